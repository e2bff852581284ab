"""Suggestions for misspelled names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return ' Did you mean batch_size?', with a space before it; empty if no candidate is similar."""
    # Case and separators are ignored, because people also write batchsize, Batch_Size and batch-size.
    by_letters = {_letters(candidate): candidate for candidate in candidates}
    nearest = difflib.get_close_matches(_letters(name), by_letters, n=1, cutoff=0.75)
    return f" Did you mean {by_letters[nearest[0]]}?" if nearest else ""


def _letters(name: str) -> str:
    """Return a name in lower case without separators."""
    return name.lower().replace("-", "").replace("_", "")
