"""The views and controls that a person sees: of cells, of runs and of sweeps."""

from __future__ import annotations


def connect() -> None:
    """Have the client show its runs and cells here: it does not know the widgets, and works without them, too."""
    from nbgpu.client.cells import cell as cells
    from nbgpu.client.cells import outputs
    from nbgpu.client.runs import run
    from nbgpu.ui import presenter

    run.presenter = presenter
    cells.offer_stop = presenter.offer_stop
    outputs.open_view = presenter.open_text


def connect_sweeps() -> None:
    """The same for sweeps, which few people load."""
    from nbgpu.client.sweeps import sweep
    from nbgpu.ui import presenter

    sweep.presenter = presenter
