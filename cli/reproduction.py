"""The command that measures the papers' claims anew: trains the networks, asks them, and writes the table."""

from __future__ import annotations

import difflib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from landscape.cli.progress import say
from landscape.cli.training import run_training
from landscape.options import OptionError, at_least, format_duration
from landscape.results.statistics import mean_and_standard_error

if TYPE_CHECKING:
    import xarray as xr

    from landscape.cli.claims import Answers, Claim, Finding, Network, Question

Option = typer.Option
TABLE = "CLAIMS.md"
RULE = (
    "A claim holds if the 95 % interval of Student's t over seeds lies on the claimed side of zero, fails if it lies "
    "on the other, and cannot be told else, as with fewer than three seeds: small networks, shortly trained, decide "
    "little."
)


def reproduce(
    data: Annotated[str, Option(help="NAME, FOLDER or file.py:callable.")] = "cifar10",
    data_root: Annotated[Path | None, Option(help="Folder that holds cifar-100-python/ and the like.")] = None,
    claim: Annotated[
        list[str], Option(help="Only this claim, into CLAIMS-NAME.md; repeatable. See cli/claims.py.")
    ] = [],  # noqa: B006
    seeds: Annotated[int, Option(help="Networks of each kind, seeds 0, 1, ...; fewer than 3 decide nothing.")] = 3,
    fraction: Annotated[float, Option(help="Class-balanced share of the training split.")] = 0.2,
    epochs: Annotated[int, Option(help="Of the main networks; those compared among themselves are shorter.")] = 8,
    measure: Annotated[bool, Option(help="Ask the networks; without, they are trained only.")] = True,
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    out: Annotated[Path, Option(help="Folder for checkpoints, results.h5 and CLAIMS.md.")] = Path("reproduction"),
    quiet: Annotated[bool, Option(help="Say nothing but errors.")] = False,
    debug: Annotated[bool, Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Train small networks of each family and decide the papers' claims on them: holds, fails, or cannot tell.

    On the CPU this takes some two hours with three seeds; whatever is finished is kept and not done again.
    """
    from landscape.cli.claims import NETWORKS, QUESTIONS, findings, table

    at_least("seeds", seeds, 1)
    at_least("epochs", epochs, 1)
    claims = _chosen(claim)
    file = out / _file_of(claims)
    studies: list[Answers] = []
    needs = list(dict.fromkeys(need for one in claims for need in one.needs))
    networks = {name: NETWORKS[name] for name in dict.fromkeys(network for network, _ in needs)}
    for seed in range(seeds):
        folders = {
            name: _trained(name, network, data, data_root, seed, fraction, epochs, device, out, quiet)
            for name, network in networks.items()
        }
        if not measure:
            continue
        answers: dict[tuple[str, str], xr.Dataset] = {}
        for network, question in needs:
            began = time.monotonic()
            answers[network, question] = _asked(
                QUESTIONS[question], folders[network], data_root, device, out / "results.h5", f"{network}-s{seed}"
            )
            took = format_duration(time.monotonic() - began)
            say(f"{network}, seed {seed}: {question} in {took}", quiet=quiet)
        studies.append(answers)
        found = findings(claims, studies)
        about = _protocol(networks, out, data=data, seeds=seed + 1, fraction=fraction, epochs=epochs)
        _written(file, about + "\n" + table(found) + "\n" + _tally(found))
    if measure:
        typer.echo(file.read_text(), nl=False)


def _chosen(names: Sequence[str]) -> list[Claim]:
    from landscape.cli.claims import CLAIMS

    known = {one.name: one for one in CLAIMS}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 3) or list(known)
            raise OptionError(f"--claim {name} is unknown; ask for {', '.join(near)}")
    return [one for name, one in known.items() if not names or name in names]


def _file_of(claims: Sequence[Claim]) -> str:
    """The name of their table: some claims have one of their own, so that the table of all stays."""
    from landscape.cli.claims import CLAIMS

    return TABLE if len(claims) == len(CLAIMS) else f"CLAIMS-{'+'.join(one.name for one in claims)}.md"


def _trained(
    name: str, network: Network, data: str, data_root: Path | None, seed: int, fraction: float, epochs: int,
    device: str, out: Path, quiet: bool,
) -> Path:  # fmt: skip
    """The run folder of one network."""
    share = float(f"{fraction * network.images:.6g}")  # 0.2 x 0.2 is 0.04
    return run_training(
        network.model, data, {"epochs": max(1, round(epochs * network.epochs))}, recipe="demo",
        out=out / "checkpoints" / f"{name}-s{seed}", data_root=data_root, model_args=network.model_args,
        fraction=share, seed=seed, device=device, quiet=quiet,
    ).parent  # fmt: skip


def _asked(
    question: Question, folder: Path, data_root: Path | None, device: str, results: Path, label: str
) -> xr.Dataset:
    """The answer of one network, from the results file where it is there already."""
    import xarray as xr

    from landscape import api
    from landscape.checkpoints.checkpoint import read_checkpoint

    options: dict[str, Any] = {"data_root": data_root, "device": device, **question.options}
    checkpoint = folder / question.snapshot
    if question.probe == "metrics":
        return xr.Dataset(read_checkpoint(checkpoint).metrics)
    name = label if question.snapshot == "final.pt" else f"{label}-{checkpoint.stem}"
    if question.probe == "evaluate":
        return _evaluated(checkpoint, results, name, **options)
    return api.measure(question.probe, checkpoint, out=results, label=name, **options)


def _evaluated(checkpoint: Path, out: Path, label: str, *, passes: int, **options: Any) -> xr.Dataset:
    from landscape.probes.evaluation import Evaluation
    from landscape.results import reader
    from landscape.run import run
    from landscape.subject import loading

    outcome = run(Evaluation(passes), loading.load(checkpoint, label=label, **options), out)
    return dict(reader.groups(out))[outcome.group].sel(passes=passes)


def _protocol(
    networks: Mapping[str, Network], out: Path, *, data: str, seeds: int, fraction: float, epochs: int
) -> str:
    """What was done, in words, with the networks and how good they are."""
    import numpy as np

    from landscape.checkpoints.checkpoint import read_checkpoint

    lines = [
        "# Claims of the papers, measured anew",
        "",
        f"Last output of `landscape reproduce`. {data}, seeds 0 to {seeds - 1}, {fraction:g} of the training images, "
        f"{epochs} epochs, recipe demo. {RULE}",
        "",
        "| network | model | parameters | images | epochs | accuracy, mean ± standard error over seeds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, network in networks.items():
        runs = [read_checkpoint(out / "checkpoints" / f"{name}-s{seed}" / "final.pt") for seed in range(seeds)]
        accuracy = np.array([run.metrics["accuracy"] for run in runs])
        mean, standard_error = mean_and_standard_error(accuracy)
        error = f" ± {standard_error:.4f}" if seeds > 1 else ""
        size = sum(tensor.numel() for key, tensor in runs[0].state_dict.items() if not _statistic(key))
        given = "".join(f" {key}={value}" for key, value in network.model_args.items())
        lines.append(
            f"| {name} | {network.model}{given} | {size:,} | {fraction * network.images:g} | {runs[0].epoch:g} "
            f"| {mean:.4f}{error} |"
        )
    return "\n".join(lines) + "\n"


def _statistic(key: str) -> bool:
    return key.endswith(("running_mean", "running_var", "num_batches_tracked"))


def _tally(found: Iterable[Finding]) -> str:
    verdicts = [finding.verdict for finding in found]
    counts = ", ".join(f"{verdicts.count(word)} {word}" for word in dict.fromkeys(sorted(verdicts, reverse=True)))
    return f"In all: {counts}.\n"


def _written(path: Path, text: str) -> None:
    """Written aside and moved: there is the old table or the whole new one."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)
