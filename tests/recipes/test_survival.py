"""The survival recipe: its data, its network, and runs on two real ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import quality
import safetensors.torch
import torch

import nbgpu
from nbgpu.config import train_config
from nbgpu.engine.workload.recipe import Judge
from nbgpu.errors import ConfigError, DataError, RankError
from nbgpu.recipes.survival import metrics
from nbgpu.recipes.survival.config import SurvivalConfig
from nbgpu.recipes.survival.network import SurvivalNetwork, load_weights
from nbgpu.recipes.survival.recipe import Survival

SMALL = {"batch_size": 4, "widen_factor": 0.0625}
COHORT = {"num_patients": 40}


def _config(**settings: Any) -> SurvivalConfig:
    cohort = {} if "data" in settings else COHORT
    config = train_config("survival", **{**SMALL, **cohort, **settings})
    assert isinstance(config, SurvivalConfig)
    return config


def test_batches_and_validation_are_of_each_patient_once() -> None:
    recipe = Survival(_config())
    loaders = [recipe.build_loaders(rank, 2) for rank in range(2)]
    held_out = [number for each in loaders for batch in each.val for number in batch["number"].tolist()]
    assert sorted(held_out) == list(range(29, 40))
    batch = next(iter(loaders[0].train))
    example = recipe.example(4)
    assert {name: (v.shape, v.dtype) for name, v in batch.items()} == {
        name: (v.shape, v.dtype) for name, v in example.items()
    }
    assert batch["image"].min() >= 0
    assert batch["image"].max() <= 1
    times = recipe._patients.times
    numbers = batch["number"].numpy()
    assert np.array_equal(batch["order"].argsort().numpy(), times[numbers].argsort())
    for each in loaders:
        each.close()


def _epochs(config: SurvivalConfig, first_step: int = 0) -> list[list[dict[str, list[int]]]]:
    """Two epochs of two ranks: for each micro-batch the numbers and the events of both together."""
    recipe = Survival(config)
    loaders = [recipe.build_loaders(rank, 2) for rank in range(2)]
    for each in loaders:
        each.seek(first_step)
    try:
        return [
            [
                {name: [*first[name].tolist(), *second[name].tolist()] for name in ("number", "event")}
                for first, second in zip(*(each.train for each in loaders), strict=True)
            ]
            for _ in range(2)
        ]
    finally:
        for each in loaders:
            each.close()


@pytest.mark.parametrize("seed", [0, 1])
def test_events_are_spread_over_ranks_and_micro_batches(seed: int) -> None:
    settings = {"batch_size": 2, "accumulate": 2, "num_patients": 44, "val_fraction": 0.273, "seed": seed}
    config = _config(**settings)
    events = Survival(config)._patients.events[:32]
    epochs = _epochs(config)
    for micro_batches in epochs:
        assert sorted(number for batch in micro_batches for number in batch["number"]) == list(range(32))
        num_events = [sum(batch["event"]) for batch in micro_batches]
        assert sum(num_events) == events.sum()
        assert max(num_events) - min(num_events) <= 1
    assert epochs[0] != epochs[1]
    # A run that goes on in the middle of an epoch goes on with the same batches.
    assert _epochs(config, first_step=2)[0] == epochs[0][4:]
    at_random = _epochs(_config(**settings, spread_events=False))
    assert any(np.ptp([sum(batch["event"]) for batch in each]) > 1 for each in at_random)


def test_a_run_says_how_many_events_a_micro_batch_has() -> None:
    loaders = Survival(_config(batch_size=2)).build_loaders(0, 1)
    loaders.close()
    assert re.fullmatch(
        r"\d+ events in an epoch: \d( or \d)? in each micro-batch of all ranks together", loaders.summary[-1]
    )
    loaders = Survival(_config(batch_size=2, spread_events=False)).build_loaders(0, 1)
    loaders.close()
    assert "events" not in loaders.summary[-1]


def test_held_out_patients_are_judged_together() -> None:
    recipe = Survival(_config())
    assert isinstance(recipe, Judge)
    patients = recipe._patients
    numbers = list(range(patients.num_training, len(patients.items)))
    assert patients.true_log_hazards is not None
    scores = patients.true_log_hazards[numbers]
    found = recipe.judge({"score": scores.tolist(), "number": [float(n) for n in numbers]})
    # As ranks have them: every second one, one rank after the other.
    mixed = numbers[::2] + numbers[1::2]
    again = recipe.judge({"score": patients.true_log_hazards[mixed].tolist(), "number": mixed})
    assert again == pytest.approx(found, abs=1e-12)
    of_held_out = scores, patients.times[numbers], patients.events[numbers]
    assert found["c_index"] == metrics.c_index(*of_held_out)
    # The interval of the result.
    ends = metrics.c_index_interval(*of_held_out, recipe.config.split_seed)
    assert (found["c_index_low"], found["c_index_high"]) == ends


def test_the_network_runs_on_the_device_meta() -> None:
    """There, what a step takes is worked out."""
    recipe = Survival(_config())
    batch = {name: value.to("meta") for name, value in recipe.example(2).items()}
    loss = recipe.loss(recipe.build_model().to("meta"), batch)["loss"]
    loss.backward()
    assert loss.is_meta


def test_a_frozen_encoder_stays_as_it_is() -> None:
    recipe = Survival(_config(freeze_epochs=2, find_unused_parameters=True))
    loaders = recipe.build_loaders(0, 1)
    model = recipe.build_model()
    for epoch in range(3):
        batch = next(iter(loaders.train))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        model.zero_grad(set_to_none=True)
        recipe.loss(model, batch)["loss"].backward()
        has_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
        changed = {name for name, value in model.state_dict().items() if not value.equal(before[name])}
        assert (has_gradient == {"head.weight"}) == (epoch < 2)
        assert bool(changed) == (epoch == 2), "running means are of what is learned from"
    loaders.seek(1)
    assert next(iter(loaders.train))["frozen"].all()
    loaders.seek(2 * loaders.steps_per_epoch)
    assert not next(iter(loaders.train))["frozen"].any()
    loaders.close()


@pytest.mark.parametrize("name", ["weights.safetensors", "weights.pth"])
def test_weights_come_from_a_file(tmp_path: Path, name: str) -> None:
    torch.manual_seed(1)
    encoder = SurvivalNetwork("resnet18", widen_factor=0.0625).encoder
    path = tmp_path / name
    if path.suffix == ".pth":
        torch.save(
            {"state_dict": {f"module.{n}": v for n, v in encoder.state_dict().items()}, "epoch": 3}, path
        )
    else:
        safetensors.torch.save_file(encoder.state_dict(), path)
    model = Survival(_config(pretrained=str(path))).build_model()
    assert isinstance(model, SurvivalNetwork)
    for key, value in encoder.state_dict().items():
        assert value.equal(model.encoder.state_dict()[key]), key
    with pytest.raises(DataError, match=r"does not fit: bn1.bias is \(4,\), and the network.s is \(8,\)"):
        Survival(_config(pretrained=str(path), widen_factor=0.125)).build_model()


def test_files_that_are_no_weights_are_refused(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "was here",)

    path = tmp_path / "weights.pt"
    torch.save({"conv1.weight": Harmful()}, path)
    with pytest.raises(DataError, match="cannot be read as weights"):
        load_weights(path)
    assert not (tmp_path / "was here").exists()
    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot be read as weights"):
        load_weights(path)
    with pytest.raises(DataError, match="no such file"):
        load_weights(tmp_path / "none.pt")


def test_settings_that_do_not_go_together_are_refused() -> None:
    for settings, message in (
        ({"image_size": (16, 16)}, "three numbers"),
        ({"hu_min": 10, "hu_max": 10}, "must be below"),
        ({"features": ("Age",)}, "features=.* counts only with data other than"),
        ({"eval_times": (3.0, 1.0)}, "must be above 0 and rise"),
        ({"freeze_epochs": 1}, "find_unused_parameters=True"),
    ):
        with pytest.raises(ConfigError, match=message):
            _config(**settings)


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CSV file with 24 volumes; who has the event sooner is older."""
    folder = tmp_path_factory.mktemp("cohort")
    rng = np.random.default_rng(0)
    lines = ["NIFTI path,time,event,Fold_1,Age"]
    for index in range(24):
        values = rng.normal(0, 300, (20, 18, 12)).astype(np.int16)
        nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), folder / f"{index}.nii.gz")
        lines.append(
            f"{index}.nii.gz,{30 - index},{int(index % 3 > 0)},{'val' if index % 4 == 0 else 'train'},{40 + index}"
        )
    (folder / "cohort.csv").write_text("\n".join(lines))
    return folder / "cohort.csv"


def test_features_are_standardised_with_the_training_patients_alone(cohort: Path) -> None:
    recipe = Survival(_config(data=str(cohort), fold="Fold_1", features=("Age",), image_size=(16, 16, 8)))
    patients = recipe._patients
    assert (patients.num_training, len(patients.parts.validation)) == (18, 6)
    features = np.array([item["features"][0] for item in patients.items])
    assert features[:18].mean() == pytest.approx(0)
    assert features[:18].std() == pytest.approx(1)
    ages = np.array([40 + int(Path(item["name"]).name.split(".")[0]) for item in patients.items])
    assert np.corrcoef(ages, features)[0, 1] == pytest.approx(1)
    loaders = recipe.build_loaders(0, 1)
    assert next(iter(loaders.train))["image"].shape == (4, 1, 16, 16, 8)
    loaders.close()
    assert recipe.amount() == (18, 1, 6)


def test_split_patients_have_all_their_volumes_on_one_side(cohort: Path) -> None:
    lines = cohort.read_text().splitlines()
    table = [lines[0] + ",patient"] + [f"{line},{index // 3}" for index, line in enumerate(lines[1:])]
    path = cohort.with_name("with_patients.csv")
    path.write_text("\n".join(table))
    patients = Survival(_config(data=str(path), image_size=(16, 16, 8)))._patients
    sides = [
        {int(Path(item["name"]).name.split(".")[0]) // 3 for item in items}
        for items in (patients.parts.training, patients.parts.validation)
    ]
    assert sides[1]
    assert not sides[0] & sides[1]


def _train(cluster: nbgpu.Cluster, tmp_path: Path, **settings: Any) -> tuple[nbgpu.Run, dict[str, Any]]:
    run = cluster.train("survival", threads=1, runs_dir=str(tmp_path), **settings)
    run.wait()
    assert run.status == "finished", run.failures
    result = run.result()
    assert result is not None
    return run, dict(result)


@pytest.mark.long
def test_a_short_run_on_files_with_folds_and_features(
    cluster2: nbgpu.Cluster, tmp_path: Path, cohort: Path
) -> None:
    settings = {"data": str(cohort), "fold": "Fold_1", "features": ("Age",), "image_size": (16, 16, 8)}
    run, result = _train(
        cluster2,
        tmp_path,
        **(SMALL | settings),
        steps=6,
        val_every=3,
        freeze_epochs=1,
        find_unused_parameters=True,
    )
    assert set(result["table"]) == {
        "resnet18",
        "mean intensity",
        "voxels 200 HU above the median",
        "10 radiomic features",
        "these and their products",
        "features alone",
        "no prediction",
    }
    assert result["table"]["features alone"]["c_index"] == 1
    assert result["table"]["no prediction"]["c_index"] == 0.5
    assert len(result["images"]) == 2
    frame = run.metrics()
    judged = frame[frame["val_c_index"].notna()] if "val_c_index" in frame else frame[:0]
    assert len(judged) == 2
    # The step's events are those of both ranks, and the loss is the same on both.
    losses = frame.pivot_table(index="step", columns="rank", values="loss")
    assert (losses[0] == losses[1]).all()


@pytest.mark.long
def test_a_short_run_learns_the_generated_cohort(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    """The full form is `test_the_quality_gate`."""
    _, result = _train(cluster2, tmp_path, num_patients=700, steps=300, val_every=0)
    assert result["table"]["resnet18"]["c_index"] > 0.62
    assert result["table"]["mean intensity"]["c_index"] < 0.6


def test_bad_rows_stop_the_run_with_all_of_them(
    cluster2: nbgpu.Cluster, tmp_path: Path, cohort: Path
) -> None:
    path = cohort.with_name("bad.csv")
    lines = cohort.read_text().splitlines()
    lines[3] = "gone.nii.gz,-4,1,train,50"
    lines[5] = "4.nii.gz,8,perhaps,train,50"
    path.write_text("\n".join(lines))
    run = cluster2.train(
        "survival", threads=1, runs_dir=str(tmp_path), data=str(path), image_size=(16, 16, 8)
    )
    with pytest.raises(RankError) as raised:
        run.wait()
    (message,) = {failure.message for failure in raised.value.failures}
    for wrong in ("gone.nii.gz: there is no such file", "time is -4", "event is 'perhaps'"):
        assert wrong in message


def test_a_patient_far_outside_the_others_leaves_the_baselines_numbers() -> None:
    recipe = Survival(_config(image_size=(16, 16, 8)))
    model = recipe.build_model().eval()
    rows = recipe.evaluate(model, torch.device("cpu"), recipe.samples_of_result())
    rows[-1]["dense regions"] = rows[-1]["size of a region"] = 1e7
    table = recipe.result(model, torch.device("cpu"), rows)["table"]
    for name in ("10 radiomic features", "these and their products"):
        assert 0 <= table[name]["ibs"] <= 1
        assert 0 <= table[name]["c_index"] <= 1


@pytest.mark.quality
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quality_gate(cluster2: nbgpu.Cluster, tmp_path: Path, seed: int) -> None:
    """1000 + 400 generated patients. Nothing can be better than the true hazard, but for luck with 400."""
    _, result = _train(cluster2, tmp_path, seed=seed, split_seed=seed)
    table = result["table"]
    quality.note("Survival, 1000 generated patients", "c_index", seed, table)
    found = {name: row["c_index"] for name, row in table.items()}
    # What counts is each lesion's shape together with its place, which no mean over the lesions has.
    by_hand = ("voxels 200 HU above the median", "10 radiomic features", "these and their products")
    assert found["resnet18"] >= max(found[name] for name in by_hand) + 0.04
    assert found["resnet18"] >= found["true hazard"] - 0.08
    assert max(found["mean intensity"], found["voxels 200 HU above the median"]) < 0.6


def test_times_beyond_the_training_follow_up_are_refused_before_the_run(cohort: Path) -> None:
    lines = cohort.read_text().splitlines()
    # The patients who are trained on are observed for up to 29, those who are held out for up to 30.
    settings = {"data": str(cohort), "fold": "Fold_1", "image_size": (16, 16, 8)}
    assert lines[1].startswith("0.nii.gz,30,")
    with pytest.raises(
        DataError, match=r"eval_times has 29.5, and no training patient is observed for longer than 29"
    ):
        Survival(_config(**settings, eval_times=(10.0, 29.5))).inspect()
    Survival(_config(**settings, eval_times=(10.0, 28.5))).inspect()


def test_a_run_at_one_voxel_size_predicts_at_it(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    """The same patient in files with other voxels, axes and margins has about the same risk."""
    lines = ["image,time,event"]
    rng = np.random.default_rng(1)
    for index in range(12):
        values = rng.normal(0, 300, (10, 10, 10)).repeat(2, 0).repeat(2, 1).repeat(2, 2).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), tmp_path / f"{index}.nii.gz")
        lines.append(f"{index}.nii.gz,{index + 1},1")
    (tmp_path / "cohort.csv").write_text("\n".join(lines))
    run, _ = _train(
        cluster2,
        tmp_path / "runs",
        **SMALL,
        data=str(tmp_path / "cohort.csv"),
        image_size=(8, 8, 8),
        spacing=(2.0,),
        steps=3,
        val_every=0,
    )
    said = "voxels of 2 x 2 x 2 mm: the middle 16 x 16 x 16 mm of each volume. 12 of the 12 that were looked at lose"
    assert any(said in line for line in run.info.data)
    first = nibabel.load(tmp_path / "0.nii.gz")
    values = first.get_fdata()
    others = {
        "larger": (np.pad(values, 8, constant_values=-1000), np.eye(4)),
        "coarse": (values[::2, ::2, ::2], np.diag([2.0, 2, 2, 1])),
        "turned": (values[::-1].transpose(2, 0, 1), np.array([[0, -1, 0, 19], [0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1.0]])),
    }  # fmt: skip
    rows = ["image", "1.nii.gz", "0.nii.gz"]
    for name, (voxels, affine) in others.items():
        nibabel.save(nibabel.Nifti1Image(voxels.astype(np.float32), affine), tmp_path / f"{name}.nii.gz")
        rows.append(f"{name}.nii.gz")
    (tmp_path / "new.csv").write_text("\n".join(rows))
    found = cluster2.predict(run, data=str(tmp_path / "new.csv"), out=str(tmp_path / "out")).frame()
    risk_of = {Path(name).name: float(risk) for name, risk in found["log_hazard"].items()}
    another = risk_of.pop("1.nii.gz")
    assert list(risk_of.values()) == pytest.approx([risk_of["0.nii.gz"]] * 4, abs=1e-4)
    assert abs(another - risk_of["0.nii.gz"]) > 1e-3
