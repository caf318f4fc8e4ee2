"""Comparisons: what is compared with what, by which protocol, with which verdict."""

import json
import re
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import synthetic
import torch
import xarray as xr
from comparing import result, seeds, trace
from scipy import stats
from torch import nn

import landscape
from landscape.cli.main import exit_code
from landscape.plots import drawing
from landscape.plots.comparison import text as comparison_text
from landscape.plots.comparison.comparison import ALIKE, EQUAL, REAL, Comparison, flatness, paired
from landscape.plots.comparison.comparison import compare_results as compare
from landscape.plots.comparison.rows import records, sections
from landscape.plots.figures.compare_study import Records, page
from landscape.plots.figures.compare_study import draw as draw_panel
from landscape.probes import PROBES
from landscape.results import reader
from landscape.results.headline_numbers import measured
from landscape.statistics.paired import paired_t


def verdicts(found: Comparison) -> dict[tuple[str, str], str]:
    return {(c.first, c.second): c.verdict for c in found.contrasts}


def test_a_clear_difference_is_real_and_names_the_flatter_network() -> None:
    (contrast,) = compare([trace("a", 1.0), trace("b", 3.0)]).contrasts
    assert (contrast.first, contrast.second, contrast.verdict) == ("b", "a", REAL)
    assert contrast.favours == "a is flatter"
    (contrast,) = compare([trace("a", 1.0), trace("b", 1.1)]).contrasts
    assert (contrast.verdict, contrast.favours) == (ALIKE, "")


def test_numbers_of_other_protocols_are_never_compared() -> None:
    found = compare([trace("a", 1.0, spec={"batch_size": 64}), trace("b", 3.0)])
    assert verdicts(found) == {("b", "a"): "not comparable: protocols differ (batch size 128 against 64)"}
    assert [len(rows) for words, rows in sections(found)[0].tables] == [1, 1, 1]  # a table of each, and the differences
    text = comparison_text.as_text(found)
    assert "[a] digits test, 100 samples, batch size 64" in text
    assert "[b] digits test, 100 samples, batch size 128 (from a: batch size 128 against 64)" in text


def test_the_split_is_part_of_the_protocol_and_an_unused_batch_size_is_not() -> None:
    values = {"nll": 0.5, "nll_se": 0.01}
    results = [result("calibration", "a", values), result("calibration", "b", values, spec={"batch_size": 64})]
    assert verdicts(compare(results)) == {("b", "a"): ALIKE}
    results[1] = result("calibration", "b", values, spec={"split": "train"})
    assert verdicts(compare(results)) == {("b", "a"): "not comparable: protocols differ (split train against test)"}


def test_parameters_are_part_of_the_protocol_unless_they_only_change_the_error() -> None:
    one, other = trace("a", 1.0, parameters={"vectors": 8}), trace("b", 3.0, parameters={"vectors": 64})
    assert verdicts(compare([one, other])) == {("b", "a"): REAL}
    other = trace("b", 3.0, parameters={"params": "head"})
    assert "params head against not said" in verdicts(compare([one, other]))["b", "a"]


def test_other_samples_under_the_same_name_are_another_protocol() -> None:
    found = compare([trace("a", 1.0, data_sha256="0"), trace("b", 3.0, data_sha256="1")])
    assert verdicts(found)["b", "a"] == "not comparable: protocols differ (other samples of the same name)"


def test_a_half_finished_result_is_marked_and_not_compared() -> None:
    found = compare([trace("a", 1.0), trace("b", 3.0, done=0)])
    assert verdicts(found) == {("b", "a"): "not comparable: b is unfinished (0 of 1 unit)"}
    assert "b (partial: 0 of 1 unit)" in comparison_text.as_text(found)


def test_every_pair_up_to_four_networks_and_then_all_with_the_first() -> None:
    four = [trace(name, 1.0) for name in "abcd"]
    assert len(compare(four).contrasts) == 6
    assert set(verdicts(compare([*four, trace("e", 1.0)]))) == {(name, "a") for name in "bcde"}
    assert set(verdicts(compare(four, against="c"))) == {(name, "c") for name in "abd"}


def test_rows_with_one_reference_name_it_once() -> None:
    found = compare([trace(name, value) for name, value in zip("abcde", (2.0, 1.0, 3.0, 2.0, 2.0), strict=True)])
    (_, (words, rows)) = sections(found)[0].tables
    assert words == "Differences from a"
    verdicts = [(row["difference"], row["verdict"]) for row in rows]
    assert verdicts[:3] == [("b", "real: flatter"), ("c", "real: sharper"), ("d", ALIKE)]


def test_p_is_corrected_over_the_rows_of_a_probe() -> None:
    results = [trace(name, value) for name, value in (("a", 1.0), ("b", 1.3), ("c", 1.0))]
    first = compare(results[:2]).contrasts[0]
    assert first.adjusted == pytest.approx(first.difference.p)  # type: ignore[union-attr]
    assert first.verdict == REAL
    assert [c.verdict for c in compare(results).contrasts] == [ALIKE] * 3  # 3 x 0.034


def hessian(label: str, values: np.ndarray, **about: Any) -> tuple[str, xr.Dataset]:
    positive, known = values[values > 0], np.nan_to_num(values, nan=-np.inf)
    arrays = {"eigenvalue": (("batch", "rank"), values), "largest": ("batch", known.max(axis=1)),
              "nep": float((values < 0).mean()), "ape": float(positive.mean()),
              "converged": (("batch", "rank"), 1 + 0 * values), "done": ("batch", np.ones(len(values)))}  # fmt: skip
    return result("hessian", label, arrays, **{"data_sha256": "0", "batch_size": 16, **about})


def test_spectra_of_the_same_mini_batches_are_compared_pair_by_pair() -> None:
    rng = np.random.default_rng(0)
    hard = rng.exponential(10.0, size=(8, 1))  # what makes a mini-batch hard for both
    values = [hard + 5 + rng.normal(size=(8, 4)), hard + 7 + rng.normal(size=(8, 4))]
    one, other = (hessian(label, v) for label, v in zip("ab", values, strict=True))
    by_pairs = paired(other[1], one[1])
    assert by_pairs["ape"] == paired_t(values[1].mean(axis=1), values[0].mean(axis=1), "mini-batches")  # equal counts
    assert compare([one, other]).contrasts[1].verdict == REAL
    assert paired(other[1].assign_attrs(data_sha256="1"), one[1]) == {}
    assert paired(other[1].assign_attrs(data_sha256=""), one[1].assign_attrs(data_sha256="")) == {}


def test_the_share_of_negative_values_is_paired_too_and_keeps_its_value() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(size=(6, 10)), rng.normal(0.3, 1.0, size=(6, 10))
    one, other = (hessian(label, v)[1] for label, v in zip("ab", values, strict=True))
    found = paired(one, other)
    shares = [(v < 0).mean(axis=1) for v in values]
    assert found["nep"].p == pytest.approx(paired_t(*shares).p)
    assert found["ape"].value == pytest.approx(float(one["ape"]) - float(other["ape"]))


def test_what_cannot_differ_or_repeats_another_number_is_not_tested_nor_called_better() -> None:
    rng = np.random.default_rng(3)
    spectra = [hessian(name, rng.uniform(5.0 * (i + 1), 5.0 * (i + 2), (8, 1))) for i, name in enumerate("ab")]
    share, mean = compare(spectra).contrasts  # none is negative in either
    assert (share.number, share.verdict) == ("nep", EQUAL)
    assert mean.difference is not None
    assert mean.adjusted == mean.difference.p
    values = [{"value": ("measure", 2 * [1.0 + i]), "se": ("measure", 2 * [0.01], {"n": 100})} for i in range(2)]
    names = {"measure_name": ("measure", ["sam", "trace"])}
    assert len(compare([result("flatness", str(i), value | names) for i, value in enumerate(values)]).contrasts) == 1
    drops = [{"accuracy_drop": ("unit", [drop]), "accuracy_drop_se": ("unit", [0.01])} for drop in (0.1, 0.5)]
    found = compare([result("lesion", str(i), drop | {"name": ("unit", ["conv"])}) for i, drop in enumerate(drops)])
    assert {(c.verdict, c.favours) for c in found.contrasts} == {(REAL, "")}  # the other has more to lose


@pytest.mark.slow
def test_changes_barriers_and_ensembles_favour_nobody_and_a_barrier_that_no_point_exceeds_is_not_tested(
    tmp_path: Path,
) -> None:
    """A network at chance has nothing to lose, and a barrier is of a pair."""
    for probe in PROBES:
        for headline in synthetic.headlines_of(probe):
            if re.search("drop|increase|barrier|rise", f"{headline.quantity} {headline.name}"):
                assert headline.reading == "", (probe, headline.name)
    path = synthetic.write(tmp_path / "r.h5", synthetic.NETWORKS[:2], probes=("line", "noise", "ensemble"))

    def flat(file: h5py.File) -> None:
        line = next(iter(file["line"].values()))
        line["barrier"][...] = line["barrier_se"][...] = 0.0

    found = compare(reader.groups(synthetic.changed(path, tmp_path / "flat.h5", flat)))
    assert "barrier" not in {c.number for c in found.contrasts}  # its error is not known
    members = {"parameters": {"members": "a.pt,b.pt"}, "checkpoint_sha256": "ab"}
    both = compare([trace("a", 1.0), trace("b", 2.0), result("ensemble", "a and b", {"nll": 0.1}, **members)])
    assert both.networks == ("a", "b")
    (section,) = sections(compare([trace(name, 1.0, np.nan) for name in "ab"]))
    assert "95 %" not in section.caption


def test_spectra_of_other_mini_batches_are_compared_by_their_spread() -> None:
    rng = np.random.default_rng(2)
    values = [rng.exponential(10.0, size=(4, 5)) for _ in range(2)]
    one, other = (hessian(label, v) for label, v in zip("ab", values, strict=True))
    unknown = other[0], other[1].assign_attrs(data_sha256="")
    (contrast,) = [c for c in compare([one, unknown]).contrasts if c.number == "ape"]
    assert contrast.difference is not None
    known = stats.ttest_ind(values[1].mean(axis=1), values[0].mean(axis=1), equal_var=False)
    assert contrast.difference.p == pytest.approx(known.pvalue)  # a normal distribution would be too sure of 4
    lost = values[0].copy()
    lost[1] = np.nan
    assert paired(hessian("c", lost)[1], other[1]) == {}


@pytest.mark.slow
def test_a_paired_difference_is_that_of_the_headline_numbers(tmp_path: Path) -> None:
    probes = ("calibration", "corruption", "ensemble", "hessian")
    path = synthetic.write(tmp_path / "study.h5", synthetic.NETWORKS[:2], probes=probes)
    for probe in probes:
        one, other = (data.assign_attrs(data_sha256="0") for _, data in reader.find(path, probe))
        values = [{number.name: number.value for number in measured(data)} for data in (one, other)]
        found = paired(one, other)
        assert set(found) & set(values[0]), probe
        for name, difference in found.items():
            if name == "brier":  # of the figure alone, no headline number
                continue
            assert difference.value == pytest.approx(values[0][name] - values[1][name], abs=1e-9), (probe, name)


def plane(label: str, height: float, seed: int, loss: float = 0.5) -> tuple[str, xr.Dataset]:
    values = {"height": ("radius", [height]), "height_se": ("radius", [0.01]), "radius": ("radius", [0.5])}
    return result("surface", label, values, parameters={"plane": "random", "seed": seed, "directions": 3})


def test_heights_on_several_random_planes_have_the_error_over_planes() -> None:
    heights = {"a": (1.0, 1.4, 0.9), "b": (1.6, 1.1, 1.5)}
    results = [plane(label, h, seed) for label, values in heights.items() for seed, h in enumerate(values)]
    found = compare(results)
    assert found.entries[0].numbers["height at 0.5"].value == pytest.approx(np.mean(heights["a"]))
    (contrast,) = found.contrasts
    assert contrast.difference is not None
    assert contrast.difference.method == "Welch's t over planes"
    assert contrast.verdict == ALIKE
    (single,) = compare([results[0], results[3]]).contrasts
    assert (single.verdict, single.favours) == (REAL, "a is flatter on this plane")


def test_the_newest_of_equal_results_counts_and_is_noted() -> None:
    found = compare([trace("a", 1.0), trace("a", 2.0, created="2026-02-01"), trace("b", 3.0)])
    assert found.entries[0].numbers["trace"].value == 2.0
    assert found.notes == ("trace of a is stored several times; the newest counts",)


def test_checkpoints_of_one_label_and_changed_networks_have_names_of_their_own() -> None:
    found = compare([trace("a", 1.0, checkpoint_sha256="1" * 8), trace("a", 3.0, checkpoint_sha256="2" * 8)])
    assert found.networks == ("a (111111)", "a (222222)")
    found = compare([trace("a", 1.0), trace("a", 3.0, spec={"mc_dropout": 8})])
    assert found.networks == ("a", "a (8 dropout masks)")


def test_trainings_of_one_label_are_named_by_their_optimisers_which_no_line_above_both_does() -> None:
    runs = [
        result("monitor", "net", {"eigenvalue": (("step", "rank"), [[value]])}, checkpoint_sha256="", created=optimizer,
               protocol=f"one mini-batch, optimiser {optimizer}")
        for value, optimizer in enumerate(("SGD", "Adam"), 1)
    ]  # fmt: skip
    found = compare(runs)
    assert [name[:9] for name in found.networks] == ["net (SGD,", "net (Adam"]
    assert [one.words for one in found.protocols["monitor"]] == ["one mini-batch"]
    assert [one.words for one in compare(runs[:1]).protocols["monitor"]] == ["one mini-batch, optimiser SGD"]


def test_equal_weights_under_two_labels_are_said_to_be_equal() -> None:
    results = [trace(label, 1.0, checkpoint_sha256="1" * 8) for label in ("good", "twin")]
    for _, data in results:
        data.encoding["group"] = f"trace/{data.attrs['label']}-1234567890"
    assert compare(results).notes == ("twin has the same weights as good",)


def test_a_share_of_all_has_the_error_of_its_interval() -> None:
    values: dict[str, Any] = {"accuracy_drop": ("unit", [0.1]), "accuracy_drop_se": ("unit", [0.01])}
    values["name"] = ("unit", ["conv"])
    one, other = (result("lesion", n, values, intact_accuracy=a, samples=20) for n, a in (("a", 0.9), ("b", 1.0)))
    (contrast,) = [c for c in compare([one, other]).contrasts if c.number == "intact accuracy"]
    assert contrast.difference is not None
    half = stats.t.ppf(0.975, 19)
    width = 1.0 - 1 / (1 + half**2 / 20)  # of Wilson's interval, with 0.9 +- 0.069 of the other
    errors = np.square([width / (2 * half), np.sqrt(0.9 * 0.1 / 19)])
    freedom = 19 * errors.sum() ** 2 / (errors @ errors)
    assert contrast.difference.high - contrast.difference.value == pytest.approx(
        stats.t.ppf(0.975, freedom) * np.sqrt(errors.sum())
    )


def test_numbers_without_an_error_are_shown_and_not_compared() -> None:
    values = [{"divergence": ("layer", [0.5 + i]), "name": ("layer", ["last"])} for i in range(2)]
    found = compare([result("tokens", name, one) for name, one in zip("ab", values, strict=True)])
    assert found.contrasts == ()
    assert "divergence" in comparison_text.as_text(found)


def test_measures_of_flatness_that_disagree_are_said_to() -> None:
    mean = [result("density", label, {"mean": value, "mean_se": 0.1}) for label, value in (("a", 9.0), ("b", 2.0))]
    (line,) = flatness(compare([trace("a", 1.0), trace("b", 3.0), *mean]))
    assert line == "b and a: a is flatter by trace (trace); b is flatter by mean (density); the measures disagree"


@pytest.fixture
def study(tmp_path: Path) -> Path:
    return synthetic.write(tmp_path / "study.h5", synthetic.NETWORKS[:2], probes=("variance", "surface"))


@pytest.mark.slow
def test_the_command_prints_stores_and_draws(study: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert exit_code(["compare", str(study)]) == 0
    out, err = capsys.readouterr()
    assert "== surface ==" in out
    assert "stored as compare/2_networks-" in err
    ((group, data),) = reader.find(study, "compare")
    stored = study.read_bytes()
    assert exit_code(["compare", str(study), "--quiet"]) == 0
    assert study.read_bytes() == stored  # nothing new, nothing written
    assert exit_code(["show", str(study)]) == 0
    assert "out of date" not in capsys.readouterr().out
    synthetic.write(study, synthetic.NETWORKS[:2], probes=("similarity",))
    assert exit_code(["show", str(study)]) == 0
    assert re.search(r"out of date \d+ numbers changed or came since; run landscape compare", capsys.readouterr().out)
    assert exit_code(["compare", str(study), "--quiet"]) == 0
    ((other, again),) = reader.find(study, "compare")  # in place of the older one
    assert group != other
    assert again.sizes["row"] > data.sizes["row"]
    (figure,) = drawing.draw_studies(study, tmp_path / "figures", names=("compare",))
    assert figure.name == "compare.png"


@pytest.mark.slow
def test_comparisons_of_other_groups_have_figures_of_their_own(study: Path, tmp_path: Path) -> None:
    for group in ("vit=vit*,other=resnet*", "one=vit*,two=resnet*"):
        assert exit_code(["compare", str(study), "--quiet", "--group", group, "--out", str(tmp_path / "a.md")]) == 0
    drawn = drawing.draw_studies(study, tmp_path / "figures", names=("compare",))
    assert len(set(drawn)) == 2


@pytest.mark.slow
def test_out_is_written_by_its_ending(study: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name, start in (("a.md", "## surface"), ("a.csv", "kind,probe"), ("a.tex", r"\begin{table"), ("a.json", "{")):
        assert exit_code(["compare", str(study), "--no-store", "--quiet", "--out", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_text().startswith(start)
    assert capsys.readouterr().out == ""
    assert reader.find(study, "compare") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--against", "nobody"], 2, "--against nobody is unknown; expected one of "),
        (["--group", "nothing"], 2, "that fits a label such as "),
        (["--format", "xml"], 2, "--format xml is unknown; expected text, markdown"),
        (["--out", "."], 1, "is a folder, expected a file for the tables"),
    ],
)
def test_unusable_options_are_one_line(
    study: Path, words: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(["compare", str(study), "--no-store", *words]) == code
    err = capsys.readouterr().err.strip()
    assert said in err
    assert "\n" not in err


@pytest.mark.slow
def test_an_empty_file_and_one_network_say_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.h5"
    with h5py.File(empty, "w") as file:
        file.attrs["format"] = 1
    assert exit_code(["compare", str(empty)]) == 1
    assert "holds nothing finished to compare; run a probe first" in capsys.readouterr().err
    one = synthetic.write(tmp_path / "one.h5", synthetic.NETWORKS[:1], probes=("variance",))
    assert exit_code(["compare", str(one), "--no-store"]) == 0
    assert "One network: there is nothing to compare it with" in capsys.readouterr().out


@pytest.mark.slow
def test_a_file_that_cannot_be_changed_is_compared_all_the_same(
    study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*about: Any) -> str:
        raise PermissionError(13, "Permission denied", str(study))

    monkeypatch.setattr("landscape.plots.comparison.rows.store", refuse)
    assert exit_code(["compare", str(study)]) == 0
    assert f"note: not stored in {study} (Permission denied)" in capsys.readouterr().err


@pytest.mark.slow
def test_several_files_are_compared_as_one(tmp_path: Path) -> None:
    files = [
        synthetic.write(tmp_path / f"{i}.h5", synthetic.NETWORKS[i : i + 1], probes=("variance",)) for i in range(2)
    ]
    assert exit_code(["compare", *map(str, files), "--no-store", "--out", str(tmp_path / "a.json")]) == 0
    assert len(json.loads((tmp_path / "a.json").read_text())["networks"]) == 2


def test_python_compares_files_too_and_shows_tables_in_a_notebook(study: Path) -> None:
    found = landscape.compare(study, group="(vit|resnet)")
    assert set(found.sides) == {"vit", "resnet"}
    assert "<table>" in found._repr_html_()
    assert "\n== surface ==" in f"\n{found}"


@pytest.mark.slow
def test_twelve_networks_with_long_names_and_several_protocols_are_drawn(tmp_path: Path) -> None:
    names = [f"wide_resnet50-cifar100-label_smoothing_{i}-<b>$x$" for i in range(12)]
    results = [trace(name, float(i), spec={"batch_size": size}) for size in (16, 64) for i, name in enumerate(names)]
    (figure,) = drawing.draw_comparison(compare(results), tmp_path)
    assert figure.stat().st_size > 10_000


def test_the_figure_of_groups_has_a_point_per_seed() -> None:
    from matplotlib.figure import Figure

    found = compare([*seeds("x", 1.0, 1.1, 0.9), *seeds("y", 3.0, 3.2)], group=[r"-s\d$"])
    study = Records("2 groups", records(found), {"trace": ["digits test"]})
    ax = Figure().subplots()
    assert draw_panel(study, ax, study.panels[0]) is ax
    points = [line.get_xdata() for line in ax.lines if line.get_fillstyle() == "none"]
    assert [list(part) for part in points] == [[1.0, 1.1, 0.9], [3.0, 3.2]]
    assert page(study).texts[0].get_text().startswith("2 groups. trace: digits test.")


def test_the_figure_shows_flatness_first_and_numbers_that_two_have() -> None:
    values = {f"{name}{end}": 0.1 for name in ("nll", "accuracy", "ece") for end in ("", "_se")}
    many = [result("calibration", name, values) for name in "ab"]
    many += [result("corruption", name, {f"mean_{key}": value for key, value in values.items()}) for name in "ab"]
    many += [trace("a", 1.0), trace("b", 3.0), result("density", "a", {"mean": 1.0, "mean_se": 0.1})]
    study = Records("2 networks", records(compare(many)))
    assert study.panels[0] == ("trace", "a", "trace")
    assert len(study.panels) == 7
    assert not any(probe == "density" for probe, *_ in study.panels)


@pytest.mark.slow
def test_results_in_memory_are_compared_an_ensemble_in_one_table_with_its_members(tmp_path: Path) -> None:
    data, nets = (torch.randn(96, 6, generator=torch.Generator().manual_seed(0)), torch.arange(96) % 3), []
    for seed in range(3):
        torch.manual_seed(seed)
        nets.append(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3)).eval())
    how: Any = {"data": data, "out": None, "quiet": True, "batch_size": 64}
    single = [landscape.measure("calibration", net, label=f"net{i}", draws=50, **how) for i, net in enumerate(nets)]
    masks = landscape.measure("calibration", nets[0], label="net0", mc_dropout=4, draws=50, **how)
    together = landscape.measure("ensemble", nets[0], label="all", members=nets[1:], **how)
    found = landscape.compare([*single, masks], together, rows="calibration/nll")
    own_names = [re.sub(r"[0-9a-f]{6}(, )?", "", entry.network) for entry in found.entries]
    assert own_names == ["net0 ()", "net0 (4 dropout masks)", "net1", "net2", "all (mean of 3)"]
    scores = torch.stack([net(data[0]).softmax(1) for net in nets]).mean(0)
    nll = -scores[torch.arange(96), data[1]].log().detach().double().numpy()
    assert found.entries[4].numbers["nll"].value == pytest.approx(nll.mean(), rel=1e-5)
    against = next(c for c in found.contrasts if c.first == "all (mean of 3)")  # minus the first network
    own = single[0]["sample_nll"].values.ravel()
    expected = stats.ttest_rel(nll, own[np.isfinite(own)])
    assert against.difference is not None
    assert against.difference.p == pytest.approx(expected.pvalue, rel=1e-3)
    for data_ in (3, [3], data[0]):
        with pytest.raises(TypeError, match=r"expected results files, or results of landscape.measure, got a"):
            landscape.compare(data_)
