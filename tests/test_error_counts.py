"""Every stored standard error says what its independent values are, and how many there are of them."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import counting
import h5py
import numpy as np
import pytest
from measured_runs import KEPT, attending, loaded, small

from landscape.headline import with_errors
from landscape.probe import Plan, Quantity
from landscape.results import group as groups
from landscape.results.merging import merge_files
from landscape.results.run_key import RunKey, from_header, to_header
from landscape.results.series import SeriesWriter
from landscape.results.writer import Writer
from landscape.running.run import reduce_of, run
from landscape.statistics.neural_collapse import Labels, collapse
from landscape.statistics.stored import independent

pytestmark = pytest.mark.slow

CASES: list[tuple[str, dict[str, Any], dict[str, int]]] = [  # options, and the counts that are known
    ("trace", {"vectors": 4}, {"batch_trace_se": 2, "trace_se": 8, "frobenius_se": 8}),  # XTrace: 2 of 4 products
    ("trace", {"vectors": 4, "method": "hutchinson", "tol": 0.9, "max_vectors": 4}, {"round_batch_trace_se": 4}),
    ("trace", {"vectors": 8, "diagonal": "full", "blocks": "tensor"},
     {"batch_off_block_se": 2, "off_block_se": 4, "batch_diagonal_se": 8, "diagonal_se": 32, "diagonal_square_se": 4}),
    ("density", {"blocks": "tensor", **KEPT}, {"mean_se": 2, "heterogeneity_se": 2}),
    ("hessian", {"operator": "preconditioned", "optimizer": "sgd", "optimizer_arg": ("lr=0.1",), **KEPT},
     {"stability_se": 2}),
    ("surface", {"resolution": "3"}, {"loss_se": 32, "rise_se": 32, "height_se": 16}),
    ("surface", {"resolution": "3", "margin": "2se", "cap": 9.0}, {"loss_se": 32, "profile_most_se": 16}),
    ("line", {"margin": "2se"}, {"loss_se": 32, "score_worse_se": 32}),
    ("geometry", {}, {"effective_rank_se": 32, "nc2_angles_se": 20, "nc4_se": 32}),
    ("tokens", {"method": "principal", "images": 5}, {"common_se": 5}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "known"), CASES)
def test_options_of_a_probe_change_what_its_errors_are_of(
    name: str, options: dict[str, Any], known: dict[str, int], snapshots: Path, tmp_path: Path
) -> None:
    folder = attending(snapshots) if name == "tokens" else snapshots
    outcome = run(small(name, **options), loaded(folder), tmp_path / "results.h5")
    assert counting.checked_error_counts(tmp_path / "results.h5", outcome.group).items() >= known.items()


@pytest.mark.parametrize(
    ("over", "axes", "counts_of_error"),
    [
        ("batch", (), 2.0),  # the last one is not finished
        ("batch", ("band",), [2.0, 1.0]),
        ("samples", (), 14.0),  # summed over mini-batches and bands
        ("samples", ("band",), [9.0, 5.0]),
        ("samples", ("batch", "band"), [[5.0, 5.0], [4.0, 0.0], [0.0, 0.0]]),
        ("of_member", (), 6.0),  # both members see the same samples
        ("block", (), 7.0),
        ("known", ("score",), [3.0, 8.0]),
        ("parts", (), 11.0),  # an attribute
        ("words", (), math.nan),
    ],
)
def test_values_are_counted_over_finished_units(over: str, axes: tuple[str, ...], counts_of_error: Any) -> None:
    stored = {
        "done": np.array([[1, 1], [1, 0], [0, 0]]),
        "samples": np.array([[5.0, 5.0], [4.0, 4.0], [3.0, np.nan]]),
        "of_member": np.array([[2.0, 6.0]]),
        "block": np.arange(7),
        "known": np.array([3.0, 8.0]),
    }
    dims = {
        "done": ("batch", "band"), "samples": ("batch", "band"), "of_member": ("part", "member"), "block": ("block",),
        "known": ("score",),
    }  # fmt: skip
    found = independent(over, axes, stored, dims, fact={"parts": 11}.get(over))
    np.testing.assert_array_equal(found, counts_of_error)
    assert math.isnan(independent(over, axes, stored | {"done": np.zeros((3, 2))}, dims, fact=11))


def test_a_plan_has_the_errors_and_ends_that_its_quantities_declare() -> None:
    width, depth = (
        Quantity("width", "m", ("x",), bounds="positive", error="start vectors (jackknife)"),
        Quantity("depth"),
    )
    known = with_errors({"width": width, "depth": replace(depth, error="images", over="n", ends=True)})
    assert list(known) == ["width", "width_se", "depth", "depth_se", "depth_low", "depth_high"]
    assert (known["width"], known["depth"]) == (replace(width, error=""), depth)
    error = Quantity("its standard error over start vectors (jackknife)", "m", ("x",), over="vector")
    assert (known["width_se"], known["depth_se"].over) == (error, "n")
    plan = Plan(over={}, quantities={"width": width})
    assert replace(plan, facts={"a": 1}).quantities == {name: known[name] for name in ("width", "width_se")}


def key() -> RunKey:
    plan = Plan(
        over={"batch": np.arange(3)},
        quantities={"samples": Quantity("samples"), "loss_se": Quantity("its standard error", over="samples")},
        summaries={"mean_se": Quantity("its standard error", over="batch")},
        about={"batch": Quantity("mini-batch")},
    )
    return RunKey("unknown", "toy", "0123456789", plan, {"samples": 30})


def test_counts_go_through_journals_copies_and_merges(tmp_path: Path) -> None:
    restored = from_header(to_header(key())).plan
    assert (restored.quantities, restored.summaries) == (key().plan.quantities, key().plan.summaries)
    parts = [tmp_path / "first.h5", tmp_path / "second.h5"]
    for k, path in enumerate(parts):
        with Writer(path, key(), reduce_of=reduce_of) as writer:
            for unit in writer.pending()[k::2]:
                writer.write(unit, {"samples": 10.0 + unit.index[0], "loss_se": 1.0})
    whole = tmp_path / "whole.h5"
    merge_files(parts, whole, reduce_of=reduce_of)
    merge_files([whole], tmp_path / "copy.h5", reduce_of=reduce_of)
    for path, n in {**dict(zip(parts, (2, 1), strict=True)), whole: 3, tmp_path / "copy.h5": 3}.items():
        with h5py.File(path) as file:
            ((_, group),) = groups.results_in(file)
            assert dict(group["mean_se"].attrs)["n"] == n
            assert (group["loss_se"].attrs["n"], group["loss_se"].attrs["over"]) == (11 if n == 1 else 10, "samples")


def test_a_series_counts_its_rows_and_reads_what_is_fixed(tmp_path: Path) -> None:
    plan = key().plan
    noise = {"noise_se": Quantity("its standard error", over="parts")}
    plan = replace(plan, quantities={**plan.quantities, **noise}, summaries={}, grows=True, facts={"parts": 4})
    writer = SeriesWriter(tmp_path / "series.h5", replace(key(), plan=plan))
    writer.write(7, {"samples": 12.0, "loss_se": 1.0, "noise_se": 0.5})
    writer.close()
    with h5py.File(tmp_path / "series.h5") as file:
        ((_, group),) = groups.results_in(file)
        assert [group[name].attrs["n"] for name in ("loss_se", "noise_se")] == [12, 4]


def test_the_error_of_nc4_is_its_spread_over_sets_of_images() -> None:
    rng = np.random.default_rng(0)
    means, weight = rng.normal(size=(2, 5, 8)) * [[[0.5]], [[0.15]]]
    weight = weight + means
    found = []
    for _ in range(100):
        y = rng.integers(5, size=200)
        x = means[y] + rng.normal(size=(200, 8))
        decisions = (x @ weight.T - 0.5 * (weight**2).sum(axis=1)).argmax(axis=1)
        found.append(collapse(x, Labels(y.astype(float)), decisions, weight)["nc4"])
    value, error = np.array(found).T
    assert 0.85 < np.sqrt((error**2).mean()) / value.std(ddof=1) < 1.15  # over samples alone: 0.6
