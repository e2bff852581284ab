"""The views and controls of cells, of runs, of sweeps and of studies."""

from __future__ import annotations


def connect() -> None:
    """Make the client show its runs here. The client does not know the widgets, and works without them,
    too."""
    from nbgpu.client.runs import predicting, run
    from nbgpu.ui import presenter

    run.presenter = presenter
    predicting.presenter = presenter


def connect_cells() -> None:
    """Make the client show its cells here. This is apart from `connect`, because a script has no cells, and
    would import IPython for them before it starts a cluster."""
    from nbgpu.client.cells import cell as cells
    from nbgpu.client.cells import outputs
    from nbgpu.client.notebook import magics
    from nbgpu.client.scaling import cell_study
    from nbgpu.ui import presenter

    cell_study.draw = presenter.bundle_of_cell_study
    cells.offer_stop = presenter.offer_stop
    outputs.open_view = presenter.open_text
    magics.text_of_devices = presenter.text_of_devices


def connect_sweeps() -> None:
    """Make the client show its sweeps here. This is apart from `connect`, because few people use sweeps."""
    from nbgpu.client.sweeps import sweep
    from nbgpu.ui import presenter

    sweep.presenter = presenter


def connect_studies() -> None:
    """Make the client show its studies here, for the same reason apart from `connect`."""
    from nbgpu.client.scaling import study
    from nbgpu.ui import presenter

    study.presenter = presenter
