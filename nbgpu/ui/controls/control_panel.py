"""The control panel: settings, Start, Pause and Stop, and the live panel below.

The settings come from `ClusterConfig` and the recipe's `TrainConfig`: a field that is marked with
`control(...)` there appears here, as the kind of field that fits its type (`fields.py`).
"""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets as w
from IPython.core.getipython import get_ipython
from IPython.display import display, update_display

from nbgpu.client.cluster import cluster as clusters
from nbgpu.client.ipykernel.page import answer_while_busy, has_frontend, has_subshells
from nbgpu.config import ClusterConfig, TrainConfig, settings_beside, settings_of, train_config
from nbgpu.config.settings import control_fields, steerable, together
from nbgpu.errors import ConfigError, NbgpuError, NoClusterError, RankError
from nbgpu.protocol.records import FINAL_STATES
from nbgpu.ui.cell.ansi import to_html
from nbgpu.ui.controls.advice_view import AdviceView
from nbgpu.ui.controls.devices import DeviceControls
from nbgpu.ui.controls.fields import Field
from nbgpu.ui.controls.layout import GRID, grouped
from nbgpu.ui.run import plan_view
from nbgpu.ui.run.panel import Panel
from nbgpu.ui.run.picture_view import PictureView
from nbgpu.ui.slot import new_slot, slot_metadata

if TYPE_CHECKING:
    from nbgpu.client.cluster.cluster import Cluster
    from nbgpu.client.runs.run import Run

_TRACEBACK_STYLE = (
    "margin:6px 0 0;padding:var(--jp-code-padding, 5px);white-space:pre-wrap;overflow-wrap:anywhere;"
    "background:var(--jp-rendermime-error-background, rgba(255,0,0,.13));color:var(--jp-content-font-color1, inherit);"
    "font:var(--jp-code-font-size, 13px)/var(--jp-code-line-height, 1.3) var(--jp-code-font-family, monospace)"
)
"""The style of tracebacks in JupyterLab's cells."""


def controls(recipe: str = "autoencoder", cluster: Cluster | None = None, preset: str = "") -> None:
    """Display the control panel of a recipe.

    Args:
        recipe: the recipe's name, such as 'autoencoder', or the path of your own.
        cluster: the cluster to use; None for the one that `%nbgpu start` made, or else one that Start makes.
        preset: the name of values to begin with, in place of the defaults.

    Raises:
        ConfigError: there is no such recipe or preset, or the values in the recipe's file are not valid.
    """
    given = {"preset": preset} if preset else {}
    train_config(recipe, **given)
    if has_frontend():
        _Controls(recipe, cluster, preset).display()
    else:
        display({"text/plain": _as_text(recipe, given)}, raw=True)


def _as_text(recipe: str, given: Mapping[str, Any]) -> str:
    """The text of the panel for a notebook that is run without a page."""
    values = settings_beside(recipe, given)
    settings = ", ".join(f"{name}={values[name]!r}" for _, name, _ in control_fields(settings_of(recipe)))
    return f"Controls of {recipe} (open this notebook in JupyterLab to use them): {settings}"


def _tabs(groups: Mapping[str, list[w.Widget]]) -> w.Tab:
    """Tabs that show one group at a time. The page switches between them without the kernel, by a click or
    the arrow keys.

    An Accordion would not do, because neither the keyboard nor a screen reader reaches its headings.
    """
    pages = [w.GridBox(members, layout=GRID) for members in groups.values()]
    return w.Tab(pages, titles=list(groups), selected_index=0)


class _Controls:
    """One control panel. `_lock` guards it, because messages from the page come on other threads while a cell
    is running."""

    def __init__(self, recipe: str, cluster: Cluster | None, preset: str = "") -> None:
        self._recipe = recipe
        self._preset = {"preset": preset} if preset else {}
        self._touched: set[str] = set()
        """The settings that the person has changed. The others have their defaults beside these."""
        self._showing = False
        """Whether values are being shown that nobody has typed."""
        self._cluster = cluster
        self._model = settings_of(recipe)
        self._lock = threading.RLock()
        self._run: Run | None = None
        self._busy = False
        self._search: threading.Event | None = None
        """An event that ends the current search for a batch size."""
        self._slot = new_slot()
        self._devices = DeviceControls()
        self._fields = {name: Field(self._model, name) for _, name, _ in control_fields(self._model)}
        self._show_defaults()
        self._start = self._button("Start", "Start training with these settings", "success", self._on_start)
        self._pause = self._button("Pause", "Pause or resume the run", "", self._on_pause)
        self._stop = self._button("Stop", "End the run after its present step", "danger", self._on_stop)
        self._plan = self._button(
            "Plan", "Say what a run with these settings will do and take", "", self._on_plan
        )
        self._find = self._button(
            "Find batch size", "Try on the ranks which is the largest that fits", "", self._on_find
        )
        self._explain = self._button(
            "Explain", "Say what bounds the run, and what to change first", "", self._on_explain
        )
        self._advice = AdviceView(self._say_error)
        if "batch_size" not in self._fields:
            self._find.layout.display = "none"
        self._said = w.HTML(layout={"max_width": "100%"})
        self._hint = w.HTML(layout={"display": "none"})
        self._cluster_before = self._existing_cluster()
        self._place = w.VBox(layout={"width": "100%"})
        self._groups = grouped(self._model, self._fields)
        self._tabs = _tabs(self._groups)
        self.box = w.VBox(
            [
                self._devices.box,
                self._tabs,
                w.HBox(
                    [*self._buttons(), self._said],
                    layout={"flex_flow": "row wrap", "margin": "10px 0"},
                ),
                self._hint,
                self._advice.box,
                self._place,
            ],
            layout={"width": "100%", "overflow": "hidden"},
        )
        self.box.add_class("nbgpu-controls")
        self._steerable = steerable(self._model)
        for name, field in (self._devices.fields | self._fields).items():
            field.observe(partial(self._on_change, name, field), "value")
        self._devices.gpus.observe(lambda _: self._forget_said(), "value")
        for widget in (*self._buttons(), *self._inputs(), self._tabs):
            answer_while_busy(widget)
        self._refresh()

    def display(self) -> None:
        """Show the controls, and below them the output that keeps the picture of the last run."""
        data = self.box._repr_mimebundle_()
        display({**data, "text/plain": _as_text(self._recipe, self._preset)}, raw=True)
        display({"text/plain": ""}, raw=True, display_id=self._slot, metadata=slot_metadata(self._slot))
        shell = get_ipython()
        assert shell is not None, "there is a page, so there is a shell"
        shell.events.register("post_run_cell", self._on_cell_run)
        if not has_subshells():
            self._hint.value = (
                "Pause and Stop act between cells on this kernel (ipykernel 7.1 lets them act at once)."
            )
            self._hint.layout.display = ""

    def _on_cell_run(self, _: Any) -> None:
        """Clear the message if a cell has started or stopped the cluster, and show the present state."""
        with self._lock:
            cluster = self._existing_cluster()
            if cluster is not self._cluster_before and not self._busy and not self._is_running():
                self._say("")
            self._refresh()

    def _button(self, description: str, tooltip: str, style: str, on_click: Any) -> w.Button:
        button = w.Button(description=description, tooltip=tooltip, button_style=style)
        button.on_click(lambda _: on_click())
        return button

    def _buttons(self) -> list[w.Button]:
        return [self._start, self._pause, self._stop, self._plan, self._find, self._explain]

    def _inputs(self) -> list[w.Widget]:
        return [*self._devices.inputs(), *self._fields.values()]

    def _on_start(self) -> None:
        self._begin(self._train, "starting …" if self._existing_cluster() else "starting the ranks …")

    def _on_plan(self) -> None:
        self._begin(self._plan_run, "looking at model and ranks …")

    def _on_find(self) -> None:
        self._search = threading.Event()
        self._begin(self._find_batch_size, "trying batch sizes on the ranks …")

    def _begin(self, work: Callable[[Cluster, TrainConfig], None], said: str) -> None:
        """Check the settings and do the work with them on a thread, because the kernel must stay free."""
        with self._lock:
            if self._busy or self._is_running():
                return
            # An existing cluster has its devices already.
            of_devices = {} if self._existing_cluster() else self._devices.fields
            values, bad = _read(self._fields)
            typed, bad_devices = _read(of_devices)
            if bad or bad_devices:
                self._refuse(bad_devices | bad)
                return
            devices = self._devices.values(typed)
            try:
                config: TrainConfig
                *_, config = together(
                    *([lambda: ClusterConfig.checked(**devices)] if of_devices else []),
                    lambda: train_config(self._recipe, **self._preset, **self._given(values)),
                )
            except ConfigError as error:
                self._say(str(error), is_error=True)
                return
            self._busy = True
            self._say(said)
            self._refresh()
        threading.Thread(
            target=self._do, args=(work, config, devices), name="nbgpu-controls", daemon=True
        ).start()

    def _refuse(self, bad: Mapping[str, str]) -> None:
        """Say which fields are bad, and bring the first of them to the front."""
        fields = self._devices.fields | self._fields
        lines = [f"{fields[name].label}: {why}" for name, why in bad.items()]
        self._say("\n".join(["Correct this first.", *lines]), is_error=True)
        first = fields[next(iter(bad))]
        for index, boxes in enumerate(self._groups.values()):
            if first in boxes:
                self._tabs.selected_index = index
        first.focus()

    def _do(
        self,
        work: Callable[[Cluster, TrainConfig], None],
        config: TrainConfig,
        devices: dict[str, Any],
    ) -> None:
        try:
            cluster = self._existing_cluster()
            if cluster is None:
                cluster = clusters.Cluster(**devices)
            if not cluster.running:
                cluster.start()
            work(cluster, config)
        except NbgpuError as error:
            self._say_error(error)
        except Exception as error:  # noqa: BLE001 - on a thread nobody would see it
            self._say(f"{type(error).__name__}: {error}", is_error=True)
        finally:
            with self._lock:
                self._busy = False
                self._search = None
                self._refresh()

    def _train(self, cluster: Cluster, config: TrainConfig) -> None:
        self._show(cluster.train_with(config))

    def _plan_run(self, cluster: Cluster, config: TrainConfig) -> None:
        self._say(str(cluster.plan_with(config)), is_table=True)

    def _find_batch_size(self, cluster: Cluster, config: TrainConfig) -> None:
        found = cluster.find_batch_size_with(config, stop=self._search)
        self._fields["batch_size"].show(found.batch_size)
        self._say(str(found), is_table=True)

    def _show(self, run: Run) -> None:
        update_display(
            {"text/plain": ""}, raw=True, display_id=self._slot, metadata=slot_metadata(self._slot)
        )
        plan = w.HTML(plan_view.page(run))

        def follow(_: str) -> None:
            plan.value = plan_view.page(run)
            self._refresh()

        buttons = [str(button.model_id) for button in self._buttons()]
        panel = Panel(
            run,
            self._slot,
            show_buttons=False,
            buttons=buttons,
            on_state=follow,
            on_gone=self._clear_place,
        )
        pictures = w.HTML()
        if run.config.LIVE_PICTURES:
            PictureView(run, lambda newest: setattr(pictures, "value", newest["text/html"]))
        with self._lock:
            self._run = run
            self._advice.clear()
            self._place.children = (plan, panel, pictures)
        self._say("")
        panel.follow()
        run.on_end(self._on_end)

    def _clear_place(self) -> None:
        with self._lock:
            if not self._is_running():
                self._place.children = ()

    def _on_end(self, run: Run) -> None:
        if run.error is not None:
            self._say_error(run.error)
        else:
            self._say("")
        self._refresh()

    def _on_pause(self) -> None:
        run = self._run
        if run is not None:
            self._ask(run.resume if run.status == "paused" else run.pause)

    def _on_change(self, name: str, field: Field, _: Any) -> None:
        """Say at once what is wrong with a changed value, or apply it to a run that goes on, and show the
        defaults that others have beside it."""
        with self._lock:
            if self._showing:
                return
            self._forget_said()
            if name in self._fields:
                self._touched.add(name)
                self._show_defaults()
            try:
                value = field.read()
            except ConfigError:
                return
            run = self._run
            if run is None or not self._is_running() or name not in self._steerable:
                return
            now = getattr(run.config, name)
            if value == now:
                return
            try:
                run.set(**{name: value})
            except NbgpuError as error:
                field.problem = f"{error}. The run goes on with {now}"
            else:
                self._say(f"{field.label} {value} from the next {self._steerable[name]} on")

    def _given(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if name in self._touched}

    def _show_defaults(self) -> None:
        """Show in every field that the person has not changed the default that it has beside the others."""
        values, _ = _read({name: self._fields[name] for name in self._touched})
        present = settings_beside(self._recipe, {**self._preset, **values})
        self._showing = True
        try:
            for name, field in self._fields.items():
                if name not in self._touched:
                    field.show(present[name])
        finally:
            self._showing = False

    def _forget_said(self) -> None:
        """Clear the message, because it was about other settings."""
        with self._lock:
            if not self._busy:
                self._say("")

    def _on_explain(self) -> None:
        run = self._run
        if run is not None:
            self._ask(partial(self._advice.explain, run))

    def _on_stop(self) -> None:
        search = self._search
        if search is not None:
            search.set()
        elif self._run is not None:
            self._ask(self._run.stop)

    def _ask(self, command: Any) -> None:
        self._say("")
        try:
            command()
        except NbgpuError as error:
            self._say_error(error)

    def _existing_cluster(self) -> Cluster | None:
        if self._cluster is not None:
            return self._cluster
        try:
            return clusters.current()
        except NoClusterError:
            return None

    def _is_running(self) -> bool:
        return self._run is not None and self._run.status not in FINAL_STATES

    def _refresh(self) -> None:
        """Put every control into the state that fits the run and the cluster."""
        with self._lock:
            running = self._is_running()
            busy = running or self._busy
            cluster = self._cluster_before = self._existing_cluster()
            for name, field in self._fields.items():
                field.disabled = busy and not (running and name in self._steerable)
            for control in self._devices.inputs():
                control.disabled = busy or cluster is not None
            self._start.disabled = self._plan.disabled = self._find.disabled = busy
            self._pause.disabled = not running
            self._stop.disabled = not running and self._search is None
            self._explain.disabled = self._run is None
            self._advice.refresh()
            paused = self._run is not None and self._run.status == "paused"
            self._pause.description = "Resume" if paused else "Pause"
            note = ""
            if cluster is not None:
                note = f"A cluster is in use: {cluster.describe()}. To choose other devices: %nbgpu stop"
            self._devices.note.value = f'<div style="line-height:1.4">{html.escape(note)}</div>'

    def _say(self, text: str, is_error: bool = False, is_table: bool = False) -> None:
        self._said.value = _said(text, is_error, is_table)

    def _say_error(self, error: NbgpuError) -> None:
        """Show an error, and below it the traceback of the user's code, as in a cell."""
        text = _said(str(error), is_error=True)
        if isinstance(error, RankError) and error.has_tracebacks:
            # The traceback is outside of the alert, because a screen reader would read all of it aloud.
            traceback = to_html("\n".join(error._render_traceback_()))
            text += f'<pre style="{_TRACEBACK_STYLE}">{traceback}</pre>'
        self._said.value = text


def _said(text: str, is_error: bool = False, is_table: bool = False) -> str:
    """The HTML of the message beside the buttons."""
    role = "alert" if is_error else "status"
    color = "var(--jp-error-color1, #d32f2f)" if is_error else "inherit"
    wrapped = "white-space:pre;overflow-x:auto;font-family:monospace" if is_table else "white-space:pre-wrap"
    style = f"{wrapped};line-height:1.4;color:{color}"
    return f'<div role="{role}" style="{style}">{html.escape(text)}</div>'


def _read(fields: Mapping[str, Field]) -> tuple[dict[str, Any], dict[str, str]]:
    """(the values of the valid fields, the problems of the others), each by name."""
    values, bad = {}, {}
    for name, field in fields.items():
        try:
            values[name] = field.read()
        except ConfigError as error:
            bad[name] = str(error)
    return values, bad
