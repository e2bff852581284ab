"""The devices of this host and this user's clusters, as JSON for JupyterLab's sidebar.

It tells what `nbgpu ps`, `nbgpu top` and a rank's own notebook say: names, states, steps and lines of cells
by their numbers. No code, no values and no keys are in it.
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
_SILENCE_WORTH_SAYING_S = 1.0
_WAIT_WORTH_SAYING_S = 2.0
_log = logging.getLogger("nbgpu.server")


class RanksWatch:
    """Asks the ranks of one cluster where they are, each time that somebody looks.

    The ranks answer on sockets in the cluster's folder, as they do to their own notebook, which is not asked.
    What is not known here is whether a rank without work has finished a cell that others are still in: such a
    rank is idle.

    Args:
        folder: the cluster's folder.
        pids: the process ids of the ranks.
    """

    def __init__(self, folder: Path, pids: Mapping[int, int]) -> None:
        self.pids = dict(pids)
        self._seen: dict[int, StackSample] = {}
        processes = {rank: EngineProcess("", pid) for rank, pid in pids.items()}
        self._sampler = StackSampler(processes, lambda _: Stacks(folder), self._seen)
        self._here_since: dict[int, tuple[MainThreadState, float]] = {}

    def look(self) -> dict[int, RankActivity]:
        """What each rank is doing, by rank. This takes at most a third of a second."""
        # Where the folder is gone, so are the ranks.
        self._sampler.ask()
        self._sampler.collect(_PATIENCE_S)
        for rank, seen in self._seen.items():
            # The line's text is the person's code, which nobody needs here.
            where = replace(seen.where, source="")
            if rank not in self._here_since or self._here_since[rank][0] != where:
                self._here_since[rank] = where, seen.mono_s
        return {rank: self._place(rank) for rank in self.pids}

    def _place(self, rank: int) -> RankActivity:
        if self._sampler.silent_s(rank) > _SILENCE_WORTH_SAYING_S:
            return RankActivity(
                instead=self._sampler.silence(rank), stands_still=self._sampler.stands_still(rank)
            )
        if rank not in self._here_since:
            return RankActivity()
        where, since_mono_s = self._here_since[rank]
        return RankActivity(where, time.monotonic() - since_mono_s)

    def close(self) -> None:
        """Close the connections of open questions."""
        self._sampler.close()


class Overview:
    """Reads the host and the registry each time that somebody looks. All calls come from one thread."""

    def __init__(self) -> None:
        self._cards: DeviceCards | None = None
        self._ranks: dict[str, RanksWatch] = {}
        """By the cluster's id."""
        self._runs: dict[str, RunView] = {}
        """The newest run of each cluster, by the cluster's id."""

    def read(self, with_devices: bool) -> dict[str, Any]:
        """The overview as JSON. What goes wrong with one part becomes a sentence in `problems`, and the rest
        is there."""
        problems: list[str] = []
        told: dict[str, Any] = {"time_s": time.time(), "devices": None, "clusters": [], "problems": problems}
        if with_devices:
            try:
                told["devices"] = self._read_devices()
            except Exception as error:  # noqa: BLE001 - it is logged and shown
                # A driver may raise anything, and the clusters are of use without it.
                _log.exception("the devices cannot be read")
                problems.append(f"The devices cannot be read: {error}")
        try:
            entries = registry.entries()
        except NbgpuError as error:
            problems.append(f"Your clusters cannot be listed: {error}")
            entries = []
        for entry in entries:
            try:
                told["clusters"].append(self._describe(entry))
            except Exception as error:  # noqa: BLE001 - it is logged and shown
                # One damaged folder must not hide the other clusters.
                _log.exception("cluster %s cannot be described", entry.id)
                problems.append(f"Cluster {entry.id} cannot be described: {error}")
        self._forget_all_but({entry.id for entry in entries})
        return told

    def rest(self) -> None:
        """Give up connections and the driver until somebody looks again."""
        self._forget_all_but(set())
        if self._cards is not None:
            self._cards.close()
            self._cards = None

    def _read_devices(self) -> dict[str, Any]:
        if self._cards is None:
            self._cards = DeviceCards()
        return self._cards.read().as_json()

    def _describe(self, entry: AnyEntry) -> dict[str, Any]:
        names = entry.device_names()
        run = self._run(entry, len(names))
        places = self._look(entry)
        # Which ranks wait where and which do not, once one waits for as long as the cluster's setting says.
        notice_after_s = entry.config.notice_after_s if isinstance(entry, Entry) else 0.0
        waiting = notice(places, notice_after_s) if notice_after_s else ""
        gone = [rank for rank, process in sorted(entry.engines.items()) if not process.alive()]
        return {
            "id": entry.id,
            "notebook": Path(entry.notebook).name,
            "path": entry.notebook,
            "process": entry.owner.pid,
            "state": entry.state(),
            "started_s": entry.started_s,
            "ranks": [
                {"rank": rank, "device": device, **_rank_in_words(rank, entry, run, places)}
                for rank, device in enumerate(names)
            ],
            "waiting": waiting,
            "gone": named_ranks(gone) if gone else "",
            "run": None if run is None else run.describe(),
        }

    def _run(self, entry: AnyEntry, num_ranks: int) -> RunView | None:
        known = self._runs.get(entry.id)
        if entry.run is None:
            return None
        if known is None or known.folder != entry.run:
            view = opened(entry.run, num_ranks)
            if view is None:
                return None
            known = self._runs[entry.id] = view
        known.read()
        return known

    def _look(self, entry: AnyEntry) -> Mapping[int, RankActivity]:
        # What the ranks of another version would answer is not known here.
        if not isinstance(entry, Entry) or not entry.engines:
            return {}
        pids = {rank: process.pid for rank, process in entry.engines.items() if process.alive()}
        watch = self._ranks.get(entry.id)
        if watch is None or watch.pids != pids:
            if watch is not None:
                watch.close()
            watch = self._ranks[entry.id] = RanksWatch(entry.folder, pids)
        try:
            return watch.look()
        except FileNotFoundError:  # the cluster has ended meanwhile
            return {}

    def _forget_all_but(self, ids: set[str]) -> None:
        for cluster in self._ranks.keys() - ids:
            self._ranks.pop(cluster).close()
        for cluster in self._runs.keys() - ids:
            del self._runs[cluster]


def _rank_in_words(
    rank: int, entry: AnyEntry, run: RunView | None, places: Mapping[int, RankActivity]
) -> dict[str, Any]:
    """What a rank does, as words and as a sign."""
    is_in_run = run is not None and not run.is_over
    process = entry.engines.get(rank)
    if process is None and isinstance(entry, Entry) and entry.hosts:
        # A rank on another host is asked by its own notebook alone; what it writes in a run is here.
        in_run = run.states().get(rank, "") if run is not None and is_in_run else ""
        return {"words": in_run or "not known", "sign": "busy" if in_run else "unknown"}
    if process is None:
        return {"words": "is starting", "sign": "busy"}
    if not process.alive():
        return {"words": "is gone", "sign": "gone"}
    place = places.get(rank)
    if place is None or (place.where is None and not place.instead):
        return {"words": "not known", "sign": "unknown"}
    if place.instead or (place.waits and place.for_s >= _WAIT_WORTH_SAYING_S):
        return {"words": place.words, "sign": "waits"}
    if place.where is not None and place.where.doing == "idle":
        return {"words": "idle", "sign": "idle"}
    if run is not None and is_in_run and place.where is not None and place.where.doing == "run":
        return {"words": run.states().get(rank, place.kind), "sign": "busy"}
    if place.waits and place.where is not None:
        # In a healthy cell ranks wait for each other all the time.
        place = replace(place, where=replace(place.where, collective=""))
    return {"words": place.kind.removeprefix("is ").removeprefix("at "), "sign": "busy"}
