"""Which ranks are freed from a generation of their group, and what counts as given up afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from nbgpu.client.engines.other_hosts.other_host import HostLostError
from nbgpu.client.engines.rank_assignment import RankAssignment
from nbgpu.client.engines.ranks import Ranks
from nbgpu.machine.processes import EngineProcess


@dataclass
class Host:
    name: str
    is_lost: bool = False
    given_up: list[int] = field(default_factory=list)

    def give_up(self, _pids: list[int], generation: int) -> None:
        if self.is_lost:
            raise HostLostError(self.name)
        self.given_up.append(generation)


@pytest.fixture
def hosts() -> list[Host]:
    return [Host("n1"), Host("n2"), Host("n3")]


@pytest.fixture
def ranks(hosts: list[Host]) -> Ranks:
    """Ranks of generation 4, one on each host."""
    ranks = Ranks.__new__(Ranks)
    processes = {rank: EngineProcess(host.name, 100) for rank, host in enumerate(hosts)}
    ranks.assignment = RankAssignment(processes=processes, generation=4)
    ranks._pool = SimpleNamespace(hosts={host.name: host for host in hosts})  # type: ignore[assignment]
    ranks._note = lambda: None
    return ranks


def test_a_lost_host_does_not_keep_the_ranks_of_the_others_waiting(ranks: Ranks, hosts: list[Host]) -> None:
    hosts[0].is_lost = True
    ranks.sever()
    assert [host.given_up for host in hosts] == [[], [4], [4]]
    assert not ranks.assignment.is_whole


def test_a_thread_that_comes_late_leaves_the_new_generation_whole(ranks: Ranks, hosts: list[Host]) -> None:
    ranks.sever(3)
    assert [host.given_up for host in hosts] == [[3], [3], [3]]
    assert ranks.assignment.is_whole
