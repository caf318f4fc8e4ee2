"""CPU time of every probe over its floor: the passes and Hessian products that it needs, at their bare cost.

    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python benchmarks/floors.py --networks vit_demo --probes geometry stream

What a probe needs is counted while it runs, at its default options: samples of forward passes, of backward passes and
of Hessian products, by the size of their mini-batches. A forward pass that gives the same outputs for the same inputs
as an earlier one is not needed. The bare cost of each is measured right after, on the same mini-batches: the model in
inference mode, the gradient of its loss, and a product by the faster backend, once it is prepared. A pass from the
middle of the network counts as a whole one. To these the arithmetic of the probe's definition is added, such as a
Fourier transform of every map or the distances between all samples, at the cost of the few calls of `ARITHMETIC`, on
the maps of the first mini-batch. Files, checks, the search for layers and most summaries are not in the floor. A run
beyond `--seconds` ends with its next unit, and its floor is that of what was made until then. Ratios are medians over
`--rounds`, each on a freshly loaded subject; loading is not timed.
"""

import gc
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from gpu_stages.probes import neighbour
from measuring import header, parser, row, seconds
from torch import Tensor

import landscape
from landscape.api import loading_defaults, parameter_defaults
from landscape.data.structure import Forward, Nested, rows_of, tensors_in
from landscape.discovery.layer import Layer
from landscape.layers import forward_hooks, selection
from landscape.options import OptionError
from landscape.probes import PROBES, probe_class
from landscape.products import hvp_backends, vectors
from landscape.products.micro_batches import MicroBatchedProduct
from landscape.products.traced_hessian import TracedHessian
from landscape.subject.subject import Subject

OPTIONS: Mapping[str, Mapping[str, Any]] = {"step": {"optimizer": "sgd", "optimizer_arg": ("lr=0.1",)}}
BESIDE = {"pair": "against", "ends": "along", "members": "members"}  # options that take other networks
GPT2 = {"vocab_size": 8000, "n_positions": 32, "n_embd": 320, "n_layer": 6, "n_head": 5}  # 9.97 M parameters
NETWORKS = ("resnet_demo", "vit_demo", "gpt2")
LEAST = 0.2  # seconds of bare repetitions
FORWARD, BACKWARD, PRODUCT = KINDS = ("forward", "backward", "product")


class Enough(Exception):
    """The run took longer than `--seconds`."""


@dataclass
class Needs:
    """What a probe made: samples by kind and size of the mini-batch; `spent` is the time of counting."""

    samples: Counter[tuple[str, int]] = field(default_factory=Counter)
    spent: float = 0.0
    share: float = 0.0  # of the run that was made
    _seen: set[object] = field(default_factory=set)
    _with_graph: int = 0  # samples of the last pass that can be differentiated
    _product: bool = False

    def passed(self, inputs: Nested, outputs: Any) -> None:
        """Count a forward pass, unless the same inputs have given the same outputs before."""
        start = time.process_time()
        given, found = next(tensors_in(inputs)), next(tensors_in(outputs))
        if type(found) is Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(found):
            self._with_graph = len(given) if found.requires_grad else self._with_graph
            key = _few_numbers(given), _few_numbers(found)
            self.samples[FORWARD, len(given)] += 0 if key in self._seen else len(given)
            self._seen.add(key)
        self.spent += time.process_time() - start

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is made in the block, the passes aside."""
        derivative, product, once = torch.autograd.grad, MicroBatchedProduct.__call__, TracedHessian.at

        def grad(*arguments: Any, **options: Any) -> Any:
            if not self._product:
                self.samples[BACKWARD, self._with_graph] += self._with_graph
            return derivative(*arguments, **options)

        def multiply(this: MicroBatchedProduct, vector: Tensor) -> Tensor:
            self.samples[PRODUCT, this._samples] += this._samples
            self._product = True
            found = product(this, vector)
            self._product = False
            return found

        def prepare(this: TracedHessian, inputs: Any, *arguments: Any, **options: Any) -> Any:
            samples = len(next(tensors_in(inputs)))
            self.samples[FORWARD, samples] += samples
            self.samples[BACKWARD, samples] += samples
            return once(this, inputs, *arguments, **options)

        with (
            mock.patch.object(torch.autograd, "grad", grad),
            mock.patch.object(MicroBatchedProduct, "__call__", multiply),
            mock.patch.object(TracedHessian, "at", prepare),
        ):
            yield


def _few_numbers(tensor: Tensor) -> bytes:
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // 4096)].cpu().contiguous().numpy().tobytes()


@dataclass(frozen=True)
class Counted:
    """A forward pass of a subject that is counted."""

    base: Forward
    needs: Needs

    def __call__(self, model: Any, inputs: Nested) -> Any:
        outputs = self.base(model, inputs)
        self.needs.passed(inputs, outputs)
        return outputs

    def __deepcopy__(self, memo: Any) -> "Counted":
        return self


def load(network: str, probe: str, samples: int, folder: Path) -> Subject:
    """A network at random weights, with the mini-batches that are a probe's default."""
    split = "test" if "train_samples" in parameter_defaults(probe_class(probe)) else "train"  # which has more digits
    options = {**loading_defaults(probe_class(probe)), "samples": samples, "split": split, "device": "cpu"}
    torch.manual_seed(0)
    if network != "gpt2":
        return landscape.load(None, model=network, data="digits", **options)
    tokens = folder / "tokens.npy"
    if not tokens.exists():
        from transformers import GPT2Config

        GPT2Config(**GPT2, bos_token_id=0, eos_token_id=0).save_pretrained(folder)
        np.save(tokens, np.random.default_rng(0).integers(0, GPT2["vocab_size"], 32 * samples + 1))
    return landscape.load(None, model=f"hf:{folder}", data=str(tokens), **options)


def options_of(probe: str, subject: Subject, folder: Path) -> dict[str, Any]:
    """Its defaults, with networks beside the subject where some are needed; those of a run are files in the folder."""
    several = probe_class(probe).several
    others = [neighbour(subject.model, seed) for seed in range(1, 4 if several == "run" else 2)]
    beside = {BESIDE[several]: others if several == "members" else others[0]} if several in BESIDE else {}
    if several == "run":
        for i, network in enumerate((*others, subject.model)):
            torch.save(network.state_dict(), folder / f"epoch_{i:03d}.pt")
        beside = {"run": str(folder)}
    return {**OPTIONS.get(probe, {}), **beside}


def measured(probe: str, subject: Subject, most: float, folder: Path) -> tuple[float, Needs]:
    """CPU seconds of a probe, at most about so many, and what it made in them."""
    needs, options = Needs(), options_of(probe, subject, folder)
    end = time.process_time() + most

    def report(finished: int, total: int) -> None:
        needs.share = finished / total
        if time.process_time() > end and finished < total:
            raise Enough

    counted = replace(subject, forward=Counted(subject.forward, needs))
    gc.collect()  # what was made before is not collected in the time of this run
    start = time.process_time()
    with needs.counting(), suppress(Enough):
        landscape.measure(probe, counted, out=None, quiet=True, report=report, **options)
    return time.process_time() - start - needs.spent, needs


def bare(subject: Subject, kind: str, samples: int) -> float:
    """CPU seconds of a pass or product on so many samples of the first mini-batch, the median of several."""
    inputs, targets = (rows_of(nested, slice(0, samples)) for nested in subject.batch(0))
    part = replace(subject, batches=[(inputs, targets)])
    subject.model.eval()

    def forward() -> None:
        with torch.inference_mode():
            part.outputs(inputs)

    def gradient() -> None:
        torch.autograd.grad(part.loss(0), list(part.parameters.values()))

    if kind == FORWARD:
        return _median(forward)
    if kind == BACKWARD:
        return _median(gradient) - _median(forward)
    costs = []
    for hvp in ("double-backward", "traced"):
        product = hvp_backends.curvature(part, part.parameters, hvp).product(0)
        vector = vectors.random_unit(part.size, 0, device=part.device, dtype=part.dtype)
        costs.append(_median(lambda: product(vector)))  # noqa: B023
    return min(costs)


def _log_amplitudes(maps: Tensor, layer: Layer, subject: Subject) -> None:
    np.log(np.abs(torch.fft.rfft2(maps).numpy()) + 1e-6).mean(axis=(0, 1))


def _moments(maps: Tensor, layer: Layer, subject: Subject) -> None:
    maps.mean((2, 3)), torch.linalg.vector_norm(maps, dim=(2, 3))


def _products_of_samples(maps: Tensor, layer: Layer, subject: Subject) -> None:
    maps.flatten(1) @ maps.flatten(1).T


def _of_attention(maps: Tensor, layer: Layer, subject: Subject) -> None:
    """The maps, their entropy, distance, marginal, and the cosines of heads and tokens; singular values of tokens."""
    tokens = maps.flatten(2).mT if maps.ndim == 4 else maps  # (image, token, channel)
    heads = tokens.unflatten(2, (layer.attention.heads if layer.attention else 1, -1)).transpose(1, 2)
    weights = (heads @ heads.mT).softmax(-1)
    (np.log(weights.numpy()) * weights.numpy()).sum(axis=(2, 3))
    weights.flatten(2) @ torch.ones(weights[0, 0].numel()), weights.mean(-2)
    for parts, axis in ((weights, 1), (heads, 1), (tokens, 1)):
        (parts / torch.linalg.vector_norm(parts, dim=-1, keepdim=True)).sum(axis).square().sum(-1)
    (tokens * tokens).sum(-1)
    torch.linalg.svdvals(tokens[:4].double()), torch.linalg.svdvals(tokens.mean(1).double())


def _around_the_centre(maps: Tensor, layer: Layer, subject: Subject) -> None:
    """The moments of two passes, and in double precision the products of the points around the centre with it."""
    for _ in range(2):
        _moments(maps, layer, subject)
        row, column = (side // 2 for side in maps.shape[2:])
        window = maps[:, :, max(row - 7, 0) : row + 8, max(column - 7, 0) : column + 8]
        points = window.double().flatten(2)
        points[:, None, :, points.shape[2] // 2] @ points


def _of_all_samples(maps: Tensor, layer: Layer, subject: Subject) -> None:
    """Two nearest neighbours, the covariance's spectrum, of classes the nearest means of 41 sets, NC1 of 21 others."""
    channels = maps.shape[1 if maps.ndim == 4 else -1]
    rows, classes = torch.randn(len(subject), channels, dtype=torch.float64).numpy(), 10
    squared = rows @ rows.T
    squared.argmin(axis=1), squared.argmin(axis=1), np.linalg.eigvalsh(rows.T @ rows)
    if subject.batches[0][1].ndim > 1:
        return  # tokens, which are no classes
    means = (np.ones((41 + 2 * 21, len(rows))) @ rows).repeat(classes, axis=0) / len(rows)
    (rows @ means[: 41 * classes].T).reshape(-1, 41, classes).argmin(axis=2), np.square(rows @ means[-21 * classes :].T)


def _of_readout(maps: Tensor, layer: Layer, subject: Subject) -> None:
    """Two ridge regressions by eigenvectors, and the held-out scores of 19 penalties."""
    rows, targets = torch.randn(1437, maps.shape[1], dtype=torch.float64), torch.randn(1437, 10, dtype=torch.float64)
    for _ in range(2):
        solved = torch.linalg.eigh(rows.T @ rows)[1] @ (rows.T @ targets)
    for _ in range(19):
        rows[: len(rows) // 5] @ solved


def _resampled(maps: Tensor, layer: Layer, subject: Subject) -> None:
    """A thousand resamples of all samples, and their sums of 50 numbers."""
    n = len(subject)
    drawn = np.random.default_rng(0).integers(n, size=(1000, n)) + n * np.arange(1000)[:, None]
    np.bincount(drawn.ravel(), minlength=1000 * n).reshape(1000, n).astype(float) @ np.ones((n, 50))


Arithmetic = Callable[[Tensor, Layer, Subject], None]  # of a layer's maps
ARITHMETIC: Mapping[str, tuple[Arithmetic, ...]] = {  # of every mini-batch, or of the whole run
    "fourier": (_log_amplitudes,), "variance": (_moments,), "similarity": (_products_of_samples,),
    "attention": (_of_attention,), "uncertainty": (_around_the_centre,), "geometry": (_of_all_samples,),
    "probe-linear": (_of_readout,), "calibration": (_resampled,), "ensemble": (_resampled,),
}  # fmt: skip
ONCE = (_of_all_samples, _of_readout)  # per layer in a run
ALONE = (_resampled,)  # once in a run


def arithmetic(probe: str, subject: Subject) -> float:
    """CPU seconds of what a probe's definition computes beside passes and products, in a whole run."""
    if probe not in ARITHMETIC:
        return 0.0
    layers, found = selection.layers_of(subject, ()), dict[int, Tensor]()
    if probe == "attention":
        layers = [layer for layer in layers if layer.attention]
    elif probe in ("fourier", "variance", "uncertainty"):
        layers = [layer for layer in layers if layer.spatial]

    def keep(at: int, tensor: Tensor) -> None:
        found[at] = (layers[at].maps(tensor) if layers[at].spatial else tensor).contiguous().clone()

    with subject.evaluating(), forward_hooks.feature_hooks(subject.model, layers, keep):
        subject.outputs(subject.batch(0)[0])
    total = 0.0
    for work in ARITHMETIC[probe]:
        several = [0] if work in ALONE else list(found)
        costs = [_median(partial(work, found[at], layers[at], subject)) for at in several]
        total += sum(costs) * (1 if work in (*ONCE, *ALONE) else len(subject) / subject.samples(0))
    return total


def _median(work: Callable[[], object]) -> float:
    work()
    took = [seconds(work)]
    while sum(took) < LEAST or len(took) < 3:
        took.append(seconds(work))
    return statistics.median(took)


def row_of(network: str, probe: str, given: Any, folder: Path) -> str:
    """The row of the median round: ratio, seconds, and passes over all samples by kind."""
    rounds = []
    for _ in range(given.rounds):
        took, needs = measured(probe, load(network, probe, given.samples, folder), given.seconds, folder)
        subject = load(network, probe, given.samples, folder)
        beside = needs.share * arithmetic(probe, subject)
        floor = beside + sum(n / size * bare(subject, kind, size) for (kind, size), n in needs.samples.items() if n)
        made = (sum(n for (k, _), n in needs.samples.items() if k == kind) / len(subject) for kind in KINDS)
        rounds.append((took / floor, took, floor, beside, *made))
    ratio, took, floor, beside, *made = sorted(rounds)[(len(rounds) - 1) // 2]
    return row(
        network, probe, f"{ratio:.2f}", f"{took:.2f}", f"{floor:.2f}", f"{beside:.2f}", *(f"{n:.3g}" for n in made)
    )


def main() -> None:
    arguments = parser(__doc__, samples=1024, rounds=3, seconds=60.0)
    arguments.add_argument("--networks", nargs="+", default=NETWORKS)
    arguments.add_argument("--probes", nargs="+", default=tuple(PROBES))
    given = arguments.parse_args()
    torch.set_num_threads(1)
    os.environ["LANDSCAPE_CACHE"] = ""
    print(header("network", "probe", "CPU / floor", "CPU s", "floor s", "of it arithmetic", *KINDS), flush=True)
    for network in given.networks:
        with tempfile.TemporaryDirectory() as folder:
            for probe in given.probes:
                try:
                    print(row_of(network, probe, given, Path(folder)), flush=True)
                except (OptionError, ValueError, ImportError) as error:
                    print(row(network, probe, f"- {error}"), flush=True)


if __name__ == "__main__":
    main()
