"""Make the settings of a run final: for its devices, the checkpoint that it resumes, and its data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nbgpu.config import TrainConfig
from nbgpu.machine import requirements
from nbgpu.planning.suitability import adapt_to_devices
from nbgpu.protocol.records import Chosen, Device
from nbgpu.run_folder import resume
from nbgpu.run_folder.resume import Beginning


@dataclass(frozen=True)
class SettledConfig:
    """The final settings of a run, and where it begins."""

    config: TrainConfig
    beginning: Beginning = field(default_factory=Beginning)
    """The step or the checkpoint with which the run begins."""
    chosen: Chosen = field(default_factory=Chosen)
    """The values that were chosen for settings that were left out, and why."""


def settle(
    config: TrainConfig,
    devices: Sequence[Device],
    choose: Callable[[TrainConfig], Chosen],
    check_sha256: bool = True,
) -> SettledConfig:
    """Return the final settings of a run on these devices, and the step or the checkpoint at which it begins.

    Args:
        config: the settings as the user gave them.
        devices: the device of each rank.
        choose: a function that returns values for the settings that are left to the data, from the files
            and the memory of a rank.
        check_sha256: as for `resume.find`.

    Raises:
        ConfigError: the ranks cannot train with these settings, a package is not installed, or the checkpoint
            that the run is to go on from is missing or does not fit.
        RunError: every checkpoint is damaged.
    """
    requirements.require_extras(config)
    chosen = _choose_left_out(config, devices, choose) if config.left_to_data else Chosen()
    settled = adapt_to_devices(config.changed(**chosen.values), devices)
    return SettledConfig(settled, resume.find(settled, check_sha256), chosen)


def _choose_left_out(
    config: TrainConfig, devices: Sequence[Device], choose: Callable[[TrainConfig], Chosen]
) -> Chosen:
    """Return the values of the settings that are left to the data: those of the checkpoint that the run
    resumes, or else those that `choose` returns."""
    chosen = resume.values_in_checkpoint(config)
    # A smoke test has the same model as the run that it tests.
    whole = adapt_to_devices(config.changed(**chosen.values, smoke_test=False), devices)
    return chosen.with_more(choose(whole)) if whole.left_to_data else chosen
