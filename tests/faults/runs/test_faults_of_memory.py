"""A rank that gets no more memory says who holds it and what would have fitted, and gives back what it took.

The allocators themselves refuse here: torch's of the CPU and numpy's, which were asked for more than an
address space holds, or which a limit of the process keeps from growing. The GPU's own is in the tests with
the `gpu` marker.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faults
import pytest
from rows import Measured, row

import nbgpu
from nbgpu.client.cells.cell import DistributedCell
from nbgpu.protocol.records import Event

SETTINGS: dict[str, Any] = {
    "data": "phantoms",
    "patch_size": 16,
    "num_phantoms": 16,
    "batch_size": 2,
    "steps": 6,
    "val_every": 0,
}


@pytest.fixture(autouse=True)
def ranks_are_well_afterwards(cluster2: nbgpu.Cluster) -> Iterator[None]:
    cluster2.execute("kept = 3 + rank")
    yield
    told = cluster2.execute(
        f"{faults.MEND}\ntotal = torch.ones(1); dist.all_reduce(total); print(int(total), kept)"
    )
    assert told == {0: "2 3\n", 1: "2 4\n"}


def failure_in_cell(cluster: nbgpu.Cluster, code: str) -> nbgpu.RankError:
    with pytest.raises(nbgpu.RankError) as caught:
        DistributedCell(cluster.parts.cells, code, None, None).show_blocking()
    return caught.value


@row(
    "out of memory on one rank, in a cell",
    "the report comes first: rank, what was asked for, the largest variables by name; their functions' memory is free again",
    bound_s=1,
)
def test_a_cell(cluster2: nbgpu.Cluster, measured: Measured) -> None:
    cluster2.execute("""
import weakref
weights = torch.ones(4, 2**20)
view = weights[0]
history = [torch.ones(2**18, dtype=torch.float64) for _ in range(3)]
def train():
    global held_by_function
    activation = torch.ones(2**25)
    held_by_function = weakref.ref(activation)
    if rank == 1:
        fail(activation)
    dist.barrier()
""")
    cluster2.execute(f"def fail(activation):\n    {faults.at(1, 'oom').partition(': ')[2]}")
    error = failure_in_cell(cluster2, "train()")
    measured.ended(str(error))
    assert [(f.rank, f.error_type) for f in error.failures] == [(1, "OutOfMemoryError")]
    lines = [line.strip() for line in error.failures[0].message.splitlines()]
    assert lines[:2] == ["rank 1 ran out of memory", "asked for: 1.0 EiB"]
    assert re.match(r"peak: [\d.]+ [MG]iB resident; the machine has [\d.]+ [GT]iB, of which ", lines[2])
    assert lines[4:7] == [
        "activation in train(): 33554432, float32, 128.0 MiB",
        "weights: 4 x 1048576, float32, 16.0 MiB",
        "history: list with 3 tensors, 6.0 MiB",
    ]
    # Once, and before the traceback, which ends in the person's own line.
    shown = "\n".join(error._render_traceback_())
    assert shown.count("ran out of memory") == 1
    assert shown.index("ran out of memory") < shown.index("in train")
    # On the rank that was freed too.
    assert cluster2.execute("print(held_by_function(), len(history))") == {0: "None 3\n", 1: "None 3\n"}


@pytest.mark.parametrize(
    ("code", "asked"),
    [
        ("import numpy; numpy.empty(2**60, 'u1')", "asked for: 1.0 EiB"),
        ("bytearray(2**62)", "asked for: an amount that Python does not say"),
        (
            "try: torch.empty(2**60)\nexcept RuntimeError as cause: raise ValueError('wrapped') from cause",
            "4.0 EiB",
        ),
    ],
    ids=["numpy", "python", "wrapped"],
)
def test_other_allocators(cluster2: nbgpu.Cluster, code: str, asked: str) -> None:
    error = failure_in_cell(cluster2, code)
    assert [(f.rank, f.error_type) for f in error.failures] == [
        (0, "OutOfMemoryError"),
        (1, "OutOfMemoryError"),
    ]
    assert all(asked in f.message for f in error.failures)


@pytest.mark.long
@row(
    "out of memory on one rank, in a step of a run",
    "the report names rank, step and batch, what holds the memory, and what would have fitted; the next run trains",
    bound_s=1,
)
def test_a_run(cluster2: nbgpu.Cluster, measured: Measured, tmp_path: Path) -> None:
    cluster2.execute(faults.in_training(1, step=4, action="oom"))
    run = cluster2.train("autoencoder", **SETTINGS, runs_dir=str(tmp_path))
    with pytest.raises(nbgpu.RankError) as caught:
        run.wait(400)
    measured.ended(str(caught.value))
    assert [(f.rank, f.error_type) for f in caught.value.failures] == [(1, "OutOfMemoryError")]
    lines = caught.value.failures[0].message.splitlines()
    batch = "image 2 x 1 x 16 x 16 x 16"
    assert (
        lines[0] == f"rank 1 ran out of memory in step 4, with batch_size=2, accumulate=1: a batch of {batch}"
    )
    assert lines[1].startswith("asked for: 1.0 EiB, in faulty (")
    held = re.match(
        r"held by: parameters ([\d.]+ KiB), gradients ([\d.]+ KiB), optimizer state ([\d.]+ KiB), activations",
        lines[3],
    )
    assert held is not None
    parameters, gradients, optimizer = (float(size.removesuffix(" KiB")) for size in held.groups())
    assert parameters == gradients
    # Two moments of each parameter, and one number for each tensor that counts steps.
    assert 2 * parameters < optimizer < 2 * parameters + 1
    assert lines[4].startswith(
        "would have fitted: not even batch_size=1, by an estimate. Try amp='bf16', or a smaller patch"
    )
    (event,) = (
        r for r in run.reader.since()[0] if isinstance(r, Event) and r.kind == "failure" and r.rank == 1
    )
    assert event.text.startswith("OutOfMemoryError: rank 1 ran out of memory in step 4")
    # Nothing of the run is left on the rank, and the next one trains.
    left = "import gc\nprint(sum(type(o).__name__ == 'Trainer' for o in gc.get_objects()))"
    assert cluster2.execute(f"{faults.MEND}\n{left}", ranks=[1]) == {1: "0\n"}
    cluster2.execute(faults.MEND)
    assert cluster2.train("autoencoder", **SETTINGS, runs_dir=str(tmp_path)).wait(400).status == "finished"


@pytest.mark.long
def test_a_batch_that_would_have_fitted_is_named(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    """Both ranks may take 400 MiB more than they have, and the first step takes more."""
    settings = {**SETTINGS, "patch_size": 32, "num_phantoms": 256, "runs_dir": str(tmp_path)}
    cluster2.train("autoencoder", **{**settings, "steps": 1, "batch_size": 1}).wait(400)
    cluster2.execute(
        "import resource, psutil\n"
        "before = resource.getrlimit(resource.RLIMIT_AS)\n"
        "at_most = psutil.Process().memory_info().vms + 400 * 2**20\n"
        "resource.setrlimit(resource.RLIMIT_AS, (at_most, before[1]))"
    )
    try:
        run = cluster2.train("autoencoder", **{**settings, "batch_size": 64})
        with pytest.raises(nbgpu.RankError) as caught:
            run.wait(400)
    finally:
        cluster2.execute("resource.setrlimit(resource.RLIMIT_AS, before)")
    named = re.findall(r"would have fitted: batch_size=(\d+), by an estimate", str(caught.value))
    assert named
    assert all(2 <= int(batch_size) <= 32 for batch_size in named)


def test_data_that_does_not_fit_is_told_once(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    """All ranks learn of it before the first step, and only the one that it happened on speaks."""
    cluster2.execute(
        "from nbgpu.recipes.autoencoder.recipe import Autoencoder\n"
        "_good = Autoencoder.build_loaders\n"
        "def build_loaders(self, *place):\n"
        "    return torch.empty(2**60) if rank == 1 else _good(self, rank, world_size)\n"
        "Autoencoder.build_loaders = build_loaders"
    )
    try:
        run = cluster2.train("autoencoder", **SETTINGS, runs_dir=str(tmp_path))
        with pytest.raises(nbgpu.RankError) as caught:
            run.wait(400)
    finally:
        cluster2.execute("Autoencoder.build_loaders = _good")
    (failure,) = caught.value.failures
    assert (failure.rank, failure.error_type) == (1, "OutOfMemoryError")
    assert failure.message.startswith("rank 1 ran out of memory before the first step, with batch_size=2")
