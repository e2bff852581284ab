"""What nbgpu does where a library no longer has a private name: less, and never nothing at all."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from inspect import isfunction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from ipyparallel.engine.kernel import IPythonParallelKernel
from torch._C import _distributed_c10d
from torch.distributed import device_mesh
from torch.distributed.device_mesh import init_device_mesh

import nbgpu
from nbgpu.engine.group import torch_private
from nbgpu.engine.ipykernel import kernel
from nbgpu.engine.ipykernel.kernel import RankKernel
from nbgpu.engine.variables import user_groups
from nbgpu.protocol.records import CellOptions, CellOutputs


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_meshes_are_named_without_torchs_table_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    # IPython keeps a cell's value under two more names.
    variables = {"_": mesh, "mesh": mesh, "_3": mesh, "part": mesh["b"]}
    whole = "mesh = dist.device_mesh.init_device_mesh('cpu', (1, 1), mesh_dim_names=('a', 'b'))"
    monkeypatch.delattr(device_mesh, "_mesh_resources")
    assert [thing.line for thing in user_groups.owned(variables)] == [whole, "part = mesh['b']"]


@pytest.mark.usefixtures("group")
def test_the_flight_recorder_of_a_build_with_nccl_has_the_collectives_of_gloo_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def recording(*entries: dict[str, Any]) -> Any:
        found = {"version": "2.10", "nccl_comm_state": {}} | ({"entries": [*entries]} if entries else {})
        return lambda: json.dumps(found).encode()

    def names() -> list[str]:
        told = json.loads(torch_private.flight_recording() or b"")
        assert told["version"] == "2.10"
        return [entry["profiling_name"] for entry in told["entries"]]

    of_gloo = [{"profiling_name": f"gloo:{number}", "time_created_ns": 10 * number} for number in (1, 3)]
    of_nccl = {"profiling_name": "nccl:2", "time_created_ns": 20}
    nccl, others = "_dump_nccl_trace_json", "_dump_fr_trace_json"
    # As torch 2.11 with CUDA answers where all groups are gloo's.
    monkeypatch.setattr(_distributed_c10d, nccl, recording(), raising=False)
    monkeypatch.setattr(_distributed_c10d, others, recording(*of_gloo), raising=False)
    assert names() == ["gloo:1", "gloo:3"]
    monkeypatch.setattr(_distributed_c10d, nccl, recording(of_nccl))
    assert names() == ["gloo:1", "nccl:2", "gloo:3"]
    monkeypatch.setattr(_distributed_c10d, others, recording(of_nccl))
    assert names() == ["nccl:2"]
    monkeypatch.delattr(_distributed_c10d, nccl)
    monkeypatch.delattr(_distributed_c10d, others)
    assert torch_private.flight_recording() is None


def test_a_cell_is_answered_where_a_reply_has_no_date() -> None:
    outputs = kernel.OutputCounter(SimpleNamespace(send=lambda *_: None))
    outputs.begin({"header": {"msg_id": "1"}, "metadata": {CellOptions.METADATA: {}}})
    metadata: dict[str, Any] = {}
    outputs.complete(metadata)
    assert metadata == {CellOutputs.NUM: 0}


def test_each_method_of_a_ranks_kernel_overrides_one_of_ipyparallels() -> None:
    """An override of a method that is gone would never be called, and nobody would notice."""
    methods = {name for name, value in vars(RankKernel).items() if isfunction(value)}
    assert "_publish_status" in methods
    assert {name for name in methods if not hasattr(IPythonParallelKernel, name)} == set()


def test_nothing_else_replaces_a_method_of_a_ranks_kernel() -> None:
    """Its overrides stand in `RankKernel`, in an order that one reads."""
    engine = Path(nbgpu.__file__).parent / "engine"
    sources = {path.name: path.read_text() for path in engine.rglob("*.py")}
    assert "kernel.py" in sources
    assert {
        name for name, source in sources.items() if re.search(r"\bkernel\.\w+(, .*)? = ", source)
    } == set()
