"""Flatness of several networks is compared measure by measure, over seeds and by mini-batches."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from analytic import tanh_net
from scipy.stats import t as t_quantile
from test_flatness import changed

import landscape
from landscape.plots.comparison import comparison
from landscape.plots.comparison.comparison import paired
from landscape.plots.comparison.text import compare
from landscape.plots.figures.flatness import unpaired as why_unpaired
from landscape.statistics.flatness import parts


@pytest.mark.slow
def test_results_over_seeds_have_a_verdict_per_measure(tmp_path: Path) -> None:
    """With random classes, the gradient and the curvature grow with the last layer."""
    for seed in range(3):
        for group, factor in (("small", 1.0), ("large", 4.0)):
            subject = tanh_net(sizes=(24, 24))
            subject.label = f"{group}-s{seed}"
            with torch.no_grad():
                subject.model[0].weight.mul_(1 + 0.02 * seed)  # type: ignore[index]
                subject.model[2].weight.mul_(factor)  # type: ignore[index]
            landscape.measure("flatness", subject, out=tmp_path / "r.h5", quiet=True, measures="sam,fisher-rao")
    found = compare(tmp_path / "r.h5", group=r"-s\d+$")
    said = {c.number: (c.verdict, c.favours) for c in found.contrasts}
    assert said == dict.fromkeys(("sam", "fisher-rao"), ("real", "small is flatter"))
    (line,) = comparison.flatness(found)
    groups, _, verdict = line.partition(": ")  # results of one second are in the order of their names
    assert groups in ("small and large", "large and small")
    assert verdict == "small is flatter by sam (flatness), fisher-rao (flatness)"


@pytest.mark.slow
def test_a_larger_sigma_is_flatter(tmp_path: Path) -> None:
    """The same predictions from weights that are eight times as large, of which noise is a smaller share."""

    def enlarge_all(model: Any) -> None:
        for depth, layer in enumerate((model[0], model[2], model[4])):
            layer.weight.mul_(8.0)
            layer.bias.mul_(8.0 ** (depth + 1))

    for name, change in (("plain", lambda model: None), ("larger", enlarge_all)):
        subject = changed(change)
        subject.label = name
        landscape.measure("flatness", subject, out=tmp_path / "r.h5", quiet=True, measures="pac-bayes-sigma", draws=60)
    found = compare(tmp_path / "r.h5")
    assert [(c.verdict, c.favours) for c in found.contrasts] == [("real", "larger is flatter")]


@pytest.mark.slow
def test_two_networks_are_compared_mini_batch_by_mini_batch(tmp_path: Path) -> None:
    """Of the same samples most noise cancels; of what has no pairs the method says why."""
    measures = "sam,fisher-rao,trace,frobenius,top-eigenvalue"
    options: dict[str, Any] = {"measures": measures, "draws": 4, "vectors": 5}
    data = []
    for name, factor in (("a", 1.0), ("b", 1.05)):
        subject = tanh_net(sizes=(24, 24, 9))
        subject.label = name
        with torch.no_grad():
            subject.model[2].weight.mul_(factor)  # type: ignore[index]
        data.append(landscape.measure("flatness", subject, out=tmp_path / "r.h5", quiet=True, **options))
    found = {c.number: c for c in compare(tmp_path / "r.h5", against="a").contrasts}
    names, n = list(data[0]["measure_name"].values), np.array([24.0, 24.0, 9.0]) / 57
    a, b = (one["term"].values[one["unit_measure"].values == names.index("sam"), names.index("sam")] for one in data)
    mean = n @ (b - a)
    error = math.sqrt(n**2 @ (b - a - mean) ** 2 * 3 / 2)
    sam = found["sam"].difference
    assert sam is not None
    assert (sam.value, sam.method) == (pytest.approx(mean), "paired t over 3 mini-batches")
    assert sam.p == pytest.approx(2 * t_quantile(2).sf(abs(mean) / error))
    assert math.isnan(sam.high)  # of three mini-batches
    for name, one in found.items():
        assert one.difference is not None
        values = [float(part["value"].values[names.index(name)]) for part in data]
        assert one.difference.value == pytest.approx(values[1] - values[0], rel=1e-9), name
    assert why_unpaired("fisher-rao", *data) == "fewer than 6 mini-batches"
    apart = {name: c.difference.method for name, c in found.items() if c.difference and "not" in c.difference.method}
    assert apart == {"fisher-rao": "errors of both, not paired: fewer than 6 mini-batches"}
    assert why_unpaired("pac-bayes-sigma", *data) == "its noise draws are not stored one by one"
    assert found["frobenius"].difference.method == "paired t over 5 random vectors"  # type: ignore[union-attr]


@pytest.mark.slow
def test_measures_are_paired_between_results_that_differ_in_other_measures_and_vectors(tmp_path: Path) -> None:
    subject = tanh_net(sizes=(12,) * 4)

    def measured(name: str, **options: Any) -> Any:
        return landscape.measure("flatness", subject, out=tmp_path / f"{name}.h5", quiet=True, **options)

    more, fewer, alone = (
        measured(name, measures=measures, vectors=vectors)
        for name, measures, vectors in (("more", "sam,trace", 5), ("fewer", "sam,trace", 4), ("alone", "sam", 4))
    )
    assert [sorted(paired(more, other)) for other in (more, fewer, alone)] == [["sam", "trace"], ["sam"], ["sam"]]
    assert why_unpaired("trace", more, fewer) == "different numbers of random vectors"
    halves = [alone.assign(done=alone["done"].copy(data=done)) for done in np.array([[1, 1, 0, 0], [0, 0, 1, 1]])]
    assert paired(*halves) == {}
    assert why_unpaired("sam", *halves) == "different mini-batches"


def test_the_paired_error_of_a_root_is_that_of_resampled_mini_batches() -> None:
    generator = np.random.default_rng(0)
    terms = generator.gamma(40.0, size=400)
    data = {"measure_name": np.array(["fisher-rao"]), "unit_measure": np.zeros(400), "done": np.ones(400),
            "part": np.arange(400), "term": terms[:, None], "samples": np.full(400, 8.0)}  # fmt: skip
    found = parts(data)["fisher-rao"]
    assert found.shares @ found.values == pytest.approx(math.sqrt(terms.mean()))
    resampled = np.sqrt(generator.choice(terms, (4000, 400)).mean(axis=1)).std()
    assert found.values.std(ddof=1) / 20 == pytest.approx(resampled, rel=0.05)
