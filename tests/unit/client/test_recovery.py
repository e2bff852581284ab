"""How failures on ranks are mended, with ranks that are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from nbgpu.client.engines.host_pool import HostPool
from nbgpu.client.faults import recovery as recovery_module
from nbgpu.client.faults.lost_hosts import LostHosts
from nbgpu.client.faults.recovery import Recovery
from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.client.state.rank_changes import RankChanges
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError
from nbgpu.machine import devices, transports
from nbgpu.machine.transports import ChosenTransport


@dataclass
class Ranks:
    """Two ranks, of which some are gone; a replacement fails as often as `failing` says."""

    dead: dict[int, str] = field(default_factory=dict)
    failing: int = 0
    dies_meanwhile: bool = True
    replaced: list[list[int]] = field(default_factory=list)
    spares: int = 0
    num_regroups: int = 0
    group_is_whole: bool = True

    def __len__(self) -> int:
        return 2

    def gone(self) -> dict[int, str]:
        return dict(self.dead)

    def gone_together(self) -> dict[int, str]:
        return self.gone()

    def replace(self, ranks: list[int], on: Any = None) -> list[str]:
        self.replaced.append(ranks)
        if len(self.replaced) <= self.failing:
            if not self.dies_meanwhile:
                self.dead.clear()
            raise ClusterError("a new engine did not come")
        self.dead.clear()
        return []

    def add_spares(self, num_spares: int) -> None:
        self.spares += num_spares

    def regroup(self, _: Any = ()) -> list[str]:
        self.num_regroups += 1
        return ["formed again"]

    def standstills(self, _: Any = None) -> dict[int, str]:
        return {}

    def without_group(self) -> list[int]:
        return []

    def signals_taken(self) -> dict[str, list[int]]:
        return {"SIGINT": [1]}


class Reply:
    """A rank's answer to an earlier cell."""

    def __init__(self, is_ready: bool) -> None:
        self.is_ready = is_ready

    def ready(self) -> bool:
        return self.is_ready


class Questions:
    """The questions of a host, which are listened to until somebody closes them."""

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def with_ranks(ranks: Any) -> ClusterState:
    """The state of a cluster with these ranks."""
    config = ClusterConfig(gpus="none", spare=1)
    chosen = (devices.cpu(0), devices.cpu(1))
    transport = ChosenTransport(transports.candidates(config, chosen)[0])
    return ClusterState(config, HostPool(config), chosen, transport, started_ranks=ranks)


def recovery_of(state: ClusterState) -> Recovery:
    return Recovery(state, RankChanges(state))


def test_ranks_that_ended_between_two_cells_are_replaced_and_nothing_is_sent() -> None:
    ranks = Ranks({1: "rank 1 was killed"})
    with pytest.raises(
        ClusterError, match=r"rank 1 was killed(.|\n)*rank 0 kept all variables(.|\n)*run it again"
    ):
        recovery_of(with_ranks(ranks)).make_ready(None)
    assert (ranks.replaced, ranks.spares) == ([[1]], 1)


def test_a_rank_that_dies_while_another_is_replaced_is_replaced_too() -> None:
    ranks = Ranks({0: "", 1: ""}, failing=2)
    told = recovery_of(with_ranks(ranks)).replace_all_gone()
    assert "no rank kept its variables" in told
    assert ranks.replaced == [[0, 1]] * 3


def test_replacements_that_fail_again_and_again_are_given_up() -> None:
    ranks = Ranks({1: ""}, failing=100)
    with pytest.raises(ClusterError, match="did not come"):
        recovery_of(with_ranks(ranks)).replace_all_gone()
    assert len(ranks.replaced) == 3


def test_a_replacement_that_failed_with_no_rank_gone_is_not_tried_again() -> None:
    ranks = Ranks({1: ""}, failing=1, dies_meanwhile=False)
    with pytest.raises(ClusterError, match="did not come"):
        recovery_of(with_ranks(ranks)).replace_all_gone()
    assert len(ranks.replaced) == 1


@dataclass
class LosesHosts:
    """A cluster with rank 0 on host n1 and rank 1 on n2. n2 is lost, and then what `events` say happens: each
    returns the hosts that have come meanwhile, with those for which they came."""

    events: list[Callable[[], list[tuple[Any, Any]]]]
    dead: dict[int, str] = field(default_factory=lambda: {1: "rank 1 is gone with its host n2"})
    policy: str = "wait"

    def __post_init__(self) -> None:
        self.hosts = {name: SimpleNamespace(name=name, is_there=True) for name in ("n1", "n2", "n3", "n4")}
        self.has_ranks = [self.hosts["n1"], self.hosts["n2"]]
        self.ranks = Ranks(self.dead)
        self.ranks.assignment = SimpleNamespace(  # type: ignore[attr-defined]
            processes={0: SimpleNamespace(host="n1"), 1: SimpleNamespace(host="n2")}
        )
        launcher = SimpleNamespace(is_over=lambda: False, when_lost=lambda: "%nbgpu restart")
        pool = SimpleNamespace(
            launcher=launcher, lost=self.lost, start_again=lambda: None, obstacles=lambda: []
        )
        config = SimpleNamespace(on_host_lost=self.policy, host_patience_s=60, spare=0)
        self.state: Any = SimpleNamespace(config=config, pool=pool, ranks=self.ranks)
        self.changes: Any = SimpleNamespace(
            take_returned_hosts=lambda: self.events.pop(0)() if self.events else []
        )

    def lost(self) -> list[Any]:
        return [host for host in self.has_ranks if not host.is_there]

    def lose(self, name: str) -> list[tuple[Any, Any]]:
        self.hosts[name].is_there = False
        return []

    def replace(self, name: str, by: str) -> list[tuple[Any, Any]]:
        before, now = self.hosts[name], self.hosts[by]
        self.has_ranks[self.has_ranks.index(before)] = now
        return [(before, now)]


def test_a_host_that_came_for_another_and_is_lost_itself_is_replaced_with_its_ranks() -> None:
    def replace_and_lose_at_once() -> list[tuple[Any, Any]]:
        cluster.lose("n3")
        return cluster.replace("n2", by="n3")

    cluster = LosesHosts([replace_and_lose_at_once, lambda: cluster.replace("n3", by="n4")])
    cluster.lose("n2")
    hosts = LostHosts(cluster.state, cluster.changes, lambda _: None)
    lines = hosts.go_on()
    assert hosts.places == {1: "n4"}
    assert lines == ["host n3 came for host n2.", "host n4 came for host n3."]


def test_a_host_that_is_lost_while_another_is_waited_for_is_replaced_with_its_ranks() -> None:
    cluster = LosesHosts(
        [
            lambda: cluster.lose("n1"),
            lambda: cluster.replace("n1", by="n3"),
            lambda: cluster.replace("n2", by="n4"),
        ]
    )
    cluster.lose("n2")
    hosts = LostHosts(cluster.state, cluster.changes, lambda _: None)
    hosts.go_on()
    assert hosts.places == {0: "n3", 1: "n4"}


def test_a_rank_that_died_before_a_host_was_given_up_is_named_and_kept_nothing() -> None:
    cluster = LosesHosts(
        [], dead={0: "rank 0 was killed", 1: "rank 1 is gone with its host n2"}, policy="stop"
    )
    cluster.lose("n2")
    with pytest.raises(ClusterError) as raised:
        Recovery(cluster.state, cluster.changes).make_ready(None)
    assert str(raised.value).startswith("rank 0 was killed. host n2 is lost")
    assert "No rank kept its variables" in str(raised.value)
    assert "rank 1 is gone" not in str(raised.value)


def test_a_rank_in_an_earlier_cell_gets_no_other_until_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery_module, "_FREED_PATIENCE_S", 0.1)
    ranks = Ranks()
    state = with_ranks(ranks)
    recovery = recovery_of(state)
    late: Any = Reply(is_ready=False)
    questions: Any = Questions()
    state.listening.append(questions)
    recovery.abandon_cell({0: Reply(is_ready=True), 1: late})  # type: ignore[dict-item]
    assert questions.is_closed
    with pytest.raises(ClusterError, match=r"rank\(s\) 1 are still in an earlier cell"):
        recovery.make_ready(None)
    assert ranks.num_regroups == 0
    late.is_ready = True
    recovery.make_ready(None)
    assert ranks.num_regroups == 1
    assert state.news[0] == "formed again"


def test_a_handler_that_was_taken_back_is_named_once() -> None:
    ranks = Ranks()
    state = with_ranks(ranks)
    recovery = recovery_of(state)
    for _ in range(2):
        recovery.make_ready(None)
    assert len(state.news) == 1
    assert state.news[0].startswith("SIGINT: its handler, which a cell replaced on rank 1, is back")
