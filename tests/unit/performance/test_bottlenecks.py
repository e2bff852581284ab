"""What is said of made steps whose bottleneck is known."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nbgpu.performance.bottlenecks import Explanation, Observed, explain
from nbgpu.performance.step_parts import StepParts

DDP: dict[str, Any] = {
    "strategy": "ddp",
    "comm_hook": "none",
    "accumulate": 1,
    "num_workers": 0,
    "cache_rate": 1.0,
}


def steps(late_s: float = 0.0, last: tuple[int, ...] = (0, 1), **parts_ms: float) -> list[StepParts]:
    """Twenty steps of two ranks: 10 ms of everything that is not named; rank `last` is `late_s` behind."""
    found = []
    for number in range(1, 21):
        late = last[number % len(last)]
        for rank in range(2):
            named = {
                "data": 0,
                "forward": 30,
                "backward": 60,
                "transfer": 0,
                "optimizer": 5,
                "other": 1,
            } | parts_ms
            parts = {f"{name}_s": ms / 1000 for name, ms in named.items()}
            parts["waiting_s"] = late_s if rank != late else 0.0
            parts["backward_s"] += late_s if rank == late else 0.0
            found.append(StepParts(number, rank, sum(parts.values()), float(number), parts, 0.02, late))
    return found


def explained(
    found: list[StepParts], between_s: dict[str, float] | None = None, **settings: Any
) -> Explanation:
    return explain(Observed(found, between_s or {}, 8, DDP | settings))


@pytest.mark.parametrize(
    ("found", "between_s", "bound", "first"),
    [
        (steps(), {}, "computation", "Computation bounds this run: 95 ms"),
        (steps(data=50), {}, "data", "Data bound this run: a step waits 50 ms"),
        (steps(transfer=80), {}, "communication", "Communication bounds this run: 80 ms"),
        (steps(0.07, last=(1,)), {}, "imbalance", "rank 0 waits 70 ms of a step, .* for rank 1, .* 100%"),
        (steps(), {"validation": 0.2}, "validation", "Validation bounds this run: 200 ms"),
        (steps(), {"checkpoints": 0.05}, "checkpoints", "Checkpoints bound this run: 50 ms"),
        (steps(other=60), {}, "other", "None of a step's parts bounds this run"),
        # Ranks that take turns to be last are alike.
        (steps(0.07), {}, "computation", "Computation bounds this run"),
    ],
)
def test_the_first_sentence_names_what_bounds_the_run(
    found: list[StepParts], between_s: dict[str, float], bound: str, first: str
) -> None:
    told = explained(found, between_s)
    assert told.bound == bound
    assert re.search(first, told.sentences[0])


def test_where_nothing_would_help_nothing_is_advised() -> None:
    assert explained(steps()).advice == ()
    assert "would" not in str(explained(steps()))


def test_the_most_useful_advice_comes_first_and_says_what_it_would_bring() -> None:
    first, second = explained(steps(transfer=80)).advice
    # Of 100 ms of exchange 20 are hidden. Half the bytes leave 50, of which 20 stay hidden.
    assert first.settings == {"comm_hook": "fp16"}
    assert first.step_s == pytest.approx(0.126)
    assert second.settings == {"accumulate": 2}
    assert first.relative == pytest.approx(0.176 / 0.126)
    assert "at best take 126 ms in place of 176 ms" in first.text


def test_validations_become_as_rare_as_is_enough() -> None:
    (advice,) = explained(steps(), {"validation": 0.2}, val_every=1).advice
    assert advice.settings == {"val_every": 32}
    assert advice.step_s == pytest.approx(0.096 + 0.2 / 32)


def test_a_gradient_that_is_compressed_already_is_not_compressed_again() -> None:
    told = explained(steps(transfer=80), comm_hook="fp16")
    assert [advice.settings for advice in told.advice] == [{"accumulate": 2}]


def test_what_is_said_adds_up() -> None:
    told = explained(steps(data=20, transfer=10), {"checkpoints": 0.01})
    assert told.step_s == pytest.approx(0.096 + 0.03 + 0.01)
    assert "transfer" not in str(told)
    assert "communication 10 ms (7%)" in str(told)
