"""Files of a served folder that come here in pieces."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nbgpu.client.engines.other_hosts.arriving_files import ArrivingFiles
from nbgpu.protocol.served import Piece


@pytest.fixture
def files(tmp_path: Path) -> ArrivingFiles:
    return ArrivingFiles(tmp_path)


def test_a_file_has_its_name_once_all_of_it_is_here(files: ArrivingFiles) -> None:
    path = files.folder / "profile" / "trace"
    assert files.write(Piece("profile/trace", 0, b"abc", False))
    assert not path.exists()
    assert files.write(Piece("profile/trace", 3, b"def", True))
    assert path.read_bytes() == b"abcdef"
    # It has grown, and is then written again.
    assert files.write(Piece("profile/trace", 6, b"ghi", True))
    assert files.write(Piece("profile/trace", 0, b"1", False))
    assert path.read_bytes() == b"abcdefghi"
    assert files.write(Piece("profile/trace", 1, b"2", True))
    assert path.read_bytes() == b"12"


def test_lines_are_here_at_once(files: ArrivingFiles) -> None:
    assert files.write(Piece("rank0.jsonl", 0, b"1\n", False))
    assert files.write(Piece("rank0.jsonl", 2, b"2\n", False))
    assert (files.folder / "rank0.jsonl").read_bytes() == b"1\n2\n"


def test_a_piece_without_those_before_it_is_not_written(files: ArrivingFiles) -> None:
    files.write(Piece("rank0.jsonl", 0, b"1\n", True))
    (files.folder / "rank0.jsonl").write_bytes(b"edited\n")
    assert not files.write(Piece("rank0.jsonl", 2, b"2\n", True))
    assert not files.write(Piece("rank1.jsonl", 2, b"2\n", True))
    assert not (files.folder / "rank1.jsonl").exists()


def test_a_checkpoint_has_its_name_once_all_of_it_is_here(files: ArrivingFiles) -> None:
    final = files.folder / "checkpoints" / "step-00000004"
    files.write(Piece("checkpoints/step-00000004/model.safetensors", 0, b"weights", True))
    files.write(Piece("checkpoints/step-00000004/manifest.json", 0, b"{}", True))
    assert not final.exists()
    files.complete("checkpoints/step-00000004")
    assert sorted(path.name for path in final.iterdir()) == ["manifest.json", "model.safetensors"]
    assert [path.name for path in final.parent.iterdir()] == ["step-00000004"]


def test_a_checkpoint_that_does_not_come_leaves_the_one_that_is_here(files: ArrivingFiles) -> None:
    name = "checkpoints/step-00000004"
    files.write(Piece(f"{name}/manifest.json", 0, b"1", True))
    files.complete(name)
    files.write(Piece(f"{name}/manifest.json", 0, b"2", True))
    files.drop(name)
    files.give_up()
    assert (files.folder / name / "manifest.json").read_bytes() == b"1"
    assert [path.name for path in (files.folder / "checkpoints").iterdir()] == ["step-00000004"]


def test_a_checkpoint_replaces_the_old_one_before_that_is_removed(
    files: ArrivingFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "checkpoints/step-00000004"
    manifest = files.folder / name / "manifest.json"
    files.write(Piece(f"{name}/manifest.json", 0, b"1", True))
    files.complete(name)
    files.write(Piece(f"{name}/manifest.json", 0, b"2", True))

    def be_killed(*_args: object, **_settings: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", be_killed)
        with pytest.raises(SystemExit):
            files.complete(name)
    assert manifest.read_bytes() == b"2"
    # What the killed process has left is in nobody's way.
    files.write(Piece(f"{name}/manifest.json", 0, b"3", True))
    files.complete(name)
    assert manifest.read_bytes() == b"3"
    assert [path.name for path in (files.folder / "checkpoints").iterdir()] == ["step-00000004"]


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/passwd", "link/passwd", ""])
def test_nothing_is_written_beside_the_folder(files: ArrivingFiles, name: str) -> None:
    (files.folder / "link").symlink_to("/etc")
    with pytest.raises(OSError, match=r"no file of this folder|is a link"):
        files.write(Piece(name, 0, b"", True))
