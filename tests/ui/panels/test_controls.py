"""The controls come from the settings' models, and from nowhere else."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import ipywidgets as w
import pytest
from pydantic import BaseModel, Field
from rich.console import Console

import nbgpu
from nbgpu.config import TRAIN_CONFIGS, ClusterConfig, own_file, settings_of, train_config
from nbgpu.config.settings import as_text, control, control_fields
from nbgpu.errors import ConfigError
from nbgpu.text.console import say
from nbgpu.ui.controls import fields
from nbgpu.ui.controls.control_panel import _Controls, controls
from nbgpu.ui.run import terminal
from nbgpu.ui.run.snapshot import report_html


class Sizes(BaseModel):
    """One field of each kind."""

    mode: Literal["off", "on"] = Field("on", description="a choice", json_schema_extra=control("A"))
    level: Literal[1, 2] | None = Field(None, description="a choice or none", json_schema_extra=control("A"))
    num_layers: int = Field(3, ge=1, le=9, description="a number", json_schema_extra=control("A"))
    hidden: int = Field(64, description="any whole number", json_schema_extra=control("A"))
    share: float = Field(0.5, gt=0, le=1, description="a share", json_schema_extra=control("B"))
    limit: int | None = Field(None, ge=2, le=5, description="or none", json_schema_extra=control("B"))
    either: float | str = Field("auto", description="a number or a word", json_schema_extra=control("B"))
    name: str = Field("x", description="a word", json_schema_extra=control("B"))
    shape: tuple[int, ...] = Field((), description="numbers", json_schema_extra=control("B"))
    columns: tuple[str, ...] = Field(("Age, in years",), description="words", json_schema_extra=control("B"))
    quick: bool = Field(True, description="yes or no", json_schema_extra=control("B"))
    slow: bool | None = Field(None, description="yes, no or neither", json_schema_extra=control("B"))
    internal: int = Field(1, description="for files only")


def field(name: str) -> fields.Field:
    return fields.Field(Sizes, name)


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("mode", "choice", "on"),
        ("level", "choice", ""),
        ("num_layers", "text", "3"),
        ("hidden", "text", "64"),
        ("share", "text", "0.5"),
        ("limit", "text", ""),
        ("either", "text", "auto"),
        ("name", "text", "x"),
        ("shape", "text", ""),
        ("columns", "text", "('Age, in years',)"),
        ("quick", "switch", "True"),
        ("slow", "choice", ""),
    ],
)
def test_each_kind_of_setting_gets_its_field(name: str, kind: str, text: str) -> None:
    made = field(name)
    assert (made.kind, made.value) == (kind, text)
    assert made.label == name.replace("_", " ").capitalize()
    assert str(Sizes.model_fields[name].description) in made.meaning
    assert made.read() == Sizes.model_fields[name].default


def test_bounds_stand_in_what_a_field_means() -> None:
    assert field("num_layers").meaning == "a number (1 to 9)"


def test_a_setting_for_files_only_has_no_field() -> None:
    assert "internal" not in [name for _, name, _ in control_fields(Sizes)]


@pytest.mark.parametrize(
    ("name", "typed", "value"),
    [
        ("num_layers", " 7 ", 7),
        ("hidden", "1e2", 100),
        ("share", "1", 1.0),
        ("limit", "2", 2),
        ("level", "2", 2),
        ("either", "0.5", 0.5),
        ("either", "fast", "fast"),
        ("shape", "24 24 16", (24, 24, 16)),
        ("shape", "(24, 24)", (24, 24)),
        ("columns", "Age, Sex at birth", ("Age", "Sex at birth")),
        ("columns", "('a, b',)", ("a, b",)),
        ("slow", "False", False),
        ("name", "", ""),
    ],
)
def test_what_is_typed_becomes_a_value(name: str, typed: str, value: Any) -> None:
    made = field(name)
    made.value = typed
    read = made.read()
    assert read == value
    assert type(read) is type(value)
    assert made.problem == ""


@pytest.mark.parametrize(
    ("name", "typed", "said"),
    [
        ("num_layers", "0", "0 is not valid. Give a value within: 1 to 9"),
        ("num_layers", "3.7", "'3.7' is not a whole number. Give a value within: 1 to 9"),
        ("num_layers", "", "a value is missing. Give a value within: 1 to 9"),
        ("share", "nan", "nan is not valid. Give a value within: above 0, at most 1"),
        (
            "share",
            "0,001",
            "'0,001' is not a number (with a decimal point it would be 0.001). Give a value within: above 0, at most 1",
        ),
        ("limit", "6", "6 is not valid. Give a value within: 2 to 5, or leave it empty"),
        ("shape", "24 x", "'x' is not a whole number"),
    ],
)
def test_what_cannot_be_taken_is_said_beside_the_field_and_stays(name: str, typed: str, said: str) -> None:
    made = field(name)
    made.value = typed
    with pytest.raises(ConfigError, match=re.escape(said)):
        made.read()
    assert made.problem == said
    assert made.value == typed
    made.value = as_text(Sizes.model_fields[name].default)
    made.read()
    assert made.problem == ""


@pytest.fixture
def template(tmp_path: Path) -> str:
    return str(own_file.create(str(tmp_path / "my_recipe.py")))


@pytest.fixture(params=[*sorted(TRAIN_CONFIGS), "the file that `nbgpu new` writes"])
def recipe(request: pytest.FixtureRequest, template: str) -> str:
    return request.param if request.param in TRAIN_CONFIGS else template


def test_controls_that_nobody_touched_have_the_defaults(recipe: str) -> None:
    """Every field reads back what stands in it, and all of them together are valid."""
    panel = _Controls(recipe, cluster=None)
    values = {name: made.read() for name, made in panel._settings.fields.items()}
    model = settings_of(recipe)
    assert values == {name: model.model_fields[name].default for name in values}
    assert train_config(recipe, **values).model_dump() == train_config(recipe).model_dump()
    for name, made in panel._settings.devices.fields.items():
        ClusterConfig.checked(**{name: made.read()})


def test_a_file_whose_own_values_are_not_valid_is_told_before_anything_is_shown(template: str) -> None:
    path = Path(template)
    path.write_text(path.read_text().replace("hidden: int = 64", "hidden: int = 'wide'"))
    with pytest.raises(ConfigError, match="hidden = 'wide' is not valid"):
        controls(template)


@pytest.mark.parametrize("recipe", sorted(TRAIN_CONFIGS))
def test_every_marked_field_is_in_the_panel(recipe: str) -> None:
    panel = _Controls(recipe, cluster=None)
    names = [name for _, name, _ in control_fields(TRAIN_CONFIGS[recipe])]
    assert list(panel._settings.fields) == names
    of_cluster = [name for _, name, _ in control_fields(ClusterConfig)]
    assert sorted(panel._settings.devices.fields) == sorted(of_cluster)


def type_in(panel: _Controls, **typed: str) -> None:
    for name, text in typed.items():
        panel._settings.fields[name].value = text


def test_bad_fields_are_named_and_nothing_is_started_or_lost() -> None:
    panel = _Controls("autoencoder", cluster=None)
    type_in(panel, patch_size="30", lr="0,001")
    panel._settings.devices.ranks.value = "0"
    assert (
        panel._settings.fields["patch_size"].problem
        == "30 is not valid. Give a value within: 0 to 512, a multiple of 4"
    )
    for pressed in (panel._start, panel._plan, panel._find):
        pressed.click()
        assert 'role="alert"' in panel._message.value
        for said in (
            "CPU ranks: 0 is not valid",
            "Patch size: 30 is not valid",
            "Learning rate: &#x27;0,001&#x27; is not a number",
        ):
            assert said in panel._message.value
        assert not panel._start.disabled
    assert panel._settings.fields["patch_size"].value == "30"
    assert panel._settings.fields["lr"].value == "0,001"
    # What was said goes when something is changed.
    type_in(panel, patch_size="32")
    assert panel._message.value == said_nothing(panel)
    panel._settings.devices.ranks.value = "2"
    panel._start.click()
    assert panel._settings.tabs.get_title(panel._settings.tabs.selected_index) == "Optimizer"


def said_nothing(panel: _Controls) -> str:
    panel._say("")
    return str(panel._message.value)


def test_values_that_do_not_go_together_are_said_in_words() -> None:
    panel = _Controls("autoencoder", cluster=None)
    type_in(panel, replace_rate="0.5")
    panel._start.click()
    assert "replace_rate=0.5 replaces nothing while cache_rate=1" in panel._message.value


HOSTS_HERE = {"launcher": "hosts", "nodes": "2", "gpus_per_node": "1", "gpus": "none", "interface": "lo"}
"""Hosts that dial in to this one, which are this one."""


def choose_hosts(panel: _Controls, **typed: str) -> None:
    for name, text in typed.items():
        panel._settings.devices.hosts.fields[name].value = text


def wait_for_join_file(panel: _Controls) -> str:
    """The file that the panel names for hosts."""
    give_up_s = time.monotonic() + 300
    while (named := re.search(r"nbgpu host --join (\S+?)<", panel._message.value)) is None:
        assert panel._busy, panel._message.value
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
    return named[1]


def test_the_wait_for_hosts_says_what_to_start_and_can_be_stopped() -> None:
    panel = _Controls("autoencoder", cluster=None)
    choose_hosts(panel, **HOSTS_HERE)
    panel._start.click()
    folder = Path(wait_for_join_file(panel)).parent
    assert not panel._stop.disabled
    panel._stop.click()
    _wait_until_free(panel)
    assert "the start was stopped" in panel._message.value
    assert panel._stop.disabled
    assert not panel._start.disabled
    assert not folder.exists()


@pytest.mark.long
def test_a_run_is_planned_on_hosts_that_have_dialled_in() -> None:
    panel = _Controls("autoencoder", cluster=None)
    choose_hosts(panel, **HOSTS_HERE)
    type_in(panel, data="phantoms", patch_size="16", batch_size="3")
    panel._plan.click()
    command = [sys.executable, "-m", "nbgpu.cli", "host", "--join", wait_for_join_file(panel)]
    dialled = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(2)]
    try:
        _wait_until_free(panel)
        assert "3 samples for each rank and micro-batch, 6 in each" in panel._message.value
        assert "2 CPU ranks on 2 hosts" in panel._devices._note.value
        assert parts_of_devices(panel) == [panel._devices._note]
    finally:
        nbgpu.current().stop()
        codes = [process.wait(400) for process in dialled]
    assert codes == [0, 0]


def parts_of_devices(panel: _Controls) -> list[w.Widget]:
    """What the part of the devices shows."""
    return [part for part in panel._devices.box.children if part.layout.display != "none"]


def test_the_cards_of_this_host_are_not_those_of_a_cluster_on_others() -> None:
    """They would say that the ranks run on the CPU where only the notebook's host has no GPU."""
    panel = _Controls("autoencoder", cluster=None)
    devices = panel._devices
    assert parts_of_devices(panel) == [devices.gpus, devices._note]
    devices.show_cluster("A cluster is in use: 8 GPUs on 2 hosts.", is_elsewhere=True)
    assert parts_of_devices(panel) == [devices._note]
    devices.show_cluster("", is_elsewhere=False)
    assert parts_of_devices(panel) == [devices.gpus, devices._note]


def _wait_until_free(panel: _Controls) -> None:
    give_up_s = time.monotonic() + 300
    while panel._busy:
        assert time.monotonic() < give_up_s, panel._message.value
        time.sleep(0.05)
    # Whoever frees the panel holds this until the buttons say so.
    with panel._lock:
        pass


@pytest.mark.long
def test_plan_and_search_speak_below_the_buttons(cluster2: nbgpu.Cluster) -> None:
    # What a Stop in the middle of this import does is test_interrupts's.
    cluster2.execute("import torch._dynamo")
    panel = _Controls("autoencoder", cluster2)
    type_in(panel, data="phantoms", patch_size="16", batch_size="3")
    panel._plan.click()
    assert panel._start.disabled
    assert panel._stop.disabled
    _wait_until_free(panel)
    assert "3 samples for each rank and micro-batch, 6 in each" in panel._message.value
    # Long lines wrap below the buttons, and do not scroll.
    assert "pre-line" in panel._message.value
    # A terminal of 80 columns breaks the same plan between words.
    printed, plan = io.StringIO(), str(cluster2.plan("autoencoder", data="phantoms", patch_size=16))
    say(Console(file=printed, force_terminal=True, width=80), plan)
    assert max(map(len, printed.getvalue().splitlines())) <= 80 < max(map(len, plan.splitlines()))
    assert printed.getvalue().split() == plan.split()

    panel._find.click()
    assert not panel._stop.disabled
    panel._stop.click()
    _wait_until_free(panel)
    assert "stopped" in panel._message.value
    assert panel._settings.fields["batch_size"].value == "3"
    assert not panel._find.disabled
    _wait_until_back(cluster2)


def test_a_stopped_run_gets_its_result_by_a_button(
    cluster2: nbgpu.Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    panel = _Controls("autoencoder", cluster2)
    type_in(panel, data="phantoms", patch_size="16", steps="100000")
    assert panel._result.layout.display == "none"
    panel._start.click()
    give_up_s = time.monotonic() + 300
    while panel._run is None or panel._run.statuses()[0].step < 2:
        assert time.monotonic() < give_up_s
        time.sleep(0.05)
    run = panel._run
    assert panel._result.layout.display == "none"
    panel._stop.click()
    run.wait(400)
    assert (run.status, panel._result.layout.display) == ("stopped", "")
    panel._result.click()
    assert panel._start.disabled
    assert not panel._stop.disabled
    run.wait(400)
    assert (run.status, panel._result.layout.display) == ("finished", "none")
    assert run.result() is not None


def _wait_until_back(cluster: nbgpu.Cluster) -> None:
    """On a busy machine a rank may have been given up in the middle of an import, and come back a moment
    later."""
    give_up_s = time.monotonic() + 300
    while True:
        try:
            cluster.execute("pass")
        except nbgpu.ClusterError:
            if time.monotonic() > give_up_s:
                raise
            time.sleep(0.2)
        else:
            return


def shown(panel: _Controls, *names: str) -> list[str]:
    return [panel._settings.fields[name].value for name in names]


def test_fields_show_the_defaults_beside_the_others_until_they_are_changed(
    monkeypatch: pytest.MonkeyPatch, cluster2: nbgpu.Cluster
) -> None:
    panel = _Controls("survival", cluster2)
    type_in(panel, lr="0.003")
    assert shown(panel, "lr", "weight_decay", "epochs", "ema_decay") == ["0.003", "1.0", "", "0.98"]
    type_in(panel, data="cohort.csv")
    assert shown(panel, "lr", "weight_decay", "epochs", "ema_decay") == ["0.003", "1e-05", "50", "0.0"]
    type_in(panel, steps="120")
    assert shown(panel, "steps", "epochs") == ["120", ""]
    planned: list[Any] = []
    monkeypatch.setattr(type(cluster2.parts.runs), "plan_with", lambda _, config: planned.append(config))
    panel._plan.click()
    _wait_until_free(panel)
    expected = train_config("survival", lr=0.003, data="cohort.csv", steps=120)
    assert [config.model_dump() for config in planned] == [expected.model_dump()]
    type_in(panel, data="generated")
    assert shown(panel, "weight_decay") == ["1.0"]


def test_controls_begin_with_a_preset(monkeypatch: pytest.MonkeyPatch, cluster2: nbgpu.Cluster) -> None:
    panel = _Controls("survival", cluster2, "mace")
    assert shown(panel, "lr", "image_size", "epochs") == ["0.0001", "256, 256, 64", "50"]
    type_in(panel, image_size="16, 16, 8", batch_size="3")
    planned: list[Any] = []
    monkeypatch.setattr(type(cluster2.parts.runs), "plan_with", lambda _, config: planned.append(config))
    panel._plan.click()
    _wait_until_free(panel)
    expected = train_config("survival", preset="mace", image_size=(16, 16, 8), batch_size=3)
    assert [config.model_dump() for config in planned] == [expected.model_dump()]
    assert expected.global_batch_size is None
    with pytest.raises(ConfigError, match=r"is not known\. Presets of survival"):
        controls("survival", preset="3d_ldm")


def test_a_search_shows_its_pictures_and_has_no_batches(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    panel = _Controls("microstructure", cluster2)
    assert panel._find.layout.display == "none"
    settings = {"limit_to": 4, "shape": (8, 8, 8), "steps": 4, "val_every": 2, "runs_dir": str(tmp_path)}
    run = cluster2.train("microstructure", **settings)
    panel._show(run)
    _, drawn, pictures = panel._run_views.children
    run.wait()
    assert "step 4: the volume as a block" in pictures.value
    assert 'src="data:image/png;base64,' in pictures.value
    # What a search does not have has no place on the page, on a terminal and in the report.
    assert "throughput" not in [chart["id"] for chart in drawn.system_charts]
    screen = io.StringIO()
    terminal.follow(run, Console(file=screen, force_terminal=True, width=140))
    (heading,) = set(re.findall("rank.*device.*", screen.getvalue()))
    assert "loss" in heading
    assert not re.search(r"samples/s|\blr\b", heading)
    report = report_html(run)
    headings = re.findall("<h2>(.*?)</h2>", report)
    assert "Curves" in headings
    assert "Epochs" not in headings
    assert not re.search("<t[hd][^>]*>(batch_size|samples/s)<", report)


def test_a_run_that_goes_on_takes_no_half_typed_value(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    panel = _Controls("microstructure", cluster2)
    settings = {"limit_to": 4, "shape": (8, 8, 8), "steps": 100_000, "optimizer_type": "adam"}
    run = cluster2.train("microstructure", runs_dir=str(tmp_path), **settings)
    panel._show(run)
    panel._refresh()
    lr = panel._settings.fields["lr"]
    assert not lr.disabled
    assert panel._settings._workload.recipe.disabled
    lr.draft = "0.05"
    assert run.config.lr == 0.01
    lr.value = "0.05"
    assert run.config.lr == 0.05
    run.stop()
    run.wait()
