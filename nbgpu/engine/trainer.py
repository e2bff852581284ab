"""The training loop, from the data to the checkpoint, for every recipe and every way to start it."""

from __future__ import annotations

import json
import logging
import math
import random
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nbgpu import resume
from nbgpu.config import TrainConfig
from nbgpu.engine import checkpoint, exchange, memory, optimizers, replicas
from nbgpu.engine.consensus import Consensus, together
from nbgpu.engine.feed import Feed
from nbgpu.engine.group import Membership
from nbgpu.engine.nonfinite import Guard
from nbgpu.errors import OutOfMemoryError, RunError
from nbgpu.records import Command, Device, RunInfo, RunState
from nbgpu.signals import uninterrupted
from nbgpu.telemetry import CommandWatch, Recorder

if TYPE_CHECKING:
    from nbgpu.recipes import Recipe

_log = logging.getLogger("nbgpu.trainer")
_AMP_DTYPES = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PAUSE_POLL_S = 0.05


def _seed_everything(seed: int, rank: int, step: int) -> None:
    """Sets torch's, NumPy's and Python's generators to what they are at the beginning of a step."""
    torch_seed, numpy_seed, python_seed = np.random.SeedSequence([seed, rank, step]).generate_state(3)
    torch.manual_seed(int(torch_seed))
    np.random.seed(numpy_seed)
    random.seed(int(python_seed))


class Trainer:
    """Trains one recipe with DDP on the ranks of the process group.

    Random numbers of a step come from (seed, rank, step) alone, so that a rank which takes over in the middle
    draws what the one before it would have drawn, and a step that is done again draws the same.

    Args:
        config: the settings.
        recipe: what is trained, built with the same settings.
        folder: the run's folder.
        member: this rank's place in the group.
        device: what `run_info.json` says of it.
        recorder: takes the numbers of each step; None leaves them unrecorded.
    """

    def __init__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        folder: Path,
        member: Membership,
        device: Device,
        recorder: Recorder | None,
    ) -> None:
        self.config = config
        self.recipe = recipe
        self.folder = folder
        self.member = member
        self.rank = member.rank
        self.device = member.device
        self._described_device = device
        self.recorder = recorder
        self.step = 0
        """Optimizer steps done."""
        self.command: Command | None = None
        """What the person asked for and all ranks have agreed to follow: 'pause', 'stop' or nothing."""
        self.model: nn.Module | None = None
        self._ddp: DistributedDataParallel | None = None
        self._begun = False
        """Model and optimizer are those of `step`: as drawn, as a checkpoint or another rank gave them."""
        self._train_s = 0.0
        self._validated_step = 0
        self._saved_step = 0
        keep = config.keep_checkpoints
        self._checkpoints = checkpoint.Writer(folder, keep, self._tell) if self.rank == 0 else None
        self._feed: Feed | None = None
        self._buffers_before_step: list[Tensor] = []
        self._guard = Guard(config, self.device)
        self._before_bytes: int | None = None
        """What the process held beside the run; None before the first step."""
        self._unrecorded: tuple[int, dict[str, Tensor], dict[str, float], Mapping[str, Tensor]] | None = None

    def run(self, mended: str = "") -> RunState:
        """Trains to the last step, or until the person stops it; returns 'finished' or 'stopped'.

        After a failure that is mended (a rank was replaced, the group formed anew) every rank calls it again,
        and training goes on with the state of the rank that had got furthest.

        Args:
            mended: the failure that was mended, in words, which is recorded; empty at the start.

        Raises:
            DataError: a file cannot be used; every rank raises it, at the same step.
        """
        # Made anew each time, so that the newest command counts even if a rank that had heard it is gone.
        self._consensus = Consensus(CommandWatch(self.folder) if self.rank == 0 else None)
        self._gather_ranks()
        if mended:
            self._event("heal", f"{mended} It was replaced, and training goes on after step {self.step}.")
        self._enter("training")
        started_s = time.perf_counter()
        try:
            self._train()
        finally:
            self._train_s += time.perf_counter() - started_s
        self._flush()
        together(self._conclude)
        ended: RunState = "stopped" if self.command == "stop" else "finished"
        self._enter(ended)
        return ended

    def interrupted(self) -> None:
        """Lets go of what belongs to a group that is of no use any more; `run` may be called again."""
        self._let_go_of_ddp()
        if self.model is not None:
            # Views into DDP's buckets, and with it half of a sum.
            self.model.zero_grad(set_to_none=True)
            for buffer, before in zip(self.model.buffers(), self._buffers_before_step, strict=False):
                buffer.copy_(before)
        # The last step was perhaps never judged, which takes all ranks: if the run is to stop, they do it again.
        self._record_numbers()
        self._unrecorded = None
        if self._guard.is_over:
            self._step_back()

    def out_of_memory(self, error: BaseException) -> OutOfMemoryError:
        """What to say of a run in which this rank got no more memory."""
        begun = self.model is not None and self._before_bytes is not None
        static = memory.Static.of(self._model, self._optimizer, self._before_bytes or 0) if begun else None
        batch = self._feed.in_hand() if self._feed is not None else {}
        shapes = {name: tuple(values.shape) for name, values in batch.items()}
        return memory.explain_run(error, self.rank, self.step, shapes, self.config, self.device, static)

    def close(self) -> None:
        """Ends the threads that read data and write checkpoints."""
        self._let_go_of_ddp()
        if self._checkpoints is not None:
            self._checkpoints.close()
        if self._feed is not None:
            self._feed.loaders.close()

    def _let_go_of_ddp(self) -> None:
        if self._ddp is not None:
            replicas.forget(self._ddp)
            self._ddp = None

    # ---- getting ready ----

    def _gather_ranks(self) -> None:
        """Makes every rank ready for the same step: the furthest rank's, a checkpoint's, or the first."""
        standings = exchange.gather({"ready": self._begun, "step": self.step})
        ready = {rank: s["step"] for rank, s in enumerate(standings) if s["ready"]}
        if self.model is None:
            self._enter("loading")
        together(self._load)
        self._write_info()
        together(self._build)
        self._saved_step = 0
        if ready:
            self._take_state(source=max(ready, key=ready.__getitem__))
        else:
            together(self._resume)
        self._begun = True
        # DDP's constructor is a collective.
        self._ddp = DistributedDataParallel(
            self._model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
        self._before_bytes = memory.before_run(self.device, self._model, self._optimizer)
        self.command = self._consensus.newest_command()

    def _load(self) -> None:
        if self._feed is None:
            loaders = self.recipe.build_loaders(self.rank, self.member.world_size)
            self._feed = Feed(loaders, self.config.accumulate, self.device)

    def _write_info(self) -> None:
        """Says in `run_info.json` what is fixed for the run; once."""
        gathered = exchange.gather(asdict(self._described_device))
        path = self.folder / "run_info.json"
        if self.rank != 0 or path.exists():
            return
        info = RunInfo(
            run_id=self.folder.name,
            recipe=self.config.recipe,
            devices=tuple(Device(**fields) for fields in gathered),
            backend=self.member.backend,
            total_steps=self.config.steps,
            steps_per_epoch=self._data.loaders.steps_per_epoch,
            batch_size=self.config.batch_size,
            global_batch_size=self.config.global_batch_size(self.member.world_size),
            started_s=time.time(),
            resumed_from=resume.Beginning.read(self.folder).checkpoint,
        )
        path.write_text(json.dumps(info.to_json(), indent=2) + "\n")

    def _build(self) -> None:
        """Model, optimizer, schedule and scaler. Every rank draws the same weights."""
        if self.model is not None:
            return
        torch.manual_seed(self.config.seed)
        self.model = self.recipe.build_model().to(self.device)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=self.config.lr, weight_decay=self.config.weight_decay, fused=True
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, self._lr_factor)
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=self.config.amp == "fp16")

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that training goes on from: tensors by name ('model.*', 'optimizer.*'), and the rest as JSON."""
        assert self._unrecorded is None, "the last step was looked at (_flush) before its state counts"
        moments, groups = optimizers.state_of(self._optimizer)
        tensors = {f"model.{name}": tensor for name, tensor in self._model.state_dict().items()}
        tensors |= {f"optimizer.{name}": tensor for name, tensor in moments.items()}
        return tensors, {
            "step": self.step,
            "validated_step": self._validated_step,
            "train_s": self._train_s,
            "optimizer": groups,
            "schedule": self._schedule.state_dict()["last_epoch"],
            "scaler": self._scaler.state_dict(),
            "left_out": self._guard.num_left_out,
        }

    def load_state(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave on this or another rank; every rank loads the same."""
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}}
        for name, tensor in tensors.items():
            part, _, rest = name.partition(".")
            parts[part][rest] = tensor
        self._model.load_state_dict(parts["model"])
        optimizers.load_state(self._optimizer, parts["optimizer"], about["optimizer"])
        self._schedule.load_state_dict({**self._schedule.state_dict(), "last_epoch": about["schedule"]})
        self._scaler.load_state_dict(about["scaler"])
        self._guard.restore(about["left_out"])
        self.step = about["step"]
        self._validated_step = about["validated_step"]
        self._train_s = about["train_s"]

    def _resume(self) -> None:
        """Goes on from the checkpoint that the run begins with, if it does, under this run's own settings."""
        beginning = resume.Beginning.read(self.folder)
        if self.rank == 0:
            for note in beginning.notes:
                self._event("note", note)
        if not beginning.checkpoint:
            return
        tensors, about = checkpoint.load(Path(beginning.checkpoint))
        if self.rank == 0 and about["world_size"] != self.member.world_size:
            ranks = f"{about['world_size']} ranks then, {self.member.world_size} now"
            self._event("note", f"goes on with another number of ranks: {ranks}")
        own = {
            "lr": self.config.lr * self._lr_factor(about["schedule"]),
            "initial_lr": self.config.lr,
            "weight_decay": self.config.weight_decay,
        }
        about["optimizer"] = [{**group, **own} for group in about["optimizer"]]
        about["scaler"] = about["scaler"] or self._scaler.state_dict()
        try:
            self.load_state(tensors, about)
        except (RuntimeError, ValueError) as error:
            raise RunError(f"{beginning.checkpoint} does not fit the model: {error}") from error
        self._saved_step = self.step

    def _take_state(self, source: int) -> None:
        """Gives every rank the state of one of them, over the process group."""
        tensors, about = self.state()
        received = exchange.broadcast_tensors(tensors, source, self.device)
        about = exchange.broadcast(about, source)
        if self.rank != source:
            self.load_state(received, about)

    @property
    def _data(self) -> Feed:
        assert self._feed is not None, "the data is loaded before the first step"
        return self._feed

    @property
    def _model(self) -> nn.Module:
        assert self.model is not None, "the model is built before the first step"
        return self.model

    @property
    def _replica(self) -> DistributedDataParallel:
        assert self._ddp is not None, "the ranks are gathered before the first step"
        return self._ddp

    # ---- training ----

    def _train(self) -> None:
        """Steps until the last one, or until the person stops it; saves and validates in between."""
        while True:
            if self._due(self.config.checkpoint_every) and self._saved_step < self.step < self.config.steps:
                self._save()
            if self._due(self.config.val_every) and self._validated_step != self.step:
                self._validate()
            if self.command == "pause":
                self._pause()
            if self.command == "stop" or self.step == self.config.steps:
                return
            self._train_step()

    def _train_step(self) -> None:
        """One optimizer step over `accumulate` micro-batches."""
        started_s = time.perf_counter()
        batches, failure = self._data.take(self.step)
        fetched_s = time.perf_counter()
        self._consensus.begin(failure)
        if failure is not None:
            self._consensus.finish()
        _seed_everything(self.config.seed, self.rank, self.step)
        self._buffers_before_step = [buffer.clone() for buffer in self._model.buffers()]
        sums: dict[str, Tensor] = {}
        own_s = 0.0
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            # Gradients add up on each rank, and cross to the others once, with the last micro-batch.
            with nullcontext() if last else self._replica.no_sync():
                with self._autocast():
                    terms = self.recipe.loss(self._replica, batch)
                if index == 0:
                    own_s = time.perf_counter() - started_s
                    self.command = self._consensus.finish() or self.command
                    self._guard.look_at(batch)
                loss = self._scaler.scale(terms["loss"] / self.config.accumulate)
                loss.backward(self._guard.start_of_backward(terms["loss"]))
            for name, term in terms.items():
                sums[name] = sums[name] + term.detach() if name in sums else term.detach()
        self._scaler.unscale_(self._optimizer)
        limit = self.config.clip_norm or math.inf
        grad_norm: Tensor = nn.utils.clip_grad_norm_(self._model.parameters(), limit)
        lr = float(self._optimizer.param_groups[0]["lr"])
        with uninterrupted():
            inputs = self._update(grad_norm)
        step_s = time.perf_counter() - started_s
        numbers = {
            "lr": lr,
            "step_s": step_s,
            "data_s": fetched_s - started_s,
            "samples_per_s": self.config.batch_size * self.config.accumulate / step_s,
        }
        if self.device.type == "cpu":
            # The rank's own work before it first waits for the others: what tells a slow rank from the rest. On a
            # GPU it would only be the time that it takes to queue the work.
            numbers["compute_s"] = own_s
        means = {name: total / self.config.accumulate for name, total in sums.items()}
        self._record(means | {"grad_norm": grad_norm}, numbers, inputs)

    def _update(self, grad_norm: Tensor) -> Mapping[str, Tensor]:
        """What ends a step. An interrupt in the middle would leave a state that belongs to no step."""
        buffers = list(self._model.buffers())
        inputs = self._guard.update(self._optimizer, grad_norm, buffers, self._buffers_before_step)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=False)  # the gradients are views into DDP's buckets
        self._schedule.step()
        self.step += 1
        self._data.done()
        self._buffers_before_step = []
        return inputs

    def _autocast(self) -> torch.autocast:
        return torch.autocast(
            self.device.type, dtype=_AMP_DTYPES[self.config.amp], enabled=self.config.amp != "off"
        )

    def _lr_factor(self, step: int) -> float:
        """The learning rate of a step (from 0) as a share of the peak: linear warm-up, then the schedule."""
        warmup = self.config.num_warmup_steps
        if step < warmup:
            return (step + 1) / warmup
        if self.config.schedule == "constant":
            return 1.0
        done = (step - warmup) / max(1, self.config.steps - warmup)
        return 0.5 * (1 + math.cos(math.pi * done))

    def _due(self, every: int) -> bool:
        return every > 0 and self.step > 0 and (self.step % every == 0 or self.step == self.config.steps)

    def _validate(self) -> None:
        """Averages the recipe's held-out values over the samples of all ranks."""
        self._flush()
        self._enter("validating")
        self._model.eval()
        sums, num_samples = together(self._validate_own_share)
        self._model.train()
        # A rank may have had no sample, and so not know the names.
        gathered: list[tuple[dict[str, float], int]] = exchange.gather((sums, num_samples))
        total = sum(count for _, count in gathered)
        if total and self.rank == 0 and self.recorder is not None:
            names = dict.fromkeys(name for rank_sums, _ in gathered for name in rank_sums)
            means = {
                name: sum(rank_sums.get(name, 0.0) for rank_sums, _ in gathered) / total for name in names
            }
            self.recorder.sample(self.step, **{f"val_{name}": mean for name, mean in means.items()})
        self._validated_step = self.step
        self._enter("training")

    @torch.no_grad()
    def _validate_own_share(self) -> tuple[dict[str, float], int]:
        """The sums of the recipe's values over this rank's held-out samples, and how many there are."""
        sums: dict[str, float] = {}
        num_samples = 0
        for batch in self._data.loaders.val:
            with self._autocast():
                values = self.recipe.validate(self._model, self._data.to_device(batch))
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + float(value.double().sum())
            num_samples += len(next(iter(values.values())))
        return sums, num_samples

    def _pause(self) -> None:
        """Waits until the person says 'resume' or 'stop', which all ranks hear together."""
        self._enter("paused")
        while self.command not in ("resume", "stop"):
            time.sleep(_PAUSE_POLL_S)
            self._consensus.begin()
            self.command = self._consensus.finish() or self.command
        self._enter("training")

    def _save(self) -> None:
        """Begins a checkpoint on rank 0. No rank waits for it, and training goes on if it fails."""
        # First, whether the step was left out: if the run stops for it, there is another step to save.
        self._flush()
        self._saved_step = self.step
        if self._checkpoints is not None:
            self._checkpoints.begin(self.step, *self._whole_state())

    def _save_last(self) -> RunError | None:
        """Writes a checkpoint on rank 0 and waits for it; returns why it could not be written."""
        if self._checkpoints is None:
            return None
        try:
            self._checkpoints.finish(self.step, *self._whole_state())
        except RunError as error:
            return error
        return None

    def _conclude(self) -> None:
        """Writes the last checkpoint, and says what the trained model is worth. Rank 0 does both."""
        failure = self._save_last()
        # The result is worth having all the same.
        if self.rank == 0 and self.command != "stop":
            self._enter("validating")
            self._model.eval()
            self._event("result", self.config.recipe, **self.recipe.result(self._model, self.device))
        if failure is not None:
            raise failure

    def _whole_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state, with what tells whether another run can go on from it."""
        tensors, about = self.state()
        config = self.config.model_dump(mode="json")
        return tensors, {**about, "config": config, "world_size": self.member.world_size}

    def _record(
        self, tensors: dict[str, Tensor], numbers: dict[str, float], inputs: Mapping[str, Tensor]
    ) -> None:
        """Records a step one step late, so that reading a loss never makes the GPU wait for the CPU."""
        self._flush()
        self._unrecorded = (self.step, tensors, numbers, inputs)

    def _flush(self) -> None:
        """Records the step that is not recorded yet, and acts on it if its loss or gradient was not finite.

        Raises:
            RunError: the run must not go on; every rank raises it, in the same state, that of `self.step`.
        """
        if self._unrecorded is None:
            return
        step, tensors, _, inputs = self._unrecorded
        self._record_numbers()
        verdict = self._guard.judge(step, tensors, inputs, self._scaler, self.step)
        self._unrecorded = None
        if verdict is None:
            return
        if verdict.stop:
            self._step_back()
            if (failure := together(self._save_last)) is not None:
                self._event("note", str(failure))
            raise RunError(verdict.text)
        if verdict.rank == self.rank and self.recorder is not None:
            self.recorder.event("nonfinite", verdict.text, step)

    def _record_numbers(self) -> None:
        if self._unrecorded is not None and self.recorder is not None:
            step, tensors, numbers, _ = self._unrecorded
            self.recorder.sample(step, **{name: t.item() for name, t in tensors.items()}, **numbers)

    def _step_back(self) -> None:
        """Goes back to the step that the weights belong to, where the steps after it were left out."""
        self.step -= self._guard.num_left_out
        self._guard.restore(0)
        self._schedule.last_epoch = self.step
        for parameters in self._optimizer.param_groups:
            parameters["lr"] = self.config.lr * self._lr_factor(self.step)

    def _enter(self, state: RunState) -> None:
        if self.recorder is not None:
            self.recorder.state(state, self.step)

    def _tell(self, kind: str, text: str, step: int) -> None:
        """An event of a step that may be over: called on the thread that writes checkpoints."""
        if kind == "note":
            _log.warning(text)
        if self.recorder is not None:
            self.recorder.event(kind, text, step)

    def _event(self, kind: str, text: str, **detail: Any) -> None:
        if self.recorder is not None:
            self.recorder.event(kind, text, self.step, **detail)
