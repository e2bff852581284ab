"""A recipe's result as the notebook keeps it."""

from __future__ import annotations

import base64

from nbgpu.ui.run import result_view

PIXEL = base64.b64encode(b"\x89PNG not a real one").decode()
RESULT = {
    "table": {"network": {"c_index": 0.71234, "events": 12}, "<b>chance": {"c_index": 0.5, "ibs": 0.25}},
    "note": "On 40 patients.",
    "images": {"curves": f"data:image/png;base64,{PIXEL}"},
    "weights": "the average",
    "left_out": {},
}


def test_a_result_is_a_sentence_a_table_and_pictures() -> None:
    told = result_view.bundle(RESULT)["text/html"]
    assert told.startswith("<p>On 40 patients.</p>")
    for part in ("<th scope", "0.7123", "&lt;b&gt;chance", f"base64,{PIXEL}", 'alt="curves"', "the average"):
        assert part in told
    # A notebook that nobody has trusted shows it as it is.
    assert "<script" not in told
    assert "<style" not in told
    assert "left_out" not in told


def test_the_same_as_text() -> None:
    told = result_view.bundle(RESULT)["text/plain"]
    assert told.splitlines()[0] == "On 40 patients."
    assert "network     0.7123      12" in told
    assert "pictures: curves" in told
    assert PIXEL not in told


def test_a_picture_that_is_none_is_mentioned() -> None:
    told = result_view.html({"images": {"curves": "javascript:alert(1)"}})
    assert "curves: this picture is not a PNG" in told
    assert "javascript" not in told
