"""The tables and pictures of the memory of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nbgpu.performance.memory import NAMES, MeasuredMemory, Memory, PredictedMemory, PredictedMemoryTable

MIB = 2**20
TENSORS = dict.fromkeys(NAMES, 0) | {"parameters": 10 * MIB, "activations": 30 * MIB}


def memory(predicted: PredictedMemory | None = None) -> Memory:
    def ask(changes: Mapping[str, Any], ranks: Any) -> list[PredictedMemory]:
        return [
            PredictedMemory({"ranks": ranks, **changes}, TENSORS, ""),
            PredictedMemory({"ranks": ranks, **changes}, None, "it reads values"),
        ]

    measured = [
        MeasuredMemory(0, TENSORS, 100 * MIB, 150 * MIB),
        MeasuredMemory(1, TENSORS | {"activations": 40 * MIB}, 100 * MIB, 145 * MIB),
    ]
    predicted = predicted or PredictedMemory({}, TENSORS | {"activations": 34 * MIB}, "")
    return Memory("a recipe", "cpu", measured, predicted, ask)


def test_the_rows_add_up_to_the_peak_of_each_rank() -> None:
    found = memory()
    of_ranks = found.frame().groupby("rank")["bytes"].sum()
    assert list(of_ranks) == [150 * MIB, 145 * MIB]
    lines = {line.split("  ")[0]: line for line in str(found).splitlines()}
    assert lines["measured: a recipe"]
    # 44 MiB are 10 % above rank 0, and 12 % below rank 1.
    assert "+10%" in lines["all tensors"]
    assert found.error is not None
    assert math.isclose(found.error, 44 / 50 - 1)
    # Memory that was held before was used again on rank 1: a row that is hidden would not be true.
    assert "10.0 MiB" in lines["the rest"]
    assert "-5.0 MiB" in lines["the rest"]


def test_pictures_say_what_was_measured_and_what_was_not() -> None:
    found = memory()
    figure = found.figure()
    assert "measured" in figure.layout.title.text
    assert "predicted" in figure.layout.title.text
    assert sum(trace.y[0] for trace in figure.data) == 150
    modelled = found.predict(ranks=8, batch_size=4)
    assert "predicted" in modelled.figure().layout.title.text
    assert "measured" not in modelled.figure().layout.title.text
    assert str(modelled).startswith("predicted, not measured")
    assert "not known: it reads values" in str(modelled)
    frame = modelled.frame()
    assert list(frame["ranks"]) == [8, 8]
    assert frame["total_bytes"][0] == 40 * MIB
    assert math.isnan(frame["total_bytes"][1])


def test_bars_are_named_by_what_differs() -> None:
    tensors = {**dict.fromkeys(NAMES, 0), "parameters": MIB}
    rows = [PredictedMemory({"ranks": 2, "batch_size": size}, tensors, "") for size in (2, 4)]
    figure = PredictedMemoryTable("a recipe", rows).figure()
    assert list(figure.data[0].x) == ["batch_size=2", "batch_size=4"]
    assert figure.layout.title.text.endswith("; here ranks=2")
    alone = PredictedMemoryTable("a recipe", rows[:1]).figure()
    assert list(alone.data[0].x) == ["ranks=2<br>batch_size=2"]
    # A category has its colour whatever else there is.
    of = {trace.name: trace.marker.color for trace in memory().figure().data}
    assert of["parameters"] == figure.data[0].marker.color
    assert len(set(of.values())) == len(of)


def test_a_recipe_that_cannot_be_predicted_is_measured_all_the_same() -> None:
    found = memory(PredictedMemory({}, None, "it reads values"))
    assert found.error is None
    assert "no prediction: it reads values" in str(found)
    assert "predicted" not in found.figure().layout.title.text
    assert found.frame()["predicted_bytes"].isna().all()
