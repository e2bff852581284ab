"""Ranks of torchrun on one machine that others can reach: theirs are the ports of the loopback alone."""

from __future__ import annotations

import ipaddress
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from nbgpu.config import ClusterConfig, train_config, write_toml

ADDRESS = "198.18.0.1"  # for benchmarks of networks (RFC 2544)
ON_A_NETWORK = f"""
set -e
hostname reachable
ip link set lo up
ip link add outside type veth peer name there
ip addr add {ADDRESS}/24 dev outside
ip link set outside up
ip link set there up
mount --bind "$1" /etc/hosts
shift
exec "$@"
"""
RUN_PATIENCE_S = 600
LISTEN = "0A"


@pytest.fixture
def on_a_network(tmp_path: Path) -> list[str]:
    """The beginning of a command that runs the rest on a machine whose name is an address of a network."""
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("unshare")):
        if os.environ.get("CI") == "true":
            pytest.fail("this needs root, and ip and unshare of iproute2 and util-linux")
        pytest.skip("making a network needs root, and ip and unshare of iproute2 and util-linux")
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{ADDRESS} reachable\n")
    script = tmp_path / "on_a_network.sh"
    script.write_text(ON_A_NETWORK)
    return ["unshare", "--net", "--mount", "--uts", "bash", str(script), str(hosts)]


@pytest.mark.release
@pytest.mark.long
@pytest.mark.timeout(RUN_PATIENCE_S + 30)
def test_ranks_listen_on_the_loopback_alone(on_a_network: list[str], tmp_path: Path) -> None:
    run = train_config(
        "autoencoder", data="phantoms", patch_size=16, steps=8, runs_dir=str(tmp_path / "runs")
    )
    write_toml(tmp_path / "run.toml", ClusterConfig(gpus="none", ranks=2), run)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*on_a_network, *torchrun, "-m", "nbgpu.engine.train", str(tmp_path / "run.toml")]
    without = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    environment = without | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    seen: set[tuple[str, str]] = set()
    give_up_s = time.monotonic() + RUN_PATIENCE_S
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log) as process,
    ):
        while process.poll() is None and time.monotonic() < give_up_s:
            seen |= _listening(process.pid)
            time.sleep(0.05)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    said = (tmp_path / "log").read_text()
    assert process.returncode == 0, said
    of_ranks = {address for who, address in seen if who == "rank"}
    # Telemetry and gloo's own port of each rank were to be seen.
    assert of_ranks, said
    assert of_ranks <= {"127.0.0.1", "::ffff:127.0.0.1"}


def _listening(torchrun: int) -> set[tuple[str, str]]:
    """Who listens where: torchrun itself, and its ranks, by the addresses of the ports."""
    found = set()
    # psutil knows the connections of this network alone.
    try:
        of_inode = {
            inode: address
            for version in ("tcp", "tcp6")
            for inode, address in _ports(Path(f"/proc/{torchrun}/net/{version}").read_text())
        }
        parent = psutil.Process(torchrun)
        processes = [("torchrun", parent), *(("rank", child) for child in parent.children(recursive=True))]
        for who, process in processes:
            for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
                with suppress(FileNotFoundError):
                    inode = str(descriptor.readlink()).removeprefix("socket:[").removesuffix("]")
                    if inode in of_inode:
                        found.add((who, of_inode[inode]))
    except (OSError, psutil.NoSuchProcess):
        pass  # a process has ended meanwhile; it is looked for again
    return found


def _ports(table: str) -> Iterator[tuple[str, str]]:
    """The inode and the address of each port that listens, from a table of /proc/net."""
    for line in table.splitlines()[1:]:
        (
            _,
            local,
            _,
            state,
            *_,
        ) = line.split()
        if state == LISTEN:
            yield line.split()[9], _in_words(local.partition(":")[0])


def _in_words(address: str) -> str:
    """An address as /proc writes it, in words of 32 bits whose bytes are the wrong way round."""
    words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
