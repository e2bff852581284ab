"""The environment variables from which torch's GPU allocator reads its settings when torch is imported."""

from __future__ import annotations

import os
from importlib import metadata

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Newer versions of torch read both, and the second wins."""
_FIRST_TORCH_WITH_ALLOC_CONF = (2, 10)


def set_variables() -> list[str]:
    """Return those of the variables that are set, as 'NAME=value'."""
    return [f"{name}={os.environ[name]}" for name in _VARIABLES if os.environ.get(name)]


def variable() -> str:
    """Return the name of the variable to set for the version of torch that is installed."""
    version = tuple(int(part) for part in metadata.version("torch").split(".")[:2])
    return _VARIABLES[0 if version >= _FIRST_TORCH_WITH_ALLOC_CONF else 1]
