"""The training loop, from the data to the checkpoint, for every recipe and every way to start it."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nbgpu.config import TrainConfig
from nbgpu.engine.checkpoints import files as checkpoint
from nbgpu.engine.checkpoints.saving import Saves, WholeState
from nbgpu.engine.data import identity as data_identity
from nbgpu.engine.data.batches import Feed
from nbgpu.engine.dry_run import fake_steps
from nbgpu.engine.group import activity, exchange
from nbgpu.engine.group.consensus import Consensus, together
from nbgpu.engine.group.group import Membership
from nbgpu.engine.logs import run_info
from nbgpu.engine.logs.log_files import Books
from nbgpu.engine.logs.profiler import Profiler
from nbgpu.engine.memory import budget
from nbgpu.engine.model import build as models
from nbgpu.engine.model import precision
from nbgpu.engine.model.clipping import clip
from nbgpu.engine.model.discriminator import Discriminator
from nbgpu.engine.model.schedule import LearningRate
from nbgpu.engine.model.state import State
from nbgpu.engine.model.strategy import Strategy, spread
from nbgpu.engine.training import smoke, validation
from nbgpu.engine.training.nonfinite import DISCRIMINATOR_LOSS, Guard
from nbgpu.engine.training.progress import Progress
from nbgpu.engine.training.smoke import SmokeTest
from nbgpu.engine.training.steering import Steering
from nbgpu.engine.training.step_metrics import Readings
from nbgpu.engine.workload.recipe import Adversarial, Identity, Recipe
from nbgpu.errors import DataError, OutOfMemoryError, RunError
from nbgpu.machine.signals import uninterrupted
from nbgpu.protocol.records import Command, Device, RunState, cluster_folder
from nbgpu.run_folder import checkpoint_files
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.commands import CommandWatch
from nbgpu.run_folder.recorder import Recorder

_log = logging.getLogger("nbgpu.trainer")
_PAUSE_POLL_S = 0.05
_PICTURES_PERIOD_S = 2.0


def _seed_everything(seed: int, rank: int, step: int, device: torch.device) -> None:
    """Sets the generators that a step draws from (torch's, NumPy's, Python's) to what they are at its beginning."""
    torch_seed, numpy_seed, python_seed = np.random.SeedSequence([seed, rank, step]).generate_state(3)
    # Each of them by itself: torch.manual_seed takes a hundred times as long, most of it for devices that are not used.
    torch.default_generator.manual_seed(int(torch_seed))
    if device.type == "cuda":
        torch.cuda.manual_seed(int(torch_seed))
    np.random.seed(numpy_seed)
    random.seed(int(python_seed))


class Trainer:
    """Trains one recipe on the ranks of the process group.

    Random numbers of a step come from (seed, rank, step) alone, so that a rank which takes over in the middle
    draws what the one before it would have drawn, and a step that is done again draws the same.

    Args:
        config: the settings.
        recipe: what is trained, built with the same settings.
        folder: the run's folder.
        member: this rank's place in the group.
        device: what `run_info.json` says of it.
        recorder: takes the numbers of each step; None leaves them unrecorded.
        books: rank 0's, which take histograms of weights and gradients.
    """

    def __init__(
        self,
        config: TrainConfig,
        recipe: Recipe,
        folder: Path,
        member: Membership,
        device: Device,
        recorder: Recorder | None,
        books: Books | None = None,
    ) -> None:
        self.config = config
        self.recipe = recipe
        self.folder = folder
        self.member = member
        self.rank = member.rank
        self.device = member.device
        self._described_device = device
        self.recorder = recorder
        self.books = books
        self.step = 0
        """Optimizer steps done."""
        self.command: Command | None = None
        """What the person asked for and all ranks have agreed to follow: 'pause', 'stop' or nothing."""
        self.total_steps = config.steps
        """Where the length is given in epochs, it is known when the data are."""
        self._state: State | None = None
        self._strategy: Strategy | None = None
        self._begun = False
        """Model and optimizer are those of `step`: as drawn, as a checkpoint or another rank gave them."""
        self._train_s = 0.0
        self._validated_step = 0
        self._pictured_s = -_PICTURES_PERIOD_S
        self._saves = Saves(folder, config.keep_checkpoints, self.rank, self._tell)
        self._feed: Feed | None = None
        self._buffers_before_step: list[Tensor] = []
        self._guard = Guard(config, self.device)
        self._progress = Progress(config)
        self._smoke = SmokeTest(config) if config.smoke_test else None
        self._lost_step = 0
        """What training had got to when the state was lost, with a rank that had a part of it."""
        self._profiler = Profiler(config.profiled_steps, folder, self.rank, self.device, self._event)
        self._before_bytes: int | None = None
        """What the process held beside the run; None before the first step."""
        self._steering = Steering()
        self._unrecorded: tuple[int, float, Readings, dict[str, float], Readings] | None = None
        """Of the last step: its number, when it ended, what it recorded, and the inputs it is judged by."""

    def run(self, mended: str = "") -> RunState:
        """Trains to the last step, or until the person or a validation that gets no better stops it.

        Returns 'finished', also where it stopped early, or 'stopped' by the person.

        After a failure that is mended (a rank was replaced, the group formed anew) every rank calls it again,
        and training goes on with the state of the rank that had got furthest.

        Args:
            mended: the failure that was mended, in words, which is recorded; empty at the start.

        Raises:
            DataError: a file cannot be used; every rank raises it, at the same step.
        """
        # Made anew each time, so that the newest command counts even if a rank that had heard it is gone.
        self._consensus = Consensus(CommandWatch(self.folder, cluster_folder()) if self.rank == 0 else None)
        self._gather_ranks()
        if mended:
            self._event("heal", f"{mended} {self._goes_on_in_words()}")
        self._enter("training")
        started_s = time.perf_counter()
        try:
            self._train()
        finally:
            self._train_s += time.perf_counter() - started_s
        if self.command == "stop":
            self._enter("stopping")
        self._flush()
        ended_early = self._progress.is_over and self.command != "stop" and self.step < self.total_steps
        if ended_early and self.rank == 0:
            self._event("note", self._progress.end_in_words(self.step))
        self._conclude()
        if self._smoke is not None and self.command != "stop":
            self._look_back(self._smoke)
        ended: RunState = "stopped" if self.command == "stop" else "finished"
        self._enter(ended)
        return ended

    def interrupted(self) -> None:
        """Lets go of what belongs to a group that is of no use any more; `run` may be called again."""
        survives = self._strategy is None or self._strategy.survives
        self._let_go_of_strategy()
        # The last step was perhaps never judged, which takes all ranks: if the run is to stop, they do it again.
        self._record_numbers()
        self._unrecorded = None
        if not survives:
            self._begin_anew()
            return
        if self._state is not None:
            if self._built.average is not None:
                self._built.average.out_of_the_model()
            # Views into DDP's buckets, and with it half of a sum.
            self._model.zero_grad(set_to_none=True)
            if self._built.discriminator is not None:
                self._built.discriminator.forget_gradients()
            for buffer, before in zip(self._model.buffers(), self._buffers_before_step, strict=False):
                buffer.copy_(before)
        if self._guard.is_over:
            self._step_back()

    def _begin_anew(self) -> None:
        """Forgets the state: each rank has a part of it only, and one of them is gone."""
        self._lost_step = max(self._lost_step, self.step)
        self._state = None
        self._begun = False
        self.step = self._validated_step = 0
        self._buffers_before_step = []
        self._guard.restore(0)
        self._progress.load_state(None)
        if self._feed is not None:
            # It may have begun in the middle of the run, with another batch size.
            self._feed.loaders.close()
            self._feed = None

    def out_of_memory(self, error: BaseException) -> OutOfMemoryError:
        """What to say of a run in which this rank got no more memory."""
        static = None
        if self._state is not None and self._before_bytes is not None:
            static = budget.Static.of(
                self._state.model,
                self._state.optimizer,
                self._before_bytes,
                self._state.averages,
                self._state.beside,
            )
        batch = self._feed.in_hand() if self._feed is not None else {}
        shapes = {name: tuple(values.shape) for name, values in batch.items()}
        # Of steps that were done it is known what they take.
        need = None if self.step else fake_steps.need_of(self.config, self.member.world_size)
        return budget.explain_run(error, self.rank, self.step, shapes, self.config, self.device, static, need)

    def close(self) -> None:
        """Ends the threads that read data and write checkpoints."""
        self._let_go_of_strategy()
        self._saves.close()
        if self._feed is not None:
            self._feed.loaders.close()

    def _let_go_of_strategy(self) -> None:
        if self._strategy is not None:
            self._strategy.close()
            self._strategy = None

    # ---- getting ready ----

    def _gather_ranks(self) -> None:
        """Makes every rank ready for the same step: the furthest rank's, a checkpoint's, or the first."""
        standings = exchange.gather(
            {
                "ready": self._begun,
                "step": self.step,
                "lost": self._lost_step,
                "steering": self._steering.standing(self.config),
                "data_began": self._data.began if self._feed is not None else (0, 0),
            }
        )
        self._lost_step = max(s["lost"] for s in standings)
        ready = {rank: s["step"] for rank, s in enumerate(standings) if s["ready"]}
        source = max(ready, key=ready.__getitem__, default=None)
        if missed := self._steering.catch_up([s["steering"] for s in standings]):
            self._take_settings(missed)
        path, notes = (None, ()) if source is not None else self._saves.to_begin_with()
        if not self._begun:
            # Known before the first record: this rank may have taken another's place, or go on from a checkpoint.
            self.step = standings[source]["step"] if source is not None else self._step_of(path)
        if self.recorder is not None:
            self.recorder.at(self.step)
        if self._state is None:
            self._enter("loading")
        together(self._load)
        self._require_the_same_data()
        if source is not None:
            self._begin_data_at(*standings[source]["data_began"])
        self._write_info()
        # Whoever spreads the weights over the ranks does it once the model is the same on all of them.
        model, discriminator = together(self._networks)
        if self.config.strategy == "dp":
            self._event("note", "strategy='dp' copies the model to each GPU in every step; 'ddp' is faster")
        self._strategy = spread(self.config, model, self.recipe.blocks(model), self.device)
        if self._state is None:
            self._state = State(self.config, model, self._learning_rate(), self.device, discriminator)
            if self.config.ema_decay and self.rank == 0:
                self._event("note", "ema_decay: validation and result are those of the averaged weights")
        self._saves.newest_step = 0
        if source is not None:
            self._take_state(source)
        else:
            self._resume(path, notes)
            self._write_info()  # an epoch of the checkpoint's run may have begun elsewhere
        if self._smoke is not None and not self._begun:
            self._smoke.begins(self._model)
        self._begun = True
        self._before_bytes = budget.before_run(
            self.device, self._model, self._state.optimizer, self._state.averages, self._state.beside
        )
        self.command = self._consensus.newest_command()

    def _load(self) -> None:
        if self._feed is None:
            with activity.during("loading the data"):
                loaders = self.recipe.build_loaders(self.rank, self.member.world_size, self.device)
            if self._smoke is not None:
                loaders = self._smoke.few_of(loaders)
            stand_in = partial(self.recipe.example, self.config.batch_size)
            self._feed = Feed(loaders, self.config, self.device, stand_in)
            if self.rank == 0:
                for warning in loaders.warnings:
                    self._event("note", warning)
            self._begin_data_at(0, 0)

    def _require_the_same_data(self) -> None:
        """Raises DataError on every rank where they do not have the same samples to share out. A collective."""
        if self.member.world_size == 1:
            return

        def identities() -> list[dict[str, Identity]]:
            own = together(lambda: dict(self._data.loaders.identity()))
            return exchange.gather(own)

        if told := data_identity.differences(identities(), identities):
            raise DataError(told)

    def _begin_data_at(self, step: int, epoch: int) -> None:
        if self._data.began != (step, epoch):
            self._data.begin_at(step, epoch)
        self.total_steps = self._data.total_steps(self.config)

    def _write_info(self) -> None:
        gathered = exchange.gather(asdict(self._described_device))
        if self.rank == 0:
            devices = [Device(**fields) for fields in gathered]
            loaders = self._data.loaders
            data = loaders.told
            steps = (self.total_steps, loaders.steps_per_epoch)
            with runs.telling_what_is_not_written(partial(self._event, "note")):
                run_info.write(self.folder, self.config, self.member, devices, *steps, data, self._data.began)

    def _networks(self) -> tuple[nn.Module, Discriminator | None]:
        """The model on the device, and its discriminator if it has one. Every rank draws the same weights."""
        if self._state is not None:
            return self._state.model, self._state.discriminator
        with activity.during("building the model"):
            model, notes = models.build(self.config, self.recipe, self.device)
        if self.rank == 0:
            for note in notes:
                self._event("note", note)
        return model, Discriminator.of(self.config, self.recipe, self.device)

    def _learning_rate(self) -> LearningRate:
        return LearningRate(self.config, self.member.world_size, self.total_steps)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All that training goes on from: tensors by name (as `State.parts`), and the rest as JSON.

        A collective where the strategy shares out the weights.
        """
        assert self._unrecorded is None, "the last step was looked at (_flush) before its state counts"
        tensors, about = self._built.parts()
        return tensors, about | {
            "step": self.step,
            "validated_step": self._validated_step,
            "train_s": self._train_s,
            "left_out": self._guard.num_left_out,
            "data_began": self._data.began,
            "progress": self._progress.state(),
        }

    def load_state(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Goes on from what `state` gave on this or another rank; every rank loads the same."""
        self._built.load(tensors, about)
        self._guard.restore(about["left_out"])
        # Not in checkpoints of older versions.
        self._progress.load_state(about.get("progress"))
        self.step = about["step"]
        self._validated_step = about["validated_step"]
        self._train_s = about["train_s"]

    @staticmethod
    def _step_of(path: Path | None) -> int:
        """The step at which a checkpoint was written; 0 where there is none."""
        return 0 if path is None else int(checkpoint_files.state(path)["step"])

    def _resume(self, path: Path | None, notes: Sequence[str]) -> None:
        """Goes on from the checkpoint that the run begins with, if it does, under this run's own settings."""
        if self.rank == 0:
            for note in notes:
                self._event("note", note)
        if path is not None:
            together(lambda: self._load_checkpoint(path))

    def _load_checkpoint(self, path: Path) -> None:
        tensors, about = checkpoint.load(path)
        try:
            if self.rank == 0 and about["world_size"] != self.member.world_size:
                ranks = f"{about['world_size']} ranks then, {self.member.world_size} now"
                self._event("note", f"goes on with another number of ranks: {ranks}")
            self.load_state(tensors, about)
            self._saves.newest_step = self.step
            if all(
                about["config"][name] == getattr(self.config, name) for name in ("batch_size", "accumulate")
            ):
                self._begin_data_at(*about.get("data_began", (0, 0)))
        except (RuntimeError, ValueError) as error:
            raise RunError(f"{path} does not fit the model: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            # Its sha256 is right, and still somebody may have written it by hand.
            raise RunError(f"{path / checkpoint_files.STATE} is not what nbgpu writes: {error!r}") from error
        if (gone := self._saves.point_to_earlier_best(path, self._progress.best)) is not None:
            self._event("note", gone)

    def _goes_on_in_words(self) -> str:
        if not self._lost_step:
            return f"Training goes on after step {self.step}."
        lost, self._lost_step = self._lost_step, 0
        where = (
            f"goes on from the newest whole checkpoint, after step {self.step}"
            if self.step
            else "begins again with the first step, because there is no checkpoint"
        )
        return (
            f"With strategy={self.config.strategy!r} each rank has a part of the weights, and they are lost with the "
            f"group: training had done {lost} steps and {where}."
        )

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
    def _built(self) -> State:
        assert self._state is not None, "the model is built before the first step"
        return self._state

    @property
    def _model(self) -> nn.Module:
        return self._built.model

    @property
    def _spread(self) -> Strategy:
        assert self._strategy is not None, "the ranks are gathered before the first step"
        return self._strategy

    # ---- training ----

    def _train(self) -> None:
        """Steps until the last one, or until the person stops it; saves and validates in between."""
        while True:
            must_validate = self._due(self.config.val_every) and self._validated_step != self.step
            # Whoever stops a run waits for its end, and a validation may be what does not come to one.
            if must_validate and self.command != "stop":
                self._validate()
            ends = self.step == self.total_steps or self._progress.is_over
            if self._saves.newest_step < self.step and not ends and self._is_worth_a_checkpoint():
                self._save()
            if self.command == "pause":
                self._pause()
            if self.command == "stop" or ends:
                return
            self._steer()
            with self._profiler.step(self.step + 1):
                self._train_step()

    def _steer(self) -> None:
        """Takes the settings that the person asked for, at the same step on all ranks; those of the data with the next epoch."""
        self._steering.asked |= self._consensus.new_settings()
        if not self._steering.asked:
            return
        epoch, steps_into_epoch = self._data.epoch_at(self.step)
        now = self._steering.take_due(self.config, begins_epoch=steps_into_epoch == 0)
        if not now:
            return
        self._flush()
        before = self._take_settings(now)
        if self._steering.changes_data(now, self.config):
            self._data.loaders.close()
            self._feed = None
            together(self._load)
            self._require_the_same_data()
            self._begin_data_at(self.step, epoch)
        self._write_info()
        self._built.follow(self.config, self._learning_rate())
        if self.rank == 0:
            with runs.telling_what_is_not_written(partial(self._event, "note")):
                runs.note_change(self.folder, self.step, now)
            told = ", ".join(f"{name} {before[name]} → {value}" for name, value in now.items())
            self._event("setting", told, **now)
        self._steering.changed()

    def _take_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Goes on under other settings; returns those that were changed, as they were."""
        before = {name: getattr(self.config, name) for name in settings}
        if before != settings:
            self.config = self.config.changed(**settings)
            self.recipe = type(self.recipe)(self.config)
            self._guard.follow(self.config)
            if self._state is not None and self._state.discriminator is not None:
                assert isinstance(self.recipe, Adversarial)
                self._state.discriminator.follow(self.config, self.recipe)
        return before

    def _train_step(self) -> None:
        """One optimizer step over `accumulate` micro-batches."""
        started_s = time.perf_counter()
        self._profiler.enter("data")
        batches, failure = self._data.take(self.step)
        fetched_s = time.perf_counter()
        self._profiler.enter("agreement")
        self._consensus.begin(failure)
        _seed_everything(self.config.seed, self.rank, self.step, self.device)
        self._buffers_before_step = [buffer.clone() for buffer in self._model.buffers()]
        lr = self._built.learning_rate.at(self.step)
        sums: dict[str, Tensor] = {}
        own_s = 0.0
        discriminator = self._playing()
        for index, batch in enumerate(batches):
            # Gradients add up on each rank, and cross to the others once, with the last micro-batch.
            with self._spread.exchange(now=index == len(batches) - 1):
                self._profiler.enter("forward")
                with precision.autocast(self.config, self.device):
                    loss_of = self.recipe.loss if discriminator is None else discriminator.loss_of_model
                    terms = loss_of(self._spread.replica, batch)
                if index == 0:
                    own_s = time.perf_counter() - started_s
                    self._guard.look_at(batch)
                self._profiler.enter("backward")
                loss = self._built.scaler.scale(terms["loss"] / self.config.accumulate)
                loss.backward(self._guard.start_of_backward(terms["loss"]))
            if discriminator is not None:
                terms = terms | {DISCRIMINATOR_LOSS: discriminator.learn(self._built.scaler)}
            for name, term in terms.items():
                sums[name] = sums[name] + term.detach() if name in sums else term.detach()
        self._profiler.enter("waiting")
        # Here the gradients have just brought all ranks together, so that nobody waits for it.
        self.command = self._consensus.finish() or self.command
        self._profiler.enter("optimizer")
        self._built.scaler.unscale_(self._built.optimizer)
        norms = {"grad_norm": clip(self._model.parameters(), self.config)}
        if discriminator is not None:
            norms["discriminator_grad_norm"] = discriminator.exchange(self._built.scaler)
            # Both learn from a step, or neither does.
            norms["grad_norm"] = norms["grad_norm"] + 0 * norms["discriminator_grad_norm"]
        if self.books is not None:
            self.books.look_at(self.step + 1, self._model)
        with uninterrupted():
            inputs = self._update(lr, norms["grad_norm"], discriminator)
        self._profiler.enter("other")
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
        self._record(means | norms, numbers, inputs)

    def _playing(self) -> Discriminator | None:
        """The discriminator, if there is one and its time has come."""
        found = self._built.discriminator
        return found if found is not None and self.step >= found.first_step else None

    def _update(
        self, lr: float, grad_norm: Tensor, discriminator: Discriminator | None
    ) -> Mapping[str, Tensor]:
        """What ends a step. An interrupt in the middle would leave a state that belongs to no step."""
        state = self._built
        for group in state.optimizer.param_groups:
            group["lr"] = lr
        optimizers = [state.optimizer]
        if discriminator is not None:
            discriminator.set_lr(lr / self.config.lr)
            optimizers.append(discriminator.optimizer)
        buffers = list(self._model.buffers())
        inputs = self._guard.update(optimizers, grad_norm, buffers, self._buffers_before_step)
        if state.average is not None:
            state.average.update(self.step, self._guard.has_left_out)
        state.scaler.update()
        state.optimizer.zero_grad(set_to_none=not self._spread.keeps_gradients)
        if discriminator is not None:
            discriminator.forget_gradients()
        self.step += 1
        self._data.done()
        self._buffers_before_step = []
        return inputs

    def _is_worth_a_checkpoint(self) -> bool:
        epoch, steps_into_epoch = self._data.epoch_at(self.step)
        every = self.config.checkpoint_every_epochs
        epoch_is_due = every > 0 and steps_into_epoch == 0 and epoch % every == 0
        return epoch_is_due or self._due(self.config.checkpoint_every) or self._progress.is_best(self.step)

    def _due(self, every: int) -> bool:
        return every > 0 and self.step > 0 and (self.step % every == 0 or self.step == self.total_steps)

    def _validate(self) -> None:
        """Averages the recipe's held-out values over the samples of all ranks."""
        self._flush()
        self._enter("validating")
        now_s = time.monotonic()
        is_time = self.step == self.total_steps or now_s - self._pictured_s >= _PICTURES_PERIOD_S
        shows = self.rank == 0 and is_time
        means = validation.validate(
            self.recipe,
            self._built,
            self._spread,
            self._data,
            self.config,
            self.device,
            self._show if shows else None,
        )
        if means:
            self._validated(means)
        self._progress.validated(self.step, means)
        if self._smoke is not None:
            self._smoke.validation = means
        self._validated_step = self.step
        self._enter("training")

    def _show(self, images: dict[str, str]) -> None:
        self._pictured_s = time.monotonic()
        self._event("pictures", "", images=images)

    def _validated(self, means: Mapping[str, float]) -> None:
        """What follows from a validation: every rank has the same values."""
        if self.rank == 0 and self.recorder is not None:
            self.recorder.sample(self.step, **{f"val_{name}": mean for name, mean in means.items()})
        learning_rate = self._built.learning_rate
        if learning_rate.validated(means["loss"]) and self.rank == 0:
            lr = learning_rate.at(self.step)
            self._event("note", f"the validation loss stays: the learning rate is {lr:.3g} from here on")

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
        self._saves.begin(self.step, self._whole_state(), self._score())

    def _score(self) -> checkpoint_files.Score | None:
        """Of the validation of this step, if it is the best so far."""
        return self._progress.best if self._progress.is_best(self.step) else None

    def _conclude(self) -> None:
        """Writes the last checkpoint, and says what the trained model is worth. Rank 0 does both."""
        whole_state = self._whole_state()
        # Before the averaged weights are put in their place: they are no copies.
        failure = together(lambda: self._saves.finish(self.step, whole_state, self._score()))
        if self.config.restore_best and self.command != "stop":
            self._go_back_to_best()
        with validation.evaluating(self._built, self._spread):
            together(lambda: self._tell_the_end(failure))

    def _go_back_to_best(self) -> None:
        """Takes the state with the best validation, all of it, so that a run that is healed meanwhile is in order."""
        path, why = self._saves.best(self.step, self._progress.best)
        if path is not None:
            together(lambda: self.load_state(*checkpoint.load(path)))
        elif why and self.rank == 0:
            self._event("note", f"the result is that of the last step, and not of the best one: {why}")

    def _tell_the_end(self, failure: RunError | None) -> None:
        # The result is worth having also where the checkpoint could not be written.
        if self.command != "stop":
            self._enter("working out the result" if self.rank == 0 else "waiting for rank 0")
        if self.rank == 0 and self.command != "stop":
            weights = self._progress.weights_in_words(self.step)
            with activity.during("working out the result"):
                result = self.recipe.result(self._model, self.device)
            self._event("result", self.config.title, weights=weights, **result)
        if failure is not None:
            raise failure

    def _whole_state(self) -> WholeState:
        """The state, with what tells whether another run can go on from it. A collective where weights are shared out."""
        tensors, about = self.state()
        config = self.config.model_dump(mode="json")
        return tensors, {**about, "config": config, "world_size": self.member.world_size}

    def _look_back(self, smoke_test: SmokeTest) -> None:
        """Says how a smoke test went, which includes going on from its checkpoint."""
        path = self.folder / "checkpoints" / checkpoint_files.checkpoint_name(self.step)
        loaded, about = together(lambda: checkpoint.load(path))
        well, wrong = smoke_test.verdict(self._model, loaded, self.state()[0], path.name)
        if wrong:
            raise RunError("\n".join(["the smoke test failed:", *wrong]))
        together(lambda: self.load_state(loaded, about))
        if self.rank == 0:
            for line in smoke.in_words(self.config, self.member.world_size, well):
                self._event("note", line)

    def _record(
        self, tensors: dict[str, Tensor], numbers: dict[str, float], inputs: Mapping[str, Tensor]
    ) -> None:
        """Records a step one step late, so that reading a loss never makes the GPU wait for the CPU."""
        self._flush()
        self._unrecorded = (self.step, time.time(), Readings(tensors), numbers, Readings(inputs))
        if self.recorder is not None:
            self.recorder.at(self.step)

    def _flush(self) -> None:
        """Records the step that is not recorded yet, and acts on it if its loss or gradient was not finite.

        Raises:
            RunError: the run must not go on; every rank raises it, in the same state, that of `self.step`.
        """
        if self._unrecorded is None:
            return
        step, _, readings, _, inputs = self._unrecorded
        self._record_numbers()
        verdict = self._guard.judge(step, readings.values(), inputs, self._built.scaler, self.step)
        self._unrecorded = None
        if verdict is None:
            return
        if verdict.stop:
            self._step_back()
            whole_state = self._whole_state()
            if (
                failure := together(lambda: self._saves.finish(self.step, whole_state, self._score()))
            ) is not None:
                self._event("note", str(failure))
            raise RunError(verdict.text)
        if verdict.rank == self.rank and self.recorder is not None:
            self.recorder.event("nonfinite", verdict.text, step)

    def _record_numbers(self) -> None:
        if self._unrecorded is None or self.recorder is None:
            return
        step, time_s, readings, numbers, _ = self._unrecorded
        if step % self.config.log_every == 0 or step == self.total_steps:
            self.recorder.sample(step, time_s=time_s, **readings.values(), **numbers)

    def _step_back(self) -> None:
        """Goes back to the step that the weights belong to, where the steps after it were left out."""
        self.step -= self._guard.num_left_out
        self._guard.restore(0)

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
