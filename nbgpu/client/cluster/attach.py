"""Rejoins a cluster that went on without its notebook."""

from __future__ import annotations

import logging

from nbgpu.client.cluster.cluster import Cluster, require_none, take_over
from nbgpu.client.engines import preloading
from nbgpu.client.host import registry

_log = logging.getLogger("nbgpu.cluster")


def attach(which: str | int | None = None) -> Cluster:
    """Connect a new kernel to a cluster that was started with `keep`: its ranks, its run, its history.

    Args:
        which: the cluster's id, its notebook, or one of its processes, as `nbgpu ps` shows them; needed only
            if several clusters are kept.

    Returns:
        The cluster; its `run` is the run that was started last, which may be over. A run in which a rank
        failed while no client was attached is brought to its end now.

    Raises:
        NoClusterError: there is no kept cluster, or none that `which` refers to.
        ClusterError: there are several, or another notebook still has the cluster.
    """
    require_none()
    entry = registry.take_over(None if which is None else str(which))
    preloading.dismiss()
    return take_over(entry)
