"""Which objects of training libraries a rank warns of."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from IPython.core.events import EventManager

from nbgpu.engine.variables import library_objects


class Trainer:
    """Lightning's class, as far as it matters here."""

    def __init__(self, world_size: int = 1) -> None:
        self.world_size = world_size


class TrainerOfACell(Trainer):
    """A subclass, whose module is not Lightning's."""


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The shell of a rank of two."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    lightning = ModuleType("lightning.pytorch")
    vars(lightning)["Trainer"] = Trainer
    monkeypatch.setitem(sys.modules, "lightning.pytorch", lightning)
    shell: Any = SimpleNamespace(user_ns={})
    shell.events = EventManager(shell, {"post_run_cell": lambda _: None})
    library_objects.install(shell)
    return shell


def test_a_trainer_of_a_class_that_a_cell_has_made_is_warned_of_once(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    shell.user_ns |= {"alone": TrainerOfACell(), "together": TrainerOfACell(world_size=2)}
    shell.events.trigger("post_run_cell", None)
    shell.events.trigger("post_run_cell", None)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("alone is configured for a single process, and each rank trains alone")
