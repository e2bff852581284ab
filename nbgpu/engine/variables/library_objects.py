"""The person's objects of training libraries that divide the work by the number of ranks."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist

from nbgpu.engine.variables.persons_objects import is_a

_CLASSES = (
    ("accelerate", "Accelerator", "Accelerator(...), and all that its prepare(...) returned"),
    ("lightning.fabric", "Fabric", "Fabric(...), and all that its setup(...) returned"),
    ("lightning_fabric", "Fabric", "Fabric(...), and all that its setup(...) returned"),
    ("lightning.pytorch", "Trainer", "Trainer(...)"),
    ("pytorch_lightning", "Trainer", "Trainer(...)"),
    ("transformers.training_args", "TrainingArguments", "TrainingArguments(...)"),
    ("transformers.trainer", "Trainer", "Trainer(...)"),
)
"""Module, class, and the call that makes an object again."""

_noted: weakref.WeakSet[Any] = weakref.WeakSet()
"""Lightning's objects about which a warning was already printed."""


def how_to_make_again(variables: Mapping[str, Any]) -> list[str]:
    """Return a line of code for each library's object that must be made again for the new number of ranks.

    accelerate reads the number of ranks once in a process, so its state is reset as well: a new Accelerator
    would be made for the old number.
    """
    lines = [f"{name} = {call}" for name, _, _, call in _objects(variables)]
    if (state := sys.modules.get("accelerate.state")) is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
    return lines


def install(shell: Any) -> None:
    """Check the person's variables after each cell for objects that train on this rank alone."""
    shell.events.register("post_run_cell", lambda _: _warn_of_single_process_trainers(shell.user_ns))


def _warn_of_single_process_trainers(variables: Mapping[str, Any]) -> None:
    """Print a warning about each of Lightning's objects that is configured for a single process, once.

    Without a number of devices Lightning takes one process on the CPU, and its metrics are then those of one
    rank.
    """
    for name, value, module, call in _objects(variables):
        # The module of the value's own class is __main__ where a cell has made a subclass.
        is_single = "lightning" in module and value not in _noted and value.world_size == 1
        if is_single and dist.is_initialized() and dist.get_world_size() > 1:
            _noted.add(value)
            print(  # noqa: T201 - the cell's output
                f"{name} is configured for a single process, and each rank trains alone: pass devices=world_size and "
                f"strategy='ddp' to {call.partition('(')[0]}",
                file=sys.stderr,
            )


def _objects(variables: Mapping[str, Any]) -> Iterator[tuple[str, Any, str, str]]:
    """Yield (name, value, module of its class in `_CLASSES`, call that makes it again) for each variable that
    is an object of one of these classes."""
    for module, kind, call in _CLASSES:
        if module not in sys.modules:
            continue
        # Looked up without loading it: transformers loads a class when it is asked for.
        its_class = vars(sys.modules[module]).get(kind)
        if not isinstance(its_class, type):
            continue
        for name, value in list(variables.items()):
            # IPython keeps the values of cells under names such as _7.
            if is_a(value, its_class) and not name.startswith("_"):
                yield name, value, module, call
