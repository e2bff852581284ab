"""Every recipe on the GPU: its smoke test, a short training in bf16 that learns, and predictions."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checks import Place, check

if TYPE_CHECKING:
    import pandas as pd

SMALL: dict[str, dict[str, Any]] = {
    "autoencoder": {"data": "phantoms", "num_phantoms": 16, "patch_size": 16, "lr": 4e-3},
    "diffusion": {
        "data": "phantoms",
        "num_phantoms": 16,
        "size": 16,
        "channels": (8, 16),
        "num_res_blocks": 1,
        "norm_groups": 4,
        "lr": 4e-3,
    },
    # Without corrections the recipe has no network, and no use for bf16.
    "lithography": {"data": "generated", "num_masks": 32, "pixel_nm": 25.0, "lr": 1e-3, "corrections": 2},
    "microstructure": {"shape": (16, 16, 16), "limit_to": 4},
    # On CPUs with AMX, oneDNN's bf16 convolutions with stride 2 over volumes whose last axis is 1 long read
    # memory that nobody has written: the gradient of the weights is NaN at times. The network halves the axes
    # four times.
    "survival": {"data": "generated", "num_patients": 48, "image_size": (24, 24, 32), "widen_factor": 0.125},
}
"""What makes the recipes' data and networks small; the full sizes are in speed.py."""


def _recipe(place: Place, name: str) -> tuple[str, dict[str, Any]]:
    """The recipe as it is called, which for 'own' is a new file, and its settings."""
    settings = {**SMALL.get(name, {}), "runs_dir": str(place.folder)}
    if name != "own":
        return name, settings
    begin = f"import os; os.chdir({str(place.folder)!r}); from nbgpu.cli import main; main(['new', 'mine'])"
    done = place.python("-c", begin)
    assert done.returncode == 0, done.stderr
    return str(Path(place.folder, "mine.py")), settings


def _smoke_test(name: str) -> Callable[[Place], None]:
    def test(place: Place) -> None:
        recipe, settings = _recipe(place, name)
        with place.cluster() as cluster:
            began_s = time.monotonic()
            smoke = cluster.train(recipe, **settings, smoke_test=True, amp="bf16").wait(place.bound_s(30))
            place.figure("from its start to its end", time.monotonic() - began_s, "s")
        assert smoke.status == "finished", smoke.failures
        passed = [note for note in smoke.notes() if note.startswith("smoke test passed")]
        assert passed, smoke.notes()
        place.figure("smoke test", passed[0])
        assert smoke.result()["note"].startswith("A smoke test's result") or name == "own"

    return test


def rate(frame: pd.DataFrame) -> tuple[str, float]:
    """The samples of a second, or of a search, which goes over none, the evaluations of its loss."""
    if "samples_per_s" in frame:
        return "samples", float(frame["samples_per_s"].median())
    return "evaluations of the loss", float((frame["num_evaluations"] / frame["step_s"]).median())


def _training(name: str) -> Callable[[Place], None]:
    def train(place: Place) -> None:
        recipe, settings = _recipe(place, name)
        steps = {"steps": place.size(60, 12), **({"amp": "bf16"} if name != "microstructure" else {})}
        with place.cluster() as cluster:
            began_s = time.monotonic()
            run = cluster.train(recipe, **settings, **steps).wait(place.bound_s(40))
            place.figure("from its start to its end", time.monotonic() - began_s, "s")
        assert run.status == "finished", run.failures
        frame = run.metrics().dropna(subset=["loss"])
        losses = list(frame.sort_values("step")["loss"])
        part = max(2, len(losses) // 5)
        first, last = sum(losses[:part]) / part, sum(losses[-part:]) / part
        place.figure("steps", len(losses))
        place.figure("mean loss of the first steps", first)
        place.figure("mean loss of the last steps", last)
        place.figure(*rate(frame.iloc[len(frame) // 2 :]), "1/s")
        # A partial likelihood over a few patients of each batch moves too much for so few steps.
        if place.on_gpu and name != "survival":
            assert last < first, f"the loss went from {first:.4g} to {last:.4g}"
        assert all(loss == loss for loss in losses), "a loss is NaN"

    return train


for _name in (*SMALL, "own"):
    _shown = (f"recipes/{_name}", "engine/training")
    check(
        f"{_name}: a short training in bf16 lowers the loss",
        slice=5,
        page="training",
        shows=_shown,
        budget_s=22,
        name=f"recipe_{_name}",
    )(_training(_name))
    # A search has no smoke test.
    if _name != "microstructure":
        check(
            f"{_name}: the smoke test passes in bf16",
            slice=5,
            page="training",
            shows=_shown,
            budget_s=18,
            name=f"smoke_test_{_name}",
        )(_smoke_test(_name))


@check(
    "a trained model predicts new volumes on the GPU as it does on the CPU",
    slice=5,
    page="training",
    shows=("recipes/prediction.py", "recipes/autoencoder", "engine/workload"),
    budget_s=24,
)
def predictions(place: Place) -> None:
    import nibabel
    import numpy as np

    import nbgpu
    from nbgpu.recipes.phantoms import phantom

    for number in range(2):
        voxels = phantom(16, 5, number)[0].numpy()
        nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), Path(place.folder, f"case-{number}.nii.gz"))
    data = Path(place.folder, "data")
    data.mkdir()
    for path in list(place.folder.glob("case-*")):
        path.rename(data / path.name)
    settings = {**SMALL["autoencoder"], "steps": 8, "runs_dir": str(place.folder / "runs")}
    with place.cluster() as cluster:
        run = cluster.train("autoencoder", **settings, work_out_result=False).wait(place.bound_s(30))
        cluster.predict(run, data, place.folder / "here")
    with nbgpu.Cluster(gpus="none", ranks=1) as cluster:
        cluster.predict(run, data, place.folder / "cpu")
    worst = 0.0
    names = sorted(
        path.relative_to(place.folder / "here") for path in Path(place.folder, "here").rglob("*.nii.gz")
    )
    assert names, "nothing was predicted"
    for name in names:
        ours, theirs = (
            nibabel.nifti1.load(place.folder / where / name).get_fdata() for where in ("here", "cpu")
        )
        worst = max(worst, float(np.abs(ours - theirs).max() / max(1e-9, np.abs(theirs).max())))
    place.figure("volumes", len(names))
    place.figure("largest difference, as a share of the largest value", worst)
    assert worst < 2e-2, f"GPU and CPU differ by {worst:.3g}"
