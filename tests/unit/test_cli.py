"""The `nbgpu` command itself: what it says, its exit codes and its completion."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from nbgpu import cli
from nbgpu.cli import completion
from nbgpu.cli.catalogue import COMMANDS
from nbgpu.version import VERSION


def _exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_alone_it_lists_every_command_in_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main([])
    said = capsys.readouterr().out
    assert all(f"nbgpu {name}" in said for name in COMMANDS)
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        cli.main([name, "--help"])
    assert f"nbgpu {name}" in capsys.readouterr().out


def test_the_version_and_the_overview_import_no_library() -> None:
    code = (
        "import sys; from nbgpu import cli; cli.main(['--version']); cli.main([]); "
        "print({'torch', 'pydantic', 'tyro', 'rich'} & {*sys.modules})"
    )
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout.startswith(f"nbgpu {VERSION}\n")
    assert said.stdout.endswith("\nset()\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["trian"], "Did you mean train?"),
        (["train", "autoencodr"], "Did you mean autoencoder?"),
        (["sweep", "survivl"], "Did you mean survival?"),
        (["train", "autoencoder", "--batch-siz", "2"], "--batch-size"),
        (["completion", "zhs"], "Did you mean zsh?"),
        (["ps", "all"], "usage: nbgpu ps"),
    ],
)
def test_bad_usage_exits_with_2_and_names_the_nearest(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code(*arguments) == cli.BAD_USAGE
    assert told in capsys.readouterr().err


def test_a_refused_file_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code("predict", str(tmp_path / "none"), "--data", "x") == cli.FAILED
    assert "none" in capsys.readouterr().err


def test_a_recipe_is_found_by_the_name_of_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    cli.main(["new", "my_recipe"])
    assert _exit_code("train", "my_recipe", "--bad-flag") == cli.BAD_USAGE
    assert "my_recipe.py" in capsys.readouterr().out


def test_help_lists_what_matters_and_help_all_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    assert not _exit_code("train", "autoencoder", "--help")
    short = capsys.readouterr().out
    assert not _exit_code("train", "autoencoder", "--help-all")
    full = capsys.readouterr().out
    assert "--batch-size" in short
    assert "--bucket-mb" not in short
    assert all(flag in full for flag in completion.flags_of("autoencoder"))


def test_a_reader_that_stops_reading_gets_no_traceback() -> None:
    command = f"{sys.executable} -m nbgpu.cli train autoencoder --help-all | head -n 1"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert ended.stderr == ""


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("nbgpu tra", "train"),
        ("nbgpu train auto", "autoencoder"),
        ("nbgpu train autoencoder --batch-s", "--batch-size"),
        ("nbgpu completion f", "fish"),
    ],
)
def test_bash_completes(line: str, expected: str) -> None:
    words = " ".join(line.split())
    code = f"{completion.script('bash')}\nCOMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}}-1)); _nbgpu; echo ${{COMPREPLY[@]}}"
    ended = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert ended.stdout.split() == [expected]


def test_notebooks_are_copied_and_never_over_others(tmp_path: Path) -> None:
    cli.main(["notebooks", str(tmp_path / "lessons")])
    assert (tmp_path / "lessons" / "00_first_run.ipynb").is_file()
    assert _exit_code("notebooks", str(tmp_path / "lessons")) == cli.FAILED
