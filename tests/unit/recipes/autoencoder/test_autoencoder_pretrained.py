"""Weights that were trained with MONAI, MAISI or the older package `generative` are loaded, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from monai.apps.generation.maisi.networks.autoencoderkl_maisi import AutoencoderKlMaisi
from monai.networks.nets import AutoencoderKL
from torch import Tensor

from nbgpu.client.runs import data_check
from nbgpu.config import ClusterConfig, train_config, write_toml
from nbgpu.engine.checkpoints import files as checkpoint
from nbgpu.engine.workload.by_name import load
from nbgpu.errors import ConfigError, DataError
from nbgpu.planning.suitability import adapt_to_devices
from nbgpu.protocol.records import Device
from nbgpu.recipes import trained
from nbgpu.recipes.autoencoder.network import renamed
from nbgpu.recipes.autoencoder.recipe import Autoencoder

PUBLISHED: dict[str, Any] = {
    "spatial_dims": 3,
    "in_channels": 1,
    "out_channels": 1,
    "num_res_blocks": (2, 2, 2),
    "norm_num_groups": 32,
    "norm_eps": 1e-6,
    "attention_levels": (False, False, False),
    "with_encoder_nonlocal_attn": False,
    "with_decoder_nonlocal_attn": False,
}
"""What the configurations of 3d_ldm, the bundle brats_mri_generative_diffusion, and MAISI's image
autoencoder have in common, beside the channels 64, 128 and 256."""
SETTINGS: dict[str, Any] = {"channels": (64, 128, 256), "num_res_blocks": 2, "norm_groups": 32}
ATTENTION: dict[str, Any] = {
    **PUBLISHED,
    "channels": (4, 8),
    "latent_channels": 2,
    "num_res_blocks": (1, 2),
    "norm_num_groups": 4,
    "attention_levels": (False, True),
    "with_encoder_nonlocal_attn": True,
    "with_decoder_nonlocal_attn": True,
}
WITH_ATTENTION: dict[str, Any] = {
    "channels": (4, 8),
    "num_res_blocks": (1, 2),
    "norm_groups": 4,
    "attention_levels": (False, True),
    "with_encoder_nonlocal_attn": True,
    "with_decoder_nonlocal_attn": True,
}


def recipe_of(**values: Any) -> Autoencoder:
    recipe = load(
        train_config(
            "autoencoder",
            **{"data": "phantoms", "patch_size": 8, "channels": (8, 16), "latent_channels": 2, **values},
        )
    )
    assert isinstance(recipe, Autoencoder)
    return recipe


@torch.no_grad()
def outputs(network: torch.nn.Module, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    assert isinstance(network, AutoencoderKL)
    mean, sigma = network.eval().encode(image)
    return mean, sigma, network.decode(mean)


def as_of_generative(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with the names that MONAI's `load_old_state_dict` expects of the older package, whose
    attention has a projection that it does not apply."""
    return {
        name.replace(".attn.to_", ".to_")
        .replace(".attn.out_proj.", ".proj_attn.")
        .replace("postconv", "conv"): value
        for name, value in weights.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("latent_channels", "num_res_blocks", "norm_groups"), [(8, 2, 32), (3, 1, 16)], ids=["3d_ldm", "smaller"]
)
@pytest.mark.parametrize("file", ["autoencoder.pt", "autoencoder.safetensors"])
def test_monais_weights_give_the_same_outputs(
    tmp_path: Path, file: str, latent_channels: int, num_res_blocks: int, norm_groups: int
) -> None:
    theirs = AutoencoderKL(
        **{**PUBLISHED, "num_res_blocks": num_res_blocks, "norm_num_groups": norm_groups},
        channels=(64, 128, 256),
        latent_channels=latent_channels,
    )
    path = tmp_path / file
    if path.suffix == ".pt":
        torch.save(theirs.state_dict(), path)
    else:
        safetensors.torch.save_file(theirs.state_dict(), path)
    own = recipe_of(
        channels=(64, 128, 256),
        num_res_blocks=num_res_blocks,
        norm_groups=norm_groups,
        latent_channels=latent_channels,
        pretrained=str(path),
    ).build_model()
    image = torch.rand(1, 1, 8, 12, 8)
    for made, expected in zip(outputs(own, image), outputs(theirs, image), strict=True):
        assert torch.equal(made, expected)


@pytest.mark.slow
def test_maisis_weights_give_the_same_outputs(tmp_path: Path) -> None:
    theirs = AutoencoderKlMaisi(
        **PUBLISHED, num_channels=(64, 128, 256), latent_channels=4, num_splits=1, norm_float16=False
    )
    torch.save({"unet_state_dict": theirs.state_dict(), "epoch": 273}, tmp_path / "autoencoder_epoch273.pt")
    settings = {**SETTINGS, "latent_channels": 4, "pretrained": str(tmp_path / "autoencoder_epoch273.pt")}
    with pytest.raises(
        DataError, match=r"273\.pt: has the names of MAISI's network, .* Set upsampling='trilinear'"
    ):
        recipe_of(**settings).build_model()
    own = recipe_of(**settings, upsampling="trilinear").build_model()
    image = torch.rand(1, 1, 16, 8, 8)
    for made, expected in zip(outputs(own, image), outputs(theirs, image), strict=True):
        # MAISI's GroupNorm adds up in another order.
        torch.testing.assert_close(made, expected, rtol=0, atol=1e-5)
    values = dict(theirs.state_dict())
    assert len(values) == len(own.state_dict())
    for (name, value), (_, made) in zip(values.items(), own.state_dict().items(), strict=True):
        assert torch.equal(value, made), name


def test_the_unused_projection_of_the_older_package_is_left_out(tmp_path: Path) -> None:
    first, by_monai = AutoencoderKL(**ATTENTION), AutoencoderKL(**ATTENTION)
    old = as_of_generative(first.state_dict())
    # Where there is no projection, MONAI's loader gives the identity: the older package computes that.
    without = {name: value for name, value in old.items() if ".proj_attn." not in name}
    assert len(without) < len(old)
    by_monai.load_old_state_dict(dict(without))
    torch.save({"model": old}, tmp_path / "model_autoencoder.pt")
    own = recipe_of(**WITH_ATTENTION, pretrained=str(tmp_path / "model_autoencoder.pt")).build_model()
    for name, value in by_monai.state_dict().items():
        assert torch.equal(own.state_dict()[name], value), name
    image = torch.rand(1, 1, 8, 8, 8)
    for made, expected in zip(outputs(own, image), outputs(by_monai, image), strict=True):
        torch.testing.assert_close(made, expected)
    assert renamed(without, first.state_dict()).keys() == by_monai.state_dict().keys()


def test_maisis_attention_has_no_projection(tmp_path: Path) -> None:
    settings = {**ATTENTION, "num_channels": ATTENTION["channels"]}
    del settings["channels"]
    theirs = AutoencoderKlMaisi(**settings, include_fc=False, num_splits=1)
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "maisi.safetensors")
    path = str(tmp_path / "maisi.safetensors")
    own = recipe_of(**WITH_ATTENTION, upsampling="trilinear", pretrained=path).build_model()
    image = torch.rand(1, 1, 8, 8, 8)
    for made, expected in zip(outputs(own, image), outputs(theirs, image), strict=True):
        torch.testing.assert_close(made, expected, rtol=0, atol=1e-5)


def test_what_does_not_fit_is_told_with_names_and_shapes_before_training(tmp_path: Path) -> None:
    theirs = AutoencoderKL(**ATTENTION)
    torch.save(theirs.state_dict(), tmp_path / "weights.pt")
    other = recipe_of(
        channels=(4, 8),
        latent_channels=3,
        norm_groups=4,
        num_res_blocks=1,
        pretrained=str(tmp_path / "weights.pt"),
    )
    for build in (other.build_model, other.inspect, lambda: other.build_loaders(0, 1)):
        with pytest.raises(DataError) as caught:
            build()
        told = str(caught.value)
        assert told.startswith(f"{tmp_path / 'weights.pt'}: the file does not fit: has no decoder.blocks.")
        assert "; and " in told
        assert "See channels, latent_channels, num_res_blocks, attention_levels" in told
    latent = recipe_of(**WITH_ATTENTION, latent_channels=3, pretrained=str(tmp_path / "weights.pt"))
    with pytest.raises(DataError) as caught:
        latent.build_model()
    said = "decoder.blocks.0.conv.weight is (8, 2, 3, 3, 3), and the network's is (8, 3, 3, 3, 3)"
    assert said in str(caught.value)
    torch.save({**theirs.state_dict(), "extra": torch.ones(3)}, tmp_path / "more.pt")
    more = recipe_of(**WITH_ATTENTION, pretrained=str(tmp_path / "more.pt"))
    with pytest.raises(
        DataError, match=r"does not fit: has extra \(3,\), which the network has not\. See channels"
    ):
        more.build_model()


def test_bad_weights_are_told_beside_bad_volumes(tmp_path: Path) -> None:
    (tmp_path / "volumes").mkdir()
    (tmp_path / "volumes" / "a.nii").write_bytes(b"nothing")
    (tmp_path / "weights.pt").write_bytes(b"nothing")
    recipe = recipe_of(data=str(tmp_path / "volumes"), pretrained=str(tmp_path / "weights.pt"))
    with pytest.raises(DataError) as caught:
        recipe.inspect()
    lines = str(caught.value).splitlines()
    assert [line.partition(": cannot be read as ")[0] for line in lines] == [
        str(tmp_path / "volumes" / "a.nii"),
        str(tmp_path / "weights.pt"),
    ]


@pytest.mark.long
@pytest.mark.slow
def test_bad_weights_are_told_before_an_engine_starts(tmp_path: Path) -> None:
    (tmp_path / "weights.pt").write_bytes(b"nothing")
    config = train_config("autoencoder", data="phantoms", pretrained=str(tmp_path / "weights.pt"))
    with pytest.raises(DataError, match=r"weights\.pt: cannot be read as weights"):
        data_check.require_good_data(config)


def test_a_file_that_is_not_there_or_runs_code_is_refused(tmp_path: Path) -> None:
    config = train_config("autoencoder", data="phantoms", pretrained=str(tmp_path / "none.pt"))
    with pytest.raises(ConfigError, match=r"pretrained = .*none\.pt': there is no such file"):
        adapt_to_devices(config, [Device("cpu", "CPU", "CPU-0", 0, 2**30)])

    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "was here",)

    torch.save({"encoder.blocks.0.conv.weight": Harmful()}, tmp_path / "bad.pt")
    with pytest.raises(DataError, match=r"bad\.pt: cannot be read as weights"):
        recipe_of(pretrained=str(tmp_path / "bad.pt")).build_model()
    assert not (tmp_path / "was here").exists()


def test_a_trained_model_does_not_need_the_file_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = train_config("autoencoder", data="phantoms", patch_size=8, pretrained=str(tmp_path / "gone.pt"))
    write_toml(tmp_path / "run.toml", ClusterConfig(), config)
    weights = recipe_of().build_model().state_dict()
    monkeypatch.setattr(checkpoint, "load", lambda _: ({f"model.{n}": v for n, v in weights.items()}, {}))
    model = trained.load_model(tmp_path, tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])
