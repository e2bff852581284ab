"""`input()` on a rank: the notebook asks the person, and the answer comes back to this rank.

In ipyparallel an engine cannot ask a person. The notebook, or on another host the host's engine in its stead,
listens in the cluster's private folder, and the notebook says with each cell whether somebody can answer.
"""

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


def go_to_the_notebook(shell: Any, folder: Path, rank: int) -> None:
    """Make `input` and `getpass` of this process ask in the notebook.

    Args:
        shell: the engine's.
        folder: the cluster's private folder.
        rank: this rank, for the question.
    """
    numbers = itertools.count(1)

    def ask(prompt: object = "", password: bool = False) -> str:
        return _ask(shell, folder, Question(rank, next(numbers), str(prompt), password))

    def ask_for_password(prompt: str = "Password: ", stream: object = None, **_: object) -> str:
        return ask(prompt, password=True)

    # ipykernel puts its own functions there while a cell runs.
    shell.kernel.raw_input = builtins.input = ask
    shell.kernel.getpass = getpass.getpass = ask_for_password


def _ask(shell: Any, folder: Path, question: Question) -> str:
    sys.stdout.flush()
    sys.stderr.flush()
    if not are_answered:
        raise _nobody(question.rank)
    # This goes the same way as printed text, so that the notebook shows that text before it asks.
    shell.data_pub.publish_data({Question.NEWEST: question.number})
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            with short_path(folder) as short:
                connection.connect(str(short / Question.SOCKET))
        except OSError:
            raise _nobody(question.rank) from None
        connection.sendall(json.dumps(asdict(question)).encode() + b"\n")
        with connection.makefile("rb") as answers:
            line = answers.readline()
    if not line:
        raise EOFError("the cell in which the question was asked has ended")
    answer: str = json.loads(line)
    if answer == _END_OF_INPUT:
        raise EOFError
    return answer


def _nobody(rank: int) -> StdinNotImplementedError:
    return StdinNotImplementedError(
        f"rank {rank} called input(), and there is nobody to answer: it works in a cell that runs in a notebook's page"
    )
