"""What the C library does with what is freed, seen by the pages that the kernel hands out."""

from __future__ import annotations

import json
import platform
import subprocess
import sys

import pytest

# A process of its own: where memory has once been refused, glibc goes on with another heap, of 64 MiB.
STEPS = """
import json, resource, torch
from nbgpu.engine.memory import heap

# More than glibc ever keeps by itself.
NUM_BYTES = 96 * 2**20

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(NUM_BYTES // 4)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

pages()
begun_bytes, before = resident_bytes(), pages()
with heap.kept():
    # Something small may go into the room of one, so that the next does not fit there, until there is room beside it.
    kept = min(pages() for _ in range(20))
    kept_bytes = resident_bytes() - begun_bytes
left_bytes, after = resident_bytes() - begun_bytes, pages()
print(json.dumps([NUM_BYTES, before, kept, kept_bytes, left_bytes, after]))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such calls")
def test_what_a_step_frees_is_there_for_the_next_and_given_back_at_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], check=True, capture_output=True, text=True)
    num_bytes, before, kept, kept_bytes, left_bytes, after = json.loads(done.stdout)
    if not before:
        pytest.skip("this kernel does not count page faults")
    assert kept < before / 4
    assert kept_bytes > num_bytes / 2
    assert left_bytes < num_bytes / 2
    assert after > before / 2
