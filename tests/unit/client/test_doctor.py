"""`nbgpu doctor`: what it finds here with real processes, and what it would say of GPUs (NVML alone is a
stand-in)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pretend_gpus
import pynvml
import pytest

from nbgpu.cli import host
from nbgpu.client.host import doctor
from nbgpu.client.host.device_cards import DeviceCards
from nbgpu.config import ClusterConfig
from nbgpu.host import gpu_checks, host_checks
from nbgpu.host.host_checks import Finding, fail, ok, warn
from nbgpu.machine import cgroups
from nbgpu.machine.requirements import requirements
from nbgpu.planning import workers
from nbgpu.version import VERSION

OLDER_KERNEL = Path(__file__).parents[2] / "support" / "kernels" / "older_kernel.py"


def examined(tmp_path: Path, **environment: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """The exit code of `nbgpu doctor --json` in a process of its own, and its findings by check."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "GLOO_", "CUDA_"))
    }
    command = [sys.executable, "-m", "nbgpu.cli", "doctor", "--json", "--runs-dir", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=clean | environment, check=False, timeout=360
    )
    assert not done.stderr
    found: dict[str, list[dict[str, str]]] = {}
    for finding in json.loads(done.stdout)["findings"]:
        found.setdefault(finding["check"], []).append(finding)
    return done.returncode, found


def test_it_says_how_processes_watch_each_other() -> None:
    code = [sys.executable, "-c", f"from {host_checks.__name__} import system; print(system())"]
    newer = subprocess.run(code, capture_output=True, text=True, check=True)
    older = subprocess.run([sys.executable, OLDER_KERNEL, *code], capture_output=True, text=True, check=True)
    assert "through pidfds'" in newer.stdout
    assert "through pipes, because pidfds" in older.stdout


def test_the_cards_head_the_report_and_name_nobody_in_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NBGPU_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    pretend_gpus.install(
        [pretend_gpus.PretendGpu(used=2**34, processes=[(os.getpid(), 2**34)])], patch=monkeypatch
    )
    monkeypatch.setattr(host.checks, "examine", lambda runs_dir, devices: iter([ok("gloo", "adds up")]))
    assert host.doctor([]) == 0
    text = capsys.readouterr().out
    assert text.index("GPU 0  NVIDIA H100 80GB HBM3") < text.index("CPU") < text.index("gloo")
    assert "16.0 of 80.0 GiB" in text
    assert host.doctor(["--json"]) == 0
    card, processor = json.loads(capsys.readouterr().out)["devices"]
    assert (card["title"], card["state"], card["used_bytes"]) == ("GPU 0", "others", 2**34)
    assert processor["title"] == "CPU"
    assert not {"holder", "why"} & card.keys()


@pytest.mark.long
@pytest.mark.slow
def test_here_two_processes_add_up(tmp_path: Path) -> None:
    code, found = examined(tmp_path)
    assert [f["verdict"] for f in found["gloo"]] == ["ok"], found["gloo"][0]["told"]
    assert "2 processes formed a group" in found["gloo"][0]["told"]
    assert found["loopback"][0]["verdict"] == "ok"
    assert str(sys.version_info.minor) in found["python"][0]["told"]
    assert {"cores", "memory", "/dev/shm", "open files", "torch", "packages"} <= set(found)
    failed = [f for findings in found.values() for f in findings if f["verdict"] == "fail"]
    assert code == (1 if failed else 0)
    # Whatever is not well has something to be done about it.
    assert all(f["fix"] for findings in found.values() for f in findings if f["verdict"] != "ok")


@pytest.mark.long
@pytest.mark.slow
def test_an_interface_that_is_not_there_is_seen_and_really_fails(tmp_path: Path) -> None:
    code, found = examined(tmp_path, GLOO_SOCKET_IFNAME="nbgpu-none", NCCL_TIMEOUT="1800")
    assert code == 1
    assert found["gloo"][0]["verdict"] == "fail"
    assert "nbgpu-none" in found["gloo"][0]["told"]
    told = {f["told"]: f for f in found["environment"]}
    assert told["GLOO_SOCKET_IFNAME=nbgpu-none, and there is no interface nbgpu-none"]["verdict"] == "fail"
    assert (
        told["NCCL_TIMEOUT=1800: NCCL has no such variable, and nothing reads it"]["fix"]
        == "unset NCCL_TIMEOUT"
    )


def test_nccls_names_of_interfaces_are_prefixes() -> None:
    variables = {"NCCL_SOCKET_IFNAME": "l"}
    assert [f.verdict for f in host_checks.environment(variables)] == ["ok"]
    assert [f.verdict for f in host_checks.environment({"NCCL_SOCKET_IFNAME": "=l"})] == ["fail", "ok"]
    assert [f.verdict for f in host_checks.environment({"NCCL_SOCKET_IFNAME": "^eth"})] == ["ok"]
    assert [f.verdict for f in host_checks.environment({"GLOO_SOCKET_IFNAME": "l"})] == ["fail", "ok"]


@pytest.mark.parametrize("version", [1, 2])
def test_the_containers_share_of_the_cores(
    version: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    groups, own = tmp_path / "groups", tmp_path / "own"
    cpu, memory = (groups, groups) if version == 2 else (groups / "cpu", groups / "memory")
    for folder in (cpu, memory):
        (folder / "jobs" / "mine").mkdir(parents=True, exist_ok=True)
    own.write_text("0::/jobs/mine\n" if version == 2 else "4:cpu,cpuacct:/jobs/mine\n5:memory:/jobs/mine\n")

    def limit(folder: Path, cores: float | None) -> None:
        if version == 2:
            (folder / "cpu.max").write_text(f"{'max' if cores is None else int(cores * 100_000)} 100000\n")
        else:
            (folder / "cpu.cfs_quota_us").write_text(f"{-1 if cores is None else int(cores * 50_000)}\n")
            (folder / "cpu.cfs_period_us").write_text("50000\n")

    monkeypatch.setattr(cgroups, "_ROOT", groups)
    monkeypatch.setattr(cgroups, "_OWN", own)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    limit(cpu / "jobs" / "mine", None)
    assert (cgroups.cpu_quota(), cgroups.memory_limit_bytes(), cgroups.usable_cores()) == (None, None, 8)
    limit(cpu / "jobs", 4.5)
    (memory / "jobs" / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(f"{2**30}\n")
    assert (cgroups.cpu_quota(), cgroups.memory_limit_bytes(), cgroups.usable_cores()) == (4.5, 2**30, 4)
    assert "above 1.0 GiB" in host_checks.memory().text
    # All that shares cores out goes by the quota, and doctor says so.
    assert ClusterConfig().threads_for(2) == 2
    assert ClusterConfig(threads_per_rank=7).threads_for(2) == 7
    assert workers.this_host(2).num_cores == 4
    assert "the time of 4.5: ranks share out 4 cores" in host_checks.cores().text
    assert host_checks.cores().verdict == "ok"
    limit(cpu / "jobs" / "mine", 0.5)
    assert (cgroups.usable_cores(), host_checks.cores().verdict) == (1, "warn")


def test_folders_that_a_cluster_left_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("NBGPU_STATE_DIR", str(tmp_path / "state"))
    assert [f.verdict for f in doctor._leftovers()] == ["ok"]
    (tmp_path / "nbgpu-0123456789ab" / "profile").mkdir(parents=True)
    assert [f.verdict for f in doctor._leftovers()] == ["ok", "warn"]


def test_a_library_newer_than_those_that_were_tried_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "7.99.0" if name == "ipykernel" else version(name))
    (newer,) = [finding for finding in doctor._versions() if "is newer than" in finding.text]
    assert newer.verdict == "warn"
    assert newer.text.startswith("ipykernel 7.99.0 is newer than 7.")


def test_a_checkout_that_is_not_installed_is_examined_by_its_pyproject(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed = requirements()

    def not_installed(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", not_installed)
    assert {r.name for r in requirements()} == {r.name for r in installed}
    (packages,) = [finding for finding in doctor._versions() if finding.text.startswith("nbgpu ")]
    assert packages.text.startswith(f"nbgpu {VERSION}, ")


def test_a_report_tells_neither_home_nor_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada.l")
    findings = [
        ok("a", "/home/ada.l/runs and /data/ada.l/x"),
        warn("b", "Canada.l", "rm"),
        fail("c", "bad", "x"),
    ]
    told = doctor.as_json(findings)
    assert "~/runs and /data/USER/x" in told
    assert "/ada.l" not in told
    assert "Canada.l" in told
    assert json.loads(told)["verdict"] == "fail"
    assert doctor.exit_code(findings[:2]) == 0
    assert doctor.summary(findings) == "1 ok, 1 to look at, 1 that do not work"
    assert doctor.line(findings[1]).splitlines()[1].strip() == "-> rm"


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver for CUDA 12.4 with two GPUs that see one another through one PCIe switch only."""
    answers: dict[str, Any] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetCudaDriverVersion": lambda: 12040,
        "nvmlSystemGetDriverVersion": lambda: "550.54",
        "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: f"Pretend {handle}",
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(
            total=80 * 2**30, free=(10, 79)[handle] * 2**30
        ),
        "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlDeviceGetComputeMode": lambda handle: pynvml.NVML_COMPUTEMODE_DEFAULT,
        "nvmlDeviceGetP2PStatus": lambda a, b, index: pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED,
        "nvmlDeviceGetTopologyCommonAncestor": lambda a, b: pynvml.NVML_TOPOLOGY_SINGLE,
        "nvmlDeviceGetNvLinkState": _no_link,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)


def _no_link(handle: int, link: int) -> int:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def torch_for(cuda: str | None, *architectures: str) -> dict[str, Any]:
    return {"torch": "2.13", "cuda": cuda, "architectures": list(architectures), "num_gpus": 2}


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_without_memory_of_its_own_is_no_broken_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def has_none(_: int) -> Any:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetMemoryInfo", has_none)
    found = {f.check: f for f in gpu_checks.gpus(torch_for("12.1", "sm_90"), {})}
    text = "Pretend 1, compute capability 9.0, shares the host's memory"
    assert found["GPU 1"] == Finding("GPU 1", "ok", text)


@pytest.mark.usefixtures("two_gpus")
def test_gpus_and_their_links() -> None:
    uses = {"GPU-0": "In use, with 69 GiB, by user ada."}
    found = {f.check: f for f in gpu_checks.gpus(torch_for("12.1", "sm_80", "sm_90"), uses)}
    assert found["driver"] == Finding("driver", "ok", "550.54, for CUDA 12.4 at most")
    assert (found["GPU 0"].verdict, found["GPU 0"].fix) == ("warn", uses["GPU-0"])
    assert found["GPU 1"].text == "Pretend 1, compute capability 9.0, 79.0 GiB free of 80.0 GiB"
    assert found["links"].text == "no P2P (chipset), one PCIe switch: GPUs 0-1"
    assert "nccl_safe" in found["links"].fix
    assert "NVLink" not in found


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_without_bfloat16_is_told_with_what_auto_takes_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCudaComputeCapability", lambda handle: ((7, 5), (6, 0))[handle])
    found = {f.check: f.text for f in gpu_checks.gpus(torch_for("12.1", "compute_60"), {})}
    assert "compute capability 7.5, no bfloat16 (amp='auto' takes fp16)" in found["GPU 0"]
    assert "compute capability 6.0, no bfloat16 (amp='auto' is off)" in found["GPU 1"]


def test_a_lost_gpu_is_told_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = pretend_gpus.install(pretend_gpus.several(3), patch=monkeypatch)
    gpus[1].is_lost = True
    found = list(gpu_checks.gpus(torch_for("13.0", "sm_90"), {}))
    verdicts = {f.check: f.verdict for f in found if f.check.startswith("GPU ")}
    assert verdicts == {"GPU 0": "ok", "GPU 1": "fail", "GPU 2": "ok"}
    (lost,) = [f for f in found if f.verdict == "fail"]
    assert lost.text == "cannot be read: GPU is lost"
    assert [f.text for f in found if f.check == "links"] == ["P2P over NVLink: GPUs 0-2"]


def test_whoever_has_a_gpu_is_named_as_on_its_card_and_not_in_a_bug_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = pretend_gpus.install(pretend_gpus.several(3), patch=monkeypatch)
    for gpu, gib in ((gpus[0], 70), (gpus[2], 12)):
        # No process of this machine has this number.
        gpu.processes, gpu.used = [(2**22 + gib, gib * 2**30)], gib * 2**30
    with DeviceCards() as cards:
        devices = cards.read()
    findings = [f for f in gpu_checks.gpus(None, devices.uses()) if f.check.startswith("GPU ")]
    assert [f.verdict for f in findings] == ["warn", "ok", "warn"]
    assert [f.fix for f in findings] == [card.why for card in devices.cards if card.kind == "gpu"]
    assert findings[2].fix.startswith("In use, with 12.0 GiB, by ")
    assert "In use" not in doctor.as_json(findings, devices)


def test_a_driver_that_cannot_be_used_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def mismatch() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", mismatch)
    (finding,) = gpu_checks.gpus(torch_for("13.0"), {})
    assert (finding.check, finding.verdict) == ("GPUs", "warn")
    assert "version mismatch" in finding.text


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("torch", "check", "said"),
    [
        (torch_for(None), "driver", "built for the CPU only"),
        (torch_for("13.0", "sm_90"), "driver", "torch is built for CUDA 13.0"),
        (torch_for("12.1", "sm_80", "sm_120"), "GPU 1", r"no kernels for it \(sm_80, sm_120\)"),
    ],
)
def test_a_torch_that_does_not_fit_the_gpus(torch: dict[str, Any], check: str, said: str) -> None:
    found = [f for f in gpu_checks.gpus(torch, {}) if f.check == check]
    assert [f.verdict for f in found] == ["fail"]
    assert said.replace("\\", "") in found[0].text


def test_kernels_run_on_later_minors_and_ptx_on_later_majors() -> None:
    assert gpu_checks._runs_on(["sm_80"], 8, 6)
    assert not gpu_checks._runs_on(["sm_86"], 8, 0)
    assert not gpu_checks._runs_on(["sm_80"], 9, 0)
    assert gpu_checks._runs_on(["sm_80", "compute_80"], 12, 0)
    assert gpu_checks._runs_on(["sm_90a"], 9, 0)
