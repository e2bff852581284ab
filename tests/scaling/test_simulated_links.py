"""A simulated link: what is held back, for how long, and what is not.

Times are compared with those of the link's own formula, never with a clock's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import waiting_steps
from slow_link import slow_link

import nbgpu
from nbgpu.engine.group.simulated_link import Operation, seconds
from nbgpu.machine.links import parse_link
from nbgpu.protocol.records import Sample

LINK = "80MB/s,20ms"
LINK_NAME = parse_link(LINK).name
SHARE_OF_DATA = 1448 / 1538
"""What the headers of Ethernet, IP and TCP leave of a link's rate, in packets of 1500 bytes."""
NUM_BYTES = 4_000_000
NUM_ITEMS = NUM_BYTES // 4
SETTINGS = {"data": "phantoms", "patch_size": 16, "batch_size": 2, "channels": (16, 32, 64)}

TIMED = """
import datetime, time
def timed(code, repeats=1):
    # The least of several, because other work on the machine only adds time.
    found = []
    for _ in range(repeats):
        dist.barrier()
        begun_s = time.monotonic()
        code()
        found.append(time.monotonic() - begun_s)
    return min(found)
items = NUM_ITEMS
whole, part = torch.ones(items), torch.ones(items // 2)
parts = [torch.zeros(items // 2) for _ in range(2)]
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from conftest import what_changes_of

    with (
        nbgpu.Cluster(gpus="none", ranks=2, link=LINK) as cluster,
        what_changes_of(cluster),
    ):
        cluster.execute(TIMED.replace("NUM_ITEMS", str(NUM_ITEMS)))
        yield cluster


@contextmanager
def beside(**settings: Any) -> Iterator[Any]:
    """A cluster of CPU ranks beside the module's own."""
    other = nbgpu.Cluster(gpus="none", **settings)
    other.parts.lifecycle.start()
    try:
        yield other
    finally:
        other.stop()


def link_s(operation: Operation, num_bytes: float = NUM_BYTES) -> float:
    """The time that the link needs by its formula."""
    return seconds(operation, num_bytes, 2, parse_link(LINK))


def values(cluster: Any, code: str) -> list[Any]:
    """What each rank prints as JSON, by rank."""
    return [json.loads(text) for _, text in sorted(cluster.execute(code).items())]


COLLECTIVES: dict[str, tuple[str, Operation, float]] = {
    "all_reduce": ("dist.all_reduce(whole)", "all_reduce", NUM_BYTES),
    "all_reduce, later": ("dist.all_reduce(whole, async_op=True).wait()", "all_reduce", NUM_BYTES),
    "future": ("dist.all_reduce(whole, async_op=True).get_future().wait()", "all_reduce", NUM_BYTES),
    "in time": (
        "dist.all_reduce(whole, async_op=True).wait(datetime.timedelta(seconds=60))",
        "all_reduce",
        NUM_BYTES,
    ),
    "half": ("dist.all_reduce(whole.to(torch.bfloat16))", "all_reduce", NUM_BYTES / 2),
    "broadcast": ("dist.broadcast(whole, 0)", "broadcast", NUM_BYTES),
    "reduce": ("dist.reduce(whole, 0)", "reduce", NUM_BYTES),
    "all_gather": ("dist.all_gather(parts, part)", "all_gather", NUM_BYTES),
    "all_gather_into_tensor": ("dist.all_gather_into_tensor(whole, part)", "all_gather", NUM_BYTES),
    "reduce_scatter": ("dist.reduce_scatter_tensor(part, whole)", "reduce_scatter", NUM_BYTES),
    "all_to_all": ("dist.all_to_all_single(torch.empty_like(whole), whole)", "all_to_all", NUM_BYTES),
    "gather": ("dist.gather(part, parts if rank == 0 else None)", "gather", NUM_BYTES),
    "scatter": ("dist.scatter(part, parts if rank == 0 else None)", "scatter", NUM_BYTES),
    "barrier": ("dist.barrier()", "barrier", 0),
    "send": ("dist.send(whole, 1) if rank == 0 else dist.recv(whole, 0)", "send", NUM_BYTES),
    "both ways": (
        "[work.wait() for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, whole, 1 - rank), "
        "dist.P2POp(dist.irecv, torch.empty_like(whole), 1 - rank)])]",
        "send",
        NUM_BYTES,
    ),
    "object": (f"dist.broadcast_object_list([b'x' * {NUM_BYTES}], 0)", "broadcast", NUM_BYTES),
    "new group": ("dist.all_reduce(whole, group=mine)", "all_reduce", NUM_BYTES),
}


def test_every_collective_takes_as_long_as_on_the_link(cluster: Any) -> None:
    cluster.execute("mine = dist.new_group([0, 1])")
    listed = "\n".join(
        f"found[{name!r}] = timed(lambda: {code})" for name, (code, _, _) in COLLECTIVES.items()
    )
    by_rank = values(cluster, f"import json\nfound = {{}}\n{listed}\nprint(json.dumps(found))")
    for name, (_, operation, num_bytes) in COLLECTIVES.items():
        expected_s = link_s(operation, num_bytes)
        for found in by_rank:
            # How much longer it takes on a busy host is no promise of the link's.
            assert found[name] / expected_s > 0.9, (name, found[name], expected_s)


def test_results_are_those_of_the_real_collectives(cluster: Any) -> None:
    code = """
import json
own = torch.full((4,), float(rank + 1))
total = own.clone(); dist.all_reduce(total)
future = dist.all_reduce(own.clone(), async_op=True).get_future().then(lambda sent: sent.value()[0] / 2).wait()
there = [torch.zeros(4) for _ in range(2)]; dist.all_gather(there, own)
shard = torch.zeros(2); dist.reduce_scatter_tensor(shard, own)
words = [None, None]; dist.all_gather_object(words, "ab"[rank])
print(json.dumps([total.tolist(), future.tolist(), [t[0].item() for t in there], shard.tolist(), words]))
"""
    assert values(cluster, code) == [[[3.0] * 4, [1.5] * 4, [1.0, 2.0], [3.0, 3.0], ["a", "b"]]] * 2


def test_the_time_counts_from_when_the_last_rank_has_come(cluster: Any) -> None:
    code = f"""
import json
def late():
    time.sleep({link_s("all_reduce")} if rank == 1 else 0)
    dist.all_reduce(whole)
print(json.dumps(timed(late, 2)))
"""
    for found_s in values(cluster, code):
        assert 1.95 < found_s / link_s("all_reduce") < 2.6


def test_work_hides_an_exchange(cluster: Any) -> None:
    code = f"""
import json
def hidden():
    work = dist.all_reduce(whole, async_op=True)
    begun = work.is_completed()
    time.sleep({1.5 * link_s("all_reduce")})
    ended = work.is_completed()
    work.wait()
    assert (begun, ended) == (False, True)
print(json.dumps(timed(hidden, 3)))
"""
    for found_s in values(cluster, code):
        assert 1.5 <= found_s / link_s("all_reduce") < 1.9


def test_the_link_is_one_queue_in_order(cluster: Any) -> None:
    code = """
import json
def several():
    large = dist.all_reduce(whole, async_op=True)
    small = dist.all_reduce(torch.ones(1), async_op=True)
    group = dist.all_reduce(torch.ones(1), group=mine, async_op=True)
    large.wait()
    assert not small.is_completed()
    small.wait()
    group.wait()
print(json.dumps(timed(several)))
"""
    cluster.execute("mine = dist.new_group([0, 1])")
    # The small one waits for the large one, and that of the other group for whichever began before.
    for found_s in values(cluster, code):
        assert found_s >= 0.95 * (link_s("all_reduce") + 2 * link_s("all_reduce", 4))


DDP = """
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
def stepping(ddp):
    def step():
        ddp.zero_grad(set_to_none=False)
        ddp(torch.full((1, 500), rank + 1.0)).sum().backward()
    step(), step()  # DDP arranges its buckets after the first step
    return timed(step, 8)
def plain(**settings):
    torch.manual_seed(0)
    return DDP(torch.nn.Sequential(*[torch.nn.Linear(500, 500, bias=False) for _ in range(4)]), **settings)
"""


def test_a_loop_of_ones_own_feels_the_link(cluster: Any) -> None:
    code = """
import json
found = {}
one = plain(bucket_cap_mb=100)
found['one bucket'] = stepping(one)
found['gradient'] = [one.module[-1].weight.grad.mean().item()]
found['small buckets'] = stepping(plain(bucket_cap_mb=0.5))
half = plain(bucket_cap_mb=100)
half.register_comm_hook(None, default_hooks.fp16_compress_hook)
found['half'] = stepping(half)
builtin = plain(bucket_cap_mb=100)
builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
found['builtin half'] = stepping(builtin)
calls = []
def own(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    calls.append(state)
    return default_hooks.allreduce_hook(None, bucket)
with_own = plain(bucket_cap_mb=100)
with_own.register_comm_hook("mine", own)
found['own'] = stepping(with_own)
found['calls'] = calls[0]
low_rank = plain(bucket_cap_mb=100)  # with several, gloo's threads and the main one may disagree on an order
low_rank.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook.powerSGD_hook)
found['low rank'] = stepping(low_rank)
silent = plain(bucket_cap_mb=100)
with silent.no_sync():
    found['no exchange'] = stepping(silent)
local = plain()
local.module(torch.full((1, 500), 1.0)).sum().backward()
first = local.module[-1].weight.grad.clone()
local.zero_grad(); local.module(torch.full((1, 500), 2.0)).sum().backward()
found['gradient'].append(((first + local.module[-1].weight.grad) / 2).mean().item())
print(json.dumps(found))
"""
    cluster.execute(DDP)
    one_s = link_s("all_reduce")
    for found in values(cluster, code):
        assert 0.98 < found["one bucket"] / one_s < 2
        # The latency counts once more for each bucket.
        assert found["small buckets"] >= 0.98 * (one_s + 3 * link_s("all_reduce", 0))
        for name in ("half", "builtin half"):
            assert 0.98 < found[name] / link_s("all_reduce", NUM_BYTES / 2) < 2
            assert found[name] < 0.9 * found["one bucket"]
        assert 0.98 < found["own"] / one_s < 2
        assert found["calls"] == "mine"
        # It sends less, in messages that wait for each other.
        assert found["low rank"] > 2 * link_s("all_reduce", 0)
        assert found["no exchange"] < 0.5 * one_s
        assert found["gradient"][0] == pytest.approx(found["gradient"][1])


def test_buffers_and_parameters_that_ddp_broadcasts_take_their_time(cluster: Any) -> None:
    code = """
import json
model = torch.nn.Linear(1000, 1000, bias=False)
model.register_buffer("table", torch.ones(items))
found = {"made": timed(lambda: globals().update(ddp=DDP(model)))}
found["forward"] = timed(lambda: ddp(torch.ones(1, 1000)))
print(json.dumps(found))
"""
    cluster.execute(DDP)
    for found in values(cluster, code):
        assert found["made"] >= 0.95 * link_s("broadcast", 2 * NUM_BYTES)
        assert 0.95 < found["forward"] / link_s("broadcast") < 2.5


def test_shards_travel_over_the_link(cluster: Any) -> None:
    code = """
import json
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
torch.manual_seed(0)
model = torch.nn.Linear(1000, 1000, bias=False)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
def step():
    model.zero_grad()
    model(torch.full((1, 1000), rank + 1.0)).sum().backward()
step()
print(json.dumps([timed(step, 2), model.weight.grad.to_local().mean().item()]))
"""
    expected_s = link_s("all_gather") + link_s("reduce_scatter")
    for found_s, gradient in values(cluster, code):
        assert 0.95 < found_s / expected_s < 2.5
        assert gradient == pytest.approx(1.5)


def test_control_messages_are_not_held_back(cluster: Any) -> None:
    code = """
import json
from nbgpu.engine.group import exchange
print(json.dumps([timed(lambda: exchange.gather(rank), 3)]))
"""
    for (found_s,) in values(cluster, code):
        assert found_s < link_s("all_gather", 0)


def test_a_run_and_all_that_is_kept_of_it_name_the_link(cluster: Any, tmp_path: Path) -> None:
    run = cluster.train("autoencoder", steps=6, val_every=0, **SETTINGS)
    run.wait()
    assert run.status == "finished"
    assert (
        json.loads((run.folder / "run_info.json").read_text())["simulated"] == f"simulated link {LINK_NAME}"
    )
    assert f"simulated link {LINK_NAME}" in (run.folder / "report.html").read_text()
    timeline = run.timeline()
    assert f"simulated link {LINK_NAME}" in timeline._repr_mimebundle_()["text/plain"]
    assert f"simulated link {LINK_NAME}" in timeline.figure().layout.title.text
    trace = json.loads(timeline.chrome_trace(tmp_path / "trace.json").read_text())
    shown = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"]
    assert any(f"simulated link {LINK_NAME}" in name for name in shown)
    gradients = cluster.plan("autoencoder", **SETTINGS).memory["gradients"]
    steps = run.metrics()["step_s"]
    # All buckets pass after each other, and nothing else does.
    assert steps.iloc[2:].min() >= 0.9 * link_s("all_reduce", gradients)


def test_tables_name_the_link(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbgpu.client.scaling.measurements.BUDGET_S", 1.0)
    links = nbgpu.measure_links()
    assert links.backend == f"gloo, simulated link {LINK_NAME}"
    assert links.lacking == {}
    assert all(timed.num_wrong == 0 for timed in links.timed)
    for timed in links.timed:
        if timed.operation in ("all_reduce", "all_gather", "reduce_scatter"):
            assert timed.least_s >= 0.98 * link_s(timed.operation, timed.num_bytes)
    times = nbgpu.time_step("autoencoder", num_steps=3, **SETTINGS)
    assert f"over gloo, simulated link {LINK_NAME}" in str(times)
    assert f"simulated link {LINK_NAME}" in cluster.describe()
    assert f"simulated link {LINK_NAME}" in str(cluster.plan("autoencoder", **SETTINGS))


@pytest.mark.release
@pytest.mark.long
def test_a_slow_rank_is_named() -> None:
    with beside(ranks=2, slow_rank="1=4x") as cluster:
        assert "rank 1 slowed x4" in cluster.describe()
        cluster.execute(TIMED.replace("NUM_ITEMS", "10"))
        code = """
import json
def part():
    time.sleep(0.1)
    begun_s = time.monotonic()
    dist.all_reduce(whole)
    return time.monotonic() - begun_s
print(json.dumps([timed(part, 2), part()]))
"""
        for whole_s, _ in values(cluster, code):
            assert 3.9 < whole_s / 0.1 < 6
        times = nbgpu.time_step("autoencoder", num_steps=2, cluster=cluster, **SETTINGS)
        assert "rank 1" in str(times)
        run = cluster.train("autoencoder", steps=10, val_every=0, **SETTINGS)
        run.wait()
        records, _ = run.reader.since()
        own: dict[int, list[float]] = {0: [], 1: []}
        for record in records:
            if isinstance(record, Sample) and "compute_s" in record.values and record.step > 2:
                own[record.rank].append(record.values["compute_s"])
        # Other work on the machine lengthens some steps of both.
        assert min(own[1]) / min(own[0]) > 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"link": "fast"}, "link = 'fast' is not valid"),
        ({"link": "1Gbit/s"}, "a rate and a latency, or a name"),
        ({"slow_rank": "1"}, "'1' is not a rank and a factor"),
        ({"slow_rank": "1=0.5x,0=1000x"}, "'1=0.5x': the factor is above 1 and at most 100; '0=1000x'"),
        ({"slow_rank": "2=2x"}, "names rank 2, and there are 2 rank"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(settings: dict[str, str], message: str) -> None:
    with pytest.raises(nbgpu.ConfigError) as caught:
        nbgpu.Cluster(gpus="none", ranks=2, **settings)
    assert message in str(caught.value)


def test_without_a_link_nothing_is_wrapped() -> None:
    code = """
from torch.nn.parallel import DistributedDataParallel
from nbgpu.engine.group import simulated_link
print(simulated_link._is_installed, hasattr(dist.ProcessGroup.allreduce, '__wrapped__'))
print(hasattr(DistributedDataParallel.forward, '__wrapped__'))
"""
    with beside(ranks=1) as cluster:
        assert cluster.execute(code) == {0: "False False\nFalse\n"}


@pytest.mark.long
@pytest.mark.release
@pytest.mark.slow_link
def test_steps_take_as_long_as_over_a_real_link() -> None:
    """Layers wait, as a CPU does while its GPU computes; docs/scaling.md has the figures of a quiet host."""
    rows = [[256, 0.004, 1.0, 6], [512, 0.004, 25.0, 6]]
    code = (
        f"import json, sys\nsys.path.insert(0, {str(Path(waiting_steps.__file__).parent)!r})\n"
        f"import waiting_steps\nprint(json.dumps([waiting_steps.steps_s(*row) for row in {rows}]))"
    )
    for bits_per_s, delay_s in ((1e9, 1e-4), (2e8, 1e-3)):
        link = f"{bits_per_s * SHARE_OF_DATA} bit/s, {delay_s} s"
        real: list[list[list[float]]] = []
        simulated: list[list[list[float]]] = []
        with slow_link(2, bits_per_s, delay_s) as wire, beside(ranks=2, link=link) as cluster:
            for _ in range(2):
                simulated.append(values(cluster, code)[0])
                real.append(wire.run(waiting_steps.steps_over, rows=rows)[0])
        for index in range(len(rows)):
            # The least of many, because other work on the machine only adds time.
            least_s = [min(time_s for found in many for time_s in found[index]) for many in (simulated, real)]
            assert 0.75 < least_s[0] / least_s[1] < 1.25, (link, rows[index], least_s)
