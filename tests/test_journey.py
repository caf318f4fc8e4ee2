"""One journey of every probe: measured whole; stopped, resumed, measured in processes and in threads, and merged."""

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import counting
import numpy as np
import pytest
from measured_runs import FASTER, attending, loaded, small, stop_after, stored_result

from landscape.checkpoints.checkpoint import state_dict_sha256
from landscape.cli.main import exit_code
from landscape.plots import headlines
from landscape.probe import WHOLE, Plan, Probe, Shard
from landscape.probes import PROBES
from landscape.results import group as groups
from landscape.results import reader
from landscape.results.headline_numbers import measured
from landscape.results.merging import merge_files
from landscape.results.run_key import Arrays, Outcome, command_for
from landscape.running.executor import Executor
from landscape.running.run import digest, reduce_of, run
from landscape.subject.subject import Subject

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = {"attention-maps", "fourier", "lesion", "line", "noise", "probe-linear", "shape-bias", "similarity", "surface",
         "variance"}  # fmt: skip
COUNTS = {  # of 12 samples in 3 mini-batches: the independent values behind an error
    "step": {"mean_update_norm_se": 3, "mean_batch_sharpness_se": 3, "pooled_batch_sharpness_se": 3},
    "density": {"mean_se": 2},
    "noise-scale": {"simple_se": 3, "gradient_noise_se": 3},
    "flatness": {"se": 2},  # the pairs of opposite signs of 4 draws, or 2 random vectors
    "sensitivity": {"loss_increase_se": 12, "mean_trace_se": 6, "additivity_error_se": 12},
    "similarity": {"cka_se": 3},
    "geometry": {"effective_rank_se": 12, "nc4_se": 12},
    "calibration": {"ece_se": 12, "temperature_se": 6},
    "corruption": {"accuracy_se": 12, "mean_accuracy_se": 12},
    **{name: {f"{error}_se": 12} for name, error in (
        ("lesion", "loss_increase"), ("noise", "loss_increase"), ("attack", "accuracy"), ("variance", "variance"),
        ("perturbation", "consistency"), ("input-surface", "line_rise"), ("fourier", "high_frequency"),
        ("attention", "distance"), ("uncertainty", "rms"), ("trajectory", "loss"), ("barriers", "barrier"),
        ("ensemble", "nll"), ("probe-linear", "accuracy"),
    )},
}  # fmt: skip
ALONE = 8  # units of a probe that are measured once more, each by itself


def few_samples(probe: Probe, checkpoints: Path) -> Subject:
    return loaded(checkpoints, samples=12, batch_size=4, ordered=probe.ordered)


@dataclass(frozen=True)
class Journey:
    """A probe, the checkpoints that it is tried on, and its whole result."""

    probe: Probe
    checkpoints: Path
    path: Path
    plan: Plan
    outcome: Outcome

    @cached_property
    def again(self) -> Subject:
        """The network, loaded anew."""
        return few_samples(self.probe, self.checkpoints)

    def stored(self) -> Arrays:
        return stored_result(self.path, self.outcome)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in PROBES]
)
def journey(request: pytest.FixtureRequest, snapshots: Path, tmp_path_factory: pytest.TempPathFactory) -> Journey:
    probe = small(request.param, **FASTER.get(request.param, {}))
    folder = attending(snapshots) if probe.name.startswith("attention") else snapshots
    path = tmp_path_factory.mktemp(probe.name) / "whole.h5"
    subject = few_samples(probe, folder)
    return Journey(probe, folder, path, probe.plan(subject), run(probe, subject, path))


def test_stored_equals_measured(journey: Journey) -> None:
    stored, fresh = journey.stored(), journey.again
    plan = journey.probe.plan(fresh)
    assert stored["done"].all()
    units = list(plan.units())[:: -max(1, math.prod(plan.shape) // ALONE)]  # any order
    for unit in units:
        for quantity, value in journey.probe.measure(fresh, unit).items():
            np.testing.assert_array_equal(stored[quantity][unit.index], value, err_msg=f"{quantity} {unit.index}")
    for label, (_, values) in plan.labels.items():
        np.testing.assert_array_equal(stored[label], values)


def test_every_error_says_how_many_independent_values_it_is_of(journey: Journey) -> None:
    found = counting.checked_error_counts(journey.path, journey.outcome.group)
    assert found.items() >= COUNTS.get(journey.probe.name, {}).items(), found


@pytest.mark.slow
def test_a_result_has_a_headline_and_a_command_that_finds_it(
    journey: Journey, capsys: pytest.CaptureFixture[str]
) -> None:
    ((_, data),) = reader.groups(journey.path)
    known = {*journey.plan.quantities, *journey.plan.summaries, *journey.plan.facts}
    assert known & {one.quantity for one in journey.probe.headlines}
    assert headlines.numbers(data)
    assert measured(data) or journey.probe.name == "noise-scale"  # of 12 samples a bound, in words
    assert exit_code(shlex.split(command_for(data.attrs, journey.path))[1:]) == 0
    assert "already measured" in capsys.readouterr().err


@pytest.mark.slow
def test_stopped_resumed_spread_and_merged_equals_uninterrupted(
    journey: Journey, executors: Mapping[str, Executor], tmp_path: Path
) -> None:
    """One unit in line, stopped; half in threads, the other half in processes: merged, the whole result."""
    probe, one, whole = journey.probe, journey.again, journey.outcome
    here, processes, out = (tmp_path / f"{name}.h5" for name in ("here", "processes", "all"))
    weights = state_dict_sha256(one.model.state_dict())
    with pytest.raises(KeyboardInterrupt) as caught:
        run(probe, one, here, report=stop_after(1))
    assert caught.traceback  # and still the model is as it was
    assert state_dict_sha256(one.model.state_dict()) == weights
    group = groups.stored_group(here, probe.name, digest(probe, one))
    assert group == whole.group
    assert groups.read_array(here, group, "done").sum() == 1
    assert groups.attribute(here, group, "finished") == ""

    odd, even = (Shard(number, 2) for number in (1, 2))
    count, half = whole.units, (whole.units + 1) // 2
    again = half == 1  # that unit was measured in line
    resumed = run(probe, one, here, shard=odd, executor=executors["threads"], overwrite=again)
    assert (resumed.group, resumed.units, resumed.measured) == (group, half, half - (not again))
    rest = run(probe, one, processes, shard=even if count > 1 else WHOLE, executor=executors["processes"])
    assert rest.measured == max(count - half, 1)
    assert [file.name for file in tmp_path.iterdir() if "journal" in file.name or "lock" in file.name] == []

    merged = merge_files([processes, here], out, reduce_of=reduce_of)
    assert [(found.group, found.done, found.units) for found in merged] == [(group, count, count)]
    counting.assert_same_results(out, journey.path)
    assert run(probe, one, out).measured == 0
