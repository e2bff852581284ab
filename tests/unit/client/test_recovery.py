"""How failures on ranks are mended, with ranks that are made up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from nbgpu.client.faults.recovery import Recovery
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError


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

    def regroup(self) -> list[str]:
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


class Cluster:
    def __init__(self, ranks: Ranks) -> None:
        self.config = ClusterConfig(gpus="none", spare=1)
        self.news: list[str] = []
        self.ranks: Any = ranks
        self.num_stops_of_questions = 0

    def lost_hosts(self) -> list[Any]:
        return []

    def take_returned_hosts(self) -> list[Any]:
        return []

    def lookout(self) -> Any:
        raise AssertionError("nobody asks the ranks where they are")

    def stop_listening(self) -> None:
        self.num_stops_of_questions += 1


def test_ranks_that_ended_between_two_cells_are_replaced_and_nothing_is_sent() -> None:
    cluster = Cluster(Ranks({1: "rank 1 was killed"}))
    with pytest.raises(
        ClusterError, match=r"rank 1 was killed(.|\n)*rank 0 kept all variables(.|\n)*run it again"
    ):
        Recovery(cluster).make_ready(None)
    assert (cluster.ranks.replaced, cluster.ranks.spares) == ([[1]], 1)


def test_a_rank_that_dies_while_another_is_replaced_is_replaced_too() -> None:
    cluster = Cluster(Ranks({0: "", 1: ""}, failing=2))
    told = Recovery(cluster).replace_all_gone()
    assert "no rank kept its variables" in told
    assert cluster.ranks.replaced == [[0, 1]] * 3


def test_replacements_that_fail_again_and_again_are_given_up() -> None:
    cluster = Cluster(Ranks({1: ""}, failing=100))
    with pytest.raises(ClusterError, match="did not come"):
        Recovery(cluster).replace_all_gone()
    assert len(cluster.ranks.replaced) == 3


def test_a_replacement_that_failed_with_no_rank_gone_is_not_tried_again() -> None:
    cluster = Cluster(Ranks({1: ""}, failing=1, dies_meanwhile=False))
    with pytest.raises(ClusterError, match="did not come"):
        Recovery(cluster).replace_all_gone()
    assert len(cluster.ranks.replaced) == 1


def test_a_rank_in_an_earlier_cell_gets_no_other_until_it_is_back() -> None:
    cluster = Cluster(Ranks())
    recovery = Recovery(cluster)
    late: Any = Reply(is_ready=False)
    recovery.leave_behind({0: Reply(is_ready=True), 1: late})  # type: ignore[dict-item]
    assert cluster.num_stops_of_questions == 1
    with pytest.raises(ClusterError, match=r"rank\(s\) 1 are still in an earlier cell"):
        recovery.make_ready(None)
    assert cluster.ranks.num_regroups == 0
    late.is_ready = True
    recovery.make_ready(None)
    assert cluster.ranks.num_regroups == 1
    assert cluster.news[0] == "formed again"


def test_a_handler_that_was_taken_back_is_named_once() -> None:
    cluster = Cluster(Ranks())
    recovery = Recovery(cluster)
    for _ in range(2):
        recovery.make_ready(None)
    assert len(cluster.news) == 1
    assert cluster.news[0].startswith("SIGINT: its handler, which a cell replaced on rank 1, is back")
