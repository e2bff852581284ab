"""The settings form, as its fields behave in the kernel."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import ipywidgets as w
import nibabel
import numpy as np
import pytest
from kernel import Kernel, kernel

from nbgpu.config import ClusterConfig, TrainConfig, own_file, train_config
from nbgpu.config.settings import as_text
from nbgpu.machine.devices import cpu
from nbgpu.protocol.records import Device
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.settling import SettledConfig
from nbgpu.ui.controls.control_panel import _Controls
from nbgpu.ui.controls.fields import Field
from nbgpu.ui.controls.settings_area import FIRST, SettingsArea


@pytest.fixture
def area(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SettingsArea:
    monkeypatch.chdir(tmp_path)
    own_file.create("my_recipe.py")
    Path("broken.py").write_text("class Broken(OwnRecipe): hidden: int")
    return _Controls("autoencoder", cluster=None)._settings


def draft(area: SettingsArea, **typed: str) -> None:
    """Type without leaving the fields."""
    for name, text in typed.items():
        area.fields[name].draft = text


def type_in(area: SettingsArea, **typed: str) -> None:
    for name, text in typed.items():
        area.fields[name].value = text


def problems(area: SettingsArea) -> dict[str, str]:
    return {name: field.problem for name, field in area.every_field.items() if field.problem}


def tab_titles(tabs: w.Tab) -> list[str]:
    return [tabs.get_title(index) for index in range(len(tabs.children))]


def titles(area: SettingsArea) -> dict[str, list[str]]:
    pages = zip(tab_titles(area.tabs), area.tabs.children, strict=True)
    return {title: [field.name for field in page.children] for title, page in pages}


def test_what_matters_first_stands_at_the_top_and_all_else_in_tabs(area: SettingsArea) -> None:
    assert [field.name for field in area._first.children] == list(FIRST)
    in_tabs = [name for names in titles(area).values() for name in names]
    assert sorted([*in_tabs, *FIRST]) == sorted(area.every_field)
    assert titles(area)["Cluster"] == [
        "ranks",
        "memory_limit",
        "keep",
        "release_after_s",
        "link",
        "slow_rank",
    ]


def test_a_number_of_ranks_that_was_typed_is_reset_to_that_of_the_devices(area: SettingsArea) -> None:
    ranks = area.devices.ranks
    assert (ranks.value, ranks.standard, ranks.changed) == ("2", "2", False)
    assert area._reset.disabled
    ranks.value = "3"
    assert area._reset.description == "Reset all (1 changed)"
    area._reset.click()
    assert (ranks.value, ranks.changed) == ("2", False)
    assert area._reset.disabled
    # The choice of devices changes the default, and what was typed stays.
    ranks.value = "3"
    area.devices.gpus.value = ("A", "B", "C", "D")
    assert (ranks.value, ranks.standard, ranks.changed) == ("3", "4", True)
    area._reset.click()
    assert ranks.value == "4"


def shown(area: SettingsArea, title: str) -> list[str]:
    """The fields of a tab that a person sees."""
    (page,) = [
        page for name, page in zip(tab_titles(area.tabs), area.tabs.children, strict=True) if name == title
    ]
    return [field.name for field in page.children if field.layout.display != "none"]


def test_a_notebook_in_a_slurm_job_can_save_before_its_limit_with_any_launcher(
    monkeypatch: pytest.MonkeyPatch, area: SettingsArea
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    hosts = area.devices.hosts.fields
    hosts["launcher"].value = "slurm"
    hosts["launcher_options"].value = "time=1:00:00"
    assert "'time' cannot be given, because this notebook is in job 7" in problems(area)["launcher_options"]
    hosts["launcher_options"].value = ""
    assert problems(area) == {}
    hosts["launcher"].value = "local"
    assert shown(area, "Hosts") == ["launcher", "save_before_time_limit"]


def test_the_fields_of_hosts_are_those_that_count_with_the_launcher(area: SettingsArea) -> None:
    hosts = area.devices.hosts.fields
    assert shown(area, "Hosts") == ["launcher"]
    hosts["launcher"].value = "ssh"
    assert shown(area, "Hosts") == [
        "launcher",
        "hosts",
        "launcher_options",
        "setup",
        "gpus_per_node",
        "interface",
        "on_host_lost",
        "gpus",
    ]
    hosts["on_host_lost"].value = "wait"
    assert "host_patience_s" in shown(area, "Hosts")
    assert shown(area, "Cluster") == ["memory_limit", "keep", "release_after_s"]
    assert "names no host on which launcher='ssh' could start ranks" in problems(area)["hosts"]
    assert area.devices.gpus.layout.display == "none"
    hosts["hosts"].value = "node1, node2"
    assert problems(area) == {}
    hosts["launcher"].value = "slurm"
    assert "nodes" in shown(area, "Hosts")
    assert "hosts" not in shown(area, "Hosts")
    hosts["launcher_options"].value = "nodes=3"
    assert "'nodes' cannot be given" in problems(area)["launcher_options"]
    hosts["launcher_options"].value = "partition=gpu"
    hosts["nodes"].value = "3"
    assert problems(area) == {}
    assert "launcher='slurm', nodes=3" in area._copy.code or "--launcher slurm --nodes 3" in area._copy.code
    # What was typed for another launcher does not count, and is there again with its own.
    hosts["launcher"].value = "local"
    assert area._copy.problem == ""
    assert "slurm" not in area._copy.code


def test_the_global_batch_is_said_where_the_number_of_ranks_is_known(area: SettingsArea) -> None:
    hosts, size = area.devices.hosts.fields, area.fields["batch_size"]
    hosts["launcher"].value = "ssh"
    hosts["hosts"].value = "node1, node2"
    assert size.note == ""
    assert area.fields["cache_rate"].note == ""
    hosts["gpus_per_node"].value = "4"
    assert size.note == "global batch 16 = 2 x 8 ranks"


def test_what_is_typed_is_judged_and_is_no_value_yet(area: SettingsArea) -> None:
    size = area.fields["batch_size"]
    draft(area, batch_size="0")
    assert problems(area) == {"batch_size": "0 is not valid. Give a value within: 1 to 4096"}
    assert (size.value, size.changed, size.note) == ("2", False, "")
    draft(area, batch_size="6", accumulate="3")
    assert problems(area) == {}
    assert size.note == "global batch 36 = 6 x 2 ranks x accumulate 3"
    assert (size.value, size.changed) == ("2", False)
    area.devices.ranks.draft = "1"
    assert size.note == "global batch 18 = 6 x 1 rank x accumulate 3"
    # Typed back to what it was before.
    draft(area, batch_size="x")
    draft(area, batch_size="2")
    assert problems(area) == {}


def test_rules_between_fields_are_said_at_the_field_that_was_changed_last(area: SettingsArea) -> None:
    draft(area, replace_rate="0.5")
    assert list(problems(area)) == ["replace_rate"]
    assert "cache_rate=1 keeps every volume" in problems(area)["replace_rate"]
    draft(area, cache_rate="0.5")
    assert problems(area) == {}
    type_in(area, cache_rate="0.5", replace_rate="0.5")
    draft(area, cache_rate="1")
    assert list(problems(area)) == ["cache_rate"]
    type_in(area, cache_rate="0.5", early_stop_patience="3")
    assert "counts only with best_metric" in problems(area)["early_stop_patience"]
    # Rules between the cluster's.
    area.devices.fields["slow_rank"].draft = "7=2x"
    assert "names rank 7, and there are 2 rank(s)" in problems(area)["slow_rank"]
    area.devices.fields["memory_limit"].draft = "10 TiB"
    assert "is more than" in problems(area)["memory_limit"]


def test_a_rule_about_a_setting_without_a_field_is_said_below_the_tabs(area: SettingsArea) -> None:
    area._workload.recipe.value = "survival"
    area._workload.preset.value = "mace"
    area.devices.ranks.value = "7"
    assert "global_batch_size=24" in "".join([area._wrong.value, *problems(area).values()])


def test_changes_are_marked_and_can_be_taken_back(area: SettingsArea) -> None:
    assert area._reset.disabled
    type_in(area, batch_size="4", lr="1e-3", data="phantoms")
    assert area.form.changed == ["batch_size", "lr", "data"]
    assert [area.fields[name].standard for name in ("batch_size", "lr", "data")] == ["2", "0.004", "mni152"]
    area.devices.fields["memory_limit"].value = "2 GiB"
    assert area._reset.description == "Reset all (4 changed)"
    # What equals its default is not marked, whoever typed it.
    type_in(area, batch_size="2")
    assert not area.fields["batch_size"].changed
    area.form.reset("lr")
    assert (area.fields["lr"].value, area.fields["lr"].changed) == ("0.004", False)
    area._reset.click()
    assert area.form.changed == []
    assert (area.fields["data"].value, area.devices.fields["memory_limit"].value) == ("mni152", "")
    assert area._reset.disabled


def test_a_default_beside_others_is_what_a_field_goes_back_to(area: SettingsArea) -> None:
    area._workload.recipe.value = "survival"
    type_in(area, lr="3e-3")
    assert area.fields["lr"].standard == "0.002"
    type_in(area, data="cohort.csv")
    assert area.fields["lr"].standard == "0.0001"
    area.form.reset("lr")
    assert area.fields["lr"].value == "0.0001"


def test_another_recipe_keeps_what_both_have(area: SettingsArea) -> None:
    type_in(area, batch_size="4", data="phantoms", patch_size="16", wandb="offline")
    area.tabs.selected_index = list(titles(area)).index("Logs")
    before = area.fields["batch_size"]
    area._workload.recipe.value = "survival"
    assert area.form.recipe == "survival"
    assert area.form.changed == ["batch_size", "wandb"]
    assert area.fields["batch_size"].value == "4"
    # 'phantoms' is what the autoencoder generates.
    assert area.fields["data"].value == "generated"
    assert area.tabs.get_title(area.tabs.selected_index) == "Logs"
    assert before.comm is None
    assert "Model" in titles(area)
    area._workload.preset.value = "mace"
    assert area.fields["lr"].value == "0.0001"
    assert area._workload.preset.note
    area._workload.recipe.value = "microstructure"
    assert area._workload.preset.value == ""
    assert area._first.children == ()


def test_own_recipes_are_offered_and_one_that_is_broken_leaves_the_form_as_it_is(area: SettingsArea) -> None:
    choice = area._workload.recipe
    assert "my_recipe.py" in choice.choices
    assert "broken.py" not in choice.choices
    choice.value = "my_recipe.py"
    assert area.form.recipe == "my_recipe.py"
    path = Path("my_recipe.py")
    path.write_text(path.read_text().replace("hidden: int = 64", "hidden: int = 'wide'"))
    choice.value = "diffusion"
    choice.value = "my_recipe.py"
    assert "hidden = 'wide' is not valid" in choice.problem
    assert area.form.recipe == "diffusion"
    choice.value = "survival"
    assert choice.problem == ""


def test_the_memory_of_files_is_looked_at_beside_the_kernel(area: SettingsArea, tmp_path: Path) -> None:
    note = area.fields["cache_rate"]
    assert note.note.startswith("fits in memory: the only training volume, about ")
    area.devices.fields["memory_limit"].value = "1 GiB"
    assert note.note.startswith(
        "fits in memory: the only training volume, about 37.5 MiB of the 2.0 GiB that memory_limit"
    )
    folder = tmp_path / "volumes"
    folder.mkdir()
    for number in range(3):
        voxels = np.random.default_rng(number).random((24,) * 3, dtype=np.float32)
        nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), folder / f"{number}.nii.gz")
    type_in(area, data=str(folder))
    assert area._memory is not None
    area._memory.wait()
    assert note.note.startswith("fits in memory: all 2 training volumes, about ")
    assert note.note.endswith("(estimated from the headers of 3 of 3 files and the voxels of 2)")
    (folder / "1.nii.gz").write_bytes(b"damaged")
    area.judge()
    # The same folder is known; another look comes with other settings.
    type_in(area, spacing="1.5")
    area._memory.wait()
    assert "whether it fits in memory is not known: " in note.note
    assert "1.nii.gz: cannot be read as NIfTI" in note.note


def test_copies_are_of_what_stands_in_the_form(area: SettingsArea) -> None:
    copies = area._copy
    assert copies.command == "nbgpu train autoencoder --gpus none --ranks 2"
    type_in(area, batch_size="4", data="phantoms")
    area.devices.fields["memory_limit"].value = "2 GiB"
    assert copies.command == (
        "nbgpu train autoencoder --batch-size 4 --data phantoms --gpus none --ranks 2 --memory-limit '2 GiB'"
    )
    draft(area, batch_size="0")
    assert copies.problem
    draft(area, batch_size="4")
    assert copies.problem == ""


@pytest.fixture(scope="module")
def empty_notebook() -> Iterator[Kernel]:
    """A notebook's kernel without a cluster."""
    with kernel() as started:
        yield started


@pytest.mark.release
@pytest.mark.long
def test_copied_code_trains_with_the_same_settings(empty_notebook: Kernel, tmp_path: Path) -> None:
    area = _Controls("autoencoder", cluster=None)._settings
    typed = {"data": "phantoms", "patch_size": "8", "batch_size": "3", "steps": "2", "run_name": "copied"}
    type_in(area, **typed)
    area.devices.ranks.value = "1"
    expected = train_config(
        "autoencoder", data="phantoms", patch_size=8, batch_size=3, steps=2, run_name="copied"
    )
    assert empty_notebook.run(f"import os\nos.chdir({str(tmp_path)!r})").status == "ok"
    done = empty_notebook.run(area._copy.code)
    assert done.status == "ok", done.error
    found = empty_notebook.run(
        "run.wait()\nprint(run.config.model_dump_json(), cluster.config.model_dump_json(), sep='\\n')"
    )
    assert found.status == "ok", found.error
    lines = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    empty_notebook.run("%nbgpu stop")
    of_run, of_cluster = lines
    assert of_run == json.loads(expected.model_dump_json())
    assert of_cluster == json.loads(ClusterConfig(gpus="none", ranks=1).model_dump_json())


def test_mixed_precision_is_what_the_devices_can_do_where_there_are_gpus(
    area: SettingsArea, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert area.fields["amp"].value == "off"
    t4 = Device("cuda", "Tesla T4", "GPU-1", 0, 16 * 2**30, compute_capability=7.5)
    monkeypatch.setattr(area, "_chosen_devices", lambda config: [t4])
    area.judge()
    assert (area.fields["amp"].value, area.fields["amp"].changed) == ("auto", False)
    assert 'amp="auto"' in area._copy.code
    _, config = area.checked()
    assert config.amp == "auto"
    type_in(area, amp="off")
    assert area.fields["amp"].changed
    assert "amp" not in area._copy.code
    _, config = area.checked()
    assert config.amp == "off"
    area.form.reset("amp")
    assert area.fields["amp"].value == "auto"
    area._workload.recipe.value = "diffusion"
    area._workload.preset.value = "fast_ddpm"
    assert area.fields["amp"].value == "bf16"
    assert "Take amp='fp16', or 'auto'" in area.fields["amp"].problem
    monkeypatch.setattr(area, "_chosen_devices", lambda config: [cpu(0)])
    area._workload.preset.value = ""
    assert area.fields["amp"].value == "off"


def folder_of_volumes(path: Path, count: int = 10) -> str:
    path.mkdir()
    for number in range(count):
        values = np.random.default_rng(number).random((20, 20, 20), np.float32)
        nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), path / f"scan_{number}.nii.gz")
    return str(path)


def test_of_steps_and_epochs_one_is_in_charge_and_the_other_says_what_follows(
    area: SettingsArea, tmp_path: Path
) -> None:
    steps, epochs = area.fields["steps"], area.fields["epochs"]
    assert (steps.idle, epochs.idle) == (False, True)
    type_in(area, data=folder_of_volumes(tmp_path / "brains"))
    area._memory.wait()
    # The data bring epochs along: 8 of 10 volumes with 16 patches each, and 2 ranks with 2 of them in a step.
    assert (epochs.value, epochs.origin, epochs.idle) == ("60", "from Data", False)
    assert (steps.idle, steps.note) == (True, "about 1920, from Epochs")
    assert (area.fields["lr"].value, area.fields["lr"].origin) == ("0.0001", "from Data")
    assert not area.fields["lr"].changed
    assert area.fields["weight_decay"].origin == ""
    # What is typed takes charge, and takes back what was typed into the other one.
    type_in(area, steps="640")
    area._memory.wait()
    assert (epochs.value, epochs.idle, epochs.note) == ("", True, "about 20, from Steps")
    assert (steps.idle, steps.note) == (False, "")
    type_in(area, epochs="3")
    area._memory.wait()
    assert (steps.value, steps.changed, steps.idle, steps.note) == (
        "200",
        False,
        True,
        "about 96, from Epochs",
    )
    assert area.form.config(area.form.read()[0]).epochs == 3
    type_in(area, epochs="")
    assert (steps.idle, epochs.idle) == (False, True)
    type_in(area, smoke_test="True")
    assert steps.note.endswith("steps, from Smoke test")


def test_the_settings_of_a_run_to_resume_are_shown_and_marked(area: SettingsArea, tmp_path: Path) -> None:
    of_run = {"lr": 2e-3, "batch_size": 4, "optimizer": "adam", "latent_channels": 4, "epochs": 7}
    assert train_config("autoencoder").latent_channels != 4
    folder = runs.create(SettledConfig(train_config("autoencoder", **of_run)), ClusterConfig(gpus="none"))
    (folder / "checkpoints" / "step-00000010").mkdir(parents=True)
    type_in(area, batch_size="8", optimizer="sgd", resume="auto")
    fields = area.fields
    assert folder.name in fields["resume"].note
    assert [fields[name].value for name in ("lr", "epochs", "optimizer")] == ["0.002", "7", "adam"]
    marked = {name for name in fields if fields[name].origin == "from the run"}
    assert marked == {"lr", "epochs", "optimizer", "image_channels"}
    # What the person has typed stays; what must be the same as there is the run's, and cannot be changed.
    assert (fields["batch_size"].value, fields["batch_size"].standard) == ("8", "4")
    assert area.form.changed == ["batch_size", "resume"]
    assert fields["optimizer"].disabled
    assert not fields["lr"].disabled
    config = area.checked()[1]
    assert {name: getattr(config, name) for name in of_run} == {**of_run, "batch_size": 8}
    assert "latent_channels=4" in area._copy.code
    # A number of steps takes the place of the run's epochs.
    type_in(area, steps="900")
    assert (fields["epochs"].value, fields["epochs"].origin) == ("", "")
    area.form.reset("steps")
    assert fields["epochs"].value == "7"
    # Without the run all is as before, and a folder that cannot be resumed is named at its field.
    area.form.reset("resume")
    assert (fields["lr"].origin, fields["resume"].note) == ("", "")
    assert not fields["optimizer"].disabled
    type_in(area, resume="nowhere")
    assert "there is no such folder" in fields["resume"].note
    assert fields["resume"].warns


def test_a_new_form_offers_the_settings_of_the_last_run(area: SettingsArea, tmp_path: Path) -> None:
    area.judge()
    assert area._last.layout.display == "none"
    for lr in (2e-3, 3e-3):
        config = train_config("autoencoder", lr=lr, batch_size=4, amp="bf16", resume="auto")
        last = runs.create(SettledConfig(config), ClusterConfig(gpus="none"))
    os.utime(last / "run.toml", (2e9, 2e9))
    area.judge()
    assert area._last.layout.display == ""
    assert last.name in area._last.tooltip
    area._last.click()
    shown = {name: area.fields[name].value for name in ("lr", "batch_size", "amp", "resume")}
    assert shown == {"lr": "0.003", "batch_size": "4", "amp": "bf16", "resume": ""}
    assert set(area.form.changed) == {"lr", "batch_size", "amp"}
    # What a person has typed is not overwritten by a press meant for an empty form.
    assert area._last.layout.display == "none"


def test_the_last_run_of_a_file_is_found_by_its_relative_path(
    area: SettingsArea, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("from nbgpu.recipes.own import OwnRecipe\nclass Mine(OwnRecipe): pass\n")
    last = runs.create(SettledConfig(train_config("mine.py", steps=7)), ClusterConfig(gpus="none"))
    area._choose_workload("mine.py", "")
    area.judge()
    assert last.name in area._last.tooltip
    area._last.click()
    assert area.fields["steps"].value == "7"


def test_the_settings_of_the_last_run_are_shown_whatever_defaults_the_form_has(area: SettingsArea) -> None:
    """The form takes other defaults from a preset, and amp='auto' where the ranks have GPUs."""
    last = train_config("autoencoder", lr=5e-4, batch_size=3)
    runs.create(SettledConfig(last), ClusterConfig(gpus="none"))
    area._workload.preset.value = "3d_ldm"
    area.judge()
    area.form.adapt_defaults(has_gpus=True)
    assert (area.fields["amp"].value, area.fields["epochs"].value) == ("auto", "1000")
    area._show_last_run()
    for name in ("lr", "batch_size", "amp", "epochs", "patch_size", "steps"):
        assert area.fields[name].value == as_text(getattr(last, name)), name


def test_a_value_counts_as_soon_as_its_field_is_left() -> None:
    """The page keeps back a widget's state while the kernel has not answered the last one, and no press of a
    button: what was typed comes as a message too, before that press."""
    field = Field(TrainConfig, "lr")
    content = {"type": "take", "value": "0.5"}
    field._handle_msg({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})
    assert field.read() == 0.5
    assert field.draft == "0.5"
