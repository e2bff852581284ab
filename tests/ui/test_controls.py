"""The controls come from the settings' models, and from nowhere else."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Literal

import ipywidgets as w
import pytest
from pydantic import BaseModel, Field

import nbgpu
from nbgpu.config import TRAIN_CONFIGS, ClusterConfig
from nbgpu.settings import control, control_fields
from nbgpu.ui.controls import _Controls, control_for


class Sizes(BaseModel):
    """One field of each kind."""

    mode: Literal["off", "on"] = Field("on", description="a choice", json_schema_extra=control("A"))
    num_layers: int = Field(3, ge=1, le=9, description="a number", json_schema_extra=control("A"))
    share: float = Field(0.5, gt=0, le=1, description="a share", json_schema_extra=control("B"))
    limit: int | None = Field(None, ge=2, le=5, description="or none", json_schema_extra=control("B"))
    name: str = Field("x", description="a word", json_schema_extra=control("B"))
    quick: bool = Field(True, description="yes or no", json_schema_extra=control("B"))
    hidden: int = Field(1, description="for files only")


def made() -> dict[str, w.Widget]:
    return {name: control_for(name, field) for _, name, field in control_fields(Sizes)}


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("mode", w.Dropdown, "on"),
        ("num_layers", w.BoundedIntText, 3),
        ("share", w.BoundedFloatText, 0.5),
        ("limit", w.BoundedIntText, 2),
        ("name", w.Text, "x"),
        ("quick", w.Checkbox, True),
    ],
)
def test_each_kind_of_field_gets_its_control(name: str, kind: type[w.Widget], value: Any) -> None:
    widget = made()[name]
    assert type(widget) is kind
    assert widget.value == value
    assert widget.description == name.replace("_", " ")
    assert str(Sizes.model_fields[name].description) in widget.tooltip


def test_bounds_reach_the_control_and_its_tooltip() -> None:
    widget = made()["num_layers"]
    assert (widget.min, widget.max) == (1, 9)
    assert "1 to 9" in widget.tooltip


def test_a_field_for_files_only_has_no_control() -> None:
    assert "hidden" not in made()


def test_a_number_with_no_bounds_cannot_be_a_control() -> None:
    with pytest.raises(TypeError, match="lowest and a highest"):
        control_for("hidden", Sizes.model_fields["hidden"])


@pytest.mark.parametrize("recipe", sorted(TRAIN_CONFIGS))
def test_every_marked_field_is_in_the_panel(recipe: str) -> None:
    panel = _Controls(recipe, cluster=None)
    names = [name for _, name, _ in control_fields(TRAIN_CONFIGS[recipe])]
    assert list(panel._settings) == names
    devices = ["gpus", "ranks", "memory_limit", "release_after_s"]
    assert [name for _, name, _ in control_fields(ClusterConfig)] == devices


def test_a_bad_value_is_said_in_words_and_nothing_is_lost() -> None:
    panel = _Controls("autoencoder", cluster=None)
    panel._settings["patch_size"].value = 30
    panel._on_start()
    assert "patch_size = 30 is not valid" in panel._said.value
    assert 'role="alert"' in panel._said.value
    assert panel._settings["patch_size"].value == 30
    assert not panel._start.disabled


def _wait_until_free(panel: _Controls) -> None:
    give_up_s = time.monotonic() + 120
    while panel._busy:
        assert time.monotonic() < give_up_s, panel._said.value
        time.sleep(0.05)


def test_plan_and_search_speak_below_the_buttons(cluster2: nbgpu.Cluster) -> None:
    # What a Stop in the middle of this import does is test_interrupts's.
    cluster2.execute("import torch._dynamo")
    panel = _Controls("autoencoder", cluster2)
    for name, value in {"data": "phantoms", "patch_size": 16, "batch_size": 3}.items():
        panel._settings[name].value = value
    panel._plan.click()
    assert panel._start.disabled
    assert panel._stop.disabled
    _wait_until_free(panel)
    assert "3 samples for each rank and micro-batch, 6 in each" in panel._said.value
    assert "monospace" in panel._said.value

    panel._find.click()
    assert not panel._stop.disabled
    panel._stop.click()
    _wait_until_free(panel)
    assert "stopped" in panel._said.value
    assert panel._settings["batch_size"].value == 3
    assert not panel._find.disabled


def test_a_search_shows_its_pictures_and_has_no_batches(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    panel = _Controls("microstructure", cluster2)
    assert panel._find.layout.display == "none"
    settings = {"limit_to": 4, "shape": (8, 8, 8), "steps": 4, "val_every": 2, "runs_dir": str(tmp_path)}
    run = cluster2.train("microstructure", **settings)
    panel._show(run)
    pictures = panel._place.children[2]
    run.wait()
    assert "step 4: the volume as a block" in pictures.value
    assert 'src="data:image/png;base64,' in pictures.value
