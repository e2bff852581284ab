"""The findings of a check of the machine, each with a verdict and a remedy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "warn", "fail"]
"""'warn': nbgpu works, but slower, or not in every case. 'fail': nbgpu, or a device, does not work."""


@dataclass(frozen=True)
class Finding:
    """One line of `nbgpu doctor`."""

    check: str
    verdict: Verdict
    text: str
    fix: str = ""
    """What to do about it; empty where nothing needs to be done."""


def ok(check: str, text: str) -> Finding:
    """A finding about which nothing needs to be done."""
    return Finding(check, "ok", text)


def warn(check: str, text: str, fix: str) -> Finding:
    """A finding about something that works, but slower than it could, or not always."""
    return Finding(check, "warn", text, fix)


def fail(check: str, text: str, fix: str) -> Finding:
    """A finding about something that does not work."""
    return Finding(check, "fail", text, fix)
