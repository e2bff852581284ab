"""Tab in a real bash, zsh and fish completes `nbgpu`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import conftest
import pexpect
import pytest

from nbgpu.cli import completion

TYPED = {
    "nbgpu tra": "train",
    "nbgpu train auto": "train autoencoder",
    "nbgpu train autoencoder --batch-s": "train autoencoder --batch-size",
    "nbgpu train survival --preset m": "train survival --preset mace",
    "nbgpu train survival --amp bf": "train survival --amp bf16",
    "nbgpu train my_recipe.py --accum": "train my_recipe.py --accumulate",
    "nbgpu sweep survival --para": "sweep survival --parallel",
    "nbgpu scaling diffusion --repe": "scaling diffusion --repeats",
    "nbgpu predict folder --checkpoint b": "predict folder --checkpoint best",
    "nbgpu convert a.yml --ou": "convert a.yml --out",
    "nbgpu doctor --j": "doctor --json",
    "nbgpu completion f": "completion fish",
    "nbgpu report fol": "report folder",
}
"""What stands on the line at Tab, and what nbgpu then gets."""


def _require(shell: str) -> None:
    if shutil.which(shell) is None:
        reason = f"there is no {shell} here: apt-get install {shell}"
        if conftest.IN_CI:
            pytest.fail(f"{reason} (with CI=true this is a failure)", pytrace=False)
        pytest.skip(reason)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the shell is, with a folder whose name can be completed."""
    (tmp_path / "folder").mkdir()
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(("shell", "plain"), [("bash", "--norc"), ("zsh", "-f")])
def test_tab_completes_what_is_typed(shell: str, plain: str, folder: Path) -> None:
    _require(shell)
    (folder / "script").write_text(completion.script(shell))
    surroundings = {"HOME": str(folder), "PATH": "/usr/local/bin:/usr/bin:/bin", "TERM": "dumb", "PS1": "> "}
    session = pexpect.spawn(
        shell, [plain, "-i"], encoding="utf8", timeout=180, dimensions=(50, 200), env=surroundings, cwd=folder
    )
    try:
        # A stand-in for the command, which says with what it was called.
        session.sendline('source ./script; nbgpu() { echo "CALLED<$*>"; }; echo IS REA""DY')
        session.expect("IS READY")
        for typed, called in TYPED.items():
            session.send(f"{typed}\t\r")
            session.expect(r"CALLED<(.*?)>")
            assert session.match[1].strip().rstrip("/") == called
        session.sendline("exit")
        session.expect(pexpect.EOF)
    finally:
        session.close(force=True)


def test_fish_completes_what_is_typed(folder: Path) -> None:
    _require("fish")
    (folder / "script").write_text(completion.script("fish"))
    # With -C fish prints what it would offer for a line.
    asked = "; ".join(f"echo @; complete -C '{typed}'" for typed in TYPED)
    said = subprocess.run(
        ["fish", "--no-config", "-c", f"source ./script; {asked}"],
        cwd=folder,
        env={"HOME": str(folder), "PATH": "/usr/local/bin:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    )
    assert said.stderr == ""
    offered = [
        [line.partition("\t")[0] for line in block.splitlines()] for block in said.stdout.split("@\n")[1:]
    ]
    for (typed, called), words in zip(TYPED.items(), offered, strict=True):
        # Of a folder fish offers the name with a slash.
        assert called.split()[-1] in [word.rstrip("/") for word in words], (typed, words)
