"""Claims: numbers in closed form from made-up results, verdicts by the t interval, end to end on digits."""

import math
from pathlib import Path

import numpy as np
import pytest
import synthetic
import xarray as xr
from scipy import stats

import landscape
from landscape.api import names_of_results
from landscape.cli.main import exit_code
from landscape.cli.study import shipped
from landscape.predictions import evaluation
from landscape.results import reader
from landscape.statistics.rounding import plus_minus
from landscape.studies.claims import Claim, Finding, findings, markdown_table, over_seeds
from landscape.studies.expressions import change_across, first_against_rest, stage_ends
from landscape.studies.study import Results, Study
from landscape.studies.study_file import study_of

pytestmark = pytest.mark.slow

BY_NAME = {claim.name: claim for claim in study_of(shipped()["reproduce"], names_of_results).claims}


def results(*results: tuple[str, str, xr.Dataset]) -> Results:
    return {(network, measurement): data for network, measurement, data in results}


def layers(kinds: list[str], reduces: list[int] | None = None, **values: list[float]) -> xr.Dataset:
    arrays = {"kind": kinds, "reduces": reduces or [0] * len(kinds), **values}
    return xr.Dataset({name: ("layer", np.array(array)) for name, array in arrays.items()})


def units(kinds: list[str], stages: list[int], drops: list[float]) -> xr.Dataset:
    return xr.Dataset({"kind": ("unit", kinds), "stage": ("unit", stages), "accuracy_drop": ("unit", drops)})


def claim(claimed: int = 1) -> Claim:
    return Claim("made-up", "A is above B", "nobody", "A - B", claimed, (), lambda _: 0.0)  # type: ignore[arg-type]


def test_the_value_at_stage_ends_is_that_of_the_last_layer_and_steps_leave_out_layers_that_reduce() -> None:
    data = xr.Dataset({"stage": ("layer", np.array([-1, 0, 0, 1, 1, 2]))})
    assert stage_ends(data, np.array([9.0, 1.0, 2.0, 5.0, math.nan, math.nan])) == (2.0 + 5.0) / 2
    assert math.isnan(stage_ends(data, np.full(6, math.nan)))
    data = layers(["stem", "conv", "conv", "msa", "conv", "conv"], [0, 0, 1, 0, 0, 0])
    values = np.array([0.0, 1.0, 10.0, 7.0, math.nan, 3.0])
    assert change_across(data, values, "conv") == 1.0
    assert change_across(data, values, "msa") == -3.0
    assert math.isnan(change_across(data, values, "mlp"))


def test_uncertainty_is_compared_in_units_of_the_map() -> None:
    """A map scaled by a constant, and its standard deviation with it, counts as before."""

    def one(scale: float, deviation: float) -> xr.Dataset:
        values = {"model_uncertainty": [1.0, deviation * scale], "rms": [1.0, 2.0 * scale]}
        arrays = {name: ("layer", np.array(v)) for name, v in values.items()}
        return xr.Dataset({"stage": ("layer", np.array([0, 1])), **arrays})

    made = results(("smoothing", "uncertainty", one(10.0, 0.5)), ("dropout", "uncertainty", one(1.0, 1.0)))
    assert BY_NAME["uncertainty"].compute(made) == pytest.approx(math.log(0.5) / 2)


def test_smoothing_must_be_better_at_every_ensemble_size() -> None:
    def one(nll: list[float]) -> xr.Dataset:
        return xr.Dataset({"nll": ("size", np.array(nll))}, {"size": [1, 2, 20]})

    made = results(
        ("smoothing", "ensemble sizes", one([1.0, 0.7, 0.6])), ("dropout", "ensemble sizes", one([1.5, 0.9, 0.5]))
    )
    assert BY_NAME["smoothing-sizes"].compute(made) == pytest.approx(0.1)


def test_encoders_are_compared_at_their_last_layer_and_over_all() -> None:
    def one(values: list[list[float]]) -> xr.Dataset:
        return xr.Dataset({name: (("layer", "head"), np.array(values)) for name in ("distance", "mutual_information")})

    contrastive, masked = one([[1.0, 3.0], [0.0, 0.2]]), one([[0.5, 0.5], [0.4, 0.6]])
    made = results(("contrastive", "attention", contrastive), ("masked", "attention", masked))
    assert BY_NAME["global-attention"].compute(made) == pytest.approx(4.2 / 4 - 0.5)
    assert BY_NAME["collapse"].compute(made) == pytest.approx(0.1 - 0.5)


def test_temporal_smoothing_is_the_change_from_no_smoothing_of_the_deterministic_pass() -> None:
    scores = np.array([0.5, 0.3, 0.9, 0.1])  # deterministic, temporal, with MC dropout
    data = xr.Dataset({"nll": ("method", scores), "ece": ("method", 2 * scores)})
    data["throughput"] = "method", np.array([200.0, 190.0, 20.0, 180.0])
    made = results(("resnet", "stream", data))
    assert BY_NAME["temporal"].compute(made) == pytest.approx(-0.2)
    assert BY_NAME["temporal-calibration"].compute(made) == pytest.approx(-0.4)
    assert BY_NAME["temporal-throughput"].compute(made) == pytest.approx(0.05)


def test_of_several_results_in_one_place_of_a_study_the_last_counts() -> None:
    stored = [(f"trace/{k}", xr.Dataset({"trace": float(k)}, attrs={"label": f"a-{k}"})) for k in range(3)]
    study = Study.of(stored, lambda probe, data: ("a", probe))
    assert {cell: data["trace"].item() for cell, data in study.cells.items()} == {("a", "trace"): 2.0}
    assert study.networks["a"].label == "a"


def test_the_interval_is_student_s_over_seeds() -> None:
    numbers = [0.9, 1.4, 1.3, 1.0]
    half = stats.t.ppf(0.975, 3) * stats.sem(numbers)
    assert over_seeds(numbers) == plus_minus(1.15, half, 2) == "1.15 ± 0.38"
    assert over_seeds(numbers[:3]) == "1.2"  # from four seeds on


@pytest.mark.parametrize(
    ("numbers", "claimed", "verdict"),
    [
        ([1.0, 1.1, 0.9], 1, "holds"), ([1.0, 1.1, 0.9], -1, "fails"), ([-1.0, -1.1, -0.9], -1, "holds"),
        ([1.0, -1.1, 0.9], 1, "cannot tell"), ([1.0], 1, "cannot tell"), ([1.0, 1.0], 1, "cannot tell"),
        ([], 1, "cannot tell"), ([1.0, math.nan, 1.0], 1, "cannot tell"), ([0.0, 0.0, 0.0], 1, "cannot tell"),
    ],
)  # fmt: skip
def test_a_claim_holds_if_its_number_is_told_apart_from_zero_on_its_side(
    numbers: list[float], claimed: int, verdict: str
) -> None:
    assert Finding(claim(claimed), numbers).verdict == verdict


def test_a_seed_that_lacks_a_result_gives_no_number() -> None:
    data = xr.Dataset({"accuracy": 0.5})
    complete = results(("alternet", "accuracy", data + 0.2), ("preresnet", "accuracy", data))
    (finding,) = findings([BY_NAME["alternet"]], [complete, results(("alternet", "accuracy", data))])
    assert finding.numbers == pytest.approx([0.2])


def test_filters_and_variance_are_changes_across_a_kind_of_layer() -> None:
    features = layers(
        ["stem", "msa", "mlp", "msa", "mlp"],
        high_frequency=[-1.0, -3.0, -2.5, -3.5, -2.0],
        variance=[1.0, 0.5, 2.0, 1.0, 4.0],
    )
    known = results(("vit", "fourier", features), ("vit", "variance", features))
    assert BY_NAME["low-pass"].compute(known) == pytest.approx(-1.5)
    assert BY_NAME["high-pass-mlp"].compute(known) == pytest.approx(1.0)
    assert BY_NAME["variance"].compute(known) == pytest.approx(-math.log(2))


def test_the_rhythm_is_the_first_unit_of_a_stage_against_its_others() -> None:
    data = units(["conv"] * 6, [1, 1, 1, 2, 2, 3], [0.5, 0.1, 0.3, 0.4, 0.2, 0.9])
    assert first_against_rest(data) == pytest.approx(((0.5 - 0.2) + (0.4 - 0.2)) / 2)
    assert math.isnan(first_against_rest(units(["conv"], [1], [0.3])))


def test_ends_compares_attention_at_the_end_of_a_stage_with_the_convolution_there() -> None:
    mixed = units(["conv", "conv", "conv", "msa", "conv", "msa"], [1, 1, 2, 2, 3, 3], [0, 0, 0, 0.5, 0, 0.3])
    plain = units(["conv"] * 6, [1, 1, 2, 2, 3, 3], [0, 0, 0, 0.1, 0, 0.2])
    found = BY_NAME["ends"].compute(results(("alternet", "lesion", mixed), ("preresnet", "lesion", plain)))
    assert found == pytest.approx(((0.5 - 0.1) + (0.3 - 0.2)) / 2)


def test_surface_spectrum_and_noise_are_read_where_they_are_stored() -> None:
    def surface(rise: float) -> xr.Dataset:
        found = {"height": ("radius", [0.0, rise, 9.0])}
        return xr.Dataset(found, {"radius": [0.25, 0.5, 1.0]}, synthetic.declared("surface"))

    def noise(drops: list[float]) -> xr.Dataset:
        return xr.Dataset({"accuracy_drop": ("band", drops)}, {"band": [0.1, 0.30000000000000004, 0.9]})

    known = results(
        ("vit", "surface", surface(1.5)), ("resnet", "surface", surface(2.0)),
        ("vit", "spectrum", xr.Dataset({"ape": 2.0})), ("resnet", "spectrum", xr.Dataset({"ape": 8.0})),
        ("vit", "noise", noise([0, 0.2, 0.1])), ("resnet", "noise", noise([0, 0.1, 0.3])),
    )  # fmt: skip
    assert BY_NAME["flatter"].compute(known) == -0.5
    assert BY_NAME["sharpness"].compute(known) == pytest.approx(-math.log(4))
    assert BY_NAME["noise"].compute(known) == pytest.approx(-0.2)
    assert BY_NAME["noise-contrast"].compute(known) == pytest.approx(-0.1 - 0.2)


def test_the_table_has_a_row_per_claim_with_its_verdict() -> None:
    text = markdown_table([Finding(claim(), [1.0, 1.1, 0.9, 1.0]), Finding(claim(-1), [])])
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines() if row.startswith("|")]
    assert {len(row) for row in rows} == {8}
    assert rows[2][5:] == ["1.00 ± 0.13", "1, 1.1, 0.9, 1", "**holds**"]
    assert rows[3][5:] == ["not measured", "", "**cannot tell**"]
    assert text.endswith("\n\nIn all: 1 holds, 1 cannot tell.\n")


CHECKED = ("rhythm", "alternet", "temporal")


def shortened(monkeypatch: pytest.MonkeyPatch, folder: Path, *changes: tuple[str, str]) -> None:
    """Ship the study with some texts replaced."""
    text = shipped()["reproduce"].read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    file = folder / "reproduce.toml"
    file.write_text(text)
    monkeypatch.setattr("landscape.cli.study.shipped", lambda: {"reproduce": file})
    monkeypatch.setattr("landscape.plots.drawing.draw_run", lambda *_: [])  # of every training, each time


@pytest.mark.campaign
def test_claims_are_reproduced_from_training_to_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [("[measure.lesion]\nsamples = 1024", "[measure.lesion]\nsamples = 32")]
    few += [("[measure.stream]\nsamples = 256", "[measure.stream]\nsamples = 32")]
    shortened(monkeypatch, tmp_path, ('"alternet_demo"', '"preresnet_demo"'), *few)  # the cheapest twin
    out = tmp_path / "out"
    command = ["reproduce", "--data", "digits", "--seeds", "2", *(f"--claim={name}" for name in CHECKED)]
    command += ["--epochs", "1", "--fraction", "0.05", "--out", str(out)]
    assert exit_code(command) == 0
    first, said = capsys.readouterr()
    assert "preresnet, seed 1: accuracy in" in said
    assert (out / f"CLAIMS-{'+'.join(CHECKED)}.md").read_text() == first
    assert not (out / "CLAIMS.md").exists()  # that of all claims
    assert "| 0 | 0, 0 | **cannot tell** |" in first  # equal networks from equal seeds
    assert "AlterNet is above the CNN" in first
    (row,) = [line for line in first.splitlines() if "Temporal smoothing of a stream" in line]
    assert row.count("-0.") + row.count("0.") >= 3  # a mean and two seeds
    assert "In all: " in first
    assert exit_code(command) == 0  # again: from what is there
    second, said = capsys.readouterr()
    assert second == first
    assert "already trained" in said


@pytest.mark.campaign
def test_evaluations_of_ensembles_are_stored_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = ("{ mc_dropout = 0.3, smoothing = true }", "{ mc_dropout = 0.3 }")
    few = ("[measure.ensemble]\nprobe = \"evaluate\"\nsamples = 2048\npasses = 16",
           "[measure.ensemble]\nprobe = \"evaluate\"\nsamples = 64\npasses = 2")  # fmt: skip
    shortened(monkeypatch, tmp_path, same, few)
    command = ["reproduce", "--data", "digits", "--claim", "smoothing", "--seeds", "1", "--epochs", "1"]
    command += ["--fraction", "0.05", "--out", str(tmp_path / "out"), "--quiet"]
    assert exit_code(command) == 0
    assert "| 0 | 0 | **cannot tell** |" in (tmp_path / "out" / "CLAIMS-smoothing.md").read_text()
    ((_, stored),) = reader.find(tmp_path / "out" / "results.h5", "evaluate")  # equal networks from equal seeds
    subject = landscape.load(tmp_path / "out" / "checkpoints/dropout-s0/final.pt", samples=64)
    wanted = evaluation.evaluate(subject.model, list(subject.batches), passes=2)
    assert stored["loss"].sel(passes=2).item() == wanted["loss"]
    monkeypatch.setattr(evaluation, "evaluate", None)
    assert exit_code(command) == 0  # again, without measuring


def test_an_unknown_claim_is_a_usage_error_that_names_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["reproduce", "--claim", "flat"]) == 2
    assert "got flat; did you mean flatter" in capsys.readouterr().err
