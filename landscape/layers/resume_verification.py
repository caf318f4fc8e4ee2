"""Verify that forward passes of changed networks may resume in the middle, many changes with few passes."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

from landscape.data.structure import Nested, map_tensors, tensors_in
from landscape.discovery import graph, layer
from landscape.layers.partial_forward import Cache, ResumePoint, advance, bytes_of, flow_of, resumed
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights

K = TypeVar("K", bound=Hashable)
Change = Callable[[], AbstractContextManager[object]]  # changes the network while its block runs

MOST_KEPT = 2**27  # bytes of outputs of complete passes and before the points, which are compared later


def verified(subject: Subject, candidates: Mapping[K, tuple[ResumePoint, Change]]) -> dict[K, ResumePoint]:
    """Each point, or the start of the pass if resuming there gives another bit while the network is changed.

    Verified on a few samples, once per key and weights: a complete pass for every change, the passes before the points
    as one, and each pass from its point on. The masks of members count the calls of a pass, which is therefore run as
    a whole.
    """
    if subject.members:
        return dict.fromkeys(candidates, ResumePoint())
    known = _known(subject)
    pending = [(key, *candidate) for key, candidate in candidates.items() if key not in known]
    pending.sort(key=lambda one: one[1].operations)
    example, _ = subject.example()
    latest: Cache = {}
    while pending:
        with subject.evaluating():
            equal, latest = _equal(subject, example, [(point, change) for _, point, change in pending], latest)
        done, pending = pending[: len(equal)], pending[len(equal) :]
        known |= {key: point if same else ResumePoint() for (key, point, _), same in zip(done, equal, strict=True)}
    return {key: known[key] for key in candidates}


@once_per_weights
def _known(subject: Subject) -> dict[Hashable, ResumePoint]:
    """What has been verified so far, by key."""
    return {}


def _equal(
    subject: Subject, example: Nested, candidates: Sequence[tuple[ResumePoint, Change]], latest: Cache
) -> tuple[list[bool], Cache]:
    """For the first candidates, as many as `MOST_KEPT` allows, whether resumed passes equal complete ones.

    Points are reached from the cache of an earlier one, `latest`; that of the last of these candidates is returned.

    Modules may keep tensors as attributes, from which a resumed pass could take what it should not know. Passes are
    therefore resumed from the last point to the first, after a pass of other samples: that pass is the latest one of
    all the modules that a resumed pass skips, and is repeated where it is not.
    """
    complete: list[Any] = []
    caches: list[Cache | None] = []
    kept: dict[int, int] = {}  # bytes, by the ids of tensors
    for point, change in candidates:
        with change():
            complete.append(subject.outputs(example))
        try:
            latest = advance(subject.model, example, point, latest, subject.forward)
            caches.append(latest)
        except Exception:  # whatever a foreign model raises, the complete pass remains
            caches.append(None)
        kept |= {id(t): t.numel() * t.element_size() for t in tensors_in(complete[-1])} | bytes_of(latest)
        if sum(kept.values()) > MOST_KEPT:
            break
    flow = flow_of(subject)
    equal = [False] * len(complete)
    run: set[str] | None = None  # modules since the pass of other samples
    for i, (point, change) in reversed(list(enumerate(candidates[: len(complete)]))):
        cache = caches[i]
        if cache is None:
            continue
        skipped, others = _skipped_and_run(flow, point)
        try:
            if run is None or run & skipped:
                run = None
                subject.outputs(map_tensors(example, lambda t: t.flip(-1) if t.dim() > 1 else t))
                run = set()
            run |= others
            with change(), resumed(subject.model, cache):
                equal[i] = _same(complete[i], subject.outputs(example))
        except Exception:  # as above
            run = None
    return equal, latest


def _skipped_and_run(flow: graph.Flow, point: ResumePoint) -> tuple[set[str], set[str]]:
    """Names of the modules of which a pass from a point on skips a call, and of those of which it makes one."""
    skipped: set[str] = set()
    run: set[str] = set()
    for i, call in enumerate(flow.calls):
        around = (flow.calls[k] for k in flow.enclosing(i))
        cached = any(layer.Tap(outer.module, "output", outer.number) in point.skipped for outer in around)
        (skipped if cached else run).add(call.module)
    return skipped, run


def _same(one: Any, other: Any) -> bool:
    """Whether all values are equal; NaN equals NaN."""
    pairs = zip(tensors_in(one), tensors_in(other), strict=True)
    return all(torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True) for a, b in pairs)
