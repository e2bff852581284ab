"""The part of the control panel that writes the files with which a run trains elsewhere."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import ipywidgets as w

from nbgpu.client.ipykernel.page import answer_while_busy
from nbgpu.errors import NbgpuError
from nbgpu.exports.settings import FORMATS, USED, ExportConfig, Format
from nbgpu.ui.controls.fields import Choice, Field
from nbgpu.ui.controls.form import read
from nbgpu.ui.controls.layout import WRAPPED, grid, message_html, problems_text

if TYPE_CHECKING:
    from nbgpu.client.runs.run import Run

_LABELS = {
    "slurm": "Slurm",
    "job": "Kubernetes: Job",
    "jobset": "Kubernetes: JobSet",
    "trainjob": "Kubernetes: TrainJob",
}
"""The formats that have another name in the page than in code."""


class ExportView:
    """The fields of an export, a button that writes the files, and a message about the result. Only the
    fields that the chosen format uses are shown."""

    def __init__(self) -> None:
        """Make the form, which is hidden until `open`."""
        self._run: Run | None = None
        self._format = Choice("For", {str(name): _LABELS.get(name, name) for name in FORMATS}, FORMATS[0])
        self._format.meaning = "the program that starts the training there"
        self._fields = {name: Field(ExportConfig, name) for name in ExportConfig.model_fields}
        self._field_box = w.VBox()
        self._write = w.Button(
            description="Write files", tooltip="Write them into a new folder", button_style="primary"
        )
        self._close = w.Button(description="Close", tooltip="Hide this form")
        self._message = w.HTML(layout={"max_width": "100%"})
        self.box = w.VBox(
            [
                self._format,
                self._field_box,
                w.HBox([self._write, self._close], layout={**WRAPPED, "margin": "6px 0"}),
                self._message,
            ],
            layout={"width": "100%", "display": "none"},
        )
        self._format.observe(lambda _: self._show_fields(), "value")
        for name, field in self._fields.items():
            field.observe(partial(self._on_value, name), "value")
            field.on_reset(field.show_standard)
        self._write.on_click(lambda _: self._export())
        self._close.on_click(lambda _: self.close())
        # The fields too: while a cell is running, the press of a button would otherwise arrive before the
        # text that was typed before it.
        for widget in (self._format, *self._fields.values(), self._write, self._close):
            answer_while_busy(widget)
        self._show_fields()

    def open(self, run: Run) -> None:
        """Show the form for a run; hide the form if it shows that run already."""
        if self._run is run and self.box.layout.display != "none":
            self.close()
            return
        self._run = run
        self._message.value = ""
        self.box.layout.display = ""

    def close(self) -> None:
        """Hide the form; what was typed stays."""
        self.box.layout.display = "none"

    def _shown(self) -> dict[str, Field]:
        used = USED[cast(Format, self._format.value)]
        return {name: field for name, field in self._fields.items() if name in used}

    def _show_fields(self) -> None:
        self._field_box.children = (grid(self._shown().values()),)
        self._message.value = ""

    def _on_value(self, name: str, _: Any) -> None:
        """Mark a field whose value is not the default, and show its problem if the value is not valid."""
        field = self._fields[name]
        field.changed = field.value != field.standard
        read({name: field})
        self._message.value = ""

    def _export(self) -> None:
        """Write the files with the values that the person has changed, and show their path; show the problems
        instead if a field is not valid."""
        if self._run is None:
            return
        shown = self._shown()
        values, problems = read(shown)
        if problems:
            self._message.value = message_html(problems_text(shown, problems), is_error=True)
            shown[next(iter(problems))].focus()
            return
        given = {name: value for name, value in values.items() if shown[name].changed}
        try:
            export = self._run.export(self._format.value, **given)
        except NbgpuError as error:
            self._message.value = message_html(str(error), is_error=True)
        else:
            self._message.value = message_html(str(export))
