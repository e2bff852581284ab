"""Settings that do not go with the ranks are refused before anything starts, all at once."""

from __future__ import annotations

from typing import Any

import pytest

from nbgpu.config import TrainConfig
from nbgpu.errors import ConfigError
from nbgpu.machine.devices import cpu
from nbgpu.planning.suitability import adapt_to_devices, least_amp
from nbgpu.protocol.records import Device

TWO_CPU_RANKS = (cpu(0), cpu(1))
T4 = Device("cuda", "Tesla T4", "GPU-1", 0, 16 * 2**30, compute_capability=7.5)
P100 = Device("cuda", "Tesla P100", "GPU-2", 1, 16 * 2**30, compute_capability=6.0)
H100 = Device("cuda", "NVIDIA H100", "GPU-3", 2, 80 * 2**30, compute_capability=9.0)


@pytest.mark.parametrize(
    ("settings", "devices", "said"),
    [
        ({"strategy": "single"}, TWO_CPU_RANKS, "strategy='single' trains on one rank, and there are 2"),
        ({"global_batch_size": 9, "accumulate": 2}, TWO_CPU_RANKS, "must be a multiple of 4.* 8 or 12"),
        ({"strategy": "fsdp", "cpu_offload": True}, TWO_CPU_RANKS, "these are CPU ranks"),
        ({"comm_hook": "bf16"}, TWO_CPU_RANKS, "needs NCCL.* Take 'fp16'"),
        (
            {"amp": "bf16"},
            (T4,),
            r"needs compute capability 8.0, and GPU 0 Tesla T4 has 7.5. Take amp='fp16'",
        ),
        ({"amp": "fp16"}, (P100,), r"needs compute capability 7.0.* Take amp='off'"),
        ({"tf32": True}, (T4,), "tf32 needs compute capability 8.0"),
    ],
)
def test_what_the_ranks_cannot_do_is_said_with_a_way_out(
    settings: dict[str, Any], devices: tuple[Device, ...], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        adapt_to_devices(TrainConfig.checked(**settings), devices)


def test_all_of_it_is_said_at_once() -> None:
    config = TrainConfig.checked(amp="bf16", tf32=True, global_batch_size=3)
    with pytest.raises(ConfigError) as caught:
        adapt_to_devices(config, (T4, H100))
    assert len(str(caught.value).splitlines()) == 3


def test_the_batch_of_a_rank_follows_from_the_global_one() -> None:
    config = adapt_to_devices(TrainConfig.checked(global_batch_size=24, accumulate=3), TWO_CPU_RANKS)
    assert config.batch_size == 4
    assert config.samples_per_step(world_size=2) == 24
    # A file of this run, on another number of ranks.
    assert adapt_to_devices(config, (H100,)).batch_size == 8


@pytest.mark.parametrize(
    ("settings", "devices", "expected"),
    [
        ({}, (H100, H100), "bf16"),
        ({}, (T4, T4), "fp16"),
        ({}, (H100, T4), "fp16"),
        ({}, (T4, P100), "off"),
        ({}, TWO_CPU_RANKS, "off"),
        ({"dtype": "float64"}, (H100,), "off"),
        ({"strategy": "fsdp"}, (T4, T4), "off"),
        ({"strategy": "fsdp"}, (H100, H100), "bf16"),
        ({"strategy": "fsdp", "cpu_offload": True}, (H100,), "bf16"),
        ({"smoke_test": True}, (T4,), "fp16"),
    ],
)
def test_auto_is_the_mixed_precision_that_all_devices_can_do(
    settings: dict[str, Any], devices: tuple[Device, ...], expected: str
) -> None:
    assert adapt_to_devices(TrainConfig.checked(amp="auto", **settings), devices).amp == expected


def test_ranks_on_unlike_hosts_take_what_all_of_them_can_do() -> None:
    assert least_amp(["bf16", "fp16", "bf16"]) == "fp16"
    assert least_amp(["fp16", "off"]) == "off"


@pytest.mark.parametrize(
    "settings", [{"amp": "bf16", "tf32": True}, {"strategy": "fsdp", "cpu_offload": True}]
)
def test_a_gpu_that_can_do_it_may(settings: dict[str, Any]) -> None:
    config = TrainConfig.checked(**settings)
    assert adapt_to_devices(config, (H100, H100)) == config
