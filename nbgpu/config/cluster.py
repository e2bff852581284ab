"""The settings of a cluster: its devices, the number of ranks, and how the ranks communicate."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator

from nbgpu.config.conditions import Condition, Rules, given, left_out, none_of, one_of, only
from nbgpu.config.launchers import LAUNCHERS, OPTIONAL, LauncherSettings
from nbgpu.config.settings import Settings, control, several
from nbgpu.errors import ConfigError
from nbgpu.machine.cgroups import usable_cores
from nbgpu.machine.gpus import setting as gpus_setting
from nbgpu.machine.links import Link, parse_link
from nbgpu.text.ranks import named_ranks
from nbgpu.text.sizes import in_words, parse_size

MAX_RANKS = 64
MAX_SLOW_FACTOR = 100.0
_LEAST_MEMORY_BYTES = 64 * 2**20
"""Python and torch alone take more. A smaller limit is a mistake, such as a unit that was forgotten."""
if TYPE_CHECKING:
    LauncherName = str
else:
    LauncherName = Literal[tuple(LAUNCHERS)]


class ClusterConfig(Settings):
    """The devices that get a rank, and how the ranks communicate."""

    ONLY_WITH: ClassVar[Rules] = (
        only(one_of("backend", "auto", "nccl"), "nccl_safe"),
        only(one_of("backend", "auto"), "probe_timeout_s"),
        only(none_of("gpus", "none"), "share_gpus", "allocator", "bind_cores"),
        only(given("release_after_s"), "save_on_release"),
        *(
            only(one_of("launcher", *(each.NAME for each in LAUNCHERS.values() if name in each.TAKES)), name)
            for name in OPTIONAL
        ),
        only(none_of("launcher", "local"), "gpus_per_node", "interface", "on_host_lost"),
        only(one_of("on_host_lost", "wait"), "host_patience_s"),
        only(left_out("ranks"), "at_least"),
        only(left_out("wait"), "at_least"),
        only(
            one_of("launcher", "local"),
            *("ranks", "at_least", "spare", "share_gpus", "wait", "link", "slow_rank"),
        ),
        only(Condition("gpus", gpus_setting.takes_free, "gpus='auto' or 'free:N'"), "wait"),
    )

    FROM_SITE: ClassVar[Mapping[str, str]] = {
        name: name
        for name in (
            *("gpus", "wait", "release_after_s", "launcher", "launcher_options", "hosts", "nodes"),
            *("gpus_per_node", "ipython_profile", "setup", "interface"),
        )
    }
    """The settings whose defaults an administrator may set, each with its row in the site's file."""
    SITE_ONLY_WITH: ClassVar[Rules] = (
        only(one_of("launcher", "local"), "gpus"),
        only(left_out("share_gpus"), "gpus", "wait"),
    )
    """The site's defaults that have an effect only for certain values of another setting."""

    gpus: str = Field("auto", json_schema_extra=control("Devices", "GPUs") | several())
    """GPUs to use: 'auto' for all that are free, 'free:2' for two free ones, 'all' for all that are visible,
    'none' for CPU ranks, or numbers and UUIDs separated by commas"""
    ranks: int | None = Field(None, ge=1, le=MAX_RANKS, json_schema_extra=control("Devices", "Ranks"))
    """number of ranks; left out: one for each GPU, or 2 CPU ranks where there is none"""
    wait: bool = False
    """wait until as many GPUs are free as gpus and ranks ask for; Stop (Ctrl-C) ends the wait"""
    at_least: int | None = Field(None, ge=2, le=64)
    """the fewest ranks that there are to be, for what needs several: where there are fewer GPUs, so many
    ranks on the CPU, or on the GPUs that `gpus` names, which share them; the start says which, and what times
    mean then. Left out: as many ranks as GPUs, also if that is one"""
    launcher: LauncherName = Field(
        "local",
        description="where ranks run: "
        + "; ".join(f"{each.NAME!r} {each.MEANING}" for each in LAUNCHERS.values()),
        json_schema_extra=control("Hosts", "Launcher"),
    )
    hosts: str = Field("", json_schema_extra=control("Hosts", "Hosts") | several())
    """hosts on which ssh starts the ranks, as ssh takes them: names, addresses or names of ~/.ssh/config,
    also user@host, separated by commas"""
    nodes: int | None = Field(None, ge=1, le=64, json_schema_extra=control("Hosts", "Number of hosts"))
    """number of hosts: of Slurm's nodes, or of hosts that dial in; left out: all nodes of the Slurm job that
    the notebook is in, and else 1"""
    ipython_profile: str = Field("", json_schema_extra=control("Hosts", "IPython profile"))
    """name of an IPython profile whose ipcluster_config.py says how ipyparallel starts engines, such as with
    PBS, LSF, SGE, HTCondor or MPI: hosts are started so. Left out: nothing is started, and hosts dial in by
    themselves"""
    launcher_options: str = Field(
        "",
        description="more for the launcher, as names and values separated by spaces. "
        + " ".join(filter(None, (each.OPTIONS_MEANING for each in LAUNCHERS.values()))).removesuffix("."),
        json_schema_extra=control("Hosts", "Launcher options"),
    )
    setup: str = Field("", json_schema_extra=control("Hosts", "Setup"))
    """lines of shell that run on each host before its ranks start, such as 'module load cuda'"""
    gpus_per_node: int | None = Field(None, ge=1, le=64, json_schema_extra=control("Hosts", "Ranks per host"))
    """number of ranks on each host; left out: one for each of its GPUs, or 2 CPU ranks where it has none"""
    interface: str = Field("auto", json_schema_extra=control("Hosts", "Interface"))
    """the network interface of the notebook's host, or its address, at which the hosts find the cluster;
    'auto' for the one that leads to other hosts. Nothing listens on any other"""
    on_host_lost: Literal["shrink", "wait", "stop"] = Field(
        "shrink", json_schema_extra=control("Hosts", "When a host is lost")
    )
    """what the cluster does when a host is lost: 'shrink' goes on at once with the ranks of the other hosts,
    which keep their variables, and with more ranks when a host comes back; 'wait' has the next cell, or the
    run, wait until the host is back; 'stop' runs no more cells. A run goes on from its newest checkpoint"""
    host_patience_s: float = Field(
        600.0, gt=0, le=7 * 86_400, json_schema_extra=control("Hosts", "Wait for a host", unit="s")
    )
    """seconds for which on_host_lost='wait' waits for a host that is lost; Stop ends the wait"""
    backend: Literal["auto", "nccl", "gloo", "hierarchical_copy"] = "auto"
    """how the ranks communicate; 'auto' tries nccl (on GPUs), nccl in safe mode, gloo, and one rank alone,
    takes the first that works, and says which; a backend that is named is the only one tried;
    'hierarchical_copy' is another name for gloo"""
    nccl_safe: bool = False
    """NCCL without direct access between GPUs, InfiniBand and CUDA's host memory, for containers where it
    hangs or fails; slower. Variables that you have set stay"""
    probe_timeout_s: float = Field(30.0, gt=0, le=3600)
    """seconds that a first all_reduce over nccl may take before backend='auto' tries the next transport"""
    collective_timeout_s: float = Field(1800.0, gt=0, le=30 * 86_400)
    """seconds that a collective may take, over gloo and NCCL alike, before it comes back as an error that
    names it and the ranks that had not come; a group that a cell makes with a timeout of its own has that
    one. A rank that fails or dies is noticed long before"""
    memory_limit: str = Field("", json_schema_extra=control("Devices", "Memory limit", unit="per rank"))
    """the most memory that a rank may take: bytes ('4294967296'), a size ('4096MiB', '4GiB'), or a share of
    its device ('0.5'), which ranks on one device divide among them; on a GPU it bounds what torch allocates,
    on the CPU the rank's own memory; empty for no limit"""
    allocator: str = Field("", pattern=r"^$|^[a-z0-9_]+:[^,:\s]+(,[a-z0-9_]+:[^,:\s]+)*$")
    """settings of torch's GPU allocator, such as 'expandable_segments:True' against fragmentation, as
    PYTORCH_ALLOC_CONF takes them; that variable stays where you have set it"""
    threads_per_rank: int | None = Field(None, ge=1, le=512)
    """CPU threads for each rank; left out: the cores that may be used, divided by the ranks: those of the
    affinity, or fewer where a container has a smaller quota of CPU time"""
    bind_cores: bool = True
    """keep each rank on the cores of its GPU's NUMA node, on hosts that have several; a host where you or
    Slurm have given fewer cores than it has, or variables that place OpenMP's threads, is left as it is"""
    cell_seed: int | None = Field(None, ge=0, le=2**31 - 1)
    """seed of the random numbers that cells draw from torch, NumPy and random: each rank gets a seed of its
    own, made of this one and its number, so that cells can be repeated; left out: other numbers on each rank
    and at each start, as under torchrun. A run has its own `seed`"""
    keep: bool = Field(False, json_schema_extra=control("Devices", "Keep without kernel"))
    """let the cluster and its run go on when the notebook's kernel ends; nbgpu.attach() connects to them
    again"""
    release_after_s: float | None = Field(
        None, ge=1, le=365 * 86_400, json_schema_extra=control("Devices", "Release when idle", unit="s")
    )
    """seconds without any cell, run or typing in the notebook after which the cluster ends and its GPUs are
    free; the ranks' variables are lost then, and the next cell says so; left out: never"""
    save_on_release: str = ""
    """folder in which the ranks' variables are saved before release_after_s ends the cluster, so that %nbgpu
    load gives them back. Where they cannot be saved the cluster is not ended"""
    save_before_time_limit: str = Field("", json_schema_extra=control("Hosts", "Save before the limit"))
    """folder in which the ranks' variables are saved two minutes before a Slurm job's time limit, so that
    %nbgpu load gives them back to the next cluster. A run stops then in any case, with a checkpoint. The job
    is that of the ranks, or that which the notebook is in, with any launcher"""
    share_gpus: bool = False
    """take GPUs even where another cluster has them already; gpus='auto' is then the same as 'all'"""
    spare: int = Field(0, ge=0, le=16)
    """engines that wait to take the place of a rank that dies; each holds memory, and no GPU until then"""
    start_timeout_s: float = Field(120.0, gt=0, le=3600)
    """seconds that the engines may take to start"""
    notice_after_s: float = Field(5.0, ge=0, le=3600)
    """seconds that ranks wait in a collective before a notice, under the cell or in a run's panel, says which
    rank waits where; 0 for never"""
    max_output_lines: int = Field(25_000, ge=10, le=1_000_000)
    """lines of text, of 100 characters on average, that a cell shows; the full text of a cell that prints
    more is in a file for each rank, beside the runs"""
    debug: bool = False
    """torch compares the ranks' collectives before each one (TORCH_DISTRIBUTED_DEBUG=DETAIL), so that
    different calls or shapes are named; slows every collective"""

    link: str = Field("", json_schema_extra=control("Devices", "Simulated link"))
    """a slower link between CPU ranks to simulate: its name, such as '10GbE', or its rate and latency one
    way, such as '1Gbit/s,0.2ms'; empty for the real link"""
    slow_rank: str = Field("", json_schema_extra=control("Devices", "Slow ranks"))
    """CPU ranks that take longer for their own work, such as '1=1.5x' for 1.5 times as long; several
    separated by commas; empty for none"""

    @field_validator("gpus", "hosts", "setup", mode="before")
    @classmethod
    def _join_list(cls, value: Any, info: ValidationInfo) -> Any:
        """Turn a list of names, or of lines of `setup`, into the text that the setting holds."""
        separator = "\n" if info.field_name == "setup" else ","
        return separator.join(map(str, value)) if isinstance(value, list | tuple) else value

    @field_validator("gpus")
    @classmethod
    def _check_gpus(cls, value: str) -> str:
        gpus_setting.require_valid(value)
        return value

    @field_validator("hosts")
    @classmethod
    def _check_hosts(cls, value: str) -> str:
        names = [name.strip() for name in value.split(",") if name.strip()]
        if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
            raise ValueError(f"{' and '.join(twice)} is named twice, and a host has all of its ranks at once")
        if wrong := [name for name in names if name.startswith("-") or len(name.split()) > 1]:
            raise ValueError(f"{wrong[0]!r} is not the name of a host")
        return ",".join(names)

    @field_validator("launcher_options", mode="before")
    @classmethod
    def _join_options(cls, value: Any) -> Any:
        """Turn a mapping of options into the text that the setting holds. True stands for an option without a
        value, and False leaves the option out."""
        if not isinstance(value, Mapping):
            return value
        return shlex.join(
            str(name) if option is True else f"{name}={option}"
            for name, option in value.items()
            if option is not False
        )

    @field_validator("launcher_options")
    @classmethod
    def _check_options(cls, value: str) -> str:
        _options(value)
        return value

    @field_validator("memory_limit", mode="before")
    @classmethod
    def _check_amount(cls, value: Any) -> Any:
        """Accept a number as its text, and refuse a limit too small to start a rank, such as one without its
        unit."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
        if isinstance(value, str) and value:
            amount = parse_size(value)
            if isinstance(amount, int) and amount < _LEAST_MEMORY_BYTES:
                suggestion = f" Did you mean {value.strip()}MiB?" if value.strip().isdecimal() else ""
                raise ValueError(
                    f"{value!r} is {in_words(amount)}, and a rank needs {in_words(_LEAST_MEMORY_BYTES)} at least.{suggestion}"
                )
        return value

    @field_validator("link")
    @classmethod
    def _check_link(cls, value: str) -> str:
        try:
            if value:
                parse_link(value)
        except ConfigError as error:
            raise ValueError(str(error).removeprefix(f"link={value!r} is not valid: ")) from None
        return value

    @field_validator("slow_rank")
    @classmethod
    def _check_slow_ranks(cls, value: str) -> str:
        _slow_factors(value)
        return value

    def problems(self) -> Iterator[str]:
        """Yield settings that exclude each other, and the launcher's missing or unsuitable settings."""
        if self.keep and self.ipython_profile:
            yield "keep and ipython_profile do not go together: what has started the hosts ends with the kernel"
        if self.share_gpus and (self.wait or self.most_free_gpus):
            yield (
                f"share_gpus does not go with {'wait' if self.wait else f'gpus={self.gpus!r}'}: nobody else has a GPU that is "
                "free. Leave one of them out"
            )
        yield from self.launcher_settings.problems()

    @property
    def takes_free_gpus(self) -> bool:
        """Whether the cluster takes only GPUs that no other process uses."""
        return gpus_setting.takes_free(self.gpus) and not self.share_gpus

    @property
    def named_gpus(self) -> str:
        """The value of `gpus` regardless of other users of the GPUs: 'all' for 'auto', and else unchanged."""
        return gpus_setting.ALL if self.gpus == gpus_setting.AUTO else self.gpus

    @property
    def most_free_gpus(self) -> int | None:
        """N of gpus='free:N'; None for every other value."""
        return gpus_setting.num_free(self.gpus)

    @property
    def num_hosts(self) -> int:
        """The number of hosts that have ranks."""
        return self.launcher_settings.num_hosts

    @property
    def is_local(self) -> bool:
        """Whether the ranks run on the notebook's host."""
        return LAUNCHERS[self.launcher].IS_LOCAL

    @property
    def launcher_settings(self) -> LauncherSettings:
        """The settings of the launcher."""
        return LAUNCHERS[self.launcher](
            self.host_names, self.nodes, self.options_of_launcher, self.ipython_profile, self.most_free_gpus
        )

    @property
    def host_names(self) -> list[str]:
        """The hosts on which ssh starts ranks; empty for other launchers."""
        return self.hosts.split(",") if self.hosts else []

    @property
    def options_of_launcher(self) -> dict[str, str | bool]:
        """The launcher's options by name; True for one without a value."""
        return _options(self.launcher_options)

    @property
    def simulated_link(self) -> Link | None:
        """The link to simulate; None for the real link."""
        return parse_link(self.link) if self.link else None

    @property
    def slow_factors(self) -> dict[int, float]:
        """By slow rank, the factor by which its own work takes longer."""
        return _slow_factors(self.slow_rank)

    @property
    def simulated(self) -> str:
        """The simulated link and slow ranks as text: 'simulated link 10GbE, rank 1 slowed x1.5'; empty for
        none."""
        link = self.simulated_link
        slow = [f"{named_ranks([rank])} slowed x{factor:g}" for rank, factor in self.slow_factors.items()]
        return ", ".join([*([f"simulated link {link.name}"] if link else []), *slow])

    def threads_for(
        self, local_world_size: int, num_cores: int | None = None, share: int | None = None
    ) -> int:
        """Return the number of CPU threads for each rank of a host.

        Args:
            local_world_size: the number of ranks on the host.
            num_cores: the number of cores that processes may use there; None for this host's.
            share: the rank's share, in cores, of the cores to which it is bound; None if it is not bound.
        """
        per_rank = (usable_cores() if num_cores is None else num_cores) // local_world_size
        return self.threads_per_rank or max(1, per_rank if share is None else min(per_rank, share))


def _options(text: str) -> dict[str, str | bool]:
    """Parse 'partition=gpu exclusive' into {'partition': 'gpu', 'exclusive': True}.

    Raises:
        ValueError: a quotation is not closed, or a part has no name.
    """
    options: dict[str, str | bool] = {}
    for word in shlex.split(text):
        name, equals, value = word.partition("=")
        if not name:
            raise ValueError(f"{word!r} has no name before the '='")
        options[name] = value if equals else True
    return options


def _slow_factors(text: str) -> dict[int, float]:
    """Parse '1=1.5x,3=2x' into {1: 1.5, 3: 2.0}.

    Raises:
        ValueError: a part is not a rank and a factor above 1, or a rank is named twice.
    """
    factors: dict[int, float] = {}
    problems = []
    for part in filter(None, map(str.strip, text.split(","))):
        match = re.fullmatch(r"(\d+)\s*=\s*(\d+(?:\.\d*)?|\.\d+)\s*x?", part)
        if match is None:
            problems.append(f"{part!r} is not a rank and a factor, such as 1=1.5x")
            continue
        rank, factor = int(match[1]), float(match[2])
        if not 1 < factor <= MAX_SLOW_FACTOR:
            problems.append(f"{part!r}: the factor is above 1 and at most {MAX_SLOW_FACTOR:g}")
        if rank in factors:
            problems.append(f"rank {rank} is named twice")
        factors[rank] = factor
    if problems:
        raise ValueError("; ".join(problems))
    return factors
