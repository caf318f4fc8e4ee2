"""The help and the completion of the command line: one screen per probe, all options, groups in order."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
import typer
from command_line import Command
from rich.text import Text

from landscape.cli import main, measuring
from landscape.cli.command_options import loading_options, probe_options
from landscape.plots import FIGURES
from landscape.probes import GROUPS, PROBES, probe_class
from landscape.subject.spec import Spec


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
        assert Text.from_markup(help).plain.count("[") == help.count("["), help  # Rich drops what it takes for a tag
