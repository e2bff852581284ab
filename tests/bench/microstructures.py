"""The loss of a volume and its gradient, nbgpu's and MCRpy's in turns: `make bench-mcrpy`.

MCRpy needs TensorFlow and an older NumPy, and lives in a virtual environment of its own, .venv-mcrpy. Each
has one thread.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[2]
MCRPY_PYTHON = REPOSITORY / ".venv-mcrpy" / "bin" / "python"
EDGE, LIMIT_TO = 32, 8
WEIGHTS = {"FFTCorrelations": 1.0, "Variation": 100.0}
NUM_TURNS = 30
_ALIKE = 1e-10


def measure(table: Callable[..., str], ratio: Callable[..., str]) -> str:
    import torch

    from nbgpu.recipes.microstructure.characterize import characterize
    from nbgpu.recipes.microstructure.losses import Loss
    from nbgpu.recipes.microstructure.measure import Measure
    from nbgpu.recipes.microstructure.objective import Objective
    from nbgpu.recipes.microstructure.sample import micrograph

    if not MCRPY_PYTHON.exists():
        raise SystemExit("MCRpy is not installed: make bench-mcrpy")
    torch.set_num_threads(1)
    picture = micrograph((64, 64), 2.0, [0.35], seed=1)
    field = torch.rand(EDGE, EDGE, EDGE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    how = Measure(LIMIT_TO)
    target = characterize(picture.double()[None], [*WEIGHTS], how, multigrid=False)
    objective = Objective(Loss([target], WEIGHTS, how))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.save(folder / "picture.npy", picture.numpy())
        np.save(folder / "field.npy", field.numpy())
        script = Path(__file__).with_name("mcrpy_loss.py")
        weights = [f"{descriptor}={weight}" for descriptor, weight in WEIGHTS.items()]
        with subprocess.Popen(
            [str(MCRPY_PYTHON), str(script), name, str(LIMIT_TO), *weights],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        ) as mcrpy:
            assert mcrpy.stdin is not None
            assert mcrpy.stdout is not None
            version, tensorflow = mcrpy.stdout.readline().split()
            _compare(objective(field[None]), np.load(folder / "found.npz"))
            ours: list[tuple[float, float]] = []
            theirs: list[tuple[float, float]] = []
            for _ in range(NUM_TURNS):
                mcrpy.stdin.write("\n")
                real_s, processor_s = map(float, mcrpy.stdout.readline().split())
                theirs.append((real_s, processor_s))
                began_s, began_cpu_s = time.perf_counter(), time.process_time()
                objective(field[None])
                ours.append((time.perf_counter() - began_s, time.process_time() - began_cpu_s))
            mcrpy.stdin.close()
    rows, ratios = [], []
    for kind, place in (("real time", 0), ("processor time", 1)):
        mine, other = ([1000 * times[place] for times in all_] for all_ in (ours, theirs))
        rows += [(f"MCRpy, {kind}", other), (f"nbgpu, {kind}", mine)]
        ratios.append(ratio(f"MCRpy / nbgpu, {kind}", other, mine, "at least 20"))
    versions = f"MCRpy {version} with TensorFlow {tensorflow}, torch {torch.__version__}"
    told = f"FFTCorrelations and Variation, limit_to={LIMIT_TO}, float64; both values are the same to 1e-10. {versions}.\n\n"
    return told + table("ms", rows) + "".join(ratios)


def _compare(ours: tuple[object, object], theirs: np.lib.npyio.NpzFile) -> None:
    """Two that work out different things cannot be compared."""
    for mine, name in zip(ours, ("loss", "gradient"), strict=True):
        found, wanted = np.asarray(mine), theirs[name]
        if np.abs(found - wanted).max() > _ALIKE * np.abs(wanted).max():
            raise RuntimeError(f"the {name} differs from MCRpy's by {np.abs(found - wanted).max():g}")
