"""Curves of low loss between two checkpoints (Garipov et al. 2018, arXiv 1802.10026), kept in the user's cache."""

import hashlib
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from landscape.checkpoints.checkpoint import state_dict_sha256
from landscape.checkpoints.user_code import fixed_rng
from landscape.data import dataset, structure, user_cache
from landscape.options import format_duration
from landscape.probe import derived_seed
from landscape.reporting.progress import forecast_level
from landscape.subject import mc_dropout, other_samples, restoration
from landscape.subject.loading.identity import identity
from landscape.subject.subject import Subject
from landscape.weight_space.lines import StraightLine
from landscape.weight_space.weights_in_place import WeightsInPlace

MOST_BYTES = 4 * 2**30  # of all kept curves; those used last stay
_log = logging.getLogger(__name__)


def folder() -> Path | None:
    """Where control points are kept: if need be, among the system's temporary files; None if nothing is kept."""
    return user_cache.folder("curves", "trained curves", temporary=True)


def load(key: str, like: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """The control point of a key, on the devices of tensors of the same names; None if there is no usable one.

    A file that is damaged, belongs to somebody else, or holds other tensors than those is not used.
    """
    path = _path(key)
    if path is None or not user_cache.is_own(path):
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        control, sha256 = content["control"], content["sha256"]
        intact = state_dict_sha256(control) == sha256 and _shapes(control) == _shapes(like)
        os.utime(path)
    except FileNotFoundError:  # another process has removed it meanwhile
        return None
    except Exception:  # torch's unpickler raises nearly anything on a damaged file
        intact = False
    if not intact:
        _log.warning("note: %s is damaged; the curve is trained again", path)
        path.unlink(missing_ok=True)
        return None
    return {name: control[name].to(tensor) for name, tensor in like.items()}


def store(key: str, control: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Keep a control point; returns the one that is kept: of two processes that train it at once, that of the first."""
    path = _path(key)
    if path is None:
        return dict(control)
    on_cpu = {name: tensor.cpu() for name, tensor in control.items()}
    content = {"control": on_cpu, "sha256": state_dict_sha256(on_cpu)}
    try:
        handle, temporary = tempfile.mkstemp(".pt", "unfinished-", path.parent)  # counted if it stays behind
        try:
            with os.fdopen(handle, "wb") as stream:
                torch.save(content, stream)
                stream.flush()
                os.fsync(handle)
            os.link(temporary, path)
        except FileExistsError:
            return load(key, control) or dict(control)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except (OSError, RuntimeError) as error:  # a full disk, or one without hard links
        _log.warning("note: the trained curve is not kept, and is trained again by the next run: %s", error)
        return dict(control)
    user_cache.forget_oldest(path.parent, MOST_BYTES, newest=path)
    return dict(control)


def _path(key: str) -> Path | None:
    place = folder()
    return None if place is None else place / f"{key}.pt"


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


MOMENTUM = 0.9


@dataclass(frozen=True)
class CurveTraining:
    """How the control point of a curve is found."""

    epochs: int
    rate: float  # learning rate at the start, falling linearly to a hundredth
    batch_size: int
    seed: int


def training_part(subject: Subject) -> Subject:
    """The whole train split of the subject's data.

    Raises:
        ValueError: the subject is measured on that split itself, or its data have no other one.
    """
    if subject.spec is not None and subject.spec.split == "train":
        raise ValueError(
            "--connect bezier trains a curve on the train split and measures it on the other: --split test"
        )
    train = other_samples.on_split(mc_dropout.as_is(subject), "train", "all")
    if train.data.one_part:
        raise ValueError(
            "--connect bezier trains a curve on the train split and measures it on the other, and the data "
            f"({train.data.name}) have one part; give data with a train and a test part"
        )
    return train


def curved(subject: Subject, line: StraightLine, training: CurveTraining) -> StraightLine:
    """The curve (1 - t)^2 w0 + 2 t (1 - t) c + t^2 w1 with a trained control point c.

    c minimises E_t L(w(t)), t uniform in 0 to 1 (section 3), by SGD with momentum: the gradient by c is 2 t (1 - t)
    times that by the weights. It starts in the middle of the straight line, where the curve is that line, and stays
    there in weights that are not trainable, such as those below a separate adapter. Batch norm uses the statistics of
    the mini-batch while it trains.

    The control point is kept for later runs and other processes, found by all that it depends on: other bits, of
    another machine, would be another curve. It is part of the identity of the line.

    Raises:
        ValueError: the training diverged.
    """
    assert line.end is not None
    train = other_samples.rebatched(training_part(subject), training.batch_size)
    key = _key(train, line, training)
    moved = {name: p.detach() for name, p in train.model.named_parameters() if name in line.end}
    control = load(key, moved)
    if control is None:
        if folder() is None:
            _log.warning(
                "note: trained curves are not kept: every run and every worker trains this one again, and an "
                "interrupted run resumes only where the training gives the same bits; name a folder by %s",
                user_cache.VARIABLE,
            )
        control = store(key, _trained(train, line.end, training))
    else:
        _log.debug("line: the curve is known from an earlier run and not trained again")
    known = [line.identity, state_dict_sha256(control)]
    return replace(line, control=control, name=f"{line.name}, trained curve", identity=known)


def _key(train: Subject, line: StraightLine, training: CurveTraining) -> str:
    """SHA-256, shortened, of all that the control point depends on."""
    about = {
        **identity(train, ()), **asdict(training), "towards": line.identity, "dtype": str(train.dtype),
        "trained": list(train.parameters),
    }  # fmt: skip
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _trained(train: Subject, to: Mapping[str, Tensor], training: CurveTraining) -> dict[str, Tensor]:
    """The control point of the curve to other weights."""
    parameters = {name: p for name, p in train.model.named_parameters() if name in to}
    end = {name: to[name].to(p.data) for name, p in parameters.items()}
    generator = torch.Generator().manual_seed(derived_seed(training.seed, "positions"))
    with (
        WeightsInPlace(train, parameters) as weights, restoration.evaluation_mode(train.model), torch.enable_grad(),
        fixed_rng(training.seed),
    ):  # fmt: skip
        train.model.train()
        control = {name: torch.lerp(weights.original[name], end[name], 0.5) for name in parameters}
        trained = {name: p for name, p in train.parameters.items() if name in control}
        optimizer = torch.optim.SGD([control[name] for name in trained], lr=training.rate, momentum=MOMENTUM)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, max(1, training.epochs - 1))
        began = time.monotonic()
        for epoch in range(training.epochs):
            losses = []
            for inputs, targets in _shuffled(train, derived_seed(training.seed, "order", epoch)):
                t = float(torch.rand((), generator=generator))
                weights.interpolate(control, 2 * t * (1 - t), end, t * t)
                loss = train.losses(train.outputs(inputs), targets).mean()
                gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
                for name, gradient in zip(trained, gradients, strict=True):
                    control[name].grad = None if gradient is None else 2 * t * (1 - t) * gradient
                optimizer.step()
                losses.append(loss.item())
            schedule.step()
            if not math.isfinite(np.mean(losses)):
                raise ValueError(
                    f"the training of the curve diverged in epoch {epoch + 1} (loss {np.mean(losses)}); give a smaller "
                    f"--connect-rate than {training.rate:g}"
                )
            _log.debug("line: epoch %d of %d of the curve, loss %.4f", epoch + 1, training.epochs, np.mean(losses))
            if epoch == 0:
                seconds = training.epochs * (time.monotonic() - began)
                _log.log(forecast_level(seconds), "line: training the curve first: about %s", format_duration(seconds))
    for tensor in control.values():
        tensor.grad = None
    return control


def _shuffled(subject: Subject, seed: int) -> Iterator[tuple[structure.Nested, structure.Nested]]:
    """All samples in mini-batches of random samples; of a loader's own mini-batches, these in random order."""
    generator = np.random.default_rng(seed)
    if not isinstance(subject.batches, dataset.Batches):
        for i in generator.permutation(len(subject.batches)).tolist():
            yield subject.batch(i)
        return
    order, size = generator.permutation(len(subject)), subject.batch_size
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        if len(rows) > 1:  # batch norm needs two
            yield other_samples.on_rows(subject, rows).batch(0)
