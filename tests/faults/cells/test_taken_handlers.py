"""A cell may do with the handlers of signals what it likes: the ranks are freed all the same, and the next
cell can be stopped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import faults
import pytest
from kernel import Kernel
from rows import Measured, row

BOUND_S = 30
TOTAL = "%%distributed\ntotal = torch.ones(1); dist.all_reduce(total)\nint(total)"
ENDLESS = "while True: time.sleep(0.01)"


pytestmark = pytest.mark.usefixtures("ranks_may_be_replaced")


@pytest.fixture(autouse=True)
def ranks_are_well_afterwards(notebook: Kernel) -> Iterator[None]:
    notebook.run("%%distributed\nimport asyncio, faulthandler, signal, sys, time\nkept = 7 * rank")
    yield
    assert notebook.run(TOTAL, timeout_s=BOUND_S).said(0, 1) == [["2"], ["2"]]


def is_kept(notebook: Kernel, rank: int) -> bool:
    return notebook.run(f"%%distributed --ranks {rank}\nkept").said(rank) == [[str(7 * rank)]]


TAKES = {
    "faulthandler.register(signal.SIGUSR1)": "faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)",
    "signal.signal(signal.SIGUSR1, signal.SIG_IGN)": "",
    "signal.signal(signal.SIGINT, signal.SIG_IGN)": "",
    "signal.set_wakeup_fd(-1)": "",
    "an event loop with a signal of its own": "loop = asyncio.new_event_loop(); loop.add_signal_handler(signal.SIGUSR1, print)",
}


@row(
    "a rank takes a signal ({takes}) and waits in a barrier, the other one raises",
    "the failure is named, all are back, the sum is right, variables are kept",
    bound_s=1,
)
@pytest.mark.parametrize("takes", TAKES)
def test_a_rank_is_freed_whose_cell_has_taken_the_handlers(
    notebook: Kernel, measured: Measured, takes: str
) -> None:
    code = f"if rank == 1: {TAKES[takes] or takes}\n{faults.at(0, 'raise')}\ndist.barrier()"
    done = notebook.run(f"%%distributed\n{code}", timeout_s=BOUND_S)
    measured.ended(done.error)
    assert done.error.startswith("on rank 0:")
    assert "ValueError: on purpose" in done.error
    assert "freed from waiting for the others: rank 1" in done.stderr
    assert is_kept(notebook, 0)
    assert is_kept(notebook, 1)


LASTS = {
    "signal.signal(signal.SIGINT, signal.SIG_IGN)": "SIGINT",
    "signal.signal(signal.SIGINT, lambda *_: None)": "SIGINT",
    "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])": "SIGINT",
    "faulthandler.register(signal.SIGINT, sys.__stderr__)": "",
    "signal.signal(signal.SIGUSR2, signal.SIG_DFL)": "SIGUSR2",
}


@row(
    "a cell takes a signal for good ({takes}), a later one is stopped",
    "the handler is back before the next cell, which says so once; Stop works as ever",
    bound_s=1,
)
@pytest.mark.parametrize("takes", LASTS)
def test_a_handler_lasts_as_long_as_its_cell(notebook: Kernel, measured: Measured, takes: str) -> None:
    def stop() -> None:
        measured.fault_now()
        notebook.manager.interrupt_kernel()

    # What was said of a signal is not said again.
    notebook.run("import nbgpu\nnbgpu.current().parts.recovery._reported_signals.clear()")
    assert notebook.run(f"%%distributed\n{takes}").status == "ok"
    code = f"%%distributed\nprint('working', flush=True)\n{ENDLESS}"
    done = notebook.run(code, meanwhile=stop, timeout_s=BOUND_S)
    measured.ended(done.error)
    assert "KeyboardInterrupt" in done.error
    name = LASTS[takes]
    told = f"{name}: its handler, which a cell replaced on ranks 0-1, is back"
    assert (told in done.stderr) == bool(name), done.stderr
    notebook.run(f"%%distributed\n{takes}")
    assert "is back" not in notebook.run("%distributed 1").stderr


IGNORES = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
STAYS = {
    "ignores SIGINT": (
        f"{IGNORES}\n    {ENDLESS}",
        "The code of rank 1 has replaced the handler of SIGINT, and so no interrupt reaches it",
    ),
    "catches KeyboardInterrupt": (
        "while True:\n        try: time.sleep(0.01)\n        except KeyboardInterrupt: pass",
        "The code of rank 1 caught the KeyboardInterrupt of each interrupt, and went on",
    ),
}


@row(
    "a rank raises, another one {stays} in a loop of Python",
    "the failure is named, and why the other rank did not come back; %nbgpu restart --rank gives that one up",
    bound_s=4,
)
@pytest.mark.parametrize("stays", STAYS)
def test_the_cause_is_shown_where_another_rank_does_not_come_back(
    notebook: Kernel, measured: Measured, stays: str
) -> None:
    body, why = STAYS[stays]
    done = notebook.run(
        f"%%distributed\nif rank == 1:\n    {body}\n{faults.at(0, 'raise')}", timeout_s=BOUND_S
    )
    measured.ended(done.error)
    assert done.error.startswith("on rank 0:")
    assert "ValueError: on purpose" in done.error
    assert "rank 1 did not come back: it is at cell line " in done.error
    assert why in done.error
    assert "in C" not in done.error
    assert done.error.endswith("or give up the rank's variables: %nbgpu restart --rank 1")
    assert "still in an earlier cell" in notebook.run("%distributed 1").error
    told = notebook.run("%nbgpu restart --rank 1", timeout_s=BOUND_S)
    assert "it is empty; rank 0 kept all variables" in told.stdout, told.error
    assert is_kept(notebook, 0)


def test_the_same_is_said_to_who_calls_from_python(notebook: Kernel) -> None:
    code = f"if rank == 1:\n    {STAYS['ignores SIGINT'][0]}\n{faults.at(0, 'raise')}"
    done = notebook.run(f"import nbgpu\nnbgpu.current().execute({code!r})", timeout_s=BOUND_S)
    assert "ValueError: on purpose" in done.error
    assert "The code of rank 1 has replaced the handler of SIGINT" in done.error
    assert notebook.run("%nbgpu restart --rank 1", timeout_s=BOUND_S).status == "ok"


@row(
    "%nbgpu restart --rank of one of two ranks that do not come back",
    "the other one is given up as well, because there is no group without it, and that is said",
    bound_s=6,
)
def test_a_rank_that_does_not_come_back_is_given_up_with_the_one_that_is_restarted(
    notebook: Kernel, measured: Measured, tmp_path: Path
) -> None:
    # Said when both ignore it: a Stop that came before would end the one that does not yet, and a barrier
    # could be cut.
    code = f"""
from pathlib import Path
{IGNORES}
(Path({str(tmp_path)!r}) / str(rank)).touch()
while len(list(Path({str(tmp_path)!r}).iterdir())) < 2: time.sleep(0.01)
print('working', flush=True)
{ENDLESS}"""
    done = notebook.run(
        f"%%distributed\n{code}",
        meanwhile=notebook.manager.interrupt_kernel,
        timeout_s=BOUND_S,
    )
    assert "ranks 0, 1" in done.error or "rank 0 did not come back" in done.error
    measured.fault_now()
    told = notebook.run("%nbgpu restart --rank 0", timeout_s=BOUND_S)
    measured.ended(told.stdout)
    assert told.status == "ok", told.error
    assert "rank 0 has a new process" in told.stdout
    assert "rank 1 was still in an earlier cell, did not come back, and was given up as well" in told.stdout


def test_a_rank_that_can_be_stopped_keeps_its_variables_when_another_is_restarted(notebook: Kernel) -> None:
    """It waits in a collective for the one that did not come back."""
    code = f"if rank == 0:\n    {IGNORES}\n    print('working', flush=True)\n    {ENDLESS}\nwhile True:\n    try: dist.barrier()\n    except RuntimeError: time.sleep(3); break"
    done = notebook.run(
        f"%%distributed\n{code}", meanwhile=notebook.manager.interrupt_kernel, timeout_s=BOUND_S
    )
    assert done.status == "error"
    told = notebook.run("%nbgpu restart --rank 0", timeout_s=BOUND_S)
    assert "it is empty; rank 1 kept all variables" in told.stdout, told.error
    assert is_kept(notebook, 1)
