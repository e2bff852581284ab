"""Settings of runs that only a GPU has, and the same losses however samples are spread."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

from checks import REPOSITORY, Place, Skipped, check

_NUM_STEPS = 6
_VARIANTS: dict[str, dict[str, Any]] = {
    "tf32 off": {"tf32": False},
    "tf32 on": {"tf32": True},
    "cudnn benchmark": {"cudnn": "benchmark"},
    "cudnn deterministic": {"cudnn": "deterministic"},
    "activations computed again": {"checkpoint_activations": True},
    "channels last": {"channels_last": True},
    "amp bf16": {"amp": "bf16"},
    "amp fp16, with GradScaler": {"amp": "fp16"},
    "strategy single": {"strategy": "single"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp, CPU offload": {"strategy": "fsdp", "cpu_offload": True},
    "transforms on the GPU": {"transforms_on": "gpu"},
    "pageable batches": {"pin_memory": "off", "non_blocking": False},
}
_OTHER_NOISE = {"channels last", "amp bf16", "amp fp16, with GradScaler", "compiled"}
"""Where the autoencoder's noise is drawn in another order or type. The first loss, which hardly depends on
it, is nearly the same, and the others are not."""
_MOST_OFF = 0.02
"""How far losses may be from those of the defaults, as a share."""
_ONLY_ON_A_GPU = {"cpu_offload"}
"""What CPU ranks refuse."""


def _settings(place: Place, **settings: Any) -> dict[str, Any]:
    return {
        "data": "phantoms",
        "patch_size": place.size(64, 8),
        "num_phantoms": 16,
        "channels": place.size((32, 64), (2, 4)),
        "batch_size": 2,
        "steps": _NUM_STEPS,
        "val_every": 0,
        "work_out_result": False,
        "runs_dir": str(place.folder),
        **settings,
    }


def losses_of(run: Any) -> list[float]:
    """The losses of a run's steps, rank by rank."""
    frame = run.metrics().dropna(subset=["loss"])
    return list(frame.sort_values(["rank", "step"])["loss"])


def _require_like(place: Place, name: str, run: Any, expected: list[float]) -> None:
    """Note a run's time and memory; AssertionError unless its losses are the expected ones."""
    frame = run.metrics().dropna(subset=["loss"])
    rates = list(frame["samples_per_s"])[_NUM_STEPS // 2 :]
    place.figure(f"{name}: samples", statistics.median(rates), "1/s")
    if "memory_reserved_bytes" in frame:
        place.figure(f"{name}: reserved", frame["memory_reserved_bytes"].max() / 2**20, "MiB")
    losses = losses_of(run)
    assert len(losses) == _NUM_STEPS, f"{name}: {len(losses)} steps were recorded"
    num_compared = 1 if name in _OTHER_NOISE else _NUM_STEPS
    # In the small network of a rehearsal the noise of a few numbers is all there is.
    most_off = place.size(_MOST_OFF, 0.15) if name in _OTHER_NOISE else _MOST_OFF
    pairs = list(zip(losses, expected, strict=True))[:num_compared]
    off = max(abs(a - b) / abs(b) for a, b in pairs)
    place.figure(f"{name}: {'first loss' if num_compared == 1 else 'losses'} off by", off)
    assert off <= most_off, f"{name}: the losses are off by {off:.3g}"
    assert losses[-1] < losses[0], f"{name}: the loss went from {losses[0]:.4g} to {losses[-1]:.4g}"


@check(
    "TF32, cuDNN's choices, recomputed activations, channels_last, CPU offload, GradScaler, copies and crops: "
    "each trains with the losses of the defaults",
    slice=1,
    page="training",
    timeout_s=240,
)
def settings_that_a_gpu_has(place: Place) -> None:
    wrong = []
    with place.cluster() as cluster:
        expected = losses_of(cluster.train("autoencoder", **_settings(place)).wait(place.bound_s(120)))
        for name, settings in _VARIANTS.items():
            if not place.on_gpu and settings.keys() & _ONLY_ON_A_GPU:
                continue
            try:
                run = cluster.train("autoencoder", **_settings(place, **settings))
                _require_like(place, name, run.wait(place.bound_s(120)), expected)
            except Exception as error:  # noqa: BLE001 - the other settings are still to be tried
                wrong.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
    assert not wrong, "\n".join(wrong)


@check("two runs with cudnn='deterministic' are equal to the last bit", slice=1, page="training")
def deterministic_runs_are_equal(place: Place) -> None:
    from nbgpu.run_folder import checkpoint_files

    deterministic = {"cudnn": "deterministic"} if place.on_gpu else {}
    with place.cluster() as cluster:
        runs = [
            cluster.train("autoencoder", **_settings(place, **deterministic)).wait(place.bound_s(60))
            for _ in range(2)
        ]
    losses = [losses_of(run) for run in runs]
    place.figure("steps compared", len(losses[0]))
    assert losses[0] == losses[1], f"the losses differ: {losses}"
    weights = [(run.checkpoint() / checkpoint_files.MODEL).read_bytes() for run in runs]
    assert weights[0] == weights[1], "the weights differ"


@check("fused Adam, AdamW and SGD take the same first steps as torch's plain ones", slice=1, page="training")
def fused_optimizers(place: Place) -> None:
    import torch

    for name in ("Adam", "AdamW", "SGD"):
        found = []
        for fused in (True, False):
            torch.manual_seed(0)
            model = torch.nn.Linear(256, 256, device=place.device)
            options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
            optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2, fused=fused, **options)
            data = torch.randn(64, 256, device=place.device)
            for _ in range(5):
                optimizer.zero_grad()
                model(data).square().mean().backward()
                optimizer.step()
            found.append(model.weight.detach().clone())
        off = float((found[0] - found[1]).abs().max() / found[1].abs().max())
        place.figure(f"{name}: fused and plain differ by", off)
        assert off < 1e-5, f"{name}: {off}"
    wrong = []
    with place.cluster() as cluster:
        for optimizer in ("adam", "adamw", "sgd"):
            run = cluster.train("autoencoder", **_settings(place, optimizer=optimizer, lr=1e-3)).wait(
                place.bound_s(60)
            )
            losses = losses_of(run)
            place.figure(f"{optimizer}: last loss", losses[-1])
            if not (math.isfinite(losses[-1]) and len(losses) == _NUM_STEPS):
                wrong.append(f"{optimizer}: {losses}")
    assert not wrong, wrong


@check(
    "a compiled model has the losses of one that is not",
    slice=3,
    page="training",
    timeout_s=180,
)
def compiled_model(place: Place) -> None:
    import shutil

    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("gcc")):
        raise Skipped("torch.compile needs a C++ compiler")
    with place.cluster() as cluster:
        plain = cluster.train("autoencoder", **_settings(place)).wait(place.bound_s(60))
        compiled = cluster.train("autoencoder", **_settings(place, compile=True)).wait(place.bound_s(160))
        _require_like(place, "not compiled", plain, losses_of(plain))
        _require_like(place, "compiled", compiled, losses_of(plain))


_EQUIVALENCE: dict[str, tuple[dict[str, Any], str]] = {
    "ddp": ({"batch_size": 4}, "group"),
    "accumulated": ({"batch_size": 2, "accumulate": 2}, "group"),
    "recomputed": ({"batch_size": 4, "checkpoint_activations": True, "static_graph": True}, "group"),
    "channels last": ({"batch_size": 4, "channels_last": True, "gradient_as_bucket_view": False}, "group"),
    "batch": ({"batch_size": 4, "sync_batchnorm": True}, "batch"),
    "adam": ({"batch_size": 4, "optimizer": "adam", "clip_value": 0.05}, "adam"),
    "sgd": ({"batch_size": 4, "optimizer": "sgd"}, "sgd"),
    "contest": ({"batch_size": 4, "clip_value": 0.05}, "contest"),
}
_SHARDED = {
    "fsdp": ({"batch_size": 4, "strategy": "fsdp"}, "group"),
    "fsdp, accumulated": ({"batch_size": 2, "accumulate": 2, "strategy": "fsdp"}, "group"),
}
_ALONE = {
    "group": ({"batch_size": 8}, "group"),
    "batch": ({"batch_size": 8}, "batch"),
    "adam": ({"batch_size": 8, "optimizer": "adam", "clip_value": 0.05}, "group"),
    "sgd": ({"batch_size": 8, "optimizer": "sgd"}, "group"),
    "contest": ({"batch_size": 8, "clip_value": 0.05}, "contest"),
}
_COMMON = {"steps": 20, "dtype": "float64", "lr": 1e-2, "val_every": 0, "clip_norm": 0.5}


def _regression(
    place: Place, num_ranks: int, runs: dict[str, tuple[dict[str, Any], str]]
) -> dict[str, list[float]]:
    """The losses of small networks, as tests/support/regression.py trains them, on the device."""
    asked = []
    for settings, norm in runs.values():
        # Adam and SGD have the norm 'group', whatever they are compared with.
        asked.append(({**_COMMON, **settings}, norm if norm in ("group", "batch", "contest") else "group"))
    done = place.python(
        str(REPOSITORY / "tests" / "support" / "regression.py"),
        str(num_ranks),
        json.dumps(asked),
        REGRESSION_DEVICE=place.device,
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(runs, json.loads(done.stdout.splitlines()[-1]), strict=True))


def _compare(place: Place, runs: dict[str, tuple[dict[str, Any], str]]) -> None:
    alone = _regression(place, 1, {name: _ALONE[name] for name in {norm for _, norm in runs.values()}})
    spread = _regression(place, 2, runs)
    wrong = []
    for name, (_, norm) in runs.items():
        off = max(abs(a - b) for a, b in zip(spread[name], alone[norm], strict=True))
        place.figure(f"{name}: off by", off)
        # Kernels on a GPU may add in another order each time.
        if not off <= place.size(1e-8, 1e-10):
            wrong.append(f"{name}: {off:.3g}")
    assert not wrong, "; ".join(wrong)


@check(
    "two ranks with ddp lose what one does, in float64 over twenty steps",
    slice=1,
    page="training",
    timeout_s=180,
    seldom=False,
)
def equivalence(place: Place) -> None:
    _compare(place, _EQUIVALENCE)


@check(
    "two ranks with fsdp over gloo on one GPU lose what one does, in float64 over twenty steps",
    slice=1,
    page="training",
)
def equivalence_with_fsdp(place: Place) -> None:
    _compare(place, _SHARDED)


@check("`nbgpu train` and torchrun train on the GPU from a terminal", slice=1, page="training")
def from_a_terminal(place: Place) -> None:
    small = [
        "--data",
        "phantoms",
        "--patch-size",
        "16",
        "--num-phantoms",
        "8",
        "--steps",
        "4",
        "--val-every",
        "0",
    ]
    runs = ["--gpus", place.gpus, "--ranks", "1", "--runs-dir", str(place.folder / "runs")]
    done = place.python("-m", "nbgpu.cli", "train", "autoencoder", *small, "--amp", "bf16", *runs)
    assert done.returncode == 0, done.stderr[-2000:]
    (folder,) = (path for path in Path(place.folder, "runs").iterdir() if path.is_dir())
    done = place.python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"),
        *("-m", "nbgpu.engine.train", str(folder / "run.toml")),
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"[-2000:]
    place.figure("runs", len([path for path in Path(place.folder, "runs").iterdir() if path.is_dir()]))
