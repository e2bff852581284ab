"""Saved variables of a folder that nobody has trusted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nbgpu.engine.saved_variables import rank_files
from nbgpu.engine.saved_variables.describing import Describer
from nbgpu.engine.saved_variables.rank_files import Stored
from nbgpu.engine.saved_variables.rebuilding import NeedsTrust, Rebuilder


def rebuilder(nodes: list[dict[str, Any]], trust: bool = False) -> Rebuilder:
    stored = Stored({}, None, nodes, [], [], {})
    return Rebuilder(stored, {}, torch.device("cpu"), trust)


def test_an_imported_class_gets_no_attributes_from_the_folder(tmp_path: Path) -> None:
    """This one removes the file of its name when its object ends."""
    victim = tmp_path / "victim"
    victim.touch()
    made_of = {"is": "imported", "module": "tempfile", "name": "_TemporaryFileCloser"}
    state = [["name", str(victim)], ["delete", True], ["close_called", False], ["file", 1]]
    nodes: list[dict[str, Any]] = [{"is": "object", "class": {"#": 1}, "state": state}, made_of]
    with pytest.raises(NeedsTrust, match=r"an object of tempfile\._TemporaryFileCloser"):
        rebuilder(nodes).value({"#": 0})
    assert victim.exists()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("builtins", "eval"),
        ("os", "system"),
        ("torch", "os.system"),
        ("os", "popen"),
        ("subprocess", "Popen"),
        ("shutil", "rmtree"),
    ],
)
def test_what_runs_programs_is_refused_under_every_name(module: str, name: str) -> None:
    nodes = [{"is": "imported", "module": module, "name": name}]
    with pytest.raises(NeedsTrust):
        rebuilder(nodes).value({"#": 0})
    assert callable(rebuilder(nodes, trust=True).value({"#": 0}))


def test_functions_of_libraries_are_rebuilt_without_trust() -> None:
    for module, name in (("torch.nn.functional", "relu"), ("math", "sqrt"), ("collections", "OrderedDict")):
        assert callable(rebuilder([{"is": "imported", "module": module, "name": name}]).value({"#": 0}))


def test_a_module_of_torch_is_rebuilt_without_trust() -> None:
    made_of = {"is": "imported", "module": "torch.nn.modules.activation", "name": "ReLU"}
    nodes = [{"is": "object", "class": {"#": 1}, "state": [["inplace", True], ["training", False]]}, made_of]
    relu = rebuilder(nodes).value({"#": 0})
    assert isinstance(relu, torch.nn.ReLU)
    assert relu.inplace


def test_a_weight_that_knows_its_model_is_still_the_models(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.owner = model  # type: ignore[assignment]
    describer = Describer(torch.device("cpu"))
    for name, value in {"weight": model.weight, "model": model}.items():
        assert not describer.add(name, value)
    rank_files.write(tmp_path / "rank", describer, describer.add_random_state())
    stored = rank_files.read(tmp_path / "rank")
    again = Rebuilder(stored, {}, torch.device("cpu"), trust=False)
    weight, rebuilt = (again.value(stored.variables[name]) for name in ("weight", "model"))
    assert rebuilt.weight is weight
    assert weight.owner is rebuilt
    assert torch.equal(weight, model.weight)
