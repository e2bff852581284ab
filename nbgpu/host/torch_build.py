"""Whether the torch that is installed can use GPUs, without importing it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from nbgpu.errors import ClusterError
from nbgpu.protocol.records import Device

_BUILT_FOR = re.compile(r"^(cuda|hip|rocm)\b[^=\n]*=\s*(.+?)\s*$", re.MULTILINE)
_VERSION = re.compile(r"^__version__\s*=\s*['\"](.+?)['\"]", re.MULTILINE)


def require_for(devices: Sequence[Device]) -> None:
    """Raise a ClusterError if these devices are GPUs and torch is built for the CPU only.

    torch writes what it is built for into torch/version.py. Where nothing can be read there, the ranks find
    out.
    """
    if any(device.kind == "cuda" for device in devices) and (version := _for_the_cpu_only()):
        raise ClusterError(
            f"torch {version} is built for the CPU only, and there are GPUs: {devices[0].name}. Install a torch that is "
            "built for the driver's CUDA (nbgpu doctor says which that is, https://pytorch.org/get-started how), or "
            "start on the CPU: gpus='none', %nbgpu start --gpus none"
        )


def _for_the_cpu_only() -> str:
    """The version of a torch without GPUs; empty for any other, and where it is not known."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return ""
    built_for = dict(_BUILT_FOR.findall(text))
    version = _VERSION.search(text)
    if version is None or "cuda" not in built_for or any(value != "None" for value in built_for.values()):
        return ""
    return version[1]
