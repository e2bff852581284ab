"""A process in which oneDNN was refused memory for a kernel convolves all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

_REFUSED = """
import resource, torch
from nbgpu.engine.group.torch_settings import TorchSettings
from nbgpu.engine.memory import usage

torch.set_num_threads(1)

def convolve(channels, width):
    image, weight = torch.ones(1, channels, width, width), torch.ones(channels, channels, 3, 3)
    return lambda: torch.nn.functional.conv2d(image, weight)

def refused_a_kernel():
    "Keep the memory from growing, until a result finds room in the heap and a kernel does not."
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    convolve(8, 8)()
    for channels in (8, 16, 24, 32):
        for width in range(9, 100):
            convolution = convolve(channels, width)
            resource.setrlimit(resource.RLIMIT_DATA, (2**20, limits[1]))
            try:
                convolution()
            except (RuntimeError, MemoryError) as error:
                if usage.lacked_a_kernel(error):
                    return error
                # Another lack of memory breaks nothing.
                resource.setrlimit(resource.RLIMIT_DATA, limits)
                assert usage.mend_onednn(error, 1) == "", error
            finally:
                resource.setrlimit(resource.RLIMIT_DATA, limits)

error = refused_a_kernel()
assert error is not None, "a kernel was never refused memory"
try:
    convolve(8, 200)()
except RuntimeError as again:
    assert usage.lacked_a_kernel(again), again
else:
    raise AssertionError("oneDNN makes kernels again by itself: `usage.mend_onednn` is not needed any more")
settings = TorchSettings()  # of a run, taken before
print(usage.mend_onednn(error, 1))
convolve(8, 201)()
with settings.in_force():
    convolve(8, 202)()
with TorchSettings().in_force():
    convolve(8, 203)()
convolve(8, 204)()
assert not torch._C._get_mkldnn_enabled()
"""


@pytest.mark.slow
def test_it_computes_without_onednn_and_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _REFUSED], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "computes them without it" in done.stdout
    assert "%nbgpu restart --rank 1" in done.stdout
