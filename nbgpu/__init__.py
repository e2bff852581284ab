"""nbgpu: interactive work on several GPUs, in JupyterLab.

The import is fast: names are imported when they are used, and torch is imported only by the ranks. On systems
other than Linux the import warns and names alternatives; there, only errors and settings can be used.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nbgpu.machine import operating_system
from nbgpu.version import VERSION

if TYPE_CHECKING:
    from nbgpu.client.cluster.cluster import Cluster, attach, current
    from nbgpu.client.runs.run import Run
    from nbgpu.client.scaling.measurements import measure_links, memory, nccl_times, time_step
    from nbgpu.client.scaling.starting import scaling, study
    from nbgpu.client.scaling.study import Study
    from nbgpu.client.scaling.trial import try_advice
    from nbgpu.client.sweeps.starting import sweep
    from nbgpu.client.sweeps.sweep import Sweep
    from nbgpu.config import ClusterConfig, TrainConfig
    from nbgpu.errors import (
        ClusterError,
        ConfigError,
        DataError,
        NbgpuError,
        NoClusterError,
        OutOfMemoryError,
        RankError,
        RunError,
        TransferError,
    )
    from nbgpu.ui.controls.control_panel import controls
    from nbgpu.ui.overlap import overlap

__version__ = VERSION

__all__ = [
    "Cluster",
    "ClusterConfig",
    "ClusterError",
    "ConfigError",
    "DataError",
    "NbgpuError",
    "NoClusterError",
    "NoFreeGpuError",
    "OutOfMemoryError",
    "RankError",
    "Run",
    "RunError",
    "Study",
    "Sweep",
    "TrainConfig",
    "TransferError",
    "attach",
    "controls",
    "current",
    "measure_links",
    "memory",
    "nccl_times",
    "overlap",
    "scaling",
    "study",
    "sweep",
    "time_step",
    "try_advice",
]

_MODULES = {
    "nbgpu.client.cluster.cluster": ("Cluster", "attach", "current"),
    # The text of a distributed cell is transformed to a call of this function. Such calls stay in users'
    # histories, so the name must not change.
    "nbgpu.client.notebook.magics": ("run_cell",),
    "nbgpu.client.runs.run": ("Run",),
    "nbgpu.client.scaling.measurements": ("measure_links", "memory", "nccl_times", "time_step"),
    "nbgpu.client.scaling.starting": ("scaling", "study"),
    "nbgpu.client.scaling.study": ("Study",),
    "nbgpu.client.scaling.trial": ("try_advice",),
    "nbgpu.client.sweeps.starting": ("sweep",),
    "nbgpu.client.sweeps.sweep": ("Sweep",),
    "nbgpu.config": ("ClusterConfig", "TrainConfig"),
    "nbgpu.errors": tuple(name for name in __all__ if name.endswith("Error")),
    "nbgpu.ui.controls.control_panel": ("controls",),
    "nbgpu.ui.overlap": ("overlap",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

_ANYWHERE = {*_MODULES["nbgpu.config"], *_MODULES["nbgpu.errors"]}
"""The names that work on every operating system, because they need no ranks."""

if _why_not := operating_system.why_not():
    warnings.warn(_why_not, stacklevel=2)

_SHOWN = {"Cluster", "Run", "Sweep", "Study", "attach", "controls", "sweep", "scaling", "study", "try_advice"}
"""The names whose runs, sweeps and studies are displayed, for which the user interface is connected."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nbgpu' has no attribute {name!r}")
    if name not in _ANYWHERE:
        _require_linux()
    if name in _SHOWN:
        import_module("nbgpu.ui").connect()
    value = getattr(import_module(_HOMES[name]), name)
    # Stored, so that the next use, as in every distributed cell, does not call this function.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


def _require_linux() -> None:
    """Raise a ClusterError on other operating systems."""
    if why_not := operating_system.why_not():
        from nbgpu.errors import ClusterError

        raise ClusterError(why_not)


def load_ipython_extension(shell: Any) -> None:
    """Load the extension; called by `%load_ext nbgpu`."""
    _require_linux()
    from nbgpu.client.engines import preloading
    from nbgpu.client.host import gpu_choice

    # This comes first, because it continues in other processes while this one imports the rest.
    preloading.begin(gpu_choice.choose)
    from nbgpu import ui
    from nbgpu.client.ipykernel.shell import allow_widgets
    from nbgpu.client.notebook import magics

    allow_widgets()
    ui.connect()
    ui.connect_cells()
    magics.load(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Unload the extension; called by `%unload_ext nbgpu`."""
    from nbgpu.client.engines import preloading
    from nbgpu.client.notebook import magics

    preloading.dismiss()
    magics.unload(shell)
