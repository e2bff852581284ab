"""Links by name and as text."""

from __future__ import annotations

import pytest

from nbgpu.errors import ConfigError
from nbgpu.machine.links import PRESETS, parse_link


@pytest.mark.parametrize(
    ("text", "bytes_per_s", "latency_s"),
    [
        ("1Gbit/s,0.2ms", 125e6, 0.2e-3),
        (" 200 Mbit/s , 1 ms ", 25e6, 1e-3),
        ("25 GB/s, 5us", 25e9, 5e-6),
        ("10Gbps,50µs", 1.25e9, 50e-6),
        ("1e6 B/s, .5s", 1e6, 0.5),
        ("10GbE", 1.25e9, 50e-6),
        ("10 gbe", 1.25e9, 50e-6),
        ("nvlink-4", 450e9, 3.4e-6),
        ("NVLink3", 300e9, 3.4e-6),
        ("HDR200", 25e9, 14e-6),
    ],
)
def test_bits_and_bytes_are_told_apart(text: str, bytes_per_s: float, latency_s: float) -> None:
    link = parse_link(text)
    assert link.bytes_per_s == pytest.approx(bytes_per_s)
    assert link.latency_s == pytest.approx(latency_s)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a rate and a latency, or a name"),
        ("fast", "Names: PCIe4x16"),
        ("1Gbit/s", "a rate and a latency, or a name"),
        ("Gbit/s,0.2ms", "'Gbit/s' is not a rate"),
        ("1Gb/s,0.2ms", "'1Gb/s' is not a rate"),
        ("1gb/s,0.2ms", "'1gb/s' is not a rate"),
        ("0Gbit/s,0.2ms", "the rate '0Gbit/s' is not a number above 0"),
        (
            "-1Gbit/s,-2ms",
            "the rate '-1Gbit/s' is not a number above 0; the latency '-2ms' is not a number above 0",
        ),
        ("1Gbit/s,0ms", "the latency '0ms' is not a number above 0"),
        ("1e999GB/s,1ms", "the rate '1e999GB/s' is not a number above 0"),
        ("1Gbit/s,2", "'2' is not a latency"),
        ("0.2ms,1Gbit/s", "'0.2ms' is not a rate"),
    ],
)
def test_a_wrong_link_is_refused_with_examples(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_link(text)
    assert message in str(caught.value)
    assert "'1Gbit/s,0.2ms'" in str(caught.value)


def test_presets_know_their_source_and_themselves() -> None:
    for name, link in PRESETS.items():
        assert parse_link(name) is link
        assert "rate: " in link.source
        assert "latency: " in link.source
    # 16 lanes of 16 GT/s carry 31.5 GB/s (https://pcisig.com/faq).
    assert PRESETS["PCIe4x16"].bytes_per_s == pytest.approx(31.5e9, rel=0.001)
    assert PRESETS["PCIe5x16"].bytes_per_s == pytest.approx(63.0e9, rel=0.001)


def test_a_link_in_words_has_units() -> None:
    assert str(parse_link("1Gbit/s,0.2ms")) == "1Gbit/s, 0.2ms (125 MB/s each way, 200 us)"
    assert str(PRESETS["NVLink4"]) == "NVLink4 (450 GB/s each way, 3.4 us)"
    assert parse_link("1Gbit/s,1ms").seconds(125e6) == pytest.approx(1.001)
