"""The whole way in a real Chromium and a real JupyterLab, with real ranks."""

from __future__ import annotations

import re
import time
from typing import Any

import faults
import jupyterlab
import pytest
from conftest import SUPPORT
from lab import Lab, Notebook, screenshot
from packaging.version import Version
from playwright.sync_api import Locator, Page, TimeoutError, expect

pytestmark = [pytest.mark.browser, pytest.mark.long]

WIDGET = "application/vnd.jupyter.widget-view+json"
PLOTLY = "application/vnd.plotly.v1+json"

START_CLUSTER = "%load_ext nbgpu\nimport nbgpu\n%nbgpu start --gpus none --ranks 2"
DISTRIBUTED = "%%distributed\nprint(f'I am rank {rank} of {world_size}')"
CONTROLS = "nbgpu.controls('autoencoder')"
BLOCK = "import time\ntime.sleep(12)"
WHILE_THE_CELL_RUNS_S = 6
"""A button that waited for the blocking cell would take twice as long. How fast they are stands in the
docs."""

WHEN_PAUSED = """
records, _ = nbgpu.client.cluster.cluster.current().run.reader.since()
print(next(r.time_s for r in records if getattr(r, 'text', '') == 'paused'))
"""
STOP_CLUSTER = "%nbgpu stop"
SWEEP = """
import nbgpu
settings = dict(data="phantoms", num_phantoms=16, patch_size=16, steps=5000, val_every=4, threads=1)
sweep = nbgpu.sweep("autoencoder", lr=[1e-3, 1e-2], gpus="none", **settings)
sweep
""".strip()


def control(page: Page, name: str) -> Locator:
    # Charts have such names as well.
    return page.get_by_label(name, exact=True).and_(page.locator("input, select"))


def button(page: Page, name: str) -> Locator:
    """A button of the controls."""
    return page.locator(".jupyter-button", has_text=name)


def state(page: Page, name: str) -> Locator:
    return page.locator(".nbgpu-state", has_text=name)


def seconds_until(locator: Locator, timeout_s: float = 60) -> float:
    started_s = time.monotonic()
    locator.wait_for(timeout=timeout_s * 1000)
    return time.monotonic() - started_s


def wait_for_points(page: Page, chart: str, curve: str, num_points: int) -> None:
    """Waits until a curve whose name has these words has so many points on the screen."""
    page.wait_for_function(
        """([chart, curve, numPoints]) =>
            (document.querySelector(`[data-chart=${chart}] .nbgpu-plot`)?.data ?? [])
                .some(trace => trace.name?.includes(curve) && trace.x.length >= numPoints)""",
        arg=[chart, curve, num_points],
    )


def points_of(page: Page, chart: str) -> dict[str, int]:
    """How many points each named curve of a chart has on the screen."""
    found: dict[str, int] = page.evaluate(
        """chart => Object.fromEntries(
            (document.querySelector(`[data-chart=${chart}] .nbgpu-plot`)?.data ?? [])
                .map(trace => [trace.name, trace.x.length]))""",
        chart,
    )
    return found


def zoom_into(page: Page, chart: str) -> None:
    """Drags over a part of a chart."""
    box = page.locator(f"[data-chart={chart}] .nsewdrag").first.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.3 * box["width"], box["y"] + 0.3 * box["height"])
    page.mouse.down()
    # As slowly as a person, so that a run that goes on has new points in the middle of it.
    for part in range(1, 11):
        page.mouse.move(box["x"] + (0.3 + 0.03 * part) * box["width"], box["y"] + 0.8 * box["height"])
        page.wait_for_timeout(100)
    page.mouse.up()


def open_group(page: Page, name: str) -> None:
    """Brings a group of the controls to the front."""
    page.get_by_role("tab", name=name, exact=True).click()


def fill(page: Page, name: str, value: str) -> None:
    control(page, name).fill(value)
    control(page, name).press("Tab")


def final_output(document: Any) -> Any:
    """The one output of a saved notebook that holds a run's curves."""
    outputs = [o for cell in document.cells for o in cell.outputs if PLOTLY in o.get("data", {})]
    assert len(outputs) == 1
    return outputs[0]


@pytest.mark.subshells
@pytest.mark.timeout(900)
def test_a_first_run_from_start_to_the_curves_that_stay(lab: Lab, page: Page) -> None:
    lab.write_notebook("first.ipynb", [START_CLUSTER, DISTRIBUTED, CONTROLS, BLOCK, STOP_CLUSTER])
    page.set_viewport_size({"width": 1280, "height": 1500})
    notebook = Notebook(page, lab, "first.ipynb")
    notebook.open()
    for cell in (0, 1, 2):
        notebook.run_cell(cell)
        notebook.wait_until_idle()
    said = page.locator(".jp-CodeCell").nth(1).inner_text()
    assert "I am rank 0 of 2" in said
    assert "I am rank 1 of 2" in said

    # A running cluster has its devices already, and says so.
    expect(control(page, "CPU ranks")).to_be_disabled()
    expect(page.get_by_text("A cluster is in use")).to_be_visible()

    # A bad value is refused in words, and all values stay.
    expect(control(page, "Steps")).to_be_visible()
    open_group(page, "Data")
    expect(control(page, "Steps")).to_be_hidden()
    fill(page, "Data", "phantoms")
    fill(page, "Patch size", "18")
    button(page, "Start").click()
    expect(page.get_by_role("alert").filter(has_text="Patch size: 18 is not valid")).to_be_visible()
    expect(control(page, "Data")).to_have_value("phantoms")

    # Small, because many processors have to emulate bf16.
    fill(page, "Patch size", "8")
    # With the keyboard to the first group.
    page.get_by_role("tab", name="Data", exact=True).focus()
    page.keyboard.press("Home")
    page.keyboard.press("Enter")
    fill(page, "Steps", "50000")
    fill(page, "Batch size", "2")
    control(page, "Mixed precision").select_option("bf16")
    button(page, "Start").click()
    state(page, "training").wait_for(timeout=240_000)
    for name in ("Data", "Patch size"):
        expect(control(page, name)).to_be_disabled()
    for name in ("Batch size", "Mixed precision", "Learning rate"):  # which a run takes on while it goes on
        expect(control(page, name)).to_be_enabled()
    expect(button(page, "Start")).to_be_disabled()
    settings = notebook.in_kernel("print(nbgpu.client.cluster.cluster.current().run.config)")
    assert "batch_size=2" in settings
    assert "amp='bf16'" in settings

    # Points of both ranks arrive.
    page.wait_for_function(
        "() => document.querySelectorAll('[data-chart=loss] .nbgpu-plot .scatterlayer .trace').length >= 4"
    )
    counts = points_of(page, "loss")
    assert counts["rank 0, smoothed"] > 0
    assert counts["rank 1, smoothed"] > 0
    wait_for_points(page, "loss", "rank 1, smoothed", 20)
    screenshot(page, "controls-light")
    page.get_by_text(re.compile("^Plan: ddp on 2 ranks over gloo, 4 samples a step")).click()
    expect(page.get_by_text("410 volumes over 2 ranks: 205 on each")).to_be_visible()
    page.get_by_text(re.compile("^Plan: ddp on 2 ranks")).click()

    # The buttons act while a cell is running.
    notebook.run_cell(3)
    page.wait_for_timeout(500)
    pressed_s = time.time()
    button(page, "Pause").click()
    assert seconds_until(state(page, "paused")) < WHILE_THE_CELL_RUNS_S
    button(page, "Resume").click()
    assert seconds_until(state(page, "training")) < WHILE_THE_CELL_RUNS_S

    # The panel comes back after a reload, with its history, and so do the buttons.
    page.reload()
    notebook.wait_for_kernel()
    try:
        state(page, "training").wait_for(timeout=90_000)
    except TimeoutError:
        # Seen on a busy machine only: the page had asked the kernel for its widgets too early. A person
        # reloads once more.
        page.reload()
        notebook.wait_for_kernel()
        state(page, "training").wait_for()
    page.locator("[data-chart=loss] .js-plotly-plot").wait_for()
    page.wait_for_function(
        "() => document.querySelector('[data-chart=loss] .nbgpu-plot').data?.[0].x.length > 5"
    )
    notebook.set_theme("JupyterLab Dark")
    page.wait_for_timeout(500)
    screenshot(page, "controls-dark")
    button(page, "Stop").click()
    seconds_until(state(page, "stopped").or_(page.locator(".jp-RenderedPlotly")), timeout_s=30)

    # The curves take the panel's place, although this page never saw the display being made.
    page.locator(".nbgpu").wait_for(state="detached")
    expect(button(page, "Start")).to_be_enabled()
    page.locator(".jp-RenderedPlotly .main-svg").first.wait_for()
    screenshot(page, "picture-dark")
    notebook.set_theme("JupyterLab Light")
    # What the page shows waits for its own painting; the ranks themselves had paused by then.
    paused_s = float(notebook.in_kernel(WHEN_PAUSED))
    assert 0 < paused_s - pressed_s < WHILE_THE_CELL_RUNS_S
    notebook.run_cell(4)
    notebook.wait_until_idle()
    kept = final_output(notebook.save())
    assert kept.data["text/plain"].startswith("autoencoder: stopped, step ")
    assert "data:image/svg+xml" in kept.data["text/html"]


@pytest.mark.timeout(900)
def test_a_reopened_notebook_shows_the_curves_with_no_kernel(lab: Lab, page: Page) -> None:
    cells = [_recorded_run(steps=60), "run.wait()"]
    document = lab.write_notebook("kept.ipynb", cells)
    notebook = Notebook(page, lab, "kept.ipynb")
    notebook.open()
    for cell in (0, 1):
        notebook.run_cell(cell)
    page.locator(".jp-RenderedPlotly .main-svg").first.wait_for()
    notebook.wait_until_idle()
    saved = notebook.save()
    assert WIDGET not in final_output(saved).data
    page.goto("about:blank")
    lab.shut_kernels_down()

    # Opened again where no kernel is ever started.
    document.rename(document.with_name("reopened.ipynb"))
    page.goto(f"{lab.url}/lab?token={lab.token}&reset")
    page.wait_for_function("() => window.jupyterapp?.commands.hasCommand('docmanager:open')")
    page.evaluate(
        """() => jupyterapp.commands.execute('docmanager:open', {
            path: 'reopened.ipynb', factory: 'Notebook', kernelPreference: { shouldStart: false, canStart: false },
        })"""
    )
    page.locator(".jp-RenderedPlotly .main-svg, .jp-RenderedSVG svg, .jp-RenderedPlotly img").first.wait_for()
    screenshot(page, "reopened")
    # JupyterLab 4.2 starts one whatever it is told; the curves do not come from it.
    assert lab.num_kernels() == 0 or Version(jupyterlab.__version__) < Version("4.3")


@pytest.mark.subshells
@pytest.mark.timeout(900)
def test_a_panel_of_its_own_in_both_themes(lab: Lab, page: Page) -> None:
    lab.write_notebook("panel.ipynb", [_recorded_run(steps=30000), BLOCK])
    page.set_viewport_size({"width": 1280, "height": 1250})
    notebook = Notebook(page, lab, "panel.ipynb")
    notebook.open()
    notebook.run_cell(0)
    page.locator("[data-chart=loss] .js-plotly-plot").wait_for()
    wait_for_points(page, "loss", "rank 0", 20)
    screenshot(page, "panel-light")

    expect(
        page.get_by_role("listitem", name=re.compile("^rank 0, GPU 0 NVIDIA H200, training"))
    ).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^Loss: rank 0 "))).to_be_visible()
    expect(page.get_by_role("progressbar", name="Progress")).to_be_visible()

    zoom_into(page, "loss")
    reset = page.get_by_role("button", name="Reset the zoom of Loss")
    expect(reset).to_be_visible()
    reset.click()
    expect(reset).to_have_count(0)

    # With the keyboard alone: pause while a cell is running.
    notebook.run_cell(1)
    page.wait_for_timeout(500)
    page.get_by_role("button", name="Pause").focus()
    page.keyboard.press("Enter")
    assert seconds_until(state(page, "paused")) < WHILE_THE_CELL_RUNS_S
    notebook.set_theme("JupyterLab Dark")
    zoom_into(page, "loss")
    screenshot(page, "panel-zoomed")
    reset.focus()
    page.keyboard.press("Enter")
    expect(reset).to_have_count(0)
    page.get_by_role("button", name="Enlarge Loss").click()
    page.get_by_role("button", name="Terms", exact=True).click()
    page.get_by_role("button", name="time", exact=True).click()
    expect(page.locator("[data-chart=kl]")).to_be_visible()
    page.wait_for_timeout(500)
    screenshot(page, "panel-dark")
    assert page.evaluate("() => typeof window.Plotly") == "undefined"

    page.get_by_role("button", name="Stop").click()
    page.locator(".jp-RenderedPlotly .main-svg").first.wait_for()
    expect(page.locator(".nbgpu")).to_have_count(0)
    notebook.set_theme("JupyterLab Light")


@pytest.mark.release
@pytest.mark.timeout(900)
def test_many_ranks_become_bands(lab: Lab, page: Page) -> None:
    lab.write_notebook("many.ipynb", [_recorded_run(steps=2000, num_ranks=24)])
    page.set_viewport_size({"width": 1280, "height": 1400})
    notebook = Notebook(page, lab, "many.ipynb")
    notebook.open()
    notebook.run_cell(0)
    page.locator("[data-chart=loss] .js-plotly-plot").wait_for()
    wait_for_points(page, "memory", "the worst", 10)
    screenshot(page, "many-ranks")
    notebook.in_kernel("run.stop(); run.wait()")


def _recorded_run(steps: int, num_ranks: int = 2) -> str:
    return f"""
import sys, tempfile
from pathlib import Path
sys.path.insert(0, {str(SUPPORT)!r})
from recorded import RecordedRun
from nbgpu.ui.run.panel import show
run = RecordedRun(Path(tempfile.mkdtemp(dir='.')), num_ranks={num_ranks}, steps={steps})
show(run)
""".strip()


def test_tab_completes_and_shift_tab_explains_names_of_the_ranks(lab: Lab, page: Page) -> None:
    defines = "%%distributed\nweights = torch.zeros(2, 3)\ndef blend(first, second=0.5):\n    'Mixes two.'"
    begun = "%%distributed\nweights.sha"
    lab.write_notebook("tab.ipynb", [START_CLUSTER, defines, begun, STOP_CLUSTER])
    notebook = Notebook(page, lab, "tab.ipynb")
    notebook.open()
    for index in (0, 1):
        notebook.run_cell(index)
        notebook.wait_until_idle()
    # The first answer takes as long as IPython needs to load its completer, for which JupyterLab may not
    # wait.
    page.evaluate(
        """async code => {
            const kernel = jupyterapp.shell.currentWidget.context.sessionContext.session.kernel;
            const ask = () => kernel.requestComplete({ code, cursor_pos: code.length });
            while (!(await ask()).content.matches.length);
        }""",
        begun,
    )
    page.locator(".jp-CodeCell").nth(2).locator(".cm-content").click()
    page.keyboard.press("Control+End")
    page.keyboard.press("Tab")
    page.locator(".jp-Completer-item").filter(has_text="shape").first.wait_for()
    page.keyboard.press("Enter")
    page.wait_for_function(
        "() => jupyterapp.shell.currentWidget.content.widgets[2].model.sharedModel.getSource()"
        ".endsWith('weights.shape')"
    )
    page.keyboard.type("\nblend(")
    # JupyterLab 4.2 does not hear the next keys right after a completion.
    page.keyboard.press("Escape")
    page.keyboard.press("Enter")
    page.keyboard.press("Shift+Tab")
    page.locator(".jp-Tooltip").filter(has_text="Mixes two.").wait_for()
    page.keyboard.press("Escape")
    notebook.run_cell(3)
    notebook.wait_until_idle()


@pytest.mark.subshells
@pytest.mark.timeout(900)
def test_a_sweep_is_watched_and_stopped(lab: Lab, page: Page) -> None:
    lab.write_notebook("sweep.ipynb", [SWEEP])
    notebook = Notebook(page, lab, "sweep.ipynb")
    notebook.open()
    notebook.run_cell(0)
    line = page.locator(".nbgpu-sweep-line")
    expect(line).to_contain_text("best val_loss", timeout=240_000)
    expect(line).to_contain_text("running: 0 of 2 trials finished, 2 at work")
    expect(page.get_by_role("rowheader", name=re.compile(r"^\W*1"))).to_be_visible()
    page.get_by_role("img", name="Chart of the trials").locator("svg").wait_for()
    screenshot(page, "sweep")

    button(page, "Stop").click()
    expect(line).to_contain_text(re.compile("^stop"), timeout=5000)
    screenshot(page, "sweep-stopping")
    expect(line).to_contain_text("stopped: 0 of 2 trials finished, 2 stopped", timeout=240_000)
    expect(button(page, "Stop")).to_have_count(0)
    screenshot(page, "sweep-stopped")
    saved = notebook.save()
    assert "stopped: 0 of 2" in str([o.get("data") for o in saved.cells[0].outputs])
    assert notebook.in_kernel("print(all(trial.checkpoint() for trial in sweep.trials))") == "True\n"


@pytest.mark.subshells
@pytest.mark.timeout(900)
def test_a_run_that_hangs_says_so_and_stops(lab: Lab, page: Page) -> None:
    settings = {
        "data": "phantoms",
        "num_phantoms": 16,
        "patch_size": 16,
        "steps": 100_000,
        "val_every": 0,
        "threads": 1,
    }
    train = f"run = nbgpu.current().train('autoencoder', **{settings!r})\nrun.panel()\nrun.wait()\nrun.checkpoint()"
    fault = faults.in_training(1, step=40, action="sleep")
    cells = [f"{START_CLUSTER} --notice-after-s 1", f"%%distributed\n{fault}", train, STOP_CLUSTER]
    lab.write_notebook("hang.ipynb", cells)
    page.set_viewport_size({"width": 1280, "height": 1250})
    notebook = Notebook(page, lab, "hang.ipynb")
    notebook.open()
    for index in (0, 1, 2):
        notebook.run_cell(index)
    said = re.compile(
        r"rank 0 waits in DDP backward, step 40, for \d+ s; rank 1 is at faulty, line \d+ of an earlier cell"
    )
    hang = page.locator(".nbgpu-hang")
    expect(hang).to_have_text(said, timeout=240_000)
    # Under the cell, too.
    expect(page.locator(".jp-OutputArea-output b", has_text=said)).to_be_visible()
    screenshot(page, "hang")

    page.locator(".nbgpu-stop").click()
    expect(page.locator(".jp-OutputArea-output", has_text="step-00000039")).to_be_visible(timeout=240_000)
    page.locator(".jp-RenderedPlotly .main-svg").first.wait_for()
    expect(page.locator(".jp-OutputArea-output b", has_text=said)).to_have_count(0)
    screenshot(page, "hang-stopped")
    notebook.run_cell(3)
    notebook.wait_until_idle()
