"""How a command line that was not understood is told."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UsageError(Exception):
    """The command line itself is wrong; the message says how it is meant."""


def nearest(word: str, known: Iterable[str]) -> str:
    """' Did you mean autoencoder?' for a word that is nearly a known one; else nothing."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""
