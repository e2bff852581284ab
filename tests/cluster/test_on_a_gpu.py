"""The ways of data and profiler that only a GPU has: pinned copies beside other work, crops on the GPU,
kernels in the trace.

Run on one H100 on 2026-11-26, all but the last.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import leaks
import psutil
import pytest
import torch

import nbgpu
from nbgpu.client.runs.run import Run

pytestmark = pytest.mark.gpu

SMALL: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": 16,
    "num_phantoms": 16,
    "batch_size": 2,
    "steps": 8,
    "val_every": 0,
    "rotate90_prob": 0.5,
    "cudnn": "deterministic",
    "profile": "3:6",
    "work_out_result": False,
}
PARTS = ("data_s", "forward_s", "backward_s", "communication_s", "optimizer_s", "other_s")


@pytest.fixture(scope="module")
def one_gpu() -> Iterator[nbgpu.Cluster]:
    with (
        nbgpu.Cluster(gpus="0") as cluster,
        leaks.holding_family_of(psutil.Process(cluster.pids[0]).ppid()),
    ):
        yield cluster


def losses(run: Run) -> list[float]:
    return list(run.metrics().dropna(subset=["loss"]).sort_values("step")["loss"])


def trace_of(run: Run, rank: int = 0) -> list[dict[str, Any]]:
    (event,) = (e for e in run.reader.events() if e.kind == "profile" and e.rank == rank)
    with gzip.open(run.folder / event.detail["trace"], "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return events


def copies_of(run: Run) -> set[str]:
    """From which memory batches were copied to the GPU, as CUPTI names it: 'Pinned' or 'Pageable'."""
    names = {e["name"] for e in trace_of(run) if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"]}
    return {kind for kind in ("Pinned", "Pageable") if any(f"({kind} -> Device)" in name for name in names)}


def trained(cluster: nbgpu.Cluster, folder: Path, **settings: Any) -> Run:
    return cluster.train("autoencoder", **SMALL, **settings, runs_dir=str(folder)).wait(400)


def test_batches_are_the_same_however_they_come_to_the_gpu(one_gpu: nbgpu.Cluster, tmp_path: Path) -> None:
    pinned = trained(one_gpu, tmp_path)
    assert not [note for note in pinned.notes() if "does nothing" in note]
    assert "Pinned" in copies_of(pinned)
    assert len(losses(pinned)) == 8
    waits = trained(one_gpu, tmp_path, non_blocking=False)
    assert losses(waits) == pytest.approx(losses(pinned), rel=1e-4)
    pageable = trained(one_gpu, tmp_path, pin_memory="off", non_blocking=False)
    assert "Pageable" in copies_of(pageable)
    assert losses(pageable) == pytest.approx(losses(pinned), rel=1e-4)


def test_batches_are_the_same_from_workers_and_made_on_the_gpu(
    one_gpu: nbgpu.Cluster, tmp_path: Path
) -> None:
    here = trained(one_gpu, tmp_path)
    with_workers = trained(one_gpu, tmp_path, num_workers=1, dataset="plain")
    assert "Pinned" in copies_of(with_workers)
    assert losses(with_workers) == pytest.approx(losses(here), rel=1e-4)
    on_gpu = trained(one_gpu, tmp_path, transforms_on="gpu")
    assert losses(on_gpu) == pytest.approx(losses(here), rel=1e-4)


def test_a_profile_says_which_part_the_kernels_belong_to(one_gpu: nbgpu.Cluster, tmp_path: Path) -> None:
    run = one_gpu.train("autoencoder", **SMALL, runs_dir=str(tmp_path)).wait(400)
    (event,) = (e for e in run.reader.events() if e.kind == "profile")
    assert event.text.startswith("steps 3 to 6, ")
    assert sum(event.detail[part] for part in PARTS) == pytest.approx(event.detail["step_s"])
    assert min(event.detail[part] for part in ("forward_s", "backward_s", "optimizer_s")) > 0
    # One rank alone has nobody to wait for.
    assert event.detail["communication_s"] < 0.2 * event.detail["step_s"]
    kernels = [e for e in trace_of(run) if e.get("cat") == "kernel"]
    # They are of four steps, and most of each step's time in which one ran belongs to forward, backward and
    # optimizer.
    computing_s = sum(event.detail[part] for part in ("forward_s", "backward_s", "optimizer_s"))
    assert computing_s > 0.5 * sum(kernel["dur"] for kernel in kernels) / 1e6 / 4 > 0


def test_the_parts_of_steps_are_those_of_the_device(one_gpu: nbgpu.Cluster, tmp_path: Path) -> None:
    run = one_gpu.train("autoencoder", **SMALL, runs_dir=str(tmp_path)).wait(400)
    parts = run.step_parts()
    assert len(parts) == 8
    assert (parts[["forward_s", "backward_s", "optimizer_s"]] > 0).all(axis=None)
    assert "exposed_s" not in parts.columns
    # The host's steps and the device's are equally long on the average, and not one by one.
    device_s = parts[["forward_s", "backward_s", "optimizer_s"]].sum(axis=1).iloc[2:].sum()
    assert device_s < 1.1 * parts["step_s"].iloc[2:].sum()
    begins = run.metrics().dropna(subset=["begun_at_s"]).sort_values("step")["begun_at_s"]
    assert begins.is_monotonic_increasing
    assert {span.kind for span in run.timeline(range(3, 6)).spans(4)} >= {"forward", "backward", "optimizer"}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank, two at least")
def test_nccl_is_communication_hidden_or_not(one_gpu: nbgpu.Cluster, tmp_path: Path) -> None:
    one_gpu.stop()
    with nbgpu.Cluster(gpus="0,1", backend="nccl") as cluster:
        run = cluster.train("autoencoder", **SMALL, runs_dir=str(tmp_path)).wait(400)
    for rank in (0, 1):
        (event,) = (e for e in run.reader.events() if e.kind == "profile" and e.rank == rank)
        assert sum(event.detail[part] for part in PARTS) == pytest.approx(event.detail["step_s"])
        assert event.detail["communication_s"] + event.detail["hidden_s"] > 0
        assert any("nccl" in e["name"].lower() for e in trace_of(run, rank) if e.get("cat") == "kernel")
    steps = run.metrics().dropna(subset=["exchange_s"])
    assert (steps["exchange_s"] > 0).all()
    assert ((steps["hidden_s"] + steps["exposed_s"] - steps["exchange_s"]).abs() < 1e-6).all()
    parts = run.step_parts()
    exposed_s = parts["waiting_s"] + parts["transfer_s"]
    assert exposed_s.sum() == pytest.approx(steps["exposed_s"].sum(), rel=1e-6)
    assert {span.rank for span in run.timeline([4]).spans(4) if span.kind == "exchange"} == {0, 1}
