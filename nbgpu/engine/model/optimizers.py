"""The optimizers, and their state as named tensors and JSON, which can be saved and sent without pickling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

# Engines start without the settings of training, which take a tenth of a second to import.
if TYPE_CHECKING:
    from nbgpu.config import TrainConfig


def make(config: TrainConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Return the optimizer of the settings, fused: a fused optimizer can skip a step on the device
    (nonfinite.py)."""
    lr, weight_decay = config.lr, config.weight_decay
    match config.optimizer:
        case "adamw":
            return AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=True)
        case "adam":
            return Adam(parameters, lr=lr, weight_decay=weight_decay, fused=True)
        case "sgd":
            sgd = SGD(parameters, lr=lr, momentum=config.momentum, weight_decay=weight_decay, fused=True)
            if config.momentum:
                # The fused step allocates them when it first runs, and leaves them uninitialised if it skips
                # that step.
                for parameter in sgd.param_groups[0]["params"]:
                    sgd.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            return sgd


def state_of(optimizer: Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """Return (tensors by 'index of the parameter.name', such as '3.exp_avg'; the parameter groups'
    settings)."""
    state = optimizer.state_dict()
    tensors = {
        f"{index}.{name}": value
        for index, values in state["state"].items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }
    return tensors, state["param_groups"]


def load_state(optimizer: Optimizer, tensors: Mapping[str, Tensor], groups: Sequence[dict[str, Any]]) -> None:
    """Load the result of `state_of` into an optimizer over the same parameters."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": list(groups)})
