"""Where a rank finds a folder of the notebook's host that its own host does not see."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbgpu.host.served_folder import ServedFolder
from nbgpu.protocol import served
from nbgpu.protocol.cluster_processes import CLUSTER_FOLDER

RUN = Path("/home/ann/runs/one")


def test_a_path_in_a_served_folder_is_that_in_its_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CLUSTER_FOLDER, str(tmp_path))
    assert served.here(RUN) == RUN
    copy = ServedFolder(str(RUN), tmp_path).copy
    checkpoint = RUN / "checkpoints" / "step-00000004"
    assert served.here(RUN) == copy
    assert served.here(checkpoint) == copy / "checkpoints" / "step-00000004"
    assert served.original(served.here(checkpoint)) == checkpoint
    assert served.is_copy(served.here(checkpoint))


@pytest.mark.parametrize("path", ["/home/ann/runs", "/home/ann/runs/two", "/home/ann/data.csv", "relative"])
def test_other_paths_stay_as_they_are(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CLUSTER_FOLDER, str(tmp_path))
    ServedFolder(str(RUN), tmp_path)
    assert served.here(path) == served.original(path) == Path(path)
    assert not served.is_copy(Path(path))


def test_a_process_of_no_cluster_has_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CLUSTER_FOLDER, raising=False)
    assert served.here(RUN) == served.original(RUN) == RUN
