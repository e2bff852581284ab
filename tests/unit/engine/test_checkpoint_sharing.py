"""A checkpoint of rank 0's host on its way to a host that has a copy of the run's folder only."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from nbgpu.engine.checkpoints import sharing
from nbgpu.protocol import served
from nbgpu.run_folder.checkpoint_files import UNFINISHED

CONTENT = b"weights"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where rank 1 keeps the copy. What it receives is `CONTENT`."""
    monkeypatch.setattr(sharing.group, "membership", lambda: SimpleNamespace(rank=1, local_rank=0))
    monkeypatch.setattr(sharing.exchange, "broadcast_bytes", lambda *_, **__: CONTENT)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder / "step-00000004"


@pytest.mark.parametrize("rank_0_failed", [False, True])
def test_a_host_keeps_no_copy_of_what_rank_0_could_not_read(
    place: Path, monkeypatch: pytest.MonkeyPatch, rank_0_failed: bool
) -> None:
    monkeypatch.setattr(sharing.exchange, "gather_numbers", lambda own: [int(rank_0_failed), own])
    assert sharing._send_files(place, {"model.safetensors": len(CONTENT)}, writes=True) is None
    assert place.exists() is not rank_0_failed
    assert [path.name for path in place.parent.iterdir()] == ([] if rank_0_failed else [place.name])


def test_what_a_rank_left_that_was_killed_before_it_named_its_copy_is_replaced(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing.exchange, "gather_numbers", lambda own: [0, own])
    left = place.with_name(f"{place.name}{UNFINISHED}")
    left.mkdir()
    for name in ("left.safetensors", served.RECEIVED):
        (left / name).touch()
    assert sharing._send_files(place, {"model.safetensors": len(CONTENT)}, writes=True) is None
    assert {path.name for path in place.iterdir()} == {"model.safetensors", served.RECEIVED}
    assert (place / "model.safetensors").read_bytes() == CONTENT
