"""NCCL with two ranks on one GPU, which it takes for GPUs of two hosts (two_hosts/sitecustomize.py).

In a rehearsal the same is done with CPU ranks over gloo.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checks import Place, Skipped, check
from memory import KILLED, held_bytes, kill_and_compare
from runs import SHARDED, compare_with_one_rank, losses_of

_GROUP = ("engine/group", "machine/transports.py")
_FAULTS = ("engine/group", "client/faults", "engine/ipykernel/interrupts.py")
_SHARDS = ("engine/model/strategy.py", "engine/checkpoints", "engine/training")
_TRAINED = ("engine/training", "engine/model", "engine/group")
TWO_HOSTS = Path(__file__).with_name("two_hosts")
_SUM = "total = torch.ones(1, device=device); dist.all_reduce(total)\n"
_TAKE_TRANSPORT = """
from nbgpu.machine import transports
transports.candidates = lambda config, chosen: (transports.Transport({name!r}, {backend!r}),)
"""
"""Makes clusters of a process use a transport, though nbgpu refuses NCCL to ranks that share a GPU."""


def _use_two_hosts(place: Place, name: str = "nccl") -> str:
    """Have engines that are started from here on name hosts of their own; return code that makes a process's
    clusters use NCCL, or gloo in a rehearsal."""
    before = os.environ.get("PYTHONPATH", "")
    if str(TWO_HOSTS) not in before.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TWO_HOSTS), before]))
    # Between ranks of one GPU there is no other way, and NCCL need not look for one.
    os.environ |= {"NCCL_IB_DISABLE": "1", "NCCL_MNNVL_ENABLE": "0", "NCCL_DEBUG": "WARN"}
    backend = place.size("nccl", "gloo")
    return _TAKE_TRANSPORT.format(name=place.size(name, "gloo"), backend=backend)


@contextmanager
def _two_ranks(place: Place, name: str = "nccl", **settings: Any) -> Iterator[Any]:
    """Two ranks on one GPU over NCCL."""
    exec(_use_two_hosts(place, name), {})  # the same code as in a notebook
    with place.cluster(ranks=2, **settings) as cluster:
        assert cluster.parts.state.backend == place.size("nccl", "gloo"), cluster.describe()
        yield cluster


@contextmanager
def _notebook(place: Place, flags: str = "") -> Iterator[Any]:
    """A notebook with two such ranks, and a variable on each."""
    from kernel import kernel

    given = _use_two_hosts(place)
    with kernel() as started:
        start = place.start_line(2, flags)
        done = started.run(
            f"import nbgpu\n{given}\nget_ipython().run_line_magic('load_ext', 'nbgpu')", timeout_s=60
        )
        assert done.status == "ok", done.error
        done = started.run(start.partition("\n")[2], timeout_s=90)
        assert done.status == "ok", f"{done.error}{done.stderr}"
        done = started.run("%%distributed\nkept = torch.full((4,), float(rank), device=device)")
        assert done.status == "ok", done.error
        yield started
        started.run("%nbgpu stop")


def _require_well(notebook: Any, place: Place) -> None:
    done = notebook.run(f"%%distributed\n{_SUM}int(total), kept.tolist() == [rank] * 4", timeout_s=60)
    assert done.said(0, 1) == [["(2, True)"], ["(2, True)"]], f"{done.stdout}{done.error}{done.stderr}"


@check(
    "two ranks on one GPU form an NCCL group, and all collectives are right",
    slice=3,
    page="devices",
    shows=_GROUP,
    budget_s=10,
    seldom=False,
)
def nccl_group(place: Place) -> None:
    num = place.size(2**24, 2**18)
    code = f"""
import os, time
x = torch.arange({num}, device=device, dtype=torch.float32) * (rank + 1)
dist.all_reduce(x)
ok = torch.equal(x, torch.arange({num}, device=device, dtype=torch.float32) * 3)
gathered = torch.empty(4, device=device)
dist.all_gather_into_tensor(gathered, torch.full((2,), float(rank), device=device))
ok &= gathered.tolist() == [0, 0, 1, 1]
part = torch.empty(1, device=device)
if {place.on_gpu}:
    dist.reduce_scatter_tensor(part, torch.tensor([1.0, 2.0], device=device))
    ok &= part.item() == 2 * (rank + 1)
y = torch.full((3,), float(rank), device=device)
dist.broadcast(y, 1)
ok &= y.tolist() == [1, 1, 1]
times = []
for _ in range(5):
    begun_s = time.perf_counter()
    dist.all_reduce(x)
    torch.cuda.synchronize() if {place.on_gpu} else None
    times.append(time.perf_counter() - begun_s)
print(ok, sorted(times)[2], os.environ.get("NCCL_HOSTID", "none"))
"""
    with _two_ranks(place) as cluster:
        place.figure("cluster", cluster.describe())
        said = [text.split() for text in cluster.execute(code).values()]
        assert [words[0] for words in said] == ["True", "True"], said
        place.figure("all_reduce", 4 * num / float(said[0][1]) / 1e9, "GB/s of the tensor")
        assert len({words[2] for words in said}) == 2, f"the ranks name the same host: {said}"
        if place.on_gpu:
            place.figure("NCCL", cluster.execute("print(torch.cuda.nccl.version())")[0].strip())


@check(
    "a rank raises while the other waits in NCCL's all_reduce: both are back, the sum is right, variables are kept",
    slice=3,
    page="faults",
    shows=_FAULTS,
    budget_s=14,
    seldom=False,
)
def nccl_one_rank_raises(place: Place) -> None:
    synchronize = "torch.cuda.synchronize()" if place.on_gpu else "pass"
    code = (
        "if rank == 1:\n    import time; time.sleep(1); raise ValueError('on purpose')\n"
        f"x = torch.ones(1000, device=device)\ndist.all_reduce(x)\n{synchronize}"
    )
    with _notebook(place) as notebook:
        done = notebook.run(f"%%distributed\n{code}", timeout_s=60)
        place.figure("from the failure until the cell is back", done.took_s - 1, "s")
        assert done.error.startswith("on rank 1:"), done.error
        assert "on purpose" in done.error
        _require_well(notebook, place)


@check(
    "Stop in NCCL's all_reduce that never completes: the ranks are back, the sum is right",
    slice=3,
    page="faults",
    shows=_FAULTS,
    budget_s=14,
    seldom=False,
)
def nccl_stop(place: Place) -> None:
    stopped_s: list[float] = []
    code = "print('working', flush=True)\nx = torch.ones(9, device=device)\nif rank == 0:\n    dist.all_reduce(x); x.cpu()"
    with _notebook(place) as notebook:

        def stop() -> None:
            time.sleep(1)
            stopped_s.append(time.monotonic())
            notebook.manager.interrupt_kernel()

        done = notebook.run(f"%%distributed\n{code}", meanwhile=stop, timeout_s=60)
        place.figure("from Stop until the cell is back", time.monotonic() - stopped_s[0], "s")
        assert done.status == "error"
        _require_well(notebook, place)


@check(
    "after an abort torch's watchdog leaves the processes alone: the same ones answer five seconds later",
    slice=3,
    page="faults",
    shows=_FAULTS,
    budget_s=18,
)
def nccl_watchdog_leaves_the_ranks_alone(place: Place) -> None:
    import pytest

    import nbgpu

    with _two_ranks(place) as cluster:
        cluster.execute("kept = 7 + rank")
        pids = dict(cluster.pids)
        with pytest.raises(nbgpu.RankError, match="on purpose"):
            cluster.execute(
                "import time\nif rank == 1:\n    time.sleep(1); raise ValueError('on purpose')\n"
                "x = torch.ones(9, device=device); dist.all_reduce(x); x.cpu()"
            )
        wait_s = place.size(5, 2)
        time.sleep(wait_s)
        said = cluster.execute(f"{_SUM}print(int(total), kept)")
        assert said == {0: "2 7\n", 1: "2 8\n"}, said
        assert cluster.pids == pids, "a rank was replaced"
        place.figure("watched for", wait_s, "s")


@check(
    "a collective that outlasts `collective_timeout_s` comes back as an error, and the ranks live",
    slice=3,
    page="faults",
    shows=_FAULTS,
    budget_s=18,
)
def nccl_timeout(place: Place) -> None:
    timeout_s = 2
    with _two_ranks(place, collective_timeout_s=timeout_s) as cluster:
        cluster.execute("kept = 7 + rank")
        pids = dict(cluster.pids)
        began_s = time.monotonic()
        results = cluster.submit(
            f"import time\nx = torch.ones(9, device=device)\nif rank == 1: time.sleep({4 * timeout_s})\n"
            "else:\n    dist.all_reduce(x); x.cpu()"
        )
        ended = results[0].wait(3 * timeout_s)
        place.figure("the timeout", timeout_s, "s")
        place.figure("rank 0 waited for", time.monotonic() - began_s, "s")
        place.figure("it came back by itself", bool(ended))
        if not ended:
            cluster.ranks.interrupt((0, 1))
        for result in results.values():
            result.wait(5 * timeout_s)
        said = cluster.execute("print(kept)")
        place.figure("the same processes live on", cluster.pids == pids)
        assert said == {0: "7\n", 1: "8\n"}, said
        assert cluster.pids == pids, "a rank was replaced"
        assert ended, "rank 0 waited beyond the timeout"
        error = str(results[0].exception())
        place.figure("what it says", error.splitlines()[0])
        assert "CollectiveTimeoutError" in error, error
        assert "rank 1 had not come" in error, error


@check(
    "a run that fails keeps the flight recorder's account of NCCL's collectives of both ranks",
    slice=3,
    page="faults",
    shows=("engine/group/diagnosis.py",),
    budget_s=18,
    seldom=False,
)
def nccl_flight_recorder(place: Place) -> None:
    import faults
    import pytest

    import nbgpu

    with _two_ranks(place) as cluster:
        cluster.execute(faults.in_training(1, step=4, action="raise"))
        run = cluster.train("autoencoder", **{**faults.ENDLESS, "steps": 100}, runs_dir=str(place.folder))
        with pytest.raises(nbgpu.RankError, match="on purpose"):
            run.wait(place.bound_s(40))
        found = {}
        for rank in (0, 1):
            recording = json.loads((run.folder / f"flight-rank{rank}.json").read_text())
            found[rank] = [entry["profiling_name"] for entry in recording["entries"]]
        place.figure("collectives recorded by rank 0", len(found[0]))
        place.figure("the newest of rank 0", found[0][-1] if found[0] else "none")
        backend = place.size("nccl", "gloo")
        for rank, names in found.items():
            assert any(backend in name for name in names), f"rank {rank}: {names[-5:]}"


@check(
    "NCCL in safe mode: the group forms, and says its variables",
    slice=3,
    page="devices",
    shows=("machine/transports.py", "engine/group/safe_nccl.py"),
    budget_s=10,
    seldom=False,
)
def nccl_safe_mode(place: Place) -> None:
    from nbgpu.machine.transports import NCCL_SAFE

    with _two_ranks(place, NCCL_SAFE, nccl_safe=True) as cluster:
        place.figure("cluster", cluster.describe())
        assert cluster.execute(f"{_SUM}print(int(total))") == {0: "2\n", 1: "2\n"}
        if place.on_gpu:
            assert "NCCL_P2P_DISABLE=1" in cluster.describe()


_BREAK_IT = (
    "import time\nif rank == 1:\n    time.sleep(0.1); raise ValueError('on purpose')\n"
    "x = torch.ones(9, device=device); dist.all_reduce(x); x.cpu()"
)


def _break_and_form_again(cluster: Any) -> float:
    """Break the group, and return how long it takes until a sum over the next one is right."""
    import pytest

    import nbgpu

    began_s = time.monotonic()
    with pytest.raises(nbgpu.RankError, match="on purpose"):
        cluster.execute(_BREAK_IT)
    said = cluster.execute(f"{_SUM}print(int(total))")
    assert said == {0: "2\n", 1: "2\n"}, said
    return time.monotonic() - began_s


@check(
    "a broken group is formed again, up to fifty times in twelve seconds: each sum is right",
    slice=3,
    page="faults",
    shows=_FAULTS,
    budget_s=23,
)
def nccl_formed_again_and_again(place: Place) -> None:
    with _two_ranks(place) as cluster:
        pids = dict(cluster.pids)
        taken_s: list[float] = []
        ends_s = time.monotonic() + place.bound_s(12)
        while len(taken_s) < place.size(50, 4) and time.monotonic() < ends_s:
            taken_s.append(_break_and_form_again(cluster))
            place.figure("times", len(taken_s))
            place.figure("broken and formed again, median", statistics.median(taken_s), "s")
            place.figure("broken and formed again, longest", max(taken_s), "s")
        assert cluster.pids == pids, "a rank was replaced"


def _small_run(place: Place, **settings: Any) -> dict[str, Any]:
    return {
        "data": "phantoms",
        "patch_size": 16,
        "num_phantoms": 16,
        "batch_size": 2,
        "steps": 8,
        "val_every": 0,
        "work_out_result": False,
        "runs_dir": str(place.folder),
        **settings,
    }


@check(
    "training over NCCL has the losses of training over gloo",
    slice=3,
    page="training",
    shows=_TRAINED,
    budget_s=24,
)
def nccl_training(place: Place) -> None:
    settings = _small_run(place, cudnn="deterministic" if place.on_gpu else "default")
    with place.cluster(ranks=2, backend="gloo") as cluster:
        expected = losses_of(cluster.train("autoencoder", **settings).wait(place.bound_s(30)))
    with _two_ranks(place) as cluster:
        losses = losses_of(cluster.train("autoencoder", **settings).wait(place.bound_s(30)))
    off = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    place.figure("losses off by", off)
    assert off < 1e-4, f"the losses differ by {off:.3g}"


@check(
    "NCCL's collectives are in the times of each step of a run, and in its profile",
    slice=3,
    page="training",
    shows=_TRAINED,
    budget_s=16,
)
def nccl_in_the_profile(place: Place) -> None:
    settings = _small_run(place, steps=12, profile="6:9")
    with _two_ranks(place) as cluster:
        run = cluster.train("autoencoder", **settings).wait(place.bound_s(30))
        steps = run.metrics().dropna(subset=["exchange_s"])
        (event,) = (e for e in run.reader.events() if e.kind == "profile" and e.rank == 0)
    place.figure("exchange of a step", 1e3 * float(steps["exchange_s"].median()), "ms")
    place.figure("communication in the profile", 1e3 * event.detail["communication_s"], "ms")
    assert len(steps) == 2 * settings["steps"]
    assert (steps["exchange_s"] > 0).all()
    assert ((steps["hidden_s"] + steps["exposed_s"] - steps["exchange_s"]).abs() < 1e-6).all()
    assert event.detail["communication_s"] + event.detail["hidden_s"] > 0


@check(
    "of groups that were broken and formed again neither memory, threads nor files pile up",
    slice=3,
    page="faults",
    shows=_FAULTS,
    budget_s=22,
    alone=True,
)
def nccl_groups_leave_nothing(place: Place) -> None:
    import psutil

    num_times = 8
    with _two_ranks(place) as cluster:

        def held() -> tuple[float, int, int]:
            engines = [psutil.Process(pid) for pid in cluster.pids.values()]
            threads, files = sum(e.num_threads() for e in engines), sum(e.num_fds() for e in engines)
            return held_bytes(place, cluster) / 2**20, threads, files

        def held_when_quiet() -> tuple[float, int, int]:
            """What is held once the groups that have ended are gone, for which they have a second or two."""
            before = held()
            for _ in range(3):
                time.sleep(1.2)
                now = held()
                if now[1:] == before[1:]:
                    break
                before = now
            return now

        for _ in range(3):
            _break_and_form_again(cluster)
        settled = held_when_quiet()
        for _ in range(num_times):
            _break_and_form_again(cluster)
        after = held_when_quiet()
        for name, before, now, unit in zip(
            ("memory", "threads", "files"), settled, after, ("MiB", "", ""), strict=True
        ):
            place.figure(f"{name} after three times", before, unit)
            place.figure(f"{name} after {3 + num_times} times", now, unit)
        assert after[0] <= settled[0] + 200, "memory piles up"
        assert after[1] <= settled[1] + num_times // 2, "threads pile up"
        assert after[2] <= settled[2] + num_times // 2, "open files pile up"


@check(
    "over NCCL a rank that is killed in a run is replaced, and the weights are those of an unhurt run",
    slice=3,
    page="faults",
    shows=KILLED,
    budget_s=24,
    alone=True,
)
def nccl_killed_rank_in_a_run(place: Place) -> None:
    with _two_ranks(place) as cluster:
        kill_and_compare(place, cluster)


@check(
    "fsdp over NCCL trains with the losses of ddp",
    slice=3,
    page="training",
    shows=_SHARDS,
    budget_s=20,
)
def nccl_fsdp(place: Place) -> None:
    _compare(place, {"strategy": "fsdp"}, {"strategy": "ddp"})


def _compare(place: Place, settings: dict[str, Any], others: dict[str, Any]) -> None:
    """AssertionError unless a run with two ranks over NCCL has the losses of one with other settings."""
    with _two_ranks(place) as cluster:
        losses, expected = (
            losses_of(cluster.train("autoencoder", **_small_run(place, **given)).wait(place.bound_s(30)))
            for given in (settings, others)
        )
    off = max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))
    place.figure("losses off by", off)
    assert off < 1e-3, f"the losses differ by {off:.3g}"


@check(
    "fsdp over NCCL writes intact checkpoints and goes on from one",
    slice=3,
    page="training",
    shows=_SHARDS,
    budget_s=20,
)
def nccl_fsdp_resumed(place: Place) -> None:
    settings = _small_run(place, strategy="fsdp", val_every=4)
    with _two_ranks(place) as cluster:
        run = cluster.train("autoencoder", **settings).wait(place.bound_s(30))
        settings |= {"steps": 12, "resume": str(run.folder)}
        again = cluster.train("autoencoder", **settings).wait(place.bound_s(30))
    place.figure("steps after resuming", int(again.metrics()["step"].max()))
    assert again.status == "finished", again.failures


@check(
    "fsdp with CPU offload over NCCL trains with the losses of fsdp without it, and writes intact checkpoints",
    slice=3,
    page="training",
    shows=_SHARDS,
    budget_s=20,
)
def nccl_fsdp_offload(place: Place) -> None:
    if not place.on_gpu:
        raise Skipped("CPU ranks have nothing to offload")
    _compare(place, {"strategy": "fsdp", "cpu_offload": True}, {"strategy": "fsdp"})


@check(
    "two ranks with fsdp over NCCL lose what one rank does, in float64 over twenty steps",
    slice=3,
    page="training",
    shows=_SHARDS,
    budget_s=20,
    seldom=False,
)
def equivalence_with_fsdp(place: Place) -> None:
    # torch crashes in FSDP over gloo with tensors of GPUs.
    _use_two_hosts(place)
    compare_with_one_rank(place, SHARDED, place.size("nccl", "gloo"))
