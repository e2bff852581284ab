"""Measures nbgpu against its peers, each pair in one run and in turns, and writes docs/benchmarks.md.

    python tests/bench [start] [cell] [page] [train] [scaling] [telemetry] [logs] [transfer] [data] [slider]
        [peers] [loops] [mcrpy] [searches] [links] [advice] [ranks]

Seconds depend on the machine and on what else it does; a ratio of two things measured in turns does so much
less. Nothing here is an assertion.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
REPOSITORY = Path(__file__).resolve().parents[2]
SUPPORT = REPOSITORY / "tests" / "support"
sys.path[:0] = [str(REPOSITORY / "tests"), *map(str, (SUPPORT, SUPPORT / "kernels", SUPPORT / "warm"))]

import advice  # noqa: E402
import epochs  # noqa: E402
import links  # noqa: E402
import many_ranks  # noqa: E402
import microstructures  # noqa: E402
import pages  # noqa: E402
import peers  # noqa: E402
import searches  # noqa: E402
import slider  # noqa: E402
import step_split  # noqa: E402
import trainer  # noqa: E402
import training  # noqa: E402
from kernel import Kernel, kernel  # noqa: E402 - it stands beside the tests

import nbgpu  # noqa: E402

BENCH = Path(__file__).parent
DOCUMENT = REPOSITORY / "docs" / "benchmarks.md"
OTHER_DOCUMENTS = dict.fromkeys([*links.PARTS, "advice"], REPOSITORY / "docs" / "scaling.md")
"""By benchmark, where its result stands if not in DOCUMENT."""


TO_IMPORT = {"import nbgpu": "nbgpu", "import torch": "torch"}
IMPORTED = "import time; begun_s = time.perf_counter(); import {}; print(time.perf_counter() - begun_s)"
START = "%nbgpu start --gpus none --ranks 2"
LOADED_BEFORE_S = 2.0
SPLIT_FOR_S = 120.0


def start() -> str:
    """Start to the first all_reduce against the import of torch and against raw ipyparallel's defaults."""
    scripts: dict[str, list[float]] = {"nbgpu": [], "ipyparallel": [], "nbgpu16": []}
    imports: dict[str, list[float]] = {name: [] for name in TO_IMPORT}
    in_notebook: dict[str, list[float]] = {"at once": [], "later": []}
    for _ in range(5):
        for name, module in TO_IMPORT.items():
            imports[name].append(float(_output([sys.executable, "-c", IMPORTED.format(module)])))
        for name, taken in scripts.items():
            taken.append(float(_output([sys.executable, str(BENCH / "start.py"), name]).splitlines()[-1]))
        in_notebook["at once"].append(_felt_s(0.0))
        in_notebook["later"].append(_felt_s(LOADED_BEFORE_S))
    rows = [
        ("`import nbgpu`", imports["import nbgpu"]),
        ("`import torch`", imports["import torch"]),
        ("ipyparallel's defaults, Python started to first all_reduce", scripts["ipyparallel"]),
        ("nbgpu, the same", scripts["nbgpu"]),
        ("nbgpu, 16 ranks on these cores", scripts["nbgpu16"]),
        ("`%load_ext nbgpu` and at once `%nbgpu start` in a notebook, both cells", in_notebook["at once"]),
        ("`%nbgpu start` where `%load_ext nbgpu` was run 2 s before", in_notebook["later"]),
    ]
    torch = imports["import torch"]
    return (
        _table("seconds", rows)
        + _ratio("nbgpu / import torch", scripts["nbgpu"], torch, "at most 1.6")
        + _ratio("both cells / import torch", in_notebook["at once"], torch, "at most 1.6")
        + _ratio("nbgpu / ipyparallel", scripts["nbgpu"], scripts["ipyparallel"], "at most 0.33")
    )


def _felt_s(after_s: float) -> float:
    """How long a person waits for a start in a new kernel: with 0 from the loading of the extension on, else
    from the start that comes so long after it."""
    with kernel() as notebook:
        loading_s = _must(notebook, "%load_ext nbgpu")
        time.sleep(after_s)
        starting_s = _must(notebook, START)
        _must(notebook, "%nbgpu stop")
    return starting_s if after_s else loading_s + starting_s


EMPTY_CELLS = {"plain": "pass", "%%px": "%%px --block\npass", "%%distributed": "%%distributed\npass"}
CLUSTER_FOR_CELLS = [
    f"%load_ext nbgpu\n{START}",
    "import nbgpu, ipyparallel as ipp\n"
    "client = ipp.Client(connection_info=str(nbgpu.current().connection_file))\n"
    "client[:].activate()",
]


def cell() -> str:
    """Round trip of an empty cell: plain, `%%px` and `%%distributed`, in turns in one kernel."""
    with kernel() as notebook:
        for code in CLUSTER_FOR_CELLS:
            _must(notebook, code)
        told = f"With {1000 * peers.PAUSE_S:.0f} ms between two cells.\n\n"
        told += _empty_cells(_round_trips_ms(notebook, 200, peers.PAUSE_S))
        told += "Each as soon as the one before has ended, as Run All sends them.\n\n"
        told += _empty_cells(_round_trips_ms(notebook, 400, 0.0))
        _must(notebook, "client.close()")
        _must(notebook, "%nbgpu stop")
    return told


def _round_trips_ms(notebook: Kernel, num_cells: int, pause_s: float) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in EMPTY_CELLS}
    for _ in range(num_cells):
        for name, code in EMPTY_CELLS.items():
            time.sleep(pause_s)
            times[name].append(1000 * _must(notebook, code))
    return times


def page() -> str:
    """The same in a notebook that is open in JupyterLab, from the command to run the cell until the page has
    shown its end."""
    return _empty_cells(pages.round_trips_ms(CLUSTER_FOR_CELLS, EMPTY_CELLS, 100))


def _empty_cells(times: Mapping[str, Sequence[float]]) -> str:
    return (
        _table("ms", [(f"empty cell, {name}", taken) for name, taken in times.items()])
        + _ratio("%%distributed / plain", times["%%distributed"], times["plain"], "below 1.5")
        + _ratio("%%px / plain", times["%%px"], times["plain"])
        + f"95th percentiles, %%distributed / plain: {_late(times['%%distributed']) / _late(times['plain']):.2f}.\n\n"
    )


def _late(values: Sequence[float]) -> float:
    """The 95th percentile."""
    return statistics.quantiles(values, n=20)[-1]


def train() -> str:
    """Steps per second of the trainer under torchrun against the same loop in plain torch, two ranks with one
    thread each."""
    told = ""
    for patch_size, batch_size in ((16, 4), (32, 2)):
        with training.volumes(patch_size) as file:
            rates = training.in_turns(
                {
                    "plain torch": training.by_hand("plain", file, batch_size),
                    "plain torch that keeps memory": training.by_hand("plain", file, batch_size, True),
                    "nbgpu": training.ours(patch_size=patch_size, batch_size=batch_size),
                }
            )
        told += f"Patches of {patch_size}^3, {batch_size} for each rank.\n\n"
        told += _table("steps/s", list(rates.items()))
        told += _ratio("nbgpu / plain torch", rates["nbgpu"], rates["plain torch"], "at least 0.99")
        kept = rates["plain torch that keeps memory"]
        told += _ratio("nbgpu / plain torch that keeps memory", rates["nbgpu"], kept)
    return told


def scaling() -> str:
    """Samples per second of the autoencoder on two ranks against one, one thread each, patches of 32^3."""
    starts = {num_ranks: training.ours(num_ranks, patch_size=32, batch_size=2) for num_ranks in (1, 2)}
    rates = training.in_turns({"one rank": starts[1], "two ranks": starts[2]})
    one = [2 * rate for rate in rates["one rank"]]
    two = [4 * rate for rate in rates["two ranks"]]
    rows = [("one rank", one), ("two ranks", two)]
    return _table("samples/s", rows) + _ratio("two / one", two, one, "at least 1.85")


def loops() -> str:
    """Steps per second of the trainer and of the same loop with Lightning Fabric, accelerate and plain torch,
    patches of 32^3."""
    peers.require_environment()
    names = ("plain", "fabric", "accelerate")
    with training.volumes(32) as file:
        starts = {name: training.by_hand(name, file, 2) for name in names}
        rates = training.in_turns({"nbgpu": training.ours(patch_size=32, batch_size=2), **starts})
    ratios = [_ratio(f"nbgpu / {name}", rates["nbgpu"], rates[name]) for name in names]
    return _table("steps/s", list(rates.items())) + "".join(ratios)


def telemetry() -> str:
    """The same run with telemetry on and off, and one run that splits the time of its steps in turns."""
    rates = training.in_turns({"off": training.ours(telemetry=False), "on": training.ours()})
    rows = [(f"telemetry {name}", taken) for name, taken in rates.items()]
    ratio = _ratio("on / off", rates["on"], rates["off"], "at least 0.98")
    whole, split = training.in_blocks(
        training.ours(options=["--split-in-turns"]), trainer.BLOCK_STEPS, SPLIT_FOR_S
    )
    blocks = [("blocks of 10 steps that are not split", whole), ("blocks that are", split)]
    split_ratio = _ratio("split / not split", split, whole, "at least 0.99")
    added = [(f"the split of a step with {n} buckets, by itself", step_split.added_us(n)) for n in (1, 4, 16)]
    return (
        _table("steps/s", rows)
        + ratio
        + _table("steps/s", blocks)
        + split_ratio
        + _table("us of processor time", added)
    )


def logs() -> str:
    """The same run with no log at all, and with every log: metrics.csv, epochs.jsonl, TensorBoard, W&B
    offline."""
    every = {"tensorboard": True, "histograms_every": 50, "wandb": "offline"}
    rates = training.in_turns({"no log": training.ours(telemetry=False), "every log": training.ours(**every)})
    ratio = _ratio("every log / no log", rates["every log"], rates["no log"], "at least 0.95")
    return _table("steps/s", list(rates.items())) + ratio


def transfer() -> str:
    """100 MB from a rank into the notebook's process, and from there to two ranks, against a plain clone."""
    import torch

    torch.set_num_threads(1)
    num = 25_000_000
    tensor = torch.rand(num)
    array = tensor.numpy()
    with nbgpu.Cluster(gpus="none", ranks=2) as cluster:
        cluster.execute(f"tensor = torch.rand({num}); array = tensor.numpy()")
        raw = [cluster.ranks[rank] for rank in range(2)]

        def raw_push(**values: Any) -> None:
            for result in [engine.push(values, block=False) for engine in raw]:
                result.get()

        actions: dict[str, Callable[[], Any]] = {
            "clone": lambda: tensor.clone(),
            "pull tensor": lambda: cluster.pull("tensor", rank=1),
            "pull array": lambda: cluster.pull("array", rank=1),
            "raw pull tensor": lambda: raw[1].pull("tensor", block=True),
            "raw pull array": lambda: raw[1].pull("array", block=True),
            "push tensor": lambda: cluster.push(pushed=tensor),
            "push array": lambda: cluster.push(pushed=array),
            "raw push tensor": lambda: raw_push(pushed=tensor),
            "raw push array": lambda: raw_push(pushed=array),
            "clone, read": lambda: tensor.clone().sum(),
            "pull, read": lambda: cluster.pull("tensor", rank=1).sum(),
            "clone, change": lambda: tensor.clone().add_(1),
            "pull, change": lambda: cluster.pull("tensor", rank=1).add_(1),
        }
        times: dict[str, list[float]] = {name: [] for name in actions}
        for turn in range(17):
            for name, action in actions.items():
                started_s = time.perf_counter()
                value = action()
                took_s = time.perf_counter() - started_s
                # Giving 100 MB back takes its time too, and is no part of any of these.
                del value
                cluster.execute("pushed = None")
                if turn > 1:  # the first ones warm up
                    times[name].append(1000 * took_s)
    rows = [
        ("`x.clone()` in one process", "clone"),
        ("`%pull`, tensor, until it can be used", "pull tensor"),
        ("`%pull`, NumPy array", "pull array"),
        ("ipyparallel's `view.pull`, tensor", "raw pull tensor"),
        ("ipyparallel's `view.pull`, NumPy array, which may not be written to", "raw pull array"),
        ("`%push`, tensor, until both ranks have it", "push tensor"),
        ("`%push`, NumPy array", "push array"),
        ("ipyparallel's `view.push`, tensor", "raw push tensor"),
        ("ipyparallel's `view.push`, NumPy array", "raw push array"),
        ("`x.clone().sum()`", "clone, read"),
        ("`%pull x`, then `x.sum()`", "pull, read"),
        ("`x.clone().add_(1)`", "clone, change"),
        ("`%pull x`, then `x.add_(1)`", "pull, change"),
    ]
    table = _table("ms", [(text, times[name]) for text, name in rows])
    ours = ["pull tensor", "pull array", "push tensor", "push array"]
    ratios = [_ratio(f"{name} / clone", times[name], times["clone"], "at most 2") for name in ours]
    touched = [
        _ratio("pulled and read / cloned and read", times["pull, read"], times["clone, read"]),
        _ratio("pulled and changed / cloned and changed", times["pull, change"], times["clone, change"]),
    ]
    return table + "".join(ratios + touched)


def data() -> str:
    """An epoch with cached volumes against one that decodes them."""
    return epochs.measure(_table, _ratio)


def peers_() -> str:
    """Cells of nbgpu and of its peers, two CPU ranks."""
    versions = peers.require_environment()
    return peers.cells(_table, _ratio) + peers.starts(_table) + f"With {versions}. "


def mcrpy() -> str:
    """The loss of 32 x 32 x 32 voxels and its gradient beside MCRpy's, in turns, one thread each."""
    return microstructures.measure(_table, _ratio)


def searches_() -> str:
    """A step of the search for a microstructure, with L-BFGS spread over the ranks and with scipy's."""
    return searches.measure(_table, _ratio)


def _must(notebook: Kernel, code: str) -> float:
    """Runs a cell that must not fail; returns its round trip in seconds."""
    done = notebook.run(code, timeout_s=300)
    if done.status != "ok":
        raise RuntimeError(f"{code}\n{done.error}{done.stderr}")
    return done.took_s


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY).stdout


def _table(unit: str, rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    lines = [f"| | median, {unit} | from | to | runs |", "|---|---|---|---|---|"]
    for name, values in rows:
        middle = statistics.median(values)
        lines.append(f"| {name} | {middle:.3g} | {min(values):.3g} | {max(values):.3g} | {len(values)} |")
    return "\n".join(lines) + "\n\n"


def _ratio(name: str, ours: Sequence[float], theirs: Sequence[float], aim: str = "") -> str:
    """The median and the spread of the ratios of pairs that were measured one after the other."""
    pairs = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    ratio = statistics.median(pairs)
    quarter = len(pairs) // 4
    spread = f"half of the pairs lie between {pairs[quarter]:.2f} and {pairs[-1 - quarter]:.2f}"
    return f"**{name}: {ratio:.2f}**{f' (aim: {aim})' if aim else ''}; {spread}.\n\n"


def _write(name: str, text: str) -> None:
    """Puts a benchmark's result between its marks in the document; what stands around it stays."""
    path = OTHER_DOCUMENTS.get(name, DOCUMENT)
    document = path.read_text() if path.exists() else "# Benchmarks\n"
    begin, end = f"<!-- bench {name} -->", f"<!-- end {name} -->"
    block = f"{begin}\n{text.strip()}\n{end}"
    if begin in document:
        before, _, rest = document.partition(begin)
        document = before + block + rest.partition(end)[2]
    else:
        document = document.rstrip() + f"\n\n{block}\n"
    path.write_text(document)


BENCHMARKS: dict[str, Callable[[], str]] = {
    "start": start,
    "cell": cell,
    "train": train,
    "scaling": scaling,
    "telemetry": telemetry,
    "logs": logs,
    "transfer": transfer,
    "data": data,
    "slider": slider.slider,
}
BY_NAME_ONLY: dict[str, Callable[[], str]] = {
    "page": page,
    "peers": peers_,
    "loops": loops,
    "mcrpy": mcrpy,
    "searches": searches_,
    "advice": advice.advice,
    "ranks": many_ranks.many_ranks,
    **links.PARTS,
}
"""Those that need more than an environment for development, or more time."""
COMMANDS = {
    "page": "python tests/bench page",
    "peers": "make bench-peers",
    "loops": "make bench-peers",
    "mcrpy": "make bench-mcrpy",
    "searches": "python tests/bench searches",
    "advice": "python tests/bench advice",
    "ranks": "python tests/bench ranks",
    **dict.fromkeys(links.PARTS, "python tests/bench links"),
}


def main(names: Sequence[str]) -> None:
    # 'links' is several, each of which can be measured by itself when the machine is quiet.
    parts = [part for name in names or BENCHMARKS for part in (links.PARTS if name == "links" else [name])]
    for name in parts:
        measure = (BENCHMARKS | BY_NAME_ONLY)[name]
        title = " ".join((measure.__doc__ or "").split())
        print(f"{name}: {title}", flush=True)
        result = measure()
        print(result, flush=True)
        cores = len(os.sched_getaffinity(0))
        command = COMMANDS.get(name, "make bench")
        when = f"{time.strftime('%Y-%m-%d')}, {cores} CPU cores ({platform.machine()}), no GPU; `{command}`"
        _write(name, f"### {title}\n\n{result}{when}")


if __name__ == "__main__":
    main(sys.argv[1:])
