"""The button that explains a run, and those that try what it advises."""

from __future__ import annotations

import html
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ipywidgets as w
import pytest
from made_runs import RECIPE, STEPS

import nbgpu
from nbgpu.ui.controls.control_panel import _Controls

BOUND_S = 120


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "made.py"
    path.write_text(RECIPE)
    return str(path)


def texts(box: w.Widget) -> str:
    """All that a part of the panel says."""
    children = getattr(box, "children", ())
    own = box.value if isinstance(box, w.HTML) else ""
    return own + "".join(map(texts, children))


def buttons(box: w.Widget) -> list[w.Button]:
    if isinstance(box, w.Button):
        return [box]
    return [each for child in getattr(box, "children", ()) for each in buttons(child)]


def wait_until(is_so: Callable[[], bool], said: Callable[[], str] = str) -> None:
    give_up_s = time.monotonic() + BOUND_S
    while not is_so():
        assert time.monotonic() < give_up_s, said()
        time.sleep(0.05)


@pytest.mark.long
@pytest.mark.one_host("a trial has its ranks on the notebook's host")
def test_a_run_is_explained_and_its_advice_tried(
    cluster2: nbgpu.Cluster, recipe: str, tmp_path: Path
) -> None:
    panel = _Controls(recipe, cluster2)
    assert panel._explain.disabled
    # Workers that read would take seconds to start, for every run of the study.
    made = {"val_every": 0, "norms": 20, "sync_batchnorm": True, "compute_s": 0.005, "work_out_result": False}
    run = cluster2.train(recipe, runs_dir=str(tmp_path), steps=10_000, **made)
    panel._show(run)
    wait_until(lambda: run.statuses()[0].step > 12)
    panel._explain.click()
    assert "BatchNorm's statistics bound this run" in html.unescape(texts(panel._advice.box))
    (tried,) = [each for each in buttons(panel._advice.box) if each.description == "Try"]
    # A study beside the run would slow it, and be slowed by it.
    assert tried.disabled
    run.stop()
    run.wait()
    assert not tried.disabled
    tried.click()
    assert tried.disabled
    said = partial(texts, panel._advice.box)
    wait_until(lambda: re.search(r"[1-5] of 6 repeats done", said()) is not None, said)
    assert "sync_batchnorm" in texts(panel._advice.box)
    (end,) = [each for each in buttons(panel._advice.box) if each.description == "End trial"]
    end.click()
    wait_until(lambda: "stopped" in said(), said)
    wait_until(lambda: not tried.disabled)


def test_a_run_of_which_too_little_is_known_is_told_so(
    cluster2: nbgpu.Cluster, recipe: str, tmp_path: Path
) -> None:
    panel = _Controls(recipe, cluster2)
    run = cluster2.train(recipe, runs_dir=str(tmp_path), **{**STEPS, "steps": 2}, val_every=0)
    panel._show(run)
    run.wait()
    panel._explain.click()
    assert "2 steps with their parts were recorded" in panel._message.value
    # The next run makes what was said of this one disappear.
    longer = cluster2.train(recipe, runs_dir=str(tmp_path), **STEPS, val_every=0, compute_s=0.02)
    panel._show(longer)
    longer.wait()
    panel._explain.click()
    assert "were recorded" not in panel._message.value
    # Beside other work on the machine there may be something to advise, with a setting to try or without one.
    said = texts(panel._advice.box)
    assert said
    has_advice = any(each.description == "Try" for each in buttons(panel._advice.box))
    assert not (has_advice and "There is nothing to advise" in said)
