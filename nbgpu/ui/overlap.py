"""A picture of one modelled step of DDP, with sliders for the link, the number of ranks and the buckets."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterator
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
_CUSTOM_LINK = "as below"
"""The choice of a link that the two sliders describe."""
_SLIDER_STEP = 0.02
"""The step of the two sliders of the link, in powers of ten."""
_MEASURED = 0.0
"""The value of the slider of buckets that stands for the measured ones."""
_WIDTH, _LEFT, _TOP, _LANE, _AXIS = 640, 80, 26, 18, 34
"""Lengths in the picture: its width, the left and the upper margin, the height of a lane, and that of the
axis."""
_MAX_LANES = 16
"""The most lanes in the picture. If there are more buckets, a lane has several of them."""


def overlap(times: StepTimes, link: str = "10GbE") -> None:
    """Display a modelled step of DDP, with sliders for the link, the number of ranks and the size of buckets.

    The picture shows what the ranks compute, when each bucket of gradients is ready, when its all_reduce
    runs, and how much of that the backward pass hides. It needs no cluster. Every rank has the batch that was
    measured.

    nbgpu.overlap(nbgpu.time_step("autoencoder"))

    Args:
        times: the times that `nbgpu.time_step` has measured, with DDP.
        link: the link that is shown first: a name such as '10GbE', or a rate and a one-way latency such as
            '1Gbit/s,0.2ms'.

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
        name = link.name if link.name in PRESETS else _CUSTOM_LINK
        self.name = w.Dropdown(options=[_CUSTOM_LINK, *PRESETS], value=name, description="link")
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
            slider.observe(self._on_value, "value")
            answer_while_busy(slider)
        self.box = w.VBox(
            [w.HBox(sliders, layout={"flex_flow": "row wrap"}), self.picture],
            layout={"width": "100%", "overflow": "hidden"},
        )
        self._is_program_writing = False
        self._draw(link)

    def _on_value(self, change: Any) -> None:
        """Draw the picture after a change. The choice of a named link moves the sliders of rate and latency.
        A person who moves one of these leaves the named link for a custom one."""
        if self._is_program_writing:
            return
        preset = PRESETS.get(self.name.value)
        # Otherwise each value that is set here would draw a picture.
        self._is_program_writing = True
        try:
            if change["owner"] is self.name and preset is not None:
                self.rate.value = preset.bytes_per_s * _BITS / 1e6
                self.latency.value = preset.latency_s * 1e6
            elif change["owner"] in (self.rate, self.latency) and not self._shows(preset):
                self.name.value, preset = _CUSTOM_LINK, None
        finally:
            self._is_program_writing = False
        self._draw(preset or self._custom_link())

    def _shows(self, link: Link | None) -> bool:
        """Whether the sliders are at a link, to half of their step: a page rounds the values that the kernel
        sets, and sends them back."""
        if link is None:
            return False
        distances = (
            math.log10(self.rate.value * 1e6 / _BITS / link.bytes_per_s),
            math.log10(self.latency.value / 1e6 / link.latency_s),
        )
        # A hundredth of a step is for floating-point errors.
        return all(abs(distance) <= 0.51 * _SLIDER_STEP for distance in distances)

    def _custom_link(self) -> Link:
        rate_mbit, latency_us = self.rate.value, self.latency.value
        name = f"{_rate(rate_mbit)}, {_latency(latency_us)}"
        return Link(name, latency_us / 1e6, rate_mbit * 1e6 / _BITS, "as described")

    def _draw(self, link: Link) -> None:
        self.drawn = model.overlap(self._times, link, self.ranks.value, self.bucket_mb.value or None)
        self.picture.value = _page(self.drawn, svg(self.drawn))


def svg(drawn: Overlap) -> str:
    """The picture of a step as an SVG element."""
    lanes = min(_MAX_LANES, len(drawn.buckets))
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


def _computing(drawn: Overlap, x: Callable[[float], float]) -> Iterator[str]:
    """Yield the bars of a rank's computation, and of its wait for the exchange; `x` maps seconds to the
    picture."""
    yield f'<text x="{_LEFT - 8}" y="{_TOP + 12}" text-anchor="end">each rank</text>'
    for kind, begin_s, end_s in (
        ("forward", 0.0, drawn.backward_at_s),
        ("backward", drawn.backward_at_s, drawn.computed_at_s),
        ("waiting", drawn.computed_at_s, drawn.arrived_at_s),
        ("optimizer", drawn.arrived_at_s, drawn.step_s),
    ):
        if end_s > begin_s:
            yield _bar(kind, x(begin_s), x(end_s), _TOP)


def _sending(drawn: Overlap, lanes: int, x: Callable[[float], float]) -> Iterator[str]:
    """Yield the bar of each bucket, on its lane, and a dashed line from the time at which the bucket is ready
    to the time at which it is sent."""
    for index, (bucket, (begin_s, end_s)) in enumerate(zip(drawn.buckets, drawn.sent_s, strict=True)):
        top = _TOP + (index % lanes + 1) * _LANE
        if index < lanes:
            on_lane = range(index + 1, len(drawn.buckets) + 1, lanes)
            numbers = ", ".join(map(str, on_lane[:2])) + (" …" if len(on_lane) > 2 else "")
            label = numbers if len(on_lane) > 1 else f"bucket {numbers}"
            yield f'<text x="{_LEFT - 8}" y="{top + 12}" text-anchor="end">{label}</text>'
        if begin_s > bucket.ready_s:
            middle = top + _LANE / 2 - 2
            yield (
                f'<line x1="{x(bucket.ready_s):.1f}" x2="{x(begin_s):.1f}" y1="{middle}" y2="{middle}" '
                f'stroke="{TEXT_COLOR}" stroke-dasharray="2 2"/>'
            )
        yield _bar("transfer", x(begin_s), x(end_s), top)


def _axis(ticks: list[float], height: int, x: Callable[[float], float]) -> Iterator[str]:
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
    meanings = {
        "forward": "forward",
        "backward": "backward",
        "transfer": "a bucket travels",
        "waiting": "waiting for the exchange",
        "optimizer": "optimizer",
    }
    boxes = (
        f'<span style="white-space:nowrap;margin-right:14px"><span style="display:inline-block;width:12px;height:12px;'
        f'background:{KIND_COLORS[kind]}"></span> {text}</span>'
        for kind, text in meanings.items()
    )
    return "".join(boxes) + "<span>dashed: ready, and waiting for the buckets before it</span>"


def _ticks(longest_s: float) -> list[float]:
    """Round times from 0 to the first that is not below the longest, so that the scale stays while a slider
    moves a little."""
    step_s = 10 ** math.floor(math.log10(longest_s))
    step_s *= next(factor for factor in (0.1, 0.2, 0.5, 1) if 10 * factor * step_s >= longest_s)
    return [step_s * index for index in range(math.ceil(longest_s / step_s) + 1)]


def _log_slider(
    description: str, value: float, low: float, high: float, readout: str, tooltip: str
) -> w.FloatLogSlider:
    """Make a logarithmic slider from 10^low to 10^high. A value outside of these bounds is clipped."""
    slider = w.FloatLogSlider(
        value=min(10**high, max(10**low, value)),
        min=low,
        max=high,
        step=_SLIDER_STEP,
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
