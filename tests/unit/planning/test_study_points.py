"""The points of a study: their settings, the order in which they are measured, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nbgpu.errors import ConfigError
from nbgpu.planning import studies
from nbgpu.planning.studies import RANKS, StudyPlan

CPU: dict[str, Any] = {"gpus": "none"}


def planned(vary: str = RANKS, values: Any = (1, 2, 4), **settings: Any) -> StudyPlan:
    return studies.plan("autoencoder", vary, values, CPU | settings)


def test_weak_scaling_keeps_the_batch_of_each_rank() -> None:
    points = planned(batch_size=3).points()
    assert [(p.ranks, p.config.batch_size, p.samples_per_step) for p in points] == [
        (1, 3, 3),
        (2, 3, 6),
        (4, 3, 12),
    ]


def test_a_study_may_have_a_name() -> None:
    assert planned().title == "autoencoder-ranks"
    assert planned(run_name="on-the-new-host").title == "on-the-new-host-ranks"


def test_strong_scaling_keeps_the_samples_of_a_step() -> None:
    points = planned(mode="strong", batch_size=8, accumulate=2).points()
    assert [(p.ranks, p.config.batch_size, p.samples_per_step) for p in points] == [
        (1, 8, 16),
        (2, 4, 16),
        (4, 2, 16),
    ]


def test_a_run_of_a_study_is_as_long_as_its_steps_and_says_nothing_at_its_end() -> None:
    config = planned(measured_steps=7, warm_up_steps=4).points()[0].config
    assert (config.steps, config.val_every, config.work_out_result) == (11, 0, False)
    assert planned(val_every=5).points()[0].config.val_every == 5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"values": [0, 1]}, "ranks = 0: ranks = 0 is not valid"),
        ({"values": [1, 65]}, "ranks = 65: "),
        ({"values": []}, "ranks has no values"),
        ({"values": [1, 1]}, "a value twice"),
        (
            {"mode": "strong", "values": [1, 2, 3], "batch_size": 4},
            "ranks = 3: .*4 samples cannot be shared out",
        ),
        ({"global_batch_size": 4}, "does not go with mode='weak'"),
        ({"steps": 10}, "steps cannot be given: measured_steps"),
        ({"vary": "epochs", "values": [1]}, "epochs cannot be given"),
        ({"vary": "bucket", "values": [1]}, "bucket is not a setting"),
        ({"vary": "bucket_mb", "values": [1, -1]}, "bucket_mb = -1: "),
        ({"buckets": 3}, "buckets is not a setting of a study"),
        ({"repeats": 0}, "repeats = 0 is not valid"),
        ({"keep": True}, "keep does not go with a study"),
        ({"slow_rank": "1=2x"}, "ranks = 1: slow_rank='1=2x' names rank 1, and there are 1 rank"),
        ({"link": "fast"}, "link = 'fast' is not valid|link='fast'"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        planned(**settings)


def test_all_bad_points_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        planned(vary="lr", values=[-1.0, 1e-3, 20.0])
    assert "2 of 3 points" in str(caught.value)
    assert "lr = -1.0: " in str(caught.value)
    assert "lr = 20.0: " in str(caught.value)


def test_a_recipe_without_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no batches"):
        studies.plan("microstructure", RANKS, [1, 2], CPU)


def test_text_of_the_command_line_becomes_values() -> None:
    assert planned(vary="bucket_mb", values=["0.5", "25"]).values == [0.5, 25.0]


def test_points_take_turns_and_every_other_turn_goes_backwards() -> None:
    assert studies.order(3, 2) == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 1), (1, 0)]


@pytest.mark.parametrize(
    ("vary", "values"),
    [
        (RANKS, [1, 2]),
        ("channels", [(8, 16), (16, 32)]),
        ("amp", ["off", "bf16"]),
        ("comm_hook", ["none", "fp16"]),
        ("threads", [None, 1]),
    ],
)
def test_a_plan_is_read_as_it_was_written(tmp_path: Path, vary: str, values: list[Any]) -> None:
    made = planned(
        vary=vary, values=values, ranks=2 if vary != RANKS else None, lr=1e-4, studies_dir=str(tmp_path)
    )
    folder = studies.create_folder(made, {"host": "here"})
    read, environment = StudyPlan.read(folder)
    assert read == made
    assert read.advice == ""
    assert environment == {"host": "here"}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_an_advice_is_kept_with_what_it_promised(tmp_path: Path) -> None:
    made = planned(vary="comm_hook", values=["none", "fp16"], ranks=2, studies_dir=str(tmp_path))
    made = replace(made, advice="With 16 bits.", promised=1.5)
    assert StudyPlan.read(studies.create_folder(made, {}))[0] == made


def test_validations_and_checkpoints_count_in_whole_cycles() -> None:
    settings = {"vary": "batch_size", "values": [1, 2], "ranks": 2, "val_every": 4, "checkpoint_every": 6}
    made = planned(**settings, measured_steps=24)
    assert [point.cycle for point in made.points()] == [12, 12]
    # One step more, whose beginning ends the measurement.
    assert made.points()[0].config.steps == 5 + 24 + 1
    with pytest.raises(ConfigError, match=r"come again every 12 steps.* Give measured_steps=24"):
        planned(**settings, measured_steps=20)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not the folder of a study: it has no study\.toml"):
        StudyPlan.read(tmp_path)
    (tmp_path / "study.toml").write_text("[study]\nrecipe = 'autoencoder'\n")
    with pytest.raises(ConfigError, match="not what nbgpu writes"):
        StudyPlan.read(tmp_path)
