"""The search for the largest batch size, where hardly anything fits and where several hosts take part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from nbgpu.engine.dry_run import batch_size
from nbgpu.engine.group import exchange, group
from nbgpu.machine import cgroups
from nbgpu.machine.clock import boot_id

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    monkeypatch.setattr(group, "_membership", group.Membership(0, 1, 0, CPU, "gloo"))
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_model_that_does_not_fit_fits_with_no_batch() -> None:
    def make() -> Any:
        return torch.empty(2**55, dtype=torch.uint8)

    search = batch_size._Search(make, CPU)
    assert search.run() == 0
    (only,) = search.tried
    assert (only["batch_size"], only["fits"]) == (1, False)
    assert only["why"].startswith("rank 0: asked for")
    search.close()


@pytest.mark.usefixtures("one_rank")
def test_an_error_of_the_model_is_raised() -> None:
    def make() -> Any:
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        batch_size._Search(make, CPU).run()


def test_the_ranks_of_a_host_share_what_its_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[int] = []

    def enforce(limit_bytes: int) -> Any:
        allowed.append(limit_bytes - psutil.Process().memory_info().rss)
        return nullcontext()

    monkeypatch.setattr(batch_size.memory_limit, "enforced_meanwhile", enforce)
    monkeypatch.setattr(exchange, "gather", lambda value: [value, value, "another host", "another host"])
    monkeypatch.setattr(cgroups, "free_memory_bytes", lambda: 8 * GIB)
    assert boot_id() != "another host"
    batch_size._bounded(CPU)
    assert allowed[0] / GIB == pytest.approx(0.8 * 8 / 2, abs=0.1)
