"""Who else may put something in the place of a run's folder is known, and a foreign folder is not used."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path

import pytest

from nbgpu import RunError
from nbgpu.config import ClusterConfig, train_config
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.settling import SettledConfig

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "runs"
    path.mkdir(mode=0o700)
    return path


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o1777])
def test_nobody_else_may_rename_in_a_folder_of_ones_own_or_a_sticky_one(folder: Path, mode: int) -> None:
    folder.chmod(mode)
    (folder / "inner").mkdir()
    assert runs.who_may_rename(folder) == ""
    assert runs.who_may_rename(folder / "inner") == ""


def test_everybody_may_in_a_folder_that_all_can_write(folder: Path) -> None:
    (folder / "inner").mkdir()
    folder.chmod(0o777)
    told = f"every user of this machine ({folder} has mode drwxrwxrwx)"
    assert runs.who_may_rename(folder) == told
    assert runs.who_may_rename(folder / "inner") == told


def test_a_run_that_begins_in_such_a_folder_says_so(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = train_config("autoencoder", runs_dir=str(folder))
    runs.create(SettledConfig(config), ClusterConfig())
    assert caplog.messages == []
    folder.chmod(0o777)
    assert runs.create(SettledConfig(config), ClusterConfig()).parent == folder
    (said,) = caplog.messages
    assert said.startswith(
        f"every user of this machine ({folder} has mode drwxrwxrwx) may rename what is in runs_dir"
    )
    assert "take a folder that only you can write to" in said


def test_a_group_may_whose_members_a_directory_service_does_not_list(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.chmod(0o770)
    # The group of this user alone, as far as the local files say, in which this user is not either.
    assert runs.who_may_rename(folder) == ""
    local = [user for user in pwd.getpwall() if user.pw_uid != os.geteuid()]
    monkeypatch.setattr(pwd, "getpwall", lambda: local)
    assert runs.who_may_rename(folder).startswith("the group with gid ")


def test_a_group_may_that_is_not_the_private_one_of_this_user(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users of a directory service, who are not listed, may have the primary group `users`, too."""
    folder.chmod(0o770)
    known = grp.getgrgid(folder.stat().st_gid)
    shared = grp.struct_group(("users", known.gr_passwd, known.gr_gid, known.gr_mem))
    monkeypatch.setattr(grp, "getgrgid", lambda _: shared)
    assert runs.who_may_rename(folder).startswith(f"the group with gid {known.gr_gid} (")


@as_root
def test_a_group_and_an_owner_may(folder: Path) -> None:
    folder.chmod(0o770)
    os.chown(folder, 0, NOBODY)
    assert runs.who_may_rename(folder).startswith(f"the group with gid {NOBODY} (")
    os.chown(folder, NOBODY, 0)
    assert runs.who_may_rename(folder) == f"the owner of {folder} (uid {NOBODY})"


@as_root
def test_what_is_not_ones_own_is_refused(folder: Path, tmp_path: Path) -> None:
    runs.require_own(folder)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(RunError, match="is a link"):
        runs.require_own(tmp_path / "link")
    os.chown(folder, NOBODY, NOBODY)
    with pytest.raises(RunError, match=rf"belongs to another user \(uid {NOBODY}\)"):
        runs.require_own(folder)
