"""The ranks of one process group: which engine is which rank, and how the group is formed again.

A rank keeps its number unless the number of ranks changes. Its engine may change: an engine that died is
replaced by a new one, or by a spare that waits, and the process group is then formed again. Each time that
it is formed is a generation of the group.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nbgpu.client.engines import rank_specs
from nbgpu.client.engines.calls import reference
from nbgpu.client.engines.cell_replies import Answer, Arrivals
from nbgpu.client.engines.host_pool import HostPool
from nbgpu.client.engines.lifetimes import Lifetimes, by_host
from nbgpu.client.engines.other_hosts.other_host import HostLostError
from nbgpu.client.engines.rank_assignment import RankAssignment
from nbgpu.client.engines.reply import Reply
from nbgpu.client.engines.results import RanksLateError, collect, failures
from nbgpu.client.engines.standstill_notice import StandstillNotice
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError, RankError
from nbgpu.machine.processes import CoreUse
from nbgpu.machine.signals import take_interrupt, uninterrupted
from nbgpu.machine.transports import Transport
from nbgpu.protocol.calls import Call
from nbgpu.protocol.records import CellOptions, Device

if TYPE_CHECKING:
    from nbgpu.client.engines.connection import Client

_log = logging.getLogger("nbgpu.cluster")

_REGROUP_PATIENCE_S = 60.0
_MAX_REGROUP_ATTEMPTS = 3
_ENGINE_PATIENCE_S = 60.0
_ECHO_PATIENCE_S = 0.1
_POLL_PERIOD_S = 0.01
_EXIT_PATIENCE_S = 5.0


class Ranks:
    """Sends cells and calls to the ranks' engines, and forms their process group.

    Args:
        pool: the hosts of the engines. All engines for ranks and spares are registered with its client.
        chosen: the device of each rank.
        transport: the transport between the ranks. `assign_engines` may choose another one.
        config: the cluster's settings.
        assignment: which engine is which rank; this object changes it.
        note: a function that is called after each change of the assignment, to store it.
    """

    def __init__(
        self,
        pool: HostPool,
        chosen: Sequence[Device],
        transport: Transport,
        config: ClusterConfig,
        assignment: RankAssignment,
        note: Callable[[], None],
    ) -> None:
        self.assignment = assignment
        self._config = config
        self._chosen = tuple(chosen)
        self._note = note
        self._pool = pool
        self._client: Client = pool.client
        self._views: dict[int, Any] = {}
        """ipyparallel's view of each engine, kept because making one takes longer than sending a cell."""
        self._lifetimes = Lifetimes(pool, assignment, note)
        self._suspects: set[int] = set()
        """Ranks that have failed. Where the ranks' states differ, the others' state is the right one. Empty
        once the group is whole."""
        self._transport = transport
        self._specs = self._specs_with_transport(transport)

    def _specs_with_transport(self, transport: Transport) -> list[dict[str, Any]]:
        return rank_specs.rank_specs(self._config, self._chosen, transport, self._pool, self._host_name)

    def _host_name(self, rank: int) -> str:
        """The name of a rank's host. A rank that has no process yet will be on the notebook's host."""
        process = self.assignment.processes.get(rank)
        return self._pool.processes.this_host.name if process is None else process.host

    def __len__(self) -> int:
        return len(self._specs)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The device of every rank."""
        return self._chosen[: len(self)]

    @property
    def pids(self) -> dict[int, int]:
        """The process id of every rank."""
        return self.assignment.pids

    @property
    def pids_here(self) -> dict[int, int]:
        """The process id of every rank if the ranks run on this host. Empty if they run on other hosts: here
        the same pid belongs to another process."""
        return {} if self._pool.members else self.pids

    def __getitem__(self, rank: int) -> Any:
        """Return ipyparallel's view of a rank's engine."""
        engine = self._engine(rank)
        if engine not in self._views:
            self._views[engine] = self._client[engine]
        return self._views[engine]

    def _engine(self, rank: int) -> int:
        """Return the number of a rank's engine. Raise ClusterError if the engine is not registered."""
        engine = self.assignment.engines[rank]
        if engine not in self._client.ids:
            raise ClusterError(
                f"rank {rank} is not reachable: its process has ended, or has not come back from a start. "
                f"%nbgpu restart --rank {rank} puts a new one in its place"
            )
        return engine

    def send_cell(
        self,
        ranks: Iterable[int],
        code: str,
        options: CellOptions,
        arrivals: Arrivals,
        is_awaited: bool = False,
    ) -> dict[int, Answer]:
        """Send a cell to ranks, as `Client.send_cell` sends it to engines."""
        engines = {rank: self._engine(rank) for rank in ranks}
        return self._client.send_cell(engines, code, options, arrivals, is_awaited)

    @uninterrupted()
    def assign_engines(self, transport: Transport, with_new_engines: bool) -> None:
        """Prepare the ranks for `join` over a transport: make their specs, and start new engines if asked.

        Args:
            transport: the transport that is tried next.
            with_new_engines: whether to replace the engines. They have tried another transport, and a process
                in which a transport has failed cannot be repaired.
        """
        if with_new_engines:
            self.end(range(len(self)))
        self._transport = transport
        self._specs = self._specs_with_transport(transport)
        if with_new_engines:
            self.assignment.generation += 1
            self._lifetimes.assign_spares(
                {rank: self._lifetimes.new_spare(self._host_name(rank)) for rank in range(len(self))}
            )
            for gone in [rank for rank in self.assignment.engines if rank >= len(self)]:
                del self.assignment.engines[gone], self.assignment.processes[gone]

    @uninterrupted()
    def join(self, timeout_s: float) -> list[str]:
        """Form the first group, and return the environment variables that the ranks set for its transport,
        as 'NAME=value'.

        Args:
            timeout_s: the time that all ranks have to join, in seconds.

        Raises:
            ClusterError: a rank's process ended, or a rank did not join in time.
            RankError: a rank failed.
        """
        self._note()
        joining = self.call(Call.JOIN, self.assignment.generation, with_spec=True)
        variables = self._wait_for_meeting(joining, timeout_s)
        self.assignment.is_whole = True
        for rank in range(len(self)):
            self._wait_for_output_path(rank, timeout_s)
        return list(dict.fromkeys(setting for settings in variables.values() for setting in settings))

    @uninterrupted()
    def call(
        self, function: str, *args: Any, ranks: Iterable[int] | None = None, with_spec: bool = False
    ) -> dict[int, Reply]:
        """Call a function on ranks, and return their pending replies at once.

        Args:
            function: its name as `module:function`, usually a `Call`.
            args: its arguments.
            ranks: the ranks; None for all.
            with_spec: whether each rank gets its `RankSpec` as an argument before the others.
        """
        chosen = range(len(self)) if ranks is None else ranks
        return {
            rank: self[rank].apply_async(
                reference(function), *([self._specs[rank]] if with_spec else []), *args
            )
            for rank in chosen
        }

    def owes_answer(self, rank: int) -> bool:
        """Return whether a rank has yet to answer a message, which it may not have received yet."""
        return bool(self[rank].outstanding & self._client.outstanding)

    def interrupt(self, ranks: Iterable[int]) -> None:
        """Raise KeyboardInterrupt in the Python code of the ranks, and end the programs that they run, as
        Ctrl-C would."""
        for host, processes in by_host(self.assignment.processes[rank] for rank in ranks).items():
            self._pool.hosts[host].interrupt(processes)

    def sever(self, generation: int | None = None) -> None:
        """Abort the collectives in which ranks wait. Afterwards the group must be formed again.

        All ranks lose their connections, also those that wait in no collective: gloo may not notice a
        connection that was cut at one end only. A second call for the same generation does nothing more.

        Args:
            generation: the generation of the group that is given up; None for the present one. A thread names
                the generation that it saw, because the next one may have been formed meanwhile.
        """
        assignment = self.assignment
        given_up = assignment.generation if generation is None else generation
        is_first_call = assignment.is_whole and given_up == assignment.generation
        if is_first_call:
            assignment.is_whole = False
        for host, processes in by_host(assignment.processes.values()).items():
            try:
                self._pool.hosts[host].give_up(processes, given_up)
            except HostLostError:
                # Its ranks are lost with it, but those of the other hosts still have to be freed.
                _log.warning("host %s is lost, and its ranks could not be freed", host)
        if is_first_call:
            self._note()

    @property
    def group_is_whole(self) -> bool:
        """Whether the group may be used: all ranks joined it, and since then neither the client nor a rank
        whose collective took too long has given it up."""
        return self.assignment.is_whole and not self._as_ranks(self._client.cut_off)

    def without_group(self) -> list[int]:
        """Return the ranks that are no longer in a process group, because a cell has destroyed it there."""
        return self._as_ranks(self._client.without_group)

    def signals_taken(self) -> dict[str, list[int]]:
        """Return, by the name of a signal, the ranks on which a cell has replaced its handler since the last
        call."""
        taken = {name: self._as_ranks(engines) for name, engines in self._client.taken_signals.items()}
        self._client.taken_signals.clear()
        return taken

    def _as_ranks(self, engines: Collection[int]) -> list[int]:
        """The ranks that these engines are."""
        return [rank for rank, engine in self.assignment.engines.items() if engine in engines]

    def require_reachable(self) -> None:
        """Raise ClusterError if the controller or the fork server is gone: no message would arrive."""
        self._pool.processes.require_reachable()

    @uninterrupted()
    def untouched_by_cell(self) -> bool:
        """Return whether no rank used a process group in the last cell."""
        return all(collect(self.call(Call.UNTOUCHED_BY_CELL), _REGROUP_PATIENCE_S).values())

    def how_ended(self, rank: int) -> str | None:
        """Return how the process of a rank ended, in words, or None while it lives."""
        ended = self._lifetimes.how_ended(self.assignment.processes[rank])
        return None if ended is None else f"{self.name_of(rank)} {ended}"

    def name_of(self, rank: int) -> str:
        """Return the rank's name for messages: 'rank 2', or 'rank 2 on host n2' if hosts have dialled in."""
        return f"rank {rank} on host {self._host_name(rank)}" if self._pool.members else f"rank {rank}"

    def is_ending(self, rank: int) -> bool:
        """Return whether the process of a rank is exiting or has ended."""
        process = self.assignment.processes[rank]
        return self._pool.process_host(process).is_ending(process.pid)

    def standstills(self, ranks: Iterable[int] | None = None) -> dict[int, str]:
        """Return the ranks that are alive but kept from running, as by SIGSTOP or a debugger; each with the
        reason and the remedy, in words.

        Args:
            ranks: the ranks to look at; None for all.
        """
        processes = self.assignment.processes
        chosen = processes if ranks is None else ranks
        reasons = {
            rank: self._pool.process_host(processes[rank]).standstill(processes[rank].pid) for rank in chosen
        }
        return {rank: reason for rank, reason in reasons.items() if reason}

    @uninterrupted()
    def wait_for(self, results: Mapping[int, Reply]) -> dict[int, Any]:
        """Wait for the replies of ranks and return their values, by rank. A notice under the cell names the
        ranks that stand still meanwhile.

        Raises:
            ClusterError: no rank can be reached any more.
            RankError: the call raised on one rank or more.
        """
        with StandstillNotice(self.standstills) as notice:

            def check() -> None:
                self.require_reachable()
                notice.check(results)

            return collect(results, check=check)

    def resident_bytes(self, rank: int) -> int | None:
        """Return the memory that a rank's process has in RAM, or None if the process is gone."""
        process = self.assignment.processes[rank]
        return self._pool.process_host(process).resident_bytes(process.pid)

    def core_uses(self, ranks: Iterable[int]) -> dict[int, CoreUse]:
        """Return how long the process of each rank has used and waited for CPU cores so far, in seconds; a
        process that has ended is left out."""
        return self._lifetimes.core_uses({rank: self.assignment.processes[rank] for rank in ranks})

    def gone(self) -> dict[int, str]:
        """Return the ranks whose processes have ended, and how each ended."""
        processes = self.assignment.processes
        ending = [
            rank for rank in range(len(self)) if self._lifetimes.exit_probe(processes[rank]).is_ending()
        ]
        return {rank: how for rank in ending if (how := self.how_ended(rank)) is not None}

    def gone_together(self) -> dict[int, str]:
        """Return the ranks whose processes have ended, as `gone` does, but wait for those that are exiting
        until they have ended, too: one cause may end several ranks, a moment apart."""
        give_up_s = time.monotonic() + _EXIT_PATIENCE_S
        while gone := self.gone():
            alive = set(range(len(self))) - gone.keys()
            if not any(self.is_ending(rank) for rank in alive) or time.monotonic() > give_up_s:
                break
            time.sleep(_POLL_PERIOD_S)
        return gone

    def close(self) -> None:
        """Stop watching the processes. Call when the cluster has ended."""
        self._lifetimes.close()

    @uninterrupted()
    def regroup(self, failed: Collection[int] = ()) -> list[str]:
        """Form the process group again on all ranks, and restart their DDP objects on it.

        Args:
            failed: ranks that have failed: where the ranks' states differ, the others' state is kept.

        Returns:
            A line for each variable of the ranks that belonged to the old group and has to be made again.

        Raises:
            ClusterError: a rank's process ended meanwhile.
            RanksLateError: a rank did not join in time.
            RankError: a rank failed to join, in each of several attempts.
        """
        self._suspects.update(failed)
        for _ in range(_MAX_REGROUP_ATTEMPTS - 1):
            try:
                return self._form_again()
            except RankError as error:
                # The next generation shares nothing with this one, so another attempt may succeed.
                _log.warning("the process group is formed once more: %s", error)
        return self._form_again()

    def _form_again(self) -> list[str]:
        """Form the next generation of the group, once; see `regroup`."""
        all_ranks = range(len(self))
        healthy = [rank for rank in all_ranks if rank not in self._suspects] or list(all_ranks)
        try:
            self.assignment.generation += 1
            self.assignment.is_whole = False
            self._note()
            joining = self.call(Call.JOIN_AGAIN, self.assignment.generation, healthy, with_spec=True)
            lost = self._wait_for_meeting(joining, _REGROUP_PATIENCE_S)
        except BaseException:
            # Also after an interrupt: the ranks that have joined would wait for one that does not.
            self.sever()
            raise
        self.assignment.is_whole = True
        self._suspects.clear()
        self._note()
        # Keep the order of the lines, because the variables are to be made again in that order.
        return list(dict.fromkeys(line for lines in lost.values() for line in lines))

    def _wait_for_meeting(self, results: Mapping[int, Reply], timeout_s: float) -> dict[int, Any]:
        """Wait for the replies to a call in which the ranks wait for one another. If one rank fails, abort
        the wait of the others.

        Raises:
            ClusterError: a rank's process ended.
            RanksLateError: a rank did not answer in time.
            RankError: a rank failed.
        """
        is_severed = False
        give_up_s = time.monotonic() + timeout_s
        while pending := {rank: result for rank, result in results.items() if not result.ready()}:
            if time.monotonic() > give_up_s:
                standing = [f"rank {rank}: {reason}" for rank, reason in self.standstills(pending).items()]
                named = ", ".join(map(str, pending))
                message = f"rank {named} did not answer within {timeout_s:g} s"
                raise RanksLateError("; ".join([message, *standing]), pending)
            next(iter(pending.values())).wait(_POLL_PERIOD_S)
            take_interrupt()
            gone = self.gone()
            answered = {rank: result for rank, result in results.items() if result.ready()}
            if not is_severed and (gone or failures(answered)):
                self.sever()
                is_severed = True
            if gone:
                raise ClusterError(f"while the group was formed, {'; '.join(gone.values())}")
        return collect(results, _POLL_PERIOD_S)

    @uninterrupted()
    def resize(self, chosen: Sequence[Device], transport: Transport, hosts: Sequence[str]) -> list[str]:
        """Form the group with another number of ranks: new engines are appended as the last ranks, or the
        last ranks leave.

        If this raises, the ranks and their engines are the same as before, and the group has to be formed
        again. The processes of ranks that leave run until `end_leaving`.

        Args:
            chosen: the device of each rank. Ranks that stay keep theirs.
            transport: the transport between the ranks.
            hosts: the name of the host of each new rank.

        Returns:
            The lines that `regroup` returns.

        Raises:
            ClusterError: a new engine did not register, or the process of a rank ended meanwhile.
            RankError: a rank failed to join, in each of several attempts.
        """
        assignment = self.assignment
        # Everything that this changes, to be restored if it fails.
        engines, processes = dict(assignment.engines), dict(assignment.processes)
        before = self._chosen, self._specs, self._transport, engines, processes
        new = range(len(self), len(chosen))
        arrived = dict(zip(new, self._lifetimes.take_spares(hosts), strict=True))
        new_processes = {engine: assignment.spares[engine] for engine in arrived.values()}
        leaving = {rank: process for rank, process in assignment.processes.items() if rank >= len(chosen)}
        # Their processes are ended only by `end_leaving`: if the others cannot form a group, they stay.
        assignment.leaving = list(leaving.values())
        try:
            self._lifetimes.assign_spares(arrived)
            self._chosen = tuple(chosen)
            self._transport = transport
            self._specs = self._specs_with_transport(transport)
            for rank in leaving:
                del assignment.engines[rank], assignment.processes[rank]
            for rank in new:
                self._wait_for_output_path(rank, _ENGINE_PATIENCE_S)
            lines = self.regroup(failed=new)
        except BaseException:
            self._chosen, self._specs, self._transport, assignment.engines, assignment.processes = before
            assignment.leaving = []
            assignment.is_whole = False
            self._suspects.difference_update(new)
            self._lifetimes.dismiss(new_processes)
            self._note()
            raise
        return lines

    @uninterrupted()
    def end_leaving(self) -> None:
        """End the processes of ranks that have left the group.

        Raises:
            ClusterError: a process does not end.
        """
        leaving = self.assignment.leaving
        self._lifetimes.end_left(leaving)
        if leaving:
            self.assignment.leaving = []
            self._note()

    def drop(self, ranks: Collection[int]) -> None:
        """Remove ranks whose host or GPU is lost. The others get new numbers from 0 on, in their order, and
        the group has to be formed again.

        Args:
            ranks: the ranks to remove; at least one other rank stays.
        """
        assignment = self.assignment
        staying = [rank for rank in range(len(self)) if rank not in ranks]
        assignment.engines = {new: assignment.engines[rank] for new, rank in enumerate(staying)}
        assignment.processes = {new: assignment.processes[rank] for new, rank in enumerate(staying)}
        assignment.is_whole = False
        self._suspects = {new for new, rank in enumerate(staying) if rank in self._suspects}
        self._chosen = tuple(self._chosen[rank] for rank in staying)
        self._specs = self._specs_with_transport(self._transport)
        self._note()

    @uninterrupted()
    def replace(
        self,
        ranks: Collection[int],
        replay: Callable[[int], None] | None = None,
        on: Mapping[int, str] | None = None,
    ) -> list[str]:
        """Give ranks new engines, end the old engines that are still alive, and form the group again.

        Args:
            ranks: the ranks.
            replay: a function that runs cells again on each new rank before the rank joins the group. In
                these cells every collective returns at once and does nothing.
            on: by rank, the name of the host on which its new engine runs; a rank that is left out stays on
                its host.

        Returns:
            The lines that `regroup` returns.
        """
        self._suspects.update(ranks)
        self.assignment.is_whole = False
        self.end(ranks)
        hosts = [(on or {}).get(rank, self._host_name(rank)) for rank in ranks]
        arrived = dict(zip(ranks, self._lifetimes.take_spares(hosts), strict=True))
        self._lifetimes.assign_spares(arrived)
        if on:
            # A host that was started again has another folder, and perhaps another network interface.
            self._specs = self._specs_with_transport(self._transport)
        for rank in ranks:
            self._wait_for_output_path(rank, _ENGINE_PATIENCE_S)
            if replay is not None:
                collect(
                    self.call(Call.BECOME_RANK_FOR_REPLAY, ranks=[rank], with_spec=True), _ENGINE_PATIENCE_S
                )
                try:
                    replay(rank)
                except KeyboardInterrupt:
                    self.interrupt([rank])
                    self.regroup(failed=ranks)
                    raise
        return self.regroup(failed=ranks)

    @uninterrupted()
    def prepare_to_train(self, recipes: Iterable[str]) -> None:
        """Import what training needs in the fork servers and the spares, from which later engines come, and
        return at once.

        Args:
            recipes: the names of the recipes.
        """
        self._pool.prepare_engines(list(recipes))
        for engine in set(self.assignment.spares) & set(self._client.ids):
            self._client[engine].apply_async(reference(Call.GET_READY_TO_TRAIN), list(recipes))

    @uninterrupted()
    def add_spares(self, num_spares: int) -> None:
        """Start spares on this host until there are `num_spares`; return before they are ready."""
        while len(self.assignment.spares) < num_spares:
            self._lifetimes.new_spare(self._pool.processes.this_host.name)

    @uninterrupted()
    def end(self, ranks: Iterable[int], why: str = "") -> None:
        """End the processes of ranks.

        Args:
            why: what later messages say behind the ranks' names about how they ended; empty for the usual
                text.

        Raises:
            ClusterError: a process does not end.
        """
        for rank in ranks:
            self._lifetimes.end(self.assignment.processes[rank], self.name_of(rank), why)

    def _wait_for_output_path(self, rank: int, timeout_s: float) -> None:
        """Wait until a rank's output arrives here. ZeroMQ's subscription takes a moment to reach the rank,
        and everything that the rank printed before would be lost without an error."""
        give_up_s = time.monotonic() + timeout_s
        while not self[rank].execute("", silent=True, block=False).wait_for_output(_ECHO_PATIENCE_S):
            if time.monotonic() > give_up_s:
                log = self._pool.processes.this_host.log_tail("controller")
                raise ClusterError(f"the output of rank {rank} does not arrive. {log}")
            if how := self.how_ended(rank):
                raise ClusterError(how)
            take_interrupt()
