"""The losses of the autoencoder, against MONAI's where it has the same."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from monai.losses import JukeboxLoss, PatchAdversarialLoss
from monai.networks.nets import AutoencoderKL
from safetensors.torch import save_file

from nbgpu.config import train_config
from nbgpu.engine.model.discriminator import Discriminator
from nbgpu.engine.workload.by_name import load
from nbgpu.engine.workload.recipe import Adversarial
from nbgpu.errors import ConfigError, DataError
from nbgpu.recipes.autoencoder.losses import (
    FeatureDistance,
    discriminator_loss,
    generator_loss,
    kl_divergence,
    spectral_distance,
)
from nbgpu.recipes.autoencoder.recipe import Autoencoder

CPU = torch.device("cpu")
NO_SCALER = torch.amp.GradScaler("cpu", enabled=False)


def autoencoder(**values: Any) -> Autoencoder:
    recipe = load(train_config("autoencoder", data="phantoms", patch_size=8, **values))
    assert isinstance(recipe, Autoencoder)
    return recipe


def feature_distance(network: str) -> FeatureDistance:
    return FeatureDistance(autoencoder(perceptual="features", perceptual_network=network).config)


def test_the_log_variance_is_clamped_so_that_neither_loss_nor_gradient_overflows() -> None:
    recipe = autoencoder()
    model = recipe.build_model()
    assert isinstance(model, AutoencoderKL)
    # AutoencoderKL clamps the logarithm of the latent variance to these bounds.
    for far, bound in ((-1e4, -30.0), (1e4, 20.0)):
        torch.nn.init.constant_(model.quant_conv_log_sigma.conv.bias, far)  # type: ignore[union-attr, arg-type]
        mean, sigma = model.encode(torch.rand(2, 1, 8, 8, 8))
        assert 2 * float(sigma.detach().log().mean()) == pytest.approx(bound, abs=1e-4)
        loss = kl_divergence(torch.zeros_like(mean), sigma)
        one = 0.5 * (math.exp(bound) - bound - 1)
        assert float(loss.detach()) == pytest.approx(one * mean[0].numel(), rel=1e-4)
        model.zero_grad()
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_the_adversarial_losses_are_those_of_least_squares() -> None:
    made, true = torch.randn(4, 1, 3, 3, 3), torch.randn(4, 1, 3, 3, 3)
    monai = PatchAdversarialLoss(criterion="least_squares", no_activation_leastsq=True)
    torch.testing.assert_close(
        generator_loss(made), monai(made, target_is_real=True, for_discriminator=False)
    )
    expected = [
        monai(x, target_is_real=real, for_discriminator=True) for x, real in ((made, False), (true, True))
    ]
    torch.testing.assert_close(discriminator_loss(made, true), sum(expected) / 2)


def test_the_spectral_distance_is_monais_and_has_a_gradient_also_at_zero() -> None:
    output, image = torch.rand(2, 1, 8, 8, 8), torch.rand(2, 1, 8, 8, 8)
    torch.testing.assert_close(spectral_distance(output, image), JukeboxLoss(spatial_dims=3)(output, image))
    empty = torch.zeros(1, 1, 8, 8, 8, requires_grad=True)
    spectral_distance(empty, image[:1]).backward()
    assert empty.grad is not None
    assert empty.grad.isfinite().all()


def test_features_of_a_file_are_those_of_its_convolutions(tmp_path: Path) -> None:
    layers = [(torch.randn(4, 1, 3, 3, 3), torch.randn(4)), (torch.randn(2, 4, 5, 5, 5), torch.randn(2))]
    path = tmp_path / "encoder.safetensors"
    save_file(
        {
            f"{i}.{n}": t
            for i, pair in enumerate(layers)
            for n, t in zip(("weight", "bias"), pair, strict=True)
        },
        path,
    )
    output, image = torch.rand(2, 1, 8, 8, 8), torch.rand(2, 1, 8, 8, 8)
    features = [torch.nn.functional.conv3d(x, *layers[0], padding=1).relu() for x in (output, image)]
    first = (features[0] - features[1]).square().mean()
    features = [
        torch.nn.functional.conv3d(torch.nn.functional.avg_pool3d(x, 2), *layers[1], padding=2).relu()
        for x in features
    ]
    second = (features[0] - features[1]).square().mean()
    torch.testing.assert_close(feature_distance(str(path))(output, image), (first + second) / 2)


def test_random_features_are_the_same_ones_each_time() -> None:
    image = torch.rand(1, 1, 8, 8, 8)
    one, other = feature_distance("random"), feature_distance("random")
    assert float(one(image, image)) == 0
    noisy = image + 0.1 * torch.randn_like(image)
    assert float(one(noisy, image)) > 1e-4
    assert float(one(noisy, image)) == float(other(noisy, image))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a": torch.zeros(1)}, r"is of no network that is known here \(AlexNet, .*It has a"),
        (
            {"1.weight": torch.zeros(1)},
            r"layer 0 needs both 0.weight and 0.bias\n.*unexpected names: 1.weight",
        ),
        ({"0.weight": torch.zeros(2, 1, 2, 2, 2), "0.bias": torch.zeros(2)}, "with an odd k"),
        (
            {
                "0.weight": torch.zeros(2, 1, 3, 3, 3),
                "0.bias": torch.zeros(2),
                "1.weight": torch.full((2, 3, 3, 3, 3), math.nan),
                "1.bias": torch.zeros(2),
            },
            "layer 1 takes 3 channels, and the one before gives 2",
        ),
    ],
)
def test_a_bad_file_of_weights_is_named_before_training(
    tmp_path: Path, tensors: dict[str, torch.Tensor], words: str
) -> None:
    path = tmp_path / "bad.safetensors"
    save_file(tensors, path)
    recipe = autoencoder(perceptual="features", perceptual_network=str(path))
    with pytest.raises(DataError, match=words):
        recipe.build_loaders(0, 1)
    with pytest.raises(DataError, match=words):
        recipe.inspect()


@pytest.mark.parametrize("perceptual", ["spectral", "features"])
def test_every_distance_is_a_term_and_reaches_the_weights(perceptual: str) -> None:
    plain, more = autoencoder(), autoencoder(perceptual=perceptual, perceptual_weight=2.0)
    model, image = plain.build_model(), torch.rand(2, 1, 8, 8, 8)
    found = []
    for recipe in (plain, more):
        torch.manual_seed(0)
        found.append(recipe.loss(model, {"image": image}))
    difference = found[1]["loss"] - found[0]["loss"]
    torch.testing.assert_close(difference, 2 * found[1]["perceptual_loss"])
    found[1]["perceptual_loss"].backward()
    assert sum(float(p.grad.abs().sum()) for p in model.parameters() if p.grad is not None) > 0


@pytest.mark.parametrize("patch_size", [8, 12, 16, 32])
def test_a_discriminator_fits_every_patch(patch_size: int) -> None:
    config = train_config("autoencoder", data="phantoms", patch_size=patch_size, adversarial_weight=0.01)
    recipe = load(config)
    assert isinstance(recipe, Adversarial)
    network = recipe.build_discriminator()
    assert network is not None
    said = network(torch.rand(2, 1, *(patch_size,) * 3))[-1]
    assert min(said.shape[2:]) >= 2
    assert not list(network.buffers())


def test_the_model_learns_against_the_discriminator_and_each_keeps_to_its_weights() -> None:
    recipe = autoencoder(adversarial_weight=0.5)
    rival = Discriminator.of(recipe.config, recipe, CPU)
    assert rival is not None
    model, image = recipe.build_model(), torch.rand(2, 1, 8, 8, 8)
    torch.manual_seed(0)
    without = recipe.loss(model, {"image": image})
    torch.manual_seed(0)
    terms = rival.loss_of_model(model, {"image": image})
    torch.testing.assert_close(terms["loss"] - without["loss"], 0.5 * terms["adversarial_loss"])
    terms["loss"].backward()
    assert all(p.grad is None and p.requires_grad for p in rival.network.parameters())
    of_model = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    before = float(rival.learn(NO_SCALER))
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in rival.network.parameters())
    assert all(
        torch.equal(p.grad, g)
        for p, g in zip(model.parameters(), of_model, strict=True)
        if p.grad is not None
    )
    # It learns to tell these two apart.
    for _ in range(20):
        rival.set_lr(1.0)
        rival.optimizer.step()
        rival.zero_grad()
        rival.loss_of_model(model, {"image": image})
        after = float(rival.learn(NO_SCALER))
    assert after < before / 2


def test_a_discriminator_with_buffers_is_refused() -> None:
    recipe = autoencoder(adversarial_weight=0.5)
    with pytest.raises(ValueError, match="Take InstanceNorm"):
        Discriminator(recipe.config, recipe, torch.nn.BatchNorm3d(1), CPU)


def test_what_the_settings_leave_without_effect_is_told() -> None:
    with pytest.raises(ConfigError, match="discriminator_layers=3 are too many for patch_size=16: at most 2"):
        train_config("autoencoder", patch_size=16, discriminator_layers=3)
    assert autoencoder().build_discriminator() is None
    assert Discriminator.of(autoencoder().config, autoencoder(), CPU) is None
    recipe = autoencoder(adversarial_weight=0.1, adversarial_after=200, perceptual="features")
    loaders = recipe.build_loaders(0, 1)
    loaders.close()
    assert loaders.warnings[-2].endswith("random filters; perceptual_network names others")
    assert loaders.warnings[-1] == (
        "the discriminator would begin after 200 steps, and the run ends with step 200. Lower adversarial_after"
    )
