"""Check, before anything starts, whether a run's settings suit the ranks that are to train it."""

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
    """Divide settings among the classes that have them.

    Args:
        settings: by name, as the user gave them.
        homes: the fields of each class.
        owner: what has these settings, such as 'a study of autoencoder', for the message.

    Raises:
        ConfigError: no class has a setting; one line for each.
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
    """The final settings for these ranks: `batch_size` follows from `global_batch_size` where that is given,
    amp='auto' is what their devices can do, and a smoke test gets a short run.

    Args:
        config: the settings as the user gave them.
        devices: the device of each rank.

    Raises:
        ConfigError: the ranks cannot train with these settings; the message has one line for each reason.
    """
    problems = list(_problems(config, devices))
    problems += _wrong_paths(config)
    if problems:
        raise ConfigError("\n".join(problems))
    if config.amp == "auto":
        config = config.changed(amp=_amp_of(config, devices))
    if config.smoke_test:
        return _smaller(config)
    if config.global_batch_size is None:
        return config
    return config.changed(batch_size=config.global_batch_size // (len(devices) * config.accumulate))


def _amp_of(config: TrainConfig, devices: Sequence[Device]) -> str:
    """What amp='auto' is on these devices, the same for all ranks."""
    least = min(device.compute_capability if device.kind == "cuda" else 0.0 for device in devices)
    if config.dtype == "float64" or least < _FP16_SINCE:
        return "off"
    if least >= _BF16_SINCE:
        return "bf16"
    # As for a person who asks for it: ranks with shards would scale their losses differently.
    return "off" if config.strategy == "fsdp" or config.cpu_offload else "fp16"


def least_amp(of_ranks: Sequence[str]) -> str:
    """What all ranks can do, of what amp='auto' is for each."""
    return min(of_ranks, key=("off", "fp16", "bf16").index)


def without_gpus(config: TrainConfig, devices: Sequence[Device]) -> Iterator[str]:
    """Yield a sentence for each setting that means nothing on CPU ranks, where these are some.

    The run goes on: a notebook that was written for GPUs works where there is none.
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
    """Raise ConfigError with a line for every path among the settings that cannot be read, as far as that is
    known without opening it."""
    if wrong := list(_wrong_paths(config)):
        raise ConfigError("\n".join(wrong))


def _wrong_paths(config: TrainConfig) -> Iterator[str]:
    """Yield a sentence for each path among the settings that cannot be read."""
    for name in type(config).model_fields:
        for path in paths_to_read(config, name):
            if not path.exists():
                yield f"{name} = {str(path)!r}: there is no such file or folder. {name}: {description(type(config), name)}"
            elif _is_special(path):
                yield _not_read(name, path)
    # What an own recipe calls its data need not be a path.
    data = Path(config.data)
    if _is_special(data) and data not in paths_to_read(config, "data"):
        yield _not_read("data", data)


def _is_special(path: Path) -> bool:
    return path.exists() and not (path.is_file() or path.is_dir())


def _not_read(name: str, path: Path) -> str:
    return (
        f"{name} = {str(path)!r} is neither a file nor a folder, but a pipe or a device, which might be waited for "
        "without end"
    )


def _smaller(config: TrainConfig) -> TrainConfig:
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
        # Volumes are read when they are needed, because few of them are.
        dataset="plain",
        replace_rate=0.0,
    )


def _problems(config: TrainConfig, devices: Sequence[Device]) -> Iterator[str]:
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
    return f"{setting} needs compute capability {needs}, and {device.label()} has {device.compute_capability}. {advice}"
