"""Whatever moves tensors leaves each on the device where it belongs, and lets no two devices meet."""

from __future__ import annotations

import math

import pytest
import torch
from fake_gpu import GPU, NoWaiting, fake_gpu
from torch import nn

from nbgpu.config import train_config
from nbgpu.engine.checkpoints import files
from nbgpu.engine.data import identity
from nbgpu.engine.logs import histograms
from nbgpu.engine.model.schedule import LearningRate
from nbgpu.engine.model.state import State
from nbgpu.engine.training.nonfinite import Guard
from nbgpu.engine.training.rank_model import PlainStep
from nbgpu.engine.training.step_metrics import Readings
from nbgpu.engine.variables import table
from nbgpu.engine.workload import by_name
from nbgpu.recipes.diffusion.recipe import Diffusion
from nbgpu.serialization import tensors

HOST = torch.device("cpu")
CONFIG = train_config("autoencoder", ema_decay=0.9)
PLACES = pytest.mark.parametrize("place", [GPU, HOST], ids=["on_the_gpu", "cpu_offload"])


def state_on(place: torch.device) -> State:
    """A small network whose weights are on the GPU, or in host memory as with cpu_offload, which leaves
    buffers on the GPU."""
    model = nn.Sequential(nn.Linear(4, 4, device=place), nn.BatchNorm1d(4, device=place))
    for name, buffer in list(model[1].named_buffers()):
        model[1].register_buffer(name, buffer.to(GPU))
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    return State(CONFIG, by_name.load(CONFIG), model, LearningRate(CONFIG, 1, 10, 5), GPU)


def to_gpu(model: nn.Module) -> None:
    """Replace a model's tensors, as a module of tensors without values cannot be moved."""
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(weight.detach().to(GPU)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, buffer.to(GPU))


def test_two_devices_that_meet_are_seen() -> None:
    with fake_gpu():
        with pytest.raises(RuntimeError, match="at least two devices"):
            torch.ones(2, device=GPU) + torch.ones(2, device=HOST)
        with pytest.raises(AssertionError, match="gets tensors on"):
            torch.stack([torch.ones((), device=GPU), torch.ones((), device=HOST)])


@PLACES
def test_the_end_of_a_step(place: torch.device) -> None:
    """Clipping, the guard against NaN, the optimizer, the average and the step's numbers."""
    with fake_gpu():
        state, guard = state_on(place), Guard(CONFIG, GPU)
        guard.look_at({"image": torch.ones(2, 1, device=GPU)})
        step = PlainStep(CONFIG, None, state, None, GPU)  # type: ignore[arg-type]
        norms = step.gradient_norms()
        buffers = list(state.model.buffers())
        inputs = guard.update(step.optimizers, norms["grad_norm"], buffers, [b.clone() for b in buffers])
        assert state.average is not None
        state.average.update(3, guard.has_left_out)
        with state.average.in_the_model():
            pass
        Readings({"loss": torch.zeros((), device=GPU), **norms})
        Readings(inputs)
        assert {each.device for each in (*state.model.parameters(), *state.average.tensors)} == {place}
        assert {buffer.device for buffer in state.model.buffers()} == {GPU}


@PLACES
def test_a_checkpoint_is_gathered_in_host_memory_and_loaded_where_it_was(place: torch.device) -> None:
    with fake_gpu():
        state = state_on(place)
        state.optimizer.step()
        named, about = state.parts()
        whole = files.gathering(named)
        copies = {id(tensor): whole.next().detach().cpu() for tensor in list(whole._left)}
        state.load({name: copies[id(tensor)] for name, tensor in named.items()}, about)
        moments = [each["exp_avg"] for each in state.optimizer.state.values()]
        assert state.average is not None
        held = [*state.model.parameters(), *state.average.tensors, *moments]
        assert {each.device for each in held} == {place}
        assert {buffer.device for buffer in state.model.buffers()} == {GPU}


@pytest.mark.parametrize("recipe", ["autoencoder", "survival", "lithography"])
def test_losses_and_held_out_values(recipe: str) -> None:
    loaded = by_name.load(train_config(recipe))
    example, model = loaded.example(2), loaded.build_model()
    with fake_gpu():
        to_gpu(model)
        batch = {name: tensor.to(GPU) for name, tensor in example.items()}
        terms = loaded.loss(model, batch)
        values = loaded.validate(model.eval(), batch)
        Readings({name: term.mean() for name, term in terms.items()})
        assert {each.device for each in (*terms.values(), *values.values())} == {GPU}


def test_a_diffusion_model_learns_and_predicts() -> None:
    loaded = by_name.load(train_config("diffusion"))
    assert isinstance(loaded, Diffusion)
    example, model = loaded.example(2), loaded.build_model()
    with fake_gpu():
        to_gpu(model)
        batch = {name: tensor.to(GPU) for name, tensor in example.items()}
        made = loaded.sampler(model.eval(), batch["condition"], [0, 1])
        assert {each.device for each in (made, *loaded.loss(model, batch).values())} == {GPU}


@pytest.mark.parametrize("recipe", ["autoencoder", "diffusion", "survival", "lithography"])
def test_a_step_never_waits_for_the_gpu(recipe: str) -> None:
    loaded = by_name.load(train_config(recipe))
    example, model = loaded.example(2), loaded.build_model()
    with fake_gpu():
        to_gpu(model)
        batch = {name: tensor.to(GPU) for name, tensor in example.items()}
        loaded.loss(model, batch)  # what is kept on the device gets there
        with NoWaiting():
            loaded.loss(model, batch)


def test_waiting_for_the_gpu_is_seen() -> None:
    with fake_gpu():
        on_gpu = torch.ones(2, device=GPU)
        with NoWaiting():
            torch.ones(2).to(GPU, non_blocking=True)
            with pytest.raises(AssertionError, match="between host and GPU waits"):
                torch.ones(2).to(GPU)
            with pytest.raises(AssertionError, match="between host and GPU waits"):
                torch.ones(2).copy_(on_gpu)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_variables_are_pulled_saved_and_compared_by_way_of_host_memory() -> None:
    with fake_gpu():
        base = torch.ones(5000, device=GPU)
        forms, blocks = tensors.take_apart([base, base[10:20]], 0)
        for num_bytes, source in blocks:
            assert callable(source)
            source(memoryview(bytearray(num_bytes)))
        storage = torch.zeros(20_000, dtype=torch.uint8, device=GPU).untyped_storage()
        assert [tensors.in_storage(form, storage, GPU).device for form in forms] == [GPU, GPU]
        assert table._fingerprint_of_tensors([base], math.inf)
        assert identity.digest({"image": base})
        assert histograms._subsample(base).shape == (5000,)
