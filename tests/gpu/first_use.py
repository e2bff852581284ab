"""What a person does first, as they do it: the first notebooks, and a training from the controls."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checks import CUT_OFF_S, REPOSITORY, Place, check

_TRAINING = "## Training from code"


def _first_run_cells(cells: list[Any]) -> list[Any]:
    """The notebook up to its training."""
    return cells[: _position(cells, _TRAINING)]


def _first_run_training(cells: list[Any]) -> list[Any]:
    """What starts the ranks and gives them a variable, and the notebook from its training on, with fewer
    steps."""
    training = cells[_position(cells, _TRAINING) :]
    for cell in training:
        cell.source = cell.source.replace("steps=1000", "steps=400")
    return [*cells[: _position(cells, "%%distributed") + 1], *training]


def _position(cells: list[Any], begins: str) -> int:
    return next(number for number, cell in enumerate(cells) if cell.source.startswith(begins))


def _notebook(name: str, part: Callable[[list[Any]], list[Any]]) -> Callable[[Place], None]:
    def execute(place: Place) -> None:
        import nbconvert
        import nbformat

        # Where packages were put into a folder of their own, nbconvert does not find its templates by itself.
        templates = Path(nbconvert.__file__).parents[1] / "share" / "jupyter"
        paths = os.pathsep.join(filter(None, [os.environ.get("JUPYTER_PATH"), str(templates)]))
        content = nbformat.read(REPOSITORY / "notebooks" / f"{name}.ipynb", as_version=4)
        content.cells = part(content.cells)
        notebook = place.folder / f"{name}.ipynb"
        nbformat.write(content, notebook)
        out = place.folder / "demo"
        began_s = time.monotonic()
        commands = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        arguments = ("-m", "nbgpu.client.demo", str(notebook), str(out))
        done = place.python(*arguments, timeout_s=CUT_OFF_S, JUPYTER_PATH=paths, PATH=commands)
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"[-3000:]
        place.figure("from the first cell to the page", time.monotonic() - began_s, "s")
        place.figure("page", (out / f"{name}.html").stat().st_size / 2**20, "MiB")

    return execute


for _name, _file, _part, _what in (
    ("notebook_00_cells", "00_first_run", _first_run_cells, "runs up to its training"),
    (
        "notebook_00_training",
        "00_first_run",
        _first_run_training,
        "trains, for 400 steps, and shows the result",
    ),
    ("notebook_01", "01_distributed_cells", lambda cells: cells, "runs from its first cell to its last"),
):
    check(
        f"notebooks/{_file}.ipynb {_what}, as `nbgpu demo` runs it",
        slice=2,
        page="training",
        shows=("client", "engine", f"../notebooks/{_file}.ipynb"),
        budget_s=24,
        name=_name,
    )(_notebook(_file, _part))


@check(
    "the controls' Start trains with what was typed into them, and shows the result",
    slice=2,
    page="training",
    shows=("ui/controls", "client/runs"),
    budget_s=24,
)
def training_from_the_controls(place: Place) -> None:
    from nbgpu.ui.controls.control_panel import _Controls

    typed: dict[str, Any] = {"data": "phantoms", "patch_size": 16, "batch_size": 2, "steps": 8}
    with place.cluster() as cluster:
        panel = _Controls("autoencoder", cluster)
        for name, value in typed.items():
            panel._settings.fields[name].value = str(value)
        panel._start.click()
        give_up_s = time.monotonic() + place.bound_s(30)
        while panel._run is None or panel._is_running():
            assert time.monotonic() < give_up_s, panel._message.value
            time.sleep(0.1)
        run = panel._run
        run.wait(place.bound_s(10))
        place.figure("steps", int(run.metrics()["step"].max()))
        assert run.status == "finished", run.failures
        assert {name: getattr(run.config, name) for name in typed} == typed
        result = run.result()
        assert result is not None
        assert "psnr_db" in str(result["table"])
