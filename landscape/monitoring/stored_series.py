"""What a monitored run stores: its quantities over the steps, what identifies it, and which stored series it is."""

import hashlib
import itertools
import json
import logging
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from torch.optim import Optimizer

from landscape.data.structure import common_length
from landscape.headline import Headline, stored_headlines
from landscape.monitoring.gradients import BUCKETS, UPDATES, Start
from landscape.monitoring.gradients import parts_of as parts_of_batch
from landscape.options import counted
from landscape.probe import Plan, Quantity
from landscape.results import group as groups
from landscape.results import run_key, series, unmerged_journals
from landscape.subject.loading.identity import attributes as attributes_of
from landscape.subject.optimizer_rules import name_of, parts_of, rule_of
from landscape.subject.subject import Subject

MONITOR = "monitor"  # name of the groups
RULE = (
    "a multiple of `every` has a row if rows stay below 19/20 of `overhead` times the training time until the next "
    "one, and eigenvalues and noise scale if all measurements stay below `overhead` times that so far, the first one "
    "always; loss, gradient, distance, learning rate and what is measured along the last update are in every row"
)
HEADLINES = (
    Headline("steps", "step", {"step": -1}),
    Headline("sharpness", "eigenvalue", {"rank": 0, "step": "last"}),
    Headline("sharpness / threshold", "eigenvalue", {"rank": 0, "step": "last"}, by="threshold"),
    Headline("preconditioned", "preconditioned", {"rank": 0, "step": "last"}),
    Headline(
        "preconditioned / threshold", "preconditioned", {"rank": 0, "step": "last"}, by="preconditioned_threshold"
    ),
    Headline("distance", "distance", {"step": "last"}),
)
SHARE, RISE = 0.05, 8.0  # of the loss, and of the median of earlier rows, that the cost of an update exceeds
EARLIER, LEAST = 20, 10  # rows before those in question, and the least of them
IN_A_ROW = 2  # rows above both
ALARM = (
    f"1 where actual - predicted change exceeds {SHARE:g} of the loss and {RISE:g} times its median over {EARLIER} "
    f"earlier rows, in {IN_A_ROW} rows that follow each other"
)
CRITICAL = "2 / eta_c, eta_c the smallest learning rate along the last update at which the loss exceeds its start"
_log = logging.getLogger(__name__)


def plan_of(subject: Subject, top: int, parts: int, sketch: np.ndarray) -> Plan:
    """The quantities over the steps, with the parts of the mini-batch, and the sketch of the weights at the start."""
    loss, seen = subject.meaning.units, "1 / learning rate"
    curvature, squared = f"{loss} / weight^2", f"{loss}^2 / weight^2"
    ranks, preconditioned = ("rank",), "largest eigenvalue of P^-1/2 H P^-1/2, P the optimiser's preconditioner"
    return Plan(
        over={"step": np.array([], np.int64)},
        axes={"rank": np.arange(top), "bucket": np.arange(BUCKETS)},
        quantities={
            "loss": Quantity("loss", loss),
            "update_norm": Quantity("norm of the last update u", "weight"),
            "predicted_change": Quantity("change of the loss by the last update to first order, g'u", loss),
            "actual_change": Quantity("change of the loss by the last update", loss),
            "critical_sharpness": Quantity(CRITICAL, seen),
            "critical_multiple": Quantity("critical learning rate as a multiple of the learning rate"),
            "critical_passes": Quantity("forward passes of the search for it, at start and end of the update too"),
            "relative_critical_sharpness": Quantity("critical sharpness of the second mini-batch, same update", seen),
            "alarm": Quantity(ALARM),
            "norm_sharpness": Quantity("u'Hu / ||u||^2, || || the norm of the optimiser's steps"),
            "simple_noise_scale": Quantity(
                "tr Sigma / |G|^2 of the training's micro-batches, last updates", "samples", bounds="positive"
            ),
            "simple_noise_scale_se": Quantity("its standard error (jackknife)", "samples", over="noise_updates"),
            "gradient_norm": Quantity("norm of the gradient", f"{loss} / weight"),
            "eigenvalue": Quantity("largest Hessian eigenvalue", curvature, ranks),
            "residual": Quantity("residual of the eigenvalue, within which one lies", curvature, ranks),
            "error": Quantity("estimated error min(r, r^2 / gap) of the eigenvalue", curvature, ranks),
            "converged": Quantity("1 where the eigenvalue reached its tolerance", dims=ranks),
            "threshold": Quantity("stability threshold of the largest Hessian eigenvalue", curvature),
            "preconditioned": Quantity(preconditioned, seen, ranks),
            "preconditioned_residual": Quantity("residual of the preconditioned eigenvalue", seen, ranks),
            "preconditioned_error": Quantity("estimated error of the preconditioned eigenvalue", seen, ranks),
            "preconditioned_converged": Quantity("1 where the preconditioned one reached its tolerance", dims=ranks),
            "preconditioned_threshold": Quantity("stability threshold of the preconditioned eigenvalue", seen),
            "learning_rate": Quantity("learning rate of the update: the largest of the groups that made it"),
            "warm_error": Quantity("share by which the search from the last vectors missed the largest eigenvalue"),
            "products": Quantity("Hessian products of this measurement"),
            "noise_scale": Quantity("simple noise scale tr Sigma / |G|^2", "samples"),
            "noise_scale_se": Quantity(
                "standard error of the noise scale, by the jackknife", "samples", over="noise_parts"
            ),
            "gradient_variance": Quantity("tr Sigma, variance of the gradients of single samples", squared),
            "gradient_squared": Quantity("unbiased estimate of |G|^2", squared),
            "distance": Quantity("distance from the weights at the start", "weight"),
            "distance_se": Quantity("standard error of the distance, 0 where it is exact", "weight", over="bucket"),
            "seconds": Quantity("time of this measurement", "s"),
            "training_seconds": Quantity("time of the training so far, without measurements", "s"),
            "skipped": Quantity("steps that were left out since the last row, to keep within the overhead"),
        },
        labels={"start_sketch": (Quantity("sketch of the weights at the start", "weight", ("bucket",)), sketch)},
        about={
            "step": Quantity("step", "updates"),
            "rank": Quantity("rank, from the largest"),
            "bucket": Quantity("bucket of the sketch; of few weights, the weight"),
        },
        facts={"noise_parts": len(parts_of_batch(subject, parts)), "noise_updates": UPDATES},
        grows=True,
    )


@dataclass(frozen=True)
class Place:
    """Where a run is stored, and from which step on."""

    path: Path
    start: int  # updates before this process
    overwrite: bool  # take the place of the last run of the same name


def opened(
    place: Place, subject: Subject, optimizer: Optimizer | None, begun: Start, settings: Mapping[str, Any], data: str
) -> series.SeriesWriter:
    """The writer of a run's series; where an earlier process began it, the start becomes that of the whole run.

    A run that starts at step 0 gets a series of its own, with a number behind its label where the file holds one of
    the same name; `overwrite` takes the place of the last of these. A run that goes on from a later step continues the
    last of them, without the rows after that step. `data` names the data; "" where the caller gave none.
    """
    path, start = place.path, place.start
    plan = plan_of(subject, settings["top"], settings["noise"], begun.sketch)
    identity = {name: settings[name] for name in ("top", "noise", "tol")} | _identity(subject, optimizer)
    attributes = {
        **attributes_of(subject), "data": data or subject.data.name,
        "protocol": _protocol(subject, optimizer, settings, data),
        "parameters": json.dumps(dict(settings), default=str), "versions": json.dumps(run_key.versions()),
        "schedule": RULE, **stored_headlines(HEADLINES),
    }  # fmt: skip

    def key(run: int) -> run_key.RunKey:
        """Of the run-th series with this identity."""
        text = json.dumps({MONITOR: identity, "run": run}, sort_keys=True, default=str)
        label = subject.label if run == 1 else f"{subject.label}-{run}"
        return run_key.RunKey(MONITOR, label, hashlib.sha256(text.encode()).hexdigest()[:10], plan, attributes)

    unmerged_journals.merge_orphans(path, reduce_of=lambda probe, parameters: None)
    runs = (groups.stored_group(path, MONITOR, key(run).digest) for run in itertools.count(1))
    known = list(itertools.takewhile(bool, runs))  # names of groups
    if start > 0 and not known:
        _log.warning("note: %s holds no series of this run (%s); it begins at step %d", path, subject.label, start)
    if start > 0 and known:
        begun.resume(np.asarray(groups.read_array(path, str(known[-1]), "start_sketch"), np.float64))
    another = not known or not (start > 0 or place.overwrite)
    return series.SeriesWriter(path, key(len(known) + another), after=start if start > 0 else -1)


def _identity(subject: Subject, optimizer: Optimizer | None) -> dict[str, Any]:
    """What tells a run from others in one file: its label, batch, parameters and optimiser, not its weights."""
    loss = getattr(subject.losses, "__wrapped__", subject.losses)
    own: list[Any] = [[type(part).__name__, {**part.defaults}] for part in parts_of(optimizer)]
    return {
        "label": subject.label,
        "loss": subject.traits.name or getattr(loss, "__qualname__", type(loss).__name__),
        "parameters": [[name, list(p.shape)] for name, p in subject.parameters.items()],
        "data": subject.data.sha256,
        "optimizer": None if not own else own[0] if len(own) == 1 else own,
    }


def _protocol(subject: Subject, optimizer: Optimizer | None, settings: Mapping[str, Any], data: str) -> str:
    """The protocol in words as it stands below figures."""
    rows, every, overhead = common_length(subject.batch(0)), int(settings["every"]), float(settings["overhead"])
    of = "" if rows is None else f" of {counted(rows, 'sample')}"
    unknown = " and ".join(type(part).__name__ for part in parts_of(optimizer) if rule_of(part).stability is None)
    parts = [
        data,
        f"one mini-batch{of} in evaluation mode",
        f"every {ordinal(every)} step" if every > 1 else "every step",
        f"at most {100 * overhead:.3g} % of the training time" if overhead < 1 else "",
        f"loss {subject.traits.name.rpartition('/')[2]}" if subject.traits.name else "",
        f"optimiser {name_of(optimizer)}" if optimizer is not None else "",
    ]
    return ", ".join(filter(None, parts)) + (f" (no threshold of {unknown} is known)" if unknown else "")


def ordinal(number: int) -> str:
    """A whole number as 1st, 2nd, 3rd, 4th, ..."""
    ends = {1: "st", 2: "nd", 3: "rd"} if number // 10 % 10 != 1 else {}
    return f"{number}{ends.get(number % 10, 'th')}"


class EarlyWarning:
    """Follows the second-order cost of the updates, actual - predicted change of the loss, which is about u'Hu / 2.

    Critical sharpness over its threshold is about this cost over -g'u. On mini-batches g'u has either sign, and single
    rows lie far above the threshold in sound trainings too; the cost does not depend on that sign.
    """

    def __init__(self) -> None:
        self._costs: deque[float] = deque(maxlen=EARLIER + IN_A_ROW)
        self._above = 0  # rows in a row

    def alarm(self, step: int, loss: float, actual: float, predicted: float) -> float:
        """1 where a spike is announced, 0 where not, NaN where that is not known: no update, or few rows before."""
        cost, earlier = actual - predicted, [*self._costs][:-IN_A_ROW]
        if not math.isfinite(cost):
            return math.nan
        self._costs.append(cost)
        if len(earlier) < LEAST:
            return math.nan
        self._above = self._above + 1 if cost > max(RISE * median(earlier), SHARE * (loss - actual)) else 0
        if self._above == IN_A_ROW:
            _log.warning(
                "warning: a loss spike may follow step %d: beside what their slope gains, the last %d measured updates "
                "cost more than %g %% of the loss and %g times as much as before; a lower learning rate may avoid it",
                step, IN_A_ROW, 100 * SHARE, RISE,
            )  # fmt: skip
        return float(self._above >= IN_A_ROW)
