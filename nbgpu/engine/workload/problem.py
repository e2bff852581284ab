"""What a problem is: the protocol by which the minimiser knows what it looks for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nbgpu.engine.workload.descent import AfterStep, Evaluate, descend


class Problem(ABC):
    """What a Minimiser minimises: a loss of one tensor, in stages, each of which begins with what the one before has found.

    Every rank has the whole tensor, and gets the same values of it to the last bit.
    """

    optimizer: str
    """Of `descent.OPTIMIZERS`."""
    tolerance: float
    """As for `descent.descend`."""

    @abstractmethod
    def load(self) -> None:
        """Reads the data and gets everything ready; DataError names all that is wrong. No collective."""

    @property
    @abstractmethod
    def told(self) -> tuple[str, ...]:
        """What is looked for, and from what, a sentence each."""

    @property
    @abstractmethod
    def num_steps(self) -> Sequence[int]:
        """At most so many steps in each stage."""

    def stage_name(self, stage: int) -> str:
        """What a stage is called."""
        return f"stage {stage + 1} of {len(self.num_steps)}"

    @abstractmethod
    def begin(self, stage: int, found: Tensor | None) -> Tensor:
        """Where a stage begins: with what the stage before has found, or, in the first, with None. On the CPU, in float64."""

    @abstractmethod
    def evaluate(
        self, tensor: Tensor, stage: int, step: int, rank: int, world_size: int
    ) -> tuple[Tensor, Tensor]:
        """(loss, gradient) after so many steps of all stages, the same on every rank. A collective where there are several."""

    def search(
        self,
        tensor: Tensor,
        stage: int,
        steps: range,
        evaluate: Evaluate,
        after_step: AfterStep,
        lr: Callable[[], float],
        rank: int,
        world_size: int,
    ) -> str:
        """Does the steps of a stage, downhill; returns why they ended. See `descent.descend`.

        Args:
            tensor: where to begin.
            steps: their numbers within the stage.
            evaluate: of this stage.
            after_step: to be told of each step.
            lr: the learning rate.
            rank, world_size: of the group.
        """
        return descend(
            evaluate,
            tensor,
            len(steps),
            after_step,
            optimizer=self.optimizer,
            lr=lr,
            tolerance=self.tolerance,
        )

    @abstractmethod
    def num_parts(self, stage: int, rank: int, world_size: int) -> int:
        """How many parts of a step's work, slices for instance, are this rank's."""

    @abstractmethod
    def measure(self, tensor: Tensor) -> dict[str, float]:
        """What the tensor is worth beside its loss, by name; no collective."""

    @abstractmethod
    def pictures(self, tensor: Tensor) -> dict[str, str]:
        """What the tensor looks like now: PNG data URIs by caption, some kilobytes in all; no collective."""

    @abstractmethod
    def result(self, tensor: Tensor, folder: Path) -> dict[str, Any]:
        """What to say of what was found, as JSON; files go into the folder. Rank 0 calls this at the end."""

    @abstractmethod
    def memory_bytes(self, world_size: int) -> dict[str, int]:
        """An estimate of what one rank takes, by name of the part."""
