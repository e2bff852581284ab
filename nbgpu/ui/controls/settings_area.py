"""The part of the control panel with the settings: recipe and preset, the most important settings at the top,
the others in tabs, and the buttons that act on all of them."""

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
from nbgpu.ui.controls.layout import WRAPPED, grid, grouped, message_html
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
        on_other_settings: called after the choice of another recipe, preset, run to resume, or devices.
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
        self._cluster_problems: list[str] = []
        """Lines about settings of the cluster that are not valid and belong to no field."""
        self._devices_by_choice: dict[tuple[str, int | None], Sequence[Device]] = {}
        """Cache of the devices by the choice of GPUs and the number of ranks."""
        self.devices = DeviceControls()
        self.form = self._new_form(recipe, preset)
        self._workload = WorkloadChoice(recipe, preset, self._choose_workload)
        self._reset = w.Button(description="Reset all", tooltip="Give every setting its default again")
        self._reset.on_click(lambda _: self._reset_all())
        self._copy = CopyButtons()
        self._last = w.Button(description="As the last run")
        self._last.on_click(lambda _: self._show_last_run())
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
            field.observe(partial(self._on_device_field, field), "value")
            field.observe(lambda _: self.judge(), "draft")
            field.on_reset(field.show_standard)
        self.devices.gpus.observe(lambda _: self._on_other_settings(), "value")
        buttons = self._reset, self._last, self._copy
        for widget in (*buttons, self.tabs, *self._workload.fields, *self.devices.inputs()):
            answer_while_busy(widget)
        self._show_form()

    def _new_form(self, recipe: str, preset: str) -> SettingsForm:
        return SettingsForm(recipe, preset, self._lock, self._on_run_field, self.judge)

    def _show_form(self) -> None:
        """Show the fields of the present form: some at the top, and the others in tabs by their groups. The
        tab that was open stays open if there is one of that title."""
        fields = self.form.fields
        self.steerable = steerable(self.form.model)
        self._memory = MemoryNote(fields["cache_rate"], self._show_length) if "cache_rate" in fields else None
        self._first.children = tuple(fields[name] for name in FIRST if name in fields)
        others = {name: field for name, field in fields.items() if name not in FIRST}
        self._groups = {
            **grouped(self.form.model, others),
            _CLUSTER: list(self.devices.device_fields.values()),
            _HOSTS: list(self.devices.hosts.fields.values()),
        }
        open_tab = self.tabs.selected_index
        open_title = self.tabs.get_title(open_tab) if open_tab is not None else ""
        titles = list(self._groups)
        # The page switches between tabs without the kernel, by a click or the arrow keys. An Accordion would
        # not do, because neither the keyboard nor a screen reader reaches its headings.
        self.tabs.children = tuple(grid(members) for members in self._groups.values())
        with self.tabs.hold_sync():
            for index, title in enumerate(titles):
                self.tabs.set_title(index, title)
        self.tabs.selected_index = titles.index(open_title) if open_title in titles else 0
        for field in fields.values():
            answer_while_busy(field)

    # ---- for the panel ----

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of the run's settings, by name."""
        return self.form.fields

    @property
    def every_field(self) -> dict[str, Field]:
        """All fields, those of the cluster first."""
        return self.devices.fields | self.form.fields

    def invalid(self) -> dict[str, str]:
        """The problem of each field that has no valid value, by the field's name."""
        return read(self._new_cluster_fields)[1] | self.form.read()[1]

    @property
    def _new_cluster_fields(self) -> dict[str, Field]:
        """The fields of the cluster that Start makes; empty if there is a cluster, which has its devices."""
        return {} if self._existing_cluster() else self.devices.applicable

    def checked(self) -> tuple[dict[str, Any], TrainConfig]:
        """Return the settings of a new cluster, and those of the run. Call this when `invalid` is empty.

        Raises:
            ConfigError: values do not go together, with a line for each.
        """
        cluster_settings = self.devices.values(read(self._new_cluster_fields)[0])
        values, _ = self.form.read()
        config: TrainConfig
        *_, config = together(
            *([] if self._existing_cluster() else [lambda: ClusterConfig.checked(**cluster_settings)]),
            lambda: self.form.config(values),
        )
        return cluster_settings, config

    @property
    def is_local(self) -> bool:
        """Whether the ranks of the existing cluster, or else of the one that Start makes, are on this
        host."""
        existing = self._existing_cluster()
        return self.devices.hosts.is_local if existing is None else existing.config.is_local

    def go_to(self, field: Field) -> None:
        """Bring a field to the front, and move the keyboard there."""
        for index, members in enumerate(self._groups.values()):
            if field in members:
                self.tabs.selected_index = index
        field.focus()

    def enable(self, is_busy: bool, is_running: bool, has_cluster: bool) -> None:
        """Enable the controls that may be changed now, but for the settings that a run to resume prescribes.

        Args:
            is_busy: whether a run or other work is going on, during which nothing else can be changed.
            is_running: whether it is a run, during which some settings can.
            has_cluster: whether there is a cluster, whose devices cannot be changed.
        """
        for name, field in self.form.fields.items():
            is_steered = is_running and name in self.steerable
            field.disabled = name in self.form.fixed or (is_busy and not is_steered)
        for field in self._workload.fields:
            field.disabled = is_busy
        for control in self.devices.inputs():
            control.disabled = is_busy or has_cluster
        self._is_busy = is_busy

    # ---- actions of the person ----

    def _on_run_field(self, name: str) -> None:
        with self._lock:
            self._on_change(name)
            if name in ("resume", "run_name"):  # the run to resume decides which settings may be changed
                self._on_other_settings()
            self.judge()

    def _on_device_field(self, field: Field, _: Any) -> None:
        field.changed = field.value != field.standard
        self._on_other_settings()

    def _reset_all(self) -> None:
        """Give the settings of the run and those of the cluster their defaults again."""
        with self._lock:
            self.form.reset_all()
            for field in self.devices.fields.values():
                if field.changed and not field.disabled:
                    field.show_standard()
            self.judge()

    def _show_last_run(self) -> None:
        """Show the settings of the newest run of this recipe in the fields, such as one of a kernel that has
        ended. The new run starts from scratch, even if that run was resumed."""
        with self._lock:
            last = self._last_settings()
            if last is None:
                return
            _, config = last
            # The form's defaults are not the recipe's where a preset is chosen, or where the ranks have GPUs.
            self.form.set_values(self.form.beyond_defaults(config))
            self._on_other_settings()

    def _last_settings(self) -> tuple[Path, TrainConfig] | None:
        """The folder and the settings of the newest run of this recipe; None if there is none."""
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
        """Show the settings of another recipe or preset, with those of the person's changes that apply to
        both.

        Raises:
            ConfigError: the recipe's file cannot be used; the form stays as it is.
        """
        with self._lock:
            earlier = self.form
            form = self._new_form(recipe, preset)
            form.copy_changes(earlier)
            self.form = form
            self._show_form()
            self._on_other_settings()
            earlier.close()

    # ---- consequences of the settings ----

    def judge(self) -> None:
        """Check what is typed so far, show each problem beside its field, and update the notes, the buttons
        and the texts to copy."""
        with self._lock:
            cluster, chosen = self._check_cluster()
            self.form.adapt_defaults(has_gpus=any(device.kind == "cuda" for device in chosen))
            config = self.form.validate(chosen)
            self._show_notes(config, cluster, chosen)
            wrong = "\n".join([*self._cluster_problems, *self.form.general_problems])
            self._wrong.value = message_html(wrong, is_error=True) if wrong else ""
            self._wrong.layout.display = "" if wrong else "none"
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

    def _show_notes(
        self, config: TrainConfig | None, cluster: ClusterConfig | None, chosen: Sequence[Device]
    ) -> None:
        """Show the notes on the global batch, on the length of the run and on the memory of its data.

        Args:
            config: the settings of the run; None where they are not valid.
            cluster: the settings of the cluster; None where they are not valid.
            chosen: the devices of the ranks.
        """
        is_local = self.is_local
        if (batch := self.fields.get("batch_size")) is not None:
            # Where the cluster's hosts decide how many ranks there are, `chosen` are stand-ins.
            knows_ranks = is_local or self._existing_cluster() is not None
            knows_ranks |= cluster is not None and cluster.gpus_per_node is not None
            batch.note = global_batch(config, len(chosen)) if config is not None and knows_ranks else ""
        self._show_length(config, None, len(chosen))
        if self._memory is None:
            return
        is_about_problem = self._memory.is_about({n for n, field in self.fields.items() if field.problem})
        if is_local and config is not None:
            self._memory.say(config, len(chosen), _limit_bytes(cluster, chosen))
        # The memory of other hosts is not known. On this one, a setting that the note does not depend on may
        # be wrong while a person types: the note stays.
        elif not is_local or is_about_problem:
            self._memory.clear()

    def _show_length(self, config: TrainConfig | None, data: DecodedData | None, num_ranks: int) -> None:
        """Show below the field of epochs the number that follows from the steps, or the other way round. No
        data: their size is not known yet. No settings: they are not valid, and there is no note."""
        notes = ("", "") if config is None else length_notes(config, data, num_ranks)
        for name, note in zip(("steps", "epochs"), notes, strict=True):
            if name in self.fields:
                self.fields[name].note = note

    def _check_cluster(self) -> tuple[ClusterConfig | None, Sequence[Device]]:
        """Check what is typed about the cluster, show each problem beside its field, and collect in
        `_cluster_problems` those that belong to no field.

        Returns:
            The settings of the run's cluster, or None where they are not valid.
            The devices of its ranks; CPU ranks stand for them where the settings do not say which.
        """
        existing = self._existing_cluster()
        self._cluster_problems = []
        if existing is not None:
            return existing.config, existing.devices
        fields = self.devices.applicable
        values, problems = read_drafts(fields)
        config: ClusterConfig | None = None
        chosen: Sequence[Device] | None = None
        try:
            config = ClusterConfig.checked(**self.devices.values(values))
            if config.is_local:
                chosen = self._chosen_devices(config)
                together(
                    partial(devices.require_simulable, config, chosen),
                    partial(devices.least_rank_memory_bytes, config, chosen),
                )
            else:
                # This comes first: without devices the form would check the settings of the run for CPUs.
                chosen = stand_ins(config)
                launcher_of(config)  # raises where the launcher cannot do what the settings say
        except ConfigError as error:
            by_field, self._cluster_problems = _sort_problems(error, fields)
            problems = {**by_field, **problems}
        for name, field in self.devices.fields.items():
            field.problem = problems.get(name, "")
        if chosen is None:
            chosen = devices.choose("none", values.get("ranks"))
        if problems or self._cluster_problems or config is None:
            return None, chosen
        return with_numbers(config, chosen), chosen

    def _chosen_devices(self, config: ClusterConfig) -> Sequence[Device]:
        """The devices of the ranks. The driver is asked once for each choice, and not whenever a key is
        pressed."""
        choice = config.gpus if config.takes_free_gpus else config.named_gpus, config.ranks
        if choice not in self._devices_by_choice:
            self._devices_by_choice[choice] = free_gpus.assumed(*choice)
        return self._devices_by_choice[choice]


def _limit_bytes(cluster: ClusterConfig | None, chosen: Sequence[Device]) -> int | None:
    """The host memory that all ranks together may take, in bytes; None where nothing limits it. On a GPU
    `memory_limit` is for the GPU's memory, and not for the host's."""
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
