"""Scores of one network on several data sets at points of a line or plane, each compared with that at the checkpoint.

One setting of the weights serves all data sets. A score is the mean over samples of a loss, or the accuracy; positive
differences are worse. What is derived from them is in `statistics.basins`.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from landscape.options import OptionError, require
from landscape.probe import Quantity
from landscape.statistics import basins
from landscape.statistics.means import PARTS
from landscape.subject import batchnorm, sample_statistics, weights_cache
from landscape.subject.loading.further_data import further_subjects, parse_further, short_name
from landscape.subject.loading.identity import loss_identity, protocol
from landscape.subject.losses import MEANINGS, undefined_accuracy
from landscape.subject.subject import Subject
from landscape.weight_space.forward_mode import REFERENCE, ExecutionMode, ForwardPass

ALSO_HELP = "measure this data set, or loss, at the same points too; repeatable; NAME=DATA[:SPLIT][@LOSS]"
MARGIN_HELP = "how much worse a score may get in its basin: 2se (standard errors at the checkpoint), 10%, or a number"
_log = logging.getLogger(__name__)
AXES = {"score": Quantity("score: a loss or the accuracy on one data set"), "part": Quantity("part of the samples")}
Samples = tuple[Tensor, Tensor]  # loss and correctness of every sample, (N,)


def check(also: Sequence[str], margin: str) -> None:
    """Raise an OptionError unless the options have a meaning."""
    parse_further("also", also)
    if margin:
        number, unit = basins.parse_margin(margin)
        require(number > 0 or unit == "", "margin", margin, "above 0")


@dataclass(frozen=True, eq=False)
class Scores:
    """Every score of `--also` and `--margin`, on a subject that is at its checkpoint when this is made."""

    subject: Subject
    further: tuple[Subject, ...]
    margin: str = ""
    recalibrate: int = 0  # mini-batches of the subject from which batch norm's statistics follow, at every point
    mode: ExecutionMode = REFERENCE

    @classmethod
    def of(
        cls,
        subject: Subject,
        also: Sequence[str],
        margin: str,
        *,
        recalibrate: int = 0,
        mode: ExecutionMode = REFERENCE,
    ) -> "Scores | None":
        """None where neither option is given. Raises OptionError: a data set has the name of the subject's own."""
        if not (also or margin):
            return None
        named = parse_further("also", also)
        if own := next((one.name for one in named if one.name == short_name(subject)), ""):
            raise OptionError(f"--also {own}=...: the data that are measured anyway have this name; give another")
        return cls(subject, further_subjects(subject, tuple(named)), margin, recalibrate, mode)

    @property
    def subjects(self) -> tuple[Subject, ...]:
        """The subject and those with further data."""
        return self.subject, *self.further

    @cached_property
    def rows(self) -> list[tuple[int, int]]:
        """Of every score the position of its data set, and 0 for the loss or 1 for the accuracy."""
        rows = []
        for i, one in enumerate(self.subjects):
            rows.append((i, 0))
            counts = one.meaning.right is not undefined_accuracy and (not i or one.losses in MEANINGS)
            rows += [(i, 1)] if counts and not bool(self.at_checkpoint()[i][1].isnan().all()) else []
        return rows

    @cached_property
    def forwards(self) -> list[ForwardPass]:
        """The forward passes of the further data sets."""
        return [ForwardPass(one, self.mode) for one in self.further]

    def at_checkpoint(self) -> list[Samples]:
        """Loss and correctness of every sample of every data set; computed once, at the checkpoint."""
        return _at_checkpoint(self.subject, self.further, self.recalibrate, self.mode)

    def further_samples(self) -> list[Samples]:
        """Loss and correctness of every sample of the further data sets at the present weights."""
        return [_samples(one, forward) for one, forward in zip(self.further, self.forwards, strict=True)]

    def check_again(self) -> None:
        """Compare recorded passes of the further data sets with plain ones: after weights were written, say."""
        for forward in self.forwards:
            forward.check_again()

    def table(self, own: Samples, further: Sequence[Samples]) -> Tensor:
        """Value, standard error, worsening, its paired error and its means over parts, (score, 4 + parts) float64.

        On the device. `own` may be of the first samples alone.
        """
        every = []
        for one, now, before in zip(self.subjects, (own, *further), self.at_checkpoint(), strict=True):
            for sign, values, reference in zip((1.0, -1.0), now, before, strict=True):
                values = values.double()
                changes = sign * (values - reference[: len(values)].to(values))
                unknown = one.traits.mean_only and sign > 0  # of the loss alone: correctness is that of every sample
                errors = [values.new_tensor(torch.nan) if unknown else _error(part) for part in (values, changes)]
                parts = means_of_parts(changes, parts_of(self.subject))
                four = torch.stack([values.mean(), errors[0], changes.mean(), errors[1]])
                every.append(torch.cat([four, torch.full_like(parts, torch.nan) if unknown else parts]))
        return torch.stack([every[2 * i + kind] for i, kind in self.rows])

    def values_at(self, own: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
        """The measured quantities at the present weights, given loss and correctness of the subject's own samples."""
        further = [sample_statistics.per_sample(one) for one in self.further]
        with self.subject.evaluating():
            return self.values(self.table((torch.from_numpy(own[0]), torch.from_numpy(own[1])), further).numpy())

    def values(self, table: np.ndarray) -> dict[str, np.ndarray]:
        columns = np.asarray(table, dtype=float).reshape(len(self.rows), -1).T.copy()
        return dict(zip(basins.MEASURED, (*columns[:4], columns[4:].T), strict=True))

    def axes(self) -> dict[str, np.ndarray]:
        return {"score": np.arange(len(self.rows)), "part": np.arange(parts_of(self.subject))}

    def labels(self) -> dict[str, tuple[Quantity, np.ndarray]]:
        """Names of the scores, their values at the checkpoint, and by how much they may be worse."""
        at, own = ("score",), self.at_checkpoint()
        with self.subject.evaluating():
            table = self.table(own[0], own[1:]).cpu().numpy()
        names = [short_name(self.subject), *(one.label for one in self.further)]
        kinds = [self._kind(*row) for row in self.rows]
        margins = [basins.margin_of(self.margin, value, error) for value, error in table[:, :2]]
        unknown = [
            f"{kind} of {names[i]}"
            for (i, _), kind, margin, value in zip(self.rows, kinds, margins, table[:, 0], strict=True)
            if math.isfinite(value) and math.isnan(margin)
        ]
        if unknown:
            _note_unknown(self.subject, ", ".join(unknown), self.margin or basins.MARGIN)
        text = {
            "score_data": ("data set", [names[i] for i, _ in self.rows]),
            "score_name": (
                "score",
                [k if k == names[i] else f"{names[i]} {k}" for (i, _), k in zip(self.rows, kinds, strict=True)],
            ),
            "score_kind": ("what is averaged over its samples", kinds),
            "score_units": ("units of the score", ["1" if k else self.subjects[i].meaning.units for i, k in self.rows]),
            "score_protocol": ("how its samples were read", [protocol(self.subjects[i]) for i, _ in self.rows]),
        }
        numbers = {
            "score_centre": ("score at the checkpoint", table[:, 0]),
            "score_centre_se": ("its standard error over samples", table[:, 1]),
            "score_samples": ("samples of the score", np.array([float(len(self.subjects[i])) for i, _ in self.rows])),
            "score_margin": ("by how much it may be worse within its basin", np.array(margins)),
        }
        return {
            **{name: (Quantity(words, dims=at), np.array(values)) for name, (words, values) in text.items()},
            **{
                name: (Quantity(words, "score", at, over="score_samples" * name.endswith("_se")), values)
                for name, (words, values) in numbers.items()
            },
        }

    def identity(self) -> dict[str, Any]:
        """What the numbers depend on beyond the subject."""
        also = [
            [one.label, one.data.sha256, loss_identity(one), one.batch_size * one.traits.coupled]
            for one in self.further
        ]
        return {"also": also, "margin": basins.parse_margin(self.margin or basins.MARGIN)}

    def _kind(self, i: int, accuracy: int) -> str:
        one = self.subjects[i]
        if accuracy:
            return "accuracy"
        return "loss" if not i or one.losses in MEANINGS else Path(one.traits.name).name.rpartition(":")[2]


def parts_of(subject: Subject) -> int:
    """Number of the disjoint parts of the samples whose means are stored too."""
    return min(PARTS, len(subject))


def means_of_parts(values: Tensor, parts: int) -> Tensor:
    """Means over every so many of the values, beginning at each of the first (parts,); NaN where there is none."""
    short = -len(values) % parts
    table = functional.pad(values, (0, short), value=torch.nan).view(-1, parts)
    return table.nanmean(dim=0)


@weights_cache.once_per_weights
def _note_unknown(subject: Subject, scores: str, margin: str) -> None:
    """Say why scores have no radius."""
    _log.warning(
        "note: %s: without an error over samples the margin of %s, and with it the radius of the basin, is unknown; "
        "give --margin 10%% or a number", scores, margin,
    )  # fmt: skip


@weights_cache.once_per_weights
def _at_checkpoint(
    subject: Subject, further: tuple[Subject, ...], recalibrate: int, mode: ExecutionMode
) -> list[Samples]:
    statistics = batchnorm.statistics(subject.model)
    try:
        if recalibrate:
            batchnorm.refresh(subject, recalibrate)
        return [_samples(one, ForwardPass(one, mode)) for one in (subject, *further)]
    finally:
        batchnorm.restore(subject.model, statistics)


def _samples(subject: Subject, forward: ForwardPass) -> Samples:
    with subject.evaluating():  # a further loss may differentiate where the subject's own does not
        parts = [forward.losses_and_right(i) for i in range(len(forward))]
        losses, right = (torch.cat([part[k].double() for part in parts]) for k in (0, 1))
    return losses, right


def _error(values: Tensor) -> Tensor:
    """Standard error of the mean; NaN for fewer than two values."""
    return values.std(correction=1) / len(values) ** 0.5 if len(values) > 1 else values.new_tensor(torch.nan)
