"""What the C library does with what is freed, seen by the pages that the kernel hands out."""

from __future__ import annotations

import platform
import resource

import psutil
import pytest
import torch

from nbgpu.engine import heap

_NUM_BYTES = 96 * 2**20
"""More than glibc ever keeps by itself."""
_NUM_PAGES = _NUM_BYTES // resource.getpagesize()

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="other C libraries have no such calls"
)


def _pages_for_a_step() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(_NUM_BYTES // 4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_what_a_step_frees_is_there_for_the_next_and_given_back_at_the_end() -> None:
    _pages_for_a_step()
    # Not all of them, where the kernel hands out huge pages.
    by_default = _pages_for_a_step()
    resident_bytes = psutil.Process().memory_info().rss
    with heap.kept():
        # Something small may have gone into the room of the first, so that the next does not fit there.
        assert min(_pages_for_a_step() for _ in range(4)) < by_default / 4
        assert psutil.Process().memory_info().rss > resident_bytes + _NUM_BYTES / 2
    assert psutil.Process().memory_info().rss < resident_bytes + _NUM_BYTES / 2
    assert _pages_for_a_step() > by_default / 2
