"""What numbers in messages and files can be: one that cannot was damaged on its way, or forged."""

from __future__ import annotations

LATEST_TIME_S = 2.0**36
"""No time is later: in the year 4147."""
MAX_NUMBER = 2**53
"""No count is greater: up to it a float has every whole number."""


def is_time(value: object) -> bool:
    """Whether a value can be seconds since the epoch."""
    return type(value) in (float, int) and 0 <= value <= LATEST_TIME_S  # type: ignore[operator]
