"""A start on GPUs with a torch that cannot use them."""

from __future__ import annotations

import sys
from pathlib import Path

import pretend_gpus
import pytest

import nbgpu
from nbgpu.errors import ClusterError
from nbgpu.host import host_checks
from nbgpu.protocol.records import Device

_GPU = Device("cuda", "NVIDIA H100", "GPU-1", 0, 80 * 2**30)
_FOR_CUDA = "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"


def _installed(folder: Path, text: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder / "torch"
    package.mkdir()
    (package / "__init__.py").touch()
    if text is not None:
        (package / "version.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    # One that is imported already is found before any path.
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def test_a_start_is_refused_before_any_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for_the_cpu = _FOR_CUDA.replace("2.13.0", "2.13.0+cpu").replace("'13.0'", "None")
    _installed(tmp_path, for_the_cpu, monkeypatch)
    pretend_gpus.install(pretend_gpus.several(2), patch=monkeypatch)
    with pytest.raises(
        ClusterError, match=r"torch 2.13.0\+cpu is built for the CPU only, and there are GPUs: NVIDIA H100"
    ):
        nbgpu.Cluster(gpus="0,1").start()


@pytest.mark.parametrize(
    "text",
    [
        _FOR_CUDA,
        _FOR_CUDA.replace("'13.0'", "None").replace(
            "hip: Optional[str] = None", "hip: Optional[str] = '7.0'"
        ),
        "",
        None,
    ],
)
def test_any_other_torch_is_left_to_the_ranks(
    text: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _installed(tmp_path, text, monkeypatch)
    host_checks.require_torch_for([_GPU])
