"""nbgpu's cells beside those of its peers, each in a kernel of its own, in turns: `make bench-peers`.

The peers live in a virtual environment of their own, .venv-peers, with the same versions of all else.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty

from kernel import Kernel, kernel

REPOSITORY = Path(__file__).resolve().parents[2]
PEERS_PYTHON = REPOSITORY / ".venv-peers" / "bin" / "python"
NUM_CELLS = int(os.environ.get("PEERS_CELLS", "200"))
NUM_STARTS = int(os.environ.get("PEERS_STARTS", "5"))
NUM_PRINTS = 10_000
PAUSE_S = 0.02
"""So that no cell pays for what the one before has left to do."""
PATIENCE_S = 600
PEERS = ("nbdistributed", "jupyter-distributed")
OURS = ("ipyparallel", "ipykernel", "torch", "IPython")

PRINTS = f"for number in range({NUM_PRINTS}):\n    print('line', number)"
ALL_REDUCE = "import torch, torch.distributed as dist\ntotal = torch.ones(1)\ndist.all_reduce(total)\nprint('sum', int(total))"
PX_FOLDER = "__import__('tempfile').mkdtemp(prefix='nbgpu-bench-')"


@dataclass(frozen=True)
class Tool:
    """How a tool is driven in its kernel."""

    name: str
    start: tuple[str, ...]
    """Cells that bring two ranks up, up to where a cell can call all_reduce."""
    cell: Callable[[str], str]
    """What a person types to run code on all ranks."""
    stop: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    all_reduce: str = ALL_REDUCE


def _launcher(module: str) -> tuple[str, ...]:
    return (str(PEERS_PYTHON), "-m", module, "-f", "{connection_file}")


NBGPU = Tool(
    "nbgpu `%%distributed`",
    ("%load_ext nbgpu\n%nbgpu start --gpus none --ranks 2",),
    lambda code: f"%%distributed\n{code}",
    ("%nbgpu stop",),
)
PX = Tool(
    "ipyparallel `%%px`, its defaults",
    (
        "import ipyparallel as ipp\ncluster = ipp.Cluster(n=2, log_level=40)\nclient = cluster.start_and_connect_sync()\n"
        f"folder = {PX_FOLDER}\nclient[:].push({{'folder': folder}})\n"
        "client[:].scatter('rank', [0, 1], flatten=True)\nclient[:].activate();",
    ),
    lambda code: f"%%px --block\n{code}",
    ("cluster.stop_cluster_sync(); client.close(); __import__('shutil').rmtree(folder)",),
    all_reduce="import torch.distributed as dist\n"
    "dist.init_process_group('gloo', init_method=f'file://{folder}/store', rank=rank, world_size=2)\n"
    + ALL_REDUCE,
)
NBDISTRIBUTED = Tool(
    "nbdistributed `%%distributed`",
    ("%load_ext nbdistributed\n%dist_init -n 2", "%dist_mode --disable"),
    lambda code: f"%%distributed\n{code}",
    ("%dist_shutdown",),
    command=_launcher("ipykernel_launcher"),
)
# Its server extension replaces the kernel's command by this one when a person sets the number of processes.
JUPYTER_DISTRIBUTED = Tool(
    "jupyter-distributed",
    (),
    lambda code: code,
    command=_launcher("jupyter_distributed.kernel"),
    environment=(("JUPYTER_DISTRIBUTED_BASE_KERNEL", "python3"), ("JUPYTER_DISTRIBUTED_WORLD_SIZE", "2")),
    all_reduce="import torch.distributed as dist\ndist.init_process_group('gloo')\n" + ALL_REDUCE,
)
TOOLS = (NBGPU, PX, NBDISTRIBUTED, JUPYTER_DISTRIBUTED)


@dataclass(frozen=True)
class Measured:
    took_s: float
    num_messages: int
    num_bytes: int
    text: str
    """All that it showed, in whatever form."""


def require_environment() -> str:
    """The versions of all tools, in words; SystemExit where the peers are not installed."""
    if not PEERS_PYTHON.exists():
        raise SystemExit("the peers are not installed: make bench-peers")
    code = "import sys; from importlib.metadata import version; print(', '.join(f'{n} {version(n)}' for n in sys.argv[1:]))"
    return ", ".join(
        subprocess.run(
            [python, "-c", code, *names], check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()
        for python, names in ((sys.executable, OURS), (str(PEERS_PYTHON), PEERS))
    )


def cells(table: Callable[..., str], ratio: Callable[..., str]) -> str:
    """The empty cell's round trip, and 10,000 prints from each of two ranks."""
    with ExitStack() as open_:
        kernels = {tool: open_.enter_context(_running(tool)) for tool in TOOLS}
        ways: dict[str, tuple[Kernel, Callable[[str], str]]] = {
            "a plain cell": (kernels[NBGPU], lambda code: code)
        } | {tool.name: (kernels[tool], tool.cell) for tool in TOOLS}
        trips: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(NUM_CELLS + 3):
            for name, (notebook, cell) in ways.items():
                time.sleep(PAUSE_S)
                took_ms = 1000 * _run(notebook, cell("pass")).took_s
                if turn >= 3:  # the first ones warm up
                    trips[name].append(took_ms)
        prints: dict[str, list[Measured]] = {name: [] for name in ways}
        for _ in range(NUM_STARTS):
            for name, (notebook, cell) in ways.items():
                prints[name].append(_run(notebook, cell(PRINTS)))
    plain = "a plain cell"
    text = "The empty cell's round trip, in turns.\n\n" + table("ms", list(trips.items()))
    text += "".join(
        ratio(f"{name} / a plain cell", trips[name], trips[plain]) for name in ways if name != plain
    )
    lines = [
        f"{NUM_PRINTS:,} prints from each of two ranks (the plain cell prints as many once), {NUM_STARTS} times in turns.\n",
        "| | median, s | from | to | messages | KB | last line shown |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, done in prints.items():
        times = [each.took_s for each in done]
        lines.append(
            f"| {name} | {statistics.median(times):.3g} | {min(times):.3g} | {max(times):.3g} "
            f"| {statistics.median(each.num_messages for each in done):,.0f} "
            f"| {statistics.median(each.num_bytes for each in done) / 1000:,.0f} "
            f"| {'yes' if all(f'line {NUM_PRINTS - 1}' in each.text for each in done) else 'no'} |"
        )
    return text + "\n".join(lines) + "\n\n"


def starts(table: Callable[..., str]) -> str:
    """From the kernel's start to the sum of the first all_reduce."""
    plain = "a plain kernel, to its first cell"
    times: dict[str, list[float]] = {plain: []} | {tool.name: [] for tool in TOOLS}
    num_lost = dict.fromkeys(times, 0)
    for _ in range(NUM_STARTS):
        started_s = time.monotonic()
        with kernel() as notebook:
            _run(notebook, "1")
            times[plain].append(time.monotonic() - started_s)
        for tool in TOOLS:
            started_s = time.monotonic()
            with _running(tool) as notebook:
                # Some say that they have started before their ranks can be reached, and the cell is lost.
                while "sum 2" not in (done := _run(notebook, tool.cell(tool.all_reduce))).text:
                    num_lost[tool.name] += 1
                    if time.monotonic() - started_s > PATIENCE_S:
                        raise RuntimeError(f"{tool.name}: no sum in {done.text[:2000]}")
                times[tool.name].append(time.monotonic() - started_s)
    lost = "".join(
        f"{name}: {num} first cells were lost because the ranks were not there yet, and were run again.\n\n"
        for name, num in num_lost.items()
        if num
    )
    heading = "From the start of the kernel to the sum of the first all_reduce of two ranks.\n\n"
    return heading + table("seconds", list(times.items())) + lost


@contextmanager
def _running(tool: Tool) -> Iterator[Kernel]:
    """The tool's kernel, with two ranks."""
    python = Path(tool.command[0]).parent if tool.command else None
    environment = dict(tool.environment)
    if python is not None:
        # Where the peers look for the kernels that they start themselves.
        environment |= {"PATH": f"{python}:{os.environ['PATH']}", "VIRTUAL_ENV": str(python.parent)}
    with kernel(tool.command, environment) as notebook:
        for code in tool.start:
            _run(notebook, code)
        try:
            yield notebook
        finally:
            for code in tool.stop:
                _run(notebook, code)


def _run(notebook: Kernel, code: str) -> Measured:
    """Runs a cell that must not fail, and counts what it sends to the page."""
    started_s = time.monotonic()
    num_messages = num_bytes = 0
    texts: list[str] = []
    message_id = notebook.client.execute(code, store_history=True, allow_stdin=False)
    while True:
        try:
            message = notebook.client.get_iopub_msg(timeout=1)
        except Empty:
            if time.monotonic() - started_s > PATIENCE_S:
                raise TimeoutError(f"the cell did not end within {PATIENCE_S} s: {code}") from None
            continue
        content = message["content"]
        if message["msg_type"] == "status":
            if content["execution_state"] == "idle" and message["parent_header"].get("msg_id") == message_id:
                break
            continue
        if message["msg_type"] == "error":
            raise RuntimeError(f"{code}\n{content}")
        if message["msg_type"] != "execute_input":
            num_messages += 1
            texts.append(json.dumps(content, default=str))
            num_bytes += len(texts[-1])
    while (reply := notebook.client.get_shell_msg(timeout=PATIENCE_S))["parent_header"].get(
        "msg_id"
    ) != message_id:
        pass
    took_s = time.monotonic() - started_s
    if reply["content"]["status"] != "ok":
        raise RuntimeError(f"{code}\n{reply['content']}")
    return Measured(took_s, num_messages, num_bytes, "".join(texts))
