"""The GPU's memory: reports of what is missing, what is free again, and what a plan says beforehand."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from checks import Place, check, used_bytes

_MIB = 2**20
_MEMORY = ("engine/memory",)
KILLED = ("client/faults", "engine/training", "engine/group", "engine/checkpoints")
PHANTOMS: dict[str, Any] = {"data": "phantoms", "num_phantoms": 4, "val_every": 0}


def held_bytes(place: Place, cluster: Any) -> int:
    """What is in use on the GPU, or what the CPU ranks hold."""
    if place.on_gpu:
        return used_bytes()
    import psutil

    return sum(psutil.Process(pid).memory_info().rss for pid in cluster.pids.values())


def until_free(place: Place, cluster: Any, most_bytes: int, patience_s: float = 20.0) -> int:
    """Wait until no more than so much is held; return what is held then, or at the end of the patience."""
    give_up_s = time.monotonic() + patience_s
    while (held := held_bytes(place, cluster)) > most_bytes and time.monotonic() < give_up_s:
        time.sleep(0.1)
    return held


def _memory_limit(place: Place) -> dict[str, Any]:
    return place.size({}, {"memory_limit": "1GiB"})


@check(
    "out of memory in a cell: the report names the rank and the variables, and the memory is free again",
    slice=2,
    page="faults",
    shows=_MEMORY,
    budget_s=10,
    alone=True,
    seldom=False,
)
def out_of_memory_in_a_cell(place: Place) -> None:
    import pytest

    import nbgpu

    num_bytes = place.size(2**34, 2**27)
    with place.cluster(**_memory_limit(place)) as cluster:
        cluster.execute("torch.ones(1, device=device)")
        before_bytes = held_bytes(place, cluster)
        code = (
            f"def ask():\n    first = torch.ones({num_bytes}, dtype=torch.uint8, device=device)\n"
            "    return torch.ones(2**46, dtype=torch.uint8, device=device)\nask()"
        )
        with pytest.raises(nbgpu.RankError) as caught:
            cluster.execute(code)
        (failure,) = caught.value.failures
        message = failure.message
        print(message)
        assert failure.error_type == "OutOfMemoryError", message
        after_bytes = until_free(place, cluster, before_bytes + 64 * _MIB)
        place.figure("in use before", before_bytes / _MIB, "MiB")
        place.figure("in use afterwards", after_bytes / _MIB, "MiB")
        place.figure("taken at the time", num_bytes / _MIB, "MiB")
        assert "first in ask(): " in message, message
        assert after_bytes <= before_bytes + place.size(64, 200) * _MIB
        assert cluster.execute("print(int(torch.ones(3, device=device).sum()))") == {0: "3\n"}


@check(
    "out of memory in a run: the report says which batch would have fitted, it does, and the memory is free again",
    slice=2,
    page="faults",
    shows=_MEMORY,
    budget_s=24,
    alone=True,
)
def out_of_memory_in_a_run(place: Place) -> None:
    import re

    import pytest

    import nbgpu

    # A bound that a small batch reaches: a GPU full of data would take a minute to make.
    settings = {
        **PHANTOMS,
        "patch_size": place.size(64, 32),
        "channels": place.size((32, 64), (8, 16)),
        "steps": 2,
        "work_out_result": False,
        "runs_dir": str(place.folder),
    }
    with place.cluster(memory_limit=place.size("8GiB", "1GiB")) as cluster:
        cluster.train("autoencoder", **{**settings, "batch_size": 1}).wait(place.bound_s(30))
        before_bytes = held_bytes(place, cluster)
        run = cluster.train("autoencoder", **{**settings, "batch_size": place.size(64, 256)})
        with pytest.raises(nbgpu.RankError) as caught:
            run.wait(place.bound_s(30))
        message = str(caught.value)
        print(message)
        after_bytes = until_free(place, cluster, before_bytes + 256 * _MIB)
        place.figure("in use before", before_bytes / _MIB, "MiB")
        place.figure("in use afterwards", after_bytes / _MIB, "MiB")
        found = re.search(r"would have fitted: batch_size=(\d+)", message)
        assert found is not None, message
        place.figure("batch that would have fitted", int(found[1]))
        assert after_bytes <= before_bytes + 256 * _MIB
        smaller = cluster.train("autoencoder", **{**settings, "batch_size": int(found[1])})
        assert smaller.wait(place.bound_s(30)).status == "finished", smaller.failures


def _planned(place: Place) -> dict[str, Any]:
    return {
        **PHANTOMS,
        "patch_size": place.size(64, 32),
        "channels": place.size((32, 64), (8, 16)),
        "amp": place.size("bf16", "off"),
    }


@check(
    "the largest batch that is found trains under the same bound",
    slice=2,
    page="devices",
    shows=("engine/dry_run/batch_size.py", "engine/dry_run/steps.py", "engine/memory/limit.py"),
    budget_s=22,
    alone=True,
)
def largest_batch(place: Place) -> None:
    limit = place.size("4GiB", "1GiB")
    with place.cluster(memory_limit=limit) as cluster:
        found = cluster.find_batch_size("autoencoder", **_planned(place))
        print(found)
        place.figure("memory limit", limit)
        place.figure("largest batch", found.largest)
        place.figure("batch to take", found.batch_size)
        run = cluster.train(
            "autoencoder",
            **{**_planned(place), "batch_size": found.batch_size, "steps": place.size(4, 1)},
            work_out_result=False,
            runs_dir=str(place.folder),
        )
        assert run.wait(place.bound_s(30)).status == "finished", run.failures


@check(
    "the plan's estimate is within 10 % of the measured peak",
    slice=2,
    page="devices",
    shows=("engine/dry_run", "engine/memory/allocations.py", "engine/memory/trace.py"),
    budget_s=20,
    alone=True,
)
def plan(place: Place) -> None:
    import nbgpu

    with place.cluster(**_memory_limit(place)) as cluster:
        for batch_size in (2, 8):
            of_batch = {**_planned(place), "batch_size": batch_size}
            planned = cluster.plan("autoencoder", **of_batch).memory
            (measured,) = nbgpu.memory("autoencoder", cluster, **of_batch).measured
            place.figure(f"batch {batch_size}: planned", planned["peak"] / _MIB, "MiB")
            place.figure(f"batch {batch_size}: measured", measured.peak_bytes / _MIB, "MiB")
            off = planned["peak"] / measured.peak_bytes - 1
            place.figure(f"batch {batch_size}: off by", 100 * off, "%")
            # A CPU rank's memory is the whole process's, of which a small step is little.
            assert abs(off) <= place.size(0.10, 0.25), f"the plan is off by {100 * off:.0f} %"


@check(
    "a rank that is killed in a run frees its memory, is replaced, and the weights are those of an unhurt run",
    slice=2,
    page="faults",
    shows=KILLED,
    budget_s=24,
    alone=True,
)
def killed_rank_in_a_run(place: Place) -> None:
    with place.cluster(ranks=2, backend="gloo") as cluster:
        kill_and_compare(place, cluster)


def kill_and_compare(place: Place, cluster: Any) -> None:
    """Train unhurt, and again with a rank that is killed in step 8; compare the weights bit by bit."""
    import faults

    from nbgpu.run_folder import checkpoint_files

    settings = {
        "data": "phantoms",
        "patch_size": 16,
        "num_phantoms": 16,
        "batch_size": 2,
        "steps": 12,
        "val_every": 6,
        "ema_decay": 0.9,
        "work_out_result": False,
        "cudnn": "deterministic" if place.on_gpu else "default",
        "runs_dir": str(place.folder),
    }
    unhurt = cluster.train("autoencoder", **settings).wait(place.bound_s(60))
    before_bytes = held_bytes(place, cluster)
    cluster.execute(faults.in_training(1, step=8, action="kill"))
    began_s = time.monotonic()
    run = cluster.train("autoencoder", **settings).wait(place.bound_s(60))
    place.figure("run with a kill", time.monotonic() - began_s, "s")
    assert run.status == "finished", run.failures
    assert any("rank 1 was killed by SIGKILL" in note for note in run.notes()), run.notes()
    after_bytes = until_free(place, cluster, before_bytes + 256 * _MIB)
    place.figure("in use by two ranks before the kill", before_bytes / _MIB, "MiB")
    place.figure("in use by two ranks after the kill", after_bytes / _MIB, "MiB")

    def weights(of_run: Any) -> bytes:
        return bytes((of_run.checkpoint() / checkpoint_files.MODEL).read_bytes())

    same = weights(run) == weights(unhurt)
    place.figure("the run with a kill is equal to the last bit", same)
    assert after_bytes <= before_bytes + place.size(256, 400) * _MIB, "the killed rank's memory is not free"
    assert same, "the weights differ from those of a run that was not hurt"


@check(
    "a cluster that stops leaves nothing on the device",
    slice=2,
    page="devices",
    shows=("client/engines/lifetimes.py", "client/cluster", "host/this_host.py"),
    budget_s=12,
    alone=True,
    seldom=False,
)
def nothing_is_left(place: Place) -> None:
    import psutil

    def others_bytes() -> int:
        return used_bytes() if place.on_gpu else 0

    before_bytes = others_bytes()
    with place.cluster(ranks=2, backend="gloo") as cluster:
        cluster.execute("x = torch.ones(2**28, dtype=torch.uint8, device=device)")
        place.figure("in use by two ranks", held_bytes(place, cluster) / _MIB, "MiB")
        pids = list(cluster.pids.values())
    gone = [pid for pid in pids if not psutil.pid_exists(pid)]
    give_up_s = time.monotonic() + 20
    while others_bytes() > before_bytes + 16 * _MIB and time.monotonic() < give_up_s:
        time.sleep(0.1)
    place.figure("in use before", before_bytes / _MIB, "MiB")
    place.figure("in use afterwards", others_bytes() / _MIB, "MiB")
    with suppress(psutil.NoSuchProcess):
        left = [
            pid for pid in pids if pid not in gone and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        ]
        assert not left, f"processes {left} are left"
    assert others_bytes() <= before_bytes + 16 * _MIB
