"""Tables of plain text."""

from __future__ import annotations

from nbgpu.text.tables import aligned


def test_columns_stand_below_one_another_and_lines_end_with_their_text() -> None:
    rows = [("rank", "memory", "state"), ("0", "1.5 GiB", ""), ("12", "800 MiB", "in a collective")]
    assert aligned(rows, right={1}) == [
        "rank   memory  state",
        "0     1.5 GiB",
        "12    800 MiB  in a collective",
    ]


def test_no_rows_are_no_lines() -> None:
    assert aligned([]) == []
