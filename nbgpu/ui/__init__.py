"""The views and controls of cells, of runs, of sweeps and of studies."""

from __future__ import annotations

from nbgpu.client import presenting


def connect() -> None:
    """Have the client show its runs, sweeps and studies here."""
    from nbgpu.ui import presenter

    presenting.presenter = presenter


def connect_cells() -> None:
    """Have the client show its cells here, in a notebook."""
    from nbgpu.ui import presenter

    presenting.cell_presenter = presenter
