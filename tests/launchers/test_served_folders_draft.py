# ruff: noqa
# fmt: off
import time, traceback, io, contextlib
from pathlib import Path
import pytest, hosts
from hosts import FarPython
pytestmark = [pytest.mark.hosts, pytest.mark.long, pytest.mark.timeout(1200)]
import test_ssh_cluster as T
box = Path("/tmp/folder-box")
@pytest.mark.timeout(1200)
def test_loop(test_ssh):
    box.mkdir(exist_ok=True)
    names = {"test_ssh": test_ssh, "T": T, "FarPython": FarPython, "nb": None}
    end = time.time() + 900
    while time.time() < end:
        c = box / "cmd.py"
        if not c.exists():
            time.sleep(0.2); continue
        code = c.read_text(); c.unlink()
        if code.strip() == "quit": break
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            try: exec(code, names)
            except BaseException: traceback.print_exc(file=out)
        (box/"part").write_text(out.getvalue()); (box/"part").rename(box/"out")
    if names["nb"] is not None:
        names["nb"].process.kill()
