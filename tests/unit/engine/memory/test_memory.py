"""What is read off an allocator's message and off the variables. Real failures are in tests/faults."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from nbgpu.config import train_config
from nbgpu.engine.dry_run import fake_steps
from nbgpu.engine.dry_run.steps import without_exchange
from nbgpu.engine.memory import budget
from nbgpu.engine.memory.budget import Static, batch_size_that_fits
from nbgpu.engine.memory.usage import Usage, asked_bytes, is_exhausted, largest
from nbgpu.errors import RunError
from nbgpu.text.sizes import in_words

CPU = torch.device("cpu")
GIB = 2**30


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            "CUDA out of memory. Tried to allocate 20.50 GiB. GPU 0 has a total capacity of 139.81 GiB",
            20.5 * GIB,
        ),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12", 4096),
        ("Unable to allocate 1.00 KiB for an array with shape (1024,)", 1024),
        ("", 0),
    ],
)
def test_what_was_asked_for(message: str, expected: float) -> None:
    assert asked_bytes(message) == expected


def test_sizes_in_words() -> None:
    assert [in_words(n) for n in (0, 512, 1024, 1.5 * GIB, 2**60)] == [
        "0 bytes",
        "512 bytes",
        "1.0 KiB",
        "1.5 GiB",
        "1.0 EiB",
    ]


def test_what_counts_as_out_of_memory() -> None:
    assert is_exhausted(torch.OutOfMemoryError("CUDA out of memory"))
    assert is_exhausted(MemoryError())
    assert not is_exhausted(RuntimeError("size mismatch"))
    assert is_exhausted(RuntimeError("could not create a primitive"))
    assert not is_exhausted(
        RuntimeError(
            "could not create a primitive descriptor for a convolution forward propagation primitive"
        )
    )
    # Another rank's failure, quoted.
    assert not is_exhausted(
        RunError("rank 1 failed: RuntimeError: DefaultCPUAllocator: can't allocate memory")
    )


@pytest.mark.parametrize(
    ("recipe", "settings", "fits", "told"),
    [
        (
            "autoencoder",
            {"batch_size": 8},
            4,
            "batch_size=4, by an estimate .*; with accumulate=2 .*amp='bf16'",
        ),
        ("autoencoder", {"batch_size": 8, "static_graph": True}, 4, "batch_size=4, by an estimate[^;]*$"),
        ("autoencoder", {"batch_size": 8, "dtype": "float64"}, 4, "^((?!amp=).)*$"),
        ("lithography", {"batch_size": 8}, 4, "^((?!amp=).)*$"),
        ("autoencoder", {"batch_size": 1}, 0, "not even this one sample. Try"),
        ("autoencoder", {"batch_size": 2}, 0, "not even batch_size=1, by an estimate. Try"),
    ],
)
def test_only_settings_that_the_run_would_take_are_advised(
    recipe: str, settings: dict[str, Any], fits: int, told: str
) -> None:
    line = budget.advice(train_config(recipe, **settings), fits, is_known=True, on_gpu=False)
    assert re.search(told, line), line


@pytest.mark.parametrize(
    ("batch_size", "peak_gib", "asked_gib", "had_fitted", "expected"),
    [
        (8, 15, 4, True, 6),  # 16 GiB for 8 samples, 13 GiB left for them
        (8, 15, 4, False, 4),  # the step had not come to its end: half
        (8, 4, 60, False, 1),
        (8, 4, 1000, False, 0),
        (1, 15, 4, True, 0),
        (8, 3, 0, True, 7),  # it failed for another reason; never as many as did not fit
    ],
)
def test_the_batch_size_that_would_have_fitted(
    batch_size: int, peak_gib: int, asked_gib: int, had_fitted: bool, expected: int
) -> None:
    static = Static(before_bytes=0, parameters_bytes=GIB, gradients_bytes=GIB, optimizer_bytes=GIB)
    usage = Usage(
        peak_gib * GIB, peak_gib * GIB, peak_gib * GIB, could_have_bytes=16 * GIB, total_bytes=16 * GIB
    )
    assert batch_size_that_fits(batch_size, asked_gib * GIB, usage, static, had_fitted) == expected


def test_the_largest_variables_by_name() -> None:
    model = torch.nn.Linear(100, 100, bias=False)
    model(torch.ones(1, 100)).sum().backward()
    weights = torch.ones(1000, 10)
    named = {
        "number": 3,
        "weights": weights,
        "row": weights[0],  # keeps all of it, and costs nothing more
        "model": model,
        "log": [{"loss": torch.ones(10, dtype=torch.float64)}, {"loss": torch.ones(10, dtype=torch.float64)}],
        "array": np.ones((2, 30), np.float32)[:1],
        "on_no_device": torch.empty(10**6, device="meta"),
    }
    assert largest(named.items(), CPU) == [
        ("model: Linear with 2 tensors", 80_000),
        ("weights: 1000 x 10, float32", 40_000),
        ("array: 1 x 30, float32", 240),
        ("log: list with 2 tensors", 160),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 8])
def test_a_need_computed_without_values_counts_what_fsdp_gathers(num_ranks: int) -> None:
    """As the plan does, which follows every tensor."""
    config = without_exchange(train_config("diffusion", data="phantoms", batch_size=1, strategy="fsdp"))
    planned_bytes = sum(fake_steps.parts(config, torch.device("cpu"), num_ranks).values())
    need = fake_steps.need_of(config, num_ranks)
    assert need is not None
    assert need.fixed_bytes + need.sample_bytes == pytest.approx(planned_bytes, rel=0.1)
