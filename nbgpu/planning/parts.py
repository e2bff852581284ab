"""How many samples, or groups of them that belong together, are held out."""

from __future__ import annotations

from nbgpu.config import DataSettings


def held_out(num_groups: int, config: DataSettings) -> tuple[int, int]:
    """(the groups for validation, those for the test): at least one in every part whose share is above 0, if
    there are enough for two parts."""
    num_left = num_groups - 1
    counts = []
    for fraction, part in ((config.val_fraction, "validation"), (config.test_fraction, "test")):
        # Each of the parts that follow gets one at least.
        spared = 1 if part == "validation" and config.test_fraction else 0
        wanted = min(max(1, round(fraction * num_groups)), num_left - spared) if fraction else 0
        counts.append(max(0, wanted))
        num_left -= counts[-1]
    return counts[0], counts[1]
