"""Links between ranks by name, such as '10GbE', and as text, such as '1Gbit/s,0.2ms'.

Rates are bytes per second in one direction, and latencies are of a message one way. Datasheets give bits per
second for networks, and for NVLink the sum of both directions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nbgpu.errors import ConfigError

_BITS = 8
_NUMBER = r"(?P<number>[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?)"
_RATE = re.compile(rf"{_NUMBER}\s*(?P<prefix>[kKMGT]?)(?P<unit>bit/s|bps|B/s|bytes/s)")
_LATENCY = re.compile(rf"{_NUMBER}\s*(?P<unit>ns|us|µs|μs|ms|s)")
_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}
_EXAMPLES = "'10GbE', '1Gbit/s,0.2ms' or '25 GB/s, 5us'"

_NCCL = "NCCL's src/graph/tuning.cc (hwLatencies, a step of a ring, protocol Simple)"
_PCI_SIG = "rate: PCI-SIG, {} GT/s a lane, 16 lanes, 128 bits in 130; latency: " + _NCCL
_NVLINK = "rate: NVIDIA's {} whitepaper, {} links of 25 GB/s each way; latency: " + _NCCL
_INFINIBAND = "rate: InfiniBand Trade Association's roadmap, {}; latency: " + _NCCL
_ETHERNET = "rate: IEEE {}; latency: assumed, half of TCP's round trip of 0.1 ms within a rack"


@dataclass(frozen=True)
class Link:
    """The link from one rank to the next."""

    name: str
    latency_s: float
    """The time of an empty message, one way."""
    bytes_per_s: float
    """The rate of each direction while both are used. 1 Gbit/s is 125e6."""
    source: str
    """The standard or datasheet that the numbers come from."""

    def seconds(self, num_bytes: float) -> float:
        """Return the time of one message."""
        return self.latency_s + num_bytes / self.bytes_per_s

    def __str__(self) -> str:
        rate = _scaled(self.bytes_per_s, ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1, "B/s")))
        latency = _scaled(self.latency_s, ((1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")))
        return f"{self.name} ({rate} each way, {latency})"


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """Return a value in the first (largest) unit that it reaches, or else in the last one."""
    factor, unit = next(((factor, unit) for factor, unit in units if value >= factor), units[-1])
    return f"{value / factor:.4g} {unit}"


def _pcie(generation: int, transfers_per_s: float) -> Link:
    rate = transfers_per_s * 16 * 128 / 130 / _BITS
    source = _PCI_SIG.format(f"{transfers_per_s / 1e9:.0f}")
    return Link(f"PCIe{generation}x16", 5.7e-6, rate, source)


def _nvlink(generation: int, num_links: int, gpu: str) -> Link:
    return Link(f"NVLink{generation}", 3.4e-6, num_links * 25e9, _NVLINK.format(gpu, num_links))


def _infiniband(name: str, bits_per_s: float, lanes: str) -> Link:
    return Link(name, 14e-6, bits_per_s / _BITS, _INFINIBAND.format(lanes))


def _ethernet(name: str, bits_per_s: float, standard: str) -> Link:
    return Link(name, 50e-6, bits_per_s / _BITS, _ETHERNET.format(standard))


PRESETS: dict[str, Link] = {
    link.name: link
    for link in (
        _pcie(4, 16e9),
        _pcie(5, 32e9),
        _nvlink(3, 12, "A100"),
        _nvlink(4, 18, "H100"),
        _infiniband("HDR100", 100e9, "2 lanes of 50 Gbit/s"),
        _infiniband("HDR200", 200e9, "4 lanes of 50 Gbit/s"),
        _infiniband("NDR200", 200e9, "2 lanes of 100 Gbit/s"),
        _infiniband("NDR400", 400e9, "4 lanes of 100 Gbit/s"),
        _ethernet("1GbE", 1e9, "802.3ab"),
        _ethernet("2.5GbE", 2.5e9, "802.3bz"),
        _ethernet("5GbE", 5e9, "802.3bz"),
        _ethernet("10GbE", 10e9, "802.3an"),
        _ethernet("25GbE", 25e9, "802.3by"),
    )
}
"""The links by name. The rates are those of the hardware; NCCL and gloo reach less."""


def parse_link(text: str) -> Link:
    """Return the link that a person has named or described.

    Args:
        text: the name of a preset, in any case, or a rate and a one-way latency separated by a comma. Rates
            are in 'bit/s' or 'bps', or in 'B/s' with a capital B, with a prefix k, M, G or T (powers of
            1000). Latencies are in ns, us, ms or s.

    Raises:
        ConfigError: it is neither, or a number is not above 0.
    """
    if preset := next((link for name, link in PRESETS.items() if _plain(name) == _plain(text)), None):
        return preset
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2:
        raise ConfigError(
            f"link={text!r} is not valid: a rate and a latency, or a name. Write {_EXAMPLES}. Names: "
            f"{', '.join(PRESETS)}"
        )
    rate, latency = _RATE.fullmatch(parts[0]), _LATENCY.fullmatch(parts[1])
    wrong = []
    if rate is None:
        wrong.append(
            f"{parts[0]!r} is not a rate: a number with bit/s, kbit/s, Mbit/s, Gbit/s (bits) or B/s, kB/s, MB/s, GB/s "
            "(bytes)"
        )
    elif not 0 < float(rate["number"]) < float("inf"):
        wrong.append(f"the rate {parts[0]!r} is not a number above 0")
    if latency is None:
        wrong.append(f"{parts[1]!r} is not a latency: a number with ns, us, ms or s")
    elif not 0 < float(latency["number"]) < float("inf"):
        wrong.append(f"the latency {parts[1]!r} is not a number above 0")
    if rate is None or latency is None or wrong:
        raise ConfigError(f"link={text!r} is not valid: {'; '.join(wrong)}. Write {_EXAMPLES}")
    units_per_byte = 1 if rate["unit"] in {"B/s", "bytes/s"} else _BITS
    return Link(
        ", ".join(parts),
        float(latency["number"]) * _SECONDS[latency["unit"]],
        float(rate["number"]) * _PREFIXES[rate["prefix"]] / units_per_byte,
        "as described",
    )


def _plain(name: str) -> str:
    """Return a name without case, blanks and dashes, for comparison."""
    return re.sub(r"[\s_-]", "", name).casefold()
