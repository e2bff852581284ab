"""Sizes of memory as text."""

from __future__ import annotations

import math
import re

UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_WRITTEN = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[KMGTPE]iB|bytes|B)?", re.IGNORECASE)


def in_words(num_bytes: float) -> str:
    """Return a size as text: '512 bytes', '1.5 GiB'."""
    power = min(int(math.log(num_bytes, 1024)), len(UNITS) - 1) if num_bytes >= 1 else 0
    return f"{num_bytes / 1024**power:.{1 if power else 0}f} {UNITS[power]}"


def parse_size(text: str) -> int | float:
    """Parse '4GiB', '4096 MiB' or '4294967296' as bytes, and '0.5' as a share.

    Returns:
        An int for bytes, a float above 0 and at most 1 for a share.

    Raises:
        ValueError: the text is neither.
    """
    match = _WRITTEN.fullmatch(text.strip())
    if match is not None and (number := float(match["number"])) > 0:
        unit = (match["unit"] or "").lower()
        if not unit and number <= 1:
            return number
        power = next((i for i, name in enumerate(UNITS) if name.lower() == unit), 0)
        num_bytes: float = number * 1024.0**power
        if num_bytes.is_integer() or power:
            return round(num_bytes)
    raise ValueError(
        f"{text!r} is not an amount of memory. Give bytes (4294967296), a size (4096MiB, 4GiB), or a share above 0 and at "
        "most 1 (0.5)"
    )
