"""A Stop button under a distributed cell that takes long, shown while the cell runs."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import ipywidgets
from IPython.display import display, update_display

from nbgpu.client.ipykernel.page import answer_while_busy, has_frontend, has_subshells

CELL_TOOLTIP = "Stop this cell on all ranks; they keep their variables"


def offer(stop: Callable[[], None], tooltip: str = CELL_TOOLTIP) -> Callable[[], None]:
    """Show the button if there is a page; return a function that removes the button.

    Before ipykernel 7.1 a press would be handled only after the end of the cell, so no button is shown.

    Args:
        stop: called on another thread when the button is pressed.
        tooltip: a text about the effect of the button.
    """
    if not has_frontend() or not has_subshells():
        return lambda: None
    button = ipywidgets.Button(description="Stop", icon="stop", tooltip=tooltip)
    answer_while_busy(button)

    def on_click(_: ipywidgets.Button) -> None:
        button.disabled = True
        stop()

    button.on_click(on_click)
    slot = f"nbgpu-stop-{uuid.uuid4().hex}"
    # By these metadata the page finds the button, and removes it if the kernel cannot.
    display(button, display_id=slot, metadata={"nbgpu": {"button": True}})

    def remove() -> None:
        # The output becomes empty, because otherwise a saved notebook would keep it without its widget.
        update_display({}, raw=True, display_id=slot)
        button.close()

    return remove
