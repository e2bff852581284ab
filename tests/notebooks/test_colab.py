"""What Colab and Kaggle have is enough: IPython 7.34, ipykernel 6.17, ipywidgets 7.7, and no JupyterLab."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import colab
import pytest
from conftest import REPOSITORY
from kernel import Done, Kernel, kernel

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

VIEW = "application/vnd.jupyter.widget-view+json"
COLAB = """
import sys, types
google, package, output = (types.ModuleType(name) for name in ("google", "google.colab", "google.colab.output"))
switched_on = []
output.enable_custom_widget_manager = lambda: switched_on.append(True)
sys.modules.update({"google": google, "google.colab": package, "google.colab.output": output})
"""
"""Of Colab's own package, what nbgpu asks of it."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with Colab's Jupyter."""
    return colab.overlay(tmp_path_factory.mktemp("colab") / "environment")


def _command(python: Path) -> list[str]:
    return [str(python), "-m", "ipykernel_launcher", "-f", "{connection_file}"]


@pytest.fixture(scope="module")
def notebook(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel like Colab's, on which nbgpu is loaded and two ranks run."""
    folder = tmp_path_factory.mktemp("notebook")
    with kernel(_command(python), {"PYTHONPATH": str(REPOSITORY)}) as started:
        for code in (COLAB, f"%cd -q {folder}", "%load_ext nbgpu", "%nbgpu start --gpus none --ranks 2"):
            assert well(started.run(code, timeout_s=180))
        yield started
        started.run("%nbgpu stop")


def well(done: Done) -> Done:
    assert done.status == "ok", done.error
    assert "Traceback" not in done.stderr
    return done


def test_pip_would_change_nothing_of_it(python: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--dry-run", "--report", report, "--no-index"]
        + ["--no-build-isolation", REPOSITORY],
        check=True,
        timeout=300,
    )
    found = json.loads(report.read_text())
    assert colab.changed(found) == []
    assert "nbgpu" in {item["metadata"]["name"] for item in found["install"]}


def test_the_page_is_told_to_load_widgets(notebook: Kernel) -> None:
    import_of = "import IPython, ipykernel, ipywidgets\n"
    versions = "print(IPython.__version__, ipykernel.__version__, ipywidgets.__version__, switched_on)"
    assert notebook.run(import_of + versions).stdout == "7.34.0 6.17.1 7.7.1 [True]\n"


def test_a_cell_runs_on_all_ranks(notebook: Kernel) -> None:
    done = well(notebook.run("%%distributed\nx = torch.ones(1) + rank\ndist.all_reduce(x)\nprint(x.item())"))
    assert done.stdout == "[0-1] 3.0\n"
    done = well(
        notebook.run("%%distributed\nimport asyncio\nawait asyncio.sleep(0.01)\nprint('awaited', rank)")
    )
    assert done.said(0, 1) == [["awaited 0"], ["awaited 1"]]
    well(notebook.run("%pull x --into xs"))
    assert notebook.run("print(xs[0].item(), xs[1].item())").stdout == "3.0 3.0\n"


def test_a_rank_that_raises_frees_the_other_and_both_keep_their_variables(notebook: Kernel) -> None:
    done = notebook.run(
        "%%distributed\nkept = 10 + rank\nif rank == 1: raise ValueError('wrong')\ndist.all_reduce(torch.ones(1))"
    )
    assert done.status == "error"
    assert "ValueError: wrong" in done.error
    assert "freed from waiting for the others: rank 0" in done.stderr
    assert notebook.run("%%distributed\nprint(kept)").said(0, 1) == [["10"], ["11"]]


def test_stop_gives_the_notebook_back(notebook: Kernel) -> None:
    done = notebook.run(
        "%%distributed\nimport time\nprint('begun', flush=True)\ntime.sleep(600)",
        meanwhile=notebook.manager.interrupt_kernel,
    )
    assert done.status == "error"
    assert done.took_s < 60
    assert notebook.run("%%distributed\nprint(kept)").said(0, 1) == [["10"], ["11"]]


def test_names_are_completed_and_explained(notebook: Kernel) -> None:
    well(notebook.run("import nbgpu"))

    def completed(code: str) -> list[str]:
        notebook.client.complete(code, len(code))
        return list(notebook.client.get_shell_msg(timeout=30)["content"]["matches"])

    assert completed('nbgpu.study("autoencoder",\n    batch_si') == ["batch_size="]
    assert completed('nbgpu.study("autoencoder", amp="b') == ["bf16"]
    assert "--ranks" in completed("%nbgpu start --r")
    # A rank's first answer takes as long as IPython needs to load its completer.
    give_up_s = time.monotonic() + 300
    while completed("%%distributed\nkep") != ["kept"]:
        assert time.monotonic() < give_up_s
    notebook.client.inspect('nbgpu.study("autoencoder", batch_size', 35)
    told = notebook.client.get_shell_msg(timeout=30)["content"]["data"]["text/plain"]
    assert told.lstrip().startswith("batch_size: int")


def test_a_run_trains_and_the_controls_and_the_panel_are_shown(notebook: Kernel) -> None:
    well(notebook.run("import nbgpu"))
    train = "run = nbgpu.current().train('autoencoder', preset='demo', steps=30, val_every=15)"
    done = well(notebook.run(f"{train}\nrun.panel()\nrun.wait()", timeout_s=300, allow_stdin=True))
    assert any(VIEW in each for each in done.displays)
    assert any("data:image/svg+xml" in each.get("text/html", "") for each in done.updates)
    assert notebook.run("print(run.status, run.metrics()['step'].max())").stdout == "finished 30\n"
    shown = well(notebook.run("nbgpu.controls('autoencoder')", allow_stdin=True)).displays[0]
    assert shown[VIEW]["version_major"] == 2
    assert "nbgpu.current().train" in shown["text/plain"]
    said = well(notebook.run("!{sys.executable} -m nbgpu.cli report {run.folder}", timeout_s=180)).stdout
    assert "report.html" in said


def test_another_kernel_attaches_to_kept_ranks(python: Path, tmp_path: Path) -> None:
    with kernel(_command(python), {"PYTHONPATH": str(REPOSITORY)}) as first:
        for code in (f"%cd -q {tmp_path}", "%load_ext nbgpu", "%nbgpu start --gpus none --ranks 1 --keep"):
            well(first.run(code, timeout_s=180))
        well(first.run("%%distributed\nmine = 20 + rank"))
    with kernel(_command(python), {"PYTHONPATH": str(REPOSITORY)}) as second:
        well(second.run("%load_ext nbgpu"))
        assert "1 CPU rank" in well(second.run("%nbgpu attach")).stdout
        assert second.run("%%distributed\nprint(mine)").stdout.endswith("20\n")
        well(second.run("%nbgpu stop"))
