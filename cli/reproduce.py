"""The command `reproduce`: train small networks, measure the papers' claims on them, and write the table."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from landscape.cli.command_options import Debug, Quiet, Verbose
from landscape.cli.training import run_training
from landscape.options import alternatives, at_least, invalid

if TYPE_CHECKING:
    import xarray as xr

    from landscape.studies.claims import Claim, Training

Option = typer.Option


def reproduce(
    data: Annotated[str, Option(help="NAME, FOLDER or file.py:callable")] = "cifar10",
    data_root: Annotated[Path | None, Option(help="folder that holds cifar-100-python/ and the like")] = None,
    claim: Annotated[
        list[str],
        Option(help="only this claim, into CLAIMS-NAME.md; repeatable; names: see landscape/studies/papers.py"),
    ] = [],  # noqa: B006
    seeds: Annotated[int, Option(help="networks of each kind, with seeds 0, 1, ...; fewer than 3 decide nothing")] = 3,
    fraction: Annotated[float, Option(help="class-balanced share of the training split")] = 0.2,
    epochs: Annotated[int, Option(help="epochs of the main networks; the others train for fewer or more")] = 8,
    measure: Annotated[bool, Option(help="measure the networks, or only train them")] = True,
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:1")] = "auto",
    out: Annotated[Path, Option(help="folder for checkpoints, results.h5 and CLAIMS.md")] = Path("reproduction"),
    quiet: Quiet = False,
    verbose: Verbose = False,
    debug: Debug = False,
) -> None:
    """Train small networks of each family and test the papers' claims on them: holds, fails, or cannot tell.

    Takes more than two hours on a CPU with three seeds. Finished steps are kept and not repeated.
    """
    from landscape.results.replacing import write_text
    from landscape.studies.claims import findings, markdown_table, protocol
    from landscape.studies.edge_of_stability import TRAININGS, table_of
    from landscape.studies.papers import CLAIMS, NETWORKS
    from landscape.studies.study import Results, Study

    at_least("seeds", seeds, 1)
    at_least("epochs", epochs, 1)
    claims = _claims_named(claim)
    # a selection has a table of its own, which does not replace that of all claims
    file = out / (f"CLAIMS-{'+'.join(one.name for one in claims)}.md" if len(claims) < len(CLAIMS) else "CLAIMS.md")
    out.mkdir(parents=True, exist_ok=True)
    found: list[Results] = []
    needs = list(dict.fromkeys(need for one in claims for need in one.needs))
    names = dict.fromkeys(network for network, _ in needs)
    networks = {name: NETWORKS[name] for name in names if name in NETWORKS}
    trainings = {name: TRAININGS[name] for name in names if name in TRAININGS}
    for seed in range(seeds):
        where: dict[str, Any] = {"data_root": data_root, "seed": seed, "device": device, "out": out}
        for name, network in networks.items():
            _train(name, network, data, fraction, epochs, quiet=quiet, **where)
        if not measure:
            continue
        study = Study(f"seed {seed}")
        study.measure(needs, partial(_result, data=data, **where), quiet=quiet)
        found.append(study.cells)
        about = protocol(networks, out, data=data, seeds=seed + 1, fraction=fraction, epochs=epochs)
        about += table_of(trainings, found)
        write_text(file, about + "\n" + markdown_table(findings(claims, found)))
    if measure:
        typer.echo(file.read_text(), nl=False)


def _result(
    network: str, measurement: str, *, data: str, data_root: Path | None, seed: int, device: str, out: Path
) -> xr.Dataset:
    """A measurement of a trained network, or the series of a training that is followed."""
    from landscape import api
    from landscape.studies.claims import run_folder
    from landscape.studies.edge_of_stability import TRAININGS, followed
    from landscape.studies.papers import MEASUREMENTS

    where: Mapping[str, Any] = {"data_root": data_root, "device": device, "out": out / "results.h5"}
    if network in TRAININGS:
        return followed(network, data=data, seed=seed, **where)
    return MEASUREMENTS[measurement].of(run_folder(out, network, seed), api.measure, **where)


def _claims_named(names: Sequence[str]) -> list[Claim]:
    """The claims of some names, or all."""
    from landscape.studies.papers import CLAIMS

    known = {one.name: one for one in CLAIMS}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 3) or list(known)
            raise invalid("claim", name, alternatives(near))
    return [one for name, one in known.items() if not names or name in names]


def _train(
    name: str, network: Training, data: str, fraction: float, epochs: int, *, seed: int, out: Path, **options: Any
) -> None:
    """Train one network, unless it is trained."""
    from landscape.studies.claims import run_folder

    overrides: dict[str, Any] = {"epochs": max(1, round(epochs * network.epochs))}
    if network.objective != "classification":
        overrides["objective"] = network.objective
    run_training(
        network.model, data, overrides, recipe="demo", out=run_folder(out, name, seed), seed=seed,
        model_args=network.model_args, fraction=float(f"{fraction * network.images:.6g}"),  # 0.2 x 0.2 is 0.04
        **options,
    )  # fmt: skip
