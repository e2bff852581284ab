"""Where the ranks of `at_least` are, what is said of them, and who refuses the setting."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pretend_gpus
import pytest

import nbgpu
from nbgpu.client.cluster.cluster import cluster_with
from nbgpu.config import ClusterConfig
from nbgpu.errors import ConfigError
from nbgpu.host.enough_ranks import placed
from nbgpu.planning import studies, trials

ON_THE_CPU = "at_least=2, and 1 GPU is free: 2 ranks on the CPU. Times are those of CPU ranks"
SHARED = "2 ranks share them over gloo and take turns, so that times say nothing about several GPUs"


@pytest.fixture
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    pretend_gpus.install(pretend_gpus.several(request.param), patch=monkeypatch)


@pytest.mark.parametrize(
    ("gpus", "asked", "placement", "said"),
    [
        (0, {}, ("auto", 2), ""),
        (0, {"at_least": 3}, ("auto", 3), ""),
        (0, {"at_least": 12}, ("auto", 12), "12 ranks share 8 CPU cores and take turns"),
        (1, {}, ("none", 2), ON_THE_CPU),
        (1, {"gpus": "none"}, ("none", 2), ""),
        (1, {"gpus": "0"}, ("0", 2), SHARED),
        (1, {"allocator": "expandable_segments:True"}, ("none", 2), ON_THE_CPU),
        (2, {}, ("auto", None), ""),
        (2, {"at_least": 4}, ("none", 4), "at_least=4, and 2 GPUs are free: 4 ranks on the CPU"),
        (4, {}, ("auto", None), ""),
        (4, {"gpus": "3"}, ("3", 2), SHARED),
        (4, {"gpus": "3,1"}, ("3,1", None), ""),
    ],
    indirect=["gpus"],
)
@pytest.mark.usefixtures("gpus")
def test_there_are_enough_ranks_and_what_their_times_mean_is_said(
    asked: dict[str, Any], placement: tuple[str, int | None], said: str
) -> None:
    config, note = placed(ClusterConfig.checked(**{"at_least": 2, **asked}))
    assert config.at_least is None
    assert (config.gpus, config.ranks) == placement
    assert said in note if said else note == ""


@pytest.mark.parametrize(
    ("asked", "placement", "said"),
    [
        ({}, ("none", 2), "at_least=2, and no GPU is free: 2 ranks on the CPU"),
        ({"share_gpus": True}, ("auto", None), ""),
    ],
)
def test_gpus_that_others_have_count_as_the_start_counts_them(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], placement: tuple[str, int | None], said: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    gpus = pretend_gpus.several(8)
    for gpu in gpus:
        gpu.used = 30 * pretend_gpus.GIB
    pretend_gpus.install(gpus, patch=monkeypatch)
    config, note = placed(ClusterConfig.checked(at_least=2, **asked))
    assert (config.gpus, config.ranks, config.at_least) == (*placement, None)
    assert said in note if said else note == ""


@pytest.mark.parametrize("gpus", [1], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_a_cluster_has_ranks_as_if_they_had_been_asked_for() -> None:
    cluster = nbgpu.Cluster(at_least=2)
    assert [device.kind for device in cluster.devices] == ["cpu", "cpu"]
    assert ON_THE_CPU in cluster.parts.lifecycle.placement_note
    assert cluster.config == ClusterConfig(gpus="none", ranks=2)
    assert cluster_with(ClusterConfig(gpus="0", at_least=3)).world_size == 3


@pytest.mark.parametrize("gpus", [1], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_without_the_setting_nothing_is_placed() -> None:
    config = ClusterConfig()
    assert placed(config) == (config, "")


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"ranks": 4}, "at_least=2 counts only with no ranks, and ranks is 4"),
        ({"launcher": "ssh", "hosts": "a"}, "at_least=2 counts only with launcher='local'"),
        ({"at_least": 1}, "at_least = 1 is not valid. Give a value within: 2 to 64"),
    ],
)
def test_it_is_refused_where_it_makes_no_sense(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ClusterConfig.checked(**{"at_least": 2, **asked})


@pytest.mark.parametrize("gpus", [1], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_all_points_of_a_study_are_on_one_kind_of_device() -> None:
    plan = studies.plan("autoencoder", studies.RANKS, [1, 2], {"at_least": 2, "data": "phantoms"})
    assert [(point.ranks, plan.point_cluster(point.ranks).gpus) for point in plan.points()] == [
        (1, "none"),
        (2, "none"),
    ]
    assert ON_THE_CPU in plan.placement_note
    buckets = studies.plan("autoencoder", "bucket_mb", [1.0, 25.0], {"at_least": 2, "data": "phantoms"})
    assert [point.ranks for point in buckets.points()] == [2, 2]


def test_a_sweep_says_what_it_takes_instead() -> None:
    with pytest.raises(ConfigError, match="at_least does not go with a sweep: each trial has as many ranks"):
        trials.plan("autoencoder", {"at_least": 2, "lr": [1e-3, 1e-4]})


def test_torchrun_says_itself_how_many_there_are(tmp_path: Path) -> None:
    from nbgpu.engine import train

    path = tmp_path / "run.toml"
    path.write_text('[cluster]\nat_least = 2\n[train]\nrecipe = "autoencoder"\n')
    with pytest.raises(ConfigError, match=r"torchrun decides how many .* --nproc-per-node=2"):
        train.main([str(path)])
