"""Generated heads in four modalities."""

from __future__ import annotations

import torch

from nbgpu.recipes.diffusion.files import ENHANCING, MODALITIES, OEDEMA
from nbgpu.recipes.diffusion.phantoms import NOISE, phantom


def test_a_phantom_is_the_same_whenever_it_is_made() -> None:
    first, again, other = phantom(16, 0, 3), phantom(16, 0, 3), phantom(16, 1, 3)
    for name in MODALITIES:
        assert first[name].shape == (1, 16, 16, 16)
        assert first[name].dtype == torch.float32
        torch.testing.assert_close(first[name], again[name], rtol=0, atol=0)
        assert not torch.equal(first[name], other[name])


def test_only_the_modality_to_be_found_has_no_noise() -> None:
    clean, noisy = phantom(24, 0, 0), phantom(24, 0, 0, clean="t1n")
    assert -1 <= float(clean["t2f"].min()) < float(clean["t2f"].max()) <= 1
    assert 1.8 * NOISE < float((noisy["t2f"] - clean["t2f"]).std()) < 2.2 * NOISE
    assert float(clean["t1n"].min()) < -1.2


def test_the_tumour_looks_as_in_mri() -> None:
    """Over many heads: oedema is brightest in FLAIR, and what enhances in T1 with contrast."""
    heads = [phantom(16, 0, index) for index in range(40)]

    def mean(modality: str, label: int) -> float:
        return float(torch.cat([head[modality][head["label"] == label] for head in heads]).mean())

    assert mean("t2f", OEDEMA) > mean("t1n", OEDEMA) + 0.5
    assert mean("t1c", ENHANCING) > mean("t1n", ENHANCING) + 0.5
    assert all((head["label"] > 0).any() for head in heads)
