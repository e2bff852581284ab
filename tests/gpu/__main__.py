"""Shows what nbgpu does on a GPU: `make gpu SLICE=1`.

    python tests/gpu SLICE [NAME ...] [--rehearse] [--seconds 200] [--jobs N] [--folder FOLDER]
    python tests/gpu --list

It needs the checkout, the packages that `make gpu-wheels` collects, and no network. Without names a slice
runs what shown.json lacks, and then what it has of older code. It ends within its seconds, whatever happens:
each check runs in a process of its own and is cut off after 25 s, a failure of one never stops the others,
and the results are written after each figure. They are in tests/_artifacts/gpu, as slice1.json and
slice1.log, and in $OUT as well where that is set. `make gpu-pages` adds them to shown.json. `--rehearse` runs
the checks on CPU ranks, with small sizes.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "support"))
sys.path.insert(1, str(Path(__file__).resolve().parents[2]))

from checks import (
    CUT_OFF_S,
    REHEARSAL_PATIENCE,
    REPOSITORY,
    SLICE_S,
    Check,
    about_machine,
    commit,
    load,
    shown,
    there_is_a_gpu,
)

ARTIFACTS = REPOSITORY / "tests" / "_artifacts"
NUM_SLICES = 6
_JOBS = 4
_JOBS_BY_SLICE = {3: 2}
"""Where it is not 4: NCCL's kernels take the whole GPU while they wait for the other rank."""
_ENDING_S = 5.0
"""What a check that was stopped gets to end its ranks in."""
_POLL_PERIOD_S = 0.1
_MOST_LOG_BYTES = 12 * 2**20


class Slice:
    """The checks of one slice, and what came of them so far."""

    def __init__(self, number: int, checks: Sequence[Check], folder: Path, rehearsal: bool) -> None:
        self.folder = folder
        self._rehearsal = rehearsal
        self._results = folder / f"slice{number}.json"
        self._log = folder / f"slice{number}.log"
        folder.mkdir(parents=True, exist_ok=True)
        before: dict[str, Any] = json.loads(self._results.read_text()) if self._results.exists() else {}
        self._found: dict[str, Any] = {
            "slice": number,
            "rehearsal": rehearsal,
            "machine": about_machine(rehearsal),
            "commit": commit(),
            "checks": {},
        }
        earlier = before.get("checks", {}) if before.get("machine") == self._found["machine"] else {}
        for check in checks:
            not_run = {"status": "not run", "reason": "", "figures": {}, "seconds": 0.0}
            self._found["checks"][check.name] = earlier.get(check.name, not_run) | {
                "claim": check.claim,
                "page": check.page,
            }
        # As it is now, whatever is changed while the checks run.
        self._code = {check.name: check.code for check in checks}
        self.write()

    def note(self, check: Check, record: dict[str, Any], log: str) -> None:
        """Keep what came of a check, and its log."""
        if record["status"] == "not run" and self._found["checks"][check.name]["status"] != "not run":
            return
        if record["status"] == "failed":
            record["log"] = log[-6000:]
        with self._log.open("a") as file:
            file.write(f"\n==== {check.name}: {record['status']} after {record['seconds']} s\n{log}\n")
        self.keep(check, record)

    def keep(self, check: Check, record: dict[str, Any]) -> None:
        """Keep what is known of a check, which may still run."""
        record["commit"], record["date"] = self._found["commit"], datetime.now(UTC).strftime("%Y-%m-%d")
        record["code"] = self._code[check.name]
        self._found["checks"][check.name] |= record
        self.write()

    def write(self) -> None:
        part = self._results.with_suffix(".part")
        part.write_text(json.dumps(self._found, indent=1) + "\n")
        part.replace(self._results)
        out = os.environ.get("OUT")
        if not out:
            return
        shutil.copy(self._results, out)
        if self._log.exists():
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - _MOST_LOG_BYTES))
                Path(out, self._log.name).write_bytes(file.read())


class Running:
    """A check that runs in a process of its own."""

    def __init__(self, check: Check, rehearsal: bool, ends_s: float) -> None:
        self.check = check
        self._folder = Path(tempfile.mkdtemp(prefix="nbgpu-gpu-"))
        self._record = self._folder / "record.json"
        self._began_s = time.monotonic()
        self._read: bytes = b""
        cut_off_s = CUT_OFF_S * (REHEARSAL_PATIENCE if rehearsal else 1)
        self._gives_up_s = min(self._began_s + cut_off_s, ends_s)
        script = str(Path(__file__).with_name("one_check.py"))
        command = [
            sys.executable,
            script,
            check.name,
            str(self._record),
            *(["--rehearse"] if rehearsal else []),
        ]
        # A registry of its own: checks that run side by side take the same GPU.
        temporary = self._folder / "t"
        temporary.mkdir()
        environment = {
            **os.environ,
            "TMPDIR": str(temporary),
            "NBGPU_STATE_DIR": str(self._folder / "state"),
            "NBGPU_CACHE_DIR": str(self._folder / "cache"),
            # What one check has compiled, or has begun to, the next one need not compile.
            "TORCHINDUCTOR_CACHE_DIR": str(Path(tempfile.gettempdir(), f"nbgpu-gpu-compiled-{os.getuid()}")),
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(REPOSITORY)])),
        }
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._folder,
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def over(self) -> bool:
        """Whether it has ended; it is ended here once its time is over."""
        if self._process.poll() is None and time.monotonic() > self._gives_up_s:
            self._end()
        return self._process.poll() is not None

    def _end(self) -> None:
        # SIGINT first, so that it stops its cluster and writes where it was.
        for number in (signal.SIGINT, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(_ENDING_S)
                return
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()

    def news(self) -> dict[str, Any] | None:
        """What the check has noted since this was last asked; None for nothing."""
        content = self._record.read_bytes() if self._record.exists() else b""
        if content == self._read:
            return None
        self._read = content
        record: dict[str, Any] = json.loads(content)
        return record

    def outcome(self) -> tuple[dict[str, Any], str]:
        """The record and the log of a check that is over."""
        seconds = round(time.monotonic() - self._began_s, 1)
        record: dict[str, Any] = {"status": "failed", "reason": "", "figures": {}, "seconds": seconds}
        if self._record.exists():
            record |= json.loads(self._record.read_text())
        record["seconds"] = seconds
        if time.monotonic() > self._gives_up_s and record["status"] == "failed":
            record["reason"] = f"cut off after {seconds:.0f} s. {record['reason']}".strip()
        elif self._process.returncode < 0:
            record["reason"] = f"its process was ended by signal {-self._process.returncode}"
        log = (self._folder / "log").read_text(errors="replace")
        shutil.rmtree(self._folder, ignore_errors=True)
        return record, log


def run(
    number: int,
    names: Sequence[str],
    *,
    rehearsal: bool,
    seconds: float,
    jobs: int,
    folder: Path,
    quick: bool = False,
) -> int:
    """Run the checks of a slice, or those that are named; return how many failed."""
    ends_s = time.monotonic() + seconds
    of_slice = [check for check in load().values() if check.slice == number]
    unknown = sorted(set(names) - {check.name for check in of_slice})
    if unknown:
        raise SystemExit(f"slice {number} has no check {', '.join(unknown)}. See: python tests/gpu --list")
    kept = Slice(number, of_slice, folder, rehearsal)
    known = {} if rehearsal else shown()
    left = [c for c in of_slice if c.name in names] if names else _in_order(of_slice, known)
    left = [check for check in left if not (quick and check.seldom)]
    if not names and len(left) < len(of_slice) and not quick:
        print(f"{len(of_slice) - len(left)} of {len(of_slice)} have shown this very code already", flush=True)
    running: list[Running] = []
    failed, num_done, num_all = 0, 0, len(left)
    try:
        while left or running:
            for one in [r for r in running if r.over()]:
                running.remove(one)
                record, log = one.outcome()
                kept.note(one.check, record, log)
                num_done += 1
                failed += record["status"] == "failed"
                said = f": {record['reason'].splitlines()[0][:160]}" if record["reason"] else ""
                print(
                    f"[{num_done}/{num_all}] {record['status']:<8} {one.check.name} ({record['seconds']:.0f} s){said}",
                    flush=True,
                )
            for one in running:
                if news := one.news():
                    kept.keep(one.check, news)
            while left and may_begin(left[0], [r.check for r in running], jobs):
                check = left.pop(0)
                if time.monotonic() > ends_s - check.budget_s:
                    num_done += 1
                    record = {
                        "status": "not run",
                        "reason": "the slice's time was over",
                        "figures": {},
                        "seconds": 0.0,
                    }
                    kept.note(check, record, "")
                    print(
                        f"[{num_done}/{num_all}] not run  {check.name}: the slice's time was over", flush=True
                    )
                    continue
                running.append(Running(check, rehearsal, ends_s))
            time.sleep(_POLL_PERIOD_S)
    finally:
        for one in running:
            one._end()
    print(f"{failed} of {num_all} failed; {kept.folder / f'slice{number}.json'}", flush=True)
    return failed


def _in_order(checks: Sequence[Check], known: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """What is to be shown: first what never passed, then what passed with older code."""
    left = [check for check in checks if not check.is_current(known.get(check.name, {}))]
    passed = {name for name, record in known.items() if record["status"] in ("passed", "skipped")}
    return sorted(left, key=lambda check: check.name in passed)


def may_begin(check: Check, running: Sequence[Check], jobs: int) -> bool:
    """Whether a check may begin beside those that run."""
    if check.alone or any(other.alone for other in running):
        return not running
    return len(running) < jobs


def num_jobs(number: int) -> int:
    """How many checks of a slice run side by side."""
    return _JOBS_BY_SLICE.get(number, _JOBS)


def budget_s(checks: Sequence[Check], jobs: int) -> float:
    """How long checks take together if each takes its budget, begun in this order as `run` begins them."""
    now_s, left, running = 0.0, list(checks), list[tuple[float, Check]]()
    while left or running:
        while left and may_begin(left[0], [check for _, check in running], jobs):
            check = left.pop(0)
            running.append((now_s + check.budget_s, check))
        now_s = min(ends_s for ends_s, _ in running)
        running = [(ends_s, check) for ends_s, check in running if ends_s > now_s]
    return now_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests/gpu", description="Show what nbgpu does on a GPU.")
    parser.add_argument("slice", nargs="?", type=int, choices=range(1, NUM_SLICES + 1))
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these checks of the slice")
    parser.add_argument("--rehearse", action="store_true", help="on CPU ranks, with small sizes")
    parser.add_argument("--quick", action="store_true", help="leave out what takes long in a rehearsal")
    parser.add_argument("--seconds", type=float, help="the slice ends by then (default: 200, 3600 rehearsed)")
    parser.add_argument(
        "--jobs", type=int, help="checks that run side by side (default: 4, and 2 in slice 3)"
    )
    parser.add_argument("--folder", type=Path, help="where the results go")
    parser.add_argument("--list", action="store_true", help="list the checks")
    given = parser.parse_args()
    if given.list:
        for number in range(1, NUM_SLICES + 1):
            checks = [check for check in load().values() if check.slice == number]
            print(f"slice {number}: {budget_s(checks, num_jobs(number)):.0f} s")
            for check in checks:
                print(f"  {check.budget_s:3.0f} s  {check.name:<40} {check.claim}")
        return
    if given.slice is None:
        parser.error(f"name a slice, 1 to {NUM_SLICES}")
    if not given.rehearse and not there_is_a_gpu():
        raise SystemExit("there is no NVIDIA GPU here; --rehearse runs the checks on CPU ranks")
    # A slice that is told to end ends its checks as well.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    folder = given.folder or ARTIFACTS / ("gpu-rehearsal" if given.rehearse else "gpu")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"slice{given.slice}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        failed = run(
            given.slice,
            given.names,
            rehearsal=given.rehearse,
            seconds=given.seconds or (3600.0 if given.rehearse else SLICE_S),
            jobs=given.jobs or num_jobs(given.slice),
            folder=folder.resolve(),
            quick=given.quick,
        )
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
