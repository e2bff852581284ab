"""The cluster that a process has already, where it asks for another one."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import nbgpu
from nbgpu.client.cluster import cluster as clusters


@pytest.mark.parametrize("ask", [nbgpu.attach, lambda: nbgpu.Cluster(gpus="none", ranks=1).start()])
def test_the_refusal_says_how_to_go_on_with_the_cluster_that_is_there(
    ask: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an interrupt of `attach` the process has the cluster, and a stop would end what was kept."""
    there = nbgpu.Cluster(gpus="none", ranks=1)
    monkeypatch.setattr(clusters, "_current", there)
    with pytest.raises(nbgpu.ClusterError, match=r"already running .*nbgpu\.current\(\) returns it"):
        ask()
    assert nbgpu.current() is there
