"""The engines of a cluster as the ranks of one group: who sits where, and how the group is made good again.

A rank keeps its number for good. The engine behind it may change: one that died is replaced by a new one, or
by a spare that was waiting, and takes its seat in the next generation of the group.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from nbgpu.client.engines.cell_replies import Answer, Arrivals
from nbgpu.client.engines.processes import Processes
from nbgpu.client.engines.reply import Reply
from nbgpu.client.engines.results import collect, failures
from nbgpu.client.engines.seating import Seating
from nbgpu.client.engines.standstill_notice import StandstillNotice
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError, RankError
from nbgpu.machine import devices
from nbgpu.machine import processes as machine_processes
from nbgpu.machine.signals import take_interrupt, uninterrupted
from nbgpu.machine.transports import SINGLE, Transport
from nbgpu.protocol.calls import Call
from nbgpu.protocol.records import CellOptions, Device

if TYPE_CHECKING:
    from nbgpu.client.engines.connection import Client

_log = logging.getLogger("nbgpu.cluster")

_REGROUP_PATIENCE_S = 60.0
_MAX_REGROUP_ATTEMPTS = 3
_ENGINE_PATIENCE_S = 60.0
_DEATH_PATIENCE_S = 10.0
_ECHO_PATIENCE_S = 0.1
_POLL_PERIOD_S = 0.01


class Ranks:
    """Reaches the ranks' engines, and forms their group anew.

    Args:
        processes: the engines' processes, which have been started.
        client: ipyparallel's client, to which as many engines have come as there are ranks and spares.
        chosen: the device of each rank.
        transport: how they talk, if that is known already.
        config: the cluster's settings.
        seating: who sits where so far.
        note: called when that has changed.
    """

    def __init__(
        self,
        processes: Processes,
        client: Client,
        chosen: Sequence[Device],
        transport: Transport,
        config: ClusterConfig,
        seating: Seating,
        note: Callable[[], None],
    ) -> None:
        self.seating = seating
        self._config = config
        self._chosen = tuple(chosen)
        self._note = note
        self._processes = processes
        self._client = client
        self._views: dict[int, Any] = {}
        """By engine: to make one takes longer than to send a cell."""
        self._glances: dict[int, machine_processes.Glance] = {}
        """By process."""
        self._why_ended: dict[int, str] = {}
        """By process: how it ended, in words, where this object has ended it."""
        self._distrusted: set[int] = set()
        """While the group is not whole: ranks whose state is not to be trusted where the ranks differ."""
        self._seats = self._seats_for(transport)

    def _seats_for(self, transport: Transport) -> list[dict[str, Any]]:
        """What each engine is told of its place (engine/process/boot.py, Seat)."""
        chosen = self._chosen[:1] if transport.name == SINGLE else self._chosen
        return [
            {
                "rank": rank,
                "world_size": len(chosen),
                "local_rank": rank,
                "backend": transport.backend,
                "transport": transport.name,
                "device": devices.torch_name(device, self._chosen),
                "described": asdict(device),
                "rendezvous": str(self._processes.folder),
                "threads": self._config.threads_for(len(chosen)),
                "collective_timeout_s": self._config.collective_timeout_s,
                "memory_limit_bytes": devices.memory_limit_bytes(self._config, device, self._chosen),
                "cell_seed": self._config.cell_seed,
            }
            for rank, device in enumerate(chosen)
        ]

    def __len__(self) -> int:
        return len(self._seats)

    @property
    def pids(self) -> dict[int, int]:
        """The process id of every rank."""
        return dict(self.seating.pids)

    def __getitem__(self, rank: int) -> Any:
        """ipyparallel's view of a rank's engine."""
        engine = self._engine(rank)
        if engine not in self._views:
            self._views[engine] = self._client[engine]
        return self._views[engine]

    def _engine(self, rank: int) -> int:
        engine = self.seating.engines[rank]
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
        """As `Client.send_cell`, to ranks."""
        engines = {rank: self._engine(rank) for rank in ranks}
        return self._client.send_cell(engines, code, options, arrivals, is_awaited)

    @uninterrupted()
    def prepare_for(self, transport: Transport, anew: bool) -> None:
        """Gives the engines their places for a way to talk.

        Args:
            anew: the ranks have tried another way, and get new engines: what that left in them is not to be
                mended.
        """
        if anew:
            self.end(range(len(self)))
        self._seats = self._seats_for(transport)
        if anew:
            self.seating.generation += 1
            self._give_places({rank: self._new_spare() for rank in range(len(self))})
            for gone in [rank for rank in self.seating.engines if rank >= len(self)]:
                for by_rank in (self.seating.engines, self.seating.pids):
                    del by_rank[gone]

    @uninterrupted()
    def join(self, timeout_s: float) -> list[str]:
        """Forms the first group; returns the variables that were set for its way to talk, as 'NAME=value'.

        Raises:
            ClusterError: a rank's process ended, or a rank did not come in time.
            RankError: a rank failed.
        """
        self._note()
        joining = self.call(Call.JOIN, self.seating.generation, seated=True)
        told = self._meet(joining, timeout_s)
        for rank in range(len(self)):
            self._wait_for_output_path(rank, timeout_s)
        return list(dict.fromkeys(setting for settings in told.values() for setting in settings))

    @uninterrupted()
    def call(
        self, function: str, *args: Any, ranks: Iterable[int] | None = None, seated: bool = False
    ) -> dict[int, Reply]:
        """Call a function, a `Call` as a rule, on ranks, all of them where none are named; return at once.

        With `seated` the first argument is the rank's own seat.
        """
        chosen = range(len(self)) if ranks is None else ranks
        return {
            rank: self[rank].apply_async(reference(function), *([self._seats[rank]] if seated else []), *args)
            for rank in chosen
        }

    def interrupt(self, ranks: Iterable[int]) -> None:
        """Raises KeyboardInterrupt in the Python code of the ranks, and ends programs that they run, as
        Ctrl-C would."""
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self.seating.pids[rank], signal.SIGINT)
            machine_processes.interrupt_programs_of(self.seating.pids[rank])

    def sever(self) -> None:
        """Frees all ranks from whatever collective they wait in; after it the group must be formed anew.

        Ranks that wait in none are severed too: gloo may not notice a connection that was cut at one end
        only. Said again of the same group, it does nothing more.
        """
        self.seating.give_up(self._processes.folder)
        if self.seating.is_whole:
            self.seating.is_whole = False
            self._note()

    @property
    def group_is_whole(self) -> bool:
        """Whether the group may be used: all ranks came to it, and it was not given up since."""
        return self.seating.is_whole

    def without_group(self) -> list[int]:
        """The ranks that are in no process group any more, because their own code has ended it."""
        return self._ranks_of(self._client.without_group)

    def signals_taken(self) -> dict[str, list[int]]:
        """By the name of a signal, the ranks whose code has replaced its handler; each is told once."""
        taken = {name: self._ranks_of(engines) for name, engines in self._client.taken_signals.items()}
        self._client.taken_signals.clear()
        return taken

    def _ranks_of(self, engines: Collection[int]) -> list[int]:
        return [rank for rank, engine in self.seating.engines.items() if engine in engines] if engines else []

    def require_reachable(self) -> None:
        """ClusterError where the controller, or the fork server, is gone: nothing sent would arrive."""
        self._processes.require_reachable()

    @uninterrupted()
    def untouched_by_cell(self) -> bool:
        """Whether nothing went through the process groups in the last cell, on no rank."""
        return all(collect(self.call(Call.UNTOUCHED_BY_CELL), _REGROUP_PATIENCE_S).values())

    def how_ended(self, rank: int) -> str | None:
        """How the process of a rank ended, in words; None while it lives."""
        ended = self._processes.how_ended(self.seating.pids[rank], self._config.debug)
        return None if ended is None else f"rank {rank} {self._why_ended.get(self.seating.pids[rank], ended)}"

    def is_ending(self, rank: int) -> bool:
        """Whether the process of a rank is on its way out."""
        return machine_processes.is_ending(self.seating.pids[rank])

    def standstills(self, ranks: Iterable[int] | None = None) -> dict[int, str]:
        """Which of these ranks live and are kept from going on, and why and what lets them go on, in words.

        Args:
            ranks: the ranks to look at; None for all.
        """
        chosen = self.seating.pids if ranks is None else ranks
        return {
            rank: why for rank in chosen if (why := machine_processes.standstill(self.seating.pids[rank]))
        }

    @uninterrupted()
    def wait_for(self, results: Mapping[int, Reply]) -> dict[int, Any]:
        """Collect the results of ranks, with a notice while one of them stands still.

        Raises:
            ClusterError: no rank can be reached any more.
            RankError: it raised on one rank or more.
        """
        with StandstillNotice(self.standstills) as notice:

            def check() -> None:
                self.require_reachable()
                notice.check(results)

            return collect(results, check=check)

    def core_use(self, rank: int) -> machine_processes.CoreUse | None:
        """What a rank's process has had of the cores so far; None where it is gone."""
        return machine_processes.core_use(self.seating.pids[rank])

    def gone(self) -> dict[int, str]:
        """The ranks whose processes have ended, and how."""
        ending = [rank for rank in range(len(self)) if self._glance(rank).is_ending()]
        return {rank: how for rank in ending if (how := self.how_ended(rank)) is not None}

    def _glance(self, rank: int) -> machine_processes.Glance:
        pid = self.seating.pids[rank]
        if pid not in self._glances:
            for replaced in set(self._glances) - set(self.seating.pids.values()):
                self._glances.pop(replaced).close()
            self._glances[pid] = machine_processes.Glance(pid)
        return self._glances[pid]

    def close(self) -> None:
        """Called when the cluster has ended."""
        for glance in self._glances.values():
            glance.close()
        self._glances.clear()

    @uninterrupted()
    def regroup(self, failed: Collection[int] = ()) -> list[str]:
        """Forms the process group anew on all ranks, and starts their DDP objects anew on it.

        Args:
            failed: ranks whose state is not to be trusted where the ranks differ.

        Returns:
            A line for each variable of the ranks that belonged to the old group and has to be made again.

        Raises:
            ClusterError: a rank's process ended meanwhile, or a rank did not come.
            RankError: a rank failed in it again and again.
        """
        self._distrusted.update(failed)
        for _ in range(_MAX_REGROUP_ATTEMPTS - 1):
            try:
                return self._form_again()
            except RankError as error:
                # The next generation has nothing of this one.
                _log.warning("the process group is formed once more: %s", error)
        return self._form_again()

    def _form_again(self) -> list[str]:
        everybody = range(len(self))
        healthy = [rank for rank in everybody if rank not in self._distrusted] or list(everybody)
        try:
            self.seating.generation += 1
            self.seating.is_whole = False
            self._note()
            joining = self.call(Call.JOIN_AGAIN, self.seating.generation, healthy, seated=True)
            lost = self._meet(joining, _REGROUP_PATIENCE_S)
        except BaseException:
            # Also where the person stopped it: the ranks that came would wait for one that does not.
            self.sever()
            raise
        self.seating.is_whole = True
        self._distrusted.clear()
        self._note()
        # In their order, in which they are to be made again.
        return list(dict.fromkeys(line for lines in lost.values() for line in lines))

    def _meet(self, results: Mapping[int, Reply], timeout_s: float) -> dict[int, Any]:
        """Waits for calls in which the ranks wait for one another; where one fails the others are freed.

        Raises:
            ClusterError: a rank's process ended, or a rank did not answer in time.
            RankError: a rank failed.
        """
        severed = False
        give_up_s = time.monotonic() + timeout_s
        while waiting := [result for result in results.values() if not result.ready()]:
            if time.monotonic() > give_up_s:
                break
            waiting[0].wait(_POLL_PERIOD_S)
            take_interrupt()
            gone = self.gone()
            if not severed and (gone or failures({r: a for r, a in results.items() if a.ready()})):
                self.sever()
                severed = True
            if gone:
                raise ClusterError(f"while the group was formed, {'; '.join(gone.values())}")
        if late := [rank for rank, result in results.items() if not result.ready()]:
            told = [f"rank {rank}: {why}" for rank, why in self.standstills(late).items()]
            named = ", ".join(map(str, late))
            raise ClusterError("; ".join([f"rank {named} did not answer within {timeout_s:g} s", *told]))
        return collect(results, _POLL_PERIOD_S)

    @uninterrupted()
    def replace(self, ranks: Collection[int], replay: Callable[[int], None] | None = None) -> list[str]:
        """Gives ranks new engines, ends the old ones where they still live, and forms the group anew.

        Args:
            replay: called for each new rank before it joins the group; in what it runs there every
                collective returns at once and does nothing.

        Returns:
            As `regroup`.
        """
        self._distrusted.update(ranks)
        self.seating.is_whole = False
        self.end(ranks)
        self._give_places(dict(zip(ranks, self._take_spares(len(ranks)), strict=True)))
        for rank in ranks:
            self._wait_for_output_path(rank, _ENGINE_PATIENCE_S)
            if replay is not None:
                collect(self.call(Call.SEAT_FOR_REPLAY, ranks=[rank], seated=True), _ENGINE_PATIENCE_S)
                try:
                    replay(rank)
                except KeyboardInterrupt:
                    self.interrupt([rank])
                    self.regroup(failed=ranks)
                    raise
        return self.regroup(failed=ranks)

    def _give_places(self, arrived: Mapping[int, tuple[int, int]]) -> None:
        """Puts new engines, (pid, number) by rank, in the place of those that the ranks had, once they have
        come."""
        try:
            self._wait_for([engine for _, engine in arrived.values()])
        except ClusterError:
            for pid, _ in arrived.values():
                self._dismiss(pid)
            raise
        for rank, (pid, engine) in arrived.items():
            self.seating.engines[rank] = engine
            self.seating.pids[rank] = pid
            self.seating.spares.pop(pid)

    @uninterrupted()
    def prepare_to_train(self, recipes: Iterable[str]) -> None:
        """Has what training needs imported where a rank's replacement will come from; returns at once."""
        self._processes.prepare_engines(list(recipes))
        for engine in set(self.seating.spares.values()) & set(self._client.ids):
            self._client[engine].apply_async(reference(Call.GET_READY_TO_TRAIN), list(recipes))

    @uninterrupted()
    def add_spares(self, num_spares: int) -> None:
        """Starts spare engines until there are so many; they come in their own time."""
        while len(self.seating.spares) < num_spares:
            self._new_spare()

    def _new_spare(self) -> tuple[int, int]:
        """(pid, engine) of a new engine. It is a spare until it has a rank's place, so that an interrupt in
        between leaves no engine that belongs to nobody: the next replacement takes it."""
        spares: dict[int, int] = {}

        def take(pid: int, engine: int) -> None:
            self.seating.spares[pid] = spares[pid] = engine
            self._note()

        self._processes.new_engine(take)
        ((pid, engine),) = spares.items()
        return pid, engine

    def _take_spares(self, num: int) -> list[tuple[int, int]]:
        """(pid, engine) of spares that live; new ones are started where there are too few."""
        for pid in list(self.seating.spares):
            if self._processes.how_ended(pid, self._config.debug) is not None:
                del self.seating.spares[pid]
        self.add_spares(num)
        return list(self.seating.spares.items())[:num]

    def _dismiss(self, pid: int) -> None:
        """Ends a spare."""
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        self.seating.spares.pop(pid, None)

    @uninterrupted()
    def end(self, ranks: Iterable[int], why: str = "") -> None:
        """Ends the processes of ranks; ClusterError where one does not go.

        Args:
            why: what is to be said later of how they ended, behind their names.
        """
        for rank in ranks:
            pid = self.seating.pids[rank]
            if not self.is_ending(rank):
                self._why_ended[pid] = why or "was ended, to be replaced"
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            give_up_s = time.monotonic() + _DEATH_PATIENCE_S
            while self.how_ended(rank) is None:
                if time.monotonic() > give_up_s:
                    raise ClusterError(
                        f"the process of rank {rank} (pid {pid}) does not end: it waits in the kernel or its driver. "
                        "%nbgpu stop, then look at it with ps"
                    )
                time.sleep(_POLL_PERIOD_S)
                take_interrupt()

    def _wait_for_output_path(self, rank: int, timeout_s: float) -> None:
        """Makes sure that what a rank prints arrives: a subscription on the way to it takes a moment, and
        what is printed before is lost without a word."""
        give_up_s = time.monotonic() + timeout_s
        while not self[rank].execute("", silent=True, block=False).wait_for_output(_ECHO_PATIENCE_S):
            if time.monotonic() > give_up_s:
                raise ClusterError(
                    f"what rank {rank} prints does not arrive. {self._processes.log_tail('controller')}"
                )
            take_interrupt()

    def _wait_for(self, engines: Collection[int]) -> None:
        give_up_s = time.monotonic() + _ENGINE_PATIENCE_S
        while not set(engines) <= set(self._client.ids):
            if time.monotonic() > give_up_s:
                raise ClusterError(
                    f"a new engine did not come within {_ENGINE_PATIENCE_S:g} s. {self._processes.log_tail()}"
                )
            time.sleep(_POLL_PERIOD_S)
            take_interrupt()


def reference(function: str) -> Any:
    """`module:function` as something that ipyparallel looks up on the engine."""
    module, _, name = function.partition(":")
    return expression(f"__import__('importlib').import_module({module!r}).{name}")


def expression(source: str) -> Any:
    """An expression as something that ipyparallel evaluates on the engine."""
    # Here, so that the fork server can be launched before ipyparallel is imported, which takes a quarter
    # of a second.
    from ipyparallel import Reference

    return Reference(source)
