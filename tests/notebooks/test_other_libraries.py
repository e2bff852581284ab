"""Other libraries train in a cell as they do under torchrun: docs/howto/train_with_other_libraries.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import launching
import leaks
import pytest
from conftest import REPOSITORY
from kernel import Kernel, kernel

PAGE = REPOSITORY / "docs" / "howto" / "train_with_other_libraries.md"
SECTIONS = dict(re.findall(r"^## (.*)\n((?:(?!^## ).*\n)*)", PAGE.read_text(), re.MULTILINE))
CELL = re.compile(r"^```python\n(.*?)^```\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL)
NEEDED = {
    "accelerate": ["accelerate"],
    "The Trainer of transformers": ["transformers", "accelerate"],
    "Lightning Fabric": ["lightning"],
    "Lightning Trainer": ["lightning"],
    "torchmetrics": ["torchmetrics"],
}
SLOW_TO_IMPORT = {"The Trainer of transformers", "Lightning Fabric", "Lightning Trainer"}

DIGEST = """
import hashlib
import torch
import torch.distributed as dist

torch.set_num_threads(1)
torch.manual_seed(0)

def say(model, *numbers):
    weights = b"".join(weight.detach().numpy().tobytes() for weight in model.parameters())
    numbers = [float(number).hex() for number in numbers]
    print("numbers of", dist.get_rank(), hashlib.sha256(weights).hexdigest(), *numbers, flush=True)
"""
ACCELERATE = """
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

set_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(52, 8)), batch_size=4, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for (x,) in loader:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
say(model, *accelerator.gather(loss))
"""
TRANSFORMERS = """
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

sizes = dict(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
texts = [{"input_ids": text, "labels": text} for text in torch.randint(0, 32, (20, 8))]
arguments = TrainingArguments(
    "trainer", use_cpu=True, per_device_train_batch_size=2, max_steps=6, report_to=[], save_strategy="no",
    disable_tqdm=True, logging_strategy="no",
)
trainer = Trainer(LlamaForCausalLM(LlamaConfig(**sizes)), arguments, train_dataset=texts)
say(trainer.model, trainer.train().training_loss)
"""
LIGHTNING = """
from lightning import Fabric

fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01))
data = torch.utils.data.DataLoader(torch.randn(52, 8), batch_size=4, shuffle=True)
for x in fabric.setup_dataloaders(data):
    optimizer.zero_grad()
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    fabric.backward(loss)
    optimizer.step()
say(model, *fabric.all_gather(loss))
"""


def require(*libraries: str) -> None:
    """Skip unless these are installed. They are not imported here, because an import may leave something."""
    for library in libraries:
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed: `make test-libraries` has an environment with it")


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A notebook with two ranks in a folder of its own, because the cells write files."""
    with kernel() as started, leaks.holding_family_of(started.manager.provisioner.pid):
        assert started.run(f"%cd -q {tmp_path_factory.mktemp('libraries')}").status == "ok"
        assert started.run(f"%load_ext nbgpu\n%nbgpu start {launching.flags()}").status == "ok"
        yield started
        started.run("%nbgpu stop")


def test_every_section_is_short_and_has_a_cell() -> None:
    assert set(NEEDED) < set(SECTIONS)
    for section, text in SECTIONS.items():
        assert len(CELL.findall(text)) == 1, section
        written = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        assert len([line for line in written.splitlines() if line]) <= 10, section


@pytest.mark.parametrize(
    "section",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in SLOW_TO_IMPORT else [], id=name.split()[-1])
        for name in SECTIONS
    ],
)
def test_a_section_does_what_it_says(notebook: Kernel, section: str) -> None:
    require(*NEEDED.get(section, []))
    [(code, shown)] = CELL.findall(SECTIONS[section])
    done = notebook.run(code, timeout_s=240)
    assert done.status == "ok", f"{done.error}\n{done.written}"
    assert done.stdout.splitlines()[-shown.count("\n") :] == shown.splitlines(), done.written


@pytest.mark.long
@pytest.mark.one_host("compares with processes of this host")
@pytest.mark.parametrize(
    ("library", "script"),
    [("accelerate", ACCELERATE), ("transformers", TRANSFORMERS), ("lightning", LIGHTNING)],
)
def test_the_numbers_are_those_of_the_script_under_torchrun(
    notebook: Kernel, tmp_path: Path, library: str, script: str
) -> None:
    require(library)
    path = tmp_path / "script.py"
    path.write_text(DIGEST + script)
    # A file for each rank, because two that print at once mix their lines.
    logs = ["--log-dir", str(tmp_path / "logs"), "--redirects", "1"]
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *logs, "--standalone", "--nproc-per-node", "2", str(path)],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    printed = [log.read_text() for log in sorted((tmp_path / "logs").rglob("stdout.log"))]
    right = sorted(line for text in printed for line in text.splitlines() if line.startswith("numbers of"))
    assert [line.split()[2] for line in right] == ["0", "1"], printed
    done = notebook.run(f"%%distributed\n{DIGEST}{script}", timeout_s=240)
    assert done.status == "ok", done.error
    in_cell = [line for lines in done.said(0, 1) for line in lines if line.startswith("numbers of")]
    assert in_cell == right


@pytest.mark.long
@pytest.mark.parametrize(
    ("library", "cell", "said"),
    [
        (
            "accelerate",
            "import accelerate\naccelerate.notebook_launcher(print, num_processes=2)",
            "The ranks are the processes that notebook_launcher starts in a notebook: call the function itself",
        ),
        (
            "lightning",
            "import lightning\nlightning.Fabric(accelerator='cpu', devices=2, strategy='ddp_notebook').launch(print)",
            "RuntimeError: lightning would start processes of its own here. The ranks are these processes",
        ),
        (
            "lightning",
            "import lightning\nlightning.Fabric(accelerator='cpu', devices=2, strategy='ddp_spawn').launch()",
            "The ranks are these processes: pass devices=world_size and strategy='ddp'",
        ),
    ],
)
def test_a_launcher_of_notebooks_says_what_to_write(
    notebook: Kernel, library: str, cell: str, said: str
) -> None:
    require(library)
    # notebook_launcher starts nothing where an Accelerator was made.
    notebook.run("%%distributed\nimport sys\nif 'accelerate.state' in sys.modules: sys.modules['accelerate.state']"
                 ".AcceleratorState._reset_state(True)")
    done = notebook.run(f"%%distributed\n{cell}", timeout_s=120)
    for left in Path(tempfile.gettempdir()).glob("torchelastic_*"):
        shutil.rmtree(left)  # torch leaves the logs of processes that it did not start
    assert done.status == "error"
    assert done.error.splitlines()[-1].startswith(said), done.error
    assert notebook.run("%%distributed\nx = torch.ones(1); dist.all_reduce(x); int(x)").said(0, 1) == [["2"]] * 2


@pytest.mark.long
def test_lightning_alone_on_each_rank_is_said_once(notebook: Kernel) -> None:
    require("lightning")
    alone = "alone is configured for a single process, and each rank trains alone: pass devices=world_size and"
    made = notebook.run("%%distributed\nimport lightning\nalone = lightning.Fabric(accelerator='cpu')", timeout_s=120)
    assert made.stderr.count(alone) == 1, made.stderr
    assert alone not in notebook.run("%%distributed\nprint(1)").stderr


def test_what_was_made_for_another_number_of_ranks_is_listed(notebook: Kernel) -> None:
    require("accelerate")
    made = notebook.run("%%distributed\nfrom accelerate import Accelerator\naccelerator = Accelerator()")
    assert made.status == "ok", made.error
    resized = notebook.run("%nbgpu resize 3")
    assert "make it again for 3. It was: accelerator = Accelerator(...)" in resized.written
    again = notebook.run("%%distributed\nfrom accelerate import Accelerator\nprint(Accelerator().num_processes)")
    assert again.said(0, 1, 2) == [["3"]] * 3, again.error
