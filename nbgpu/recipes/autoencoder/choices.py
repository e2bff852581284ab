"""Chooses the network and the patch size from the volumes, where the settings leave them out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nbgpu.engine.data.volumes import shape_in_words, shapes_of
from nbgpu.engine.workload.recipe import Proposal
from nbgpu.recipes.autoencoder.config import AutoencoderConfig

_ON_GPU = (
    ((64, 128, 256), (112, 96, 80, 64)),
    ((32, 64, 128), (96, 80, 64, 48)),
    ((16, 32, 64), (64, 48, 32, 16, 8)),
)
_ON_CPU = (((16, 32, 64), (32,)), ((8, 16, 32), (32, 16, 8)))
"""Channels, and edges of patches in voxels, the largest first. The first channels on a GPU are those of
MONAI's tutorial 3d_ldm, whose patches have 112 x 128 x 80 voxels."""
_LATENT_CHANNELS = 8
"""As in the tutorial: with three resolutions one latent voxel stands for 64 voxels."""
_SMALLEST = 8


def propose_networks(config: AutoencoderConfig, volumes: Sequence[Path], on_gpu: bool) -> list[Proposal]:
    """Propose networks and patch sizes, the largest first, for which a patch fits into the smallest volume.
    Settings that were given keep their values.

    A single volume is cut into parts, and a patch has to fit into each of them.

    Raises:
        DataError: none of the files can be used.
    """
    shapes = shapes_of(volumes, spacing_mm=config.spacing_mm, channels=config.image_channels)
    smallest = min(shapes, key=min)
    max_edge = min(smallest)
    if len(volumes) == 1:
        num_parts = 1 + (config.val_fraction > 0) + (config.test_fraction > 0)
        # Empty margins are cut off first, which usually leaves at least half of the axis.
        max_edge = min(max_edge, max(smallest) // (2 * num_parts))
    multiple = max(4, config.voxels_per_latent)
    reason = f"the smallest of {len(shapes)} volumes has {shape_in_words(smallest)} voxels"
    if not on_gpu:
        reason += ", and CPU ranks get a small network"
    proposals: list[dict[str, object]] = []
    for channels, edges in _ON_GPU if on_gpu else _ON_CPU:
        for edge in edges:
            values = {
                "patch_size": max(_SMALLEST, min(edge, max_edge) // multiple * multiple),
                "channels": channels,
                "latent_channels": _LATENT_CHANNELS,
            }
            left_out = {name: value for name, value in values.items() if name in config.left_to_data}
            if left_out not in proposals:
                proposals.append(left_out)
    return [Proposal(values, reason) for values in proposals]
