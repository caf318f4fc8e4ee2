"""Tables of comparisons: as text, CSV and LaTeX, whole or of chosen networks and numbers."""

import csv
import io
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import synthetic
from comparing import HOSTILE, result, seeds, trace

from landscape.cli.main import exit_code
from landscape.options import OptionError
from landscape.plots.comparison import text as comparison_text
from landscape.plots.comparison.comparison import REAL, chosen
from landscape.plots.comparison.comparison import compare_results as compare
from landscape.plots.comparison.rows import records
from landscape.results import reader


def test_wide_tables_are_divided_for_the_terminal() -> None:
    values = {f"{name}_se": 0.1 for name in ("nll", "accuracy", "ece", "ece_signed", "temperature")}
    values |= {name.removesuffix("_se"): 0.5 for name in values}
    long = [result("calibration", f"{'long' * 22}-{name}", values) for name in "ab"]
    lines = comparison_text.as_text(compare(long)).splitlines()
    tables = [line for line in lines if line.startswith("network")]
    assert len(tables) == 2
    assert "temperature" in tables[1]
    assert max(len(line) for line in lines if line.startswith(("network", "long"))) <= 400
    printed = comparison_text.as_latex(compare(long)).split("tabular")
    assert r"{lr@{}l" in printed[1]  # a number is two cells, which meet at its decimal point


def test_chosen_numbers_are_shown_with_the_p_of_all() -> None:
    stored = [trace(name, value) for name, value in (("a", 1.0), ("b", 3.0), ("c", 5.0))]
    for i, name in enumerate("abc"):
        values = {"nll": 0.1 + i, "nll_se": 0.1, "ece": 5.0 + i, "ece_se": 0.1}
        stored.append(result("calibration", name, values))
    whole = compare(stored)
    found = chosen(whole, ["calibration/e*"])
    assert {(e.probe, *e.numbers) for e in found.entries} == {("calibration", "ece")}
    assert found.contrasts == tuple(c for c in whole.contrasts if c.number == "ece")
    assert "over the 6 rows of calibration" in comparison_text.as_text(found)
    assert {e.probe for e in chosen(whole, ["trace", "calibration/nll"]).entries} == {"trace", "calibration"}
    with pytest.raises(OptionError, match=r"such as calibration/nll, calibration/ece, got calibration/x"):
        chosen(whole, ["calibration/x"])


@pytest.mark.slow
def test_a_choice_by_the_command_is_not_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = synthetic.write(tmp_path / "r.h5", synthetic.NETWORKS[:3], probes=("trace",))
    label = synthetic.NETWORKS[0].label
    assert exit_code(["compare", str(path), "--only", label, "--only", synthetic.NETWORKS[1].label]) == 0
    assert exit_code(["compare", str(path), "--rows", "trace"]) == 0
    said = capsys.readouterr().out
    assert synthetic.NETWORKS[2].label not in said.partition("== trace ==")[2].partition("== trace ==")[0]
    assert not any(name.startswith("compare/") for name, _ in reader.groups(path))


@pytest.mark.parametrize("columns", [1, 2])
def test_tables_of_a_paper_fit_their_columns_and_line_up(columns: int, tmp_path: Path) -> None:
    values = {"nll": 0.5, "nll_se": 0.1, "accuracy": 0.25, "accuracy_se": 0.01, "ece": 12.0, "ece_se": 1.0}
    found = compare([result("calibration", f"resnet 50 & {n}", values) for n in "abc"])
    latex = comparison_text.as_latex(found, columns)
    for table in latex.split(r"\toprule")[1:]:
        kinds = re.findall(r"\\begin{tabular}{(.*)}", latex)
        assert kinds
        body = table.partition(r"\bottomrule")[0]
        lines = [line.removesuffix(r" \\") for line in body.splitlines() if line.endswith(r"\\")]
        across = [
            sum(int((re.search(r"\\multicolumn{(\d)}", cell) or "x1")[1]) for cell in re.split(r"(?<!\\)&", line))
            for line in lines
        ]
        assert len(set(across)) == 1, lines
        plain = [re.sub(r"\\multicolumn{\d}{\w}|\\emph|\\textless|\\|[{}$]| (?=&)|(?<=&) ", "", line) for line in lines]
        widths = map(
            max, zip(*([len(cell) for cell in line.split("&")] for line in plain if "&" in line), strict=False)
        )
        assert sum(widths) <= comparison_text.PRINTED[columns] + 9
    for number in re.findall(r"& (\S+) & (\S*)", latex.partition("midrule")[2].partition("bottomrule")[0]):
        assert "." not in number[0]
    if setter := next(filter(None, map(shutil.which, ("pdflatex", "lualatex", "tectonic"))), None):
        document = (
            rf"\documentclass[twocolumn]{{article}}\usepackage{{booktabs}}\begin{{document}}{latex}\end{{document}}"
        )
        (tmp_path / "t.tex").write_text(document)
        subprocess.run([setter, "t.tex"], cwd=tmp_path, check=True, capture_output=True, stdin=subprocess.DEVNULL)


def test_every_format_escapes_a_hostile_label() -> None:
    found = compare([trace(HOSTILE, 1.0), trace("b\x1b[31m", 3.0)])
    text, markdown, latex = (comparison_text.FORMATS[name](found) for name in ("text", "markdown", "latex"))
    assert "\x1b" not in text + markdown + latex
    assert r"\<b\>\|µ模 ]\(http" in markdown
    assert r"a\_b \$x\$ \textbackslash{}input\{z\} 100\% \& \#1 \textasciitilde{}\textasciicircum{}\{\}" in latex
    lines = [line for line in latex.splitlines() if line.endswith(r"\\")]
    cells = [line.replace(r"\&", "").count("&") for line in lines]
    assert cells == [1, 2, 2, 2, 0, 4]
    labels = re.findall(r"\\label\{(.+)\}", latex)
    assert len(set(labels)) == len(labels) == latex.count(r"\begin{table") == 2
    assert latex.count("p below 0.05") <= 1
    assert max(len(line) for line in latex.splitlines() if "caption" in line) < 150
    page = comparison_text.as_html(found)
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
    rows = list(csv.DictReader(io.StringIO(comparison_text.as_csv(found))))
    assert {row["network"] for row in rows if row["kind"] == "network"} == {HOSTILE, "b\x1b[31m"}
    assert json.loads(comparison_text.as_json(found))["networks"][0] == HOSTILE


def test_records_hold_every_number_and_difference_once() -> None:
    rows = records(compare([*seeds("x", 1.0, 1.1, 0.9), *seeds("y", 3.0, 3.2)], group=[r"-s\d$"]))
    assert [row["kind"] for row in rows] == ["network"] * 5 + ["group"] * 2 + ["difference"]
    assert len({tuple(row) for row in rows}) == 1
    last = rows[-1]
    assert (last["group"], last["against"], last["seeds"], last["verdict"]) == ("y", "x", "2, 3", REAL)
    assert last["p_holm"] == last["p"]
