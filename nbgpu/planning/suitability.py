"""Check, before anything starts, whether a run's settings can be used on its ranks, and adapt them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nbgpu.config import TrainConfig
from nbgpu.config.conditions import description
from nbgpu.config.settings import paths_to_read
from nbgpu.errors import ConfigError
from nbgpu.protocol.records import Device
from nbgpu.text.ranks import count_of_ranks
from nbgpu.text.similar import did_you_mean

_BF16_SINCE = 8.0
"""The first compute capability with bfloat16, and TF32, in hardware (Ampere)."""
_FP16_SINCE = 7.0
"""The first compute capability that is faster in float16 (Volta)."""


def divide(
    settings: Mapping[str, Any], homes: Sequence[Mapping[str, Any]], owner: str
) -> list[dict[str, Any]]:
    """Divide settings among classes by their fields. Return one dictionary for each class.

    Args:
        settings: the settings by name, as the user gave them.
        homes: the fields of each class.
        owner: the thing that has these settings, for messages, such as 'a study of autoencoder'.

    Raises:
        ConfigError: a line for each setting that no class has as a field.
    """
    names = [name for home in homes for name in home]
    if unknown := [name for name in settings if name not in names]:
        raise ConfigError(
            "\n".join(
                f"{name} is not a setting of {owner}.{did_you_mean(name, names)} Settings: {', '.join(names)}"
                for name in unknown
            )
        )
    return [{name: value for name, value in settings.items() if name in home} for home in homes]


def adapt_to_devices(config: TrainConfig, devices: Sequence[Device]) -> TrainConfig:
    """Return the final settings for these ranks: `batch_size` is computed from `global_batch_size` if that is
    given, amp='auto' becomes the best precision that all devices have, and a smoke test becomes a short run.

    Args:
        config: the settings as the user gave them.
        devices: the device of each rank.

    Raises:
        ConfigError: the ranks cannot train with these settings; the message has one line for each reason.
    """
    if problems := [*_problems(config, devices), *_wrong_paths(config)]:
        raise ConfigError("\n".join(problems))
    if config.amp == "auto":
        config = config.changed(amp=_best_amp(config, devices))
    if config.smoke_test:
        return _smoke_test(config)
    if config.global_batch_size is None:
        return config
    return config.changed(batch_size=config.global_batch_size // (len(devices) * config.accumulate))


def _best_amp(config: TrainConfig, devices: Sequence[Device]) -> str:
    """Return the precision for amp='auto': the best one that all devices have in hardware, because all ranks
    use the same."""
    least = min(device.compute_capability if device.kind == "cuda" else 0.0 for device in devices)
    if config.dtype == "float64" or least < _FP16_SINCE:
        return "off"
    if least >= _BF16_SINCE:
        return "bf16"
    # fp16 needs loss scaling, and with sharded gradients the ranks would scale their losses differently.
    return "off" if config.strategy == "fsdp" or config.cpu_offload else "fp16"


def least_amp(best_amps: Sequence[str]) -> str:
    """Return the best precision that all ranks have, from the best one of each rank."""
    return min(best_amps, key=("off", "fp16", "bf16").index)


def without_gpus(config: TrainConfig, devices: Sequence[Device]) -> Iterator[str]:
    """Yield a sentence for each setting that has no effect because all ranks are CPU ranks. These are no
    errors, so that a notebook that was written for GPUs also works without them.
    """
    if any(device.kind == "cuda" for device in devices):
        return
    if config.tf32 is not None:
        yield f"tf32={config.tf32} does nothing: the ranks have no GPU"
    if config.cudnn == "benchmark":
        yield "cudnn='benchmark' does nothing: the ranks have no GPU"
    if config.pin_memory == "on":
        yield "pin_memory='on' does nothing: the ranks have no GPU, and pinned memory is what a GPU reads faster"
    if config.transforms_on == "gpu":
        yield "transforms_on='gpu' runs on the CPU: the ranks have no GPU"


def require_paths(config: TrainConfig) -> None:
    """Raise ConfigError with a line for each path in the settings that does not exist, or is neither a file
    nor a folder. No file is opened."""
    if wrong := list(_wrong_paths(config)):
        raise ConfigError("\n".join(wrong))


def _wrong_paths(config: TrainConfig) -> Iterator[str]:
    """Yield a sentence for each path in the settings that does not exist, or is a pipe or a device."""
    for name in type(config).model_fields:
        for path in paths_to_read(config, name):
            if not path.exists():
                yield f"{name} = {str(path)!r}: there is no such file or folder. {name}: {description(type(config), name)}"
            elif _is_special(path):
                yield _special_problem(name, path)
    # In a user's own recipe `data` need not be a path. If it is that of a pipe or a device, opening it may
    # block.
    data = Path(config.data)
    if _is_special(data) and data not in paths_to_read(config, "data"):
        yield _special_problem("data", data)


def _is_special(path: Path) -> bool:
    """Return whether a path is that of a pipe, a device or the like."""
    return path.exists() and not (path.is_file() or path.is_dir())


def _special_problem(name: str, path: Path) -> str:
    return (
        f"{name} = {str(path)!r} is neither a file nor a folder, but a pipe or a device, which might be waited for "
        "without end"
    )


def _smoke_test(config: TrainConfig) -> TrainConfig:
    """Return the settings of a smoke test: three steps of two samples for each rank, with a validation and
    without a cache."""
    accumulate = min(config.accumulate, 2)
    return config.counting(
        steps=3,
        epochs=None,
        warmup_steps=0,
        warmup_epochs=None,
        batch_size=2 // accumulate,
        accumulate=accumulate,
        global_batch_size=None,
        val_every=3 if config.validates else 0,
        val_every_epochs=0,
        on_nonfinite="stop",
        resume="",
        profile="",
        # A cache would decode all volumes before the first step.
        dataset="plain",
        replace_rate=0.0,
    )


def _problems(config: TrainConfig, devices: Sequence[Device]) -> Iterator[str]:
    """Yield a sentence for each setting that cannot be used with this number of ranks or these devices."""
    num_ranks = len(devices)
    if config.strategy == "single" and num_ranks > 1:
        yield (
            f"strategy={config.strategy!r} trains on one rank, and there are {num_ranks}. Take strategy='ddp', or start "
            "a cluster with ranks=1"
        )
    if config.global_batch_size is not None:
        shares = num_ranks * config.accumulate
        if config.global_batch_size % shares:
            below = config.global_batch_size // shares * shares
            near = " or ".join(str(n) for n in (below, below + shares) if n)
            yield (
                f"global_batch_size={config.global_batch_size} must be a multiple of {shares}, which is {count_of_ranks(num_ranks)} "
                f"x accumulate={config.accumulate}. Near it: {near}"
            )
    gpus = [device for device in devices if device.kind == "cuda"]
    if config.cpu_offload and not gpus:
        yield "cpu_offload moves what is on a GPU to the host, and these are CPU ranks. Leave it out"
    if config.cpu_offload and config.amp == "fp16":
        yield "cpu_offload does not go with amp='fp16'. Take 'bf16'"
    if config.comm_hook == "bf16" and not gpus:
        yield "comm_hook='bf16' needs NCCL, and these are CPU ranks. Take 'fp16' or 'none'"
    for device in gpus:
        if config.amp == "bf16" and device.compute_capability < _BF16_SINCE:
            yield _too_old(
                "amp='bf16'", device, "Take amp='fp16', or 'auto', which takes what the GPUs can do"
            )
        if config.amp == "fp16" and device.compute_capability < _FP16_SINCE:
            yield _too_old(
                "amp='fp16'", device, "Take amp='off': it would be slower, not faster", needs=_FP16_SINCE
            )
        if config.tf32 and device.compute_capability < 8.0:
            yield _too_old("tf32", device, "Leave it out")


def _too_old(setting: str, device: Device, advice: str, needs: float = _BF16_SINCE) -> str:
    """Return the sentence for a GPU whose compute capability is below the one that a setting needs."""
    return f"{setting} needs compute capability {needs}, and {device.label()} has {device.compute_capability}. {advice}"
