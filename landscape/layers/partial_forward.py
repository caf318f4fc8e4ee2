"""Resume a forward pass in the middle, where module calls before a point return cached outputs; and verify that."""

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from landscape.data.memory import available, available_on
from landscape.data.structure import Forward, Nested, call_model, map_tensors, tensors_in
from landscape.discovery import graph, layer
from landscape.layers.forward_hooks import hooked_calls
from landscape.subject.subject import Subject
from landscape.subject.weights_cache import once_per_weights

MOST_KEPT = 2**30  # bytes of cached outputs of one mini-batch
Cache = Mapping[layer.Tap, Any]  # outputs of module calls; only the shapes of those that nothing reads again


@dataclass(frozen=True)
class ResumePoint:
    """A point of a forward pass, and the module calls before it that need not run again."""

    operations: int = 0  # number of operations before it
    skipped: frozenset[layer.Tap] = frozenset()  # calls that have finished by then, outermost ones only
    live: frozenset[layer.Tap] = frozenset()  # those of them whose outputs are read afterwards


@once_per_weights
def flow_of(subject: Subject) -> graph.Flow:
    """A recorded pass of a few samples."""
    return graph.record(subject.model, subject.example()[0], subject.forward)


def resume_point(flow: graph.Flow, replaced: Sequence[layer.Tap], bypassed: Sequence[layer.Tap]) -> ResumePoint:
    """The end of the first of the calls whose outputs will be replaced; bypassed ones, by their first input."""
    at = {layer.Tap(call.module, "output", call.number): i for i, call in enumerate(flow.calls)}
    enclosing = {outer for tap in replaced for outer in flow.enclosing(at[tap])} - {at[tap] for tap in replaced}
    first = min((at[tap] for tap in replaced), key=lambda i: (flow.calls[i].stop, i))
    point, skipped = flow.calls[first].stop, _finished(flow, flow.calls[first].stop, range(first + 1), enclosing)
    return _point(flow, point, skipped, {flow.calls[at[tap]].reads[0] for tap in bypassed if at[tap] in skipped})


def resume_before(flow: graph.Flow, call: int) -> ResumePoint:
    """The start of a call, a position in `flow.calls`, which runs again with changed weights."""
    point = flow.calls[call].start
    return _point(flow, point, _finished(flow, point, range(call), set(flow.enclosing(call))), set())


def _finished(flow: graph.Flow, point: int, calls: Iterable[int], enclosing: Container[int]) -> set[int]:
    """Those of some calls that have finished after a number of operations, outermost ones only."""
    found: set[int] = set()
    for i in calls:
        call = flow.calls[i]
        if call.stop <= point and i not in enclosing and found.isdisjoint(flow.enclosing(call.parent)):
            found.add(i)
    return found


def _point(flow: graph.Flow, point: int, skipped: Set[int], read: Set[graph.Node]) -> ResumePoint:
    """The resume point that skips some calls; `read`: nodes whose values are needed beside those read later."""
    needed = set(flow.calls[0].writes) | read
    made = set()
    for operation in flow.operations:
        if skipped.isdisjoint(flow.enclosing(operation.call)):
            needed |= set(operation.reads)
        else:
            made |= set(operation.writes)
    given = {i: set(flow.calls[i].writes) & needed for i in skipped}
    if (needed & made) - set().union(*given.values()):
        return ResumePoint()  # a tensor bypasses the modules' outputs, by an attribute or a closure
    taps = {i: layer.Tap(flow.calls[i].module, "output", flow.calls[i].number) for i in skipped}
    return ResumePoint(point, frozenset(taps.values()), frozenset(taps[i] for i in skipped if given[i]))


def advance(model: nn.Module, inputs: Nested, point: ResumePoint, cache: Cache, forward: Forward = call_model) -> Cache:
    """The cache of a resume point, from that of an earlier one for the same inputs: runs only what lies between.

    An earlier cache that lacks an output which is read after the point is not used. Outputs that nothing reads after
    the point are forgotten. The caller switches off gradients.

    Raises:
        LookupError: the model does not make the calls that were recorded.
    """
    if any(isinstance(t, _ShapeOnly) for tap in point.live & cache.keys() for t in tensors_in(cache[tap])):
        cache = {}
    missing = point.skipped - cache.keys()
    found = point.skipped & cache.keys()
    outputs = {tap: cache[tap] if tap in point.live else map_tensors(cache[tap], _shape_only) for tap in found}
    if not missing:
        return outputs

    def keep(tap: layer.Tap, args: tuple[Any, ...], output: Any) -> None:
        if tap in missing:
            outputs[tap] = map_tensors(output, torch.clone if tap in point.live else _shape_only)
            if len(outputs) == len(point.skipped):
                raise _Reached

    sides = {(tap.module, tap.side) for tap in missing}
    try:
        with resumed(model, cache), hooked_calls(model, sides, keep):
            forward(model, inputs)
    except _Reached:
        pass
    if len(outputs) < len(point.skipped):
        raise LookupError("the model does not make the module calls that were recorded")
    return outputs


@contextmanager
def resumed(model: nn.Module, cache: Cache) -> Iterator[None]:
    """Run the block with the cached calls returning their cached outputs; the model is restored, whatever happens."""
    modules = dict(model.named_modules())
    counts: dict[str, int] = {}

    def cached_forward(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = counts[name] = counts.get(name, -1) + 1
            tap = layer.Tap(name, "output", number)
            return map_tensors(cache[tap], _restored) if tap in cache else forward(*args, **kwargs)

        return call

    names = {tap.module for tap in cache}
    own = {name: vars(modules[name]).get("forward") for name in names}
    start = model.register_forward_pre_hook(lambda module, args: counts.clear())
    try:
        for name in names:
            modules[name].forward = cached_forward(name, modules[name].forward)
        yield
    finally:
        start.remove()
        for name in names:
            if own[name] is not None:
                modules[name].forward = own[name]
            elif "forward" in vars(modules[name]):
                del modules[name].forward


class _Reached(Exception):
    """Ends a forward pass once the resume point is reached."""


class _ShapeOnly(Tensor):
    """A tensor on the meta device that remembers the device of the original."""

    original_device: torch.device


def _shape_only(tensor: Tensor) -> Tensor:
    if isinstance(tensor, _ShapeOnly):
        return tensor
    shape = torch.empty_like(tensor, device="meta").as_subclass(_ShapeOnly)
    shape.original_device = tensor.device
    return shape


def _restored(tensor: Tensor) -> Tensor:
    """A copy, as later operations may work in place; of a mere shape NaN, which would show if anything read it."""
    if isinstance(tensor, _ShapeOnly):
        value = torch.nan if tensor.is_floating_point() else 0
        return torch.full((), value, dtype=tensor.dtype, device=tensor.original_device).expand(tensor.shape)
    return tensor.clone()


def bytes_of(cache: Cache) -> dict[int, int]:
    """Sizes of the cached tensors by their ids, as several caches may share one; mere shapes take no memory."""
    tensors = (tensor for tensor in tensors_in(list(cache.values())) if not isinstance(tensor, _ShapeOnly))
    return {id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}


class Prefixes:
    """Cached outputs before the resume points of one mini-batch at a time, which several changes of a network share.

    Those of all points are kept as long as they fit into an eighth of the free memory and `MOST_KEPT`; else a pass
    starts from the latest point before that is kept.
    """

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.release()

    def release(self) -> None:
        self._batch = -1
        self._kept: dict[ResumePoint, Cache] = {}
        self._latest: tuple[ResumePoint, Cache] = (ResumePoint(), {})
        self._seen: set[int] = set()  # ids of tensors that are kept
        self._free = 0  # bytes

    def at(self, batch: int, point: ResumePoint) -> Cache:
        """The cache of a point for mini-batch `batch`."""
        if batch != self._batch:
            self.release()
            self._batch = batch
            device = self._subject.device
            free = available_on(device) if device.type == "cuda" else available()
            self._free = min(free // 8, MOST_KEPT)  # other workers may share the memory
        if point in self._kept:
            return self._kept[point]
        before = [known for known in (*self._kept.items(), self._latest) if known[0].operations <= point.operations]
        _, start = max(before, key=lambda known: known[0].operations, default=(point, {}))
        inputs, _ = self._subject.batch(batch)
        with self._subject.evaluating():
            cache = advance(self._subject.model, inputs, point, start, self._subject.forward)
        self._latest = (point, cache)
        new = {tensor: size for tensor, size in bytes_of(cache).items() if tensor not in self._seen}
        needed = sum(new.values())
        if needed <= self._free:
            self._free -= needed
            self._seen.update(new)
            self._kept[point] = cache
        return cache


K = TypeVar("K", bound=Hashable)
Change = Callable[[], AbstractContextManager[object]]  # changes the network while its block runs

MOST_COMPARED = 2**27  # bytes of outputs of complete passes and before the points, which are compared later


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
    """For the first candidates, as many as `MOST_COMPARED` allows, whether resumed passes equal complete ones.

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
        if sum(kept.values()) > MOST_COMPARED:
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
