"""An exponential moving average (EMA) of the weights, which often predicts better than the newest weights themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from nbgpu.engine.model.strategy import own_part, shared_out
from nbgpu.machine.signals import uninterrupted


class Average:
    """The average of a model's weights over the steps; each rank has as much of it as it has of the model.

    Buffers are not averaged: with the averaged weights go the model's own, as in torch.optim.swa_utils.

    Args:
        model: on the device, and shared out where the strategy does that. The average begins with its weights.
        decay: what a step leaves of the average, at most. In the first steps it is less, (1 + step) / (10 + step), so
            that the random beginning is soon forgotten (as TensorFlow's ExponentialMovingAverage does it).
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._model = model
        self._decay = decay
        self._weights = list(model.parameters())
        self.tensors = [weight.detach().clone() for weight in self._weights]
        place = {id(weight): index for index, weight in enumerate(self._weights)}
        # Tied weights have several names. Noted now: fsdp puts others in their place while it gathers them.
        self._places = {name: place[id(w)] for name, w in model.named_parameters(remove_duplicate=False)}
        self._in_the_model = False

    @torch.no_grad()
    def update(self, step: int, left_out: Tensor) -> None:
        """Moves towards the weights, or stays to the last bit.

        Not torch's own `get_ema_multi_avg_fn`, whose decay is a number: whether a step is left out for NaN is known on
        the device only, and asking it would hold up every step.

        Args:
            step: optimizer steps done before this one.
            left_out: a bool on the device: this step changed nothing.
        """
        share = 1 - min(self._decay, (1 + step) / (10 + step))
        like = own_part(self.tensors[0])
        share_now = (~left_out).to(like.device, like.dtype) * share
        for average, weight in zip(self.tensors, self._weights, strict=True):
            own_part(average).lerp_(own_part(weight), share_now)

    @contextmanager
    def in_the_model(self) -> Iterator[None]:
        """In it the model has the averaged weights."""
        try:
            self._exchange(True)
            yield
        finally:
            self.out_of_the_model()

    def out_of_the_model(self) -> None:
        """Gives the model its own weights back, if it has the averaged ones."""
        self._exchange(False)

    @torch.no_grad()
    def _exchange(self, into_the_model: bool) -> None:
        if self._in_the_model == into_the_model:
            return
        # An interrupt in the middle would leave a model of both.
        with uninterrupted():
            for average, weight in zip(self.tensors, self._weights, strict=True):
                kept = own_part(weight).clone()
                own_part(weight).copy_(own_part(average))
                own_part(average).copy_(kept)
            self._in_the_model = into_the_model

    def state_dict(self) -> dict[str, Tensor]:
        """What `model.load_state_dict` takes: averaged weights, and the model's buffers."""
        assert not self._in_the_model, "a state belongs to the end of a step"
        return {
            name: self.tensors[self._places[name]] if name in self._places else tensor
            for name, tensor in self._model.state_dict().items()
        }

    @torch.no_grad()
    def load_state_dict(self, tensors: Mapping[str, Tensor]) -> None:
        """Goes on from whole tensors by name, which every rank has."""
        for name, place in self._places.items():
            average = self.tensors[place]
            own_part(average).copy_(own_part(shared_out(tensors[name], average)))
