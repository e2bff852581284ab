"""Two things on a group, of all kinds that a person makes, work on after cells that raise, Stop and deaths.

GROUPED_ROUNDS in the environment is how often each way is tried, GROUPED_SEED repeats one.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator

import faults
import launching
import leaks
import pytest
import torch.distributed as dist
from grouped import IMPORTS, THINGS
from kernel import Kernel, kernel

NUM_RANKS = 3
BOUND_S = 60
ROUNDS = int(os.environ.get("GROUPED_ROUNDS", "6"))
SEED = int(os.environ.get("GROUPED_SEED", "1"))
WORK = "dist.barrier()"


@pytest.fixture(scope="module", params=["0", "1"], ids=["again", "in place"])
def notebook(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    if request.param == "1" and not hasattr(dist, "_reconfigure"):
        pytest.skip("torch before 2.14 cannot form a group again in place")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBGPU_REFORM_IN_PLACE", request.param)
        with kernel() as started, leaks.holding_family_of(started.manager.provisioner.pid):
            started.run("%load_ext nbgpu")
            assert started.run(f"%nbgpu start {launching.flags(NUM_RANKS)}").status == "ok"
            prepare(started)
            done = started.run("%%distributed\n__import__('os').environ.get('NBGPU_REFORM_IN_PLACE')")
            assert done.said(0) == [[repr(request.param)]]
            yield started
            started.run("%nbgpu stop")


def prepare(notebook: Kernel) -> None:
    done = notebook.run(f"%%distributed\n{IMPORTS}\ndefault = dist.group.WORLD", timeout_s=BOUND_S)
    assert done.status == "ok", done.error


def require(notebook: Kernel, names: list[str], after: str) -> None:
    """The sum of the default group is right, and the things do what they should, on all ranks."""
    checks = ", ".join(THINGS[name].check for name in names)
    done = notebook.run(f"%%distributed\nsum_over(None) == world_size, {checks}", timeout_s=BOUND_S)
    right = str((True, *[True] * len(names)))
    assert done.said(*range(NUM_RANKS)) == [[right]] * NUM_RANKS, f"{names} after {after}: {done}"


def blow(notebook: Kernel, kind: str, chance: random.Random) -> str:
    """End a cell in one of the ways in which cells end; return what was said of it."""
    bad, after_s = chance.randrange(NUM_RANKS), chance.uniform(0, 0.3)
    act = {"raise": faults.at(bad, "raise"), "kill": faults.at(bad, "kill"), "stop": "pass"}[kind]
    pid = notebook.manager.provisioner.process.pid
    stop = threading.Timer(after_s + 0.2, os.kill, (pid, signal.SIGINT)) if kind == "stop" else None
    done = notebook.run(
        "%%distributed\nimport time\nprint('working', flush=True)\nbegun_s = time.monotonic()\n"
        f"while True:\n    if time.monotonic() - begun_s > {after_s}:\n        {act}\n    {WORK}",
        meanwhile=stop.start if stop else None,
        timeout_s=BOUND_S,
    )
    assert done.status == "error", done
    return done.stderr


@pytest.mark.long
@pytest.mark.timeout(0)
def test_pairs_work_on(notebook: Kernel) -> None:
    chance = random.Random(SEED)
    names = list(THINGS)
    chance.shuffle(names)
    for number in range(ROUNDS):
        first = names[number % len(names)]
        pair = [first, chance.choice([name for name in THINGS if name != first])]
        made = "\n".join(THINGS[name].make for name in pair)
        done = notebook.run(f"%%distributed\n{made}", timeout_s=BOUND_S)
        assert done.status == "ok", f"{pair}: {done.error}"
        require(notebook, pair, "making")
        kinds = chance.choices(["raise", "stop"], k=chance.choice([1, 2]))
        for kind in kinds:
            said = blow(notebook, kind, chance)
            assert "again:" not in said, f"{pair} after {kind}: {said}"
        require(notebook, pair, " and ".join(kinds))
        print(f"[{number}] {pair} after {kinds}", flush=True)
        if number % 5 == 4:
            blow(notebook, "kill", chance)
            prepare(notebook)
            require(notebook, [], "kill")


@pytest.mark.long
def test_a_variable_has_the_default_group_of_now(notebook: Kernel) -> None:
    prepare(notebook)
    notebook.run("%%distributed\nbefore = id(default)")
    blow(notebook, "raise", random.Random(SEED))
    same = "import os\nis_same = os.environ['NBGPU_REFORM_IN_PLACE'] != '1' or id(default) == before"
    done = notebook.run(
        f"%%distributed\n{same}\nis_same and default is dist.group.WORLD and sum_over(default)"
    )
    assert done.said(*range(NUM_RANKS)) == [[str(NUM_RANKS)]] * NUM_RANKS


AS_NCCL2 = """
from nbgpu.engine.group import torch_private
torch_private.uses_nccl2 = lambda: True
dist.destroy_process_group()
"""
"""Lets gloo's groups connect as nccl2's do from the next one on, only after they are made."""


@pytest.mark.long
@pytest.mark.parametrize("notebook", ["1"], ids=["in place"], indirect=True)
def test_groups_that_connect_after_they_are_made_are_formed_again_in_place(notebook: Kernel) -> None:
    assert notebook.run(f"%%distributed\n{AS_NCCL2}", timeout_s=BOUND_S).status == "ok"
    prepare(notebook)
    made = "pair = dist.new_group([0, 2])\nbefore = id(default), id(pair)"
    assert notebook.run(f"%%distributed\n{made}", timeout_s=BOUND_S).status == "ok"
    checks = "(id(default), id(pair)) == before, sum_over(default), rank == 1 or sum_over(pair)"
    for _ in range(3):
        done = notebook.run(f"%%distributed\n{checks}", timeout_s=BOUND_S)
        assert done.said(0, 1, 2) == [["(True, 3, 2)"], ["(True, 3, True)"], ["(True, 3, 2)"]], done
        blow(notebook, "raise", random.Random(SEED))


@pytest.mark.long
def test_a_group_that_has_ended_leaves_nothing_behind(notebook: Kernel) -> None:
    # Each of gloo's groups has threads, a listening socket and connections.
    prepare(notebook)
    made = notebook.run(
        "%%distributed\nimport psutil, time\nme = psutil.Process(); own = dist.new_group()\n"
        "def count(): return me.num_threads(), me.num_fds()"
    )
    assert made.status == "ok", made.error
    blow(notebook, "raise", random.Random(SEED))
    notebook.run("%%distributed\ntime.sleep(3); first = count()")
    for _ in range(4):
        blow(notebook, "raise", random.Random(SEED))
    done = notebook.run(
        "%%distributed\nfor _ in range(300):\n    left = [n - f for n, f in zip(count(), first)]\n"
        "    if max(left) <= 0: break\n    time.sleep(0.1)\nmax(left) <= 0 or left",
        timeout_s=BOUND_S,
    )
    assert done.said(*range(NUM_RANKS)) == [["True"]] * NUM_RANKS, done


@pytest.mark.long
def test_ranks_agree_on_the_next_group_after_one_that_only_some_began(notebook: Kernel) -> None:
    prepare(notebook)
    done = notebook.run(f"%%distributed\n{faults.at(1, 'raise')}\ndist.new_group()", timeout_s=BOUND_S)
    assert done.error.startswith("on rank 1:"), done
    done = notebook.run("%%distributed\nsum_over(dist.new_group())", timeout_s=BOUND_S)
    assert done.said(*range(NUM_RANKS)) == [[str(NUM_RANKS)]] * NUM_RANKS, done
