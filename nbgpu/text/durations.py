"""Durations as text."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return a duration as text: '12 ms', '4.2 s', '45 s', '3 min 20 s', '2 h', '1 d 4 h'."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, rest_min = divmod(minutes, 60)
    days, rest_h = divmod(hours, 24)
    if days:
        return _two(days, "d", rest_h, "h")
    if hours:
        return _two(hours, "h", rest_min, "min")
    return _two(minutes, "min", rest_s, "s") if minutes else f"{rest_s} s"


def _two(count: int, unit: str, rest: int, smaller_unit: str) -> str:
    return f"{count} {unit} {rest} {smaller_unit}" if rest else f"{count} {unit}"
