"""Clusters that outlive their notebook, and notebooks that outlive what their cluster cannot be without."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import faults
import launching
import psutil
import pytest
from kernel import Kernel, kernel
from rows import Measured, row

import nbgpu
from nbgpu.client.cells.cell import DistributedCell
from nbgpu.client.host import ps, registry
from nbgpu.client.host.registry import Entry
from nbgpu.run_folder import folder as runs
from nbgpu.ui.run.stored import StoredRun

BOUND_S = 30
"""Tells an end from a hang; what it bounds takes a second or two."""

TRAIN = """
run = nbgpu.current().train("autoencoder", data="phantoms", patch_size=16, num_phantoms=16, batch_size=2, steps={steps},
    val_every=0, threads=1, runs_dir={folder!r})
"""


@pytest.fixture(autouse=True)
def nothing_is_kept() -> Iterator[None]:
    yield
    ps.stop([], everything=True)


def start(notebook: Kernel, flags: str = "") -> Entry:
    """Starts a cluster of two ranks in a notebook; returns what the registry says of it."""
    notebook.run("import nbgpu\n%load_ext nbgpu")
    done = notebook.run(f"%nbgpu start {launching.flags()} {flags}")
    assert done.status == "ok", done.error
    (entry,) = registry.entries()
    return entry


def train(notebook: Kernel, folder: Path, steps: int = 100_000) -> None:
    """Starts a run and waits for its first steps."""
    done = notebook.run(TRAIN.format(folder=str(folder), steps=steps))
    assert done.status == "ok", done.error
    wait_for_step(notebook, 3)


def wait_for_step(notebook: Kernel, step: int) -> None:
    code = f"""
import time
give_up_s = time.monotonic() + 300
while min(s.step for s in nbgpu.current().run.statuses()) < {step}:
    assert time.monotonic() < give_up_s, nbgpu.current().run.statuses()
    time.sleep(0.05)
"""
    done = notebook.run(code)
    assert done.status == "ok", done.error + notebook.run("%nbgpu status").stdout


def kill(notebook: Kernel) -> None:
    """As a server does that gives up on a kernel: the whole process group of it."""
    pid = notebook.manager.provisioner.pid
    os.killpg(pid, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [], timeout=0.1)


def processes_of(entry: Entry) -> list[psutil.Process]:
    """All that belongs to a cluster, also what its processes have started."""
    leaders = [psutil.Process(leader.pid) for leader in entry.leaders.values()]
    return leaders + [child for leader in leaders for child in leader.children(recursive=True)]


@pytest.mark.long
def test_a_start_beside_a_kept_cluster_of_the_notebook_says_that_it_is_there() -> None:
    with kernel() as first:
        entry = start(first, "--keep")
        kill(first)
    with kernel() as second:
        second.run("import nbgpu\n%load_ext nbgpu")
        done = second.run(f"%nbgpu start {launching.flags()}")
        assert done.status == "ok", done.error
        assert f"cluster {entry.id} of this notebook has gone on since" in done.stderr
        assert (
            f"To connect to it: %nbgpu stop, then %nbgpu attach {entry.id}. To end it: nbgpu stop"
            in done.stderr
        )
        done = second.run(f"%nbgpu stop\n%nbgpu attach {entry.id}")
        assert done.status == "ok", done.error
        assert second.run("%nbgpu stop").status == "ok"


@pytest.mark.long
@row(
    "The kernel is killed; the cluster was started with --keep",
    "The run goes on, and is back after attach",
    None,
)
def test_a_kept_run_goes_on_and_is_rejoined_with_no_gap(tmp_path: Path) -> None:
    with kernel() as first:
        entry = start(first, "--keep")
        first.run("%%distributed\nkept = 7 + rank")
        train(first, tmp_path)
        kill(first)
    (left,) = registry.entries()
    assert (left.id, left.state()) == (entry.id, "kept")
    with kernel() as second:
        second.run("import nbgpu\n%load_ext nbgpu")
        done = second.run("%nbgpu attach")
        assert launching.described() in done.stdout, done.error
        assert "training" in done.stdout
        before = int(second.run("run = nbgpu.current().run\nmin(s.step for s in run.statuses())").value)
        wait_for_step(second, before + 5)
        assert second.run("run.stop(); run.wait(400).status").value == "'stopped'"
        steps = "[sorted(run.metrics().query(f'rank == {r}').dropna(subset='loss')['step']) for r in (0, 1)]"
        code = f"[s == list(range(1, len(s) + 1)) and len(s) > {before} for s in {steps}]"
        assert second.run(code).value == "[True, True]"
        done = second.run("%%distributed\ntotal = torch.ones(1); dist.all_reduce(total)\nint(total), kept")
        assert done.said(0, 1) == [["(2, 7)"], ["(2, 8)"]]
        kill(second)
    with kernel() as third:
        third.run("import nbgpu\ncluster = nbgpu.attach()")
        assert third.run("cluster.run.wait().status").value == "'stopped'"
        assert third.run("cluster.run.checkpoint().name[:5]").value == "'step-'"
        assert third.run("cluster.stop()").status == "ok"
    assert registry.entries() == []
    assert not entry.folder.exists()


@pytest.mark.long
@row(
    "A rank raises in a kept run while no kernel is there",
    "After attach the failure is shown, and the others are freed",
    None,
)
def test_a_run_that_failed_while_nobody_watched_is_told_and_the_ranks_are_freed(tmp_path: Path) -> None:
    with kernel() as first:
        start(first, "--keep")
        # Rank 1 raises once it may, and rank 0 waits for it in the backward pass.
        due = "is_due = "
        fault = faults.in_training(1, step=6, action="raise")
        assert due in fault
        fault = fault.replace(
            due, f"while len(calls) == 6 and not pathlib.Path(may).exists(): time.sleep(0.05)\n        {due}"
        )
        first.run(f"%%distributed\nimport pathlib, time\nmay = {str(tmp_path / 'may')!r}\n{fault}")
        train(first, tmp_path / "runs")
        kill(first)
    (tmp_path / "may").touch()
    (folder,) = (tmp_path / "runs").iterdir()
    wait_until(lambda: runs.outcome(folder, 1) is not None, lambda: StoredRun(folder).statuses())
    with kernel() as second:
        second.run("import nbgpu\ncluster = nbgpu.attach()")
        done = second.run("cluster.run.wait(400)")
        assert done.error.startswith("on rank 1:"), done.error
        assert "ValueError: on purpose" in done.error
        done = second.run(
            f"cluster.execute('''{faults.MEND}\ntotal = torch.ones(1); dist.all_reduce(total); print(int(total))''')"
        )
        assert done.value == "{0: '2\\n', 1: '2\\n'}", done.error


@pytest.mark.long
def test_what_failed_before_the_kernel_went_is_told_with_its_cause(tmp_path: Path) -> None:
    """The first kernel has freed rank 0, which is no failure to the second one either."""
    with kernel() as first:
        start(first, "--keep")
        first.run(f"%%distributed\n{faults.in_training(1, step=6, action='raise')}")
        train(first, tmp_path / "runs")
        (folder,) = (tmp_path / "runs").iterdir()
        both = (0, 1)
        wait_until(
            lambda: all(runs.outcome(folder, rank) is not None for rank in both),
            lambda: StoredRun(folder).statuses(),
        )
        kill(first)
    with kernel() as second:
        second.run("import nbgpu\ncluster = nbgpu.attach()")
        done = second.run("cluster.run.wait(400)")
        assert done.error.startswith("on rank 1:"), done.error
        assert "ValueError: on purpose" in done.error
        assert "on rank 0" not in done.error


@pytest.mark.long
def test_a_run_that_failed_with_a_dead_rank_is_over_after_attach(tmp_path: Path) -> None:
    faulty = f"""%%distributed
kept = 5
from nbgpu.engine.workload import by_name
def load(*_):
    {faults.at(1, "kill")}
    raise ValueError("on purpose")
before, by_name.load = by_name.load, load
"""
    with kernel() as first:
        entry = start(first, "--keep")
        assert first.run(faulty).status == "ok"
        done = first.run(TRAIN.format(folder=str(tmp_path), steps=5) + "run.wait(400)")
        assert "ValueError: on purpose" in done.error
        first.run("%%distributed\n1")  # is told that rank 1 was replaced
        assert first.run("%%distributed\nrank").said(0, 1) == [["0"], ["1"]]
        kill(first)
    assert "failed" in ps.table()
    with kernel() as second:
        second.run("import nbgpu\ncluster = nbgpu.attach()")
        assert second.run("cluster.run.status, cluster.run.over").value == "('failed', True)"
        done = second.run("cluster.run.wait(400)")
        assert "rank 1 was killed by SIGKILL" in done.error
        assert "ValueError: on purpose" in done.error
        assert second.run("cluster.pull('kept', rank=0)").value == "5"
        done = second.run(
            "cluster.execute('total = torch.ones(1); dist.all_reduce(total); print(int(total))')"
        )
        assert done.value == "{0: '2\\n', 1: '2\\n'}", done.error
        # A rank that came after the run is in no run, either.
        assert second.run("cluster.resize(3)").status == "ok"
        kill(second)
    # Nor is a rank that left no word of its end, and does nothing.
    next(tmp_path.glob("*/rank0.outcome.json")).unlink()
    with kernel() as third:
        third.run("import nbgpu\ncluster = nbgpu.attach()")
        assert (
            third.run("cluster.run.over, cluster.execute('print(rank)', ranks=[2])").value
            == "(True, {2: '2\\n'})"
        )
        assert third.run("cluster.stop()").status == "ok"
    assert not entry.folder.exists()


@pytest.mark.long
def test_only_one_notebook_has_a_cluster(tmp_path: Path) -> None:
    with kernel() as first, kernel() as second:
        entry = start(first, "--keep")
        second.run("import nbgpu")
        owner = first.manager.provisioner.pid
        told = second.run("nbgpu.attach()").error
        assert f"one notebook at a time, and {entry.id} (a notebook, process {owner}) has it" in told
        assert (
            "there is no kept cluster of that name (other.ipynb)"
            in second.run("nbgpu.attach('other.ipynb')").error
        )
        # Shut down with all ceremony, the first kernel leaves the cluster alone as well.
        first.run("%%distributed\nkept = 3")
        first.client.shutdown()
        psutil.wait_procs([psutil.Process(owner)], timeout=BOUND_S)
        assert second.run(f"nbgpu.attach({owner}).pull('kept', rank=1)").value == "3"
        assert "a cluster is already running" in second.run("nbgpu.attach()").error


@pytest.mark.long
def test_a_cell_that_was_left_behind_can_be_stopped() -> None:
    with kernel() as first:
        start(first, "--keep")
        first.client.execute("%%distributed\nkept = 5\nif rank == 0: dist.all_reduce(torch.ones(1))")
        time.sleep(1)
        kill(first)
    with kernel() as second:
        second.run("import nbgpu\ncluster = nbgpu.attach()")
        assert "rank(s) 0 are still in an earlier cell" in second.run("cluster.execute('1')").error
        second.run("cluster.stop_cell()")
        done = second.run(
            "cluster.execute('total = torch.ones(1); dist.all_reduce(total); print(int(total), kept)')"
        )
        assert done.value == "{0: '2 5\\n', 1: '2 5\\n'}", done.error
        kill(second)
    (entry,) = registry.entries()
    launching.kill(entry.assignment.pids[1], signal.SIGKILL, rank=1)
    wait_until(lambda: not any(engine.alive() for engine in [*entry.engines.values()][1:]), registry.entries)
    with kernel() as third:
        third.run("import nbgpu\ncluster = nbgpu.attach()")
        assert f"{launching.called(1)} was killed by SIGKILL" in third.run("cluster.execute('1')").error
        assert third.run("cluster.pull('kept', rank=0)").value == "5"


@pytest.mark.long
@row(
    "The kernel is killed while the process group is formed again, and only one rank was asked to come",
    "The next notebook that attaches has the group, and all variables",
    bound_s=None,
)
def test_a_group_whose_forming_was_cut_off_is_formed_by_who_attaches() -> None:
    call_only_one = """
ranks = nbgpu.current().ranks
called = ranks.call
def call(function, *args, with_spec=False):
    called(function, *args, ranks=[0], with_spec=with_spec)
    print("one is called", flush=True)
    time.sleep(600)
ranks.call = call
ranks.regroup()
"""
    with kernel() as first:
        start(first, "--keep")
        first.run("%%distributed\nkept = 5\nimport time")
        first.client.execute(f"import time\n{call_only_one}")
        (entry,) = registry.entries()
        wait_until(lambda: not registry.entries()[0].assignment.is_whole, registry.entries)
        time.sleep(1)
        kill(first)
    with kernel() as second:
        second.run("import nbgpu\ncluster = nbgpu.attach()")
        done = second.run(
            "cluster.execute('total = torch.ones(1); dist.all_reduce(total); print(int(total), kept)')",
            timeout_s=BOUND_S,
        )
        assert done.value == "{0: '2 5\\n', 1: '2 5\\n'}", (
            done.error + second.run("print(cluster.status())").stdout
        )
        kill(second)
    assert entry.alive()


@pytest.mark.long
@row("The {leader} is killed", "The cell or run ends and says so; no process is left", bound_s=2)
@pytest.mark.parametrize(
    "leader",
    [
        "controller",
        pytest.param("fork server", marks=pytest.mark.one_host("no fork server is the notebook's there")),
    ],
)
def test_a_controller_or_parent_that_is_killed_ends_the_cell_and_all_others(
    leader: str, tmp_path: Path, measured: Measured
) -> None:
    with nbgpu.Cluster(**launching.settings()) as cluster:
        (entry,) = registry.entries()
        train_settings = {
            "data": "phantoms",
            "patch_size": 16,
            "num_phantoms": 16,
            "steps": 100_000,
            "val_every": 0,
        }
        if leader == "controller":
            # They wait in the store that the controller serves.
            waits = "dist.distributed_c10d._get_default_store().wait(['never'])"
            cell = DistributedCell(cluster.parts.cells, waits, None, None)
        else:
            run = cluster.train("autoencoder", runs_dir=str(tmp_path), **train_settings)
            wait_until(lambda: run.status == "training", lambda: (run.status, run.failures))
        processes = processes_of(entry)
        measured.fault_now()
        entry.leaders[leader].send(signal.SIGKILL)
        said = rf"the {leader} of the cluster is gone \(killed by SIGKILL\); the ranks cannot be reached: %nbgpu stop"
        with pytest.raises(nbgpu.ClusterError, match=said) as caught:
            cell.show_blocking() if leader == "controller" else run.wait(BOUND_S)
        measured.ended(str(caught.value))
        with pytest.raises(nbgpu.ClusterError, match=said):
            cluster.execute("1")
        with pytest.raises(nbgpu.ClusterError, match=said):
            cluster.pull("rank")
        assert leader == "controller" or run.status == "failed"
        _, alive = psutil.wait_procs(processes, timeout=BOUND_S)
        assert not alive


def wait_until(condition: Callable[[], bool], look: Callable[[], object]) -> None:
    """Waits; what `look` finds is told where it does not come."""
    give_up_s = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < give_up_s, look()
        time.sleep(0.05)
