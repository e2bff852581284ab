"""A picture of one step of DDP that follows sliders for the link, the ranks and the buckets."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator
from typing import Any

import ipywidgets as w

from nbgpu.client.ipykernel.page import answer_while_busy
from nbgpu.machine.links import PRESETS, Link, parse_link
from nbgpu.performance import steps as model
from nbgpu.performance.steps import Overlap, StepTimes
from nbgpu.text.html import as_image
from nbgpu.text.palette import KIND_COLORS, TEXT_COLOR
from nbgpu.ui.slot import display_with_page, require_notebook

_BITS = 8
_RANKS = [2**power for power in range(1, 11)]
_BUCKETS_MB = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
_OWN = "as below"
_STEP = 0.02
"""The step of a slider of the link, in powers of ten: a fiftieth of a factor of ten."""
_MEASURED = 0.0
"""The size of buckets that stands for those that were measured."""
_WIDTH, _LEFT, _TOP, _LANE, _AXIS = 640, 80, 26, 18, 34
_MOST_LANES = 16
"""The most lanes in the picture; buckets beyond this number take turns on them."""


def overlap(times: StepTimes, link: str = "10GbE") -> None:
    """Display a modelled step of DDP, with sliders for the link, the number of ranks and the size of buckets.

    The picture shows what the ranks compute, when each bucket of gradients is ready, when it travels, and how
    much of that the backward pass hides. It needs no cluster. Every rank has the batch that was measured.

    nbgpu.overlap(nbgpu.time_step("autoencoder"))

    Args:
        times: what `nbgpu.time_step` has measured, with DDP.
        link: the first link: a name such as '10GbE', or a rate and a latency one way such as '1Gbit/s,0.2ms'.

    Raises:
        ConfigError: the link is not valid, or the step was measured with FSDP.
        RunError: there is no notebook to display anything.
    """
    shown = OverlapView(times, parse_link(link))
    require_notebook("times.predict")
    display_with_page(shown.box, _page(shown.drawn, as_image(svg(shown.drawn))), shown.drawn.title)


class OverlapView:
    """The sliders and the picture.

    Args:
        times: the measured step.
        link: the first link.
    """

    def __init__(self, times: StepTimes, link: Link) -> None:
        """Make the sliders, and draw the first picture for the given link."""
        self._times = times
        self.drawn = model.overlap(times, link, max(2, times.world_size))
        self.name = w.Dropdown(
            options=[_OWN, *PRESETS], value=link.name if link.name in PRESETS else _OWN, description="link"
        )
        bits_per_s, latency_us = link.bytes_per_s * _BITS, link.latency_s * 1e6
        self.rate = _log_slider(
            "Mbit/s", bits_per_s / 1e6, 1, 7, ",.0f", "the rate of each link, in one direction"
        )
        self.latency = _log_slider("latency, us", latency_us, 0, 5, ",.1f", "of a message, one way")
        self.ranks = w.SelectionSlider(options=_RANKS, value=_nearest(_RANKS, times.world_size))
        self.ranks.description = "ranks"
        measured = f"{len(times.buckets)}, as measured"
        self.bucket_mb = w.SelectionSlider(
            options=[(measured, _MEASURED), *((f"{mb:g} MiB", mb) for mb in _BUCKETS_MB)],
            description="buckets",
        )
        self.picture = w.HTML(layout={"width": "100%"})
        sliders = [self.name, self.rate, self.latency, self.ranks, self.bucket_mb]
        for slider in sliders:
            slider.style = {"description_width": "80px"}
            slider.layout = {"width": "400px", "max_width": "100%"}
            slider.observe(self._follow, "value")
            answer_while_busy(slider)
        self.box = w.VBox(
            [w.HBox(sliders, layout={"flex_flow": "row wrap"}), self.picture],
            layout={"width": "100%", "overflow": "hidden"},
        )
        self._is_setting = False
        self._draw(link)

    def _follow(self, change: Any) -> None:
        """Draw the picture for a slider that was moved. A named link moves the two sliders of rate and
        latency, and these set the name to the person's own link when they leave it."""
        if self._is_setting:
            return
        if change["owner"] is self.name and change["new"] in PRESETS:
            chosen = PRESETS[change["new"]]
            # Each of the two would draw the picture with half of the link.
            self._is_setting = True
            try:
                self.rate.value = chosen.bytes_per_s * _BITS / 1e6
                self.latency.value = chosen.latency_s * 1e6
            finally:
                self._is_setting = False
            self._draw(chosen)
        elif change["owner"] in (self.rate, self.latency) and not self._is_still(
            PRESETS.get(self.name.value)
        ):
            self._is_setting = True
            try:
                self.name.value = _OWN
            finally:
                self._is_setting = False
            self._draw(self._own_link())
        else:
            self._draw(PRESETS.get(self.name.value) or self._own_link())

    def _is_still(self, link: Link | None) -> bool:
        """Whether the sliders stand as near to a link as their steps allow. A page rounds the values that it
        is given, and sends them back."""
        if link is None:
            return False
        steps = (
            math.log10(self.rate.value * 1e6 / _BITS / link.bytes_per_s),
            math.log10(self.latency.value / 1e6 / link.latency_s),
        )
        # Rounding moves a slider by half of a step at most; the rest is for errors of floating point.
        return all(abs(step) <= 0.51 * _STEP for step in steps)

    def _own_link(self) -> Link:
        rate_mbit, latency_us = self.rate.value, self.latency.value
        name = f"{_rate(rate_mbit)}, {_latency(latency_us)}"
        return Link(name, latency_us / 1e6, rate_mbit * 1e6 / _BITS, "as described")

    def _draw(self, link: Link) -> None:
        self.drawn = model.overlap(self._times, link, self.ranks.value, self.bucket_mb.value or None)
        self.picture.value = _page(self.drawn, svg(self.drawn))


def svg(drawn: Overlap) -> str:
    """The picture of a step as an element of a page."""
    lanes = min(_MOST_LANES, len(drawn.buckets))
    height = _TOP + (lanes + 1) * _LANE + _AXIS
    ticks = _ticks(drawn.step_s)
    scale = (_WIDTH - _LEFT - 20) / ticks[-1]

    def x(at_s: float) -> float:
        return _LEFT + scale * at_s

    parts = [*_computing(drawn, x), *_sending(drawn, lanes, x), *_axis(ticks, height, x)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="100%" '
        f'style="font:11px sans-serif" fill="{TEXT_COLOR}">{"".join(parts)}</svg>'
    )


def _page(drawn: Overlap, picture: str) -> str:
    """The picture with its title and its legend, as HTML."""
    title = html.escape(drawn.title)
    return (
        f'<div style="line-height:1.4;white-space:normal"><b>{title}</b></div>'
        f'<div role="img" aria-label="{title}" style="max-width:900px">{picture}</div>'
        f'<div style="line-height:1.4;white-space:normal">{_legend()}</div>'
    )


def _computing(drawn: Overlap, x: Any) -> Iterator[str]:
    """Yield the bars of what each rank computes, with the wait for the exchange."""
    yield f'<text x="{_LEFT - 8}" y="{_TOP + 12}" text-anchor="end">each rank</text>'
    for kind, begin_s, end_s in (
        ("forward", 0.0, drawn.backward_at_s),
        ("backward", drawn.backward_at_s, drawn.computed_at_s),
        ("waiting", drawn.computed_at_s, drawn.arrived_at_s),
        ("optimizer", drawn.arrived_at_s, drawn.step_s),
    ):
        if end_s > begin_s:
            yield _bar(kind, x(begin_s), x(end_s), _TOP)


def _sending(drawn: Overlap, lanes: int, x: Any) -> Iterator[str]:
    """Yield the bars of the buckets, on a lane each, and a dashed line from the time at which a bucket is
    ready to the time at which it is sent."""
    for index, (bucket, (begin_s, end_s)) in enumerate(zip(drawn.buckets, drawn.sent_s, strict=True)):
        # More buckets than there is room for take turns on the lanes.
        top = _TOP + (index % lanes + 1) * _LANE
        if index < lanes:
            label = (
                f"bucket {index + 1}"
                if len(drawn.buckets) <= lanes
                else f"{index + 1}, {index + 1 + lanes} …"
            )
            yield f'<text x="{_LEFT - 8}" y="{top + 12}" text-anchor="end">{label}</text>'
        if begin_s > bucket.ready_s:
            middle = top + _LANE / 2 - 2
            yield (
                f'<line x1="{x(bucket.ready_s):.1f}" x2="{x(begin_s):.1f}" y1="{middle}" y2="{middle}" '
                f'stroke="{TEXT_COLOR}" stroke-dasharray="2 2"/>'
            )
        yield _bar("transfer", x(begin_s), x(end_s), top)


def _axis(ticks: list[float], height: int, x: Any) -> Iterator[str]:
    """Yield the lines and labels of the axis of time, in milliseconds."""
    base = height - _AXIS + 6
    for at_s in ticks:
        yield (
            f'<line x1="{x(at_s):.1f}" x2="{x(at_s):.1f}" y1="{_TOP - 6}" y2="{base}" stroke="{TEXT_COLOR}" '
            f'stroke-opacity="0.3"/><text x="{x(at_s):.1f}" y="{base + 14}" text-anchor="middle">'
            f"{1e3 * at_s:g}</text>"
        )
    yield f'<text x="{_LEFT - 8}" y="{base + 14}" text-anchor="end">time, ms</text>'


def _bar(kind: str, left: float, right: float, top: int) -> str:
    width = max(1.0, right - left)
    return f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_LANE - 4}" fill="{KIND_COLORS[kind]}"/>'


def _legend() -> str:
    """Return the meaning of the colours, as HTML."""
    words = {
        "forward": "forward",
        "backward": "backward",
        "transfer": "a bucket travels",
        "waiting": "waiting for the exchange",
        "optimizer": "optimizer",
    }
    boxes = (
        f'<span style="white-space:nowrap;margin-right:14px"><span style="display:inline-block;width:12px;height:12px;'
        f'background:{KIND_COLORS[kind]}"></span> {text}</span>'
        for kind, text in words.items()
    )
    return "".join(boxes) + "<span>dashed: ready, and waiting for the buckets before it</span>"


def _ticks(longest_s: float) -> list[float]:
    """Round times up to one beyond the longest, so that the scale stays while a slider moves a little."""
    step_s = 10 ** math.floor(math.log10(longest_s))
    step_s *= next(factor for factor in (0.1, 0.2, 0.5, 1) if 10 * factor * step_s >= longest_s)
    return [step_s * index for index in range(math.ceil(longest_s / step_s) + 1)]


def _log_slider(
    description: str, value: float, low: float, high: float, readout: str, tooltip: str
) -> w.FloatLogSlider:
    """Make a slider over powers of ten from 10^low to 10^high, with the value moved into these bounds."""
    slider = w.FloatLogSlider(
        value=min(10**high, max(10**low, value)),
        min=low,
        max=high,
        step=_STEP,
        base=10,
        readout_format=readout,
        description=description,
    )
    # ipywidgets 7 has another name for it.
    setattr(slider, "tooltip" if slider.has_trait("tooltip") else "description_tooltip", tooltip)
    return slider


def _nearest(options: list[int], value: int) -> int:
    return min(options, key=lambda option: abs(option - value))


def _rate(mbit: float) -> str:
    return f"{mbit / 1000:.3g} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"


def _latency(us: float) -> str:
    return f"{us / 1000:.3g} ms" if us >= 1000 else f"{us:.3g} us"
