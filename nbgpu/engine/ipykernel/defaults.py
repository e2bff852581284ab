"""What people know from a notebook's own kernel, and an engine of ipyparallel does otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from IPython.core import page
from IPython.core.error import UsageError


def take_over(shell: Any) -> None:
    """Gives the engine's shell the habits of a kernel's."""
    # Figures show themselves at the end of the cell. As ipykernel does it: matplotlib need not be there.
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    # Plotly would take an engine for a script and write a page of its own. What it finds out by itself in Colab and on
    # Kaggle is right.
    if not {"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"} & set(os.environ):
        os.environ.setdefault("PLOTLY_RENDERER", "plotly_mimetype")
    # The pager is a part of the page, which the ranks cannot reach.
    shell.set_hook("show_in_pager", page.as_hook(_print), 0)
    shell.ask_exit = _refuse_to_exit


def _print(shown: str | Mapping[str, str], *_: Any, **__: Any) -> None:
    print(shown if isinstance(shown, str) else shown["text/plain"])  # noqa: T201 - the cell's output


def _refuse_to_exit() -> None:
    raise UsageError(
        "exit() would end this rank and lose its variables. %nbgpu stop ends the cluster, %nbgpu restart --rank K gives "
        "one rank a new process"
    )
