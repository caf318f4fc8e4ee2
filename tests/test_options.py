"""Facts about the text of options: what it is parsed as, and the one sentence that refuses it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import typer
from command_line import Command
from rich.text import Text

from landscape import options
from landscape.cli import main, measuring
from landscape.cli.command_options import loading_options, probe_options
from landscape.data.recipes import Recipe, validated
from landscape.exchange.importing import import_file
from landscape.options import OptionError
from landscape.plots import FIGURES
from landscape.probes import GROUPS, PROBES, probe_class
from landscape.subject.pixels import parse_pixels
from landscape.subject.spec import Spec
from landscape.training.monitor_options import MonitorOptions


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("30m", 1800), ("2h", 7200), ("1.5m", 90)])
def test_times_are_read(text: str, seconds: float) -> None:
    assert options.parse_duration("budget", text) == seconds


def test_counts_and_durations_are_readable() -> None:
    said = [options.counted(n, noun, ",") for n, noun in ((0, "unit"), (1, "unit"), (1200, "mini-batch"), (3, "epoch"))]
    assert said == ["0 units", "1 unit", "1,200 mini-batches", "3 epochs"]
    said = [options.format_duration(seconds) for seconds in (3.2, 89, 600, 7200, 12000)]
    assert said == ["3 s", "89 s", "10 min", "2 h 0 min", "3 h 20 min"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2", ((-2, 2), (-2, 2))), ("-1:3", ((-1, 3), (-1, 3))), ("0:1,-2:2", ((0, 1), (-2, 2))),
        ("1,-2:0", ((-1, 1), (-2, 0))), ("1e-3", ((-1e-3, 1e-3), (-1e-3, 1e-3))),
    ],
)  # fmt: skip
def test_ranges_are_read(text: str, expected: tuple[tuple[float, float], tuple[float, float]]) -> None:
    assert options.parse_ranges("range", text) == expected


@pytest.mark.parametrize(
    ("value", "count"), [("all", 360), (None, 360), ("10%", 36), ("0.1%", 1), ("200%", 360), (50, 50), ("999", 360)]
)
def test_counts_are_numbers_shares_or_all_that_there_is(value: int | str | None, count: int) -> None:
    assert options.parse_count("samples", value, 360) == count


def test_resolutions_and_lists_are_read() -> None:
    assert options.parse_resolution("resolution", "51") == (51, 51)
    assert options.parse_resolution("resolution", "51,25") == (51, 25)
    assert options.parse_numbers("mean", "0.5,-1e-3") == (0.5, -1e-3)
    assert options.parse_choices("format", "PNG, svg", ("png", "pdf", "svg")) == ("png", "svg")


def test_model_arguments_become_what_they_look_like() -> None:
    words = ["a=1", "b-c=2.5", "d=true", "e=0,1,1,2", "f=name", "g=none", "h=x=y"]
    expected = {"a": 1, "b_c": 2.5, "d": True, "e": (0, 1, 1, 2), "f": "name", "g": None, "h": "x=y"}
    assert options.parse_arguments("model_arg", words) == expected


@pytest.mark.parametrize(
    ("parse", "arguments", "message"),
    [
        (options.at_least, ("resolution", 1, 2), "--resolution must be at least 2, got 1"),
        (options.at_least, ("weight_decay", float("nan"), 0.0), "--weight-decay must be at least 0, got nan"),
        (options.at_least, ("weight_decay", float("inf"), 0.0), "--weight-decay must be finite, got inf"),
        (options.one_of, ("pool", "max", ("mean", "cls")), "--pool must be mean or cls, got max"),
        (options.one_of, ("which", "", ("LM", "LA", "SA")), "--which must be LM, LA or SA, got "),
        (options.one_of, ("preset", "park2021", ["park2022"]), "--preset must be park2022, got park2021"),
        (options.require, (False, "tol", 2.0, "below 1"), "--tol must be below 1, got 2.0"),
        (options.parse_numbers, ("eps", "a,1"), "--eps must be finite numbers separated by commas, got a,1"),
        (options.parse_numbers, ("eps", "1,inf"), "--eps must be finite numbers separated by commas, got 1,inf"),
        (options.parse_choices, ("format", "png,gif", ("png", "pdf")), "--format must be png or pdf, got gif"),
        (options.parse_resolution, ("resolution", "5x5"), "--resolution must be N or NX,NY, got 5x5"),
        (options.parse_ranges, ("range", "a"), "--range must be R, LOW:HIGH or XLOW:XHIGH,YLOW:YHIGH, got a"),
        (options.parse_ranges, ("range", "1,2,3"), "--range must be R, LOW:HIGH or XLOW:XHIGH,YLOW:YHIGH, got 1,2,3"),
        (options.parse_range, ("range", "1,2"), "--range must be R or LOW:HIGH, got 1,2"),
        (options.parse_range, ("range", "1:1"), "--range must be R or LOW:HIGH from a low to a higher number, got 1:1"),
        (
            options.parse_ranges,
            ("range", "2:1"),
            "--range must be R, LOW:HIGH or XLOW:XHIGH,YLOW:YHIGH from a low to a higher number, got 2:1",
        ),
        (
            options.parse_count,
            ("samples", "few", 9),
            "--samples must be a number, a share such as 10%, or all, got few",
        ),
        (options.parse_count, ("samples", "inf%", 9), "got inf%"),
        (options.parse_count, ("samples", 0, 9), "--samples must be at least 1, got 0"),
        (options.parse_arguments, ("model_arg", ["width"]), "--model-arg must be KEY=VALUE, got width"),
        (options.parse_arguments, ("model_arg", ["=3"]), "--model-arg must be KEY=VALUE, got =3"),
        (options.regular_expression, ("params", "("), "--params must be a regular expression, got ( (missing )"),
        (options.parse_duration, ("budget", "1d"), "--budget must be a time such as 90s, 30m or 2h, got 1d"),
    ],
)
def test_the_error_names_the_option_what_was_expected_and_what_was_got(
    parse: Any, arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(OptionError) as caught:
        parse(*arguments)
    assert message in str(caught.value)


def test_an_expression_that_takes_for_ever_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "MATCHING_SECONDS", 0.1)
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(OptionError, match=r"--layers must be an expression that is matched in 0\.1 s.*got \(a\+\)\+\$"):
        options.matching("layers", "(a+)+$", ["a" * 40 + "b"])
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0.0


def test_expressions_find_names_in_any_thread_and_leave_a_timer_of_the_caller_running() -> None:
    signal.setitimer(signal.ITIMER_REAL, 1000.0)
    try:
        assert options.matching("layers", r"blocks(\.\d+)+$", ["stem", "blocks.1", "blocks.1.2"]) == [
            "blocks.1",
            "blocks.1.2",
        ]
        assert 900.0 < signal.getitimer(signal.ITIMER_REAL)[0] <= 1000.0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(options.matching, "layers", "a", ["ab", "b"]).result() == ["ab"]


def number_options() -> Iterator[tuple[str, Callable[[float], object]]]:
    """Every option that is a real number, with what checks it."""
    for probe in PROBES:
        kind = probe_class(probe)
        for field in fields(kind):
            if isinstance(field.default, float):
                yield f"{probe} --{field.name}", partial(lambda kind, name, x: kind(**{name: x}), kind, field.name)
    yield "--weight-decay", lambda x: Spec(weight_decay=x)
    yield "--mean", lambda x: Spec(mean=(x,), std=(1.0,))
    yield "--std", lambda x: Spec(mean=(0.5,), std=(x,))
    for name, value in asdict(Recipe()).items():
        if isinstance(value, float):
            yield f"train --{name}", partial(lambda name, x: validated(replace(Recipe(), **{name: x})), name)
    yield "train --monitor-overhead", lambda x: MonitorOptions(1, x)
    yield (
        "import --weight-decay",
        lambda x: import_file(Path("none.csv"), Path("none.h5"), weight_decay=x, reduce_of=lambda name: None),
    )


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("option", dict(number_options()))
def test_no_option_takes_a_number_that_is_not_finite(option: str, value: float) -> None:
    with pytest.raises(OptionError, match=str(value)):
        dict(number_options())[option](value)


def test_arguments_of_a_model_may_be_words_in_python_too() -> None:
    """As those of an optimiser."""
    assert Spec(model_arg=["width=32", "pool=max"]).model_arg == {"width": 32, "pool": "max"}  # type: ignore[arg-type]
    with pytest.raises(OptionError, match=r"--model-arg"):
        Spec(model_arg=["width"])  # type: ignore[arg-type]


NAMED: dict[str, dict[str, tuple[object, ...]]] = {  # of a probe, values that are refused with the name of their option
    "surface": {
        "range": ("0", "-1", "2:1", "1:1", "1:2:3", "1,2,3", "a", "1,", "nan", "inf", ":", "1:"),
        "resolution": ("", "0", "5,1", "5,5,5", "2.5", "5x5", "-3", "a"),
        "bn": ("", "train", "recalibrate", "recalibrate:0", "recalibrate:-1", "frozen:2"),
        "normalize": ("filters",), "l2_definition": ("l1",), "ignore": ("(",), "directions": (0,), "tolerance": (0,),
        "cap": (float("nan"),), "precision": ("fp8",), "memory_format": ("nhwc",),
        "budget": ("30", "m", "-1m", "0s", "1d", "infs", "nanm", "half an hour"),
    },
    "hessian": {
        "top": (0,), "batches": (-1,), "tol": (0.0, 1.0, float("nan")), "which": ("largest",), "params": ("[",),
        "max_products": (1,), "hvp": ("fast",), "scope": ("all",), "operator": ("hesse",), "engine": ("eigsh",),
        "ends": (0.0, 1.5), "tol_residual": (1.0, -0.1),
    },
    "density": {"vectors": (0,), "steps": (1,), "hvp": ("fast",), "tol": (1.0,), "blocks": ("row",)},
    "trace": {"method": ("hutch",), "vectors": (3, float("nan")), "hvp": ("fast",), "tol": (-0.1, 1.0)},
    "sensitivity": {
        "bits": ("1", "3.5", ""), "sparsity": ("1",), "noise": ("0",), "rank": ("2",), "unit": ("x",), "vectors": (1,),
        "layers": (("[",),), "granularity": ("x",), "group_size": (0,), "neurons": (0,),
    },
    "convexity": {"tol": (0.0,), "range": ("1:0",), "normalize": ("rows",)},
    "align": {"resolution": (1,), "restarts": (0,), "repair": (-1,)},
    "barriers": {"resolution": (1,), "restarts": (0,), "repair": (-1,)},
}  # fmt: skip
SAID: dict[str, list[tuple[dict[str, Any], str]]] = {  # of a probe, options, and what their refusal says beside
    "surface": [
        ({"resolution": "1"}, "--resolution must be at least 2, got 1"),
        ({"range": "1:-1"}, "from a low to a higher number"),
        ({"bn": "melt"}, "recalibrate:K"),
        ({"budget": "30"}, "--budget .* such as 90s, 30m or 2h"),
        ({"preview": True, "margin": "2se"}, "preview"),
        ({"plane": "eigen", "directions": 2}, "random planes"),
    ],
    "line": [
        ({"resolution": 1}, "--resolution must be at least 2, got 1"),
        ({"directions": 0}, "--directions must be at least 1, got 0"),
        ({"range": "1:1"}, "R or LOW:HIGH from a low to a higher number, got 1:1"),
        ({"range": "0:1,0:1"}, "--range must be R or LOW:HIGH, got 0:1,0:1"),
        ({"bn": "melt"}, "recalibrate:K"),
        ({"bn": "interpolate"}, "needs another checkpoint"),
        ({"along": "eigen", "directions": 3}, "has two"),
        ({"normalize": "filters"}, "--normalize must be filter, .*, got filters"),
    ],
    "trajectory": [({"bn": "melt"}, "recalibrate:K")],
    "lesion": [({"pairs": True, "stages": True}, "choose one of them")],
    "convexity": [({"resolution": "1"}, "--resolution must be at least 2, got 1")],
    "hessian": [
        ({"tol": 2.0}, "above 0 and below 1"),
        ({"which": "XX"}, "LM"),
        ({"operator": "preconditioned", "which": "SA"}, "compares the largest eigenvalue"),
        ({"optimizer": "sgd"}, "need --operator preconditioned"),
        ({"operator": "preconditioned", "optimizer": "lbfgs"}, "closure"),
        ({"operator": "preconditioned", "engine": "pyhessian"}, "does not support --operator preconditioned"),
        ({"engine": "pyhessian", "which": "LA"}, "--engine pyhessian .* --which LA"),
        ({"engine": "pyhessian", "operator": "ggn"}, "--engine pyhessian .* --operator ggn"),
        ({"engine": "pyhessian", "scope": "dataset"}, "--engine pyhessian .* --scope dataset"),
        ({"engine": "pyhessian", "hvp": "traced"}, "--engine pyhessian .* --hvp traced"),
    ],
    "density": [
        ({"max_vectors": 4, "tol": 0.1}, "--max-vectors"),
        ({"blocks": "tensor", "tol": 0.1}, "--tol is for the whole Hessian"),
        ({"blocks": "tensor", "hvp": "traced"}, "--hvp traced makes products of the whole Hessian"),
    ],
    "trace": [({"max_vectors": 16, "tol": 0.1}, "--max-vectors")],
    "flatness": [
        ({"measures": "sam,sharpnes"}, "--measures must be"), ({"rho": "sam=0"}, "positive"),
        ({"rho": "sam"}, "positive"), ({"rho": "trace=1"}, "names no measure with a radius"),
        ({"rho": "samm=1"}, "did you mean sam"), ({"draws": 5}, "even"), ({"steps": 0}, "at least 1"),
    ],
    "attack": [
        ({"eps": "2"}, "--eps must be from 0 to 1, such as 8/255, got 2"),
        ({"eps": "8/0"}, "--eps must be numbers or fractions such as 8/255"),
        ({"eps": "8/255,1/255"}, "rising numbers"),
        ({"methods": "cw"}, "--methods must be fgsm or pgd, got cw"),
        ({"steps": 0}, "--steps must be at least 1"),
        ({"step_size": "0"}, "--step-size must be above 0"),
        ({"restarts": 2, "random_start": False}, "drop --no-random-start"),
    ],
    "noise": [
        ({"eps": "0"}, "--eps must be above 0, got 0"),
        ({"eps": "0.7,-1"}, "--eps must be above 0, got 0.7,-1"),
        ({"eps": "much"}, "--eps must be finite numbers separated by commas, got much"),
        ({"eps": "nan"}, "--eps must be finite numbers separated by commas, got nan"),
        ({"bands": "0.5,1.5"}, "--bands must be frequencies from 0 to 1, in units of pi, got 0.5,1.5"),
        ({"bands": ""}, "--bands must be finite numbers separated by commas, got nothing"),
        ({"half_width": 0.0}, "--half-width must be above 0, got 0.0"),
        ({"classifier": "nearest"}, "--classifier must be own or linear, got nearest"),
        ({"pool": "cls"}, "--pool cls needs --classifier linear"),
        ({"train_samples": "100"}, "--train-samples 100 needs --classifier linear"),
        ({"classifier": "linear", "train_samples": "3"}, "--train-samples must be at least 10, got 3"),
    ],
    "attention-maps": [
        ({"queries": text}, "--queries must be pairs of shares from 0 to 1") for text in ("0.5", "0.5,1.5")
    ],
    "tokens": [
        ({"depths": "2"}, "--depths must be numbers from 0 to 1, got 2"),
        ({"method": "umap"}, "--method must be tsne or principal, got umap"),
    ],
    "uncertainty": [({"reach": 0}, "--reach must be at least 1, got 0")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("probe", "wrong", "said"),
    [
        *((probe, {name: value}, "--" + name.replace("_", "-"))
          for probe, of in NAMED.items() for name, values in of.items() for value in values),
        *((probe, wrong, said) for probe, cases in SAID.items() for wrong, said in cases),
    ],
)  # fmt: skip
def test_a_probe_refuses_a_wrong_option_by_its_name(probe: str, wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        probe_class(probe)(**wrong)


def test_sizes_of_an_attack_are_fractions_or_numbers() -> None:
    assert parse_pixels("eps", "0.5/255,8/255,0.1") == pytest.approx((0.5 / 255, 8 / 255, 0.1))


# --- The help and the completion of the command line: one screen per probe, all options, groups in order ---


def test_every_documented_field_of_spec_is_an_option_with_the_default_of_the_probe(command: Command) -> None:
    documented = {
        name for name, hint in get_type_hints(Spec, include_extras=True).items() if hasattr(hint, "__metadata__")
    }
    assert {"data", "samples", "batch_size", "mean", "seed"} <= documented
    of_the_command = {"checkpoint", "logits", "ordered"}
    assert documented == set(loading_options({})) == set(Spec.__dataclass_fields__) - of_the_command
    for probe, batch_size, split in (("hessian", 16, "train"), ("fourier", 128, "test")):
        text = " ".join(command(probe, "--help-all")[1].replace("│", " ").split())
        assert all(f"--{name.replace('_', '-')} " in text for name in documented)
        assert f"default {batch_size} " in text
        assert f"default {split} " in text
        assert "default 1024 " in text


@pytest.mark.parametrize("name", main.MEASURING)
def test_the_help_of_a_probe_is_one_screen_with_its_options_and_common_ones_and_help_all_has_the_others(
    name: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (code, short, _), (_, whole, _) = command(name, "--help"), command(name, "--help-all")
    assert code == 0
    assert short.count("\n") <= 60
    assert "…" not in whole  # nothing is cut
    listed, every = ({*re.findall(r"│ (--[\w-]+)", text)} for text in (short, whole))
    fields = {field for probe in measuring.probes_of(name) for field in probe_options(probe_class(probe))}
    names = (*fields, "data", "samples", "batch-size", "out", "device", "seed", "help-all")
    assert listed - {"--save"} >= {f"--{field.replace('_', '-')}" for field in names}
    assert every - listed >= {"--model", "--loss", "--workers", "--augment", "--no-augment", "--quiet"}
    _, _, err = command(name, "--worker", "2")
    assert "--workers" in err  # also what the short help leaves out is suggested


def test_the_help_of_the_other_commands_cuts_no_word_in_80_columns(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    tree: Any = typer.main.get_command(main.app)
    studies = {f"study {name}": one for name, one in tree.commands["study"].commands.items()}
    others = {name: tree.commands[name] for panel in main.OTHERS.values() for name in panel}
    for name, one in (others | studies).items():
        code, said, _ = command(*name.split(), "--help")
        assert (code, "…" in said, "None" in said) == (0, False, False), name
        names = {option for param in one.params for option in param.opts if option.startswith("--")}
        assert names <= {*re.findall(r"│ (--[\w-]+)", said)}, name
        assert len(said.splitlines()) <= 90, name


def test_a_shell_completes_the_name_of_a_file_without_torch() -> None:
    code = "import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); sys.argv[0] = 'landscape'"
    words = {"_LANDSCAPE_COMPLETE": "complete_bash", "COMP_WORDS": "landscape hessian fin", "COMP_CWORD": "2"}
    script = f"{code}\nfrom landscape.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", script], env=os.environ | words, capture_output=True, text=True)
    assert (done.returncode, done.stdout.split()[-1:], done.stderr) == (0, ["False"], "")


def test_a_shell_completes_also_options_that_the_short_help_leaves_out_and_prints_nothing_else(
    command_here: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["landscape"])
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None, raising=False)  # else its name is that of pytest
    words = {"_LANDSCAPE_COMPLETE": "complete_bash", "COMP_WORDS": "landscape hessian --wor", "COMP_CWORD": "2"}
    for name, value in words.items():
        monkeypatch.setenv(name, value)
    assert command_here() == (0, "--workers\n", "")


def test_the_help_lists_the_probes_in_their_groups(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    panels = re.findall(r"╭─ ([^─]+) ─+╮\n(.*?)╰", command("--help")[1], flags=re.DOTALL)
    listed = {title: re.findall(r"(?m)^│ ([\w-]+)", text) for title, text in panels}
    assert [title for title in listed if title.startswith("Measure")] == [f"Measure: {group}" for group in GROUPS]
    assert [name for group in GROUPS for name in listed[f"Measure: {group}"] if name != "features"] == list(PROBES)
    assert max(map(len, listed.values())) <= 13
    index = (Path(__file__).parents[1] / "docs" / "probes" / "index.md").read_text()
    assert re.findall(r"(?m)^## (.*)", index) == [*(group.capitalize() for group in GROUPS), "Layers"]
    assert re.findall(r"(?m)^```{probe-pages} (.*)", index) == list(GROUPS)
    assert [*dict.fromkeys(figure.probe for figure in FIGURES.values() if figure.probe in PROBES)] == list(PROBES)


@pytest.mark.slow
def test_the_help_of_every_option_is_shown_as_it_was_written() -> None:
    commands = [typer.main.get_command(main.app)]
    for name in main.MEASURING:
        single = typer.Typer()
        single.command(name)(main.command_of(name))
        commands.append(typer.main.get_command(single))
    commands += commands[0].commands.values()
    helps = [str(getattr(option, "help", "") or "") for command in commands for option in command.params]
    assert any("[@LOSS]" in help for help in helps)
    for help in helps:
        shown = Text.from_markup(help).plain  # Rich drops what it takes for a tag, and draws `:label:`
        assert [shown.count(sign) for sign in "[:"] == [help.count(sign) for sign in "[:"], help
