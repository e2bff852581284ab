"""The watchdog over collectives: what it counts, and whom it names.

Over real ranks: tests/faults/cells/test_late_collectives.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version

from nbgpu.engine.group import collective_timeout, diagnosis, torch_private
from nbgpu.engine.group.torch_private import CollectiveInFlight

TIMEOUT_S = 8.0
LATE = CollectiveInFlight("0", True, "gloo", "all_reduce", 7, False, "[3, 4] Float")


class Watched:
    """A watchdog over made-up collectives, and what it has given up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.unfinished: dict[str, str] = {"earlier": "3"}
        self.in_flight: dict[str, CollectiveInFlight] = {}
        self.num_given_up = 0
        self.store = dist.HashStore()
        monkeypatch.setattr(torch_private, "unfinished_groups", lambda: dict(self.unfinished))
        monkeypatch.setattr(torch_private, "collectives_in_flight", lambda: dict(self.in_flight))
        monkeypatch.setattr(torch_private, "group_ranks", lambda name: [0, 1, 2] if name == "0" else [])
        monkeypatch.setattr(collective_timeout, "_timeouts_s", {})
        monkeypatch.setattr(collective_timeout, "_message", "")
        monkeypatch.setattr(collective_timeout, "_is_due", False)
        self.watchdog = collective_timeout.Watchdog(TIMEOUT_S, 0, self.store, self._give_up)

    def _give_up(self, note: Callable[[], None]) -> None:
        self.num_given_up += 1
        note()

    def begin(self, collective: CollectiveInFlight, group: str = "world") -> None:
        self.unfinished[group] = "6"
        self.in_flight[group] = collective


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def test_a_collective_that_outlasts_the_timeout_is_named_with_those_who_had_not_come(
    watched: Watched,
) -> None:
    watched.begin(LATE)
    watched.watchdog.look(100.0, 0.0)
    watched.watchdog.look(107.9, 0.0)
    assert watched.num_given_up == 0
    watched.store.set("nbgpu/waits/0/0/1", "7")
    watched.store.set("nbgpu/waits/0/0/2", "6")
    watched.watchdog.look(108.0, 0.0)
    assert watched.num_given_up == 1
    error = collective_timeout.take_error()
    assert str(error) == (
        "all_reduce of [3, 4] Float, collective 7 of the default group, was given up after 8 s "
        "(collective_timeout_s): rank 2 had not come. Variables are kept, and the process group is formed again"
    )
    assert isinstance(error, dist.DistBackendError)
    assert collective_timeout.take_error() is None


def test_progress_and_time_in_which_the_process_stood_still_do_not_count(watched: Watched) -> None:
    watched.begin(LATE)
    watched.watchdog.look(100.0, 0.0)
    watched.unfinished["world"] = "7"
    watched.watchdog.look(107.0, 0.0)
    watched.watchdog.look(114.0, 0.0)
    watched.watchdog.look(134.0, 19.5)
    assert watched.num_given_up == 0
    watched.watchdog.look(134.6, 0.0)
    assert watched.num_given_up == 1


def test_groups_of_earlier_generations_and_groups_that_ended_do_not_count(watched: Watched) -> None:
    watched.begin(replace(LATE, group="ended"), "ended")
    watched.begin(LATE, "earlier")
    for now_s in range(100, 200, 2):
        watched.watchdog.look(float(now_s), 0.0)
    assert watched.num_given_up == 0


def test_each_group_has_the_timeout_that_it_was_made_with(watched: Watched) -> None:
    collective_timeout.allow("0", 60.0)
    watched.begin(LATE)
    for now_s in range(100, 160, 4):
        watched.watchdog.look(float(now_s), 0.0)
    assert watched.num_given_up == 0
    watched.watchdog.look(160.0, 0.0)
    assert watched.num_given_up == 1


def test_only_errors_of_torch_are_explained(watched: Watched) -> None:
    cut = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1")
    assert collective_timeout.explain(cut) is cut
    watched.begin(LATE)
    watched.watchdog.look(100.0, 0.0)
    watched.watchdog.look(109.0, 0.0)
    own = RuntimeError("of the person's code")
    assert collective_timeout.explain(own) is own
    assert collective_timeout.explain(ValueError("gloo")).args == ("gloo",)
    assert "had not come" in str(collective_timeout.explain(cut))
    assert collective_timeout.take_error() is None, "it was raised"


@pytest.mark.parametrize(("version", "together"), [((2, 21, 5), False), ((2, 22, 3), True)])
def test_nccl_groups_are_aborted_together_where_nccl_can(
    monkeypatch: pytest.MonkeyPatch, version: tuple[int, ...], together: bool
) -> None:
    """The backends are stand-ins for NCCL's, which a build for the CPU lacks."""
    calls: list[str] = []

    def group(number: int) -> Any:
        backend = SimpleNamespace(
            abort=lambda: calls.append(f"abort {number}"),
            _group_start=lambda: calls.append("start"),
            _group_end=lambda: calls.append("end"),
        )
        return SimpleNamespace(_get_backend=lambda device: backend)

    def no_backend(device: Any) -> Any:
        raise RuntimeError("no backend for cuda")

    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    torch_private.abort_nccl([group(0), SimpleNamespace(_get_backend=no_backend), group(1)])
    aborts = ["abort 0", "abort 1"]
    assert calls == (["start", *aborts, "end"] if together else aborts)
    calls.clear()
    torch_private.abort_nccl([group(2)])
    assert calls == ["abort 2"]


def test_the_recorder_of_nccl_is_on_in_every_version_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make test-oldest` runs this with torch 2.6, whose recorder is off unless a variable says how much it
    keeps, and which knows the older name only."""
    names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
    monkeypatch.setattr(os, "environ", {})
    diagnosis.keep_nccl_from_ending_the_process()
    wanted = names[Version(torch.__version__) < Version("2.9")]
    # With both, a newer torch warns of the older one.
    assert [name for name in names if os.environ.get(name)] == [wanted]
