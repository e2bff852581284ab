"""The loss of a microstructure: against the reference's numbers, by hand, and its gradient."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import REPOSITORY
from torch import Tensor

from nbgpu.engine.workload.shards import share_of
from nbgpu.recipes.microstructure.characterize import characterize
from nbgpu.recipes.microstructure.losses import NORMS, Loss
from nbgpu.recipes.microstructure.measure import Measure
from nbgpu.recipes.microstructure.objective import Objective

WEIGHTS = {"FFTCorrelations": 1.0, "Variation": 100.0}


def _field(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _target(*shape: int, measure: Measure) -> dict[str, Tensor]:
    return characterize((_field(*shape, seed=1) < 0.4).double(), [*WEIGHTS], measure)


def test_loss_and_gradient_of_a_volume_equal_the_references() -> None:
    expected = np.load(REPOSITORY / "tests" / "oracles" / "mcrpy.npz", allow_pickle=False)
    target = torch.from_numpy(expected["ms"]).double()[None]
    volume = torch.from_numpy(np.random.default_rng(7).normal(0.5, 0.1, (32, 32, 32)))[None]
    measure = Measure(limit_to=8)
    wanted = characterize(target, [*WEIGHTS], measure, multigrid=False)
    loss, gradient = Objective(Loss([wanted], WEIGHTS, measure))(volume)
    assert loss.item() == pytest.approx(float(expected["loss"]), abs=1e-10)
    np.testing.assert_allclose(gradient.numpy().ravel()[::61], expected["gradient"], rtol=0, atol=1e-10)


def test_the_norms_by_hand() -> None:
    difference = torch.tensor([[3.0, -4.0]], dtype=torch.float64)
    found = {name: norm(difference).item() for name, norm in NORMS.items()}
    assert found == {"MSE": 12.5, "SSE": 25, "RMS": pytest.approx(12.5**0.5), "L1": 7, "L2": 5}


@pytest.mark.parametrize("norm", [*NORMS])
def test_what_looks_as_it_should_has_no_loss_and_no_gradient(norm: str) -> None:
    """Roots have an infinite slope at 0, and no optimizer must see it."""
    measure = Measure(4)
    field = (_field(1, 16, 16) < 0.4).double()
    wanted = characterize(field, ["VolumeFractions"], measure)
    loss, gradient = Objective(Loss([wanted], {"VolumeFractions": 1.0}, measure, norm))(field)
    assert loss.item() == 0
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_weights_of_grids_and_descriptors_multiply_the_differences() -> None:
    """Two grids, one number each: sum of squares = (w d)^2 (1 + 2^2), because averaging keeps the share."""
    measure = Measure(4)
    wanted = characterize(torch.zeros(1, 16, 16, dtype=torch.float64), ["VolumeFractions"], measure)
    field = torch.full((1, 16, 16), 0.5, dtype=torch.float64)
    loss = Loss([wanted], {"VolumeFractions": 3.0}, measure, "SSE")
    assert loss(field[None]).item() == pytest.approx((3 * 0.5) ** 2 * 5)
    # Once halved, the field is on the target's second grid and has none below it.
    assert loss(field[None, :, :8, :8], coarser=1).item() == pytest.approx((3 * 0.5) ** 2)


def test_penalties_are_shares_of_the_loss() -> None:
    measure = Measure(4)
    plain = {"oor_multiplier": 0.0, "phase_sum_multiplier": 0.0}
    wanted = [_target(2, 16, 16, measure=measure)]
    slices = torch.full((1, 2, 8, 8), 0.75, dtype=torch.float64)
    energy = Loss(wanted, WEIGHTS, measure, **plain)(slices)
    whole = Loss(wanted, WEIGHTS, measure, phase_sum_multiplier=10.0)(slices)
    torch.testing.assert_close(whole, energy * (1 + 10 * 0.5**2))
    slices[:, 0] = 1.5
    energy = Loss(wanted, WEIGHTS, measure, **plain)(slices)
    whole = Loss(wanted, WEIGHTS, measure, oor_multiplier=10.0, phase_sum_multiplier=0.0)(slices)
    torch.testing.assert_close(whole, energy * (1 + 10 * 0.5**2 / 2))


@pytest.mark.parametrize("shape", [(2, 8, 10), (2, 6, 8, 10)])
def test_the_gradient_is_that_of_the_loss(shape: tuple[int, ...]) -> None:
    """Against finite differences: two phases, two grids, values outside 0..1, a volume that is no cube."""
    measure = Measure(2)
    objective = Objective(Loss([_target(2, 16, 16, measure=measure)], WEIGHTS, measure))
    field = _field(*shape) * 1.2 - 0.1
    _, gradient = objective(field)
    direction = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    step = 1e-6
    ahead, behind = (objective(field + sign * step * direction)[0].item() for sign in (1, -1))
    assert float((gradient * direction).sum()) == pytest.approx((ahead - behind) / (2 * step), rel=1e-6)


def test_each_direction_can_have_its_own_target() -> None:
    measure = Measure(4)
    volume = (_field(1, 8, 8, 8) < 0.4).double()
    own = characterize(volume, ["VolumeFractions"], measure)["VolumeFractions"]
    targets = [{"VolumeFractions": values} for values in own]
    loss, _ = Objective(Loss(targets, {"VolumeFractions": 1.0}, measure))(volume)
    shares = [volume.mean(dim=tuple(d for d in range(4) if d != across)) for across in (1, 2, 3)]
    expected = sum(float((share - share.mean()).square().sum()) for share in shares)
    assert loss.item() == pytest.approx(expected)


@pytest.mark.parametrize("num_slices", [1, 7, 8])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_each_slice_is_on_one_rank(num_slices: int, world_size: int) -> None:
    shares = [share_of(num_slices, rank, world_size) for rank in range(world_size)]
    assert [index for share in shares for index in share] == list(range(num_slices))
    assert max(map(len, shares)) == -(-num_slices // world_size)
