"""The training loop, from the data to the checkpoint, for every recipe and every way to start it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from nbgpu.config import TrainConfig
from nbgpu.config.settings import steerable
from nbgpu.engine.checkpoints import files as checkpoint
from nbgpu.engine.checkpoints import sharing
from nbgpu.engine.checkpoints.saving import StateParts
from nbgpu.engine.data import identity as data_identity
from nbgpu.engine.data.batches import StepBatches
from nbgpu.engine.dry_run import fake_steps
from nbgpu.engine.group import activity, group, straggler
from nbgpu.engine.group.consensus import together
from nbgpu.engine.logs import run_info
from nbgpu.engine.logs.profiler import Profiler
from nbgpu.engine.memory import budget
from nbgpu.engine.model import precision, randomness
from nbgpu.engine.model.moments import Anchors
from nbgpu.engine.model.schedule import LearningRate
from nbgpu.engine.model.state import State
from nbgpu.engine.training import smoke, validation
from nbgpu.engine.training.loop import Loop, RunContext, raising_afterwards
from nbgpu.engine.training.nonfinite import Guard
from nbgpu.engine.training.rank_model import RankModel
from nbgpu.engine.training.smoke import SmokeTest
from nbgpu.engine.training.step_metrics import Readings, StepClock, StepRecord, is_detailed
from nbgpu.engine.workload.recipe import Evaluated, Recipe
from nbgpu.errors import ConfigError, OutOfMemoryError, RunError
from nbgpu.machine.clock import notebooks_time_s
from nbgpu.machine.signals import uninterrupted
from nbgpu.planning.suitability import without_gpus
from nbgpu.protocol import served
from nbgpu.protocol.records import TIMELINE
from nbgpu.run_folder import checkpoint_files
from nbgpu.text.ranks import count_of_ranks


class Trainer(Loop):
    """Trains one recipe on the ranks of the process group.

    The random numbers of a step come from (seed, rank, step) alone, so that a rank that takes over in the
    middle draws what its predecessor would have drawn, and a step that is repeated draws the same.

    Args:
        recipe: the recipe to train, built with the same settings.

    The other arguments are those of every Loop.
    """

    def __init__(self, config: TrainConfig, recipe: Recipe, context: RunContext) -> None:
        super().__init__(config, context)
        self.recipe = recipe
        self.total_steps = config.steps
        """If the length is given in epochs, it is known once the data are loaded."""
        self._step_batches: StepBatches | None = None
        self._begun = False
        """Whether model and optimizer are those of `step`: initialised, or taken from a checkpoint or another
        rank."""
        self._lost_step = 0
        """The step that training had reached when the state was lost together with a rank's shards; 0 if none
        was."""
        self._guard = Guard(config, self.device)
        self._rank_model = RankModel(self._guard, self.device)
        self._smoke = SmokeTest(config) if config.smoke_test else None
        self._anchors = Anchors(self.device)
        self._profiler = Profiler(config.profiled_steps, self.folder, self.rank, self.device, self._event)
        self._unrecorded: StepRecord | None = None
        """The last step, if it is not yet recorded."""
        self._fitting_batch_size = 0
        """The batch size of the newest step that this rank has completed; 0 before the first."""

    def interrupted(self) -> None:
        """Leave the group that has ended, and go back to the end of the last whole step.

        With fsdp the shards of a rank that is gone are lost for all, so the whole state is dropped.
        """
        survives = self._rank_model.survives
        self._profiler.close(self.step)
        self._rank_model.leave_group()
        # Only the numbers of the last step are recorded. Judging whether they end the run is a collective: if
        # they do, the ranks repeat the step and judge it then.
        self._record_numbers()
        self._unrecorded = None
        if not survives:
            self._forget_state()
            return
        self._rank_model.undo_step()
        if self._guard.is_over:
            self._step_back()

    def _forget_state(self) -> None:
        """Drop the whole state as if this rank were new: each rank has a shard of the state only, and the
        shard of a lost rank is gone."""
        self._lost_step = max(self._lost_step, self.step)
        self._rank_model.forget()
        self._begun = False
        self.step = self._validated_step = 0
        self._progress.load_state(None)
        if self._step_batches is not None:
            # The batches may have begun in the middle of the run, with another batch size.
            self._step_batches.loaders.close()
            self._step_batches = None

    def out_of_memory(self, error: BaseException) -> OutOfMemoryError:
        """Return the error that explains why this rank ran out of memory, with a batch size that would have
        fitted."""
        batch = self._step_batches.in_hand() if self._step_batches is not None else {}
        shapes = {name: tuple(values.shape) for name, values in batch.items()}
        # Once a step was done, what it needs is measured and not estimated.
        had_fitted = self._fitting_batch_size == self.config.batch_size
        need = None if had_fitted else fake_steps.need_of(self.config, self.member.world_size)
        static = self._rank_model.static_memory()
        return budget.explain_run(
            error, self.rank, self.step, shapes, self.config, self.device, static, need, had_fitted
        )

    def close(self) -> None:
        self._profiler.close(self.step)
        self._rank_model.leave_group()
        super().close()
        if self._step_batches is not None:
            self._step_batches.loaders.close()

    # ---- getting ready ----

    def _gather_ranks(self) -> None:
        """Load the data, build and distribute the model, and bring every rank to the same step: that of the
        rank that has done most steps, of a checkpoint, or the first. A collective.

        Calls that may fail on one rank alone are made in `together`, so that all ranks raise; the other calls
        are collectives themselves.
        """
        # Agree on the state to begin with. `began` is the (step, epoch) from which the loaders count.
        began = self._data.began if self._step_batches is not None else (0, 0)
        gathered = self._gather(
            self._begun, lost=self._lost_step, data_began=began, bucket_order=self._rank_model.bucket_order
        )
        self._lost_step = max(position["lost"] for position in gathered.positions)
        source = gathered.source
        if not self._rank_model.is_built:
            self._enter("loading")
        together(self._load)
        self._require_the_same_data()
        if source is not None:
            # The state to be copied was trained on the batches of loaders that began at this (step, epoch).
            self._start_data(*gathered.positions[source]["data_began"])
        self._write_info()
        is_new = not self._rank_model.is_built
        # The strategy distributes the weights only once the model is the same on all ranks.
        self._note(*together(lambda: self._rank_model.build(self.config, self.recipe)))
        if self.config.ema_decay and is_new:
            self._note("ema_decay: validation and result are those of the averaged weights")
        parts = (self.config, self.recipe, self._learning_rate())
        self._rank_model.spread(*parts, gathered.bucket_order)
        together(lambda: self._rank_model.prepare(*parts))
        if is_new:
            self._note(*self._built.grouped.in_words())
        # A new rank knows of no checkpoint, and all ranks have to decide alike when the next one is due.
        self._saves.newest_step = 0
        # Every rank takes the chosen state.
        if source is not None:
            self._copy_state(self.state(), source)
        else:
            self._note(*gathered.notes)
            if (path := gathered.checkpoint) is not None:
                together(lambda: self._load_checkpoint(path))
        # The model is built, and an epoch of the checkpoint's run may have begun elsewhere.
        self._write_info()
        if self._smoke is not None and not self._begun:
            self._smoke.begins(self._built.model)
        self._begun = True
        self._rank_model.measure_memory_before_steps()
        self.command = self._consensus.newest_command()

    def _load(self) -> None:
        """Build the recipe's loaders for this rank, unless it has some. No collective: it runs in
        `together`."""
        if self._step_batches is None:
            with activity.during("loading the data"):
                loaders = self.recipe.build_loaders(self.rank, self.member.world_size, self.device)
            if self._smoke is not None:
                loaders = self._smoke.reduced(loaders)
            stand_in = partial(self.recipe.example, self.config.batch_size)
            self._step_batches = StepBatches(loaders, self.config, self.device, stand_in)
            self._note(
                *without_gpus(self.config, self._devices),
                *precision.slow_on_cpu(self.config, self.device),
                *loaders.warnings,
            )
            self._start_data(0, 0)
            self._require_a_schedule()

    def _require_a_schedule(self) -> None:
        """Raise ConfigError if the run would end before its warm-up does, and let the recipe's own schedule
        raise its errors. Only once the data are loaded is the number of steps of `epochs` known."""
        self._learning_rate().try_out()
        # A run that only works out its result has no step to do.
        if self.step < self.total_steps and (
            problem := self.config.warm_up_problem(self.total_steps, self._data.loaders.steps_per_epoch)
        ):
            raise ConfigError(problem)

    def _require_the_same_data(self) -> None:
        if self.member.world_size > 1:
            data_identity.require_the_same(self._data.loaders)

    def _start_data(self, step: int, epoch: int) -> None:
        """Let an epoch of the loaders begin at this step of the run, and compute the run's number of
        steps."""
        if self._data.began != (step, epoch):
            self._data.begin_at(step, epoch)
        self.total_steps = self._data.total_steps(self.config)

    def _write_info(self) -> None:
        """Write `run_info.json` on rank 0, or write it again: settings, devices, number of steps, data, and
        the number of parameters, which is 0 until the model is built."""
        if self.rank == 0:
            loaders = self._data.loaders
            with self._report_unwritten_files():
                run_info.write(
                    self.folder,
                    self.config,
                    self.member,
                    self._devices,
                    self.total_steps,
                    loaders.steps_per_epoch,
                    loaders.summary,
                    self._data.began,
                    self._rank_model.num_parameters,
                )

    def _learning_rate(self) -> LearningRate:
        """Return the schedule of the learning rate for the present number of ranks and steps."""
        steps_per_epoch = self._data.loaders.steps_per_epoch
        return LearningRate(
            self.config, self.member.world_size, self.total_steps, steps_per_epoch, self.recipe
        )

    def state(self) -> StateParts:
        """Return the state of the last whole step: the tensors of `State.parts`, with fsdp sharded, and as
        JSON the step, the position in the data, the validations so far and the order of DDP's buckets."""
        assert self._unrecorded is None, "the last step was looked at (_flush) before its state counts"
        tensors, about = self._built.parts()
        return tensors, about | {
            "step": self.step,
            "validated_step": self._validated_step,
            "train_s": self._train_s,
            "left_out": self._guard.num_left_out,
            "progress": self._progress.state(),
            "bucket_order": self._rank_model.bucket_order,
            **self._data.position,
        }

    def load_state(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Continue from the result of `state` on this or another rank, with whole tensors. The position in
        the data is left to the caller, because a checkpoint may come from a run with other data."""
        self._built.load(tensors, about)
        self._guard.restore(about["left_out"])
        self._progress.load_state(about["progress"])
        self.step = about["step"]
        self._validated_step = about["validated_step"]
        self._train_s = about["train_s"]

    def _load_checkpoint(self, path: Path) -> None:
        """Load a checkpoint, and begin the data after its step; RunError if its tensors do not fit the
        model."""
        tensors, about = checkpoint.load(path)
        try:
            if self.rank == 0 and about["world_size"] != self.member.world_size:
                ranks = f"{count_of_ranks(about['world_size'])} then, {self.member.world_size} now"
                self._event("note", f"goes on with another number of ranks: {ranks}")
            self.load_state(tensors, about)
            self._saves.newest_step = self.step
            if note := self._data.begin_as(about, self.step):
                self._note(note)
            self.total_steps = self._data.total_steps(self.config)
        except (RuntimeError, ValueError) as error:
            raise RunError(f"{path} does not fit the model: {error}") from error
        except (KeyError, TypeError, AttributeError) as error:
            # The sha256 of the file is right, but a person may have written the file.
            raise RunError(f"{path / checkpoint_files.STATE} is not what nbgpu writes: {error!r}") from error
        if (missing := self._saves.point_to_earlier_best(path, self._progress.best)) is not None:
            self._event("note", missing)

    def _describe_continuation(self) -> str:
        """Return a sentence about the step from which training goes on; if the sharded state was lost (fsdp),
        also how many steps were done."""
        if not self._lost_step:
            return f"Training goes on after step {self.step}."
        lost, self._lost_step = self._lost_step, 0
        where = (
            f"goes on from the newest intact checkpoint, after step {self.step}"
            if self.step
            else "begins again with the first step, because there is no checkpoint"
        )
        return (
            f"With strategy={self.config.strategy!r} each rank has a part of the weights, and they are lost with the "
            f"group: training had done {lost} steps and {where}."
        )

    @property
    def _data(self) -> StepBatches:
        assert self._step_batches is not None, "the data is loaded before the first step"
        return self._step_batches

    @property
    def _built(self) -> State:
        return self._rank_model.state

    # ---- training ----

    def _run_steps(self) -> None:
        """Step until the last step, or until the person stops the run; save and validate in between."""
        while True:
            must_validate = self._is_time_to_validate() and self._validated_step != self.step
            # A person who stops a run waits for its end, and the validation may be what hangs.
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
            with self._profiler.step(self.step + 1), smoke.anomalies(self.config):
                self._train_step()

    def _steer(self) -> None:
        """Apply the settings that the person requested, at the same step on all ranks; settings of the data
        apply from the next epoch. A collective if there are any."""
        self._steering.pending |= self._consensus.new_settings()
        if not self._steering.pending:
            return
        epoch, steps_into_epoch = self._data.epoch_at(self.step)
        now = self._steering.take_due(self.config, begins_epoch=steps_into_epoch == 0)
        if not now:
            return
        # First record the last step under the settings with which it was computed.
        self._flush()
        before = self._apply_settings(now)
        if any(steerable(type(self.config))[name] == "epoch" for name in now):
            self._data.loaders.close()
            self._step_batches = None
            together(self._load)
            self._require_the_same_data()
            self._start_data(self.step, epoch)
        self._write_info()
        rates_before = self._built.grouped.in_words()
        self._built.follow(self.config, self.recipe, self._learning_rate())
        if rates_before != self._built.grouped.in_words():
            self._note(*self._built.grouped.in_words())
        self._note_settings(before, now)

    def _apply_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Continue under other settings, with a recipe that is built again from them; return the previous
        values."""
        before = super()._apply_settings(settings)
        if before != settings:
            self.recipe = type(self.recipe)(self.config)
            self._rank_model.follow(self.config, self.recipe)
        return before

    def _train_step(self) -> None:
        """Do one optimizer step over `accumulate` micro-batches. A collective.

        Its losses are recorded only in the next step (`_record`), so that the device need not be waited for.
        """
        started_s = time.perf_counter()
        # On a GPU each mark of the clock is a CUDA event, so only steps that are recorded get a clock.
        is_timed = self.recorder is not None and (
            self._is_recorded(self.step + 1) or self._is_detailed(self.step + 1)
        )
        clock = StepClock(
            self._profiler, self._anchors if is_timed else None, self._rank_model.strategy.transfers
        )
        clock.enter("data")
        batches, failure = self._data.take(self.step)
        fetched_s = time.perf_counter()
        clock.enter("agreement")
        # The consensus message carries a failure to fetch data, and the person's commands. This small
        # all_reduce travels while the forward and backward passes are computed.
        self._consensus.begin(failure)
        randomness.seed_step(self.config.seed, self.rank, self.step, self.device)
        step = self._rank_model.begin_step(
            self.config, self.recipe, self.step, self._data.loaders.steps_per_epoch
        )
        lr = self._built.learning_rate.at(self.step)
        sums: dict[str, Tensor] = {}
        compute_s = 0.0
        for index, batch in enumerate(batches):
            # Gradients accumulate on each rank, and are exchanged once, with the last micro-batch.
            with self._rank_model.strategy.exchange(now=index == len(batches) - 1):
                clock.enter("forward")
                # A recipe may read this position, to draw the same numbers for a sample on every rank.
                with randomness.at(self._position(index)):
                    terms = step.forward(batch)
                straggler.catch_up()
                if index == 0:
                    compute_s = time.perf_counter() - started_s
                self._guard.look_at(batch)
                clock.enter("backward")
                step.backward(terms["loss"], self._guard.start_of_backward(terms["loss"]))
            if self._built.discriminator is not None:
                clock.enter("beside")
            for name, term in {**terms, **step.auxiliary_step()}.items():
                sums[name] = sums[name] + term.detach() if name in sums else term.detach()
        clock.enter("waiting")
        # The exchange of the gradients has just synchronised all ranks, so no rank waits for the consensus
        # here.
        self._finish_consensus()
        clock.enter("optimizer")
        norms = step.gradient_norms()
        if self.log_writer is not None:
            self.log_writer.look_at(self.step + 1, self._built.model)
        # SIGINT here would leave weights of one step with the number of another.
        with uninterrupted():
            inputs = self._rank_model.end_step(step, self.step, lr, norms["grad_norm"])
            self.step += 1
            self._fitting_batch_size = self.config.batch_size
            self._data.done()
        # An optimizer makes its state in its first step. Only now can it turn out that no checkpoint can hold
        # that state.
        self._built.grouped.require_saveable()
        straggler.catch_up()
        clock.end()
        step_s = time.perf_counter() - started_s
        numbers = {
            **self._built.grouped.rates(lr),
            "step_s": step_s,
            "data_s": fetched_s - started_s,
            "samples_per_s": self.config.batch_size * self.config.accumulate / step_s,
        }
        if self.device.type == "cpu":
            # The rank's work before it first waits for other ranks shows which rank is slow. On a GPU this
            # would only be the time that it takes to queue the work.
            numbers["compute_s"] = compute_s
        means = {name: total / self.config.accumulate for name, total in sums.items()}
        self._record(means | norms, numbers, clock, inputs)

    def _position(self, micro_batch: int) -> randomness.Place:
        """Return the position of a micro-batch among the samples of this step, which are counted over all
        micro-batches of rank 0, then of rank 1, and so on."""
        before = (self.rank * self.config.accumulate + micro_batch) * self.config.batch_size
        return randomness.Place((self.config.seed, self.step), before)

    def _is_time_to_validate(self) -> bool:
        """Return whether a validation is due after the last step."""
        if self.config.val_every_epochs:
            is_the_end = self.step > 0 and self.step == self.total_steps
            return is_the_end or self._ends_an_epoch(self.config.val_every_epochs)
        return self._due(self.config.val_every)

    def _is_worth_a_checkpoint(self) -> bool:
        """Return whether a checkpoint is due after the last step, by epochs, by steps, or because its
        validation is the best."""
        epoch_is_due = self._ends_an_epoch(self.config.checkpoint_every_epochs)
        return epoch_is_due or self._due(self.config.checkpoint_every) or self._progress.is_best(self.step)

    def _ends_an_epoch(self, every: int) -> bool:
        """Return whether the last step was the end of an `every`-th epoch; never for 0."""
        epoch, steps_into_epoch = self._data.epoch_at(self.step)
        return every > 0 and self.step > 0 and steps_into_epoch == 0 and epoch % every == 0

    def _due(self, every: int) -> bool:
        """Return whether the last step is an `every`-th one, or the last of the run; never for 0."""
        return every > 0 and self.step > 0 and (self.step % every == 0 or self.step == self.total_steps)

    def _validate(self) -> None:
        """Validate the model on the held-out samples of all ranks, and hand the means to the records, the
        learning rate, the best score and the smoke test. A collective."""
        # Judge the last step first: after a bad one the run may end here.
        self._flush()
        self._enter("validating")
        shows_pictures = self._shows_pictures(is_last=self.step == self.total_steps)
        means = validation.validate(
            self.recipe,
            self._built,
            self._rank_model.strategy,
            self._data,
            self.config,
            self.device,
            self._show if shows_pictures else None,
        )
        if means:
            self._record_validation(means)
        self._progress.validated(self.step, means)
        if self._smoke is not None:
            self._smoke.validation = means
        self._validated_step = self.step
        self._enter("training")

    def _record_validation(self, means: Mapping[str, float]) -> None:
        """Record a validation and update the learning rate; every rank has the same values."""
        if self.rank == 0 and self.recorder is not None:
            self.recorder.sample(self.step, **{f"val_{name}": mean for name, mean in means.items()})
        learning_rate = self._built.learning_rate
        if learning_rate.validated(means["loss"]):
            lr = learning_rate.at(self.step)
            self._note(f"the validation loss no longer improves: the learning rate is {lr:.3g} from here on")

    def _save(self) -> None:
        """Begin a checkpoint, which rank 0 writes while training continues, also if the writing fails. A
        collective if the state is sharded; see `begin` for when ranks then wait for the disk."""
        # Judge the last step first: if its loss or gradient was not finite and the run stops for that, the
        # checkpoint is of an earlier step.
        self._flush()
        self._saves.begin(self.step, self._state_to_save(), self._score())

    def _conclude(self) -> None:
        """Write the last checkpoint, and evaluate the trained model. Rank 0 writes the checkpoint and reports
        the result; with a recipe that shares its evaluation out, all ranks compute it."""
        self._flush()
        self._profiler.close(self.step)
        if self._progress.is_over and self.command != "stop" and self.step < self.total_steps:
            self._note(self._progress.end_in_words(self.step))
        # Save before the averaged weights take the weights' place, because the saved tensors are not copies.
        failure = self._save_and_wait()
        if self.config.restore_best and self.command != "stop":
            self._go_back_to_best()
        # The recipe decides how long this takes, and rank 0 does some of it alone.
        with group.without_timeout(), validation.evaluating(self._built, self._rank_model.strategy):
            evaluated = self._evaluated() if self._has_result else None
            validation.each_alone(self._rank_model.strategy, lambda: self._report_end(failure, evaluated))
        if self._smoke is not None and self.command != "stop":
            self._check_smoke_test(self._smoke)

    def _go_back_to_best(self) -> None:
        """Load the checkpoint with the best validation, for the result.

        The whole state is loaded, and not only the weights: if a rank is replaced now, its successor copies a
        state that belongs to one step.
        """
        path, reason = self._saves.best(self.step, self._progress.best)
        if path is not None:
            together(lambda: self.load_state(*checkpoint.load(path)))
        elif reason:
            self._note(f"the result is that of the last step, not of the best one: {reason}")

    @property
    def _has_result(self) -> bool:
        return self.config.work_out_result and self.command != "stop"

    def _evaluated(self) -> list[Any] | None:
        """Return the recipe's `evaluate` of each sample of the result, for which all ranks share the work;
        None if the recipe has no such method. A collective."""
        recipe = self.recipe
        if not isinstance(recipe, Evaluated):
            return None

        def report(num_done: int, num_samples: int) -> None:
            if self.recorder is not None:
                self.recorder.state("working out the result", self.step, done=num_done, total=num_samples)

        return validation.evaluate(
            recipe,
            self._built.model,
            self._rank_model.strategy,
            self.device,
            self.member,
            self.config.batch_size,
            report,
        )

    def _report_end(self, failure: RunError | None, evaluated: list[Any] | None) -> None:
        """Compute the result on rank 0 and record it, then raise `failure`, if there is one: the result is
        worth having even if the last checkpoint could not be written.

        Args:
            failure: the error of the last checkpoint.
            evaluated: the result of `_evaluated`.
        """
        if self._has_result:
            self._enter("working out the result" if self.rank == 0 else "waiting for rank 0")
        if self.rank == 0 and self._has_result:
            with raising_afterwards(failure):
                result = self._result(evaluated)
                weights = self._progress.weights_in_words(self.step)
                self._event("result", self.config.title, weights=weights, **result)
        elif failure is not None:
            raise failure

    def _result(self, evaluated: list[Any] | None) -> dict[str, Any]:
        """Return the recipe's result of the trained model."""
        recipe = self.recipe
        with activity.during("working out the result"):
            result = (
                recipe.result(self._built.model, self.device, evaluated)
                if isinstance(recipe, Evaluated)
                else recipe.result(self._built.model, self.device)
            )
        if self._smoke is not None:
            result["note"] = f"{smoke.RESULT_NOTE} {result.get('note', '')}".rstrip()
        return result

    def _check_smoke_test(self, smoke_test: SmokeTest) -> None:
        """Report how a smoke test went; this includes continuing from its checkpoint."""
        name = checkpoint_files.checkpoint_name(self.step)
        path = sharing.everywhere(served.original(checkpoint_files.checkpoints_folder(self.folder) / name))
        loaded, about = together(lambda: checkpoint.load(path))
        well, wrong = smoke_test.verdict(self._built.model, loaded, self.state()[0], path.name)
        if wrong:
            raise RunError("\n".join(["the smoke test failed:", *wrong]))
        together(lambda: self.load_state(loaded, about))
        self._note(*smoke.in_words(self.config, self.member.world_size, well))

    def _record(
        self,
        tensors: dict[str, Tensor],
        numbers: dict[str, float],
        clock: StepClock,
        inputs: Mapping[str, Tensor],
    ) -> None:
        """Record the step before this one, and keep this one's numbers for the next call: read one step late,
        a loss never makes the GPU wait for the CPU."""
        self._flush()
        self._unrecorded = StepRecord(
            self.step, notebooks_time_s(), Readings(tensors), numbers, clock, Readings(inputs)
        )
        if self.recorder is not None:
            self.recorder.at(self.step)

    def _flush(self) -> None:
        """Record the last step, which is recorded one step late, and act on it if its loss or gradient was
        not finite.

        Raises:
            RunError: the run must not continue; every rank raises it, in the same state, that of `self.step`.
        """
        last = self._unrecorded
        if last is None:
            return
        self._record_numbers()
        verdict = self._guard.judge(
            last.step, last.readings.values(), last.inputs, self._built.scaler, self.step
        )
        self._unrecorded = None
        if verdict is None:
            return
        if verdict.stop:
            self._step_back()
            if (failure := self._save_and_wait()) is not None:
                self._event("note", str(failure))
            raise RunError(verdict.text)
        if verdict.rank == self.rank and self.recorder is not None:
            self.recorder.event("nonfinite", verdict.text, last.step)

    def _record_numbers(self) -> None:
        """Write the losses, times and other numbers of the last step into the rank's records, where they are
        due. Waits until the device has computed them."""
        last = self._unrecorded
        if last is None or self.recorder is None:
            return
        # The device has passed the end of the step once its numbers can be read.
        values = {**last.readings.values(), **last.numbers}
        if self._is_recorded(last.step):
            self.recorder.sample(last.step, time_s=last.ended_s, **values, **last.clock.seconds())
        if self._is_detailed(last.step):
            self.recorder.event(TIMELINE, "", last.step, **last.clock.detail())

    def _is_detailed(self, step: int) -> bool:
        return step in self.config.profiled_steps or is_detailed(step)

    def _is_recorded(self, step: int) -> bool:
        return step % self.config.log_every == 0 or step == self.total_steps

    def _step_back(self) -> None:
        """Set `self.step` back to the step of the weights: the steps after it were left out."""
        self.step -= self._guard.num_left_out
        self._guard.restore(0)
