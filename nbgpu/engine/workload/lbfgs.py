"""L-BFGS for a tensor with values from 0 to 1, on its device, with all vectors spread over the ranks.

The elements of the tensor are the variables of the search. Each rank has some slices of the tensor, and the
same slices of every vector (shards.py). Sums over all variables are added up over the ranks.

After Byrd, Lu, Nocedal and Zhu, "A limited memory algorithm for bound constrained optimization" (SIAM Journal
on Scientific Computing 1995, 10.1137/0916069; L-BFGS-B), with the projection of Morales and Nocedal (ACM
Transactions on Mathematical Software 2011, 10.1145/2049662.2049669). The one difference is the Cauchy point,
which decides which variables stay at a bound: L-BFGS-B sorts all variables by the step at which they reach
their bound and passes them one by one, which ranks cannot share. Here it is the best of some steps along the
projected gradient, in the spirit of Lin and Moré's TRON (10.1137/S1052623498345075).

The bounds are kept by projection because that came nearest to scipy's L-BFGS-B. These figures were measured
with a prototype of this search, and not again with this module. After 150 steps with 10 pairs
on fields of three seeds, the loss differed from scipy's by at most 0.8 % (32^3 voxels, FFTCorrelations,
Variation and VolumeFractions) and 1.0 % (16^3, Correlations and Variation). Without a Cauchy point, with the
variables fixed that are at a bound and would leave it, it differed by 1.4 and 2.2 %, and some searches had to
forget their pairs. With a change of variable it was 1 to 8 % higher for the square of a sine and 3 to 104 %
higher for a sigmoid, because both flatten the loss at the bounds, where most variables end. The sine was
better only where the loss is all but zero (1e-6 in a picture, 1e-5 with three phases) and few bounds matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nbgpu.engine.workload.shards import Shards
from nbgpu.errors import RunError

EvaluatePart = Callable[[Tensor], tuple[float, Tensor]]
"""Returns (loss, this rank's part of the gradient) for a whole tensor."""

AfterStep = Callable[[Tensor, float], None]
"""Is called with (tensor, loss) after each step, and may raise to end the descent."""

ALL_DONE = "all steps were done"
_NUM_VECTORS = 6
"""The number of vectors that a search holds at most beside its pairs: two points and their gradients, the
point that it aims at, and one for what is being computed."""

_CAUCHY_STEPS = 2.0 ** np.array([-3.0, -2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0])
"""The steps along the projected gradient that are compared, in units of the one that would be best without
bounds."""
_LEAST_CURVATURE = float(np.finfo(np.float64).eps)
"""The least curvature along a step, as a share of the slope, for the step to be remembered; L-BFGS-B has the
same."""


_DECREASE = 1e-3
"""The share of the decrease that the slope promises which a step has to reach; L-BFGS-B has the same."""
_CURVATURE = 0.9
"""The share of the slope that may be left after a step; L-BFGS-B has the same."""
_MAX_TRIALS = 20
_GROWTH = 4.0
_MARGIN = 0.1
"""How near to an end of an interval the next trial may be, as a share of the interval."""


def describe_nonfinite(loss: float, gradient_norm: float, has_lr: bool = False) -> str:
    """Return the message where a loss or its gradient is not finite: no optimizer recovers from that.

    Args:
        loss: the loss.
        gradient_norm: the norm of its gradient.
        has_lr: whether the search has a learning rate.
    """
    advice = "a smaller lr, or other start values" if has_lr else "other start values, such as another seed"
    return f"the loss is {loss} and the norm of its gradient {gradient_norm}, and both must be finite: try {advice}"


@dataclass(frozen=True)
class Held:
    """The memory of a search's tensors on the rank with the most slices, in bytes."""

    whole_bytes: int
    """The whole tensor: that of the last step and the one that is tried. Where the first axis is longer than
    1, a third one while it is put together."""
    shared_bytes: int
    """The rank's share of the pairs and of the other vectors."""
    working_bytes: int
    """The intermediate results for the piece of slices that is worked on, if they take more than what is held
    only while the loss of a tensor is evaluated."""

    @property
    def total_bytes(self) -> int:
        """Return the sum of all parts, in bytes."""
        return self.whole_bytes + self.shared_bytes + self.working_bytes


def held_bytes(shape: Sequence[int], num_pairs: int, world_size: int) -> Held:
    """Return the memory of a search's tensors on one rank, without the evaluation of the loss; a test
    measures it.

    Args:
        shape: the shape of the tensor (C, L, ...).
        num_pairs: the number of pairs that are remembered.
        world_size: the number of ranks.
    """
    shards = Shards(shape, 0, world_size)
    # All vectors are float64, of eight bytes a number.
    whole = 8 * math.prod(shape)
    part = 8 * len(shards.share) * shards.num_in_slice
    piece = 8 * shards.largest_piece * shards.num_in_slice
    num_rows = 2 * num_pairs
    # While the loss of a tensor is evaluated there are two differences for a piece. While the model's minimum
    # is computed there are two copies of all rows of a piece, but neither the tensor that is evaluated nor
    # its gradient and two more vectors.
    working = max(2 * piece, 2 * (num_rows + 2) * piece - whole - _NUM_VECTORS // 2 * part)
    return Held((2 if shape[0] == 1 else 3) * whole, (num_rows + _NUM_VECTORS) * part, working)


@dataclass(frozen=True)
class _Point:
    """A point of the search, with its loss and gradient."""

    part: Tensor
    """This rank's part of the tensor."""
    whole: Tensor
    loss: float
    gradient: Tensor
    """This rank's part of the gradient."""


class Lbfgs:
    """A search for a tensor with a low loss, and its memory of the last steps: pairs of a step and the change
    of the gradient in it.

    Each rank holds the pairs for its slices. With several ranks each call is a collective, except
    `load_state`.

    Args:
        shards: the division of the tensor over the ranks.
        num_pairs: how many pairs are remembered.
        device: the device of the vectors.
    """

    def __init__(self, shards: Shards, num_pairs: int, device: torch.device) -> None:
        self._shards = shards
        self._num_pairs = num_pairs
        # For each slice a matrix with a row for each change of the gradient, then one for each step.
        self._pairs = torch.zeros(
            len(shards.share), 2 * num_pairs, shards.num_in_slice, dtype=torch.float64, device=device
        )
        self._order: list[int] = []
        """The places of the pairs that are remembered, the oldest first."""
        # The inner products of steps with changes of the gradient, and with steps, by place.
        self._steps_by_changes = np.zeros((num_pairs, num_pairs))
        self._steps_by_steps = np.zeros((num_pairs, num_pairs))
        self._scale = 1.0
        """The curvature in directions orthogonal to all pairs; theta in the paper."""
        self._is_first = True
        """Whether no step was done yet."""

    def minimise(
        self,
        evaluate: EvaluatePart,
        start: Tensor,
        num_steps: int,
        after_step: AfterStep,
        tolerance: float,
    ) -> str:
        """Minimise until a step reduces the loss by less than `tolerance`, or for `num_steps` steps. A
        collective.

        A search that continues with the state of another one, from the tensor after its last step, takes the
        steps that the other one would have taken.

        Args:
            evaluate: returns the loss of a whole tensor, and this rank's part of its gradient.
            start: the initial tensor, whole. It is not changed; variables out of bounds begin at the bound.
            num_steps: the largest number of steps.
            after_step: is called with the tensor and its loss after each step, and may raise to end the
                search.
            tolerance: a share of the loss, or of 1 if that is larger; 0 disables it.

        Returns:
            The reason why it ended, as a text.

        Raises:
            RunError: loss or gradient are NaN or infinite; every rank raises it.
        """
        if num_steps < 1:
            return "no steps were left"
        shards = self._shards
        x = shards.part(start).clamp_(0, 1)
        loss, gradient, _ = self._evaluated(evaluate, start.clamp(0, 1), x, x)
        # Freed now, because the caller may have made the tensor for this call alone.
        del start
        num_done = 0
        while num_done < num_steps:
            target = self._target(x, gradient)
            if target is None:
                return "no number can change within its bounds at a lower loss"
            point = self._search_line(evaluate, x, *target, loss)
            del target
            if point is None:
                if not self._order:
                    return "no step along the gradient gives a lower loss"
                # As in L-BFGS-B: the pairs describe the loss wrongly here, and the gradient alone is tried.
                self._order, self._scale = [], 1.0
                continue
            before, loss = loss, point.loss
            self._remember(x, point.part, gradient, point.gradient)
            # Nothing else keeps the point, because it takes as much memory as the tensor.
            x, gradient, whole = point.part, point.gradient, point.whole
            del point
            self._is_first = False
            num_done += 1
            after_step(whole, loss)
            del whole
            if before - loss <= tolerance * max(abs(before), abs(loss), 1.0):
                return "a step gained less than the tolerance"
        return ALL_DONE

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return this rank's parts of the remembered pairs, by name and the oldest first, and the rest of the
        state as JSON."""
        tensors = {}
        for number, place in enumerate(self._order):
            tensors[f"change.{number:03d}"] = self._pairs[:, place]
            tensors[f"step.{number:03d}"] = self._pairs[:, self._num_pairs + place]
        oldest_first = np.ix_(self._order, self._order)
        return tensors, {
            "num_pairs": len(self._order),
            "steps_by_changes": self._steps_by_changes[oldest_first].tolist(),
            "steps_by_steps": self._steps_by_steps[oldest_first].tolist(),
            "scale": self._scale,
            "is_first": self._is_first,
        }

    def load_state(self, tensor: Callable[[str], Tensor], about: Mapping[str, Any]) -> None:
        """Continue with the state of another search, or with the newest of its pairs if this one remembers
        fewer.

        Args:
            tensor: returns a vector by the name that `state` gives it, with the parts of all ranks: (L,
                numbers of a slice). It is called for one after the other, so that only one is in memory.
            about: the rest of the state.
        """
        num_stored = about["num_pairs"]
        newest = range(max(0, num_stored - self._num_pairs), num_stored)
        share = slice(self._shards.share.start, self._shards.share.stop)
        for place, number in enumerate(newest):
            self._pairs[:, place] = tensor(f"change.{number:03d}")[share].to(self._pairs.device)
            self._pairs[:, self._num_pairs + place] = tensor(f"step.{number:03d}")[share].to(
                self._pairs.device
            )
        self._order = list(range(len(newest)))
        for products, stored in (
            (self._steps_by_changes, about["steps_by_changes"]),
            (self._steps_by_steps, about["steps_by_steps"]),
        ):
            all_stored = np.array(stored).reshape(num_stored, num_stored)
            products[: len(newest), : len(newest)] = all_stored[newest.start :, newest.start :]
        self._scale = about["scale"]
        self._is_first = about["is_first"]

    # ---- the minimum of the model ----

    def _sums(self, num: int, terms: Callable[[slice], Tensor]) -> np.ndarray:
        """Return sums over the slices of all ranks, (num,), in one exchange. A collective.

        Args:
            num: the number of sums.
            terms: returns the terms of each slice of a piece, (slices of the piece, num).
        """
        by_slice = self._pairs.new_zeros(len(self._pairs), num)
        for piece in self._shards.pieces():
            by_slice[piece] = terms(piece)
        return self._shards.sums(by_slice)

    def _target(self, x: Tensor, gradient: Tensor) -> tuple[Tensor, float] | None:
        """Return (this rank's part of the point where the quadratic model of the loss is lowest within the
        bounds, the slope of the loss from x towards this point); None if the projected gradient is zero. A
        collective."""
        model = _Model(
            self._order, self._num_pairs, self._steps_by_changes, self._steps_by_steps, self._scale
        )
        step = self._cauchy_step(model, x, gradient)
        if step is None:
            return None
        direction = self._subspace_direction(model, x, gradient, step)
        point = _cauchy_point(x, gradient, step).add_(direction).clamp_(0, 1)
        slope = self._slope(gradient, x, point)
        if slope < 0:
            return point, slope
        # The projection onto the bounds has made the loss rise towards the point. Instead of projecting, end
        # the step from the Cauchy point at the first bound.
        start = _cauchy_point(x, gradient, step)
        longest = min(1.0, self._shards.smallest(_longest_within_bounds(start, direction)))
        point = start.add_(direction, alpha=longest).clamp_(0, 1)
        return point, self._slope(gradient, x, point)

    def _cauchy_step(self, model: _Model, x: Tensor, gradient: Tensor) -> float | None:
        """Return the step along the projected gradient at which the model is lowest, of `_CAUCHY_STEPS`; None
        if the projected gradient is zero. A collective."""
        pairs = self._pairs
        num_rows = pairs.shape[1]

        def direction_terms(piece: slice) -> Tensor:
            """Return the squared length of the projected gradient, and its products with the pairs."""
            direction = _projected(x[piece], gradient[piece])
            return torch.cat([_dots(direction, direction), _products(pairs[piece], direction)], dim=1)

        squared, *products = self._sums(1 + num_rows, direction_terms)
        if squared == 0:
            return None
        # The quotient is the best step without bounds; its multiples are tried within the bounds.
        steps = squared / model.curvature(float(squared), np.array(products)) * _CAUCHY_STEPS
        num = len(steps)

        def step_terms(piece: slice) -> Tensor:
            """Return for each step the slope, the squared length and the products with the pairs of the move
            to its point."""
            moves = torch.stack(
                [_cauchy_point(x[piece], gradient[piece], t) - x[piece] for t in steps], dim=1
            )
            slopes = (moves @ gradient[piece, :, None])[..., 0]
            return torch.cat([slopes, moves.square().sum(dim=2), (pairs[piece] @ moves.mT).flatten(1)], dim=1)

        slopes, squares, *rows = self._sums(num * (2 + num_rows), step_terms).reshape(-1, num)
        losses = [
            slope + model.curvature(float(square), step_products) / 2
            for slope, square, step_products in zip(slopes, squares, np.array(rows).T, strict=True)
        ]
        return float(steps[int(np.argmin(losses))])

    def _subspace_direction(self, model: _Model, x: Tensor, gradient: Tensor, step: float) -> Tensor:
        """Return the vector from the Cauchy point to the model's minimum over the free variables, those
        between their bounds there; the others stay at their bound. The minimum may be out of bounds. A
        collective.

        Args:
            model: the model of the loss around x.
            x, gradient: this rank's parts.
            step: the step of the Cauchy point along the negative gradient.
        """
        shards, pairs = self._shards, self._pairs
        num_rows = pairs.shape[1]
        # The model's gradient at the Cauchy point x + v is g + B v, which needs W^T v of all ranks.
        products = self._sums(
            num_rows,
            lambda piece: _products(pairs[piece], _cauchy_point(x[piece], gradient[piece], step) - x[piece]),
        )
        weights = x.new_tensor(model.weights(products))
        # The negative of that gradient for the free variables, and the sums over them that the linear system
        # in their subspace needs.
        direction = torch.empty_like(x)

        def free_terms(piece: slice) -> Tensor:
            """Fill the piece of `direction`, and return the terms of the sums."""
            start = _cauchy_point(x[piece], gradient[piece], step)
            is_free = (start > 0) & (start < 1)
            downhill = weights @ pairs[piece] - gradient[piece] - model.scale * (start - x[piece])
            direction[piece] = downhill * is_free
            free_pairs = pairs[piece] * is_free[:, None]
            return torch.cat(
                [_products(free_pairs, downhill), (free_pairs @ pairs[piece].mT).flatten(1)], dim=1
            )

        products, *squares = self._sums(num_rows * (1 + num_rows), free_terms).reshape(-1, num_rows)
        weights = x.new_tensor(model.reduced_weights(products, np.array(squares)))
        for piece in shards.pieces():
            start = _cauchy_point(x[piece], gradient[piece], step)
            is_free = (start > 0) & (start < 1)
            direction[piece] = direction[piece] / model.scale + weights @ pairs[piece] * is_free
        return direction

    # ---- the step ----

    def _search_line(
        self, evaluate: EvaluatePart, x: Tensor, point: Tensor, slope: float, loss: float
    ) -> _Point | None:
        """Search the line from x to the point and beyond for a step with a lower loss; None if there is none.
        A collective.

        Args:
            evaluate: returns the loss and this rank's part of the gradient.
            x: this rank's part of the tensor.
            point: this rank's part of the point at the step 1.
            slope, loss: those at x, along the line.
        """
        newest: _Point | None = None

        def try_step(step: float) -> Trial:
            """Evaluate the loss at a step along the line. A collective."""
            nonlocal newest
            # Freed before the next point is computed, because a point takes as much memory as the tensor.
            newest = None
            # A step of 1 ends at the point itself, whose numbers are at their bounds exactly.
            part = point if step == 1 else (point - x).mul_(step).add_(x).clamp_(0, 1)
            whole = self._shards.whole(part)
            loss, gradient, slope = self._evaluated(evaluate, whole, x, point)
            newest = _Point(part, whole, loss, gradient)
            return Trial(step, loss, slope)

        if not slope < 0:
            return None
        accepted = strong_wolfe(try_step, Trial(0.0, loss, slope), self._longest(x, point))
        return newest if accepted is not None else None

    def _longest(self, x: Tensor, point: Tensor) -> float:
        """Return the longest step along the line within the bounds, at least 1. A collective after the first
        step."""
        # L-BFGS-B limits its first step in this way.
        if self._is_first:
            return 1.0
        steps = x.new_full((len(x), 1), math.inf)
        for piece in self._shards.pieces():
            steps[piece] = _longest_within_bounds(x[piece], point[piece] - x[piece])
        return max(1.0, self._shards.smallest(steps))

    def _evaluated(
        self, evaluate: EvaluatePart, whole: Tensor, x: Tensor, point: Tensor
    ) -> tuple[float, Tensor, float]:
        """Evaluate the loss of a whole tensor. A collective.

        Args:
            evaluate: returns the loss and this rank's part of the gradient.
            whole: the tensor.
            x, point: this rank's parts of two points.

        Returns:
            (loss, this rank's part of the gradient, slope at the tensor along the line from x to the point).

        Raises:
            RunError: loss or gradient are NaN or infinite.
        """
        loss, gradient = evaluate(whole)

        def terms(piece: slice) -> Tensor:
            part = gradient[piece]
            return torch.cat([_dots(part, part), _dots(part, point[piece] - x[piece])], dim=1)

        squared, slope = self._sums(2, terms)
        if not (math.isfinite(loss) and math.isfinite(squared)):
            raise RunError(describe_nonfinite(loss, math.sqrt(squared)))
        return loss, gradient, float(slope)

    def _slope(self, gradient: Tensor, x: Tensor, point: Tensor) -> float:
        """Return the slope of the loss from x towards a point, with the step 1 at the point. A collective."""
        return float(self._sums(1, lambda piece: _dots(gradient[piece], point[piece] - x[piece]))[0])

    def _remember(self, x: Tensor, x_now: Tensor, gradient: Tensor, gradient_now: Tensor) -> None:
        """Keep a step and the change of the gradient as a pair, in place of the oldest pair if there is no
        room. A pair without positive curvature is not kept. A collective."""
        pairs, num_pairs = self._pairs, self._num_pairs

        def terms(piece: slice) -> Tensor:
            step, change = x_now[piece] - x[piece], gradient_now[piece] - gradient[piece]
            scalars = [_dots(step, change), _dots(change, change), _dots(step, step)]
            rows = [_products(pairs[piece], step), _products(pairs[piece], change)]
            return torch.cat([*scalars, _dots(step, gradient[piece]), *rows], dim=1)

        sums = self._sums(4 + 2 * pairs.shape[1], terms)
        curvature, squared_change, squared_step, slope = map(float, sums[:4])
        if curvature <= _LEAST_CURVATURE * -slope:
            return
        step_products, change_products = sums[4:].reshape(2, -1)
        is_full = len(self._order) == num_pairs
        # A new pair takes the place of the oldest one; `_order` has the places by age.
        place = self._order[0] if is_full else len(self._order)
        self._steps_by_changes[:, place] = change_products[num_pairs:]
        self._steps_by_changes[place] = step_products[:num_pairs]
        self._steps_by_changes[place, place] = curvature
        self._steps_by_steps[:, place] = self._steps_by_steps[place] = step_products[num_pairs:]
        self._steps_by_steps[place, place] = squared_step
        self._order = [*self._order[is_full:], place]
        self._scale = squared_change / curvature
        for piece in self._shards.pieces():
            torch.sub(gradient_now[piece], gradient[piece], out=pairs[piece, place])
            torch.sub(x_now[piece], x[piece], out=pairs[piece, num_pairs + place])


class _Model:
    """The quadratic model of the loss around a point: its matrix is B = scale * I - W M W^T (equation 3.2 of
    Byrd et al.), where W has the changes of the gradient and the scaled steps in its columns.

    The products with W that its methods take, and the weights that they return, are in the order of the rows
    of `Lbfgs._pairs`.

    Args:
        order: the places of the pairs that are remembered, the oldest first.
        num_pairs: the number of places.
        steps_by_changes: (place, place), the products of steps with changes of the gradient.
        steps_by_steps: (place, place), the products of steps with one another.
        scale: the curvature in directions orthogonal to all pairs.
    """

    def __init__(
        self,
        order: list[int],
        num_pairs: int,
        steps_by_changes: np.ndarray,
        steps_by_steps: np.ndarray,
        scale: float,
    ) -> None:
        self.scale = scale
        self._num_rows = 2 * num_pairs
        self._rows = [*order, *(num_pairs + place for place in order)]
        self._factors = np.repeat([1.0, scale], len(order))
        oldest_first = np.ix_(order, order)
        by_changes = steps_by_changes[oldest_first]
        lower = np.tril(by_changes, -1)
        self._inverse = np.block(
            [[-np.diag(np.diag(by_changes)), lower.T], [lower, scale * steps_by_steps[oldest_first]]]
        )
        """The inverse of M."""

    def curvature(self, squared: float, products: np.ndarray) -> float:
        """Return v^T B v from v^T v and the products of the rows with v."""
        w_v = self._w_products(products)
        return self.scale * squared - float(w_v @ _solved(self._inverse, w_v))

    def weights(self, products: np.ndarray) -> np.ndarray:
        """Return the weights of the rows whose combination is W M W^T v, from the products of the rows with
        v."""
        return self._row_weights(_solved(self._inverse, self._w_products(products)))

    def reduced_weights(self, products: np.ndarray, squares: np.ndarray) -> np.ndarray:
        """Return the weights of the rows whose combination, added to v / scale, solves B d = v for the free
        variables (Sherman, Morrison and Woodbury).

        Args:
            products: (rows,), the products of the rows with v over the free variables.
            squares: (rows, rows), the products of the rows with one another over the free variables.
        """
        w_w = self._factors[:, None] * squares[np.ix_(self._rows, self._rows)] * self._factors
        system = self._inverse - w_w / self.scale
        return self._row_weights(_solved(system, self._w_products(products)) / self.scale**2)

    def _w_products(self, products: np.ndarray) -> np.ndarray:
        """Return W^T v from the products of the rows with v."""
        w_v: np.ndarray = products[self._rows] * self._factors
        return w_v

    def _row_weights(self, values: np.ndarray) -> np.ndarray:
        """Return the weights of the rows whose combination is W times these values."""
        weights = np.zeros(self._num_rows)
        weights[self._rows] = values * self._factors
        return weights


def _solved(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the solution of a small linear system; NaN if there is none.

    NaN reaches every rank with the next sum, and there all of them forget their pairs. An exception might be
    raised on some ranks only, whose processors round differently.
    """
    try:
        return np.linalg.solve(matrix, values)
    except np.linalg.LinAlgError:
        return np.full_like(values, np.nan)


def _projected(x: Tensor, gradient: Tensor) -> Tensor:
    """Return the negative gradient, with 0 for the variables that it would move out of their bounds."""
    leaves = ((x <= 0) & (gradient > 0)) | ((x >= 1) & (gradient < 0))
    return gradient.neg().masked_fill_(leaves, 0)


def _cauchy_point(x: Tensor, gradient: Tensor, step: float) -> Tensor:
    """Return the point at a step along the negative gradient, projected onto the bounds."""
    return torch.sub(x, gradient, alpha=step).clamp_(0, 1)


def _products(pairs: Tensor, vector: Tensor) -> Tensor:
    """Return the products (N, R) of the rows of (N, R, M) with a vector (N, M), by slice."""
    # `pairs @ vector` takes seven times as long on the CPU.
    return (vector[:, None] @ pairs.mT)[:, 0]


def _dots(left: Tensor, right: Tensor) -> Tensor:
    """Return the inner products (N, 1) of two vectors (N, M), by slice."""
    return (left * right).sum(dim=1, keepdim=True)


def _longest_within_bounds(x: Tensor, direction: Tensor) -> Tensor:
    """Return for each slice (N, 1) the longest step from x (N, M) along a direction (N, M) that keeps all of
    its variables within their bounds."""
    steps = torch.where(direction > 0, 1 - x, x).div_(direction.abs()).nan_to_num_(nan=math.inf)
    return steps.amin(dim=1, keepdim=True)


@dataclass(frozen=True)
class Trial:
    """A point on the line."""

    step: float
    loss: float
    slope: float
    """The derivative of the loss by the step."""


def strong_wolfe(try_step: Callable[[float], Trial], start: Trial, longest: float) -> Trial | None:
    """Find a step that lowers the loss enough and leaves little of the slope (the strong Wolfe conditions):
    first the step 1, then longer ones until an interval holds such a step, then the minimiser of a cubic in
    that interval.

    After Nocedal and Wright, "Numerical Optimization" (2nd edition, algorithms 3.5 and 3.6).

    Args:
        try_step: evaluates the loss at a step above 0.
        start: step 0, with a negative slope.
        longest: the longest step allowed, at least 1. It is taken if the loss still falls there.

    Returns:
        The trial that was evaluated last, or None if no step meets the conditions.
    """
    low, high = start, None
    step = 1.0
    for _ in range(_MAX_TRIALS):
        trial = try_step(step)
        promised = start.loss + _DECREASE * step * start.slope
        # The loss has not fallen enough: an acceptable step lies between `low` and this one.
        if trial.loss > promised or (low is not start and trial.loss >= low.loss):
            high = trial
        elif abs(trial.slope) <= -_CURVATURE * start.slope:
            return trial
        # The loss rises from this step away from `low`: an acceptable step lies between the two.
        elif trial.slope * (1.0 if high is None else high.step - low.step) >= 0:
            low, high = trial, low
        elif high is None and step >= longest:
            return trial
        else:
            low = trial
        step = min(_GROWTH * step, longest) if high is None else _cubic_minimiser(low, high)
    return None


def _cubic_minimiser(first: Trial, second: Trial) -> float:
    """Return the step at the minimum of the cubic that has the losses and slopes of both trials.

    It is the middle where the cubic has no minimum, and is kept away from both ends.
    """
    width = second.step - first.step
    slope = (second.loss - first.loss) / width
    rise = first.slope + second.slope - 3 * slope
    squared = rise * rise - first.slope * second.slope
    step = first.step + width / 2
    if squared >= 0:
        root = math.copysign(math.sqrt(squared), width)
        divisor = second.slope - first.slope + 2 * root
        if divisor:
            step = second.step - width * (second.slope + root - rise) / divisor
    margin = _MARGIN * abs(width)
    return min(max(step, min(first.step, second.step) + margin), max(first.step, second.step) - margin)
