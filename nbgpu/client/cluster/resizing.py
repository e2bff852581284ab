"""Changes the number of ranks of a running cluster, and restores the group if that fails."""

from __future__ import annotations

import os
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass

from nbgpu.client.engines.results import sentence
from nbgpu.client.faults.recovery import Recovery
from nbgpu.client.host import gpu_choice
from nbgpu.client.state.cluster_state import ClusterState
from nbgpu.client.state.rank_changes import RankChanges
from nbgpu.config import ClusterConfig
from nbgpu.errors import ClusterError, ConfigError, NbgpuError
from nbgpu.host import host_checks
from nbgpu.machine import devices, transports
from nbgpu.machine.signals import take_interrupt
from nbgpu.machine.transports import SINGLE, Transport
from nbgpu.protocol.records import Device
from nbgpu.text.ranks import count_of_ranks, named_ranges
from nbgpu.text.sizes import in_words

_CELL_PATIENCE_S = 1.0
"""How long to wait for the end of a cell or a run, whose reply may be on the way."""
_CALL_PATIENCE_S = 60.0
"""How long to wait for a call of nbgpu itself, such as the one that frees memory after a run."""
_ANSWER_PATIENCE_S = 1.0
_LOOK_PERIOD_S = 0.02


@dataclass(frozen=True)
class WantedRanks:
    """The ranks of a cluster after a change of their number. Those that stay keep their devices and hosts.

    Attributes:
        config: the cluster's settings after the change.
        devices: the device of each rank.
        hosts: the name of the host of each rank.
    """

    config: ClusterConfig
    devices: tuple[Device, ...]
    hosts: tuple[str, ...]


class Resizing:
    """Gives a running cluster another number of ranks."""

    def __init__(self, state: ClusterState, changes: RankChanges, recovery: Recovery) -> None:
        self._state = state
        self._changes = changes
        self._recovery = recovery

    def resize(self, num_ranks: int) -> str:
        """Change the number of ranks of a cluster that is ready for work; return a message about the change.

        Raises:
            ConfigError: there cannot be so many ranks; nothing was changed.
            ClusterError: too few GPUs are free, or a rank is still in a cell, and nothing was changed; or the
                change failed and the cluster has as many ranks as before.
        """
        state = self._state
        num_before = state.world_size
        wanted = self.wanted_ranks(num_ranks)
        if num_ranks == num_before:
            self._changes.note_wanted_ranks(num_ranks)
            return f"there are {count_of_ranks(num_before)} already: nothing was changed"
        config, chosen = wanted.config, wanted.devices
        transport = self._transport(config, chosen)
        self._require_memory(wanted)
        self._require_idle()
        if num_ranks > num_before and config.is_local:
            host_checks.require_startable(os.environ, [transport.backend], num_ranks + config.spare)
        try:
            lines = self._changes.change_size(config, chosen, transport, wanted.hosts[num_before:])
        except KeyboardInterrupt:
            state.news.append(f"%nbgpu resize {num_ranks} was interrupted. {self._restore(num_before)}")
            raise
        except NbgpuError as error:
            raise ClusterError(
                f"{sentence(str(error))} {self._restore(num_before)} To try again: %nbgpu resize {num_ranks}"
            ) from error
        self._changes.note_wanted_ranks(num_ranks)
        state.ranks.end_leaving()
        state.ranks.add_spares(config.spare)
        return "\n".join([_describe_change(num_before, num_ranks), state.describe(), *lines])

    def wanted_ranks(self, num_ranks: int) -> WantedRanks:
        """Return the ranks that the running cluster would have with this number of ranks.

        Raises:
            ConfigError: there cannot be so many ranks.
        """
        state = self._state
        processes = state.ranks.assignment.processes
        now = tuple(processes[rank].host for rank in range(state.world_size))
        if state.config.is_local:
            config = ClusterConfig.checked(**{**state.config.model_dump(), "ranks": num_ranks})
            chosen = self._devices_here(config, num_ranks)
            devices.require_simulable(config, chosen)
            return WantedRanks(config, chosen, (now[0],) * num_ranks)
        ClusterConfig.checked(ranks=num_ranks)
        slots = [*zip(now, state.devices, strict=True), *self._changes.free_slots()]
        if num_ranks > len(slots):
            room = ", ".join(
                f"{name} {number}" for name, number in Counter(name for name, _ in slots).items()
            )
            lost = " and ".join(host.name for host in state.pool.missing())
            self._state.pool.start_again()
            raise ConfigError(
                f"ranks = {num_ranks}: the hosts have room for {count_of_ranks(len(slots))} ({room}), one for each device, or as "
                f"many as gpus_per_node says.{f' {lost} is lost, and has room when it is back.' if lost else ''} For more: "
                "%nbgpu stop, then %nbgpu start with more nodes or gpus_per_node"
            )
        slots = slots[:num_ranks]
        return WantedRanks(
            state.config, tuple(device for _, device in slots), tuple(name for name, _ in slots)
        )

    def _devices_here(self, config: ClusterConfig, num_ranks: int) -> tuple[Device, ...]:
        """Return the device of each rank if all are on the notebook's host."""
        now = self._state.devices
        if num_ranks < len(now):
            return now[:num_ranks]
        if now[0].kind == "cpu":
            return (*now, *map(devices.cpu, range(len(now), num_ranks)))
        if config.takes_free_gpus:
            return gpu_choice.more(config, now, num_ranks)
        chosen = devices.choose(config.named_gpus, num_ranks)
        if chosen[: len(now)] != now:
            raise ConfigError(
                f"ranks = {num_ranks}: the GPUs that gpus = {config.gpus!r} names are not those that the ranks have, "
                f"{', '.join(d.label() for d in now)}. %nbgpu stop, then %nbgpu start --ranks {num_ranks}"
            )
        return chosen

    def _transport(self, config: ClusterConfig, chosen: tuple[Device, ...]) -> Transport:
        """Return the transport for ranks on these devices: the present one if possible, else the best one
        that did not fail at the start. None is tried first: a transport that fails would leave the ranks'
        processes in a state that cannot be repaired.

        Raises:
            ConfigError: the settings name a transport that is not possible there, or none has worked so far.
        """
        state = self._state
        possible = transports.candidates(config, chosen)
        failed = state.chosen_transport.failed
        if state.transport.name == SINGLE:
            failures = "\n".join(f"{name} failed: {error}" for name, error in failed.items())
            raise ConfigError(
                f"ranks = {len(chosen)}: there is one rank, alone, because ranks cannot communicate with each other here. nbgpu "
                f"doctor says more\n{failures}"
            )
        if state.transport in possible:
            return state.transport
        # There is one: gloo comes last, and cannot have failed before the present transport was chosen.
        return next(transport for transport in possible if transport.name not in failed)

    def _require_memory(self, wanted: WantedRanks) -> None:
        """Raise ConfigError if a CPU rank that stays uses more memory than its limit after the change."""
        if wanted.devices[0].kind != "cpu":
            return
        slots = list(zip(wanted.hosts, wanted.devices, strict=True))
        problems = []
        for rank, (host, device) in enumerate(slots[: self._state.world_size]):
            # The ranks of a host share its memory.
            devices_there = [device for name, device in slots if name == host]
            limit_bytes = devices.memory_limit_bytes(wanted.config, device, devices_there)
            used_bytes = self._state.ranks.resident_bytes(rank) or 0
            if limit_bytes is not None and used_bytes >= limit_bytes:
                problems.append(
                    f"{self._state.ranks.name_of(rank)} has {in_words(used_bytes)} and could have {in_words(limit_bytes)}"
                )
        if problems:
            raise ConfigError(
                f"ranks = {len(slots)}: with memory_limit = {wanted.config.memory_limit!r} {', '.join(problems)}. Free memory there "
                "with: %distributed del NAME"
            )

    def _require_idle(self) -> None:
        """Wait a moment until all ranks are idle; raise ClusterError if one is still at work or does not
        answer."""
        state = self._state
        begun_s = time.monotonic()
        with closing(state.stack_sampler()) as sampler:
            while True:
                sampler.seen.clear()
                sampler.ask()
                sampler.collect(_ANSWER_PATIENCE_S)
                doing = {
                    rank: sampler.seen[rank].where.doing if rank in sampler.seen else ""
                    for rank in range(state.world_size)
                }
                # A rank also reports that it is idle while a cell is on its way to it.
                busy = [
                    rank for rank, work in doing.items() if work != "idle" or state.ranks.owes_answer(rank)
                ]
                if not busy:
                    return
                standstills = state.ranks.standstills(busy)
                # A rank that frees memory may not answer meanwhile, so silence alone gets the longer time.
                is_user_work = bool(standstills) or any(doing[rank] in ("cell", "run") for rank in busy)
                if time.monotonic() > begun_s + (_CELL_PATIENCE_S if is_user_work else _CALL_PATIENCE_S):
                    break
                time.sleep(_LOOK_PERIOD_S)
                take_interrupt()
        reasons = "".join(f" Rank {rank}: {reason}." for rank, reason in standstills.items())
        raise ClusterError(
            f"{named_ranges(busy)} {'is' if len(busy) == 1 else 'are'} still at work, and the number of ranks can only change between two cells."
            f"{reasons} Wait until that is done, or stop it with the notebook's stop button; %nbgpu status shows the line"
        )

    def _restore(self, num_before: int) -> str:
        """After a change that failed, replace ranks whose processes have ended, and form the group of the
        former ranks again. If that fails, the next cell tries again.

        Args:
            num_before: the number of ranks before the change.

        Returns:
            A message about the ranks that there are now.
        """
        state = self._state
        message = "They kept all variables."
        try:
            if state.ranks.gone():
                message = self._recovery.replace_all_gone()
            elif not state.ranks.group_is_whole:
                state.news += state.ranks.regroup()
        except NbgpuError as error:
            message = (
                f"They could not be brought together again, and the next cell tries. {sentence(str(error))}"
            )
        as_before = ", as before" if state.world_size == num_before else ""
        return f"The cluster has {count_of_ranks(state.world_size)}{as_before}. {message}"


def _describe_change(num_before: int, num_now: int) -> str:
    """Return a message that says which ranks are new or have left, and which kept their variables."""
    if num_now < num_before:
        left = named_ranges(range(num_now, num_before))
        return f"{left} left, and the variables there are gone; {named_ranges(range(num_now))} kept all variables"
    came, is_one = named_ranges(range(num_before, num_now)), num_now - num_before == 1
    return f"{came} {'is' if is_one else 'are'} new and empty; {named_ranges(range(num_before))} kept all variables"
