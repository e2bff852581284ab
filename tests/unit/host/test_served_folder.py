"""What a host says that its ranks have written into the copy of a folder, and what it takes into it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from nbgpu.host.served_folder import ServedFolder
from nbgpu.protocol.served import MARK, Piece

MUCH = 2**20


@pytest.fixture
def served(tmp_path: Path) -> ServedFolder:
    return ServedFolder("/home/ann/runs/one", tmp_path)


def bring(served: ServedFolder, here: Path, max_bytes: int = MUCH) -> list[str]:
    """Bring all that is new to a folder, as the notebook's host does; return the checkpoints that came
    whole."""
    whole: list[str] = []
    while True:
        changes = served.changes(max_bytes, {})
        for piece in changes.pieces:
            path = here / piece.path
            path.parent.mkdir(parents=True, exist_ok=True)
            before = path.read_bytes() if piece.offset_bytes else b""
            assert len(before) == piece.offset_bytes
            path.write_bytes(before + piece.content)
        whole += changes.whole
        if not changes.num_bytes_left:
            return whole


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MARK
    }


def checkpoint(served: ServedFolder, step: int, size_bytes: int = 1000) -> Path:
    unfinished = served.copy / "checkpoints" / f"step-{step:08d}.1.unfinished"
    unfinished.mkdir(parents=True)
    for name in ("model.safetensors", "manifest.json"):
        (unfinished / name).write_bytes(os.urandom(size_bytes))
    return unfinished.rename(unfinished.with_name(f"step-{step:08d}"))


@pytest.mark.parametrize("max_bytes", [1, 7, 64, MUCH])
def test_files_that_grow_come_piece_by_piece_and_once(
    served: ServedFolder, tmp_path: Path, max_bytes: int
) -> None:
    for number in range(5):
        with (served.copy / "rank0.jsonl").open("a") as file:
            file.write(f'{{"seq": {number}}}\n')
        (served.copy / "profile").mkdir(exist_ok=True)
        with (served.copy / "profile" / "trace").open("ab") as file:
            file.write(bytes([number]) * 50)
        bring(served, tmp_path / "here", max_bytes)
        assert files(tmp_path / "here") == files(served.copy)
        assert not served.changes(max_bytes, {}).pieces


def test_half_a_line_is_not_sent(served: ServedFolder, tmp_path: Path) -> None:
    records = served.copy / "rank0.jsonl"
    records.write_bytes(b'{"seq": 0}\n{"se')
    bring(served, tmp_path / "here")
    assert files(tmp_path / "here") == {"rank0.jsonl": b'{"seq": 0}\n'}
    # A rank that takes the place of a killed one cuts it off.
    os.truncate(records, 11)
    with records.open("ab") as file:
        file.write(b'{"seq": 1, "kind": "state"}\n')
    bring(served, tmp_path / "here")
    assert files(tmp_path / "here") == files(served.copy)


def test_files_that_are_written_again_come_again(served: ServedFolder, tmp_path: Path) -> None:
    table, info = served.copy / "metrics.csv", served.copy / "run_info.json"
    table.write_text("step,rank\n1,0\n")
    info.write_text("a" * 400)
    bring(served, tmp_path / "here", 32)
    table.write_text("step,rank,loss\n1,0,\n2,0,3\n")
    (served.copy / ".new").write_text("b" + "a" * 399)
    (served.copy / ".new").rename(info)
    bring(served, tmp_path / "here", 32)
    assert files(tmp_path / "here") == files(served.copy)


@pytest.mark.parametrize("max_bytes", [100, MUCH])
def test_a_checkpoint_is_told_of_once_all_of_it_was_sent(
    served: ServedFolder, tmp_path: Path, max_bytes: int
) -> None:
    checkpoint(served, 4)
    (served.copy / "best.json").write_text("4")
    first = served.changes(max_bytes, {})
    assert first.whole == (["checkpoints/step-00000004"] if max_bytes == MUCH else [])
    assert "best.json" not in [piece.path for piece in first.pieces]
    served = ServedFolder("/home/ann/runs/one", tmp_path)
    assert bring(served, tmp_path / "here", max_bytes) == ["checkpoints/step-00000004"]
    bring(served, tmp_path / "here", max_bytes)
    assert files(tmp_path / "here") == files(served.copy)


def test_what_is_not_complete_is_not_sent(served: ServedFolder) -> None:
    unfinished = served.copy / "checkpoints" / "step-00000008.2.unfinished"
    unfinished.mkdir(parents=True)
    (unfinished / "model.safetensors").write_bytes(b"half")
    (served.copy / ".report.html.a1b2").write_bytes(b"half")
    assert not served.changes(MUCH, {}).pieces


def test_a_checkpoint_that_is_removed_on_its_way_is_told_of(served: ServedFolder) -> None:
    gone = checkpoint(served, 4)
    assert served.changes(100, {}).num_bytes_left
    shutil.rmtree(gone)
    checkpoint(served, 8)
    assert served.changes(100, {}).gone == ["checkpoints/step-00000004"]
    assert served.changes(MUCH, {}).whole == ["checkpoints/step-00000008"]


def test_what_could_not_be_written_is_sent_again(served: ServedFolder) -> None:
    checkpoint(served, 4)
    (served.copy / "rank0.jsonl").write_bytes(b"1\n2\n")
    assert served.changes(MUCH, {}).whole
    again = served.changes(MUCH, {"rank0.jsonl": 2, "checkpoints/step-00000004/manifest.json": 0})
    assert [(piece.path, piece.offset_bytes) for piece in again.pieces] == [
        ("rank0.jsonl", 2),
        ("checkpoints/step-00000004/manifest.json", 0),
    ]
    assert again.whole == ["checkpoints/step-00000004"]


def test_what_was_put_there_is_not_sent_back(served: ServedFolder) -> None:
    assert served.put(Piece("run.toml", 0, b"[train]", True)) == 7
    assert served.put(Piece("commands.jsonl", 0, b"1\n", True)) == 2
    assert served.put(Piece("commands.jsonl", 2, b"2\n", True)) == 4
    assert served.put(Piece("commands.jsonl", 9, b"lost\n", True)) == 4
    assert files(served.copy) == {"commands.jsonl": b"1\n2\n", "run.toml": b"[train]"}
    assert not served.changes(MUCH, {}).pieces


@pytest.mark.parametrize("name", ["rank1.outcome.json", "metrics.csv"])
def test_a_file_that_is_taken_back_is_told_of(served: ServedFolder, name: str) -> None:
    (served.copy / name).write_text("{}")
    (served.copy / "rank1.jsonl").write_text("1\n")
    served.changes(MUCH, {})
    (served.copy / name).unlink()
    (served.copy / "rank1.jsonl").unlink()
    assert served.changes(MUCH, {}).gone == [name]
    assert served.changes(MUCH, {}).gone == []


def test_a_copy_that_is_being_removed_says_nothing_of_its_files(served: ServedFolder) -> None:
    (served.copy / "rank1.outcome.json").write_text("{}")
    served.changes(MUCH, {})
    served.remove()
    with pytest.raises(FileNotFoundError):
        served.changes(MUCH, {})


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/passwd", ""])
def test_nothing_is_written_beside_the_copy(served: ServedFolder, name: str) -> None:
    with pytest.raises(ValueError, match="no file in a served folder"):
        served.put(Piece(name, 0, b"", True))
