"""Random faults at random moments, in cells and in runs, for SOAK_MINUTES: never hung, never a wrong sum,
nothing left.

Not collected with the tests; `make soak` names it. SOAK_SEED repeats a soak, SOAK_RUNS is the share of faults
in runs.
"""

from __future__ import annotations

import ast
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import faults
import psutil
import pytest
from kernel import Done, Kernel, kernel

import nbgpu

NUM_RANKS = 3
HUNG_S = 90
"""Whoever has not got their cell back by then never will; torch's own timeout is half an hour."""

MAX_NEW_FDS = 12
"""A rank may hold on to a few until the collector runs; a fault that leaked one each would soon pass this."""

CAN_REPLACE = hasattr(nbgpu.Cluster, "restart")

SET_UP = """
%%distributed
import time
expected = [rank * 1000 + i for i in range(100)]
kept = torch.tensor(expected)
torch.manual_seed(0)
model = torch.nn.Linear(64, 64)
ddp = torch.nn.parallel.DistributedDataParallel(model)
"""

NEVER_COMPLETES = "a collective that never completes"
WORK = {
    "all_reduce": "dist.all_reduce(torch.ones(10_000))",
    "a large all_reduce": "dist.all_reduce(torch.ones(2_000_000))",
    "broadcast": "dist.broadcast(torch.ones(10_000), src=step % world_size)",
    "barrier": "dist.barrier()",
    "all_gather": "dist.all_gather([torch.ones(100) for _ in range(world_size)], torch.ones(100))",
    "DDP": "ddp(torch.randn(8, 64)).sum().backward()",
    "an own group": "dist.all_reduce(torch.ones(1000), group=own)",
    "plain Python": "sum(range(1000))",
    NEVER_COMPLETES: "dist.barrier() if rank else time.sleep(0.01)",
}

CHECK = """
%%distributed
import os
total = torch.ones(1)
dist.all_reduce(total)
ddp.zero_grad()
ddp(torch.full((1, 64), float(rank))).sum().backward()
gradient = float(model.weight.grad[0, 0])
wanted = sum(range(world_size)) / world_size
intact = kept.tolist() == expected and int(expected[0]) == rank * 1000 and abs(gradient - wanted) < 1e-6
(int(total), intact, len(os.listdir('/proc/self/fd')))
"""

RUN = (
    "run = nbgpu.current().train('autoencoder', data='phantoms', patch_size=16, num_phantoms=16, batch_size=1,"
    " steps=100_000, val_every=0, runs_dir={folder!r})"
)


@dataclass
class Soak:
    """One notebook that goes from fault to fault."""

    notebook: Kernel
    chance: random.Random
    folder: Path
    took_s: dict[str, list[float]] = field(default_factory=dict)
    first_fds: dict[int, int] = field(default_factory=dict)

    def set_up(self) -> None:
        """Gives every rank what must be there after every fault; a rank that was replaced has nothing."""
        done = self.run(SET_UP.strip())
        assert done.status == "ok", done.error

    def run(self, code: str, meanwhile: Callable[[], None] | None = None) -> Done:
        return self.notebook.run(code, meanwhile=meanwhile, timeout_s=HUNG_S)

    def fault_in_cell(self) -> str:
        """A workload that goes on for ever, until a rank fails or the person presses Stop."""
        name, work = self.chance.choice(list(WORK.items()))
        kinds = [
            "raise",
            "stop",
            "two raise",
            "out of memory",
            *(["kill", "segfault"] if CAN_REPLACE else []),
        ]
        # Who waits for ever comes to no fault of its own: there is only Stop.
        kind = self.chance.choice(kinds) if name != NEVER_COMPLETES else "stop"
        bad = self.chance.sample(range(NUM_RANKS), 2)
        after_s = self.chance.uniform(0, 1)
        action: faults.Action = "raise"
        if kind in ("kill", "segfault"):
            action = kind  # type: ignore[assignment]
        lines = [
            "print('working', flush=True)",
            "own = dist.new_group(list(range(world_size)))",
            "begun_s = time.monotonic()",
            "for step in range(10**9):",
            f"    due = time.monotonic() - begun_s > {after_s}",
        ]
        if kind == "out of memory":
            lines.append(f"    if due and rank == {bad[0]}: torch.empty(1 << 50)")
        elif kind != "stop":
            lines += [
                f"    {faults.at(rank, action).replace('if rank', 'if due and rank')}"
                for rank in bad[: 2 if kind == "two raise" else 1]
            ]
        lines.append(f"    {work}")
        interrupt = self._stop_in(after_s) if kind == "stop" else None
        done = self.run("\n".join(["%%distributed", *lines]), interrupt)
        assert done.status == "error", f"{kind} in {name}: {done}"
        self._after(done, kind, bad)
        return f"{kind} in a cell"

    def fault_in_run(self) -> str:
        """A run that is stopped, or in which a rank raises."""
        kind = self.chance.choice(["raise", "stop", *(["kill"] if CAN_REPLACE else [])])
        bad = self.chance.randrange(NUM_RANKS)
        step = self.chance.randint(1, 30)
        if kind != "stop":
            armed = self.run(f"%%distributed\n{faults.in_training(bad, step, kind)}")  # type: ignore[arg-type]
            assert armed.status == "ok", armed.error
        started = self.run("import nbgpu\n" + RUN.format(folder=str(self.folder)))
        assert started.status == "ok", started.error
        if kind == "stop":
            time.sleep(self.chance.uniform(0, 3))
            done = self.run("run.stop(); run.wait(400).status")
            assert done.value == "'stopped'", done
        elif kind == "raise":
            done = self.run("run.wait(400)")
            assert f"on rank {bad}" in done.error, done
        else:
            # It heals, goes on past the step of the fault, and is stopped then.
            done = self.run(
                f"import time\nwhile run.statuses()[0].step < {step + 10} and not run.over: time.sleep(0.05)\n"
                "run.stop(); run.wait(400).status"
            )
            assert done.value == "'stopped'", done
        mended = self.run(f"%%distributed\n{faults.MEND}")
        assert mended.status == "ok", mended.error
        if kind == "kill":
            self.set_up()
        return f"{kind} in a run"

    def _stop_in(self, after_s: float) -> Callable[[], None]:
        # What the kernel's manager does for an interrupt; it would make an event loop for the timer's thread.
        pid = self.notebook.manager.provisioner.process.pid
        return lambda: threading.Timer(after_s, os.kill, (pid, signal.SIGINT)).start()

    def _after(self, done: Done, kind: str, bad: list[int]) -> None:
        if kind in ("kill", "segfault"):
            name = {"kill": "SIGKILL", "segfault": "SIGSEGV"}[kind]
            assert f"rank {bad[0]} was killed by {name}" in done.error, done
            self.set_up()
        elif kind != "stop":
            assert any(f"on rank {rank}" in done.error or "on ranks" in done.error for rank in bad), done

    def check(self, after: str) -> None:
        """The sum is right on every rank, what the ranks had they have, and no file descriptor was left
        open."""
        done = self.run(CHECK.strip())
        assert done.status == "ok", f"after {after}: {done}"
        said = [ast.literal_eval(line) for (line,) in done.said(*range(NUM_RANKS))]
        assert [(total, intact) for total, intact, _ in said] == [(NUM_RANKS, True)] * NUM_RANKS, (
            after,
            done,
        )
        for rank, (_, _, num_fds) in enumerate(said):
            first = self.first_fds.setdefault(rank, num_fds)
            assert num_fds <= first + MAX_NEW_FDS, (
                f"rank {rank} has {num_fds} descriptors and had {first}: {after}"
            )


def cluster_folders() -> list[Path]:
    return [
        path for path in Path(os.environ["TMPDIR"]).glob("nbgpu-*") if not path.name.startswith("nbgpu-test-")
    ]


@pytest.mark.timeout(0)
def test_random_faults(tmp_path: Path) -> None:
    minutes = float(os.environ.get("SOAK_MINUTES", "10"))
    share_of_runs = float(os.environ.get("SOAK_RUNS", "0.15"))
    seed = int(os.environ.get("SOAK_SEED", str(time.time_ns() % 10**6)))
    counts: Counter[str] = Counter()
    print(f"\nSOAK_SEED={seed}", flush=True)
    with kernel() as notebook:
        assert notebook.run(f"%load_ext nbgpu\n%nbgpu start --gpus none --ranks {NUM_RANKS}").status == "ok"
        soak = Soak(notebook, random.Random(seed), tmp_path)
        soak.set_up()
        num_processes = 0
        give_up_s = time.monotonic() + 60 * minutes
        while time.monotonic() < give_up_s:
            bring_about = soak.fault_in_run if soak.chance.random() < share_of_runs else soak.fault_in_cell
            happened = bring_about()
            counts[happened] += 1
            soak.check(happened)
            if sum(counts.values()) == 10:
                num_processes = len(psutil.Process().children(recursive=True))
        assert len(psutil.Process().children(recursive=True)) == num_processes
        (folder,) = cluster_folders()
        generations = list(folder.glob("group-generation-*"))
        assert len(generations) <= 5, f"every fault left a file behind: {len(generations)}"
        assert notebook.run("%nbgpu stop").status == "ok"
        assert cluster_folders() == []
    print(
        f"{sum(counts.values())} faults in {minutes:g} min: "
        + ", ".join(f"{k} {n}" for k, n in sorted(counts.items()))
    )
