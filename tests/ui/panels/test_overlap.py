"""The picture of a step that follows sliders."""

from __future__ import annotations

import base64
import re
from typing import Any
from xml.etree import ElementTree

import pytest

import nbgpu
from nbgpu.machine.links import parse_link
from nbgpu.performance.steps import StepTimes, overlap
from nbgpu.text.html import as_image
from nbgpu.ui.overlap import OverlapView, svg

MB = 2**20


def times(strategy: str = "ddp", num_buckets: int = 4) -> StepTimes:
    """A step of 100 ms: 30 forward, 60 backward with buckets of 10 MiB, 10 optimizer."""
    step = {
        "forward_s": 0.03,
        "backward_s": 0.06,
        "last_backward_s": 0.06,
        "optimizer_s": 0.01,
        "step_s": 0.1,
        "buckets": [(0.06 * (index + 1) / num_buckets, 10 * MB) for index in range(num_buckets)],
        "blocks": [],
        "rest_bytes": 0,
        "micro_batches": 1,
    }
    rank = {"alone": [step] * 3, "together": [step] * 3, "alone again": [step] * 3}
    return StepTimes("a recipe", "gloo", 4, [rank, rank], strategy)


def num_bars(picture: str) -> int:
    return len(re.findall("<rect ", picture))


def test_over_a_fast_link_everything_but_the_last_bucket_is_hidden() -> None:
    drawn = overlap(times(), parse_link("100 GB/s, 1us"), 2)
    assert drawn.step_s == pytest.approx(0.1, rel=0.01)
    assert drawn.exchange.exposed_s == pytest.approx(10 * MB / 100e9 + 2e-6, rel=0.01)
    assert [bucket.ready_s for bucket in drawn.buckets] == pytest.approx([0.045, 0.06, 0.075, 0.09])


def test_over_a_slow_link_the_buckets_queue() -> None:
    drawn = overlap(times(), parse_link("1Gbit/s,1us"), 2)
    one_s = 10 * MB / 125e6
    # From the first bucket on the link is never free.
    assert drawn.step_s == pytest.approx(0.045 + 4 * one_s + 0.01, rel=0.01)
    begins = [begin for begin, _ in drawn.sent_s]
    assert begins == pytest.approx([0.045 + index * one_s for index in range(4)], rel=0.01)


@pytest.mark.parametrize(
    ("num_buckets", "first", "second"),
    [(4, "bucket 1", "bucket 2"), (17, "1, 17", "bucket 2"), (34, "1, 17 …", "2, 18 …")],
)
def test_a_lane_is_labelled_with_the_buckets_that_are_on_it(
    num_buckets: int, first: str, second: str
) -> None:
    labels = re.findall(
        r'text-anchor="end">([^<]*)</text>',
        svg(overlap(times(num_buckets=num_buckets), parse_link("10GbE"), 2)),
    )
    assert labels[1:3] == [first, second]


def test_a_step_of_fsdp_has_no_buckets() -> None:
    with pytest.raises(nbgpu.ConfigError, match="strategy='ddp'"):
        OverlapView(times("fsdp"), parse_link("10GbE"))


def test_the_picture_follows_each_slider() -> None:
    view = OverlapView(times(), parse_link("10GbE"))

    def shown() -> str:
        picture: str = view.picture.value
        assert view.drawn.title in picture
        assert view.drawn.title.startswith("modelled: ")
        return picture

    before = shown()
    assert "over 10GbE takes" in before
    # A page rounds to the steps of its sliders, and says so.
    view.rate.value, view.latency.value = 9_950.0, 50.1
    assert view.name.value == "10GbE"
    assert "over 10GbE takes" in shown()
    assert num_bars(before) == 3 + 4 + 1

    def changed(**moved: Any) -> str:
        nonlocal before
        for name, value in moved.items():
            getattr(view, name).value = value
        now = shown()
        assert now != before
        before = now
        return now

    assert "over 100 Mbit/s, 50.1 us takes" in changed(rate=100)
    # A link of one's own has no name any more.
    assert view.name.value == "as below"
    slow_s = view.drawn.step_s
    assert "over 100 Mbit/s, 10 ms takes" in changed(latency=10_000)
    assert view.drawn.step_s > slow_s
    assert "a step of 64 ranks" in changed(ranks=64)
    assert "1 bucket takes" not in changed(bucket_mb=100)
    assert len(view.drawn.buckets) == 2
    assert "over NVLink4 takes" in changed(name="NVLink4")
    assert view.rate.value == pytest.approx(450e9 * 8 / 1e6)
    assert view.latency.value == pytest.approx(3.4, rel=0.05)


def test_many_small_buckets_find_room() -> None:
    drawn = overlap(times(), parse_link("10GbE"), 2, bucket_mb=0.1)
    assert len(drawn.buckets) == 400
    picture = svg(drawn)
    assert num_bars(picture) >= 400
    assert int(re.search(r'viewBox="0 0 640 (\d+)"', picture)[1]) < 500  # type: ignore[index]


def test_the_picture_is_an_image_in_a_notebook_that_is_kept() -> None:
    image = as_image(svg(overlap(times(), parse_link("10GbE"), 2)))
    encoded = re.search(r'^<img alt="" src="data:image/svg\+xml;base64,([^"]+)"[^<]*>$', image)
    assert encoded
    root = ElementTree.fromstring(base64.b64decode(encoded[1]))
    # Without its namespace a browser would not draw it.
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert "time, ms" in "".join(root.itertext())
    assert as_image("") == ""


def test_a_link_that_is_none_is_refused() -> None:
    with pytest.raises(nbgpu.ConfigError, match="is not a rate"):
        nbgpu.overlap(times(), "fast,1us")
