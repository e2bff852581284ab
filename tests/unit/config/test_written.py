"""Settings written as code and as a command are read as the same settings again."""

from __future__ import annotations

import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from nbgpu import cli
from nbgpu.cli import training
from nbgpu.config import TRAIN_CONFIGS, ClusterConfig, TrainConfig, own_file, train_config, written
from nbgpu.config.settings import control_fields, label_of, unit_of

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("autoencoder", "", {}),
    (
        "autoencoder",
        "",
        {
            "batch_size": 4,
            "amp": "bf16",
            "patch_size": (32, 32, 16),
            "epochs": 3,
            "smoke_test": True,
            "data": "phantoms",
            "channels": (8, 16, 32),
            "run_name": "mine",
        },
    ),
    ("autoencoder", "", {"attention_levels": (True, False), "tf32": False, "clip_norm": 0.0}),
    # What is the default beside this preset differs from the field's own, and the other way round.
    ("survival", "mace", {"image_size": (16, 16, 8), "batch_size": 3, "spread_events": False}),
    ("survival", "mace", {"lr": 1e-3, "epochs": None, "steps": 10}),
    ("survival", "", {"lr": 1e-5, "weight_decay": 1.0}),
]


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[ClusterConfig, TrainConfig]]:
    """The settings of each run that the command line would start, without engines."""
    found: list[tuple[ClusterConfig, TrainConfig]] = []
    monkeypatch.setattr(training, "_run", lambda cluster, config, asked: found.append((cluster, config)))
    monkeypatch.setattr(training.preloading, "begun", lambda *_: nullcontext())
    monkeypatch.setattr(training.data_check, "require_good_data", lambda config: None)
    monkeypatch.chdir(tmp_path)
    return found


@pytest.mark.parametrize(("recipe", "preset", "given"), CASES)
def test_a_command_asks_for_the_same_run(
    asked_for: list[tuple[ClusterConfig, TrainConfig]], recipe: str, preset: str, given: dict[str, Any]
) -> None:
    whole = train_config(recipe, **({"preset": preset} if preset else {}), **given)
    cluster = ClusterConfig(gpus="none", ranks=3, memory_limit="2 GiB", slow_rank="1=1.5x,2=2x")
    needed = written.differing(recipe, preset, given)
    command = shlex.split(written.as_command(recipe, preset, needed, cluster))
    assert command[:3] == ["nbgpu", "train", recipe]
    cli.main(command[1:])
    ((asked_cluster, asked),) = asked_for
    assert asked.model_dump() == whole.model_dump()
    assert asked_cluster == cluster


@pytest.mark.parametrize(("recipe", "preset", "given"), CASES)
def test_code_calls_for_the_same_run(recipe: str, preset: str, given: dict[str, Any]) -> None:
    whole = train_config(recipe, **({"preset": preset} if preset else {}), **given)
    needed = written.differing(recipe, preset, given)
    code = written.as_code(recipe, preset, needed, ClusterConfig(gpus="none"))
    call = code[code.index("cluster.train(") :].replace("cluster.train", "train_config", 1)
    assert eval(call, {"train_config": train_config}).model_dump() == whole.model_dump()


def test_only_what_differs_is_written() -> None:
    given = {"batch_size": 4, "lr": 4e-3, "steps": 200}
    assert written.differing("autoencoder", "", given) == {"batch_size": 4}
    # Without the preset this would be the default.
    assert written.differing("survival", "mace", {"lr": 1e-3}) == {"lr": 1e-3}


def test_texts_are_quoted_for_their_reader() -> None:
    odd = {"data": 'my folder/a\'s "b"', "run_name": "-x"}
    assert written.arguments_of(TRAIN_CONFIGS["autoencoder"], odd) == [
        "--data",
        'my folder/a\'s "b"',
        "--run-name=-x",
    ]
    code = written.as_code("autoencoder", "", odd, ClusterConfig())
    assert repr(odd["data"]) in code
    command = written.as_command("autoencoder", "", {"data": odd["data"]}, ClusterConfig())
    assert shlex.split(command)[-1] == odd["data"]


def test_a_cluster_that_is_there_is_not_started_again() -> None:
    code = written.as_code("diffusion", "", {}, ClusterConfig(gpus="0,1"), is_started=True)
    assert "# %nbgpu start --gpus 0,1" in code.splitlines()
    assert "%load_ext" not in code


def test_long_calls_have_a_line_for_each_setting() -> None:
    given = {
        "data": "/scratch/a_rather_long_name/of_a_folder",
        "batch_size": 4,
        "accumulate": 2,
        "amp": "bf16",
    }
    code = written.as_code("autoencoder", "", given, ClusterConfig())
    assert max(map(len, code.splitlines())) < 88
    assert "    batch_size=4," in code.splitlines()


def test_every_control_has_a_word_of_its_own() -> None:
    """A name such as 'amp' tells only who knows it."""
    for model in (ClusterConfig, *TRAIN_CONFIGS.values()):
        labels = [label_of(model, name) for _, name, _ in control_fields(model)]
        assert len({*labels}) == len(labels), model
        assert all(label[0].isupper() and "_" not in label for label in labels), model
    assert label_of(TRAIN_CONFIGS["survival"], "amp") == "Mixed precision"
    # A recipe that has another default for a setting does not name it again.
    assert label_of(TRAIN_CONFIGS["lithography"], "lr") == "Learning rate"
    assert unit_of(TRAIN_CONFIGS["lithography"], "defocus_nm") == "nm"


def test_own_recipes_of_a_folder_are_found(tmp_path: Path) -> None:
    own_file.create(str(tmp_path / "mine.py"))
    (tmp_path / "other.py").write_text("print('no recipe')")
    (tmp_path / "broken.py").write_text("class Broken(OwnRecipe:")
    assert own_file.in_folder(tmp_path) == [str(tmp_path / "mine.py")]
