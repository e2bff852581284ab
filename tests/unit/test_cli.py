"""The `nbgpu` command itself: what it says, its exit codes and its completion."""

from __future__ import annotations

import contextlib
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPOSITORY

from nbgpu import cli
from nbgpu.cli import command_flags, completion
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
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=180
    )
    assert said.stdout.startswith(f"nbgpu {VERSION}\n")
    assert said.stdout.endswith("\nset()\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["trian"], "Did you mean train?"),
        (["autoencodr"], "Did you mean train autoencoder?"),
        (["--verison"], "Did you mean --version?"),
        (["train", "autoencodr"], "Did you mean autoencoder?"),
        (["sweep", "survivl"], "Did you mean survival?"),
        (["train", "autoencoder", "--batch-siz", "2"], "--batch-size"),
        (["completion", "zhs"], "bash|zsh|fish"),
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
    # What its own file adds matters most to the person who wrote it.
    assert not _exit_code("train", "my_recipe", "--help")
    assert "\nRecipe\n  --" in capsys.readouterr().out


def test_help_lists_what_matters_and_help_all_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    assert not _exit_code("train", "autoencoder", "--help")
    short = capsys.readouterr().out
    assert not _exit_code("train", "autoencoder", "--help-all")
    full = capsys.readouterr().out
    assert "--batch-size" in short
    assert "--bucket-mb" not in short
    assert all(flag in full for flag in completion.flags_of("train", "autoencoder"))


@pytest.mark.parametrize("name", [name for name in COMMANDS if COMMANDS[name].has_flags])
def test_help_is_in_groups_of_at_most_80_columns(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for asked in ("--help", "--help-all"):
        assert not _exit_code(name, asked)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= 80
        # `nbgpu result` has no flags but those of its cluster.
        assert ("Cluster" if name == "result" else "Command") in lines
        shown = [line.split()[0].rstrip(",") for line in lines if line.startswith("  --")]
        flags = [f"--{each.replace('_', '-')}" for each, _ in command_flags.fields_of(name)]
        if asked == "--help-all":
            assert sorted(shown) == sorted(flags)
        else:
            assert 1 <= len(shown) <= 14
            others = f"--help-all lists the {len(flags) - len(shown)} other flags as well."
            assert (others in lines) == (len(shown) < len(flags))


def test_help_of_a_recipe_is_in_its_groups(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert not _exit_code("train", "survival", "--help-all")
    lines = capsys.readouterr().out.splitlines()
    headings = ["Command", "Cluster", "Length", "Optimizer", "Precision", "Parallel", "Data", "Checkpoints"]
    assert [line for line in lines if line in headings] == headings
    assert lines.index("  --ties efron|breslow       " + lines[_place(lines, "--ties")][29:]) > lines.index(
        "Recipe"
    )
    assert lines.index("Optimizer") < _place(lines, "--weight-decay") < lines.index("Precision")


def _place(lines: list[str], flag: str) -> int:
    return next(place for place, line in enumerate(lines) if line.startswith(f"  {flag} "))


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["train", "autoencoder", "--help-all"], ["recipes"], []])
def test_a_reader_that_stops_reading_gets_no_traceback(arguments: list[str]) -> None:
    """As `| head` does, here before the first line."""
    command = [sys.executable, "-m", "nbgpu.cli", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(400) == cli.OUTPUT_CLOSED


def test_ctrl_c_exits_with_130_and_no_traceback() -> None:
    command = [sys.executable, "-m", "nbgpu.cli", "doctor"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() != "", "it has begun"
        process.send_signal(signal.SIGINT)
        said, errors = process.communicate(timeout=180)
    assert process.returncode == cli.INTERRUPTED
    assert "Traceback" not in said + errors


def test_notebooks_are_copied_and_never_over_others(tmp_path: Path) -> None:
    cli.main(["notebooks", str(tmp_path / "lessons")])
    assert (tmp_path / "lessons" / "00_first_run.ipynb").is_file()
    assert _exit_code("notebooks", str(tmp_path / "lessons")) == cli.FAILED


def test_the_page_of_the_commands_is_current() -> None:
    """`make docs` writes it."""
    generator = runpy.run_path(str(REPOSITORY / "docs" / "generate.py"))
    page = (REPOSITORY / "docs" / "commands.md").read_text()
    assert generator["commands"]() == page
    assert all(f"\n### `nbgpu {command.usage}`\n" in page for command in COMMANDS.values())
