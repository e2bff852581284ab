"""`input()` on a rank: the notebook asks the person, and the answer comes back to this rank.

In ipyparallel an engine cannot ask a person. So a rank sends its question to a socket in the cluster's
private folder. There the notebook listens, or on another host the host's engine in its stead. The options of
each cell say whether a person can answer."""

from __future__ import annotations

import builtins
import getpass
import itertools
import json
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from IPython.core.error import StdinNotImplementedError

from nbgpu.machine.unix_sockets import short_path
from nbgpu.protocol.records import Question

_END_OF_INPUT = "\x04"

are_answered = False
"""Whether a person can answer questions of the running cell."""


_numbers = itertools.count(1)
"""The numbers of this rank's questions, by which text and question are brought into order."""
_folder = Path()
_rank = 0


def install(kernel: Any, folder: Path, rank: int) -> None:
    """Make `input` and `getpass` of this process ask in the notebook, also outside of cells."""
    follow(folder, rank)
    # ipykernel puts the kernel's methods there while a cell runs.
    builtins.input, getpass.getpass = kernel.raw_input, kernel.getpass


def follow(folder: Path, rank: int) -> None:
    """Ask as the rank `rank` from now on, on the socket in the cluster's private folder."""
    global _folder, _rank
    _folder, _rank = folder, rank


def ask(shell: Any, prompt: object, is_password: bool = False) -> str:
    """Send a question of this rank to the notebook, and wait for the person's answer.

    Args:
        shell: the rank's.
        prompt: the text of the question.
        is_password: whether the answer is hidden as it is typed.

    Raises:
        StdinNotImplementedError: nobody can answer.
        EOFError: the cell has ended, or the person has ended the input.
    """
    question = Question(_rank, next(_numbers), str(prompt), is_password)
    sys.stdout.flush()
    sys.stderr.flush()
    if not are_answered:
        raise _nobody_error()
    # The number of the question goes through the same socket as printed text. So the notebook knows when all
    # text that was printed before has arrived, and shows the question only then.
    shell.data_pub.publish_data({Question.NEWEST: question.number})
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            with short_path(_folder) as short:
                connection.connect(str(short / Question.SOCKET))
        except OSError:
            raise _nobody_error() from None
        connection.sendall(json.dumps(asdict(question)).encode() + b"\n")
        with connection.makefile("rb") as answers:
            line = answers.readline()
    if not line:
        raise EOFError("the cell in which the question was asked has ended")
    answer: str = json.loads(line)
    if answer == _END_OF_INPUT:
        raise EOFError
    return answer


def _nobody_error() -> StdinNotImplementedError:
    return StdinNotImplementedError(
        f"rank {_rank} called input(), and there is nobody to answer: it works in a cell that runs in a notebook's page"
    )
