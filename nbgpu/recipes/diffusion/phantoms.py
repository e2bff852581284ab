"""Generated heads with a tumour, in four modalities.

The given modalities have so much noise that the target of a voxel follows from the voxels around it, but
hardly from the voxel alone.
"""

from __future__ import annotations

import numpy as np
import torch
from scipy.ndimage import gaussian_filter
from torch import Tensor

from nbgpu.recipes.diffusion.files import CORE, ENHANCING, OEDEMA

TISSUES = ("air", "white matter", "grey matter", "fluid", "oedema", "enhancing tumour", "core")
BRIGHTNESS = {
    "t1n": (0.0, 0.80, 0.55, 0.20, 0.45, 0.50, 0.30),
    "t1c": (0.0, 0.80, 0.55, 0.20, 0.45, 1.00, 0.30),
    "t2w": (0.0, 0.35, 0.55, 1.00, 0.80, 0.65, 0.85),
    "t2f": (0.0, 0.45, 0.75, 0.05, 1.00, 0.80, 0.55),
}
"""Brightness of each tissue in each modality, roughly as radiologists describe it; fluid is bright in T2 and
dark in FLAIR, where oedema is brightest."""
_LABELS = np.array([0, 0, 0, 0, OEDEMA, ENHANCING, CORE])
SPREAD = 0.06
"""Standard deviation of a tissue's brightness between heads."""
NOISE = 0.27
"""Standard deviation of the noise in the given modalities, as a share of the range of brightness."""


def phantom(size: int, seed: int, index: int, clean: str = "t2f", noise: float = NOISE) -> dict[str, Tensor]:
    """Generate a head with a tumour. It follows from `size`, `seed` and `index` alone.

    Args:
        size: the edge of the volumes in voxels.
        seed, index: the family of heads, and the number in it.
        clean: the modality without noise, the target.
        noise: the standard deviation of the noise in the other modalities, as a share of the range of
            brightness.

    Returns:
        Each modality by name, in float32 (1, size, size, size): from -1 to 1, and beyond where noise is
        added. Also `label` in int64: 0, or CORE, OEDEMA and ENHANCING as in BraTS; and `brain` in float32:
        0 in air and 1 elsewhere.
    """
    rng = np.random.default_rng((seed, index))
    tissue = _tissues(size, rng)
    images = {}
    for name, means in BRIGHTNESS.items():
        brightness = np.asarray(means)
        drawn = brightness + np.where(brightness > 0, rng.normal(0, SPREAD, len(TISSUES)), 0)
        image = 2 * gaussian_filter(np.clip(drawn, 0, 1)[tissue], 0.4) - 1
        added = rng.normal(0, 2 * noise, image.shape)
        images[name] = torch.from_numpy((image if name == clean else image + added).astype(np.float32))[None]
    images["label"] = torch.from_numpy(_LABELS[tissue])[None]
    images["brain"] = torch.from_numpy((tissue > 0).astype(np.float32))[None]
    return images


def _tissues(size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw a head from ellipsoids, and return the tissue of each voxel as an index into TISSUES, (size, size,
    size) in int64. Later ellipsoids cover earlier ones."""
    axis = (np.arange(size) + 0.5) / size
    points = np.stack(np.meshgrid(axis, axis, axis, indexing="ij"), axis=-1)

    def radius(centre: np.ndarray, semi_axes: np.ndarray) -> np.ndarray:
        """Return the distance of each voxel from the centre of an ellipsoid with a random tilt, scaled to 1
        on its surface."""
        tilt, _ = np.linalg.qr(rng.normal(size=(3, 3)))
        return np.asarray(np.linalg.norm((points - centre) @ tilt / semi_axes, axis=-1))

    tissue = np.zeros((size,) * 3, dtype=np.int64)
    centre = 0.5 + rng.uniform(-0.06, 0.06, 3)
    head = np.linalg.norm((points - centre) / rng.uniform(0.36, 0.54, 3), axis=-1)
    # The brain: grey matter outside, white matter inside, with nuclei of grey matter and ventricles of fluid.
    tissue[head < 1] = 2
    tissue[head < rng.uniform(0.7, 0.85)] = 1
    for _ in range(rng.integers(2, 5)):
        nucleus = radius(centre + rng.uniform(-0.2, 0.2, 3), rng.uniform(0.08, 0.2, 3))
        tissue[(nucleus < 1) & (head < 0.85)] = 2
    for _ in range(rng.integers(1, 4)):
        ventricle = radius(centre + rng.uniform(-0.12, 0.12, 3), rng.uniform(0.08, 0.2, 3))
        tissue[(ventricle < 1) & (head < 0.85)] = 3
    # The tumour, from outside to inside: oedema, an enhancing rim, and the core.
    tumour = radius(centre + rng.uniform(-0.2, 0.2, 3), rng.uniform(0.18, 0.36, 3))
    inside = head < 0.95
    tissue[(tumour < 1) & inside] = 4
    tissue[(tumour < rng.uniform(0.5, 0.75)) & inside] = 5
    tissue[(tumour < rng.uniform(0.2, 0.5)) & inside] = 6
    return tissue
