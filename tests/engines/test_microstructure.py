"""Microstructures on two real ranks: the same numbers as on one."""

from __future__ import annotations

import pytest
import torch

import nbgpu
from nbgpu.recipes.microstructure.characterize import characterize
from nbgpu.recipes.microstructure.losses import Loss
from nbgpu.recipes.microstructure.measure import Measure
from nbgpu.recipes.microstructure.objective import Objective

WEIGHTS = {"FFTCorrelations": 1.0, "Variation": 100.0}

ON_RANKS = """
from nbgpu.recipes.microstructure.losses import Loss
from nbgpu.recipes.microstructure.measure import Measure
from nbgpu.recipes.microstructure.objective import Objective

loss = Loss([target], {"FFTCorrelations": 1.0, "Variation": 100.0}, Measure(4))
found = Objective(loss, rank, world_size)(field)
"""


@pytest.mark.parametrize("shape", [(1, 16, 16, 16), (2, 9, 11, 13), (1, 16, 16)])
def test_two_ranks_find_the_loss_and_gradient_of_one(cluster2: nbgpu.Cluster, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    measure = Measure(4)
    picture = (torch.rand(shape[0], 32, 32, generator=generator) < 0.4).double()
    target = characterize(picture, [*WEIGHTS], measure)
    field = torch.rand(*shape, generator=generator, dtype=torch.float64)
    loss, gradient = Objective(Loss([target], WEIGHTS, measure))(field)
    cluster2.push(field=field, target=target)
    cluster2.execute(ON_RANKS)
    on_first, on_second = cluster2.pull("found", ranks="all").values()
    assert torch.equal(on_first[0], on_second[0])
    assert torch.equal(on_first[1], on_second[1])
    torch.testing.assert_close(on_first[0], loss, rtol=1e-12, atol=0)
    torch.testing.assert_close(on_first[1], gradient, rtol=0, atol=1e-12 * float(gradient.abs().max()))
