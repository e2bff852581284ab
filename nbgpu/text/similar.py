"""Suggestions for names that were written wrongly."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ' Did you mean batch_size?', with a space before it, or an empty text if no known name is like
    this one."""
    # Names are compared as people type them, who write batchsize, Batch_Size and batch-size.
    by_letters = {_letters(each): each for each in known}
    nearest = difflib.get_close_matches(_letters(name), by_letters, n=1, cutoff=0.75)
    return f" Did you mean {by_letters[nearest[0]]}?" if nearest else ""


def _letters(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
