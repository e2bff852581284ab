"""The machine: what `nbgpu doctor` says of it, what the picker offers, and how fast the GPU is."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from typing import Any

from checks import Place, check, nvidia_smi


@check(
    "`nbgpu doctor` finds nothing that does not work",
    slice=6,
    page="devices",
    shows=("host", "machine/gpus", "machine/devices.py"),
    budget_s=21,
    seldom=False,
)
def doctor(place: Place) -> None:
    done = place.python("-m", "nbgpu.cli", "doctor", "--json", "--runs-dir", str(place.folder))
    findings: list[dict[str, str]] = json.loads(done.stdout)["findings"]
    for verdict in ("ok", "warn", "fail"):
        place.figure(f"findings '{verdict}'", sum(f["verdict"] == verdict for f in findings))
    broken = [f for f in findings if f["verdict"] == "fail"]
    assert not broken, "; ".join(f"{f['check']}: {f['told']}" for f in broken)
    by_check = {f["check"]: f["told"] for f in findings}
    if place.on_gpu:
        place.figure("GPU 0", by_check["GPU 0"])
        place.figure("NCCL", by_check["nccl"])
    else:
        assert "2 processes formed a group" in by_check["gloo"]


@check(
    "the picker of devices offers the GPU, by name and UUID",
    slice=6,
    page="devices",
    shows=("ui/devices", "machine/gpus"),
    budget_s=6,
    seldom=False,
)
def picker(place: Place) -> None:
    from nbgpu.ui.controls.control_panel import _Controls

    cards = _Controls("autoencoder", None, "")._devices.gpus
    assert cards.wait(place.bound_s(60)), "the driver did not answer"
    assert cards.read is not None, cards.problem
    offered = [(f"{card.title} {card.name}", card.uuid) for card in cards.read.cards if card.kind == "gpu"]
    expected = []
    if place.on_gpu:
        # The name and the number are as nvidia-smi shows them.
        name, uuid = nvidia_smi("name", "uuid")
        expected = [(f"GPU 0 {name}", uuid)]
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True)
        place.figure("nvidia-smi -L", listed.stdout.strip())
        card = cards.read.cards[0]
        place.figure(
            "card of GPU 0", f"{card.memory_in_words()}, {card.load_in_words()}, {card.heat_in_words()}"
        )
        assert card.state != "unreadable", card.why
        used_mib = float(nvidia_smi("memory.used")[0])
        assert card.used_bytes is not None
        assert abs(card.used_bytes / 2**20 - used_mib) < 64, f"nvidia-smi says {used_mib} MiB in use"
    place.figure("offered", ", ".join(label for label, _ in offered) or "no GPU")
    assert offered[: len(expected)] == expected, f"offered {offered}, expected {expected}"
    assert bool(offered) == place.on_gpu


@check(
    "utilization and memory in a run's records are those of nvidia-smi",
    slice=6,
    page="devices",
    shows=("machine/gpus", "run_folder/recorder.py"),
    budget_s=22,
    alone=True,
    seldom=False,
)
def records_equal_nvidia_smi(place: Place) -> None:
    import psutil

    settings: dict[str, Any] = {
        "data": "phantoms",
        "patch_size": place.size(64, 16),
        "num_phantoms": 8,
        "batch_size": place.size(8, 2),
        "channels": place.size((32, 64), (8, 16)),
        "steps": 1_000_000,
        "val_every": 0,
        "runs_dir": str(place.folder),
    }
    with place.cluster() as cluster:
        process = psutil.Process(cluster.pids[0])

        def measured() -> tuple[float, float]:
            """Utilization in percent and memory in bytes, as others see them."""
            if place.on_gpu:
                use, mib = nvidia_smi("utilization.gpu", "memory.used")
                return float(use), float(mib) * 2**20
            return process.cpu_percent(), float(process.memory_info().rss)

        _, before_bytes = measured()
        run = cluster.train("autoencoder", **settings)
        _until_trained(run, steps=10)
        ours, theirs = [], []
        for _ in range(8):
            time.sleep(0.25)
            theirs.append(measured())
            ours.append(dict(run.statuses()[0].values))
        run.stop()
        run.wait(place.bound_s(60))
    memory = "memory_reserved_bytes" if place.on_gpu else "memory_rss_bytes"
    use, use_by_others = (
        statistics.median(values)
        for values in ([v["utilization_percent"] for v in ours], [u for u, _ in theirs])
    )
    recorded_bytes, bytes_by_others = (
        statistics.median(values) for values in ([v[memory] for v in ours], [b for _, b in theirs])
    )
    place.figure("utilization in the records", use, "%")
    place.figure("utilization by nvidia-smi", use_by_others, "%")
    place.figure("reserved by torch, in the records", recorded_bytes / 2**20, "MiB")
    place.figure("memory by nvidia-smi, less that before", (bytes_by_others - before_bytes) / 2**20, "MiB")
    if place.on_gpu:
        total_mib = float(nvidia_smi("memory.total")[0])
        known_mib = run.info.devices[0].memory_bytes / 2**20
        place.figure("memory of the GPU, in the records", known_mib, "MiB")
        assert abs(known_mib - total_mib) < 1, f"nvidia-smi says {total_mib} MiB"
        assert abs(use - use_by_others) <= 15, "the utilization differs"
        # CUDA's context and the libraries' kernels come on top of what torch has reserved.
        on_top_bytes = bytes_by_others - before_bytes - recorded_bytes
        place.figure("CUDA's context and libraries", on_top_bytes / 2**20, "MiB")
        assert 0 <= on_top_bytes < 2 * 2**30, "the records' memory is not what nvidia-smi sees"
    else:
        assert abs(recorded_bytes - bytes_by_others) < 0.3 * bytes_by_others


def _until_trained(run: Any, steps: int, patience_s: float = 60.0) -> None:
    give_up_s = time.monotonic() + patience_s
    while max(status.step for status in run.statuses()) < steps:
        assert time.monotonic() < give_up_s, f"{run} did not train: {run.failures}"
        time.sleep(0.05)


def copy_bytes_per_s(device: str, num_bytes: int) -> float:
    """The rate of a copy in the device's memory, counting bytes that are read and bytes that are written."""
    import torch

    source = torch.rand(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device)


def product_flops(device: str, edge: int) -> float:
    """The operations per second of a product of two square bf16 matrices."""
    import torch

    a, b = (torch.randn(edge, edge, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * edge**3 / seconds_of(lambda: a @ b, device)


def seconds_of(work: Any, device: str, num_repeats: int = 10) -> float:
    """The median of the seconds that some work takes on a device, after two times to warm up."""
    import torch

    for _ in range(2):
        work()
    if not device.startswith("cuda"):
        taken_s = []
        for _ in range(num_repeats):
            began_s = time.perf_counter()
            work()
            taken_s.append(time.perf_counter() - began_s)
        return statistics.median(taken_s)
    begins, ends = ([torch.cuda.Event(enable_timing=True) for _ in range(num_repeats)] for _ in range(2))
    for begin, end in zip(begins, ends, strict=True):
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(b.elapsed_time(e) for b, e in zip(begins, ends, strict=True)) / 1e3)


@check(
    "the ceilings of the GPU: a copy in its memory and a product of bf16 matrices",
    slice=1,
    page="benchmarks",
    shows=(),
    budget_s=6,
    alone=True,
    seldom=False,
)
def ceilings(place: Place) -> None:
    place.figure("copy", copy_bytes_per_s(place.device, place.size(2**32, 2**24)) / 1e9, "GB/s")
    place.figure("bf16 product", product_flops(place.device, place.size(8192, 256)) / 1e12, "TFLOP/s")
