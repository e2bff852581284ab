"""Advice about lines of scripts for torchrun that fail in a cell.

In a script each process forms the group, picks its GPU and may start the other processes. In a notebook all
of this is done before the first cell. A sentence about what to write instead is added to errors that come
from such lines, and to no others.
"""

from __future__ import annotations

import linecache
import re
import sys
import weakref
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkServerProcess, SpawnProcess
from multiprocessing.process import BaseProcess
from traceback import extract_tb
from types import FunctionType, TracebackType
from typing import Any

from torch import multiprocessing
from torch.multiprocessing.spawn import start_processes

from nbgpu.engine.frames import called_collective, codes, is_library
from nbgpu.engine.group import ddp_objects, group

_NO_SUCH_GPU = (
    # With torch's build for CPUs, with no driver, with no GPU, and with fewer GPUs than were counted on.
    "Cannot access accelerator device when none is available",
    "Torch not compiled with CUDA enabled",
    "has no attribute '_cuda_setDevice'",
    "Found no NVIDIA driver",
    "No CUDA GPUs are available",
    "invalid device ordinal",
    "Invalid device id",
)
_PUTS_ON_A_DEVICE = re.compile(r"\.to\(|\.cuda\(|device")
_SPAWNS = "torch/multiprocessing/spawn.py"
_NOTEBOOK_LAUNCHER = "accelerate/launchers.py"
_ENDED = (
    "destroy_process_group has ended the group in this cell. Leave it out; the next cell has a group again."
)
_CALL_IT = "call the function itself, without notebook_launcher"
_BY_DDP = "pass devices=world_size and strategy='ddp'"
_LAUNCHERS: Mapping[str, str] = {
    "lightning": _BY_DDP,
    "lightning_fabric": _BY_DDP,
    "pytorch_lightning": _BY_DDP,
    "torch.distributed.elastic": _CALL_IT,
}
"""Packages that start the processes of a group from a notebook, and what to write in a cell instead."""

_started: weakref.WeakKeyDictionary[BaseProcess, str] = weakref.WeakKeyDictionary()
"""The name of the cell's function that a process with an empty interpreter is to call, by the process."""


_device = ""
"""The rank's device, as the variable `device` of cells shows it."""


def install(shell: Any, device: str) -> None:
    """Wrap the functions that start processes: record those that cells start, refuse those that would be
    ranks, and print at the end of a cell which of them could not begin.

    Args:
        shell: the engine's shell.
        device: the rank's device, such as 'cuda:1' or 'cpu'.
    """
    global _device
    _device = device
    for kind in (SpawnProcess, ForkServerProcess):
        kind.__init__ = _noting(kind.__init__)  # type: ignore[method-assign]
    multiprocessing.start_processes = _refusing_launchers(start_processes)  # type: ignore[attr-defined]
    shell.events.register("post_run_cell", _print_failed_processes)


def advice(error: BaseException, traceback: TracebackType | None) -> str:
    """Return a sentence that says what to write instead of a line of a script for torchrun that failed in a
    cell; empty if the error comes from any other line."""
    if not isinstance(error, Exception):
        return ""  # the person has stopped the cell
    message = str(error)
    if called_collective(codes(traceback)) == "init_process_group":
        if "initialize the default process group twice" in message:
            return (
                "The ranks are one process group already: leave init_process_group out. The group is there as `dist`, "
                "with `rank` and `world_size`."
            )
        if group.has_ended():
            return _ENDED
    if "Default process group has not been initialized" in message and group.has_ended():
        return _ENDED
    if any(code.co_filename.endswith(_SPAWNS) for code in codes(traceback)):
        return _about_spawned(message)
    if any(code.co_filename.endswith(_NOTEBOOK_LAUNCHER) for code in codes(traceback)):
        return f"The ranks are the processes that notebook_launcher starts in a notebook: {_CALL_IT}."
    if "needs to be called with a function that contains the code to launch in processes" in message:
        return f"The ranks are these processes: {_BY_DDP}."  # of Lightning's Fabric
    if ddp_objects.lacks_gradients(message):
        return (
            "DDP waits for the gradients of weights that this loss does not use. DistributedDataParallel(model, "
            "find_unused_parameters=True) goes on without them, and so does a run with find_unused_parameters=True."
        )
    if "device_ids and output_device arguments only work with" in message:
        return "Leave device_ids out: DistributedDataParallel takes the device on which the model is."
    if any(text in message for text in _NO_SUCH_GPU) and _PUTS_ON_A_DEVICE.search(_own_lines(traceback)):
        owned = "no GPU" if _device == "cpu" else f"the GPU {_device}"
        return f"This rank has {owned}: write .to(device). `device` is '{_device}' here, and a rank's own GPU where it has one."
    return ""


def _about_spawned(message: str) -> str:
    """Return a sentence for an error of mp.spawn whose processes should call a function of a cell, or make a
    group; empty for any other."""
    names = [name for process, name in _started.items() if _exit_code(process)]
    _started.clear()
    makes_a_group = "init_process_group" in message
    if not names and not makes_a_group:
        return ""
    called = f"call {names[0]}(rank, ...) itself" if names else "call the function itself"
    return f"The ranks are the processes that mp.spawn makes in a script: {called}, without mp.spawn."


def _own_lines(traceback: TracebackType | None) -> str:
    """Return the innermost lines of the person's own code in a traceback, as text; empty if there are
    none."""
    entries = [entry for entry in extract_tb(traceback) if not is_library(entry.filename)]
    if not entries or (first := entries[-1].lineno) is None:
        return ""
    last = entries[-1].end_lineno or first
    return "".join(linecache.getline(entries[-1].filename, number) for number in range(first, last + 1))


def _refusing_launchers(start: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap torch's `start_processes`, to refuse processes that a library would take for the ranks of a group.

    A forked process has the group of this rank, number and connections included. Its first collective would
    never end.
    """

    def start_or_refuse(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the processes, unless one of these libraries asks for it."""
        module = getattr(fn, "__module__", None) or ""
        for package, instead in _LAUNCHERS.items():
            if module == package or module.startswith(f"{package}."):
                raise RuntimeError(
                    f"{package} would start processes of its own here. The ranks are these processes: {instead}."
                )
        return start(fn, *args, **kwargs)

    return start_or_refuse


def _noting(begin: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of a process class that starts an empty interpreter, to record processes that are
    to call a function of a cell: such a process cannot import the function."""

    def begin_and_note(
        process: BaseProcess,
        group: None = None,
        target: Any = None,
        name: Any = None,
        args: Any = (),
        **rest: Any,
    ) -> None:
        """Construct a process object, and record the name of the cell's function that it is to call."""
        begin(process, group, target, name, args, **rest)
        # mp.spawn starts a function of its own, whose first argument is the person's.
        called = (
            args[0] if args and getattr(target, "__module__", "") == "torch.multiprocessing.spawn" else target
        )
        if isinstance(called, FunctionType) and called.__module__ == "__main__":
            _started[process] = called.__name__

    return begin_and_note


def _exit_code(process: BaseProcess) -> int | None:
    try:
        return process.exitcode
    except ValueError:  # the person has closed it
        return 0


def _print_failed_processes(_: Any) -> None:
    """Print a hint about recorded processes that have ended with an error: they print their own tracebacks
    elsewhere, and the cell may have succeeded."""
    if not _started:
        return
    ended = {process: name for process, name in _started.items() if _exit_code(process) is not None}
    for process in ended:
        del _started[process]
    if failed := sorted({name for process, name in ended.items() if (_exit_code(process) or 0) > 0}):
        named = ", ".join(failed)
        print(  # noqa: T201 - the cell's output
            f"{named}: a process that is spawned cannot find a function of a cell. To train, start none: the ranks are the "
            f"processes, and {failed[0]}(rank, ...) is called on each",
            file=sys.stderr,
        )
