"""A setting that does not count beside the others is refused, and none is forgotten."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from nbgpu.config import TRAIN_CONFIGS, ClusterConfig, OwnConfig, TrainConfig, config_of_point, train_config
from nbgpu.config.conditions import Condition, conditions, meaning
from nbgpu.config.settings import Settings, types_of, unused
from nbgpu.engine import train
from nbgpu.errors import ConfigError
from nbgpu.planning.suitability import adapt_to_devices, without_gpus
from nbgpu.protocol.records import Device

MODELS: dict[str, type[Settings]] = {
    **TRAIN_CONFIGS,
    "a recipe of one's own": OwnConfig,
    "the cluster": ClusterConfig,
}

_ALWAYS = {
    "every run": """
        recipe steps batch_size accumulate global_batch_size epochs seed threads smoke_test
        optimizer lr lr_scaling weight_decay clip_norm clip_value ema_decay schedule warmup_epochs
        amp dtype tf32 cudnn sdpa on_nonfinite
        strategy sync_batchnorm checkpoint_activations compile channels_last
        checkpoint_every checkpoint_every_epochs keep_checkpoints best_metric resume
        log_every telemetry work_out_result runs_dir run_name tensorboard wandb profile
        data dataset check_voxels replace_rate shards num_workers persistent_workers prefetch
        pin_memory non_blocking transforms_on rotate90_prob flip_prob intensity_prob
        val_every_epochs split_seed
    """,
    "autoencoder": """
        patch_size channels latent_channels num_res_blocks norm_groups attention_levels
        with_encoder_nonlocal_attn with_decoder_nonlocal_attn upsampling recon_loss kl_weight perceptual adversarial_weight
    """,
    "diffusion": """
        target size prediction spacing train_times antithetic num_times betas sampler clip
        num_res_blocks attention_edges norm_groups val_cases
    """,
    "lithography": """
        image pixel_nm wavelength_nm numerical_aperture medium_index source defocus_nm zernikes
        simulated_kernels resist_threshold diffusion_nm num_kernels kernel_nm corrections
    """,
    "microstructure": """
        shape add_dimension descriptor_types descriptor_weights limit_to periodic isotropic
        multigrid_descriptor multigrid_reconstruction multiphase loss_type optimizer_type initial
    """,
    "survival": """
        image_size hu_min hu_max resnet widen_factor stem_stride pretrained freeze_epochs encoder_lr_factor ties
        eval_times risk_groups
    """,
    "the cluster": """
        gpus ranks launcher backend collective_timeout_s memory_limit threads_per_rank cell_seed keep
        release_after_s save_before_time_limit spare start_timeout_s notice_after_s max_output_lines debug link
        slow_rank
    """,
}
ALWAYS = {name for names in _ALWAYS.values() for name in names.split()}
"""The settings that count whatever the others are, or that are refused with reasons of their own."""


def _with_conditions() -> Iterator[Any]:
    for title, model in MODELS.items():
        for name in model.model_fields:
            for condition in conditions(model, name):
                if not {name, condition.name} & unused(model):
                    yield pytest.param(model, name, condition, id=f"{title}: {name} {condition.words}")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "name", "condition"), [*_with_conditions()])
def test_what_does_not_count_is_refused_with_the_condition(
    model: type[Settings], name: str, condition: Condition
) -> None:
    without = next(value for value in _values(model, condition.name) if not condition.holds(value))
    with pytest.raises(ConfigError) as caught:
        model.checked(**{name: _other(model, name), condition.name: without})
    lines = [line for line in str(caught.value).splitlines() if line.startswith(f"{name}=")]
    assert [line for line in lines if f"counts only with {condition.words}, and {condition.name} is" in line]
    assert f"only with {condition.words}" in meaning(model, name)


def _values(model: type[Settings], name: str) -> Iterator[Any]:
    """Values that a setting may have, its default first."""
    field = model.model_fields[name]
    yield field.default
    if get_origin(field.annotation) is Literal:
        yield from get_args(field.annotation)
    if field.annotation is float:
        yield 0.0
    yield from {"data": ["patients.csv", "generated", "phantoms"], "gpus": ["none"]}.get(name, [])
    yield from {
        "ranks": [4],
        "wait": [True],
        "val_every_epochs": [1],
        "warmup_epochs": [1.0],
        "adversarial_after_epochs": [1.0],
        "fold": ["Fold_1"],
        "split": ["split.csv"],
        "replace_rate": [0.25],
    }.get(name, [])


def _other(model: type[Settings], name: str) -> Any:
    """A value that is valid by itself and differs from the default."""
    field = model.model_fields[name]
    default, kind = field.default, types_of(field)[0]
    if get_origin(kind) is Literal:
        return next(choice for choice in get_args(kind) if choice != default)
    if kind is bool:
        return not default
    if kind is str:
        valid = {"allocator": "expandable_segments:True", "link": "10GbE", "slow_rank": "1=2x"}
        return valid.get(name, "something")
    if get_origin(kind) is tuple:
        return {str: ("Age",), int: (3,)}.get(get_args(kind)[0], (0.25,))
    for value in (0.25, 0.75, 5e-4, 2, 3, 8, 12):
        if value != default and isinstance(value, int if kind is int else float | int):
            try:
                model.checked(**{name: value})
            except ConfigError as error:
                if "counts only with" not in str(error):
                    continue
            return value
    raise AssertionError(f"no other value of {name} was found")


@pytest.mark.parametrize("title", MODELS)
def test_every_setting_counts_always_or_says_when(title: str) -> None:
    """Where this fails for a setting of yours: does it count whatever the others are? Then it belongs into
    ALWAYS above; otherwise say in ONLY_WITH of its class, or of the recipe, when it does."""
    model = MODELS[title]
    without_condition = {
        name for name in model.model_fields if name not in unused(model) and not conditions(model, name)
    }
    assert without_condition <= ALWAYS


def test_nothing_always_counts_that_is_no_setting() -> None:
    assert {name for model in MODELS.values() for name in model.model_fields} >= ALWAYS


def test_conditions_name_settings() -> None:
    for model in MODELS.values():
        for known in model.__mro__:
            for rule in vars(known).get("ONLY_WITH", ()):
                assert {rule.condition.name, *rule.names} <= model.model_fields.keys()


def test_what_does_not_count_is_said_with_all_else_that_is_wrong() -> None:
    with pytest.raises(ConfigError) as caught:
        train_config("lithography", amp="bf16", momentum=0.5, data="masks.npz")
    lines = str(caught.value).splitlines()
    assert lines == [
        "data='masks.npz': the size of a pixel at the wafer is not known. Give pixel_nm",
        "momentum=0.5 counts only with optimizer='sgd', and optimizer is 'adamw'. Leave momentum out, or change "
        "optimizer",
        "amp='bf16' counts only with corrections, and corrections is 0. Leave amp out, or change corrections",
    ]
    assert train_config("lithography", amp="bf16", corrections=2).amp == "bf16"


def test_a_default_never_counts_as_given() -> None:
    # A run's own run.toml has every setting, also those that do not count.
    everything = train_config("autoencoder").model_dump()
    assert train_config(**everything) == train_config("autoencoder")


def test_a_setting_of_several_runs_is_for_those_where_it_counts() -> None:
    shared = {"momentum": 0.5, "steps": 3}
    found = [config_of_point("autoencoder", shared, {"optimizer": name}) for name in ("sgd", "adamw")]
    assert [config.momentum for config in found] == [0.5, 0.9]
    # Where nothing that varies decides, it is refused as everywhere.
    with pytest.raises(ConfigError, match=r"momentum=0\.5 counts only with optimizer='sgd'"):
        config_of_point("autoencoder", shared, {"lr": 1e-3})
    # Values of a command line are text.
    varied = [{"adversarial_weight": "0"}, {"adversarial_weight": "0.1"}]
    ends = [config_of_point("autoencoder", {"adversarial_after": 7}, each) for each in varied]
    assert isinstance(ends[0], TrainConfig)
    assert [getattr(config, "adversarial_after", None) for config in ends] == [100, 7]


def test_a_smoke_test_leaves_out_what_no_longer_counts() -> None:
    config = train_config(
        "autoencoder", smoke_test=True, cache_rate=0.5, on_nonfinite="skip", max_nonfinite_skips=3
    )
    made = adapt_to_devices(config, [Device("cpu", "CPU", "CPU-0", 0, 2**30)])
    assert (made.dataset, made.cache_rate, made.on_nonfinite) == ("plain", 1.0, "stop")


def test_what_is_for_gpus_is_noted_on_cpu_ranks() -> None:
    cpu = Device("cpu", "CPU", "CPU-0", 0, 2**30)
    gpu = Device("cuda", "NVIDIA H100", "GPU-3", 2, 80 * 2**30, compute_capability=9.0)
    config = train_config("autoencoder", tf32=True, cudnn="benchmark", pin_memory="on")
    notes = list(without_gpus(config, [cpu, cpu]))
    assert [note.split("=")[0] for note in notes] == ["tf32", "cudnn", "pin_memory"]
    assert list(without_gpus(config, [gpu])) == []
    # It has an effect on the CPU as well.
    assert list(without_gpus(train_config("autoencoder", cudnn="deterministic"), [cpu])) == []


def test_torchrun_is_told_how_to_set_the_allocator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.endswith("ALLOC_CONF")]:
        monkeypatch.delenv(name)
    run_toml = tmp_path / "run.toml"
    run_toml.write_text(
        '[cluster]\nallocator = "expandable_segments:True"\n[train]\nrecipe = "autoencoder"\n'
    )
    with pytest.raises(
        ConfigError, match=r"with PYTORCH_[A-Z_]*CONF=expandable_segments:True in its environment"
    ):
        train.main([str(run_toml)])
