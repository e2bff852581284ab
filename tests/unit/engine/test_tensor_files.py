"""safetensors files that are written and read one tensor at a time, against the format's own library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nbgpu.engine.checkpoints import tensor_files
from nbgpu.engine.checkpoints.tensor_files import StoredTensors

OF_MANY_TYPES = {
    "scalar": torch.tensor(7.0),
    "flags": torch.tensor([True, False, True]),
    "weights": torch.arange(12.0).reshape(3, 4) / 7,
    "exact": torch.rand(5, dtype=torch.float64),
    "half": torch.rand(3, 3).to(torch.float16),
    "brief": torch.rand(3, 1, 2).to(torch.bfloat16),
    "count": torch.tensor([2**40, -1]),
    "bytes": torch.arange(7, dtype=torch.uint8),
    "field": torch.rand(4, dtype=torch.complex64),
    "nothing": torch.zeros(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    'a "quoted" Ω': torch.ones(2, dtype=torch.int32),
}


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    ordered = tensor_files.in_order(tensors)
    values = iter(ordered.values())
    path.write_bytes(b"".join(tensor_files.pieces(ordered, lambda: next(values))))


def check(found: Mapping[str, Tensor]) -> None:
    assert set(found) == set(OF_MANY_TYPES)
    for name, tensor in OF_MANY_TYPES.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor), name


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    write(tmp_path / "file", OF_MANY_TYPES)
    check(load_file(tmp_path / "file"))


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    contiguous = {name: tensor.contiguous() for name, tensor in OF_MANY_TYPES.items()}
    save_file(contiguous, tmp_path / "file", metadata={"format": "pt"})
    stored = StoredTensors(tmp_path / "file")
    assert len(stored) == len(OF_MANY_TYPES)
    check(stored)


def test_a_tensor_that_is_read_is_its_own(tmp_path: Path) -> None:
    write(tmp_path / "file", OF_MANY_TYPES)
    stored = StoredTensors(tmp_path / "file")
    stored["weights"].zero_()
    check(stored)


def test_a_type_without_a_name_in_the_format_is_refused_with_the_tensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"safetensors has no type for wide \(torch\.complex128\)"):
        write(tmp_path / "file", {"weights": torch.zeros(2), "wide": torch.zeros(2, dtype=torch.complex128)})
