"""Time single predictions, with the work that they leave to an accelerator, and summarise the seconds they take."""

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from landscape.data import structure
from landscape.data.structure import Nested, common_length, rows_of
from landscape.predictions.frames import RingBuffer, networks_of
from landscape.statistics.intervals import percentile_interval
from landscape.subject import mc_dropout, members, weights_cache
from landscape.subject.device import wait_for
from landscape.subject.subject import Subject

WARM_UP = 3  # predictions that are not timed
DRAWS = 1000


def timed(run: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    """What a function returns, and the seconds it took."""
    wait_for(device)
    start = time.perf_counter()
    found = run()
    wait_for(device)
    return found, time.perf_counter() - start


def single_inputs(subject: Subject, count: int) -> Iterator[Nested]:
    """Inputs of single samples, the first ones, as the subject takes them; from the start if they are few."""
    for t, one in enumerate(itertools.islice(itertools.cycle(_rows(mc_dropout.as_is(subject))), count)):
        yield members.Positioned(one, torch.tensor([t], device=subject.device)) if subject.members else one


def _rows(subject: Subject) -> Iterator[Nested]:
    for inputs, _ in subject.each_batch():
        yield from (rows_of(inputs, slice(row, row + 1)) for row in range(common_length(inputs) or 1))


def probabilities(subject: Subject, inputs: Nested) -> Tensor:
    """Predicted probabilities."""
    logits: Tensor = structure.logits_in(subject.outputs(inputs))
    return logits.softmax(dim=1)


def per_image(subject: Subject, images: int) -> list[float]:
    """Seconds of the predictions of single images."""
    seconds = []
    with subject.evaluating():
        for inputs in single_inputs(subject, images + WARM_UP):
            seconds.append(timed(partial(probabilities, subject, inputs), subject.device)[1])
    return seconds[WARM_UP:]


@weights_cache.once_per_weights
def prediction_time(
    subject: Subject, others: tuple[str, ...], *, tau: float, past: int, look_ahead: int, frames: int
) -> dict[str, list[float]]:
    """Seconds of every frame by method, one frame at a time, from the input to its prediction.

    A smoothed prediction takes a pass and the mean over the ring buffer behind it, any other one the passes of all
    masks or networks and the mean of their probabilities. All are timed on the same frames, so that a busy machine
    slows them alike.
    """
    plain, ring = mc_dropout.as_is(subject), RingBuffer(tau, past, look_ahead)
    networks, seconds = [plain, *networks_of(subject, others)], defaultdict(list)
    with subject.evaluating():
        each = (single_inputs(one, frames + WARM_UP) for one in (plain, subject))
        for t, (inputs, stochastic) in enumerate(zip(*each, strict=True)):
            predicted, one = timed(partial(probabilities, plain, inputs), subject.device)
            _, mean = timed(partial(ring.push, predicted), subject.device)
            took = {"deterministic": one, "temporal": one + mean}
            if subject.members:
                _, took["mc_dropout"] = timed(partial(probabilities, subject, stochastic), subject.device)
                with subject.member(0):
                    _, one = timed(partial(probabilities, subject, stochastic), subject.device)
                took["mc_dropout_temporal"] = one + mean
            if others:
                _, took["ensemble"] = timed(partial(_mean_of, networks, inputs), subject.device)
                _, one = timed(partial(probabilities, networks[t % len(networks)], inputs), subject.device)
                took["ensemble_temporal"] = one + mean
            for name, value in took.items() if t >= WARM_UP else ():
                seconds[name].append(value)
    return seconds


def _mean_of(networks: Sequence[Subject], inputs: Nested) -> Tensor:
    return torch.stack([probabilities(one, inputs) for one in networks]).mean(dim=0)


def facts(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """Mean of the seconds of several predictions by `name`, with the ends of its 95 % bootstrap interval."""
    values = np.array(seconds)
    drawn = np.random.default_rng(0).choice(values, size=(DRAWS, len(values))).mean(axis=1)
    low, high = percentile_interval(drawn)
    return {name: float(values.mean()), f"{name}_low": low, f"{name}_high": high}
