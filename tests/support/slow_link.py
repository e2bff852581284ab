"""Real slow links, between network namespaces on this machine.

with slow_link(num_hosts=2, bits_per_s=1e9, delay_one_way_s=1e-4) as link:
    results = link.run(measure, size=4096)  # measure(place, size) in a process on each host

Every host is a namespace with one interface behind a switch (slow_link.c). What a host sends leaves it at the
rate, in each direction, and arrives after the delay. Namespaces belong to processes, and end with them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path
from typing import Any

INTERFACE = "slow0"
_SOURCE = Path(__file__).with_suffix(".c")
_POLL_S = 0.02


@dataclass(frozen=True)
class Host:
    """One end of the links."""

    address: str
    namespace: str
    """A path for `nsenter --net=`, while the link lasts."""


@dataclass(frozen=True)
class Place:
    """Which host a function runs on."""

    rank: int
    world_size: int
    address: str
    rendezvous: Path
    """An empty folder that all hosts of one `SlowLink.run` see, such as for a FileStore."""


@dataclass(frozen=True)
class SlowLink:
    """The links, while they last."""

    hosts: tuple[Host, ...]
    bits_per_s: float
    delay_one_way_s: float
    report: dict[str, float] = field(default_factory=dict)
    """When the links have ended: the `frames`, how many were `lost`, and how late they came in `late_s` (the
    mean) and `most_late_s`."""

    def run(self, function: Callable[..., Any], patience_s: float = 300.0, **arguments: Any) -> list[Any]:
        """Call a function in a process of its own on each host at the same time.

        Gloo uses the hosts' interface. Where one process fails, the others are ended.

        Args:
            function: of a file's top level. It gets its Place first.
            patience_s: when all are ended that have not come to their end.
            arguments: what JSON can carry.

        Returns:
            What the function returned on each host, through JSON.

        Raises:
            RuntimeError: a process failed or did not end in time; with what it wrote.
        """
        code = function.__code__.co_filename
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "rendezvous").mkdir()
            processes: list[subprocess.Popen[bytes]] = []
            try:
                for rank, host in enumerate(self.hosts):
                    place = [rank, len(self.hosts), host.address, str(folder / "rendezvous")]
                    call = json.dumps([code, function.__name__, place, arguments])
                    python = [sys.executable, __file__, call, str(folder / f"result-{rank}")]
                    with (folder / f"output-{rank}").open("wb") as output:
                        processes.append(
                            subprocess.Popen(
                                ["nsenter", f"--net={host.namespace}", *python],
                                env=environment,
                                stdin=subprocess.DEVNULL,
                                stdout=output,
                                stderr=subprocess.STDOUT,
                            )
                        )
                self._wait(processes, folder, patience_s)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            return [json.loads((folder / f"result-{rank}").read_text()) for rank in range(len(processes))]

    @staticmethod
    def _wait(processes: list[subprocess.Popen[bytes]], folder: Path, patience_s: float) -> None:
        give_up_s = time.monotonic() + patience_s
        while True:
            ends = [process.poll() for process in processes]
            late = time.monotonic() > give_up_s
            for rank, end in enumerate(ends):
                if end or (late and end is None):
                    what = f"ended with {end}" if end else f"did not end within {patience_s:.0f} s"
                    wrote = (folder / f"output-{rank}").read_text(errors="replace")
                    raise RuntimeError(f"the process of host {rank} {what}:\n{wrote[-4000:]}")
            if None not in ends:
                return
            time.sleep(_POLL_S)


@contextmanager
def slow_link(num_hosts: int, bits_per_s: float, delay_one_way_s: float) -> Iterator[SlowLink]:
    """Make hosts with slow links between them; call where `why_not` is empty.

    Args:
        num_hosts: 2 to 16.
        bits_per_s: what each host sends and receives at most, with the headers of TCP and Ethernet.
        delay_one_way_s: in addition to the time that the bits take.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "slow_link")
        subprocess.run(["gcc", "-O2", "-o", program, _SOURCE], check=True)
        switch = subprocess.Popen(
            [program, str(num_hosts), str(bits_per_s), str(delay_one_way_s), INTERFACE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert switch.stdin is not None
        assert switch.stdout is not None
        with switch.stdin, switch.stdout:
            try:
                descriptors = [switch.stdout.readline().strip() for _ in range(num_hosts)]
                if switch.stdout.readline() != "ready\n":
                    raise RuntimeError(f"no slow link between {num_hosts} hosts; its messages are above")
                hosts = tuple(
                    Host(f"198.19.0.{number + 1}", f"/proc/{switch.pid}/fd/{descriptor}")
                    for number, descriptor in enumerate(descriptors)
                )
                link = SlowLink(hosts, bits_per_s, delay_one_way_s)
                yield link
                switch.stdin.close()
                link.report.update(json.loads(switch.stdout.readline()))
            finally:
                switch.kill()
                switch.wait()


def why_not() -> str:
    """Why slow links cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    if missing := [name for name in ("gcc", "nsenter") if shutil.which(name) is None]:
        return f"no {' and no '.join(missing)} on this machine: apt-get install gcc libc6-dev util-linux"
    if not Path("/dev/net/tun").exists():
        return "this machine has no /dev/net/tun"
    tried = subprocess.run(
        ["unshare", "--net", "true"], capture_output=True, text=True, check=False, timeout=30
    )
    return f"no network namespace can be made here: {tried.stderr.strip()}" if tried.returncode else ""


def _call(text: str, result: Path) -> None:
    """Call a function on its host, in this process."""
    code, name, (rank, world_size, address, rendezvous), arguments = json.loads(text)
    sys.path.insert(0, str(Path(code).parent))
    spec = util.spec_from_file_location(Path(code).stem, code)
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    returned = getattr(module, name)(Place(rank, world_size, address, Path(rendezvous)), **arguments)
    result.write_text(json.dumps(returned))


if __name__ == "__main__":
    _call(sys.argv[1], Path(sys.argv[2]))
