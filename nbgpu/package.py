"""The folder that nbgpu is installed in."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent
"""Links in the path are kept, because the file names in tracebacks keep them, too."""
STATIC = PACKAGE / "static"
"""What pages load: the scripts and styles that are built from widgets/."""
