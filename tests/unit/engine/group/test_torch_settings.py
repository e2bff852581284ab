"""torch's settings of the person's cells, and those of a run."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from faults import CHANGE_TORCH, CHANGE_TORCH_BACK, TORCH_IS, TORCH_WAS_CHANGED
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from nbgpu.engine.group.torch_settings import TorchSettings, as_at_the_beginning

PACKAGE = Path(__file__).resolve().parents[4] / "nbgpu"
FACTORIES = {
    f"torch.{name}"
    for name in [
        "arange",
        "empty",
        "eye",
        "full",
        "linspace",
        "ones",
        "rand",
        "randint",
        "randn",
        "randperm",
        "scalar_tensor",
        "tensor",
        "zeros",
    ]
}


def test_a_run_has_the_settings_of_a_new_process_and_the_cells_have_theirs_again() -> None:
    names = {"torch": torch}
    usual = str(eval(TORCH_IS.strip(), names))
    exec(CHANGE_TORCH, names)
    try:
        with as_at_the_beginning():
            in_the_run = str(eval(TORCH_IS.strip(), names))
            made = torch.ones(2, requires_grad=True)
            loss = (made @ made.detach()).sum()
            loss.backward()
        found = str(eval(TORCH_IS.strip(), names))
    finally:
        exec(CHANGE_TORCH_BACK, names)
        torch.set_num_threads(int(usual.split(",")[4]))
    assert in_the_run == usual
    assert found == TORCH_WAS_CHANGED
    assert (loss.dtype, loss.device.type) == (torch.float32, "cpu")
    assert made.grad is not None
    assert not made.is_inference()
    assert str(eval(TORCH_IS.strip(), names)) == usual


class _Doubling(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is torch.ones else result


def test_modes_that_a_cell_left_open_are_closed_for_the_run() -> None:
    with _Doubling(), FakeTensorMode():
        with as_at_the_beginning():
            made = torch.ones(1)
        left_open = torch.ones(1)
        assert type(left_open) is not Tensor
    assert type(made) is Tensor
    assert made.item() == 1.0
    with _Doubling():
        with as_at_the_beginning():
            pass
        assert torch.ones(1).item() == 2.0


def test_the_weights_of_an_open_autocast_are_not_those_of_the_run() -> None:
    """An autocast keeps its copies of weights until the outermost one ends."""
    weight = torch.ones(4, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), as_at_the_beginning():
        sums = []
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                sums.append(float((torch.ones(4, 4) @ weight).detach().sum()))
            with torch.no_grad():
                weight.add_(1)
    assert sums == [64.0, 128.0]


def test_a_precision_that_older_settings_contradict_is_no_obstacle() -> None:
    if not hasattr(torch._C, "_get_fp32_precision_getter"):
        pytest.skip("fp32_precision came with torch 2.9")
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with as_at_the_beginning():
            assert torch.get_float32_matmul_precision() == "highest"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_what_a_recipe_s_file_has_set_stays_with_its_run() -> None:
    settings = TorchSettings()
    with settings.in_force():
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
    assert torch.ones(1).dtype is torch.float32
    assert torch.ones(1).device.type == "cpu"
    with settings.in_force():
        assert torch.ones(1).dtype is torch.float64
        assert torch.ones(1).device.type == "meta"
    assert torch.ones(1).device.type == "cpu"


def test_every_tensor_of_the_engine_names_its_dtype_and_device() -> None:
    """Code of the engine runs between a person's cells, too, where torch's defaults are theirs."""
    calls = [
        (f"{path.name}:{node.lineno}: {ast.unparse(node.func)}", {keyword.arg for keyword in node.keywords})
        for path in [*(PACKAGE / "engine").rglob("*.py"), PACKAGE / "serialization" / "tensors.py"]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FACTORIES
    ]
    assert len(calls) > 10
    assert [call for call, named in calls if not {"dtype", "device"} <= named] == []
