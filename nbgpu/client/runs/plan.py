"""The plan of a run, shown before it starts: devices, batches, steps, and the memory of each rank."""

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

_LABEL_WIDTH = 11
_NAMES = {**NAMES, "before": "held already"}
"""The labels of an estimate's parts."""


@dataclass(frozen=True)
class Plan:
    """What a run will do. It prints as lines."""

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
    """Sentences about the checkpoint from which the run goes on, and the settings that differ from those of
    the checkpoint's run; empty if it begins with its first step."""

    @classmethod
    def at_first(
        cls,
        cluster: ClusterConfig,
        config: TrainConfig,
        devices: Sequence[Device],
        chosen_transport: ChosenTransport,
    ) -> Plan:
        """Return a plan without an estimate and without a description of the data, which only ranks give."""
        unknown = {"unknown": "it is known when the ranks have looked at the data"}
        data, _ = data_in_words(config, len(devices), unknown)
        memory = {"unknown": f"cluster.plan({config.recipe!r}, ...) estimates it"}
        return cls(cluster, config, devices, chosen_transport, memory, data, 0)

    @property
    def fits(self) -> bool | None:
        """Whether the estimate is below the memory that each rank may take, or None if it is not known."""
        if "peak" not in self.memory:
            return None
        return all(self.memory["peak"] <= self._limit_bytes(device) for device in self.devices)

    def __str__(self) -> str:
        indented = f"\n{' ' * _LABEL_WIDTH}"
        rows = [(name, text.replace("\n", indented)) for name, text in self.rows()]
        return "\n".join(f"{name:<{_LABEL_WIDTH}}{text}" for name, text in rows)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return labelled(self.rows())

    def rows(self) -> list[tuple[str, str]]:
        """Return (label, text) for each part of the plan."""
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
        if self._trains_a_model:
            return rows
        # A search for a field, such as a microstructure, has no batches, strategy or precision.
        replaced = {"backend": self.chosen_transport.describe(), "length": f"at most {config.steps} steps"}
        return [(name, replaced.get(name, text)) for name, text in rows if name not in ("batch", "precision")]

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
        limit_bytes = min(self._limit_bytes(device) for device in self.devices)
        remedy = "lower batch_size" if self._trains_a_model else "take a smaller shape or limit_to"
        return f"{estimate}. That is more than the {in_words(limit_bytes)} that a rank may take: {remedy}"

    def _limit_bytes(self, device: Device) -> int:
        return devices.rank_memory_bytes(self.cluster, device, self.devices)


def data_in_words(
    config: TrainConfig, num_ranks: int, estimated: Mapping[str, Any]
) -> tuple[tuple[str, ...], int]:
    """Return (sentences about how the data come to the ranks, the steps of an epoch or 0 if they are not
    known).

    Args:
        config: the run's settings.
        num_ranks: the number of ranks.
        estimated: the `data` that `nbgpu.engine.dry_run.memory:estimate_run` returns: `amount`, or `unknown`,
            which says why the amount is not known.
    """
    if "num_workers" in config.UNUSED:
        return tuple(estimated.get("unknown", "").splitlines()), 0
    amount = epochs.DataAmount(*estimated["amount"]) if "amount" in estimated else None
    if amount is not None and isinstance(config, OwnConfig):
        num_steps, sentences = epochs.epoch_of_samples(config, amount, num_ranks)
        return (*sentences, workers.workers_for_own(config).in_words()), num_steps
    data_workers = workers.workers_for(config, workers.this_host(num_ranks)).in_words()
    if amount is None:
        return (*estimated["unknown"].splitlines(), data_workers), 0
    epoch = epochs.epoch_of(config, amount, num_ranks)
    return (*epoch.words, data_workers), epoch.num_steps
