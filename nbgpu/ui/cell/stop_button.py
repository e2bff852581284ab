"""A Stop button under a distributed cell that takes long, for as long as it runs."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import ipywidgets
from IPython.display import display, update_display

from nbgpu.client.ipykernel.page import answer_while_busy, has_frontend, has_subshells

CELL_TOOLTIP = "Stop this cell on all ranks; they keep their variables"


def offer(stop: Callable[[], None], tooltip: str = CELL_TOOLTIP) -> Callable[[], None]:
    """Shows the button where there is a page to press it; returns what takes it away again.

    On kernels older than ipykernel 7.1 a press would be heard after the cell's end: none is shown there.

    Args:
        stop: called when it is pressed, on another thread.
        tooltip: what it does, in words.
    """
    if not has_frontend() or not has_subshells():
        return lambda: None
    button = ipywidgets.Button(description="Stop", icon="stop", tooltip=tooltip)
    answer_while_busy(button)

    def obey(_: ipywidgets.Button) -> None:
        button.disabled = True
        stop()

    button.on_click(obey)
    slot = f"nbgpu-stop-{uuid.uuid4().hex}"
    display(button, display_id=slot, metadata={"nbgpu": {"button": True}})

    def take_away() -> None:
        # An empty output in its place: a saved notebook would keep a button whose widget is gone.
        update_display({}, raw=True, display_id=slot)
        button.close()

    return take_away
