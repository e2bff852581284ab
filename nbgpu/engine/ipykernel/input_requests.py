"""`input()` on a rank: the notebook asks the person, and the answer comes back to this rank.

ipyparallel has no way from an engine to a person. The notebook listens in the cluster's private folder, and says with
each cell whether somebody sits in front of it.
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
"""Whether there is somebody who can be asked, in the cell that runs."""


def go_to_the_notebook(shell: Any, folder: Path, rank: int) -> None:
    """From now on `input` and `getpass` of this process ask there.

    Args:
        shell: the engine's.
        folder: the cluster's own.
        rank: who asks.
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
    # Takes the same way as what was printed, so that the notebook does not ask before it has shown that.
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
