"""Start, reach and stop the engines, which ipyparallel runs for us: one for each rank."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from nbgpu.client.cluster import status
from nbgpu.client.cluster.history import CellHistory
from nbgpu.client.cluster.questions import Listener, Questions
from nbgpu.client.cluster.release import IdleRelease, tell_in_next_cell
from nbgpu.client.engines import environment
from nbgpu.client.engines.cell_replies import Answer, Arrivals
from nbgpu.client.engines.processes import Processes
from nbgpu.client.engines.ranks import Ranks
from nbgpu.client.engines.reply import Reply
from nbgpu.client.engines.seating import Seating
from nbgpu.client.engines.transport_fallback import find_transport
from nbgpu.client.faults.recovery import Recovery
from nbgpu.client.faults.stacks import Lookout, Sighting
from nbgpu.client.faults.watch import RankWatch
from nbgpu.client.host import host_checks, registry
from nbgpu.client.runs import planning
from nbgpu.client.runs.batch_sizes import BatchSizes
from nbgpu.client.runs.plan import Plan
from nbgpu.client.runs.run import Run
from nbgpu.client.variables import definitions, transfer
from nbgpu.client.variables import table as variables
from nbgpu.client.variables.autoreload import Reloading
from nbgpu.config import TRAIN_CONFIGS, ClusterConfig, TrainConfig, train_config
from nbgpu.errors import (
    ClusterError,
    ConfigError,
    NoClusterError,
    RunError,
)
from nbgpu.machine import devices, transports
from nbgpu.machine.signals import take_interrupt, uninterrupted
from nbgpu.machine.transports import ChosenTransport, Transport
from nbgpu.planning.suitability import settled
from nbgpu.protocol.records import CellOptions, Device

if TYPE_CHECKING:
    import pandas as pd

_OUTPUT_PATIENCE_S = 2.0
_ANSWER_PATIENCE_S = 1.0
_NOT_RUNNING = "this cluster is not running. Start it with: start(), or %nbgpu start"

_R = TypeVar("_R", bound=Reply)
"""A rank's pending reply."""

_current: Cluster | None = None


def current() -> Cluster:
    """The cluster that this process started last and that still runs; NoClusterError where there is none."""
    if _current is None:
        raise NoClusterError("no cluster is running. Start one with: %nbgpu start")
    return _current


def require_none() -> None:
    """ClusterError where this process has a cluster."""
    if _current is not None:
        raise ClusterError(
            f"a cluster is already running ({_current.describe()}). Stop it first: %nbgpu stop"
        )


class Cluster:
    """Engines that form one torch.distributed group, one on each GPU, or on shares of the CPU.

    Use it as a context manager, or call `start` and `stop`. Variables live in the ranks until `stop`.

    Args:
        gpus: 'auto', 'none', or indices and UUIDs separated by commas.
        ranks: how many ranks; None is one for each GPU, or 2 where there is none.
        settings: any other field of ClusterConfig.

    Raises:
        ConfigError: a setting is not valid, or a GPU is named that is not there.
    """

    def __init__(self, gpus: str = "auto", ranks: int | None = None, **settings: Any) -> None:
        self._configure(ClusterConfig.checked(gpus=gpus, ranks=ranks, **settings))

    @classmethod
    def with_config(cls, config: ClusterConfig) -> Self:
        """A cluster with settings that were checked as a whole.

        Raises:
            ConfigError: a GPU is named that is not there.
        """
        cluster = cls.__new__(cls)
        cluster._configure(config)
        return cluster

    def _configure(self, config: ClusterConfig) -> None:
        chosen = devices.choose(config.gpus, config.ranks)
        for device in chosen:
            devices.memory_limit_bytes(config, device, chosen)
        self._describe(config, chosen, ChosenTransport(transports.candidates(config, chosen)[0]))

    def _describe(
        self, config: ClusterConfig, chosen: tuple[Device, ...], chosen_transport: ChosenTransport
    ) -> None:
        self.config = config
        self.devices = self._wanted = chosen
        self._transports = transports.candidates(config, chosen)
        self.chosen_transport = chosen_transport
        """How the ranks talk, and what was tried before; before the start what is tried first."""
        self.run: Run | None = None
        """The training run that was started last, which may be over."""
        self._planned: Plan | None = None
        """The plan that was made last."""
        self._processes: Processes | None = None
        self._entry: registry.Entry | None = None
        self._client: Any = None
        self._ranks: Ranks | None = None
        self.history = CellHistory()
        """What the ranks were sent."""
        self.reloading = Reloading()
        self.recovery = Recovery(self)
        self._last_seen: dict[int, Sighting] = {}
        self._listens: Listener | None = None
        self._release: IdleRelease | None = None
        self._why_ended = ""
        """Why it does not run, where nobody has stopped it."""
        self.news: list[str] = []
        """What the person does not know yet, for the next cell to tell: ranks that were replaced in a run."""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Cluster {'running' if self.running else 'stopped'}: {self.describe()}>"

    @property
    def running(self) -> bool:
        return self._client is not None

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def backend(self) -> str:
        """torch.distributed's."""
        return self.chosen_transport.transport.backend

    @property
    def transport(self) -> Transport:
        """The way in which the ranks talk."""
        return self.chosen_transport.transport

    @property
    def pids(self) -> dict[int, int]:
        """The process id of every rank."""
        return self.ranks.pids

    @property
    def ranks(self) -> Ranks:
        """The engines as ranks; NoClusterError where the cluster is not running."""
        if self._ranks is None:
            raise NoClusterError(self._why_ended or _NOT_RUNNING)
        return self._ranks

    @property
    def folder(self) -> Path:
        """The cluster's own folder, which only the user can enter; it goes when the cluster ends."""
        if self._processes is None:
            raise NoClusterError(_NOT_RUNNING)
        return self._processes.folder

    @property
    def connection_file(self) -> Path:
        """ipyparallel's file for clients: with it, and only with it, another process can reach the
        engines."""
        if self._processes is None:
            raise NoClusterError(_NOT_RUNNING)
        return self._processes.connection_file

    def describe(self) -> str:
        """One line that says what the cluster got."""
        count = f"{self.world_size} {'rank' if self.world_size == 1 else 'ranks'}"
        if self.devices[0].kind == "cpu":
            found = "no GPU found" if self.config.gpus == "auto" else "no GPU used"
            return f"{found}: {count.replace(' ', ' CPU ')}, {self.chosen_transport.describe()}"
        names = ", ".join(f"{d.label()} ({d.uuid})" for d in dict.fromkeys(self.devices))
        return f"{count} on {names}, {self.chosen_transport.describe()}"

    def start(self) -> Self:
        """Starts the engines and returns when an all_reduce over all of them gave the right sum.

        With `backend='auto'` other ways to talk are tried where the best one does not work, down to a rank
        alone; a warning then says which failed, and why.

        Raises:
            ConfigError: a variable of gloo's or NCCL's names a network interface that is not there.
            ClusterError: another cluster of this process runs, another one has a GPU, too few files may be
                open or they may be too short, or an engine did not come; the message ends with what the
                engines said.
        """
        require_none()
        return self._start(self._become_current)

    def start_beside(self) -> Self:
        """As `start`, for one of several clusters that a process has: none of them is `current()`, and
        whoever started them stops them."""
        return self._start(lambda: None)

    def _start(self, at_the_end: Callable[[], None]) -> Self:
        self.devices, self.chosen_transport = self._wanted, ChosenTransport(self._transports[0])
        num_engines = self.world_size + self.config.spare
        host_checks.require_startable(
            os.environ, [transport.backend for transport in self._transports], num_engines
        )
        self._processes = processes = Processes.prepare()
        try:
            # What `stop` does not know of it cannot take back.
            with uninterrupted():
                # Before all else, because importing torch takes longest. No GPU is touched before it is
                # claimed.
                processes.launch(environment.of_engines(self.config, self.devices))
                entry = registry.new_entry(self.config, self.devices, self.chosen_transport, processes.folder)
                registry.claim(entry)
                self._entry = entry
                processes.start_engines(num_engines)
                self._note()
            self._client = processes.connect(num_engines, self.config.start_timeout_s)
            seating = Seating.at_start(
                self._client, self.world_size, self.config.start_timeout_s, processes.require_reachable
            )
            self._ranks = self._sit_down(processes, seating)
            self._take_way(find_transport(self._ranks, self._transports, self.config))
            if self.config.spare:
                self._ranks.prepare_to_train(TRAIN_CONFIGS)
            if self.config.keep:
                processes.keep()
            at_the_end()
        except BaseException:
            self.stop()
            raise
        return self

    @classmethod
    def restored(cls, entry: registry.Entry) -> Cluster:
        """The handle of a cluster that another process has started; `entry` says all that is known of it."""
        cluster = cls.__new__(cls)
        cluster._describe(entry.config, entry.devices, entry.chosen_transport)
        cluster._entry = entry
        cluster._processes = Processes(entry.folder, entry.leaders)
        num_engines = sum(process.alive() for process in entry.engines.values())
        cluster._client = cluster._processes.connect(num_engines, entry.config.start_timeout_s)
        cluster._ranks = cluster._sit_down(cluster._processes, entry.seating)
        cluster._become_current()
        return cluster

    def rejoin(self, run_folder: Path | None) -> None:
        """Takes up what the ranks were doing when their notebook went: a run, or a cell."""
        if run_folder is not None and not run_folder.exists():
            warnings.warn(f"the folder of the last run is gone: {run_folder}", stacklevel=3)
        elif run_folder is not None:
            self.run = Run.rejoin(run_folder, self)
            if not self.run.over:
                return
        if any(self.ranks.how_ended(rank) for rank in range(self.world_size)):
            return  # the next cell says so
        self.recovery.take_up_the_cell()

    def _take_way(self, chosen_transport: ChosenTransport) -> None:
        """Notes how the ranks talk, and says so where it is not the best way."""
        self.chosen_transport = chosen_transport
        self.devices = self.devices[: len(self.ranks)]
        self._note()
        if chosen_transport.failed:
            why = "\n".join(f"{name} failed: {error}" for name, error in chosen_transport.failed.items())
            now = (
                "there is one rank, alone"
                if self.world_size == 1
                else f"the ranks talk over {chosen_transport.transport.name}"
            )
            warnings.warn(f"{now}, because better ways failed\n{why}\nnbgpu doctor says more", stacklevel=3)

    def stop_cell(self) -> None:
        """Stops a cell that ranks are in although nobody waits for it any more, as the stop button would."""
        self.recovery.stop_cell()

    def _note(self) -> None:
        """Writes down what another process must know to list, end or take over this cluster."""
        if self._entry is None or self._processes is None:
            return
        known: dict[str, Any] = {
            "leaders": self._processes.leaders,
            "chosen_transport": self.chosen_transport,
            "devices": self.devices,
        }
        if self._ranks is not None:
            seating = self._ranks.seating
            known |= {"seating": seating, "engines": self._entry.engines_with(seating.pids)}
        if self.run is not None:
            known["run"] = self.run.folder
        self._entry = self._entry.model_copy(update=known)
        registry.update(self._entry)

    @uninterrupted()
    def _become_current(self) -> None:
        global _current
        _current = self
        if not self.config.keep:
            atexit.register(self.stop)
        if self.config.release_after_s is not None:
            self._release = IdleRelease(self.config.release_after_s, self._is_working, self._end_unused)

    def note_use(self) -> None:
        """Notes that somebody uses the cluster: `release_after_s` counts from now."""
        if self._release is not None:
            self._release.used()

    def _is_working(self) -> bool:
        """Whether a run goes on or a rank is at work, also one that does not say what it does."""
        if self.run is not None and not self.run.over:
            return True
        with closing(self.lookout()) as lookout:
            lookout.seen.clear()
            lookout.ask()
            lookout.collect(_ANSWER_PATIENCE_S)
            alive = [rank for rank in range(self.world_size) if self.ranks.how_ended(rank) is None]
            return any(rank not in lookout.seen or lookout.seen[rank].where.doing != "idle" for rank in alive)

    def _end_unused(self) -> None:
        assert self.config.release_after_s is not None
        devices = "GPUs are free" if self.devices[0].kind == "cuda" else "memory is free"
        self._why_ended = (
            f"the cluster was ended at {time.strftime('%H:%M:%S')}: no cell, run or typing had used it for "
            f"{self.config.release_after_s:g} s (release_after_s). Its {devices}, and what the ranks held is gone. "
            "Start it again with: start(), or %nbgpu start"
        )
        told = self._why_ended
        self.stop()
        self._why_ended = told
        tell_in_next_cell(told[0].upper() + told[1:])

    def stop(self) -> None:
        """Ends every engine and the controller, and removes what they left on disk. Harmless when repeated.

        An interrupt is raised when all that is done.
        """
        with uninterrupted():
            self._stop_all()

    def _stop_all(self) -> None:
        global _current
        if _current is self:
            _current = None
        self._why_ended = ""
        if self._release is not None:
            self._release.close()
            self._release = None
        atexit.unregister(self.stop)
        if self.run is not None:
            self.run.abandon()
        if self._client is not None:
            self._client.close()
            self._client = None
        self.stop_listening()
        if self._processes is not None:
            self._processes.end()
            self._processes = None
        if self._entry is not None:
            registry.remove(self._entry)
            self._entry = None
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        self.history = CellHistory()
        self.reloading.forget()
        self.recovery = Recovery(self)
        self._last_seen = {}

    def submit(self, code: str, ranks: Sequence[int] | None = None) -> dict[int, Any]:
        """Sends a cell to the ranks and returns at once; by rank, ipyparallel's AsyncResult, which gathers
        what it prints.

        Args:
            code: the cell's text.
            ranks: which; None for all.

        Raises:
            RunError: a training run has the ranks now.
        """
        return self._send(
            code,
            ranks,
            lambda chosen: {
                rank: self.ranks[rank].execute(code, silent=False, block=False) for rank in chosen
            },
        )

    def send_cell(
        self,
        code: str,
        ranks: Sequence[int] | None,
        options: CellOptions,
        arrivals: Arrivals,
        is_awaited: bool = False,
    ) -> dict[int, Answer]:
        """As `submit`, in half the time; `options` go along, and `arrivals` gets what is printed, message by
        message.

        The answers to a cell that `is_awaited` come on the caller's event loop.
        """
        return self._send(
            code,
            ranks,
            lambda chosen: self.ranks.send_cell(chosen, code, options, arrivals, is_awaited),
        )

    @uninterrupted()
    def _send(
        self, code: str, ranks: Sequence[int] | None, send: Callable[[Sequence[int]], Mapping[int, _R]]
    ) -> dict[int, _R]:
        chosen = self._chosen(ranks)
        self._make_ready()
        self._last_seen = {}
        self.reloading.before_cell(self.ranks)
        self.history.note(chosen, code)
        results: dict[int, _R] = {}
        try:
            # Sent to some ranks only, it would meet the others' next cell in a collective.
            results |= send(chosen)
            take_interrupt()
        except KeyboardInterrupt:
            self.recovery.stop(RankWatch(self.ranks, results), results)
            self.history.forget_newest(chosen)
            raise
        return results

    @uninterrupted()
    def execute(self, code: str, ranks: Sequence[int] | None = None) -> dict[int, str]:
        """Runs code on the ranks and returns what each printed to stdout.

        Raises:
            RankError: it raised on one rank or more.
        """
        results = self.submit(code, ranks)
        watch = RankWatch(self.ranks, results)
        try:
            self.recovery.bring_back(watch, results)
        finally:
            if watch.severed or watch.gone:
                self.history.forget_newest(results)
            self.note_use()
        for result in results.values():
            # Output takes another socket than the result, and may come after it.
            result.wait_for_output(_OUTPUT_PATIENCE_S)
        return {rank: result.stdout for rank, result in results.items()}

    @uninterrupted()
    def apply(
        self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None
    ) -> dict[int, Any]:
        """Calls a function on the ranks and returns its results by rank; RankError where it raised."""
        chosen = self._chosen(ranks)
        self._make_ready()
        results = {rank: self.ranks[rank].apply_async(function, *args) for rank in chosen}
        self.recovery.bring_back(RankWatch(self.ranks, results), results)
        return {rank: result.result() for rank, result in results.items()}

    def pull(
        self, name: str | Sequence[str], rank: int = 0, *, ranks: Sequence[int] | Literal["all"] | None = None
    ) -> Any:
        """A copy of a variable of one rank, in this process's memory. Tensors arrive on the CPU.

        Args:
            name: of the variable; with several names their values come as a dict by name.
            rank: which.
            ranks: several, or 'all': a dict by rank comes.

        Raises:
            RankError: a rank has no such variable, or its value cannot travel; all that is wrong is named.
            TransferError: a value cannot be put together here, because its class is defined on the ranks
                only.
            RunError: a training run has the ranks now.
        """
        chosen = self._chosen([rank] if ranks is None else None if ranks == "all" else ranks)
        self._refuse_during_run()
        names = [name] if isinstance(name, str) else list(name)
        pulled = transfer.pull(self.ranks, chosen, names)
        by_rank = {rank: values[name] if isinstance(name, str) else values for rank, values in pulled.items()}
        return by_rank if ranks is not None else by_rank[rank]

    def push(self, ranks: Sequence[int] | None = None, **values: Any) -> None:
        """Gives the ranks variables of these names, with copies of the values. Tensors arrive on the CPU.

        Raises:
            TransferError: some values cannot travel; all of them are named, and nothing was sent.
            RankError: a rank cannot put a value together, because its class is not defined there.
            RunError: a training run has the ranks now.
        """
        chosen = self._chosen(ranks)
        self._refuse_during_run()
        self.news += definitions.push(
            self.ranks, chosen, values, lambda data: transfer.push(self.ranks, chosen, data)
        )
        self.history.note_pushed(values)

    def vars(self, pattern: str = "*") -> pd.DataFrame:
        """The ranks' variables whose names fit: one row for each variable and rank.

        The columns are name, rank, type, shape, dtype, device, bytes, content and "ranks differ", which says
        in what they do, and is empty where they agree or where the values were not compared.
        """
        return variables.table(self.apply, pattern).frame()

    def train(self, recipe: str, **settings: Any) -> Run:
        """Starts a training run on all ranks and returns at once. A Stop meanwhile stops the run.

        Raises:
            ConfigError: a setting is not valid; nothing was started.
            RunError: another run has the ranks now.
        """
        return self.train_with(train_config(recipe, **settings))

    @uninterrupted()
    def train_with(self, config: TrainConfig) -> Run:
        """As `train`, with settings that are checked already."""
        config = settled(config, self.devices)
        self.note_use()
        self._make_ready()
        self.tell_news()
        planned = self._planned if self._planned and self._planned.config == config else None
        self.run = Run.start(config, self, planned)
        self._note()
        self.run.on_end(lambda _: self.note_use())
        try:
            take_interrupt()
        except KeyboardInterrupt:
            self.run.stop()
            raise
        return self.run

    def plan(self, recipe: str, **settings: Any) -> Plan:
        """What a run with these settings will do, and an estimate of its memory; nothing is started. Prints
        as lines.

        Raises:
            ConfigError: a setting is not valid.
            RunError: a training run has the ranks now.
        """
        return self.plan_with(train_config(recipe, **settings))

    def plan_with(self, config: TrainConfig) -> Plan:
        """As `plan`, with settings that are checked already."""
        config = settled(config, self.devices)
        self._make_ready()
        self._planned = planning.plan(self, config)
        return self._planned

    def find_batch_size(
        self, recipe: str, stop: threading.Event | None = None, **settings: Any
    ) -> BatchSizes:
        """Finds the largest batch that fits on all ranks, with real steps on generated batches; prints as a
        table.

        On CPU ranks `memory_limit` decides, or their share of what the host has free. Variables of the ranks
        count as held, and stay as they are.

        Args:
            recipe: the workload.
            stop: ends the search when it is set, as the notebook's stop button does.
            settings: as for `train`; `batch_size` and `global_batch_size` do not count.

        Raises:
            ConfigError: a setting is not valid, or the strategy is fsdp; nothing was tried.
            RankError: not even one sample fits, or a step failed otherwise.
            RunError: a training run has the ranks now, or the search was stopped.
        """
        config = train_config(recipe, **planning.without_batch_sizes(settings))
        return self.find_batch_size_with(config, stop)

    def find_batch_size_with(self, config: TrainConfig, stop: threading.Event | None = None) -> BatchSizes:
        """As `find_batch_size`, with settings that are checked already."""
        config = settled(planning.for_search(config), self.devices)
        self._make_ready()
        return planning.find_batch_size(self, config, stop)

    @uninterrupted()
    def restart(self, rank: int | None = None, replay: bool = False) -> str:
        """Ends one rank and puts a new engine in its place, or starts the whole cluster anew.

        Other ranks that are still in an earlier cell are stopped. One that does not come back even then is
        given up as well: without it there is no group.

        Args:
            rank: which; None for the whole cluster.
            replay: run the cells again that the rank had seen, on it alone, but for those that were cut off.
                Collectives in them return at once and exchange nothing. DDP objects and their optimizers get
                the other ranks' state afterwards.

        Returns:
            What happened, in words.

        A rank that stands still in a training run is ended, and the run replaces it as one that has died.

        Raises:
            RunError: a training run has the ranks now, and this one does not stand still.
        """
        if rank is None:
            self.stop()
            self.start()
            return self.describe()
        (rank,) = self._chosen([rank])
        if self.run is not None and not self.run.over and (standing := self.ranks.standstills([rank])):
            self.ranks.end(standing, "stood still and was ended by a restart")
            return (
                f"rank {rank} stood still and was ended: {self.run.folder.name} goes on when it is replaced"
            )
        self._refuse_during_run()
        return self.recovery.restart(rank, self.history, replay)

    def restore_group(
        self, watch: RankWatch, results: Mapping[int, Reply], failed: Sequence[int] = ()
    ) -> list[str]:
        """Makes the group good again once all ranks are back or gone; those that are gone are replaced.

        Args:
            watch: over the results.
            results: by rank.
            failed: ranks that raised, whose state is not trusted where the ranks differ.

        Returns:
            What the person is to know, in lines.
        """
        return self.recovery.restore_group(watch, results, failed)

    def leave_behind(self, results: Mapping[int, Reply]) -> None:
        """Notes ranks that did not come back from a cell; they get no other one until they do, and no
        answers."""
        self.recovery.leave_behind(results)

    def lookout(self) -> Lookout:
        """What asks the ranks where they are; to be closed."""
        if self._processes is None:
            raise NoClusterError(_NOT_RUNNING)
        return Lookout(self._processes.folder, self.pids, self._last_seen)

    def questions(self) -> Questions:
        """What takes the ranks' questions to the person; to be closed."""
        if self._processes is None:
            raise NoClusterError(_NOT_RUNNING)
        return Questions(self._listener)

    def _listener(self) -> Listener:
        """Where the ranks come with their questions."""
        assert self._processes is not None
        if self._listens is None:
            self._listens = Listener(self._processes.folder)
        return self._listens

    def stop_listening(self) -> None:
        """Takes no more questions of the ranks to the person, until they are asked for again."""
        if self._listens is not None:
            self._listens.close()
            self._listens = None

    def status(self) -> str:
        """A table: every rank's device, process, memory, and the line that it is at. Answers within a
        second."""
        with closing(self.lookout()) as lookout:
            return status.table(self, lookout)

    def _sit_down(self, processes: Processes, seating: Seating) -> Ranks:
        return Ranks(
            processes,
            self._client,
            self.devices,
            self.chosen_transport.transport,
            self.config,
            seating,
            self._note,
        )

    def _chosen(self, ranks: Sequence[int] | None) -> list[int]:
        self.note_use()
        self.ranks.require_reachable()
        if ranks is None:
            return list(range(self.world_size))
        wrong = [r for r in ranks if not 0 <= r < self.world_size]
        if wrong or not ranks:
            raise ConfigError(f"ranks = {list(ranks)} is not valid. Ranks: 0 to {self.world_size - 1}")
        return sorted(set(ranks))

    @uninterrupted()
    def _make_ready(self) -> None:
        """Called before work is sent: all ranks are there and free, or it says why not."""
        self.note_use()
        self.ranks.require_reachable()
        self._refuse_during_run()
        self.recovery.make_ready(self.run.folder if self.run is not None else None)

    def tell_news(self) -> None:
        """Shows what the person does not know yet."""
        while self.news:
            print(self.news.pop(0), file=sys.stderr)  # noqa: T201 - the cell's output

    def _refuse_during_run(self) -> None:
        if self.run is not None and not self.run.over:
            raise RunError(
                f"the ranks are training ({self.run.folder.name}, {self.run.status}), and code sent to them would "
                "wait until the end. Call run.wait() or run.stop() first"
            )
