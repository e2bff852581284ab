"""The DistributedDataParallel objects that are alive in this process, with the arguments and the
communication hook of each.

An object is identified by the number of objects made before it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from nbgpu.engine.group import torch_private

_FAKE = "fake"
"""The backend of the group in which a rank that replaces a dead one runs the earlier cells again, alone."""
_numbers = itertools.count()
_made: WeakKeyDictionary[DistributedDataParallel, tuple[int, dict[str, Any]]] = WeakKeyDictionary()
"""For every DDP object that is alive: the number of objects made before it, and its arguments."""
_hooks: WeakKeyDictionary[DistributedDataParallel, tuple[Any, Any]] = WeakKeyDictionary()
"""The state and the communication hook that a person has registered; an object takes one."""


def note() -> None:
    """Wrap DDP's constructor and `register_comm_hook`, to record the arguments and the communication hook of
    every DDP object that is made from now on. With them the object can be made again on another group."""
    make = DistributedDataParallel.__init__
    register = DistributedDataParallel.register_comm_hook
    signature = inspect.signature(make)

    @functools.wraps(make)
    def make_and_note(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        """Construct a DDP object, and record its arguments."""
        make(self, *args, **kwargs)
        # Recorded only after the constructor: one that raises leaves no usable object.
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        del arguments["self"], arguments["module"]
        number, _ = _made.get(self, (next(_numbers), {}))
        _made[self] = number, arguments
        # A hook that the constructor has registered is DDP's own, as with mixed precision.
        _hooks.pop(self, None)
        if dist.get_backend() == _FAKE and not torch_private.has_comm_hook(self):
            # The reducer needs the result of each all_reduce, and the fake group gives none.
            # A lambda, because DDP checks annotations and does not understand them as strings.
            register(self, None, lambda _, bucket: sent_nowhere(bucket))

    @functools.wraps(register)
    def register_and_note(self: DistributedDataParallel, state: object, hook: Any) -> None:
        # In a fake group the object already has the one hook that DDP allows. The person's hook is registered
        # later, on the real group.
        if dist.get_backend() != _FAKE or self not in _made:
            register(self, state, hook)
        note_hook(self, state, hook)

    DistributedDataParallel.__init__ = make_and_note  # type: ignore[method-assign]
    DistributedDataParallel.register_comm_hook = register_and_note  # type: ignore[method-assign]


def note_hook(ddp: DistributedDataParallel, state: object, hook: Any) -> None:
    """Record the communication hook of a DDP object, unless it is one of nbgpu's own."""
    if not str(getattr(hook, "__module__", "")).startswith("nbgpu."):
        _hooks[ddp] = state, hook


def registered_hook(ddp: DistributedDataParallel) -> tuple[Any, Any] | None:
    """Return (state, hook) of the communication hook that a person has registered; None if there is none."""
    return _hooks.get(ddp)


def are_there() -> bool:
    """Return whether any DDP object is alive in this process."""
    return bool(_made)


def all_made() -> dict[DistributedDataParallel, tuple[int, dict[str, Any]]]:
    """Return the number and the constructor's arguments of every living DDP object, in the order in which
    they were made."""
    return dict(sorted(_made.items(), key=lambda item: item[1][0]))


def references() -> list[ref[DistributedDataParallel]]:
    """Return weak references to all DDP objects, to check whether other code still holds them."""
    return _made.keyrefs()


def next_number() -> int:
    """Return the number of the next DDP object. The count goes on behind it, until `set_next_number`."""
    return next(_numbers)


def set_next_number(number: int) -> None:
    """Set the number of the next DDP object."""
    global _numbers
    _numbers = itertools.count(number)


def forget(ddp: DistributedDataParallel) -> None:
    """Drop an object that is no longer used, so that it is not moved to a new group while it waits for the
    garbage collector."""
    _made.pop(ddp, None)


def lacks_gradients(message: str) -> bool:
    """Return whether a message is DDP's error that the loss did not use some parameters."""
    return "Expected to have finished reduction in the prior iteration" in message


def sent_nowhere(bucket: Any) -> torch.futures.Future[Tensor]:
    """Return the result of a communication hook that leaves a bucket as it is."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
