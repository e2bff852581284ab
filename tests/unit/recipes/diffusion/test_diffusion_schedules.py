"""The times, predictions and steps of diffusion, against MONAI's schedulers where these can take them."""

from __future__ import annotations

import pytest
import torch
from monai.networks.schedulers import DDIMScheduler, DDPMScheduler
from monai.networks.schedulers.scheduler import Scheduler

from nbgpu.engine.model.randomness import Place
from nbgpu.recipes.diffusion.schedules import Noise, Prediction, Variance, antithetic, times

MONAI_NAMES = {"epsilon": "epsilon", "x0": "sample", "v": "v_prediction"}

SHAPE = (2, 1, 4, 4, 4)


def _in_float64(monai: Scheduler) -> None:
    """Its tables are float32, in which 1 - alphas_cumprod[0] has four digits. The formulas stay its own."""
    monai.betas = monai.betas.double()
    monai.alphas = 1 - monai.betas
    monai.alphas_cumprod = monai.alphas.cumprod(dim=0)


def _normal(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_each_schedule_has_as_many_times_as_it_says() -> None:
    assert times("uniform").tolist() == [0, *range(99, 1000, 100)]
    assert len(times("uniform")) == 11
    assert times("uniform-from-0").tolist() == list(range(0, 1000, 100))
    assert times("non-uniform").tolist() == [0, 199, 399, 599, 699, 799, 849, 899, 949, 999]
    assert times("all").tolist() == list(range(1000))
    assert times("uniform", 5, 100).tolist() == [0, 24, 49, 74, 99]
    with pytest.raises(ValueError, match="10 of 1000"):
        times("non-uniform", 12)


def test_times_of_a_batch_mirror_each_other() -> None:
    torch.manual_seed(0)
    drawn = antithetic(4000, 11, Place((0, 0), 0))
    assert (drawn.view(-1, 2).sum(dim=1) == 10).all()
    assert drawn.bincount(minlength=11).min() > 250
    assert len(antithetic(5, 11, Place((0, 0), 0))) == 5


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_step_has_the_same_pairs_of_times_however_it_is_cut(size: int) -> None:
    step = (5, 17)
    whole = antithetic(12, 11, Place(step, 0))
    assert (whole.view(-1, 2).sum(dim=1) == 10).all()
    parts = [antithetic(size, 11, Place(step, first)) for first in range(0, 12, size)]
    assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(antithetic(12, 11, Place((5, 18), 0)), whole)


@pytest.mark.parametrize("kind", ["epsilon", "x0", "v"])
def test_a_prediction_gives_back_image_and_noise(kind: Prediction) -> None:
    torch.manual_seed(0)
    x0, epsilon = torch.randn(2, 8, 1, 4, 4, 4, dtype=torch.float64)
    noise, t = Noise(), torch.tensor([0, 1, 99, 199, 500, 800, 998, 999])
    x_t = noise.add(x0, epsilon, t)
    got = noise.split(kind, noise.target(kind, x0, epsilon, t), x_t, t)
    torch.testing.assert_close(got, (x0, epsilon), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["epsilon", "x0", "v"])
@pytest.mark.parametrize("eta", [0.0, 0.7])
def test_ddim_goes_where_monai_goes(kind: Prediction, eta: float) -> None:
    """999, 899, ..., 99, which MONAI has with this offset."""
    monai = DDIMScheduler(1000, clip_sample=False, steps_offset=99, prediction_type=MONAI_NAMES[kind])
    monai.set_timesteps(10)
    assert monai.timesteps.tolist() == list(range(999, 0, -100))
    _in_float64(monai)
    noise, x_t, predicted, drawn = Noise(), _normal(0), _normal(1), _normal(2)
    for t in range(999, 0, -100):
        want, _ = monai.step(predicted, t, x_t, eta, torch.Generator().manual_seed(2))
        x0, epsilon = noise.split(kind, predicted, x_t, t)
        got = noise.ddim(x0, epsilon, t, t - 100, eta, drawn)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("variance", ["small", "large"])
@pytest.mark.parametrize("kind", ["epsilon", "x0", "v"])
def test_the_posterior_is_monais(kind: Prediction, variance: Variance) -> None:
    monai = DDPMScheduler(
        1000, variance_type=f"fixed_{variance}", clip_sample=False, prediction_type=MONAI_NAMES[kind]
    )
    _in_float64(monai)
    noise, x_t, predicted, drawn = Noise(), _normal(0), _normal(1), _normal(2)
    for t in (0, 1, 2, 10, 500, 999):
        want, _ = monai.step(predicted, t, x_t, torch.Generator().manual_seed(2))
        x0, _ = noise.split(kind, predicted, x_t, t)
        got = noise.posterior(x_t, x0, t, t - 1, variance, drawn)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_long_steps_of_the_posterior_are_those_of_ddim_with_as_much_noise() -> None:
    """With eta = 1 both draw from the same distribution, over any distance."""
    noise = Noise()
    x_t, x0, drawn = torch.randn(3, 2, 1, 4, 4, 4, dtype=torch.float64)
    for t, t_next in ((999, 949), (949, 599), (199, 0)):
        _, epsilon = noise.split("x0", x0, x_t, t)
        by_ddim = noise.ddim(x0, epsilon, t, t_next, 1.0, drawn)
        torch.testing.assert_close(
            by_ddim, noise.posterior(x_t, x0, t, t_next, "small", drawn), rtol=0, atol=1e-10
        )
