"""The values of the setting `gpus` that are not names of GPUs."""

from __future__ import annotations

import re

AUTO = "auto"
"""The GPUs that nobody uses."""
ALL = "all"
"""Every GPU that is visible, whoever uses it."""
NONE = "none"
"""CPU ranks."""
_FREE = "free:"
_WORDS = "'auto', 'all', 'none', 'free:N'"


def takes_free(gpus: str) -> bool:
    """Return whether the setting takes whichever GPUs are free: 'auto' or 'free:N'."""
    return gpus == AUTO or gpus.startswith(_FREE)


def num_free(gpus: str) -> int | None:
    """Return N of 'free:N'; None for every other value."""
    return int(gpus.removeprefix(_FREE)) if gpus.startswith(_FREE) else None


def require_valid(gpus: str) -> None:
    """Refuse a value that is neither one of those above nor a list of GPUs.

    Raises:
        ValueError: with a valid example.
    """
    names = [name.strip() for name in gpus.split(",")]
    if gpus.startswith(_FREE) and not re.fullmatch(r"free:[1-9][0-9]{0,2}", gpus):
        raise ValueError(f"{gpus!r}: write 'free:2' for two free GPUs")
    if len(names) > 1:
        odd = [name for name in names if name in (AUTO, ALL, NONE) or name.startswith(_FREE)]
        if odd:
            raise ValueError(f"{gpus!r}: {odd[0]!r} stands alone, or GPUs are named by number or UUID")
    elif gpus == "free":
        raise ValueError(
            f"'free' needs a number, such as 'free:2'; 'auto' takes all free GPUs. It takes {_WORDS}"
        )
