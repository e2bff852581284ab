"""The GPUs of a cluster on this host: chosen, claimed, and waited for where others have them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing

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

_LOOK_PERIOD_S = 2.0
"""The time between two looks at the GPUs while the cluster waits for free ones."""
_MAX_TRIES = 20
"""The most choices that other users' clusters may take away before the start gives up."""
_STAYS_TRUE_S = 2.0
"""For this time a choice of GPUs counts as valid without asking the driver, whose start may take a second."""


def gpus_of(chosen: Sequence[Device]) -> list[str]:
    """The UUIDs of the GPUs among the ranks' devices, each once."""
    return list(dict.fromkeys(device.uuid for device in chosen if device.kind == "cuda"))


def choose(config: ClusterConfig) -> tuple[Device, ...]:
    """Return the device of every rank, by what is free now, without claiming any.

    Raises:
        ConfigError: a GPU is named that is not there, or there are fewer than are asked for.
        NoFreeGpuError: too few GPUs are free.
    """
    if not config.takes_free_gpus:
        return devices.choose(config.named_gpus, config.ranks)
    with closing(GpuChooser()) as chooser:
        return _chosen(chooser, config, registry.entries())


def more(config: ClusterConfig, now: Sequence[Device], num_ranks: int) -> tuple[Device, ...]:
    """Choose the device of every rank of a cluster on free GPUs that gets more ranks. The present ranks keep
    their devices; new ranks get free GPUs near those, and share GPUs once the cluster may have no other.

    Raises:
        NoFreeGpuError: too few GPUs are free.
    """
    with closing(GpuChooser()) as chooser:
        own = list(dict.fromkeys(now))
        # Ranks share GPUs once there are no others.
        asked = config.num_free_gpus or len(devices.inventory())
        missing = min(num_ranks, asked) - len(own)
        if missing > 0:
            clusters = registry.entries()
            held = chooser.read(clusters)
            beside = [gpu for gpu in held if gpu.device in own]
            free = [gpu for gpu in held if gpu.holder.is_free]
            if len(free) < missing:
                chooser.refuse(
                    f"ranks = {num_ranks}", missing, [gpu for gpu in held if gpu.device not in own]
                )
            own += [gpu.device for gpu in chooser.best(free, missing, beside)]
    return (*now, *(own[rank % len(own)] for rank in range(len(now), num_ranks)))


def wait(config: ClusterConfig) -> tuple[Device, ...]:
    """Wait until as many GPUs are free as the settings ask for, and return the device of every rank on them.
    This claims nothing."""
    return Taking(config, (), 0.0, print_at_once, None).wait()


class Taking:
    """Takes the GPUs of a cluster that starts.

    Args:
        config: the cluster's settings.
        chosen: the devices that were chosen when the cluster was made; they are taken if nobody has them.
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
        """Begin the wait, whose time the last line reports. The driver is first asked by `wait` or
        `claim`."""
        self._config = config
        self._wanted = tuple(chosen)
        self._chosen_mono_s = chosen_mono_s
        self._tell = tell
        self._stop = stop
        self._told = ""
        self._began_mono_s = time.monotonic()
        self._chooser = GpuChooser()
        self._reservations = Reservations()

    def wait(self) -> tuple[Device, ...]:
        """Wait until as many GPUs are free as the settings ask for, and return the device of every rank on
        them; claim none."""
        try:
            while True:
                try:
                    return _chosen(self._chooser, self._config, registry.entries())
                except NoFreeGpuError as error:
                    self._show(str(error))
                self._pause()
        finally:
            self._chooser.close()

    def claim(self, entry: Entry, keep: Callable[[Entry, Reservations], None]) -> None:
        """Claim GPUs in the registry, and wait for them first where the settings say so.

        Clusters that start at the same moment do not get the same GPU: those of one user choose one after the
        other, and of two users the one that reserves it first gets it.

        Args:
            entry: the cluster's entry, with the devices that were chosen.
            keep: is called with the entry that was written and the reserved GPUs, before an interrupt can
                come.

        Raises:
            NoFreeGpuError: too few GPUs are free, and none are waited for.
            ClusterError: a cluster has one of the GPUs, this user may have no more, or the wait was stopped.
        """
        try:
            while True:
                try:
                    with uninterrupted():
                        keep(registry.claim(entry, self._reserved), self._reservations)
                    break
                except NoFreeGpuError as error:
                    if not self._config.wait:
                        raise
                    self._show(str(error))
                self._pause()
            if self._told:
                self._tell(f"the GPUs are free, after {time.monotonic() - self._began_mono_s:.0f} s")
        except BaseException:
            self._reservations.close()
            raise
        finally:
            self._chooser.close()

    def _reserved(self, clusters: Sequence[AnyEntry]) -> tuple[Device, ...]:
        """Return the devices for the cluster, after their GPUs were reserved for this process. GPUs that the
        settings name are returned even if another user's cluster has reserved them, because they may be
        shared."""
        for _ in range(_MAX_TRIES):
            chosen = self._choose(clusters) if self._config.takes_free_gpus else self._wanted
            # Named GPUs may be shared with whoever has reserved them.
            if self._reservations.hold(gpus_of(chosen)) or not self._config.takes_free_gpus:
                return chosen
            # Another user was faster: what was chosen is not free any more.
            self._reservations.close()
            self._wanted = ()
        raise ClusterError("other clusters took the free GPUs while this one chose. Start it again")

    def _choose(self, clusters: Sequence[AnyEntry]) -> tuple[Device, ...]:
        """Return the devices for the cluster: those that were chosen before if nobody has taken them since,
        else a new choice. The driver is not asked again within `_STAYS_TRUE_S` of the first choice."""
        taken = {uuid for cluster in clusters for uuid in cluster.gpus()}
        wanted = {device.uuid for device in self._wanted if device.kind == "cuda"}
        if self._wanted and not wanted & taken:
            if time.monotonic() - self._chosen_mono_s < _STAYS_TRUE_S or not wanted:
                return self._wanted
            free = {gpu.device.uuid for gpu in self._chooser.read(clusters) if gpu.holder.is_free}
            if wanted <= free:
                return self._wanted
        return _chosen(self._chooser, self._config, clusters)

    def _show(self, why: str) -> None:
        """Print who has the GPUs that the cluster waits for, and again when that changes."""
        # The last line of the error is advice on what else to do, which this wait makes needless.
        who = "\n".join(why.splitlines()[:-1])
        # The memory that is left changes all the time.
        known = "\n".join(line.rpartition(";")[0] or line for line in who.splitlines())
        if known != self._told:
            self._told = known
            self._tell(f"waiting for free GPUs; Stop (Ctrl-C) ends the wait. {who}")

    def _pause(self) -> None:
        """Wait until the next look at the GPUs. An interrupt, or the event `stop`, ends the wait with an
        error."""
        until_mono_s = time.monotonic() + _LOOK_PERIOD_S
        while time.monotonic() < until_mono_s:
            take_interrupt()
            if self._stop is not None and self._stop.is_set():
                raise ClusterError("the wait for free GPUs was stopped, and no cluster was started")
            time.sleep(0.05)


def _chosen(chooser: GpuChooser, config: ClusterConfig, clusters: Sequence[AnyEntry]) -> tuple[Device, ...]:
    most = site.most_gpus()
    if most is not None:
        # Where none is left, the claim says who has them.
        most = max(1, most - len(registry.gpus_here(clusters)))
    return chooser.choose(config.gpus, config.ranks, clusters, most, can_wait=not config.wait)
