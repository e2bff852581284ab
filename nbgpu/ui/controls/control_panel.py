"""The control panel: settings, Start, Pause and Stop, and the live panel below.

The settings come from `ClusterConfig` and the recipe's `TrainConfig`: a field that is marked with
`control(...)` there appears here, as the kind of field that fits its type (`fields.py`). Those that matter
first stand together at the top, all others in tabs.
"""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Mapping, Sequence
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
from nbgpu.machine import devices
from nbgpu.protocol.records import FINAL_STATES, Device
from nbgpu.ui.cell.ansi import to_html
from nbgpu.ui.controls.advice_view import AdviceView
from nbgpu.ui.controls.copying import CopyButtons, with_numbers
from nbgpu.ui.controls.devices import DeviceControls
from nbgpu.ui.controls.fields import Field
from nbgpu.ui.controls.form import SettingsForm, read, read_drafts
from nbgpu.ui.controls.layout import grid, grouped
from nbgpu.ui.controls.notes import MemoryNote, global_batch
from nbgpu.ui.controls.workload import WorkloadChoice
from nbgpu.ui.run import plan_view
from nbgpu.ui.run.panel import Panel
from nbgpu.ui.run.picture_view import PictureView
from nbgpu.ui.slot import new_slot, slot_metadata

if TYPE_CHECKING:
    from nbgpu.client.cluster.cluster import Cluster
    from nbgpu.client.runs.run import Run

FIRST = ("amp", "batch_size", "cache_rate")
"""The settings that stand at the top, beside the devices."""
_CLUSTER = "Cluster"
"""The title of the tab with the other settings of a cluster."""

_TRACEBACK_STYLE = (
    "margin:6px 0 0;padding:var(--jp-code-padding, 5px);white-space:pre-wrap;overflow-wrap:anywhere;"
    "background:var(--jp-rendermime-error-background, rgba(255,0,0,.13));color:var(--jp-content-font-color1, inherit);"
    "font:var(--jp-code-font-size, 13px)/var(--jp-code-line-height, 1.3) var(--jp-code-font-family, monospace)"
)
"""The style of tracebacks in JupyterLab's cells."""


def controls(recipe: str = "autoencoder", cluster: Cluster | None = None, preset: str = "") -> None:
    """Display the control panel of a recipe.

    Args:
        recipe: the workload.
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


class _Controls:
    """One control panel. `_lock` guards it, because messages from the page come on other threads while a cell
    is running."""

    def __init__(self, recipe: str, cluster: Cluster | None, preset: str = "") -> None:
        self._cluster = cluster
        self._lock = threading.RLock()
        self._run: Run | None = None
        self._busy = False
        self._search: threading.Event | None = None
        """An event that ends the current search for a batch size."""
        self._slot = new_slot()
        self._devices = DeviceControls()
        self._form = self._new_form(recipe, preset)
        self._workload = WorkloadChoice(recipe, preset, self._on_workload)
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
        self._reset = self._button("Reset all", "Give every setting its default again", "", self._on_reset)
        self._copy = CopyButtons()
        self._advice = AdviceView(self._say_error)
        self._said = w.HTML(layout={"max_width": "100%"})
        self._hint = w.HTML(layout={"display": "none"})
        self._cluster_before = self._existing_cluster()
        self._place = w.VBox(layout={"width": "100%"})
        self._first = grid([])
        self._tabs = w.Tab()
        first = w.VBox([self._devices.box, self._first])
        first.add_class("nbgpu-first")
        wrapped = {"flex_flow": "row wrap", "align_items": "center"}
        self.box = w.VBox(
            [
                grid(self._workload.fields),
                first,
                self._tabs,
                w.HBox([self._reset, self._copy], layout=wrapped),
                w.HBox([*self._buttons(), self._said], layout={**wrapped, "margin": "6px 0 10px"}),
                self._hint,
                self._advice.box,
                self._place,
            ],
            layout={"width": "100%", "overflow": "hidden"},
        )
        self.box.add_class("nbgpu-controls")
        for name, field in self._devices.fields.items():
            field.observe(partial(self._on_device, name, field), "value")
            field.observe(lambda _: self._judge(), "draft")
            field.on_reset(partial(self._reset_device, name))
        self._devices.gpus.observe(lambda _: self._on_devices(), "value")
        for widget in (*self._buttons(), self._reset, self._copy, self._tabs, *self._workload.fields):
            answer_while_busy(widget)
        for widget in self._devices.inputs():
            answer_while_busy(widget)
        self._put_fields()
        self._refresh()

    @property
    def _fields(self) -> dict[str, Field]:
        return self._form.fields

    def _new_form(self, recipe: str, preset: str) -> SettingsForm:
        return SettingsForm(recipe, preset, self._on_change, self._judge)

    def _put_fields(self) -> None:
        """Show the fields of the present form."""
        fields, devices = self._form.fields, self._devices.fields
        self._steerable = steerable(self._form.model)
        self._find.layout.display = "" if "batch_size" in fields else "none"
        self._memory = MemoryNote(fields["cache_rate"]) if "cache_rate" in fields else None
        self._first.children = tuple(fields[name] for name in FIRST if name in fields)
        others = {name: field for name, field in fields.items() if name not in FIRST}
        self._groups = grouped(self._form.model, others)
        self._groups[_CLUSTER] = list(devices.values())
        chosen = self._tabs.selected_index
        title = self._tabs.titles[chosen] if chosen is not None and self._tabs.titles else ""
        titles = list(self._groups)
        # An Accordion would not do, because neither the keyboard nor a screen reader reaches its headings.
        self._tabs.children = tuple(grid(members) for members in self._groups.values())
        self._tabs.titles = titles
        self._tabs.selected_index = titles.index(title) if title in titles else 0
        for field in fields.values():
            answer_while_busy(field)

    def display(self) -> None:
        """Show the controls, and below them the output that keeps the picture of the last run."""
        data = self.box._repr_mimebundle_()
        given = {"preset": self._form.preset} if self._form.preset else {}
        display({**data, "text/plain": _as_text(self._form.recipe, given)}, raw=True)
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
            values, bad = self._form.read()
            typed, bad_devices = read(of_devices)
            if bad or bad_devices:
                self._refuse(bad_devices | bad)
                return
            devices = self._devices.values(typed)
            try:
                config: TrainConfig
                *_, config = together(
                    *([lambda: ClusterConfig.checked(**devices)] if of_devices else []),
                    lambda: self._form.config(values),
                )
            except ConfigError as error:
                self._judge()
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

    def _on_change(self, name: str) -> None:
        """Say at once what is wrong with a changed value, and apply it to a run that goes on."""
        with self._lock:
            self._forget_said()
            self._judge()
            run, field = self._run, self._fields[name]
            if run is None or not self._is_running() or name not in self._steerable:
                return
            try:
                value = field.parsed(field.value)
            except ConfigError:
                return
            now = getattr(run.config, name)
            if value == now:
                return
            try:
                run.set(**{name: value})
            except NbgpuError as error:
                self._form.refuse(name, f"{error}. The run goes on with {now}")
            else:
                self._say(f"{field.label} {value} from the next {self._steerable[name]} on")

    def _on_device(self, name: str, field: Field, _: Any) -> None:
        with self._lock:
            # The number of ranks follows the choice of devices.
            field.changed = name != "ranks" and field.value != field.standard
            self._on_devices()

    def _reset_device(self, name: str) -> None:
        field = self._devices.fields[name]
        field.show(field.standard)

    def _on_devices(self) -> None:
        with self._lock:
            self._forget_said()
            self._judge()

    def _on_reset(self) -> None:
        with self._lock:
            self._form.reset_all()
            for name, field in self._devices.fields.items():
                if field.changed and not field.disabled:
                    self._reset_device(name)
            self._judge()

    def _on_workload(self, recipe: str, preset: str) -> None:
        """Show another recipe's settings, or another preset's, with what both have and the person changed.

        Raises:
            ConfigError: the recipe's file cannot be used; the form stays as it is.
        """
        with self._lock:
            earlier = self._form
            form = self._new_form(recipe, preset)
            self._form = form
            form.take_over(earlier)
            self._put_fields()
            self._say("")
            self._refresh()
            earlier.close()

    # ---- what follows from the settings ----

    def _judge(self) -> None:
        """Mark what is wrong with what is typed so far, and say what follows from it."""
        with self._lock:
            cluster, chosen = self._present_cluster()
            config = self._form.judge(chosen)
            batch = self._fields.get("batch_size")
            if batch is not None:
                batch.note = global_batch(config, len(chosen)) if config is not None else ""
            if self._memory is not None:
                if config is None:
                    self._memory.clear()
                else:
                    self._memory.say(config, len(chosen))
            num = len(self._form.changed) + sum(field.changed for field in self._devices.fields.values())
            self._reset.description = f"Reset all ({num} changed)" if num else "Reset all"
            self._reset.disabled = not num
            if self._form.unplaced and not self._busy and not self._is_running():
                self._say("\n".join(self._form.unplaced), is_error=True)
            if config is None or cluster is None:
                self._copy.refuse("Correct what is marked first")
                return
            try:
                self._copy.offer(self._form, cluster, self._existing_cluster() is not None)
            except ConfigError as error:
                self._copy.refuse(str(error))

    def _present_cluster(self) -> tuple[ClusterConfig | None, Sequence[Device]]:
        """(the settings of the cluster of a run, or None where they are not valid; the devices of its
        ranks)."""
        existing = self._existing_cluster()
        if existing is not None:
            return existing.config, existing.devices
        fields = self._devices.fields
        typed, bad = read_drafts(fields)
        config = None
        try:
            config = ClusterConfig.checked(**self._devices.values(typed))
            chosen = devices.choose(config.gpus, config.ranks)
            devices.require_simulable(config, chosen)
            devices.least_rank_memory_bytes(config, chosen)
        except ConfigError as error:
            for line in str(error).splitlines():
                named = next((name for name in fields if line.startswith((f"{name}=", f"{name} ="))), None)
                if named is not None:
                    bad.setdefault(named, line)
        for name, field in fields.items():
            field.problem = bad.get(name, "")
        if bad or config is None:
            return None, devices.choose("none", typed.get("ranks"))
        return with_numbers(config, devices.inventory()), chosen

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
            for field in self._workload.fields:
                field.disabled = busy
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
            self._judge()
            if busy:
                self._reset.disabled = True

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
