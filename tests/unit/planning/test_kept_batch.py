"""The samples of a step stay when a run goes on with another number of ranks."""

from __future__ import annotations

import pytest

from nbgpu.config import train_config
from nbgpu.planning.epochs import on_other_ranks


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "before", "now", "expected"),
    [
        (1, 1, 4, 2, (1, 2)),
        (2, 1, 4, 2, (2, 2)),
        (2, 3, 4, 3, (2, 4)),
        # Three samples a rank: two do not divide them, and no rank may take three at once.
        (2, 1, 3, 2, (1, 3)),
        (1, 2, 2, 4, (1, 1)),
    ],
)
def test_no_rank_takes_more_at_once_and_the_step_stays(
    batch_size: int, accumulate: int, before: int, now: int, expected: tuple[int, int]
) -> None:
    config = train_config("autoencoder", batch_size=batch_size, accumulate=accumulate)
    changes, words = on_other_ranks(config, before, now)
    assert (changes["batch_size"], changes["accumulate"]) == expected
    assert config.changed(**changes).samples_per_step(now) == config.samples_per_step(before)
    assert "as before" in words


def test_samples_that_do_not_divide_are_told() -> None:
    changes, words = on_other_ranks(train_config("autoencoder", batch_size=1), 4, 3)
    assert changes == {"batch_size": 1, "accumulate": 1}
    assert words.startswith("4 samples of a step do not divide among 3 ranks: a step has 3 now")


def test_a_global_batch_becomes_shares_of_the_ranks() -> None:
    config = train_config("autoencoder", global_batch_size=8).changed(batch_size=2)
    changes, _ = on_other_ranks(config, 4, 2)
    assert changes == {"batch_size": 2, "accumulate": 2, "global_batch_size": None}
