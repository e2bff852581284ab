"""Start, reach and stop the engines, which ipyparallel runs for us: one for each rank."""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from nbgpu.client.cluster import resizing, status, time_limit
from nbgpu.client.cluster.history import CellHistory
from nbgpu.client.cluster.rank_changes import RankChanges
from nbgpu.client.cluster.release import IdleRelease, tell_in_next_cell
from nbgpu.client.cluster.run_calls import RunCalls
from nbgpu.client.cluster.variable_calls import VariableCalls
from nbgpu.client.engines import environment
from nbgpu.client.engines.other_hosts import joining
from nbgpu.client.engines.other_hosts.returning import ReturningHosts
from nbgpu.client.engines.processes import Processes
from nbgpu.client.engines.ranks import Ranks
from nbgpu.client.engines.seating import Seating
from nbgpu.client.engines.transport_fallback import find_transport
from nbgpu.client.faults.recovery import Recovery
from nbgpu.client.host import gpu_choice, registry
from nbgpu.client.launchers.choosing import launcher_of, launcher_that_started
from nbgpu.client.launchers.launcher import print_at_once
from nbgpu.client.runs import planning
from nbgpu.client.runs.run import Run
from nbgpu.client.variables import saving
from nbgpu.client.variables.autoreload import Reloading
from nbgpu.config import TRAIN_CONFIGS, ClusterConfig
from nbgpu.errors import (
    ClusterError,
    NbgpuError,
    NoClusterError,
    NoFreeGpuError,
)
from nbgpu.host import enough_ranks, host_checks, torch_build
from nbgpu.machine import devices, transports
from nbgpu.machine.gpus.reservations import Reservations
from nbgpu.machine.signals import uninterrupted
from nbgpu.machine.transports import ChosenTransport
from nbgpu.planning.host_devices import UNKNOWN
from nbgpu.protocol.records import Device

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


def _require_usable(config: ClusterConfig, chosen: Sequence[Device]) -> None:
    """Refuse settings that the devices of the ranks cannot honour."""
    for device in chosen:
        devices.memory_limit_bytes(config, device, chosen)
    devices.require_simulable(config, chosen)


class Cluster(VariableCalls, RunCalls, RankChanges):
    """The ranks of one torch.distributed group: one on each GPU, or several that share the CPU.

    Use it as a context manager, or call `start` and `stop`. Variables live in the ranks until `stop`.

    Args:
        gpus: 'auto' for all free GPUs, 'free:2' for two of them, 'all' for all that are visible, 'none', or
            indices and UUIDs separated by commas; None for the default.
        ranks: how many ranks; None is one for each GPU, or 2 where there is none.
        settings: any other field of ClusterConfig.

    Raises:
        ConfigError: a setting is not valid, or a GPU is named that is not there.
        NoFreeGpuError: too few GPUs are free, and the settings do not say to wait.
    """

    def __init__(self, gpus: str | None = None, ranks: int | None = None, **settings: Any) -> None:
        named = {"gpus": gpus, "ranks": ranks}
        given = {name: value for name, value in named.items() if value is not None}
        self._configure(ClusterConfig.checked(**given, **settings))

    @classmethod
    def with_config(cls, config: ClusterConfig) -> Self:
        """Make a cluster with settings that are already checked.

        Raises:
            ConfigError: a GPU is named that is not there.
            NoFreeGpuError: too few GPUs are free, and the settings do not say to wait.
        """
        cluster = cls.__new__(cls)
        cluster._configure(config)
        return cluster

    def _configure(self, config: ClusterConfig) -> None:
        launcher_of(config)  # refuses what it cannot do
        time_limit.require_limit(config)
        config, placement_note = enough_ranks.placed(config)
        # What other hosts have is known once they have dialled in.
        chosen: tuple[Device, ...] = ()
        if config.is_local:
            try:
                chosen = gpu_choice.choose(config)
            except NoFreeGpuError:
                if not config.wait:
                    raise
        _require_usable(config, chosen)
        best = transports.candidates(config, chosen or UNKNOWN)[0]
        self._describe(config, chosen, ChosenTransport(best, simulated=config.simulated))
        self.placement_note = placement_note

    def _describe(
        self, config: ClusterConfig, chosen: tuple[Device, ...], chosen_transport: ChosenTransport
    ) -> None:
        self.config = config
        self.devices = self._wanted = chosen
        self._chosen_mono_s = time.monotonic()
        self._transports = transports.candidates(config, chosen or UNKNOWN)
        self.chosen_transport = chosen_transport
        self.run = None
        self.last_timeline = None
        self.history = CellHistory()
        self.reloading = Reloading()
        self.recovery = Recovery(self)
        self.news = []
        self.join_file = None
        self.placement_note = ""
        self._most_ranks = None
        self._launcher = None
        self._returning = None
        self._time_limit = None
        self._processes = None
        self._entry = None
        self._reservations = Reservations()
        self._client = None
        self._ranks = None
        self._choices = planning.Choices()
        self._planned = None
        self._last_seen = {}
        self._listens = []
        self._release = None
        self._why_ended = ""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Cluster {'running' if self.running else 'stopped'}: {self.describe()}>"

    def start(
        self, *, tell: Callable[[str], None] = print_at_once, stop: threading.Event | None = None
    ) -> Self:
        """Start the engines and return when an all_reduce over all of them has given the right sum.

        With `backend='auto'` other transports are tried if the best one does not work, a single rank being
        the last. A warning then says which ones failed, and why.

        Args:
            tell: a function that shows a line about other hosts or free GPUs that are waited for.
            stop: an event that ends the wait, for a start on a thread that no interrupt reaches.

        Raises:
            ConfigError: a variable of gloo or NCCL names a network interface that does not exist.
            ClusterError: another cluster of this process runs, another cluster has a GPU, the limits of the
                number or size of files are too low, torch is built for the CPU only and there are GPUs, or an
                engine did not start. The message ends with the engines' log.
        """
        require_none()
        return self._start(self._become_current, tell, stop)

    def start_beside(
        self, *, tell: Callable[[str], None] = print_at_once, stop: threading.Event | None = None
    ) -> Self:
        """As `start`, for one of several clusters of this process. None of them is `current()`, and the
        caller stops them."""
        return self._start(lambda: None, tell, stop)

    def _start(
        self,
        at_the_end: Callable[[], None],
        tell: Callable[[str], None] = print_at_once,
        stop: threading.Event | None = None,
    ) -> Self:
        self.devices = self._wanted
        self.chosen_transport = ChosenTransport(self._transports[0], simulated=self.config.simulated)
        time_limit.require_loop(self.config)
        if not self.config.is_local:
            return self._start_on_hosts(at_the_end, tell, stop)
        if self.placement_note:
            tell(self.placement_note)
        # Before anything is written, and again where the GPUs become others.
        self._require_startable()
        self._processes = processes = Processes.prepare()
        try:
            self._take_devices(processes, tell, stop)
            num_engines = self._require_startable()
            # `stop` can only end what it knows of.
            with uninterrupted():
                # Before all else, because the import of torch takes longest.
                processes.launch(environment.engine_variables(self.config, self.devices))
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
            self._time_limit = time_limit.watch_over(self, None)
            if self.config.keep:
                processes.keep()
            at_the_end()
        except BaseException:
            self.stop()
            raise
        return self

    def _require_startable(self) -> int:
        """Raise an error in conditions under which these devices can have no ranks; return the number of
        engines that they need."""
        torch_build.require_for(self.devices)
        num_engines = self.world_size + self.config.spare
        backends = [transport.backend for transport in self._transports]
        host_checks.require_startable(os.environ, backends, num_engines)
        return num_engines

    def _take_devices(
        self, processes: Processes, tell: Callable[[str], None], stop: threading.Event | None
    ) -> None:
        """Claim the GPUs before anything touches them, and wait for free ones where the settings say so."""

        def keep(claimed: registry.Entry, reservations: Reservations) -> None:
            self._entry, self._reservations = claimed, reservations

        entry = registry.new_entry(self.config, self._wanted, self.chosen_transport, processes.folder)
        taking = gpu_choice.Taking(self.config, self._wanted, self._chosen_mono_s, tell, stop)
        taking.claim(entry, keep)
        assert self._entry is not None, "claiming keeps it"
        if self._entry.devices != self._wanted:
            self.devices = self._wanted = self._entry.devices
            _require_usable(self.config, self._wanted)
            self._transports = transports.candidates(self.config, self._wanted)
            self.chosen_transport = ChosenTransport(self._transports[0], simulated=self.config.simulated)

    def _start_on_hosts(
        self, at_the_end: Callable[[], None], tell: Callable[[str], None], stop: threading.Event | None
    ) -> Self:
        self.devices = self._wanted = ()
        self.join_file = None
        self._launcher = launcher = launcher_of(self.config, tell)

        def check() -> None:
            processes.require_reachable()
            if stop is not None and stop.is_set():
                raise ClusterError("the start was stopped")

        try:
            interface, ip = launcher.listen_at()
            self._processes = processes = Processes.prepare()
            variables = environment.engine_variables(self.config, UNKNOWN)
            with uninterrupted():
                processes.launch(variables, ip)
                entry = registry.new_entry(self.config, (), self.chosen_transport, processes.folder)
                registry.claim(entry)
                self._entry = entry
                self._note()
            self._client = processes.connect(0, self.config.start_timeout_s)
            where = f"{interface} ({ip})"
            self.join_file = joining.write_join_file(processes.folder, variables, where)
            launcher.start(self.join_file, where)
            self._note()
            there = joining.gather(self._client, self.config, launcher, check)
            launcher.joined()
            processes.use(there, launcher.when_lost)
            self._returning = ReturningHosts(self._client, processes, self.config, launcher, self.join_file)
            seats = joining.devices_of(there)
            registry.claim(self._entry.model_copy(update={"devices": tuple(device for _, device in seats)}))
            # After a `resize`, a restart has as many ranks again.
            seats = seats[: self._most_ranks]
            num_ranks = Counter(name for name, _ in seats)
            processes.have_ranks_on(num_ranks)
            seating = joining.start_ranks(self._client, there, num_ranks, self.config, check)
            self.devices = self._wanted = tuple(device for _, device in seats)
            self._transports = transports.candidates(self.config, self.devices)
            self.chosen_transport = ChosenTransport(self._transports[0])
            self._ranks = self._sit_down(processes, seating)
            self._use_transport(find_transport(self._ranks, self._transports, self.config))
            self._time_limit = time_limit.watch_over(self, launcher)
            if self.config.keep:
                processes.keep()
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
        cluster._processes = processes = Processes(entry.folder, entry.leaders)
        num_engines = sum(process.alive() for process in entry.engines.values())
        cluster._client = processes.connect(num_engines, entry.config.start_timeout_s)
        if entry.hosts:
            launcher = launcher_that_started(entry.config, entry.job, entry.launched)
            cluster._launcher = launcher
            processes.use(joining.take_over(cluster._client, entry.hosts, entry.seating), launcher.when_lost)
            processes.have_ranks_on({process.host for process in entry.seating.processes.values()})
            cluster._most_ranks = entry.most_ranks
            join_file = entry.folder / "join.json"
            cluster._returning = ReturningHosts(cluster._client, processes, entry.config, launcher, join_file)
        cluster._time_limit = time_limit.watch_over(cluster, cluster._launcher)
        cluster._ranks = cluster._sit_down(cluster._processes, entry.seating)
        cluster._ranks.end_leaving()
        cluster._reserve()
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
        # A rank alone has the first device, and a GPU that hangs has no rank.
        self.devices = self.ranks.devices
        self._reserve()
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

    @uninterrupted()
    def _become_current(self) -> None:
        global _current
        _current = self
        if not self.config.keep:
            atexit.register(self.stop)
        if self.config.release_after_s is not None:
            self._release = IdleRelease(self.config.release_after_s, self._is_working, self._end_unused)

    def _is_working(self) -> bool:
        """Whether a run is active or a rank is at work. A rank that does not answer counts as working."""
        if self.run is not None and not self.run.over:
            return True
        idle = self.idle_ranks()
        return any(self.ranks.how_ended(rank) is None for rank in range(self.world_size) if rank not in idle)

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
        held = saving.where_they_are(Path(saved_in)) if saved_in else "the ranks' variables are gone"
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
        if self._time_limit is not None:
            self._time_limit.close()
            self._time_limit = None
        if self._returning is not None:
            self._returning.close()
            self._returning = None
        atexit.unregister(self.stop)
        if self.run is not None:
            self.run.abandon()
        if self._processes is not None:
            self._processes.end_others()
        launcher, self._launcher = self._launcher, None
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
        self._reservations.close()
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
        self.history = CellHistory()
        self.reloading.forget()
        self.recovery = Recovery(self)
        self._last_seen = {}
        if launcher is not None:
            launcher.end()

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

    def status(self) -> str:
        """A table with each rank's device, process, memory and current line, and the state of a job. Returns
        within a second, or within three more where Slurm is slow."""
        with closing(self.lookout()) as lookout:
            table = status.table(self, lookout)
        given = time_limit.job_state(self._launcher)
        return f"{table}\n{given}" if given else table

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
