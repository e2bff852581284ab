"""Has a process launch from the template (warm_start.py) once it imports what launches. It costs all other
processes next to nothing."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_LAUNCHES = "nbgpu.host.launch"


class _Hook:
    """Changes the module that launches when it is imported."""

    @classmethod
    def find_spec(cls, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _LAUNCHES:
            return None
        sys.meta_path.remove(cls)
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def execute_and_change(module: Any) -> None:
            from warm_start import change

            execute(module)
            change(module)

        spec.loader.exec_module = execute_and_change
        return spec


def install() -> None:
    """Watch for the import. Does nothing where it is watched for already."""
    if _LAUNCHES not in sys.modules and _Hook not in sys.meta_path:
        sys.meta_path.insert(0, _Hook)
