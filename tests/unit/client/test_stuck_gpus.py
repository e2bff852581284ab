"""What is said of GPUs that are left out because they hang."""

from __future__ import annotations

import pytest

from nbgpu.client.engines.transport_fallback import _stuck_gpus_notice


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        (
            ["GPU 1 (a)"],
            "GPU 1 (a) still computes, and has no process: it hangs. The cluster goes on without it, with 2 ranks. "
            "Resetting it (nvidia-smi --gpu-reset) or the host brings it back",
        ),
        (
            ["GPU 0 (a)", "GPU 1 (b)"],
            "GPU 0 (a) and GPU 1 (b) still compute, and have no process: they hang. The cluster goes on without them, "
            "with 2 ranks. Resetting them (nvidia-smi --gpu-reset) or the host brings them back",
        ),
    ],
)
def test_one_gpu_and_several_are_told_in_words_that_fit(gpus: list[str], said: str) -> None:
    assert _stuck_gpus_notice(gpus, 2) == said
