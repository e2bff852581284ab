"""Lazy import of a module that is slow to import and rarely used.

MONAI imports jsonschema, which imports `rfc3987_syntax` if JupyterLab has installed it. That takes 1.7 s of
CPU time in each rank before its first training, to build a grammar of international URIs (measured with
rfc3987-syntax 1.1 on two cores). A stand-in loads the module when such a URI is checked.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_NAME = "rfc3987_syntax"


class _LazyModule(ModuleType):
    """A stand-in for the module until one of its names is used."""

    def is_valid_syntax(self, term: str, value: str) -> bool:
        """Return whether a text matches the grammar's rule `term`, such as 'iri'. jsonschema imports this
        function by name, so it must exist before the module is loaded."""
        is_valid: bool = _load().is_valid_syntax(term, value)
        return is_valid

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_load(), name)


def _load() -> ModuleType:
    """Replace the stand-in by the real module, and return that."""
    if isinstance(sys.modules.get(_NAME), _LazyModule):
        del sys.modules[_NAME]
    return import_module(_NAME)


def put_off() -> None:
    """Delay the import of the module until it is used. Does nothing if the module is already imported or not
    installed."""
    if _NAME not in sys.modules and (spec := find_spec(_NAME)) is not None:
        sys.modules[_NAME] = stand_in = _LazyModule(_NAME)
        stand_in.__spec__ = spec
