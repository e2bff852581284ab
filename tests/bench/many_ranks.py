"""What more ranks, and hosts to have them on, cost the notebook: its start, an empty cell, and a run's panel.

The hosts are namespaces of this machine, so all ranks share its cores: the times of more ranks than cores say
how long these take for them, and the CPU time of the notebook's kernel is the figure that carries over.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import hosts
import recorded
from hosts.namespaces import wait_until
from kernel import Kernel, kernel
from recorded import RecordedRun

NUM_HOSTS = {2: 1, 8: 2, 32: 4, 64: 8}
"""By the number of ranks, the number of hosts that they are spread over."""
NUM_ON_NOTEBOOKS_HOST = (2, 8, 32)
NUM_ROUNDS = 5
NUM_CELLS = 40
NUM_FOR_WARMING_UP = 10
CELLS = {"plain": "pass", "distributed": "%%distributed\npass"}
PATIENCE_S = 300.0
PANEL_S = 20.0
PANEL_SETTLES_S = 5.0
STEPS, STEP_S = 100_000, 0.1
SUPPORT = str(Path(recorded.__file__).parent)

START = """
%load_ext nbgpu
import shutil, threading, time
import nbgpu
cluster = nbgpu.Cluster(gpus="none", threads_per_rank=1, start_timeout_s={patience_s}, {settings})

def hand_over():
    while cluster.join_file is None:
        time.sleep(0.01)
    shutil.copy(cluster.join_file, {folder!r} + "/part")
    shutil.move({folder!r} + "/part", {folder!r} + "/join.json")

if cluster.config.launcher == "hosts":
    threading.Thread(target=hand_over).start()
begun_s = time.monotonic()
cluster.start()
print(time.monotonic() - begun_s)
"""

SHOW_PANEL = """
import sys
from pathlib import Path
sys.path.insert(0, {support!r})
from recorded import RecordedRun
from nbgpu.ui.run.panel import show

class Elsewhere(RecordedRun):
    def _train(self):
        self.status = "training"

run = Elsewhere(Path({folder!r}), num_ranks={num_ranks}, steps={steps}, cuda=False)
show(run)
"""


@dataclass
class Measured:
    """What a number of ranks costs."""

    start_s: float
    round_trips_ms: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in CELLS})
    cpu_ms: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in CELLS})
    """CPU time of the notebook's kernel for a cell, by round."""
    panel_share: float = 0.0
    """Of a core, for the panel of a run with ten steps a second."""

    @property
    def for_all_ranks_ms(self) -> float:
        """CPU time of the kernel for a distributed cell above a plain one's."""
        return statistics.median(self.cpu_ms["distributed"]) - statistics.median(self.cpu_ms["plain"])


def many_ranks() -> str:
    """The start, an empty cell and a run's panel with 2 to 64 ranks on up to 8 hosts."""
    if why := hosts.why_no_hosts():
        raise SystemExit(why)
    rows = []
    for num_ranks in NUM_ON_NOTEBOOKS_HOST:
        with kernel() as notebook, tempfile.TemporaryDirectory(prefix="nbgpu-bench-") as path:
            begin(notebook, Path(path), f"ranks={num_ranks}")
            rows.append(_row("the notebook's", num_ranks, measure(notebook, Path(path), num_ranks)))
    for num_ranks, num_hosts in NUM_HOSTS.items():
        with notebook_and_hosts(num_hosts, num_ranks // num_hosts) as (notebook, folder):
            rows.append(_row(str(num_hosts), num_ranks, measure(notebook, folder, num_ranks)))
    return "\n".join([*TITLES, *rows]) + "\n\n"


TITLES = (
    "| hosts | ranks | start, s | empty cell, ms | plain cell, ms | kernel's CPU for the cell above a plain one's, ms "
    "| for each rank, ms | panel, share of a core |",
    "|---|---|---|---|---|---|---|---|",
)


def _row(where: str, num_ranks: int, measured: Measured) -> str:
    trips = {name: statistics.median(taken) for name, taken in measured.round_trips_ms.items()}
    above_ms = measured.for_all_ranks_ms
    return (
        f"| {where} | {num_ranks} | {measured.start_s:.1f} | {trips['distributed']:.1f} | {trips['plain']:.1f} "
        f"| {above_ms:.2f} | {above_ms / num_ranks:.3f} | {100 * measured.panel_share:.1f} % |"
    )


@contextmanager
def notebook_and_hosts(num_hosts: int, ranks_each: int) -> Iterator[tuple[Kernel, Path]]:
    """A notebook on a host of its own, and a cluster with ranks on others, which have dialled in."""
    names = [f"n{number}" for number in range(num_hosts)]
    with tempfile.TemporaryDirectory(prefix="nbgpu-bench-", dir=Path.cwd()) as path:
        folder = Path(path)
        with hosts.make_hosts(["desk", *names], folder / "hosts", shared=[folder]) as made:
            # The kernel would look for this process by its number, which is another one's on its host.
            python = ["env", "JPY_PARENT_PID=0", sys.executable, "-m", "ipykernel_launcher"]
            command = made["desk"].entering([*python, "-f", "{connection_file}"])
            # Sockets in the file system, because this process has another network.
            reached = {
                "transport": "ipc",
                "ip": f"{folder}/kernel",
                "connection_file": f"{folder}/kernel.json",
            }
            with kernel(command, **reached) as notebook:
                dialled: list[subprocess.Popen[bytes]] = []
                with (folder / "hosts.log").open("w") as log:
                    join_file = folder / "join.json"

                    def dial_in(log: IO[str] = log) -> None:
                        wait_until(join_file.exists, PATIENCE_S, lambda: "there is no join file")
                        command = [sys.executable, "-m", "nbgpu.cli", "host", "--join", str(join_file)]
                        dialled.extend(made[name].popen(command, stdout=log, stderr=log) for name in names)

                    settings = (
                        f"launcher='hosts', nodes={num_hosts}, gpus_per_node={ranks_each}, interface='eth0'"
                    )
                    begin(notebook, folder, settings, dial_in)
                try:
                    yield notebook, folder
                finally:
                    for process in dialled:
                        process.kill()
                        process.wait()


def begin(
    notebook: Kernel, folder: Path, settings: str, meanwhile: Callable[[], None] = lambda: None
) -> None:
    """Start the cluster in the notebook; `meanwhile` is called on a thread."""
    code = START.format(patience_s=PATIENCE_S, settings=settings, folder=str(folder))
    with ThreadPoolExecutor(1) as pool:
        dialling = pool.submit(meanwhile)
        said = must(notebook, code)
        dialling.result()
    must(notebook, f"start_s = {float(said.split()[-1])}")


def measure(notebook: Kernel, folder: Path, num_ranks: int) -> Measured:
    """Measure a cluster that has started, and stop it."""
    measured = Measured(float(must(notebook, "print(start_s)")))
    for code in [*CELLS.values()] * NUM_FOR_WARMING_UP:
        must(notebook, code)
    for _ in range(NUM_ROUNDS):
        for name, code in CELLS.items():
            before_s = cpu_s(notebook)
            for _ in range(NUM_CELLS):
                measured.round_trips_ms[name].append(1000 * notebook.run(code, timeout_s=PATIENCE_S).took_s)
            # The cell that asks for the time is one more plain cell.
            measured.cpu_ms[name].append(1000 * (cpu_s(notebook) - before_s) / NUM_CELLS)
    measured.panel_share = panel_share(notebook, folder / "run", num_ranks)
    must(notebook, "cluster.stop()")
    return measured


def panel_share(notebook: Kernel, folder: Path, num_ranks: int) -> float:
    """The share of a core that the kernel takes for a run's panel, which is sent to a page that is not there.

    The run is made up: 64 ranks that train take 24 GB of memory and more cores. This process writes
    what they would, and the kernel reads it in the run's folder.
    """
    folder.mkdir()
    run = RecordedRun(folder, num_ranks, STEPS, STEP_S, cuda=False)
    asked = {"support": SUPPORT, "folder": str(folder), "num_ranks": num_ranks, "steps": STEPS}
    must(notebook, SHOW_PANEL.format(**asked))
    time.sleep(PANEL_SETTLES_S)
    before_s, begun_s = cpu_s(notebook), time.monotonic()
    time.sleep(PANEL_S)
    share = (cpu_s(notebook) - before_s) / (time.monotonic() - begun_s)
    run.stop()
    run.wait()
    return share


def cpu_s(notebook: Kernel) -> float:
    """The CPU time that the notebook's kernel has used."""
    return float(must(notebook, "import time; print(time.process_time())"))


def must(notebook: Kernel, code: str) -> str:
    """Run a cell that must not fail; return what it prints."""
    done = notebook.run(code, timeout_s=PATIENCE_S)
    if done.status != "ok":
        raise RuntimeError(f"{code}\n{done.error}{done.stderr}")
    return done.stdout
