"""The doctor names each planted fault by its rule, and says nothing of the same result without it."""

import json
import math
import re
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import h5py
import numpy as np
import pytest
import synthetic
import xarray as xr
from command_line import Command, one_line
from faulty_results import CASES, SEVERAL, drops, line, made, surface

from landscape.doctor import panels, premises, protocols, rules, spectra, surfaces
from landscape.doctor.finding import SEVERITIES, Result, RuleOfSeveral
from landscape.doctor.rules import OF_A_PROBE, OF_ALL, OF_ONE, examine
from landscape.probes import PROBES
from landscape.results import reader
from landscape.running.run import reduce_of


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_named_once_and_a_sound_result_is_not(name: str) -> None:
    rule, faulty, healthy, remedy = CASES[name]
    (finding,) = rule(faulty)
    assert finding.severity in SEVERITIES
    assert finding.groups == (faulty.group,)
    assert remedy.lstrip("-") in finding.remedy
    assert "\n" not in finding.text + finding.remedy
    assert list(rule(healthy)) == []


def test_a_basin_of_one_point_is_suspicious_and_one_of_three_is_a_note() -> None:
    named = [(finding.rule, finding.severity) for reach in (8.0, 2.0) for finding in surfaces.too_wide(surface(reach))]
    assert named == [("too-wide", "suspicious"), ("coarse-basin", "note")]


@pytest.mark.parametrize(("reach", "points"), [(8.0, 11), (2.0, 11), (2.0, 7), (1.0, 7), (0.9, 5), (1.05, 9)])
def test_the_command_for_a_coarse_basin_resolves_it(reach: float, points: int) -> None:
    (finding,) = surfaces.too_wide(surface(reach, points=points))
    asked = dict(re.findall(r"--(range|resolution) (\S+)", finding.remedy))
    assert float(asked.get("range", reach)) <= reach
    again = surface(float(asked.get("range", reach)), points=int(asked.get("resolution", points)))
    assert list(surfaces.too_wide(again)) == []


@pytest.mark.parametrize("name", SEVERAL)
def test_a_fault_of_several_results_is_named_once(name: str) -> None:
    rule, faulty, healthy = SEVERAL[name]
    (finding,) = rule(faulty)
    assert len(finding.groups) == 2
    assert "\n" not in finding.text + finding.remedy
    assert list(rule(healthy)) == []


def test_the_command_that_looks_at_a_network_loads_it_as_it_was_loaded() -> None:
    loading = {"model": "net.py:model", "model_arg": {"depth": 2}, "data": "net.py:data", "loss": "mse"}
    result = made("lesion", intact_accuracy=0.1, spec={**loading, "mean": [0.0], "std": [1.0], "batch_size": 8})
    (finding,) = premises.at_chance(result)
    command = "landscape evaluate net.pt --model net.py:model --model-arg depth=2 --data net.py:data --loss mse"
    assert finding.remedy.endswith(command)


def test_three_values_are_too_few_for_an_interval_and_four_are_fewer_than_its_coverage_was_measured_with() -> None:
    every = (made("hessian", {"nep_se": ((), 0.1, {"n": n, "over": "batch"})}) for n in (3.0, 4.0))
    assert [[one.rule for one in spectra.few_values(result)] for result in every] == [["few-values"], ["uncertified"]]


@pytest.mark.parametrize("over", ["samples", "batch"])
def test_more_samples_are_advised_only_where_the_data_have_more(over: str) -> None:
    for asked, advice in (("96", "run: landscape"), ("1024", "all samples are used"), ("all", "all samples are used")):
        result = made("hessian", {"ape_se": ((), 0.1, {"n": 8.0, "over": over})}, spec={"samples": asked}, samples=96)
        result.data["ape_se"].attrs |= {"n": 8.0, "over": over}
        (finding,) = spectra.few_values(result)
        assert finding.remedy.startswith(advice)


@pytest.mark.parametrize(
    ("over", "available", "advice"),
    [
        ("samples", 40, "all samples are used"), ("samples", 60, "--samples all"), ("samples", 4000, "--samples 700"),
        ("batch", 60, "--samples all"), ("block", 4000, "--samples 100"), ("image", 18, "--samples all"),
        ("image", 17, "these data have 17 samples"), ("group", 127, "too few for 32 groups"),
        ("group", 4000, "--samples 128 --groups 32"),
    ],
)  # fmt: skip
def test_no_advice_asks_for_more_samples_than_there_are(over: str, available: int, advice: str) -> None:
    count = {"image": 16, "samples": 40}.get(over, 10)
    about = {"samples": count, "samples_available": available, "certified": '{"block": 12}'}
    result = made("tokens", {"common_se": ((), 0.1)}, **about)
    result.data["common_se"].attrs |= {"n": 8.0, "over": over}
    (finding,) = spectra.few_values(result)
    assert advice in finding.remedy


def test_products_are_advised_where_a_random_vector_takes_two() -> None:
    error = {"batch_trace_se": ((), 0.1, {"n": 16.0, "over": "random vectors"})}
    for products, advised in ((16, 32), (32, 64)):
        (finding,) = spectra.few_values(made("trace", error, parameters={"vectors": products}))
        assert f"--vectors {advised}" in finding.remedy


def test_a_fault_of_sixty_networks_is_named_once() -> None:
    faults: dict[RuleOfSeveral, Callable[[str], Result]] = {
        protocols.differing_protocols: lambda label: made("lesion", label=label, samples=100 + int(label)),
        protocols.other_samples: lambda label: made("lesion", label=label, data_sha256=label),
        protocols.same_weights: lambda label: made("lesion", label=label, checkpoint_sha256="one"),
    }
    for rule, network in faults.items():
        assert len(list(rule([network(str(i)) for i in range(60)]))) == 1


def test_the_range_of_a_line_between_checkpoints_is_theirs() -> None:
    between = line()  # its other end is higher than guessing is for two classes, and so are most of its points
    between.data.attrs |= {"along": "checkpoints", "classes": 2}
    between.data["loss"] = between.data["loss"] * 0 + np.array([0.1, 2.0, 3.0, 2.0, 0.01])
    assert [finding for rule in OF_ONE for finding in rule(between)] == []
    between.data.attrs["along"] = "random"
    assert {finding.rule for rule in OF_ONE for finding in rule(between)} == {"too-wide", "minimum-at-edge"}


def test_one_cause_is_one_finding_that_names_its_results() -> None:
    same = [finding for k in range(60) for finding in panels.flat_panel(drops("lesion", 0.001, label=f"net{k}"))]
    other = list(panels.flat_panel(drops("noise", 0.0, parameters={"eps": "0.1"})))
    one, two = rules.by_cause([*same, *other])
    assert (len(one.groups), two.groups) == (60, other[0].groups)
    assert one.text.endswith(
        "likewise lesion/net1-0123456789, lesion/net2-0123456789, lesion/net3-0123456789 and 56 more"
    )


def test_a_comparison_that_is_out_of_date_is_named_with_the_command_that_makes_it_anew() -> None:
    stored = made("compare")
    (finding,) = rules.stale(stored, [stored], lambda data, of_file: f"out of date: {len(of_file)} numbers; run")
    assert (finding.text, finding.remedy) == ("out of date: 1 numbers", "run: landscape compare r.h5")
    assert list(rules.stale(stored, [stored], lambda *_: "")) == []


def test_every_rule_has_a_case() -> None:
    tested = {case[0] for case in (*CASES.values(), *SEVERAL.values())}
    assert {rule.__name__ for rule in (*OF_ONE, *OF_A_PROBE, *OF_ALL) if rule not in tested} == {"unfinished"}


def test_units_of_a_replaced_checkpoint_are_not_to_be_finished_with_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "standings", lambda file: [])
    path = tmp_path / "net.pt"
    half = {"done": ("batch", np.array([1, 0], np.uint8))}
    for content, says in ((b"weights", "run: landscape trace"), (b"others", "only its older file can finish them")):
        path.write_bytes(content)
        result = made("trace", half, spec={"checkpoint": str(path)}, checkpoint_sha256=sha256(b"weights").hexdigest())
        assert [says in finding.remedy for finding in rules.unfinished(result)] == [True]


@pytest.mark.parametrize(("stored", "again", "changed"), [(math.nan, math.nan, 0), (2.0, 2.0, 0), (1.0, 2.0, 1)])
def test_summaries_are_computed_again(stored: float, again: float, changed: int) -> None:
    found = rules.summaries(made("trace", {"trace": stored}), lambda arrays: {"trace": np.array(again)})
    assert [finding.rule for finding in found] == ["summaries"] * changed


@pytest.mark.slow
def test_a_number_or_an_attribute_of_any_probe_that_was_changed_afterwards_is_named(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "OF_ONE", ())
    path = Path(shutil.copy(small, tmp_path / "changed.h5"))
    names = [name for name, _ in reader.groups(path)]
    assert {name.partition("/")[0] for name in names} >= {*PROBES}
    assert not {finding.rule for finding in examine([path], reduce_of)} & {"changed", "summaries"}
    with h5py.File(path, "a") as file:
        for number, name in enumerate(names):
            if number % 2:
                file[name].attrs["samples"] = 50_000
            else:
                file[name]["done"][...] = 0
    found = [finding for finding in examine([path], reduce_of) if finding.rule in ("changed", "summaries")]
    assert {(finding.severity, name) for finding in found for name in finding.groups} == {
        ("wrong", name) for name in names
    }


def test_no_rule_fails_on_a_result_without_anything() -> None:
    for probe in ("surface", "line", "hessian", "trajectory", "trace", "calibration", "unknown"):
        bare = Result(Path("r.h5"), f"{probe}/x-0", xr.Dataset(attrs={"probe": probe, "spec": "[", "parameters": "1"}))
        assert [finding for rule in OF_ONE for finding in rule(bare)] == []
        assert [finding for rule in (*OF_A_PROBE, *OF_ALL) for finding in rule([bare, bare])] == []


@pytest.mark.slow
def test_untrained_networks_are_at_chance_and_partial_results_are_resumed(command: Command, tmp_path: Path) -> None:
    out, run = tmp_path / "r.h5", "checkpoints/resnet_demo-digits"
    few = ("--resolution", "3", "--samples", "64", "--out", out)
    assert command("surface", "--model", "preresnet_demo", "--data", "digits", *few)[0] == 0
    assert command("surface", f"{run}/final.pt", *few, "--shard", "1/2")[0] == 0
    code, said, _ = command("doctor", out, "--json")
    rules = {(finding["rule"], finding["severity"]) for finding in json.loads(said)}
    assert (code, {("at-chance", "wrong"), ("unfinished", "suspicious")} <= rules) == (3, True)
    code, said, _ = command("doctor", out)
    assert "4 of 9 units missing" in said
    assert f"run: landscape surface {run}/final.pt --resolution 3 --bn frozen --samples 64 --out {out}" in said
    assert said.splitlines()[-1].startswith("1 wrong, ")


@pytest.mark.slow
def test_initial_weights_are_a_note_and_the_exit_code_is_0(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "r.h5"
    assert command("lesion", "checkpoints/resnet_demo-digits/init.pt", "--samples", "128", "--out", out)[0] == 0
    code, said, _ = command("doctor", out)
    assert (code, said.splitlines()[-1]) == (0, "nothing wrong or suspicious found, 1 note")


@pytest.mark.slow
def test_files_that_hold_no_results_are_refused_in_one_line(command: Command, tmp_path: Path) -> None:
    foreign, text = tmp_path / "foreign.h5", tmp_path / "text.h5"
    with h5py.File(foreign, "w") as file:
        file["loss"] = 1.0
    text.write_text("loss 1\n")
    for path in (tmp_path / "none.h5", text, tmp_path):
        code, said, err = command("doctor", path)
        assert (code, said, one_line(err)) == (1, "", True), err
    (tmp_path / "empty.h5").touch()
    assert command("doctor", tmp_path / "empty.h5")[0] == 1
    code, said, err = command("doctor", foreign)
    assert (code, one_line(err)) == (1, True), (said, err)


@pytest.mark.slow
def test_the_findings_that_the_page_of_pictures_quotes_are_those_of_its_files() -> None:
    folder = Path(__file__).parents[1] / "docs" / "is-my-plot-right"
    page = " ".join(folder.with_suffix(".md").read_text().replace("\n> ", " ").split())
    named = {file.stem: examine([file]) for file in folder.glob("*.h5")}
    rules = {name: [finding.rule for finding in findings] for name, findings in named.items()}
    assert rules == {
        "healthy": [], "too-wide": ["too-wide"], "too-narrow": ["too-narrow"], "train-mode": ["mini-batch"],
        "wrong-normalisation": ["at-chance", "contradicts-checkpoint", "minimum-elsewhere"],
    }  # fmt: skip
    together = examine([folder / "healthy.h5", folder / "train-mode.h5"])
    for finding in (*(finding for findings in named.values() for finding in findings), *together):
        assert f"{finding.severity} ({finding.rule}): {finding.text}" in page
    for name in named:
        assert f"]({folder.name}/{name}.png)" in page
        assert (folder / f"{name}.png").stat().st_size < 40_000


@pytest.mark.slow
def test_show_and_plot_name_the_doctor_where_it_would_name_something(command: Command, tmp_path: Path) -> None:
    sound, faulty = tmp_path / "sound.h5", tmp_path / "faulty.h5"
    for path in (sound, faulty):
        synthetic.write(path, synthetic.NETWORKS[:1], probes=("variance",))
    with h5py.File(faulty, "r+") as file:
        (group,) = file["variance"].values()
        group["done"][-1] = 0
    assert "landscape doctor" not in command("show", sound)[1]
    line = f"1 suspicious: landscape doctor {faulty} says what, and what to do"
    assert command("show", faulty)[1].splitlines()[-1] == line
    assert line in command("plot", faulty, "--out", tmp_path / "figures")[2]
    assert "doctor" not in command("plot", sound, "--out", tmp_path / "figures")[2]
    assert "doctor" not in command("show", faulty, "--json")[1]
