"""The loop that minimises over a tensor instead of training a model."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from nbgpu.config import TrainConfig
from nbgpu.engine.checkpoints import files as checkpoint
from nbgpu.engine.checkpoints.saving import StateParts
from nbgpu.engine.group import activity, exchange, group
from nbgpu.engine.group.consensus import together
from nbgpu.engine.logs import run_info
from nbgpu.engine.memory import usage as memory
from nbgpu.engine.training.loop import Loop, RunContext, raising_afterwards
from nbgpu.engine.workload.lbfgs import Lbfgs
from nbgpu.engine.workload.problem import Problem
from nbgpu.engine.workload.shards import Shards
from nbgpu.errors import OutOfMemoryError, RunError
from nbgpu.machine.signals import uninterrupted
from nbgpu.text.sizes import in_words


class _EndOfRun(Exception):
    """Leaves the search when the person, or early stopping, ends the run."""


class Minimiser(Loop):
    """Minimises one problem on the ranks of the process group. All ranks do the same steps.

    If the search is spread over the ranks (L-BFGS), a checkpoint has its memory of earlier steps, and a run
    that continues from it takes the steps of an uninterrupted run. Otherwise, and always after a rank was
    replaced, which had a part of that memory, only the tensor is left: the optimizer starts afresh from it.

    Args:
        problem: the problem to minimise, built with the same settings.

    The other arguments are those of every Loop, whose `step` counts over all stages.
    """

    def __init__(self, config: TrainConfig, problem: Problem, context: RunContext) -> None:
        super().__init__(config, context)
        self.problem = problem
        self._loaded = False
        self._tensor: Tensor | None = None
        """The tensor after `step` steps; None before the run has begun."""
        self._stage = 0
        self._steps_in_stage = 0
        self._lbfgs: Lbfgs | None = None
        """The L-BFGS search of the stage and its pairs, if they are spread over the ranks; else None."""
        self._mesh: DeviceMesh | None = None
        """All ranks of the group, over which the search's memory is spread."""
        self._loss = math.nan
        """The loss after the last step."""
        self._step_began_s = 0.0
        self._num_evaluations = 0
        self._grad_norm = 0.0
        self._consensus_is_open = False
        """Whether a consensus message was begun and not finished."""

    def interrupted(self) -> None:
        """Drop the L-BFGS pairs and the mesh: each rank has a part of the pairs only, and the mesh belongs to
        the group that has ended."""
        self._lbfgs, self._mesh = None, None

    def out_of_memory(self, error: BaseException) -> OutOfMemoryError:
        """Return the error that explains why this rank ran out of memory, with the settings that would lower
        its need."""
        usage = memory.Usage.of(self.device)
        return OutOfMemoryError(
            f"rank {self.rank} ran out of memory after step {self.step}: {error}\n"
            f"It holds {in_words(usage.used_bytes)}. Take a smaller shape, a smaller limit_to, or more ranks: each has "
            "its share of the slices"
        )

    # ---- getting ready ----

    def _gather_ranks(self) -> None:
        """Load the problem, and bring every rank to the same tensor and step: those of the rank that has done
        most steps, of a checkpoint, or the problem's first tensor. A collective."""
        # A consensus message of the group that has ended never arrives.
        self._consensus_is_open = False
        gathered = self._gather(self._tensor is not None)
        if not self._loaded:
            self._enter("loading")
        together(self._load)
        self._write_info()
        source = gathered.source
        if source is not None:
            self._lbfgs = None
            # Only the source has a state to send; the other ranks pass an empty one, which `_copy_state`
            # ignores.
            self._copy_state(self._position() if self.rank == source else ({}, {}), source)
        else:
            self._note(*gathered.notes)
            together(lambda: self._begin(gathered.checkpoint))
        self.command = self._consensus.newest_command()

    def _describe_continuation(self) -> str:
        forgets = "; it has forgotten its earlier steps" if self.problem.is_spread(self._stage) else ""
        return f"The search goes on after step {self.step}{forgets}."

    def _load(self) -> None:
        """Load the problem's data, once in a process. No collective: it runs in `together`."""
        if not self._loaded:
            with activity.during("loading the data"):
                self.problem.load()
            self._loaded = True

    def _write_info(self) -> None:
        """Write `run_info.json` on rank 0. All steps count as one epoch, because the problem has no data
        set."""
        if self.rank == 0:
            total_steps = steps_per_epoch = sum(self.problem.num_steps)
            steps = (total_steps, steps_per_epoch)
            with self._report_unwritten_files():
                run_info.write(
                    self.folder, self.config, self.member, self._devices, *steps, self.problem.summary
                )

    def _begin(self, path: Path | None) -> None:
        """Begin with a checkpoint, or with the problem's first tensor if there is none."""
        if path is None:
            self._tensor = self.problem.begin(0, None).to(self.device)
            return
        self.load_state(*checkpoint.load(path))
        self._saves.newest_step = self.step
        if self._lbfgs is None:
            self._note("the optimizer starts afresh: the checkpoint holds the tensor found alone")
        if (note := self._saves.point_to_earlier_best(path, self._progress.best)) is not None:
            self._event("note", note)

    def state(self) -> StateParts:
        """Return the state of the last whole step; the memory of a search that is spread over the ranks is
        sharded."""
        tensors, about = self._position()
        if self._lbfgs is not None:
            parts, about["lbfgs"] = self._lbfgs.state()
            tensors |= {f"optimizer.{name}": self._sharded(part) for name, part in parts.items()}
        return tensors, about

    def _sharded(self, part: Tensor) -> DTensor:
        """Return an L-BFGS vector of all ranks as a DTensor, from this rank's part of it.

        The checkpoint code gathers DTensors, so that the file has the whole vector and fits another number of
        ranks.

        Args:
            part: (number of this rank's slices, numbers of a slice); the result is (L, numbers of a slice).
        """
        if self._mesh is None:
            self._mesh = init_device_mesh(self.device.type, (self.member.world_size,))
        shape = torch.Size((self._solution.shape[1], part.shape[1]))
        # Shape and stride are given, because the last ranks may have fewer slices: by default torch takes the
        # rows of this rank times the number of ranks.
        return DTensor.from_local(
            part, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=(shape[1], 1)
        )

    def _position(self) -> StateParts:
        """Return the state without the memory of the search."""
        return {"model.field": self._solution}, {
            "step": self.step,
            "stage": self._stage,
            "steps_in_stage": self._steps_in_stage,
            "loss": self._loss,
            "validated_step": self._validated_step,
            "train_s": self._train_s,
            "progress": self._progress.state(),
        }

    def load_state(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Continue from the result of `state`, with whole tensors; the L-BFGS pairs are taken over if the
        stage of the state spreads its search over the ranks."""
        self._tensor = tensors["model.field"].to(self.device)
        self.step = about["step"]
        self._stage, self._steps_in_stage = about["stage"], about["steps_in_stage"]
        self._loss = about["loss"]
        self._validated_step = about["validated_step"]
        self._train_s = about["train_s"]
        self._progress.load_state(about["progress"])
        self._lbfgs = None
        if "lbfgs" in about and self.problem.is_spread(self._stage):
            self._lbfgs = self._new_lbfgs()
            self._lbfgs.load_state(lambda name: tensors[f"optimizer.{name}"], about["lbfgs"])

    def _new_lbfgs(self) -> Lbfgs:
        shards = Shards(self._solution.shape, self.rank, self.member.world_size)
        return Lbfgs(shards, self.problem.num_pairs, self.device)

    @property
    def _solution(self) -> Tensor:
        assert self._tensor is not None, "the ranks are gathered before the first step"
        return self._tensor

    # ---- steps ----

    def _run_steps(self) -> None:
        self._minimise()
        if self._consensus_is_open:
            self._finish_consensus()

    def _minimise(self) -> None:
        """Search stage after stage, each until its steps are done or a step gains less than the tolerance."""
        num_stages = len(self.problem.num_steps)
        try:
            self._between_steps()
            while True:
                ended = self._search()
                where = self.problem.stage_name(self._stage) if num_stages > 1 else "the search"
                self._note(f"{where} ended after {self._steps_in_stage} steps: {ended}")
                if self._stage == num_stages - 1:
                    return
                # Computed before the state changes, because it may take long and be interrupted.
                following = self.problem.begin(self._stage + 1, self._solution.cpu()).to(self.device)
                with uninterrupted():
                    self._tensor, self._stage, self._steps_in_stage = following, self._stage + 1, 0
                    self._lbfgs = None
        except _EndOfRun:
            return
        except RunError:
            if (failure := self._save_and_wait()) is not None:
                self._event("note", str(failure))
            raise

    def _search(self) -> str:
        """Search in this stage; return the reason why it ended."""
        if self.problem.is_spread(self._stage):
            if self._lbfgs is None:
                self._lbfgs = self._new_lbfgs()
            shards = Shards(self._solution.shape, self.rank, self.member.world_size)
            return self._lbfgs.minimise(
                lambda tensor: self._evaluate_part(tensor, shards),
                self._solution,
                self._num_left,
                self._after_step,
                self.problem.tolerance,
            )
        return self.problem.search(
            self._solution,
            self._stage,
            range(self._steps_in_stage, self.problem.num_steps[self._stage]),
            self._evaluate,
            self._after_step,
            lambda: self.config.lr,
            self.rank,
            self.member.world_size,
        )

    def _evaluate_part(self, tensor: Tensor, shards: Shards) -> tuple[float, Tensor]:
        """Return the loss of the whole tensor and this rank's part of its gradient; the norm of the whole
        gradient is kept for the step's record. A collective."""
        loss, gradient = self.problem.evaluate_part(tensor, self._stage, self.step, shards)
        self._num_evaluations += 1
        self._grad_norm = math.sqrt(shards.sums(gradient.square().sum(dim=1, keepdim=True))[0])
        return loss, gradient

    def _evaluate(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and its gradient, with the shape of `tensor`; every rank gets the same. The norm of
        the gradient is kept for the step's record."""
        loss, gradient = self.problem.evaluate(
            tensor, self._stage, self.step, self.rank, self.member.world_size
        )
        self._num_evaluations += 1
        self._grad_norm = float(gradient.norm())
        return loss, gradient

    def _after_step(self, tensor: Tensor, loss: float) -> None:
        """Take over the result of a step, record it, complete the step's consensus message, and prepare the
        next step; the search is left by `_EndOfRun` if there is none."""
        # An interrupt in the middle would leave a tensor with the number of another step.
        with uninterrupted():
            self._tensor = tensor
            self.step += 1
            self._steps_in_stage += 1
            self._loss = loss
        self._record(loss)
        self._finish_consensus()
        self._between_steps()

    def _between_steps(self) -> None:
        """Validate and save a checkpoint if it is time, carry out the person's commands, and begin the next
        consensus message."""
        # A healed run may come here with the last step taken and its validation not made.
        if self._due(self.config.val_every) and self._validated_step != self.step:
            self._validate()
        is_best = self._progress.is_best(self.step)
        if self._saves.newest_step < self.step and (self._due(self.config.checkpoint_every) or is_best):
            self._saves.begin(self.step, self._state_to_save(), self._score())
        if self.command == "pause":
            self._pause()
        if self.command == "stop":
            raise _EndOfRun
        if self._progress.is_over:
            self._note(self._progress.end_in_words(self.step))
            raise _EndOfRun
        self._steer()
        self._consensus.begin()
        self._consensus_is_open = True
        self._step_began_s = time.perf_counter()
        self._num_evaluations = 0

    def _finish_consensus(self) -> None:
        self._consensus_is_open = False
        super()._finish_consensus()

    def _due(self, every: int) -> bool:
        """Return whether the last step is an `every`-th one; never for 0."""
        return every > 0 and self.step > 0 and self.step % every == 0

    def _record(self, loss: float) -> None:
        """Record the loss, the time and the number of evaluations of every `log_every`-th step, and of the
        last step of a stage."""
        if self.recorder is None or (self.step % self.config.log_every and self._num_left):
            return
        step_s = time.perf_counter() - self._step_began_s
        # A search by swaps computes no gradient.
        values = {"grad_norm": self._grad_norm} if self._num_evaluations else {}
        num_evaluations = float(self._num_evaluations)
        self.recorder.sample(self.step, loss=loss, step_s=step_s, num_evaluations=num_evaluations, **values)

    @property
    def _num_left(self) -> int:
        return self.problem.num_steps[self._stage] - self._steps_in_stage

    def _validate(self) -> None:
        """Measure the tensor on rank 0 and broadcast the values, by which all ranks make the same decisions.
        Only one rank measures, because that takes the memory of several copies of the tensor. A
        collective."""
        self._enter("validating")
        with group.without_timeout():
            measured = together(lambda: self.problem.measure(self._solution) if self.rank == 0 else {})
        measured = exchange.broadcast(measured, source=0)
        # The loss is that of the step: a problem has no held-out data.
        values = {"loss": self._loss, **measured}
        if self.rank == 0 and self.recorder is not None:
            self.recorder.sample(self.step, **{f"val_{name}": value for name, value in measured.items()})
            if self._shows_pictures(self.command == "stop" or self.step == sum(self.problem.num_steps)):
                self._show(self.problem.pictures(self._solution))
        self._progress.validated(self.step, values)
        self._validated_step = self.step
        self._enter("training")

    def _steer(self) -> None:
        """Apply the settings that the person requested, after the same step on all ranks."""
        self._steering.pending |= self._consensus.new_settings()
        if now := self._steering.take_due(self.config, begins_epoch=True):
            self._note_settings(self._apply_settings(now), now)

    # ---- the result ----

    def _conclude(self) -> None:
        """Write the last checkpoint, measure the tensor and report the result, also if the person stopped the
        run: the tensor may be good enough."""
        if self.step and self._validated_step != self.step and self.config.val_every:
            self._validate()
        failure = self._save_and_wait()
        with group.without_timeout():
            together(lambda: self._report_end(failure))

    def _report_end(self, failure: RunError | None) -> None:
        """Compute the result on rank 0 and record it; raise `failure`, the error of the last checkpoint,
        afterwards, because the result is worth having without the checkpoint."""
        self._enter("working out the result" if self.rank == 0 else "waiting for rank 0")
        with raising_afterwards(failure):
            if self.rank == 0:
                with torch.no_grad(), activity.during("working out the result"):
                    result = self.problem.result(self._solution.cpu(), self.folder)
                self._event("result", self.config.title, **result)
