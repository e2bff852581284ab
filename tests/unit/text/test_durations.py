"""Lengths of time in words."""

from __future__ import annotations

import pytest

from nbgpu.text.durations import duration


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.012, "12 ms"),
        (4.23, "4.2 s"),
        (59.4, "59 s"),
        (200, "3 min 20 s"),
        (120, "2 min"),
        (7500, "2 h 5 min"),
        (3 * 86_400 + 4 * 3600, "3 d 4 h"),
    ],
)
def test_durations_are_said_as_people_say_them(seconds: float, words: str) -> None:
    assert duration(seconds) == words
