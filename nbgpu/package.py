"""The folder in which nbgpu is installed."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent
"""Symbolic links in the path are not resolved, because tracebacks do not resolve them, either."""
STATIC = PACKAGE / "static"
"""The scripts and styles for web pages, which are built from widgets/."""
