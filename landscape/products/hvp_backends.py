"""Select the backend of Hessian-vector products: the requested one, or the faster in a short benchmark."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from landscape.data.memory import available_on
from landscape.options import first_line
from landscape.products import kinks as patterns
from landscape.products import stored_hessian
from landscape.products.chunked_cross_entropy import tokens_at_once
from landscape.products.hessian_product import out_of_memory
from landscape.products.hvp_reference import (
    Costs,
    PlannedProducts,
    Reference,
    agrees,
    flops,
    learn,
    predicted,
    reason,
    reference,
    require_agreement,
    seconds_of,
)
from landscape.products.kinks import activation_pattern, check_pattern, compact_bytes, has_kinks
from landscape.products.memory_forecast import SHARE, forecast, planned_micro_batches
from landscape.products.micro_batches import MicroBatching
from landscape.products.operator import Curvature, Operator
from landscape.products.parameter_selection import matching
from landscape.products.traced_hessian import TracedHessian, trace
from landscape.subject.device import too_narrow
from landscape.subject.loading.checks import refuse_training
from landscape.subject.members import unpositioned
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights

# double-backward: through a kept graph of the gradient; traced: a recorded forward-over-reverse graph
Hvp = Literal["auto", "double-backward", "traced"]
Kinks = Literal["double", "single"]
CODES: tuple[str, ...] = get_args(Hvp)[1:]  # a mini-batch stores the position of its backend in this list
CODES_MEANING = f"how products were made: {', '.join(f'{i} {hvp}' for i, hvp in enumerate(CODES))}"
HVP_HELP = "backend of Hessian products, same to rounding: double-backward, traced, or auto: the faster one"
KINKS_HELP = "precision of the activation pattern (ReLU, max pooling): double, by one more pass, or single"
BATCHED = 8  # mini-batches per product on a GPU; which number is the fastest is not measured
FILLING = 2e11  # operations of a product of one mini-batch from which it fills a GPU: an estimate
WORTH = 10.0  # times as long as recording a graph everything planned takes, where a second layout is tried
ONE_BATCH = PlannedProducts()

log = logging.getLogger(__name__)


def curvature(
    subject: Subject,
    parameters: Mapping[str, Tensor],
    hvp: Hvp,
    *,
    planned: PlannedProducts = ONE_BATCH,
    operator: Operator = "hessian",
    kinks: Kinks = "single",
    batched: bool = False,
) -> Curvature:
    """Prepare the planned products; those of other matrices than the Hessian use double backward.

    `auto` predicts the time of the traced graph from that of double backward on the first mini-batch, prepares it only
    if it is predicted to be faster for all that is planned, measures it, and takes the better. With `batched` a GPU may
    take several mini-batches in one product. Fixing the activation pattern (`kinks` double) costs a forward pass
    in double precision per mini-batch; where every product passes over all of them, their patterns are kept if they fit
    into memory, else they are not fixed. `auto` takes double backward for a language model whose logits are computed
    in chunks, because a recorded graph holds them all. Where a mini-batch is predicted to exceed the free memory, or
    the limit that was given, double backward takes it in parts.

    Raises:
        ValueError: nothing keeps within the limit, the backend does not work with this model, or the model is in
            training mode.
    """
    refuse_training(subject.model)
    fixed = kinks == "double" and _can_fix_pattern(subject)
    if fixed and planned.prepared > planned.batches:
        fixed = _patterns_fit(subject, planned.batches)
    parts = planned_micro_batches(subject, parameters, planned.stored * planned.at_once)
    kept = Curvature(subject, parameters, "double-backward", operator, fixed, _micro_batching=MicroBatching(parts))
    if operator != "hessian" or hvp == "double-backward":
        return kept
    if hvp == "auto" and (chunk := tokens_at_once(subject)):
        log.debug("Hessian products: kept, with the cross-entropy over %d tokens at a time", chunk)
        return kept
    if hvp == "auto" and parts > 1:
        log.debug("Hessian products: kept, as a mini-batch does not fit into memory as a whole")
        return kept
    together = mini_batches_per_product(subject, parameters, planned) if batched else 0
    if hvp == "auto":
        return _faster(subject, parameters, fixed, together, planned)
    return _prepared(subject, parameters, fixed, together, _layouts(subject)[0])


def autotuned(subject: Subject, pattern: str, hvp: Hvp, **options: Any) -> dict[str, str]:
    """The choice of a probe's `autotune`: the backend that `auto` picks; empty if one was requested."""
    if hvp != "auto":
        return {}
    return {"hvp": curvature(subject, matching(subject.parameters, pattern), hvp, **options).hvp}


@once_per_weights
def _can_fix_pattern(subject: Subject) -> bool:
    """Whether the network has kinks in single precision, and is the same function in double."""
    if subject.dtype != torch.float32:
        return False
    inputs, _ = subject.batch(0)
    try:
        if subject.traits.needs_graph:
            raise ValueError("it differentiates inside its forward pass")
        if not has_kinks(subject.model, inputs, subject.forward):
            return False
        pattern = activation_pattern(subject.model, inputs, subject.forward)
        check_pattern(subject.model, inputs, pattern, subject.forward)
    except Exception as error:  # whatever a model's own code raises
        if isinstance(error, RuntimeError | MemoryError) and out_of_memory(error):
            return True  # micro-batches may fit
        why = first_line(error)
        log.info("the activation pattern stays that of single precision: the model cannot be run in double (%s)", why)
        return False
    return True


@once_per_weights
def _patterns_fit(subject: Subject, batches: int) -> bool:
    """Whether the activation patterns of so many mini-batches may be kept in memory."""
    inputs, _ = subject.batch(0)
    needed = batches * compact_bytes(activation_pattern(subject.model, inputs, subject.forward))
    if needed > patterns.MOST_BYTES:
        log.info(
            "the activation pattern stays that of single precision: those of %d mini-batches would take %.1f GiB, more "
            "than %.1f GiB; with at most --samples %d it is fixed", batches, needed / 2**30,
            patterns.MOST_BYTES / 2**30, max(int(len(subject) * patterns.MOST_BYTES / needed), 1),
        )  # fmt: skip
    return needed <= patterns.MOST_BYTES


@dataclass
class _Known:
    """What is known so far of the traced graphs of some parameters."""

    tried: dict[int, tuple[Curvature, Costs] | None] = field(default_factory=dict)  # by mini-batches per product
    said: str = ""


@once_per_weights
def _known(subject: Subject, parameters: Mapping[str, Tensor], fixed: bool) -> _Known:
    return _Known()


@once_per_weights
def _predicted(subject: Subject, parameters: Mapping[str, Tensor], fixed: bool, together: int) -> Costs:
    """The costs of the traced graph before it is prepared."""
    expected = reference(subject, parameters, fixed)
    stored = not together and stored_hessian.is_stored(stored_hessian.key_of(subject, parameters, fixed))
    return predicted(expected.costs, expected.functions, subject.device, batched=bool(together), stored=stored)


def _faster(
    subject: Subject, parameters: Mapping[str, Tensor], fixed: bool, together: int, planned: PlannedProducts
) -> Curvature:
    """Double backward, or the traced graph where that is predicted to be faster and proves so."""
    expected, known = reference(subject, parameters, fixed), _known(subject, parameters, fixed)
    costs = {"double-backward": expected.costs}
    if together in known.tried or _predicted(subject, parameters, fixed, together).faster(expected.costs, planned):
        if together not in known.tried:
            known.tried[together] = _measured(subject, parameters, fixed, together, planned)
        tried = known.tried[together]
        costs |= {} if tried is None else {"traced": tried[1]}
    else:
        tried, costs["traced"] = None, _predicted(subject, parameters, fixed, together)
    traced = tried is not None and tried[1].faster(expected.costs, planned)
    if tried is not None and not traced:
        _forget(tried[0])
    said = reason("traced" if traced else "double-backward", costs, planned)
    if said != known.said:
        log.debug("Hessian products: %s", said)
    known.said = said
    return tried[0] if tried is not None and traced else expected.curved


def _measured(
    subject: Subject, parameters: Mapping[str, Tensor], fixed: bool, together: int, planned: PlannedProducts
) -> tuple[Curvature, Costs] | None:
    """Prepare the traced graph and measure it, in the faster layout; None if it does not work with this model.

    Another layout is tried where all that is planned takes far longer than to record it.
    """
    expected, best = reference(subject, parameters, fixed), None
    for layout in _layouts(subject)[: 1 if together else None]:
        if best is not None and best[1].total(planned) < WORTH * _predicted(subject, parameters, fixed, 0).start:
            break
        try:
            made = _prepared(subject, parameters, fixed, together, layout)
            costs = Costs(0.0, *seconds_of(replace(made, patterns=expected.patterns)))
        except Exception as error:  # whatever a model's code or a pass over its graph raises
            log.debug("no traced Hessian products: %s", first_line(error))
            continue
        if best is None or costs.faster(best[1], planned):
            if best is not None:
                _forget(best[0])
            best = made, costs
        else:
            _forget(made)
    if best is not None:
        learn(subject.device, expected.costs, best[1], batched=bool(best[0].batched))
    return best


def _forget(loser: Curvature) -> None:
    """Free what a backend that is not taken has recorded on the device."""
    if loser._traced is not None:
        loser._traced.forget()


def convolves(model: nn.Module) -> bool:
    """Whether a model slides overlapping kernels over maps; cutting an image into patches does not count."""
    convolutions = (m for m in model.modules() if isinstance(m, nn.Conv2d))
    return any(k > s for m in convolutions for k, s in zip(m.kernel_size, m.stride, strict=True))


def mini_batches_per_product(subject: Subject, parameters: Mapping[str, Tensor], planned: PlannedProducts) -> int:
    """How many mini-batches a traced graph takes at once; 0: one by one.

    As on a CPU, where several do not fit into memory, where one of them leaves no part of the device idle, and where
    they make grouped convolutions, which take three times as long as the single ones (an H200, 8 groups).
    """
    few = planned.batches < 2 * BATCHED
    if subject.device.type == "cpu" or few or flops(subject) > FILLING or convolves(subject.model):
        return 0
    needed = BATCHED * forecast(subject, parameters, planned.stored).total(1)
    return BATCHED if needed <= SHARE * available_on(subject.device) else 0


def _prepared(
    subject: Subject, parameters: Mapping[str, Tensor], fixed: bool, together: int, layout: torch.memory_format
) -> Curvature:
    """The traced graph; for one mini-batch at a time where its operations do not take several."""
    if together:
        try:
            return _traced(subject, parameters, fixed, together, torch.contiguous_format)
        except Exception as error:  # whatever a model's code or its batched operations raise
            log.debug("one mini-batch at a time: %s", first_line(error))
    return _traced(subject, parameters, fixed, 0, layout)


@once_per_weights
def _traced(
    subject: Subject, parameters: Mapping[str, Tensor], fixed: bool, together: int, layout: torch.memory_format
) -> Curvature:
    """The traced graph for the first mini-batch's shape; on a CPU in torch's interpreter, where that runs it.

    One that an earlier run left on disk is found by what it was made of, before the model is traced, and is used if its
    product is that of double backward.

    Raises:
        ValueError: the model cannot be traced.
    """
    inputs, targets = subject.batch(0)
    if not isinstance(unpositioned(inputs), Tensor) or not isinstance(targets, Tensor):
        raise ValueError("--hvp traced needs one tensor as input and one as target; use --hvp double-backward")
    expected = reference(subject, parameters, fixed)
    interpreted = subject.device.type == "cpu" and not together
    key = stored_hessian.key_of(subject, parameters, fixed) if interpreted else ""
    loaded = stored_hessian.load(subject, parameters, layout, key)
    if loaded is not None and agrees(candidate := _with_graph(expected, loaded), expected):
        return candidate
    graph = _graph(subject, parameters, fixed, together, layout)
    if interpreted and agrees(candidate := _with_graph(expected, faster := graph.interpreted()), expected):
        stored_hessian.store(subject, faster, key)
        return candidate
    require_agreement(candidate := _with_graph(expected, graph), expected)
    return candidate


def _layouts(subject: Subject) -> tuple[torch.memory_format, ...]:
    """Memory formats worth a trial: channels last is faster for convolutions on a CPU, and may be elsewhere."""
    on_cpu = subject.device.type == "cpu"
    if not convolves(subject.model) or (on_cpu and too_narrow(subject.model)):
        return (torch.contiguous_format,)
    return (torch.channels_last,) if on_cpu else (torch.contiguous_format, torch.channels_last)


@once_per_weights
def _graph(
    subject: Subject, parameters: Mapping[str, Tensor], fixed: bool, together: int, layout: torch.memory_format
) -> TracedHessian:
    inputs, targets = subject.batch(0)
    assert isinstance(targets, Tensor)
    return trace(
        subject.model, subject.losses, parameters, inputs, targets, forward=subject.forward,
        pattern=reference(subject, parameters, fixed).pattern() if fixed else (),
        channels_last=layout is torch.channels_last, batched=together,
    )  # fmt: skip


def _with_graph(expected: Reference, traced: TracedHessian) -> Curvature:
    return replace(expected.curved, hvp="traced", _traced=traced, _micro_batching=MicroBatching())
