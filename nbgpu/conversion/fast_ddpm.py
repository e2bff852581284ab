"""Converts the YAML files of Fast-DDPM for 3D volumes (configs/fast_ddpm_3d.yml), and the values that are
fixed in its script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nbgpu.conversion.converted import Converted, Keys, in_words

TABLES = ("diffusion", "sampling", "optim")
"""Such a file has at least one of these tables."""

_BETAS = {
    "linear": "linear_beta",
    "quad": "scaled_linear_beta",
    "sigmoid": "sigmoid_beta",
    "cosine": "cosine",
}
_NUM_GROUPS = 32
_IN_SCRIPT = "in the script"


def convert(keys: Keys, names: str, data: str, network: str) -> Converted:
    """Return the settings of the recipe diffusion.

    Args:
        keys: the values of the file.
        names: the file, for messages.
        data: the folder of the data, which the file does not have; empty for none.
        network: a file for the perceptual loss, which is noted as left out: Fast-DDPM has none.
    """
    result = Converted("diffusion", keys, names)
    # A folder that does not exist is refused when training starts. Without a value of data, the recipe would
    # train on generated heads.
    result.set(
        "data", data or "BraTS2023", "--data" if data else "which the file does not name: the folder of BraTS"
    )
    size = _data(result)
    _network(result, size)
    _diffusion(result)
    _training(result)
    _optimizer(result)
    _sampling(result)
    if network:
        result.left_out.append("--perceptual-network: the loss is the squared error alone")
    result.note_fixed("device", "cuda", otherwise="the cluster chooses the devices: --gpus")
    result.take("mixed_precision", "amp", convert=lambda on: "fp16" if on else "off")
    return result


def _cube(value: Any) -> int:
    """Return the edge of a cubic volume from its size; ValueError if it is not a cube."""
    edges = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    if not all(isinstance(edge, int) for edge in edges) or len({*edges}) != 1:
        raise ValueError("volumes are cubes here; see size")
    return int(edges[0])


def _data(result: Converted) -> int | None:
    """Convert the table `data`. Return the edge in voxels of the network's input: that of the crops if the
    file has them, else that of the volumes; None if neither is a cube."""
    result.note_fixed("data.dataset", "BraTS3D", otherwise="the recipe reads folders of BraTS")
    size: int | None = result.take(
        "data.crop_size", "size", "cut from the middle; the script cuts at random places", convert=_cube
    )
    if size is not None:
        result.set("fit", "crop", "data.crop_size")
        result.leave("data.volume_size", "crops are cut at the own resolution of the files; see fit")
        result.leave("data.crops_per_volume", "a volume is cropped once, in its middle")
    else:
        size = result.take("data.volume_size", "size", convert=_cube)
        result.leave("data.crops_per_volume", "nothing is cropped")
    result.note_fixed("data.channels", 1, otherwise="volumes have one channel for each modality here")
    result.take("data.num_workers", "num_workers", "for each rank")
    result.leave("data.normalization", "percentiles 1 to 99 of the brain become -1 to 1, for all volumes")
    return size


def _network(result: Converted, size: int | None) -> None:
    """Convert the table `model`. The channels of each resolution are the product of two keys. GroupNorm has
    32 groups, as in the script, if 32 divides all channels.

    Args:
        result: gets the settings.
        size: the edge of the network's input in voxels, which each resolution halves; None if not known.
    """
    result.leave("model.type", "one modality is made from the other three; see target")
    result.note_fixed("model.in_channels", 4, otherwise="three modalities and the noisy fourth come in")
    result.note_fixed("model.out_ch", 1, otherwise="one modality comes out")
    channels = result.keys.take("model.ch")
    if not isinstance(channels, int | None):
        result.left_out.append(f"model.ch = {channels!r}: no whole number")
        channels = None
    multiples = result.keys.take("model.ch_mult")
    if not (
        multiples is None or (isinstance(multiples, list) and all(isinstance(m, int) for m in multiples))
    ):
        result.left_out.append(f"model.ch_mult = {multiples!r}: no list of whole numbers")
        multiples = None
    if channels is not None and multiples is not None:
        result.set("channels", [channels * factor for factor in multiples], "model.ch x model.ch_mult")
        if all(channels * factor % _NUM_GROUPS == 0 for factor in multiples):
            result.set("norm_groups", _NUM_GROUPS, _IN_SCRIPT)
    elif channels is not None:
        result.left_out.append(f"model.ch = {channels}: needs model.ch_mult")
    elif multiples is not None:
        result.left_out.append(f"model.ch_mult = {multiples}: needs model.ch")
    result.take("model.num_res_blocks", "num_res_blocks")
    edges = [size // 2**level for level in range(len(multiples or ()))] if size else []
    with_attention = result.keys.take("model.attn_resolutions") or []
    with_attention = with_attention if isinstance(with_attention, list) else [with_attention]
    if present := [edge for edge in with_attention if edge in edges]:
        result.set("attention_edges", present, "model.attn_resolutions")
    if missing := [edge for edge in with_attention if edge not in edges]:
        result.left_out.append(
            f"model.attn_resolutions = {in_words(missing)}: the network's resolutions have the edges {edges}"
        )
    result.note_fixed("model.dropout", 0, 0.0, otherwise="MONAI's network has no dropout")
    result.note_fixed("model.resamp_with_conv", True, otherwise="resolutions are changed by convolutions")
    result.note_fixed(
        "model.use_sigmoid", False, otherwise="the output is not squashed: images go from -1 to 1"
    )
    result.leave(
        "model.var_type", "DDIM's steps (eta) draw with no variance of their own; see sampler and variance"
    )
    if result.keys.take("model.ema", True):
        result.take("model.ema_rate", "ema_decay", "with model.ema")
    else:
        result.leave("model.ema_rate", "model.ema is false")


def _diffusion(result: Converted) -> None:
    """Convert the table `diffusion`, the noise schedule."""

    def as_betas(value: Any) -> str:
        if not isinstance(value, str) or value not in _BETAS:
            raise ValueError(f"is not known; known are {', '.join(_BETAS)}")
        return _BETAS[value]

    betas = result.take("diffusion.beta_schedule", "betas", convert=as_betas)
    for name in ("beta_start", "beta_end"):
        if betas == "cosine":
            result.leave(f"diffusion.{name}", "the cosine schedule has none")
        else:
            result.take(f"diffusion.{name}", name)
    result.take("diffusion.num_diffusion_timesteps", "num_times")
    result.set("prediction", "epsilon", f"{_IN_SCRIPT}, which learns the noise")


def _training(result: Converted) -> None:
    """Convert the table `training`. The script has a constant learning rate, and a warm-up only if the file
    asks for one."""
    result.take("training.batch_size", "batch_size", "per rank in both")
    result.take("training.gradient_accumulation_steps", "accumulate")
    result.take("training.epochs", "epochs")
    result.note_fixed("training.loss_type", "mse", "simple", otherwise="the loss is the squared error")
    result.take("training.gradient_clip", "clip_norm")
    result.take("training.save_every", "checkpoint_every")
    result.take("training.validate_every", "val_every")
    result.take("training.log_every_n_steps", "log_every")
    result.take(
        "training.sync_batchnorm", "sync_batchnorm", "the network has GroupNorm: 0 layers are converted"
    )
    result.leave("training.multi_gpu", "all GPUs are taken, or those of --gpus")
    result.leave("training.distributed", "DDP in both cases, in place of DataParallel")
    result.leave("training.warmup_start_lr", "the rate rises from 0")
    result.set("schedule", "constant", _IN_SCRIPT)
    if result.take("training.warmup_steps", "warmup_steps") is None:
        result.set("warmup_steps", 0, f"{_IN_SCRIPT}, where there is no training.warmup_steps")


def _optimizer(result: Converted) -> None:
    """Convert the table `optim`, which takes precedence over keys of the same meaning in `training`, as in
    the script."""
    result.take("optim.optimizer", "optimizer", convert=lambda name: str(name).lower())
    # The script's optimizer reads the table optim.
    for setting, beside in (("lr", "learning_rate"), ("weight_decay", "weight_decay")):
        value = result.take(f"optim.{setting}", setting)
        if value is None:
            result.take(f"training.{beside}", setting)
        else:
            result.note_fixed(f"training.{beside}", value, otherwise=f"the optimizer takes optim.{setting}")
    result.note_fixed("optim.beta1", 0.9, otherwise="Adam's first beta is 0.9")
    result.note_fixed("optim.amsgrad", False, otherwise="Adam is without AMSGrad")
    result.note_fixed("optim.eps", 1e-8, otherwise="Adam's epsilon is 1e-8")


def _sampling(result: Converted) -> None:
    """Convert the table `sampling`: the times that are visited, and the noise."""
    # The setting by Fast-DDPM's name. Its 'uniform' begins at time 0 and does not visit the last time.
    spacings = {"uniform": "uniform-from-0", "non-uniform": "non-uniform"}

    def as_spacing(value: Any) -> str:
        if not isinstance(value, str) or value not in spacings:
            raise ValueError("is not known; known are uniform and non-uniform")
        return spacings[value]

    spacing = result.take("sampling.scheduler_type", "spacing", convert=as_spacing)
    if spacing == "non-uniform":
        result.note_fixed("sampling.timesteps", 10, otherwise="the non-uniform times are ten")
    elif result.take("sampling.timesteps", "sampling_steps") is not None and spacing is None:
        result.set("spacing", "uniform-from-0", f"{_IN_SCRIPT}, where there is no sampling.scheduler_type")
    result.take("sampling.eta", "eta")
    result.leave("sampling.batch_size", "validation samples in batches of batch_size")
    result.note_fixed("sampling.init_type", "gaussian", otherwise="sampling begins with Gaussian noise")
    result.note_fixed("sampling.noise_std", 1.0, otherwise="the first noise has standard deviation 1")
    result.note_fixed("sampling.noise_mean", 0.0, otherwise="the first noise has mean 0")
