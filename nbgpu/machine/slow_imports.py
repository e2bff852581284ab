"""Imports that would take seconds in each rank for what hardly any rank uses.

MONAI imports jsonschema, and that imports `rfc3987_syntax`, where JupyterLab has brought it: 1.7 s of CPU in
each rank before its first training, to build a grammar for checks of international addresses (measured with
rfc3987-syntax 1.1 on two cores). Here the module is loaded when such an address is checked.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_NAME = "rfc3987_syntax"


class _LoadedAtUse(ModuleType):
    """Stands for the module until one of its names is used."""

    def is_valid_syntax(self, term: str, value: str) -> bool:
        """Return whether a text is what the grammar calls `term`, such as 'iri'."""
        is_valid: bool = _load().is_valid_syntax(term, value)
        return is_valid

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_load(), name)


def _load() -> ModuleType:
    if isinstance(sys.modules.get(_NAME), _LoadedAtUse):
        del sys.modules[_NAME]
    return import_module(_NAME)


def put_off() -> None:
    """Have the module loaded when it is used. Does nothing where it is loaded already or not installed."""
    if _NAME not in sys.modules and (spec := find_spec(_NAME)) is not None:
        sys.modules[_NAME] = stand_in = _LoadedAtUse(_NAME)
        stand_in.__spec__ = spec
