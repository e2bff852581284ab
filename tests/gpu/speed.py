"""Steps per second of the trainer beside plain torch and its peers, and recipes in full sizes beside the
ceilings of the GPU."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from checks import REPOSITORY, Place, Skipped, check
from machine import copy_bytes_per_s, product_flops
from recipes import SMALL, rate


def _in_turns(channels: tuple[int, ...], full_batch: int, peer: str) -> Callable[[Place], None]:
    def compare(place: Place) -> None:
        sys.path.insert(1, str(REPOSITORY / "tests" / "bench"))
        import training

        edge, batch_size = place.size(64, 16), place.size(full_batch, 2)
        num_phantoms, num_turns = 16, place.size(5, 1)
        kind = "cuda" if place.on_gpu else "cpu"
        shown = ",".join(map(str, channels))
        if not _is_there(peer):
            raise Skipped(f"{peer} is not installed")

        def note(rates: Mapping[str, Sequence[float]]) -> None:
            for name, of_name in rates.items():
                place.figure(f"{name}: steps", statistics.median(of_name), "1/s")
            place.figure(f"nbgpu / {peer}", _ratio(rates, peer))
            place.figure("turns", len(rates["nbgpu"]))

        with training.volumes(edge, num_phantoms) as file:
            starts = {
                peer: training.by_hand(peer, file, batch_size, num_ranks=1, options=(shown, kind, "bf16"))
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
            # A turn that has begun takes another three seconds, and the end two.
            rates = training.in_turns(starts, num_turns, 1.5, note, place.ends_s - 5.5)
        ratio = _ratio(rates, peer)
        if place.on_gpu:
            assert ratio >= 0.99, f"nbgpu has {ratio:.3f} of the steps of {peer}"

    return compare


def _ratio(rates: Mapping[str, Sequence[float]], name: str) -> float:
    return statistics.median(mine / other for mine, other in zip(rates["nbgpu"], rates[name], strict=True))


def _is_there(name: str) -> bool:
    return name == "plain" or find_spec({"fabric": "lightning_fabric"}.get(name, name)) is not None


_TRAINER = ("engine/training", "engine/model", "engine/data", "run_folder/recorder.py", "recipes/autoencoder")
_PEERS = {"plain": "plain torch", "fabric": "Fabric", "accelerate": "accelerate"}
for _channels, _batch, _who in (
    ((8, 16), 4, "plain"),
    ((32, 64), 8, "plain"),
    ((32, 64), 8, "fabric"),
    ((32, 64), 8, "accelerate"),
):
    check(
        f"steps of the trainer beside {_PEERS[_who]} in turns: {_channels[0]} and {_channels[1]} channels, {_batch} patches "
        "of 64^3, bf16; at least 0.99 of them",
        slice=1,
        page="benchmarks",
        shows=_TRAINER,
        budget_s=24,
        alone=True,
        name=f"trainer_beside_{_who}_{_channels[0]}_{_channels[1]}",
    )(_in_turns(_channels, _batch, _who))


_FULL_SIZES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
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
    "lithography": (
        "lithography",
        {
            "data": "generated",
            "num_masks": 64,
            "size": 256,
            "batch_size": 16,
            "corrections": 2,
            "amp": "bf16",
        },
        {"size": 64, "num_masks": 16, "batch_size": 2, "pixel_nm": 25.0},
    ),
    "microstructure": (
        "microstructure",
        {"shape": (128, 128, 128), "limit_to": 16, "multigrid_reconstruction": False},
        {"shape": (16, 16, 16), "limit_to": 4},
    ),
}
"""By name: the recipe, its settings, and what makes them small for a rehearsal. fast_ddpm_3d, 3d_ldm and
resnet50 are the configurations of other projects' guides."""
_SIZES_IN_WORDS = {
    "fast_ddpm_3d": "volumes of 128^3, batch 1, bf16",
    "3d_ldm": "patches of 112 x 128 x 80, batch 2, with the discriminator, bf16",
    "resnet50": "ResNet 50 on 256 x 256 x 64, batch 8, bf16",
    "lithography": "masks of 256 x 256, batch 16, two corrections, bf16",
    "microstructure": "a search for 128^3 voxels, limit_to=16, float64",
}


def _full_size(name: str) -> Callable[[Place], None]:
    def train(place: Place) -> None:
        recipe, settings, small = _FULL_SIZES[name]
        num_steps = place.size(16, 4)
        given = {**settings, **place.size({}, small), "steps": num_steps}
        given |= {"val_every": 0, "checkpoint_every": 0, "runs_dir": str(place.folder)}
        if recipe != "microstructure":  # a search that works out no result would find nothing
            given["work_out_result"] = False
        with place.cluster() as cluster:
            run = cluster.train(recipe, **given).wait(place.bound_s(30))
            assert run.status == "finished", run.failures
            frame = run.metrics().dropna(subset=["loss"])
            later = frame[frame["step"] > num_steps // 2]
            place.figure(*rate(later), "1/s")
            if place.on_gpu:
                reserved = cluster.execute("print(torch.cuda.max_memory_reserved())")[0]
                place.figure("memory, reserved", int(reserved) / 2**30, "GiB")
            parts = run.step_parts().iloc[num_steps // 2 :].median(numeric_only=True).dropna()
            for part in ("step_s", "data_s", "forward_s", "backward_s", "optimizer_s"):
                if part in parts:  # a search has no such parts
                    place.figure(f"a step: {part.removesuffix('_s')}", 1e3 * float(parts[part]), "ms")
            cluster.execute(
                f"import sys; sys.path.insert(1, {str(Path(__file__).parent)!r}); import operations\n"
                f"counted = operations.of_passes({recipe!r}, {given!r}, device)"
            )
            num_flops, num_bytes, passes_s = cluster.pull("counted")
        place.figure("forward and backward", 1e3 * passes_s, "ms")
        place.figure("products and convolutions", num_flops / passes_s / 1e12, "TFLOP/s")
        # The ceilings are measured beside it, in this process.
        ceiling = product_flops(place.device, place.size(8192, 256))
        place.figure("share of a bf16 product's rate", 100 * num_flops / passes_s / ceiling, "%")
        place.figure("read and written by all operators", num_bytes / passes_s / 1e9, "GB/s")
        ceiling = copy_bytes_per_s(place.device, place.size(2**31, 2**23))
        place.figure("share of the bandwidth of a copy", 100 * num_bytes / passes_s / ceiling, "%")

    return train


for _name, _size in _SIZES_IN_WORDS.items():
    check(
        f"{_name}: {_size}: samples per second, memory, and the shares of what matrix units and memory give",
        slice=4 if _name in ("lithography", "microstructure") else 1,
        page="benchmarks",
        shows=("engine/training", "engine/model", "engine/data", f"recipes/{_FULL_SIZES[_name][0]}"),
        budget_s=24,
        alone=True,
        name=f"full_size_{_name}",
    )(_full_size(_name))
