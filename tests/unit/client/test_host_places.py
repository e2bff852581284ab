"""On which hosts the trials of a sweep train."""

from __future__ import annotations

import pytest

from nbgpu.client.sweeps.starting import places_on_hosts
from nbgpu.config import ClusterConfig
from nbgpu.errors import ConfigError
from nbgpu.planning import trials


def of_ssh(parallel: int | None = None, **settings: object) -> list[tuple[str, str]]:
    given = ClusterConfig.checked(**{"launcher": "ssh", "hosts": "a,b", "gpus_per_node": 1, **settings})
    return [(each.hosts, each.gpus) for each in places_on_hosts(given, parallel)]


def test_each_host_has_one_trial_where_its_gpus_are_not_named() -> None:
    assert of_ssh() == [("a", "auto"), ("b", "auto")]
    assert of_ssh(1) == [("a", "auto")]


def test_named_gpus_are_shared_out_and_the_hosts_take_turns() -> None:
    assert of_ssh(gpus="0,1,2,3", gpus_per_node=2) == [("a", "0,1"), ("b", "0,1"), ("a", "2,3"), ("b", "2,3")]
    assert of_ssh(3, gpus="0,1") == [("a", "0"), ("b", "0"), ("a", "1")]


def test_cpu_ranks_may_be_as_many_as_one_likes() -> None:
    assert of_ssh(3, gpus="none") == [("a", "none"), ("b", "none"), ("a", "none")]


@pytest.mark.parametrize(("parallel", "settings"), [(3, {}), (None, {"gpus": "0", "gpus_per_node": 2})])
def test_more_than_there_is_room_for_is_refused(parallel: int | None, settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="gpus_per_node"):
        of_ssh(parallel, **settings)


def test_slurm_has_as_many_jobs_as_trials_at_a_time() -> None:
    given = ClusterConfig.checked(launcher="slurm", nodes=2, gpus_per_node=4)
    assert places_on_hosts(given, None) == [given]
    assert places_on_hosts(given, 3) == [given] * 3


def test_a_trial_has_one_rank_on_each_host_where_nothing_else_is_given() -> None:
    def planned(**settings: object) -> ClusterConfig:
        return trials.plan("autoencoder", {"seed": [0, 1], **settings}).cluster

    assert planned(launcher="ssh", hosts=["a"]).gpus_per_node == 1
    assert planned(launcher="ssh", hosts=["a"], gpus_per_node=4).gpus_per_node == 4
    assert planned().ranks == 1
