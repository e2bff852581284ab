"""Swapping pixels: what is kept exactly, and what falls."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from nbgpu.config import train_config
from nbgpu.errors import ConfigError
from nbgpu.recipes.microstructure.characterize import characterize
from nbgpu.recipes.microstructure.config import MicrostructureConfig
from nbgpu.recipes.microstructure.grids import decided, indicated
from nbgpu.recipes.microstructure.losses import Loss
from nbgpu.recipes.microstructure.measure import Measure
from nbgpu.recipes.microstructure.objective import Objective
from nbgpu.recipes.microstructure.recipe import Microstructure
from nbgpu.recipes.microstructure.sample import micrograph
from nbgpu.recipes.microstructure.swaps import at_random, swap

WEIGHTS = {"FFTCorrelations": 1.0, "Variation": 1.0}


def _loss(num_phases: int) -> Loss:
    measure = Measure(4)
    fractions = [0.35] if num_phases == 1 else [0.3, 0.25]
    target = micrograph((64, 64), 2.0, fractions, seed=1)
    return Loss([characterize(indicated(target, num_phases), [*WEIGHTS], measure)], WEIGHTS, measure)


def _start(num_phases: int, shape: tuple[int, ...]) -> Tensor:
    shares = [0.65, 0.35] if num_phases == 1 else [0.45, 0.3, 0.25]
    return indicated(at_random(torch.tensor(shares), shape, seed=0), num_phases)


@pytest.mark.slow
@pytest.mark.parametrize(("num_phases", "shape"), [(1, (16, 16, 16)), (3, (16, 12, 14)), (1, (20, 16))])
def test_swaps_lower_the_loss_and_keep_each_phase(num_phases: int, shape: tuple[int, ...]) -> None:
    loss, start = _loss(num_phases), _start(num_phases, shape)
    before = start.clone()
    told: list[tuple[Tensor, float]] = []
    ended = swap(loss, start, range(30), lambda *news: told.append(news), seed=0)
    assert ended == "all steps were done"
    assert torch.equal(start, before)
    losses = [float(Objective(loss)(start)[0]), *(value for _, value in told)]
    assert len(losses) == 31
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(losses))
    assert losses[-1] < 0.97 * losses[0]
    for field, value in told[::10]:
        assert value == pytest.approx(float(Objective(loss)(field)[0]), rel=1e-12)
        assert torch.equal(field.flatten(1).sum(dim=1), start.flatten(1).sum(dim=1))
        assert torch.equal(indicated(decided(field), num_phases), field)


def test_a_search_that_is_taken_up_swaps_what_it_would_have_swapped() -> None:
    loss, start = _loss(1), _start(1, (16, 16, 16))
    found = [start, start]

    def keep(place: int) -> object:
        return lambda field, value: found.__setitem__(place, field)

    swap(loss, start, range(12), keep(0), seed=3)  # type: ignore[arg-type]
    swap(loss, start, range(5), keep(1), seed=3)  # type: ignore[arg-type]
    swap(loss, found[1], range(5, 12), keep(1), seed=3)  # type: ignore[arg-type]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], start)


@pytest.mark.slow
def test_warm_steps_also_climb_and_cold_ones_do_not() -> None:
    loss, start = _loss(1), _start(1, (16, 16))
    losses: list[float] = []
    swap(loss, start, range(300), lambda _, value: losses.append(value), temperature=3.0, seed=0)
    climbs = [later > earlier for earlier, later in itertools.pairwise(losses)]
    assert sum(climbs[:50]) > 5
    assert sum(climbs[-50:]) < sum(climbs[:50])
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_a_search_ends_where_nothing_can_be_gained() -> None:
    picture = indicated(micrograph((16, 16), 2.0, [0.35], seed=1), 1)
    measure = Measure(4)
    own = Loss([characterize(picture, [*WEIGHTS], measure)], WEIGHTS, measure)
    ended = swap(own, picture, range(1000), lambda *_: None, seed=0)
    assert ended == "6400 swaps in a row lowered nothing"
    flat = torch.zeros(1, 16, 16, dtype=torch.float64)
    assert swap(own, flat, range(9), lambda *_: None, seed=0) == "all pixels are in one phase"


def test_pixels_at_random_have_the_shares_to_one_pixel() -> None:
    phases = at_random(torch.tensor([0.2, 0.301, 0.499]), (10, 100), seed=0)
    assert torch.bincount(phases.flatten()).tolist() == [200, 301, 499]
    assert phases.unique_consecutive().numel() > 400


@pytest.mark.slow
def test_drawn_slices_give_the_loss_and_gradient_on_average() -> None:
    loss = _loss(1)
    field = torch.rand(1, 16, 18, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = Objective(loss)(field)
    some = Objective(loss, num_drawn=6, seed=2)
    drawn = [some(field, step=step) for step in range(300)]
    assert float(torch.stack([value for value, _ in drawn]).mean()) == pytest.approx(
        float(whole[0]), rel=0.02
    )
    mean = torch.stack([gradient for _, gradient in drawn]).mean(dim=0)
    assert float((mean - whole[1]).norm() / whole[1].norm()) < 0.15
    assert float((drawn[0][1] - whole[1]).norm() / whole[1].norm()) > 0.5
    assert torch.equal(some(field, step=7)[1], drawn[7][1])
    every = Objective(loss, num_drawn=20)(field)
    assert torch.equal(every[0], whole[0])


def test_swaps_begin_with_the_shares_of_the_target_and_refuse_what_changes_them() -> None:
    settings = {"shape": (16, 16, 16), "limit_to": 4}
    config = train_config("microstructure", optimizer_type="simulatedannealing", **settings)
    assert isinstance(config, MicrostructureConfig)
    problem = Microstructure(config)
    problem.load()
    begun = problem.begin(0, None)
    assert float(begun.mean()) == pytest.approx(0.35, abs=1 / begun.numel() + 2e-4)
    after = train_config("microstructure", swap_steps=7, steps=5, **settings)
    assert isinstance(after, MicrostructureConfig)
    assert Microstructure(after).num_steps == [5, 7]
    with pytest.raises(ConfigError, match="keeps the number of pixels in each phase"):
        train_config("microstructure", optimizer_type="ytpost", multigrid_reconstruction=True)
    with pytest.raises(
        ConfigError, match="slices_per_step=4 counts only with optimizer_type other than 'lbfgs' or 'lbfgsb'"
    ):
        train_config("microstructure", slices_per_step=4)
    assert train_config("microstructure", slices_per_step=4, optimizer_type="adam")
