"""Every recipe on the GPU: its smoke test, and a short training in bf16 that learns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from checks import Place, check

_SMALL: dict[str, dict[str, Any]] = {
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
    "survival": {"data": "generated", "num_patients": 48, "image_size": (24, 24, 16), "widen_factor": 0.125},
}
"""What makes the recipes' data and networks small; the full sizes are in speed.py."""


def _recipe(name: str) -> Callable[[Place], None]:
    def train(place: Place) -> None:
        recipe = name
        settings = {**_SMALL.get(name, {}), "runs_dir": str(place.folder)}
        if name == "own":
            done = place.python(
                "-c",
                f"import os; os.chdir({str(place.folder)!r}); from nbgpu.cli import main; main(['new', 'mine'])",
            )
            assert done.returncode == 0, done.stderr
            recipe = str(Path(place.folder, "mine.py"))
        trains_a_model = name != "microstructure"
        with place.cluster() as cluster:
            if trains_a_model:
                smoke = cluster.train(recipe, **settings, smoke_test=True, amp="bf16").wait(place.bound_s(90))
                assert smoke.status == "finished", smoke.failures
                passed = [note for note in smoke.notes() if note.startswith("smoke test passed")]
                assert passed, smoke.notes()
                place.figure("smoke test", passed[0])
            steps = {"steps": place.size(60, 12), **({"amp": "bf16"} if trains_a_model else {})}
            run = cluster.train(recipe, **settings, **steps).wait(place.bound_s(100))
        assert run.status == "finished", run.failures
        frame = run.metrics().dropna(subset=["loss"])
        losses = list(frame.sort_values("step")["loss"])
        part = max(2, len(losses) // 5)
        first, last = sum(losses[:part]) / part, sum(losses[-part:]) / part
        place.figure("steps", len(losses))
        place.figure("mean loss of the first steps", first)
        place.figure("mean loss of the last steps", last)
        place.figure("samples", float(frame["samples_per_s"].iloc[len(frame) // 2 :].median()), "1/s")
        # A partial likelihood over a few patients of each batch moves too much for so few steps.
        if place.on_gpu and name != "survival":
            assert last < first, f"the loss went from {first:.4g} to {last:.4g}"
        assert all(loss == loss for loss in losses), "a loss is NaN"

    return train


for _name in (*_SMALL, "own"):
    check(
        f"{_name}: the smoke test passes, and a short training in bf16 lowers the loss",
        slice=2,
        page="training",
        timeout_s=180,
        name=f"recipe_{_name}",
    )(_recipe(_name))


@check(
    "a trained model predicts new volumes on the GPU as it does on the CPU",
    slice=2,
    page="training",
    timeout_s=150,
)
def predictions(place: Place) -> None:
    import nibabel
    import numpy as np

    import nbgpu
    from nbgpu.recipes.phantoms import phantom

    for number in range(4):
        voxels = phantom(16, 5, number)[0].numpy()
        nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), Path(place.folder, f"case-{number}.nii.gz"))
    data = Path(place.folder, "data")
    data.mkdir()
    for path in list(place.folder.glob("case-*")):
        path.rename(data / path.name)
    settings = {**_SMALL["autoencoder"], "steps": 20, "runs_dir": str(place.folder / "runs")}
    with place.cluster() as cluster:
        run = cluster.train("autoencoder", **settings).wait(place.bound_s(60))
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
            np.asarray(nibabel.load(place.folder / where / name).dataobj) for where in ("here", "cpu")
        )
        worst = max(worst, float(np.abs(ours - theirs).max() / max(1e-9, np.abs(theirs).max())))
    place.figure("volumes", len(names))
    place.figure("largest difference, as a share of the largest value", worst)
    assert worst < 2e-2, f"GPU and CPU differ by {worst:.3g}"
