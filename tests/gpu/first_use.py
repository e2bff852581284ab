"""What a person does first, as they do it: the first notebooks, and a training from the controls."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from checks import REPOSITORY, Place, check


def _notebook(name: str) -> Callable[[Place], None]:
    def execute(place: Place) -> None:
        import nbconvert

        # Where packages were put into a folder of their own, nbconvert does not find its templates by itself.
        templates = Path(nbconvert.__file__).parents[1] / "share" / "jupyter"
        paths = os.pathsep.join(filter(None, [os.environ.get("JUPYTER_PATH"), str(templates)]))
        notebook, folder = str(REPOSITORY / "notebooks" / f"{name}.ipynb"), str(place.folder)
        began_s = time.monotonic()
        done = place.python(
            "-m",
            "nbgpu.client.demo",
            notebook,
            folder,
            timeout_s=55,
            JUPYTER_PATH=paths,
            PATH=_with_commands(),
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"[-3000:]
        place.figure("from the first cell to the page", time.monotonic() - began_s, "s")
        place.figure("page", Path(folder, f"{name}.html").stat().st_size / 2**20, "MiB")

    return execute


def _with_commands() -> str:
    import sys

    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


for _name in ("00_first_run", "01_distributed_cells"):
    check(
        f"notebooks/{_name}.ipynb runs from its first cell to its last, as `nbgpu demo` runs it",
        slice=2,
        page="training",
        shows=("client", "engine", f"../notebooks/{_name}.ipynb"),
        timeout_s=60,
        alone=True,
        name=f"notebook_{_name}",
    )(_notebook(_name))


@check(
    "the controls' Start trains with what was typed into them, and shows the result",
    slice=2,
    page="training",
    shows=("ui/controls", "client/runs"),
    timeout_s=35,
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
            assert time.monotonic() < give_up_s, panel._said.value
            time.sleep(0.1)
        run = panel._run
        run.wait(place.bound_s(10))
        place.figure("steps", int(run.metrics()["step"].max()))
        assert run.status == "finished", run.failures
        assert {name: getattr(run.config, name) for name in typed} == typed
        result = run.result()
        assert result is not None
        assert "psnr_db" in str(result["table"])
