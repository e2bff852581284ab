"""A rank that fails, dies or is stopped in a prediction costs what it was at, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import faults
import launching
import pytest
from kernel import Kernel
from rows import Measured, row

from nbgpu.run_folder import predictions

OUT = "predicted = nbgpu.current().predict(trained, 'phantoms', {out!r})\nprint(len(predicted.failed))"
MEND = """
%%distributed
if "_predict" in globals():
    from nbgpu.recipes.autoencoder.recipe import Autoencoder
    Autoencoder.predict = _predict
"""
KEEP = """
%%distributed
from nbgpu.recipes.autoencoder.recipe import Autoencoder
_predict = Autoencoder.predict
kept = rank + 1
"""
SUM = "%%distributed\ntotal = torch.ones(1)\ndist.all_reduce(total)\nprint(int(total))"


@pytest.fixture(scope="module")
def trained(notebook: Kernel, tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    folder = tmp_path_factory.mktemp("runs")
    done = notebook.run(
        "import nbgpu\n"
        "trained = nbgpu.current().train('autoencoder', data='phantoms', patch_size=16, num_phantoms=8, steps=2, "
        f"channels=(4, 8), val_every=0, threads=1, runs_dir={str(folder)!r}).wait(400).folder"
    )
    assert done.status == "ok", done.error
    return notebook


def rows_in(out: Path) -> list[str]:
    """The latents of the samples that are done: of one that was cut off there may be a file, and no row."""
    job = predictions.Job(**json.loads((out / predictions.JOB).read_text()))
    return [name for row in predictions.rows(job) for name in row.files if name.endswith(".npy")]


def again(notebook: Kernel, out: Path) -> None:
    """The same prediction does what is missing, and the ranks are as they were."""
    assert notebook.run(MEND).status == "ok"
    before = {name: (out / name).stat().st_mtime_ns for name in rows_in(out)}
    done = notebook.run(OUT.format(out=str(out)))
    assert done.stdout == "0\n", done.error
    assert len(rows_in(out)) == 8
    assert {name: (out / name).stat().st_mtime_ns for name in before} == before
    assert notebook.run(SUM).stdout == "[0-1] 2\n"


@row(
    "A rank {action}s in the middle of a prediction",
    "the sample and the rank are named; what was predicted stays, and the same call goes on with the rest",
    bound_s=5,
)
@pytest.mark.usefixtures("ranks_may_be_replaced")
@pytest.mark.parametrize("action", ["raise", "kill"])
def test_what_was_predicted_stays(
    trained: Kernel, measured: Measured, action: faults.Action, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert trained.run(KEEP).status == "ok"
    trained.run("%%distributed\n" + faults.in_prediction(1, "phantom 11", action))
    done = trained.run(OUT.format(out=str(out)))
    measured.ended(done.error)
    assert done.status == "error"
    if action == "raise":
        assert "This happened on rank 1 with the sample phantom 11" in done.error
    else:
        assert f"{launching.called(1)} was killed by SIGKILL" in done.error
    assert f"The predictions made so far stay in {out}" in done.error
    assert "phantom-9.latent.npy" in rows_in(out)
    if action == "kill":
        assert "rank 1" in trained.run("%nbgpu restart --rank 1").stdout
        assert trained.run("%%distributed\nprint(globals().get('kept'))").said(0) == [["1"]]
    again(trained, out)


@row(
    "Stop in the middle of a prediction",
    "the ranks are free; what was predicted stays, and the same call goes on with the rest",
    bound_s=5,
)
def test_a_stop(trained: Kernel, measured: Measured, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert trained.run(KEEP).status == "ok"
    trained.run("%%distributed\n" + faults.in_prediction(1, "phantom 13", "sleep"))

    def stop() -> None:
        measured.fault_now()
        trained.manager.interrupt_kernel()

    done = trained.run(OUT.format(out=str(out)), meanwhile=stop, once_shown="[5-7] of 8 samples")
    measured.ended(done.error)
    assert "Interrupt" in done.error
    assert trained.run("%%distributed\nprint(kept)").said(0, 1) == [["1"], ["2"]]
    again(trained, out)


def test_a_notebook_has_one_line_about_the_progress(trained: Kernel, tmp_path: Path) -> None:
    done = trained.run(OUT.format(out=str(tmp_path / "out")))
    assert len(done.displays) == 1
    assert "looking at the data" in done.displays[0]["text/plain"]
    assert "8 of 8 samples" in done.updates[-1]["text/plain"]
    assert 'value="8" max="8"' in done.updates[-1]["text/html"]
