"""notebooks/09_autoencoder.ipynb runs to its end, and draws volumes, reconstructions and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from notebook_run import executed


@pytest.mark.long
@pytest.mark.release
def test_the_notebook_trains_against_a_discriminator_and_encodes_a_volume(tmp_path: Path) -> None:
    shorter = {
        '"steps": 600, "val_every": 100': '"steps": 30, "val_every": 15',
        '"adversarial_after": 300': '"adversarial_after": 15',
    }
    content = executed("09_autoencoder.ipynb", tmp_path, shorter)
    cells = {cell.source: cell.outputs for cell in content.cells if cell.cell_type == "code"}
    drawn = [s for s, outputs in cells.items() if any("image/png" in o.get("data", {}) for o in outputs)]
    assert len(drawn) == 3
    live = [o for o in cells[next(s for s in cells if "run.panel()" in s)] if "text/html" in o.get("data", {})]
    assert any("step 30: reconstruction" in o.data["text/html"] for o in live)
    index = json.loads((tmp_path / "latents" / "latents.json").read_text())
    told = "".join(o.get("text", "") for o in cells[next(s for s in cells if "pull" in s)])
    assert "latent (2, 20, 18, 16), standard deviation 1.00" in told
    assert f"{index['volumes'][0]['psnr_db']:.1f} dB" in told
