"""The commands `smoothing`, `heads`, `sweep` and `build-up`: one table and one figure that compare several networks.

They are shipped studies whose files their options change.
"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from landscape.cli.command_options import (
    OWN,
    RUN,
    Debug,
    Quiet,
    loading_options,
    loading_values,
    option,
    own_options,
    with_options,
)
from landscape.cli.loading import CHECKPOINT, several_checkpoints
from landscape.cli.study import carry_out, illustrate, of_checkpoints, shipped, study_named, workers_of
from landscape.options import OptionError, at_least, format_duration, invalid, parse_arguments
from landscape.probes import PROBES, probe_class
from landscape.reporting.progress import say, text_table

if TYPE_CHECKING:
    from landscape.plots.report.findings import Finding

Option = typer.Option


def smoothing(
    checkpoint: Path | None, sizes: str, batches: int, out: Path, figures: Path, quiet: bool, **options: Any
) -> None:
    """Compare a checkpoint with and without smoothing blocks: scores over ensemble sizes, features and curvature.

    Measures calibration for every ensemble size (of a network with dropout; else the network alone), fourier,
    uncertainty and a few mini-batches of hessian, each twice, into one results file. What the file holds is not
    measured again.
    """
    counts, loading = _sizes(sizes), loading_values(options)
    at_least("batches", batches, 1)
    blocks = {name: loading.pop(name) for name in ("smooth_at", "smooth_block") if name in loading}
    most = {"mc_dropout": counts[-1]}
    measure = {"calibration": {"over": {"mc_dropout": [0, *counts]}}, "fourier": most, "uncertainty": most,
               "hessian": {"batches": batches, "otherwise": {"mc_dropout": counts[0]}}}  # fmt: skip
    changes = {"networks": {"with smoothing": {"load": blocks}}, "measure": measure}
    own = own_options(smoothing, mc_dropout="sizes")
    of_checkpoints("smoothing", [checkpoint], loading, changes, own, out, figures, quiet=quiet)


def heads(
    checkpoint: list[Path] | None, masks: int, resolution: str, batches: int, out: Path, figures: Path, quiet: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Surfaces and Hessian spectra of networks side by side, deterministic and with dropout masks, in one figure.

    Such as an MLP head, average pooling, and average pooling with smoothing blocks. Measures surface and hessian of
    every network, twice where it has dropout, into one results file, and draws all networks of that file: with --smooth
    a second run adds a network with blocks that are inserted. What the file holds is not measured again.
    """
    at_least("masks", masks, 1)
    at_least("batches", batches, 1)
    over = {"over": {"mc_dropout": [0, masks]}}
    changes = {"measure": {"surface": {"resolution": resolution, **over}, "hessian": {"batches": batches, **over}}}
    loading, own = loading_values(options), own_options(heads, mc_dropout="masks")
    _, drawn = of_checkpoints("heads", checkpoint or [], loading, changes, own, out, figures, quiet=quiet)
    if not drawn:
        say(f"no figure yet: {out} needs two networks, one of them with dropout; run it on another one", quiet=quiet)


def sweep(checkpoint: list[Path], batches: int, out: Path, figures: Path, quiet: bool, **options: Any) -> None:
    """Compare networks that differ in one argument, such as the kernel or patch size or the number of heads.

    Measures calibration on the test and on the train split, and a few mini-batches of hessian, of every network into
    one results file; draws accuracy, error against training NLL and curvature over the argument. Networks with other
    seeds are drawn as runs of the same value. What the file holds is not measured again.
    """
    from landscape.results import reader
    from landscape.studies import kinds

    at_least("batches", batches, 1)
    changes = {"measure": {"hessian": {"batches": batches}}}
    loading, own = loading_values(options), own_options(sweep)
    found, _ = of_checkpoints("sweep", checkpoint, loading, changes, own, out, figures, quiet=quiet)
    if not found:
        stored = list(reader.groups(out))
        labels = ", ".join(dict.fromkeys(str(data.attrs["label"]) for _, data in stored))
        differ = ", ".join(kinds.differing(stored)) or "no known argument"
        raise ValueError(
            f"no sweep in {out}: it holds {labels}, which differ in {differ}, expected networks that landscape train "
            f"wrote, with {kinds.FEWEST} values of one argument and all others equal; run it with the missing ones"
        )


def _sizes(text: str) -> list[int]:
    try:
        counts = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise invalid("sizes", text, "numbers of dropout masks such as 1,2,5,10") from None
    if counts[0] < 1:
        raise OptionError(f"--sizes must be at least 1, got {counts[0]}; the network without dropout comes by itself")
    return counts


def _with_loading(function: Any, own: dict[str, Any], *without: str) -> None:
    """Give a command its own options, those of loading, and those of every study."""
    batches = option(int, "mini-batches of hessian", 4, OWN)
    figures = {"out": RUN["out"], "figures": option(Path, "folder for the figure", Path("figures"), OWN)}
    run = {**figures, **{name: RUN[name] for name in ("quiet", "verbose", "debug")}}
    with_options(function, {**own, "batches": batches, **loading_options({}, without=without), **run})


_SIZES = option(str, "numbers of dropout masks whose probabilities are averaged", "1,2,3,5,10", OWN)
_with_loading(smoothing, {"checkpoint": CHECKPOINT, "sizes": _SIZES}, "smooth", "mc_dropout")
_MASKS = option(int, "dropout masks whose predictions are averaged", 5, OWN)
_RESOLUTION = option(str, "points per axis of the surfaces", "11", OWN)
_NETWORKS = several_checkpoints("networks, or their run folders")
_with_loading(heads, {"checkpoint": _NETWORKS, "masks": _MASKS, "resolution": _RESOLUTION}, "mc_dropout")
_TRAINED = Annotated[list[Path], typer.Argument(help="trained networks, or their run folders")]
_with_loading(sweep, {"checkpoint": (_TRAINED, ...)}, "split")


def build_up(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="trained AlterNets, files or run folders; default: train them")
    ] = None,
    model: Annotated[str, Option(help="AlterNet that is built up, see: landscape models")] = "alternet_demo",
    data: Annotated[str, Option(help="NAME, FOLDER or file.py:callable to train on")] = "",
    data_root: Annotated[Path | None, Option(help="folder that holds cifar-100-python/ and the like")] = None,
    model_arg: Annotated[list[str], Option(help="KEY=VALUE argument of the model; repeatable")] = [],  # noqa: B006
    recipe: Annotated[str | None, Option(help="recipe of the training, see: landscape train --help")] = None,
    epochs: Annotated[int | None, Option(help="epochs of each network")] = None,
    seeds: Annotated[int, Option(help="networks of each kind, with seeds 0, 1, ...")] = 3,
    fraction: Annotated[float, Option(help="class-balanced share of the training split")] = 1.0,
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:1")] = "auto",
    out: Annotated[Path, Option(help="folder for checkpoints, build_up.csv and the figure")] = Path("build-up"),
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train AlterNets with 0, 1, 2, ... self-attentions, or take trained ones, and draw their accuracy.

    Self-attentions replace convolutions from the end of the last stage backward. Finished networks are kept.
    """
    from landscape import models
    from landscape.plots import drawing
    from landscape.plots.figures.build_up import column
    from landscape.results.replacing import write_text
    from landscape.statistics.rounding import interval
    from landscape.statistics.seed_groups import mean_interval
    from landscape.studies.kinds import build_up_rows
    from landscape.studies.network_tables import options_instead

    at_least("seeds", seeds, 1)
    if runs and data:
        raise OptionError(f"got {len(runs)} trained networks and --data {data}; give the networks, or --data to train")
    if not runs and not data:
        raise OptionError("give trained AlterNets, or --data NAME to train them on, for example --data digits")
    arguments = parse_arguments("model_arg", model_arg)
    if "msa" in arguments:
        raise OptionError(f"--model-arg msa={arguments['msa']}: build-up sets the self-attentions itself; drop it")
    if data:
        network = {"model": model, "args": arguments, "over": {"msa": list(map(list, models.build_up(model)))}}
        train = {"seeds": seeds, "fraction": fraction, "recipe": recipe, "epochs": epochs}
        train = {name: value for name, value in train.items() if value is not None}
        folder, own = out / model, own_options(build_up)  # a folder for each model, whose networks have the same names
        with options_instead(own):
            study = study_named("build-up", data_root=data_root, data=data, train=train, networks={"alternet": network})
            carry_out(study, folder, device=device, quiet=quiet, options=own)
        runs = [file for seed in study.seeds for one in study.networks.values() if (file := one.file(folder, seed))]
    rows = list(build_up_rows(runs or []))
    csv.writer(text := io.StringIO(), lineterminator="\n").writerows([[*rows[0]], *(row.values() for row in rows)])
    file = write_text(out / "build_up.csv", text.getvalue())
    for count in sorted({row["msa"] for row in rows}):
        accuracies = column(rows, "accuracy", count)
        of = f" over {len(accuracies)} seeds" if len(accuracies) > 1 else ""
        typer.echo(f"{count} MSA  accuracy {interval(*mean_interval(accuracies, 'share'))}{of}")
    typer.echo(file)
    for path in drawing.draw_page("build_up", rows, out):
        typer.echo(path)


WORKERS = 2  # processes that train, measure and draw: networks as small as these gain nothing by threads
OTHERS: Mapping[str, Mapping[str, Any]] = {  # of `--all`, where the defaults take long or one network is too few
    "perturbation": {"samples": 64},
    "ensemble": {"samples": 512, "networks": ["vit_demo"], "with": ["resnet_demo", "alternet_demo"]},
    "attack": {"samples": 128, "eps": "1/255,4/255,16/255", "steps": 10},
    "input-surface": {"samples": 64, "resolution": 11},
    "corruption": {"samples": 128, "severities": "1,3,5"},
}
FEWEST = 96  # samples: four for each group of the noise scale
SENTENCES = 3
OWN = "landscape hessian weights.pt --model mine.py:model --data mine.py:data"


def demo(
    out: Annotated[Path, Option(help="folder for checkpoints, results, figures and report")] = Path("."),
    all: Annotated[bool, Option("--all", help="run every probe and draw every figure, in several minutes")] = False,
    epochs: Annotated[int | None, Option(help="epochs per model; default: those of the study's file")] = None,
    samples: Annotated[int, Option(help=f"samples per probe, at most; {FEWEST} or more")] = 1024,
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:1")] = "auto",
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a ViT, a ResNet and an AlterNet on digits, run the core probes, draw 16 figures: one to two minutes.

    Finished steps are kept and not repeated.
    """
    from landscape.plots import report
    from landscape.results.declared_size import toml_of
    from landscape.studies.network_tables import options_instead

    at_least("samples", samples, FEWEST)
    start, results = monotonic(), out / "results.h5"
    measure = toml_of(shipped()["demo"])["measure"]
    measure |= dict(others(measure, quiet=quiet)) if all else {}
    changes: dict[str, Any] = {"train": {} if epochs is None else {"epochs": epochs}}
    changes |= {"figures": []} if all else {}
    changes["measure"] = {name: {**of, "samples": min(samples, of["samples"])} for name, of in measure.items()}
    own = own_options(demo)
    with options_instead(own):
        study = study_named("demo", **changes)
    with workers_of(study, WORKERS, device=device) as workers:
        with options_instead(own):
            found = carry_out(study, out, **workers, device=device, quiet=quiet, options=own)
        illustrate(study, found, results, workers["each"], WORKERS, quiet=quiet)
    typer.echo(text_table(report.summary_table(results)))
    typer.echo(closing(report.findings_of(results), out))
    say(f"{format_duration(monotonic() - start)} in all", quiet=quiet)


def others(core: Iterable[str], *, quiet: bool = True) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """What is measured beside some probes: all but those of an order of frames, which digits do not have."""
    for name in (name for name in PROBES if name not in core and not probe_class(name).ordered):
        if (needed := PROBES[name].needs) and find_spec(needed) is None:
            say(f"{name}: left out, as {needed} is not installed", quiet=quiet)
        else:
            yield name, OTHERS.get(name, {"samples": 512})


def closing(found: Iterable[Finding], out: Path) -> str:
    """What was found, in sentences with numbers, and the commands to type next."""
    sentences = [finding.number for finding in found if finding.number][:SENTENCES]
    compare, every = (
        ["landscape", "compare", str(out / "results.h5")],
        ["landscape", "demo", "--out", str(out), "--all"],
    )
    commands = [shlex.join(compare), shlex.join(every), OWN]
    lines = ["", "Found (in brackets and after ±: 95 % intervals):", *(f"- {line}" for line in sentences)]
    return "\n".join([*lines, "", "Next:", *(f"$ {command}" for command in commands)])
