"""A run that does not get on says who waits for whom, and can be stopped with its state."""

from __future__ import annotations

import ast
import json
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faults
import launching
import leaks
import pytest
from kernel import Kernel, kernel
from rows import Measured, row

import nbgpu
from nbgpu.config import own_file
from nbgpu.protocol.records import Event
from nbgpu.run_folder import checkpoint_files

BOUND_S = 60
ENDLESS = {**faults.ENDLESS, "threads": 1}
SUM_AND_VARIABLE = f"{faults.MEND}\ntotal = torch.ones(1); dist.all_reduce(total); print(int(total), kept)"


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    with kernel() as started, leaks.holding_family_of(started.manager.provisioner.pid):
        command = f"%load_ext nbgpu\n%nbgpu start {launching.flags()} --notice-after-s 1"
        assert started.run(command).status == "ok"
        yield started
        started.run("%nbgpu stop")


def until(holds: Callable[[], Any], what: str) -> None:
    give_up_s = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < give_up_s, what
        time.sleep(0.05)


def train(cluster: nbgpu.Cluster, tmp_path: Path, **settings: Any) -> Any:
    return cluster.train("autoencoder", **{**ENDLESS, **settings}, runs_dir=str(tmp_path))


@pytest.mark.long
@row(
    "a rank does not come to the end of a step of a run",
    "a notice says which rank waits and where the other is; Stop ends the run with a checkpoint of the step before, the sum is right, "
    "variables are kept",
    bound_s=2,
)
def test_a_notice_names_who_waits_and_stop_ends_the_run(
    notebook: Kernel, measured: Measured, tmp_path: Path
) -> None:
    def stop() -> None:
        measured.fault_now()
        notebook.manager.interrupt_kernel()

    fault = faults.in_training(1, step=4, action="sleep")
    assert notebook.run(f"%%distributed\nkept = 3 + rank\n{fault}").status == "ok"
    settings = {**ENDLESS, "runs_dir": str(tmp_path)}
    notebook.run(f"import nbgpu\nrun = nbgpu.current().train('autoencoder', **{settings!r})")
    pattern = r"rank 0 waits in DDP backward, step 4, for \d+ s; rank 1 is at faulty, line \d+ of an earlier cell, in step 4: .*"
    # On a busy machine the ranks may wait for one another so long before the first step that it is said.
    done = notebook.run("run.wait()", meanwhile=stop, timeout_s=BOUND_S, once_shown=pattern)
    measured.ended(done.error)
    assert "KeyboardInterrupt" in done.error
    texts = [data["text/plain"] for data in [*done.displays, *done.updates] if "text/html" in data]
    # Beside the notice stands the line with the run's progress, which stays.
    notices = [text for text in texts if not text.startswith("autoencoder: ")]
    assert any(re.fullmatch(pattern, notice) for notice in notices), notices
    assert notices[-1] == ""

    assert notebook.run("run.status").value == "'stopped'"
    (folder,) = tmp_path.iterdir()
    newest = checkpoint_files.newest_whole(folder).checkpoint
    assert newest is not None
    assert newest.name.endswith("3")
    events = [json.loads(line) for line in (folder / "rank0.jsonl").read_text().splitlines()]
    told = [str(event.get("text", "")) for event in events]
    assert any(
        "rank 1 is at faulty" in text and text.endswith("Training goes on after step 3.") for text in told
    )
    assert notebook.run(f"%%distributed\n{SUM_AND_VARIABLE}").stdout == "[0] 2 3\n[1] 2 4\n"


@pytest.mark.long
def test_nothing_is_said_of_a_hang_that_is_over(notebook: Kernel, tmp_path: Path) -> None:
    """The rank that others waited for is killed and replaced."""
    notebook.run(f"%%distributed\n{faults.in_training(1, step=4, action='sleep')}")
    settings = {**ENDLESS, "runs_dir": str(tmp_path)}
    code = f"""
import nbgpu, os, signal, time
run = nbgpu.current().train('autoencoder', **{settings!r})
while not run.hang: time.sleep(0.1)
before = run.hang
os.kill(nbgpu.current().pids[1], signal.SIGKILL)
while run.hang: time.sleep(0.01)
said, until_s = set(), time.monotonic() + 4
while time.monotonic() < until_s:
    said.add(run.hang)
    time.sleep(0.01)
run.stop()
run.wait().status, before, said"""
    value = notebook.run(code, timeout_s=BOUND_S).value
    assert value is not None
    status, before, said = ast.literal_eval(value)
    assert status == "stopped"
    of_rank_1 = next(part for part in before.split("; ") if part.startswith("rank 1"))
    # On a busy machine ranks wait for one another again, which is then said.
    assert not any(of_rank_1 in text for text in said), (before, said)
    assert notebook.run(f"%%distributed\n{faults.MEND}").status == "ok"


def test_a_last_checkpoint_that_takes_long_is_not_taken_for_a_hang(notebook: Kernel, tmp_path: Path) -> None:
    slow = """
import time
from nbgpu.engine.checkpoints.saving import Saves
finish, num_calls = Saves.finish, []
def slowly(*args):
    num_calls.append(1)
    time.sleep(4 * (rank == 0))
    return finish(*args)
Saves.finish = slowly"""
    notebook.run(f"%%distributed\n{slow}")
    settings = {**ENDLESS, "runs_dir": str(tmp_path)}
    code = f"""
import nbgpu, time
run = nbgpu.current().train('autoencoder', **{settings!r})
while run.status != 'training': time.sleep(0.1)
run.stop()
while run.status != 'stopping': time.sleep(0.01)
while not run.hang: time.sleep(0.01)
run.wait().status, run.checkpoint().exists()"""
    done = notebook.run(code, timeout_s=BOUND_S)
    assert done.value == "('stopped', True)", done.error
    assert notebook.run("%%distributed\nSaves.finish = finish\nlen(num_calls)").stdout == "[0-1] 1\n"


FOLLOW = """
import nbgpu
from nbgpu.ui.run.wording import warning
cluster = nbgpu.current()
run = cluster.train({recipe!r}, **{settings!r})
said, states, tables = set(), set(), set()
while not run.over:
    statuses = run.statuses()
    said.update([run.hang, *map(warning, statuses)])
    states.add((run.status, *(status.state for status in statuses)))
    if {asked!r} in run.status and not tables:
        tables.add(cluster.status())
    time.sleep(0.02)
print(*states, *tables, sep="\\n")
run.wait().status, said"""
"""Follows a run to its end; prints the states that its ranks had, and what `%nbgpu status` says in one of
them."""


def test_a_result_that_takes_long_is_told_and_is_no_hang(notebook: Kernel, tmp_path: Path) -> None:
    computes = """
import time
from nbgpu.recipes.autoencoder.recipe import Autoencoder
good_result = Autoencoder.result
def computes(*args):
    until_s = time.monotonic() + 5
    while time.monotonic() < until_s:
        sum(range(100))
    return {}
Autoencoder.result = computes"""
    notebook.run(f"%%distributed\n{computes}")
    settings = {**ENDLESS, "steps": 2, "runs_dir": str(tmp_path)}
    code = FOLLOW.format(recipe="autoencoder", settings=settings, asked="result")
    done = notebook.run(f"import time{code}", timeout_s=BOUND_S)
    assert done.value == "('finished', {''})", done.error
    assert str(("working out the result", "working out the result", "waiting for rank 0")) in done.stdout
    assert re.search(
        r"^0 .* working out the result, step 2 of 2, computes, line \d+ of an earlier cell$",
        done.stdout,
        re.M,
    )
    assert notebook.run("%%distributed\nAutoencoder.result = good_result").status == "ok"


def test_a_hang_in_the_result_is_told_and_can_be_stopped(notebook: Kernel, tmp_path: Path) -> None:
    sleeps = """
import time
from nbgpu.recipes.autoencoder.recipe import Autoencoder
good_result = Autoencoder.result
def sleeps(*args):
    time.sleep(600)
Autoencoder.result = sleeps"""
    notebook.run(f"%%distributed\n{sleeps}")
    settings = {**ENDLESS, "steps": 2, "runs_dir": str(tmp_path)}
    code = f"""
import nbgpu, time
run = nbgpu.current().train('autoencoder', **{settings!r})
while not run.hang and not run.over: time.sleep(0.02)
said = run.hang
run.stop()
run.wait().status, said"""
    done = notebook.run(code, timeout_s=BOUND_S)
    pattern = (
        r"rank 0 is working out the result, in sleeps, line 5 of an earlier cell, with no progress for \d+ s; "
        r"rank 1 waits in .*, for \d+ s"
    )
    assert done.value is not None, done.error
    status, said = ast.literal_eval(done.value)
    assert status == "stopped"
    assert re.fullmatch(pattern, said), said
    assert notebook.run("%%distributed\nAutoencoder.result = good_result").status == "ok"


def test_packages_that_take_long_to_load_are_told_and_are_no_hang(notebook: Kernel, tmp_path: Path) -> None:
    """Also where they hold the GIL, so that the rank's telemetry is silent meanwhile."""
    path = own_file.create(str(tmp_path / "slow.py"))
    held = "import time\nimport torch.distributed as dist\nif dist.get_rank() == 1:\n    began_s = time.monotonic()\n"
    held += (
        "    sum(range(10**8))\n    while time.monotonic() - began_s < 5:\n        sum(range(3 * 10**7))\n"
    )
    path.write_text(path.read_text().replace("import torch\n", f"{held}import torch\n", 1))
    settings = {"steps": 2, "runs_dir": str(tmp_path)}
    code = FOLLOW.format(recipe=str(path), settings=settings, asked="packages")
    done = notebook.run(f"import time{code}", timeout_s=BOUND_S)
    assert done.value == "('finished', {''})", done.error
    # Rank 0 waits for rank 1 before it enters a state of its own, for only all together know the step.
    assert re.search(r"^\('loading packages', '.*', 'loading packages'\)$", done.stdout, re.M), done.stdout
    assert re.search(r"^1 .* loading packages\b", done.stdout, re.M), done.stdout


def test_a_run_that_pauses_does_not_hang(notebook: Kernel, tmp_path: Path) -> None:
    settings = {**ENDLESS, "runs_dir": str(tmp_path)}
    notebook.run(f"import nbgpu, time\nrun = nbgpu.current().train('autoencoder', **{settings!r})")
    code = "while run.status != 'training': time.sleep(0.1)\nrun.pause()\nwhile run.status != 'paused': time.sleep(0.1)"
    assert notebook.run(code, timeout_s=BOUND_S).status == "ok"
    assert notebook.run("time.sleep(3)\nrun.hang").value == "''"
    done = notebook.run("run.stop(); run.wait().status")
    assert done.value == "'stopped'", done.error


@pytest.mark.long
def test_stop_pressed_again_interrupts_a_step_in_which_nobody_waits(
    cluster2: nbgpu.Cluster, tmp_path: Path
) -> None:
    both = faults.in_training(0, step=4, action="sleep") + faults.in_training(1, step=4, action="sleep")
    cluster2.execute(f"kept = 3 + rank\n{both}")
    run = train(cluster2, tmp_path)
    until(lambda: max(s.step for s in run.statuses()) >= 2, "the run does not train")
    time.sleep(1)
    run.stop()
    time.sleep(2)
    assert not run.over
    run.stop()
    assert run.wait(BOUND_S).status == "stopped"
    assert run.checkpoint().name.endswith("3")
    assert cluster2.execute(SUM_AND_VARIABLE) == {0: "2 3\n", 1: "2 4\n"}


def test_a_run_that_hangs_while_it_loads_is_stopped_and_leaves_nothing(
    cluster2: nbgpu.Cluster, tmp_path: Path
) -> None:
    cluster2.execute(
        "import time\nfrom nbgpu.recipes.autoencoder.recipe import Autoencoder\n"
        "kept, whole = 3 + rank, Autoencoder.build_loaders\n"
        "def slow(*args):\n    time.sleep(600 * rank)\n    return whole(*args)\n"
        "Autoencoder.build_loaders = slow"
    )
    run = train(cluster2, tmp_path)
    until(lambda: "loading" in {s.state for s in run.statuses()}, "the run does not load")
    time.sleep(1)
    run.stop()
    time.sleep(1.5)
    run.stop()
    assert run.wait(BOUND_S).status == "stopped"
    assert {s.state for s in run.statuses()} == {"stopped"}
    with pytest.raises(nbgpu.RunError, match="has no checkpoint"):
        run.checkpoint()
    assert cluster2.execute(f"Autoencoder.build_loaders = whole\n{SUM_AND_VARIABLE}") == {
        0: "2 3\n",
        1: "2 4\n",
    }
    assert train(cluster2, tmp_path, steps=3).wait(BOUND_S).status == "finished"


@pytest.mark.long
def test_a_run_that_is_stopped_while_it_loads_packages_ends_when_they_are_loaded(
    cluster2: nbgpu.Cluster, tmp_path: Path
) -> None:
    """No import of torch heeds an interrupt, and as long as it goes on nothing that costs variables is
    advised."""
    cluster2.execute(
        "import time\nfrom nbgpu.engine.workload import by_name\nkept, whole = 3 + rank, by_name.load\n"
        "def slow(*args):\n"
        "    until_s = time.monotonic() + 8\n"
        "    while time.monotonic() < until_s:\n"
        "        try: time.sleep(0.05)\n"
        "        except KeyboardInterrupt: pass\n"
        "    return whole(*args)\n"
        "by_name.load = slow"
    )
    run = train(cluster2, tmp_path)
    until(lambda: {s.state for s in run.statuses()} == {"loading packages"}, "the run does not load packages")
    run.stop()
    time.sleep(1.2)
    run.stop()
    until(lambda: run.hang or run.over, "nothing is said of the wait")
    assert run.hang.startswith("ranks 0, 1 are loading packages"), run.hang
    with pytest.raises(
        nbgpu.RunError, match=r"was asked to stop, and is loading packages .*run\.wait\(\)"
    ) as told:
        cluster2.execute("1")
    assert "restart" not in str(told.value)
    assert run.wait(BOUND_S).status == "stopped"
    assert cluster2.execute(f"by_name.load = whole\n{SUM_AND_VARIABLE}") == {0: "2 3\n", 1: "2 4\n"}


@pytest.mark.long
def test_with_fsdp_it_takes_a_second_stop_and_the_newest_checkpoint_is_what_is_left(
    cluster2: nbgpu.Cluster, tmp_path: Path
) -> None:
    cluster2.execute(f"kept = 3 + rank\n{faults.in_training(1, step=6, action='sleep')}")
    run = train(cluster2, tmp_path, strategy="fsdp", checkpoint_every=2)
    until(lambda: run.hang, "nothing is said of the hang")
    run.stop()
    time.sleep(2)
    assert not run.over
    run.stop()
    assert run.wait(BOUND_S).status == "stopped"
    assert run.checkpoint().name.endswith("4")
    (told,) = {e.text for e in run.reader.since()[0] if isinstance(e, Event) and e.kind == "heal"}
    assert "all were interrupted for the Stop" in told
    assert told.endswith("goes on from the newest intact checkpoint, after step 4.")
    assert cluster2.execute(SUM_AND_VARIABLE) == {0: "2 3\n", 1: "2 4\n"}


@pytest.mark.long
def test_a_rank_in_c_code_is_told_with_the_way_out(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    cluster2.execute(f"kept = 3 + rank\n{faults.in_training(1, step=4, action='hold_gil_for_ever')}")
    run = train(cluster2, tmp_path)
    until(lambda: run.hang, "nothing is said of the hang")
    assert re.search(r"rank 1 does not answer for \d+ s: it is in C code that holds the GIL", run.hang)
    run.stop()
    with pytest.raises(nbgpu.ClusterError, match="%nbgpu restart --rank 1"):
        run.wait(BOUND_S)
    assert run.status == "failed"
    assert "it is empty" in cluster2.restart(rank=1)
    assert cluster2.execute(f"{faults.MEND}\nprint(kept)", ranks=[0]) == {0: "3\n"}
    assert train(cluster2, tmp_path, steps=3).wait(BOUND_S).status == "finished"
