"""What is brought to a machine with a GPU and no network is all that nbgpu imports and that machine lacks."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
from conftest import REPOSITORY
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from nbgpu.machine.requirements import requirements


@pytest.fixture(scope="module")
def wheels() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_wheels", REPOSITORY / "tests/gpu/wheels.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_dependency_is_there_or_brought(wheels: ModuleType) -> None:
    brought = set(wheels.wanted())
    needed = {canonicalize_name(requirement.name) for requirement in requirements()}
    assert needed - wheels.THERE <= brought
    assert "torch" not in brought
    # What they need in turn comes as well.
    assert {"tornado", "pydantic-core", "traitlets", "debugpy"} <= brought


def test_each_comes_in_the_version_of_the_constraints(wheels: ModuleType) -> None:
    pins = [Requirement(pin) for pin in wheels.pins(wheels.wanted())]
    assert [pin.name for pin in pins] == wheels.wanted()
    assert all(len(pin.specifier) == 1 for pin in pins)
    with pytest.raises(SystemExit, match="does not pin no-such-package, nor-this"):
        wheels.pins(["no-such-package", "monai", "nor-this"])
