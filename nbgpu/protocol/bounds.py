"""The range of numbers in messages and files. A number outside of it was damaged on its way, or forged."""

from __future__ import annotations

LATEST_TIME_S = 2.0**36
"""No time in seconds since the epoch is later than this one, which is in the year 4147."""
MAX_NUMBER = 2**53
"""No count is greater. A float represents every whole number up to this one."""


def is_time(value: object) -> bool:
    """Whether a value can be seconds since the epoch."""
    return type(value) in (float, int) and 0 <= value <= LATEST_TIME_S  # type: ignore[operator]
