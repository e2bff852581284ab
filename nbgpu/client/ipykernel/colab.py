"""What Colab's page has to be told before it shows the panels."""

from __future__ import annotations

import sys
from importlib import import_module


def is_here() -> bool:
    """Whether this is a kernel of Colab's, which loads its own package before any cell."""
    return "google.colab" in sys.modules


def allow_widgets() -> None:
    """Let the page load widgets that it does not bring itself, such as the panels; nothing elsewhere."""
    if is_here():
        import_module("google.colab.output").enable_custom_widget_manager()
