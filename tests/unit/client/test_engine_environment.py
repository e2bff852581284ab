"""The variables that engines are started with."""

from __future__ import annotations

import pytest

from nbgpu.client.engines import environment
from nbgpu.config import ClusterConfig
from nbgpu.machine.devices import cpu


@pytest.mark.parametrize(("set_by_person", "expected"), [(None, "0"), ("1", "1")])
def test_torchs_second_backend_for_nccl_is_left_to_the_person(
    monkeypatch: pytest.MonkeyPatch, set_by_person: str | None, expected: str
) -> None:
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    if set_by_person is not None:
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", set_by_person)
    assert environment.engine_variables(ClusterConfig(), [cpu(0)])["TORCH_DIST_USE_NCCL2"] == expected
