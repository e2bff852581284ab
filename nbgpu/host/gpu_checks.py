"""Check the GPUs with NVML: which there are, whether they are in use, and how they reach one another.

Written from NVML's documentation; not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import pynvml

from nbgpu.host.host_checks import Finding, fail, ok, warn
from nbgpu.machine import numa
from nbgpu.machine.gpus import links as gpu_links

_GIB = 2**30
_BF16_SINCE, _FP16_SINCE = 8, 7
"""The major number of the first compute capability with each in hardware."""
_NO_NVLINK = (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT)


def gpus(torch: Mapping[str, Any] | None, uses: Mapping[str, str]) -> Iterator[Finding]:
    """Check the driver, the GPUs and the links, and whether torch can use them.

    Args:
        torch: the result of `engine/group/probe.py` about torch; None if torch cannot be imported.
        uses: for each GPU that is not free, by UUID, a sentence on who uses it, as on its card.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError_LibraryNotFound as error:
        yield ok("GPUs", f"none: {error}. The ranks run on the CPU")
        return
    except pynvml.NVMLError as error:
        text = f"none can be used: {error}. The ranks run on the CPU"
        yield warn("GPUs", text, "nvidia-smi may say more; after an update of the driver: reboot")
        return
    try:
        num_gpus = pynvml.nvmlDeviceGetCount()
        if not num_gpus:
            yield ok("GPUs", "the driver finds none. The ranks run on the CPU")
            return
        yield _driver(torch)
        handles: dict[int, Any] = {}
        for index in range(num_gpus):
            # A GPU that is lost must not prevent the checks of the others.
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                yield from _gpu(index, handle, torch, uses)
            except pynvml.NVMLError as error:
                yield fail(f"GPU {index}", f"cannot be read: {error}", "nvidia-smi may say more; reboot")
            else:
                handles[index] = handle
        yield from _links(handles)
        yield _numa(handles)
    finally:
        pynvml.nvmlShutdown()


def _driver(torch: Mapping[str, Any] | None) -> Finding:
    """Compare the newest CUDA version that the driver supports with the one that torch is built for. Only the
    major versions are compared: a driver runs programs that were built for any minor version of its CUDA."""
    version = pynvml.nvmlSystemGetCudaDriverVersion()
    # NVML returns CUDA 12.4 as 12040.
    driver_cuda = (version // 1000, version % 1000 // 10)
    text = f"{_text(pynvml.nvmlSystemGetDriverVersion())}, for CUDA {driver_cuda[0]}.{driver_cuda[1]} at most"
    if torch is None:
        return ok("driver", text)
    if torch["cuda"] is None:
        fix = "pip install torch from https://download.pytorch.org/whl/ of your CUDA version"
        return fail("driver", f"{text}, and torch {torch['torch']} is built for the CPU only", fix)
    built_for = tuple(int(part) for part in torch["cuda"].split("."))
    if built_for[0] > driver_cuda[0]:
        fix = "install a newer driver, or a torch that is built for an older CUDA"
        return fail("driver", f"{text}, and torch is built for CUDA {torch['cuda']}", fix)
    return ok("driver", text)


def _gpu(
    index: int, handle: Any, torch: Mapping[str, Any] | None, uses: Mapping[str, str]
) -> Iterator[Finding]:
    """Check one GPU: its compute mode, whether torch has kernels for it, and who has it."""
    name = f"GPU {index}"
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        room = f"{memory.free / _GIB:.1f} GiB free of {memory.total / _GIB:.1f} GiB"
    except pynvml.NVMLError_NotSupported:
        room = "shares the host's memory"
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    text = (
        f"{_text(pynvml.nvmlDeviceGetName(handle))}, compute capability {major}.{minor}, {_precision(major)}"
        f"{room}"
    )
    mode = pynvml.nvmlDeviceGetComputeMode(handle)
    if mode == pynvml.NVML_COMPUTEMODE_PROHIBITED:
        yield fail(
            name, f"{text}; its compute mode forbids every use", f"nvidia-smi -i {index} -c DEFAULT, as root"
        )
    elif torch is not None and torch["architectures"] and not _runs_on(torch["architectures"], major, minor):
        built = ", ".join(torch["architectures"])
        yield fail(name, f"{text}; torch has no kernels for it ({built})", "install a torch that has")
    elif use := uses.get(_text(pynvml.nvmlDeviceGetUUID(handle))):
        yield warn(name, text, use)
    else:
        yield ok(name, text)


def _precision(major: int) -> str:
    if major >= _BF16_SINCE:
        return ""
    return f"no bfloat16 (amp='auto' {'takes fp16' if major >= _FP16_SINCE else 'is off'}), "


def _runs_on(architectures: list[str], major: int, minor: int) -> bool:
    """Return whether kernels built for these architectures run on a GPU of this compute capability. A binary
    ('sm_80') needs the same major and at least the same minor version, and PTX ('compute_80') at least the
    same version."""
    for architecture in architectures:
        kind, _, number = architecture.partition("_")
        digits = "".join(c for c in number if c.isdigit())
        built_major, built_minor = int(digits[:-1]), int(digits[-1])
        if (built_major == major or kind != "sm") and (built_major, built_minor) <= (major, minor):
            return True
    return False


def _links(handles: Mapping[int, Any]) -> Iterator[Finding]:
    """Report the connection of each pair of GPUs, with equal connections in one line, and the NVLinks.

    Args:
        handles: NVML's handles by the GPU's number.
    """
    pairs: dict[tuple[str, bool], list[str]] = {}
    for (i, first), (j, second) in combinations(handles.items(), 2):
        try:
            connection = gpu_links.pair(first, second)
            key = connection.describe(), connection.has_p2p
        except pynvml.NVMLError as error:
            key = f"not known ({error})", False
        pairs.setdefault(key, []).append(f"{i}-{j}")
    for (description, has_p2p), names in pairs.items():
        text = f"{description}: GPUs {', '.join(names)}"
        fix = "NCCL goes through host memory there, which is slower; if it hangs: nccl_safe=True"
        yield ok("links", text) if has_p2p else warn("links", text, fix)
    links = {index: _num_nvlinks(handle) for index, handle in handles.items()}
    if any(links.values()):
        yield ok("NVLink", ", ".join(f"GPU {index}: {number} links" for index, number in links.items()))


def _numa(handles: Mapping[int, Any]) -> Finding:
    """Report the NUMA node of each GPU, and whether ranks are bound to the node's cores.

    Args:
        handles: NVML's handles by the GPU's number.
    """
    nodes, by_node = numa.cores_by_node(), dict[str, list[str]]()
    if len(nodes) < 2:
        return ok("NUMA", "the host has one node")
    for index, handle in handles.items():
        by_node.setdefault(str(numa.node_of_gpu(handle)), []).append(str(index))
    unknown = by_node.keys() - nodes.keys()
    near = [
        f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(gpus)} at "
        + ("a node that the host does not name" if node in unknown else f"node {node} (cores {nodes[node]})")
        for node, gpus in sorted(by_node.items())
    ]
    if reason := numa.reason_against():
        return ok("NUMA", f"{'; '.join(near)}. Ranks are not bound: {reason}")
    if len(unknown) == len(by_node):
        return ok("NUMA", f"{'; '.join(near)}. Ranks are not bound")
    return ok("NUMA", f"{'; '.join(near)}. Ranks are bound to these cores; bind_cores=False leaves that")


def _num_nvlinks(handle: Any) -> int:
    """Return the number of a GPU's NVLinks that are up."""
    num_up = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            num_up += pynvml.nvmlDeviceGetNvLinkState(handle, link) == pynvml.NVML_FEATURE_ENABLED
        except pynvml.NVMLError as error:
            if error.value not in _NO_NVLINK:
                raise
            break
    return num_up


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
