"""The switch that turns off the short cuts of distributed cells.

With NBGPU_PLAIN_CELLS=1 in the environment of the notebook's kernel, and so of its engines, ipykernel and
ipyparallel send, run and answer cells in their own way, which takes some milliseconds longer. A fault that
goes away with the switch is in one of the short cuts. An upgrade that moves a private name can cause such a
fault.
"""

from __future__ import annotations

import os

VARIABLE = "NBGPU_PLAIN_CELLS"


def are_plain() -> bool:
    """Whether this process does without the short cuts."""
    return os.environ.get(VARIABLE, "") not in ("", "0")
