"""What real runs are said to be bound by, where that is known because it was made so."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from made_runs import CASES, LINK, RECIPE, STEPS, Case

import nbgpu
from nbgpu.config import ClusterConfig, write_toml
from nbgpu.performance.bottlenecks import Explanation
from nbgpu.run_folder import names

BOUND_S = 120
_BUSY_CORES = 0.5
TRIAL = {"repeats": 1, "measured_steps": 8, "warm_up_steps": 3}


def marks_of(case: Case) -> list[pytest.MarkDecorator]:
    """Links are simulated between ranks of one host."""
    return [pytest.mark.one_host("links are simulated on one host")] if case.link else []


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("recipe") / "made.py"
    path.write_text(RECIPE)
    return str(path)


@pytest.fixture(scope="module")
def linked() -> Iterator[nbgpu.Cluster]:
    cluster = nbgpu.Cluster(gpus="none", ranks=2, link=LINK)
    cluster.parts.lifecycle.start()
    yield cluster
    cluster.stop()


class OtherPrograms:
    """The cores that other programs take from the time of this object on."""

    def __init__(self) -> None:
        self._begin_cpu_s, self._begin_s = self._cpu_s(), time.monotonic()

    def hide_the_bottleneck(self, told: Explanation) -> bool:
        """Whether the run blames them, and they did take its cores: that is the truth, and hides the rest."""
        num_cores = (self._cpu_s() - self._begin_cpu_s) / (time.monotonic() - self._begin_s)
        return told.change_first == "cores" and num_cores > _BUSY_CORES

    def _cpu_s(self) -> float:
        """The CPU time, since the machine started, of all processes but this one and its children."""
        this = psutil.Process()
        ours = [process.cpu_times() for process in (this, *this.children(recursive=True))]
        times = psutil.cpu_times()
        return times.user + times.nice + times.system - sum(one.user + one.system for one in ours)


@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=marks_of(case)) for case in CASES])
def test_the_known_bottleneck_is_named(
    cluster2: Any, linked: nbgpu.Cluster, recipe: str, tmp_path: Path, case: Case
) -> None:
    cluster = linked if case.link else cluster2
    others = OtherPrograms()
    run = cluster.train(recipe, runs_dir=str(tmp_path), **STEPS, **case.settings).wait()
    told = run.explain()
    if others.hide_the_bottleneck(told):
        assert re.search("^Change this first: the cores.*no core", "\n".join(told.sentences), re.MULTILINE)
        return
    assert told.change_first == case.cause, str(told)
    assert re.search(case.first, "\n".join(told.sentences[:2]))
    # What can be said of a busy machine is more, but never more than a person reads.
    assert 3 <= len(told.sentences) + len(told.advice) <= 8
    if not case.tried:
        assert all(not advice.settings for advice in told.advice)
    else:
        advised = [advice.settings for advice in told.advice]
        assert any(case.tried.keys() == settings.keys() for settings in advised), advised
    parts = run.step_parts()
    columns = [name for name in parts if name.endswith("_s") and name not in ("step_s", "hidden_s")]
    assert (parts[columns].sum(axis=1) / parts["step_s"]).between(0.98, 1.02).all()
    # Other work on the machine may come in, but most of a step lies in parts that have a name.
    assert (parts["other_s"] / parts["step_s"]).median() < 0.2


@pytest.mark.long
@pytest.mark.one_host("a trial has its ranks on the notebook's host")
@pytest.mark.parametrize("name", ["tiny buckets", "a validation after each step"])
def test_an_advice_is_tried_and_said_to_bring_what_it_brought(
    cluster2: Any, linked: nbgpu.Cluster, recipe: str, tmp_path: Path, name: str
) -> None:
    (case,) = (case for case in CASES if case.name == name)
    cluster = linked if case.link else cluster2
    others = OtherPrograms()
    run = cluster.train(recipe, runs_dir=str(tmp_path), **STEPS, **case.settings).wait()
    told = run.explain()
    # Which advice promises more, and what it brings, differs on a busy machine: `make bench` compares what it
    # brings with the promise.
    wanted = {*case.tried, "accumulate"}
    number = next((n for n, advice in enumerate(told.advice, 1) if wanted & advice.settings.keys()), None)
    if number is None:
        assert others.hide_the_bottleneck(told), str(told)
        return
    study = nbgpu.try_advice(run, number, studies_dir=str(tmp_path), **TRIAL).wait(BOUND_S)
    with_it = study.summary()[1]
    assert study.plan.vary in wanted
    assert study.plan.promised > 1
    assert study.plan.cluster.link == case.link
    said = f"It brought {with_it.relative:.2f} times"
    assert said in str(study)
    assert said in (study.folder / "report.html").read_text()
    # Another process reads the same.
    assert said in str(nbgpu.Study(study.folder))


@pytest.mark.one_host("a trial has its ranks on the notebook's host")
def test_an_advice_for_a_run_of_a_kept_cluster_is_tried(cluster2: Any, recipe: str, tmp_path: Path) -> None:
    settings = {"val_every": 1, "validate_s": 0.03, "compute_s": 0.03, "val_fraction": 0.1, **STEPS}
    run = cluster2.train(recipe, runs_dir=str(tmp_path), **settings).wait()
    write_toml(run.folder / names.SETTINGS, cluster2.config.changed(keep=True), run.config)
    study = nbgpu.try_advice(run, studies_dir=str(tmp_path), **TRIAL)
    study.stop()
    assert study.wait(BOUND_S).status == "stopped"


def test_an_advice_for_ranks_on_other_hosts_is_not_tried_here(
    cluster2: Any, recipe: str, tmp_path: Path
) -> None:
    settings = {"val_every": 1, "validate_s": 0.03, "compute_s": 0.03, "val_fraction": 0.1, **STEPS}
    run = cluster2.train(recipe, runs_dir=str(tmp_path), **settings).wait()
    on_hosts = ClusterConfig(launcher="hosts", nodes=2, gpus_per_node=1, gpus="none")
    write_toml(run.folder / names.SETTINGS, on_hosts, run.config)
    said = r"notebook's host.*other hosts \(launcher='hosts'\)\. Give the next run there val_every=\d+, and compare"
    with pytest.raises(nbgpu.ConfigError, match=said):
        nbgpu.try_advice(run)


def test_an_advice_that_cannot_be_tried_is_refused(cluster2: Any, recipe: str, tmp_path: Path) -> None:
    settings = {"val_every": 0, "late_s": 0.15, **STEPS}
    run = cluster2.train(recipe, runs_dir=str(tmp_path), **settings).wait()
    with pytest.raises(nbgpu.ConfigError, match="is not about a setting"):
        nbgpu.try_advice(run)
    with pytest.raises(nbgpu.ConfigError, match="advice 2: there are 1"):
        nbgpu.try_advice(run, 2)
    with pytest.raises(nbgpu.ConfigError, match="batch_size: a trial has the settings of what it tries"):
        nbgpu.try_advice(run, batch_size=3)


def test_a_single_rank_has_no_exchange_to_blame(recipe: str, tmp_path: Path) -> None:
    # So small a network spends a good part of a step in DDP's calls, also where nothing travels.
    settings = {**STEPS, "bucket_mb": 0.01, "compute_s": 0.0}
    cluster = nbgpu.Cluster(gpus="none", ranks=1)
    cluster.parts.lifecycle.start()
    try:
        run = cluster.train(recipe, runs_dir=str(tmp_path), **settings).wait()
    finally:
        cluster.stop()
    told = str(run.explain())
    assert not re.search("ommunication|xchange|comm_hook|one another", told), told
    parts = run.step_parts()
    assert parts[["waiting_s", "transfer_s", "hidden_s"]].isna().all(axis=None)
    drawn = [trace.name for trace in run.timeline([STEPS["steps"]]).figure().data]
    assert "backward" in drawn
    assert "gradients on their way" not in drawn


def test_too_few_steps_are_not_explained(cluster2: Any, recipe: str, tmp_path: Path) -> None:
    run = cluster2.train(recipe, runs_dir=str(tmp_path), steps=3, val_every=0, work_out_result=False).wait()
    with pytest.raises(nbgpu.RunError, match="3 steps with their parts were recorded"):
        run.explain()
