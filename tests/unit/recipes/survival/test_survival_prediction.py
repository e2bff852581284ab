"""The risks of new patients."""

from __future__ import annotations

from pathlib import Path

import nibabel
import numpy as np
import pytest

from nbgpu.config import train_config
from nbgpu.errors import DataError
from nbgpu.recipes.survival.files import read_new
from nbgpu.recipes.survival.patients import Scale
from nbgpu.recipes.survival.prediction import concordance_in_words, new_patients, risks
from nbgpu.run_folder.predictions import Row


def _row(name: str, log_hazard: float, outcome: tuple[float, bool] | None = None) -> Row:
    return Row(name, 0, {"log_hazard": log_hazard}, aside={"outcome": outcome})


def test_risks_are_worked_by_hand() -> None:
    """Four training patients with equal scores and events at 1, 2, 3 and 4: the baseline hazard rises by 1/4,
    1/3, 1/2 and 1."""
    scores, times, events = np.zeros(4), np.array([1.0, 2, 3, 4]), np.ones(4, dtype=bool)
    rows = [_row("alike", 0.0), _row("twice", np.log(2)), _row("hardly", -3.0)]
    found = risks(rows, scores, times, events, np.array([2.0, 3.5]), 2)
    assert found["alike"]["survival_2"] == pytest.approx(np.exp(-7 / 12), abs=1e-4)
    assert found["twice"]["survival_2"] == pytest.approx(np.exp(-14 / 12), abs=1e-4)
    assert found["alike"]["survival_3.5"] == pytest.approx(np.exp(-13 / 12), abs=1e-4)
    # exp(-H) is one half at H = .693: between 7/12 at 2 and 13/12 at 3; for twice the hazard at H = .347.
    assert found["alike"]["median_time"] == 3
    assert found["twice"]["median_time"] == 2
    assert found["hardly"]["median_time"] is None
    assert [found[name]["risk_percentile"] for name in ("hardly", "alike", "twice")] == [0, 0, 100]
    assert [found[name]["risk_group"] for name in ("hardly", "twice")] == [1, 2]


def test_an_order_is_judged_where_outcomes_are_known() -> None:
    known = [_row("a", 2.0, (1.0, True)), _row("b", 1.0, (2.0, True)), _row("c", 3.0, (3.0, False))]
    (words,) = concordance_in_words([*known, _row("d", 0.0)])
    assert words.startswith(
        "Of 3 patients with known outcomes, 2 of them with the event, the C-index is 0.333"
    )
    assert concordance_in_words([_row("d", 0.0), _row("e", 1.0)]) == []


def test_a_table_needs_no_outcomes_and_keeps_the_training_scale(tmp_path: Path) -> None:
    nibabel.save(
        nibabel.Nifti1Image(np.random.rand(8, 8, 8).astype(np.float32), np.eye(4)), tmp_path / "a.nii"
    )
    table = tmp_path / "new.csv"
    table.write_text("image,age\na.nii,70\nmissing.nii,60\na.nii,old\n")
    config = train_config("survival", data="cohort.csv", fold="fold", features=("age",), image_size=(8, 8, 8))
    samples, problems = new_patients(config, Scale(np.array([60.0]), np.array([5.0])), str(table))
    assert [sample["features"] for sample in samples] == [(2.0,)]
    assert samples[0]["outcome"] is None
    assert ["line 3" in problems[0], "line 4: age is 'old'" in problems[1]] == [True, True]

    table.write_text("image,age,time\na.nii,70,3\n")
    with pytest.raises(DataError, match="has no column 'event'"):
        read_new(table, ("age",), lambda _: None)
    table.write_text("image,time,event\na.nii,3,1\n")
    ((patient,), _) = read_new(table, (), lambda _: None)
    assert (patient.time, patient.event) == (3.0, True)
    # The names of the training table's outcomes do not make outcomes necessary.
    table.write_text("ct\na.nii\n")
    ((patient,), _) = read_new(
        table, (), lambda _: None, {"image": "ct", "time": "OS_days", "event": "dead", "patient": "PID"}
    )
    assert (patient.image.name, patient.time) == ("a.nii", None)
