"""Which samples are trained on, which ones choose the weights, and which ones the result is about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch

from nbgpu.config import TrainConfig, train_config
from nbgpu.engine.data.decoding import Item
from nbgpu.engine.data.parts import Parts, split
from nbgpu.errors import ConfigError, DataError
from nbgpu.recipes.autoencoder.config import AutoencoderConfig
from nbgpu.recipes.autoencoder.recipe import Autoencoder
from nbgpu.recipes.diffusion.recipe import Diffusion
from nbgpu.recipes.lithography.recipe import Lithography
from nbgpu.recipes.survival.recipe import Survival

RECIPES: dict[str, Any] = {
    "autoencoder": Autoencoder,
    "diffusion": Diffusion,
    "lithography": Lithography,
    "survival": Survival,
}
TINY: dict[str, dict[str, Any]] = {
    "autoencoder": {"data": "phantoms", "num_phantoms": 20, "patch_size": 8},
    "diffusion": {"num_phantoms": 20, "size": 8},
    "lithography": {"num_masks": 20, "size": 32},
    "survival": {"num_patients": 40, "batch_size": 4, "widen_factor": 0.0625},
}


def config(**settings: Any) -> TrainConfig:
    return train_config("diffusion", data="BraTS", size=8, **settings)


def items(count: int, per_patient: int = 1) -> list[Item]:
    return [{"name": f"case {i:02}", "patient": i // per_patient} for i in range(count)]


def names(part: list[Item]) -> list[str]:
    return [item["name"] for item in part]


@pytest.mark.parametrize(
    ("count", "val", "test", "sizes"),
    [
        (10, 0.2, 0.0, (8, 2, 0)),
        (10, 0.2, 0.3, (5, 2, 3)),
        (10, 0.0, 0.3, (7, 0, 3)),
        (2, 0.99, 0.0, (1, 1, 0)),
        (2, 0.01, 0.0, (1, 1, 0)),
        (1, 0.5, 0.0, (1, 0, 0)),
        (5, 0.0, 0.0, (5, 0, 0)),
        (3, 0.9, 0.05, (1, 1, 1)),
    ],
)
def test_each_sample_is_in_one_part_of_the_size_that_was_asked_for(
    count: int, val: float, test: float, sizes: tuple[int, int, int]
) -> None:
    parts = split(items(count), config(val_fraction=val, test_fraction=test))
    assert (len(parts.training), len(parts.validation), len(parts.test)) == sizes
    assert sorted(names(parts.everything)) == names(items(count))


def test_what_is_held_out_follows_split_seed_and_not_the_seed_of_the_run() -> None:
    settings = {"val_fraction": 0.2, "test_fraction": 0.2}
    of_seed = [split(items(40), config(seed=seed, **settings)) for seed in (0, 1)]
    assert of_seed[0] == of_seed[1]
    other = split(items(40), config(split_seed=1, **settings))
    assert names(other.validation) != names(of_seed[0].validation)
    assert names(other.test) != names(of_seed[0].test)


def test_a_test_part_leaves_validation_as_it_was() -> None:
    without = split(items(40), config(val_fraction=0.2))
    with_test = split(items(40), config(val_fraction=0.2, test_fraction=0.2))
    assert names(with_test.validation) == names(without.validation)


def test_what_belongs_together_stays_together() -> None:
    parts = split(
        items(40, per_patient=4), config(val_fraction=0.3, test_fraction=0.2), lambda i: i["patient"]
    )
    patients = [{item["patient"] for item in part} for part in (parts.training, parts.validation, parts.test)]
    assert [len(part) for part in patients] == [5, 3, 2]
    assert len(set.union(*patients)) == 10


def test_too_few_for_a_test_part_is_said() -> None:
    with pytest.raises(DataError, match=r"2 sample\(s\) that belong together cannot be divided into 3 parts"):
        split(items(2), config(test_fraction=0.2))
    with pytest.raises(
        ConfigError, match=r"val_fraction=0\.6 and test_fraction=0\.4 leave nothing to train on"
    ):
        config(val_fraction=0.6, test_fraction=0.4)


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_a_file_says_which_sample_is_in_which_part(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"split.{kind}"
    said = {"case 00": "train", "case 01": "val", "case 02": "test", "case 03": "train"}
    if kind == "csv":
        path.write_text("name,part\n" + "".join(f"{name},{part}\n" for name, part in said.items()))
    else:
        lists: dict[str, list[str]] = {"train": [], "val": [], "test": []}
        for name, part in said.items():
            lists[part].append(name)
        path.write_text(json.dumps({"about": "a split", **lists}))
    parts = split(items(4), config(split=str(path)))
    assert (names(parts.training), names(parts.validation), names(parts.test)) == (
        ["case 00", "case 03"],
        ["case 01"],
        ["case 02"],
    )
    with pytest.raises(ConfigError, match=r"test_fraction=0\.2 counts only with no split"):
        config(split=str(path), test_fraction=0.2)


def test_everything_wrong_with_a_file_is_said_at_once(tmp_path: Path) -> None:
    path = tmp_path / "split.csv"
    path.write_text("case,set\ncase 00,train\ncase 01,val\ncase 02,test\ncase 09,test\n")
    with pytest.raises(DataError) as caught:
        split(items(4, per_patient=2), config(split=str(path)), lambda i: i["patient"])
    lines = [line.partition(": ")[2] for line in str(caught.value).splitlines()]
    assert lines == [
        "case 01 and what belongs to it (0) is in two of its parts",
        "case 03 is in none of its parts",
        "case 09 is not a sample of the data",
    ]
    path.write_text("name,part\ncase 00,train\ncase 00,val\ncase 01,both\n")
    with pytest.raises(DataError) as caught:
        split(items(2), config(split=str(path)))
    lines = [line.partition(": ")[2] for line in str(caught.value).splitlines()]
    assert lines == [
        "case 01 is in 'both', and must be in train, val or test",
        "case 00 is in training and in validation",
    ]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"needs a column with names .* and one with parts"):
        split(items(2), config(split=str(path)))
    with pytest.raises(DataError, match="cannot be read"):
        split(items(2), config(split=str(tmp_path / "none.csv")))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_result_is_about_the_test_part_and_validation_never_sees_it(recipe: str) -> None:
    settings = {**TINY[recipe], "val_fraction": 0.2, "test_fraction": 0.3}
    made = RECIPES[recipe](train_config(recipe, **settings))
    parts = _parts(made)
    assert parts.reported == parts.test
    loaders = made.build_loaders(0, 1)
    num_validated = sum(len(next(iter(batch.values()))) for batch in loaders.val)
    loaders.close()
    model = made.build_model().eval()
    result = made.result(model, torch.device("cpu"))
    assert f"These are the test part: {len(parts.test)} samples" in result["note"]
    if recipe != "autoencoder":
        assert num_validated == min(len(parts.validation), 16 if recipe == "diffusion" else 10**6)
        assert f"On {len(parts.test)} held-out" in result["note"]
    # Another seed of the run trains on the same samples.
    again = RECIPES[recipe](train_config(recipe, **settings, seed=5))
    assert names(_parts(again).test) == names(parts.test)


def _parts(recipe: Any) -> Parts:
    if isinstance(recipe, Survival):
        return recipe._patients.parts
    parts: Parts = recipe.parts() if isinstance(recipe, Diffusion) else recipe._parts()
    return parts


def test_a_result_of_samples_that_chose_the_weights_says_so() -> None:
    chosen = {"best_metric": "psnr_db", "best_mode": "max", "restore_best": True}
    settings = {**TINY["diffusion"], "batch_size": 4}
    said = "restore_best chose these weights by the same samples"
    for extra, expected in ((chosen, True), ({}, False), (chosen | {"test_fraction": 0.2}, False)):
        made = Diffusion(train_config("diffusion", **settings, **extra))  # type: ignore[arg-type]
        note = made.result(made.build_model().eval(), torch.device("cpu"))["note"]
        assert (said in note) == expected


def _volumes(folder: Path, names: list[str]) -> str:
    rng = np.random.default_rng(0)
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        nibabel.save(nibabel.Nifti1Image(rng.random((10, 10, 10), dtype=np.float32), np.eye(4)), path)
    return str(folder)


@pytest.mark.parametrize(
    ("names", "patient_pattern", "num_patients"),
    [
        ([f"sub-{i:02}/anat/sub-{i:02}_{k}.nii.gz" for i in range(5) for k in ("T1w", "T2w")], "", 5),
        ([f"BraTS-GLI-{i:05}-10{v}/x-{v}.nii.gz" for i in range(5) for v in (0, 1)], "", 5),
        ([f"BraTS20_Training_{i:03}_{k}.nii" for i in range(5) for k in ("t1", "t2")], "", 5),
        ([f"case_{i}_visit_{v}.nii.gz" for i in range(5) for v in (0, 1)], r"(case_\d+)", 5),
        ([f"{i}.nii.gz" for i in range(10)], "", 10),
    ],
)
def test_volumes_of_one_patient_are_in_one_part(
    tmp_path: Path, names: list[str], patient_pattern: str, num_patients: int
) -> None:
    data = _volumes(tmp_path, names)
    made = AutoencoderConfig.checked(
        data=data, patch_size=8, patient_pattern=patient_pattern, val_fraction=0.4, test_fraction=0.2
    )
    parts = Autoencoder(made)._parts()
    per_patient = len(names) // num_patients
    sizes = [len(part) for part in (parts.training, parts.validation, parts.test)]
    assert sizes == [2 * len(names) // 5, 2 * len(names) // 5, len(names) // 5]
    known = sorted(str(tmp_path / name) for name in names)
    of = {name: index // per_patient for index, name in enumerate(known)}
    patients = [
        {of[item["name"]] for item in part} for part in (parts.training, parts.validation, parts.test)
    ]
    assert sum(map(len, patients)) == num_patients


def test_a_list_may_have_a_test_part_and_patients(tmp_path: Path) -> None:
    _volumes(tmp_path, [f"{i}.nii.gz" for i in range(6)])
    path = tmp_path / "list.json"
    entries = [{"image": f"{i}.nii.gz", "patient": i // 2} for i in range(6)]
    path.write_text(json.dumps({"training": entries[:2], "validation": entries[2:4], "test": entries[4:]}))
    parts = Autoencoder(AutoencoderConfig.checked(data=str(path), patch_size=8))._parts()
    assert [len(part) for part in (parts.training, parts.validation, parts.test)] == [2, 2, 2]
    path.write_text(json.dumps({"training": entries[:3], "validation": entries[3:4], "test": entries[4:]}))
    with pytest.raises(DataError, match="the patient 1 is in training and in validation"):
        Autoencoder(AutoencoderConfig.checked(data=str(path), patch_size=8))._parts()
    table = tmp_path / "list.csv"
    table.write_text("image,patient\n" + "".join(f"{i}.nii.gz,{i // 2}\n" for i in range(6)))
    made = AutoencoderConfig.checked(data=str(table), patch_size=8, val_fraction=0.3, test_fraction=0.3)
    parts = Autoencoder(made)._parts()
    sides = [{int(Path(i["name"]).name[0]) // 2 for i in part} for part in (parts.training, parts.validation)]
    assert [len(side) for side in sides] == [1, 1]


def test_one_volume_is_cut_into_three_parts_that_share_no_voxel(tmp_path: Path) -> None:
    # Each slice across the longest axis has its own number.
    ramp = np.broadcast_to(np.arange(1, 41, dtype=np.float32)[None, :, None], (16, 40, 16))
    path = tmp_path / "one.nii.gz"
    nibabel.save(nibabel.Nifti1Image(ramp.copy(), np.eye(4)), path)
    recipe = Autoencoder(
        AutoencoderConfig.checked(data=str(path), patch_size=8, val_fraction=0.2, test_fraction=0.3)
    )
    cut = [recipe._steps()(item)["image"] for item in recipe._parts().everything]
    # The darkest slice counts as an empty margin.
    assert [part.shape[2] for part in cut] == [19, 8, 12]
    slices = [set(part.unique().tolist()) for part in cut]
    # The brightest half of a percent is clipped to one value.
    assert not slices[0] & slices[1]
    assert not slices[1] & slices[2]
    short = AutoencoderConfig.checked(data=str(path), patch_size=16, val_fraction=0.2, test_fraction=0.3)
    with pytest.raises(DataError, match="too short for 3 parts of 16 voxels each"):
        Autoencoder(short).inspect()
