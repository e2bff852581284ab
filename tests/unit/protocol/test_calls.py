"""What the notebook's side calls on ranks is there, and nothing is called in another way."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import nbgpu
from nbgpu.protocol.calls import Call

PACKAGE = Path(nbgpu.__file__).parent
PROCESSES = {
    "nbgpu.engine.process.fork_server",
    "nbgpu.engine.process.host",
    "nbgpu.engine.group.probe",
    "nbgpu.engine.train",
}
"""Modules that run as programs of their own."""


@pytest.mark.parametrize("call", Call)
def test_a_call_names_a_function(call: Call) -> None:
    assert callable(getattr(import_module(call.module), call.function))


@pytest.mark.slow
def test_no_other_place_names_the_engines_functions() -> None:
    on_the_ranks = {"engine", "recipes"}
    on_the_notebooks_side = [
        path
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in on_the_ranks and path.name != "calls.py"
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
