"""The explanation of a run's speed, a button for each advice that can be tried, and the study that tries
it."""

from __future__ import annotations

import html
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import ipywidgets as w

from nbgpu.client.ipykernel.page import answer_while_busy
from nbgpu.client.scaling.trial import try_advice
from nbgpu.errors import NbgpuError
from nbgpu.performance.bottlenecks import Advice
from nbgpu.ui.followed import follow
from nbgpu.ui.study import view

if TYPE_CHECKING:
    from nbgpu.client.runs.run import Run
    from nbgpu.client.scaling.study import Study

_PERIOD_S = 1.0
_READABLE = "line-height:1.4;white-space:normal;overflow-x:auto"


class AdviceView:
    """The part of the control panel, below the buttons, that explains what bounds a run's speed.

    Args:
        say_error: shows an error to the person.
    """

    def __init__(self, say_error: Callable[[NbgpuError], None]) -> None:
        """Make the part without sentences; `explain` fills it."""
        self._say_error = say_error
        self._try_buttons: list[w.Button] = []
        self._study: Study | None = None
        self._run: Run | None = None
        self._ranks_are_free = True
        self._study_view = w.HTML(layout={"width": "100%", "min_width": "0"})
        self._end = w.Button(description="End trial", tooltip="End this trial after its current step")
        self._end.on_click(lambda _: self._stop())
        self._end.layout.display = "none"
        self._sentences = w.VBox()
        self.box = w.VBox([self._sentences, self._end, self._study_view], layout={"width": "100%"})
        answer_while_busy(self._end)

    def explain(self, run: Run) -> None:
        """Show what bounds the run.

        Raises:
            RunError: too few steps were recorded.
        """
        explanation = run.explain()
        self._run = run
        self._try_buttons = []
        rows: list[w.Widget] = [_text(sentence) for sentence in explanation.sentences]
        for number, advice in enumerate(explanation.advice, start=1):
            rows.append(self._advice(number, advice))
        if not explanation.advice:
            rows.append(_text("There is nothing to advise."))
        self._sentences.children = tuple(rows)
        self._study_view.value = ""
        self._refresh()

    def clear(self) -> None:
        """Show nothing, because the explanation is about an earlier run, unless its study goes on."""
        if self._study is None or self._study.over:
            self._sentences.children = ()
            self._study_view.value = ""
            self._run, self._try_buttons = None, []

    def refresh(self, ranks_are_free: bool) -> None:
        """Enable the buttons only while no run goes on: a run and a study would slow each other.

        Args:
            ranks_are_free: whether no run goes on.
        """
        self._ranks_are_free = ranks_are_free
        self._refresh()

    def _refresh(self) -> None:
        for button in self._try_buttons:
            button.disabled = not self._can_try

    @property
    def _can_try(self) -> bool:
        return self._ranks_are_free and (self._study is None or self._study.over)

    def _advice(self, number: int, advice: Advice) -> w.Widget:
        """Return the row of one advice: its sentence, and a button that tries the advice if it is about a
        setting."""
        if not advice.settings:
            return _text(advice.text)
        button = w.Button(
            description="Try",
            tooltip="Measure what it brings, once the run is over",
            layout={"width": "70px", "flex": "0 0 auto"},
        )
        button.on_click(lambda _: self._try(number))
        answer_while_busy(button)
        self._try_buttons.append(button)
        return w.HBox([button, _text(advice.text)], layout={"align_items": "center"})

    def _try(self, number: int) -> None:
        """Start the study that tries an advice, and show it on a thread until the study ends."""
        run = self._run
        if run is None or not self._can_try:
            return
        try:
            study = self._study = try_advice(run, number, studies_dir=str(run.folder.parent))
        except NbgpuError as error:
            self._say_error(error)
            return
        self._end.layout.display = ""
        self._refresh()
        follow(study, lambda: _PERIOD_S, partial(self._show, study))

    def _show(self, study: Study, last: bool) -> None:
        page = view.page(study, view.svg(study))
        # Without `contain` a wide table would widen the whole panel, beyond the page.
        self._study_view.value = f'<div style="{_READABLE};contain:inline-size">{page}</div>'
        if last:
            self._end.layout.display = "none"
            # `_can_try` is still false: the study counts as over only when all its callbacks have returned.
            for button in self._try_buttons:
                button.disabled = not self._ranks_are_free

    def _stop(self) -> None:
        if self._study is not None:
            self._study.stop()


def _text(sentence: str) -> w.HTML:
    return w.HTML(f'<div style="{_READABLE}">{html.escape(sentence)}</div>')
