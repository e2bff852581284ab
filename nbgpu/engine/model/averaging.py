"""An exponential moving average (EMA) of the weights, which often predicts better than the newest weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nbgpu.engine.model.strategy import own_part, shared_out
from nbgpu.machine.signals import uninterrupted


class Average:
    """The average of a model's weights over the steps, sharded over the ranks as the model is.

    Buffers are not averaged: the averaged weights are used with the model's buffers, as in
    torch.optim.swa_utils.

    Args:
        model: the model on the device, sharded if the strategy shards it. The average begins with its
            weights.
        decay: the largest share of the average that a step keeps. In the first steps the share is smaller,
            (1 + step) / (10 + step), so that the random initial weights are soon forgotten (as in
            TensorFlow's ExponentialMovingAverage).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._decay = decay
        self._weights = list(model.parameters())
        self.tensors = [weight.detach().clone() for weight in self._weights]
        place = {id(weight): index for index, weight in enumerate(self._weights)}
        # Tied weights have several names. Recorded now, because fsdp replaces the weights while it gathers
        # them.
        self._places = {name: place[id(w)] for name, w in model.named_parameters(remove_duplicate=False)}
        self._in_the_model = False

    @torch.no_grad()
    def update(self, step: int, left_out: Tensor) -> None:
        """Move the average towards the weights of the step; change nothing if the step was left out.

        torch's own `get_ema_multi_avg_fn` takes the decay as a number. Whether a step is left out for NaN is
        only known on the device, and reading it would delay every step.

        Args:
            step: the number of optimizer steps before this one.
            left_out: a bool on the device, true if this step changed nothing.
        """
        share = 1 - min(self._decay, (1 + step) / (10 + step))
        like = own_part(self.tensors[0])
        share_now = (~left_out).to(like.device, like.dtype) * share
        for average, weight in zip(self.tensors, self._weights, strict=True):
            own_part(average).lerp_(own_part(weight), share_now)

    @contextmanager
    def in_the_model(self) -> Iterator[None]:
        """Swap the averaged weights into the model for a block."""
        try:
            self._exchange(True)
            yield
        finally:
            self.out_of_the_model()

    def out_of_the_model(self) -> None:
        """Swap the trained weights back, if the averaged ones are in the model."""
        self._exchange(False)

    @torch.no_grad()
    def _exchange(self, into_the_model: bool) -> None:
        """Swap the averaged weights into the model or the trained ones back, unless that has been done. The
        swap needs memory for one weight only."""
        if self._in_the_model == into_the_model:
            return
        # An interrupt halfway would leave a model with some weights of each kind.
        with uninterrupted():
            for average, weight in zip(self.tensors, self._weights, strict=True):
                kept = own_part(weight).clone()
                own_part(weight).copy_(own_part(average))
                own_part(average).copy_(kept)
            self._in_the_model = into_the_model

    def state_dict(self) -> dict[str, Tensor]:
        """Return the input of `model.load_state_dict`: the averaged weights, and the model's buffers."""
        assert not self._in_the_model, "a state belongs to the end of a step"
        return {
            name: self.tensors[self._places[name]] if name in self._places else tensor
            for name, tensor in self._model.state_dict().items()
        }

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Load whole tensors by name, which every rank has."""
        for name, place in self._places.items():
            average = self.tensors[place]
            own_part(average).copy_(own_part(shared_out(tensors[name], average)))
