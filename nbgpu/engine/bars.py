"""Progress bars of the ranks are text: a row for each rank, which the notebook draws in place.

`tqdm.auto` sees a Jupyter kernel in an engine and would make widgets, one for each bar and rank, that live in the rank.
"""

from __future__ import annotations

import sys
from types import ModuleType


def draw_as_text() -> None:
    """Lets `tqdm.auto` choose text in this process; `tqdm.notebook` still makes widgets for who asks for them."""
    if "tqdm.std" not in sys.modules:
        # torch has imported it wherever it is installed.
        return
    chosen = ModuleType("tqdm.autonotebook")
    chosen.__dict__.update({name: getattr(sys.modules["tqdm.std"], name) for name in ("tqdm", "trange")})
    sys.modules["tqdm.autonotebook"] = chosen
