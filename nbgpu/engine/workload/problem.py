"""The protocol of a problem, which defines the loss that the minimiser minimises."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nbgpu.engine.workload.descent import LBFGS, Evaluate, descend
from nbgpu.engine.workload.lbfgs import AfterStep
from nbgpu.engine.workload.shards import Shards


class Problem(ABC):
    """A loss of one tensor, minimised in stages. Each stage begins with the result of the stage before.

    Every rank has the whole tensor (C, L, ...), and computes the same values from it to the last bit.
    """

    optimizer: str
    """One of `descent.OPTIMIZERS`."""
    num_pairs: int
    """The number of pairs that 'lbfgs' and 'lbfgsb' remember."""
    tolerance: float
    """The tolerance of `descent.descend`."""

    @abstractmethod
    def load(self) -> None:
        """Read the data and prepare everything; DataError lists all problems. No collective."""

    @property
    @abstractmethod
    def summary(self) -> tuple[str, ...]:
        """Return the goal and its source, in a sentence each."""

    @property
    @abstractmethod
    def num_steps(self) -> Sequence[int]:
        """Return the largest number of steps of each stage."""

    def stage_name(self, stage: int) -> str:
        """Return the name of a stage."""
        return f"stage {stage + 1} of {len(self.num_steps)}"

    @abstractmethod
    def begin(self, stage: int, found: Tensor | None) -> Tensor:
        """Return the initial tensor of a stage from the last stage's result, None in the first.

        On the CPU, in float64.
        """

    @abstractmethod
    def evaluate(
        self, tensor: Tensor, stage: int, step: int, rank: int, world_size: int
    ) -> tuple[Tensor, Tensor]:
        """Return (loss, gradient) at a tensor, the same on every rank.

        With several ranks this is a collective: each rank may compute a share, and the problem adds them up.

        Args:
            tensor: the whole tensor.
            stage: the number of the stage.
            step: the number of the step, counted over all stages.
            rank, world_size: this rank, and the number of ranks.
        """

    def evaluate_part(self, tensor: Tensor, stage: int, step: int, shards: Shards) -> tuple[float, Tensor]:
        """Return (loss, this rank's part of the gradient), with the same loss on every rank. A collective
        with several ranks.

        A problem overrides this method if it can compute its part of the gradient without the whole.
        """
        loss, gradient = self.evaluate(tensor, stage, step, shards.rank, shards.world_size)
        return float(loss), shards.part(gradient)

    def is_spread(self, stage: int) -> bool:
        """Return whether the vectors of a stage's search are spread over the ranks. Such a stage is searched
        by `lbfgs.Lbfgs` with `evaluate_part`, and any other one by `search`."""
        return self.optimizer == LBFGS

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
        """Minimise in one stage until a step reduces the loss by less than `tolerance`, or until its steps
        are done; return the reason why it ended.

        Args:
            tensor: the initial tensor.
            stage: the stage.
            steps: the numbers of the steps within the stage.
            evaluate: returns the loss and gradient of this stage.
            after_step: is called after each step.
            lr: returns the learning rate.
            rank, world_size: this rank, and the number of ranks.
        """
        return descend(
            evaluate,
            tensor,
            len(steps),
            after_step,
            optimizer=self.optimizer,
            num_pairs=self.num_pairs,
            lr=lr,
            tolerance=self.tolerance,
        )

    @abstractmethod
    def measure(self, tensor: Tensor) -> dict[str, float]:
        """Return metrics of the tensor other than its loss, by name, as JSON; no collective. Rank 0 calls
        this."""

    @abstractmethod
    def pictures(self, tensor: Tensor) -> dict[str, str]:
        """Return pictures of the tensor: PNG data URIs by caption, some kilobytes in all; no collective."""

    @abstractmethod
    def result(self, tensor: Tensor, folder: Path) -> dict[str, Any]:
        """Return the result as JSON, and write its files into the folder. Rank 0 calls this at the end."""

    @abstractmethod
    def memory_bytes(self, world_size: int) -> dict[str, int]:
        """Return an estimate of one rank's memory, by name of the part."""
