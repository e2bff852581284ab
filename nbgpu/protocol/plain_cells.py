"""One switch for all that makes an empty distributed cell quick, and takes liberties with ipykernel and ipyparallel for it.

With NBGPU_PLAIN_CELLS=1 in the environment of the notebook's kernel, and so in that of its engines, cells are sent, run and answered
the way in which these libraries do it. That is slower, and nothing else: what goes wrong only without it is the fault of one
of the accelerations, as after an upgrade that moved a private name.
"""

from __future__ import annotations

import os

VARIABLE = "NBGPU_PLAIN_CELLS"


def are_plain() -> bool:
    """Whether the accelerations are left out in this process."""
    return os.environ.get(VARIABLE, "") not in ("", "0")
