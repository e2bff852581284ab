"""What a cell of the notebook's own kernel can show, on ranks: figures, tables, magics, the shell, errors."""

from __future__ import annotations

import re
import time

import pytest
from kernel import Kernel

# What a rank has loaded is asked.
pytestmark = pytest.mark.cold

BOUND_S = 30
WIDGET = "application/vnd.jupyter.widget-view+json"
SUM = "%%distributed\ntotal = torch.ones(1)\ndist.all_reduce(total)\nint(total)"


def test_figures_and_tables_of_every_rank(notebook: Kernel) -> None:
    loaded = "import sys; sorted({'matplotlib', 'plotly', 'pandas', 'ipywidgets'} & set(sys.modules))"
    assert notebook.run(f"%distributed {loaded}").stdout == "[0-1] []\n"
    done = notebook.run("%%distributed\nimport matplotlib.pyplot as plt\nplt.plot([1, 2, rank]);")
    assert [set(d) for d in done.displays] == [{"image/png", "text/plain"}] * 2
    assert sorted(done.stdout.split()) == ["[0]", "[1]"]

    done = notebook.run("%%distributed\nimport pandas as pd\npd.DataFrame({'mine': [rank]})")
    assert ["<td>0</td>" in done.displays[0]["text/html"], "<td>1</td>" in done.displays[1]["text/html"]] == [
        True
    ] * 2

    plot = "import plotly.graph_objects as go\nfig = go.Figure(go.Scatter(y=[0, rank]))"
    for show in ("fig.show()", "fig"):
        done = notebook.run(f"%%distributed\n{plot}\n{show}")
        drawn = [d["application/vnd.plotly.v1+json"]["data"][0]["y"] for d in done.displays]
        assert sorted(drawn) == [[0, 0], [0, 1]]


def test_a_display_is_changed_by_the_rank_that_made_it(notebook: Kernel) -> None:
    code = (
        "%%distributed\nfrom IPython.display import HTML, display, update_display\n"
        "display(HTML(f'first {rank}'), display_id='same')\nupdate_display(HTML(f'then {rank}'), display_id='same')"
    )
    done = notebook.run(code)
    assert sorted(d["text/html"] for d in done.displays) == ["first 0", "first 1"]
    assert sorted(u["text/html"] for u in done.updates) == ["then 0", "then 1"]


def test_clear_output_clears_what_the_rank_displayed(notebook: Kernel) -> None:
    code = (
        "%%distributed\nfrom IPython.display import HTML, clear_output, display\n"
        "for n in range(3):\n    clear_output(wait=True)\n    display(HTML(f'{rank} {n}'))\n"
        "if rank: clear_output()"
    )
    done = notebook.run(code)
    assert sorted(d["text/html"] for d in done.displays) == ["0 0", "1 0"]
    assert sorted(u.get("text/html", "") for u in done.updates) == ["", "0 1", "0 2", "1 1", "1 2"]
    assert done.updates.index({}) > [u.get("text/html") for u in done.updates].index("1 2")


def test_a_widget_of_a_rank_and_its_page(notebook: Kernel) -> None:
    code = "%%distributed\nimport ipywidgets\nslider = ipywidgets.IntSlider(value=rank)\nslider"
    shown = notebook.run(code).displays
    assert [d["text/plain"] for d in shown] == ["IntSlider(value=0)", "IntSlider(value=1)"]
    # What a page sends when somebody moves the second one.
    moved = {"comm_id": shown[1][WIDGET]["model_id"], "data": {"method": "update", "state": {"value": 7}}}
    notebook.client.shell_channel.send(notebook.client.session.msg("comm_msg", moved))
    assert notebook.run("%distributed slider.value").stdout == "[0] 0\n[1] 7\n"
    # A callback prints when no cell runs, and fails.
    code = """%%distributed --ranks 1
def pressed(_): print('pressed'); 1 / 0
button = ipywidgets.Button()
button.on_click(pressed)
button"""
    button = notebook.run(code).displays[0][WIDGET]["model_id"]
    click = {"comm_id": button, "data": {"method": "custom", "content": {"event": "click"}}}
    notebook.client.shell_channel.send(notebook.client.session.msg("comm_msg", click))
    text = ""
    while "[1] ZeroDivisionError: division by zero" not in text:
        content = notebook.client.get_iopub_msg(timeout=BOUND_S)["content"]
        text += re.sub(r"\x1b\[[0-9;]*m", "", content.get("text", ""))
    assert "[1] pressed\n" in text
    # Text that is printed `with` an Output appears under the cell; what is appended to it is in it.
    code = (
        "%%distributed\nout = ipywidgets.Output()\nout.append_stdout('held')\nwith out: print('printed')\n"
        "[o['text'] for o in out.outputs]"
    )
    assert notebook.run(code, timeout_s=BOUND_S).stdout == "[0-1] printed\n[0-1] ['held']\n"


def test_magics_and_the_shell(notebook: Kernel) -> None:
    done = notebook.run("%%distributed --ranks 0\n%timeit -n 10 -r 2 sum(range(10))\n%time x = 3\nx")
    assert "loops each" in done.stdout
    assert "Wall time" in done.stdout
    assert done.stdout.endswith("[0] 3\n")
    assert notebook.run("%distributed _ + 1 if rank == 0 else 0").stdout == "[0] 4\n[1] 0\n"
    done = notebook.run("%%distributed\n!echo hello; exit 3\n_exit_code")
    assert done.stdout == "[0-1] hello\n[0-1] 3\n"
    done = notebook.run("%%distributed\n%%bash\necho out; echo err >&2")
    assert (done.stdout, done.stderr) == ("[0-1] out\n", "[0-1] err\n")
    assert "exit status 4" in notebook.run("%%distributed\n%%bash\nexit 4").error
    done = notebook.run("%%distributed\ndef f(a):\n    'what it is for'\nf?")
    assert "[0-1] Docstring: what it is for" in done.stdout


@pytest.mark.parametrize(
    "runs",
    ["!sleep 600", "x = !sleep 600", "%%bash\nsleep 600", "import os; os.system('sleep 600')"],
)
def test_stop_ends_programs_too(notebook: Kernel, runs: str) -> None:
    started_s = time.time()
    notebook.run("import asyncio, os, signal\nmain = os.getpid()")
    notebook.run(
        "async def stop():\n    await asyncio.sleep(0.7)\n    os.kill(main, signal.SIGINT)\nstopping = asyncio.ensure_future(stop())"
    )
    done = notebook.run(f"%%distributed\n{runs}", timeout_s=BOUND_S)
    assert "the cell was stopped" in done.error
    assert notebook.run(SUM).stdout == "[0-1] 2\n"
    sleeping = "import psutil; [p.pid for p in psutil.process_iter(['cmdline', 'create_time']) if p.info['cmdline'] == ['sleep', '600']"
    assert notebook.run(f"{sleeping} and p.info['create_time'] > {started_s}]").value == "[]"


def test_exit_does_not_end_a_rank(notebook: Kernel) -> None:
    notebook.run("%%distributed\nheld = rank + 5")
    assert "%nbgpu stop ends the cluster" in notebook.run("%distributed exit()").error
    assert notebook.run("%distributed held").stdout == "[0] 5\n[1] 6\n"


def test_a_syntax_error_has_its_line_and_is_shown_once(notebook: Kernel) -> None:
    done = notebook.run("%%distributed\nx = 1\ny = (2 +\n")
    assert done.error.count("SyntaxError") == 1
    assert re.search(r"Cell In\[\d+\], line 2\n    y = \(2 \+\n", done.error), done.error
    done = notebook.run("%%distributed\ndef g():\n    eval('1 +')\ng()")
    assert re.search(r"Cell In\[\d+\], line 2,? in g\n    eval\('1 \+'\)", done.error), done.error


def test_cells_have_the_notebooks_numbers(notebook: Kernel) -> None:
    number = int(notebook.run("len(In) - 1").value)
    notebook.run("%%distributed\ndef failing():\n    1/0")
    done = notebook.run("%distributed failing()")
    assert f"Cell In[{number + 1}], line 2, in failing()" in done.error
    assert f"Cell In[{number + 2}], line 1" in done.error
    assert notebook.run("%distributed rank + 1").stdout == "[0] 1\n[1] 2\n"
    assert notebook.run(f"%distributed Out[{number + 3}], In[-1]").stdout.startswith("[0] (1, 'Out[")


def test_tracebacks_have_the_persons_lines_only(notebook: Kernel) -> None:
    code = (
        "%%distributed\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        raise ValueError('in forward')\n"
        "torch.nn.Sequential(Net())(1)"
    )
    done = notebook.run(code)
    assert "----> 4 torch.nn.Sequential(Net())(1)" in done.error
    assert re.search(r"-> 3 +raise ValueError\('in forward'\)", done.error)
    assert "(5 frames of libraries left out; %%distributed --full shows all)" in done.error
    assert ".py" not in done.error
    done = notebook.run(code.replace("%%distributed", "%%distributed --full"))
    assert "nn/modules/module.py" in done.error
    assert "left out" not in done.error
    notebook.run("import nbgpu\ndef sent(x):\n    return len(x)")
    done = notebook.run("nbgpu.current().apply(sent, 1)")
    assert "in sent(x)" in done.error
    assert "do_apply" not in done.error


def test_the_same_error_on_all_ranks_is_no_error_of_one(notebook: Kernel) -> None:
    """Also of the type that a rank raises which was freed from a collective."""
    done = notebook.run("%%distributed\nimport time\ntime.sleep(0.3 * rank)\nraise RuntimeError('same')")
    assert "on all ranks:" in done.error
    assert done.error.count("RuntimeError: same") == 1
    assert "freed" not in done.stderr


def test_an_error_that_cannot_say_what_it_is(notebook: Kernel) -> None:
    code = "%%distributed\nclass Mute(Exception):\n    def __str__(self):\n        return 1 / 0\nraise Mute"
    assert notebook.run(code, timeout_s=BOUND_S).status == "error"
    # IPython drops a handler that fails, and would show all of torch's frames from then on.
    done = notebook.run("%distributed __import__('json').loads('{')")
    assert "frames of libraries left out" in done.error
