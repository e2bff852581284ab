"""The part common to both loops of a rank: how a run begins, pauses, takes new settings, saves its state and
ends."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from nbgpu.config import TrainConfig
from nbgpu.config.settings import steerable
from nbgpu.engine.checkpoints.saving import Saves, StateParts
from nbgpu.engine.group import exchange
from nbgpu.engine.group.consensus import Consensus, together
from nbgpu.engine.group.group import Membership
from nbgpu.engine.logs.log_files import LogWriter
from nbgpu.engine.training import ending
from nbgpu.engine.training.progress import BestMetricTracker
from nbgpu.errors import OutOfMemoryError, RunError
from nbgpu.machine.clock import clock_id
from nbgpu.machine.files import telling_what_is_not_written
from nbgpu.protocol.cluster_processes import cluster_folder
from nbgpu.protocol.records import CLOCKS, Command, Device, RunState
from nbgpu.run_folder import checkpoint_files
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.checkpoint_files import Score
from nbgpu.run_folder.commands import CommandWatch
from nbgpu.run_folder.recorder import Recorder

_log = logging.getLogger("nbgpu.trainer")
_PAUSE_POLL_S = 0.05
_PICTURES_PERIOD_S = 2.0
"""Pictures are limited to one set per period because they are in the run's records, which are read as a
whole."""


@contextmanager
def raising_afterwards(failure: RunError | None) -> Iterator[None]:
    """Raise an earlier error after the block, also in place of an error of the block, which may have the same
    cause, such as a full disk."""
    try:
        yield
    except Exception as error:
        if failure is not None:
            raise failure from error
        raise
    if failure is not None:
        raise failure


@dataclass(frozen=True)
class Gathered:
    """The step and state of every rank when a group forms, and the state that all ranks begin with. It is the
    same on every rank."""

    positions: Sequence[Mapping[str, Any]]
    """Each rank's `position` as it was given to `gather`, in order of rank."""
    source: int | None
    """The rank that has done most steps, whose state the others copy; None if no rank has a state."""
    checkpoint: Path | None
    """The checkpoint that the run continues from if no rank has a state; None to begin with the first
    step."""
    notes: Sequence[str]
    """Notes about the checkpoint."""

    @property
    def step(self) -> int:
        """Return the number of optimizer steps done in the state that all ranks begin with."""
        return int(self._state.get("step", 0))

    @property
    def bucket_order(self) -> Sequence[int]:
        """Return the order of the parameters in DDP's buckets during the steps of that state. Another order
        would sum the gradients in another sequence, and so change their last bits."""
        return cast(Sequence[int], self._state.get("bucket_order", ()))

    @property
    def _state(self) -> Mapping[str, Any]:
        if self.source is not None:
            return self.positions[self.source]
        return {} if self.checkpoint is None else checkpoint_files.state(self.checkpoint)


def gather(position: Mapping[str, Any], saves: Saves) -> Gathered:
    """Exchange the positions of all ranks, and choose the state that all of them begin with: that of the rank
    that has done most steps, else the newest intact checkpoint. A collective.

    Args:
        position: this rank's, as JSON: its `step`, `ready` (whether it has the state of that step), and other
            information for the other ranks.
        saves: the run's checkpoints.
    """
    positions = exchange.gather(dict(position))
    ready = {rank: position["step"] for rank, position in enumerate(positions) if position["ready"]}
    source = max(ready, key=ready.__getitem__, default=None)
    checkpoint, notes = (None, ()) if source is not None else saves.to_begin_with()
    return Gathered(positions, source, checkpoint, notes)


@dataclass(frozen=True)
class RunContext:
    """The place of a run on this rank, and the destination of its numbers."""

    folder: Path
    """The run's folder."""
    member: Membership
    """This rank's place in the group."""
    device: Device
    """The description of the rank's device in `run_info.json`."""
    recorder: Recorder | None
    """Records the numbers of each step; None leaves them unrecorded."""
    log_writer: LogWriter | None = None
    """The writer of rank 0's logs, which hold histograms of weights and gradients."""
    settings_since_s: float = 0.0
    """In seconds since the epoch: settings that were requested before this moment are already in `config`."""


class Loop(ABC):
    """One run on this rank: steps, and between them checkpoints, validations and the person's commands.

    Args:
        config: the settings.
        context: the place of the run.
    """

    def __init__(self, config: TrainConfig, context: RunContext) -> None:
        self.config = config
        self.folder = context.folder
        self.member = context.member
        self.rank = context.member.rank
        self.device = context.member.device
        self.recorder = context.recorder
        self.log_writer = context.log_writer
        self._settings_since_s = context.settings_since_s
        self.step = 0
        """Optimizer steps done."""
        self.command: Command | None = None
        """The person's command that all ranks have agreed to follow: 'pause', 'stop' or nothing."""
        self._described_device = context.device
        self._devices: Sequence[Device] = ()
        """The devices of all ranks, in order of rank."""
        self._train_s = 0.0
        self._has_one_clock = True
        """Whether the processes of all ranks read the same monotonic clock."""
        self._validated_step = 0
        self._pictured_s = -_PICTURES_PERIOD_S
        self._progress = BestMetricTracker(config)
        self._steering = Steering()
        self._saves = Saves(self.folder, config.keep_checkpoints, self.rank, self._tell)
        self._consensus: Consensus
        """Created in each `run`, so that the newest command counts even if a rank that had received it is
        gone."""

    def run(self, mended: str = "") -> RunState:
        """Do the steps up to the last one, or until the person stops them or a validation no longer improves.

        After a failure that is mended (a rank was replaced, the group formed again) every rank calls this
        again, and the run continues with the state of the rank that had got furthest.

        Args:
            mended: the failure that was mended, in words, to be recorded; empty at the start.

        Returns:
            'finished', also after early stopping, or 'stopped' if the person stopped it.

        Raises:
            DataError: the data cannot be used; every rank raises it, at the same step.
            RunError: a step gave NaN or an infinite number; every rank raises it, after a checkpoint of the
                step before.
        """
        # Only rank 0 reads the person's commands; the other ranks get them with each step's consensus
        # message.
        commands = None
        if self.rank == 0:
            commands = CommandWatch(self.folder, cluster_folder(), self._settings_since_s)
        self._consensus = Consensus(commands, lambda: ending.received() is not None)
        self._gather_ranks()
        if mended:
            paused = " It stays paused until it is resumed." if self.command == "pause" else ""
            self._event("heal", f"{mended} {self._describe_continuation()}{paused}")
        self._enter("training")
        started_s = time.perf_counter()
        try:
            self._run_steps()
        finally:
            self._train_s += time.perf_counter() - started_s
        # The clocks drift during a run, so their offsets are measured at its start (`_gather`) and at its
        # end.
        self._compare_clocks()
        if self.command == "stop":
            if reason := ending.in_words() or (commands.why_stop if commands is not None else ""):
                self._event("note", reason)
            self._enter("stopping")
        self._conclude()
        ended: RunState = "stopped" if self.command == "stop" else "finished"
        self._enter(ended)
        return ended

    @abstractmethod
    def interrupted(self) -> None:
        """Release what belongs to a group that is no longer usable; `run` may be called again."""

    @abstractmethod
    def out_of_memory(self, error: BaseException) -> OutOfMemoryError:
        """Return the error that explains why this rank ran out of memory."""

    @abstractmethod
    def state(self) -> StateParts:
        """Return the state that the run can continue from: tensors by name, with fsdp sharded, and the rest
        as JSON."""

    @abstractmethod
    def load_state(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Continue from the result of `state` on this or another rank, with whole tensors; every rank loads
        the same."""

    def close(self) -> None:
        """End the threads that read data and write checkpoints."""
        self._saves.close()

    # ---- what each loop does in its own way ----

    @abstractmethod
    def _gather_ranks(self) -> None:
        """Bring every rank to the same step: that of the rank furthest ahead, of a checkpoint, or the
        first."""

    @abstractmethod
    def _describe_continuation(self) -> str:
        """Return where the run continues after a failure that was mended."""

    @abstractmethod
    def _run_steps(self) -> None:
        """Step until the last step, or until the person or the validations end the run."""

    @abstractmethod
    def _conclude(self) -> None:
        """Write the last checkpoint, and report the result."""

    # ---- between the ranks ----

    def _gather(self, is_ready: bool, **more: Any) -> Gathered:
        """Agree on the state that all ranks begin with, and take its step and its settings. A collective.

        Args:
            is_ready: whether this rank has the state of `step`.
            more: other information about this rank for the other ranks.
        """
        position = {
            "ready": is_ready,
            "step": self.step,
            "steering": self._steering.position(self.config),
            "device": asdict(self._described_device),
            "clock": clock_id(),
        }
        gathered = gather(position | more, self._saves)
        self._has_one_clock = len({position["clock"] for position in gathered.positions}) == 1
        self._devices = [Device(**position["device"]) for position in gathered.positions]
        missed = self._steering.catch_up([position["steering"] for position in gathered.positions])
        self._apply_settings(missed)
        if not is_ready:
            # Set before the first record: this rank may have replaced another one, or may continue from a
            # checkpoint.
            self.step = gathered.step
        if self.recorder is not None:
            self.recorder.at(self.step)
        self._compare_clocks()
        return gathered

    def _compare_clocks(self) -> None:
        """Record the offsets between the monotonic clocks of the ranks' hosts. A collective if there are
        several hosts."""
        if self._has_one_clock:
            return
        offsets_s, errors_s = zip(*exchange.clock_offsets(), strict=True)
        if self.rank == 0:
            self._event(CLOCKS, "", offsets_s=offsets_s, errors_s=errors_s, at_s=time.monotonic())

    def _copy_state(self, state: StateParts, source: int) -> None:
        """Broadcast the state of one rank to all ranks, and load it there. A collective.

        Args:
            state: this rank's state, which is read on the rank `source` only.
            source: the rank whose state all ranks take.
        """
        tensors, about = state
        received = exchange.broadcast_tensors(tensors, source, self.device)
        about = exchange.broadcast(about, source)
        if self.rank != source:
            self.load_state(received, about)

    def _finish_consensus(self) -> None:
        """Wait for the consensus message of this step, and take the command that it carries."""
        self.command = self._consensus.finish() or self.command

    def _pause(self) -> None:
        """Wait for the person's command 'resume' or 'stop', which all ranks receive together."""
        self._enter("paused")
        while self.command not in ("resume", "stop"):
            time.sleep(_PAUSE_POLL_S)
            self._consensus.begin()
            self._finish_consensus()
        self._enter("training")

    # ---- settings ----

    def _apply_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Continue under other settings; return the previous values of the settings."""
        before = {name: getattr(self.config, name) for name in settings}
        if before != settings:
            self.config = self.config.changed(**settings)
        return before

    def _note_settings(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Write to the run's folder and to its records that all ranks have taken other settings."""
        if self.rank == 0:
            with self._report_unwritten_files():
                runs.note_change(self.folder, self.step, now)
            changes = ", ".join(f"{name} {before[name]} → {value}" for name, value in now.items())
            self._event("setting", changes, **now)
        self._steering.num_changes += 1

    def _report_unwritten_files(self) -> AbstractContextManager[None]:
        """Turn a failure to write a file about the run into a note, inside the context, so that the run
        continues."""
        return telling_what_is_not_written(partial(self._event, "note"))

    # ---- checkpoints ----

    def _state_to_save(self) -> StateParts:
        """Return the state, with the data that decide whether another run can continue from it."""
        tensors, about = self.state()
        config = self.config.model_dump(mode="json")
        return tensors, {**about, "config": config, "world_size": self.member.world_size}

    def _score(self) -> Score | None:
        """Return the score of this step's validation if it is the best so far."""
        return self._progress.best if self._progress.is_best(self.step) else None

    def _save_and_wait(self) -> RunError | None:
        """Write a checkpoint on rank 0; return the error if it could not be written. A collective."""
        failure = self._saves.finish(self.step, self._state_to_save(), self._score())
        # All ranks wait until rank 0 has written it.
        return together(lambda: failure)

    # ---- records ----

    def _enter(self, state: RunState) -> None:
        """Record that this rank is in another state of the run, such as 'training' or 'paused'."""
        if self.recorder is not None:
            self.recorder.state(state, self.step)

    def _event(self, kind: str, text: str, /, **detail: Any) -> None:
        """Record an event of the present step."""
        if self.recorder is not None:
            self.recorder.event(kind, text, self.step, **detail)

    def _note(self, *texts: str) -> None:
        """Record once the notes that are the same on all ranks."""
        if self.rank == 0:
            for text in texts:
                self._event("note", text)

    def _tell(self, kind: str, text: str, step: int) -> None:
        """Record an event of a checkpoint, whose step may be an earlier one. `Saves` calls this, also on the
        thread that writes checkpoints."""
        if kind == "note":
            _log.warning(text)
        if self.recorder is not None:
            self.recorder.event(kind, text, step)

    def _shows_pictures(self, is_last: bool) -> bool:
        """Return whether this rank should show the pictures of a validation."""
        is_time = is_last or time.monotonic() - self._pictured_s >= _PICTURES_PERIOD_S
        return self.rank == 0 and is_time

    def _show(self, images: dict[str, str]) -> None:
        self._pictured_s = time.monotonic()
        self._event("pictures", "", images=images)


class Steering:
    """The settings that the person has requested during a run, and how many changes all ranks have made."""

    def __init__(self) -> None:
        self.pending: dict[str, Any] = {}
        """Requested settings that are not yet due, by name."""
        self.num_changes = 0

    def take_due(self, config: TrainConfig, begins_epoch: bool) -> dict[str, Any]:
        """Return the settings to apply from the next step on; settings of the data wait for the start of an
        epoch."""
        due_at = steerable(type(config))
        now = {name: value for name, value in self.pending.items() if due_at[name] == "step" or begins_epoch}
        self.pending = {name: value for name, value in self.pending.items() if name not in now}
        # A rank that replaced another one has read all requests of the run, also those applied long ago.
        return {name: value for name, value in now.items() if value != getattr(config, name)}

    def position(self, config: TrainConfig) -> dict[str, Any]:
        """Return this rank's present and pending settings as JSON, from which other ranks `catch_up`."""
        return {
            "num_changes": self.num_changes,
            "settings": {name: getattr(config, name) for name in steerable(type(config))},
            "pending": self.pending,
        }

    def catch_up(self, positions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Take over the pending settings of the rank that has made the most changes; return the settings to
        apply because this rank has missed changes.

        A rank that has just joined has only the settings with which the run began.

        Args:
            positions: the result of `position` on every rank, in order of rank.
        """
        newest = max(positions, key=lambda position: position["num_changes"])
        # A rank that has made the same number of changes has the same settings.
        missed: dict[str, Any] = newest["settings"] if self.num_changes < newest["num_changes"] else {}
        self.pending, self.num_changes = newest["pending"], newest["num_changes"]
        return missed
