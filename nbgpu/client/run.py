"""The handle of a training run: what it does now, and what a person can ask of it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import ipyparallel as ipp

from nbgpu import logbook, manifest, resume, runs
from nbgpu.backends import Climb, Rung
from nbgpu.client.ending import Ending
from nbgpu.client.frames import frame_of
from nbgpu.client.hangs import HangWatch
from nbgpu.client.notice import Notice
from nbgpu.client.plan import Plan
from nbgpu.client.ranks import Ranks
from nbgpu.client.results import LeftResult, sentence
from nbgpu.client.watch import RankWatch
from nbgpu.client.whereabouts import Lookout
from nbgpu.config import ClusterConfig, TrainConfig, read_toml
from nbgpu.errors import ClusterError, ConfigError, NbgpuError, RankError, RunError
from nbgpu.records import (
    FINAL_STATES,
    Command,
    Device,
    RankFailure,
    RankStatus,
    RunInfo,
    RunState,
)
from nbgpu.settings import steerable
from nbgpu.suitability import settled
from nbgpu.telemetry import Reader, send_command, send_settings

if TYPE_CHECKING:
    import pandas as pd

    from nbgpu.client.sweep import Sweep

_log = logging.getLogger("nbgpu.run")
_RUN_IN_ENGINE = "nbgpu.engine.train:run_in_engine"
_STOP_PATIENCE_S = 10.0
_HANG_S = 5.0
"""A rank that waits so long, or as long as a notice takes to come, while the person wants the run to stop, waits for one that
does not come."""
_SECOND_STOP_AFTER_S = 1.0
"""Who presses twice within a second meant it once."""
_MAX_HEAL_ATTEMPTS = 3
_MAX_DEATHS_WITHOUT_PROGRESS = 2
"""A step that kills its rank each time it is done would go on for ever."""
_WATCH_PERIOD_S = 0.1
_LET_GO_PATIENCE_S = 5.0


class Host(Protocol):
    """What a run asks of the cluster that it runs on."""

    config: ClusterConfig
    devices: tuple[Device, ...]
    climb: Climb
    news: list[str]

    @property
    def backend(self) -> str: ...

    @property
    def rung(self) -> Rung: ...

    @property
    def ranks(self) -> Ranks: ...

    def replace_gone(self) -> str: ...

    def leave_behind(self, results: Mapping[int, ipp.AsyncResult]) -> None: ...

    def lookout(self) -> Lookout: ...


class Presenter(Protocol):
    """What shows runs to a person. The client does not know the widgets; `nbgpu/__init__.py` connects them."""

    def show(self, run: Run) -> None:
        """Displays the live panel of a run."""
        ...

    def prepare(self) -> None:
        """Does what `report` would take a second for when it is called first; on a thread, while a run trains."""
        ...

    def report(self, run: Run) -> None:
        """Writes `report.html` into the folder of a run that is over."""
        ...

    def show_sweep(self, sweep: Sweep) -> None:
        """Displays the live panel of a sweep."""
        ...

    def report_sweep(self, sweep: Sweep) -> None:
        """Writes `report.html` into the folder of a sweep that is over."""
        ...

    def offer_stop(self, stop: Callable[[], None]) -> Callable[[], None]:
        """Shows a Stop button under the cell that is running, which calls `stop` on another thread when it is
        pressed; returns what takes it away again."""
        ...


presenter: Presenter | None = None


class Run:
    """A training run on the ranks of a cluster.

    Attributes:
        folder: the run's folder: run.toml, rankN.jsonl, checkpoints/, report.html, env.json.
        config: the settings that it was started with, and those that were set since.
        reader: every sample and event of every rank so far.
        failures: what was raised on the ranks; empty unless `status` is 'failed'.
        hang: who waits where and who does not, in words, while a rank waits longer than the cluster's
            `notice_after_s`; else empty.
    """

    def __init__(
        self,
        folder: Path,
        config: TrainConfig,
        info: RunInfo,
        host: Host,
        results: dict[int, ipp.AsyncResult],
        planned: Plan | None = None,
    ) -> None:
        self.folder = folder
        self.config = config
        self._planned = planned or Plan.at_first(host.config, config, info.devices, host.climb)
        self.failures: Sequence[RankFailure] = ()
        self.hang = ""
        self.reader = Reader(folder, info.world_size)
        self._info = info
        self._info_written_ns = 0
        self._host = host
        self._results = results
        self._ending: Ending[RunState] = Ending(folder.name, _log)
        self._abandoned = False
        self._num_stops_asked = 0
        self._stop_asked_mono_s = 0.0
        self._interrupted = False
        """Whether a Stop has had to interrupt the ranks."""
        self._lost: NbgpuError | None = None
        self._prepared = False
        """Whether what a new rank needs has been imported where it comes from."""
        self._died_at_step = 0
        self._num_deaths = 0
        self._preparing: threading.Thread | None = None
        if presenter is not None:
            self._preparing = threading.Thread(target=presenter.prepare, name="nbgpu-prepare", daemon=True)
            self._preparing.start()
        threading.Thread(target=self._follow_to_the_end, name="nbgpu-run", daemon=True).start()

    def __repr__(self) -> str:
        return (
            f"<Run {self.folder.name}: {self.status}, step {self._newest_step()} of {self.info.total_steps}>"
        )

    @classmethod
    def start(cls, config: TrainConfig, host: Host, planned: Plan | None = None) -> Run:
        """Makes the run's folder and starts the trainer on every rank; `planned` is a plan that was made of it."""
        folder = runs.create(config, host.config)
        results = host.ranks.call(_RUN_IN_ENGINE, str(folder))
        return cls(folder, config, _info(folder, config, host), host, results, planned)

    @classmethod
    def rejoin(cls, folder: Path, host: Host) -> Run:
        """The handle of a run that another process started; what the ranks returned stands in the run's folder."""
        _, config = read_toml(folder / "run.toml")
        config = runs.with_changes(config, folder)
        results = {rank: LeftResult(folder, rank) for rank in range(len(host.devices))}
        run = cls(folder, config, _info(folder, config, host), host, results)
        if all(result.ready() for result in results.values()):
            run._ending.wait_at_most(_STOP_PATIENCE_S)
        return run

    @property
    def info(self) -> RunInfo:
        """What a reader needs to know of the run; of the data nothing is known until the ranks have looked at them."""
        path = self.folder / "run_info.json"
        try:
            written_ns = path.stat().st_mtime_ns
        except FileNotFoundError:
            return self._info
        if written_ns != self._info_written_ns:
            self._info_written_ns = written_ns
            self._info = RunInfo.from_json(json.loads(path.read_text()))
        return self._info

    @property
    def plan(self) -> Plan:
        """What it does and takes, as `cluster.plan` says it; how the data come to the ranks as they found them."""
        info = self.info
        if not info.data:
            return self._planned
        return replace(self._planned, data=info.data, steps_per_epoch=info.steps_per_epoch)

    @property
    def over(self) -> bool:
        return self._ending.over

    @property
    def status(self) -> RunState:
        """What the run does: the state of its ranks, and of the slowest one where they differ."""
        if self._ending.state is not None:
            return self._ending.state
        order: list[RunState] = ["starting", "loading", "paused", "validating", "training"]
        states = {s.state for s in self.statuses()} - FINAL_STATES
        return next((state for state in order if state in states), "training")

    def statuses(self) -> list[RankStatus]:
        """The last known of every rank, in order."""
        return self.reader.statuses(self._info.devices)

    def _newest_step(self) -> int:
        return max(status.step for status in self.statuses())

    def metrics(self) -> pd.DataFrame:
        """Every number that the ranks recorded: one row for each sample, with rank, step, time_s and the series."""
        return frame_of(self.reader)

    def result(self) -> Mapping[str, Any] | None:
        """What the recipe says of the trained model, beside its baselines; None until the run has finished."""
        results = [event.detail for event in self.reader.events() if event.kind == "result"]
        return results[-1] if results else None

    def notes(self) -> list[str]:
        """What the ranks want a person to know, such as a checkpoint that could not be written; oldest first."""
        return [event.text for event in self.reader.events() if event.kind == "note"]

    def panel(self) -> None:
        """Displays the live panel: loss, memory, utilization and throughput of every rank."""
        if presenter is None:
            raise RunError(
                "nothing is connected that could display a panel. Use the run through `import nbgpu`"
            )
        presenter.show(self)

    def pause(self) -> None:
        """Asks all ranks to wait before their next step; they agree on which step that is."""
        self._ask("pause")

    def resume(self) -> None:
        """Lets a paused run go on."""
        self._ask("resume")

    def set(self, **settings: Any) -> None:
        """Lets the run go on with other settings.

        All ranks take them at the same step; those of the data with the next epoch. A mark on the panels says where,
        and `changes.jsonl` in the run's folder.

        Raises:
            ConfigError: a setting cannot be changed now, or its value is not valid; nothing is changed.
            RunError: the run is over.
        """
        possible = steerable(type(self.config))
        if fixed := [name for name in settings if name not in possible]:
            raise ConfigError(
                f"{', '.join(fixed)} cannot be changed while a run goes on. What can be: {', '.join(possible)}"
            )
        config = self.config.changed(**settings)
        if "batch_size" in settings:
            config = config.changed(global_batch_size=None)
        config = settled(config, self._host.devices)
        self._refuse_if_over("be changed")
        self.config = config
        send_settings(self.folder, {name: getattr(config, name) for name in settings})

    def stop(self) -> None:
        """Asks all ranks to end after the step they are in; they write a checkpoint first.

        A step that does not come to its end, because a rank waits for one that does not come, is interrupted; so is
        any step where this is called again. Training goes back to the state before it then and ends with that; with
        strategy='fsdp', where no rank has it, with that of the newest checkpoint.
        """
        self._ask("stop")
        now_s = time.monotonic()
        if not self._num_stops_asked or now_s - self._stop_asked_mono_s > _SECOND_STOP_AFTER_S:
            self._num_stops_asked, self._stop_asked_mono_s = self._num_stops_asked + 1, now_s

    def wait(self, timeout_s: float | None = None) -> Run:
        """Waits for the end. The kernel's interrupt stops the run, waits for that, and is then raised.

        Raises:
            RankError: the run failed; it shows the ranks' own tracebacks.
            ClusterError: the ranks could not be reached any more while it went on.
            TimeoutError: the run goes on after `timeout_s` seconds.
        """
        notice = Notice()
        try:
            self._ending.wait(
                timeout_s,
                lambda: self.status,
                self.stop,
                _STOP_PATIENCE_S,
                meanwhile=lambda: notice.show(self.hang),
            )
        finally:
            notice.show("")
        if self.failures:
            raise RankError(self.failures)
        if self._lost is not None:
            raise self._lost
        return self

    def checkpoint(self, which: Literal["newest", "best"] = "newest") -> Path:
        """The newest checkpoint with nothing wrong, or the one with the best validation (`best_metric`).

        Raises:
            RunError: there is none; what is damaged is named.
        """
        if which == "best":
            return self._best_checkpoint()
        newest = manifest.newest_whole(self.folder)
        damaged = "; ".join(f"{path.name} is damaged ({what})" for path, what in newest.damaged)
        if newest.checkpoint is None:
            raise RunError(
                f"{self.folder.name} has no whole checkpoint: {damaged}"
                if damaged
                else f"{self.folder.name} has no checkpoint yet: one is written at the end, "
                "and after every `checkpoint_every` steps"
            )
        if damaged:
            _log.warning("%s; the newest whole checkpoint is %s", damaged, newest.checkpoint.name)
        return newest.checkpoint

    def _best_checkpoint(self) -> Path:
        try:
            best = manifest.best(self.folder)
        except ValueError as error:
            raise RunError(str(error)) from None
        if best is None:
            why = (
                "none was validated yet"
                if self.config.best_metric
                else "it follows no validation value. Set best_metric='loss' before a run"
            )
            raise RunError(f"{self.folder.name} has no best checkpoint: {why}")
        if what := manifest.damage(best.checkpoint):
            raise RunError(
                f"the best checkpoint of {self.folder.name}, {best.checkpoint}, is damaged ({what}). "
                "run.checkpoint() is the newest whole one"
            )
        return best.checkpoint

    def on_end(self, callback: Callable[[Run], None]) -> None:
        """Calls back once when the run is over, before `wait` returns; at once where it is over already."""
        self._ending.call(lambda: callback(self))

    def abandon(self) -> None:
        """Ends the handle of a run whose cluster was stopped under it."""
        self._abandoned = True
        self._ending.wait_at_most(_STOP_PATIENCE_S)

    def _ask(self, command: Command) -> None:
        self._refuse_if_over(command)
        send_command(self.folder, command)

    def _refuse_if_over(self, what: str) -> None:
        if self.over:
            raise RunError(f"{self.folder.name} is {self.status}: it cannot {what} any more")

    def _bring_every_rank_back(self) -> None:
        while True:
            watch = RankWatch(self._host.ranks, self._results)
            hang = self._wait_for_all(watch)
            if self._abandoned:
                return
            self.failures, _ = watch.outcome()
            if hang is not None and watch.only_freed:
                if self._can_end_in_order(watch, hang):
                    continue
            elif self._can_heal(watch) and self._heal(watch):
                continue
            self._end_on_the_ranks(watch)
            return

    def _wait_for_all(self, watch: RankWatch) -> str | None:
        """Waits until all ranks are back or gone; returns where they were if a Stop had to interrupt them."""
        found: str | None = None
        lookout = self._host.lookout()
        hangs = HangWatch(
            lookout, self._results, self._info.world_size, self._host.config.notice_after_s, work="run"
        )
        with closing(hangs):
            while watch.pending() and not self._abandoned and not watch.stuck():
                watch.wait(_WATCH_PERIOD_S)
                watch.check()
                hangs.check()
                self.hang = hangs.text
                if not watch.severed and self._must_interrupt(hangs):
                    found = hangs.describe_all()
                    watch.stop()
                self._prepare_replacements()
        self.hang = ""
        return found

    def _must_interrupt(self, hangs: HangWatch) -> bool:
        """Whether what the person wants stopped would not stop by itself."""
        if self._num_stops_asked > 1:
            return True
        # With fsdp no rank has all of the state to go on from, so that the person has to say it twice.
        survives = self.config.strategy != "fsdp"
        too_long_s = min(self._host.config.notice_after_s or _HANG_S, _HANG_S)
        return self._num_stops_asked == 1 and survives and hangs.longest_wait_s > too_long_s

    def _prepare_replacements(self) -> None:
        """Once the ranks train: earlier it would take the cores from them, while they get ready themselves."""
        if not self._prepared and self._newest_step() > self._died_at_step:
            self._host.ranks.add_spares(self._host.config.spare)
            self._host.ranks.prepare_to_train([self.config.recipe])
            self._prepared = True

    def _can_end_in_order(self, watch: RankWatch, hang: str) -> bool:
        """Lets ranks that a Stop has interrupted end as any other run that is stopped; False where that is in vain."""
        self.failures = ()
        if self.status in ("starting", "loading"):
            # There is nothing yet that could be kept.
            return False
        told = f"{self.folder.name} did not come to the end of its step when it was to stop: {hang}."
        if stuck := watch.stuck():
            named = ", ".join(map(str, stuck))
            ways_out = ", ".join(f"%nbgpu restart --rank {rank}" for rank in stuck)
            self._lost = ClusterError(
                f"{told} Rank {named} did not come back. Code in C cannot be interrupted. Wait for it to end, or give up "
                f"the rank's variables: {ways_out}"
            )
        elif self._interrupted:
            self._lost = RunError(
                f"{told} It was interrupted for the second time, and ended without a checkpoint"
            )
        else:
            self._interrupted = True
            self._num_stops_asked = 1
            self._host.ranks.regroup()
            self._results = self._host.ranks.call(
                _RUN_IN_ENGINE, str(self.folder), f"{hang}: all were interrupted for the Stop."
            )
        return self._lost is None

    def _can_heal(self, watch: RankWatch) -> bool:
        """Whether ranks died, which can be replaced, and nothing else went wrong."""
        if not watch.gone or len(watch.gone) + len(watch.stuck()) == self._info.world_size:
            return False
        if any(failure.rank not in watch.gone for failure in self.failures):
            return False
        step = self._newest_step()
        self._num_deaths = self._num_deaths + 1 if step <= self._died_at_step + 1 else 1
        self._died_at_step = step
        if self._num_deaths <= _MAX_DEATHS_WITHOUT_PROGRESS:
            return True
        self._add_to_failures(f"that was {self._num_deaths} times at step {step}, and the run was given up")
        return False

    def _heal(self, watch: RankWatch) -> bool:
        """Replaces the ranks that died and lets the run go on; False where that fails."""
        why = "; ".join(failure.message for failure in self.failures)
        # gloo may never tell a rank that the other was killed in the middle of sending to it.
        stuck = watch.stuck()
        if stuck:
            self._host.ranks.end(stuck)
            why += f"; rank {', '.join(map(str, stuck))} did not come back, and was ended"
        for attempt in range(1, _MAX_HEAL_ATTEMPTS + 1):
            try:
                told = self._host.replace_gone()
                break
            except NbgpuError as error:
                # Another one that died meanwhile is replaced too.
                if attempt == _MAX_HEAL_ATTEMPTS or not self._host.ranks.gone():
                    self._add_to_failures(f"it could not be replaced: {error}")
                    return False
        self._host.news.append(f"While {self.folder.name} was training, {sentence(why)} {told}")
        self.failures = ()
        self._prepared = False
        self._results = self._host.ranks.call(
            _RUN_IN_ENGINE, str(self.folder), f"{sentence(why)} It was replaced."
        )
        return True

    def _add_to_failures(self, text: str) -> None:
        self.failures = [replace(f, message=f"{f.message}; {text}") for f in self.failures]

    def _end_on_the_ranks(self, watch: RankWatch) -> None:
        """Leaves the ranks in good order for what comes next."""
        stuck = watch.stuck()
        back = [rank for rank in self._results if rank not in watch.gone and rank not in stuck]
        # Rank 0 ends the run's logs in it.
        failed = bool(self.failures or self._lost)
        ended = self._host.ranks.call("nbgpu.engine.train:let_go", str(self.folder), failed, ranks=back)
        if watch.left_the_group_unsure and not watch.gone and not stuck:
            self._host.ranks.regroup([failure.rank for failure in self.failures])
        if stuck:
            self._host.leave_behind(self._results)
        # It looks at all that torch's compiler and MONAI have made, and nobody waits for it.
        self._host.ranks.call("nbgpu.engine.memory:free", ranks=back)
        for result in ended.values():
            result.wait(_LET_GO_PATIENCE_S)

    def _follow_to_the_end(self) -> None:
        try:
            self._bring_every_rank_back()
        except NbgpuError as error:
            self._lost = error
        except Exception as error:  # noqa: BLE001
            # Whoever waits for the run would wait for ever.
            _log.exception("the handle of %s failed", self.folder.name)
            self._lost = RunError(f"{self.folder.name} cannot be followed any more: {error!r}")
        ended = [result for result in self._results.values() if result.ready()]
        failed = bool(self.failures or self._lost)
        complete = len(ended) == len(self._results) and not failed
        # A run that a Stop has interrupted while it loaded its data has raised on all ranks.
        answers = {result.result() for result in ended if result.exception() is None} if complete else set()
        self.reader.close()
        try:
            logbook.complete(self.folder, self._newest_step(), surely=failed)
        except (OSError, ValueError) as error:
            _log.warning("the logs of %s are not complete: %s", self.folder.name, error)
        state: RunState = "failed" if failed else "finished" if answers == {"finished"} else "stopped"
        self._ending.come(state, self._report)

    def _report(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
        if presenter is not None:
            presenter.report(self)


def _info(folder: Path, config: TrainConfig, host: Host) -> RunInfo:
    """What is known of a run before the ranks have looked at the data."""
    return RunInfo(
        run_id=folder.name,
        recipe=config.title,
        devices=host.devices,
        backend=host.backend,
        rung=host.rung.name,
        total_steps=config.total_steps(steps_per_epoch=0),
        steps_per_epoch=0,
        batch_size=config.batch_size,
        global_batch_size=config.samples_per_step(len(host.devices)),
        started_s=(folder / "run.toml").stat().st_mtime,
        resumed_from=resume.Beginning.read(folder).checkpoint,
    )
