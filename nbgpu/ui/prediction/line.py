"""The progress of a prediction in a notebook: one line with a bar, which stays in the saved notebook."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.display import display, update_display

from nbgpu.run_folder.predictions import Progress
from nbgpu.ui.prediction import in_words
from nbgpu.ui.slot import new_slot


def begin(title: str) -> Callable[[Progress], None]:
    """Display the line, and return the function that updates it; without IPython nothing is shown."""
    if get_ipython() is None:
        return lambda progress: None
    slot, shown = new_slot(), ""
    display(_bundle(title, Progress()), raw=True, display_id=slot)

    def show(progress: Progress) -> None:
        nonlocal shown
        if shown != in_words(progress):
            shown = in_words(progress)
            update_display(_bundle(title, progress), raw=True, display_id=slot)

    return show


def _bundle(title: str, progress: Progress) -> dict[str, Any]:
    """Return the progress as HTML with a bar, and as plain text. While the total is not known, the bar only
    shows activity."""
    text = in_words(progress)
    share = f' value="{progress.num_done}" max="{progress.num_samples}"' if progress.num_samples else ""
    return {
        "text/plain": f"{title}: {text}",
        "text/html": (
            f'<div role="status">{html.escape(title)} '
            f'<progress aria-label="{html.escape(title)}"{share}></progress> {html.escape(text)}</div>'
        ),
    }
