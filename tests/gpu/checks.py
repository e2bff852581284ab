"""How a check that needs a GPU is declared, and what it is given.

A check is a function of a `Place`. It notes figures as it goes, raises where something does not hold, and
raises `Skipped` where the machine lacks something. The same function runs on CPU ranks in a rehearsal, with
small sizes.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

REPOSITORY = Path(__file__).resolve().parents[2]
MODULES = (
    "speed",
    "first_use",
    "memory",
    "nccl",
    "kernels",
    "graphs",
    "recipes",
    "runs",
    "cells",
    "machine",
    "two_on_one",
    "marked",
)
"""The modules with checks. A slice runs those of its own that were never shown, and then those whose code has
changed, in this order: what is worth most comes first."""
SHOWN = Path(__file__).with_name("shown.json")
"""What was shown, on which GPU, when and of which code; `make gpu-pages` adds to it."""

CUT_OFF_S = 25.0
"""A check that takes longer is ended. What takes longer is split into two checks."""
SLICE_S = 200.0
"""How long a slice may take, by the budgets of its checks and on the clock."""
REHEARSAL_PATIENCE = 5
"""How many times as long a rehearsal may take, which has no seconds to lose."""

Page = Literal["benchmarks", "faults", "devices", "training"]
_Full = TypeVar("_Full")


class Skipped(Exception):
    """Raised by a check on a machine that cannot do what it wants; the message says what is missing."""


@dataclass(frozen=True)
class Check:
    """A check, and what the runner needs to know of it."""

    name: str
    claim: str
    """What holds if the check passes, a part of a sentence."""
    function: Callable[[Place], None]
    slice: int
    page: Page
    """The page of docs/ that shows the outcome."""
    shows: tuple[str, ...]
    """The files and folders of nbgpu whose code it shows."""
    budget_s: float
    """What it is expected to take on one H100 with 16 cores, its start included."""
    alone: bool
    """Whether nothing else may run beside it, because it measures time or the device's memory."""
    seldom: bool
    """Whether a quick rehearsal leaves it out, because it takes long on CPU ranks."""

    @property
    def code(self) -> str:
        """A digest of the code that it shows, which needs no git: a borrowed machine has a copy."""
        digest = hashlib.sha256()
        for root in self.shows:
            path = (REPOSITORY / "nbgpu" / root).resolve()
            assert path.exists(), f"{self.name}: there is no nbgpu/{root}"
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                digest.update(f"{file.relative_to(REPOSITORY)}\n".encode() + file.read_bytes())
        return digest.hexdigest()[:16]

    def is_current(self, record: Mapping[str, Any]) -> bool:
        """Whether a record shows this code. A check that failed has shown nothing."""
        return record.get("status") in ("passed", "skipped") and record.get("code") == self.code


CHECKS: dict[str, Check] = {}


def check(
    claim: str,
    *,
    slice: int,
    page: Page,
    shows: Sequence[str],
    budget_s: float,
    alone: bool = False,
    seldom: bool = True,
    name: str = "",
) -> Callable[[Callable[[Place], None]], Callable[[Place], None]]:
    """Declare a check. Its name is that of its function, unless another is given."""

    def declared(function: Callable[[Place], None]) -> Callable[[Place], None]:
        called = name or function.__name__
        assert called not in CHECKS, f"two checks are called {called}"
        assert budget_s < CUT_OFF_S, f"{called} would be cut off: split it"
        CHECKS[called] = Check(called, claim, function, slice, page, tuple(shows), budget_s, alone, seldom)
        return function

    return declared


def load() -> dict[str, Check]:
    """Import all modules with checks; return the checks by name, in order."""
    for name in MODULES:
        importlib.import_module(name)
    # One module may import another.
    in_order = sorted(CHECKS.values(), key=lambda check: MODULES.index(check.function.__module__))
    return {check.name: check for check in in_order}


def shown() -> dict[str, dict[str, Any]]:
    """The records of what was shown, by the names of the checks."""
    records: dict[str, dict[str, Any]] = json.loads(SHOWN.read_text()) if SHOWN.exists() else {}
    return records


class Place:
    """Where a check runs: on GPU 0, or on CPU ranks in a rehearsal.

    Attributes:
        on_gpu: whether there is a GPU.
        folder: an empty folder of the check's own.
        figures: what was noted so far, name by name: {"value": ..., "unit": ...}.
    """

    def __init__(self, on_gpu: bool, folder: Path, keep: Callable[[], None] = lambda: None) -> None:
        self.on_gpu = on_gpu
        self.folder = folder
        self.figures: dict[str, dict[str, Any]] = {}
        self._keep = keep
        self._began_s = time.monotonic()

    @property
    def gpus(self) -> str:
        """The `gpus` of a cluster here."""
        return "0" if self.on_gpu else "none"

    @property
    def ends_s(self) -> float:
        """When the check is cut off, by the monotonic clock."""
        return self._began_s + self.bound_s(CUT_OFF_S)

    @property
    def device(self) -> str:
        """torch's name of the device, in a process that sees all GPUs."""
        return "cuda:0" if self.on_gpu else "cpu"

    def figure(self, name: str, value: Any, unit: str = "") -> None:
        """Note a figure; it is kept even if the check is cut off later."""
        self.figures[name] = {"value": value, "unit": unit}
        shown = f"{value:.6g}" if isinstance(value, float) else value
        print(f"figure  {name}: {shown} {unit}".rstrip(), flush=True)
        self._keep()

    def size(self, full: _Full, small: _Full) -> _Full:
        """What a GPU is given, or what a rehearsal is given."""
        return full if self.on_gpu else small

    def bound_s(self, seconds: float) -> float:
        """How long to wait at most for what takes less on a GPU; a rehearsal may have few cores."""
        return seconds if self.on_gpu else REHEARSAL_PATIENCE * seconds

    def cluster(self, ranks: int = 1, **settings: Any) -> AbstractContextManager[Any]:
        """A cluster on GPU 0, which the ranks share, or on CPU ranks."""
        import nbgpu

        return nbgpu.Cluster(gpus=self.gpus, ranks=ranks, **settings)

    def start_line(self, ranks: int = 1, flags: str = "") -> str:
        """What a notebook's cell says to start such a cluster."""
        return f"%load_ext nbgpu\n%nbgpu start --gpus {self.gpus} --ranks {ranks} {flags}".rstrip()

    def python(
        self, *arguments: str, timeout_s: float = 120.0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run this Python with arguments, from the repository."""
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=self.bound_s(timeout_s),
            check=False,
        )
        print(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}(ended with {done.returncode})", flush=True)
        return done


def nvidia_smi(*fields: str) -> list[str]:
    """Ask nvidia-smi for fields of GPU 0, without units."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return [part.strip() for part in done.stdout.strip().split(",")]


def there_is_a_gpu() -> bool:
    """Whether the driver knows a GPU."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return bool(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return False


def used_bytes() -> int:
    """The memory in use on GPU 0, as NVML says it."""
    import pynvml

    pynvml.nvmlInit()
    return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used)


def about_machine(rehearsal: bool) -> Mapping[str, Any]:
    """What the pages say of where the figures come from."""
    import platform

    about: dict[str, Any] = {"python": platform.python_version(), "cores": len(os.sched_getaffinity(0))}
    question = (
        "import json, torch; c = torch.version.cuda; "
        "print(json.dumps({'torch': torch.__version__, 'cuda': c, 'cudnn': torch.backends.cudnn.version(), "
        "'nccl': '.'.join(map(str, torch.cuda.nccl.version())) if c else None}))"
    )
    done = subprocess.run([sys.executable, "-c", question], capture_output=True, text=True, check=True)
    about |= json.loads(done.stdout)
    if rehearsal:
        return about | {"gpu": "none: a rehearsal on CPU ranks", "driver": None}
    gpu, driver, memory = nvidia_smi("name", "driver_version", "memory.total")
    return about | {"gpu": gpu, "driver": driver, "memory_mib": int(memory)}


def commit() -> str:
    """The commit that is checked. A copy of a checkout may have no .git; then COMMIT says it."""
    if named := os.environ.get("COMMIT"):
        return named
    git = shutil.which("git")
    if git is None:
        return "an unknown commit"
    done = subprocess.run(
        [git, "describe", "--always", "--dirty"], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "an unknown commit"
