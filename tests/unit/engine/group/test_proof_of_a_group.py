"""A group is used only if it sums rightly: each element, and not merely one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbgpu.engine.group import group

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_group_that_sums_rightly_is_taken() -> None:
    group.prove(1, 0, CPU)


@pytest.mark.parametrize(
    "copies",
    [
        pytest.param(lambda total: total[50:].zero_(), id="a_part_does_not_arrive"),
        pytest.param(lambda total: total.copy_(total.roll(16)), id="a_part_arrives_elsewhere"),
    ],
)
def test_copies_that_go_wrong_are_seen(monkeypatch: pytest.MonkeyPatch, copies: Any) -> None:
    """As between GPUs whose peer-to-peer copies are broken: no call reports an error."""
    monkeypatch.setattr(dist, "all_reduce", copies)
    with pytest.raises(RuntimeError, match=r"gave \d+ wrong sums of 64\. nccl_safe=True"):
        group.prove(1, 0, CPU)
