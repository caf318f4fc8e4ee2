"""Loss surfaces: ours in every mode against the bare forward pass and tools that install with pip, in one run.

    python benchmarks/surface.py --data cifar10 --data-root DATA [--checkpoints DIR] [--samples 256 4096] [--compile]
        [--device cuda]

Every tool gets the same model, the same images in memory, the same batches and one thread. The bare forward pass is
the model and the mean of its losses over all images, with gradients off, and nothing else. Tools take turns, so that
other load affects all of them; process time, the median over the turns. `ratio` is bare forward / tool.
Overhead: the forward pass replaced by a constant. Preview: against the full grid, with its own and the true error.
Peers (`pip install --no-deps loss-landscapes losscape loss-landscape-3d landscaper`; the last needs topopy, treelib,
coloraide and drawsvg too) that are not installed, or fail, are named with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import resource
import statistics
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from measuring import Work, clock_of, header, in_turns, parser, row, seconds, trained, trained_models
from torch import nn

from landscape import models
from landscape.probes.surface import Surface
from landscape.subject.subject import Subject
from landscape.weight_space import adaptive_sampling
from landscape.weight_space.directions import POSITIONS, ticks
from landscape.weight_space.plane_evaluator import PlaneEvaluator
from landscape.weight_space.planes import plane_of

SIDE = 3  # 3 x 3 points per turn
LARGE = ["ours, exact fp32", "ours, bf16, channels last"]  # on more images: overhead is what tells others apart
Batches = list[tuple[torch.Tensor, torch.Tensor]]


def bare(subject: Subject) -> Work:
    batches = batches_of(subject)

    def run() -> None:
        for _ in range(SIDE**2):
            total_loss(subject.model, batches)

    return run


def batches_of(subject: Subject) -> Batches:
    return [subject.batch(i) for i in range(len(subject.batches))]


def total_loss(model: nn.Module, batches: Batches) -> float:
    with torch.inference_mode():
        return sum(F.cross_entropy(model(x), y, reduction="sum").item() for x, y in batches)


def ours(subject: Subject, **options: Any) -> Work:
    probe = Surface(**options)
    plane = probe._plane(subject)
    places = [(float(x), float(y), False) for x in ticks(-1, 1, SIDE) for y in ticks(-1, 1, SIDE)]

    def run() -> object:
        with PlaneEvaluator(
            subject, plane, l2_definition=probe.l2_definition, mode=probe.mode, cap=probe.cap
        ) as evaluator:
            return list(evaluator.evaluate(places))

    return run


def loss_landscapes(subject: Subject) -> Work:
    """loss-landscapes takes one batch: all images at once."""
    from loss_landscapes import metrics, random_plane

    inputs, targets = (torch.cat(parts) for parts in zip(*subject.batches, strict=True))
    metric = metrics.Loss(nn.CrossEntropyLoss(), inputs, targets)

    def run() -> object:
        with torch.no_grad():
            return random_plane(subject.model, metric, 1, SIDE, normalization="filter", deepcopy_model=True)

    return run


def losscape(subject: Subject) -> Work:
    from losscape.create_landscape import create_3D_losscape

    batches = batches_of(subject)

    def run() -> object:
        # It leaves a picture in the folder that it runs in.
        with contextlib.redirect_stdout(io.StringIO()), TemporaryDirectory() as folder, contextlib.chdir(folder):
            return create_3D_losscape(
                subject.model, batches, num_batches=len(batches), num_points=SIDE, save_only=True, output_h5=False
            )

    return run


def loss_landscape_3d(subject: Subject) -> Work:
    """loss-landscape-3d moves batch norm's statistics too, where its losses are NaN; its time counts all the same."""
    from loss_landscape_3d import LossLandscapeCalculator, generate_random_directions

    batches = batches_of(subject)
    first, second = generate_random_directions(subject.model, normalize=True)
    centre = {name: tensor.clone() for name, tensor in subject.model.state_dict().items()}
    axis = ticks(-1, 1, SIDE)

    def run() -> object:
        calculator = LossLandscapeCalculator(subject.model, batches, nn.CrossEntropyLoss())
        return calculator.calculate(axis, axis, first, second, centre)

    return run


def landscaper(subject: Subject) -> Work:
    """Landscaper takes the directions and a function of model and data from its user."""
    from landscaper.compute import compute_loss_landscape

    batches = batches_of(subject)
    directions = [[d.get(n, torch.zeros_like(p)) for n, p in subject.model.named_parameters()]
                  for d in Surface()._plane(subject).directions]  # fmt: skip

    def mean(model: nn.Module, data: Batches) -> float:
        return total_loss(model, data) / len(subject)

    def run() -> object:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            return compute_loss_landscape(
                subject.model, batches, directions, mean, steps=SIDE, distance=1.0, dim=2, device=str(subject.device)
            )

    return run


def tools(subject: Subject, compiled: bool, only: list[str]) -> dict[str, Work]:
    found = {
        "bare forward": bare(subject),
        "ours, exact fp32": ours(subject),
        "ours, channels last": ours(subject, memory_format="channels_last"),
        "ours, bf16": ours(subject, precision="bf16"),
        "ours, bf16, channels last": ours(subject, precision="bf16", memory_format="channels_last"),
    }
    if compiled:
        found["ours, compiled"] = ours(subject, compile=True)
        found["ours, bf16, compiled"] = ours(subject, precision="bf16", compile=True)
    peers = {"loss-landscapes": loss_landscapes, "losscape": losscape, "loss-landscape-3d": loss_landscape_3d,
             "landscaper": landscaper}  # fmt: skip
    for name, make in peers.items():
        if only and name not in only:
            continue
        kept = {key: tensor.clone() for key, tensor in subject.model.state_dict().items()}
        try:
            found[name] = make(subject)
            found[name]()
        except Exception as error:  # whatever a peer raises is its result
            print(f"{name} fails on {subject.label}: {type(error).__name__}: {str(error)[:120]}", flush=True)
            found.pop(name, None)
        subject.model.load_state_dict(kept)
    return {name: tool for name, tool in found.items() if not only or name in ("bare forward", *only)}


def throughput(subject: Subject, turns: int, compiled: bool, only: list[str]) -> list[str]:
    made = tools(subject, compiled, only)
    in_turns(made, 1)  # warm up, compile, draw directions
    took = in_turns(made, turns, clock_of(subject.device))
    lines = []
    for name, found in took.items():
        ratio = statistics.median(b / own for b, own in zip(took["bare forward"], found, strict=True))
        per_point = statistics.median(found) / SIDE**2
        numbers = f"{1e3 * per_point:.1f}", f"{len(subject) / per_point:.0f}", f"{ratio:.2f}"
        lines.append(row(subject.label, len(subject), name, *numbers))
    return lines


def overhead(model: nn.Module, shape: tuple[int, ...], points: int = 51) -> float:
    """Milliseconds per point when the forward pass is a constant: writes, sums and transfer."""
    subject = Subject(model.eval(), [(torch.zeros(128, *shape), torch.zeros(128, dtype=torch.long))])
    plane = plane_of(subject, "random", normalize="filter", ignore=POSITIONS, seed=0)
    constant = torch.zeros(128, 10)
    model.forward = lambda inputs: constant  # type: ignore[method-assign, assignment]
    with PlaneEvaluator(subject, plane) as evaluator:
        evaluator.at(0.5, 0.5)
        return 1e3 * statistics.median(seconds(partial(evaluator.at, 0.1, float(y))) for y in ticks(-1, 1, points))


def memory(model: nn.Module) -> float:
    """Peak of the process while a surface runs, beyond the loaded model, in copies of its weights."""
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    subject = Subject(model.eval(), [(torch.zeros(1, 3, 32, 32), torch.zeros(1, dtype=torch.long))])
    with torch.inference_mode():
        model(subject.batch(0)[0])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plane = plane_of(subject, "random", normalize="filter", ignore=POSITIONS, seed=0)
    with PlaneEvaluator(subject, plane) as evaluator:
        evaluator.at(0.5, 0.5)
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / size


def deviation(subject: Subject, **options: Any) -> list[str]:
    """Deviation from fp32 over 5 x 5 points in standard errors: median, 95th percentile, greatest."""
    probe = Surface(resolution="5", **options)
    units = list(probe.plan(subject).units())
    found = np.array([values["deviates"] for values in probe.sweep(subject, units)])
    return [f"{number:.3f}" for number in (np.median(found), np.quantile(found, 0.95), found.max())]


def previewed(subject: Subject, full: dict[str, np.ndarray], tolerance: float) -> str:
    """A preview of a fully known grid: its points, its own bound, the true errors of what it interpolates."""
    axes, loss, evaluated = (full["x"], full["y"]), full["loss"], np.zeros(full["loss"].shape, dtype=bool)
    refine = partial(adaptive_sampling.step, axes, loss, evaluated, tolerance=tolerance, seed=0)
    while len((step := refine()).points) and not step.fallback:
        evaluated.ravel()[step.points] = True
    if step.fallback:
        return row(subject.label, loss.size, f"{step.error:.1%}", f"falls back: {step.fallback}", "", "")
    found = adaptive_sampling.interpolate_missing(axes, {"loss": np.where(evaluated, loss, np.nan)}, evaluated)["loss"]
    error = np.abs(found / loss - 1)[~evaluated]
    numbers = (f"{number:.2%}" for number in (np.median(error), np.quantile(error, 0.95), error.max()))
    return row(subject.label, f"{evaluated.sum()} of {loss.size}", f"{step.error:.1%}", *numbers)


def grid(subject: Subject, resolution: int) -> dict[str, np.ndarray]:
    probe = Surface(resolution=str(resolution))
    plan = probe.plan(subject)
    loss = [values["loss"] for values in probe.sweep(subject, list(plan.units()))]
    return {**plan.over, "loss": np.array(loss).reshape(plan.shape)}


def rough(samples: int = 32) -> Subject:
    """A deep network without skips at random weights: its loss on a plane is chaotic."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(30):
        layers += [nn.Linear(32, 32), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(32, 10))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(6.0 if p.dim() > 1 else 1.0)
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(samples, 32, generator=generator), torch.randint(10, (samples,), generator=generator)
    return Subject(model.eval(), [batch], label="30 layers without skips")


def load(arguments: argparse.Namespace, name: str, samples: int) -> Subject:
    return trained(arguments, name, label=name, samples=samples)


def main() -> None:
    options = trained_models(parser(__doc__, turns=3, tolerance=0.05), "resnet_demo", "vit_demo")
    options.add_argument("--samples", type=int, nargs="+", default=[256, 4096])
    options.add_argument("--compile", action="store_true")
    options.add_argument("--only", nargs="+", default=[], help="tools to run with the bare forward pass; default: all")
    options.add_argument("--preview-samples", type=int, default=64, help="samples of the full grids; 0 leaves them out")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    networks = {n: models.build(n, classes=10, image_size=32) for n in ("resnet18", *arguments.models)}
    print(f"memory at 11 M beyond the model: {memory(networks['resnet18']):.2f} copies of its weights", flush=True)
    for name, model in networks.items():
        size = sum(p.numel() for p in model.parameters())
        print(f"overhead {name} ({size / 1e6:.2f} M): {overhead(model, (3, 32, 32)):.2f} ms per point", flush=True)
    print(f"\n{header('model', 'images', 'tool', 'ms / point', 'images / s', 'ratio')}")
    for samples in arguments.samples:
        for name in arguments.models:
            turns = max(1, math.ceil(arguments.turns * arguments.samples[0] / samples))
            only = arguments.only or (LARGE if samples > arguments.samples[0] else [])
            print("\n".join(throughput(load(arguments, name, samples), turns, arguments.compile, only)), flush=True)
    print(f"\n{header('model', 'execution mode', 'median', '95th', 'greatest (standard errors)')}")
    for name in arguments.models:
        subject = load(arguments, name, arguments.samples[0])
        found = deviation(subject, precision="bf16", memory_format="channels_last")
        print(row(name, "bf16, channels last", *found), flush=True)
    if arguments.preview_samples:
        print(f"\n{header('model', 'points', 'bound', 'true median', 'true 95th', 'true greatest')}")
        for subject in (*(load(arguments, n, arguments.preview_samples) for n in arguments.models), rough()):
            print(previewed(subject, grid(subject, 51), arguments.tolerance), flush=True)


if __name__ == "__main__":
    main()
