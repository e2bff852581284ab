"""The learning rate of each step, and what it is multiplied by for larger batches."""

from __future__ import annotations

from typing import Any

import pytest

from nbgpu.config import TrainConfig
from nbgpu.engine.model.schedule import LearningRate
from nbgpu.errors import ConfigError


def rate(total_steps: int = 100, world_size: int = 1, **settings: Any) -> LearningRate:
    config = TrainConfig.checked(**{"lr": 0.1, "warmup_steps": 0, "steps": total_steps, **settings})
    return LearningRate(config, world_size, total_steps, steps_per_epoch=8)


def test_a_warm_up_in_epochs_has_their_steps() -> None:
    # An epoch has eight steps here.
    lr = rate(warmup_steps=None, warmup_epochs=0.5, schedule="constant")
    assert [lr.at(step) for step in range(5)] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
    with pytest.raises(ConfigError, match="warmup_steps=4 counts only with no warmup_epochs"):
        rate(warmup_steps=4, warmup_epochs=0.5)
    with pytest.raises(ConfigError, match="warmup_epochs=3 must be smaller than epochs=3"):
        rate(warmup_steps=None, warmup_epochs=3, epochs=3)


def test_the_warm_up_rises_in_equal_steps_to_the_peak() -> None:
    lr = rate(warmup_steps=4, schedule="constant")
    assert [lr.at(step) for step in range(6)] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


def test_cosine_ends_at_the_lowest_rate_and_is_half_way_in_the_middle() -> None:
    lr = rate(warmup_steps=20, schedule="cosine", min_lr=0.02)
    assert lr.at(20) == pytest.approx(0.1)
    assert lr.at(60) == pytest.approx(0.06)
    assert lr.at(100) == lr.at(500) == pytest.approx(0.02)


def test_step_multiplies_every_so_many_steps_down_to_the_lowest() -> None:
    lr = rate(schedule="step", lr_decay=0.1, lr_decay_every=10, warmup_steps=5, min_lr=5e-4)
    assert [lr.at(step) for step in (5, 14, 15, 25, 35)] == pytest.approx([0.1, 0.1, 0.01, 0.001, 5e-4])


def test_plateau_falls_where_the_loss_stays_and_remembers_it() -> None:
    lr = rate(schedule="plateau", lr_decay=0.5, plateau_patience=1, val_every=5)
    assert [lr.validated(loss) for loss in (1.0, 0.9, 0.95, 0.92)] == [False, False, False, True]
    assert lr.at(50) == pytest.approx(0.05)
    other = rate(schedule="plateau", lr_decay=0.5, plateau_patience=1, val_every=5)
    other.load_state(lr.state())
    assert [other.validated(loss) for loss in (0.91, 0.8, 0.85, 0.85)] == [False, False, False, True]
    assert other.at(50) == pytest.approx(0.025)


def test_other_schedules_pay_no_heed_to_validation() -> None:
    lr = rate(schedule="constant")
    assert not any(lr.validated(1.0) for _ in range(20))
    assert lr.at(99) == 0.1


@pytest.mark.parametrize(
    ("settings", "factor"),
    [
        ({}, 1),
        ({"lr_scaling": "linear", "lr_batch_size": 2}, 8),
        ({"lr_scaling": "sqrt", "lr_batch_size": 2}, 8**0.5),
        ({"lr_scaling": "linear", "lr_batch_size": 4}, 4),
    ],
)
def test_scaling_follows_the_samples_of_a_step(settings: dict[str, Any], factor: float) -> None:
    lr = rate(schedule="constant", batch_size=2, accumulate=2, world_size=4, **settings)
    assert lr.at(0) == pytest.approx(0.1 * factor)


@pytest.mark.parametrize("scaling", ["sqrt", "linear"])
@pytest.mark.parametrize("samples", [8, 24, 96])
def test_the_rate_depends_on_the_samples_of_a_step_and_on_nothing_else(scaling: str, samples: int) -> None:
    times = samples / 16
    expected = 0.1 * (times**0.5 if scaling == "sqrt" else times)
    shares = [
        (world_size, accumulate)
        for world_size in (1, 2, 4, 8)
        for accumulate in (1, 2, 3, 4)
        if samples % (world_size * accumulate) == 0
    ]
    for world_size, accumulate in shares:
        batch_size = samples // (world_size * accumulate)
        lr = rate(
            schedule="constant",
            batch_size=batch_size,
            accumulate=accumulate,
            world_size=world_size,
            lr_scaling=scaling,
            lr_batch_size=16,
        )
        assert lr.at(0) == pytest.approx(expected), (world_size, accumulate)


def test_a_scaling_that_does_not_know_its_base_is_refused() -> None:
    with pytest.raises(ConfigError, match="lr_scaling='linear' needs lr_batch_size"):
        rate(lr_scaling="linear")
