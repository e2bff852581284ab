"""The part of the control panel with the settings: recipe and preset, the settings that matter first, the
others in tabs, and what can be done with all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ipywidgets as w

from nbgpu.client.ipykernel.page import answer_while_busy
from nbgpu.client.launchers.launcher import launcher_of
from nbgpu.config import ClusterConfig, TrainConfig
from nbgpu.config.conditions import default_of
from nbgpu.config.settings import steerable, together
from nbgpu.errors import ConfigError
from nbgpu.host import free_gpus
from nbgpu.machine import devices
from nbgpu.planning.decoded_data import DecodedData
from nbgpu.protocol.records import Device
from nbgpu.run_folder import folder as runs
from nbgpu.ui.controls.copying import CopyButtons, with_numbers
from nbgpu.ui.controls.devices import DeviceControls
from nbgpu.ui.controls.fields import Field
from nbgpu.ui.controls.form import SettingsForm, read, read_drafts
from nbgpu.ui.controls.hosts import stand_ins
from nbgpu.ui.controls.layout import WRAPPED, grid, grouped, said
from nbgpu.ui.controls.notes import MemoryNote, global_batch, length_notes
from nbgpu.ui.controls.workload import WorkloadChoice

if TYPE_CHECKING:
    from nbgpu.client.cluster.cluster import Cluster

FIRST = ("amp", "batch_size", "cache_rate")
"""The settings that stand at the top, beside the devices."""
_CLUSTER, _HOSTS = "Cluster", "Hosts"
"""The titles of the tabs with the other settings of a cluster."""


class SettingsArea:
    """The settings of a run and of its cluster.

    Args:
        recipe, preset: the workload, and the name of values to begin with ('' for none).
        lock: guards the whole panel.
        existing_cluster: returns the cluster that a run would use, or None where Start makes one.
        on_change: called with the name of a setting of the run that the person has changed.
        on_other_settings: called after another recipe or preset, or other devices, were chosen.
    """

    def __init__(
        self,
        recipe: str,
        preset: str,
        lock: threading.RLock,
        existing_cluster: Callable[[], Cluster | None],
        on_change: Callable[[str], None],
        on_other_settings: Callable[[], None],
    ) -> None:
        """Make the widgets of all settings, and show the fields of the recipe."""
        self._lock = lock
        self._existing_cluster = existing_cluster
        self._on_change = on_change
        self._on_other_settings = on_other_settings
        self._is_busy = False
        self._wrong_devices: list[str] = []
        self._devices_of: dict[tuple[str, int | None], Sequence[Device]] = {}
        self.devices = DeviceControls()
        self.form = self._new_form(recipe, preset)
        self._workload = WorkloadChoice(recipe, preset, self._choose_workload)
        self._reset = w.Button(description="Reset all", tooltip="Give every setting its default again")
        self._reset.on_click(lambda _: self._reset_all())
        self._copy = CopyButtons()
        self._last = w.Button(description="As the last run")
        self._last.on_click(lambda _: self._take_last())
        self._wrong = w.HTML(layout={"display": "none"})
        """A message about settings that have no field."""
        self._first = grid([], fills=True)
        self.tabs = w.Tab()
        first = w.VBox([self.devices.box, self._first])
        first.add_class("nbgpu-first")
        self.box = w.VBox(
            [
                grid(self._workload.fields),
                first,
                self.tabs,
                self._wrong,
                w.HBox([self._reset, self._last, self._copy], layout=WRAPPED),
            ]
        )
        for field in self.devices.fields.values():
            field.observe(partial(self._take_device, field), "value")
            field.observe(lambda _: self.judge(), "draft")
            field.on_reset(partial(self._reset_device, field))
        self.devices.gpus.observe(lambda _: self._on_other_settings(), "value")
        for widget in (
            self._reset,
            self._last,
            self._copy,
            self.tabs,
            *self._workload.fields,
            *self.devices.inputs(),
        ):
            answer_while_busy(widget)
        self._put_fields()

    def _new_form(self, recipe: str, preset: str) -> SettingsForm:
        return SettingsForm(recipe, preset, self._lock, self._take_setting, self.judge)

    def _put_fields(self) -> None:
        """Show the fields of the present form."""
        fields = self.form.fields
        self.steerable = steerable(self.form.model)
        self._memory = MemoryNote(fields["cache_rate"], self._say_length) if "cache_rate" in fields else None
        self._first.children = tuple(fields[name] for name in FIRST if name in fields)
        others = {name: field for name, field in fields.items() if name not in FIRST}
        self._groups = {
            **grouped(self.form.model, others),
            _CLUSTER: list(self.devices.of_devices.values()),
            _HOSTS: list(self.devices.of_hosts.values()),
        }
        chosen = self.tabs.selected_index
        title = self.tabs.get_title(chosen) if chosen is not None else ""
        titles = list(self._groups)
        # The page switches between tabs without the kernel, by a click or the arrow keys. An Accordion would
        # not do, because neither the keyboard nor a screen reader reaches its headings.
        self.tabs.children = tuple(grid(members) for members in self._groups.values())
        with self.tabs.hold_sync():
            for index, each in enumerate(titles):
                self.tabs.set_title(index, each)
        self.tabs.selected_index = titles.index(title) if title in titles else 0
        for field in fields.values():
            answer_while_busy(field)

    # ---- what the panel asks ----

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of the run's settings, by name."""
        return self.form.fields

    @property
    def every_field(self) -> dict[str, Field]:
        """All fields, those of the cluster first."""
        return self.devices.fields | self.form.fields

    def bad(self) -> dict[str, str]:
        """By name, why fields have no valid value. Those of the cluster are checked only if there is no
        cluster yet."""
        of_devices = {} if self._existing_cluster() else self.devices.counting
        return read(of_devices)[1] | self.form.read()[1]

    def checked(self) -> tuple[dict[str, Any], TrainConfig]:
        """Return the settings of a new cluster, and those of the run. Call this when `bad` is empty.

        Raises:
            ConfigError: values do not go together, with a line for each.
        """
        # An existing cluster has its devices already.
        typed, _ = read({} if self._existing_cluster() else self.devices.counting)
        of_cluster = self.devices.values(typed)
        values, _ = self.form.read()
        config: TrainConfig
        *_, config = together(
            *([] if self._existing_cluster() else [lambda: ClusterConfig.checked(**of_cluster)]),
            lambda: self.form.config(values),
        )
        return of_cluster, config

    @property
    def is_local(self) -> bool:
        """Whether a run has its ranks on this host: those of the present cluster, or of a new one."""
        existing = self._existing_cluster()
        return self.devices.hosts.is_local if existing is None else existing.config.is_local

    def go_to(self, field: Field) -> None:
        """Bring a field to the front, and move the keyboard there."""
        for index, members in enumerate(self._groups.values()):
            if field in members:
                self.tabs.selected_index = index
        field.focus()

    def enable(self, is_busy: bool, is_running: bool, has_cluster: bool) -> None:
        """Enable the controls that may be changed now: during a run those that steer it, while anything else
        is going on none, and the devices only while there is no cluster."""
        for name, field in self.form.fields.items():
            is_steered = is_running and name in self.steerable
            field.disabled = name in self.form.fixed or (is_busy and not is_steered)
        for field in self._workload.fields:
            field.disabled = is_busy
        for control in self.devices.inputs():
            control.disabled = is_busy or has_cluster
        self._is_busy = is_busy

    # ---- what the person does ----

    def _take_setting(self, name: str) -> None:
        with self._lock:
            self._on_change(name)
            if name in ("resume", "run_name"):  # which run is resumed decides what may be changed
                self._on_other_settings()
            self.judge()

    def _take_device(self, field: Field, _: Any) -> None:
        field.changed = field.value != field.standard
        self._on_other_settings()

    def _reset_device(self, field: Field) -> None:
        field.show(field.standard)

    def _reset_all(self) -> None:
        """Give the settings of the run and those of the cluster their defaults again."""
        with self._lock:
            self.form.reset_all()
            for field in self.devices.fields.values():
                if field.changed and not field.disabled:
                    self._reset_device(field)
            self.judge()

    def _take_last(self) -> None:
        """Show the settings of the newest run of this recipe in the fields, such as one of a kernel that has
        ended. The new run starts from scratch, also if that run was resumed."""
        with self._lock:
            last = self._last_settings()
            if last is None:
                return
            _, config = last
            # The form's defaults are not the recipe's where a preset is chosen, or where the ranks have GPUs.
            self.form.take(self.form.beyond_defaults(config))
            self._on_other_settings()

    def _last_settings(self) -> tuple[Path, TrainConfig] | None:
        runs_dir = Path(str(default_of(self.form.model, "runs_dir")))
        return runs.last_settings(runs_dir, self.form.recipe_of_runs)

    def _offer_last(self) -> None:
        """Offer the settings of the newest run while nothing is changed."""
        last = None if self.form.changed else self._last_settings()
        self._last.layout.display = "none" if last is None else ""
        self._last.disabled = self._is_busy
        if last is not None:
            self._last.tooltip = f"Take the settings of {last[0].name}"

    def _choose_workload(self, recipe: str, preset: str) -> None:
        """Show another recipe's settings, or another preset's, with what both have and the person changed.

        Raises:
            ConfigError: the recipe's file cannot be used; the form stays as it is.
        """
        with self._lock:
            earlier = self.form
            form = self._new_form(recipe, preset)
            form.take_over(earlier)
            self.form = form
            self._put_fields()
            self._on_other_settings()
            earlier.close()

    # ---- what follows from the settings ----

    def judge(self) -> None:
        """Check what is typed so far, show each problem beside its field, and update the notes, the buttons
        and the texts to copy."""
        with self._lock:
            cluster, chosen = self._present_cluster()
            self.form.suit(has_gpus=any(device.kind == "cuda" for device in chosen))
            config = self.form.judge(chosen)
            is_local = self.is_local
            if (batch := self.fields.get("batch_size")) is not None:
                has_ranks = self._existing_cluster() is not None
                is_known = (
                    is_local or has_ranks or (cluster is not None and cluster.gpus_per_node is not None)
                )
                batch.note = global_batch(config, len(chosen)) if config is not None and is_known else ""
            if config is not None:
                self._say_length(config, None, len(chosen))
            else:
                self._show_length_notes("", "")
            if self._memory is not None:
                # Nothing is known of other hosts' memory.
                if not is_local:
                    self._memory.clear()
                elif config is not None:
                    self._memory.say(config, len(chosen), _limit_bytes(cluster, chosen))
                elif self._memory.is_about({name for name, field in self.fields.items() if field.problem}):
                    self._memory.clear()
            self._say_wrong()
            num = sum(field.changed for field in self.every_field.values())
            self._reset.description = f"Reset all ({num} changed)" if num else "Reset all"
            self._reset.disabled = not num or self._is_busy
            self._offer_last()
            if config is None or cluster is None:
                self._copy.refuse("Correct what is marked first")
                return
            try:
                self._copy.offer(self.form, cluster, self._existing_cluster() is not None)
            except ConfigError as error:
                self._copy.refuse(str(error))

    def _say_length(self, config: TrainConfig, data: DecodedData | None, num_ranks: int) -> None:
        """Write below the fields of steps and epochs what follows for each from the other one."""
        self._show_length_notes(*length_notes(config, data, num_ranks))

    def _show_length_notes(self, of_steps: str, of_epochs: str) -> None:
        for name, note in {"steps": of_steps, "epochs": of_epochs}.items():
            if name in self.fields:
                self.fields[name].note = note

    def _say_wrong(self) -> None:
        wrong = "\n".join([*self._wrong_devices, *self.form.unplaced])
        self._wrong.value = said(wrong, is_error=True) if wrong else ""
        self._wrong.layout.display = "" if wrong else "none"

    def _present_cluster(self) -> tuple[ClusterConfig | None, Sequence[Device]]:
        """Check what is typed about the cluster, mark each wrong field, and collect in `_wrong_devices` the
        problems that belong to no field.

        Returns:
            The settings of the run's cluster, or None where they are not valid.
            The devices of its ranks; CPU ranks stand for them where the settings do not say which.
        """
        existing = self._existing_cluster()
        self._wrong_devices = []
        if existing is not None:
            return existing.config, existing.devices
        # Those that have an effect with the chosen launcher.
        fields = self.devices.counting
        values, problems = read_drafts(fields)
        config: ClusterConfig | None = None
        chosen: Sequence[Device] | None = None
        try:
            config = ClusterConfig.checked(**self.devices.values(values))
            if config.is_local:
                chosen = self._chosen(config)
                together(
                    partial(devices.require_simulable, config, chosen),
                    partial(devices.least_rank_memory_bytes, config, chosen),
                )
            else:
                # Before the settings may be refused: without devices the form would judge the run for CPUs.
                chosen = stand_ins(config)
                launcher_of(config)  # refuses what it cannot do
        except ConfigError as error:
            by_field, self._wrong_devices = _sort_problems(error, fields)
            problems = {**by_field, **problems}
        for name, field in self.devices.fields.items():
            field.problem = problems.get(name, "")
        if chosen is None:
            chosen = devices.choose("none", values.get("ranks"))
        if problems or self._wrong_devices or config is None:
            return None, chosen
        return with_numbers(config, chosen), chosen

    def _chosen(self, config: ClusterConfig) -> Sequence[Device]:
        """The devices of the ranks. The driver is asked once for each choice, and not whenever a key is
        pressed."""
        choice = config.gpus if config.takes_free_gpus else config.named_gpus, config.ranks
        if choice not in self._devices_of:
            self._devices_of[choice] = free_gpus.assumed(*choice)
        return self._devices_of[choice]


def _limit_bytes(cluster: ClusterConfig | None, chosen: Sequence[Device]) -> int | None:
    """The host memory that the ranks may take together; None where nothing limits it. On a GPU the limit is
    for the GPU's memory."""
    if cluster is None or not cluster.memory_limit or any(device.kind == "cuda" for device in chosen):
        return None
    return sum(devices.rank_memory_bytes(cluster, device, chosen) for device in chosen)


def _sort_problems(error: ConfigError, fields: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Return the lines of an error by the field that each begins with, the first of each field, and the lines
    that belong to no field."""
    by_field: dict[str, str] = {}
    others = []
    for line in str(error).splitlines():
        beginnings = {name: (f"{name}=", f"{name} =", f"{name}:") for name in fields}
        field_name = next((name for name in beginnings if line.startswith(beginnings[name])), None)
        if field_name is None:
            others.append(line)
        else:
            by_field.setdefault(field_name, line)
    return by_field, others
