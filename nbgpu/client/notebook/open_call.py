"""The call that the cursor is in, read from text that is still being typed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise

_CALLEE = re.compile(r"((?:[A-Za-z_]\w*(?:\(\))?\.)*[A-Za-z_]\w*)\s*$")
_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)\s*")
_TEXT = re.compile(r"\s*[rR]?(\"|')(.*?)\1\s*", re.DOTALL)
_PAIRS = {")": "(", "]": "[", "}": "{"}


@dataclass
class _Bracket:
    kind: str
    begin: int
    commas: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class OpenCall:
    """A call whose closing bracket is behind the cursor, or not typed yet."""

    callee: str
    """What is called, such as 'cluster.train' or 'nbgpu.current().train'."""
    arguments: tuple[str, ...]
    """The text of the arguments before the one that the cursor is in."""
    typed: str
    """The text of that argument up to the cursor."""
    in_text: bool
    """Whether the cursor is in a string."""

    @property
    def first_text(self) -> str | None:
        """The first argument, if it is a string and the cursor is behind it."""
        found = _TEXT.fullmatch(self.arguments[0]) if self.arguments else None
        return found[2] if found else None

    @property
    def keywords(self) -> set[str]:
        """The names of the arguments that are given by name."""
        return {found[1] for each in self.arguments if (found := _KEYWORD.match(each))}

    @property
    def keyword(self) -> str:
        """The name of the argument that the cursor is in; empty where it has none yet."""
        found = _KEYWORD.match(self.typed)
        return found[1] if found else ""

    @property
    def begun_text(self) -> str:
        """The string that the cursor is in, up to the cursor."""
        return re.split(r"[\"']", self.typed)[-1] if self.in_text else ""


def open_call(text: str) -> OpenCall | None:
    """Return the innermost call that is open at the end of a text; None where there is none."""
    stack: list[_Bracket] = []
    place = 0
    text_begins = -1
    while place < len(text):
        char = text[place]
        if char in "\"'":
            quote = text[place : place + 3] if text[place : place + 3] in ('"""', "'''") else char
            end = _end_of_text(text, place + len(quote), quote)
            if end is None:
                text_begins = place
                break
            place = end
            continue
        if char == "#":
            line_end = text.find("\n", place)
            if line_end < 0:
                return None  # the cursor is in a comment
            place = line_end
            continue
        if char in "([{":
            stack.append(_Bracket(char, place))
        elif char in ")]}":
            if not stack or stack.pop().kind != _PAIRS[char]:
                stack.clear()
        elif char == "," and stack:
            stack[-1].commas.append(place)
        place += 1
    if not stack or stack[-1].kind != "(" or (found := _CALLEE.search(text[: stack[-1].begin])) is None:
        return None
    cuts = [stack[-1].begin, *stack[-1].commas]
    arguments = tuple(text[begin + 1 : end] for begin, end in pairwise(cuts))
    return OpenCall(found[1], arguments, text[cuts[-1] + 1 :], text_begins >= 0)


def _end_of_text(text: str, place: int, quote: str) -> int | None:
    """The place behind a string; None where it does not end, as when it is still being typed."""
    while place < len(text):
        if text[place] == "\\":
            place += 2
        elif text.startswith(quote, place):
            return place + len(quote)
        elif text[place] == "\n" and len(quote) == 1:
            return place  # a string that was never closed ends with its line
        else:
            place += 1
    return None
