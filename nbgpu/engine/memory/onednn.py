"""oneDNN, which computes convolutions on the CPU, after it was refused memory.

It writes a kernel of machine code for each new shape. Its assembler keeps the first error in a variable of
the thread: once a thread was refused the memory for a kernel it never gets another one, however much is free
again.
"""

from __future__ import annotations

import itertools

import torch

from nbgpu.engine.group import torch_settings
from nbgpu.engine.memory.usage import lacked_a_kernel

_NOTE = (
    "oneDNN, which computes convolutions, cannot make another kernel in this process: this rank computes them without it "
    "from now on, several times slower. A new process has it again, without the rank's variables: %nbgpu restart --rank {rank}"
)
_widths = itertools.count(1013)
"""A convolution of a width that was there before would find its kernel made."""


def mend(error: BaseException, rank: int) -> str:
    """Have this process compute without oneDNN if an error has broken it for good. Call where the memory
    limit is lifted, on the thread that raised the error.

    Returns:
        A sentence about it for the person; empty if nothing is broken.
    """
    if not lacked_a_kernel(error) or _makes_kernels():
        return ""
    torch_settings.forbid_onednn()
    return _NOTE.format(rank=rank)


def _makes_kernels() -> bool:
    image = torch.ones(1, 8, 8, next(_widths), dtype=torch.float32, device="cpu")
    weight = torch.ones(8, 8, 3, 3, dtype=torch.float32, device="cpu")
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            torch.nn.functional.conv2d(image, weight)
    except RuntimeError as error:
        if not lacked_a_kernel(error):
            raise
        return False
    return True
