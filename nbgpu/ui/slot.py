"""Outputs of a notebook that are replaced later, and the ids by which the kernel and a page find them."""

from __future__ import annotations

import uuid
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display, update_display
from ipywidgets import DOMWidget

from nbgpu.errors import RunError

_VIEW = "application/vnd.jupyter.widget-view+json"
"""The type of an output that names a widget, in version 2.0 of the protocol that ipywidgets 7 and 8 have."""


def new_slot() -> str:
    """An id for an output that will be replaced."""
    return f"nbgpu-{uuid.uuid4().hex}"


def head_of(slot: str) -> str:
    """The id of the output above the one called `slot`: the head of a run that stands above its curves."""
    return f"{slot}-head"


def open_head(slot: str) -> None:
    """Display an empty output above another one, in whose place the head of a run appears later."""
    display({}, metadata=slot_metadata(head_of(slot)), raw=True, display_id=head_of(slot))


def clear_head(slot: str) -> None:
    """Empty the place for the head again, before another run begins."""
    update_display({}, metadata=slot_metadata(head_of(slot)), raw=True, display_id=head_of(slot))


def require_notebook(instead: str) -> None:
    """Raise a RunError where there is no IPython to display anything; `instead` says what a script can do."""
    if get_ipython() is None:
        raise RunError(f"a panel needs a notebook. In a script, read {instead}")


def display_in(slot: str, widget: DOMWidget, text: str) -> None:
    """Display a widget as an output that is replaced later. Frontends without widgets show `text`."""
    data = {**view_of(widget), "text/plain": text}
    display(data, metadata=slot_metadata(slot), raw=True, display_id=slot)


def display_with_page(widget: DOMWidget, page: str, text: str) -> None:
    """Display a widget, and for a notebook that is opened after the kernel has ended a page of HTML."""
    data = {**view_of(widget), "text/html": page, "text/plain": text}
    display(data, metadata={"nbgpu": {"page": True}}, raw=True)


def view_of(widget: DOMWidget) -> dict[str, Any]:
    """The widget as an output that a page draws. ipywidgets before 8 can only display one itself, with no id
    and nothing beside it."""
    return {_VIEW: {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}}


def slot_metadata(slot: str, final: str = "") -> dict[str, Any]:
    """The metadata that mark an output in the notebook, so that a page can find it.

    Args:
        slot: the output's display_id.
        final: a mark of the final output; empty for the output that is to be replaced.
    """
    return {"nbgpu": {"slot": slot, "final": final}}
