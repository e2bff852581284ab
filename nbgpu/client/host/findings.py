"""What a look at the machine has found: one thing, what it is worth, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]
"""'warn': works, but slower, or not in every case. 'fail': keeps nbgpu, or a device, from working."""


@dataclass(frozen=True)
class Finding:
    """One line of `nbgpu doctor`."""

    check: str
    verdict: Verdict
    text: str
    fix: str = ""
    """What to do; empty where there is nothing to be done."""


def ok(check: str, text: str) -> Finding:
    """Nothing to be done."""
    return Finding(check, "ok", text)


def warn(check: str, text: str, fix: str) -> Finding:
    """Works, but slower than it could, or not always."""
    return Finding(check, "warn", text, fix)


def fail(check: str, text: str, fix: str) -> Finding:
    """Does not work."""
    return Finding(check, "fail", text, fix)
