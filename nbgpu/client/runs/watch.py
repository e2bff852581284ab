"""Follows a training run on its ranks to the end.

It replaces ranks that die, frees those that wait for one that failed, and interrupts a step that does not end
when the run is to stop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbgpu.client.engines.reply import Reply
from nbgpu.client.engines.results import collect, sentence
from nbgpu.client.faults.hangs import HangWatch
from nbgpu.client.faults.lost_hosts import Waiting
from nbgpu.client.faults.recovery import Recovery
from nbgpu.client.faults.watch import RankWatch
from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.config import TrainConfig
from nbgpu.errors import ClusterError, NbgpuError, RunError
from nbgpu.planning import epochs
from nbgpu.planning.suitability import adapt_to_devices
from nbgpu.protocol.calls import Call
from nbgpu.protocol.records import BUSY_STATES, FINAL_STATES, RankFailure, RankStatus, RunState
from nbgpu.run_folder import checkpoint_files
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.commands import CommandWatch, send_settings
from nbgpu.text.ranks import named_ranks

_log = logging.getLogger("nbgpu.run")
_HANG_S = 5.0
"""After a stop request, a rank that has waited in a collective for this long counts as hanging; for less if
`notice_after_s` is shorter."""
_SECOND_STOP_AFTER_S = 1.0
"""Stop requests within this time count as one, such as a double click."""
_MAX_DEATHS_WITHOUT_PROGRESS = 2
"""After more deaths at one step the run is given up: the step probably kills its rank each time."""
_WATCH_PERIOD_S = 0.1
_IMPORT_STATES = frozenset({"starting", "loading packages"})
"""States in which a rank imports packages: it does not heed an interrupt, and comes back by itself."""
_LET_GO_PATIENCE_S = 5.0
_SET_DOWN_PATIENCE_S = 60.0
"""The ranks first finish a checkpoint that they are writing, which may take long."""


class RunWatch:
    """Watches over the ranks of a run.

    Args:
        folder: the run's folder.
        config: the run's settings.
        state: the state of the cluster.
        recovery: replaces ranks of the cluster.
        results: the pending replies to the call that trains, by rank.
        statuses: a function that returns the last known status of every rank.
        take_ranks: a function that is called with the settings of a run that goes on with another number of
            ranks.
        is_served: whether some host does not see the run's folder, so that its files are copied here. The
            loss of a host then ends the run, because the files that it had not sent are missing.

    Attributes:
        failures: the failures that were raised on the ranks, once the run has failed.
        lost: any other error that kept the run from its end.
        heals: a message about each replacement of ranks: which died, and how, and what was lost.
        hang: which ranks wait where and which do not, while a rank waits longer than the cluster's
            `notice_after_s`; otherwise empty.
        abandoned: set it to stop following the run, because its cluster is stopped.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        state: ClusterState,
        recovery: Recovery,
        results: Mapping[int, Reply],
        statuses: Callable[[], list[RankStatus]],
        take_ranks: Callable[[TrainConfig], None],
        is_served: bool = False,
    ) -> None:
        self.failures: Sequence[RankFailure] = ()
        self.lost: NbgpuError | None = None
        self.heals: list[str] = []
        self.hang = ""
        self.abandoned = False
        self._folder = folder
        self._config = config
        self._state = state
        self._recovery = recovery
        self._results = results
        self._statuses = statuses
        self._take_ranks = take_ranks
        self._is_served = is_served
        self._commands = CommandWatch(folder, state.folder)
        # This also skips requests from earlier kernels. A stop among them has had its effect; a pause still
        # holds.
        self._is_to_pause = self._commands.newest() == "pause"
        """Whether the person has asked the run to pause, and not yet to go on."""
        self._was_paused = False
        """Whether the run was to pause when its ranks last came back from it."""
        self._num_stops_asked = 0
        self._stop_asked_mono_s = 0.0
        self._was_interrupted = False
        """Whether a Stop has had to interrupt the ranks."""
        self._not_back = ""
        """The sentence about ranks that did not come back from a Stop; empty if all did."""
        self._replacements_are_prepared = False
        """Whether spares and the processes that new ranks are forked from have been told to import what
        training needs."""
        self._died_at_step = 0
        self._num_deaths = 0
        self._settings_since_s = 0.0
        """The ranks skip requests for settings from before this time: those are in `changes.jsonl`, or were
        sent again."""
        self._checkpoint_before: Path | None = None
        """The newest checkpoint when a host came back, or the run's folder if there was none then; None while
        no host has come back."""
        self._takes_host_back = False
        """Whether the ranks were interrupted to take a host back."""

    def _read_commands(self) -> None:
        """Read the newest pause, resume or stop request from the run's folder, where this kernel and other
        processes write them. A second stop means that the person does not want to wait for the step's end."""
        newest = self._commands.newest()
        if newest is not None:
            self._is_to_pause = newest == "pause"
        if newest != "stop":
            return
        now_s = time.monotonic()
        if not self._num_stops_asked:
            self._num_stops_asked, self._stop_asked_mono_s = 1, now_s
        elif now_s - self._stop_asked_mono_s > _SECOND_STOP_AFTER_S and (self.hang or not self._is_stopping):
            self._num_stops_asked, self._stop_asked_mono_s = 2, now_s

    def follow(self) -> RunState:
        """Wait for the run's end and return how it ended."""
        try:
            self._follow_ranks()
        except NbgpuError as error:
            self.lost = error
        except Exception as error:  # noqa: BLE001
            # Otherwise callers that wait for the run would wait for ever.
            _log.exception("the handle of %s failed", self._folder.name)
            self.lost = RunError(f"{self._folder.name} cannot be followed any more: {error!r}")
        if self.failures or self.lost:
            return "failed"
        # An abandoned run has no answers, and a run that was interrupted while it loaded its data has raised
        # on all ranks.
        answered = all(result.ready() and result.exception() is None for result in self._results.values())
        answers = {result.result() for result in self._results.values()} if answered else set()
        return "finished" if answers == {"finished"} else "stopped"

    @property
    def _is_stopping(self) -> bool:
        """Whether a rank has taken the stop request, or has ended."""
        return any(status.state in ("stopping", *FINAL_STATES) for status in self._statuses())

    def _newest_step(self) -> int:
        """Return the newest recorded step, or without telemetry the step of the newest checkpoint."""
        if self._config.telemetry:
            return max(status.step for status in self._statuses())
        newest = checkpoint_files.newest_whole(self._folder, contents=False).checkpoint
        return 0 if newest is None else int(checkpoint_files.state(newest)["step"])

    def _follow_ranks(self) -> None:
        """Wait for the ranks until the run ends.

        In each pass of the loop all ranks return from training, die, or get stuck. The ranks then train again
        if they were interrupted to readmit a host or to stop with a checkpoint, or if dead ranks could be
        replaced; otherwise the run ends.
        """
        while True:
            watch = RankWatch(self._state.ranks, self._results)
            hang = self._wait_for_all(watch)
            self._was_paused = self._is_to_pause
            if self.abandoned:
                return
            self.failures, _ = watch.outcome()
            takes_host_back, self._takes_host_back = self._takes_host_back, False
            if takes_host_back and watch.only_freed and not watch.stuck():
                if self._readmit_host():
                    continue
            elif hang is not None and watch.only_freed:
                if self._end_in_order(watch, hang):
                    continue
            elif self._can_heal(watch) and self._heal(watch):
                continue
            self._end_on_the_ranks(watch)
            return

    def _wait_for_all(self, watch: RankWatch) -> str | None:
        """Wait until all ranks are back or gone; if a Stop had to interrupt them, return what each was doing,
        else None."""
        interrupted: str | None = None
        sampler = self._state.stack_sampler()
        hangs = HangWatch(
            sampler,
            self._results,
            len(self._results),
            self._state.config.notice_after_s,
            work="run",
            is_busy=lambda rank: self._statuses()[rank].state in BUSY_STATES,
        )
        with closing(hangs):
            while watch.pending() and not self.abandoned and not self._has_lost_ranks(watch):
                watch.wait(_WATCH_PERIOD_S)
                watch.check()
                hangs.check()
                self._read_commands()
                self.hang = hangs.text or self._reason_for_wait(watch)
                if not watch.severed and self._must_interrupt(hangs):
                    interrupted = hangs.describe_all()
                    watch.stop()
                elif not watch.severed and self._can_readmit_host():
                    self._takes_host_back = True
                    watch.stop()
                self._prepare_replacements()
            if interrupted is not None and (stuck := watch.stuck()):
                self._not_back = hangs.not_back(stuck)
        self.hang = ""
        return interrupted

    def _has_lost_ranks(self, watch: RankWatch) -> bool:
        """Return whether some ranks did not return although they were freed and interrupted.

        A rank whose process is suspended may still return, so it counts only if the run is to stop. A rank
        that imports packages returns by itself.
        """
        stuck = watch.stuck()
        if not stuck:
            return False
        if self._state.ranks.standstills(stuck):
            return self.is_to_stop
        return not set(stuck) <= set(self._importing(watch))

    def _importing(self, watch: RankWatch) -> list[int]:
        """Return the ranks whose newest recorded state is an import of packages."""
        if not self._config.telemetry:
            return []
        statuses = self._statuses()
        return [rank for rank in watch.pending() if statuses[rank].state in _IMPORT_STATES]

    def _reason_for_wait(self, watch: RankWatch) -> str:
        """Return why a run that is to stop has not stopped yet; empty if the reason is unknown."""
        importing = self._importing(watch) if self.is_to_stop else []
        if not importing:
            return ""
        are = "is" if len(importing) == 1 else "are"
        return f"{named_ranks(importing)} {are} loading packages, which is not cut short: the run stops after that"

    @property
    def is_to_stop(self) -> bool:
        """Whether the person has asked the run to stop."""
        return self._num_stops_asked > 0

    def _must_interrupt(self, hangs: HangWatch) -> bool:
        """Return whether the step has to be interrupted: the person asked twice, or asked once and ranks hang
        in a collective."""
        if self._num_stops_asked != 1:
            return self._num_stops_asked > 1
        # With fsdp the interrupt would lose the steps since the newest checkpoint, because no rank has the
        # whole state. And ranks that are stopping may wait long for the one that writes the last checkpoint.
        if self._config.strategy == "fsdp" or self._is_stopping:
            return False
        return hangs.wait_longer_than(min(self._state.config.notice_after_s or _HANG_S, _HANG_S))

    def _prepare_replacements(self) -> None:
        """Start spare processes and have them import what training needs. This waits for the first step,
        because earlier it would take cores from the ranks, which still import packages themselves."""
        if not self._replacements_are_prepared and self._newest_step() > self._died_at_step:
            self._state.ranks.add_spares(self._state.config.spare)
            self._state.ranks.prepare_to_train([self._config.recipe])
            self._replacements_are_prepared = True

    def _end_in_order(self, watch: RankWatch, hang: str) -> bool:
        """After a stop has interrupted the ranks, call them once more so that they write a checkpoint and
        stop. Return False if they cannot, and the run ends without it."""
        self.failures = ()
        if {status.state for status in self._statuses()} <= {*_IMPORT_STATES, "loading"}:
            # No step was done, so there is nothing to save.
            return False
        message = f"{self._folder.name} did not come to the end of its step when it was to stop: {hang}."
        if watch.stuck():
            self.lost = ClusterError(f"{message} {self._not_back}")
        elif self._was_interrupted:
            self.lost = RunError(
                f"{message} It was interrupted for the second time, and ended without a checkpoint"
            )
        else:
            self._was_interrupted = True
            self._num_stops_asked = 1
            self._state.ranks.regroup()
            self._results = self._call_to_train(f"{hang}: all were interrupted for the Stop.")
        return self.lost is None

    def _can_heal(self, watch: RankWatch) -> bool:
        """Return whether the run can go on after replacing dead ranks: some ranks died, not all did, and no
        other rank failed. Also count the deaths without progress between them; if the run is given up for
        these, or because a host does not see its folder, add the reason to `failures`."""
        if not watch.gone:
            return False
        if self._is_served and self._state.pool.lost():
            self._add_to_failures(
                "the run ends here, because not all hosts see its folder. resume='auto' goes on from its newest checkpoint"
            )
            return False
        if len(watch.gone) + len(watch.stuck()) == len(self._results) and not self._waits_for_hosts():
            return False
        if any(failure.rank not in watch.gone for failure in self.failures):
            return False
        step = self._newest_step()
        self._num_deaths = self._num_deaths + 1 if step <= self._died_at_step + 1 else 1
        self._died_at_step = step
        if self._num_deaths <= _MAX_DEATHS_WITHOUT_PROGRESS:
            return True
        where = f"at step {step}" if self._config.telemetry else f"without a checkpoint after step {step}"
        self._add_to_failures(f"ranks died {self._num_deaths} times {where}, and the run was given up")
        return False

    def _waits_for_hosts(self) -> bool:
        """Return whether a host is lost and waited for; when it returns, the run goes on from its newest
        checkpoint, even if no other rank is left."""
        return self._state.config.on_host_lost == "wait" and bool(self._state.pool.lost())

    def _must_wait(self) -> bool:
        """Return whether to continue to wait for a lost host: until the run is abandoned or is to stop."""
        self._read_commands()
        return not self.abandoned and not self._num_stops_asked

    def _show_waiting(self, text: str) -> None:
        self.hang = text

    def _heal(self, watch: RankWatch) -> bool:
        """Replace the ranks that died and let the run go on; return False if that fails."""
        cause = "; ".join(failure.message for failure in self.failures)
        # A rank may be stuck although it was freed: gloo may never report to it that its peer was killed in
        # the middle of sending to it.
        if stuck := watch.stuck():
            self._state.ranks.end(stuck)
            were = "was" if len(stuck) == 1 else "were"
            cause += f"; {named_ranks(stuck)} did not come back, and {were} ended"
        world_size = len(self._results)
        try:
            message = self._recovery.replace_all_gone(Waiting(self._must_wait, self._show_waiting))
        except NbgpuError as error:
            self._add_to_failures(f"it could not be replaced: {error}")
            return False
        if len(self._state.ranks) < world_size:
            return self._go_on_with_fewer(world_size, cause, message)
        self._report_heal(f", {sentence(cause)} {message}")
        self._begin_again(
            f"{sentence(cause)} It was replaced, and the variables that cells had made on it are lost."
        )
        return True

    def _go_on_with_fewer(self, num_before: int, cause: str, message: str) -> bool:
        """Start the run again from its newest checkpoint on the ranks that are left after the loss of a host;
        return False if that fails or the run is to stop.

        Args:
            num_before: the number of ranks before the loss.
            cause: which ranks died, and how.
            message: how the cluster goes on.
        """
        self._read_commands()
        if self._num_stops_asked:
            self._add_to_failures("the run was to stop, and its newest checkpoint is what is left")
            return False
        try:
            self._set_down_run()
            batch_change = self._adapt_batch(num_before)
        except (NbgpuError, OSError) as error:
            self._add_to_failures(f"the run could not go on with fewer ranks: {error}")
            return False
        self._report_heal(
            f", {sentence(cause)} {sentence(message)} The run goes on from its newest checkpoint. {batch_change}"
        )
        self._begin_again(
            f"{sentence(cause)} {len(self._state.ranks)} of {num_before} ranks are left. {batch_change}"
        )
        return True

    def _can_readmit_host(self) -> bool:
        """Return whether to interrupt the run now to take a host back: one has returned, and the run has
        written a checkpoint since then, from which it starts again.

        Never for a run that is to stop, that has files on other hosts, or that has all ranks it may have.
        """
        if self._is_served or not self._state.pool.has_come(self._state.world_size) or self._num_stops_asked:
            self._checkpoint_before = None
            return False
        newest = checkpoint_files.newest_whole(self._folder, contents=False).checkpoint
        if self._checkpoint_before is None:
            # The folder stands for no checkpoint yet.
            self._checkpoint_before = newest or self._folder
        return newest is not None and newest != self._checkpoint_before

    def _readmit_host(self) -> bool:
        """Start the run again from the checkpoint that it has just written, with the ranks of a host that has
        returned; return False if that fails."""
        self._checkpoint_before = None
        num_before = len(self._results)
        try:
            self._set_down_run()
            try:
                message = self._recovery.hosts.readmit_hosts()
            except NbgpuError as error:
                message = f"a host that came back could not be taken: {sentence(str(error))}"
            if not self._state.ranks.group_is_whole:
                self._state.ranks.regroup()
            batch_change = self._adapt_batch(num_before)
        except (NbgpuError, OSError) as error:
            self.lost = RunError(f"{self._folder.name} could not go on with a host that came back: {error}")
            return False
        self._report_heal(f": {message} {batch_change}")
        self._begin_again(f"{message.splitlines()[0] if message else ''} {batch_change}".strip())
        return True

    def _set_down_run(self) -> None:
        """Have the ranks close the run without ending its logs, so that it can start again from a
        checkpoint."""
        collect(self._state.ranks.call(Call.SET_DOWN_RUN, str(self._folder)), _SET_DOWN_PATIENCE_S)

    def _adapt_batch(self, num_before: int) -> str:
        """Change the settings so that a step has as many samples as before on another number of ranks;
        return a sentence about the batch.

        Args:
            num_before: the number of ranks before.

        Raises:
            ConfigError: the ranks cannot train with these settings.
            OSError: the settings cannot be written into the run's folder.
        """
        self._settings_since_s = time.time()
        before = runs.with_changes(runs.read_settings(self._folder)[1], self._folder)
        requested = self._pending_settings(before)
        changes, message = epochs.on_other_ranks(before, num_before, len(self._state.ranks))
        config = adapt_to_devices(before.changed(**(changes | requested)), self._state.devices)
        if changes:
            runs.note_change(self._folder, self._newest_step(), changes)
        if requested:
            send_settings(self._folder, requested)
        self._take_ranks(config)
        return message

    def _pending_settings(self, present: TrainConfig) -> dict[str, Any]:
        """Return the settings that the person has requested and that the ranks have not taken yet, because
        the run was paused or the settings take effect with the next epoch."""
        self._read_commands()
        values = present.model_dump(mode="json")
        requested = self._commands.take_settings()
        return {name: value for name, value in requested.items() if values.get(name) != value}

    def _report_heal(self, text: str) -> None:
        """Add to the news and to `heals` that ranks were replaced and the run goes on.

        Args:
            text: what happened, as the rest of a sentence that begins 'While RUN was training'.
        """
        doing = "paused" if self._was_paused else "training"
        stays = " It stays paused until you resume it." if self._is_to_pause else ""
        heal = f"While {self._folder.name} was {doing}{text}{stays}"
        # In this order: whoever reports a heal takes it out of the news.
        self._state.news.append(heal)
        self.heals.append(heal)

    def _call_to_train(self, repaired: str) -> Mapping[int, Reply]:
        return self._state.ranks.call(Call.TRAIN, str(self._folder), repaired, self._settings_since_s)

    def _begin_again(self, repaired: str) -> None:
        """Have the ranks train again after some were replaced, or on another number of ranks; the run's
        record gets `repaired` as the description of what happened."""
        self.failures = ()
        # `_prepare_replacements` starts another spare in place of one that was taken.
        self._replacements_are_prepared = False
        self._results = self._call_to_train(repaired)

    def _add_to_failures(self, text: str) -> None:
        self.failures = [replace(f, message=f"{f.message}; {text}") for f in self.failures]

    def _leave_outcomes(self, ranks: Sequence[int]) -> None:
        """Record in the run's folder how the run ended on ranks that could not record it themselves.
        Otherwise a process that attaches later would take them for training."""
        failures = {failure.rank: failure for failure in self.failures}
        for rank in ranks:
            message = f"rank {rank} did not come back from the run"
            failure = failures.get(rank, RankFailure(rank, "ClusterError", message, message))
            try:
                runs.leave_outcome(self._folder, rank, failure)
            except OSError as error:
                _log.warning(
                    "how rank %d ended cannot be noted in %s: %s", rank, self._folder, error.strerror
                )

    def _end_on_the_ranks(self, watch: RankWatch) -> None:
        """Have the ranks that came back release the run's model and data, and record how the run ended on the
        others.

        If errors have left the process group unsure, it is formed again; but not if ranks are stuck, which
        get no other cell until they are back, nor if ranks are gone, which must be replaced first.
        """
        stuck = watch.stuck()
        returned = [rank for rank in self._results if rank not in watch.gone and rank not in stuck]
        has_failed = bool(self.failures or self.lost)
        failed = [failure.rank for failure in self.failures]
        self._leave_outcomes([*watch.gone, *stuck])
        # Rank 0 ends the run's logs in this call.
        ended = self._state.ranks.call(
            Call.LET_GO_OF_RUN, str(self._folder), has_failed, failed, ranks=returned
        )
        if stuck:
            self._recovery.abandon_cell(self._results)
        elif watch.left_the_group_unsure and not watch.gone:
            self._state.ranks.regroup(failed)
        # Nothing waits for this call, which looks through all objects of torch's compiler and MONAI.
        self._state.ranks.call(Call.FREE_MEMORY, ranks=returned)
        give_up_mono_s = time.monotonic() + _LET_GO_PATIENCE_S
        for result in ended.values():
            result.wait(max(0.0, give_up_mono_s - time.monotonic()))
