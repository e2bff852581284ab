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


def test_a_table_that_is_too_wide_is_turned_and_no_cell_is_cut() -> None:
    rows = [("network", "mean squared error", "EPE, nm"), ("fno", "1.93e-05", "0.00214"), ("copy", "", "0.5")]
    assert aligned(rows, right={1, 2}, width=40) == aligned(rows, right={1, 2})
    assert aligned(rows, right={1, 2}, width=30) == [
        "network fno",
        "  mean squared error  1.93e-05",
        "  EPE, nm             0.00214",
        "network copy",
        "  EPE, nm             0.5",
    ]
