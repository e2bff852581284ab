"""The settings: what a bad value is told, TOML there and back, and the docs' table."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from nbgpu.config import TRAIN_CONFIGS, ClusterConfig, TrainConfig, read_toml, train_config, write_toml
from nbgpu.config.conditions import description
from nbgpu.config.settings import bounds, control_fields, unused
from nbgpu.errors import ConfigError
from nbgpu.machine import devices
from nbgpu.protocol.records import Device
from nbgpu.recipes.autoencoder.config import AutoencoderConfig

REPOSITORY = Path(__file__).resolve().parents[3]
MODELS = [ClusterConfig, *TRAIN_CONFIGS.values()]


def _edges_of(model: type[ClusterConfig] | type[TrainConfig]) -> list[Any]:
    """(model, field, value) just outside each bound that each field of the model has."""
    outside = {"ge": -1, "gt": 0, "le": 1, "lt": 0}
    cases = []
    for name, field in model.model_fields.items():
        for metadata in field.metadata:
            cases += [
                pytest.param(
                    model, name, getattr(metadata, limit) + step, id=f"{model.__name__}-{name}-{limit}"
                )
                for limit, step in outside.items()
                if hasattr(metadata, limit)
            ]
    return cases


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name", "value"), [case for model in MODELS for case in _edges_of(model)])
def test_a_value_outside_its_bounds_names_field_value_bounds_and_default(
    model: type[ClusterConfig] | type[TrainConfig], name: str, value: float
) -> None:
    field = model.model_fields[name]
    with pytest.raises(ConfigError) as caught:
        model.checked(**{name: value})
    message = next(line for line in str(caught.value).splitlines() if line.startswith(f"{name} = "))
    assert repr(value) in message
    assert f"Give a value within: {bounds(field)}" in message
    assert ("or leave it out" if field.default is None else f"default {field.default!r}") in message
    assert description(model, name) in message


@pytest.mark.parametrize(
    ("model", "name", "value", "said"),
    [
        (TrainConfig, "amp", "half", "'off', 'auto', 'bf16' or 'fp16'"),
        (TrainConfig, "schedule", "linear", "'constant', 'cosine', 'step' or 'plateau'"),
        (ClusterConfig, "backend", "mpi", "'auto', 'nccl', 'gloo' or 'hierarchical_copy'"),
        (AutoencoderConfig, "recon_loss", "huber", "'l1' or 'l2'"),
        (TrainConfig, "strategy", "dp", "'ddp', 'fsdp' or 'single'"),
        (TrainConfig, "steps", "many", "1 to 10000000"),
        (TrainConfig, "batch_size", 1.5, "1 to 4096"),
        (AutoencoderConfig, "patch_size", 30, "a multiple of 4"),
    ],
)
def test_a_wrong_choice_or_type_lists_what_is_right(
    model: type[ClusterConfig] | type[TrainConfig], name: str, value: object, said: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} = {re.escape(repr(value))} is not valid") as caught:
        model.checked(**{name: value})
    assert said in str(caught.value)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^batchsize is not a setting of TrainConfig\. Did you mean batch_size\? Settings: .*",
    ):
        TrainConfig.checked(batchsize=2)


def test_every_bad_value_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.checked(steps=0, lr=-1, amp="half", colour="red")
    lines = str(caught.value).splitlines()
    assert [line.split()[0] for line in lines] == ["steps", "lr", "amp", "colour"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"steps": 10, "warmup_steps": 10}, "warmup_steps=10 must be smaller than steps=10"),
        ({"static_graph": True, "accumulate": 2}, "static_graph does not go with accumulate=2"),
        ({"strategy": "fsdp", "amp": "fp16"}, "amp='fp16' does not go with strategy='fsdp'"),
        ({"strategy": "fsdp", "optimizer": "sgd"}, "torch has no fused SGD for sharded weights"),
        (
            {"strategy": "single", "comm_hook": "fp16"},
            "comm_hook=.fp16. counts only with strategy=.ddp., and strategy is .single.",
        ),
        ({"cpu_offload": True}, "cpu_offload=True counts only with strategy=.fsdp., and strategy is .ddp."),
        ({"static_graph": True, "find_unused_parameters": True}, "exclude each other"),
        ({"dtype": "float64", "amp": "bf16"}, "amp='bf16' does not go with dtype='float64'"),
        ({"schedule": "plateau", "val_every": 0}, "val_every=0 makes none"),
        ({"best_metric": "dice"}, r"best_metric='dice' is not a value .* Values: loss, psnr_db"),
        ({"best_metric": "loss", "val_every": 0}, "best_metric='loss' is a value of validations"),
        ({"early_stop_patience": 2}, "counts only with best_metric, and best_metric is not given"),
        ({"min_lr": 1.0}, "min_lr=1.0 must not be above lr"),
        ({"replace_rate": 0.5, "cache_rate": 1.0}, "set cache_rate between 0 and 1, or replace_rate=0"),
        ({"replace_rate": 0.5, "cache_rate": 0.0}, "cache_rate=0 keeps none"),
        ({"dataset": "plain", "replace_rate": 0.5, "cache_rate": 0.5}, "dataset is 'plain'"),
        ({"dataset": "smart", "cache_rate": 0.5}, "set replace_rate above 0"),
        (
            {"replace_rate": 0.5, "cache_rate": 0.5, "persistent_workers": "on"},
            "would go on with the volumes of the first epoch",
        ),
        ({"persistent_workers": "on", "num_workers": 0}, "keeps nothing with num_workers=0"),
        ({"transforms_on": "gpu", "num_workers": 2}, "each worker process would need the GPU"),
        ({"transforms_on": "gpu", "pin_memory": "on"}, "what is on the GPU cannot be pinned"),
        ({"patch_size": 20, "channels": (8, 8, 8, 8)}, "patch_size=20 must be a multiple of 8"),
        ({"channels": (8, 0)}, r"channels=\(8, 0\) must all be at least 1"),
    ],
)
def test_values_that_do_not_go_together_say_what_would(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        AutoencoderConfig.checked(**values)


def test_a_config_error_is_also_a_value_error() -> None:
    with pytest.raises(ValueError):
        ClusterConfig.checked(ranks=0)


def test_an_unknown_recipe_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"recipe = 'diffuser' is not known\. Recipes: autoencoder"):
        train_config("diffuser")


def test_settings_cannot_be_changed_in_place_but_give_changed_copies() -> None:
    config = train_config("autoencoder", steps=5)
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 6
    assert config.changed(lr=0.5).lr == 0.5
    assert config.changed(lr=0.5).steps == 5
    assert config.lr == train_config("autoencoder").lr
    with pytest.raises(ConfigError, match=r"^lr = -1"):
        config.changed(lr=-1)


def test_global_batch_size_counts_ranks_and_accumulation() -> None:
    assert train_config("autoencoder", batch_size=3, accumulate=4).samples_per_step(world_size=2) == 24


def test_toml_gives_back_what_was_written(tmp_path: Path) -> None:
    cluster = ClusterConfig(gpus="0,1", ranks=2, threads_per_rank=None)
    train = train_config(
        "autoencoder", amp="bf16", channels=(8, 16, 32), lr=3e-4, data='a "quoted" folder\\ü'
    )
    path = tmp_path / "run.toml"
    write_toml(path, cluster, train)
    assert read_toml(path) == (cluster, train)


def test_toml_takes_overrides_and_fills_in_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[train]\nsteps = 7\n")
    cluster, train = read_toml(path, batch_size=5)
    assert cluster == ClusterConfig()
    assert train == train_config("autoencoder", steps=7, batch_size=5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[train]\nsteps = 0\nlr = -1\n", r"steps = 0 is not valid[\s\S]*lr = -1 is not valid"),
        ("[cluster]\nranks = 0\n", "ranks = 0 is not valid"),
        ("[trian]\nsteps = 1\n", r"unknown table\(s\) trian. It may have \[cluster\] and \[train\]"),
        ("[train\n", "cannot be read as TOML"),
        ('[train]\nrecipe = "none"\n', "recipe = 'none' is not known"),
    ],
)
def test_a_bad_toml_file_is_named_with_all_that_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_toml(path)
    assert str(path) in str(caught.value)


def test_a_missing_or_binary_toml_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^there is no file {tmp_path}/missing\.toml$"):
        read_toml(tmp_path / "missing.toml")
    with pytest.raises(ConfigError, match=rf"^there is no folder {tmp_path}/nope$"):
        read_toml(tmp_path / "nope" / "run.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.toml cannot be read"):
        read_toml(tmp_path / "binary.toml")


@pytest.mark.parametrize("model", MODELS)
def test_every_field_has_a_meaning_and_a_default_within_its_bounds(
    model: type[ClusterConfig] | type[TrainConfig],
) -> None:
    assert model.checked() == model()
    for name, field in model.model_fields.items():
        assert description(model, name), name
        assert not field.is_required(), name


def test_what_the_controls_must_offer_is_marked() -> None:
    shown = {name for model in MODELS for _, name, _ in control_fields(model)}
    assert {"gpus", "amp", "cache_rate", "batch_size", "lr", "steps"} <= shown


@pytest.mark.parametrize("model", MODELS)
def test_the_table_has_one_row_for_each_field(model: type[ClusterConfig] | type[TrainConfig]) -> None:
    table = runpy.run_path(str(REPOSITORY / "docs" / "generate.py"))["markdown_table"](model)
    rows = table.splitlines()[2:]
    assert [row.split("`")[1] for row in rows] == [n for n in model.model_fields if n not in unused(model)]
    assert {row.replace("\\|", "").count("|") for row in rows} == {5}


def test_the_page_in_the_docs_is_what_the_settings_say() -> None:
    """`make docs` writes it again."""
    page = runpy.run_path(str(REPOSITORY / "docs" / "generate.py"))["configuration"]()
    assert (REPOSITORY / "docs" / "configuration.md").read_text() == page


@pytest.mark.parametrize(
    ("profile", "told"),
    [
        ("10", "must be 'FROM:TO'"),
        ("0:5", "counted from 1"),
        ("9:5", "must be 'FROM:TO'"),
        ("1:101", "101 steps; at most 100"),
        ("190:201", "beyond the last step; give steps up to steps=200"),
    ],
)
def test_a_window_of_steps_that_cannot_be_profiled_is_refused(profile: str, told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        train_config("autoencoder", profile=profile)


def test_a_window_of_steps_includes_both_ends() -> None:
    assert list(train_config("autoencoder", profile="2:4").profiled_steps) == [2, 3, 4]
    assert len(train_config("autoencoder").profiled_steps) == 0


def test_a_truth_value_is_no_number() -> None:
    with pytest.raises(
        ConfigError, match=r"^lr = True is not valid\. Give a value within: above 0, at most 10"
    ):
        train_config("autoencoder", lr=True)
    with pytest.raises(ConfigError, match="epochs = False is not valid"):
        train_config("autoencoder", epochs=False)
    assert train_config("autoencoder", smoke_test=True).smoke_test


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("1=1.5x", {1: 1.5}),
        (" 0 = 2x , 3=100 ", {0: 2.0, 3: 100.0}),
        ("1=.5e1x", None),
        ("x", None),
    ],
)
def test_slow_ranks_are_read(text: str, expected: dict[int, float] | None) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match="is not a rank and a factor"):
            ClusterConfig.checked(slow_rank=text)
    else:
        assert ClusterConfig.checked(slow_rank=text).slow_factors == expected


@pytest.mark.parametrize("text", ["1=1x", "1=0.5x", "1=101x", "1=2x,1=3x", "-1=2x", "1=2x;2=3x", "1=nanx"])
def test_slow_ranks_that_are_not_possible_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="slow_rank"):
        ClusterConfig.checked(slow_rank=text)


def test_what_is_simulated_is_named() -> None:
    config = ClusterConfig.checked(link="10 gbe", slow_rank="1=1.5x,2=2")
    assert config.simulated == "simulated link 10GbE, rank 1 slowed x1.5, rank 2 slowed x2"
    assert ClusterConfig().simulated == ""
    with pytest.raises(ConfigError) as caught:
        ClusterConfig.checked(link="fast", slow_rank="1")
    assert [line.split(" = ")[0] for line in str(caught.value).splitlines()] == ["link", "slow_rank"]


def test_gpus_simulate_nothing() -> None:
    config = ClusterConfig(link="10GbE", slow_rank="5=2x")
    gpus = tuple(Device("cuda", "Pretend", f"GPU-{n}", n, 1) for n in range(2))
    with pytest.raises(ConfigError) as caught:
        devices.require_simulable(config, gpus)
    assert "link='10GbE' and slow_rank='5=2x' cannot be simulated on GPUs" in str(caught.value)
    assert "names rank 5, and there are 2 rank(s)" in str(caught.value)
    devices.require_simulable(ClusterConfig(), gpus)
