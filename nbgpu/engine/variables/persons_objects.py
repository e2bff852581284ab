"""Reads a person's objects, whose code may raise, or never end.

No such code may keep the process group from being formed. So the attributes in which torch keeps its data are
read without the object's own methods. Where these methods are needed, `run_limited` calls them, returns their
error as a text, and interrupts them after a time limit.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar
from weakref import ref

from torch import Tensor, nn

from nbgpu.machine.signals import c_signal

_T = TypeVar("_T")

_PATIENCE_S = 10.0
_REPEAT_S = 0.5
"""How often code that has taken too long is interrupted, because it may catch the error that is raised in
it."""
_SIGNAL = signal.SIGRTMIN + 9
"""The signal that interrupts the code, also while it sleeps or waits for a lock. No program sends this one by
itself."""

_deadline_s: float | None = None
"""The monotonic time at which the running code is interrupted; None if no code runs."""
_never_ending: dict[int, ref[Any]] = {}
"""Objects whose code did not end, by id: their code is not run a second time."""


class _OverdueError(BaseException):
    """Raised in code that takes too long. No Exception, because the code may catch these."""


def run_limited(owner: Any, code: Callable[[], _T], patience_s: float = _PATIENCE_S) -> tuple[_T | None, str]:
    """Run a person's code, for which the other ranks wait, with a time limit. Call on the main thread.

    A signal handler raises an error in the code after this time; C code that does not return to Python is not
    interrupted.

    Args:
        owner: the object whose code runs; None for several objects.
        code: calls the object's code; takes part in no collective.
        patience_s: the time in seconds that the code may take.

    Returns:
        (the result, ''), or (None, the reason why there is no result).
    """
    global _deadline_s
    too_long = f"its code had not ended after {patience_s:g} s"
    # The id of an object that has ended may be that of another one now, so the object itself is compared.
    if owner is not None and _never_ending.get(id(owner), lambda: None)() is owner:
        return None, too_long
    ended = threading.Event()
    watch = threading.Thread(
        target=_interrupt_until,
        args=(ended, threading.get_ident(), patience_s),
        name="nbgpu-patience",
        daemon=True,
    )
    # Set each time, because a cell may have replaced the handler or blocked the signal.
    c_signal.signal(_SIGNAL, _raise_if_overdue)
    c_signal.pthread_sigmask(signal.SIG_UNBLOCK, (_SIGNAL,))
    watch.start()
    _deadline_s = time.monotonic() + patience_s
    try:
        try:
            return code(), ""
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a person's code may raise what it likes
            return None, f"{type(error).__name__}: {error}"
        finally:
            _deadline_s = None
    except _OverdueError:
        _deadline_s = None
        if owner is not None:
            _never_ending[id(owner)] = ref(owner)
        return None, too_long
    except Exception as error:  # noqa: BLE001 - its text could not be made
        return None, type(error).__name__
    finally:
        ended.set()


def _interrupt_until(ended: threading.Event, thread: int, patience_s: float) -> None:
    """Send the signal to a thread, first after `patience_s` and then in short intervals, until its code has
    ended."""
    while not ended.wait(patience_s):
        signal.pthread_kill(thread, _SIGNAL)
        patience_s = _REPEAT_S


def _raise_if_overdue(_: int, __: FrameType | None) -> None:
    """Raise _OverdueError in the code that takes too long. Runs as the handler of `_SIGNAL` on the main
    thread."""
    # The signal may come when the code has just ended.
    if _deadline_s is not None and time.monotonic() >= _deadline_s:
        raise _OverdueError


def allow(seconds: float) -> None:
    """Give the code that `run_limited` runs this many more seconds, such as for sums over large tensors."""
    global _deadline_s
    if _deadline_s is not None:
        _deadline_s += seconds


def is_a(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Return whether an object is of a class. isinstance would also ask the object for its `__class__`, which
    proxies such as lazy modules compute by their own code."""
    return issubclass(type(value), kind)


def attributes(thing: Any) -> dict[str, Any]:
    """Return the dict of an object's attributes; an empty one where it has none."""
    try:
        by_name = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return by_name if type(by_name) is dict else {}


def walk_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and its submodules, each once, without their own methods. A module whose `__init__` did
    not call that of nn.Module has no submodules."""
    pending, seen = [module], {id(module)}
    while pending:
        yield (current := pending.pop())
        for child in attributes(current).get("_modules", {}).values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                pending.append(child)


def walk_parameters(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters of a module and of its submodules."""
    return walk_tensors(module, ("_parameters",))


def walk_tensors(module: nn.Module, kinds: tuple[str, ...] = ("_parameters", "_buffers")) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a module and of its submodules."""
    for current in walk_modules(module):
        for kind in kinds:
            for tensor in attributes(current).get(kind, {}).values():
                if tensor is not None:
                    yield tensor
