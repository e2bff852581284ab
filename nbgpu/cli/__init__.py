"""The `nbgpu` command. The code of a subcommand is imported only when it is called.

Exit codes: 0 for success; 1 if something failed or was refused, such as a run, a setting or a file; 2 for a
wrong command line; 130 if interrupted; 141 if the reader of the output stopped reading.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from nbgpu.machine import operating_system
from nbgpu.version import VERSION

if TYPE_CHECKING:
    from nbgpu.errors import RankError

_COLOUR = re.compile(r"\x1b\[[\d;]*m")

FAILED, BAD_USAGE, INTERRUPTED, OUTPUT_CLOSED = 1, 2, 130, 141


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command, and exit with its code unless that is 0."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        try:
            code = _run(list(arguments))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # This happens with `| head`. At its exit Python would try to write the rest again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = OUTPUT_CLOSED
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code:
        sys.exit(code)


def _run(arguments: list[str]) -> int:
    """Run the command that the arguments name, and return its exit code. An error of nbgpu becomes a
    SystemExit with the error's message."""
    if arguments[:1] in (["--version"], ["-V"]):
        print(f"nbgpu {VERSION}")
        return 0
    # These imports are slow, and `--version` does not need them.
    from nbgpu.cli.catalogue import COMMANDS, UsageError, overview
    from nbgpu.errors import NbgpuError, RankError
    from nbgpu.text.similar import did_you_mean

    if not arguments or arguments[0] in ("--help", "-h"):
        print(overview(), end="")
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        hint = did_you_mean(name, [*COMMANDS, "--version", "--help"]) or _suggest_recipe(name)
        raise _exit_with(f"nbgpu {name}: there is no such command.{hint}\n`nbgpu` lists them", BAD_USAGE)
    command = COMMANDS[name]
    why_not = "" if command.anywhere else operating_system.why_not()
    # Commands with flags of settings print their own help, for which modules are imported that need Linux.
    if rest[:1] in (["--help"], ["-h"], ["--help-all"]) and (why_not or not command.has_flags):
        from nbgpu.config import flags_help

        flags_help.show(f"nbgpu {command.usage}", command.sentence, {}, command.examples)
        return 0
    if why_not:
        raise _exit_with(why_not, FAILED)
    try:
        return getattr(import_module(f"nbgpu.cli.{command.module}"), name)(rest) or 0
    except UsageError as error:
        raise _exit_with(str(error), BAD_USAGE) from None
    except RankError as error:
        raise _exit_with(_with_tracebacks(error), FAILED, is_verbatim=True) from None
    except NbgpuError as error:
        raise _exit_with(f"{type(error).__name__}: {error}", FAILED) from None


def _suggest_recipe(name: str) -> str:
    """Return ' Did you mean train autoencoder?' for a name similar to that of a recipe; else empty."""
    from nbgpu.config import TRAIN_CONFIGS
    from nbgpu.text.similar import did_you_mean

    return did_you_mean(name, TRAIN_CONFIGS).replace("mean ", "mean train ")


def _exit_with(message: str, code: int, is_verbatim: bool = False) -> SystemExit:
    """Print an error, and return the SystemExit to raise, which contains the message for callers of `main`.

    Args:
        message: one or several lines.
        code: the exit code.
        is_verbatim: whether the message contains code, whose lines must not be wrapped.
    """
    from nbgpu.text.console import wrapped

    width = shutil.get_terminal_size().columns if sys.stderr.isatty() and not is_verbatim else None
    print(wrapped(message, width), file=sys.stderr)
    ended = SystemExit(message)
    ended.code = code
    return ended


def _with_tracebacks(error: RankError) -> str:
    """Return the text of an error as in a notebook, with the ranks' tracebacks; in colour on a terminal."""
    trace = "\n".join(error._render_traceback_())
    return trace if sys.stderr.isatty() else _COLOUR.sub("", trace)
