"""Runs programs on hosts by the system's own ssh, on all hosts at the same time.

One connection to each host (ControlMaster) carries everything. It needs no password: `~/.ssh/config` and the
agent apply as in a terminal. Secrets travel over standard input, and stand in no command line and no
environment.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from nbgpu.errors import ClusterError
from nbgpu.host import versions
from nbgpu.machine.signals import uninterrupted

Argument = TypeVar("Argument")

_CONNECT_TIMEOUT_S = 10
_PATIENCE_S = 60.0
_NUM_END_CHECKS = 60
"""How often the end of a program is checked after SIGTERM, every tenth of a second, before SIGKILL."""
_OPTIONS = (
    # There is nobody whom ssh could ask for a password.
    "BatchMode=yes",
    f"ConnectTimeout={_CONNECT_TIMEOUT_S}",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "ForwardAgent=no",
    "ForwardX11=no",
    "ControlMaster=auto",
    "ControlPersist=20",
)
_READ = (
    "import json, sys; "
    "sys.version_info < (3, 8) and sys.exit('Python %d.%d is too old: nbgpu needs 3.11' % sys.version_info[:2]); "
    'request = json.loads(sys.stdin.readline()); exec(request["code"])'
)
"""The program that Python runs on a host: it reads a request, and runs the text of remote_start.py in it."""

_EMPTY_REQUEST: Mapping[str, Any] = {
    "packages": versions.PACKAGES,
    "versions": {},
    "command": [],
    "connection": "",
}
"""A request that starts nothing."""
_SETUP_FAILED = 125
"""The exit status that stands for a failure of the lines of `setup`."""
_SSH_FAILED = 255
"""ssh's exit status if ssh itself has failed."""
_NO_CONNECTION = (
    (r"Could not resolve hostname", "there is no host of that name"),
    (r"No route to host|Network is unreachable", "there is no way to it from here"),
    (r"Connection refused", "it refuses the connection: no sshd runs there, or on another port"),
    (r"timed out|Timeout|Connection closed by UNKNOWN", f"it did not answer within {_CONNECT_TIMEOUT_S} s"),
    (
        r"HOST IDENTIFICATION HAS CHANGED|Host key verification failed",
        "its host key is not the one that is known here, or none is known: run `ssh {host}` once in a terminal and "
        "compare the key",
    ),
    (
        r"Permission denied",
        "it takes no key of yours: `ssh-copy-id {host}` puts one there, and `ssh-add` gives it to the agent. nbgpu "
        "cannot type a password",
    ),
)
"""What ssh prints, as a regular expression, and what that means."""


@dataclass(frozen=True)
class RemoteProcess:
    """A program that was started on a host."""

    host: str
    pid: int
    folder: str
    """The program's private folder on the host. Its log is `host.log`."""


@dataclass(frozen=True)
class SshOptions:
    """How ssh reaches hosts, and what runs before the programs there."""

    python: str = "python3"
    """The interpreter on the hosts: a path, or a name that a non-interactive shell finds."""
    options: Sequence[str] = ()
    """More arguments of ssh, such as ['-F', 'config'] or ['-p', '2222']."""
    through: Sequence[str] = ()
    """A command line that runs ssh somewhere else, such as in a container; empty to run it here."""
    setup: str = ""
    """Lines of shell that run before Python."""


class SshHosts:
    """Connections to hosts. `close` ends the connections; programs that were started go on.

    Args:
        hosts: names or addresses as ssh takes them, also 'user@host'.
        settings: how the hosts are reached.
    """

    def __init__(self, hosts: Sequence[str], settings: SshOptions | None = None) -> None:
        self.hosts = tuple(hosts)
        self._settings = settings or SshOptions()
        if not self._settings.through and shutil.which("ssh") is None:
            raise ClusterError(
                "there is no ssh on this host, and launcher='ssh' needs it: install openssh-client"
            )
        # The folder for the sockets of the connections. A command makes it, because ssh may run elsewhere
        # (`through`). Its path is short, because that of a socket has at most 108 bytes.
        self._sockets = f"/tmp/nbgpu-ssh-{secrets.token_hex(6)}"
        done = self._run(["mkdir", "-m", "700", self._sockets])
        if done.returncode:
            raise ClusterError(f"no folder for connections can be made: {done.stderr.strip()}")

    def reach(self) -> list[str]:
        """Connect to all hosts and compare their versions with those here. Return the address of this host
        that each of them sees.

        Raises:
            ClusterError: a host cannot be reached or has other versions, with a line for each such host.
        """
        answers, problems = self._answers(_EMPTY_REQUEST)
        if problems:
            raise ClusterError("\n".join(problems))
        return [answer["caller"] for answer in answers.values()]

    def start(self, command: Sequence[str], connection: str) -> list[RemoteProcess]:
        """Start a program on every host, in the home folder.

        Args:
            command: its arguments. '{python}' stands for the interpreter there, and '{folder}' for a new
                private folder.
            connection: the text of the file `connection.json` in that folder.

        Returns:
            One process for each host, in their order.

        Raises:
            ClusterError: a host cannot be reached or has other versions, with a line for each such host. The
                programs that were started on the other hosts are ended.
        """
        answers, problems = self._answers(
            {
                **_EMPTY_REQUEST,
                "versions": versions.here(),
                "command": list(command),
                "connection": connection,
            }
        )
        started = [RemoteProcess(host, answer["pid"], answer["folder"]) for host, answer in answers.items()]
        if problems:
            self.end(started)
            raise ClusterError("\n".join(problems))
        return started

    def _answers(self, request: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """Send a request to all hosts.

        Returns:
            The answers by host, and a line about each host that did not answer or has other versions.
        """
        versions_here = versions.here()
        answers, problems = {}, []
        results = _in_parallel(lambda host: self._answer(host, request), self.hosts)
        for host, answer in zip(self.hosts, results, strict=True):
            if isinstance(answer, ClusterError):
                problems.append(str(answer))
            elif different := versions.differences(answer["versions"], versions_here):
                problems.append(f"{host} has other versions than this notebook: {', '.join(different)}")
            else:
                answers[host] = answer
        return answers, problems

    def ended(self, processes: Sequence[RemoteProcess]) -> list[RemoteProcess]:
        """Return those of these programs that have ended.

        Raises:
            ClusterError: a host cannot be reached.
        """
        results = _in_parallel(self.alive, processes)
        for result in results:
            if isinstance(result, ClusterError):
                raise result
        return [process for process, is_alive in zip(processes, results, strict=True) if not is_alive]

    def alive(self, process: RemoteProcess) -> bool:
        """Whether a program that was started still runs.

        Raises:
            ClusterError: its host cannot be reached.
        """
        return not self._shell(process.host, f"kill -0 {process.pid} 2>/dev/null").returncode

    def still_runs(self, process: RemoteProcess) -> bool:
        """Whether a program that has its folder in its command line still runs. Unlike `alive`, this holds
        after a reboot of the host, when another program may have the same pid.

        Raises:
            ClusterError: its host cannot be reached.
        """
        search = f"grep -qs {shlex.quote(process.folder)} /proc/{process.pid}/cmdline"
        return not self._shell(process.host, search).returncode

    def log(self, process: RemoteProcess, num_lines: int = 20) -> str:
        """The last lines of a program's log.

        Raises:
            ClusterError: its host cannot be reached.
        """
        return self._shell(process.host, f"tail -n {num_lines} {shlex.quote(process.folder)}/host.log").stdout

    def end(self, processes: Sequence[RemoteProcess]) -> None:
        """End programs, with all processes of their sessions, and remove their folders. A host that cannot be
        reached is passed over: its program ends by itself when it does not hear the controller."""

        def end(process: RemoteProcess) -> None:
            # First SIGTERM, after which the program removes the cluster's folder there: that takes a while on
            # a busy host. The program leads a process group, which the negative pid means.
            pid, folder = process.pid, shlex.quote(process.folder)
            counter = " ".join(map(str, range(_NUM_END_CHECKS)))
            wait = f"for i in {counter}; do kill -0 -{pid} 2>/dev/null || break; sleep 0.1; done"
            script = f"kill -TERM -{pid}; {wait}; kill -KILL -{pid}; rm -rf {folder}"
            self._shell(process.host, f"{{ {script}; }} 2>/dev/null; true")

        _in_parallel(end, processes)

    def close(self) -> None:
        """End the connections."""
        _in_parallel(lambda host: self._ssh(host, [], options=["-O", "exit"]), self.hosts)
        self._run(["rm", "-rf", self._sockets])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, host: str, request: Mapping[str, Any]) -> dict[str, Any]:
        """Run remote_start.py on a host with a request, and return its answer; see there for both.

        Raises:
            ClusterError: the host cannot be reached, or its Python fails.
        """
        code = Path(__file__).with_name("remote_start.py").read_text()
        command = shlex.join([self._settings.python, "-c", _READ])
        if self._settings.setup:
            # The output of the lines must not mix with the answer, and they must not read the request.
            command = f"{{ {self._settings.setup}\n}} >&2 </dev/null || exit {_SETUP_FAILED}\nexec {command}"
        done = self._shell(host, command, json.dumps({**request, "code": code}) + "\n")
        lines = [line for line in done.stdout.splitlines() if line.startswith("nbgpu ")]
        if done.returncode or not lines:
            raise ClusterError(f"{host}: {self._why_no_answer(done)}")
        answer: dict[str, Any] = json.loads(lines[-1].removeprefix("nbgpu "))
        return answer

    def _why_no_answer(self, done: subprocess.CompletedProcess[str]) -> str:
        """Say why a host's Python gave no answer: the lines of `setup` failed, there is no such Python, or it
        ended with an error."""
        output = (done.stderr or done.stdout).strip().splitlines()
        last = output[-1] if output else f"exit status {done.returncode}"
        python = self._settings.python
        if done.returncode == _SETUP_FAILED and self._settings.setup:
            return f"the lines of setup failed there: {last}"
        if done.returncode in {126, 127}:  # a shell's exit statuses for a command that it cannot run
            return (
                f"there is no {python} ({last}). launcher_options={{'python': ...}} names the Python there that has "
                "nbgpu, with its path"
            )
        return f"{python} failed there: {last}"

    def _shell(self, host: str, script: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a shell script on a host.

        Raises:
            ClusterError: the host cannot be reached.
        """
        done = self._ssh(host, [script], stdin)
        if done.returncode != _SSH_FAILED:
            return done
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        for pattern, meaning in _NO_CONNECTION:
            if re.search(pattern, done.stderr):
                line = next((line for line in reversed(lines) if re.search(pattern, line)), lines[-1])
                raise ClusterError(f"{host}: {meaning.format(host=host)} (ssh: {line})")
        raise ClusterError(f"{host} is not reached: ssh says {' '.join(lines) or 'nothing'}")

    def _ssh(
        self, host: str, command: Sequence[str], stdin: str = "", options: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        ours = [f"-o{option}" for option in (*_OPTIONS, f"ControlPath={self._sockets}/%C")]
        return self._run(["ssh", *self._settings.options, *ours, *options, "--", host, *command], stdin)

    def _run(self, command: Sequence[str], stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a program where ssh runs. A program that takes too long ends with ssh's own exit status."""
        arguments = [*self._settings.through, *command]
        # Files and no pipes: a connection in the background inherits them, and a pipe would stay open.
        with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
            try:
                status = subprocess.run(
                    arguments,
                    input=stdin.encode(),
                    stdout=output,
                    stderr=errors,
                    check=False,
                    timeout=_PATIENCE_S,
                    start_new_session=True,
                ).returncode
            except subprocess.TimeoutExpired:
                status = _SSH_FAILED
                errors.write(f"Timeout: nothing came within {_PATIENCE_S:.0f} s".encode())
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        return subprocess.CompletedProcess(arguments, status, *texts)


def _in_parallel(function: Callable[[Argument], Any], arguments: Sequence[Argument]) -> list[Any]:
    """Call a function with each argument, in parallel threads, and return the results in order. A
    ClusterError that it raises takes the place of a result."""

    def attempt(argument: Argument) -> Any:
        try:
            return function(argument)
        except ClusterError as error:
            return error

    with uninterrupted(), ThreadPoolExecutor(max(1, len(arguments))) as pool:
        return list(pool.map(attempt, arguments))
