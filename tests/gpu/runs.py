"""Settings of runs that only a GPU has, and the same losses however samples are spread."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from checks import REPOSITORY, Place, Skipped, check

_NUM_STEPS = 6
_VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "tf32": {"tf32 off": {"tf32": False}},
    "cudnn": {
        "cudnn benchmark": {"cudnn": "benchmark"},
        "cudnn deterministic": {"cudnn": "deterministic"},
    },
    "precision": {"amp bf16": {"amp": "bf16"}, "amp fp16, with GradScaler": {"amp": "fp16"}},
    "memory": {
        "activations computed again": {"checkpoint_activations": True},
        "channels last": {"channels_last": True},
    },
    "strategies": {"strategy single": {"strategy": "single"}, "fsdp": {"strategy": "fsdp"}},
    "offload": {"fsdp, CPU offload": {"strategy": "fsdp", "cpu_offload": True}},
    "data": {
        "transforms on the GPU": {"transforms_on": "gpu"},
        "pageable batches": {"pin_memory": "off", "non_blocking": False},
    },
}
"""By what they are about: the settings by their names. A check has three runs at most."""
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
        # At the default rate, which is for many steps, the first six raise the loss tenfold, and with it
        # whatever a setting changes in the last bit.
        "lr": 1e-4,
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
    losses = losses_of(run)
    assert len(losses) == _NUM_STEPS, f"{name}: {len(losses)} steps were recorded"
    num_compared = 1 if name in _OTHER_NOISE else _NUM_STEPS
    # In the small network of a rehearsal the noise of a few numbers is all there is.
    most_off = place.size(_MOST_OFF, 0.15) if name in _OTHER_NOISE else _MOST_OFF
    pairs = list(zip(losses, expected, strict=True))[:num_compared]
    off = max(abs(a - b) / abs(b) for a, b in pairs)
    place.figure(f"{name}: {'first loss' if num_compared == 1 else 'losses'} off by", off)
    assert off <= most_off, f"{name}: the losses are off by {off:.3g}"


def _variants(settings_by_name: Mapping[str, dict[str, Any]]) -> Callable[[Place], None]:
    def train(place: Place) -> None:
        wrong = []
        if not place.on_gpu and any(given.keys() & _ONLY_ON_A_GPU for given in settings_by_name.values()):
            raise Skipped("CPU ranks have nothing to offload")
        with place.cluster() as cluster:
            expected = losses_of(cluster.train("autoencoder", **_settings(place)).wait(place.bound_s(30)))
            for name, settings in settings_by_name.items():
                try:
                    # The recorder measures about once a second, which may be after these few steps.
                    cluster.execute("torch.cuda.is_available() and torch.cuda.reset_peak_memory_stats()")
                    run = cluster.train("autoencoder", **_settings(place, **settings))
                    run.wait(place.bound_s(30))
                    if place.on_gpu:
                        reserved = cluster.execute("print(torch.cuda.max_memory_reserved())")[0]
                        place.figure(f"{name}: reserved", int(reserved) / 2**20, "MiB")
                    _require_like(place, name, run, expected)
                except Exception as error:  # noqa: BLE001 - the other settings are still to be tried
                    wrong.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        assert not wrong, "\n".join(wrong)

    return train


for _about, _by_name in _VARIANTS.items():
    check(
        f"{', '.join(_by_name)}: {'each ' * (len(_by_name) > 1)}trains with the losses of the defaults",
        slice=5,
        page="training",
        shows=("engine/model", "engine/training", "engine/data/batches.py"),
        budget_s=10.0 + 4 * (1 + len(_by_name)),
        name=f"settings_{_about}",
    )(_variants(_by_name))


@check(
    "two runs with cudnn='deterministic' are equal to the last bit",
    slice=5,
    page="training",
    shows=("engine/model", "engine/training"),
    budget_s=18,
)
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


def _require_compiler() -> None:
    import shutil

    if not (shutil.which("c++") or shutil.which("g++") or shutil.which("gcc")):
        raise Skipped("torch.compile needs a C++ compiler")


@check(
    "a compiled model trains",
    slice=4,
    page="training",
    shows=("engine/model/build.py",),
    budget_s=24,
)
def compiled_model(place: Place) -> None:
    """The next check finds what this one compiles in a folder that they share, even if it is cut off."""
    _require_compiler()
    with place.cluster() as cluster:
        run = cluster.train("autoencoder", **_compiled(place)).wait(place.bound_s(40))
        place.figure("the first step, which compiles", float(run.step_parts()["step_s"].max()), "s")


@check(
    "a compiled model has the losses of one that is not",
    slice=4,
    page="training",
    shows=("engine/model/build.py",),
    budget_s=22,
    # After the one before, which has compiled the model.
    alone=True,
)
def losses_of_a_compiled_model(place: Place) -> None:
    _require_compiler()
    with place.cluster() as cluster:
        plain = cluster.train("autoencoder", **_settings(place)).wait(place.bound_s(30))
        _require_like(place, "not compiled", plain, losses_of(plain))
        compiled = cluster.train("autoencoder", **_compiled(place)).wait(place.bound_s(40))
        _require_like(place, "compiled", compiled, losses_of(plain))


def _compiled(place: Place) -> dict[str, Any]:
    return _settings(place, compile=True)


_EQUIVALENCE: dict[str, tuple[dict[str, Any], str]] = {
    "ddp": ({"batch_size": 4}, "group"),
    "accumulated": ({"batch_size": 2, "accumulate": 2}, "group"),
    "recomputed": ({"batch_size": 4, "checkpoint_activations": True, "static_graph": True}, "group"),
    "channels last": ({"batch_size": 4, "channels_last": True, "gradient_as_bucket_view": False}, "group"),
    "synchronized batch norm": ({"batch_size": 4, "sync_batchnorm": True}, "batch"),
    "adam": ({"batch_size": 4, "optimizer": "adam", "clip_value": 0.05}, "adam"),
    "sgd": ({"batch_size": 4, "optimizer": "sgd"}, "sgd"),
    "contest": ({"batch_size": 4, "clip_value": 0.05}, "contest"),
}
SHARDED: dict[str, tuple[dict[str, Any], str]] = {
    "fsdp": ({"batch_size": 4, "strategy": "fsdp"}, "group"),
    "fsdp, accumulated": ({"batch_size": 2, "accumulate": 2, "strategy": "fsdp"}, "group"),
}
_ALONE: dict[str, tuple[dict[str, Any], str]] = {
    "group": ({"batch_size": 8}, "group"),
    "batch": ({"batch_size": 8}, "batch"),
    "adam": ({"batch_size": 8, "optimizer": "adam", "clip_value": 0.05}, "group"),
    "sgd": ({"batch_size": 8, "optimizer": "sgd"}, "group"),
    "contest": ({"batch_size": 8, "clip_value": 0.05}, "contest"),
}
_COMMON = {"steps": 20, "dtype": "float64", "lr": 1e-2, "val_every": 0, "clip_norm": 0.5}


def _regression(
    place: Place, num_ranks: int, runs: dict[str, tuple[dict[str, Any], str]], backend: str
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
        REGRESSION_BACKEND=backend,
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(runs, json.loads(done.stdout.splitlines()[-1]), strict=True))


def compare_with_one_rank(
    place: Place, runs: dict[str, tuple[dict[str, Any], str]], backend: str = "gloo"
) -> None:
    """AssertionError unless two ranks lose in each step what one does."""
    alone = _regression(
        place, 1, {name: _ALONE[name] for name in {norm for _, norm in runs.values()}}, "gloo"
    )
    spread = _regression(place, 2, runs, backend)
    wrong = []
    for name, (_, norm) in runs.items():
        off = max(abs(a - b) for a, b in zip(spread[name], alone[norm], strict=True))
        place.figure(f"{name}: off by", off)
        # Kernels on a GPU may add in another order each time.
        if not off <= place.size(1e-8, 1e-10):
            wrong.append(f"{name}: {off:.3g}")
    assert not wrong, "; ".join(wrong)


def _equivalence(names: Sequence[str]) -> Callable[[Place], None]:
    return lambda place: compare_with_one_rank(place, {name: _EQUIVALENCE[name] for name in names})


for _called, _names in (
    ("equivalence", ("ddp", "accumulated", "recomputed", "channels last")),
    ("equivalence_of_optimizers", ("synchronized batch norm", "adam", "sgd", "contest")),
):
    check(
        f"two ranks with ddp lose what one does, in float64 over twenty steps: {', '.join(_names)}",
        slice=5,
        page="training",
        shows=("engine/training", "engine/model"),
        budget_s=22,
        seldom=False,
        name=_called,
    )(_equivalence(_names))


_TERMINAL = ("cli/training.py", "engine/train.py")
_FEW_STEPS = {"data": "phantoms", "patch_size": 16, "num_phantoms": 8, "steps": 4, "val_every": 0}


@check(
    "`nbgpu train` trains on the GPU from a terminal",
    slice=5,
    page="training",
    shows=_TERMINAL,
    budget_s=22,
)
def from_a_terminal(place: Place) -> None:
    flags = [
        word for name, value in _FEW_STEPS.items() for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    flags += ["--no-work-out-result", "--amp", "bf16"]
    where = ["--gpus", place.gpus, "--ranks", "1", "--runs-dir", str(place.folder)]
    done = place.python("-m", "nbgpu.cli", "train", "autoencoder", *flags, *where)
    assert done.returncode == 0, done.stderr[-2000:]
    place.figure("runs", _num_runs(place))


@check("torchrun trains on the GPU from a run.toml", slice=5, page="training", shows=_TERMINAL, budget_s=20)
def from_torchrun(place: Place) -> None:
    from nbgpu.config import ClusterConfig, train_config, write_toml

    config = train_config("autoencoder", **_FEW_STEPS, work_out_result=False, runs_dir=str(place.folder))
    write_toml(place.folder / "run.toml", ClusterConfig(gpus=place.gpus), config)
    done = place.python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"),
        *("-m", "nbgpu.engine.train", str(place.folder / "run.toml")),
    )
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"[-2000:]
    place.figure("runs", _num_runs(place))


def _num_runs(place: Place) -> int:
    return len([path for path in place.folder.iterdir() if path.is_dir()])
