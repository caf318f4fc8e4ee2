"""Find the layers of any network from what it computes: points of its residual stream, with their kind and grid.

No model is known by name. One recorded forward pass shows every addition of two branches with a common start; the
branch with the heavy operations is a residual block, attention or convolution decides its kind, and the sum is a point
of the residual stream.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from torch import nn

from landscape.data.structure import Forward, Nested, call_model
from landscape.discovery import residual_blocks, sequential
from landscape.discovery.attention import attention_of
from landscape.discovery.graph import ADDITIONS, HEAVY, POOLING, Call, Flow, Node, Operation, few, record
from landscape.discovery.layer import Branch, Kind, Layer, Tap
from landscape.discovery.token_grid import layout_of, order_of, smaller, starts_linear


def discover(model: nn.Module, example: Nested, forward: Forward = call_model) -> list[Layer]:
    """Every layer of a network in order of execution, from one forward pass of an example, such as (N, C, H, W).

    In a network without residual blocks the layers are its convolutions, linear layers and poolings. Several networks
    side by side have a depth axis each.

    Raises:
        ValueError: no layer was found; names --layers.
    """
    flow = record(model, few(example), forward)
    blocks = residual_blocks.residuals(flow)
    weights = [position for position, operation in enumerate(flow.operations) if operation.weight]
    networks = residual_blocks.side_by_side(flow, [block.position for block in blocks]) or residual_blocks.side_by_side(
        flow, weights
    )
    found: list[Layer] = []
    for network in networks or flow.calls[:1]:
        own = _inside(network, blocks) or _inside(network, residual_blocks.residuals(flow, least=2))
        operations = range(network.start, network.stop) if networks else range(len(flow.operations))
        found += _network_layers(flow, own, network) if own else staged(_sequential_layers(flow, operations))
    return found


def _inside(network: Call, blocks: Sequence[residual_blocks.Residual]) -> list[residual_blocks.Residual]:
    return [block for block in blocks if network.start <= block.position < network.stop]


def _network_layers(flow: Flow, blocks: Sequence[residual_blocks.Residual], network: Call) -> list[Layer]:
    layers: list[Layer] = []
    before: list[int] = []  # of every layer the one that it follows, -1 for the input
    start: Node = network.reads[0] if network.module and network.reads else 0
    sums = {start: -1}  # their layers

    def follow(at: int, new: Sequence[Layer]) -> int:
        """Put layers behind another one, those that are not there yet; the position of the last."""
        for layer in new:
            same = ((i, (before[i], other.name, other.kind), other.tap) for i, other in enumerate(layers))
            key = at, layer.name, layer.kind
            known = next((i for i, other, tap in same if tap == layer.tap or other == key), None)
            if known is None:
                before.append(at)
                layers.append(layer)
            at = len(layers) - 1 if known is None else known
        return at

    for residual in blocks:
        position = max((node for node in sums if flow.ancestors[residual.fork] >> node & 1), default=start)
        between = _layers_between(flow, network, position, residual.fork, first=position == start, following=residual)
        sums[residual.sum] = follow(sums[position], [*between, _residual_layer(flow, residual)])
    last = blocks[-1].sum
    output = next(iter(network.writes), len(flow.shapes) - 1)
    behind = _blocks_without_skip(flow, last, residual_blocks.blocks_behind(flow, last, output))
    follow(sums[last], [*behind, *_blurs(flow, network, last, output)])
    return staged(layers, before)


def _residual_layer(flow: Flow, residual: residual_blocks.Residual) -> Layer:
    call = flow.operations[residual.position].call
    inside = [flow.operations[i] for i in residual.inside]
    kind = residual_blocks.kind_of(flow, residual.inside)
    direct = residual_blocks.direct_calls(flow, call, residual)
    tap, node, at_block = residual_blocks.tap_of(flow, residual, call)
    block = flow.calls[call].module
    only_addition = sum(r.name in ADDITIONS and r.call == call and len(r.reads) == 2 for r in flow.operations) == 1
    name = residual_blocks.branch_name(flow, direct, kind)
    if name is None or (at_block and only_addition and kind != "msa" and residual_blocks.count_heavy(flow, direct) > 1):
        name = block or (direct[-1].module if direct else tap.module)
    layer = layer_at(flow, node, tap, kind, name, linear=starts_linear(inside, flow.shapes[node]))
    start = flow.samples_first(residual.fork)
    _, before, _ = layout_of(start, residual.fork, starts_linear(inside, flow.shapes[residual.fork]))
    return replace(
        layer,
        reduces=smaller(layer.grid, before),
        branch=Branch(residual_blocks.leaves(flow, residual), residual_blocks.branch_end(residual, direct)),
        attention=attention_of(flow, residual.inside, layer.grid, layer.prefix),
    )


def layer_at(flow: Flow, node: Node, tap: Tap, kind: Kind, name: str, *, linear: bool) -> Layer:
    """The layer of a recorded tensor, as yet without stage, depth and branch."""
    second, flow = flow.second >> node & 1, flow.samples_first(node)
    layout, grid, prefix = layout_of(flow, node, linear)
    shape, images = flow.shapes[node][1:], len(flow.shapes[0]) == 4
    order = order_of(flow, node, layout, grid, prefix)
    rows = flow.shapes[node][0] // flow.shapes[0][0]
    found = Layer(name, kind, 0, 0.0, False, tap, shape, layout, grid, prefix)
    return replace(found, samples_axis=second, rows_per_image=rows, order=order, of_images=images)


def _sequential_layers(flow: Flow, operations: range) -> list[Layer]:
    """Layers of a network without residual blocks, which consists of some operations."""
    layers: list[Layer] = []
    for segment in sequential.segments(flow, operations):
        taps = ((_tap_at(flow, node), node) for node in segment.nodes)
        tap, node = next(((tap, node) for tap, node in taps if tap is not None), (None, 0))
        if tap is None:
            continue
        layer = layer_at(flow, node, tap, segment.kind, segment.name or tap.module, linear=segment.linear)
        attending = [flow.maker[segment.nodes[-1]]] if segment.kind == "msa" else []
        attention = attention_of(flow, attending, layer.grid, layer.prefix)
        if layer.grid == (1, 1) and not sequential.is_whole_stream(flow, node, operations.stop):  # a gate of channels
            continue
        reduces = bool(layers) and smaller(layer.grid, layers[-1].grid)
        branch = Branch(segment.leaves, None, skip=False)
        layers.append(replace(layer, reduces=reduces, branch=branch, attention=attention))
    if not layers:
        raise ValueError(
            "this model has no layers: no residual block, and no convolution or linear layer before its last one; "
            "name the modules to measure with --layers REGEX[:KIND]"
        )
    return layers


def _layers_between(
    flow: Flow, network: Call, start: Node, end: Node, *, first: bool, following: residual_blocks.Residual
) -> list[Layer]:
    """Layers before a residual block: the stem before the first, pooling, patch merging, blocks without skip."""
    inside = [flow.operations[i] for i in flow.between(start, end)]
    linear = starts_linear([flow.operations[i] for i in following.inside], flow.shapes[following.fork])
    blocks, before = residual_blocks.blocks_without_skip(flow, start, end), start
    layers = []
    if first:
        pool = next((o for o in inside if o.name in POOLING and _shrinks(flow, o.reads[0], o.writes[0], linear)), None)
        point = pool.reads[0] if pool else _stem_end(flow, following, end)
        heavy = next((o for o in inside if o.name in HEAVY), None)
        blocks = [block for block in blocks if heavy and flow.calls[block].start > inside.index(heavy)]
        if blocks and pool is None:
            point = flow.calls[blocks[0]].reads[0]
        before = pool.writes[0] if pool else point
        if not flow.indices >> point & 1:
            layers.append(_branchless(flow, point, "stem", linear, flow.calls[heavy.call].module if heavy else ""))
        if pool is not None:
            layers.append(_branchless(flow, pool.writes[0], "subsample", linear, flow.calls[pool.call].module))
    elif not blocks and inside and _shrinks(flow, start, end, linear):
        heavy = _resizing(flow, inside, end, linear)
        inner = [c for c in flow.enclosing(heavy.call) if residual_blocks.lies_between(flow, flow.calls[c], start, end)]
        name = flow.calls[inner[-1] if inner else heavy.call].module
        layers.append(_branchless(flow, end, "subsample", linear, name))
    if not first:
        layers = [*_blurs(flow, network, start, end), *layers]
    return [*layers, *_blocks_without_skip(flow, before, blocks)]


def _resizing(flow: Flow, inside: list[Operation], end: Node, linear: bool) -> Operation:
    """The operation that gives a map the size it has at the end: a strided convolution, say, and no gate before it."""
    several = [o for o in inside if o.name in HEAVY | POOLING and not o.blurs]
    grid = layout_of(flow, end, linear)[1]
    sized = (
        o for o in several
        if layout_of(flow, o.writes[0], linear)[1] == grid and _shrinks(flow, o.reads[0], o.writes[0], linear)
    )  # fmt: skip
    return next(sized, several[0] if several else inside[-1])


def _blocks_without_skip(flow: Flow, before: Node, blocks: Sequence[int]) -> list[Layer]:
    """The layers of calls behind a node; one that follows another may get its smaller map from what lies between."""
    layers = []
    for call in (flow.calls[block] for block in blocks):
        start = before if flow.ancestors[call.reads[0]] >> before & 1 else call.reads[0]
        inside, before = range(call.start, call.stop), call.writes[0]
        last = [flow.operations[i] for i in inside if flow.operations[i].weight][-1].name == "linear"
        layer = _branchless(flow, before, residual_blocks.kind_of(flow, inside), last, call.module)
        attention = attention_of(flow, inside, layer.grid, layer.prefix)
        layers.append(replace(layer, reduces=_shrinks(flow, start, before, last), attention=attention))
    return layers


def _blurs(flow: Flow, network: Call, start: Node, end: Node) -> list[Layer]:
    """Smoothing blocks between two nodes: averages over neighbours with stride 1, of the whole stream."""
    layers = []
    for operation in (flow.operations[i] for i in flow.between(start, end)):
        node = operation.writes[0]
        if operation.blurs and sequential.is_whole_stream(flow, node, network.stop):
            seen = residual_blocks.viewed(flow, node)
            at = next((n for n in seen if _tap_at(flow, n) is not None), node)
            tap = _tap_at(flow, at)
            inner = [
                c
                for c in flow.enclosing(operation.call)
                if residual_blocks.lies_between(flow, flow.calls[c], start, end)
            ]
            if tap is not None:
                name = flow.calls[inner[-1] if inner else operation.call].module or tap.module
                layers.append(layer_at(flow, at, tap, "smoothing", name, linear=at != node))
    return layers


def _shrinks(flow: Flow, before: Node, after: Node, linear: bool) -> bool:
    """Whether a map gets smaller between two nodes."""
    one, other = flow.shapes[before], flow.shapes[after]
    if math.prod(one) == math.prod(other) and {one[1], one[-1]} & {other[1], other[-1]}:
        return False  # the same map in another layout: as many numbers, as many channels
    return smaller(layout_of(flow, after, linear)[1], layout_of(flow, before, linear)[1])


def _stem_end(flow: Flow, residual: residual_blocks.Residual, end: Node) -> Node:
    """The output of the stem: the input of the first block, even if the branches fork after the block's norm.

    A module that adds may read the branch instead, as that at the end of BERT's attention does.
    """
    block = flow.calls[flow.operations[residual.position].call]
    before = block.reads and flow.ancestors[residual.fork] >> block.reads[0] & 1
    if before and any(flow.operations[i].name in HEAVY for i in flow.between(0, block.reads[0])):
        return block.reads[0]
    return end


def _branchless(flow: Flow, node: Node, kind: Kind, linear: bool, name: str) -> Layer:
    tap = _tap_at(flow, node) or residual_blocks.function_tap(flow, node)
    layer = layer_at(flow, node, tap, kind, name or tap.module, linear=linear)
    return replace(layer, reduces=kind == "subsample")


def _tap_at(flow: Flow, node: Node) -> Tap | None:
    """The first module call that returns a tensor, or else the first that reads it."""
    modules = [call for call in flow.calls if call.module]
    returning = (Tap(call.module, "output", call.number) for call in modules if call.writes[:1] == (node,))
    reading = (Tap(call.module, "input", call.number) for call in modules if call.reads[:1] == (node,))
    return next(chain(returning, reading), None)


def staged(layers: Sequence[Layer], before: Sequence[int] = ()) -> list[Layer]:
    """The layers with their stage and depth; `before`: the position of the layer that each follows, else the last."""
    stages: list[int] = []
    for layer, at in zip(layers, before or range(-1, len(layers) - 1), strict=True):
        stage = stages[at] if at >= 0 else 0
        if stage == 0:
            stages.append(int(layer.kind not in ("stem", "subsample")))
        else:
            stages.append(stage + layer.reduces)
    depths = (i / max(len(layers) - 1, 1) for i in range(len(layers)))
    return [replace(x, stage=stage, depth=depth) for x, stage, depth in zip(layers, stages, depths, strict=True)]
