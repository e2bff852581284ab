"""Values that travel: through shared memory or a message they come out as they were, and on memory of their
own."""

from __future__ import annotations

import ast
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from PIL import Image

from nbgpu.errors import TransferError
from nbgpu.serialization import shared_memory
from nbgpu.serialization.parcels import LARGE_BYTES, Packing, from_bytes, from_descriptor, unpack

LARGE = LARGE_BYTES // 4 + 10
"""So many numbers of 4 bytes travel in a mapping of their own."""

Point = namedtuple("Point", "x y")


@dataclass
class Holder:
    tensor: torch.Tensor
    name: str = "holder"
    more: list[Any] = field(default_factory=list)


def through_memory(values: Mapping[str, Any]) -> dict[str, Any]:
    packing = Packing(values)
    with shared_memory.created() as there:
        packing.write(there)
        with shared_memory.opened(shared_memory.address(there)) as here:
            assert here is not None
            return unpack(packing.parcel, from_descriptor(here), {}, "")


def through_a_message(values: Mapping[str, Any]) -> dict[str, Any]:
    packing = Packing(values)
    return unpack(packing.parcel, from_bytes(bytes(packing.to_bytes())), {}, "")


Travel = Callable[[Mapping[str, Any]], dict[str, Any]]


@pytest.fixture(params=[through_memory, through_a_message])
def travel(request: pytest.FixtureRequest) -> Travel:
    way: Travel = request.param
    return way


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "small": lambda: torch.arange(6.0).view(2, 3),
    "large": lambda: torch.rand(LARGE),
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 3),
    "bfloat16": lambda: torch.rand(2 * LARGE).bfloat16(),
    "bool": lambda: torch.rand(7) > 0.5,
    "complex": lambda: torch.rand(LARGE, dtype=torch.complex64),
    "conjugated": lambda: torch.rand(5, dtype=torch.complex64).conj(),
    "transposed": lambda: torch.rand(300, 200).t(),
    "with gaps": lambda: torch.rand(400, 200)[::2, 1::2],
    "channels last": lambda: torch.rand(2, 3, 100, 100).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.rand(3, 1).expand(3, 50_000),
    "a part of a large one": lambda: torch.rand(LARGE)[5:9],
    "sparse": lambda: torch.eye(300).to_sparse(),
    "needs a gradient": lambda: torch.rand(3, requires_grad=True) * 2,
    "parameter": lambda: torch.nn.Parameter(torch.rand(LARGE)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.rand(3), requires_grad=False),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_out_equal_writable_and_its_own(name: str, travel: Travel) -> None:
    sent = TENSORS[name]()
    come = travel({"x": sent})["x"]
    assert type(come) is type(sent)
    assert (come.dtype, come.shape, come.requires_grad) == (sent.dtype, sent.shape, sent.requires_grad)
    assert torch.equal(come.to_dense(), sent.to_dense())
    kept = sent.detach().clone()
    if name != "expanded":  # there too many elements are one number
        with torch.no_grad():
            come.zero_()
    assert torch.equal(sent.to_dense(), kept.to_dense())


def test_a_tensor_arrives_whatever_torch_s_default_device_is(travel: Travel) -> None:
    sent = {"values": torch.arange(3.0), "none": torch.ones(0)}
    torch.set_default_device("meta")
    try:
        came = travel(sent)
    finally:
        torch.set_default_device(None)
    assert came["values"].tolist() == [0.0, 1.0, 2.0]
    assert came["none"].device.type == "cpu"


def test_of_a_view_only_what_it_shows_is_sent() -> None:
    assert Packing({"x": torch.rand(10 * LARGE)[5:9]}).is_small
    assert Packing({"x": torch.rand(LARGE, 10)[:100, 3]}).is_small


def test_dense_strides_stay(travel: Travel) -> None:
    assert travel({"x": torch.rand(300, 200).t()})["x"].stride() == (1, 200)


def test_tensors_that_share_memory_still_do(travel: Travel) -> None:
    whole = torch.rand(LARGE)
    sent = {"whole": whole, "part": whole[100:200], "bytes": whole.view(torch.uint8), "other": torch.rand(3)}
    come = travel(sent)
    come["part"].fill_(7)
    assert come["whole"][150] == 7
    assert come["whole"][250] != 7
    assert torch.equal(come["bytes"], come["whole"].view(torch.uint8))
    assert not (whole == 7).any()


def test_parts_of_one_memory_that_do_not_touch_are_sent_alone() -> None:
    whole = torch.rand(100 * LARGE)
    assert Packing({"first": whole[:5], "last": whole[-5:]}).is_small


def test_a_model_comes_with_its_ties_and_its_optimizer(travel: Travel) -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(200, 300), torch.nn.Linear(300, 300), torch.nn.BatchNorm1d(300)
    )
    model[1].weight = torch.nn.Parameter(torch.rand(300, 300))
    model.tied = model[1]
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(4, 200)).sum().backward()
    optimizer.step()
    come = travel({"model": model, "optimizer": optimizer, "state": model.state_dict()})
    assert come["model"].tied is come["model"][1]
    assert come["optimizer"].param_groups[0]["params"][0] is come["model"][0].weight
    assert isinstance(come["state"], OrderedDict)
    for name, value in model.state_dict().items():
        assert torch.equal(come["state"][name], value), name
    with torch.no_grad():
        come["state"]["tied.weight"].fill_(1)
    assert come["model"][1].weight[0, 0] == 1
    come["model"](torch.rand(4, 200)).sum().backward()
    come["optimizer"].step()


ARRAYS: dict[str, Callable[[], Any]] = {
    "small": lambda: np.arange(6).reshape(2, 3),
    "large": lambda: np.random.default_rng(0).random(LARGE),
    "scalar": lambda: np.array(3.5),
    "empty": lambda: np.empty((0, 3)),
    "columns first": lambda: np.asfortranarray(np.arange(60_000.0).reshape(200, 300)),
    "with gaps": lambda: np.arange(90_000.0).reshape(300, 300)[::2, ::3],
    "backwards": lambda: np.arange(50_000.0)[::-1],
    "dates": lambda: np.arange("2020-01-01", "2400-01-01", dtype="datetime64[D]"),
    "records": lambda: np.zeros(20_000, dtype=[("a", "f4"), ("b", "i8", 2)]),
    "text": lambda: np.array(["one", "three"]),
    "objects": lambda: np.array([1, "one", None], dtype=object),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_comes_out_equal_writable_and_its_own(name: str, travel: Travel) -> None:
    sent = ARRAYS[name]()
    sent.flags.writeable = False
    come = travel({"x": sent})["x"]
    assert (come.dtype, come.shape) == (sent.dtype, sent.shape)
    np.testing.assert_array_equal(come, sent)
    assert come.flags.writeable
    kept = sent.copy()
    come[...] = np.zeros((), come.dtype)
    np.testing.assert_array_equal(sent, kept)


def test_frames_containers_and_plain_objects(travel: Travel) -> None:
    frame = pd.DataFrame(
        {"number": np.arange(40_000.0), "text": ["a", "b"] * 20_000, "when": datetime(2026, 1, 2)},
        index=pd.RangeIndex(5, 40_005, name="row"),
    )
    picture = Image.fromarray(np.arange(3 * 90_000, dtype=np.uint8).reshape(300, 300, 3))
    nested = {"a": [1, (2.5, "x")], ("key", 1): {3, 4}, None: Point(torch.ones(3), b"bytes")}
    sent = {
        "frame": frame,
        "series": frame["number"],
        "picture": picture,
        "nested": nested,
        "holder": Holder(torch.rand(LARGE), more=[Fraction(1, 3)]),
        "bytes": b"x" * LARGE_BYTES * 2,
        "itself": (loop := [1]),
    }
    loop.append(loop)  # type: ignore[arg-type]
    come = travel(sent)
    pd.testing.assert_frame_equal(come["frame"], frame)
    pd.testing.assert_series_equal(come["series"], frame["number"])
    come["frame"].loc[5, "number"] = -1.0
    assert frame.loc[5, "number"] == 0
    assert np.array_equal(np.asarray(come["picture"]), np.asarray(picture))
    assert come["nested"]["a"] == [1, (2.5, "x")]
    assert come["nested"][("key", 1)] == {3, 4}
    assert torch.equal(come["nested"][None].x, torch.ones(3))
    assert torch.equal(come["holder"].tensor, sent["holder"].tensor)
    assert come["holder"].more == [Fraction(1, 3)]
    assert come["bytes"] == sent["bytes"]
    assert come["itself"][1] is come["itself"]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Python's collector of cycles does not run: what is given back is given back at once."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_memory_is_given_back_one_by_one_and_no_descriptor_is_kept() -> None:
    process = psutil.Process()
    num_descriptors = process.num_fds()

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:nbgpu")

    come = through_memory({f"x{number}": torch.rand(LARGE) for number in range(20)})
    assert process.num_fds() == num_descriptors
    assert mapped() == 20
    part = come["x3"][10:20]
    come.clear()
    assert mapped() == 1
    assert float(part.sum()) > 0
    del part
    assert mapped() == 0


@pytest.mark.slow
@pytest.mark.usefixtures("no_collector")
def test_the_sender_keeps_nothing(travel: Travel) -> None:
    tensor, array = torch.rand(LARGE), np.ones(LARGE)
    watched = [weakref.ref(tensor), weakref.ref(array)]
    travel({"tensor": tensor, "array": array})
    del tensor, array
    assert [reference() for reference in watched] == [None, None]


def test_many_receivers_of_one_memory_do_not_see_each_others_changes() -> None:
    packing = Packing({"x": torch.zeros(LARGE)})
    with shared_memory.created() as there:
        packing.write(there)
        first, second = (unpack(packing.parcel, from_descriptor(there), {}, "")["x"] for _ in range(2))
    first.fill_(1)
    assert not second.any()


def test_memory_that_is_gone_is_not_mistaken_for_what_came_after_it(tmp_path: Path) -> None:
    with shared_memory.created() as there:
        gone = shared_memory.address(there)
    with (tmp_path / "another").open("w") as another:
        assert another.fileno() == gone.descriptor
        with shared_memory.opened(gone) as found:
            assert found is None
    with shared_memory.created() as there:
        elsewhere = shared_memory.Address(
            "another host's boot", *list(vars(shared_memory.address(there)).values())[1:]
        )
        with shared_memory.opened(elsewhere) as found:
            assert found is None


def test_nothing_is_left_of_the_memory_of_a_process_that_was_killed() -> None:
    code = (
        "import sys, time\nfrom nbgpu.serialization import shared_memory\nwith shared_memory.created() as there:\n"
        "    print(tuple(vars(shared_memory.address(there)).values()), flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        where = shared_memory.Address(*ast.literal_eval(process.stdout.readline()))
        with shared_memory.opened(where) as found:
            assert found is not None
        process.kill()
        process.wait()
        with shared_memory.opened(where) as found:
            assert found is None


def test_all_that_cannot_travel_is_named_with_its_path_and_the_reason() -> None:
    with Path(os.devnull).open() as file:
        values = {
            "fine": 1,
            "d": {"a": [1, 2, (number for number in range(3))]},
            "held": Holder(torch.ones(1), more=[{"lock": threading.Lock()}, file]),
            "f": [lambda: 1],
            "table": pd.DataFrame({"x": [1, threading.RLock()]}),
            "point": Point(1, os),
            "objects": np.array([1, threading.Lock()], dtype=object),
        }
        with pytest.raises(TransferError) as caught:
            Packing(values)
    lines = str(caught.value).splitlines()
    assert lines == [
        "d['a'][2]: generator cannot travel: it is in mid-run. Send what it yields: list(...)",
        "held.more[0]['lock']: _thread.lock cannot travel: it is of use in its own process only",
        "held.more[1]: _io.TextIOWrapper cannot travel: it is open in its own process only. Send its path, or what is in it",
        "f[0]: a lambda cannot travel: it has no name by which it would be found elsewhere. Define it with a name, at the "
        "top of a cell",
        "table['x'][1]: _thread.RLock cannot travel: it is of use in its own process only",
        "point.y: module cannot travel: it is code, which is imported where it is needed: %%distributed, then import",
        "objects[1]: _thread.lock cannot travel: it is of use in its own process only",
    ]


def test_a_layer_that_cannot_travel_is_named_as_in_python() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(1, 1))
    model[0].hook = open  # a function by name, which can
    model[0].lock = threading.Lock()
    with pytest.raises(TransferError, match=r"^model\.0\.lock: _thread\.lock cannot travel"):
        Packing({"model": model})


def test_what_refuses_to_be_pickled_is_quoted() -> None:
    class Shy:
        def __reduce__(self) -> Any:
            raise ZeroDivisionError("not me")

    with pytest.raises(TransferError, match=r"^x\[0\]: .*Shy cannot travel: ZeroDivisionError: not me$"):
        Packing({"x": [Shy()]})


def test_what_is_nested_too_deeply_says_so() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(
        TransferError, match=r"^x(\[0\])+: list cannot travel: it is nested too deeply to be pickled$"
    ):
        Packing({"x": nested})


def test_more_than_the_memory_that_is_free_is_refused() -> None:
    size = psutil.virtual_memory().total // 4 * 2
    with pytest.raises(
        TransferError, match=r"^x: [\d,]+ bytes would travel, and [\d,]+ bytes of memory are free$"
    ):
        Packing({"x": np.broadcast_to(np.float64(0), size)})
