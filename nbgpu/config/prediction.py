"""The settings of `nbgpu predict`, which applies a run's trained model to new data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from nbgpu.config.flags import SWITCH
from nbgpu.config.settings import Settings


class PredictConfig(Settings):
    """Apply a run's trained model to new data."""

    data: str = ""
    """the new data, in the form that the recipe trains on; a table of survival needs neither times nor
    events"""
    out: str = Field("predictions", min_length=1)
    """folder for the predictions; one that was cut off in this folder goes on with the missing samples"""
    checkpoint: Literal["newest", "best"] = "newest"
    """weights of the run's newest checkpoint, or of the one with the best validation"""
    max_samples: int | None = Field(None, ge=1, le=10_000_000)
    """number of samples, the first ones of the data; left out: all"""
    skip_bad: Annotated[bool, SWITCH] = False
    """leave out files with bad names or headers, in place of refusing to begin"""
    trust: Annotated[bool, SWITCH] = False
    """run the recipe file in the run's folder, whose code may do all that you may: for a recipe of your
    own"""

    def problems(self) -> Iterator[str]:
        """Yield a sentence if no data are given."""
        if not self.data.strip():
            yield "data is not given: name the files that the model is to be applied to"
