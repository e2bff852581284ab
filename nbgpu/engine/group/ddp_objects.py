"""Which DistributedDataParallel objects live in this process, and what each was made with.

An object is told apart from others by how many were made before it.
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

_numbers = itertools.count()
_made: WeakKeyDictionary[DistributedDataParallel, tuple[int, dict[str, Any]]] = WeakKeyDictionary()
"""Of every DDP object that lives: how many were made before it, and what it was made with."""


def note() -> None:
    """From now on notes the arguments of every DDP object that is made."""
    make = DistributedDataParallel.__init__
    signature = inspect.signature(make)

    @functools.wraps(make)
    def make_and_note(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        arguments = dict(signature.bind(self, *args, **kwargs).arguments)
        del arguments["self"], arguments["module"]
        number, _ = _made.get(self, (next(_numbers), {}))
        _made[self] = number, arguments
        if dist.get_backend() == "fake":
            # The reducer wants a result of each exchange, and that group gives none.
            # A lambda, because DDP looks at annotations, and does not know them as strings.
            self.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer()))

    DistributedDataParallel.__init__ = make_and_note  # type: ignore[method-assign]


def are_there() -> bool:
    """Whether any DDP object lives in this process."""
    return bool(_made)


def all_made() -> dict[DistributedDataParallel, tuple[int, dict[str, Any]]]:
    """Of every DDP object that lives, in the order in which they were made: (how many were made before it, its arguments)."""
    return dict(sorted(_made.items(), key=lambda item: item[1][0]))


def references() -> list[ref[DistributedDataParallel]]:
    """Weak references to all of them: to look whether anything else holds them."""
    return _made.keyrefs()


def next_number() -> int:
    """Return how many objects were made, and leave that number out."""
    return next(_numbers)


def go_on_from(number: int) -> None:
    """Give the next object this number."""
    global _numbers
    _numbers = itertools.count(number)


def forget(ddp: DistributedDataParallel) -> None:
    """Says that an object is of no use any more, though it lives until the collector comes by: `move` leaves it."""
    _made.pop(ddp, None)


def _done(tensor: Tensor) -> torch.futures.Future[Tensor]:
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(tensor)
    return done
