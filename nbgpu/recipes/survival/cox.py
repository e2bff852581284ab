"""Cox's partial likelihood over the samples of one rank or of all ranks."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

Ties = Literal["breslow", "efron"]


def cox_loss(scores: Tensor, times: Tensor, events: Tensor, ties: Ties) -> Tensor:
    """Return the negative log partial likelihood per event, a scalar in float64 (Cox 1972).

    Without events the loss and its gradient are 0: such samples say nothing about the order of events.

    Args:
        scores: log hazards (N,).
        times: the times to the event or to the end of the observation (N,). Only their order counts.
        events: whether the event occurred (N,), as numbers or bools.
        ties: the treatment of events at the same time, of Breslow (1974) or of Efron (1977).
    """
    # No shape and no branch depends on the values of tensors, because the memory of a step is estimated with
    # fake tensors, which have none.
    order = times.argsort()
    scores, times, events = scores[order].double(), times[order], events[order].double()
    # The index of the first sample with the same time. The risk set of an event holds all samples from there
    # on.
    first_tied = torch.searchsorted(times, times)
    log_risk = scores.flip(0).logcumsumexp(0).flip(0)[first_tied]
    if ties == "efron":
        zeros = torch.zeros_like(scores)
        # For the l-th of d tied events, counted from 0, Efron subtracts l / d of the tied hazards from the
        # hazard of the risk set. If `share` is the tied hazards divided by that of the risk set, the
        # logarithm of the difference is log_risk + log(1 - l / d * share). A share is at most 1, so that no
        # exponential can overflow.
        shares = zeros.index_add(0, first_tied, events * (scores - log_risk).exp())[first_tied]
        num_tied = zeros.index_add(0, first_tied, events)[first_tied]
        num_before = events.cumsum(0) - events
        left_out = events * (num_before - num_before[first_tied]) / num_tied.clamp_min(1)
        log_risk = log_risk + torch.log1p(-left_out * shares)
    return (events * (log_risk - scores)).sum() / events.sum().clamp_min(1)


def gathered(scores: Tensor, times: Tensor, events: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gather the scores, times and events (N,) of all ranks in order of rank, in float64: (N * world size,)
    each. A collective; every rank gives the same number of samples.

    The risk sets must have the samples of all ranks: the mean of the partial likelihoods of single ranks is
    another loss. If each rank computes the loss of the gathered samples, the gradients averaged by DDP are
    those of one rank with all samples.
    """
    everyone = _Gathered.apply(torch.stack([scores.double(), times.double(), events.double()]))  # type: ignore[no-untyped-call]
    all_scores, all_times, all_events = everyone.unbind()
    return all_scores, all_times, all_events


class _Gathered(torch.autograd.Function):
    """Gathers (K, N) of each rank into (K, N * world size), with a gradient."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        """Gather (K, N) into (K, N * world size), in order of rank."""
        # torch.distributed.all_gather has no gradient.
        ctx.num_own = local.shape[1]
        parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, local)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Return the gradient (K, N) of this rank's own samples, scaled for DDP's mean."""
        # Each rank computes the whole loss, but passes on only the gradient for its own samples. The sum over
        # the ranks is the whole gradient, and DDP takes the mean.
        first = dist.get_rank() * ctx.num_own
        return gradients[0][:, first : first + ctx.num_own] * dist.get_world_size()
