"""What CUDA graphs would bring: a recipe's step, launched kernel by kernel and replayed as one graph.

nbgpu has no such option. The ratio says whether it is worth one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from checks import Place, Skipped, check

_NUM_WARM_UP_STEPS = 3
_NUM_STEPS = 50


def _step(recipe: Any, config: Any, model: Any, batch: dict[str, Any], device: Any) -> Callable[[], Any]:
    """A step of plain torch in the recipe's default sizes, which a graph can capture."""
    import torch

    # Only an Adam that keeps its count of steps on the GPU can be captured.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=device.type == "cuda")
    dtype = torch.bfloat16 if config.amp == "bf16" else torch.float32

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        # The weights that autocast has cast and kept would not be cast again when a graph is replayed.
        with torch.autocast(device.type, dtype, enabled=config.amp == "bf16", cache_enabled=False):
            loss = recipe.loss(model, batch)["loss"]
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _captured(step: Callable[[], Any]) -> tuple[Any, Any]:
    """The graph of a step, and the loss that each replay writes anew."""
    import torch

    # What a library sets up at its first call must not be part of the graph.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_NUM_WARM_UP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    return graph, loss


def _steps_per_second(step: Callable[[], Any], synchronize: Callable[[], Any], num_steps: int) -> float:
    for _ in range(_NUM_WARM_UP_STEPS):
        step()
    synchronize()
    began_s = time.perf_counter()
    for _ in range(num_steps):
        step()
    synchronize()
    return num_steps / (time.perf_counter() - began_s)


def _graph(name: str, settings: Mapping[str, Any]) -> Callable[[Place], None]:
    def compare(place: Place) -> None:
        import torch

        from nbgpu.config import train_config
        from nbgpu.engine.workload import by_name

        torch.manual_seed(0)
        device = torch.device(place.device)
        config = train_config(name, **settings)
        recipe: Any = by_name.load(config)
        model = recipe.build_model().to(device)
        batch = {key: tensor.to(device) for key, tensor in recipe.example(config.batch_size).items()}
        step = _step(recipe, config, model, batch, device)
        synchronize = torch.cuda.synchronize if place.on_gpu else lambda: None
        place.figure("first loss", float(step()))
        eager = _steps_per_second(step, synchronize, place.size(_NUM_STEPS, 2))
        place.figure("kernel by kernel: steps", eager, "1/s")
        if not place.on_gpu:
            raise Skipped("CUDA graphs need a GPU")
        graph, loss = _captured(step)
        replayed = _steps_per_second(graph.replay, synchronize, _NUM_STEPS)
        place.figure("as one graph: steps", replayed, "1/s")
        place.figure("as one graph / kernel by kernel", replayed / eager)
        place.figure("last loss", float(loss))
        assert torch.isfinite(loss), "a replayed step gives no loss"

    return compare


_SETTINGS: dict[str, dict[str, Any]] = {
    "autoencoder": {"amp": "bf16"},
    # The antithetic times are drawn on the host, where no graph draws them again.
    "diffusion": {"amp": "bf16", "antithetic": False},
    # Without corrections it has no network.
    "lithography": {"amp": "bf16", "corrections": 2},
    "survival": {"amp": "bf16"},
}
for _name, _given in _SETTINGS.items():
    check(
        f"{_name}: steps per second of plain torch in the default sizes, kernel by kernel and as one CUDA graph",
        slice=4,
        page="benchmarks",
        shows=(f"recipes/{_name}",),
        budget_s=14,
        alone=True,
        name=f"cuda_graph_{_name}",
    )(_graph(_name, _given))
