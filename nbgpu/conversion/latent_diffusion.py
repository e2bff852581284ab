"""Converts the JSON files of MONAI's tutorial 3d_ldm, and of the guide for several GPUs that is based on it.

Values that are fixed in the tutorial's script, train_autoencoder.py, become settings, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbgpu.conversion.converted import Converted, Keys, in_words
from nbgpu.errors import ConfigError

TABLES = ("autoencoder_def", "autoencoder_train")
"""Such a file has at least one of these tables."""

_OF_SECOND_STAGE = ("diffusion_def", "diffusion_train", "NoiseScheduler", "diffusion")
_WARM_UP_EPOCHS = 6
"""The script trains without the discriminator in epochs 0 to 5."""
_ADVERSARIAL_WEIGHT = 0.01
_SHARE_OF_SLICES = 0.2
_IN_SCRIPT = "in the script"
_WEIGHTS = "autoencoder.pt"
"""The file in model_dir with the weights from which the script resumes."""
_SCHEDULES: dict[str, tuple[str, int | None]] = {
    "warmup_cosine": ("cosine", None),
    "cosine": ("cosine", 0),
    "constant": ("constant", 0),
    "none": ("constant", 0),
}
"""By the scheduler's name in the file: the setting `schedule`, and `warmup_steps`, where None stands for the
default."""


def convert(keys: Keys, names: str, data: str, network: str) -> Converted:
    """Return the settings of the recipe autoencoder.

    Args:
        keys: the values of the configuration and, if there is one, of the environment file.
        names: the files, for messages.
        data: the data, in place of data_base_dir in the environment file; empty for that.
        network: a local file for perceptual_network; empty for none.

    Raises:
        ConfigError: the files are of another network.
    """
    result = Converted("autoencoder", keys, names)
    _environment(result, data)
    _volumes(result)
    _network(result)
    _training(result)
    _perceptual(result, network)
    for table in _OF_SECOND_STAGE:
        result.leave_all(
            table, "it is of the tutorial's second stage, diffusion of latents, which nbgpu does not train"
        )
    return result


def _environment(result: Converted, data: str) -> None:
    """Convert the environment file, with the folders of the data and of the results."""
    if data:
        result.set("data", data, "--data")
        result.leave("data_base_dir", "--data is taken in its place")
    elif "data_base_dir" in result.keys:
        result.take("data_base_dir", "data", convert=_images)
    else:
        # A folder that does not exist is refused when training starts. Without a value of data, the recipe
        # would train on a template brain.
        result.set(
            "data", "dataset", "which data_base_dir of environment.json names: the folder of the volumes"
        )
    result.take("model_dir", "runs_dir", "each run gets a folder in it")
    result.take(
        "tfevent_path", "tensorboard", "TensorBoard's files are in each run's folder", convert=lambda _: True
    )
    result.leave(
        "output_dir", "the generated images; nbgpu predict RUN_FOLDER --data NEW --out FOLDER names its own"
    )
    _first_weights(result)


def _first_weights(result: Converted) -> None:
    """Convert `resume_ckpt`: the run begins with the script's weights in model_dir, or else with nbgpu's
    newest checkpoint."""
    if "resume_ckpt" not in result.keys:
        return
    weights = Path(str(result.values.get("runs_dir", ""))).expanduser() / _WEIGHTS
    if not result.keys.take("resume_ckpt"):
        result.the_same.append("resume_ckpt = false")
    elif weights.is_file():
        result.set("pretrained", str(weights), f"resume_ckpt = true; the script's {_WEIGHTS} in model_dir")
    else:
        result.set(
            "resume",
            "auto",
            f"resume_ckpt = true, and model_dir has no {_WEIGHTS}: from nbgpu's newest checkpoint in runs_dir, if there is one",
        )


def _images(base: Any) -> str:
    """Return the folder of the images in data_base_dir that the tutorial reads: that of the Decathlon's
    images without the labels, or data_base_dir itself if it has no such folder."""
    images = Path(str(base)).expanduser() / "Task01_BrainTumour" / "imagesTr"
    return str(images) if images.is_dir() else str(base)


def _volumes(result: Converted) -> None:
    """Convert the keys about the volumes: their dimensions, channels and voxel size."""
    result.note_fixed("spatial_dims", 3, otherwise="the recipe is for volumes")
    result.note_fixed(
        "image_channels", 1, otherwise="image_channels here are the numbers of a file's channels"
    )
    result.take("spacing", "spacing")
    result.take("channel", "image_channels", convert=lambda channel: [channel])


def _network(result: Converted) -> None:
    """Convert the table `autoencoder_def`, with MONAI's defaults for keys that the table leaves out."""
    prefix = "autoencoder_def."
    keys = result.keys
    if not any(key.startswith(prefix) for key in keys.rest()):
        result.left_out.append("the network: the files have no autoencoder_def, and it is nbgpu's own")
        return
    target = keys.take(f"{prefix}_target_")
    if target is not None:
        if str(target).rpartition(".")[2] != "AutoencoderKL":
            raise ConfigError(
                f"{result.names}: {prefix}_target_ is {target}, and the recipe trains AutoencoderKL"
            )
        result.the_same.append(f"{prefix}_target_ = {in_words(target)}")
    result.note_fixed(f"{prefix}spatial_dims", 3, otherwise="the recipe is for volumes")
    for name in ("in_channels", "out_channels"):
        result.note_fixed(f"{prefix}{name}", 1, otherwise="the network takes as many as image_channels names")
    channels_key = "num_channels" if f"{prefix}num_channels" in keys else "channels"
    result.leave("latent_channels", f"{prefix}latent_channels does not refer to it")
    for name, setting, default in (
        (channels_key, "channels", (32, 64, 64, 64)),
        ("latent_channels", "latent_channels", 3),
        ("num_res_blocks", "num_res_blocks", (2, 2, 2, 2)),
        ("attention_levels", "attention_levels", (False, False, True, True)),
        ("norm_num_groups", "norm_groups", 32),
        ("with_encoder_nonlocal_attn", "with_encoder_nonlocal_attn", True),
        ("with_decoder_nonlocal_attn", "with_decoder_nonlocal_attn", True),
    ):
        if result.take(f"{prefix}{name}", setting) is None:
            result.set(setting, default, f"MONAI's default of {name}, which autoencoder_def leaves out")
    result.note_fixed(f"{prefix}norm_eps", 1e-6, otherwise="GroupNorm's epsilon is 1e-6 here")
    for name in ("use_checkpoint", "use_checkpointing"):
        result.take(f"{prefix}{name}", "checkpoint_activations", convert=bool)
    result.note_fixed(
        f"{prefix}use_flash_attention", False, otherwise="torch chooses the kernel of the attention; see sdpa"
    )
    for name in ("use_convtranspose", "use_combined_linear"):
        result.note_fixed(f"{prefix}{name}", False, otherwise="the network has none here")
    result.note_fixed(f"{prefix}include_fc", True, otherwise="the attention has its last linear layer here")


def _training(result: Converted) -> None:
    """Convert the table `autoencoder_train`, and the values that are fixed in the script."""
    prefix = "autoencoder_train."
    keys = result.keys
    # Only files of the guide for several GPUs have this key. The guide's script differs from the tutorial's.
    is_guide = f"{prefix}lr_scheduler" in keys
    batch_size = result.take(f"{prefix}batch_size", "batch_size", "per rank in both")
    result.take(f"{prefix}patch_size", "patch_size")
    result.set("patches_per_volume", 1, f"{_IN_SCRIPT}, whose epoch has one patch of each volume")
    _optimizer(result, prefix, is_guide, batch_size)
    result.take(f"{prefix}kl_weight", "kl_weight")
    if result.take(f"{prefix}recon_loss", "recon_loss") is None:
        result.set("recon_loss", "l1", f"{_IN_SCRIPT}, where there is no {prefix}recon_loss")
    for name in ("n_epochs", "max_epochs"):
        result.take(f"{prefix}{name}", "epochs")
    interval = result.take(f"{prefix}val_interval", "val_every_epochs")
    if interval is not None:
        result.set(
            "checkpoint_every_epochs", interval, f"the script saves at each validation, {prefix}val_interval"
        )
        result.set("best_metric", "loss", f"{_IN_SCRIPT}, which keeps the best model, too")
    result.set("adversarial_weight", _ADVERSARIAL_WEIGHT, _IN_SCRIPT)
    result.set("adversarial_after_epochs", _WARM_UP_EPOCHS, f"{_IN_SCRIPT}: after epoch 5, counted from 0")
    result.set("discriminator_channels", 32, _IN_SCRIPT)


def _optimizer(result: Converted, prefix: str, is_guide: bool, batch_size: Any) -> None:
    """Convert learning rate, schedule and optimizer.

    Args:
        result: gets the settings.
        prefix: 'autoencoder_train.', with which each key begins.
        is_guide: whether the file is one of the guide for several GPUs. The guide's script uses AdamW, a
            schedule and gradient clipping, and scales the learning rate by the square root of the number of
            GPUs.
        batch_size: the batch size of one GPU; None if the file does not have it.
    """
    rate = result.take(f"{prefix}lr", "lr", "before it is scaled")
    if rate is not None:
        result.set("discriminator_lr", rate, f"{prefix}lr, which both optimizers have")
        scaling = "sqrt" if is_guide else "linear"
        factor = "the root of the number" if is_guide else "the number"
        if batch_size is not None:
            result.set("lr_scaling", scaling, f"{_IN_SCRIPT}, which multiplies lr by {factor} of GPUs")
            result.set("lr_batch_size", batch_size, "lr is that of one GPU")
    scheduler = result.keys.take(f"{prefix}lr_scheduler", "none")
    schedule, warm_up = _SCHEDULES.get(str(scheduler).lower(), ("constant", 0))
    if str(scheduler).lower() not in _SCHEDULES:
        result.left_out.append(
            f"{prefix}lr_scheduler = {in_words(scheduler)}: is not known. The rate stays as it is; see schedule"
        )
    origin = (
        f"{prefix}lr_scheduler = {in_words(scheduler)}"
        if is_guide
        else f"{_IN_SCRIPT}, which has no scheduler"
    )
    remark = "" if warm_up == 0 else "; the warm-up is a twentieth of the steps, or warmup_epochs"
    result.set("schedule", schedule, origin + remark)
    if f"{prefix}warmup_epochs" in result.keys:
        result.take(f"{prefix}warmup_epochs", "warmup_epochs")
    elif warm_up is not None:
        result.set("warmup_steps", warm_up, origin)
    result.set("optimizer", "adamw" if is_guide else "adam", _IN_SCRIPT)
    if f"{prefix}weight_decay" in result.keys:
        result.take(f"{prefix}weight_decay", "weight_decay")
    elif not is_guide:
        result.set("weight_decay", 0.0, _IN_SCRIPT)
    if not is_guide:
        result.set("clip_norm", 0.0, f"{_IN_SCRIPT}, which does not clip")


def _perceptual(result: Converted, network: str) -> None:
    """Convert the perceptual loss, whose weights the script downloads and nbgpu reads from local files. If
    `network`, such a file, is empty, the settings are written as comments for the user to complete."""
    key = "autoencoder_train.perceptual_weight"
    weight = result.keys.take(key)
    if not weight:
        if weight is not None:
            result.the_same.append(f"{key} = {in_words(weight)}")
        return
    settings: dict[str, Any] = {
        "perceptual": "features",
        "perceptual_network": network or "squeezenet1_1.pth",
        "perceptual_weight": weight,
        "perceptual_slices": _SHARE_OF_SLICES,
        "perceptual_range": "unit",
    }
    if network:
        origins = {"perceptual_network": "--perceptual-network", "perceptual_weight": key}
        for name, value in settings.items():
            result.set(name, value, origins.get(name, _IN_SCRIPT))
        return
    result.left_out.append(
        f"{key} = {in_words(weight)}: the script downloads SqueezeNet and LPIPS for it, and nbgpu downloads nothing. With "
        "torchvision's squeezenet1_1 and LPIPS's squeeze.pth beside it as local files: --perceptual-network "
        "squeezenet1_1.pth, or the last lines of the converted file"
    )
    result.offered = [
        "The script's perceptual distance, with local files of weights:",
        *(f"{name} = {in_words(value)}" for name, value in settings.items()),
    ]
