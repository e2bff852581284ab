"""The plan of a run, folded, above its live panel."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from IPython.display import display, update_display

from nbgpu.text.ranks import count_of_ranks
from nbgpu.ui.slot import new_slot

if TYPE_CHECKING:
    from nbgpu.client.runs.run import Run


def page(run: Run) -> str:
    """The plan of a run as HTML that unfolds by a click or a key, without a script."""
    plan = run.plan
    place = f"on {count_of_ranks(len(plan.devices))} over {plan.chosen_transport.name}"
    # A search has no strategy and no batches.
    if "batch_size" in plan.config.UNUSED:
        head = f"Plan: {plan.config.recipe} {place}"
    else:
        per_step = plan.config.samples_per_step(len(plan.devices))
        head = f"Plan: {plan.config.strategy} {place}, {per_step} samples a step"
    return (
        f'<details style="line-height:1.4"><summary style="cursor:pointer">{html.escape(head)}</summary>'
        f'<div style="margin:4px 0 8px 16px">{plan._repr_html_()}</div></details>'
    )


class PlanView:
    """Displays the plan of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._slot = new_slot()
        self._shown = page(run)
        display(self._bundle(), raw=True, display_id=self._slot)

    def refresh(self, _: str) -> None:
        """Show the plan again if it has changed: the ranks add to it once they have read their data."""
        if (new := page(self._run)) != self._shown:
            self._shown = new
            update_display(self._bundle(), raw=True, display_id=self._slot)

    def _bundle(self) -> dict[str, Any]:
        return {"text/html": self._shown, "text/plain": str(self._run.plan)}
