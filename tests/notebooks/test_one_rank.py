"""The notebooks that train on all ranks also do so with one, as on a machine with one GPU.

Each is run in full with two ranks by a test of its own. Here only the cells run that depend on the ranks.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from notebook_run import executed

pytestmark = pytest.mark.long

BEGIN = ("%load_ext nbgpu", "%nbgpu start")
CELLS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "02_your_own_recipe": (
        ("!nbgpu new", "cluster.train", "run.wait()", "%nbgpu stop", "nbgpu.sweep"),
        {
            "!nbgpu": f"!{sys.executable} -m nbgpu.cli",
            "val_every=100": "val_every=3, steps=6",
            "steps=200": "steps=6, gpus='none'",
            "val_every=50": "val_every=3",
        },
    ),
    "06_memory": (("found = nbgpu.memory", "found.figure()", 'guess = "weights"', "tensors.idxmax()"), {}),
    "09_autoencoder": (
        ("import phantom", "contest =", "run.wait()", "large.nii.gz", "scale_factor, psnr_db"),
        {
            '"steps": 600, "val_every": 100': '"steps": 4, "val_every": 2, "num_phantoms": 24',
            '"adversarial_after": 300': '"adversarial_after": 2',
        },
    ),
    "10_diffusion": (
        ('train("diffusion"', "run.wait()", "%push", "sample_share", "shares ="),
        {"steps=200": "steps=4, num_phantoms=32, val_cases=2", "(2, 4, 11)": "(2, 4)", "max_cases=6": "max_cases=2"},
    ),
    "11_survival": (
        ('train("survival"', "run.wait()", "cox_loss"),
        {'train("survival")': 'train("survival", steps=4, num_patients=60, val_every=2)'},
    ),
    "12_microstructure": (("target = ", "nbgpu.current()", "run.wait()"), {"steps=200": "steps=6"}),
    "13_lithography": (
        ('train("lithography"', "run.wait()", "process_window", "parts ="),
        {"steps=256": "steps=4, num_masks=40"},
    ),
}


IN_CI = ("02_your_own_recipe", "06_memory", "11_survival")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.release) for name in CELLS]
)
def test_one_rank_is_enough(name: str, tmp_path: Path) -> None:
    pieces, changes = CELLS[name]
    content = executed(f"{name}.ipynb", tmp_path, changes, ranks=1, only=(*BEGIN, *pieces))
    said = "".join(_texts(content))
    assert "1 CPU rank" in said
    if name == "11_survival":
        # All samples are those of the one rank.
        found = re.search(r"of all samples (\S+), of this rank's (\S+)", said)
        assert found
        assert found[1] == found[2]


def _texts(content: Any) -> list[str]:
    return [
        output.get("text", "") or str(output.get("data", {}).get("text/plain", ""))
        for cell in content.cells
        for output in cell.get("outputs", ())
    ]
