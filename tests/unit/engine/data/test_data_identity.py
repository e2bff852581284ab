"""What ranks say where their data differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from nbgpu.config import train_config
from nbgpu.engine.data.identity import Identity, differences, digest
from nbgpu.recipes.autoencoder.recipe import Autoencoder
from nbgpu.recipes.lithography.recipe import Lithography

Sets = Mapping[str, Identity]


def sets(length: int, **samples: str) -> Sets:
    return {"`dataset`": {"length": length, "samples": samples, "advice": "Seed it."}}


def told(first: Sequence[Sets], second: Sequence[Sets] | None = None) -> str:
    return differences(first, lambda: second if second is not None else first)


def test_equal_data_are_read_once() -> None:
    def read_again() -> list[Any]:
        raise AssertionError("nothing differs")

    assert differences([sets(3, first="a"), sets(3, first="a")], read_again) == ""


def test_lengths_are_said_with_their_ranks_and_what_to_do() -> None:
    lengths = told([sets(1604), sets(1600), sets(1604)])
    assert lengths.splitlines() == [
        "the ranks do not have the same data",
        "`dataset` differs in length: 1,604 on ranks 0, 2, 1,600 on rank 1",
        "Seed it.",
    ]
    assert "5 on rank 0, 0 on rank 1" in told([sets(5), {}])


def test_a_sample_counts_where_two_readings_of_it_are_equal() -> None:
    first = [sets(9, first="a", last="c"), sets(9, first="b", last="d"), sets(9, first="b", last="c")]
    assert "first of `dataset` is another one on ranks 1, 2 than on rank 0\nlast" in told(first)
    # Rank 1 draws the first with random numbers of its own, and the last could not be read there.
    second = [first[0], sets(9, first="x", last=""), first[2]]
    assert told([first[0], sets(9, first="b", last=""), first[2]], second) == ""


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.tensor([1.0, 2.0])},
        {"y": torch.tensor([1.0, 3.0])},
        {"x": torch.tensor([[1.0, 3.0]])},
        {"x": torch.tensor([1.0, 3.0], dtype=torch.float64)},
    ],
)
def test_a_digest_tells_names_shapes_types_and_numbers_apart(other: dict[str, torch.Tensor]) -> None:
    sample = {"x": torch.tensor([1.0, 3.0])}
    assert digest(sample) == digest({"x": torch.tensor([1.0, 0.0, 3.0])[::2]})
    assert digest(sample) != digest(other)
    assert digest({"flag": torch.tensor(True), "half": torch.ones(2, dtype=torch.bfloat16)})


def test_the_list_of_volumes_is_compared() -> None:
    few, many = (
        Autoencoder(
            train_config("autoencoder", data="phantoms", num_phantoms=count, patch_size=16)
        ).build_loaders(0, 2)
        for count in (8, 12)
    )
    try:
        assert told([few.identity(), few.identity()]) == ""
        assert "the list of volumes differs in length" in told([few.identity(), many.identity()])
    finally:
        few.close()
        many.close()


def test_what_is_compared_is_called_by_its_name() -> None:
    loaders = Lithography(train_config("lithography", num_masks=8)).build_loaders(0, 2)
    try:
        assert list(loaders.identity()) == ["the list of masks"]
    finally:
        loaders.close()
