"""The thread that reads the overview: one for all who look, none while nobody does."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from nbgpu.client.host import registry
from nbgpu.server import handlers
from nbgpu.server.handlers import Reading


@pytest.fixture(autouse=True)
def own_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.STATE_VARIABLE, str(tmp_path))


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("nbgpu-overview")]


def test_it_rests_when_nobody_looks_and_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_REST_AFTER_S", 0.3)

    async def look_and_leave() -> list[dict[str, Any]]:
        reading, told = Reading(), []
        for _ in range(2):
            told.append(await reading.read(with_devices=True))
            assert len(_threads()) == 1
            for _ in range(200):
                await asyncio.sleep(0.05)
                if not _threads():
                    break
            assert _threads() == []
        return told

    for told in asyncio.run(look_and_leave()):
        assert told["problems"] == []
        assert told["devices"]["devices"][-1]["kind"] == "cpu"


def test_those_who_look_at_one_moment_get_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "_REST_AFTER_S", 0.1)

    async def look() -> list[dict[str, Any]]:
        reading = Reading()
        told = await asyncio.gather(*(reading.read(with_devices=False) for _ in range(5)))
        await asyncio.sleep(0.5)
        return told

    told = asyncio.run(look())
    assert all(each is told[0] for each in told)
    assert told[0]["devices"] is None


def test_a_registry_that_cannot_be_used_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(registry.STATE_VARIABLE, str(tmp_path / "file"))
    monkeypatch.setattr(handlers, "_REST_AFTER_S", 0.1)

    async def look() -> dict[str, Any]:
        told = await Reading().read(with_devices=False)
        await asyncio.sleep(0.5)
        return told

    told = asyncio.run(look())
    assert told["clusters"] == []
    (problem,) = told["problems"]
    assert "Name another folder" in problem
