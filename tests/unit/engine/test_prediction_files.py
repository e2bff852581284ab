"""How the files of predictions are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from nbgpu.engine.workload.recipe import file_stems
from nbgpu.machine.files import without_parent_steps
from nbgpu.run_folder.predictions import Job, ProgressReader

SUFFIXES = (".nii", ".nii.gz")


@pytest.mark.parametrize(
    ("names", "stems"),
    [
        (["/d/one.nii.gz", "/d/two scans.nii"], ["one", "two-scans"]),
        (
            ["/d/sub-01/anat/T1w.nii.gz", "/d/sub-02/anat/T1w.nii.gz", "/d/sub-02/anat/T2w.nii.gz"],
            ["sub-01-T1w", "sub-02-T1w", "T2w"],
        ),
        (
            ["a/s1/T1w.nii", "b/s1/T1w.nii", "b/s2/T1w.nii", "T1w.nii"],
            ["a-s1-T1w", "b-s1-T1w", "b-s2-T1w", "T1w"],
        ),
        # A file of each kind in one folder, and names that differ only in what file names cannot have.
        (["d/x.nii", "d/x.nii.gz", "d/a b.nii", "d/a:b.nii"], ["x-0", "x-1", "a-b-2", "a-b-3"]),
        (["d/x.nii", "d/x.nii.gz", "d/x-1.nii"], ["x-0", "x-1-1", "x-1-2"]),
        (["sample 0", "sample 1"], ["sample-0", "sample-1"]),
    ],
)
def test_files_of_equal_names_are_called_after_their_folders(names: list[str], stems: list[str]) -> None:
    assert file_stems(names, SUFFIXES) == stems


def test_a_path_has_no_steps_up(tmp_path: Path) -> None:
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real" / "inner")
    assert without_parent_steps(tmp_path / "link" / ".." / "x.csv") == tmp_path.resolve() / "real" / "x.csv"
    assert without_parent_steps(tmp_path / "link") == tmp_path / "link"


def test_progress_passes_over_damaged_and_foreign_lines(tmp_path: Path) -> None:
    job = Job(run_folder="run", checkpoint="run/checkpoints/step-00000001", data="d", out=str(tmp_path))
    rows = tmp_path / "rows"
    rows.mkdir()
    written = b'{"num_samples": 2}\n{"name": "a", "rank": 0, "failed": ""}\n{"na\x00\n[1]\n{"other": 1}\n{"name": "b"'
    (rows / "1-rank0.jsonl").write_bytes(written)
    reader = ProgressReader(job)
    progress = reader.read()
    assert (progress.num_samples, progress.num_done, progress.newest) == (2, 1, "a")
    (rows / "1-rank0.jsonl").write_bytes(written + b', "rank": 0, "failed": "no file"}\n')
    progress = reader.read()
    assert (progress.num_done, progress.num_failed, progress.newest) == (2, 1, "b")
