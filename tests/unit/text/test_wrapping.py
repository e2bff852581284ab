"""Lines for terminals and pages: broken between words, with what must be whole left whole."""

from __future__ import annotations

import re

from nbgpu.text.console import wrapped
from nbgpu.text.html import as_html, labelled

FOLDER = "/home/somebody/project/nbgpu_runs/20261126-120000-autoencoder-with-a-long-name-1f2e"


def test_lines_break_between_words_and_are_indented() -> None:
    plan = (
        "devices    CPU, Intel(R) Xeon(R) Processor @ 2.20GHz\n"
        "batch      2 samples for each rank and micro-batch, 4 in each step (ranks: 2, accumulate: 1)\n"
        "data       12 volumes over 2 ranks: 6 on each\n"
        "           CacheDataset: a rank keeps 6 of its 6 volumes decoded in host memory, and reads ahead\n"
    )
    lines = wrapped(plan, 60).split("\n")
    assert all(len(line) <= 60 for line in lines)
    assert re.sub(r"\s+", " ", " ".join(lines)) == re.sub(r"\s+", " ", plan)
    assert all(line == "" or re.match(r"\S+ +\S| {11}\S", line) for line in lines)


def test_paths_and_names_stay_whole() -> None:
    text = f"writes to {FOLDER}, and checkpoint_activations=True with comm_hook='fp16' was accepted"
    lines = wrapped(text, 40).split("\n")
    assert any(FOLDER in line for line in lines)
    assert any("checkpoint_activations=True" in line for line in lines)
    assert wrapped(text, None) == text


def test_a_page_breaks_sentences_between_words_and_no_table() -> None:
    text = "Communication bounds this run.\nranks  a step, ms\n    1       10.50\nWith <2> ranks"
    page = as_html(text)
    assert re.sub("<[^>]*>", "\n", page).split("\n").count("") < 12
    (table,) = re.findall("<pre style=[^>]*>(.*?)</pre>", page, re.DOTALL)
    assert table == "ranks  a step, ms\n    1       10.50"
    assert "overflow-wrap:break-word" in page
    assert "break-all" not in page
    assert "With &lt;2&gt; ranks" in page
    assert "&lt;b&gt;" in labelled([("data", "<b>")])
