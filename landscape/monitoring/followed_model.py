"""The model that a monitor follows: its mini-batches, updates and what changes along them, learning rates."""

import math
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from landscape.data.structure import common_length
from landscape.monitoring.shards import Shards, own_parts
from landscape.options import OptionError, first_line
from landscape.products.vectors import joint_inner
from landscape.subject.loading.adaptation import refusing_broadcasts
from landscape.subject.loading.load import Objects, load_spec, unwrapped
from landscape.subject.spec import Spec
from landscape.subject.subject import Subject
from landscape.weight_space.optimizer_step import critical_step, loss_on
from landscape.weight_space.weights_in_place import WeightsInPlace


def rate_of(optimizer: Optimizer, parameters: Container[int]) -> float:
    """The learning rate of an update, whose threshold is 2 / rate: the largest of the groups that take part in it.

    These hold one of the `parameters`, by `id`, with a gradient; where none does, one without.
    """
    groups = [(g, [p for p in g["params"] if id(p) in parameters]) for g in optimizer.param_groups]
    made = [g for g, own in groups if any(p.grad is not None for p in own)]
    return max(float(g["lr"]) for g in made or [g for g, own in groups if own] or optimizer.param_groups)


class UpdatesSeen:
    """Watches every optimiser of PyTorch that holds a parameter of the model, by its hook for finished steps.

    Until one of them has made a step, and in a training without such an optimiser, the sums of the weights tell.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rates: list[float] | None = None  # of the steps since the last call, once such an optimiser has made one
        self._model, self._sums = model, _sums(model)
        own, parameters = weakref.ref(self), {id(p) for p in model.parameters()}

        def seen(optimizer: Optimizer, *_: Any) -> None:
            watcher = own()
            if watcher is not None and any(id(p) in parameters for g in optimizer.param_groups for p in g["params"]):
                watcher._rates = [*(watcher._rates or []), rate_of(optimizer, parameters)]

        self.forget = weakref.finalize(self, register_optimizer_step_post_hook(seen).remove)

    def since_last_call(self) -> tuple[bool, float]:
        """Whether there was an update since the last call, or the construction, and its learning rate, NaN if unknown.

        That of several optimisers is the largest.
        """
        if self._rates is None:
            before, self._sums = self._sums, _sums(self._model)
            return before != self._sums, math.nan
        rates, self._rates = self._rates, []
        return bool(rates), max(rates, default=math.nan)


def _sums(model: nn.Module) -> list[float]:
    """The sum of every trainable parameter."""
    sums = torch.stack([p.detach().double().sum() for p in model.parameters() if p.requires_grad])
    found: list[float] = getattr(sums, "full_tensor", lambda: sums)().tolist()  # of divided weights
    return found


def subject_of(module: nn.Module, loss: str | Callable[..., Any], batch: Any, label: str, other: Any) -> Subject:
    """The model on its one mini-batch, and on another one where that is given."""
    if batch is None:
        raise OptionError("Monitor needs batch=, one mini-batch as the training's loader gives it")
    rows = common_length(batch) or 1
    named, made = (loss, None) if isinstance(loss, str) else ("", loss)
    spec = Spec(batch_size=rows, samples="all", loss=named)
    objects = Objects(module, [batch] if other is None else [batch, other], made, noting=False)
    subject = load_spec(spec, objects, label=label or type(module).__name__)
    _ = subject.parameters  # raises for complex ones
    return subject


def check_other(subject: Subject) -> None:
    """Refuse a second mini-batch that the loss does not take, before the training."""
    if len(subject.batches) < 2:
        raise ValueError("other= has no samples; give another mini-batch")
    try:
        with refusing_broadcasts():
            loss = loss_on(subject, 1)
    except Exception as error:  # whatever the caller's model and loss raise
        reason = first_line(error)
        raise ValueError(
            f"other= cannot be measured with this model and loss ({reason}); give a mini-batch of the form and the "
            "classes of batch="
        ) from None
    if not math.isfinite(loss):
        raise ValueError("the loss of other= is not a finite number; give another mini-batch")


def followed(model: nn.Module) -> nn.Module:
    """The module inside its wrappers, with parameters that can change."""
    if not isinstance(model, nn.Module):
        raise OptionError(f"Monitor measures a module, got a {type(model).__name__}; give the model that is trained")
    module = unwrapped(model, divided=True)
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(
            f"all parameters of the model ({type(module).__name__}) are frozen: there is nothing to follow"
        )
    return module


NEAR = 8.0  # updates, within which the parabola through three losses says where the loss is back at its start
BESIDE = 1e-3  # of an update, where its tangent stands for the loss


class AlongUpdate:
    """The last update, as the difference of the weights before and after it, whatever made it.

    With w the weights before the update u, the losses at w and w + u and the gradient at w + u give the parabola along
    u, and with it the change to first order, g'u. Critical sharpness 2 / (c eta) (Kalra et al., arXiv 2601.16979, c u
    the shortest multiple of the update that ends above the start) is then searched from the end of the parabola or,
    where that is far, from the last critical rate: two or three passes where that is right. Relative critical sharpness
    is that of a second mini-batch along the same update, of which a loss at w - u stands in for the gradient.
    """

    def __init__(self, subject: Subject, shards: Shards) -> None:
        self._subject, self._shards = subject, shards
        self._before: dict[str, Tensor] = {}
        self._norm = math.nan  # of the update
        self._critical: dict[int, float] = {}  # the last critical learning rate by mini-batch

    def begin(self, parameters: Mapping[str, Tensor]) -> None:
        """Keep the weights before an update."""
        self._before = {name: p.clone() for name, p in own_parts(parameters).items()}

    def taken(self) -> dict[str, Tensor]:
        """The update since then, which is kept no longer; empty where there was none."""
        before, self._before = self._before, {}
        parameters = own_parts(self._subject.parameters)
        if before.keys() != parameters.keys():
            return {}
        update = {name: torch.sub(p, before[name], out=before[name]) for name, p in parameters.items()}
        self._norm = self._shards.norm(update.values())
        return update if 0 < self._norm < math.inf else {}

    def values(
        self, update: Mapping[str, Tensor], rate: float, end: float, gradient: Sequence[Tensor]
    ) -> dict[str, float]:
        """The quantities of an update made with a learning rate, by loss and gradient after it; none without one."""
        if not update:
            return {}
        rise = self._shards.total(joint_inner(list(update.values()), gradient))
        values = {"update_norm": self._norm, **self._along(update, rate, 0, end, rise)}
        if len(self._subject.batches) > 1:
            other = self._along(update, rate, 1, self._shards.mean(loss_on(self._subject, 1)))
            values["relative_critical_sharpness"] = other["critical_sharpness"]
        return values

    def _along(
        self, update: Mapping[str, Tensor], rate: float, batch: int, end: float, rise: float | None = None
    ) -> dict[str, float]:
        """The quantities of one mini-batch by the loss after the update and its derivative along it there, if known."""
        passes = 1  # that of the end
        with torch.no_grad(), WeightsInPlace(self._subject, update) as weights:

            def at(multiple: float) -> float:
                nonlocal passes
                if multiple == 1.0:
                    return end
                passes += 1
                weights.translate((update, multiple - 1.0))
                return self._shards.mean(loss_on(self._subject, batch))

            start = at(0.0)
            change = end - start
            # the change over c at c = -1, or just beyond c = 1, where the tangent there gives it
            known = (-1.0, start - at(-1.0)) if rise is None else (1 + BESIDE, change + BESIDE * (rise - change))
            slope = (change + known[1]) / 2 if rise is None else 2 * change - rise
            near = 0 < -slope < NEAR * (change - slope)
            guess = math.nan if near or not rate else self._critical.get(batch, math.nan) / rate
            found = critical_step(lambda c: at(c) - start, slope, known=known, guess=guess)
        if found.converged:
            self._critical[batch] = found.multiple * rate
        return {
            "predicted_change": slope, "actual_change": change, "critical_passes": passes,
            "critical_multiple": found.multiple if found.converged else math.nan,
            "critical_sharpness": 2 / (found.multiple * rate) if found.converged and rate > 0 else math.nan,
        }  # fmt: skip
