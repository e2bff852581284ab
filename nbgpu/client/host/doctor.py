"""`nbgpu doctor`: check whether nbgpu works on this machine, and say what to do about what does not.

Where possible a check is a trial: processes form process groups and run an all_reduce, as the ranks of a
cluster do.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import psutil

from nbgpu.client.host import registry
from nbgpu.client.host.device_cards import HostDevices
from nbgpu.client.ipykernel import shell
from nbgpu.client.launchers.notebooks_job import NotebooksJob
from nbgpu.config import TrainConfig, site, site_file
from nbgpu.config.conditions import default_of
from nbgpu.errors import ClusterError, ConfigError
from nbgpu.host import gpu_checks, host_checks
from nbgpu.host.host_checks import Finding, Verdict, fail, ok, warn
from nbgpu.machine import devices, interpreter
from nbgpu.machine.requirements import newer_than_tried, requirements
from nbgpu.protocol.cluster_processes import CONTROLLER_PID
from nbgpu.protocol.records import Device
from nbgpu.text.durations import duration
from nbgpu.version import VERSION

_BUTTONS_DURING_A_CELL = (7, 1)
"""The first version of ipykernel in which buttons work while a cell runs."""
_PATIENCE_S = 120.0
"""Long enough for imports on a busy host, and for NCCL's first collective on many GPUs."""
_POLL_PERIOD_S = 0.02


def runs_dir() -> str:
    """Return the default folder for runs. If the site's file with defaults is wrong, which `examine` reports,
    this is nbgpu's own default."""
    with suppress(ConfigError):
        return str(default_of(TrainConfig, "runs_dir"))
    return str(TrainConfig.model_fields["runs_dir"].default)


def examine(runs_dir: str, devices_now: HostDevices) -> Iterator[Finding]:
    """Check the machine, and yield each finding as soon as it is there. This takes some seconds, because
    processes import torch.

    Args:
        runs_dir: the folder for runs.
        devices_now: the cards of the devices, which say who uses each.
    """
    yield host_checks.system()
    yield from _versions()
    yield host_checks.cores()
    yield host_checks.memory()
    yield host_checks.shared_memory()
    yield host_checks.disk(runs_dir)
    yield host_checks.loopback()
    has_gpus = bool(devices.inventory())
    yield from host_checks.limits(has_gpus)
    yield from host_checks.environment(os.environ)
    yield from notebooks_job()
    yield _site()
    yield from _leftovers()
    # The import of torch takes seconds, so the checks that need it come last.
    torch: dict[str, Any] | None = None
    try:
        torch = _about_torch()
        built_for = f"CUDA {torch['cuda']}, NCCL {torch['nccl']}" if torch["cuda"] else "the CPU"
        yield ok("torch", f"{torch['torch']}, built for {built_for}; sees {torch['num_gpus']} GPUs")
    except ClusterError as error:
        yield fail("torch", f"cannot be imported: {error}", "python -m pip install --force-reinstall torch")
    yield from gpu_checks.gpus(torch, devices_now.uses())
    if torch is not None:
        yield from _groups(torch)


def _versions() -> Iterator[Finding]:
    """Compare the versions of Python, nbgpu and its dependencies with the required ones."""
    yield ok("python", f"{platform.python_version()} ({platform.python_implementation()})")
    versions, wrong = [f"nbgpu {VERSION}"], []
    for needed in requirements():
        try:
            version = metadata.version(needed.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{needed.name} is missing")
            continue
        versions.append(f"{needed.name} {version}")
        if not needed.specifier.contains(version, prereleases=True):
            wrong.append(f"{needed.name} {version} is not {needed.specifier}")
    yield ok("packages", ", ".join(versions))
    if wrong:
        yield fail("packages", "; ".join(wrong), "pip install --upgrade nbgpu")
    for name, installed, tried in newer_than_tried():
        yield warn(
            "packages",
            f"{name} {installed} is newer than {tried}, with which nbgpu was tried",
            f"if cells or runs misbehave: pip install '{name}=={tried}.*'",
        )
    ipykernel = metadata.version("ipykernel")
    if tuple(int(part) for part in ipykernel.split(".")[:2]) < _BUTTONS_DURING_A_CELL:
        text = f"{ipykernel}: buttons act between cells only"
        if shell.is_on_colab():
            yield ok("ipykernel", f"{text}; Colab's page needs this version")
        else:
            yield warn("ipykernel", text, "pip install 'ipykernel>=7.1'")


def notebooks_job() -> Iterator[Finding]:
    """Yield a finding about the Slurm job in which this process runs: its nodes and the time left. Yield none
    if it runs in no job."""
    job = NotebooksJob.find()
    if job is None:
        return
    try:
        this_one = "'local' this one" if job.node else "this host is none of them"
        yield ok("job", f"{job.describe()}. launcher='slurm' takes its nodes, and {this_one}")
    except ClusterError as error:
        left_s = job.time_left_s()
        time_left = "" if left_s is None else f"; {duration(left_s)} left"
        yield warn(
            "job",
            f"this notebook is in Slurm's job {job.number}{time_left}, and {error}",
            "launcher='local' takes the devices of this host; launcher='slurm' needs Slurm's programs here",
        )


def _site() -> Finding:
    """Return a finding about the site's file, which has default settings for all users of this host."""
    try:
        site_defaults = site_file.read()
    except ConfigError as error:
        return fail(
            "site", str(error).replace("\n", "; "), "have the file corrected by who looks after this machine"
        )
    is_named = site_file.VARIABLE in os.environ
    if site_defaults.path is None:
        reason = f"{site_file.VARIABLE} is empty" if is_named else f"no {site_file.USUAL}"
        return ok("site", f"{reason}: nbgpu's own defaults count")
    origin = f" ({site_file.VARIABLE})" if is_named else ""
    return ok("site", f"{site_defaults.path}{origin} sets {site.in_words(site_defaults) or 'nothing'}")


def _leftovers() -> Iterator[Finding]:
    """Find clusters whose notebooks have ended, and folders of clusters that have ended."""
    try:
        clusters = registry.entries()
    except ClusterError as error:
        yield fail("clusters", str(error), f"set {registry.STATE_VARIABLE}")
        return
    if left := [entry.id for entry in clusters if entry.state() == "left over"]:
        text = f"{len(left)} left over by notebooks that are gone ({', '.join(left)})"
        yield warn("clusters", text, "nbgpu stop")
    else:
        yield ok("clusters", f"{len(clusters)} of yours, none left over")
    used = {entry.folder for entry in clusters}
    orphans = [path for path in _orphaned_folders() if path not in used]
    if orphans:
        shown = ", ".join(path.name for path in orphans[:4]) + (" ..." if len(orphans) > 4 else "")
        yield warn(
            "clusters",
            f"{len(orphans)} folders of clusters that are gone in {tempfile.gettempdir()}: {shown}",
            "remove them, if no cluster is just starting",
        )


def _orphaned_folders() -> list[Path]:
    """The cluster folders of this user, recognized by ipyparallel's profile in them, whose controller does
    not run. So the folders that a kernel has preloaded are left out."""
    profiles = Path(tempfile.gettempdir()).glob("nbgpu-*/profile")
    return sorted(path.parent for path in profiles if _is_orphaned(path))


def _is_orphaned(profile: Path) -> bool:
    """Whether a profile belongs to this user, and its controller does not run."""
    try:
        if profile.stat().st_uid != os.getuid():
            return False
    except FileNotFoundError:
        return False  # it was removed meanwhile
    try:
        return not psutil.pid_exists(int((profile.parent / CONTROLLER_PID).read_text()))
    except FileNotFoundError:
        return True


def _groups(torch: dict[str, Any]) -> Iterator[Finding]:
    """Form process groups over gloo and NCCL with real processes, as a cluster does."""
    pair = (devices.cpu(0), devices.cpu(1))
    try:
        yield ok("gloo", _describe_timing(_all_reduce(pair, "gloo")))
    except ClusterError as error:
        yield fail(
            "gloo", f"2 CPU processes could not form a group: {error}", "see loopback and environment above"
        )
    gpus = devices.inventory()
    if torch["num_gpus"] < len(gpus):
        yield fail(
            "CUDA",
            f"torch sees {torch['num_gpus']} of {len(gpus)} GPUs",
            "look at driver above, and at nvidia-smi; after a driver update: reboot",
        )
    elif gpus and torch["nccl"]:
        try:
            yield ok("nccl", _describe_timing(_all_reduce(gpus, "nccl")))
        except ClusterError as error:
            yield fail(
                "nccl",
                f"{len(gpus)} GPUs could not form a group: {error}",
                "NCCL_DEBUG=INFO nbgpu doctor says more; in a container try nccl_safe=True",
            )


def _describe_timing(answers: Sequence[dict[str, Any]]) -> str:
    """Describe the results of `_all_reduce` by the slowest rank; raise ClusterError if a sum is wrong."""
    if not all(answer["ok"] for answer in answers):
        raise ClusterError("an all_reduce of ones gave a wrong sum")
    form_s = max(answer["form_s"] for answer in answers)
    all_reduce_ms = 1000 * max(answer["all_reduce_s"] for answer in answers)
    return f"{len(answers)} processes formed a group in {form_s:.2f} s, and added up 1 MiB in {all_reduce_ms:.1f} ms"


def line(finding: Finding) -> str:
    """A finding in words, with the remedy in the line below."""
    text = f"{finding.verdict:<5} {finding.check:<14} {finding.text}"
    return f"{text}\n{'':<20} -> {finding.fix}" if finding.fix else text


def summary(findings: Sequence[Finding]) -> str:
    """The last line of the report, with the number of findings by verdict."""
    count = {verdict: sum(f.verdict == verdict for f in findings) for verdict in ("ok", "warn", "fail")}
    return f"{count['ok']} ok, {count['warn']} to look at, {count['fail']} that do not work"


def as_json(findings: Sequence[Finding], devices: HostDevices | None = None) -> str:
    """The findings and the devices as JSON for a bug report, without the home folder, and without the names
    of users and notebooks."""
    # A remedy that names who uses a GPU is left out. Scripts read these keys, so they stay as they are.
    uses = () if devices is None else devices.uses().values()
    findings_json = [
        {"check": f.check, "verdict": f.verdict, "told": f.text, "fix": "" if f.fix in uses else f.fix}
        for f in findings
    ]
    cards = [] if devices is None else devices.as_json()["devices"]
    devices_json = [{key: card[key] for key in card if key not in ("holder", "why")} for card in cards]
    report = {"verdict": worst(findings), "findings": findings_json, "devices": devices_json}
    text = json.dumps(report, indent=2)
    home = Path.home()
    text = re.sub(rf"{re.escape(str(home))}(?=/)", "~", text)
    return re.sub(rf"/{re.escape(home.name)}(?=[/\"])", "/USER", text)


def worst(findings: Sequence[Finding]) -> Verdict:
    """The worst verdict of all findings."""
    return max((f.verdict for f in findings), key=["ok", "warn", "fail"].index, default="ok")


def exit_code(findings: Sequence[Finding]) -> int:
    """The exit code: 0 unless something does not work."""
    return 1 if worst(findings) == "fail" else 0


def _about_torch() -> dict[str, Any]:
    """Return the versions of torch, CUDA and NCCL, and the number of GPUs that torch sees. Raise ClusterError
    if torch cannot be imported."""
    (answer,) = _probe([["about"]], {})
    return answer


def _all_reduce(chosen: Sequence[Device], backend: str) -> list[dict[str, Any]]:
    """Form a process group with one process for each device, and run an all_reduce of 1 MiB.

    Returns:
        For each rank `form_s` and `all_reduce_s`, in seconds, and `ok`, whether the sum is right.

    Raises:
        ClusterError: a process failed or did not answer; the message has the last line of its error output.
    """
    with tempfile.TemporaryDirectory(prefix="nbgpu-trial-") as folder:
        world_size = str(len(chosen))
        commands = [
            ["reduce", folder, str(rank), world_size, backend, devices.torch_name(device, chosen)]
            for rank, device in enumerate(chosen)
        ]
        gpus = devices.visible_gpus(chosen)
        return _probe(commands, {"CUDA_VISIBLE_DEVICES": gpus, "OMP_NUM_THREADS": "1"})


def _probe(commands: Sequence[Sequence[str]], environment: dict[str, str]) -> list[dict[str, Any]]:
    """Run `nbgpu.engine.group.probe` with each of these commands, all at the same time, and return the JSON
    in the last line of each output. They run in other processes, because the kernel never imports torch.

    Raises:
        ClusterError: a process failed, or did not answer in time; all of them are killed.
    """
    with ExitStack() as open_files:
        # Files and not pipes, because NCCL may be set to log more than a pipe holds.
        outputs, errors = (
            [open_files.enter_context(tempfile.TemporaryFile("w+", errors="replace")) for _ in commands]
            for _ in range(2)
        )
        started: list[subprocess.Popen[bytes]] = []
        give_up_s = time.monotonic() + _PATIENCE_S
        try:
            for arguments, output, error in zip(commands, outputs, errors, strict=True):
                command = interpreter.command("nbgpu.engine.group.probe", *arguments)
                variables = {**os.environ, **environment}
                started.append(subprocess.Popen(command, stdout=output, stderr=error, env=variables))
            # Wait until all have ended, or one has failed: the others would wait in the collective for ever.
            # `poll` returns None while a process runs, and 0 after a success.
            while any(process.poll() is None for process in started) and not any(
                process.poll() for process in started
            ):
                if time.monotonic() > give_up_s:
                    last_lines = "; ".join(filter(None, map(_last_line, errors)))
                    raise ClusterError(f"no answer within {_PATIENCE_S:g} s. {last_lines}".rstrip(" ."))
                time.sleep(_POLL_PERIOD_S)
        except OSError as error:
            raise ClusterError(f"a process cannot be started: {error.strerror}") from None
        finally:
            exit_codes = [process.poll() for process in started]
            for process in started:
                process.kill()
                process.wait()
        problems = [
            _last_line(error) or f"a process ended with {code}"
            for code, error in zip(exit_codes, errors, strict=True)
            if code
        ]
        if problems:
            raise ClusterError("; ".join(dict.fromkeys(problems)))
        try:
            return [json.loads(_last_line(output)) for output in outputs]
        except ValueError as error:
            raise ClusterError(f"the answer of a process cannot be read: {error}") from None


def _last_line(file: IO[str]) -> str:
    """The last line of a file that is not blank."""
    file.seek(0)
    lines = [line for line in file if line.strip()]
    return lines[-1].strip() if lines else ""
