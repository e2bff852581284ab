"""How all ranks reach the same decision at the same step, without slowing the step.

Each step reduces one small message over the ranks while loss and gradients are being computed: the person's
command, and whether a rank's data failed. The result is read before the weights change, where the exchange of
gradients has brought all ranks together anyway. A rank whose data failed takes part up to that point, because
the others would otherwise wait for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from nbgpu.engine.group import exchange, simulated_link
from nbgpu.errors import DataError, NbgpuError, RunError
from nbgpu.protocol.records import Command
from nbgpu.run_folder.commands import CommandWatch

Result = TypeVar("Result")

_CODES: tuple[Command | None, ...] = (None, "resume", "pause", "stop")


class PeerFailed(RunError):
    """This rank gave up because another one failed; that rank reports the cause itself."""


class Consensus:
    """The ranks' common decision, one for each step.

    Args:
        commands: the person's commands; None on all ranks but rank 0.
        must_stop: returns whether this rank has to stop, as when its launcher is about to end it. All ranks
            stop then.
    """

    def __init__(self, commands: CommandWatch | None, must_stop: Callable[[], bool] = lambda: False) -> None:
        self._must_stop = must_stop
        self._commands = commands
        self._failure: Exception | None = None
        # On the CPU, so that reading it does not wait for the GPU.
        self._message = torch.zeros(3, dtype=torch.int32, device="cpu")
        self._work: dist.Work | None = None
        self._settings_are_there = False

    def newest_command(self) -> Command | None:
        """Return the person's last command, as rank 0 knows it. A collective."""
        command: Command | None = exchange.broadcast(self._newest(), source=0)
        return command

    def _newest(self) -> Command | None:
        return self._commands.newest() if self._commands is not None else None

    def begin(self, failure: Exception | None = None) -> None:
        """Start the all_reduce of this rank's command and failure; return at once, and read the result with
        `finish`."""
        command = "stop" if self._must_stop() else self._newest()
        self._failure = failure
        self._message[0] = _CODES.index(command)
        self._message[1] = failure is not None
        self._message[2] = self._commands is not None and self._commands.has_settings
        # The maximum of the ranks' codes: 'stop' wins over 'pause', and any failure over none.
        with simulated_link.not_simulated():
            self._work = dist.all_reduce(self._message, dist.ReduceOp.MAX, async_op=True)

    def finish(self) -> Command | None:
        """Return the command that all ranks follow at this step.

        Raises:
            DataError, PeerFailed: a rank failed. Every rank raises, and names the rank and the cause.
        """
        assert self._work is not None, "begin comes before finish"
        self._work.wait()
        if self._message[1]:
            raise_together(self._failure)
        self._settings_are_there |= bool(self._message[2])
        return _CODES[int(self._message[0])]

    def new_settings(self) -> dict[str, Any]:
        """Return the settings changed since the last call, the same on every rank.

        A collective only if there are any.
        """
        if not self._settings_are_there:
            return {}
        self._settings_are_there = False
        asked = self._commands.take_settings() if self._commands is not None else {}
        settings: dict[str, Any] = exchange.broadcast(asked, source=0)
        return settings


def together(work: Callable[[], Result]) -> Result:
    """Call `work` on this rank, and raise on every rank if it raised on any. A collective.

    The work itself must contain no collective, because a rank that failed early would not take part in it.

    Returns:
        The work's result on this rank.

    Raises:
        DataError, PeerFailed: `work` raised on a rank; see `raise_together`.
    """
    result, failure = None, None
    try:
        result = work()
    except Exception as error:  # noqa: BLE001 - all ranks must learn of any error
        failure = error
    raise_together(failure)
    return cast(Result, result)


def raise_together(failure: Exception | None) -> None:
    """Raise on every rank if any rank has a failure. A collective: every rank must call it.

    Raises:
        DataError: every failure is a DataError; the error has each line of their messages once.
        PeerFailed: a rank failed in another way. A failed rank raises its own error instead, unless that is a
            NbgpuError that not all ranks have.
    """
    report = None
    if failure is not None:
        report = [isinstance(failure, DataError), type(failure).__name__, str(failure)]
    reports = exchange.gather(report)
    failed = {rank: report for rank, report in enumerate(reports) if report is not None}
    if not failed:
        return
    if all(is_data_error for is_data_error, _, _ in failed.values()):
        lines = [line for _, _, message in failed.values() for line in message.splitlines()]
        raise DataError("\n".join(dict.fromkeys(lines)))
    # The rank's own error has the traceback that the person needs.
    is_everywhere = all(report == reports[0] for report in reports)
    if failure is not None and (is_everywhere or not isinstance(failure, NbgpuError)):
        raise failure
    raise PeerFailed(
        "; ".join(f"rank {rank} failed: {kind}: {message}" for rank, (_, kind, message) in failed.items())
    )
