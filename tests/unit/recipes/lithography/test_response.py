"""The made-up resist, and the models of a resist that are fitted by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from nbgpu.config import train_config
from nbgpu.errors import DataError
from nbgpu.recipes.lithography.baselines import COMPACT_RESIST, GAUSSIAN_RESIST, fitted_resists
from nbgpu.recipes.lithography.config import LithographyConfig
from nbgpu.recipes.lithography.recipe import Lithography
from nbgpu.recipes.lithography.resist import blurred, in_resist

PIXEL_NM = 25.0


def _aerials(seed: int, num: int = 12) -> torch.Tensor:
    torch.manual_seed(seed)
    return blurred((torch.rand(num, 1, 32, 32) < 0.3).float(), 1.5)


def test_clear_and_dark_fields_stay_what_they_are() -> None:
    torch.testing.assert_close(in_resist(torch.ones(1, 1, 32, 48), PIXEL_NM), torch.ones(1, 1, 32, 48))
    torch.testing.assert_close(in_resist(torch.zeros(1, 1, 32, 48), PIXEL_NM), torch.zeros(1, 1, 32, 48))


def test_a_shifted_image_gives_the_shifted_result_and_a_mirrored_one_another() -> None:
    aerial = _aerials(0)
    found = in_resist(aerial, PIXEL_NM)
    moved = in_resist(aerial.roll((3, -5), (2, 3)), PIXEL_NM)
    torch.testing.assert_close(moved, found.roll((3, -5), (2, 3)), rtol=0, atol=1e-5)
    # The acid drifts to one side, so that no symmetric blur describes it.
    mirrored = in_resist(aerial.flip(3), PIXEL_NM).flip(3)
    assert float((mirrored - found).square().mean()) > 1e-4


def test_where_more_is_exposed_nearby_less_reacts() -> None:
    alone, crowded = torch.zeros(2, 1, 1, 64, 64)
    alone[..., 28:36, 28:36] = crowded[..., 28:36, 28:36] = 1
    crowded[..., :, :18] = crowded[..., :, 46:] = 1
    middle = (0, 0, 31, 31)
    assert in_resist(crowded, PIXEL_NM)[middle] < in_resist(alone, PIXEL_NM)[middle] - 0.05


def test_the_fits_find_what_has_their_own_form() -> None:
    aerial, new = _aerials(1), _aerials(2)
    gaussian = 1.2 * blurred(aerial, 1.3) - 0.05
    found = fitted_resists(aerial, gaussian, new, PIXEL_NM, lambda image: image)
    torch.testing.assert_close(found[GAUSSIAN_RESIST], 1.2 * blurred(new, 1.3) - 0.05, rtol=0, atol=1e-4)
    loaded = blurred(aerial, 1.0) * (1 - 0.4 * blurred(aerial, 8.0))
    found = fitted_resists(aerial, loaded, new, PIXEL_NM, lambda image: image)
    torch.testing.assert_close(
        found[COMPACT_RESIST], blurred(new, 1.0) * (1 - 0.4 * blurred(new, 8.0)), rtol=0, atol=1e-4
    )
    worse = (found[GAUSSIAN_RESIST] - found[COMPACT_RESIST]).square().mean()
    assert float(worse) > 1e-6


def test_margins_count_in_no_fit() -> None:
    aerial, new = _aerials(3), _aerials(4)
    wanted = 0.9 * blurred(aerial, 0.9)
    wanted[..., :4, :] = 7.0
    found = fitted_resists(aerial, wanted, new, PIXEL_NM, lambda image: image[..., 4:, :])
    torch.testing.assert_close(found[GAUSSIAN_RESIST], 0.9 * blurred(new, 0.9), rtol=0, atol=1e-4)


def test_a_run_learns_what_is_in_the_resist() -> None:
    of_aerial, of_resist = (
        Lithography(train_config("lithography", size=32, num_masks=4, image=image))  # type: ignore[arg-type]
        for image in ("aerial", "resist")
    )
    (one, other) = (recipe._decoded(recipe._parts().training) for recipe in (of_aerial, of_resist))
    assert one["mask"].equal(other["mask"])
    torch.testing.assert_close(in_resist(one["aerial"], PIXEL_NM), other["aerial"], rtol=0, atol=1e-6)
    config = of_resist.config
    assert isinstance(config, LithographyConfig)
    assert (config.corrections, config.steps, of_aerial.config.corrections) == (4, 512, 0)


def test_images_that_are_given_stay_as_they_are(tmp_path: Path) -> None:
    masks = (np.random.default_rng(0).random((6, 32, 32)) < 0.3).astype(np.float32)
    given = {"data": str(tmp_path / "pairs.npz"), "size": 32, "pixel_nm": 25.0, "image": "resist"}
    np.savez(tmp_path / "pairs.npz", masks=masks, aerials=masks)
    with pytest.raises(
        DataError, match=r"has images, and image='resist' is only for those that are simulated"
    ):
        Lithography(train_config("lithography", **given)).inspect()  # type: ignore[arg-type]
    np.savez(tmp_path / "pairs.npz", masks=masks)
    Lithography(train_config("lithography", **given)).inspect()  # type: ignore[arg-type]
