"""What a person has put on a DDP object, and what of it stays when the object is initialised again on a new
group."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from nbgpu.engine.group import ddp_objects, torch_private
from nbgpu.engine.variables import persons_objects
from nbgpu.engine.variables.persons_objects import is_a

_OF_EVERY_MODULE = tuple(vars(nn.Module()))
"""The attributes in which torch keeps the hooks, children, buffers, parameters and mode of a module."""
_SWITCHES = ("require_backward_grad_sync", "require_forward_param_sync")
"""Attributes of DDP that loops set by hand to accumulate gradients."""
_STEPS_TO_SETTLE = 2
"""After so many steps DDP has put its buckets into their last order."""


@dataclass(frozen=True)
class Attachments:
    """What was put on an object."""

    attributes: dict[str, Any]
    hook: tuple[Any, Any] | None
    """The state and the communication hook."""

    @property
    def name_of_hook(self) -> str:
        """The hook's name; empty where there is none."""
        if self.hook is None:
            return ""
        _, hook = self.hook
        is_function = is_a(hook, (FunctionType, MethodType, BuiltinFunctionType))
        return hook.__qualname__ if is_function else type(hook).__name__


def collect(ddp: DistributedDataParallel) -> Attachments:
    """Return what the person has put on an object, to be put back once the object is initialised again."""
    attributes = {name: vars(ddp)[name] for name in (*_OF_EVERY_MODULE, *_SWITCHES)}
    return Attachments(attributes, ddp_objects.hook_of(ddp))


def put_back(ddp: DistributedDataParallel, attachments: Attachments) -> None:
    """Put on an object what was on it before, except the communication hook."""
    # The very dicts of before: the handles with which a hook is removed refer to them.
    vars(ddp).update(attachments.attributes)


def register_hook(ddp: DistributedDataParallel, attachments: Attachments, before: Any) -> str:
    """Register the communication hook of before.

    Args:
        ddp: the object, on the new group.
        attachments: what was on it.
        before: the default group that has ended.

    Returns:
        A sentence for the person; empty if all is as before.
    """
    if attachments.hook is None:
        return ""
    state, hook = attachments.hook
    name = attachments.name_of_hook
    state = on_new_group(state, before)
    if any(group not in torch_private.living_groups() for group in _groups_of(state)):
        return f"its communication hook {name} is on a group of your own: make it and register the hook again"
    note = ""
    if _begin_compression_again(state):
        note = f"its communication hook {name} begins again: {_STEPS_TO_SETTLE} steps without compression, no error kept"
    ddp.register_comm_hook(state, hook)
    return note


def on_new_group(thing: Any, before: Any) -> Any:
    """Put the new default group in place of the one that has ended, if an object is it or has it as an
    attribute; return the object, or the group."""
    if before is None:
        return thing
    if thing is before:
        return dist.group.WORLD
    held = persons_objects.attributes(thing)
    held.update({name: dist.group.WORLD for name, value in held.items() if value is before})
    return thing


def has_group(thing: Any) -> bool:
    """Whether an object holds a process group."""
    return any(True for _ in _groups_of(thing))


def _groups_of(thing: Any) -> Iterator[dist.ProcessGroup]:
    for value in [thing, *persons_objects.attributes(thing).values()]:
        if is_a(value, dist.ProcessGroup):
            yield value


def _begin_compression_again(state: Any) -> bool:
    """Empty PowerSGD's memories, which belong to buckets that DDP has to find again; return whether there
    were any."""
    power_sgd = sys.modules.get("torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook")
    if power_sgd is None or not is_a(state, power_sgd.PowerSGDState):
        return False
    memories = (state.error_dict, state.p_memory_dict, state.q_memory_dict)
    had_any = any(memories)
    for memory in memories:
        memory.clear()
    state.iter = min(state.iter, state.start_powerSGD_iter - _STEPS_TO_SETTLE)
    return had_any
