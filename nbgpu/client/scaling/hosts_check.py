"""`nbgpu doctor --launcher`: whether a launcher's hosts join and form a process group, and the rates between
them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from nbgpu.client.cluster.cluster import Cluster, cluster_with
from nbgpu.client.engines.calls import reference
from nbgpu.client.host.doctor import notebooks_job
from nbgpu.config import ClusterConfig
from nbgpu.errors import NbgpuError
from nbgpu.host.host_checks import Finding, fail, ok, warn
from nbgpu.performance.links import Line, Links
from nbgpu.protocol.calls import Call
from nbgpu.text.durations import duration
from nbgpu.text.ranks import count_of_ranks, named_ranks

_ROUND_TRIP = "there and back"
"""The measurement of messages from one rank to another and back."""
_BUDGET_S_PER_PAIR = 2.0
"""The time for the measurements of each pair of hosts."""
_LONGEST_BUDGET_S = 60.0
"""The most time for all pairs together."""
_SLOW_SHARE = 0.5
"""A pair with less than this share of the fastest pair's rate gets a warning."""
_PAGE = "'More than one host' in the docs says what hosts need"


def examine(config: ClusterConfig) -> Iterator[Finding]:
    """Start a cluster with these settings on its hosts, check it, and stop it.

    Args:
        config: the settings of a cluster whose launcher is not 'local'.
    """
    yield from notebooks_job()
    began_s = time.monotonic()
    try:
        cluster = cluster_with(config).start()
    except NbgpuError as error:
        yield fail(config.launcher, str(error), _PAGE)
        return
    try:
        took = duration(time.monotonic() - began_s)
        hosts = cluster.ranks.assignment.ranks_by_host()
        yield ok(
            config.launcher, f"{len(hosts)} host(s) dialled in, with the versions of this one, after {took}"
        )
        for host, ranks in hosts.items():
            devices = ", ".join(dict.fromkeys(cluster.devices[rank].name for rank in ranks))
            yield ok("host", f"{host} has {named_ranks(ranks)}: {devices}")
        yield ok(
            "group",
            f"{count_of_ranks(cluster.world_size)} formed one, and its sums are right: "
            f"{cluster.parts.state.chosen_transport.describe()}",
        )
        yield from _links(cluster, hosts)
    except NbgpuError as error:
        yield fail("group", str(error), _PAGE)
    finally:
        cluster.stop()


def _links(cluster: Cluster, hosts: Mapping[str, Sequence[int]]) -> Iterator[Finding]:
    """Yield the rate and the latency between each two hosts, measured with messages between the first rank of
    each; a warning where a pair is much slower than the fastest one."""
    pairs = {(hosts[one][0], hosts[other][0]): (one, other) for one, other in combinations(hosts, 2)}
    if not pairs:
        return
    budget_s = min(_LONGEST_BUDGET_S, _BUDGET_S_PER_PAIR * len(pairs))
    measured = cluster.apply(reference(Call.MEASURE_LINKS), budget_s, [_ROUND_TRIP], list(pairs))
    names = [device.name for device in cluster.devices]
    links = Links(cluster.parts.state.chosen_transport.name, names, list(measured.values()))
    if why := links.lacking.get(_ROUND_TRIP):
        yield warn("link", f"not measured: {why}", "backend= chooses another one")
        return
    # "send" is half of a round trip.
    lines = {pair: links.of("send", pair) for pair in pairs}
    # The fastest pair is the reference, not the median: of three hosts a slow one is in two of three pairs.
    fastest_bytes_per_s = max(line.bytes_per_s for line in lines.values())
    for pair, line in lines.items():
        one, other = pairs[pair]
        text = f"{one} and {other}: {_format_link(line)}"
        if line.bytes_per_s < _SLOW_SHARE * fastest_bytes_per_s:
            yield warn(
                "link", f"{text}, less than half of the fastest pair's", "interface= chooses another network"
            )
        else:
            yield ok("link", text)


def _format_link(line: Line) -> str:
    return f"{line.bytes_per_s * 8e-9:.3g} Gbit/s, {line.latency_s * 1e3:.3g} ms one way"
