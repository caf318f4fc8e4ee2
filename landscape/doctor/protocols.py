"""Rules of several results together: are they of the same samples, by the same protocol, of different networks?"""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from landscape.doctor.finding import Finding, Result, at_weights, found, measure_again
from landscape.doctor.surfaces import ROUNDING
from landscape.results.protocols import OF_A_RUN, differing, of_several, option_of


def differing_protocols(results: Sequence[Result]) -> Iterator[Finding]:
    """Checkpoints of which no two results of a probe have the same protocol: the figure compares unlike numbers.

    A file may hold several protocols of one checkpoint on purpose; two checkpoints are compared as equals only if they
    have one in common.
    """
    by_label: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if result.spec:
            by_label[result.label].append(result)
    pairs = [
        (one[0], other[0], differing(one[0].facts, other[0].facts))
        for one, other in combinations(by_label.values(), 2)
        if not any(a.facts == b.facts for a in one for b in other)
    ]
    if pairs:
        one, other, differences = pairs[0]
        said = "; ".join(f"{name} {a} and {b}" for name, (a, b) in differences.items())
        more = f" (and {len(pairs) - 1} more pairs)" if len(pairs) > 1 else ""
        # A value that is known by what was loaded is asked for as the other one asked for it.
        options = [option_of(name) for name in differences]
        changes = {name: other.spec.get(name, other.parameters.get(name)) for name in options}
        yield found(
            "differing-protocols", "wrong", [one, other],
            f"{one.label} and {other.label} have no {one.probe} by the same protocol: {said}{more}",
            measure_again(one, "measure both by one protocol", **changes),
            cause=said,
        )  # fmt: skip


def drawn_anew(results: Sequence[Result]) -> Iterator[Finding]:
    """Samples whose source transforms them at random were drawn once per command: no two results are of the same.

    Augmentation by a recipe (`--augment`) is drawn from the seed, and equal in all results with the same seed; with
    another seed or batch size it is not.
    """
    drawn = [r for r in results if "random transforms drawn once" in str(r.attribute("protocol"))]
    if len(drawn) > 1:
        yield found(
            "drawn-anew", "suspicious", drawn,
            f"the data of {len(drawn)} results transform their samples at random and were drawn anew for each",
            "give --data a source without random transforms, so that all results are of the same samples",
        )  # fmt: skip
    augmented = [r for r in results if "augmented once" in str(r.attribute("protocol"))]
    kinds = {(r.spec.get("seed"), int(r.attribute("batch_size", 0))) for r in augmented}
    if len({r.label for r in augmented}) > 1 and len(kinds) > 1:
        seeds = sorted({str(r.spec.get("seed")) for r in augmented})
        yield found(
            "drawn-anew", "suspicious", augmented,
            f"augmented samples were drawn with different seeds ({', '.join(seeds)}) or batch sizes: checkpoints are "
            "compared on different images",
            measure_again(augmented[-1], "use one --seed and --batch-size", seed=augmented[0].spec.get("seed"),
                          batch_size=int(augmented[0].attribute("batch_size"))),
        )  # fmt: skip


def other_samples(results: Sequence[Result]) -> Iterator[Finding]:
    """The same protocol in words, and other samples: the data changed between two results (SHA-256 of the samples).

    Only of one architecture: networks of different ones may resize the same samples to sizes of their own.
    """
    known: dict[Any, int] = {}  # the first result of each protocol and architecture
    pairs = []
    for at, result in enumerate(results):
        if sha256 := result.attribute("data_sha256"):
            first = known.setdefault((frozenset(result.facts.items()), result.attribute("model")), at)
            pairs += [(first, at)] if results[first].attribute("data_sha256") != sha256 else []
    for one, other in ((results[i], results[j]) for i, j in sorted(pairs)[:1]):
        yield found(
            "other-samples", "wrong", [one, other],
            f"{one.label} and {other.label} are of different samples, although both are {one.attribute('protocol')}",
            measure_again(other, "measure both on the same data") + " --overwrite",
        )  # fmt: skip


def one_label(results: Sequence[Result]) -> Iterator[Finding]:
    """Several checkpoints under one label, which no table or figure can tell apart.

    Snapshots of one run that differ in their epoch are told apart by it.
    """
    known: dict[str, dict[tuple[str, str], Result]] = defaultdict(dict)
    for result in results:
        if result.attribute("checkpoint_sha256"):
            key = str(result.attribute("checkpoint_sha256")), result.probe
            known[result.label][key] = result
    for label, by_key in known.items():
        weights = {sha256: result for (sha256, _), result in by_key.items()}
        if len(weights) > 1 and len({str(r.attribute("epoch")) for r in weights.values()}) < len(weights):
            first, second = list(weights.values())[:2]
            yield found(
                "one-label", "suspicious", [first, second],
                f"{len(weights)} different checkpoints have the label {label}",
                measure_again(second, "give one of them another label") + f" --label '{label} 2'",
            )  # fmt: skip


def same_weights(results: Sequence[Result]) -> Iterator[Finding]:
    """The same weights under several labels, in one file or in two: a comparison of a network with itself.

    Options that change the network (other weights of the file, dropout masks, smoothing, other arguments) make it two.
    """
    known: dict[Hashable, Result] = {}
    for result in results:
        sha256, weights, spec = result.attribute("checkpoint_sha256"), result.attribute("weights_sha256"), result.spec
        key = (
            weights or sha256, result.probe, result.attribute("model"), spec.get("model"), spec.get("mc_dropout"),
            str(result.attribute("smoothing")), str(spec.get("model_arg")), repr(sorted(result.facts.items())),
        )  # fmt: skip
        if not sha256 or of_several(result.data):
            continue
        other = known.setdefault(key, result)
        if other.label != result.label:
            yield found(
                "same-weights", "wrong", [other, result],
                f"{other.label} and {result.label} have the same weights (SHA-256 {str(weights or sha256)[:10]})",
                f"check the path of {result.label}: {spec.get('checkpoint')}",
            )  # fmt: skip
            return


def losses_disagree(results: Sequence[Result]) -> Iterator[Finding]:
    """Two results of the same checkpoint and samples that state different losses: one was measured otherwise.

    Surface, line and trajectory store the loss of the checkpoint itself. On the same samples it is the same number up
    to rounding; a difference of 0.1 % or more is another preprocessing, other statistics or other weights.
    """
    known: dict[Hashable, tuple[Result, float]] = {}
    for result in results:
        loss = at_weights(result, "loss")
        spec, sha256 = result.spec, result.attribute("checkpoint_sha256")
        if not (sha256 and np.isfinite(loss)) or result.parameters.get("precision", "fp32") != "fp32":
            continue
        same = ("split", "augment", "recipe", "mc_dropout", "weights", "image_size", "seed")
        key = (
            sha256, result.attribute("data"), result.samples, str(result.attribute("smoothing")),
            str(spec.get("model_arg")), result.facts.get("loss"), *(spec.get(name) for name in same),
        )  # fmt: skip
        other, expected = known.setdefault(key, (result, loss))
        if abs(loss - expected) > ROUNDING * max(abs(loss), abs(expected)) + 1e-6:
            names = ("model", "mean", "std", "crop", "interpolation")
            differ = [name for name in names if spec.get(name) != other.spec.get(name)]
            bn = {str(r.parameters.get("bn")) for r in (result, other)}
            why = f"--{' and --'.join(differ)} differ{'s' * (len(differ) == 1)}" if differ else ""
            why = why or (f"--bn {' and '.join(sorted(bn))}" if len(bn) > 1 else "the data or the code changed")
            if not differ and any("recalibrate" in name for name in bn):
                continue  # asked for: other batch-norm statistics
            changes = {name: other.spec.get(name) for name in differ}
            yield found(
                "losses-disagree", "wrong", [other, result],
                f"the same checkpoint and samples have the loss {expected:.5g} in {other.group} and {loss:.5g} in "
                f"{result.group}: {why}",
                measure_again(result, "measure both in the same way", **changes) + ("" if differ else " --overwrite"),
            )  # fmt: skip
            return


def one_seed(results: Sequence[Result]) -> Iterator[Finding]:
    """Networks of different kinds with one training run each: their differences include those between two runs.

    A note. Which part is due to the network is known from several runs of each (Bouthillier et al. 2021, Accounting for
    variance in machine learning benchmarks).
    """
    runs: dict[str, set[Any]] = defaultdict(set)
    labels: dict[str, Result] = {}
    for result in results:
        about = {k: v for k, v in result.configuration.items() if k not in OF_A_RUN}
        if about:
            runs[repr(sorted(about.items(), key=str))].add(result.configuration.get("seed"))
            labels.setdefault(result.label, result)
    if len(runs) > 1 and all(len(seeds) == 1 for seeds in runs.values()):
        yield found(
            "one-seed", "note", list(labels.values()),
            f"{len(runs)} kinds of networks or training were measured with one training seed each",
            "train each with at least three seeds (landscape train ... --seed N) before claiming a difference",
        )  # fmt: skip


def versions_differ(results: Sequence[Result]) -> Iterator[Finding]:
    """Results of different versions of a library: a note, because numbers may differ beyond rounding."""
    by_version: dict[str, Result] = {}
    for result in results:
        if result.spec:
            by_version.setdefault(str(result.attribute("versions")), result)
    if len(by_version) > 1:
        yield found(
            "versions-differ", "note", list(by_version.values()),
            f"results were measured with {len(by_version)} sets of library versions (attribute `versions`)",
            "measure again with one set of versions before comparing small differences",
        )  # fmt: skip
