"""Outputs of a notebook that are replaced later (slots), and the ids by which the kernel and a page find
them."""

from __future__ import annotations

import uuid
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display, update_display
from ipywidgets import DOMWidget

from nbgpu.errors import RunError

_VIEW = "application/vnd.jupyter.widget-view+json"
"""The MIME type of an output that refers to a widget, in version 2.0 of the protocol (ipywidgets 7 and 8)."""


def new_slot() -> str:
    """An id for an output that will be replaced."""
    return f"nbgpu-{uuid.uuid4().hex}"


def head_of(slot: str) -> str:
    """The id of the output for the head of a run, which is above the output `slot` with its curves."""
    return f"{slot}-head"


def open_head(slot: str) -> None:
    """Display an empty output, which the head of a run replaces later. Call this before `slot` is
    displayed."""
    display({}, metadata=slot_metadata(head_of(slot)), raw=True, display_id=head_of(slot))


def clear_head(slot: str) -> None:
    """Empty the output for the head, before another run begins."""
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
    """Display a widget, with a page of HTML that a notebook without its kernel shows instead."""
    data = {**view_of(widget), "text/html": page, "text/plain": text}
    display(data, metadata={"nbgpu": {"page": True}}, raw=True)


def view_of(widget: DOMWidget) -> dict[str, Any]:
    """The MIME bundle of a widget. ipywidgets 7 itself can only display a widget without an id and without
    other MIME types."""
    return {_VIEW: {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}}


def slot_metadata(slot: str, final: str = "") -> dict[str, Any]:
    """The metadata by which a page finds an output in the notebook.

    Args:
        slot: the output's display_id.
        final: an id of the final content; empty while the output will be replaced.
    """
    return {"nbgpu": {"slot": slot, "final": final}}
