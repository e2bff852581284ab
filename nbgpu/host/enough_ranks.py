"""The setting `at_least`: several ranks also on a host with fewer GPUs."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from nbgpu.config import site
from nbgpu.errors import NoFreeGpuError
from nbgpu.host.free_gpus import GpuChooser
from nbgpu.machine import devices
from nbgpu.machine.cgroups import usable_cores
from nbgpu.text.ranks import count_of_ranks

if TYPE_CHECKING:
    from nbgpu.config import ClusterConfig


def placed(config: ClusterConfig) -> tuple[ClusterConfig, str]:
    """Replace `at_least` by the values of `gpus` and `ranks` that it leads to on this host.

    If enough GPUs are free, each gets a rank, as without the setting. With fewer GPUs the ranks run on the
    CPU, because ranks that share a GPU take turns, so that their times do not tell how several devices would
    perform. GPUs that the settings name are used and shared nevertheless.

    Returns:
        The settings without `at_least`, and a note on the placement and on the meaning of times, which is
        empty if each rank has its own GPU.

    Raises:
        ConfigError: a named GPU does not exist.
    """
    if config.at_least is None:
        return config, ""
    wanted = config.at_least
    num_gpus = _num_gpus(config)
    asked = f"at_least={wanted}"
    if num_gpus >= wanted:
        return config.changed(at_least=None), ""
    if num_gpus and config.gpus != "auto":
        note = (
            f"{asked}, and gpus={config.gpus!r} is {_count_of_gpus(num_gpus)}: {count_of_ranks(wanted)} share them over "
            "gloo and take turns, so that times say nothing about several GPUs. gpus='none' takes CPU ranks, to measure"
        )
        return config.changed(at_least=None, ranks=wanted), note
    is_taken = not num_gpus and config.gpus == "auto" and bool(devices.inventory())
    num_cores = usable_cores()
    notes = []
    if is_taken:
        notes.append(
            f"{asked}, and no GPU is free: {count_of_ranks(wanted)} on the CPU. Times are those of CPU ranks, and can be "
            "compared with each other"
        )
    if num_gpus:
        one = num_gpus == 1
        notes.append(
            f"{asked}, and {_count_of_gpus(num_gpus)} {'is' if one else 'are'} free: {count_of_ranks(wanted)} on the CPU. "
            "Times are those of CPU ranks, and can be compared with each other. "
            f"ranks={wanted} would share the GPU{'' if one else 's'}, where ranks take turns"
        )
    if wanted > num_cores:
        notes.append(
            f"{count_of_ranks(wanted)} share {num_cores} CPU core{'s' if num_cores > 1 else ''} and take turns, so that "
            "times say nothing about several devices"
        )
    if not num_gpus and not is_taken:
        return config.changed(at_least=None, ranks=wanted), ". ".join(notes)
    # Unlike `changed`, `counting` leaves out the settings that have no effect without GPUs, which would be
    # refused.
    return config.counting(at_least=None, gpus="none", ranks=wanted), ". ".join(notes)


def _num_gpus(config: ClusterConfig) -> int:
    """Return the number of GPUs that a start with one rank per GPU would take; 0 if none is free."""
    if not config.takes_free_gpus:
        chosen = devices.choose(config.named_gpus, None)
    else:
        try:
            with closing(GpuChooser()) as chooser:
                chosen = chooser.choose(config.gpus, None, most=site.most_gpus())
        except NoFreeGpuError:
            return 0
    return sum(device.kind == "cuda" for device in chosen)


def _count_of_gpus(number: int) -> str:
    return f"{number} GPU{'s' if number > 1 else ''}"
