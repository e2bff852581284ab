"""What both loops of a rank have: how a run begins, pauses, is steered, saves its state and ends."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from nbgpu.config import TrainConfig
from nbgpu.engine.checkpoints.saving import Saves, WholeState
from nbgpu.engine.group import exchange
from nbgpu.engine.group.consensus import Consensus, together
from nbgpu.engine.group.group import Membership
from nbgpu.engine.logs.log_files import LogWriter
from nbgpu.engine.training import gathering
from nbgpu.engine.training.gathering import Gathered
from nbgpu.engine.training.progress import Progress
from nbgpu.engine.training.steering import Steering
from nbgpu.errors import OutOfMemoryError, RunError
from nbgpu.machine.files import telling_what_is_not_written
from nbgpu.protocol.records import Command, Device, RunState, cluster_folder
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.checkpoint_files import Score
from nbgpu.run_folder.commands import CommandWatch
from nbgpu.run_folder.recorder import Recorder

_log = logging.getLogger("nbgpu.trainer")
_PAUSE_POLL_S = 0.05
_PICTURES_PERIOD_S = 2.0
"""Pictures stand in the run's records, which are read as a whole."""


@dataclass(frozen=True)
class RunContext:
    """Where a run is on this rank, and where its numbers go."""

    folder: Path
    """The run's folder."""
    member: Membership
    """This rank's place in the group."""
    device: Device
    """What `run_info.json` says of the rank's device."""
    recorder: Recorder | None
    """Takes the numbers of each step; None leaves them unrecorded."""
    log_writer: LogWriter | None = None
    """Rank 0's, which take histograms of weights and gradients."""


class Loop(ABC):
    """One run on this rank: steps, and between them checkpoints, validations and what the person asks for.

    Args:
        config: the settings.
        context: where the run is.
    """

    def __init__(self, config: TrainConfig, context: RunContext) -> None:
        self.config = config
        self.folder = context.folder
        self.member = context.member
        self.rank = context.member.rank
        self.device = context.member.device
        self.recorder = context.recorder
        self.log_writer = context.log_writer
        self.step = 0
        """Optimizer steps done."""
        self.command: Command | None = None
        """What the person asked for and all ranks have agreed to follow: 'pause', 'stop' or nothing."""
        self._described_device = context.device
        self._devices: Sequence[Device] = ()
        """Of all ranks, in their order."""
        self._train_s = 0.0
        self._validated_step = 0
        self._pictured_s = -_PICTURES_PERIOD_S
        self._progress = Progress(config)
        self._steering = Steering()
        self._saves = Saves(self.folder, config.keep_checkpoints, self.rank, self._tell)
        self._consensus: Consensus
        """New with each `run`, so that the newest command counts even if a rank that had heard it is gone."""

    def run(self, mended: str = "") -> RunState:
        """Does the steps to the last one, or until the person or a validation that gets no better stops them.

        After a failure that is mended (a rank was replaced, the group formed again) every rank calls it
        again, and the run goes on with the state of the rank that had got furthest.

        Args:
            mended: the failure that was mended, in words, which is recorded; empty at the start.

        Returns:
            'finished', also where it stopped early, or 'stopped' by the person.

        Raises:
            DataError: the data cannot be used; every rank raises it, at the same step.
            RunError: a step gave NaN or an infinite number; every rank raises it, after a checkpoint of the
                step before.
        """
        self._consensus = Consensus(CommandWatch(self.folder, cluster_folder()) if self.rank == 0 else None)
        self._gather_ranks()
        if mended:
            self._event("heal", f"{mended} {self._goes_on_in_words()}")
        self._enter("training")
        started_s = time.perf_counter()
        try:
            self._take_steps()
        finally:
            self._train_s += time.perf_counter() - started_s
        if self.command == "stop":
            self._enter("stopping")
        self._conclude()
        ended: RunState = "stopped" if self.command == "stop" else "finished"
        self._enter(ended)
        return ended

    @abstractmethod
    def interrupted(self) -> None:
        """Lets go of what belongs to a group that is of no use any more; `run` may be called again."""

    @abstractmethod
    def out_of_memory(self, error: BaseException) -> OutOfMemoryError:
        """What to say of a run in which this rank got no more memory."""

    @abstractmethod
    def state(self) -> WholeState:
        """All that the run goes on from: tensors by name, and the rest as JSON."""

    @abstractmethod
    def load_state(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave on this or another rank; every rank loads the same."""

    def close(self) -> None:
        """Ends the threads that read data and write checkpoints."""
        self._saves.close()

    # ---- what each loop does in its own way ----

    @abstractmethod
    def _gather_ranks(self) -> None:
        """Makes every rank ready for the same step: the furthest rank's, a checkpoint's, or the first."""

    @abstractmethod
    def _goes_on_in_words(self) -> str:
        """Where the run goes on after a failure that was mended."""

    @abstractmethod
    def _take_steps(self) -> None:
        """Steps until the last one, or until the person or the validations end the run."""

    @abstractmethod
    def _conclude(self) -> None:
        """Writes the last checkpoint, and says what was found."""

    # ---- between the ranks ----

    def _gather(self, is_ready: bool, **more: Any) -> Gathered:
        """Settles whose state all ranks begin with, and takes its step and its settings. A collective.

        Args:
            is_ready: whether this rank has the state of `step`.
            more: what else the others are to know of this rank.
        """
        own = {
            "ready": is_ready,
            "step": self.step,
            "steering": self._steering.position(self.config),
            "device": asdict(self._described_device),
        }
        gathered = gathering.gather(own | more, self._saves)
        self._devices = [Device(**position["device"]) for position in gathered.positions]
        self._take_settings(self._steering.catch_up([s["steering"] for s in gathered.positions]))
        if not is_ready:
            # Before the first record: this rank may have taken another's place, or go on from a checkpoint.
            self.step = gathered.step
        if self.recorder is not None:
            self.recorder.at(self.step)
        return gathered

    def _take(self, own: WholeState, source: int) -> None:
        """Gives every rank the state of one of them, over the process group.

        Args:
            own: this rank's state, which counts on the rank `source` only.
            source: whose state all take.
        """
        tensors, about = own
        received = exchange.broadcast_tensors(tensors, source, self.device)
        about = exchange.broadcast(about, source)
        if self.rank != source:
            self.load_state(received, about)

    def _hear(self) -> None:
        """Ends the message of the consensus that is on its way."""
        self.command = self._consensus.finish() or self.command

    def _pause(self) -> None:
        """Waits until the person says 'resume' or 'stop', which all ranks hear together."""
        self._enter("paused")
        while self.command not in ("resume", "stop"):
            time.sleep(_PAUSE_POLL_S)
            self._consensus.begin()
            self._hear()
        self._enter("training")

    # ---- settings ----

    def _take_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Goes on under other settings; returns those that were changed, as they were."""
        before = {name: getattr(self.config, name) for name in settings}
        if before != settings:
            self.config = self.config.changed(**settings)
        return before

    def _note_settings(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Notes in the run's folder and in its records that all ranks have taken other settings."""
        if self.rank == 0:
            with self._telling_what_is_not_written():
                runs.note_change(self.folder, self.step, now)
            changes = ", ".join(f"{name} {before[name]} → {value}" for name, value in now.items())
            self._event("setting", changes, **now)
        self._steering.changed()

    def _telling_what_is_not_written(self) -> AbstractContextManager[None]:
        """In it a file about the run that cannot be written becomes a note, and the run goes on."""
        return telling_what_is_not_written(partial(self._event, "note"))

    # ---- checkpoints ----

    def _whole_state(self) -> WholeState:
        """The state, with what tells whether another run can go on from it. A collective with fsdp."""
        tensors, about = self.state()
        config = self.config.model_dump(mode="json")
        return tensors, {**about, "config": config, "world_size": self.member.world_size}

    def _score(self) -> Score | None:
        """Of the validation of this step, if it is the best so far."""
        return self._progress.best if self._progress.is_best(self.step) else None

    def _save_and_wait(self) -> RunError | None:
        """Writes a checkpoint on rank 0; returns why it could not be written. A collective."""
        whole_state = self._whole_state()
        return together(lambda: self._saves.finish(self.step, whole_state, self._score()))

    # ---- records ----

    def _enter(self, state: RunState) -> None:
        if self.recorder is not None:
            self.recorder.state(state, self.step)

    def _event(self, kind: str, text: str, **detail: Any) -> None:
        if self.recorder is not None:
            self.recorder.event(kind, text, self.step, **detail)

    def _note(self, *texts: str) -> None:
        """Records once what all ranks have to say."""
        if self.rank == 0:
            for text in texts:
                self._event("note", text)

    def _tell(self, kind: str, text: str, step: int) -> None:
        """An event of a step that may be over: called on the thread that writes checkpoints."""
        if kind == "note":
            _log.warning(text)
        if self.recorder is not None:
            self.recorder.event(kind, text, step)

    def _shows_pictures(self, is_last: bool) -> bool:
        """Whether this rank is to show the pictures of a validation."""
        is_time = is_last or time.monotonic() - self._pictured_s >= _PICTURES_PERIOD_S
        return self.rank == 0 and is_time

    def _show(self, images: dict[str, str]) -> None:
        self._pictured_s = time.monotonic()
        self._event("pictures", "", images=images)
