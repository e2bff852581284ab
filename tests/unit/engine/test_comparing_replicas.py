"""The numbers by which ranks compare their replicas of a model: the same for the same bits on every host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from nbgpu.engine.variables.replicas import _difference, _shapes_and_sums


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def differ(one: Tensor, other: Tensor) -> str:
    return _difference([_shapes_and_sums([one]), _shapes_and_sums([other])])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", [(1500, 1001), (3, 500_001)])
def test_hosts_with_other_processors_agree_on_equal_weights(shape: tuple[int, ...]) -> None:
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    by_host = []
    for num_threads in (1, 2, 4):
        torch.set_num_threads(num_threads)
        # Additions in another order stand for vectors of another width.
        by_host += [_shapes_and_sums([weights]), _shapes_and_sums([weights.t().contiguous().t()])]
    assert not _difference(by_host)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.bool,
    ],
)
def test_one_element_tells(dtype: torch.dtype) -> None:
    weights = torch.zeros(4, 3).to(dtype)
    other = weights.clone()
    other[2, 1] = 1
    assert not differ(weights, weights.clone())
    assert differ(weights, other) == "in value"
    assert not differ(torch.tensor(1).to(dtype), torch.tensor(1).to(dtype))
    assert not differ(weights[:0], other[:0])


def test_changes_that_cancel_each_other_tell() -> None:
    """As the gradients of the two biases before a softmax do."""
    assert differ(torch.tensor([0.1, 0.1]), torch.tensor([0.125, 0.075])) == "in value"


def test_one_bit_tells_in_a_large_tensor() -> None:
    weights = torch.ones(2**20 + 3)
    other = weights.clone()
    other[-1] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert differ(weights, other) == "in value"


def test_nan_is_equal_to_nan() -> None:
    assert not differ(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
