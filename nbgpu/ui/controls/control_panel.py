"""The control panel: settings, buttons such as Start, Pause and Stop, and the live panel below.

The settings come from `ClusterConfig` and the recipe's `TrainConfig`. A setting that is marked there with
`control(...)` has a field here, of the kind that fits its type (`fields.py`). The most important ones stand
together at the top, all others in tabs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import ipywidgets as w
from IPython.core.getipython import get_ipython
from IPython.display import display, update_display

from nbgpu.client.cluster import cluster as clusters
from nbgpu.client.ipykernel.page import answer_while_busy, has_frontend, has_subshells
from nbgpu.config import TrainConfig, settings_beside, settings_of, train_config
from nbgpu.config.settings import control_fields
from nbgpu.errors import ConfigError, NbgpuError, RankError
from nbgpu.protocol.records import FINAL_STATES
from nbgpu.ui.cell.ansi import to_html
from nbgpu.ui.controls import still
from nbgpu.ui.controls.advice_view import AdviceView
from nbgpu.ui.controls.export_view import ExportView
from nbgpu.ui.controls.layout import WRAPPED, message_html, problems_text
from nbgpu.ui.controls.settings_area import SettingsArea
from nbgpu.ui.run import plan_view
from nbgpu.ui.run.panel import Panel
from nbgpu.ui.run.picture_view import follow_pictures
from nbgpu.ui.slot import clear_head, display_with_page, new_slot, open_head, slot_metadata

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
        display({"text/html": still.page(recipe, given), "text/plain": _as_text(recipe, given)}, raw=True)


def _as_text(recipe: str, given: Mapping[str, Any]) -> str:
    """The panel as plain text, for a notebook that is executed without a page."""
    values = settings_beside(recipe, given)
    settings = ", ".join(f"{name}={values[name]!r}" for _, name, _ in control_fields(settings_of(recipe)))
    return f"Controls of {recipe} (open this notebook in JupyterLab to use them): {settings}. {still.in_code(recipe, given)}"


class _Controls:
    """One control panel. `_lock` guards it, because messages from the page come on other threads while a cell
    is running."""

    def __init__(self, recipe: str, cluster: Cluster | None, preset: str = "") -> None:
        """Make the panel's widgets; `display` shows them."""
        self._cluster = cluster
        self._lock = threading.RLock()
        self._run: Run | None = None
        self._busy = False
        self._cancel: threading.Event | None = None
        """An event that ends the current wait for hosts, or the current search for a batch size."""
        # A reading of the devices, on another thread, must not refresh the panel before it is complete.
        with self._lock:
            self._slot = new_slot()
            self._settings = SettingsArea(
                recipe,
                preset,
                self._lock,
                self._existing_cluster,
                on_change=self._on_change,
                on_other_settings=self._on_other_settings,
            )
            self._devices = self._settings.devices
            self._advice = AdviceView(self._say_error)
            self._exporting = ExportView()
            # In the order in which the page shows them.
            self._start = self._button("Start", "Start training with these settings", self._on_start)
            self._start.button_style = "success"
            self._pause = self._run_button("Pause", "Pause or resume the run", self._pause_or_resume)
            self._stop = self._button("Stop", "End the run after its current step", self._on_stop)
            self._stop.button_style = "danger"
            about = "Work out the result of the newest checkpoint of a stopped run"
            self._result = self._run_button("Work out result", about, self._work_out_result)
            about = "Say what a run with these settings will do and take"
            self._plan = self._button("Plan", about, self._on_plan)
            about = "Try on the ranks which is the largest that fits"
            self._find = self._button("Find batch size", about, self._on_find)
            about = "Say what bounds the run, and what to change first"
            self._explain = self._run_button("Explain", about, self._show_explanation)
            about = "Write the files with which this run trains elsewhere"
            self._export = self._run_button("Export", about, self._exporting.open)
            self._buttons = [
                *(self._start, self._pause, self._stop, self._result),
                *(self._plan, self._find, self._explain, self._export),
            ]
            self._message = w.HTML(layout={"max_width": "100%"})
            self._hint = w.HTML(layout={"display": "none"})
            self._last_cluster = self._existing_cluster()
            """The cluster at the last refresh."""
            self._run_views = w.VBox(layout={"width": "100%"})
            self.box = w.VBox(
                [
                    self._settings.box,
                    w.HBox([*self._buttons, self._message], layout={**WRAPPED, "margin": "6px 0 10px"}),
                    self._hint,
                    self._exporting.box,
                    self._advice.box,
                    self._run_views,
                ],
                layout={"width": "100%", "overflow": "hidden"},
            )
            self.box.add_class("nbgpu-controls")
            self._refresh()

    def display(self) -> None:
        """Show the controls, and below them the output that keeps the picture of the last run."""
        recipe = self._settings.form.recipe
        given = {"preset": self._settings.form.preset} if self._settings.form.preset else {}
        display_with_page(self.box, still.page(recipe, given), _as_text(recipe, given))
        open_head(self._slot)
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
            if self._existing_cluster() is not self._last_cluster and not self._is_running():
                self._clear_message()
            self._refresh()

    def _button(self, description: str, tooltip: str, on_click: Callable[[], None]) -> w.Button:
        button = w.Button(description=description, tooltip=tooltip)
        button.on_click(lambda _: on_click())
        answer_while_busy(button)
        return button

    def _run_button(self, description: str, tooltip: str, act: Callable[[Run], None]) -> w.Button:
        """Make a button that acts on the newest run, and does nothing before there is one."""

        def on_click() -> None:
            if (run := self._run) is not None:
                act(run)

        return self._button(description, tooltip, on_click)

    def _on_start(self) -> None:
        self._begin(self._train, "starting …" if self._existing_cluster() else "starting the ranks …")

    def _on_plan(self) -> None:
        self._begin(self._plan_run, "looking at model and ranks …")

    def _on_find(self) -> None:
        self._begin(self._find_batch_size, "trying batch sizes on the ranks …", can_cancel=True)

    def _begin(
        self, work: Callable[[Cluster, TrainConfig], None], message: str, can_cancel: bool = False
    ) -> None:
        """Check the settings and do some work with them on a thread, because the kernel must stay free.

        Args:
            work: called with a running cluster and the settings of the run.
            message: what the person reads meanwhile.
            can_cancel: whether the button *Stop* ends the work. The button always ends a wait for other
                hosts.
        """
        with self._lock:
            if self._busy or self._is_running():
                return
            if invalid := self._settings.invalid():
                self._show_invalid(invalid)
                return
            try:
                devices, config = self._settings.checked()
            except ConfigError as error:
                self._settings.judge()
                self._say(str(error), is_error=True)
                return
            existing = self._existing_cluster()
            is_started = existing is not None and existing.running
            waits_for_hosts = not is_started and not self._settings.is_local
            self._cancel = threading.Event() if can_cancel or waits_for_hosts else None
            self._busy = True
            self._say(message)
            self._refresh()
        threading.Thread(
            target=self._do, args=(work, config, devices, can_cancel), name="nbgpu-controls", daemon=True
        ).start()

    def _show_invalid(self, problems: Mapping[str, str]) -> None:
        """Name the fields that have problems, and bring the first of them to the front."""
        fields = self._settings.every_field
        self._say(problems_text(fields, problems), is_error=True)
        self._settings.go_to(fields[next(iter(problems))])

    def _do(
        self,
        work: Callable[[Cluster, TrainConfig], None],
        config: TrainConfig,
        devices: dict[str, Any],
        can_cancel: bool,
    ) -> None:
        """Do the work of `_begin`, on its thread: start the cluster if none runs, and then call `work`.
        Errors are shown, because nobody would see them on a thread."""
        try:
            cluster = self._existing_cluster() or clusters.Cluster(**devices)
            if not cluster.running:
                cluster.start(tell=self._say, stop=self._cancel)
            # From here on the button Stop acts on the run, and no longer on the wait for hosts.
            if not can_cancel:
                with self._lock:
                    was_stopped = self._cancel is not None and self._cancel.is_set()
                    self._cancel = None
                if was_stopped:
                    self._say("stopped; the cluster has started")
                    return
            work(cluster, config)
        except NbgpuError as error:
            self._say_error(error)
        except Exception as error:  # noqa: BLE001 - on a thread nobody would see it
            self._say(f"{type(error).__name__}: {error}", is_error=True)
        finally:
            with self._lock:
                self._busy = False
                self._cancel = None
                self._refresh()

    def _train(self, cluster: Cluster, config: TrainConfig) -> None:
        self._show(cluster.parts.runs.train_with(config))

    def _plan_run(self, cluster: Cluster, config: TrainConfig) -> None:
        self._say_page(cluster.parts.runs.plan_with(config)._repr_html_())

    def _find_batch_size(self, cluster: Cluster, config: TrainConfig) -> None:
        result = cluster.parts.runs.find_batch_size_with(config, stop=self._cancel)
        self._settings.fields["batch_size"].show(result.batch_size)
        self._say_page(result._repr_html_())

    def _show(self, run: Run) -> None:
        """Show a run below the settings, in place of the last one: its plan, its live panel and its
        pictures."""
        clear_head(self._slot)
        update_display(
            {"text/plain": ""}, raw=True, display_id=self._slot, metadata=slot_metadata(self._slot)
        )
        plan = w.HTML(plan_view.page(run))

        def on_state(_: str) -> None:
            plan.value = plan_view.page(run)
            self._refresh()

        buttons = [str(button.model_id) for button in self._buttons]
        panel = Panel(
            run, self._slot, show_buttons=False, buttons=buttons, on_state=on_state, on_gone=self._clear_run
        )
        pictures = w.HTML()
        if run.config.LIVE_PICTURES:
            follow_pictures(run, lambda newest: setattr(pictures, "value", newest["text/html"]))
        with self._lock:
            self._run = run
            self._advice.clear()
            self._run_views.children = (plan, panel, pictures)
        self._say("")
        panel.follow()
        run.on_end(self._on_end)

    def _clear_run(self) -> None:
        with self._lock:
            if not self._is_running():
                self._run_views.children = ()

    def _on_end(self, run: Run) -> None:
        if run.error is not None:
            self._say_error(run.error)
        else:
            self._say("")
        self._refresh()

    def _pause_or_resume(self, run: Run) -> None:
        self._act(run.resume if run.status == "paused" else run.pause)

    def _show_explanation(self, run: Run) -> None:
        self._act(partial(self._advice.explain, run))

    def _work_out_result(self, run: Run) -> None:
        self._act(lambda: self._show(run.work_out_result()))
        self._refresh()

    def _on_change(self, name: str) -> None:
        """Apply a changed value to a run that goes on. Call with `_lock` held."""
        self._clear_message()
        run, form = self._run, self._settings.form
        steerable = self._settings.steerable
        if run is None or not self._is_running() or name not in steerable:
            return
        field = form.fields[name]
        try:
            value = field.parsed(field.value)
        except ConfigError:  # `judge`, which is called next, shows the problem beside the field
            return
        present = getattr(run.config, name)
        if value == present:
            return
        try:
            run.set(**{name: value})
        except NbgpuError as error:
            form.mark_refused(name, f"{error}. The run goes on with {present}")
        else:
            self._say(f"{field.label} {value} from the next {steerable[name]} on")

    def _on_other_settings(self) -> None:
        self._clear_message()
        self._refresh()

    def _clear_message(self) -> None:
        """Clear the message, which is about an earlier state, unless it is about work that goes on."""
        with self._lock:
            if not self._busy:
                self._say("")

    def _on_stop(self) -> None:
        cancel = self._cancel
        if cancel is not None:
            cancel.set()
        elif self._run is not None:
            self._act(self._run.stop)

    def _act(self, command: Callable[[], object]) -> None:
        """Carry out a command on the run, and show its error, if there is one."""
        self._say("")
        try:
            command()
        except NbgpuError as error:
            self._say_error(error)

    def _existing_cluster(self) -> Cluster | None:
        """Return the cluster that a run would use: the one that `controls` was given, or the notebook's; None
        if Start has to make one."""
        return self._cluster or clusters.current_or_none()

    def _is_running(self) -> bool:
        return self._run is not None and self._run.status not in FINAL_STATES

    def _refresh(self) -> None:
        """Enable, disable and label every control by the state of the run and the cluster."""
        with self._lock:
            running = self._is_running()
            busy = running or self._busy
            cluster = self._last_cluster = self._existing_cluster()
            self._settings.enable(busy, running, has_cluster=cluster is not None)
            self._start.disabled = self._plan.disabled = self._find.disabled = busy
            self._pause.disabled = not running
            self._stop.disabled = not running and self._cancel is None
            self._explain.disabled = self._export.disabled = self._run is None
            lacks_result = self._run is not None and self._run.can_work_out_result
            self._result.layout.display = "" if lacks_result else "none"
            self._result.disabled = busy
            self._advice.refresh(ranks_are_free=not running)
            paused = self._run is not None and self._run.status == "paused"
            self._pause.description = "Resume" if paused else "Pause"
            note = ""
            if cluster is not None:
                note = f"A cluster is in use: {cluster.describe()}. To choose other devices: %nbgpu stop"
            is_elsewhere = cluster is not None and not cluster.config.is_local
            self._devices.show_cluster(note, is_elsewhere)
            self._find.layout.display = "" if "batch_size" in self._settings.fields else "none"
            self._settings.judge()

    def _say(self, text: str, is_error: bool = False) -> None:
        self._message.value = message_html(text, is_error)

    def _say_page(self, page: str) -> None:
        """Show HTML in place of the message, such as a plan."""
        self._message.value = f'<div role="status" style="line-height:1.4;overflow-x:auto">{page}</div>'

    def _say_error(self, error: NbgpuError) -> None:
        """Show an error, and below it the traceback of the user's code, as in a cell."""
        text = message_html(str(error), is_error=True)
        if isinstance(error, RankError) and error.has_tracebacks:
            # The traceback is outside of the alert, because a screen reader would read all of it aloud.
            traceback = to_html("\n".join(error._render_traceback_()))
            text += f'<pre style="{_TRACEBACK_STYLE}">{traceback}</pre>'
        self._message.value = text
