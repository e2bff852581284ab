"""How nbgpu looks at a person's objects, whose code may raise, or never end.

None of them may keep the process group from being formed. So what torch keeps in an object is read past the
object's own methods, and where those are needed, `ask` says what went wrong and ends them after a while.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from types import FrameType
from typing import Any, TypeVar
from weakref import ref

from torch import Tensor, nn

_T = TypeVar("_T")

# As in interrupts.py: the functions of `signal` are slow.
_signal = import_module("_signal")

_PATIENCE_S = 10.0
_REPEAT_S = 0.5
"""How often code that has taken too long is interrupted, should it catch what is raised in it."""
_SIGNAL = signal.SIGRTMIN + 9
"""A signal reaches code that sleeps or waits for a lock. No program sends this one by itself."""

_give_up_s: float | None = None
"""When the question that is being asked has taken too long."""
_never_ending: dict[int, ref[Any]] = {}
"""Objects whose code did not end, by id: they are not asked a second time."""


class _OverdueError(BaseException):
    """Raised in code that takes too long, which may catch every Exception."""


def ask(about: Any, question: Callable[[], _T], patience_s: float = _PATIENCE_S) -> tuple[_T | None, str]:
    """Run a person's code, for which the other ranks wait. Call on the main thread.

    C code that hears no signal is not ended.

    Args:
        about: the object that is asked; None for several.
        question: calls the object's code; takes part in no collective.
        patience_s: how long the code may take.

    Returns:
        The answer, None where there is none, and why there is none; '' where there is one.
    """
    global _give_up_s
    too_long = f"its code had not ended after {patience_s:g} s"
    if about is not None and _never_ending.get(id(about), lambda: None)() is about:
        return None, too_long
    ended = threading.Event()
    watch = threading.Thread(
        target=_interrupt_until,
        args=(ended, threading.get_ident(), patience_s),
        name="nbgpu-patience",
        daemon=True,
    )
    _signal.signal(_SIGNAL, _raise_if_overdue)
    _signal.pthread_sigmask(signal.SIG_UNBLOCK, (_SIGNAL,))
    watch.start()
    _give_up_s = time.monotonic() + patience_s
    try:
        try:
            return question(), ""
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a person's code may raise what it likes
            return None, f"{type(error).__name__}: {error}"
        finally:
            _give_up_s = None
    except _OverdueError:
        _give_up_s = None
        if about is not None:
            _never_ending[id(about)] = ref(about)
        return None, too_long
    except Exception as error:  # noqa: BLE001 - its text could not be made
        return None, type(error).__name__
    finally:
        ended.set()


def _interrupt_until(ended: threading.Event, asking_thread: int, patience_s: float) -> None:
    if ended.wait(patience_s):
        return
    while True:
        signal.pthread_kill(asking_thread, _SIGNAL)
        if ended.wait(_REPEAT_S):
            return


def _raise_if_overdue(_: int, __: FrameType | None) -> None:
    # The signal may come when the question has just been answered.
    if _give_up_s is not None and time.monotonic() >= _give_up_s:
        raise _OverdueError


def allow(seconds: float) -> None:
    """Let the question that is being asked take so much longer."""
    global _give_up_s
    if _give_up_s is not None:
        _give_up_s += seconds


def is_a(value: Any, kind: type | tuple[type, ...]) -> bool:
    """Whether an object is of a class. isinstance would also ask it for a `__class__` of its own, as proxies
    have that make their object only when it is asked for."""
    return issubclass(type(value), kind)


def attributes(thing: Any) -> dict[str, Any]:
    """Return the dict of an object's attributes; an empty one where it has none."""
    try:
        by_name = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return {}
    return by_name if type(by_name) is dict else {}


def walk_modules(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a module and all below it, each once. One whose `__init__` did not call that of torch has
    none."""
    pending, seen = [module], {id(module)}
    while pending:
        yield (current := pending.pop())
        for child in attributes(current).get("_modules", {}).values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                pending.append(child)


def walk_parameters(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters of a module and of all below it."""
    return _walk_kinds(module, ("_parameters",))


def walk_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters and buffers of a module and of all below it."""
    return _walk_kinds(module, ("_parameters", "_buffers"))


def _walk_kinds(module: nn.Module, kinds: tuple[str, ...]) -> Iterator[Tensor]:
    for current in walk_modules(module):
        for kind in kinds:
            for tensor in attributes(current).get(kind, {}).values():
                if tensor is not None:
                    yield tensor
