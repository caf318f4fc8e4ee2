"""Files of studies: what is refused, the language of expressions, and the files that the command begins."""

import math
from pathlib import Path

import pytest
import xarray as xr

from landscape.api import names_of_results
from landscape.cli.main import exit_code
from landscape.cli.study import study_named
from landscape.reporting.progress import print_log
from landscape.studies.expressions import Expression

FILE = """
title = "a against b"
[networks.a]
files = "a-*.pt"
[networks.b]
files = "b-*.pt"
[measure.trace]
[measure.mine]
probe = "calibration"
snapshot = "final.pt"
[numbers]
sharpness = "ln(trace.trace)"
twice = "2 * sharpness"
[[compare]]
networks = ["a", "b"]
numbers = ["sharpness"]
[[claims]]
name = "sharper"
value = "a.twice - b.twice"
sign = "positive"
"""


def written(folder: Path, *changes: tuple[str, str], text: str = FILE) -> Path:
    for name in "ab":
        for seed in range(4):
            (folder / f"{name}-{seed}.pt").touch()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    (file := folder / "study.toml").write_text(text)
    return file


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[networks.b]", "[networks.a]", "Cannot declare"),
        ("[numbers]", "[number]", "there is no number; expected one of .*; did you mean numbers?"),
        ('files = "b-*.pt"', 'files = "c-*.pt"', "no file matches c-"),
        ('files = "b-*.pt"', 'files = "b-0.pt"', "b is a group of one"),
        ('files = "b-*.pt"', 'files = "b-[1-3].pt"', "files pair in the order of their names, but a has 4 and b has 3"),
        ('files = "b-*.pt"', "", "neither a model to train nor files"),
        ('files = "b-*.pt"', 'model = "resnet_dem"', "similar names: resnet_demo"),
        ('files = "b-*.pt"', 'model = "resnet_demo"\nlearning = 1', "there is no learning"),
        ('files = "b-*.pt"', 'model = "resnet_demo"', "data is missing"),
        ("[networks.a]", "data = 'digist'\n[networks.a]", "'digist' is unknown; .*did you mean digits"),
        ("[networks.a]", "[train]\nepochs = 3.5\n[networks.a]", r"\[train\]: epochs must be a whole number, got 3.5"),
        ("[networks.a]", "[train]\nepoch = 3\n[networks.a]", r"\[train\]: there is no epoch; .*did you mean epochs"),
        ('files = "b-*.pt"', 'model = "resnet_demo"\nlr = "fast"', ": lr must be a number, got 'fast'"),
        ('files = "b-*.pt"', 'model = "resnet_demo"\nseeds = [1, "a"]', r"a list of different ones; got \[1, 'a'\]"),
        ("[measure.trace]", "[measure.trcae]", "there is no probe trcae.*did you mean trace"),
        ("[measure.trace]", "[measure.trace]\nvector = 3", "trace has no option vector.*did you mean vectors"),
        ("[measure.trace]", "[measure.trace]\nnetworks = ['c']", "there is no c; expected one of a, b"),
        ("[measure.trace]", "[measure.trace]\nsnapshot = 'finall.pt'", "did you mean .*final.pt"),
        ("ln(trace.trace)", "log(trace.trace)", "there is no function log"),
        ("ln(trace.trace)", "ln(tracee.trace)", "there is no tracee; .*did you mean trace"),
        ("a.twice", "c.twice", "there is no c; expected one of a, b"),
        ("a.twice", "a.twicee", "there is no twicee; .*did you mean twice"),
        ("ln(trace.trace)", "ln(trace['tracee'])", "trace has no number tracee; .*did you mean trace"),
        ("ln(trace.trace)", "ln(trace.trace_sprad)", "trace has no quantity trace_sprad; .*did you mean trace_spread"),
        ("a.twice", "a.trace.trac", "trace has no quantity trac; .*did you mean trace"),
        ("a.twice", "a['mine']['acuracy']", "mine has no number acuracy; .*did you mean accuracy"),
        (
            'probe = "calibration"\nsnapshot = "final.pt"\n[numbers]',
            'probe = "flatness"\nmeasures = "sam"\n[numbers]\ntop = "mine[\'top-eigenvalue\']"',
            "mine has no number top-eigenvalue with its options; expected one of sam",
        ),
        ('sign = "positive"', 'sign = "up"', "sign must be positive or negative, got up"),
        ('["sharpness"]', '["sharpnes"]', "did you mean sharpness"),
        (
            "[[claims]]",
            "[[correlations]]\nx = 'twice'\ny = 'sharpness'\n[[claims]]",
            "needs 8 networks, got 2; seeds of one",
        ),
        ("[[claims]]", "[[correlations]]\nx = 'twice'\n[[claims]]", "x and y are missing"),
        ("[numbers]", ".".join("a" * 20_000) + " = 1\n[numbers]", "a line of more than 1,000 dots"),  # takes seconds
        ("[numbers]", f"a = {'[' * 20_000}\n[numbers]", r"not a TOML file \(maximum recursion depth"),
        ("[measure.trace]", "[measure.trace]\nover = { vectors = 3 }", "over must name options with lists of values"),
        ("[measure.trace]", "[measure.trace]\notherwise = 3", "otherwise a table of options"),
        ("[measure.trace]", "[measure.trace]\nwith = ['b']", "with: trace measures one network; drop it"),
        ("[measure.trace]", "[measure.line]\nwith = ['c']\n[measure.trace]", "there is no c; expected one of a, b"),
        ("[networks.b]", "[networks.b]\nover = { lr = 0.1 }", "over must name options with lists of values"),
        ("[networks.b]", "[networks.b]\nover = { group = ['x', 'x'] }", "two networks have one name; .* b-x, b-x"),
        ("[[claims]]", "[[diagrams]]\nnumber = 'twice'\n[[claims]]", "it needs a number, and over of 1 or 2"),
        (
            "[[claims]]",
            "[[diagrams]]\nnumber = 'twice'\nover = ['lr']\n[[claims]]",
            "over of the networks: there is no lr",
        ),
        ("[networks.a]", "figures = ['surfac']\n[networks.a]", "figures: there is no surfac.*did you mean surface"),
        ("[measure.trace]", "[measure.trace]\notherwise = { vector = 3 }", "trace has no option vector"),
        ('files = "b-*.pt"', 'files = "b-*.pt"\nload = { sample = 3 }', "there is no sample; .*did you mean samples"),
        (
            "[measure.trace]",
            "[measure.trace]\nsplit = 'tes'",
            r"\[measure.trace\]: split must be train or test, got tes",
        ),
        ('files = "b-*.pt"', 'files = "b-*.pt"\nload = { samples = 0 }', "load: samples must be"),
        (
            "[measure.trace]",
            "[measure.surface]\nplane = 'nowhere'\notherwise = { plane = 'random' }\n[measure.trace]",
            r"\[measure.surface\]: plane must be random, eigen or a path that exists, got nowhere",
        ),
        ("[measure.trace]", "[measure.trace]\ndata = 'digist'", r"\[measure.trace\]: data 'digist' is unknown"),
        ("[networks.a]", "data = 'no/folder'\n[networks.a]", "data no/folder: no such folder"),
        (
            'title = "a against b"\n[networks.a]\nfiles = "a-*.pt"',
            'data = "digits"\n[networks.a]\nmodel = "resnet_demo"\nobjective = "mim"',
            r"\[networks.a\]: objective mim masks the patches of a ViT, resnet_demo is none",
        ),
        (
            "[measure.trace]",
            "[measure.metrics]\nsamples = 3\n[measure.trace]",
            "metrics .* have no options, got samples",
        ),
        ("[numbers]", f"# {'a' * 2**16}\n[numbers]", "expected at most 65,536"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_before_anything_runs(
    tmp_path: Path, old: str, new: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path, (old, new))
    with pytest.raises(ValueError, match=said):
        study_named(str(file))
    assert exit_code(["study", "check", str(file)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"landscape: {file}: ")


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')", "a.__class__", "(lambda: 1)()", "[1][0]", "a if a else a", "a.b(1)", "open('x')", "1 +",
        "abs(*a)", "a[0]", "f'{a}'", "+".join(["1"] * 2000), "a" + ".b" * 60, "abs(**a)", "not a", "a and a", "True",
    ],
)  # fmt: skip
def test_an_expression_has_no_other_powers(text: str) -> None:
    with pytest.raises(ValueError, match=r"there is no|not allowed|no expression|too deep"):
        Expression(text, ["a"])


def test_expressions_take_numbers_quantities_and_positions() -> None:
    data = xr.Dataset(
        {"drop": ("band", [1.0, 2.0, 4.0]), "ape": 8.0, "unknown": math.nan}, {"band": [0.1, 0.3, 0.9]}, {"fact": 3.0}
    )
    scope = {"a": {"one of them": data}, "gradient descent": {"x": data}}

    def value(text: str) -> float:
        return Expression(text, scope).value(scope)

    assert value("at(a['one of them'].drop, band=0.9) - 'gradient descent'.x.fact ** 2 / 2") == -0.5
    assert value("max(a['one of them'].ape)") == 8
    assert value("ln(a['one of them']['ape']) / ln(2)") == pytest.approx(3)
    assert value("mean(a['one of them'].drop) + max(a['one of them'].drop) + -first(a['one of them'].drop)") == (
        pytest.approx(7 / 3 + 3)
    )
    for text, said in (
        ("1 / (a['one of them'].ape - 8)", "divides by zero"),
        ("a['one of them'].apee", "no quantity apee; did you mean ape"),
        ("a['one of them']['dropp']", "no number dropp"),
        ("a['one of them'].drop", "it is an array over band; take its mean"),
        ("max(1, a['one of them'].ape)", "max takes values; got too many"),
        ("at(a['one of them'].drop, band=-1)", "band has no -1, only 0.1, 0.3, 0.9"),
        ("1e300 * a['one of them'].ape * 1e300", "it is infinite"),
        ("9 ** 9 ** 9 ** 9", "has no value"),
        ("1 + a['one of them'].unknown", "has no value: what it names has none"),
    ):
        with pytest.raises(ValueError, match=said):
            value(text)


def test_nothing_is_noted_of_the_network_that_stands_for_those_of_a_study(capsys: pytest.CaptureFixture[str]) -> None:
    with print_log():
        assert "depth_cosine" in names_of_results("attention", "", {}).others()
    assert exit_code(["study", "list"]) == 0
    said = capsys.readouterr()
    assert (said.err, "sgd-sam    SGD against SAM" in said.out) == ("", True)


def test_a_new_file_is_a_study_that_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / 'it\'s "one" \\ two'
    folder.mkdir()
    written(folder)
    groups = [f"--compare={name}={folder}/{name}-*.pt" for name in "ab"]
    for name in ("a/b", "a'b", "b"):
        assert exit_code(["study", "new", str(tmp_path / "bad.toml"), *groups, f"--compare={name}=x"]) != 0
        assert "names of groups that differ" in capsys.readouterr().err
    for arguments in (groups, []):
        file = tmp_path / f"new{len(arguments)}.toml"
        assert exit_code(["study", "new", str(file), *arguments]) == 0
        assert len(file.read_text().splitlines()) <= 40
        assert exit_code(["study", "check", str(file)]) == 0
        assert "2 networks" in capsys.readouterr().out
    assert "sam.height - sgd.height" in file.read_text()
    assert exit_code(["study", "new", str(tmp_path / "none.toml"), *groups, "--compare=c=none*"]) == 0
    assert "note: it needs a change before it runs" in (said := capsys.readouterr().err)
    assert "[networks.c]: no file matches" in said
    assert "networks = ['a', 'c']" in (tmp_path / "none.toml").read_text()  # every group is compared with the first
    assert exit_code(["study", "show", str(file), "--out", str(tmp_path), f"--data-root={tmp_path}"]) == 0
    assert "0 of 32 steps done, 32 left" in capsys.readouterr().out
