"""This rank's IPython shell, which runs the cells and holds the person's variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from IPython.core import page
from IPython.core.error import UsageError
from IPython.core.getipython import get_ipython


def current() -> Any:
    """Return this process's IPython shell; the kernel is `current().kernel`."""
    shell = get_ipython()
    assert shell is not None, "an engine has an IPython shell"
    return shell


def take_over_defaults(shell: Any) -> None:
    """Give the engine's shell those defaults of a notebook's own kernel that an engine of ipyparallel does
    not have."""
    # Figures are shown at the end of the cell. Set as ipykernel sets it: matplotlib need not be installed.
    os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    # Plotly would take an engine for a script and write a page of its own. In Colab and on Kaggle it chooses
    # the right renderer by itself.
    if not {"COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE"} & set(os.environ):
        os.environ.setdefault("PLOTLY_RENDERER", "plotly_mimetype")
    # IPython sets it for scripts that ask whether a person types at them. Lightning does, and then refuses to
    # train with several processes. A rank is one of these processes, as below a launcher.
    vars(sys).pop("ps1", None)
    # The arguments of the fork server are none of a cell's, and argparse and hydra would take them.
    sys.argv[:] = [""]
    # The pager belongs to the page, which the ranks cannot reach.
    shell.set_hook("show_in_pager", page.as_hook(_print), 0)
    shell.ask_exit = _refuse_to_exit


def _print(shown: str | Mapping[str, str], *_: Any, **__: Any) -> None:
    print(shown if isinstance(shown, str) else shown["text/plain"])  # noqa: T201 - this is the cell's output


def _refuse_to_exit() -> None:
    raise UsageError(
        "exit() would end this rank and lose its variables. %nbgpu stop ends the cluster, %nbgpu restart --rank K gives "
        "one rank a new process"
    )
