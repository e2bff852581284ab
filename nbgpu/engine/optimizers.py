"""An optimizer's state as named tensors and JSON, which can be written and sent without pickling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def state_of(optimizer: Optimizer) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """(tensors by 'index of the parameter.name', such as '3.exp_avg'; the parameter groups' settings)."""
    state = optimizer.state_dict()
    tensors = {
        f"{index}.{name}": value
        for index, values in state["state"].items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }
    return tensors, state["param_groups"]


def load_state(optimizer: Optimizer, tensors: Mapping[str, Tensor], groups: Sequence[dict[str, Any]]) -> None:
    """Fills an optimizer over the same parameters with what `state_of` gave."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": list(groups)})
