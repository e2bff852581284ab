"""Has a build or an installation of nbgpu write the stubs for editors, which are not committed."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class StubsHook(BuildHookInterface):
    """Writes the stubs beside their modules before the wheel is put together."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the stubs; hatchling calls this before each build."""
        root = Path(self.root)
        sys.path.insert(0, str(root))
        runpy.run_path(str(root / "docs" / "generate_stub.py"))["write"](root / "nbgpu")
