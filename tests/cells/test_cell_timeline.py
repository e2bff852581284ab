"""`%%distributed --timeline`: what all ranks did in a cell of a person's own."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from kernel import kernel

FIGURE = "application/vnd.plotly.v1+json"
MODEL = """%%distributed
import time
from torch import nn
from torch.nn.parallel import DistributedDataParallel
ddp = DistributedDataParallel(nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]), bucket_cap_mb=0.5)
optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-5)
def train(steps, slow_s=0.0):
    for _ in range(steps):
        time.sleep(slow_s * rank)
        ddp(torch.ones(4, 256)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        total = torch.ones(1)
        dist.all_reduce(total)
"""
READ = """
import json, nbgpu
found = nbgpu.current().last_timeline
(cell,) = found.steps
as_lists = lambda spans: [[s.kind, s.rank, s.begin_s, s.end_s, s.num_bytes, s.name] for s in spans]
print(json.dumps([found.unit, as_lists(found.spans(cell)), as_lists(found.critical_path(cell)), str(found)]))
"""


def read(notebook: Any) -> tuple[list[list[Any]], list[list[Any]], str]:
    """The spans, the critical path, and the table of the last timeline."""
    done = notebook.run(READ)
    assert done.status == "ok", done.error
    unit, spans, path, text = json.loads(done.stdout)
    assert unit == "cell"
    return spans, path, text


def seconds(spans: list[list[Any]], rank: int, kind: str) -> float:
    return float(sum(s[3] - s[2] for s in spans if (s[1], s[0]) == (rank, kind)))


def test_a_loop_of_ones_own_has_a_timeline_with_its_critical_path(notebook: Any) -> None:
    assert notebook.run(MODEL).status == "ok"
    assert (
        notebook.run("%%distributed\ntrain(2)\nbefore = ddp.module[0].weight.detach().clone()").status == "ok"
    )
    done = notebook.run("%%distributed --timeline\ntrain(4, slow_s=0.2)")
    assert done.status == "ok", done.error
    (drawn,) = [shown[FIGURE] for shown in done.displays if FIGURE in shown]
    assert "%%distributed on 2 ranks, cell" in drawn["layout"]["title"]["text"]
    assert "measured; all ranks read the clock of one machine" in drawn["layout"]["title"]["text"]
    spans, path, text = read(notebook)
    assert {s[0] for s in spans} >= {"forward", "backward", "optimizer", "other", "waiting", "exchange"}
    assert "blocked" not in {s[0] for s in spans}
    parameters = 8 * (256 * 256 + 256) * 4
    for rank in (0, 1):
        buckets = [s for s in spans if s[0] == "exchange" and s[1] == rank]
        assert len(buckets) >= 8
        assert sum(s[4] for s in buckets) == 4 * parameters
        assert (
            len([s for s in spans if s[0] == "collective" and s[1:2] == [rank] and s[5] == "all_reduce"]) == 4
        )
        own = sorted([s[2], s[3]] for s in spans if s[1] == rank and s[0] not in ("exchange", "collective"))
        assert all(before[1] <= after[0] + 1e-9 for before, after in pairwise(own))
    # Rank 1 comes 0.2 s late to each step.
    assert seconds(spans, 0, "waiting") > 0.7
    assert seconds(spans, 1, "waiting") < 0.3
    assert seconds(path, 1, "other") > 0.7
    assert seconds(path, 0, "other") < 0.3
    assert all(before[3] <= after[2] + 1e-9 for before, after in pairwise(path))
    covered_s = sum(s[3] - s[2] for s in path)
    assert 0.95 < covered_s / (path[-1][3] - path[0][2]) <= 1.0001
    assert "critical path" in text
    assert "cannot be compared" not in text


def test_the_trace_of_a_cell_has_all_ranks(notebook: Any, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    assert notebook.run(f"nbgpu.current().last_timeline.chrome_trace({str(path)!r})").status == "ok"
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 1", "critical path, %%distributed on 2 ranks"}
    assert {e["args"]["operation"] for e in events if e.get("cat") == "exchange"} == {"all_reduce"}


def test_the_ranks_are_as_before_after_the_cell(notebook: Any) -> None:
    code = """%%distributed
weights = [torch.zeros_like(ddp.module[0].weight) for _ in range(world_size)]
dist.all_gather(weights, ddp.module[0].weight.detach())
assert torch.equal(weights[0], weights[1])
wrapped = (dist.ProcessGroup.allreduce, dist.Work.wait, DistributedDataParallel.forward, torch.autograd.backward)
assert not any("cell_timeline" in str(getattr(each, "__code__", "")) for each in wrapped)
seen = []
def own(state, bucket):
    seen.append(bucket.index())
    sent = dist.all_reduce(bucket.buffer().div_(world_size), async_op=True)
    return sent.get_future().then(lambda future: future.value()[0])
ddp.register_comm_hook(None, own)
train(1)
print(len(seen) > 0)
"""
    done = notebook.run(code)
    assert done.status == "ok", done.error
    assert done.said(0, 1) == [["True"], ["True"]]


def test_a_cell_that_fails_shows_what_it_did_until_then(notebook: Any) -> None:
    code = "%%distributed --timeline\ntrain(2)\nif rank == 1:\n    raise ValueError('broken')\ntrain(1)"
    done = notebook.run(code)
    assert done.status == "error"
    assert "broken" in done.error
    assert [shown for shown in done.displays if FIGURE in shown]
    spans, path, text = read(notebook)
    assert "the critical path begins after the last wait that cannot be compared" in text
    assert seconds(spans, 0, "optimizer") > 0
    assert seconds(spans, 1, "optimizer") > 0
    # Nobody knows how long rank 0 would have waited.
    assert [s for s in spans if s[0] == "blocked" and s[1] == 0]
    assert not [s for s in path if s[0] == "blocked"]


def test_a_cell_that_is_stopped_shows_what_it_did_until_then(notebook: Any) -> None:
    code = "%%distributed --timeline\ntrain(2)\nprint('begun', flush=True)\nif rank == 1:\n    time.sleep(60)\ntrain(1)"
    done = notebook.run(code, meanwhile=notebook.manager.interrupt_kernel)
    assert done.status == "error"
    assert [shown for shown in done.displays if FIGURE in shown]
    spans, _, _ = read(notebook)
    assert len([s for s in spans if s[0] == "optimizer" and s[1] == 0]) >= 2
    assert [s for s in spans if s[0] == "blocked" and s[1] == 0]
    assert notebook.run("%%distributed --timeline\ntrain(1)").status == "ok"


def test_a_long_cell_keeps_its_last_collectives(notebook: Any) -> None:
    code = "%%distributed --timeline\nfor _ in range(700 + 0 * rank):\n    dist.all_reduce(torch.ones(1))"
    assert notebook.run(code).status == "ok"
    spans, path, text = read(notebook)
    assert "the last 500 of 700 collectives are shown" in text
    for rank in (0, 1):
        assert 490 <= len([s for s in spans if s[0] == "collective" and s[1] == rank]) <= 500
    assert path


def test_one_rank_alone_and_a_cell_without_collectives(notebook: Any) -> None:
    assert notebook.run("%%distributed --timeline --ranks 1\ntorch.ones(3).sum()").status == "ok"
    spans, _, text = read(notebook)
    assert {(s[0], s[1]) for s in spans} == {("other", 1)}
    assert "%%distributed on 1 rank" in text
    # In a group of its own a rank waits for nobody.
    alone = "%%distributed --timeline\nalone = [dist.new_group([r]) for r in range(world_size)][rank]\n"
    assert notebook.run(f"{alone}total = torch.ones(1)").status == "ok"
    use = (
        "%%distributed --timeline\nfor _ in range(3): dist.all_reduce(total, group=alone)\n"
        "own = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4), process_group=alone)\n"
        "own(torch.ones(1, 4)).sum().backward()"
    )
    assert notebook.run(use).status == "ok"
    spans, _, _ = read(notebook)
    assert {s[0] for s in spans} == {"other", "forward", "backward"}


def test_ranks_on_several_hosts_compare_their_clocks(notebook: Any) -> None:
    patch = (
        "%%distributed\nfrom nbgpu.engine.scaling import cell_timeline\n"
        "_id = cell_timeline.clock_id; cell_timeline.clock_id = lambda: str(rank)"
    )
    assert notebook.run(patch).status == "ok"
    assert notebook.run("%%distributed --timeline\ndist.all_reduce(torch.ones(1))").status == "ok"
    assert notebook.run("%distributed cell_timeline.clock_id = _id").status == "ok"
    assert "clocks of several machines" in read(notebook)[2]


def test_a_value_for_the_option_is_refused(notebook: Any) -> None:
    done = notebook.run("%%distributed --timeline yes\nprint('ran')")
    assert done.status == "error"
    assert "unrecognized arguments: yes" in done.written
    assert "ran" not in done.stdout


def test_ddp_trains_to_the_same_weights(notebook: Any) -> None:
    make = """
import copy
torch.manual_seed(0)
twins = [DistributedDataParallel(copy.deepcopy(part)) for part in [nn.Sequential(nn.Linear(31, 17), nn.Linear(17, 3))] * 2]
def fit(model):
    own = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(3):
        model(torch.randn(5, 31)).square().mean().backward()
        own.step()
        own.zero_grad()
fit(twins[0])
"""
    assert notebook.run("%%distributed" + make).status == "ok"
    assert notebook.run("%%distributed --timeline\nfit(twins[1])").status == "ok"
    same = "all(torch.equal(a, b) for a, b in zip(*(twin.parameters() for twin in twins)))"
    assert notebook.run(f"%%distributed\nprint({same})").said(0, 1) == [["True"], ["True"]]


@pytest.mark.usefixtures("ranks_may_be_replaced")
def test_a_rank_whose_process_ends_is_named(notebook: Any) -> None:
    code = "%%distributed --timeline\nimport os\nif rank == 1:\n    os._exit(3)\ndist.barrier()"
    assert notebook.run(code).status == "error"
    spans, _, text = read(notebook)
    assert "nothing is known of rank 1, which ended" in text
    assert {s[1] for s in spans} == {0}


@pytest.mark.gpu
def test_on_gpus_the_moments_are_the_devices() -> None:
    code = """%%distributed --timeline
from torch import nn
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(nn.Linear(4096, 4096).to(device), device_ids=[device.index])
for _ in range(3):
    model(torch.ones(4096, 4096, device=device)).sum().backward()
total = torch.ones(1, device=device)
dist.all_reduce(total)
"""
    with kernel() as notebook:
        assert notebook.run("%load_ext nbgpu\n%nbgpu start").status == "ok"
        done = notebook.run(code)
        assert done.status == "ok", done.error
        spans, path, _ = read(notebook)
        assert len([s for s in spans if s[0] == "backward" and s[1] == 0 and s[3] > s[2]]) >= 3
        assert [s for s in spans if s[0] == "exchange" and s[1] == 0]
        assert path
        assert notebook.run("%nbgpu stop").status == "ok"


def test_a_simulated_link_and_a_slow_rank_are_named_and_seen() -> None:
    with kernel() as notebook:
        start = "%load_ext nbgpu\n%nbgpu start --gpus none --ranks 2 --link 80MB/s,20ms --slow-rank 1=3x"
        assert notebook.run(start).status == "ok"
        assert notebook.run(MODEL + "train(2)").status == "ok"
        done = notebook.run("%%distributed --timeline\ntrain(2)")
        assert done.status == "ok", done.error
        spans, _, text = read(notebook)
        (drawn,) = [shown[FIGURE] for shown in done.displays if FIGURE in shown]
        for shown in (text, drawn["layout"]["title"]["text"]):
            assert "simulated link 80MB/s, 20ms, rank 1 slowed x3" in shown
        exchanged = [s for s in spans if s[0] == "exchange"]
        assert exchanged
        assert min(s[3] - s[2] for s in exchanged) >= 0.02
        assert notebook.run("%nbgpu stop").status == "ok"
