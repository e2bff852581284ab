"""Cohorts in CSV files, and what is said of those that cannot be used; the generated cohort."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch

from nbgpu.config import train_config
from nbgpu.engine.data.volumes import header_problem
from nbgpu.errors import ConfigError, DataError
from nbgpu.recipes.survival import files, metrics
from nbgpu.recipes.survival.cohort import SIZE, image, outcome
from nbgpu.recipes.survival.config import SurvivalConfig
from nbgpu.recipes.survival.files import PatientRow, read_table
from nbgpu.recipes.survival.recipe import Survival


def _volume(path: Path, seed: int = 0) -> None:
    values = np.random.default_rng(seed).normal(0, 300, (8, 9, 7)).astype(np.int16)
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), path)


def _table(
    folder: Path, lines: Sequence[str], fold: str = "Fold_1", features: Sequence[str] = ("Age",)
) -> list[PatientRow]:
    path = folder / "cohort.csv"
    path.write_text("\n".join(["NIFTI Path,time,event,Fold_1,Age,patient_id", *lines]), encoding="utf-8-sig")
    return read_table(path, fold, features, header_problem)


@pytest.fixture
def volumes(tmp_path: Path) -> Path:
    for name in "abcdefgh":
        _volume(tmp_path / f"{name}.nii.gz", ord(name))
    return tmp_path


GOOD = [
    "a.nii.gz,12.5,1,train,61,p1",
    "b.nii.gz,30,0,Train,70,p2",
    "",
    "c.nii.gz,9,1.0,val,55,p3",
    "d.nii.gz,14,FALSE,val,48,p4",
]


def test_a_table_gives_its_rows(volumes: Path) -> None:
    rows = _table(volumes, GOOD)
    assert [row.image.name[0] for row in rows] == ["a", "b", "c", "d"]
    assert [row.part for row in rows] == ["training", "training", "validation", "validation"]
    assert [(row.time, row.event, row.features) for row in rows[:2]] == [
        (12.5, True, (61.0,)),
        (30.0, False, (70.0,)),
    ]
    assert [row.event for row in rows[2:]] == [True, False]
    rows = _table(volumes, GOOD, fold="", features=())
    assert (len(rows), {row.part for row in rows}) == (4, {""})
    assert [row.patient for row in rows] == ["p1", "p2", "p3", "p4"]
    assert rows[0].features == ()


def test_all_that_is_wrong_is_told_at_once(volumes: Path) -> None:
    (volumes / "e.nii.gz").write_bytes(b"no volume")
    with pytest.raises(DataError) as raised:
        _table(
            volumes,
            [
                "a.nii.gz,12.5,1,train,61,p1",
                "gone.nii.gz,0,1,train,61,p5",
                "e.nii.gz,-3,yes,train,old,p6",
                "b.nii.gz,nan,100,perhaps,70,p2",
                "c.nii.gz,twelve,0,val,70,p7",
                "d.nii.gz,11,0,val,70,p1",
                ",9,1,train,50,p8",
                "a.nii.gz,13,1,train,61,p1",
            ],
        )
    told = str(raised.value).splitlines()
    expected = [
        "line 3: .*gone.nii.gz: there is no such file",
        "line 3: time is 0, and must be above 0",
        "line 4: .*e.nii.gz: cannot be read as NIfTI",
        "line 4: time is -3, and must be above 0",
        "line 4: event is 'yes', and must be 0 or 1",
        "line 4: Age is 'old', not a number",
        "line 5: time is 'nan', not a number",
        "line 5: event is '100', and must be 0 or 1",
        "line 5: Fold_1 is 'perhaps', and must be 'train', 'val' or 'test'",
        "line 6: time is 'twelve', not a number",
        "line 8: NIFTI Path is empty",
        "lines 2, 9: all name .*a.nii.gz",
        "patient 'p1' is in several parts of Fold_1: training in line 2, 9; validation in line 7",
        "none of the 1 rows of validation in Fold_1 has the event",
    ]
    assert len(told) == len(expected)
    for line, pattern in zip(told, expected, strict=True):
        assert re.search(pattern, line), (pattern, line)


def test_columns_may_have_other_names(volumes: Path) -> None:
    path = volumes / "other.csv"
    path.write_text("case;ct_path;OS_days;OS_status\nA;a.nii.gz;127,5;1\nB;b.nii.gz;822;0\n")
    config = SurvivalConfig(
        data=str(path), columns=("time=OS_days", "event=os_status", "image=ct_path", "patient=case")
    )
    rows = read_table(path, "", (), header_problem, columns=config.headings)
    assert [(row.image.name, row.time, row.event) for row in rows] == [
        ("a.nii.gz", 127.5, True),
        ("b.nii.gz", 822.0, False),
    ]
    assert [row.patient for row in rows] == ["A", "B"]
    with pytest.raises(DataError, match=r"has no column 'OS_month'\. Its headings are: case, ct_path"):
        read_table(path, "", (), header_problem, columns={**config.headings, "time": "OS_month"})
    with pytest.raises(ConfigError, match="must be entries such as 'time=OS_days'"):
        train_config("survival", data=str(path), columns=("days=OS_days",))


def test_missing_columns_are_named(volumes: Path) -> None:
    path = volumes / "other.csv"
    path.write_text("scan,event\na.nii.gz,1\n")
    with pytest.raises(DataError, match=r"has no column .*'time', 'Fold_2', 'Age'"):
        read_table(path, "Fold_2", ["Age"], header_problem)
    with pytest.raises(DataError, match="no such file"):
        read_table(volumes / "none.csv", "", [], header_problem)


def test_times_that_tell_nothing_or_mix_units_are_refused(volumes: Path) -> None:
    same = [f"{name}.nii.gz,5,1,,60,{name}" for name in "abcd"]
    with pytest.raises(DataError, match="all times are 5"):
        _table(volumes, same, fold="")
    days_and_years = [
        f"{name}.nii.gz,{time},1,,60,{name}"
        for name, time in zip("abcdefgh", (1, 2, 3, 4, 400, 700, 900, 1500), strict=True)
    ]
    with pytest.raises(DataError, match=r"no time is between 4 and 400, as if .* in lines 2, 3, 4, 5. Give"):
        _table(volumes, days_and_years, fold="")
    path = volumes / "cohort.csv"
    assert len(read_table(path, "", [], header_problem, check_time_unit=False)) == 8


def test_files_are_read_without_torch() -> None:
    imported = {
        name.name.split(".")[0] if isinstance(node, ast.Import) else str(node.module)
        for node in ast.walk(ast.parse(Path(files.__file__).read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in node.names
    }
    assert imported == {
        "__future__",
        "math",
        "collections.abc",
        "dataclasses",
        "pathlib",
        "nbgpu.recipes.survival.config",
        "nbgpu.errors",
        "nbgpu.machine.files",
        "nbgpu.planning.csv_rows",
    }


def test_the_generated_cohort_is_what_it_says() -> None:
    cohort = [outcome(0, index) for index in range(300)]
    volumes = [image(0, index) for index in range(300)]
    assert volumes[7].equal(image(0, 7))
    assert not volumes[7].equal(image(1, 7))
    assert volumes[0].shape == (1, *SIZE)
    scores = np.array([one.log_hazard for one in cohort])
    times, events = np.array([one.time for one in cohort]), np.array([one.event for one in cohort])
    assert metrics.c_index(scores, times, events) == pytest.approx(0.85, abs=0.04)
    assert 0.5 < events.mean() < 0.7
    # Neither brightness nor the amount of lesions tells much.
    images = torch.cat(volumes).numpy()
    medians = np.median(images, axis=(1, 2, 3))[:, None, None, None]
    for useless in (images.mean(axis=(1, 2, 3)), (images > medians + 200).sum(axis=(1, 2, 3))):
        assert metrics.c_index(useless, times, events) == pytest.approx(0.5, abs=0.1)


def test_a_network_that_can_learn_its_few_patients_by_heart_is_warned_of(volumes: Path) -> None:
    path = volumes / "cohort.csv"
    path.write_text(
        "\n".join(["image,time,event", *(f"{n}.nii.gz,{i + 1},1" for i, n in enumerate("abcdef"))])
    )
    of_size = {1.0: True, 1 / 64: False}
    for widen_factor, is_warned in of_size.items():
        config = SurvivalConfig(data=str(path), image_size=(16, 16, 16), widen_factor=widen_factor)
        warnings = Survival(config).build_loaders(0, 1).warnings
        assert any("may learn them by heart" in warning for warning in warnings) == is_warned


def test_an_image_size_of_two_numbers_is_refused_in_words_also_with_one_sample_a_batch() -> None:
    with pytest.raises(ConfigError, match=r"image_size=\(8, 8\) must be three numbers"):
        train_config("survival", image_size=(8, 8), batch_size=1)
