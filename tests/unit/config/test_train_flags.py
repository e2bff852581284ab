"""The flags of `nbgpu train` that are no settings: help shows them, and contradictions are refused."""

from __future__ import annotations

import re
from contextlib import nullcontext
from pathlib import Path

import pytest

from nbgpu import cli
from nbgpu.cli import training
from nbgpu.client.cluster.cluster import Cluster
from nbgpu.config import ClusterConfig, TrainConfig, flags, train_config, write_toml


class Reached(Exception):
    """The engines would be started now."""


@pytest.fixture
def no_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start(_: Cluster) -> None:
        raise Reached

    monkeypatch.setattr(Cluster, "start", start)
    monkeypatch.chdir(tmp_path)


def refused(*arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", *arguments, "--gpus", "none"])
    return str(ended.value)


@pytest.mark.parametrize("recipe", ["autoencoder", "microstructure"])
def test_help_shows_what_train_does_beside_the_settings(
    capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", recipe, "--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert all(f" {flag} " in told for flag in ("--plan", "--find-batch-size", "--config"))
    assert "--no-plan" not in told
    assert "--no-find-batch-size" not in told


def test_help_of_a_sweep_shows_its_file(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["sweep", "autoencoder", "--help"])
    told = capsys.readouterr().out
    assert " --config " in told
    assert "--plan" not in told


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["--find-batch-size", "--batch-size", "4"],
            "--find-batch-size finds the batch size, and --batch-size",
        ),
        (["--find-batch-size", "--batch_size=4"], "--find-batch-size finds the batch size, and --batch-size"),
        (["--global-batch-size", "4", "--find-batch-size"], "and --global-batch-size gives one"),
        (["--find-batch-size", "--smoke-test"], "Leave out --smoke-test or --find-batch-size"),
        (["--config"], "--config needs a file"),
        (["--config", "--plan"], "--config needs a file"),
        (["--config="], "--config needs a file"),
        (["--config", "a.toml", "--config=b.toml"], "--config is given 2 times"),
        (["--plan", "--batch-size", "0", "--lr", "99"], "lr = 99.0 is not valid"),
    ],
)
@pytest.mark.usefixtures("no_engines")
def test_flags_that_do_not_go_together_are_refused_before_engines_start(
    arguments: list[str], expected: str
) -> None:
    told = refused("autoencoder", *arguments)
    assert told.startswith("ConfigError: ")
    assert expected in told


@pytest.mark.usefixtures("no_engines")
def test_a_recipe_without_batches_has_no_largest_one() -> None:
    assert "has no batches" in refused("microstructure", "--find-batch-size")


@pytest.mark.usefixtures("no_engines")
def test_all_bad_values_are_named_at_once() -> None:
    told = refused("autoencoder", "--batch-size", "0", "--lr", "99", "--ranks", "100")
    assert [line.partition(" = ")[0] for line in told.splitlines()] == [
        "ConfigError: ranks",
        "batch_size",
        "lr",
    ]


@pytest.mark.usefixtures("no_engines")
@pytest.mark.parametrize("form", [["--config", "run.toml"], ["--config=run.toml"]])
def test_values_of_a_file_are_defaults_of_flags(monkeypatch: pytest.MonkeyPatch, form: list[str]) -> None:
    write_toml(
        Path("run.toml"), ClusterConfig(gpus="none", ranks=3), train_config("autoencoder", lr=0.5, seed=7)
    )
    given: list[TrainConfig] = []
    monkeypatch.setattr(training.requirements, "require_extras", given.append)
    with pytest.raises(Reached):
        cli.main(["train", "autoencoder", *form, "--seed", "8"])
    assert (given[0].lr, given[0].seed) == (0.5, 8)


OWN = '''
from nbgpu.recipes.own import OwnRecipe

class Mine(OwnRecipe):
    """Trains nothing."""

    plan: int = 3  # a setting that has the name of a flag
    hidden: int = 8  # a setting of its own
'''


@pytest.mark.usefixtures("no_engines")
def test_an_own_setting_may_have_the_name_of_a_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("mine.py").write_text(OWN)
    given: list[TrainConfig] = []
    monkeypatch.setattr(training.requirements, "require_extras", given.append)
    with pytest.raises(Reached):
        cli.main(["train", "mine.py", "--plan", "--hidden", "16", "--gpus", "none"])
    assert given[0].model_dump(include={"plan", "hidden"}) == {"plan": 3, "hidden": 16}


@pytest.mark.parametrize("given", [["0", "1", "2"], ["0,1,2"], ["0,1", "2"]])
def test_gpus_are_separated_by_spaces_or_commas(given: list[str]) -> None:
    values = flags.parse([ClusterConfig], ["--ranks", "3", "--gpus", *given, "--keep"], prog="nbgpu")
    assert re.findall(r"\d+", values["gpus"]) == ["0", "1", "2"]
    assert (values["ranks"], values["keep"]) == (3, True)
    assert flags.parse([ClusterConfig], [], prog="nbgpu")["gpus"] == "auto"


def test_gpus_by_spaces_are_taken_by_train_and_named_where_there_are_none(no_engines: None) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "autoencoder", "--gpus", "7", "8", "--steps", "3"])
    assert "gpus = '7,8'" in str(ended.value)


@pytest.fixture
def asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[TrainConfig]:
    """The settings of each run that the command line would start, without engines."""
    found: list[TrainConfig] = []
    monkeypatch.setattr(training, "_run", lambda cluster, config, asked: found.append(config))
    monkeypatch.setattr(training.preloading, "begun", lambda *_: nullcontext())
    monkeypatch.setattr(training.data_check, "require_good_data", lambda config: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cohort.csv").touch()
    return found


def test_defaults_follow_the_data_and_a_flag_wins(asked_for: list[TrainConfig]) -> None:
    for more in ([], ["--lr", "2e-3"], ["--steps=800"], ["--no-spread-events"]):
        cli.main(["train", "survival", "--data", "cohort.csv", "--gpus", "none", *more])
    assert [config.lr for config in asked_for] == [1e-4, 2e-3, 1e-4, 1e-4]
    assert [config.epochs for config in asked_for] == [50, 50, None, 50]
    assert [getattr(config, "spread_events", None) for config in asked_for] == [True, True, True, False]


def test_a_flag_wins_over_the_file_and_the_file_over_the_preset(asked_for: list[TrainConfig]) -> None:
    Path("mine.toml").write_text('[train]\ndata = "cohort.csv"\nties = "efron"\nmin_lr = 1e-6\n')
    cli.main(
        ["train", "survival", "--config", "mine.toml", "--preset", "mace", "--min-lr", "0", "--gpus", "none"]
    )
    (config,) = asked_for
    assert (config.data, getattr(config, "ties", ""), config.min_lr) == ("cohort.csv", "efron", 0)
    assert (config.global_batch_size, config.epochs, config.weight_decay) == (24, 50, 1e-5)


def test_a_preset_that_there_is_not_is_refused_with_those_there_are(tmp_path: Path) -> None:
    for command in ("train", "sweep", "scaling"):
        with pytest.raises(SystemExit) as ended:
            cli.main([command, "survival", "--preset", "fast_ddpm"])
        assert "preset = 'fast_ddpm' is not known. Presets of survival: demo, mace" in str(ended.value)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "survival", "--preset"])
    assert "--preset needs one name" in str(ended.value)


def test_help_with_a_preset_shows_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "survival", "--preset", "mace", "--help"])
    assert "default 50)" in " ".join(capsys.readouterr().out.split())


def test_help_shows_the_defaults_beside_the_data(capsys: pytest.CaptureFixture[str]) -> None:
    for data, expected in (("cohort.csv", "0.0001"), ("generated", "0.002")):
        with pytest.raises(SystemExit):
            cli.main(["train", "survival", "--data", data, "--help"])
        told = " ".join(capsys.readouterr().out.split())
        of_rate = re.search(r"--lr NUMBER .*?; default ([^)]*)\)", told)
        assert of_rate is not None
        assert of_rate[1] == expected


def test_recipes_lists_presets_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["recipes"])
    told = " ".join(capsys.readouterr().out.split())
    for name in ("mace", "fast_ddpm_large", "mcrpy", "3d_ldm"):
        assert f" {name} " in told
    assert "MACE-Prediction" in told
