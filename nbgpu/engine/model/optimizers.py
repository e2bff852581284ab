"""The optimizers, and their state as named tensors and JSON, which can be saved and sent without pickling."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from nbgpu.errors import ConfigError

# Engines start without the settings of training, which take a tenth of a second to import.
if TYPE_CHECKING:
    from nbgpu.config import TrainConfig

_SKIP_ON_DEVICE = (AdamW, Adam, SGD)
"""Optimizers whose fused step changes nothing where `found_inf` is 1."""


def make(config: TrainConfig, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> Optimizer:
    """Return the optimizer of the settings, fused: a fused optimizer can skip a step on the device
    (nonfinite.py).

    Args:
        config: the settings.
        parameters: the parameters, or groups of them as torch takes them.
    """
    lr, weight_decay = config.lr, config.weight_decay
    match config.optimizer:
        case "adamw":
            return AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=True)
        case "adam":
            return Adam(parameters, lr=lr, weight_decay=weight_decay, fused=True)
        case "sgd":
            sgd = SGD(parameters, lr=lr, momentum=config.momentum, weight_decay=weight_decay, fused=True)
            fill_momentum(sgd)
            return sgd


def fill_momentum(optimizer: Optimizer) -> None:
    """Set the momentum buffers of a fused SGD to zero.

    The fused step allocates them when it first runs, and leaves them uninitialised if it skips that step.
    """
    if not isinstance(optimizer, SGD):
        return
    for group in optimizer.param_groups:
        if group["momentum"] and group["fused"]:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def step_unless(optimizer: Optimizer, leave_out: Tensor) -> None:
    """Do a step of an optimizer, unless the step is to be left out.

    torch's fused optimizers decide on the device: they change nothing where `found_inf` is 1. Other
    optimizers cannot, and the host waits for the device before each of their steps.

    Args:
        optimizer: the optimizer, with gradients.
        leave_out: a bool on the device, the same on every rank.
    """
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    if type(optimizer) not in _SKIP_ON_DEVICE or not is_fused:
        if not bool(leave_out):
            optimizer.step()
        return
    # With cpu_offload the weights are in host memory, to which torch would copy `found_inf` without waiting
    # for the copy; `.to` waits.
    place = optimizer.param_groups[0]["params"][0].device
    optimizer.found_inf = leave_out.to(place, torch.float32)  # type: ignore[attr-defined]
    optimizer.step()
    del optimizer.found_inf  # type: ignore[attr-defined]


class OptimizerState(NamedTuple):
    """The state of an optimizer."""

    tensors: dict[str, Tensor]
    """By 'index of the parameter.name', such as '3.exp_avg'."""
    values: dict[str, Any]
    """Other values of the state, as JSON by the same kind of name: some optimizers count steps in an int."""
    groups: list[dict[str, Any]]
    """The settings of the parameter groups."""


def state_of(optimizer: Optimizer) -> OptimizerState:
    """Return the state of an optimizer.

    Raises:
        ConfigError: a part of it is neither a tensor nor JSON, or belongs to no parameter.
    """
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    refused = []
    for index, named in state["state"].items():
        if not isinstance(index, int) or not isinstance(named, Mapping):
            refused.append(f"{index!r}, which belongs to no parameter")
            continue
        for name, value in named.items():
            if isinstance(value, Tensor):
                tensors[f"{index}.{name}"] = value
            elif _is_json(value):
                values[f"{index}.{name}"] = value
            elif (what := f"{name!r}, a {type(value).__name__}") not in refused:
                refused.append(what)
    if refused:
        raise ConfigError(
            f"the state of the optimizer {type(optimizer).__name__} cannot be saved, and a run could not go on with it: it "
            f"holds {'; '.join(refused)}. Checkpoints take tensors, and numbers, texts and lists of those two, for each parameter"
        )
    return OptimizerState(tensors, values, state["param_groups"])


def load_state(optimizer: Optimizer, state: OptimizerState) -> None:
    """Load the result of `state_of` into an optimizer over the same parameters."""
    by_index: dict[int, dict[str, Any]] = {}
    for key, value in {**state.tensors, **state.values}.items():
        index, _, name = key.partition(".")
        by_index.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": by_index, "param_groups": list(state.groups)})


def unsaved_settings(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the names of the settings of parameter groups that no checkpoint can hold."""
    names = [
        name for group in groups for name, value in group.items() if name != "params" and not _is_json(value)
    ]
    return list(dict.fromkeys(names))


def _is_json(value: Any) -> bool:
    """Return whether a value can be written as JSON."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
