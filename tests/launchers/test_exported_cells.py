"""The script of a notebook's cells runs under torchrun as in the notebook, also when it is started again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import nbgpu
from nbgpu.exports import export

TRAINS = """
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(seed)
model = DDP(torch.nn.Linear(4, 1).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank)
x = torch.randn(32, 4, generator=generator).to(device)
for step in range(20):
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
# In one piece with its end, because both ranks write into one pipe.
SHOWS = "print(f'rank {rank}: {loss.item().hex()}\\n', end='', flush=True)"
# Rank 0 ends when its peers may still connect to it, at each start but the last.
ENDS = """
import os, signal

if rank == 0 and int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 3:
    os.kill(os.getpid(), signal.SIGKILL)
torch.distributed.all_reduce(torch.ones(1))
"""


def _notebook(path: Path, *cells: str) -> Path:
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells]), path)
    return path


def _said_under_torchrun(notebook: Path) -> list[str]:
    """The lines of the ranks, from the exported files as a person starts them."""
    folder = notebook.with_suffix("")
    environment = f"export PATH={Path(sys.executable).parent}:$PATH"
    settings = {"gpus_per_node": 0, "cpus_per_node": 2, "setup": environment, "out": str(folder)}
    made = export.export_notebook(notebook, "torchrun", settings)
    done = subprocess.run(
        ["bash", str(made.folder / "torchrun.sh")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TMPDIR": str(notebook.parent), "PORT": "0"},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_script_gives_the_notebooks_numbers(cluster2: nbgpu.Cluster, tmp_path: Path) -> None:
    cluster2.push(seed=7)
    cluster2.execute(f"{TRAINS}\nlast = loss.item()")
    here = [f"rank {rank}: {loss.hex()}" for rank, loss in cluster2.pull("last", ranks="all").items()]
    cells = (
        "%load_ext nbgpu\n%nbgpu start",
        "seed = 7",
        f"%%distributed\n{TRAINS}",
        f"%%distributed\n{SHOWS}",
    )
    assert _said_under_torchrun(_notebook(tmp_path / "lesson.ipynb", *cells)) == here


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_ranks_meet_again_when_torchrun_starts_them_again(tmp_path: Path) -> None:
    cells = (f"%%distributed\n{ENDS}", "%%distributed\nprint(f'rank {rank} is here\\n', end='', flush=True)")
    notebook = _notebook(tmp_path / "ends.ipynb", *cells)
    assert _said_under_torchrun(notebook) == ["rank 0 is here", "rank 1 is here"]
