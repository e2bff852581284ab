"""The head of a run that stays in the notebook: what it says of a run that ended in any way."""

from __future__ import annotations

import base64
import html
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib.textpath import TextPath
from recorded import RecordedRun

from nbgpu.client.cluster import cluster as clusters
from nbgpu.config import train_config
from nbgpu.errors import ClusterError
from nbgpu.protocol.records import RankFailure, Sample
from nbgpu.ui.run import head_view, panel, wording
from nbgpu.ui.run.charts import charts, pictures
from nbgpu.ui.run.history import History
from nbgpu.ui.run.snapshot import _validation_value, history_of


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Any:
    run = RecordedRun(tmp_path_factory.mktemp("run"), steps=60, step_s=0.002)
    run.wait(30)
    return run


def head_of(run: Any, handle: str = "") -> str:
    return head_view.html(run, history_of(run), handle)


def test_it_says_how_the_run_ended_and_where_it_is(finished: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JPY_SESSION_NAME", str(finished.folder.parent / "study.ipynb"))
    told = head_of(finished, "nbgpu.current().run")
    for words in ("finished", "step 60 of 60", "epoch 3 of 3", "rank 1", "trilinear", "What happened (1)"):
        assert words in told
    assert "0.5981 (step 50)" in told  # the last and lowest validation loss
    assert f'href="{finished.folder.name}/report.html"' in told
    assert "run = nbgpu.current().run" in told
    assert f"nbgpu report {finished.folder}" in told
    # A page with no script and a notebook that nobody has trusted show it alike.
    assert not re.search("<script|<style|<svg|onclick", told)
    assert head_view.LIVE_CLASS not in told


def test_a_value_of_the_validations_has_its_interval_everywhere(finished: Any) -> None:
    history = history_of(finished)
    values = {
        "val_c_index": 0.7134,
        "val_c_index_low": 0.5521,
        "val_c_index_high": 0.8412,
        "val_ebb_low": 2.0,
    }
    history.add([Sample(0, 10_000, 1e9, 60, values)])
    shown = {chart.title: chart for chart in charts(history)}
    assert [curve.label for curve in shown["Validation: c index"].curves] == [
        "validation",
        *["95 % interval"] * 2,
    ]
    assert "Validation: ebb low" in shown
    assert "Validation: c index low" not in shown
    assert "<td>0.7134 (0.5521 to 0.8412) (step 60)</td>" in head_view.html(finished, history)
    line = wording.summary(finished.info, finished.status, finished.statuses(), history)
    assert "validation loss 0.5981, c index 0.713 (0.552 to 0.841)" in line
    of_epoch = {name.removeprefix("val_"): value for name, value in values.items()}
    assert _validation_value("c_index", of_epoch) == "0.7134 (0.5521 to 0.8412)"
    assert _validation_value("ebb_low", of_epoch) == 2.0


def test_the_handle_of_a_run_is_never_that_of_another_one(
    finished: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told_where_the_cluster_has(run: Any) -> str:
        monkeypatch.setattr(clusters, "current", lambda: SimpleNamespace(run=run))
        return str(panel._head(finished, history_of(finished), "slot")["data"]["text/html"])

    assert "nbgpu.current().run" in told_where_the_cluster_has(finished)
    assert "nbgpu.current().run" not in told_where_the_cluster_has(object())


def test_a_failed_run_says_why_in_the_first_sentence(tmp_path: Path) -> None:
    run: Any = RecordedRun(tmp_path, steps=10, step_s=0.001)
    run.wait(30)
    run.status = "failed"
    run.failures = [RankFailure(1, "ValueError", "Bad <patch> size. Take another.\nMore.", "Traceback ...")]
    assert "rank 1: ValueError: Bad &lt;patch&gt; size.<" in head_of(run)
    assert "Take another" not in head_of(run)
    run.failures, run.error = [], ClusterError("The ranks are gone. Start again")
    assert "ClusterError: The ranks are gone.<" in head_of(run)
    assert head_view.text(run, history_of(run)).splitlines()[1] == "ClusterError: The ranks are gone."


def test_a_run_that_goes_on_is_marked_as_the_past(tmp_path: Path) -> None:
    run: Any = RecordedRun(tmp_path, steps=10, step_s=0.001)
    run.wait(30)
    run.status = "training"
    told = head_of(run)
    assert head_view.LIVE_CLASS in told
    assert re.search(r"As it was at \d\d:\d\d:\d\d, when this was saved last", told)
    assert "report.html" not in told  # it is written at the end
    assert "metrics.csv" in told
    # Before the first step there are no numbers to link to.
    assert "metrics.csv" not in head_view.html(run, History())


def test_the_lowest_and_highest_loss_of_a_long_run_are_those_of_all_its_steps(finished: Any) -> None:
    """Of more than 8,192 steps each rank keeps other ones, so that the mean is known of few."""
    losses = np.random.default_rng(0).random((9000, 2))
    losses[2000], losses[3000] = (-1, 2), (3, -2)
    history = History()
    for rank in (0, 1):
        history.add(
            Sample(rank, step, step, step, {"loss": loss}) for step, loss in enumerate(losses[:, rank])
        )
    told = head_view.html(finished, history)
    for words in ("loss of rank 0", "-1 (step 2000)", "3 (step 3000)", f"{losses[-1, 0]:.4g} (step 8999)"):
        assert words in told


def test_losses_that_are_not_comparable_have_a_chart_each(finished: Any) -> None:
    history = history_of(finished)
    together = charts(history, finished.config.why_losses_differ)
    assert [chart.title for chart in together[:2]] == ["Loss", "Validation: psnr (dB)"]
    assert "validation" in [curve.label for curve in together[0].curves]

    why = train_config("survival").why_losses_differ
    loss, validation, *_ = charts(history, why)
    assert [curve.label for curve in loss.curves if curve.rank is None] == []
    assert (validation.title, validation.note) == ("Validation loss", why)


@pytest.mark.parametrize("recipe", ["autoencoder", "survival"])
def test_no_text_of_a_chart_is_cut_off_in_its_picture(finished: Any, recipe: str) -> None:
    settings = {"perceptual": "spectral", "adversarial_weight": 0.01, "kl_weight": 0.1}
    why = train_config(recipe, **(settings if recipe == "autoencoder" else {})).why_losses_differ
    page = pictures(finished.info, history_of(finished), charts(history_of(finished), why))
    svgs = [base64.b64decode(data).decode() for data in re.findall(r"svg\+xml;base64,([^\"]+)", page)]
    assert " ".join(why.split()[:4]) in svgs[1]
    for svg in svgs:
        width = float(re.findall(r'viewBox="0 0 ([\d.]+) ', svg)[0])
        ends = {}
        for style, place, text in re.findall(r'<text style="([^"]*)" ([^>]*)>([^<]+)', svg):
            if "text-anchor: middle" not in style and "text-anchor: end" not in style:
                size, x = (float(re.findall(r"[\d.]+", found)[0]) for found in (style, place))
                ends[text] = x + TextPath((0, 0), html.unescape(text), size=size).get_extents().width
        assert ends
        assert {text: end for text, end in ends.items() if end > width} == {}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ""),
        ({"adversarial_weight": 0.01}, "the adversarial term"),
        ({"perceptual": "spectral"}, "the perceptual distance"),
        ({"kl_weight": 0.1}, "the KL term"),
    ],
)
def test_the_settings_say_whether_the_losses_are_comparable(settings: dict[str, Any], words: str) -> None:
    told = train_config("autoencoder", **settings).why_losses_differ
    assert words in told
    assert bool(told) == bool(words)
