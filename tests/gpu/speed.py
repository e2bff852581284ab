"""Steps per second of the trainer beside plain torch and its peers, and the configurations of the guides."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from checks import REPOSITORY, Place, check


def _in_turns(channels: tuple[int, ...], full_batch: int) -> Callable[[Place], None]:
    def compare(place: Place) -> None:
        sys.path.insert(1, str(REPOSITORY / "tests" / "bench"))
        import training

        edge, batch_size = place.size(64, 16), place.size(full_batch, 2)
        num_phantoms, num_turns = place.size(64, 16), place.size(8, 1)
        kind = "cuda" if place.on_gpu else "cpu"
        shown = ",".join(map(str, channels))
        peers = ["plain", *(name for name in ("fabric", "accelerate") if _is_there(name))]
        for name in ("fabric", "accelerate"):
            place.figure(f"{name} is installed", name in peers)
        with training.volumes(edge, num_phantoms) as file:
            starts = {
                name: training.by_hand(name, file, batch_size, num_ranks=1, options=(shown, kind, "bf16"))
                for name in peers
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
            rates = training.in_turns(starts, num_turns, place.size(3.0, 1.5))
        for name, of_name in rates.items():
            place.figure(f"{name}: steps", statistics.median(of_name), "1/s")
        for name in peers:
            ratio = statistics.median(
                mine / other for mine, other in zip(rates["nbgpu"], rates[name], strict=True)
            )
            place.figure(f"nbgpu / {name}", ratio)
            if place.on_gpu and name == "plain":
                slower = ratio
        if place.on_gpu:
            assert slower >= 0.99, f"nbgpu has {slower:.3f} of the steps of plain torch"

    return compare


def _is_there(name: str) -> bool:
    return find_spec({"fabric": "lightning_fabric"}.get(name, name)) is not None


for _channels, _batch in (((8, 16), 4), ((32, 64), 8)):
    check(
        f"steps of the trainer beside plain torch, Fabric and accelerate in turns: {_channels[0]} and {_channels[1]} "
        f"channels, {_batch} patches of 64^3, bf16; at least 0.99 of plain torch",
        slice=3,
        page="benchmarks",
        timeout_s=240,
        alone=True,
        name=f"trainer_beside_peers_{_channels[0]}_{_channels[1]}",
    )(_in_turns(_channels, _batch))


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
        {"image_size": (24, 24, 16), "widen_factor": 0.125, "resnet": "resnet18"},
    ),
}
"""By name: the recipe, its settings, and what makes them small for a rehearsal."""
_GUIDES_SIZES = {
    "fast_ddpm_3d": "volumes of 128^3, batch 1",
    "3d_ldm": "patches of 112 x 128 x 80, batch 2, with the discriminator",
    "resnet50": "ResNet 50 on 256 x 256 x 64, batch 8",
}


def _guide(name: str) -> Callable[[Place], None]:
    def train(place: Place) -> None:
        import nbgpu

        recipe, settings, small = _GUIDES[name]
        num_steps = place.size(24, 4)
        given = {**settings, **place.size({}, small), "work_out_result": False, "steps": num_steps}
        given |= {"val_every": 0, "checkpoint_every": 0, "runs_dir": str(place.folder)}
        with place.cluster() as cluster:
            run = cluster.train(recipe, **given).wait(place.bound_s(150))
            assert run.status == "finished", run.failures
            frame = run.metrics().dropna(subset=["loss"])
            later = frame[frame["step"] > num_steps // 2]
            place.figure("samples", float(later["samples_per_s"].median()), "1/s")
            parts = run.step_parts()
            later = parts.iloc[num_steps // 2 :]
            for part in ("step_s", "data_s", "forward_s", "backward_s", "optimizer_s"):
                place.figure(f"a step: {part.removesuffix('_s')}", 1e3 * float(later[part].median()), "ms")
            memory = "memory_reserved_bytes" if place.on_gpu else "memory_rss_bytes"
            place.figure(
                "memory, reserved" if place.on_gpu else "memory", float(frame[memory].max()) / 2**30, "GiB"
            )
            planned = cluster.plan(recipe, **given).memory
            if "peak" in planned:
                place.figure("memory, planned", planned["peak"] / 2**30, "GiB")
            without_runs = {key: value for key, value in given.items() if key != "runs_dir"}
            measured = nbgpu.memory(recipe, cluster, **without_runs)
            print(measured)
            place.figure("memory, peak of torch's allocator", measured.measured[0].peak_bytes / 2**30, "GiB")

    return train


for _name, _size in _GUIDES_SIZES.items():
    check(
        f"{_name}: {_size}, bf16: samples per second and memory",
        slice=3,
        page="benchmarks",
        timeout_s=200,
        alone=True,
        name=f"guide_{_name}",
    )(_guide(_name))
