"""The optimizer of a model whose weights may learn at different rates, and its state for checkpoints.

Every parameter group of the optimizer has, in addition to torch's settings, a `name` and the `lr_factor` by
which the rate of a step is multiplied. A checkpoint names the state of a weight by the weight's position in
`model.parameters()` and not in the groups, so that a run can continue with other groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from nbgpu.config import TrainConfig
from nbgpu.engine.model import optimizers
from nbgpu.engine.model.optimizers import OptimizerState
from nbgpu.engine.workload.recipe import Grouping, Optimizing, ParameterGroup, Recipe
from nbgpu.errors import ConfigError
from nbgpu.protocol.records import LR_OF

_REST = "rest"
"""The name of the weights that are in none of the recipe's groups."""
_OF_THIS_RUN = ("params", "name", "lr_factor", "weight_decay")
"""The entries of a parameter group that come from this run and not from a checkpoint."""


def groups_of(config: TrainConfig, recipe: Recipe, model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameter groups of a run's optimizer, as torch takes them: those of the recipe, and one
    with all other weights."""
    groups = list(recipe.parameter_groups(model)) if isinstance(recipe, Grouping) else []
    named = {id(parameter) for group in groups for parameter in group.parameters}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in named]
    if rest or not groups:
        groups.append(ParameterGroup(_REST, rest))
    return [
        {
            "params": list(group.parameters),
            "name": group.name,
            "lr": config.lr * group.lr_factor,
            "lr_factor": group.lr_factor,
            "weight_decay": config.weight_decay if group.weight_decay is None else group.weight_decay,
        }
        for group in groups
    ]


class GroupedOptimizer:
    """The optimizer of a run's model: the recipe's own, or that of the settings.

    Args:
        config: the settings.
        recipe: names the groups, and may make the optimizer.
        model: the model on the device, sharded if the strategy shards it.
    """

    def __init__(self, config: TrainConfig, recipe: Recipe, model: nn.Module) -> None:
        groups = groups_of(config, recipe, model)
        from_recipe = recipe.optimizer(groups) if isinstance(recipe, Optimizing) else None
        self._is_own = from_recipe is not None
        """Whether the recipe has brought the optimizer."""
        self.optimizer: Optimizer = optimizers.make(config, groups) if from_recipe is None else from_recipe
        optimizers.fill_momentum(self.optimizer)
        self._can_be_saved = not self._is_own
        # Recorded now, because fsdp replaces the weights while it gathers them.
        self.parameters: Sequence[nn.Parameter] = list(model.parameters())
        places = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        self._places = [places[id(p)] for group in self.optimizer.param_groups for p in group["params"]]
        """For each of the optimizer's weights, its place among the model's."""

    # ---- the rate ----

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of a step; each group's is `lr` times its factor."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_factor"]

    def rates(self, lr: float) -> dict[str, float]:
        """Return the rates to record of a step: `lr`, and that of each group with a factor other than 1."""
        others = {
            f"{LR_OF}{group['name']}": lr * group["lr_factor"]
            for group in self.optimizer.param_groups
            if group["lr_factor"] != 1
        }
        return {"lr": lr, **others}

    def in_words(self) -> list[str]:
        """Return a note about the groups that do not learn at the run's rate, in a list; empty if all do."""
        factors = [
            f"{group['name']} at {group['lr_factor']:g} times it ({LR_OF}{group['name']})"
            for group in self.optimizer.param_groups
            if group["lr_factor"] != 1
        ]
        if not factors:
            return []
        others = [group["name"] for group in self.optimizer.param_groups if group["lr_factor"] == 1]
        groups = f"that of {', '.join(others)}" if others else "that of no group"
        return [f"the learning rate shown as lr is {groups}; {', '.join(factors)}"]

    def follow(self, config: TrainConfig, recipe: Recipe, model: nn.Module) -> None:
        """Continue with the factors and the weight decay of other settings."""
        groups = groups_of(config, recipe, model)
        present = [[id(p) for p in group["params"]] for group in self.optimizer.param_groups]
        if present != [[id(p) for p in group["params"]] for group in groups]:
            raise ConfigError(
                "the recipe's parameter groups are others with the new settings: their weights must stay the same during a run"
            )
        for group, new in zip(self.optimizer.param_groups, groups, strict=True):
            group["lr_factor"], group["weight_decay"] = new["lr_factor"], new["weight_decay"]

    # ---- the state ----

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the optimizer's state as (tensors, the rest as JSON).

        Keys are 'POSITION.NAME': the weight's position among the model's parameters, and the state's name.

        Raises:
            ConfigError: a part of the state cannot be saved.
        """
        tensors, values, groups = optimizers.state_of(self.optimizer)
        about = {
            "optimizer": groups,
            "optimizer_values": {self._key_with_position(key): value for key, value in values.items()},
            "optimizer_class": type(self.optimizer).__name__,
        }
        return {self._key_with_position(key): tensor for key, tensor in tensors.items()}, about

    def require_saveable(self) -> None:
        """Raise ConfigError after the first step if a checkpoint could not hold the state that the recipe's
        own optimizer has by then."""
        if not self._can_be_saved:
            self.state()
            self._can_be_saved = True

    def load_state(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Load the result of `state`, with tensors that are sharded as the model is.

        Rates and weight decay are those of this run's settings. What else an optimizer of the recipe keeps in
        its groups is taken from the state.

        Raises:
            ValueError: the state is that of another optimizer.
        """
        kind = type(self.optimizer).__name__
        if (other := about["optimizer_class"]) != kind:
            raise ValueError(f"its optimizer is {other}, and this run's is {kind}")
        groups = self.optimizer.state_dict()["param_groups"]
        stored = about["optimizer"]
        if len(stored) == len(groups):
            # An optimizer of the settings takes only the rate from the state. One of the recipe may keep more
            # in its groups, such as a count of steps.
            taken = [
                {name: value for name, value in group.items() if name not in _OF_THIS_RUN}
                if self._is_own
                else {"lr": group["lr"]}
                for group in stored
            ]
            groups = [{**group, **new} for group, new in zip(groups, taken, strict=True)]
        elif self._is_own:
            raise ValueError(
                f"its optimizer has {len(stored)} parameter groups, and this run's has {len(groups)}"
            )
        index_by_place = {place: index for index, place in enumerate(self._places)}

        def by_index(key: str) -> str:
            """Replace the weight's position in the model by its number in the optimizer."""
            place, _, name = key.partition(".")
            return f"{index_by_place[int(place)]}.{name}"

        state = OptimizerState(
            {by_index(key): tensor for key, tensor in tensors.items()},
            {by_index(key): value for key, value in about["optimizer_values"].items()},
            groups,
        )
        optimizers.load_state(self.optimizer, state)

    def _key_with_position(self, key: str) -> str:
        """Replace the number of the weight in the optimizer by its position among the model's parameters."""
        index, _, name = key.partition(".")
        return f"{self._places[int(index)]}.{name}"
