"""Chooses and claims the GPUs of a cluster on this host, and waits for free ones if the settings say so."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TypeVar

from nbgpu.client.host import registry
from nbgpu.client.host.registry import AnyEntry, Entry
from nbgpu.client.launchers.launcher import print_at_once
from nbgpu.config import ClusterConfig, site
from nbgpu.errors import ClusterError, NoFreeGpuError
from nbgpu.host.free_gpus import GpuChooser
from nbgpu.machine import devices
from nbgpu.machine.gpus.reservations import Reservations
from nbgpu.machine.signals import take_interrupt, uninterrupted
from nbgpu.protocol.records import Device

Result = TypeVar("Result")

_LOOK_PERIOD_S = 2.0
"""The time between two looks at the GPUs while the cluster waits for free ones."""
_MAX_TRIES = 20
"""How often another user may reserve the chosen GPUs first, before the start gives up."""
_CHOICE_VALID_S = 2.0
"""A choice of GPUs is not checked again for this time, because the driver's start may take a second."""


def gpus_of(chosen: Sequence[Device]) -> list[str]:
    """The UUIDs of the GPUs among the ranks' devices, each once."""
    return list(dict.fromkeys(device.uuid for device in chosen if device.kind == "cuda"))


def choose(config: ClusterConfig) -> tuple[Device, ...]:
    """Choose a device for every rank from those that are free now, without claiming them.

    Raises:
        ConfigError: the settings name a GPU that does not exist, or ask for more GPUs than there are.
        NoFreeGpuError: too few GPUs are free.
    """
    if not config.takes_free_gpus:
        return devices.choose(config.named_gpus, config.ranks)
    with closing(GpuChooser()) as chooser:
        return _chosen(chooser, config, registry.entries())


def more(config: ClusterConfig, now: Sequence[Device], num_ranks: int) -> tuple[Device, ...]:
    """Choose a device for every rank of a running cluster that gets more ranks. The present ranks keep their
    devices. New ranks get free GPUs close to these, and share GPUs when the cluster has as many as it may.

    Args:
        config: the cluster's settings.
        now: the devices of the present ranks.
        num_ranks: the new number of ranks.

    Raises:
        NoFreeGpuError: too few GPUs are free.
    """
    with closing(GpuChooser()) as chooser:
        chosen = list(dict.fromkeys(now))
        most_gpus = config.most_free_gpus or len(devices.inventory())
        num_missing = min(num_ranks, most_gpus) - len(chosen)
        if num_missing > 0:
            gpus = chooser.read(registry.entries())
            present = [gpu for gpu in gpus if gpu.device in chosen]
            free = [gpu for gpu in gpus if gpu.holder.is_free]
            if len(free) < num_missing:
                others = [gpu for gpu in gpus if gpu.device not in chosen]
                chooser.refuse(f"ranks = {num_ranks}", num_missing, others)
            chosen += [gpu.device for gpu in chooser.best(free, num_missing, present)]
    return (*now, *(chosen[rank % len(chosen)] for rank in range(len(now), num_ranks)))


def wait(config: ClusterConfig) -> tuple[Device, ...]:
    """Wait until as many GPUs are free as the settings ask for, and return a device for every rank, without
    claiming them."""
    return Taking(config, (), 0.0, print_at_once, None).wait()


class Taking:
    """Claims the GPUs of a cluster that starts, and waits for them if the settings say so.

    Args:
        config: the cluster's settings.
        chosen: the devices that were chosen when the cluster was made; they are claimed if they are still
            free.
        chosen_mono_s: the time of that choice, by the monotonic clock.
        tell: a function that shows a line about the GPUs that are waited for.
        stop: an event that ends the wait.
    """

    def __init__(
        self,
        config: ClusterConfig,
        chosen: Sequence[Device],
        chosen_mono_s: float,
        tell: Callable[[str], None],
        stop: threading.Event | None,
    ) -> None:
        self._config = config
        self._first_choice = tuple(chosen)
        self._chosen_mono_s = chosen_mono_s
        self._tell = tell
        self._stop = stop
        self._last_shown = ""
        self._began_mono_s = time.monotonic()
        self._chooser = GpuChooser()
        self._reservations = Reservations()

    def wait(self) -> tuple[Device, ...]:
        """Wait until as many GPUs are free as the settings ask for, and return a device for every rank,
        without claiming them."""
        with closing(self._chooser):
            return self._retry(lambda: _chosen(self._chooser, self._config, registry.entries()), waits=True)

    def claim(self, entry: Entry, keep: Callable[[Entry, Reservations], None]) -> None:
        """Claim GPUs in the registry, after a wait for free ones if the settings say so.

        Clusters that start at the same moment do not get the same GPU: those of one user choose one after the
        other, under the registry's lock, and of two users the first one that reserves a GPU gets it.

        Args:
            entry: the cluster's entry, with the devices that were chosen.
            keep: a function that is called with the entry that was written and the reservations of its GPUs,
                before an interrupt can come.

        Raises:
            NoFreeGpuError: too few GPUs are free, and the settings do not say to wait.
            ClusterError: a cluster has one of the GPUs, this user may have no more, or the wait was stopped.
        """

        def claim() -> None:
            with uninterrupted():
                keep(registry.claim(entry, self._reserved), self._reservations)

        with closing(self._chooser):
            try:
                self._retry(claim, waits=self._config.wait)
                if self._last_shown:
                    self._tell(f"the GPUs are free, after {time.monotonic() - self._began_mono_s:.0f} s")
            except BaseException:
                self._reservations.close()
                raise

    def _retry(self, choose: Callable[[], Result], waits: bool) -> Result:
        """Call a function that chooses GPUs, again and again until enough are free.

        Args:
            choose: the function, which raises NoFreeGpuError if too few are free.
            waits: whether to wait then; otherwise its error is raised.
        """
        while True:
            try:
                return choose()
            except NoFreeGpuError as error:
                if not waits:
                    raise
                self._show(str(error))
            self._pause()

    def _reserved(self, clusters: Sequence[AnyEntry]) -> tuple[Device, ...]:
        """Choose the devices for the cluster, and reserve their GPUs against other users. GPUs that the
        settings name are returned even if another user has reserved them, because they may be shared."""
        for _ in range(_MAX_TRIES):
            chosen = self._choose(clusters) if self._config.takes_free_gpus else self._first_choice
            if self._reservations.hold(gpus_of(chosen)) or not self._config.takes_free_gpus:
                return chosen
            # Another user was faster, so these GPUs are not free any more.
            self._reservations.close()
            self._first_choice = ()
        raise ClusterError("other clusters took the free GPUs while this one chose. Start it again")

    def _choose(self, clusters: Sequence[AnyEntry]) -> tuple[Device, ...]:
        """Return the first choice if its GPUs are still free, and else a new choice."""
        taken = {uuid for cluster in clusters for uuid in cluster.gpus()}
        uuids = set(gpus_of(self._first_choice))
        if self._first_choice and not uuids & taken:
            if time.monotonic() - self._chosen_mono_s < _CHOICE_VALID_S or not uuids:
                return self._first_choice
            free = {gpu.device.uuid for gpu in self._chooser.read(clusters) if gpu.holder.is_free}
            if uuids <= free:
                return self._first_choice
        return _chosen(self._chooser, self._config, clusters)

    def _show(self, message: str) -> None:
        """Show who has the GPUs that the cluster waits for, unless that was the last line shown.

        Args:
            message: the text of the NoFreeGpuError.
        """
        # Its last line is advice on what else to do, which is not needed in a wait.
        lines = message.splitlines()[:-1]
        # The end of each line is the memory that is left, which changes all the time.
        holders = "\n".join(line.rpartition(";")[0] or line for line in lines)
        if holders != self._last_shown:
            self._last_shown = holders
            text = "\n".join(lines)
            self._tell(f"waiting for free GPUs; Stop (Ctrl-C) ends the wait. {text}")

    def _pause(self) -> None:
        """Wait until the next look at the GPUs. An interrupt or the event `stop` raises an error."""
        until_mono_s = time.monotonic() + _LOOK_PERIOD_S
        while time.monotonic() < until_mono_s:
            take_interrupt()
            if self._stop is not None and self._stop.is_set():
                raise ClusterError("the wait for free GPUs was stopped, and no cluster was started")
            time.sleep(0.05)


def _chosen(chooser: GpuChooser, config: ClusterConfig, clusters: Sequence[AnyEntry]) -> tuple[Device, ...]:
    """Choose a free device for every rank, within the number of GPUs that the site allows one person."""
    limit = site.most_gpus()
    if limit is not None:
        # At least 1: if this user may have no more, the claim refuses it and says which clusters have them.
        limit = max(1, limit - len(registry.gpus_here(clusters)))
    return chooser.choose(config.gpus, config.ranks, clusters, limit, can_wait=not config.wait)
