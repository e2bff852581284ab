"""Defaults that depend on other settings: which value counts, by every door."""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import Any

import pytest

from nbgpu.config import TRAIN_CONFIGS, ClusterConfig, TrainConfig, read_toml, train_config, write_toml
from nbgpu.config.conditions import defaults_beside, meaning
from nbgpu.config.settings import Settings, types_of
from nbgpu.errors import ConfigError
from nbgpu.planning import studies, trials
from nbgpu.planning.suitability import adapt_to_devices
from nbgpu.protocol.records import Device

CPU = [Device("cpu", "CPU", "CPU-0", 0, 2**30)]


def _rules(model: type[Settings]) -> list[Any]:
    return [rule for known in model.__mro__ for rule in vars(known).get("DEFAULTS_WITH", ())]


def test_generated_patients_keep_their_settings_and_files_get_others() -> None:
    of_toy, of_files = train_config("survival"), train_config("survival", data="cohort.csv")
    names = ("lr", "weight_decay", "ema_decay", "epochs", "val_every_epochs")
    assert [getattr(of_toy, name) for name in names] == [2e-3, 1.0, 0.98, None, 0]
    assert [getattr(of_files, name) for name in names] == [1e-4, 1e-5, 0.0, 50, 1]
    assert of_files.total_steps(steps_per_epoch=7) == 350
    assert train_config("survival", data=Path("cohort.csv")).lr == 1e-4  # type: ignore[arg-type]


def test_what_is_given_wins_also_where_it_is_another_default() -> None:
    config = train_config("survival", data="cohort.csv", lr=2e-3, weight_decay=1.0)
    assert (config.lr, config.weight_decay, config.ema_decay) == (2e-3, 1.0, 0.0)
    assert config.given.keys() == {"recipe", "data", "lr", "weight_decay"}
    assert config.changed(seed=3).lr == 2e-3


def test_a_length_in_steps_takes_the_place_of_the_default_in_epochs() -> None:
    assert train_config("survival", data="cohort.csv", steps=800).epochs is None
    assert train_config("survival", data="cohort.csv", val_every=10).val_every_epochs == 0
    assert train_config("survival", data="cohort.csv", steps=800, epochs=3).epochs == 3


@pytest.mark.parametrize("given", [{}, {"steps": 7}, {"lr": 2e-3, "epochs": 3}, {"val_every": 0}])
def test_a_runs_file_is_read_back_with_the_same_values(tmp_path: Path, given: dict[str, Any]) -> None:
    for recipe in ("survival", "autoencoder"):
        config = train_config(recipe, data="files", **given)
        write_toml(tmp_path / "run.toml", ClusterConfig(), config)
        assert read_toml(tmp_path / "run.toml")[1] == config
        assert train_config(**config.model_dump(mode="json")) == config
        assert (
            train_config(recipe, **{n: v for n, v in config.beyond_defaults.items() if n != "recipe"})
            == config
        )


def test_a_default_that_can_be_left_out_is_replaced_by_a_setting_that_cannot() -> None:
    """None is not written to run.toml, so that something else there must say that the default does not
    count."""
    for model in TRAIN_CONFIGS.values():
        for rule in _rules(model):
            for name in rule.values:
                assert name in model.model_fields
                if NoneType in types_of(model.model_fields[name]):
                    other = next(
                        vars(k)["REPLACES"][name]
                        for k in model.__mro__
                        if name in vars(k).get("REPLACES", {})
                    )
                    assert NoneType not in types_of(model.model_fields[other])


def test_files_of_older_versions_keep_their_values(tmp_path: Path) -> None:
    toy = train_config("survival").model_dump(mode="json", exclude_none=True)
    old = {**toy, "data": "cohort.csv", "image_size": [16, 16, 8]}
    path = tmp_path / "run.toml"
    path.write_text(
        "[train]\n"
        + "\n".join(
            f"{k} = {v!r}".replace("True", "true").replace("False", "false")
            for k, v in old.items()
            if k != "num_patients"
        )
    )
    config = read_toml(path)[1]
    assert (config.lr, config.steps, config.epochs, config.ema_decay) == (2e-3, 1200, None, 0.98)


def test_help_and_docs_say_both() -> None:
    told = meaning(TRAIN_CONFIGS["survival"], "lr")
    assert told == "peak learning rate, before lr_scaling; 0.0001 by default with data other than 'generated'"
    assert told in (Path(__file__).parents[3] / "docs" / "configuration.md").read_text()
    with pytest.raises(ConfigError, match=r"lr = 20 is not valid.*\(default 0\.0001\)"):
        train_config("survival", data="cohort.csv", lr=20)
    with pytest.raises(ConfigError, match=r"lr = 20 is not valid.*\(default 0\.002\)"):
        train_config("survival", lr=20)


def test_a_wrong_value_that_decides_is_told_by_its_own_check() -> None:
    with pytest.raises(ConfigError, match="data = 3 is not valid"):
        train_config("survival", data=3)


def test_an_autoencoder_of_files_leaves_its_size_to_them() -> None:
    config = train_config("autoencoder", data="/data/brains")
    assert config.left_to_data == ("patch_size", "channels", "latent_channels")
    assert (config.lr, config.epochs) == (1e-4, 60)
    assert train_config("autoencoder").left_to_data == ()
    assert train_config("autoencoder", data="/data/brains", patch_size=32).left_to_data[0] == "channels"
    with pytest.raises(ConfigError) as caught:
        train_config("autoencoder", data="phantoms", patch_size=0, channels=())
    assert [line.split("=")[0] for line in str(caught.value).splitlines()] == ["patch_size", "channels"]
    with pytest.raises(ConfigError, match="patch_size=4 must be at least 8"):
        train_config("autoencoder", patch_size=4)


def test_a_sweep_over_the_data_gives_each_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "cohort.csv").touch()
    files = str(tmp_path / "cohort.csv")
    plan = trials.plan("survival", {"data": ["generated", files], "seed": 3})
    made = trials.checked(plan, [CPU])
    made.write(tmp_path)
    for each in (made, trials.SweepPlan.read(tmp_path)):
        assert [each.asked(number) for number in range(2)] == [{"data": "generated"}, {"data": files}]
        found = [each.settings(number) for number in range(2)]
        assert [(config.lr, config.epochs, config.seed) for config in found] == [
            (2e-3, None, 3),
            (1e-4, 50, 3),
        ]


def test_a_sweep_and_a_study_take_presets(tmp_path: Path) -> None:
    plan = trials.plan("survival", {"preset": "mace", "image_size": "24 24 16", "lr": ["1e-4", "2e-4"]})
    configs = [trials.checked(plan, [CPU] * 1).settings(number) for number in range(2)]
    assert [config.lr for config in configs] == [1e-4, 2e-4]
    assert {(config.epochs, getattr(config, "ties", "")) for config in configs} == {(50, "breslow")}
    study = studies.plan(
        "survival", "resnet", ["resnet18", "resnet34"], {"preset": "mace", "ranks": 1, "gpus": "none"}
    )
    assert "epochs" not in study.train
    assert [getattr(point.config, "resnet", "") for point in study.points()] == ["resnet18", "resnet34"]
    assert all(point.config.val_every_epochs == 0 for point in study.points())
    assert study.points()[0].config.weight_decay == 1e-5


def test_a_study_wants_what_would_be_chosen_for_each_point_by_itself() -> None:
    settings = {"data": "brains", "gpus": "none", "channels": (8, 16)}
    with pytest.raises(ConfigError, match="patch_size, latent_channels: left out, and chosen by the memory"):
        studies.plan("autoencoder", "ranks", [1, 2], settings)


def test_a_smoke_test_of_files_is_short() -> None:
    config = adapt_to_devices(train_config("survival", smoke_test=True, data=__file__), CPU)
    assert isinstance(config, TrainConfig)
    assert (config.steps, config.epochs, config.val_every, config.val_every_epochs) == (3, None, 3, 0)
    assert [config.num_evaluated(number) for number in (3, 1400)] == [3, 8]
    assert config.changed(smoke_test=False).num_evaluated(1400) == 1400
    assert config.lr == 1e-4


def test_present_defaults_are_those_beside_what_is_there() -> None:
    model = TRAIN_CONFIGS["survival"]
    assert defaults_beside(model, {})["lr"] == 2e-3
    assert defaults_beside(model, {"data": "cohort.csv"})["lr"] == 1e-4
