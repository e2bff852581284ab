"""MCRpy's loss of a volume and its gradient, in an environment of its own: one thread, one evaluation for
each line on stdin.

    .venv-mcrpy/bin/python tests/bench/mcrpy_loss.py FOLDER LIMIT_TO NAME=WEIGHT ...

FOLDER has picture.npy, the target, and field.npy. It leaves found.npz there, the loss and the gradient, and
then answers each line with the seconds that an evaluation took, real and of the processor.
"""

import os
import sys
import time
from importlib.metadata import version
from pathlib import Path

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}

import mcrpy
import numpy as np
import tensorflow as tf
from mcrpy.src.DMCR import DMCR

tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)


def main(folder: Path, limit_to: int, weights: dict[str, float]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # it prints what it does
    settings = {"descriptor_types": [*weights], "limit_to": limit_to, "use_multigrid_descriptor": False}
    target = mcrpy.characterize(
        mcrpy.Microstructure(np.load(folder / "picture.npy"), use_multiphase=False),
        mcrpy.CharacterizationSettings(use_multiphase=False, **settings),
    )
    search = DMCR(descriptor_weights=[*weights.values()], n_phases=1, **settings)
    field = np.load(folder / "field.npy")
    search.assign_desired_descriptor([target[name] for name in weights])
    search.setup_optimization(field.shape, 1, None, 0)
    search.ms.x.assign(field.reshape(search.desired_shape_extended))

    def evaluate() -> tuple[np.ndarray, np.ndarray]:
        loss, (gradient,) = search.opt.call_loss(search.ms)
        return loss.numpy(), gradient.numpy()

    loss, gradient = evaluate()
    np.savez(folder / "found.npz", loss=loss, gradient=gradient.reshape(field.shape))
    print(version("mcrpy"), tf.__version__, file=answers, flush=True)
    for _ in sys.stdin:
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        evaluate()
        print(time.perf_counter() - began_s, time.process_time() - began_cpu_s, file=answers, flush=True)


if __name__ == "__main__":
    pairs = (pair.split("=") for pair in sys.argv[3:])
    main(Path(sys.argv[1]), int(sys.argv[2]), {name: float(weight) for name, weight in pairs})
