"""Cells that leave behind whatever a person's cells may, at random, with deaths and Stops in between.

No step may end without a right sum in the second cell after it, a rank is replaced only where the step ended
its process, and the ranks that lived have their variables. Nothing is left over of a cluster that was
stopped, also where a Stop came while it stopped or started, and nothing of one whose kernel is killed.

Not collected with the tests; `make soak` names it. ADVERSARY_MINUTES is how long each seed of ADVERSARY_SEEDS
goes on.
"""

from __future__ import annotations

import ast
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty

import faults
import psutil
import pytest
from grouped import IMPORTS, THINGS
from kernel import Done, Kernel, kernel
from leaks import MARKER, session_marker
from soak import HUNG_S, cluster_folders

NUM_RANKS = 3
SEEDS = [int(seed) for seed in os.environ.get("ADVERSARY_SEEDS", "1,2,3").split(",")]
MINUTES = float(os.environ.get("ADVERSARY_MINUTES", "20"))
SETTLED_S = 15
"""How long processes may take to end that a step has ended."""
MAX_NEW_IN_KERNEL = 12
"""Descriptors and threads that the kernel may have more at the end; a step that leaked one each would soon
pass this."""

START = f"%nbgpu start --gpus none --ranks {NUM_RANKS}"
KEEP = "kept = torch.arange(100, dtype=torch.float32, device='cpu') + 1000 * rank"
SUM = """%%distributed
total = torch.ones(1, dtype=torch.float32, device='cpu')
dist.all_reduce(total)
(int(total), 'kept' in globals() and kept.tolist() == [1000.0 * rank + i for i in range(100)])"""

ON_ALL_OR_ONE = {
    "the default dtype is float64": "torch.set_default_dtype(torch.float64)",
    "the default dtype is float16": "torch.set_default_dtype(torch.float16)",
    "the default dtype is float32": "torch.set_default_dtype(torch.float32)",
    "the default device is meta": "torch.set_default_device('meta')",
    "the default device is the CPU": "torch.set_default_device('cpu')",
    "gradients are off": "torch.set_grad_enabled(False)",
    "gradients are on": "torch.set_grad_enabled(True)",
    "an open inference_mode": "opened = torch.inference_mode(); opened.__enter__()",
    "deterministic algorithms": "torch.use_deterministic_algorithms(True)",
    "another number of threads": "torch.set_num_threads(2)",
    "another state of the default generator": "torch.manual_seed(7)",
    "the group is destroyed": "dist.destroy_process_group()",
    "a group of one's own": "own = dist.new_group(list(range(world_size)))",
    "faulthandler takes SIGUSR1": "import faulthandler, signal; faulthandler.register(signal.SIGUSR1)",
    "SIGUSR1 is ignored": "import signal; signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
    "SIGINT is ignored": "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
    "SIGTERM is ignored": "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "the wakeup descriptor is taken": "import signal; signal.set_wakeup_fd(-1)",
    "a second event loop": (
        "import asyncio, signal; loop = asyncio.new_event_loop(); loop.add_signal_handler(signal.SIGUSR2, print)"
    ),
    "a pool of forked processes": (
        # Its end asks the workers with SIGTERM, which they would ignore as their rank was told to.
        "import multiprocessing as mp, signal\nsignal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
        "with mp.get_context('fork').Pool(2) as pool: assert pool.map(abs, [-1]) == [1]"
    ),
    "a process in a session of its own": (
        "import subprocess; child = subprocess.Popen(['sleep', '3571'], start_new_session=True)"
    ),
}
"""What a cell may leave behind on all ranks, or on one of them."""

WAITS = {
    "barrier": "dist.barrier()",
    "all_reduce": "dist.all_reduce(torch.ones(1000, dtype=torch.float32, device='cpu'))",
    "broadcast": "dist.broadcast(torch.ones(1000, dtype=torch.float32, device='cpu'), src=0)",
    "plain Python": "sum(range(1000))",
}

WITH_TORCHS_SETTINGS = """
if torch.is_inference_mode_enabled(): raise RuntimeError('an inference mode is open')
torch.set_default_dtype(torch.float32); torch.set_default_device('cpu'); torch.set_grad_enabled(True)"""
"""As the things on a group need them, whatever other steps have left behind."""

WHERE = re.compile(rf" on all ranks$| on rank \d+$| in ({'|'.join(WAITS)})$| ?rank \d+")
"""What of a step's name says where it happened."""


@dataclass
class Adversary:
    """One notebook, and what was done to it so far."""

    notebook: Kernel
    chance: random.Random
    stop: threading.Timer | None = None

    def run(self, code: str, meanwhile: Callable[[], None] | None = None) -> Done:
        done = self.notebook.run(code, meanwhile=meanwhile, timeout_s=HUNG_S)
        self.withdraw_stop()
        return done

    def pids(self) -> dict[int, int]:
        done = self.run("import nbgpu\nnbgpu.current().pids")
        assert done.status == "ok", done.error
        pids: dict[int, int] = ast.literal_eval(done.value)
        return pids

    def step(self) -> str:
        """Does one thing or two, and looks whether all that must hold does; returns what was done last."""
        before = self.pids()
        did, may_end = [], set[int]()
        for act in self.chance.choices(
            [
                self.leave_behind,
                self.hang_on_a_group,
                self.blow,
                self.stand_still,
                self.cut_short,
                self.cut_twice,
                self.begin_again,
            ],
            [6, 3, 5, 1, 1, 1, 1],
            k=self.chance.choice([1, 2, 2]),
        ):
            name, ended = act()
            did.append(name)
            print(f"    {name}", flush=True)
            may_end |= ended
        self.check(" and then ".join(did), before, may_end)
        return did[-1]

    def leave_behind(self) -> tuple[str, set[int]]:
        name, line = self.chance.choice(list(ON_ALL_OR_ONE.items()))
        # A group that one rank makes alone waits for the others until Stop, as it must.
        where = None if "new_group" in line else self.chance.choice([None, *range(NUM_RANKS)])
        lines = "\n".join(f"    {part}" for part in line.split("\n"))
        self.run(f"%%distributed\nif {True if where is None else f'rank == {where}'}:\n{lines}")
        return f"{name} on {'all ranks' if where is None else f'rank {where}'}", set()

    def hang_on_a_group(self) -> tuple[str, set[int]]:
        """Two things on a group, and something that ends a cell; where all ranks live, both work on."""
        pair = self.chance.sample(sorted(THINGS), 2)
        makes = "\n".join(THINGS[name].make for name in pair)
        made = self.run(f"%%distributed\n{WITH_TORCHS_SETTINGS}\n{IMPORTS}\n{makes}")
        if "an inference mode is open" in made.error:
            return "nothing, in an inference mode", set()
        assert made.status == "ok", f"{pair}: {made.error}"
        name, ended = self.chance.choices([self.blow, self.resize], [4, 1])[0]()
        checks = ", ".join(THINGS[thing].check for thing in pair)
        if name.startswith("another number"):
            # What cannot go on raises on all ranks; nothing waits for good.
            self.run(f"%%distributed\n{WITH_TORCHS_SETTINGS}\n{checks}")
        elif not ended:
            # A Stop that was late hits this wait.
            self.run("import time\ntime.sleep(1.0)")
            done = self.run(f"%%distributed\n{WITH_TORCHS_SETTINGS}\n{checks}")
            assert done.said(*range(NUM_RANKS)) == [["(True, True)"]] * NUM_RANKS, f"{pair}, {name}: {done}"
        return f"{pair[0]} and {pair[1]}, {name}", ended

    def resize(self) -> tuple[str, set[int]]:
        """Another number of ranks for two cells, and then that of before."""
        number = self.chance.choice([NUM_RANKS - 1, NUM_RANKS + 1])
        for now in (number, NUM_RANKS):
            done = self.run(f"%nbgpu resize {now}")
            assert done.status == "ok", f"{now} ranks: {done}"
            done = self.run(SUM)
            said = [ast.literal_eval(lines[-1]) for lines in done.said(*range(now))]
            assert [total for total, _ in said] == [now] * now, f"{now} ranks: {done}"
        return f"another number of ranks, {number}", set(range(number, NUM_RANKS))

    def blow(self) -> tuple[str, set[int]]:
        """Something ends a cell: a rank that raises or dies, all that raise, or Stop."""
        kind = self.chance.choice(["raise", "all raise", "stop", "kill", "terminate", "close all"])
        name, wait = self.chance.choice(list(WAITS.items()))
        bad, after_s = self.chance.randrange(NUM_RANKS), self.chance.uniform(0, 0.6)
        ends = {
            "raise": faults.at(bad, "raise"),
            "all raise": "raise ValueError('on purpose')",
            "stop": "pass",
            "kill": faults.at(bad, "kill"),
            "terminate": f"if rank == {bad}: __import__('os').kill(__import__('os').getpid(), 15)",
            "close all": f"if rank == {bad}: __import__('os').closerange(3, 40)",
        }
        meanwhile = None
        if kind in ("stop", "all raise"):
            # Where all raise, Stop comes while the ranks are being brought back.
            meanwhile = self.stop_in(after_s + (0.3 if kind == "all raise" else 0))
        self.run(
            "%%distributed\nimport time\nprint('working', flush=True)\nbegun_s = time.monotonic()\n"
            f"for _ in range(10**9):\n    if time.monotonic() - begun_s > {after_s}:\n        {ends[kind]}\n"
            # A rank that ignores SIGTERM goes on.
            f"    if time.monotonic() - begun_s > {after_s} + 5: raise TimeoutError('nothing has happened')\n    {wait}",
            meanwhile,
        )
        return f"{kind} in {name}", {bad} if kind in ("kill", "terminate", "close all") else set()

    def stand_still(self) -> tuple[str, set[int]]:
        """A rank is stopped for longer than ipyparallel waits for a heartbeat, with a cell under way or
        none."""
        rank = self.chance.randrange(NUM_RANKS)
        pid = self.pids()[rank]
        os.kill(pid, signal.SIGSTOP)
        going_on = threading.Timer(self.chance.uniform(3.5, 6), os.kill, (pid, signal.SIGCONT))
        going_on.start()
        if self.chance.random() < 0.5:
            self.run(SUM)
        going_on.join()
        return f"rank {rank} stands still", set()

    def cut_short(self) -> tuple[str, set[int]]:
        """Stop while a rank is given up for a new process."""
        rank = self.chance.randrange(NUM_RANKS)
        stop = self.stop_in(self.chance.uniform(0, 2))
        self.run(f"print('replacing')\nget_ipython().run_line_magic('nbgpu', 'restart --rank {rank}')", stop)
        return f"Stop while rank {rank} is replaced", {rank}

    def cut_twice(self) -> tuple[str, set[int]]:
        self.run("import nbgpu\nranks = nbgpu.current().ranks\nranks.sever(); ranks.sever()")
        return "two cuts at once", set()

    def begin_again(self) -> tuple[str, set[int]]:
        """Stop while the cluster stops, and while another one starts; the one after that is left alone."""
        self.run("print('stopping')\n%nbgpu stop", self.stop_in(self.chance.uniform(0, 1)))
        self.run(f"print('starting')\n{START}", self.stop_in(self.chance.uniform(0, 2)))
        self.run("%nbgpu stop")
        require_nothing_left(self.notebook.manager.provisioner.process.pid)
        assert (started := self.run(START)).status == "ok", started.error
        assert self.run(f"%%distributed\n{KEEP}").status == "ok"
        return "Stop while the cluster stops and starts", set(range(NUM_RANKS))

    def stop_in(self, after_s: float) -> Callable[[], None]:
        """Stop so long after the cell's first words, if it still runs then."""
        # What the kernel's manager does for an interrupt; it would make an event loop for the timer's thread.
        pid = self.notebook.manager.provisioner.process.pid
        self.stop = threading.Timer(after_s, os.kill, (pid, signal.SIGINT))
        return self.stop.start

    def withdraw_stop(self) -> None:
        """One that comes when the cell has just ended hits ipykernel itself, which may drop the next request
        for it."""
        if self.stop is not None:
            self.stop.cancel()
            self.stop = None
            with suppress(Empty, AssertionError):
                self.notebook.run("pass", timeout_s=10)

    def check(self, after: str, before: dict[int, int], may_end: set[int]) -> None:
        # A Stop that was late hits this wait, and no cell that must hold.
        self.run("import time\ntime.sleep(1.0)")
        first = self.run(SUM)
        done = self.run(SUM)
        assert done.status == "ok", f"after {after}: first {first}, then {done}"
        said = [ast.literal_eval(lines[-1]) for lines in done.said(*range(NUM_RANKS))]
        assert [total for total, _ in said] == [NUM_RANKS] * NUM_RANKS, f"after {after}: {done}"
        now = self.pids()
        replaced = {rank for rank in before if now[rank] != before[rank]}
        assert replaced <= may_end, f"after {after}: {replaced} were replaced; first {first}"
        lost = {rank for rank, (_, is_kept) in enumerate(said) if not is_kept}
        assert lost <= replaced, f"after {after}: {lost} lost their variables, and {replaced} were replaced"
        if replaced:
            assert self.run(f"%%distributed\n{KEEP}").status == "ok", after

    def engines(self) -> list[int]:
        """The processes that the fork server has forked."""
        parent = psutil.Process(self.pids()[0]).parent()
        assert parent is not None
        return [child.pid for child in parent.children() if child.status() != psutil.STATUS_ZOMBIE]

    def require_settled(self, after: str) -> None:
        """No engine is there that belongs to nobody."""
        give_up_s = time.monotonic() + SETTLED_S
        while sorted(self.engines()) != sorted(self.pids().values()):
            assert time.monotonic() < give_up_s, f"after {after}: {self.engines()} and not {self.pids()}"
            time.sleep(0.2)


@contextmanager
def adversary(seed: int) -> Iterator[Adversary]:
    with kernel() as notebook:
        started = notebook.run(f"%load_ext nbgpu\n{START}")
        assert started.status == "ok", started.error
        assert notebook.run(f"%%distributed\n{KEEP}").status == "ok"
        yield Adversary(notebook, random.Random(seed))


def session_processes() -> list[str]:
    """The command lines of all processes that this session has started and that live, however they were
    orphaned."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_own = process.environ().get(MARKER, "").startswith(session_marker())
            if is_own and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline())}")
    return found


def require_nothing_left(kernel_pid: int | None) -> None:
    give_up_s = time.monotonic() + SETTLED_S
    while True:
        left = [line for line in session_processes() if not line.startswith(f"{kernel_pid} ")]
        folders = cluster_folders()
        if not left and not folders:
            return
        assert time.monotonic() < give_up_s, f"left over: {left}, {folders}"
        time.sleep(0.2)


@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_that_cells_leave_behind_breaks_the_cluster(seed: int) -> None:
    counts: Counter[str] = Counter()
    with adversary(seed) as person:
        kernel_pid = person.notebook.manager.provisioner.process.pid
        in_kernel = psutil.Process(kernel_pid)
        give_up_s = time.monotonic() + 60 * MINUTES
        first = (in_kernel.num_fds(), in_kernel.num_threads())
        while time.monotonic() < give_up_s:
            happened = person.step()
            counts[re.sub(WHERE, "", happened)] += 1
            print(f"[{sum(counts.values())}] {happened}", flush=True)
            if sum(counts.values()) % 10 == 0:
                person.require_settled(happened)
        now = (in_kernel.num_fds(), in_kernel.num_threads())
        assert all(n <= f + MAX_NEW_IN_KERNEL for n, f in zip(now, first, strict=True)), (first, now)
        person.run(
            "%%distributed\nimport subprocess; subprocess.Popen(['sleep', '3571'], start_new_session=True)"
        )
        assert person.run("%nbgpu stop").status == "ok"
        require_nothing_left(kernel_pid)
        assert person.run(START).status == "ok"
        person.run(
            "%%distributed\nimport subprocess; subprocess.Popen(['sleep', '3571'], start_new_session=True)"
        )
        os.kill(kernel_pid, signal.SIGKILL)
        require_nothing_left(kernel_pid)
    print(f"seed {seed}: {sum(counts.values())} steps in {MINUTES:g} min: {dict(counts.most_common())}")
