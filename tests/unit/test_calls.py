"""What the notebook's side calls on ranks is there, and nothing is called in another way."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import nbgpu
from nbgpu.protocol.calls import Call

PACKAGE = Path(nbgpu.__file__).parent
PROCESSES = {"nbgpu.engine.nursery", "nbgpu.engine.trial"}
"""Modules that run as programs of their own."""


@pytest.mark.parametrize("call", Call)
def test_a_call_names_a_function(call: Call) -> None:
    assert callable(getattr(import_module(call.module), call.function))


def test_no_other_place_names_the_engines_functions() -> None:
    on_the_notebooks_side = [
        *PACKAGE.glob("*.py"),
        *PACKAGE.glob("client/**/*.py"),
        *PACKAGE.glob("ui/**/*.py"),
    ]
    named = {
        f"{path.name}:{node.lineno}: {node.value}"
        for path in on_the_notebooks_side
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("nbgpu.engine.")
        and node.value not in PROCESSES
    }
    assert named == set()
