"""Start, take over and stop ipyparallel's engines: one for each rank."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from nbgpu.client.cells.runner import CellRunner
from nbgpu.client.cluster import time_limit
from nbgpu.client.engines import environment
from nbgpu.client.engines.host_pool import HostPool
from nbgpu.client.engines.rank_assignment import RankAssignment
from nbgpu.client.engines.ranks import Ranks
from nbgpu.client.engines.transport_fallback import find_transport
from nbgpu.client.faults.recovery import Recovery
from nbgpu.client.host import gpu_choice, registry
from nbgpu.client.launchers.launcher import print_at_once
from nbgpu.client.runs.manager import RunManager
from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.client.state.history import CellHistory
from nbgpu.client.state.release import IdleRelease, tell_in_next_cell
from nbgpu.client.variables import saving
from nbgpu.client.variables.store import VariableStore
from nbgpu.config import TRAIN_CONFIGS, ClusterConfig
from nbgpu.errors import ClusterError, NbgpuError
from nbgpu.host import host_checks
from nbgpu.machine import devices
from nbgpu.machine.gpus.reservations import Reservations
from nbgpu.machine.signals import uninterrupted
from nbgpu.machine.transports import ChosenTransport
from nbgpu.planning.host_devices import UNKNOWN
from nbgpu.protocol.records import Device


def require_usable(config: ClusterConfig, chosen: Sequence[Device]) -> None:
    """Raise ConfigError for settings that are not possible on the devices of the ranks: a memory limit or a
    simulated link."""
    for device in chosen:
        devices.memory_limit_bytes(config, device, chosen)
    devices.require_simulable(config, chosen)


class Lifecycle:
    """Starts the engines of a cluster, takes over those that another process has started, and ends them.

    Args:
        state: the state of the cluster.
        recovery: replaces ranks; it is reset when the engines end.
        runs: the runs on the cluster.
        cells: the cells of the cluster.
        variables: saves the variables before the cluster ends by itself.
        placement_note: a line about the number of ranks, which the start shows.
    """

    def __init__(
        self,
        state: ClusterState,
        recovery: Recovery,
        runs: RunManager,
        cells: CellRunner,
        variables: VariableStore,
        placement_note: str,
    ) -> None:
        self._state = state
        self._recovery = recovery
        self._runs = runs
        self._cells = cells
        self._variables = variables
        self.placement_note = placement_note
        self._chosen_mono_s = time.monotonic()
        """When the devices were chosen, by the monotonic clock. A claim soon after that does not check again
        whether the GPUs are free."""

    def start(self, tell: Callable[[str], None] = print_at_once, stop: threading.Event | None = None) -> None:
        """Start the engines as `Cluster.start` does, but do not make the cluster `current()`. A process may
        have several such clusters, and the caller stops them.

        Args:
            tell: is called with each line about the start that the person should read.
            stop: ends the start with a ClusterError when it is set.
        """
        state, pool = self._state, self._state.pool
        # The devices of other hosts are known once these have dialled in.
        state.use_devices(state.wanted if state.config.is_local else ())
        state.choose_first_transport()
        time_limit.require_loop(state.config)
        if self.placement_note:
            tell(self.placement_note)

        def check() -> None:
            pool.processes.require_reachable()
            if stop is not None and stop.is_set():
                raise ClusterError("the start was stopped")

        try:
            # Check before anything is written, and again because the claim may give other GPUs.
            self._require_startable()
            pool.prepare(tell)
            self._claim_devices(tell, stop)
            num_engines = self._require_startable()
            variables = environment.engine_variables(state.config, state.devices or UNKNOWN)
            # An interrupt in between would leave processes that `nbgpu stop` does not find.
            with uninterrupted():
                # The processes begin with the import of torch, which takes longest.
                pool.launch(variables, num_engines)
                state.write_entry()
            pool.connect(num_engines)
            if not state.config.is_local:
                self._gather_hosts(variables, check)
            self._form_group(pool.start_ranks(state.world_size, check))
        except BaseException:
            self.stop()
            raise

    def _require_startable(self) -> int:
        """Raise an error if no ranks can be started on this host, such as by its limits of open files. Return
        the number of engines to start; 0 if the ranks are on other hosts."""
        state = self._state
        if not state.config.is_local:
            return 0
        host_checks.require_torch_for(state.devices)
        num_engines = state.world_size + state.config.spare
        backends = [transport.backend for transport in state.transports]
        host_checks.require_startable(os.environ, backends, num_engines)
        return num_engines

    def _claim_devices(self, tell: Callable[[str], None], stop: threading.Event | None) -> None:
        """Claim the GPUs of this host before any process uses them, and wait for free ones if the settings
        say so. If the chosen GPUs are no longer free, others are claimed.
        """
        state = self._state

        def store_claim(claimed: registry.Entry, reservations: Reservations) -> None:
            state.entry, state.reservations = claimed, reservations

        entry = registry.new_entry(
            state.config, state.wanted, state.chosen_transport, state.pool.processes.folder
        )
        if not state.config.is_local:
            # The hosts' GPUs are claimed when they have joined (`_gather_hosts`).
            with uninterrupted():
                registry.claim(entry)
                state.entry = entry
            return
        taking = gpu_choice.Taking(state.config, state.wanted, self._chosen_mono_s, tell, stop)
        taking.claim(entry, store_claim)
        assert state.entry is not None, "store_claim was called"
        if state.entry.devices != state.wanted:
            state.use_devices(state.entry.devices)
            require_usable(state.config, state.wanted)
            state.choose_first_transport()

    def _gather_hosts(self, variables: Mapping[str, str], check: Callable[[], None]) -> None:
        """Have the other hosts started, wait until they have dialled in, and claim their devices."""
        state = self._state
        assert state.entry is not None, "_claim_devices has stored it"
        # The entry names the job as soon as it is submitted, so that another process can end a waiting job.
        chosen = state.pool.gather(variables, check, state.write_entry)
        registry.claim(state.entry.model_copy(update={"devices": chosen}))
        # A restart after `resize` has as many ranks as the resized cluster.
        state.use_devices(chosen[: state.pool.most_ranks])
        state.choose_first_transport()

    def _form_group(self, assignment: RankAssignment) -> None:
        """Make the engines ranks of one process group, over the best transport that works, and begin to watch
        the time limit."""
        state = self._state
        state.started_ranks = self._make_ranks(assignment)
        self._use_transport(find_transport(state.started_ranks, state.transports, state.config))
        if state.config.spare:
            state.started_ranks.prepare_to_train(TRAIN_CONFIGS)
        state.time_limit = time_limit.watch_over(state, self._runs, self._variables)
        if state.config.keep:
            state.pool.processes.keep()

    def take_over(self, entry: registry.Entry) -> None:
        """Connect to the engines that another process has started, as its entry in the registry describes
        them."""
        state = self._state
        num_engines = sum(process.alive() for process in entry.engines.values())
        state.pool.take_over(entry.folder, entry.leaders, num_engines, entry.hosts, entry.assignment)
        state.time_limit = time_limit.watch_over(state, self._runs, self._variables)
        state.started_ranks = self._make_ranks(entry.assignment)
        state.ranks.end_leaving()
        state.reserve()

    def rejoin(self, run_folder: Path | None) -> None:
        """Take over the run or the cell that the ranks were in when their notebook ended."""
        if run_folder is not None and not run_folder.exists():
            warnings.warn(f"the folder of the last run is gone: {run_folder}", stacklevel=4)
        elif run_folder is not None and not self._runs.rejoin(run_folder).over:
            return
        if any(self._state.ranks.how_ended(rank) for rank in range(self._state.world_size)):
            return  # the next cell replaces the rank and reports it
        self._recovery.adopt_cell()

    def _use_transport(self, chosen_transport: ChosenTransport) -> None:
        """Record the transport of the ranks, and warn if it is not the best one."""
        state = self._state
        state.chosen_transport = chosen_transport
        # There may be fewer ranks than devices: one if no transport works, and none on a GPU that hangs.
        state.devices = state.ranks.devices
        state.reserve()
        state.write_entry()
        if chosen_transport.failed:
            failures = "\n".join(f"{name} failed: {error}" for name, error in chosen_transport.failed.items())
            outcome = (
                "there is one rank, alone"
                if state.world_size == 1
                else f"the ranks communicate over {chosen_transport.transport.name}"
            )
            warnings.warn(
                f"{outcome}, because better transports failed\n{failures}\nnbgpu doctor says more",
                stacklevel=4,
            )

    def release_when_idle(self, stop: Callable[[], None]) -> None:
        """Have `stop` called when the cluster was not used for `release_after_s`, if that is set."""
        if (after_s := self._state.config.release_after_s) is not None:
            self._state.release = IdleRelease(after_s, self._is_working, lambda: self._end_unused(stop))

    def _is_working(self) -> bool:
        """Whether a run is active or a rank is at work. A rank that does not answer counts as working."""
        if self._runs.run is not None and not self._runs.run.over:
            return True
        idle = self._state.idle_ranks()
        return any(
            self._state.ranks.how_ended(rank) is None
            for rank in range(self._state.world_size)
            if rank not in idle
        )

    def _end_unused(self, stop: Callable[[], None]) -> None:
        """Save the variables if the settings say so, stop the cluster, and have the next cell report both.

        If the variables cannot be saved, the cluster is not stopped.
        """
        state = self._state
        assert state.config.release_after_s is not None
        saved_in = state.config.save_on_release
        if saved_in:
            try:
                self._variables.save(saved_in)
            except NbgpuError as error:
                news = (
                    f"the cluster was not used for {state.config.release_after_s:g} s and goes on all the same, because its "
                    f"variables could not be saved (save_on_release): {error}"
                )
                if news not in state.news:
                    state.news.append(news)
                return
        devices = "GPUs are free" if state.devices[0].kind == "cuda" else "memory is free"
        variables = saving.describe_folder(Path(saved_in)) if saved_in else "the ranks' variables are gone"
        reason = (
            f"the cluster was ended at {time.strftime('%H:%M:%S')}: no cell, run or typing had used it for "
            f"{state.config.release_after_s:g} s (release_after_s). Its {devices}, and {variables}. "
            "Start it again with: start(), or %nbgpu start"
        )
        stop()
        state.why_ended = reason
        tell_in_next_cell(reason[0].upper() + reason[1:])

    @uninterrupted()
    def stop(self) -> None:
        """End every engine and the controller, and remove their files. Harmless when repeated."""
        state = self._state
        state.why_ended = ""
        # First end the threads that act on the cluster.
        if state.release is not None:
            state.release.close()
            state.release = None
        if state.time_limit is not None:
            state.time_limit.close()
            state.time_limit = None
        if self._runs.run is not None:
            self._runs.run.abandon()
        # End the other hosts before the client and the controller, through which they are reached.
        pool, entry = state.pool, state.entry
        pool.end_others()
        if pool.client is not None:
            pool.client.close()
        state.entry = None
        state.pool = HostPool(state.config, most_ranks=pool.most_ranks)
        state.stop_listening()
        pool.end()
        if entry is not None:
            registry.remove(entry)
        state.reservations.close()
        if state.started_ranks is not None:
            state.started_ranks.close()
            state.started_ranks = None
        state.history = CellHistory()
        self._cells.reloading.forget()
        self._recovery.forget()
        state.last_seen = {}
        pool.end_launcher()

    def restart_rank(self, rank: int, replay: bool) -> str:
        """End a rank and put a new engine in its place; see `Cluster.restart`."""
        (rank,) = self._state.checked_ranks([rank])
        run = self._runs.run
        if run is not None and not run.over and (standstills := self._state.ranks.standstills([rank])):
            self._state.ranks.end(standstills, "stood still and was ended by a restart")
            return f"rank {rank} stood still and was ended: {run.folder.name} goes on when it is replaced"
        self._runs.refuse_during_run()
        return self._recovery.restart(rank, replay)

    def _make_ranks(self, assignment: RankAssignment) -> Ranks:
        state = self._state
        return Ranks(
            state.pool,
            state.devices,
            state.chosen_transport.transport,
            state.config,
            assignment,
            state.write_entry,
        )
