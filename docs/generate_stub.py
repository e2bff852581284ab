"""Writes nbgpu/client/cluster/recipe_calls.pyi from the settings: the parameters that editors and type
checkers show for `cluster.train("autoencoder", ...)` and its kin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nbgpu.client.cluster import recipe_calls
from nbgpu.config import TRAIN_CONFIGS, presets, signatures

STUB = Path(recipe_calls.__file__).with_suffix(".pyi")

_HEAD = '''\
"""Written by `make docs` from nbgpu/config/: the parameters of each recipe. See recipe_calls.py."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, overload

from nbgpu.client.runs.batch_sizes import BatchSizes
from nbgpu.client.runs.plan import Plan
from nbgpu.client.runs.run import Run
from nbgpu.config import TrainConfig

class RecipeCalls(ABC):
    @abstractmethod
    def train_with(self, config: TrainConfig) -> Run: ...
    @abstractmethod
    def plan_with(self, config: TrainConfig) -> Plan: ...
    @abstractmethod
    def find_batch_size_with(
        self, config: TrainConfig, stop: threading.Event | None = None
    ) -> BatchSizes: ...
'''

_CALLS = {
    "train": ("", "Run"),
    "plan": ("", "Plan"),
    "find_batch_size": ("stop: threading.Event | None = None", "BatchSizes"),
}
"""By name: a parameter behind the recipe, and what the call returns."""
_DOCUMENTED = "train"
"""The call whose parameters are explained; the others take the same."""


def stub() -> str:
    """The whole file."""
    return _HEAD + "".join(line + "\n" for name in _CALLS for line in _overloads(name))


def _overloads(name: str) -> Iterator[str]:
    first, returns = _CALLS[name]
    for recipe, model in TRAIN_CONFIGS.items():
        of_preset = [f'"{each}"' for each in ("", *presets.names(recipe))]
        yield "    @overload"
        yield f"    def {name}("
        yield "        self,"
        yield f'        recipe: Literal["{recipe}"],'
        if first:
            yield f"        {first},"
        yield "        *,"
        yield f'        preset: Literal[{", ".join(of_preset)}] = "",'
        for setting in signatures.names_of(model):
            yield f"        {signatures.parameter(model, setting)},"
        if name != _DOCUMENTED:
            yield f"    ) -> {returns}: ..."
            continue
        yield f"    ) -> {returns}:"
        yield f'        """{(model.__doc__ or "").strip()}'
        yield ""
        yield "        Args:"
        yield "            preset: the name of values for the settings that are not given"
        for setting in signatures.names_of(model):
            yield f"            {setting}: {signatures.help_for(model, setting)}"
        yield '        """'
    between = f", {first}" if first else ""
    yield "    @overload"
    yield f"    def {name}(self, recipe: str{between}, **settings: Any) -> {returns}: ..."


if __name__ == "__main__":
    STUB.write_text(stub())
