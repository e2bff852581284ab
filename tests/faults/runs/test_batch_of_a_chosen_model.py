"""The largest batch that fits is found for the model that the data and the memory have chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

import nbgpu


@pytest.mark.long
def test_a_run_with_the_batch_that_was_found_keeps_the_size_that_was_chosen(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lines = ["image,time,event"]
    for index in range(12):
        voxels = rng.normal(0, 300, (40, 40, 24)).astype(np.int16)
        nibabel.save(nibabel.Nifti1Image(voxels, np.eye(4)), tmp_path / f"{index}.nii")
        lines.append(f"{index}.nii,{30 - index},{index % 2}")
    (tmp_path / "cohort.csv").write_text("\n".join(lines))
    settings: dict[str, Any] = {"data": str(tmp_path / "cohort.csv"), "widen_factor": 0.125}
    with nbgpu.Cluster(gpus="none", ranks=2, memory_limit="900MiB") as limited:
        found = limited.find_batch_size("survival", **settings)
        assert found.batch_size > 16
        # At the batch size that was found, the volumes are those that it was found for.
        plan = limited.plan("survival", **settings, batch_size=found.batch_size)
        assert getattr(plan.config, "image_size", ()) == (40, 40, 24)
        # A batch that cannot fit gets smaller volumes.
        other = limited.plan("survival", **settings, batch_size=2048)
        assert getattr(other.config, "image_size", ()) < (40, 40, 24)
