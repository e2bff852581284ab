"""What a step that was cut off has changed is put back once, and never over a state that came later."""

from __future__ import annotations

import torch
from torch import Tensor

from nbgpu.config import train_config
from nbgpu.engine.model.schedule import LearningRate
from nbgpu.engine.training.nonfinite import Guard
from nbgpu.engine.training.rank_model import RankModel
from nbgpu.recipes.survival.config import SurvivalConfig
from nbgpu.recipes.survival.recipe import Survival

CPU = torch.device("cpu")


def _statistics(model: RankModel) -> list[Tensor]:
    """The running statistics of BatchNorm."""
    return [buffer.clone() for buffer in model.state.model.buffers()]


def _equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(map(torch.equal, some, others))


def test_a_second_interruption_keeps_the_state_that_was_loaded_after_the_first() -> None:
    small = {"num_patients": 20, "widen_factor": 0.0625, "image_size": (8, 8, 8), "batch_size": 4}
    config = train_config("survival", **small, ema_decay=0.0, strategy="single", sync_batchnorm=False)
    assert isinstance(config, SurvivalConfig)
    recipe, rate = Survival(config), LearningRate(config, 1, 100, 10)
    model = RankModel(Guard(config, CPU), CPU)
    model.build(config, recipe)
    model.spread(config, recipe, rate, ())
    model.prepare(config, recipe, rate)
    before = _statistics(model)

    model.begin_step(config, recipe, 0, 10)
    recipe.loss(model.state.model, recipe.example(4))
    tensors, about = model.state.parts()
    of_another_rank = {name: tensor.clone() for name, tensor in tensors.items()}
    loaded = _statistics(model)
    assert not _equal(loaded, before)
    model.undo_step()
    assert _equal(_statistics(model), before)

    model.state.load(of_another_rank, about)
    model.undo_step()
    assert _equal(_statistics(model), loaded)
