"""Files that are there whole or not at all, and those that are found in a folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from nbgpu.machine.files import files_below, write_whole


def test_it_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "what.json"
    write_whole(path, "first")
    write_whole(path, b"second", outlasts_power_cut=True)
    assert path.read_text() == "second"
    assert [*tmp_path.iterdir()] == [path]


def test_whoever_had_opened_the_one_before_reads_it_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "what.json"
    write_whole(path, "first")
    with path.open() as before:
        write_whole(path, "second")
        assert before.read() == "first"


def test_the_owner_alone_reads_what_is_secret(tmp_path: Path) -> None:
    write_whole(tmp_path / "key", "x", mode=0o600)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_text_that_is_no_utf_8_is_written_all_the_same(tmp_path: Path) -> None:
    write_whole(tmp_path / "page", os.fsdecode(b"caf\xe9"))
    assert (tmp_path / "page").read_text() == "caf\\udce9"


def test_on_a_full_disk_the_one_before_stays_and_nothing_else(small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(2**16)
    write_whole(disk / "what", "first")
    with pytest.raises(OSError) as caught:
        write_whole(disk / "what", b"x" * 2**17)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(disk / "what"))
    assert (disk / "what").read_text() == "first"
    assert [*disk.iterdir()] == [disk / "what"]


def test_the_error_names_the_file_that_the_caller_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(tmp_path / "gone" / "what", "x")
    assert caught.value.filename == str(tmp_path / "gone" / "what")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError, match=r"folder'$"):
        write_whole(tmp_path / "folder", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_folder_with_several_links_is_searched_once_under_its_own_name(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    for folder in (root / "own", root / ".hidden", outside):
        folder.mkdir(parents=True)
        (folder / "scan").touch()
        (folder / ".scan").touch()
    for name, target in {"a": root / "own", "b": outside, "c": outside, "d": root}.items():
        (root / name).symlink_to(target)
    (root / "dangling").symlink_to(tmp_path / "nothing")
    assert sorted(files_below(root)) == [root / "b" / "scan", root / "own" / "scan"]
