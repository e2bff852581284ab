"""Steps per second of the trainer beside plain torch and its peers, and the configurations of the guides."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from checks import REPOSITORY, Place, Skipped, check
from machine import product_flops
from recipes import SMALL


def _in_turns(channels: tuple[int, ...], full_batch: int, peers: Sequence[str]) -> Callable[[Place], None]:
    def compare(place: Place) -> None:
        sys.path.insert(1, str(REPOSITORY / "tests" / "bench"))
        import training

        edge, batch_size = place.size(64, 16), place.size(full_batch, 2)
        num_phantoms, num_turns = place.size(64, 16), place.size(5, 1)
        kind = "cuda" if place.on_gpu else "cpu"
        shown = ",".join(map(str, channels))
        there = [name for name in peers if _is_there(name)]
        if not there:
            raise Skipped(f"{' and '.join(peers)} are not installed")

        def note(rates: Mapping[str, Sequence[float]]) -> None:
            for name, of_name in rates.items():
                place.figure(f"{name}: steps", statistics.median(of_name), "1/s")
            for name in there:
                place.figure(f"nbgpu / {name}", _ratio(rates, name))
            place.figure("turns", len(rates["nbgpu"]))

        with training.volumes(edge, num_phantoms) as file:
            starts = {
                name: training.by_hand(name, file, batch_size, num_ranks=1, options=(shown, kind, "bf16"))
                for name in there
            }
            starts["nbgpu"] = training.ours(
                1,
                gpus=place.gpus,
                patch_size=edge,
                num_phantoms=num_phantoms,
                batch_size=batch_size,
                channels=channels,
                latent_channels=2,
                amp="bf16",
            )
            rates = training.in_turns(starts, num_turns, 1.5, note)
        slower = min(_ratio(rates, name) for name in there)
        if place.on_gpu:
            assert slower >= 0.99, f"nbgpu has {slower:.3f} of the steps of {' or '.join(there)}"

    return compare


def _ratio(rates: Mapping[str, Sequence[float]], name: str) -> float:
    return statistics.median(mine / other for mine, other in zip(rates["nbgpu"], rates[name], strict=True))


def _is_there(name: str) -> bool:
    return name == "plain" or find_spec({"fabric": "lightning_fabric"}.get(name, name)) is not None


_TRAINER = ("engine/training", "engine/model", "engine/data", "run_folder/recorder.py", "recipes/autoencoder")
_PEERS = {"plain": ("plain torch", ("plain",)), "peers": ("Fabric and accelerate", ("fabric", "accelerate"))}
for _channels, _batch, _who in (
    ((8, 16), 4, "plain"),
    ((32, 64), 8, "plain"),
    ((32, 64), 8, "peers"),
):
    _called, _names = _PEERS[_who]
    check(
        f"steps of the trainer beside {_called} in turns: {_channels[0]} and {_channels[1]} channels, {_batch} patches "
        "of 64^3, bf16; at least 0.99 of them",
        slice=1,
        page="benchmarks",
        shows=_TRAINER,
        timeout_s=35,
        alone=True,
        name=f"trainer_beside_{_who}_{_channels[0]}_{_channels[1]}",
    )(_in_turns(_channels, _batch, _names))


_GUIDES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "fast_ddpm_3d": (
        "diffusion",
        {"preset": "fast_ddpm", "data": "phantoms", "num_phantoms": 4, "accumulate": 1},
        {"size": 16, "channels": (32, 32), "norm_groups": 8},
    ),
    "3d_ldm": (
        "autoencoder",
        {
            "preset": "3d_ldm",
            "data": "phantoms",
            "num_phantoms": 4,
            "amp": "bf16",
            "adversarial_after_epochs": 0.5,
        },
        {"patch_size": 16, "channels": (32, 32, 32)},
    ),
    "resnet50": (
        "survival",
        {
            "preset": "mace",
            "data": "generated",
            "num_patients": 32,
            "resnet": "resnet50",
            "global_batch_size": 8,
            "best_metric": "",
            "val_every_epochs": 0,
            "amp": "bf16",
        },
        {"image_size": SMALL["survival"]["image_size"], "widen_factor": 0.125, "resnet": "resnet18"},
    ),
}
"""By name: the recipe, its settings, and what makes them small for a rehearsal."""
_GUIDES_SIZES = {
    "fast_ddpm_3d": "volumes of 128^3, batch 1",
    "3d_ldm": "patches of 112 x 128 x 80, batch 2, with the discriminator",
    "resnet50": "ResNet 50 on 256 x 256 x 64, batch 8",
}


_STEP_FLOPS = """
from torch.utils.flop_counter import FlopCounterMode
from nbgpu.config import train_config
from nbgpu.engine.model import build, precision
from nbgpu.engine.workload import by_name

config = train_config({recipe!r}, **{settings!r})
recipe = by_name.load(config)
model = build.build(config, recipe, device)[0]
batch = {{name: value.to(device) for name, value in recipe.example(config.batch_size).items()}}
with FlopCounterMode(display=False) as counter, precision.autocast(config, device):
    recipe.loss(model, batch)["loss"].backward()
step_flops = counter.get_total_flops()
del model, batch
"""
"""Counts the operations of products and convolutions in a forward and a backward pass."""


def _guide(name: str) -> Callable[[Place], None]:
    def train(place: Place) -> None:
        recipe, settings, small = _GUIDES[name]
        num_steps = place.size(16, 4)
        given = {**settings, **place.size({}, small), "work_out_result": False, "steps": num_steps}
        given |= {"val_every": 0, "checkpoint_every": 0, "runs_dir": str(place.folder)}
        with place.cluster() as cluster:
            run = cluster.train(recipe, **given).wait(place.bound_s(50))
            assert run.status == "finished", run.failures
            frame = run.metrics().dropna(subset=["loss"])
            later = frame[frame["step"] > num_steps // 2]
            place.figure("samples", float(later["samples_per_s"].median()), "1/s")
            parts = run.step_parts().iloc[num_steps // 2 :]
            for part in ("step_s", "data_s", "forward_s", "backward_s", "optimizer_s"):
                place.figure(f"a step: {part.removesuffix('_s')}", 1e3 * float(parts[part].median()), "ms")
            if place.on_gpu:
                reserved = cluster.execute("print(torch.cuda.max_memory_reserved())")[0]
                place.figure("memory, reserved", int(reserved) / 2**30, "GiB")
            peak_bytes = cluster.plan(recipe, **given).memory.get("peak")
            if peak_bytes:
                place.figure("memory, planned", peak_bytes / 2**30, "GiB")
            cluster.execute(_STEP_FLOPS.format(recipe=recipe, settings=given))
            flops = int(cluster.pull("step_flops")) / float(parts["step_s"].median())
            place.figure("products and convolutions", flops / 1e12, "TFLOP/s")
            # The ceiling is measured beside it, in this process.
            ceiling = product_flops(place.device, place.size(8192, 256))
            place.figure("share of a bf16 product's rate", 100 * flops / ceiling, "%")

    return train


for _name, _size in _GUIDES_SIZES.items():
    check(
        f"{_name}: {_size}, bf16: samples per second, memory, and the share of what the matrix units give",
        slice=1,
        page="benchmarks",
        shows=("engine/training", "engine/model", "engine/data", f"recipes/{_GUIDES[_name][0]}"),
        timeout_s=35,
        alone=True,
        name=f"guide_{_name}",
    )(_guide(_name))
