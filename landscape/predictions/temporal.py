"""Smooth predictions over the frames of a stream (VQ-BNN, Park et al. 2021), and time it."""

from functools import partial

import torch
from torch import Tensor

from landscape.predictions.timing import WARM_UP, probabilities, single_inputs, timed
from landscape.subject.mc_dropout import as_is
from landscape.subject.subject import Subject


def frame_weights(offsets: Tensor, tau: float) -> Tensor:
    """Weights of frames at the given distances in time, proportional to exp(-|s| / tau), with the sum 1.

    tau = 0 gives all weight to the frame itself.
    """
    weights = (offsets == 0).double() if tau == 0 else torch.exp(-offsets.abs().double() / tau)
    return weights / weights.sum()


def smoothed(log_probabilities: Tensor, weights: Tensor) -> Tensor:
    """Logarithm of sum_s w_s p_s, of log probabilities (frames, ...) and weights (frames,), without underflow."""
    used = weights > 0
    logs, shares = log_probabilities[used], weights[used].log().to(log_probabilities)
    return logs[0] if len(logs) == 1 else (logs + shares.view(-1, *(1,) * (logs.dim() - 1))).logsumexp(dim=0)


class RingBuffer:
    """The probabilities of the last frames, and their weighted mean, as a video player needs it: one pass per frame.

    With look-ahead the mean belongs to the frame that lies so many frames back.
    """

    def __init__(self, tau: float, past: int, look_ahead: int) -> None:
        self._offsets = torch.arange(past + look_ahead + 1) - look_ahead  # age of a frame -> its distance in time
        self._weights = frame_weights(self._offsets, tau)
        self._buffer = torch.empty(0)
        self._by_place: list[Tensor] = []  # for each place of the newest frame the weights of all places
        self._count = 0

    def push(self, probabilities: Tensor) -> Tensor:
        """Add the probabilities of a frame; the weighted mean over those in the buffer, of the same shape."""
        size = len(self._weights)
        if not self._count:
            self._buffer = probabilities.new_zeros((size, probabilities.numel()))
            ages = [(newest - torch.arange(size)) % size for newest in range(size)]
            self._by_place = [self._weights[age].to(probabilities) for age in ages]
        place = self._count % size
        self._buffer[place] = probabilities.reshape(-1)
        self._count += 1
        mean = self._by_place[place] @ self._buffer
        if self._count < size:  # the places that are still empty have no weight
            mean = mean / self._weights[: self._count].sum().to(mean)
        return mean.view_as(probabilities)


def prediction_time(subject: Subject, *, tau: float, past: int, look_ahead: int, frames: int) -> dict[str, list[float]]:
    """Seconds of every frame, one frame at a time, from the input to its prediction.

    A smoothed prediction takes the pass and the mean over the ring buffer behind it; both are timed on the same frames,
    so that a busy machine slows them alike.

    Returns:
        `deterministic`: one pass; `smoothed`: one pass and the weighted mean over the ring buffer; with members also
        `mc_dropout`: a pass for each of them and the mean of their probabilities.
    """
    plain, ring = as_is(subject), RingBuffer(tau, past, look_ahead)
    seconds: dict[str, list[float]] = {"deterministic": [], "smoothed": []}
    if subject.members:
        seconds["mc_dropout"] = []
    with subject.evaluating():
        each = (single_inputs(one, frames + WARM_UP) for one in (plain, subject))
        for t, (inputs, stochastic) in enumerate(zip(*each, strict=True)):
            predicted, one = timed(partial(probabilities, plain, inputs), subject.device)
            _, mean = timed(partial(ring.push, predicted), subject.device)
            took = {"deterministic": one, "smoothed": one + mean}
            if subject.members:
                _, took["mc_dropout"] = timed(partial(probabilities, subject, stochastic), subject.device)
            for name, value in took.items() if t >= WARM_UP else ():
                seconds[name].append(value)
    return seconds
