"""Presets: each is valid as a whole, wins over defaults and gives way to what a person says."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbgpu.config import TRAIN_CONFIGS, own_file, presets, settings_of, train_config
from nbgpu.config.settings import unused
from nbgpu.errors import ConfigError

ALL = [(recipe, name) for recipe in TRAIN_CONFIGS for name in presets.names(recipe)]
FILES = {
    "autoencoder": "volumes",
    "diffusion": "BraTS2023",
    "lithography": "masks.npz",
    "microstructure": "ms.npy",
    "survival": "cohort.csv",
}


def test_there_is_one_for_each_guide_and_a_demo_of_each_recipe() -> None:
    assert {recipe for recipe, name in ALL if name == "demo"} == set(TRAIN_CONFIGS)
    assert {("survival", "mace"), ("diffusion", "fast_ddpm"), ("diffusion", "fast_ddpm_large")} <= {*ALL}
    assert {("microstructure", "mcrpy"), ("lithography", "lithography"), ("autoencoder", "3d_ldm")} <= {*ALL}


@pytest.mark.parametrize(("recipe", "name"), ALL)
def test_every_value_is_one_that_counts(recipe: str, name: str) -> None:
    preset = presets.read(recipe, name)
    assert preset.description
    assert preset.source
    assert preset.values.keys() <= settings_of(recipe).model_fields.keys() - unused(settings_of(recipe))
    # As if a person had given them, so that one without effect is refused.
    data = (
        {}
        if "data" in preset.values or "num_masks" in preset.values
        else {"data": FILES.get(recipe, "files")}
    )
    config = train_config(recipe, **{**data, **preset.values})
    assert {key: getattr(config, key) for key in preset.values} == dict(preset.values)


@pytest.mark.parametrize(("recipe", "name"), ALL)
def test_a_preset_alone_and_with_files(recipe: str, name: str) -> None:
    preset = presets.read(recipe, name)
    config = train_config(recipe, preset=name)
    assert config.recipe == recipe
    with_files = train_config(recipe, preset=name, data=FILES.get(recipe, "files"))
    assert with_files.data == FILES.get(recipe, "files")
    of_generated_data = {"data", "num_masks"}
    for key, value in preset.values.items():
        if key not in of_generated_data:
            assert getattr(with_files, key) == value


def test_what_is_given_beside_a_preset_wins() -> None:
    config = train_config("survival", preset="mace", data="cohort.csv", lr=2e-3, steps=100, batch_size=3)
    assert (config.lr, config.steps, config.batch_size) == (2e-3, 100, 3)
    # They would not count beside the preset's.
    assert (config.epochs, config.global_batch_size) == (None, None)
    assert train_config("lithography", preset="lithography", warmup_steps=7).warmup_epochs is None
    assert train_config("lithography", preset="lithography", val_every=7).val_every_epochs == 0
    assert train_config("diffusion", preset="fast_ddpm_large").fit == "resize"  # phantoms are not cropped


def test_a_preset_that_there_is_not_is_told_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"preset = 'mcrpy' is not known\. Presets of survival: demo, mace"):
        train_config("survival", preset="mcrpy")


def test_a_recipe_of_ones_own_has_no_presets(tmp_path: Path) -> None:
    own = own_file.create(str(tmp_path / "mine.py"))
    with pytest.raises(ConfigError, match="has no presets"):
        train_config(str(own), preset="demo")
