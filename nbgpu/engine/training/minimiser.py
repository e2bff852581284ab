"""The loop that looks for a tensor rather than trains a model. Launch, telemetry, commands and checkpoints are the Trainer's."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nbgpu.config import TrainConfig
from nbgpu.engine.checkpoints import files as checkpoint
from nbgpu.engine.checkpoints.saving import Saves, WholeState
from nbgpu.engine.group import activity, exchange
from nbgpu.engine.group.consensus import Consensus, together
from nbgpu.engine.group.group import Membership
from nbgpu.engine.logs import run_info
from nbgpu.engine.logs.log_files import Books
from nbgpu.engine.memory import usage as memory
from nbgpu.engine.training.progress import Progress
from nbgpu.engine.training.steering import Steering
from nbgpu.engine.workload.problem import Problem
from nbgpu.errors import OutOfMemoryError, RunError
from nbgpu.machine.signals import uninterrupted
from nbgpu.protocol.records import Command, Device, RunState, cluster_folder
from nbgpu.run_folder import checkpoint_files
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.checkpoint_files import Score
from nbgpu.run_folder.commands import CommandWatch
from nbgpu.run_folder.recorder import Recorder
from nbgpu.text.sizes import in_words

_PAUSE_POLL_S = 0.05
_PICTURES_PERIOD_S = 2.0
"""They stand in the run's records, which are read as a whole."""


class _Leave(Exception):
    """Ends a descent where the person, or a validation, ends the run."""


class Minimiser:
    """Minimises one problem on the ranks of the process group, all of which do the same steps.

    A run that goes on from a checkpoint, or after a rank was replaced, goes on with the tensor; what the optimizer
    remembered of earlier steps is not kept, so that its next steps are others than they would have been.

    Args: as the Trainer's, with a problem in place of a recipe.
    """

    def __init__(
        self,
        config: TrainConfig,
        problem: Problem,
        folder: Path,
        member: Membership,
        device: Device,
        recorder: Recorder | None,
        books: Books | None = None,
    ) -> None:
        self.config = config
        self.problem = problem
        self.folder = folder
        self.member = member
        self.rank = member.rank
        self.device = member.device
        self._described_device = device
        self.recorder = recorder
        self.books = books
        self.step = 0
        """Optimizer steps done, over all stages."""
        self.command: Command | None = None
        """What the person asked for and all ranks have agreed to follow."""
        self._loaded = False
        self._tensor: Tensor | None = None
        """After `step` steps; None before the run has begun."""
        self._stage = 0
        self._steps_in_stage = 0
        self._loss = math.nan
        """After the last step."""
        self._validated_step = 0
        self._train_s = 0.0
        self._step_began_s = 0.0
        self._num_evaluations = 0
        self._grad_norm = 0.0
        self._pictured_s = -_PICTURES_PERIOD_S
        self._is_asking = False
        """A message of the consensus is on its way."""
        self._progress = Progress(config)
        self._steering = Steering()
        self._saves = Saves(folder, config.keep_checkpoints, self.rank, self._tell)

    def run(self, mended: str = "") -> RunState:
        """Minimises to the last step, the tolerance, or until the person or a validation that gets no better ends it.

        Called again after a failure that is mended, it goes on with the tensor of the rank that had got furthest.

        Returns:
            'finished' or 'stopped', by the person.

        Raises:
            DataError: the data cannot be used; every rank raises it.
            RunError: the loss is NaN or infinite; every rank raises it, after a checkpoint of the step before.
        """
        self._consensus = Consensus(CommandWatch(self.folder, cluster_folder()) if self.rank == 0 else None)
        self._is_asking = False
        self._gather_ranks()
        if mended:
            self._event("heal", f"{mended} The search goes on after step {self.step}.")
        self._enter("training")
        started_s = time.perf_counter()
        try:
            self._minimise()
        finally:
            self._train_s += time.perf_counter() - started_s
        if self._is_asking:
            self._hear()
        if self.command == "stop":
            self._enter("stopping")
        self._conclude()
        ended: RunState = "stopped" if self.command == "stop" else "finished"
        self._enter(ended)
        return ended

    def interrupted(self) -> None:
        """`run` may be called again: nothing here belongs to a process group."""

    def out_of_memory(self, error: BaseException) -> OutOfMemoryError:
        """What to say of a run in which this rank got no more memory."""
        usage = memory.Usage.of(self.device)
        return OutOfMemoryError(
            f"rank {self.rank} ran out of memory after step {self.step}: {error}\n"
            f"It holds {in_words(usage.used_bytes)}. Take a smaller shape, a smaller limit_to, or more ranks: each has "
            "its share of the slices"
        )

    def close(self) -> None:
        """Ends the thread that writes checkpoints."""
        self._saves.close()

    # ---- getting ready ----

    def _gather_ranks(self) -> None:
        standings = exchange.gather(
            {
                "ready": self._tensor is not None,
                "step": self.step,
                "steered": self._steering.standing(self.config),
                "device": asdict(self._described_device),
            }
        )
        ready = {rank: s["step"] for rank, s in enumerate(standings) if s["ready"]}
        source = max(ready, key=ready.__getitem__, default=None)
        self._take_settings(self._steering.catch_up([s["steered"] for s in standings]))
        found, notes = (None, ()) if source is not None else self._saves.to_begin_with()
        if self._tensor is None:
            # Known before the first record: this rank may have taken another's place, or go on from a checkpoint.
            begins_at = 0 if found is None else int(checkpoint_files.state(found)["step"])
            self.step = standings[source]["step"] if source is not None else begins_at
        if self.recorder is not None:
            self.recorder.at(self.step)
        if not self._loaded:
            self._enter("loading")
        together(self._load)
        if self.rank == 0:
            self._write_info([Device(**s["device"]) for s in standings])
        if source is not None:
            self._take_state(source)
        else:
            if self.rank == 0:
                for note in notes:
                    self._event("note", note)
            together(lambda: self._begin(found))
        self.command = self._consensus.newest_command()

    def _load(self) -> None:
        if not self._loaded:
            with activity.during("loading the data"):
                self.problem.load()
            self._loaded = True

    def _write_info(self, devices: Sequence[Device]) -> None:
        total_steps = sum(self.problem.num_steps)
        told = self.problem.told
        with runs.telling_what_is_not_written(partial(self._event, "note")):
            run_info.write(self.folder, self.config, self.member, devices, total_steps, total_steps, told)

    def _take_state(self, source: int) -> None:
        """Gives every rank the state of one of them."""
        tensors, about = self._state() if self.rank == source else ({}, {})
        received = exchange.broadcast_tensors(tensors, source, self.device)
        about = exchange.broadcast(about, source)
        if self.rank != source:
            self._load_state(received, about)

    def _begin(self, found: Path | None) -> None:
        if found is None:
            self._tensor = self.problem.begin(0, None).to(self.device)
            return
        tensors, about = checkpoint.load(found)
        self._load_state(tensors, about)
        self._saves.newest_step = self.step
        if self.rank == 0:
            self._event("note", "the optimizer begins anew: checkpoints have what was found, not how")
            gone = self._saves.point_to_earlier_best(found, self._progress.best)
            if gone is not None:
                self._event("note", gone)

    def _state(self) -> WholeState:
        """(tensors by name, the rest as JSON) of the last whole step."""
        return {"model.field": self._found}, {
            "step": self.step,
            "stage": self._stage,
            "steps_in_stage": self._steps_in_stage,
            "loss": self._loss,
            "validated_step": self._validated_step,
            "train_s": self._train_s,
            "progress": self._progress.state(),
        }

    def _load_state(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        self._tensor = tensors["model.field"].to(self.device)
        self.step = about["step"]
        self._stage, self._steps_in_stage = about["stage"], about["steps_in_stage"]
        self._loss = about["loss"]
        self._validated_step = about["validated_step"]
        self._train_s = about["train_s"]
        self._progress.load_state(about["progress"])

    @property
    def _found(self) -> Tensor:
        assert self._tensor is not None, "the ranks are gathered before the first step"
        return self._tensor

    # ---- steps ----

    def _minimise(self) -> None:
        """Stage after stage, each until its steps are done or a step gains less than the tolerance."""
        num_stages = len(self.problem.num_steps)
        try:
            self._between_steps()
            while True:
                ended = self.problem.search(
                    self._found,
                    self._stage,
                    range(self._steps_in_stage, self.problem.num_steps[self._stage]),
                    self._evaluate,
                    self._after_step,
                    lambda: self.config.lr,
                    self.rank,
                    self.member.world_size,
                )
                if self.rank == 0:
                    where = self.problem.stage_name(self._stage) if num_stages > 1 else "the search"
                    self._event("note", f"{where} ended after {self._steps_in_stage} steps: {ended}")
                if self._stage == num_stages - 1:
                    return
                following = self.problem.begin(self._stage + 1, self._found.cpu()).to(self.device)
                with uninterrupted():
                    self._tensor, self._stage, self._steps_in_stage = following, self._stage + 1, 0
        except _Leave:
            return
        except RunError:
            failure = together(self._save_last)
            if failure is not None:
                self._event("note", str(failure))
            raise

    def _evaluate(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        loss, gradient = self.problem.evaluate(
            tensor, self._stage, self.step, self.rank, self.member.world_size
        )
        self._num_evaluations += 1
        self._grad_norm = float(gradient.norm())
        return loss, gradient

    def _after_step(self, tensor: Tensor, loss: float) -> None:
        with uninterrupted():
            self._tensor = tensor
            self.step += 1
            self._steps_in_stage += 1
            self._loss = loss
        self._record(loss)
        self._hear()
        if self._due(self.config.val_every) and self._validated_step != self.step:
            self._validate()
        self._between_steps()

    def _between_steps(self) -> None:
        """What the person asks for, and a checkpoint where one is due; begins the next message of the consensus."""
        is_best = self._progress.is_best(self.step)
        if self._saves.newest_step < self.step and (self._due(self.config.checkpoint_every) or is_best):
            self._saves.begin(self.step, self._whole_state(), self._score())
        if self.command == "pause":
            self._pause()
        if self.command == "stop":
            raise _Leave
        if self._progress.is_over:
            if self.rank == 0:
                self._event("note", self._progress.end_in_words(self.step))
            raise _Leave
        self._steer()
        self._consensus.begin()
        self._is_asking = True
        self._step_began_s = time.perf_counter()
        self._num_evaluations = 0

    def _hear(self) -> None:
        self._is_asking = False
        self.command = self._consensus.finish() or self.command

    def _due(self, every: int) -> bool:
        return every > 0 and self.step > 0 and self.step % every == 0

    def _record(self, loss: float) -> None:
        if self.recorder is None or (self.step % self.config.log_every and self._num_left):
            return
        step_s = time.perf_counter() - self._step_began_s
        num_parts = self.problem.num_parts(self._stage, self.rank, self.member.world_size)
        # A search that swaps takes no gradient.
        values = {"grad_norm": self._grad_norm} if self._num_evaluations else {}
        self.recorder.sample(
            self.step,
            loss=loss,
            step_s=step_s,
            samples_per_s=num_parts * max(1, self._num_evaluations) / step_s,
            num_evaluations=float(self._num_evaluations),
            **values,
        )

    @property
    def _num_left(self) -> int:
        return self.problem.num_steps[self._stage] - self._steps_in_stage

    def _validate(self) -> None:
        """Every rank measures the same tensor, and so decides the same."""
        self._enter("validating")
        values = {"loss": self._loss, **self.problem.measure(self._found)}
        if self.rank == 0 and self.recorder is not None:
            self.recorder.sample(self.step, **{f"val_{name}": value for name, value in values.items()})
            now_s = time.monotonic()
            is_last = self.command == "stop" or self.step == sum(self.problem.num_steps)
            if is_last or now_s - self._pictured_s >= _PICTURES_PERIOD_S:
                self._pictured_s = now_s
                self._event("pictures", "", images=self.problem.pictures(self._found))
        self._progress.validated(self.step, values)
        self._validated_step = self.step
        self._enter("training")

    def _pause(self) -> None:
        self._enter("paused")
        while self.command not in ("resume", "stop"):
            time.sleep(_PAUSE_POLL_S)
            self._consensus.begin()
            self.command = self._consensus.finish() or self.command
        self._enter("training")

    def _steer(self) -> None:
        """Takes the settings that the person asked for, after the same step on all ranks."""
        self._steering.asked |= self._consensus.new_settings()
        now = self._steering.take_due(self.config, begins_epoch=True)
        if not now:
            return
        before = {name: getattr(self.config, name) for name in now}
        self._take_settings(now)
        self._steering.changed()
        if self.rank == 0:
            with runs.telling_what_is_not_written(partial(self._event, "note")):
                runs.note_change(self.folder, self.step, now)
            told = ", ".join(f"{name} {before[name]} → {value}" for name, value in now.items())
            self._event("setting", told, **now)

    def _take_settings(self, settings: Mapping[str, Any]) -> None:
        if settings:
            self.config = self.config.changed(**settings)

    # ---- what stays ----

    def _score(self) -> Score | None:
        """Of the validation of this step, if it is the best so far."""
        return self._progress.best if self._progress.is_best(self.step) else None

    def _save_last(self) -> RunError | None:
        """Writes a checkpoint on rank 0 and waits for it; returns why it could not be written."""
        return self._saves.finish(self.step, self._whole_state(), self._score())

    def _whole_state(self) -> WholeState:
        tensors, about = self._state()
        config = self.config.model_dump(mode="json")
        return tensors, {**about, "config": config, "world_size": self.member.world_size}

    def _conclude(self) -> None:
        """Writes the last checkpoint, measures what was found and says so. Where the person stops early, too: it may be enough."""
        if self.step and self._validated_step != self.step and self.config.val_every:
            self._validate()
        failure = together(self._save_last)
        together(lambda: self._tell_the_end(failure))

    def _tell_the_end(self, failure: RunError | None) -> None:
        self._enter("working out the result" if self.rank == 0 else "waiting for rank 0")
        if self.rank == 0:
            with torch.no_grad(), activity.during("working out the result"):
                result = self.problem.result(self._found.cpu(), self.folder)
            self._event("result", self.config.title, **result)
        if failure is not None:
            raise failure

    def _enter(self, state: RunState) -> None:
        if self.recorder is not None:
            self.recorder.state(state, self.step)

    def _tell(self, kind: str, text: str, step: int) -> None:
        if self.recorder is not None:
            self.recorder.event(kind, text, step)

    def _event(self, kind: str, text: str, **detail: Any) -> None:
        if self.recorder is not None:
            self.recorder.event(kind, text, self.step, **detail)
