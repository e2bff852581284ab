"""What a run will do, shown before it starts: devices, batches, steps, and the memory that it takes on each
rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbgpu.config import ClusterConfig, OwnConfig, TrainConfig
from nbgpu.machine import devices
from nbgpu.machine.transports import ChosenTransport
from nbgpu.performance.memory import NAMES
from nbgpu.planning import epochs, workers
from nbgpu.protocol.records import Device
from nbgpu.text.html import labelled
from nbgpu.text.sizes import in_words

_WIDTH = 11
_NAMES = {**NAMES, "before": "held already"}


@dataclass(frozen=True)
class Plan:
    """A run that was not started. It prints as lines."""

    cluster: ClusterConfig
    config: TrainConfig
    devices: Sequence[Device]
    chosen_transport: ChosenTransport
    memory: Mapping[str, Any]
    """An estimate for one rank, in bytes: the tensors at the peak by category (`performance.memory.NAMES`),
    `before` (memory that the rank holds already) and `peak`; or `unknown`, with the reason."""
    data: tuple[str, ...]
    """How the data come to the ranks, one sentence for each part."""
    steps_per_epoch: int
    """The number of steps, or 0 if it is not known."""
    beginning: tuple[str, ...] = ()
    """From which checkpoint the run goes on and with which other settings, one sentence for each; empty where
    it begins with its first step."""

    @classmethod
    def at_first(
        cls,
        cluster: ClusterConfig,
        config: TrainConfig,
        devices: Sequence[Device],
        chosen_transport: ChosenTransport,
    ) -> Plan:
        """Return the plan that is known without asking a rank."""
        unknown = {"unknown": "it is known when the ranks have looked at the data"}
        data, _ = data_in_words(config, len(devices), unknown)
        memory = {"unknown": f"cluster.plan({config.recipe!r}, ...) estimates it"}
        return cls(cluster, config, devices, chosen_transport, memory, data, 0)

    @property
    def fits(self) -> bool | None:
        """Whether the estimate is below the memory that each rank may take, or None if it is not known."""
        if "peak" not in self.memory:
            return None
        return all(self.memory["peak"] <= self._most_bytes(device) for device in self.devices)

    def __str__(self) -> str:
        indented = f"\n{' ' * _WIDTH}"
        return "\n".join(f"{name:<{_WIDTH}}{row.replace(chr(10), indented)}" for name, row in self.rows())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return labelled(self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """The parts of the plan by name."""
        config, num_ranks = self.config, len(self.devices)
        labels = ", ".join(dict.fromkeys(device.label() for device in self.devices))
        rows = [
            ("devices", labels),
            ("backend", f"{self.chosen_transport.describe()}; strategy {config.strategy}"),
            (
                "batch",
                f"{config.batch_size} samples for each rank and micro-batch, {config.samples_per_step(num_ranks)} in each "
                f"step (ranks: {num_ranks}, accumulate: {config.accumulate})",
            ),
            ("length", self._length()),
            *([("begins", "\n".join(self.beginning))] if self.beginning else []),
            ("data", "\n".join(self.data)),
            ("precision", f"{config.dtype}, amp {config.amp}"),
            ("memory", self._memory()),
        ]
        if not self._trains_a_model:
            others = {"backend": self.chosen_transport.describe(), "length": f"at most {config.steps} steps"}
            kept = ("devices", "backend", "length", "begins", "data", "memory")
            return [(name, others.get(name, row)) for name, row in rows if name in kept]
        return rows

    @property
    def _trains_a_model(self) -> bool:
        return "batch_size" not in self.config.UNUSED

    def _length(self) -> str:
        config, per_epoch = self.config, self.steps_per_epoch
        if not per_epoch:
            length = f"{config.steps} steps" if config.epochs is None else f"{config.epochs} epochs"
            return f"{length}; how many steps an epoch has is not known yet"
        num_steps = config.total_steps(per_epoch)
        return f"steps: {num_steps}, of which an epoch has {per_epoch}; epochs: {epochs.epochs_in_words(num_steps / per_epoch)}"

    def _memory(self) -> str:
        if "peak" not in self.memory:
            return f"not known beforehand: {self.memory['unknown']}"
        parts = ", ".join(
            f"{name} {in_words(self.memory[key])}" for key, name in _NAMES.items() if self.memory.get(key)
        )
        estimate = (
            f"about {in_words(self.memory['peak'])} at the peak of each rank: {parts}. What libraries take "
            "for themselves, and the data in host memory, come on top"
        )
        if self.fits:
            return estimate
        most_bytes = min(self._most_bytes(device) for device in self.devices)
        way_out = "lower batch_size" if self._trains_a_model else "take a smaller shape or limit_to"
        return f"{estimate}. That is more than the {in_words(most_bytes)} that a rank may take: {way_out}"

    def _most_bytes(self, device: Device) -> int:
        return devices.rank_memory_bytes(self.cluster, device, self.devices)


def data_in_words(
    config: TrainConfig, num_ranks: int, found: Mapping[str, Any]
) -> tuple[tuple[str, ...], int]:
    """Return (sentences about how the data come to the ranks, the steps of an epoch or 0 if they are not
    known).

    Args:
        found: the `data` that `nbgpu.engine.dry_run.memory:estimate_run` returns: `amount`, or `unknown`.
    """
    if "num_workers" in config.UNUSED:
        return tuple(found.get("unknown", "").splitlines()), 0
    if isinstance(config, OwnConfig) and "amount" in found:
        num_steps, words = epochs.epoch_of_samples(config, epochs.DataAmount(*found["amount"]), num_ranks)
        return (*words, workers.workers_for_own(config).in_words()), num_steps
    data_workers = workers.workers_for(config, workers.this_host(num_ranks)).in_words()
    if "amount" not in found:
        return (*found["unknown"].splitlines(), data_workers), 0
    epoch = epochs.epoch_of(config, epochs.DataAmount(*found["amount"]), num_ranks)
    return (*epoch.words, data_workers), epoch.num_steps
