"""The Jupyter server's extension over real HTTP with a real cluster: who may ask, what is told and done."""

from __future__ import annotations

import http.cookiejar
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lab import Lab

import nbgpu
from nbgpu.client.host import registry

BOUND_S = 60
NOBODY = 65534
RUN_POST = "/nbgpu/clusters/{id}/run"
END_POST = "/nbgpu/clusters/{id}/end"


@dataclass
class Answer:
    code: int
    body: str
    headers: Any

    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    lab: Lab, path: str, body: Any = None, token: str | None = None, opener: Any = None, **headers: str
) -> Answer:
    """One request; with `body` it is a POST. `token=""` sends none."""
    token = lab.token if token is None else token
    request = urllib.request.Request(lab.url + path, None if body is None else json.dumps(body).encode())
    for name, value in headers.items():
        request.add_header(name.replace("_", "-"), value)
    if token:
        request.add_header("Authorization", f"token {token}")
    opened = (opener or urllib.request.build_opener()).open
    try:
        with opened(request, timeout=BOUND_S) as answer:
            return Answer(answer.status, answer.read().decode(), answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return Answer(error.code, error.read().decode(), error.headers)


def overview(lab: Lab) -> Any:
    return ask(lab, "/nbgpu/overview").json()


def told_of(lab: Lab, cluster_id: str) -> Any:
    return next((each for each in overview(lab)["clusters"] if each["id"] == cluster_id), None)


def until(found: Callable[[], Any], what: str) -> Any:
    deadline_s = time.monotonic() + BOUND_S
    while time.monotonic() < deadline_s:
        if value := found():
            return value
        time.sleep(0.2)
    raise AssertionError(f"not within {BOUND_S} s: {what}")


@pytest.fixture(scope="module")
def cluster_id(cluster2: nbgpu.Cluster) -> str:
    return next(entry.id for entry in registry.entries() if entry.owner.pid == os.getpid())


@pytest.mark.parametrize("token", ["", "wrong"])
def test_nothing_is_told_or_done_without_the_token(lab: Lab, cluster_id: str, token: str) -> None:
    for path, body in [
        ("/nbgpu/overview", None),
        (f"/nbgpu/clusters/{cluster_id}/report/any", None),
        (RUN_POST.format(id=cluster_id), {"run": "any", "command": "stop"}),
        (END_POST.format(id=cluster_id), {"state": "running"}),
    ]:
        answer = ask(lab, path, body, token=token)
        # A page that is no API sends people to the login.
        assert answer.code == 403 or "<title>Jupyter" in answer.body
        assert '"ranks"' not in answer.body
        assert "Plotly" not in answer.body
    assert told_of(lab, cluster_id)["state"] == "running"


def test_a_forged_request_is_refused_although_the_browser_is_logged_in(lab: Lab, cluster_id: str) -> None:
    cookies = http.cookiejar.CookieJar()
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(cookies))
    assert ask(lab, f"/lab?token={lab.token}", token="", opener=opener).code == 200
    assert ask(lab, "/nbgpu/overview", token="", opener=opener).code == 200
    end, body = END_POST.format(id=cluster_id), {"state": "kept"}
    assert ask(lab, end, body, token="", opener=opener).code == 403
    xsrf = next(cookie.value for cookie in cookies if cookie.name == "_xsrf")
    assert xsrf is not None
    # With the token against forged requests it comes as far as the cluster, which is not kept.
    assert ask(lab, end, body, token="", opener=opener, X_XSRFToken=xsrf).code == 409
    foreign = ask(lab, end, body, token="", opener=opener, X_XSRFToken=xsrf, Origin="http://evil.example")
    assert foreign.code in (403, 404)


@pytest.mark.parametrize("body", [[], ["stop"], "stop", {"state": 1}])
def test_a_request_without_what_it_needs_is_a_bad_one(lab: Lab, body: Any) -> None:
    answer = ask(lab, END_POST.format(id="abc"), body)
    assert (answer.code, answer.json()["message"]) == (400, "state is missing")


def test_it_tells_of_devices_and_of_idle_ranks(lab: Lab, cluster_id: str) -> None:
    told = ask(lab, "/nbgpu/overview?devices=1").json()
    assert told["problems"] == []
    assert told["devices"]["devices"][-1]["kind"] == "cpu"
    assert overview(lab)["devices"] is None
    (cluster,) = [each for each in told["clusters"] if each["id"] == cluster_id]
    assert [rank["device"] for rank in cluster["ranks"]] == ["CPU", "CPU"]
    until(
        lambda: [rank["words"] for rank in told_of(lab, cluster_id)["ranks"]] == ["idle", "idle"],
        "both ranks idle",
    )
    assert (cluster["run"], cluster["waiting"], cluster["gone"], cluster["kernel_id"]) == (None, "", "", "")


WAITS = """import time
from pathlib import Path
while rank == 1 and not Path({flag!r}).exists():
    time.sleep(0.05)
dist.barrier()"""


def test_it_says_who_waits_where(lab: Lab, cluster2: nbgpu.Cluster, cluster_id: str, tmp_path: Path) -> None:
    flag = tmp_path / "go on"
    waiting = threading.Thread(target=cluster2.execute, args=(WAITS.format(flag=str(flag)),))
    waiting.start()
    try:
        sentence = until(lambda: told_of(lab, cluster_id)["waiting"], "a sentence about who waits")
        first, second = told_of(lab, cluster_id)["ranks"]
    finally:
        flag.touch()
        waiting.join(BOUND_S)
    assert "rank 0 waits in barrier, cell line 5" in sentence
    assert (first["sign"], second["sign"]) == ("waits", "busy")
    assert second["words"].startswith("cell line ")
    assert "time.sleep" not in json.dumps([first, second, sentence]), "a person's code is nobody's business"
    until(lambda: not told_of(lab, cluster_id)["waiting"], "nobody waits any more")


@pytest.fixture(scope="module")
def run(lab: Lab, cluster2: nbgpu.Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[nbgpu.Run]:
    runs_dir = str(tmp_path_factory.mktemp("runs"))
    run = cluster2.train(
        "autoencoder",
        data="phantoms",
        patch_size=16,
        num_phantoms=16,
        steps=50_000,
        threads=1,
        runs_dir=runs_dir,
    )
    yield run
    if not run.over:
        run.stop()
        run.wait(BOUND_S)


@pytest.fixture
def run_that_ended(run: nbgpu.Run) -> nbgpu.Run:
    if not run.over:
        run.stop()
        run.wait(BOUND_S)
    return run


@pytest.mark.long
def test_a_run_is_shown_paused_resumed_and_stopped(lab: Lab, cluster_id: str, run: nbgpu.Run) -> None:
    name, path = run.folder.name, RUN_POST.format(id=cluster_id)

    def shown() -> Any:
        return told_of(lab, cluster_id)["run"]

    # What was read a moment ago may be told once more, and has no run yet.
    until(lambda: ((shown() or {}).get("progress") or {}).get("step", 0) > 3, "some steps")
    now = shown()
    assert (now["name"], now["title"], now["state"]) == (name, "autoencoder", "training")
    assert now["progress"]["total_steps"] == 50_000
    assert now["progress"]["eta_s"] > 0
    until(
        lambda: all(rank["words"].startswith("step ") for rank in told_of(lab, cluster_id)["ranks"]),
        "every rank with its step",
    )

    assert ask(lab, path, {"run": name, "command": "dance"}).code == 409
    assert ask(lab, path, {"run": "another", "command": "stop"}).code == 409
    assert ask(lab, path, {"run": name}).code == 400
    assert not run.over
    assert ask(lab, path, {"run": name, "command": "pause"}).code == 200
    until(lambda: shown()["state"] == "paused" and run.status == "paused", "a pause")
    assert shown()["progress"]["eta_s"] is None
    assert ask(lab, path, {"run": name, "command": "resume"}).code == 200
    until(lambda: shown()["state"] == "training", "training again")
    assert ask(lab, path, {"run": name, "command": "stop"}).code == 200
    run.wait(BOUND_S)
    until(lambda: shown()["has_report"], "a report")
    assert (shown()["state"], shown()["is_over"], run.status) == ("stopped", True, "stopped")
    refused = ask(lab, path, {"run": name, "command": "stop"})
    assert refused.code == 409
    assert "it cannot stop any more" in refused.json()["message"]


def test_its_report_is_shown_without_the_servers_own_rights(
    lab: Lab, cluster_id: str, run_that_ended: nbgpu.Run
) -> None:
    answer = ask(lab, f"/nbgpu/clusters/{cluster_id}/report/{run_that_ended.folder.name}")
    assert answer.code == 200
    assert "Plotly.newPlot" in answer.body
    policy = answer.headers["Content-Security-Policy"]
    assert "sandbox" in policy
    assert "default-src 'none'" in policy
    assert "allow-same-origin" not in policy
    for other in ("another", "..", "%2e%2e%2frun.toml"):
        assert ask(lab, f"/nbgpu/clusters/{cluster_id}/report/{other}").code == 404


def test_a_damaged_file_is_said_and_hides_nothing_else(
    lab: Lab, cluster_id: str, run_that_ended: nbgpu.Run
) -> None:
    path = run_that_ended.folder / "run_info.json"
    content = path.read_bytes()
    path.write_text("{}")
    try:
        told = until(
            lambda: overview(lab)["problems"] and ask(lab, "/nbgpu/overview?devices=1").json(), "a problem"
        )
        assert run_that_ended.folder.name in told["problems"][0]
        assert told["devices"]["devices"]
    finally:
        path.write_bytes(content)
    until(lambda: not overview(lab)["problems"], "all is well again")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_cluster_is_neither_told_nor_touched(lab: Lab, cluster_id: str) -> None:
    own = registry.folder() / f"{cluster_id}.json"
    theirs = registry.folder() / "abcdef.json"
    theirs.write_text(own.read_text().replace(f'"{cluster_id}"', '"abcdef"'))
    try:
        until(lambda: told_of(lab, "abcdef"), "a cluster of one's own")
        os.chown(theirs, NOBODY, NOBODY)
        until(lambda: told_of(lab, "abcdef") is None, "another user's cluster is not told")
        refused = ask(lab, END_POST.format(id="abcdef"), {"state": "running"})
        assert refused.code == 409
        assert "there is no cluster abcdef" in refused.json()["message"]
    finally:
        theirs.unlink()
    assert told_of(lab, cluster_id)["state"] == "running"


_KEEPER = "import nbgpu; nbgpu.Cluster(gpus='none', ranks=1, keep=True).start()"


def test_a_cluster_is_ended_in_the_state_in_which_it_was_seen(lab: Lab, cluster_id: str) -> None:
    kept_by = {**os.environ, "JPY_SESSION_NAME": str(lab.root / "scans" / "kept.ipynb")}
    subprocess.run([sys.executable, "-c", _KEEPER], env=kept_by, check=True, timeout=BOUND_S)
    (kept,) = until(
        lambda: [each for each in overview(lab)["clusters"] if each["id"] != cluster_id], "the kept cluster"
    )
    try:
        assert (kept["state"], kept["notebook"]) == ("kept", "kept.ipynb")
        assert kept["contents_path"] == "scans/kept.ipynb"
        wrong = ask(lab, END_POST.format(id=kept["id"]), {"state": "left over"})
        assert wrong.code == 409
        assert "Nothing was ended" in wrong.json()["message"]
        assert told_of(lab, kept["id"])
    finally:
        ended = ask(lab, END_POST.format(id=kept["id"]), {"state": "kept"})
    assert ended.code == 200
    assert "1 rank(s)" in ended.json()["message"]
    until(lambda: told_of(lab, kept["id"]) is None, "it is gone")
    assert told_of(lab, cluster_id)["state"] == "running"
