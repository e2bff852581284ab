"""The cells that a new engine runs again follow the ranks to other numbers."""

from __future__ import annotations

from nbgpu.client.state.history import CellHistory


def test_cells_follow_ranks_to_their_new_numbers() -> None:
    history = CellHistory()
    history.note(range(4), "first")
    history.note([2, 3], "second")
    history.renumber({2: 0, 3: 1})
    history.forget_newest([2, 3])
    assert history._cells == {0: ["first"], 1: ["first"]}
