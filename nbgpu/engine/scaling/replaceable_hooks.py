"""A communication hook in Python for DDP objects, which a person's own hook may still replace.

torch accepts one hook for each object. The one attached here averages gradients as DDP does without a hook.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from nbgpu.engine.group import ddp_objects, simulated_ddp, torch_private
from nbgpu.engine.group.simulated_ddp import Hook

_FAKE = "fake"


class _Replaceable:
    """A communication hook that averages as DDP does by itself, until `replace` sets another one.

    Args:
        group: the process group of the DDP object.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._chosen: tuple[Any, Hook] | None = None

    def replace(self, state: Any, hook: Hook) -> None:
        self._chosen = state, hook

    def send(self, bucket: Any) -> torch.futures.Future[Tensor]:
        if self._chosen is None:
            return simulated_ddp.average(self._group, bucket)
        state, hook = self._chosen
        return hook(state, bucket)


_hooks: WeakKeyDictionary[DistributedDataParallel, _Replaceable] = WeakKeyDictionary()
_is_installed = False


def attach_replaceable_hook(ddp: DistributedDataParallel) -> bool:
    """Attach a replaceable hook to a DDP object that has no communication hook.

    Returns:
        Whether the object has a hook in Python now; False if it has one in C++, chosen by a person.
    """
    if torch_private.has_comm_hook(ddp):
        return True
    if dist.get_backend(ddp.process_group) == _FAKE:
        return False
    _allow_replacement()
    hook = _Replaceable(ddp.process_group)
    _hooks.pop(ddp, None)
    try:
        # A lambda, because torch refuses a hook whose annotations are strings, as those of this module are.
        ddp.register_comm_hook(None, lambda _, bucket: hook.send(bucket))
    except RuntimeError:
        torch_private.forget_refused_hook(ddp)
        return False
    _hooks[ddp] = hook
    return True


def _allow_replacement() -> None:
    """Patch DDP's methods that register hooks, so that they replace a hook attached here."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    register = DistributedDataParallel.register_comm_hook

    @functools.wraps(register)
    def register_or_replace(self: DistributedDataParallel, state: Any, hook: Hook) -> None:
        """Register a hook or, where `attach` has put one on the object already, put it in the place of
        that."""
        attached = _hooks.pop(self, None)
        # A DDP object that starts over on another group has lost its hook.
        if attached is None or not torch_private.has_comm_hook(self):
            register(self, state, hook)
        else:
            attached.replace(state, hook)
            ddp_objects.note_hook(self, state, hook)

    DistributedDataParallel.register_comm_hook = register_or_replace  # type: ignore[method-assign]
    by_torch = torch_private.builtin_hooks_registrar()

    def register_builtin(self: DistributedDataParallel, kind: Any) -> None:
        if self in _hooks and torch_private.has_comm_hook(self):
            register_or_replace(self, self.process_group, simulated_ddp.in_python(kind))
        else:
            by_torch(self, kind)

    torch_private.replace_builtin_hooks(register_builtin)
