"""What a person has put on a DDP object is on it after a failed cell, as before it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import launching
import leaks
import pytest
from kernel import Kernel, kernel

_NUM_RANKS = 3
_FAIL = "%%distributed\nif rank == 1: raise ValueError('on purpose')\ndist.barrier()"
_MAKE = "%%distributed\nddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))\n"
_GRADIENT = (
    "%%distributed\nddp.zero_grad()\nddp(torch.full((1, 2), rank + 1.0)).sum().backward()\n"
    "ddp.module.weight.grad[0, 0].item()"
)


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    with kernel() as started:
        assert started.run(f"%load_ext nbgpu\n%nbgpu start {launching.flags(_NUM_RANKS)}").status == "ok"
        with leaks.holding_family_of(started.manager.provisioner.pid):
            yield started
        started.run("%nbgpu stop")


def _run(notebook: Kernel, code: str) -> None:
    done = notebook.run(code)
    assert done.status == "ok", done.error


def _gradients(notebook: Kernel) -> list[float]:
    return [float(lines[-1]) for lines in notebook.run(_GRADIENT).said(*range(_NUM_RANKS))]


def _fail(notebook: Kernel) -> str:
    """Have a cell fail, and return what is said of it."""
    done = notebook.run(_FAIL)
    assert "on purpose" in done.error
    return done.error + done.stderr


SUMMED = (
    "def summed(_, bucket): return dist.all_reduce(bucket.buffer(), async_op=True).get_future()"
    ".then(lambda f: f.value()[0])\n"
)
HOOKS = {
    "of the person's own": (f"{SUMMED}ddp.register_comm_hook(None, summed)", 6.0),
    "of torch": (
        "from torch.distributed.algorithms.ddp_comm_hooks import default_hooks\n"
        "ddp.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)",
        2.0,
    ),
}


@pytest.mark.parametrize("which", HOOKS)
def test_a_communication_hook_is_on_it(notebook: Kernel, which: str) -> None:
    register, expected = HOOKS[which]
    _run(notebook, f"{_MAKE}{register}")
    before = _gradients(notebook)
    assert before == pytest.approx([expected] * _NUM_RANKS, rel=1e-3)  # in half precision
    for _ in range(2):
        assert "hook" not in _fail(notebook)
        assert _gradients(notebook) == before
        assert notebook.run("%%distributed\nlen(ddp._comm_hooks)").said(0) == [["1"]]


def test_power_sgd_goes_on_and_says_what_begins_anew(notebook: Kernel) -> None:
    _run(
        notebook,
        f"{_MAKE.replace('Linear(2, 1', 'Linear(40, 40')}"
        "from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power\n"
        "state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)\n"
        "ddp.register_comm_hook(state, power.powerSGD_hook)",
    )
    steps = "%%distributed\nfor _ in range(5): ddp(torch.ones(3, 40)).sum().backward()\nlen(state.error_dict)"
    assert notebook.run(steps).said(0, 1, 2) == [["1"]] * 3
    assert "powerSGD_hook begins again: 2 steps without compression" in _fail(notebook)
    assert notebook.run(steps).said(0, 1, 2) == [["1"]] * 3


_TRAIN = """%%distributed
def train(ddp, optimizer, num_steps):
    for _ in range(num_steps):
        x_BF = torch.randn(4, 8, generator=samples)
        optimizer.zero_grad()
        (ddp(x_BF) - x_BF.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
def make():
    global samples
    samples = torch.Generator().manual_seed(rank)
    torch.manual_seed(0)
    ddp = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)))
    return ddp, torch.optim.Adam(ddp.parameters(), lr=0.01)
undisturbed, optimizer = make()
train(undisturbed, optimizer, 12)
ddp, optimizer = make()
train(ddp, optimizer, 3)"""


def test_the_next_steps_give_the_bits_that_they_would_have_given(notebook: Kernel, tmp_path: Path) -> None:
    """Its buckets keep their order, which with three ranks decides how gradients are rounded."""
    _run(notebook, _TRAIN)
    for num_failures in (1, 2):
        for _ in range(num_failures):
            _fail(notebook)
        _run(notebook, "%%distributed\ntrain(ddp, optimizer, 3)")
    # A folder of saved variables keeps the order, too.
    _run(notebook, f"%nbgpu save '{tmp_path}/saved' ddp optimizer\n%nbgpu load '{tmp_path}/saved'")
    _run(notebook, "%%distributed\ntrain(ddp, optimizer, 3)")
    equal = "all(torch.equal(a, b) for a, b in zip(undisturbed.parameters(), ddp.parameters()))"
    assert notebook.run(f"%%distributed\n{equal}").said(0, 1, 2) == [["True"]] * 3


def test_a_hook_that_only_some_ranks_have_is_named(notebook: Kernel) -> None:
    _run(notebook, f"{_MAKE}{SUMMED}if rank: ddp.register_comm_hook(None, summed)")
    assert "ddp had a communication hook on some ranks only: it has none now" in _fail(notebook)
    assert _gradients(notebook) == [2.0] * _NUM_RANKS


def test_hooks_of_the_module_children_and_switches_are_on_it(notebook: Kernel) -> None:
    _run(
        notebook,
        f"{_MAKE}calls = []\n"
        "handle = ddp.register_forward_hook(lambda *_: calls.append(1))\n"
        "ddp.register_buffer('mean', torch.ones(3))\nddp.eval()\nddp.require_backward_grad_sync = False",
    )
    _fail(notebook)
    seen = "calls.clear(); ddp(torch.ones(1, 2)); [len(calls), ddp.mean.sum().item(), ddp.training, ddp.require_backward_grad_sync]"
    assert notebook.run(f"%%distributed\n{seen}").said(0, 1, 2) == [["[1, 3.0, False, False]"]] * 3
    # The handle of before still takes the hook away.
    assert notebook.run(f"%%distributed\nhandle.remove()\n{seen}").said(0)[0][-1].startswith("[0, ")


def test_an_optimizer_with_a_part_of_the_state_on_each_rank_goes_on(notebook: Kernel) -> None:
    _run(
        notebook,
        f"{_MAKE}from torch.distributed.optim import ZeroRedundancyOptimizer\n"
        "zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.1)",
    )
    step = (
        "%%distributed\nddp(torch.ones(1, 2)).sum().backward(); zero.step()\nddp.module.weight.sum().item()"
    )
    _run(notebook, step)
    said = _fail(notebook)
    assert "could not be formed" not in said
    assert "zero" not in said
    done = notebook.run(step)
    assert done.status == "ok", done.error
    assert len({lines[-1] for lines in done.said(*range(_NUM_RANKS))}) == 1
    _run(notebook, "%%distributed\ndel zero")


def test_an_optimizer_whose_state_cannot_be_taken_keeps_nobody(notebook: Kernel) -> None:
    _run(
        notebook,
        f"{_MAKE}class Odd(torch.optim.SGD):\n    def state_dict(self): raise RuntimeError('not mine to give')\n"
        "odd = Odd(ddp.parameters(), lr=0.1)",
    )
    assert "odd: its state could not be compared over the ranks (RuntimeError: not mine to give)" in _fail(
        notebook
    )
    assert _gradients(notebook) == [2.0] * _NUM_RANKS
    _run(notebook, "%%distributed\ndel odd, Odd")


_ODD = """
class Unmade(torch.nn.Module):
    def __init__(self): self.size = 1  # torch's own is not called
class Proxy:
    @property
    def __class__(self): raise RuntimeError('nothing behind it')
class Guarded(torch.optim.SGD):
    def __getattribute__(self, name):
        if name == 'param_groups' and 'is_guarded' in vars(self): raise RuntimeError('not mine to give')
        return super().__getattribute__(name)
class Closed(torch.nn.Linear):
    def named_parameters(self, *args, **kwargs):
        if 'is_closed' in vars(self): raise RuntimeError('closed')
        return super().named_parameters(*args, **kwargs)
class Keeper:
    __slots__ = ('group',)
    def __getattr__(self, name): raise RuntimeError(name)
unmade, proxy, guarded, keeper = Unmade(), Proxy(), Guarded(ddp.parameters(), lr=0.1), Keeper()
guarded.is_guarded, keeper.group = True, dist.group.WORLD
closed = torch.nn.parallel.DistributedDataParallel(Closed(2, 1))
closed.module.is_closed = True
"""


def test_no_odd_object_keeps_the_group_from_being_formed(notebook: Kernel) -> None:
    _run(notebook, _MAKE + _ODD)
    said = _fail(notebook)
    assert "could not be formed" not in said
    assert "guarded: its parameters could not be read (RuntimeError: not mine to give)" in said
    assert "closed, whose parameters cannot be read on rank 0 (RuntimeError: closed): make it again" in said
    assert _gradients(notebook) == [2.0] * _NUM_RANKS
    done = notebook.run("%%distributed\nkeeper.group is dist.group.WORLD")
    assert done.said(*range(_NUM_RANKS)) == [["True"]] * _NUM_RANKS
    _run(notebook, "%%distributed\ndel unmade, proxy, guarded, keeper, closed")


def test_an_optimizer_that_got_parameters_on_some_ranks_alone_is_named(notebook: Kernel) -> None:
    make = (
        "%%distributed\nddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))\n"
        "weight, bias = ddp.parameters()\ngrown = torch.optim.SGD([weight], lr=0.1)"
    )
    _run(notebook, make)
    add = "if rank == 1: raise ValueError('on purpose')\ngrown.add_param_group({'params': [bias]})\ndist.barrier()"
    done = notebook.run(f"%%distributed\n{add}")
    assert "on purpose" in done.error
    said = done.error + done.stderr
    assert "could not be formed" not in said
    assert (
        "the state of grown differs between the ranks (ConfigError: it has 1 parameter group(s) here and 2 there). "
        "Make it again on all ranks"
    ) in said
    _run(notebook, f"{_MAKE}\ndel grown, weight, bias")
    assert _gradients(notebook) == [2.0] * _NUM_RANKS


_NEVER_ENDS = {"computes": "while True: pass", "sleeps": "__import__('time').sleep(10**6)"}


@pytest.mark.long
@pytest.mark.parametrize("how", _NEVER_ENDS)
def test_an_object_whose_code_never_ends_is_named_and_not_asked_again(notebook: Kernel, how: str) -> None:
    act = f"asked.append(1)\n        {_NEVER_ENDS[how]}"
    endless = f"asked = []\nclass Endless(torch.optim.SGD):\n    def state_dict(self):\n        {act}\n"
    _run(notebook, f"{_MAKE}{endless}endless = Endless(ddp.parameters(), lr=0.1)")
    line = "endless: its state could not be compared over the ranks (its code had not ended after 10 s)"
    assert line in _fail(notebook)
    assert _gradients(notebook) == [2.0] * _NUM_RANKS
    _fail(notebook)
    assert notebook.run("%%distributed\nlen(asked)").said(*range(_NUM_RANKS)) == [["1"]] * _NUM_RANKS
    _run(notebook, "%%distributed\ndel endless")


@pytest.mark.long
def test_c_code_of_an_object_that_never_ends_is_waited_for_once(notebook: Kernel) -> None:
    """No signal reaches it, and so the group cannot be formed while it goes on."""
    endless = (
        "class Endless(torch.optim.SGD):\n    def state_dict(self):\n        return sum(range(10**13))\n"
    )
    _run(notebook, f"{_MAKE}{endless}endless = Endless(ddp.parameters(), lr=0.1)")
    patience = "from nbgpu.client.engines import ranks\nusual_s = ranks._REGROUP_PATIENCE_S\nranks._REGROUP_PATIENCE_S = "
    _run(notebook, f"{patience}5.0")
    said = _fail(notebook)
    _run(notebook, "ranks._REGROUP_PATIENCE_S = usual_s")
    assert "rank 0 did not come back: it does not answer for" in said
    assert "it is in C code that holds the GIL (computing" in said
    assert "give up the rank's variables: %nbgpu restart --rank 0" in said
    refused = notebook.run("%%distributed\nprint(rank)").error
    assert "rank(s) 0, 1, 2 are still in an earlier cell" in refused
    given_up = notebook.run("%nbgpu restart --rank 0")
    assert given_up.stdout.count("has a new process") == _NUM_RANKS, given_up.error
    total = notebook.run("%%distributed\nt = torch.ones(1)\ndist.all_reduce(t)\nint(t)")
    assert total.said(*range(_NUM_RANKS)) == [[str(_NUM_RANKS)]] * _NUM_RANKS, total.error
