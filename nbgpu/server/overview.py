"""The devices of this host and this user's clusters, as JSON for JupyterLab's sidebar.

The overview has what `nbgpu ps`, `nbgpu top` and the notebook of a cluster show: names, states, steps, and
the numbers of cells and lines. It has no code, no values and no keys.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nbgpu.client.engines.stacks import StackSample, StackSampler
from nbgpu.client.faults.hangs import RankActivity, notice
from nbgpu.client.host import registry
from nbgpu.client.host.device_cards import DeviceCards
from nbgpu.client.host.registry import AnyEntry, Entry
from nbgpu.errors import NbgpuError
from nbgpu.host.stacks import Stacks
from nbgpu.machine.processes import EngineProcess
from nbgpu.protocol.records import MainThreadState
from nbgpu.run_folder.progress import RunView, opened
from nbgpu.text.ranks import named_ranks

_PATIENCE_S = 0.3
"""The longest time for which a reading waits for the answers of the ranks."""
_SILENCE_WORTH_SAYING_S = 1.0
"""A rank that has not answered for longer than this is described by its silence."""
_WAIT_WORTH_SAYING_S = 2.0
"""A rank that has waited in a collective for less than this counts as busy, because in a healthy cell ranks
wait for each other all the time."""
_log = logging.getLogger("nbgpu.server")


class RanksWatch:
    """Asks the ranks of one cluster for their activity, once for each reading of the overview.

    The ranks answer on sockets in the cluster's folder, without the notebook's kernel. A rank without work
    counts as idle, because only the kernel knows whether other ranks are still in a cell that this rank has
    finished.

    Args:
        folder: the cluster's folder.
        pids: the process ids of the ranks.
    """

    def __init__(self, folder: Path, pids: Mapping[int, int]) -> None:
        self.pids = dict(pids)
        self._seen: dict[int, StackSample] = {}
        processes = {rank: EngineProcess("", pid) for rank, pid in pids.items()}
        self._sampler = StackSampler(processes, lambda _: Stacks(folder), self._seen)
        self._since: dict[int, tuple[MainThreadState, float]] = {}
        """By rank: the state of its main thread, and the (monotonic) time at which that state began."""

    def read(self) -> dict[int, RankActivity]:
        """Return the activity of each rank, by rank. This takes at most a third of a second.

        Raises:
            FileNotFoundError: the cluster's folder is gone, and so are the ranks.
        """
        self._sampler.ask()
        self._sampler.collect(_PATIENCE_S)
        for rank, seen in self._seen.items():
            # The text of the line is the person's code, which the sidebar does not show.
            where = replace(seen.where, source="")
            if rank not in self._since or self._since[rank][0] != where:
                self._since[rank] = where, seen.mono_s
        return {rank: self._activity(rank) for rank in self.pids}

    def _activity(self, rank: int) -> RankActivity:
        """Return the activity of one rank since its beginning, or the reason for which the rank is silent."""
        if self._sampler.silent_s(rank) > _SILENCE_WORTH_SAYING_S:
            return RankActivity(
                instead=self._sampler.silence(rank), stands_still=self._sampler.stands_still(rank)
            )
        if rank not in self._since:
            return RankActivity()
        where, since_mono_s = self._since[rank]
        return RankActivity(where, time.monotonic() - since_mono_s)

    def close(self) -> None:
        """Close the connections of open questions."""
        self._sampler.close()


class Overview:
    """Reads the host, the registry and the ranks. All calls come from one thread."""

    def __init__(self) -> None:
        self._cards: DeviceCards | None = None
        self._ranks: dict[str, RanksWatch] = {}
        """The watch of each cluster's ranks, by the cluster's id."""
        self._runs: dict[str, RunView] = {}
        """The newest run of each cluster, by the cluster's id."""

    def read(self, with_devices: bool) -> dict[str, Any]:
        """Return the overview as JSON. An error in one part becomes a sentence in `problems`, and the other
        parts are complete."""
        problems: list[str] = []
        devices: dict[str, Any] | None = None
        clusters: list[dict[str, Any]] = []
        if with_devices:
            try:
                self._cards = self._cards or DeviceCards()
                devices = self._cards.read().as_json()
            except Exception as error:  # noqa: BLE001 - it is logged and shown
                # A driver may raise anything, and the clusters are useful without the devices.
                _log.exception("the devices cannot be read")
                problems.append(f"The devices cannot be read: {error}")
        try:
            entries = registry.entries()
        except NbgpuError as error:
            problems.append(f"Your clusters cannot be listed: {error}")
            entries = []
        for entry in entries:
            try:
                clusters.append(self._describe(entry))
            except Exception as error:  # noqa: BLE001 - it is logged and shown
                # One damaged folder must not hide the other clusters.
                _log.exception("cluster %s cannot be described", entry.id)
                problems.append(f"Cluster {entry.id} cannot be described: {error}")
        self._drop_all_but({entry.id for entry in entries})
        return {"time_s": time.time(), "devices": devices, "clusters": clusters, "problems": problems}

    def rest(self) -> None:
        """Close the connections to ranks, and the driver, until the next reading."""
        self._drop_all_but(set())
        if self._cards is not None:
            self._cards.close()
            self._cards = None

    def _describe(self, entry: AnyEntry) -> dict[str, Any]:
        """Return one cluster as JSON: its notebook, its ranks with their activities, and its run."""
        names = entry.device_names()
        run = self._run(entry, len(names))
        activities = self._activities(entry)
        # The notice of a hang, once a rank has waited for as long as the cluster's setting says.
        notice_after_s = entry.config.notice_after_s if isinstance(entry, Entry) else 0.0
        waiting = notice(activities, notice_after_s) if notice_after_s else ""
        gone = [rank for rank, process in sorted(entry.engines.items()) if not process.alive()]
        return {
            "id": entry.id,
            "notebook": Path(entry.notebook).name,
            "path": entry.notebook,
            "process": entry.owner.pid,
            "state": entry.state(),
            "started_s": entry.started_s,
            "ranks": [
                {"rank": rank, "device": device, **_describe_rank(rank, entry, run, activities)}
                for rank, device in enumerate(names)
            ],
            "waiting": waiting,
            "gone": named_ranks(gone) if gone else "",
            "run": None if run is None else run.describe(),
        }

    def _run(self, entry: AnyEntry, num_ranks: int) -> RunView | None:
        """Return the present run of a cluster with its newest records; None if it has none, or its folder is
        gone. The view is kept for the next reading, which then reads only new records."""
        if entry.run is None:
            return None
        view = self._runs.get(entry.id)
        if view is None or view.folder != entry.run:
            view = opened(entry.run, num_ranks)
            if view is None:
                return None
            self._runs[entry.id] = view
        view.read()
        return view

    def _activities(self, entry: AnyEntry) -> Mapping[int, RankActivity]:
        """Ask the ranks of a cluster for their activities. Their connections are kept until the ranks'
        processes change."""
        # The ranks of another version of nbgpu may answer in another format.
        if not isinstance(entry, Entry) or not entry.engines:
            return {}
        pids = {rank: process.pid for rank, process in entry.engines.items() if process.alive()}
        watch = self._ranks.get(entry.id)
        if watch is None or watch.pids != pids:
            if watch is not None:
                watch.close()
            watch = self._ranks[entry.id] = RanksWatch(entry.folder, pids)
        try:
            return watch.read()
        except FileNotFoundError:  # the cluster has ended meanwhile
            return {}

    def _drop_all_but(self, ids: set[str]) -> None:
        for cluster in self._ranks.keys() - ids:
            self._ranks.pop(cluster).close()
        for cluster in self._runs.keys() - ids:
            del self._runs[cluster]


def _describe_rank(
    rank: int, entry: AnyEntry, run: RunView | None, activities: Mapping[int, RankActivity]
) -> dict[str, Any]:
    """Return the activity of a rank as words, and as one of the signs that the sidebar draws."""
    states = run.states() if run is not None and not run.is_over else {}
    process = entry.engines.get(rank)
    if process is None and isinstance(entry, Entry) and entry.hosts:
        # Only the notebook can ask a rank on another host, but the rank's records of a run are here.
        state = states.get(rank, "")
        return {"words": state or "not known", "sign": "busy" if state else "unknown"}
    if process is None:
        return {"words": "is starting", "sign": "busy"}
    if not process.alive():
        return {"words": "is gone", "sign": "gone"}
    activity = activities.get(rank, RankActivity())
    where = activity.where
    if activity.instead or (activity.waits and activity.for_s >= _WAIT_WORTH_SAYING_S):
        return {"words": activity.words, "sign": "waits"}
    if where is None:
        return {"words": "not known", "sign": "unknown"}
    if where.doing == "idle":
        return {"words": "idle", "sign": "idle"}
    if where.doing == "run" and states:
        return {"words": states.get(rank, activity.kind), "sign": "busy"}
    if activity.waits:
        # A short wait in a collective is not worth a word.
        activity = replace(activity, where=replace(where, collective=""))
    return {"words": activity.kind.removeprefix("is ").removeprefix("at "), "sign": "busy"}
