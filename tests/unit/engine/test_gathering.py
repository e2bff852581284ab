"""Whose state the ranks of a run begin with. That they then have it is tried on real ranks, in
tests/faults/test_heal.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nbgpu.engine.checkpoints.saving import Saves
from nbgpu.engine.training import loop
from nbgpu.engine.training.loop import Gathered
from nbgpu.run_folder import checkpoint_files

NOTE = "goes on from the checkpoint of another run"


class OneCheckpoint(Saves):
    """Knows of one checkpoint, or of none."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def to_begin_with(self) -> tuple[Path | None, tuple[str, ...]]:
        return self._path, (NOTE,)


def gathered(
    monkeypatch: pytest.MonkeyPatch, positions: Sequence[Mapping[str, Any]], checkpoint: Path | None = None
) -> Gathered:
    monkeypatch.setattr("nbgpu.engine.group.exchange.gather", lambda own: list(positions))
    return loop.gather(positions[0], OneCheckpoint(checkpoint))


def test_all_take_the_state_of_the_rank_that_had_got_furthest(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The last one has come in the place of another, and has no state of any step.
    steps = [
        {"ready": True, "step": 6},
        {"ready": True, "step": 7},
        {"ready": True, "step": 7},
        {"ready": False, "step": 9},
    ]
    found = gathered(monkeypatch, steps, tmp_path)
    assert (found.source, found.step) == (1, 7)
    # A checkpoint is older than any state that a rank has.
    assert (found.checkpoint, found.notes) == (None, ())


def test_without_a_state_the_checkpoint_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / checkpoint_files.STATE).write_text(json.dumps({"step": 4}))
    found = gathered(monkeypatch, [{"ready": False, "step": 0}] * 2, tmp_path)
    assert (found.source, found.checkpoint, found.step) == (None, tmp_path, 4)
    assert found.notes == (NOTE,)


def test_without_both_the_run_begins_with_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found = gathered(monkeypatch, [{"ready": False, "step": 0}] * 2)
    assert (found.source, found.checkpoint, found.step) == (None, None, 0)
