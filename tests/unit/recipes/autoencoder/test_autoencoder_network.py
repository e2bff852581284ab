"""The network has the settings of MONAI's AutoencoderKL, and those of earlier runs by default."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from monai.networks.nets import AutoencoderKL

from nbgpu.config import read_toml, train_config
from nbgpu.engine.dry_run import memory
from nbgpu.engine.workload.by_name import load
from nbgpu.errors import ConfigError
from nbgpu.recipes.autoencoder.config import AutoencoderConfig
from nbgpu.recipes.autoencoder.recipe import Autoencoder


def recipe_of(**values: Any) -> Autoencoder:
    recipe = load(train_config("autoencoder", **{"data": "phantoms", "patch_size": 8, **values}))
    assert isinstance(recipe, Autoencoder)
    return recipe


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


TUTORIAL: dict[str, Any] = {
    "channels": (64, 128, 256),
    "latent_channels": 8,
    "num_res_blocks": 2,
    "norm_groups": 32,
    "attention_levels": (False, False, False),
}
"""MONAI's tutorial 3d_ldm, config_train_32g.json."""


@pytest.mark.parametrize(
    ("settings", "of_monai"),
    [
        (
            TUTORIAL,
            {"channels": (64, 128, 256), "latent_channels": 8, "num_res_blocks": 2, "norm_num_groups": 32},
        ),
        (
            {
                "channels": (4, 8),
                "num_res_blocks": (1, 3),
                "norm_groups": 4,
                "with_encoder_nonlocal_attn": True,
            },
            {
                "channels": (4, 8),
                "num_res_blocks": (1, 3),
                "norm_num_groups": 4,
                "with_encoder_nonlocal_attn": True,
                "latent_channels": 2,
            },
        ),
        (
            {"channels": (4, 8), "attention_levels": (False, True), "with_decoder_nonlocal_attn": True},
            {
                "channels": (4, 8),
                "num_res_blocks": 1,
                "norm_num_groups": 1,
                "attention_levels": (False, True),
                "with_decoder_nonlocal_attn": True,
                "latent_channels": 2,
            },
        ),
    ],
    ids=["3d_ldm", "blocks and the encoder's middle", "a level and the decoder's middle"],
)
def test_the_settings_are_those_of_monais_class(settings: dict[str, Any], of_monai: dict[str, Any]) -> None:
    own = recipe_of(**settings).build_model()
    none = (False,) * len(of_monai["channels"])
    theirs = AutoencoderKL(
        **{
            "spatial_dims": 3,
            "attention_levels": none,
            "with_encoder_nonlocal_attn": False,
            "with_decoder_nonlocal_attn": False,
            **of_monai,
        }
    )
    assert shapes(own) == shapes(theirs)
    theirs.load_state_dict(own.state_dict())
    # GroupNorm's groups and eps are in no weight.
    image = torch.rand(1, 1, 8, 8, 8)
    with torch.no_grad():
        for made, expected in zip(own.encode(image), theirs.encode(image), strict=True):  # type: ignore[operator]
            torch.testing.assert_close(made, expected)


def test_a_run_from_before_has_the_network_that_it_had(tmp_path: Path) -> None:
    old = tmp_path / "run.toml"
    old.write_text(
        '[train]\nrecipe = "autoencoder"\npatch_size = 16\nchannels = [4, 8, 8]\nlatent_channels = 3\n'
    )
    _, config = read_toml(old)
    assert isinstance(config, AutoencoderConfig)
    before = AutoencoderKL(
        spatial_dims=3,
        in_channels=1,
        out_channels=1,
        channels=(4, 8, 8),
        num_res_blocks=(1, 1, 1),
        attention_levels=(False,) * 3,
        latent_channels=3,
        norm_num_groups=1,
        with_encoder_nonlocal_attn=False,
        with_decoder_nonlocal_attn=False,
    )
    now = Autoencoder(config).build_model()
    now.load_state_dict(before.state_dict())
    image = torch.rand(1, 1, 16, 16, 16)
    with torch.no_grad():
        assert torch.equal(now.reconstruct(image), before.reconstruct(image))  # type: ignore[operator]


def test_sdpa_counts_where_there_is_attention() -> None:
    assert train_config("autoencoder", sdpa="math", with_decoder_nonlocal_attn=True).sdpa == "math"
    with pytest.raises(ConfigError, match=r"sdpa='math' is a kernel for attention, and the network has none"):
        train_config("autoencoder", sdpa="math", attention_levels=(False, False))


def test_attention_learns_at_a_level_and_in_the_middle() -> None:
    recipe = recipe_of(channels=(4, 8), attention_levels=(False, True), with_encoder_nonlocal_attn=True)
    model = recipe.build_model()
    recipe.loss(model, recipe.example(1))["loss"].backward()
    of_attention = [value for name, value in model.named_parameters() if ".attn.to_v.weight" in name]
    assert len(of_attention) == 3
    assert all(value.grad is not None and bool(value.grad.any()) for value in of_attention)


@pytest.mark.slow
def test_the_planned_memory_has_the_scores_that_the_kernel_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.group, "membership", lambda: SimpleNamespace(device=torch.device("cpu")))
    settings = {"data": "phantoms", "patch_size": 16, "batch_size": 1, "with_encoder_nonlocal_attn": True}
    configs = [train_config("autoencoder", **settings, sdpa=kernel) for kernel in ("auto", "math")]
    auto, math = (
        each["tensors"]["activations"] for each in memory.predict([(c.model_dump(), 1) for c in configs])
    )
    # 512 latent voxels are compared with one another, in float32; the peak is somewhat elsewhere.
    assert math - auto > 0.9 * 4 * 512**2


def test_what_does_not_go_together_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        train_config(
            "autoencoder",
            channels=(8, 12, 16),
            norm_groups=8,
            num_res_blocks=(1, 2),
            attention_levels=(True, True),
        )
    assert str(caught.value).splitlines() == [
        "channels=(8, 12, 16) must all be multiples of norm_groups=8",
        "num_res_blocks=(1, 2) must be one number, or 3, one for each of channels=(8, 12, 16)",
        "attention_levels=(True, True) must be 3 values, one for each of channels=(8, 12, 16), or left out",
    ]


@pytest.mark.parametrize("value", [0, 9, (1, 0), (2, 9)])
def test_numbers_of_blocks_have_bounds(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_res_blocks = .* Give a value within: 1 to 8"):
        train_config("autoencoder", num_res_blocks=value)


def test_a_wrong_type_is_told_once() -> None:
    with pytest.raises(ConfigError) as caught:
        train_config("autoencoder", num_res_blocks="many")
    assert len(str(caught.value).splitlines()) == 1
