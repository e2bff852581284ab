"""The first words of a machine that lacks something, and the list of targets."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


def _make(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


def test_make_alone_lists_every_target_with_a_line() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    lines = _make().stdout.splitlines()
    assert [line.split()[1] for line in lines] == phony.split()
    assert all(len(line.split()) > 3 for line in lines)
    assert _make("help").stdout.splitlines() == lines


def _python_that(folder: Path, fails_at: str) -> Path:
    """A Python that fails at the call whose arguments contain `fails_at`."""
    path = folder / "python-of-this-test"
    path.write_text(f'#!/bin/sh\ncase "$*" in *{fails_at}*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    path.chmod(0o755)
    return path


def test_a_missing_python_is_told_with_what_to_install(tmp_path: Path) -> None:
    done = _make(f"VENV={tmp_path / 'venv'}", "PYTHON=no-such-python", "demo")
    assert done.returncode != 0
    assert "There is no no-such-python on this machine" in done.stdout
    assert "sudo apt-get install -y python3 python3-venv" in done.stdout


def test_an_old_python_is_told_with_how_to_name_another(tmp_path: Path) -> None:
    done = _make(f"VENV={tmp_path / 'venv'}", f"PYTHON={_python_that(tmp_path, 'version_info')}", "demo")
    assert done.returncode != 0
    assert "nbgpu needs 3.11 or newer" in done.stdout
    assert "make PYTHON=python3.12 demo" in done.stdout


def test_a_missing_venv_module_is_told_with_what_to_install(tmp_path: Path) -> None:
    done = _make(f"VENV={tmp_path / 'venv'}", f"PYTHON={_python_that(tmp_path, 'ensurepip')}", "demo")
    assert done.returncode != 0
    assert "sudo apt-get install -y python3-venv" in done.stdout
    assert not (tmp_path / "venv").exists()


def test_a_venv_that_fails_half_way_is_not_taken_for_a_whole_one(tmp_path: Path) -> None:
    done = _make(f"VENV={tmp_path / 'venv'}", f"PYTHON={_python_that(tmp_path, '-m')}", "demo")
    assert done.returncode != 0
    assert not (tmp_path / "venv").exists()


def test_what_is_installed_once_is_not_installed_again(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").symlink_to(sys.executable)
    first = _make("-n", f"VENV={venv}", "test").stdout
    steps = [line for line in first.splitlines() if line.startswith("echo")]
    assert [re.search(r"step \d of \d", step)[0] for step in steps] == [f"step {n} of 3" for n in (1, 2, 3)]  # type: ignore[index]
    assert first.count(" -m pip install ") == 3
    for ready in (".ready-for-use", ".ready-for-development"):
        (venv / ready).touch()
    assert _make("-n", f"VENV={venv}", "test").stdout == "bash tests/all.sh\n"


def test_the_checks_for_a_gpu_take_the_python_at_hand_and_set_nothing_up(tmp_path: Path) -> None:
    """On a borrowed machine there is no network."""
    python = tmp_path / "python-of-this-test"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    at_hand = (f"VENV={tmp_path / 'venv'}", f"PYTHON={python}")
    assert _make("gpu", *at_hand).stdout.splitlines() == [f"tests/gpu {number}" for number in range(1, 7)]
    assert _make("gpu", *at_hand, "SLICE=2", "ONLY=nccl_group nccl_stop", "REHEARSE=1").stdout == (
        "tests/gpu 2 nccl_group nccl_stop --rehearse\n"
    )
    assert _make("gpu-pages", *at_hand, "FROM=a b").stdout == "docs/generate_gpu.py a b\n"
    assert not (tmp_path / "venv").exists()
