"""The one way in which tests make a rank fail."""

from __future__ import annotations

from typing import Literal

Action = Literal["raise", "kill", "segfault", "sleep", "hold_gil"]

_ACTIONS: dict[Action, str] = {
    "raise": "raise ValueError('on purpose')",
    "kill": "__import__('os').kill(__import__('os').getpid(), __import__('signal').SIGKILL)",
    "segfault": "__import__('os').kill(__import__('os').getpid(), __import__('signal').SIGSEGV)",
    "sleep": "__import__('time').sleep(600)",
    "hold_gil": "sum(range(4 * 10**8))",
}


def at(rank: int, action: Action) -> str:
    """A line of a distributed cell in which one rank does something bad, and the others nothing."""
    return f"if rank == {rank}: {_ACTIONS[action]}"
