"""Files that are not what they should be: each is passed over, or told in a sentence, and none is waited
for."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rows import row
from safetensors.numpy import save

from nbgpu.client.host import registry
from nbgpu.config import ClusterConfig, read_toml, train_config, write_toml
from nbgpu.errors import ConfigError, DataError, NbgpuError, RunError
from nbgpu.planning import suitability
from nbgpu.protocol.records import PROFILE_PARTS, Sample
from nbgpu.recipes.lithography.recipe import load_pairs
from nbgpu.run_folder import checkpoint_files, lines, metrics_files, resume
from nbgpu.run_folder import folder as runs
from nbgpu.run_folder.commands import CommandWatch
from nbgpu.run_folder.rank_files import Tail
from nbgpu.run_folder.reader import WINDOW, Reader
from nbgpu.ui.run.snapshot import bundle, write_report
from nbgpu.ui.run.stored import StoredRun

DEEP = "[" * 20_000


def _nbgpu(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nbgpu.cli", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=180, check=False)


def _make(kind: str, path: Path) -> None:
    match kind:
        case "a folder":
            path.mkdir()
        case "a link to itself":
            path.symlink_to(path.name)
        case "a pipe":
            os.mkfifo(path)
        case "of a wrong form":
            path.write_text('{"version": 99, "id": "ab"}')
        case "nested too deeply":
            path.write_text(DEEP)


@pytest.mark.slow
@row("An entry of the registry is {kind}", "`nbgpu ps` names it, a start passes over it", bound_s=None)
@pytest.mark.parametrize(
    "kind", ["a folder", "a link to itself", "a pipe", "of a wrong form", "nested too deeply"]
)
def test_an_odd_entry_of_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv(registry.STATE_VARIABLE, str(tmp_path))
    path = registry.folder() / "ab.json"
    _make(kind, path)
    done = _nbgpu("ps", cwd=tmp_path)
    assert done.stdout == f"no clusters\n{path} is not an entry of a cluster, and is passed over: remove it\n"
    assert done.stderr == ""
    registry.require_free(())


def test_an_odd_lock_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(registry.STATE_VARIABLE, str(tmp_path))
    (registry.folder() / "lock").mkdir()
    with pytest.raises(NbgpuError, match=r"lock cannot be used as a lock .*: remove it"):
        registry.entries()


@row("`run.toml` holds {what}", "a sentence names the file and the value", bound_s=None)
@pytest.mark.parametrize(
    ("what", "text", "told"),
    [
        ("a number as [cluster]", "cluster = 3", "cluster must be a table"),
        ("a list as [train]", "train = [1]", "train must be a table"),
        ("a number as recipe", "[train]\nrecipe = 3", "recipe = 3 is not a recipe's name"),
        ("a setting cls", "[train]\ncls = 3", "cls is not a setting"),
        ("a table as lr", "[train]\nlr = {a = 1}", "lr = .* is not valid"),
        ("a list as ranks", "[cluster]\nranks = [1]", r"ranks = \[1\] is not valid"),
        pytest.param("20,000 brackets", f"a = {DEEP}", "too many brackets", id="20,000 brackets"),
    ],
)
def test_settings_of_wrong_types(tmp_path: Path, what: str, text: str, told: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told) as error:
        read_toml(path)
    assert str(path) in str(error.value)


@pytest.mark.slow
@row("A pipe stands where {what} should", "it is refused, and nobody waits for it", bound_s=None)
@pytest.mark.parametrize("what", ["--config", "--data", "the recipe"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, what: str) -> None:
    os.mkfifo(tmp_path / "pipe.py")
    arguments = ["pipe.py"] if what == "the recipe" else ["microstructure", what, "pipe.py"]
    done = _nbgpu("train", *arguments, "--gpus", "none", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith(("ConfigError: ", "DataError: "))
    assert "pipe" in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr


def test_data_that_are_a_device() -> None:
    with pytest.raises(ConfigError, match=r"/dev/zero.* neither a file nor a folder"):
        suitability.require_paths(train_config("microstructure", data="/dev/zero"))


@pytest.mark.slow
@row("`nbgpu new {name!r}`", "the name is refused in a sentence", bound_s=None)
@pytest.mark.parametrize("name", ["", ".", "/", ".."])
def test_a_recipe_with_no_name(tmp_path: Path, name: str) -> None:
    done = _nbgpu("new", name, cwd=tmp_path)
    assert done.returncode == 1
    assert "cannot be the name of a recipe" in done.stderr
    assert "Traceback" not in done.stderr


def _checkpoint(run_folder: Path, state: object) -> Path:
    folder = run_folder / "checkpoints" / checkpoint_files.checkpoint_name(2)
    folder.mkdir(parents=True)
    contents = {
        checkpoint_files.MODEL: save({"weight": np.zeros(1)}),
        checkpoint_files.OPTIMIZER: save({"weight": np.zeros(1)}),
        checkpoint_files.STATE: json.dumps(state).encode(),
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    seals = {name: checkpoint_files.sealed(content) for name, content in contents.items()}
    (folder / checkpoint_files.MANIFEST).write_text(
        checkpoint_files.text(checkpoint_files.CheckpointManifest(2, 0.0, seals))
    )
    return folder


@row(
    "A checkpoint's `state.json` was made by hand, with its sha256: {state}",
    "the checkpoint is refused as damaged, in a sentence",
    bound_s=None,
)
@pytest.mark.parametrize("state", [{}, [], {"step": "2"}, {"step": -1}, {"step": 2, "config": 3}])
def test_a_forged_state(tmp_path: Path, state: object) -> None:
    folder = _checkpoint(tmp_path, state)
    assert checkpoint_files.damage(folder) == "state.json: is not what nbgpu writes"
    config = train_config("autoencoder", data="phantoms", resume=str(folder))
    for contents in (True, False):
        with pytest.raises(RunError, match=r"state\.json.* is not what nbgpu writes"):
            resume.find(config, check_sha256=contents)


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"devices": [{"x": 1}]}', DEEP, "no JSON"])
def test_other_forged_files_of_a_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.toml").write_text("")
    for name in ("run_info.json", "resume.json", "rank0.outcome.json"):
        (tmp_path / name).write_text(text)
    with pytest.raises(RunError, match=r"run_info\.json"):
        StoredRun(tmp_path)
    with pytest.raises(RunError, match=r"resume\.json"):
        resume.Beginning.read(tmp_path)
    with pytest.raises(RunError, match=r"rank0\.outcome\.json"):
        runs.outcome(tmp_path, 0)


INFO = {
    "run_id": "20260101-120000-autoencoder-1f2e",
    "recipe": "autoencoder",
    "devices": [
        {"kind": "cpu", "name": "a processor", "uuid": "", "index": rank, "memory_bytes": 2**30}
        for rank in (0, 1)
    ],
    "backend": "gloo",
    "total_steps": 9,
    "steps_per_epoch": 3,
    "batch_size": 1,
    "global_batch_size": 2,
    "started_s": 1.75e9,
}
NUM_STEPS = 9
GOOD: dict[str, Any] = {"seq": 5, "time_s": 1.75e9, "step": 4}


def _line(seq: int) -> str:
    about: dict[str, Any] = {"seq": seq, "time_s": 1.75e9 + seq, "step": seq}
    if seq == 0:
        about |= {"kind": "state", "text": "training", "detail": {}}
    elif seq > NUM_STEPS:
        about |= {"step": NUM_STEPS, "kind": "state", "text": "finished", "detail": {}}
    else:
        about["values"] = {"loss": 1 / seq, "lr": 0.1, "step_s": 0.5, "samples_per_s": 4.0}
    return json.dumps(about)


def _run(folder: Path, **files: str | bytes) -> Path:
    """A run of two ranks that is over; `files` are other contents, by name with _ for the point."""
    write_toml(folder / "run.toml", ClusterConfig(), train_config("autoencoder", steps=NUM_STEPS))
    records = "\n".join(map(_line, range(NUM_STEPS + 2))) + "\n"
    contents = {"run_info_json": json.dumps(INFO), "rank0_jsonl": records, "rank1_jsonl": records, **files}
    for name, content in contents.items():
        path = folder / name.replace("_json", ".json").replace("_csv", ".csv")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def _with_line(number: int, line: str | bytes) -> bytes:
    """A rank's file in which one line, counted from 1, is another one."""
    known = [_line(seq).encode() for seq in range(NUM_STEPS + 2)]
    known[number - 1] = line if isinstance(line, bytes) else line.encode()
    return b"\n".join(known) + b"\n"


def _wrong(**fields: Any) -> str:
    return json.dumps({**GOOD, "values": {"loss": 1.0}, **fields})


def _event(**fields: Any) -> str:
    return json.dumps({**GOOD, "kind": "note", "text": "", "detail": {}, **fields})


DAMAGED = {
    "no JSON": "{",
    "empty": "",
    "NUL bytes": b"\0" * 40,
    "invalid UTF-8": b'{"seq": 5, "text": "\xff"}',
    "a carriage return": b"a\rb",
    "a number": "3",
    "a list": "[1, 2]",
    "a text": '"kind"',
    "null": "null",
    "two objects": _wrong() + _wrong(),
    "an empty object": "{}",
    "without a step": '{"seq": 5, "time_s": 1.0, "values": {}}',
    "with a rank": _wrong(rank=0),
    "a text as seq": _wrong(seq="5"),
    "a list as step": _wrong(step=[4]),
    "a step below 0": _wrong(step=-1),
    "a huge step": _wrong(step=10**400),
    "a number of 5,000 digits": '{"seq": ' + "9" * 5000 + "}",
    "null as time": _wrong(time_s=None),
    "NaN as time": _wrong(time_s=float("nan")),
    "a time in a million years": _wrong(time_s=1e300),
    "a list as values": _wrong(values=[1.0]),
    "a text as loss": _wrong(values={"loss": "low"}),
    "true as loss": _wrong(values={"loss": True}),
    "a huge loss": _wrong(values={"loss": 10**400}),
    "an infinite time of a step": _wrong(values={"step_s": float("inf"), "samples_per_s": 1.0}),
    "a step with a rate below 0": _wrong(values={"step_s": 1.0, "samples_per_s": -1.0}),
    "nested too deeply": DEEP,
    "a kind that is none": _event(kind=3),
    "a text that is none": _event(text=None),
    "a detail that is none": _event(detail=[]),
    "a state that is none": _event(kind="state", text="asleep"),
    "a result nested deeply": '{"seq":5,"time_s":1,"step":4,"kind":"result","text":"","detail":{"a":'
    + "[" * 900
    + "]" * 900
    + "}}",
    "pictures that are none": _event(kind="pictures", detail={"images": 3}),
    "a profile of nothing": _event(kind="profile"),
    "a profile of no time": _event(
        kind="profile",
        detail={"steps": [1, 2], "step_s": 0.0, **dict.fromkeys(map("{}_s".format, PROFILE_PARTS), 0.0)},
    ),
}


@pytest.mark.slow
@row(
    "A line in the middle of a run's `rankN.jsonl` is {what}",
    "the report shows all the others, and names file and line",
    bound_s=None,
)
@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_line_of_records(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    run = StoredRun(_run(tmp_path, rank1_jsonl=_with_line(6, DAMAGED[what])))
    named = (
        f"line 6 of {tmp_path / 'rank1.jsonl'} is not what nbgpu writes, and was passed over: curves, tables and events "
        "lack what stood there"
    )
    assert run.reader.damage() == caplog.messages == [named]
    assert [status.step for status in run.statuses()] == [NUM_STEPS, NUM_STEPS]
    assert run.status == "finished"
    shown = [(r.rank, r.step) for r in run.reader.records() if isinstance(r, Sample)]
    assert sorted(shown) == [
        (rank, step) for rank in (0, 1) for step in range(1, NUM_STEPS + 1) if (rank, step) != (1, 5)
    ]
    assert html.escape(named) in write_report(run).read_text()
    table = (tmp_path / "metrics.csv").read_text().splitlines()[1:]
    assert len(table) == 2 * NUM_STEPS - 1


def test_many_damaged_lines_are_named_together(tmp_path: Path) -> None:
    known = [_line(seq) for seq in range(NUM_STEPS + 2)]
    known[2:4] = ["x", "y"]
    known[6] = "z"
    folder = _run(tmp_path, rank0_jsonl="\n".join(known) + "\n", rank1_jsonl="x\n" * 100_000)
    ours, all_of_it = Reader(folder, 2, live=False).damage()
    assert f"lines 3 to 4 and 7 of {folder / 'rank0.jsonl'} are not what nbgpu writes" in ours
    assert "lines 1 to 100000 of" in all_of_it
    scattered = Path("a.jsonl")
    assert "lines 1, 3, 5, 7, 9, 11, 13, 15, 17, 19 and 990 more places of" in lines.passed_over(
        scattered, range(1, 2000, 2)
    )


def test_damage_behind_the_window_is_passed_over_each_time_that_it_is_read(tmp_path: Path) -> None:
    num = 2 * WINDOW + 10
    damaged = {0, 5, WINDOW - 1, WINDOW, WINDOW + 7, num - 1}
    text = "".join(
        "x\n"
        if seq in damaged
        else json.dumps({**GOOD, "seq": seq, "step": seq, "values": {"loss": 1.0}}) + "\n"
        for seq in range(num)
    )
    (tmp_path / "rank0.jsonl").write_text(text)
    reader = Reader(tmp_path, 1, live=False)
    whole = [seq for seq in range(num) if seq not in damaged]
    assert [r.step for r in reader.records() if isinstance(r, Sample)] == whole
    assert [r.step for r in Tail(tmp_path, 0).new() if isinstance(r, Sample)] == whole
    assert "lines 1, 6, 4096 to 4097, 4104 and 8202 of" in reader.damage()[0]


@row(
    "Lines of `rankN.jsonl` were {what}",
    "the report shows the others, and says from which line on it is not what the rank recorded",
    bound_s=None,
)
@pytest.mark.parametrize(
    ("what", "order", "at"),
    [
        ("taken out", [0, 1, 2, 5, 6, 7, 8, 9, 10], 4),
        ("moved", [0, 1, 2, 3, 4, 9, 5, 6, 7, 8, 10], 6),
        ("added", [0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 9, 10], 5),
    ],
)
def test_lines_that_do_not_follow_on_one_another(
    tmp_path: Path, what: str, order: list[int], at: int
) -> None:
    run = StoredRun(_run(tmp_path, rank0_jsonl="".join(_line(seq) + "\n" for seq in order)))
    assert run.status == "finished"
    (said,) = run.reader.damage()
    assert said.startswith(f"line {at} of {tmp_path / 'rank0.jsonl'} does not follow on the line before it")
    assert {r.step for r in run.reader.records() if r.rank == 0} == set(order) - {10} | {NUM_STEPS}


def test_a_last_line_that_was_cut_off_is_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is what a rank leaves that was killed while it wrote."""
    run = StoredRun(_run(tmp_path, rank0_jsonl="".join(_line(s) + "\n" for s in range(6)) + _line(6)[:20]))
    assert (run.reader.damage(), caplog.messages) == ([], [])
    assert run.statuses()[0].step == 5


def _forged_info() -> dict[str, str]:
    device = INFO["devices"][0]
    wrong: dict[str, Any] = {
        "no devices": {"devices": []},
        "a text as devices": {"devices": "two"},
        "a text as memory": {"devices": [{**device, "memory_bytes": "much"}]},
        "a huge memory": {"devices": [{**device, "memory_bytes": 10**400}]},
        "another kind of device": {"devices": [{**device, "kind": "abacus"}]},
        "a list as total_steps": {"total_steps": [1]},
        "steps below 0": {"total_steps": -1},
        "huge steps": {"steps_per_epoch": 10**400},
        "NaN as start": {"started_s": float("nan")},
        "a start in a million years": {"started_s": 1e300},
        "null as recipe": {"recipe": None},
        "epochs of two numbers": {"epochs_from": [[0, 0]]},
        "epochs of texts": {"epochs_from": [["a", "b", "c"]]},
        "a number as data": {"data": 3},
    }
    return {what: json.dumps({**INFO, **fields}) for what, fields in wrong.items()} | {
        "half of it": json.dumps(INFO)[:100],
        "invalid UTF-8": '{"run_id": "\udcff"}',
    }


@row(
    "A run's `run_info.json` has {what}",
    "`nbgpu report` names the file, and says what is missing without it",
    bound_s=None,
)
@pytest.mark.parametrize("what", _forged_info())
def test_forged_info_of_a_run(tmp_path: Path, what: str) -> None:
    text = _forged_info()[what].encode(errors="surrogateescape")
    with pytest.raises(RunError, match=r"run_info\.json is not what nbgpu writes"):
        StoredRun(_run(tmp_path, run_info_json=text))


@pytest.mark.parametrize(
    "left",
    [
        {"state": "asleep"},
        {"state": []},
        {"failure": 3},
        {"failure": {"rank": "x", "error_type": "E", "message": "", "traceback": ""}},
        {"failure": {"rank": 0, "error_type": [], "message": "", "traceback": ""}},
    ],
)
def test_forged_outcome_of_a_rank(tmp_path: Path, left: Any) -> None:
    folder = _run(tmp_path)
    (folder / "rank0.outcome.json").write_text(json.dumps(left))
    with pytest.raises(RunError, match=r"rank0\.outcome\.json is not what nbgpu writes\. Take it away"):
        StoredRun(folder)


@row(
    "A line of a run's `changes.jsonl` is damaged",
    "the run can be taken over; a warning says which settings may be shown as before",
    bound_s=None,
)
@pytest.mark.parametrize("line", ["{", "3", "{}", '{"set": 3}', DEEP, "\0"])
def test_a_damaged_change(tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "changes.jsonl").write_text(
        f'{{"set": {{"lr": 0.5}}}}\n{line}\n{{"set": {{"lr": 0.25}}}}\n{{"se'
    )
    config = runs.with_changes(train_config("autoencoder"), tmp_path)
    assert config.lr == 0.25
    (said,) = caplog.messages
    assert said.startswith(
        f"line 2 of {tmp_path / 'changes.jsonl'} is not what nbgpu writes, and was passed over"
    )


@pytest.mark.parametrize("values", ['{"lr": "fast"}', '{"no_such": 1}'])
def test_a_change_that_does_not_fit_the_run(tmp_path: Path, values: str) -> None:
    (tmp_path / "changes.jsonl").write_text(f'{{"set": {values}}}\n')
    with pytest.raises(ConfigError, match=r"changes\.jsonl holds a change that does not fit the run"):
        runs.with_changes(train_config("autoencoder"), tmp_path)


@pytest.mark.parametrize("line", ["{", "3", "{}", '{"complete": true, "last_step": "x"}', DEEP, "\0"])
def test_a_damaged_epoch_is_made_again_from_the_records(tmp_path: Path, line: str) -> None:
    folder = _run(tmp_path)
    metrics_files.complete(folder, NUM_STEPS)
    expected = [json.loads(epoch) for epoch in (folder / "epochs.jsonl").read_text().splitlines()]
    assert [epoch["last_step"] for epoch in expected] == [3, 6, 9]
    first, _, last = (folder / "epochs.jsonl").read_text().splitlines()
    (folder / "epochs.jsonl").write_text(f"{first}\n{line}\n{last}\n")
    metrics_files.MetricsWriter(folder).finish()
    assert [json.loads(epoch) for epoch in (folder / "epochs.jsonl").read_text().splitlines()] == expected


def test_a_damaged_table_of_metrics_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = _run(tmp_path, metrics_csv="step,epoch,rank,time_s,loss\n1,1,0,1.0,1.0\nx,x\n")
    metrics_files.MetricsWriter(folder).finish()
    (said,) = caplog.messages
    assert said.startswith("metrics.csv is not written any more: its last lines are not what nbgpu writes")
    StoredRun(folder)
    assert len((folder / "metrics.csv").read_text().splitlines()) == 1 + 2 * NUM_STEPS


@pytest.mark.parametrize("line", ["{", "3", '{"command": "dance"}', '{"set": 3}', DEEP])
def test_a_damaged_command_does_not_end_the_run(
    tmp_path: Path, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "commands.jsonl").write_text(f'{line}\n{{"command": "pause"}}\n')
    assert CommandWatch(tmp_path).newest() == "pause"
    assert "commands.jsonl are not what nbgpu writes, and were passed over" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("text", ["{", "{}", "3", '{"address": "x", "public_key": "y"}', DEEP])
def test_records_come_from_the_file_where_the_endpoint_is_damaged(tmp_path: Path, text: str) -> None:
    (tmp_path / "rank0.endpoint.json").write_text(text)
    reader = Reader(tmp_path, 1)
    try:
        (tmp_path / "rank0.jsonl").write_text(_line(0) + "\n")
        give_up_s = time.monotonic() + 300
        while not reader.events():
            assert time.monotonic() < give_up_s
            time.sleep(0.02)
    finally:
        reader.close()


@row("A run's `{name}` is {kind}", "`nbgpu report` names it, and nobody waits for it", bound_s=None)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", ["a folder", "a link to itself", "a pipe"])
@pytest.mark.parametrize("name", ["rank1.jsonl", "run_info.json", "rank0.outcome.json"])
def test_something_else_stands_in_a_run_s_folder(tmp_path: Path, kind: str, name: str) -> None:
    folder = _run(tmp_path)
    (folder / name).unlink(missing_ok=True)
    _make(kind, folder / name)
    with pytest.raises(RunError, match=re.escape(str(folder / name))):
        StoredRun(folder)


@pytest.mark.slow
def test_the_command_reports_a_damaged_run_without_a_traceback(tmp_path: Path) -> None:
    """The damage is named; what cannot be reported at all is one sentence, and the exit status says so."""
    folder = _run(tmp_path, rank0_jsonl=_with_line(6, DEEP), env_json=DEEP)
    done = _nbgpu("report", str(folder), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{folder / 'report.html'}\n")
    assert done.stderr.startswith(f"line 6 of {folder / 'rank0.jsonl'} is not what nbgpu writes")
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    done = _nbgpu("report", str(folder), cwd=tmp_path)
    assert done.returncode == 1
    assert "RunError: " in done.stderr
    assert "report.html: Is a directory" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_result_of_odd_values_is_shown(tmp_path: Path) -> None:
    """A picture that is none, and a path in a message that is no UTF-8."""
    detail = {"images": {"a": "data:image/png;base64,abc", "b": "é", "c": 3}, "path": "/data/\udcff"}
    event = _event(kind="result", text="\ud800", detail=detail)
    run = StoredRun(_run(tmp_path, rank0_jsonl=_with_line(6, event)))
    text = write_report(run).read_text()
    assert text.count("this picture is not a PNG as a data URL") == 3
    assert "/data/\\udcff" in text
    assert bundle(run)["text/plain"].startswith("autoencoder: finished, step 9 of 9")


@pytest.mark.timeout(60)
def test_pipes_among_layouts_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.gds")
    (tmp_path / "masks").mkdir()
    os.mkfifo(tmp_path / "masks" / "b.png")
    named = train_config("lithography", data=f"{tmp_path / 'a.gds'},{tmp_path / 'c.gds'}", pixel_nm=25)
    with pytest.raises(DataError, match=r"a\.gds: there is no such file or folder\n.*c\.gds: there is no"):
        load_pairs(named)
    with pytest.raises(DataError, match="has no"):
        load_pairs(train_config("lithography", data=str(tmp_path), pixel_nm=25))
