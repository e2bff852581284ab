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
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from nbgpu.client.cluster import resizing, status
from nbgpu.client.cluster.history import CellHistory
from nbgpu.client.cluster.questions import Questions
from nbgpu.client.cluster.recipe_calls import RecipeCalls
from nbgpu.client.cluster.release import IdleRelease, tell_in_next_cell
from nbgpu.client.engines import environment, hosts
from nbgpu.client.engines.cell_replies import Answer, Arrivals
from nbgpu.client.engines.processes import Processes
from nbgpu.client.engines.ranks import Ranks
from nbgpu.client.engines.reply import Reply
from nbgpu.client.engines.seating import Seating
from nbgpu.client.engines.transport_fallback import find_transport
from nbgpu.client.faults.recovery import Recovery
from nbgpu.client.faults.stacks import Lookout, Sighting
from nbgpu.client.faults.watch import RankWatch
from nbgpu.client.host import registry
from nbgpu.client.runs import planning, predicting
from nbgpu.client.runs.batch_sizes import BatchSizes
from nbgpu.client.runs.plan import Plan
from nbgpu.client.runs.predicting import Predictions
from nbgpu.client.runs.run import Run
from nbgpu.client.variables import definitions, saving, transfer
from nbgpu.client.variables import table as variables
from nbgpu.client.variables.autoreload import Reloading
from nbgpu.client.variables.saving import Loaded, Saved
from nbgpu.config import TRAIN_CONFIGS, ClusterConfig, TrainConfig
from nbgpu.config.prediction import PredictConfig
from nbgpu.errors import (
    ClusterError,
    ConfigError,
    NbgpuError,
    NoClusterError,
    RunError,
)
from nbgpu.host import host_checks
from nbgpu.host.questions import Listener
from nbgpu.machine import devices, interfaces, transports
from nbgpu.machine.signals import take_interrupt, uninterrupted
from nbgpu.machine.transports import ChosenTransport, Transport
from nbgpu.performance.timeline import Timeline
from nbgpu.planning.suitability import settled
from nbgpu.protocol.records import CellOptions, Device
from nbgpu.run_folder.predictions import Job
from nbgpu.text.ranks import count_of_ranks

if TYPE_CHECKING:
    import pandas as pd

_OUTPUT_PATIENCE_S = 2.0
_ANSWER_PATIENCE_S = 1.0
_NOT_RUNNING = "this cluster is not running. Start it with: start(), or %nbgpu start"

_R = TypeVar("_R", bound=Reply)
"""A rank's pending reply."""

_current: Cluster | None = None


def current() -> Cluster:
    """The running cluster that this process started last; NoClusterError if there is none."""
    if _current is None:
        raise NoClusterError("no cluster is running. Start one with: %nbgpu start")
    return _current


def require_none() -> None:
    """Raise ClusterError if this process has a cluster."""
    if _current is not None:
        raise ClusterError(
            f"a cluster is already running ({_current.describe()}). Stop it first: %nbgpu stop"
        )


_UNKNOWN = (Device("cuda", "", "GPU-0", 0, 0), Device("cuda", "", "GPU-1", 1, 0))
"""Stands for the devices of hosts that have not dialled in."""


class Cluster(RecipeCalls):
    """The ranks of one torch.distributed group: one on each GPU, or several that share the CPU.

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
        """Make a cluster with settings that are already checked.

        Raises:
            ConfigError: a GPU is named that is not there.
        """
        cluster = cls.__new__(cls)
        cluster._configure(config)
        return cluster

    def _configure(self, config: ClusterConfig) -> None:
        # What other hosts have is known once they have dialled in.
        chosen = () if config.launcher != "local" else devices.choose(config.gpus, config.ranks)
        for device in chosen:
            devices.memory_limit_bytes(config, device, chosen)
        devices.require_simulable(config, chosen)
        best = transports.candidates(config, chosen or _UNKNOWN)[0]
        self._describe(config, chosen, ChosenTransport(best, simulated=config.simulated))

    def _describe(
        self, config: ClusterConfig, chosen: tuple[Device, ...], chosen_transport: ChosenTransport
    ) -> None:
        self.config = config
        self.devices = self._wanted = chosen
        self._transports = transports.candidates(config, chosen or _UNKNOWN)
        self.chosen_transport = chosen_transport
        """The transport, with those that were tried before it; before the start, the first to be tried."""
        self.run: Run | None = None
        """The latest training run, which may be over."""
        self.last_timeline: Timeline | None = None
        """What the ranks did in the latest cell with `%%distributed --timeline`."""
        self._planned: Plan | None = None
        """The latest plan."""
        self._choices = planning.Choices()
        self._processes: Processes | None = None
        self.join_file: Path | None = None
        """With `launcher='hosts'`: the file with which hosts dial in."""
        self._entry: registry.Entry | None = None
        self._client: Any = None
        self._ranks: Ranks | None = None
        self.history = CellHistory()
        """The cells and values that were sent to the ranks."""
        self.reloading = Reloading()
        self.recovery = Recovery(self)
        self._last_seen: dict[int, Sighting] = {}
        self._listens: Listener | None = None
        self._release: IdleRelease | None = None
        self._why_ended = ""
        """The reason why the cluster no longer runs, if nobody has stopped it; otherwise empty."""
        self.news: list[str] = []
        """News for the next cell to show, such as ranks that were replaced in a run."""

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
        """The backend of torch.distributed."""
        return self.chosen_transport.transport.backend

    @property
    def transport(self) -> Transport:
        """The transport over which the ranks communicate."""
        return self.chosen_transport.transport

    @property
    def pids(self) -> dict[int, int]:
        """The process ids by rank."""
        return self.ranks.pids

    @property
    def ranks(self) -> Ranks:
        """The engines as ranks; NoClusterError if the cluster is not running."""
        if self._ranks is None:
            raise NoClusterError(self._why_ended or _NOT_RUNNING)
        return self._ranks

    @property
    def folder(self) -> Path:
        """The cluster's folder, which only the user can enter and which is removed when the cluster ends."""
        if self._processes is None:
            raise NoClusterError(_NOT_RUNNING)
        return self._processes.folder

    @property
    def connection_file(self) -> Path:
        """ipyparallel's file for clients. Another process needs it to reach the engines."""
        if self._processes is None:
            raise NoClusterError(_NOT_RUNNING)
        return self._processes.connection_file

    def describe(self) -> str:
        """Describe the cluster's ranks, devices and transport in one line."""
        if not self.devices:
            return f"{self.config.nodes} host(s) that have not dialled in yet"
        count = count_of_ranks(self.world_size)
        if self.config.launcher != "local":
            count += f" on {self.config.nodes} host{'s' if self.config.nodes > 1 else ''}"
        if self.devices[0].kind == "cpu":
            found = "no GPU found" if self.config.gpus == "auto" else "no GPU used"
            return f"{found}: {count.replace(' ', ' CPU ', 1)}, {self.chosen_transport.describe()}"
        names = ", ".join(f"{d.label()} ({d.uuid})" for d in dict.fromkeys(self.devices))
        return f"{count} on {names}, {self.chosen_transport.describe()}"

    def start(self) -> Self:
        """Start the engines and return when an all_reduce over all of them has given the right sum.

        With `backend='auto'` other transports are tried if the best one does not work, a single rank being
        the last. A warning then says which ones failed, and why.

        Raises:
            ConfigError: a variable of gloo or NCCL names a network interface that does not exist.
            ClusterError: another cluster of this process runs, another cluster has a GPU, the limits of the
                number or size of files are too low, or an engine did not start. The message ends with the
                engines' log.
        """
        require_none()
        return self._start(self._become_current)

    def start_beside(self) -> Self:
        """As `start`, for one of several clusters of this process. None of them is `current()`, and the
        caller stops them."""
        return self._start(lambda: None)

    def _start(self, at_the_end: Callable[[], None]) -> Self:
        self.devices = self._wanted
        self.chosen_transport = ChosenTransport(self._transports[0], simulated=self.config.simulated)
        if self.config.launcher == "hosts":
            return self._start_on_hosts(at_the_end)
        num_engines = self.world_size + self.config.spare
        host_checks.require_startable(
            os.environ, [transport.backend for transport in self._transports], num_engines
        )
        self._processes = processes = Processes.prepare()
        try:
            # `stop` can only end what it knows of.
            with uninterrupted():
                # Before all else, because the import of torch takes longest. No GPU is touched before it is
                # claimed.
                processes.launch(environment.of_engines(self.config, self.devices))
                entry = registry.new_entry(self.config, self.devices, self.chosen_transport, processes.folder)
                registry.claim(entry)
                self._entry = entry
                processes.start_engines(num_engines)
                self._note()
            self._client = processes.connect(num_engines, self.config.start_timeout_s)
            seating = Seating.at_start(
                self._client,
                processes.this_host.name,
                self.world_size,
                self.config.start_timeout_s,
                processes.require_reachable,
            )
            self._ranks = self._sit_down(processes, seating)
            self._use_transport(find_transport(self._ranks, self._transports, self.config))
            if self.config.spare:
                self._ranks.prepare_to_train(TRAIN_CONFIGS)
            if self.config.keep:
                processes.keep()
            at_the_end()
        except BaseException:
            self.stop()
            raise
        return self

    def _start_on_hosts(self, at_the_end: Callable[[], None]) -> Self:
        interface, ip = interfaces.address_of(self.config.interface)
        self._processes = processes = Processes.prepare()
        variables = environment.of_engines(self.config, _UNKNOWN)
        try:
            with uninterrupted():
                processes.launch(variables, ip)
                entry = registry.new_entry(self.config, (), self.chosen_transport, processes.folder)
                registry.claim(entry)
                self._entry = entry
                self._note()
            self._client = processes.connect(0, self.config.start_timeout_s)
            self.join_file = hosts.write_join_file(processes.folder, variables, f"{interface} ({ip})")
            hosts.say_how_to_join(self.join_file, self.config.nodes)
            there = hosts.gather(self._client, self.config, processes.require_reachable)
            processes.use(there)
            seating = hosts.start_ranks(self._client, there, self.config, processes.require_reachable)
            self.devices = self._wanted = tuple(device for _, device in hosts.devices_of(there))
            self._transports = transports.candidates(self.config, self.devices)
            self.chosen_transport = ChosenTransport(self._transports[0])
            self._ranks = self._sit_down(processes, seating)
            self._use_transport(find_transport(self._ranks, self._transports, self.config))
            at_the_end()
        except BaseException:
            self.stop()
            raise
        return self

    @classmethod
    def restored(cls, entry: registry.Entry) -> Cluster:
        """Make a handle for a cluster that another process has started, from its entry in the registry."""
        cluster = cls.__new__(cls)
        # A notebook that ended while its cluster was growing may have taken more GPUs than there are ranks.
        there = entry.devices[: len(entry.seating.engines)]
        cluster._describe(entry.config, there, entry.chosen_transport)
        cluster._entry = entry
        cluster._processes = Processes(entry.folder, entry.leaders)
        num_engines = sum(process.alive() for process in entry.engines.values())
        cluster._client = cluster._processes.connect(num_engines, entry.config.start_timeout_s)
        cluster._ranks = cluster._sit_down(cluster._processes, entry.seating)
        cluster._ranks.end_leaving()
        cluster._become_current()
        return cluster

    def rejoin(self, run_folder: Path | None) -> None:
        """Take over the run or the cell that the ranks were in when their notebook ended."""
        if run_folder is not None and not run_folder.exists():
            warnings.warn(f"the folder of the last run is gone: {run_folder}", stacklevel=3)
        elif run_folder is not None:
            self.run = Run.rejoin(run_folder, self)
            if not self.run.over:
                return
        if any(self.ranks.how_ended(rank) for rank in range(self.world_size)):
            return  # the next cell reports it
        self.recovery.take_up_the_cell()

    def _use_transport(self, chosen_transport: ChosenTransport) -> None:
        """Record the transport of the ranks, and warn if it is not the best one."""
        self.chosen_transport = chosen_transport
        self.devices = self.devices[: len(self.ranks)]
        self._note()
        if chosen_transport.failed:
            why = "\n".join(f"{name} failed: {error}" for name, error in chosen_transport.failed.items())
            now = (
                "there is one rank, alone"
                if self.world_size == 1
                else f"the ranks communicate over {chosen_transport.transport.name}"
            )
            warnings.warn(
                f"{now}, because better transports failed\n{why}\nnbgpu doctor says more", stacklevel=3
            )

    def stop_cell(self) -> None:
        """Stop a cell that ranks are still in although nobody waits for it, as the stop button would."""
        self.recovery.stop_cell()

    def _note(self) -> None:
        """Write the entry that other processes need to list, end or take over this cluster."""
        if self._entry is None or self._processes is None:
            return
        known: dict[str, Any] = {
            "leaders": self._processes.leaders,
            "chosen_transport": self.chosen_transport,
            "devices": self.devices,
        }
        if self._ranks is not None:
            seating = self._ranks.seating
            known |= {
                "config": self.config,
                "devices": self._ranks.devices,
                "seating": seating,
                "engines": self._entry.engines_with(self._ranks.pids_here),
            }
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
        """Note that somebody uses the cluster, so that `release_after_s` counts from now."""
        if self._release is not None:
            self._release.used()

    def _is_working(self) -> bool:
        """Whether a run is active or a rank is at work. A rank that does not answer counts as working."""
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
        saved_in = self.config.save_on_release
        if saved_in:
            try:
                self.save(saved_in)
            except NbgpuError as error:
                why = (
                    f"the cluster was not used for {self.config.release_after_s:g} s and goes on all the same, because its "
                    f"variables could not be saved (save_on_release): {error}"
                )
                if why not in self.news:
                    self.news.append(why)
                return
        devices = "GPUs are free" if self.devices[0].kind == "cuda" else "memory is free"
        held = (
            f"the ranks' variables are in {Path(saved_in).absolute()}: %nbgpu load {saved_in}"
            if saved_in
            else "the ranks' variables are gone"
        )
        self._why_ended = (
            f"the cluster was ended at {time.strftime('%H:%M:%S')}: no cell, run or typing had used it for "
            f"{self.config.release_after_s:g} s (release_after_s). Its {devices}, and {held}. "
            "Start it again with: start(), or %nbgpu start"
        )
        why_ended = self._why_ended
        self.stop()
        self._why_ended = why_ended
        tell_in_next_cell(why_ended[0].upper() + why_ended[1:])

    def stop(self) -> None:
        """End every engine and the controller, and remove their files. Harmless when repeated.

        An interrupt is raised after all of that.
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
        if self._processes is not None:
            self._processes.end_others()
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
        """Send a cell to the ranks and return at once.

        Args:
            code: the cell's text.
            ranks: the ranks that run it; None for all.

        Returns:
            By rank, ipyparallel's AsyncResult, which gathers the output.

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
        """As `submit`, in half the time. `arrivals` gets the output message by message.

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
            # A cell that only some ranks got would meet the others' next cell in a collective.
            results |= send(chosen)
            take_interrupt()
        except KeyboardInterrupt:
            self.recovery.stop(RankWatch(self.ranks, results), results)
            self.history.forget_newest(chosen)
            raise
        return results

    @uninterrupted()
    def execute(self, code: str, ranks: Sequence[int] | None = None) -> dict[int, str]:
        """Run code on the ranks and return the text that each printed to stdout.

        Raises:
            RankError: the code raised on one rank or more.
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
            # Output comes over another socket than the result, and may come after it.
            result.wait_for_output(_OUTPUT_PATIENCE_S)
        return {rank: result.stdout for rank, result in results.items()}

    @uninterrupted()
    def apply(
        self, function: Callable[..., Any], *args: Any, ranks: Sequence[int] | None = None
    ) -> dict[int, Any]:
        """Call a function on the ranks and return its results by rank; RankError if it raised."""
        chosen = self._chosen(ranks)
        self._make_ready()
        results = {rank: self.ranks[rank].apply_async(function, *args) for rank in chosen}
        self.recovery.bring_back(RankWatch(self.ranks, results), results)
        return {rank: result.result() for rank, result in results.items()}

    def pull(
        self, name: str | Sequence[str], rank: int = 0, *, ranks: Sequence[int] | Literal["all"] | None = None
    ) -> Any:
        """Copy a variable of one rank into this process. Tensors arrive on the CPU.

        Args:
            name: the variable's name. For several names the result is a dict by name.
            rank: the rank.
            ranks: several ranks, or 'all', in place of `rank`. The result is then a dict by rank.

        Raises:
            RankError: a rank has no such variable, or its value cannot be sent. The message names every such
                variable.
            TransferError: a value cannot be rebuilt here, because its class is defined on the ranks only.
            RunError: a training run has the ranks now.
        """
        chosen = self._chosen([rank] if ranks is None else None if ranks == "all" else ranks)
        self._refuse_during_run()
        names = [name] if isinstance(name, str) else list(name)
        pulled = transfer.pull(self.ranks, chosen, names)
        by_rank = {rank: values[name] if isinstance(name, str) else values for rank, values in pulled.items()}
        return by_rank if ranks is not None else by_rank[rank]

    def push(self, ranks: Sequence[int] | None = None, **values: Any) -> None:
        """Give the ranks variables of these names, with copies of the values. Tensors arrive on the CPU.

        Raises:
            TransferError: some values cannot be sent. The message names all of them, and nothing was sent.
            RankError: a rank cannot rebuild a value, because its class is not defined there.
            RunError: a training run has the ranks now.
        """
        chosen = self._chosen(ranks)
        self._refuse_during_run()
        self.news += definitions.push(
            self.ranks, chosen, values, lambda data: transfer.push(self.ranks, chosen, data)
        )
        self.history.note_pushed(values)

    def vars(self, pattern: str = "*") -> pd.DataFrame:
        """A table of the ranks' variables whose names match: one row for each variable and rank.

        The columns are name, rank, type, shape, dtype, device, bytes, content and "ranks differ", which says
        how they differ, and is empty where they agree or where the values were not compared.
        """
        return variables.table(self.apply, pattern).frame()

    def save(self, folder: str | Path, names: Sequence[str] = ()) -> Saved:
        """Write the ranks' variables into a folder, all ranks side by side, whole or not at all.

        Tensors, arrays, models, optimizers, DDP objects, frames, containers and plain values are saved as
        JSON and safetensors, functions and classes of cells as source, imports by name, and other objects
        as pickles. The states of the random number generators are there, too. The result prints as lines,
        which name everything that cannot be saved.

        Args:
            folder: a new folder, or one with variables that were saved earlier, which are replaced.
            names: the variables; all of them if none is named.

        Raises:
            DataError: the folder has other files, or cannot be written.
            RankError: a rank has no variable of a name, or cannot write its files. The folder has what it had
                before, as after any other error.
            RunError: a training run has the ranks now, or another process saves into the folder.
        """
        self._make_ready()
        return saving.save(self.ranks, Path(folder), names)

    def load(self, folder: str | Path, names: Sequence[str] = (), *, trust: bool = False) -> Loaded:
        """Give the ranks variables that `save` has written: to each its own or, on another number of ranks,
        those that were equal on all of them. The result prints as lines, which name everything that was left
        out.

        Args:
            folder: the folder of the saved variables.
            names: the variables; all of them if none is named.
            trust: whether pickles may be opened and definitions of cells be run, which can do anything.

        Raises:
            DataError: the folder has no saved variables, or none of a name, or is damaged.
            RankError: a rank cannot read its files. No variable was changed.
            RunError: a training run has the ranks now.
        """
        self._make_ready()
        loaded = saving.load(self.ranks, Path(folder), names, trust)
        self.history.note_loaded(loaded.folder)
        return loaded

    @uninterrupted()
    def train_with(self, config: TrainConfig) -> Run:
        """As `train`, with settings that are already checked."""
        settled(config, self.devices)
        self.note_use()
        self._make_ready()
        self.tell_news()
        chosen = self._choices.of(self, config)
        config = settled(config.changed(**chosen.values), self.devices)
        planned = self._planned if self._planned and self._planned.config == config else None
        self.run = Run.start(config, self, planned, chosen)
        self._note()
        self.run.on_end(lambda _: self.note_use())
        try:
            take_interrupt()
        except KeyboardInterrupt:
            self.run.stop()
            raise
        return self.run

    def plan_with(self, config: TrainConfig) -> Plan:
        """As `plan`, with settings that are already checked."""
        settled(config, self.devices)
        self._make_ready()
        chosen = self._choices.of(self, config)
        self._planned = planning.plan(self, settled(config.changed(**chosen.values), self.devices), chosen)
        return self._planned

    def with_choices(self, config: TrainConfig) -> TrainConfig:
        """Return the settings for these ranks, with values for those that are left to the data.

        Raises:
            ConfigError: the ranks cannot train with these settings.
            RankError: no file can be used.
            RunError: a training run has the ranks now.
        """
        settled(config, self.devices)
        self._make_ready()
        return settled(config.changed(**self._choices.of(self, config).values), self.devices)

    def find_batch_size_with(self, config: TrainConfig, stop: threading.Event | None = None) -> BatchSizes:
        """As `find_batch_size`, with settings that are already checked."""
        config = planning.for_search(config)
        settled(config, self.devices)
        self._make_ready()
        chosen = self._choices.of(self, config)
        found = planning.find_batch_size(self, settled(config.changed(**chosen.values), self.devices), stop)
        # The batch is the largest for this model, and the run with it must not choose another one.
        self._choices.note(self, config.changed(batch_size=found.batch_size), chosen)
        return found

    @uninterrupted()
    def predict(
        self,
        run: Run | str | Path,
        data: str | Path,
        out: str | Path = "predictions",
        *,
        checkpoint: Literal["newest", "best"] = "newest",
        max_samples: int | None = None,
        skip_bad: bool = False,
        trust: bool = False,
        **settings: Any,
    ) -> Predictions:
        """Apply a run's trained model to new data, with a share of the samples on each rank, and write a
        table and the recipe's files for each sample.

        A file that turns out to be bad fails alone. A prediction that is cut off goes on with what is missing
        when it is called again.

        Args:
            run: a run, or its folder, which may have come from another machine.
            data: the new data, in the form that the recipe trains on.
            out: the folder for the predictions.
            checkpoint: the run's newest checkpoint, or the one with the best validation.
            max_samples: the number of samples, the first ones of the data; None for all.
            skip_bad: leave out files with bad names or headers, in place of refusing to begin.
            trust: run the recipe file in the run's folder, for a recipe of your own.
            settings: settings of the run that may differ for a prediction, such as `spacing` of a diffusion.

        Raises:
            ConfigError: something is wrong with the arguments or with `out`; nothing was predicted.
            RankError: files are bad, or a rank failed or died.
            RunError: a training run has the ranks now.
        """
        asked = PredictConfig.checked(
            data=str(data),
            out=str(out),
            checkpoint=checkpoint,
            max_samples=max_samples,
            skip_bad=skip_bad,
            trust=trust,
        )
        return self.predict_with(
            predicting.job_of(run.folder if isinstance(run, Run) else run, asked, settings)
        )

    @uninterrupted()
    def predict_with(self, job: Job, show: predicting.Show | None = None) -> Predictions:
        """As `predict`, with a job that is already checked; `show` gets the progress."""
        self._make_ready()
        self.note_use()
        try:
            return predicting.predict(self, job, show)
        finally:
            self.note_use()

    @uninterrupted()
    def restart(self, rank: int | None = None, replay: bool = False) -> str:
        """End one rank and put a new engine in its place, or restart the whole cluster.

        Other ranks that are still in an earlier cell are stopped. A rank that does not come back even then is
        replaced as well, because without it there is no group. During a training run only a rank that stands
        still can be ended: the run then replaces it like a rank that has died.

        Args:
            rank: the rank; None for the whole cluster.
            replay: run the cells that the rank had seen again, on the new engine alone, except those that
                were cut off. Collectives in them return at once and exchange nothing. DDP objects and their
                optimizers get the other ranks' state afterwards.

        Returns:
            A description of what happened.

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

    @uninterrupted()
    def resize(self, ranks: int) -> str:
        """Change the number of ranks. Ranks that stay keep their variables, the last ones leave, and new ones
        are empty.

        DDP objects of the ranks that stay are moved to the new group if every rank has them.

        Args:
            ranks: the number of ranks from now on.

        Returns:
            A description of what happened.

        Raises:
            ConfigError: there cannot be so many ranks; nothing has happened.
            RunError: a training run has the ranks now; nothing has happened.
            ClusterError: a rank is still in a cell, or something failed meanwhile; the cluster has as many
                ranks as before.
        """
        self._make_ready()
        return resizing.resize(self, ranks)

    def take_size(self, config: ClusterConfig, chosen: tuple[Device, ...], transport: Transport) -> list[str]:
        """Form the group with the ranks that have these devices, for `resize`; return lines for the person.

        Raises:
            ClusterError: another cluster has a GPU, or a rank did not come or ended. The ranks are those from
                before, and the group has to be formed again.
        """
        before = self.config, self.devices, self.chosen_transport
        if self._entry is not None and set(chosen) - set(self.devices):
            registry.claim(self._entry.model_copy(update={"devices": chosen}))
        self.config = config
        self.chosen_transport = replace(self.chosen_transport, transport=transport)
        try:
            lines = self.ranks.resize(chosen, transport)
        except BaseException:
            self.config, self.devices, self.chosen_transport = before
            self._note()
            raise
        self.devices = self._wanted = chosen
        self._transports = transports.candidates(config, chosen or _UNKNOWN)
        self._planned, self._last_seen = None, {}
        self.history.keep_only(range(min(len(before[1]), len(chosen))))
        self._note()
        return lines

    def restore_group(
        self, watch: RankWatch, results: Mapping[int, Reply], failed: Sequence[int] = ()
    ) -> list[str]:
        """Restore the group when all ranks are back or gone, and replace those that are gone.

        Args:
            watch: the watch over the results.
            results: the results by rank.
            failed: the ranks that raised, whose state does not count where the ranks differ.

        Returns:
            Lines for the person.
        """
        return self.recovery.restore_group(watch, results, failed)

    def leave_behind(self, results: Mapping[int, Reply]) -> None:
        """Note the ranks that did not come back from a cell. Until they do they get no other cell, and no
        answers to their questions."""
        self.recovery.leave_behind(results)

    def lookout(self) -> Lookout:
        """Make a lookout, which asks the ranks where they are. The caller closes it."""
        if self._processes is None:
            raise NoClusterError(_NOT_RUNNING)
        hosts = self._processes.hosts
        return Lookout(self.ranks.seating.processes, lambda host: hosts[host].stacks(), self._last_seen)

    def questions(self) -> Questions:
        """Make the object that takes the ranks' questions to the person. The caller closes it."""
        if self._processes is None:
            raise NoClusterError(_NOT_RUNNING)
        return Questions(self._listener)

    def _listener(self) -> Listener:
        """The listener to which the ranks bring their questions."""
        assert self._processes is not None
        if self._listens is None:
            self._listens = Listener(self._processes.folder)
        return self._listens

    def stop_listening(self) -> None:
        """Take no more questions of the ranks to the person, until somebody asks for them again."""
        if self._listens is not None:
            self._listens.close()
            self._listens = None

    def status(self) -> str:
        """A table with each rank's device, process, memory and current line. Returns within a second."""
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
        """Have all ranks ready before work is sent, or raise the reason why they are not."""
        self.note_use()
        self.ranks.require_reachable()
        self._refuse_during_run()
        self.recovery.make_ready(self.run.folder if self.run is not None else None)

    def tell_news(self) -> None:
        """Print the news."""
        while self.news:
            print(self.news.pop(0), file=sys.stderr)  # noqa: T201 - the cell's output

    def _refuse_during_run(self) -> None:
        if self.run is not None and not self.run.over:
            raise RunError(
                f"the ranks are training ({self.run.folder.name}, {self.run.status}), and code sent to them would "
                "wait until the end. Call run.wait() or run.stop() first"
            )
