"""Small messages between the ranks, as JSON.

torch's own collectives for objects pickle them. gloo's sockets are not authenticated, and unpickling can run
any code, so that nothing that comes from them may be unpickled.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from nbgpu.engine.group import simulated_link

_NUM_CLOCK_MESSAGES = 20


@simulated_link.not_simulated()
def gather(value: Any) -> list[Any]:
    """Return every rank's value, in order of rank, on every rank. A collective; the values must be JSON."""
    text = _encoded(value)
    sizes = gather_numbers(len(text))
    # all_gather takes tensors of one size, so each text is padded to the longest. The device is named,
    # because a cell may have set another default device; with NCCL tensors on the CPU go over gloo.
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    padded[: len(text)] = text
    texts = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(texts, padded)
    return [_decoded(content[:size]) for content, size in zip(texts, sizes, strict=True)]


@simulated_link.not_simulated()
def gather_numbers(number: int) -> list[int]:
    """Return every rank's integer, in order of rank, on every rank. A collective, with one all_gather where
    `gather` has two."""
    numbers = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, torch.tensor([number], dtype=torch.int64, device="cpu"))
    return [int(gathered) for gathered in numbers]


@simulated_link.not_simulated()
def broadcast(value: Any, source: int) -> Any:
    """Return the value of the rank `source` on every rank. A collective; the value must be JSON. The size
    goes first, because the receivers must allocate the tensor."""
    is_source = dist.get_rank() == source
    text = _encoded(value) if is_source else torch.zeros(0, dtype=torch.uint8, device="cpu")
    size = torch.tensor([len(text)], dtype=torch.int64, device="cpu")
    dist.broadcast(size, source)
    if not is_source:
        text = torch.zeros(int(size), dtype=torch.uint8, device="cpu")
    dist.broadcast(text, source)
    return _decoded(text)


@simulated_link.not_simulated()
def broadcast_bytes(content: bytes, num_bytes: int, source: int) -> bytes:
    """Return the bytes of the rank `source` on every rank. A collective.

    Args:
        content: the bytes; only those of the source are used. Zeros are sent if there are not `num_bytes`.
        num_bytes: the number of bytes, known to every rank, so that no message for the size is needed.
        source: the rank that sends.
    """
    sent = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu")
    if len(content) == num_bytes and content:
        sent = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    dist.broadcast(sent, source)
    return sent.numpy().tobytes()


@simulated_link.not_simulated()
def broadcast_tensors(
    tensors: Mapping[str, torch.Tensor], source: int, device: torch.device
) -> Mapping[str, torch.Tensor]:
    """Return the tensors of the rank `source` on every rank: the originals there, copies elsewhere.

    A collective.

    Args:
        tensors: by name; only those of the source are used.
        device: where the copies of tensors on a GPU are made. Those on the CPU stay on the CPU.
    """
    is_source = dist.get_rank() == source
    shapes = {
        name: (str(t.dtype).removeprefix("torch."), list(t.shape), t.is_cuda) for name, t in tensors.items()
    }
    received = {}
    # Names, dtypes and shapes go first, because the receivers must allocate the tensors.
    for name, (dtype, shape, is_cuda) in broadcast(shapes, source).items():
        tensor = (
            tensors[name].detach().contiguous()
            if is_source
            else torch.empty(shape, dtype=getattr(torch, dtype), device=device if is_cuda else "cpu")
        )
        dist.broadcast(tensor, source)
        received[name] = tensor
    return received


def _encoded(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decoded(text: torch.Tensor) -> Any:
    return json.loads(text.numpy().tobytes())


def clock_offsets() -> list[tuple[float, float]]:
    """Return for each rank (the offset that turns its `time.monotonic` into rank 0's, the largest possible
    error of this offset), in seconds. A collective.

    A rank notes when it sends a message and when the answer arrives; rank 0 answers with its own time. Rank
    0's clock showed that time at some moment in between, so half of the interval is the largest possible
    error. The answer with the shortest interval counts (Cristian 1989, "Probabilistic clock
    synchronization").
    """
    message = torch.zeros(1, dtype=torch.float64, device="cpu")
    offset = (0.0, 0.0)
    for rank in range(1, dist.get_world_size()):
        if dist.get_rank() == 0:
            for _ in range(_NUM_CLOCK_MESSAGES):
                dist.recv(message, rank)
                message[0] = time.monotonic()
                dist.send(message, rank)
        elif dist.get_rank() == rank:
            offsets = [_measure_offset(message) for _ in range(_NUM_CLOCK_MESSAGES)]
            offset = min(offsets, key=lambda measured: measured[1])
    return [(float(offset_s), float(error_s)) for offset_s, error_s in gather(offset)]


def _measure_offset(message: torch.Tensor) -> tuple[float, float]:
    """Get the time of rank 0 once; return (the offset that gives rank 0's clock, the largest error), in
    seconds.

    Args:
        message: a tensor (1,) of float64 for the messages.
    """
    sent_s = time.monotonic()
    dist.send(message, 0)
    dist.recv(message, 0)
    received_s = time.monotonic()
    return float(message[0]) - (sent_s + received_s) / 2, (received_s - sent_s) / 2
