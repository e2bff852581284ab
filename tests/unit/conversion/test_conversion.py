"""Files of other tools become settings: every value is one, or is named with the reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import json5
import pytest
import yaml

from nbgpu.cli import main
from nbgpu.config import read_toml
from nbgpu.conversion.convert import convert
from nbgpu.errors import ConfigError
from nbgpu.recipes.autoencoder.config import AutoencoderConfig
from nbgpu.recipes.diffusion.config import DiffusionConfig

LDM = """\
{
    "channel": 0,
    "spacing": [1.1, 1.1, 1.1],
    "spatial_dims": 3,
    "image_channels": 1,
    "latent_channels": 8,
    "autoencoder_def": {
        "_target_": "monai.networks.nets.AutoencoderKL",
        "spatial_dims": "@spatial_dims",
        "in_channels": "$@image_channels",
        "out_channels": "@image_channels",
        "latent_channels": "@latent_channels",
        "channels": [64, 128, 256],
        "num_res_blocks": 2,
        "norm_num_groups": 16,
        "norm_eps": 1e-06,
        "attention_levels": [false, false, true],
        "with_encoder_nonlocal_attn": false
    },
    "autoencoder_train": {
        "batch_size": 2,                    // Per-GPU batch size
        "patch_size": [112, 128, 80],
        "lr": 1e-3,                         // Base learning rate (will be scaled)
        "perceptual_weight": 0.002,
        "kl_weight": 3e-7,
        /* 1000 in the tutorial */
        "recon_loss": "l1",
        "lr_scheduler": "warmup_cosine",
        "max_epochs": 900,
        "val_interval": 15
    },
    "diffusion_def": {"num_channels": [256, 256, 512], "latent_channels": "@latent_channels"},
    "diffusion_train": {"batch_size": 3, "lr": 1e-5},
    "NoiseScheduler": {"beta_start": 0.0015},
}
"""
ENVIRONMENT = """\
{
    "data_base_dir": "volumes",  // the Decathlon's first task
    "model_dir": "models",
    "tfevent_path": "events",
    "output_dir": "images",
    "resume_ckpt": true,
}
"""
FAST_DDPM = """\
data:
    dataset: "BraTS3D"
    volume_size: [128, 128, 128]
    channels: 1
    num_workers: 4
model:
    type: "unified_4to1"
    in_channels: 4
    out_ch: 1
    ch: 64
    ch_mult: [1, 2, 4]
    num_res_blocks: 2
    attn_resolutions: [16, 32]
    dropout: 0.1
    var_type: fixedsmall
    ema_rate: 0.9999
    ema: True
    resamp_with_conv: True
diffusion:
    beta_schedule: linear
    beta_start: 0.0001
    beta_end: 0.01
    num_diffusion_timesteps: 1000
training:
    loss_type: "ultra_stable"
    batch_size: 1
    gradient_accumulation_steps: 2
    epochs: 1000
    learning_rate: 0.00005
    weight_decay: 0.0
    gradient_clip: 10.0
    warmup_steps: 500
    warmup_start_lr: 0.000001
    multi_gpu: true
    distributed: false
    sync_batchnorm: true
    save_every: 2000
    validate_every: 1000
    log_every_n_steps: 50
optim:
    optimizer: "Adam"
    lr: 1e-5
    beta1: 0.9
    weight_decay: 0.0
    amsgrad: false
    eps: 0.00000001
sampling:
    timesteps: 10
    scheduler_type: "uniform"
    eta: 0.5
    batch_size: 2
    init_type: "gaussian"
    noise_std: 1.0
    noise_mean: 0.0
device: "cuda"
mixed_precision: True
"""


@pytest.fixture
def ldm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the tutorial's two files."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(LDM)
    Path("environment.json").write_text(ENVIRONMENT)
    Path("fast_ddpm_3d.yml").write_text(FAST_DDPM)
    return tmp_path


def _leaves(table: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in table.items():
        found += _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else [f"{prefix}{name}"]
    return found


def test_the_tutorials_files_become_a_run(ldm: Path) -> None:
    main(["convert", "config.json", "environment.json", "--out", "run.toml"])
    cluster, config = read_toml(Path("run.toml"))
    assert isinstance(config, AutoencoderConfig)
    assert cluster == type(cluster)()
    default = AutoencoderConfig()
    changed = {n: v for n, v in config.model_dump().items() if v != getattr(default, n)}
    assert changed == {
        "data": "volumes",
        "runs_dir": "models",
        "tensorboard": True,
        "resume": "auto",
        "spacing": (1.1, 1.1, 1.1),
        "image_channels": (0,),
        "channels": (64, 128, 256),
        "latent_channels": 8,
        "num_res_blocks": 2,
        "norm_groups": 16,
        "attention_levels": (False, False, True),
        # MONAI's default, because the file leaves it out.
        "with_decoder_nonlocal_attn": True,
        "patch_size": (112, 128, 80),
        "patches_per_volume": 1,
        "lr": 1e-3,
        "lr_scaling": "sqrt",
        "lr_batch_size": 2,
        "kl_weight": 3e-7,
        "recon_loss": "l1",
        "epochs": 900,
        "val_every_epochs": 15,
        "checkpoint_every_epochs": 15,
        "best_metric": "loss",
        "adversarial_weight": 0.01,
        "adversarial_after_epochs": 6.0,
        "discriminator_channels": 32,
    }
    assert config.peak_lr(4 * config.batch_size) == pytest.approx(2e-3)


@pytest.mark.parametrize("names", [["config.json", "environment.json"], ["fast_ddpm_3d.yml"]])
def test_every_key_is_a_setting_or_is_named(ldm: Path, names: list[str]) -> None:
    text = convert([Path(name) for name in names]).to_toml()
    whole: dict[str, Any] = {}
    for name in names:
        content = Path(name).read_text()
        whole |= json5.loads(content) if name.endswith("json") else yaml.safe_load(content)
    # Tables of the second stage are listed as one, and what others refer to stands there.
    of_second_stage = ("diffusion_def", "diffusion_train", "NoiseScheduler")
    referred_to = {"spatial_dims": "spatial_dims", "image_channels": "in_channels"}
    referred_to["latent_channels"] = "latent_channels"
    for key in _leaves(whole):
        table, _, name = key.partition(".")
        if key in referred_to:
            assert f"autoencoder_def.{referred_to[key]}" in text
        elif table in of_second_stage:
            assert re.search(rf"^# - {table} \(.*\b{name} = ", text, re.MULTILINE), key
        else:
            assert re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", text), key
    # Comments apart, it is what nbgpu train takes.
    Path("run.toml").write_text(text)
    assert read_toml(Path("run.toml"))[1] == convert([Path(name) for name in names]).config()


def test_unknown_keys_are_listed(ldm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = json5.loads(LDM)
    content["autoencoder_train"]["secret"] = {"sauce": [1, 2]}
    content["extra"] = "x"
    Path("config.json").write_text(json5.dumps(content))
    main(["convert", "config.json"])
    told = capsys.readouterr().out
    listed = told[told.index("# Not known, and left out:") :].splitlines()[1:3]
    assert sorted(listed) == ["# - autoencoder_train.secret.sauce = [1, 2]", '# - extra = "x"']


def test_the_perceptual_distance_waits_for_a_file(ldm: Path) -> None:
    without = convert([Path("config.json")])
    assert without.config().perceptual == "none"  # type: ignore[attr-defined]
    [note] = [
        one for one in without.left_out if one.startswith("autoencoder_train.perceptual_weight = 0.002")
    ]
    assert "nbgpu downloads nothing" in note
    # The lines at the end are settings once they are uncommented.
    text = without.to_toml()
    start = text.index("# perceptual = ")
    Path("run.toml").write_text(text[:start] + text[start:].replace("# ", ""))
    network = convert([Path("config.json")], network="squeezenet1_1.pth").config()
    assert read_toml(Path("run.toml"))[1] == network
    assert isinstance(network, AutoencoderConfig)
    assert (network.perceptual, network.perceptual_weight) == ("features", 0.002)
    assert (network.perceptual_slices, network.perceptual_range) == (0.2, "unit")


def test_the_tutorials_own_script_scales_by_the_number_of_gpus_and_has_adam(ldm: Path) -> None:
    content = json5.loads(LDM)
    train = content["autoencoder_train"]
    del train["lr_scheduler"]
    train["n_epochs"] = train.pop("max_epochs")
    content["autoencoder_def"]["num_channels"] = content["autoencoder_def"].pop("channels")
    Path("config.json").write_text(json5.dumps(content))
    config = convert([Path("config.json")]).config()
    assert isinstance(config, AutoencoderConfig)
    assert (config.optimizer, config.weight_decay, config.clip_norm) == ("adam", 0, 0)
    assert (config.schedule, config.warmup_steps) == ("constant", 0)
    assert (config.epochs, config.channels) == (900, (64, 128, 256))
    assert config.peak_lr(8 * 2) == pytest.approx(8e-3)


def test_the_decathlons_labels_are_no_images(ldm: Path) -> None:
    images = Path("volumes/Task01_BrainTumour/imagesTr")
    images.mkdir(parents=True)
    files = [Path("config.json"), Path("environment.json")]
    assert convert(files).config().data == str(images)
    assert convert(files, data="elsewhere").config().data == "elsewhere"
    # With no place for the data the run is refused, and does not train on something else.
    assert convert(files[:1]).config().data == "dataset"


def test_the_scripts_own_weights_are_gone_on_from(ldm: Path) -> None:
    files = [Path("config.json"), Path("environment.json")]
    assert (convert(files).config().resume, convert(files).values.get("pretrained")) == ("auto", None)
    Path("models").mkdir()
    Path("models/autoencoder.pt").touch()
    values = convert(files).values
    assert (values.get("resume"), values["pretrained"]) == (None, "models/autoencoder.pt")
    Path("environment.json").write_text(ENVIRONMENT.replace("true", "false"))
    found = convert(files)
    assert not {"resume", "pretrained"} & found.values.keys()
    assert "resume_ckpt = false" in found.to_toml()


@pytest.mark.parametrize(
    ("crop", "size", "fit"),
    [("[96, 96, 96]", 96, "crop"), ("[96, 96, 64]", 128, None), ("[[1], [2]]", 128, None)],
)
def test_crops_that_are_no_cubes_leave_the_volumes_size(
    ldm: Path, crop: str, size: int, fit: str | None
) -> None:
    with_crops = FAST_DDPM.replace(
        "    channels: 1\n", f"    channels: 1\n    crop_size: {crop}\n    crops_per_volume: 2\n"
    ).replace("attn_resolutions: [16, 32]", "attn_resolutions: 32")
    Path("fast_ddpm_3d.yml").write_text(with_crops)
    found = convert([Path("fast_ddpm_3d.yml")], data="BraTS")
    assert (found.values["size"], found.values.get("fit")) == (size, fit)
    # The edges of the network's resolutions follow from the size.
    assert found.values.get("attention_edges", []) == ([32] if size == 128 else [])
    assert any("data.crop_size" in line for line in found.left_out) == (fit is None)
    assert any("nothing is cropped" in line for line in found.left_out) == (fit is None)
    assert any("data.volume_size" in line for line in found.left_out) == (fit is not None)


def test_values_of_the_wrong_type_are_left_out_with_the_reason(ldm: Path) -> None:
    Path("odd.yml").write_text('model: {ch: "32", ch_mult: [1, 2]}\ndiffusion: {beta_schedule: [linear]}\n')
    found = convert([Path("odd.yml")], data="BraTS")
    assert "channels" not in found.values
    assert "model.ch = '32': no whole number" in found.left_out
    assert any('beta_schedule = ["linear"]: is not known' in line for line in found.left_out)


def test_fast_ddpms_file_becomes_a_run(ldm: Path) -> None:
    found = convert([Path("fast_ddpm_3d.yml")], data="BraTS")
    config = found.config()
    assert isinstance(config, DiffusionConfig)
    default = DiffusionConfig()
    changed = {n: v for n, v in config.model_dump().items() if v != getattr(default, n)}
    assert changed == {
        "data": "BraTS",
        "size": 128,
        "num_workers": 4,
        "channels": (64, 128, 256),
        "norm_groups": 32,
        "num_res_blocks": 2,
        "attention_edges": (32,),
        "ema_decay": 0.9999,
        "beta_end": 0.01,
        "prediction": "epsilon",
        "batch_size": 1,
        "accumulate": 2,
        "epochs": 1000,
        "clip_norm": 10.0,
        "checkpoint_every": 2000,
        "val_every": 1000,
        "log_every": 50,
        "sync_batchnorm": True,
        "schedule": "constant",
        "warmup_steps": 500,
        "optimizer": "adam",
        "lr": 1e-5,
        "weight_decay": 0.0,
        "spacing": "uniform-from-0",
        "sampling_steps": 10,
        "eta": 0.5,
        "amp": "fp16",
    }
    told = "\n".join(found.left_out)
    assert "training.learning_rate = 5e-05: the optimizer takes optim.lr" in told
    assert "model.attn_resolutions = [16]: the network's resolutions have the edges [128, 64, 32]" in told
    assert "model.dropout = 0.1: MONAI's network has no dropout" in told
    assert 'training.loss_type = "ultra_stable"' in told


def test_bad_files_and_values_are_told_with_their_keys(ldm: Path) -> None:
    Path("broken.json").write_text('{"autoencoder_train": {')
    Path("list.json").write_text("[1]")
    with pytest.raises(ConfigError) as caught:
        convert([Path("broken.json"), Path("list.json"), Path("gone.json")])
    lines = str(caught.value).splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["broken.json", "list.json", "gone.json"]
    with pytest.raises(ConfigError, match=r"environment.json: not the files of a tool .*data_base_dir"):
        convert([Path("environment.json")])
    content = json5.loads(LDM)
    content["autoencoder_train"] |= {"batch_size": "many", "patch_size": [112, 130, 80]}
    Path("config.json").write_text(json5.dumps(content))
    with pytest.raises(ConfigError) as caught:
        convert([Path("config.json")])
    told = str(caught.value)
    assert "batch_size = 'many' is not valid" in told
    assert "batch_size is from autoencoder_train.batch_size" in told
    assert "patch_size is from autoencoder_train.patch_size" in told
    content["autoencoder_def"]["_target_"] = "monai.networks.nets.VQVAE"
    Path("config.json").write_text(json5.dumps(content))
    with pytest.raises(ConfigError, match="VQVAE, and the recipe trains AutoencoderKL"):
        convert([Path("config.json")])


def test_a_file_that_is_there_is_not_written_over(ldm: Path) -> None:
    Path("run.toml").write_text("mine")
    with pytest.raises(SystemExit, match=r"run.toml is there already"):
        main(["convert", "config.json", "--out", "run.toml"])
    assert Path("run.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["diffusion", "--config", "config.json"],
            "config.json is for the recipe autoencoder: nbgpu train auto",
        ),
        (["autoencoder", "--environment-file", "environment.json"], "belongs to its --config config.json"),
        (
            ["autoencoder", "--config", "config.json", "--environment-file", "environment.json"],
            "data = 'volumes': there is no such file or folder",
        ),
        (
            ["autoencoder", "--config", "config.json", "--data", "mine", "--kl-weight", "2"],
            "kl_weight = 2.0 is not valid",
        ),
    ],
)
def test_train_takes_the_files_themselves(ldm: Path, arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        main(["train", *arguments])
