"""Studies on real ranks: measured, stopped, gone on with, compared, with points that fail."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import nbgpu
from nbgpu.client.cluster.lifecycle import Lifecycle
from nbgpu.ui import presenter
from nbgpu.ui.study import view as study_view
from nbgpu.ui.study.chart import chart

QUICK: dict[str, Any] = {
    "gpus": "none",
    "threads": 1,
    "batch_size": 2,
    "measured_steps": 4,
    "warm_up_steps": 1,
}
SMALL = QUICK | {"patch_size": 16}
HANG_S = 300
RECIPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

from nbgpu.recipes.own import OwnRecipe


class Line(OwnRecipe):
    size: str = "small"  # of the hidden layer

    def dataset(self):
        torch.manual_seed(0)
        return TensorDataset(torch.randn(64, 4), torch.randn(64, 1))

    def model(self):
        if REFUSED:
            raise ValueError("no such size here")
        width = {"small": 4, "large": 6}.get(self.size, 5)
        return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 1))

    def loss(self, model, batch):
        x, y = batch
        return (model(x) - y).square().mean()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("studies")


def own_recipe(folder: Path, refused: str = "False") -> str:
    """The path of a recipe whose steps take next to nothing."""
    path = folder / "line.py"
    path.write_text(RECIPE.replace("REFUSED", refused))
    return str(path)


@pytest.fixture(scope="module")
def scaled(folder: Path) -> nbgpu.Study:
    """A study of weak scaling that several tests read."""
    study = nbgpu.scaling("autoencoder", ranks=[1, 2], repeats=2, studies_dir=str(folder), **SMALL)
    return study.wait(HANG_S)


def test_a_study_measures_each_point_as_often_as_asked(scaled: nbgpu.Study) -> None:
    assert scaled.status == "finished"
    one, two = scaled.summary()
    assert (one.value, two.value) == (1, 2)
    repeats = scaled.repeats()
    assert list(repeats["ranks"]) == [1, 2, 1, 2]
    assert (repeats["steps"] == 4).all()
    frame = scaled.frame()
    assert list(frame["samples_per_step"]) == [2, 4]
    assert (frame["step_from_s"] <= frame["step_s"]).all()
    assert (frame["step_s"] <= frame["step_to_s"]).all()
    assert frame["relative"][0] == 1.0
    assert frame["efficiency"][1] == pytest.approx(frame["relative"][1] / 2)


def test_the_parts_of_a_step_add_up_to_it(scaled: nbgpu.Study) -> None:
    frame = scaled.frame()
    parts = [name for name in study_view.PARTS if name in frame]
    assert len(parts) > 1
    for _, row in frame.iterrows():
        # The parts are those of the middle half of the steps, and the step is the median.
        # One rank has no exchange.
        assert row[parts].fillna(0.0).sum() == pytest.approx(row["step_s"], rel=0.5)


def test_it_is_shown_as_a_table_a_page_and_a_report(scaled: nbgpu.Study) -> None:
    assert "weak scaling" in str(scaled)
    assert "speed-up" in str(scaled)
    page = study_view.page(scaled, study_view.svg(scaled))
    assert "<svg" in page
    assert "Speed-up by ranks (weak scaling), measured" in page
    report = (scaled.folder / "report.html").read_text()
    assert "Where it was measured" in report
    figure = scaled.figure()
    assert [trace.name for trace in figure.data][:2] == ["ideal", "measured, with 95 % intervals"]
    assert list(pd.read_csv(scaled.folder / "repeats.csv")["ranks"]) == [1, 2, 1, 2]


def test_another_process_reads_the_same_numbers(scaled: nbgpu.Study) -> None:
    code = f"import nbgpu; print(nbgpu.Study({str(scaled.folder)!r}))"
    read = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=HANG_S
    )
    assert read.stdout.strip() == str(scaled).strip()


def test_a_study_compares_with_itself_as_equal(scaled: nbgpu.Study) -> None:
    compared = scaled.compare(nbgpu.Study(scaled.folder))
    assert compared.differences == []
    assert list(compared.frame()["ratio"]) == [1.0, 1.0]
    assert "within the intervals" in str(compared)


@pytest.mark.long
def test_strong_scaling_goes_over_the_same_samples(folder: Path) -> None:
    settings = QUICK | {"batch_size": 4, "measured_steps": 3}
    study = nbgpu.scaling(own_recipe(folder), [1, 2], "strong", 1, studies_dir=str(folder), **settings)
    study.wait(HANG_S)
    assert list(study.frame()["repeats"]) == [1, 1], study
    assert [found.samples_per_step for found in study.summary()] == [4, 4]
    losses = study.losses()
    assert list(losses.groupby("ranks")["samples"].max()) == [16, 16]


@pytest.mark.long
def test_a_setting_is_varied_in_two_lines_and_the_picture_says_what_it_shows(folder: Path) -> None:
    study = nbgpu.study(
        "autoencoder", accumulate=[1, 2], ranks=1, repeats=1, studies_dir=str(folder), **SMALL
    )
    study.wait(HANG_S)
    assert [found.samples_per_step for found in study.summary()] == [2, 4]
    assert chart(study).title == "Samples per second by accumulate, measured: autoencoder, 1 rank"
    one, two = study.frame()["step_s"]
    assert two > 1.2 * one


@pytest.mark.parametrize("settings", [{}, {"lr": [1e-3], "amp": ["off"]}, {"lr": 1e-3}])
def test_exactly_one_setting_is_varied(settings: dict[str, Any]) -> None:
    with pytest.raises(nbgpu.ConfigError, match="a study varies one setting"):
        nbgpu.study("autoencoder", **SMALL, **settings)


@pytest.mark.long
def test_a_stopped_study_keeps_what_it_has_and_goes_on(folder: Path) -> None:
    study = nbgpu.scaling(own_recipe(folder), ranks=[1], repeats=3, studies_dir=str(folder), **QUICK)
    give_up_s = time.monotonic() + HANG_S
    while not study.measured() and time.monotonic() < give_up_s:
        time.sleep(0.02)
    shown = threading.Event()

    def show(_: nbgpu.Study) -> None:
        shown.set()
        time.sleep(0.5)

    study.on_end(show)
    study.stop()
    # Somebody who sees it stopped may let it go on at once.
    assert shown.wait(HANG_S)
    assert study.status == "stopped"
    study.resume()
    study.stop()
    study.wait(HANG_S)
    assert study.status == "stopped"
    before = study.measured()
    assert 1 <= len(before) < 3
    again = nbgpu.Study(study.folder)
    assert [each.step_s for each in again.measured()] == [each.step_s for each in before]
    again.resume().wait(HANG_S)
    assert again.status == "finished"
    assert len(again.measured()) == 3
    assert [each.step_s for each in again.measured()][: len(before)] == [each.step_s for each in before]


@pytest.mark.long
def test_a_point_that_fails_is_a_marked_gap(folder: Path, tmp_path: Path) -> None:
    recipe = own_recipe(tmp_path, refused="self.size == 'other'")
    sizes = ["large", "other", "small"]
    study = nbgpu.study(recipe, size=sizes, ranks=1, repeats=2, studies_dir=str(folder), **QUICK)
    study.wait(HANG_S)
    large, other, small = study.summary()
    assert study.status == "finished"
    assert large.step_s > 0
    assert small.step_s > 0
    assert "no such size here" in other.why
    frame = study.frame()
    assert list(frame["parameters"].fillna(0)) == [6 * 4 + 6 + 6 + 1, 0, 4 * 4 + 4 + 4 + 1]
    drawn = chart(study)
    assert drawn.title.startswith("Samples per second by number of parameters (size), measured: ")
    assert (drawn.x, drawn.names) == ([25, 37], ["small", "large"])
    assert study.figure().layout.xaxis.type == "log"
    assert "not measured: RankError" in str(study)
    assert 'class="nbgpu-study-gap"' in study_view.table_html(study)
    own_recipe(tmp_path)
    again = nbgpu.Study(study.folder).resume().wait(HANG_S)
    assert again.summary()[1].parameters == 5 * 4 + 5 + 5 + 1
    assert presenter.figure_of_study(again).data


def test_a_cluster_of_the_notebook_stays_as_it_is(cluster2: Any, folder: Path) -> None:
    cluster2.execute("kept = rank")
    nbgpu.scaling(own_recipe(folder), ranks=[1], repeats=1, studies_dir=str(folder), **QUICK).wait(HANG_S)
    assert nbgpu.current() is cluster2
    assert cluster2.execute("print(kept)") == {0: "0\n", 1: "1\n"}


@pytest.mark.long
def test_the_command_measures_and_says_what_it_has(tmp_path: Path) -> None:
    flags = "--ranks 1 --repeats 1 --measured-steps 3 --gpus none"
    command = [sys.executable, "-m", "nbgpu.cli", "scaling", own_recipe(tmp_path), *flags.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert "finished: 1 of 1 repeats done" in done.stdout
    assert "speed-up" in done.stdout
    (folder,) = (tmp_path / "nbgpu_runs").glob("*-study-*")
    resumed = [*command[:4], "--resume", str(folder)]
    again = subprocess.run(resumed, capture_output=True, text=True, timeout=HANG_S, cwd=tmp_path, check=False)
    assert again.returncode == 0, again.stderr
    assert done.stdout.splitlines()[-5:] == again.stdout.splitlines()[-5:]


def test_the_command_refuses_before_anything_starts(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "nbgpu.cli",
        "scaling",
        "autoencoder",
        "--ranks",
        "0,1",
        "--gpus",
        "none",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert "ranks = 0" in done.stderr
    assert not (tmp_path / "nbgpu_runs").exists()


def test_a_study_ends_although_its_cluster_cannot_be_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise nbgpu.ClusterError("no engine came")

    def stop(_: Lifecycle) -> None:
        raise PermissionError(13, "Permission denied", "cluster.json")

    monkeypatch.setattr(Lifecycle, "start", start)
    monkeypatch.setattr(Lifecycle, "stop", stop)
    study = nbgpu.study("autoencoder", lr=[0.1, 0.2], ranks=1, repeats=1, studies_dir=str(tmp_path), **SMALL)
    study.wait(timeout_s=60)
    assert [repeat.why_failed for repeat in study.measured()] == ["ClusterError: no engine came"] * 2
