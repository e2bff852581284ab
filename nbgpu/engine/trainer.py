"""The training loop, from the data to the checkpoint, for every recipe and every way to start it."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from nbgpu.config import TrainConfig
from nbgpu.engine import checkpoint
from nbgpu.engine.consensus import Consensus, together
from nbgpu.engine.group import Membership
from nbgpu.records import Command, RunInfo, RunState
from nbgpu.telemetry import CommandWatch, Recorder

if TYPE_CHECKING:
    from nbgpu.recipes import Batch, Loaders, Recipe

_AMP_DTYPES = {"off": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PAUSE_POLL_S = 0.05


class Trainer:
    """Trains one recipe with DDP on the ranks of the process group.

    Args:
        config: the settings.
        recipe: what is trained, built with the same settings.
        folder: the run's folder.
        member: this rank's place in the group.
        info: what is said of the run in `run_info.json`; the steps of an epoch are filled in.
        recorder: takes the numbers of each step; None leaves them unrecorded.
    """

    def __init__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        folder: Path,
        member: Membership,
        info: RunInfo,
        recorder: Recorder | None,
    ) -> None:
        self.config = config
        self.recipe = recipe
        self.folder = folder
        self.device = member.device
        self.rank = member.rank
        self.world_size = member.world_size
        self.info = info
        self.recorder = recorder
        self.step = 0
        self.consensus = Consensus(CommandWatch(folder) if self.rank == 0 else None)
        self.state: RunState = "starting"
        self.loaders: Loaders | None = None
        self._batches: Iterator[Batch] | None = None
        self._unrecorded: tuple[int, dict[str, Tensor], dict[str, float]] | None = None

    def run(self) -> RunState:
        """Trains to the last step, or until the person stops it; returns 'finished' or 'stopped'.

        Raises:
            DataError: a file cannot be used; every rank raises it, at the same step.
        """
        self._enter("loading")
        try:
            together(self._load)
            self.model = together(lambda: self.recipe.build_model().to(self.device))
            self._wrap()
            self._enter("training")
            started_s = time.perf_counter()
            stopped = self._train()
            self.train_s = time.perf_counter() - started_s
            self._flush()
            together(lambda: self._conclude(stopped))
        finally:
            if self.loaders is not None:
                self.loaders.close()
        self._enter("stopped" if stopped else "finished")
        return self.state

    def _load(self) -> None:
        # Every rank draws the same weights; after that each draws its own noise.
        torch.manual_seed(self.config.seed)
        self.loaders = self.recipe.build_loaders(self.rank, self.world_size)
        if self.rank == 0:
            info = replace(self.info, steps_per_epoch=self.loaders.steps_per_epoch)
            (self.folder / "run_info.json").write_text(json.dumps(info.to_json(), indent=2) + "\n")

    @property
    def _data(self) -> Loaders:
        assert self.loaders is not None, "the data is loaded before the first step"
        return self.loaders

    def _wrap(self) -> None:
        """Puts DDP, optimizer, schedule and scaler around the model; DDP's constructor is a collective."""
        torch.manual_seed(self.config.seed + 1 + self.rank)
        self.ddp = DistributedDataParallel(
            self.model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
        )
        self.optimizer = torch.optim.AdamW(
            self.ddp.parameters(), lr=self.config.lr, weight_decay=self.config.weight_decay, fused=True
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._lr_factor)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.config.amp == "fp16")

    def _train(self) -> bool:
        """Steps until the last one, and validates in between; True if the person stopped it."""
        while self.step < self.config.steps:
            command = self._train_step()
            self.step += 1
            if self._due(self.config.val_every):
                self._validate()
            if command == "pause":
                command = self._pause()
            if command == "stop":
                return True
        return False

    def _train_step(self) -> Command | None:
        """One optimizer step over `accumulate` micro-batches; returns what the person asked for meanwhile."""
        started_s = time.perf_counter()
        batches, failure = self._next_batches()
        fetched_s = time.perf_counter()
        self.consensus.begin(failure)
        command = None
        if failure is not None:
            self.consensus.finish()
        sums: dict[str, Tensor] = {}
        own_s = 0.0
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            # Gradients add up on each rank, and cross to the others once, with the last micro-batch.
            with nullcontext() if last else self.ddp.no_sync():
                with self._autocast():
                    terms = self.recipe.loss(self.ddp, batch)
                if index == 0:
                    own_s = time.perf_counter() - started_s
                    command = self.consensus.finish()
                self.scaler.scale(terms["loss"] / self.config.accumulate).backward()
            for name, term in terms.items():
                sums[name] = sums[name] + term.detach() if name in sums else term.detach()
        self.scaler.unscale_(self.optimizer)
        limit = self.config.clip_norm or math.inf
        grad_norm: Tensor = nn.utils.clip_grad_norm_(self.ddp.parameters(), limit)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=False)  # the gradients are views into DDP's buckets
        lr = float(self.schedule.get_last_lr()[0])
        self.schedule.step()
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
        self._record(means | {"grad_norm": grad_norm}, numbers)
        return command

    def _next_batches(self) -> tuple[list[Batch], Exception | None]:
        """The micro-batches of one step on the device, or what went wrong in fetching them."""
        try:
            return [self._to_device(self._next_batch()) for _ in range(self.config.accumulate)], None
        except Exception as error:  # noqa: BLE001 - whatever it is, all ranks must learn of it
            return [], error

    def _next_batch(self) -> Batch:
        if self._batches is None:
            self._batches = iter(self._data.train)
        try:
            return next(self._batches)
        except StopIteration:
            self._data.next_epoch()
            self._batches = iter(self._data.train)
            return next(self._batches)

    def _to_device(self, batch: Batch) -> Batch:
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}

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
        return every > 0 and (self.step % every == 0 or self.step == self.config.steps)

    def _validate(self) -> None:
        """Averages the recipe's held-out values over the samples of all ranks."""
        self._flush()
        self._enter("validating")
        self.ddp.eval()
        sums, num_samples = together(self._validate_own_share)
        self.ddp.train()
        # A rank may have had no sample, and so not know the names.
        gathered: list[tuple[dict[str, float], int]] = [({}, 0)] * self.world_size
        dist.all_gather_object(gathered, (sums, num_samples))
        total = sum(count for _, count in gathered)
        if total and self.rank == 0 and self.recorder is not None:
            names = dict.fromkeys(name for rank_sums, _ in gathered for name in rank_sums)
            means = {
                name: sum(rank_sums.get(name, 0.0) for rank_sums, _ in gathered) / total for name in names
            }
            self.recorder.sample(self.step, **{f"val_{name}": mean for name, mean in means.items()})
        self._enter("training")

    @torch.no_grad()
    def _validate_own_share(self) -> tuple[dict[str, float], int]:
        """The sums of the recipe's values over this rank's held-out samples, and how many there are."""
        sums: dict[str, float] = {}
        num_samples = 0
        for batch in self._data.val:
            with self._autocast():
                values = self.recipe.validate(self.model, self._to_device(batch))
            for name, value in values.items():
                sums[name] = sums.get(name, 0.0) + float(value.double().sum())
            num_samples += len(next(iter(values.values())))
        return sums, num_samples

    def _pause(self) -> Command | None:
        """Waits until the person says 'resume' or 'stop', which all ranks hear together."""
        self._enter("paused")
        command: Command | None = None
        while command not in ("resume", "stop"):
            time.sleep(_PAUSE_POLL_S)
            self.consensus.begin()
            command = self.consensus.finish()
        self._enter("training")
        return command

    def _conclude(self, stopped: bool) -> None:
        """Writes the checkpoint, and says what the trained model is worth. Rank 0 does both."""
        if self.rank != 0:
            return
        about = {
            "config": self.config.model_dump(mode="json"),
            "schedule": self.schedule.state_dict()["last_epoch"],
            "train_s": self.train_s,
        }
        path = checkpoint.save(self.folder, self.step, self.model, self.optimizer, about)
        self._event("checkpoint", path.name)
        if not stopped:
            self._enter("validating")
            self.model.eval()
            self._event("result", self.config.recipe, **self.recipe.result(self.model, self.device))

    def _record(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        """Records a step one step late, so that reading a loss never makes the GPU wait for the CPU."""
        self._flush()
        self._unrecorded = (self.step + 1, tensors, numbers)

    def _flush(self) -> None:
        if self._unrecorded is not None and self.recorder is not None:
            step, tensors, numbers = self._unrecorded
            self.recorder.sample(step, **{name: t.item() for name, t in tensors.items()}, **numbers)
        self._unrecorded = None

    def _enter(self, state: RunState) -> None:
        self.state = state
        if self.recorder is not None:
            self.recorder.state(state, self.step)

    def _event(self, kind: str, text: str, **detail: Any) -> None:
        if self.recorder is not None:
            self.recorder.event(kind, text, self.step, **detail)
