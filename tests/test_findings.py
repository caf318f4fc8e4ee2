"""The answers of the report: told only beyond the errors, with the command that would tell more."""

import json
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import synthetic

from landscape.headline import FLATTER
from landscape.plots.comparison.comparison import GroupMean
from landscape.plots.report import findings, next_steps, page, report, sections
from landscape.plots.report.next_steps import command_to_measure
from landscape.probes import probe_class
from landscape.results import reader
from landscape.results.headline_numbers import Measured
from landscape.results.run_key import chosen
from landscape.statistics.flatness import MEASURES
from landscape.subject.spec import Spec

pytestmark = pytest.mark.slow

VIT, RESNET = (network.label for network in synthetic.NETWORKS[:2])


FLAT = (
    "hessian", "trace", "density", "flatness", "step", "line", "sensitivity",
)  # what has measures of flatness beside the surface  # fmt: skip


def answer(path: Path, question: str) -> findings.Finding:
    found = findings.findings(reader.groups(path), path)
    return next(finding for finding in found if question in finding.question)


def test_which_network_is_flatter_is_told_only_beyond_the_errors(few: Path, tmp_path: Path) -> None:
    def heights(file: h5py.File, values: dict[str, float], error: float) -> None:
        for probe in {*FLAT} & {*file}:
            del file[probe]
        for name, group in file["surface"].items():
            group["height"][...] = next((v for label, v in values.items() if name.startswith(label)), 9.0)
            group["height_se"][...] = error
            for basin in [name for name in group if name.startswith("basin")]:
                group[basin][...] = np.nan

    apart = {VIT: 1.0, RESNET: 2.0}
    sure = synthetic.changed(few, tmp_path / "sure.h5", lambda file: heights(file, apart, 0.1))
    assert answer(sure, "flatter").certainty == "certain"
    assert answer(sure, "flatter").answer[0].startswith(f"{VIT} is the flattest by height at 0.5 (surface)")
    unsure = synthetic.changed(few, tmp_path / "unsure.h5", lambda file: heights(file, apart, 0.5))
    assert answer(unsure, "flatter").certainty == "cannot tell"
    assert answer(unsure, "flatter").answer[0] == "These numbers cannot tell."


def test_of_groups_the_spread_over_seeds_tells_and_not_the_errors_of_networks() -> None:
    def means(spread: float) -> list[GroupMean]:
        like = Measured("height at 0.5", 1.0, 9.0, -9.0, 9.0, reading=FLATTER)
        values = {"a": (1.0, 1.0 + spread, 1.0 - spread), "b": (2.0, 2.0 + spread, 2.0 - spread)}
        return [GroupMean("surface", 0, group, like.over(of)) for group, of in values.items()]

    sure, unsure = (findings.flatter([], means(spread)) for spread in (0.05, 2.0))
    assert "over seeds" in sure.question
    assert (sure.certainty, unsure.certainty) == ("certain", "cannot tell")
    assert sure.answer[0] == "a is the flattest by height at 0.5 (surface)."


def test_measures_of_flatness_that_disagree_are_said_to(few: Path, tmp_path: Path) -> None:
    def change(file: h5py.File) -> None:
        for probe in {*FLAT} & {*file}:
            del file[probe]
        for name, group in file["surface"].items():
            group["height"][...] = [2.0, 2.0, 2.0, 1.0] if name.startswith(VIT) else [1.0, 1.0, 1.0, 2.0]
            group["height_se"][...] = 0.01

    said = answer(synthetic.changed(few, tmp_path / "r.h5", change), "flatter").answer
    assert said[0].startswith("There is no single answer")
    assert said[1].startswith(f"{VIT} is the flattest by height at 1 (surface)")  # its basins are the widest too
    assert said[3].startswith("Not told apart by height at 0.5 (surface): flattest ")
    assert said[3].endswith("told apart from 1 of 2.")


@pytest.mark.parametrize(("count", "hidden"), [(5, 0), (60, 56)])
def test_an_answer_about_sixty_networks_shows_its_first_sentences(count: int, hidden: int) -> None:
    found = findings.Finding("Which?", [f"net{i} is." for i in range(count)], "certain")
    shown, _, rest = str(sections.answers([found], ())).partition("<details>")
    assert (shown.count(" is."), rest.count(" is.")) == (count - hidden, hidden)
    assert (f"{hidden} more sentences" in rest) == bool(hidden)


def test_sentences_count_what_they_do_not_name_in_the_order_of_values(tmp_path: Path) -> None:
    networks = [replace(synthetic.NETWORKS[i % 2], label=f"net{i}") for i in range(5)]
    path = synthetic.write(tmp_path / "r.h5", networks, probes=("flatness", "fourier"))
    flat = answer(path, "flatter")
    assert "Not told apart by fisher-rao (flatness): flattest net1, told apart from 3 of 4." in flat.answer
    at = list(MEASURES).index("fisher-rao")
    values = [float(data["value"][at]) for _, data in reader.find(path, "flatness")]
    first, second, third, *others = sorted(range(5), key=lambda i: values[i])
    said = flat.detail.partition("fisher-rao (flatness): ")[2].partition(";")[0]
    assert [word for word in said.split() if "net" in word] == [f"net{first},", f"net{second},", f"net{third}"]
    assert said.endswith(f"and {len(others)} more")
    rivals = next(line for line in answer(path, "filters").answer if line.startswith("net0"))
    named, _, count = rivals.partition("not told apart from ")[2].removesuffix(" more.").partition(" and ")
    assert len(named.split(", ")) == 3
    assert int(count) == 8  # self-attentions, not the layers that raise them


def test_numbers_without_errors_are_not_called_alike_and_those_with_intervals_are_told_apart_by_them(
    few: Path, tmp_path: Path
) -> None:
    def change(file: h5py.File) -> None:
        for group in (one for probe in ("fourier", "lesion") for one in file[probe].values()):
            for name in [name for name in group if name.endswith("_se")]:
                del group[name]

    path = synthetic.changed(few, tmp_path / "r.h5", change)
    for question in ("filters", "unit matters"):
        lines = answer(path, question).answer
        assert all(findings.UNKNOWN in line for line in lines)
        assert not any(words in line for line in lines for words in ("nan", "told apart", "beyond its error"))
    one, other, third = (Measured("x", i, low=i - 1, high=i + 1) for i in (0, 3, 1))
    assert findings._apart(one, other)
    assert not findings._apart(one, third)


def test_results_of_different_protocols_are_not_compared(few: Path, tmp_path: Path) -> None:
    def change(file: h5py.File) -> None:
        for probe in {*FLAT, "surface"} & {*file}:
            for i, group in enumerate(file[probe].values()):
                group.attrs["protocol"] = f"split {i}"

    path = synthetic.changed(few, tmp_path / "r.h5", change)
    assert answer(path, "flatter").certainty == "not measured"


def test_the_layer_that_filters_and_the_unit_that_matters_are_named_with_their_errors(few: Path) -> None:
    ((_, lesion),) = reader.find(few, "lesion", VIT)
    drop = lesion["accuracy_drop"].values
    said = next(line for line in answer(few, "unit matters").answer if line.startswith(VIT))
    assert str(lesion["name"].values[int(np.argmax(drop))]) in said
    assert f"{drop.max():.3g}" in said
    ((_, fourier),) = reader.find(few, "fourier", VIT)
    steps = np.diff(fourier["high_frequency"].values)
    filters = next(line for line in answer(few, "filters").answer if line.startswith(VIT))
    (layer,) = [i for i, name in enumerate(fourier["name"].values) if f" {name} (" in filters.partition(" lowers ")[0]]
    assert steps[layer - 1] == pytest.approx(steps.min())


def test_the_next_command_finishes_what_is_unfinished_first(tmp_path: Path) -> None:
    options = json.dumps({"checkpoint": "runs/a b/final.pt", "samples": "64"})
    path = synthetic.write(tmp_path / "r.h5", synthetic.NETWORKS[:1], probes=("surface",), share=0.5)
    with h5py.File(path, "r+") as file:
        for group in file["surface"].values():
            group.attrs["options"] = options
    step = answer(path, "run next")
    assert step.command.startswith("landscape surface 'runs/a b/final.pt'")
    assert "units missing" in step.answer[0]
    assert "--samples 64" in step.command
    assert "--batch-size" not in step.command
    assert "unfinished" in report(path, tmp_path / "report.html", []).read_text()
    assert page.live_data(stored := reader.groups(path), stored)["surface"][0]["missing"].endswith("units missing")


def test_the_next_command_measures_what_some_networks_lack(few: Path, tmp_path: Path) -> None:
    def change(file: h5py.File) -> None:
        for probe in file:
            for name, group in file[probe].items():
                options = {"checkpoint": f"{group.attrs['label']}.pt", **({"top": 3} if probe == "hessian" else {})}
                options |= {"model": f"net.py:{group.attrs['label']}", "data": "net.py:data"}
                group.attrs["spec"] = group.attrs["options"] = json.dumps(options)
                if probe == "hessian" and name.startswith(RESNET):
                    del file[probe][name]

    path = synthetic.changed(few, tmp_path / "r.h5", change)
    step = next_steps.next_step([(str(d.attrs["label"]), d) for _, d in reader.groups(path)], path)
    loading = f"--data net.py:data --model net.py:{RESNET} --out {path}"  # its own network, the data of the others
    assert step.command == f"landscape hessian {RESNET}.pt --top 3 {loading}"
    lesions = [(str(data.attrs["label"]), data) for _, data in reader.find(path, "lesion")]
    step = next_steps.next_step(lesions, path)  # of two models: no one command measures both
    assert step.command in [f"landscape hessian {one}.pt {loading.replace(RESNET, one)}" for one, _ in lesions]


def test_a_command_holds_all_that_was_asked_for(few: Path) -> None:
    ((_, data),) = reader.find(few, "surface", VIT)
    spec = Spec(Path("a.pt"), model_arg={"depth": 2}, mean=(0.5, 0.25), std=(1, 1), split="train", samples=1024)
    options = chosen(probe_class("surface")(resolution="15", preview=True, seed=3), spec)
    data = data.assign_attrs(options=json.dumps({**options, "hvp": "exact"}, default=str))
    assert command_to_measure(data, Path("r.h5")) == (
        "landscape surface a.pt --resolution 15 --bn frozen --preview --model-arg depth=2 --mean 0.5,0.25 --std 1,1 "
        "--seed 3 --out r.h5"
    )
