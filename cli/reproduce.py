"""The command `reproduce`: train small networks, measure the papers' claims on them, and write the table."""

from __future__ import annotations

import difflib
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from landscape.cli.command_options import Debug, Quiet, Verbose
from landscape.cli.training import run_training
from landscape.options import alternatives, at_least, format_duration, invalid
from landscape.progress import say
from landscape.results.rounding import interval
from landscape.results.seed_groups import mean_interval

if TYPE_CHECKING:
    import xarray as xr

    from landscape.cli.claims import Claim, Measurement, Network, Results

Option = typer.Option
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # batch-norm buffers, not parameters


def reproduce(
    data: Annotated[str, Option(help="NAME, FOLDER or file.py:callable")] = "cifar10",
    data_root: Annotated[Path | None, Option(help="folder that holds cifar-100-python/ and the like")] = None,
    claim: Annotated[
        list[str], Option(help="only this claim, into CLAIMS-NAME.md; repeatable; names: see cli/claims.py")
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
    from landscape.cli.claims import CLAIMS, NETWORKS
    from landscape.cli.edge_of_stability import STUDIES, table_of
    from landscape.cli.findings import findings, markdown_table

    at_least("seeds", seeds, 1)
    at_least("epochs", epochs, 1)
    claims = _claims_named(claim)
    # a selection has a table of its own, which does not replace that of all claims
    file = out / (f"CLAIMS-{'+'.join(one.name for one in claims)}.md" if len(claims) < len(CLAIMS) else "CLAIMS.md")
    out.mkdir(parents=True, exist_ok=True)
    studies: list[Results] = []
    needs = list(dict.fromkeys(need for one in claims for need in one.needs))
    names = dict.fromkeys(network for network, _ in needs)
    networks = {name: NETWORKS[name] for name in names if name in NETWORKS}
    trainings = {name: STUDIES[name] for name in names if name in STUDIES}
    for seed in range(seeds):
        given = (data, data_root, seed, fraction, epochs, device, out, quiet)
        folders = {name: _train(name, network, *given) for name, network in networks.items()}
        if not measure:
            continue
        found = partial(_found, folders=folders, data=data, data_root=data_root, seed=seed, device=device, out=out)
        results: dict[tuple[str, str], xr.Dataset] = {}
        for network, measurement in needs:
            began = time.monotonic()
            results[network, measurement] = found(network, measurement)
            took = format_duration(time.monotonic() - began)
            say(f"{network}, seed {seed}: {measurement} in {took}", quiet=quiet)
        studies.append(results)
        about = _protocol(networks, out, data=data, seeds=seed + 1, fraction=fraction, epochs=epochs)
        about += table_of(trainings, studies)
        temporary = file.with_suffix(".tmp")  # so that a kill leaves the old table or all of the new one
        temporary.write_text(about + "\n" + markdown_table(findings(claims, studies)))
        temporary.replace(file)
    if measure:
        typer.echo(file.read_text(), nl=False)


def _found(
    network: str, measurement: str, *, folders: Mapping[str, Path], data: str, data_root: Path | None, seed: int,
    device: str, out: Path,
) -> xr.Dataset:  # fmt: skip
    """A measurement of a trained network, or the series of a training that is followed."""
    from landscape.cli.claims import MEASUREMENTS
    from landscape.cli.edge_of_stability import followed

    file = out / "results.h5"
    if network not in folders:
        return followed(network, data=data, data_root=data_root, seed=seed, device=device, out=file)
    return _measure(MEASUREMENTS[measurement], folders[network], data_root, device, file, f"{network}-s{seed}")


def _claims_named(names: Sequence[str]) -> list[Claim]:
    """The claims of some names, or all."""
    from landscape.cli.claims import CLAIMS

    known = {one.name: one for one in CLAIMS}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 3) or list(known)
            raise invalid("claim", name, alternatives(near))
    return [one for name, one in known.items() if not names or name in names]


def _train(
    name: str, network: Network, data: str, data_root: Path | None, seed: int, fraction: float, epochs: int,
    device: str, out: Path, quiet: bool,
) -> Path:  # fmt: skip
    """Train one network, unless it is trained; return its run folder."""
    share = float(f"{fraction * network.images:.6g}")  # 0.2 x 0.2 is 0.04
    overrides: dict[str, Any] = {"epochs": max(1, round(epochs * network.epochs))}
    if network.objective != "classification":
        overrides["objective"] = network.objective
    return run_training(
        network.model, data, overrides, recipe="demo",
        out=out / "checkpoints" / f"{name}-s{seed}", data_root=data_root, model_args=network.model_args,
        fraction=share, seed=seed, device=device, quiet=quiet,
    ).parent  # fmt: skip


def _measure(
    measurement: Measurement, folder: Path, data_root: Path | None, device: str, results: Path, label: str
) -> xr.Dataset:
    """One measurement of one network, or its result if the results file already holds it."""
    import xarray as xr

    from landscape import api
    from landscape.checkpoints.checkpoint import read_checkpoint

    options: dict[str, Any] = {"data_root": data_root, "device": device, **measurement.options}
    checkpoint = folder / measurement.snapshot
    if measurement.probe == "metrics":
        return xr.Dataset(read_checkpoint(checkpoint).metrics)
    name = label if measurement.snapshot == "final.pt" else f"{label}-{checkpoint.stem}"
    if measurement.probe == "evaluate":
        return _evaluate(checkpoint, results, name, **options)
    if moving := options.pop("moving", ""):
        options |= _moving_images(checkpoint, moving, **options)
    return api.measure(measurement.probe, checkpoint, out=results, label=name, **options)


def _moving_images(
    checkpoint: Path, perturbation: str, *, samples: int, data_root: Path | None, device: str, **_: Any
) -> dict[str, Any]:
    """The test images of a checkpoint as clips of slowly changing frames, as options of `stream`."""
    from landscape.data import perturbations
    from landscape.subject import loading
    from landscape.subject.corrupted_images import images_of

    still = images_of(loading.load(checkpoint, samples=samples, data_root=data_root, device=device), "moving images")
    frames = perturbations.generated(still.inputs.cpu(), perturbation, seed=0)
    clip_length = frames.shape[1]
    targets = still.targets.cpu().repeat_interleave(clip_length)
    moved = still.normalised(frames.flatten(0, 1))
    return {"data": (moved, targets), "samples": "all", "data_root": None, "clip_length": clip_length}


def _evaluate(checkpoint: Path, out: Path, label: str, *, passes: int, **options: Any) -> xr.Dataset:
    from landscape.probes.evaluation import Evaluation
    from landscape.results import reader
    from landscape.run import run
    from landscape.subject import loading

    outcome = run(Evaluation(passes), loading.load(checkpoint, label=label, **options), out)
    return reader.result(out, outcome.group).sel(passes=passes)


def _protocol(
    networks: Mapping[str, Network], out: Path, *, data: str, seeds: int, fraction: float, epochs: int
) -> str:
    """The protocol in words, and a table of the networks with their accuracies."""
    import numpy as np

    from landscape.checkpoints.checkpoint import read_checkpoint
    from landscape.cli.findings import RULE

    lines = ["# The papers' claims, reproduced", "", f"Last output of `landscape reproduce`. {RULE}"]
    if not networks:
        return "\n".join(lines) + "\n"
    lines += [
        "",
        f"{data}, seeds 0 to {seeds - 1}, {fraction:g} of the training images, {epochs} epochs, recipe demo:",
        "",
        "| network | model | parameters | images | epochs | accuracy, mean over seeds (95 % from four seeds on) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, network in networks.items():
        runs = [read_checkpoint(out / "checkpoints" / f"{name}-s{seed}" / "final.pt") for seed in range(seeds)]
        accuracies = np.array([run.metrics.get("accuracy", np.nan) for run in runs])
        mean = mean_interval(accuracies, "share")
        accuracy = interval(*mean) if np.isfinite(mean[0]) else "no labels"
        size = sum(tensor.numel() for key, tensor in runs[0].state_dict.items() if not key.endswith(BUFFERS))
        arguments = "".join(f" {key}={value}" for key, value in network.model_args.items())
        arguments += f" objective={network.objective}" if network.objective != "classification" else ""
        lines.append(
            f"| {name} | {network.model}{arguments} | {size:,} | {fraction * network.images:g} | {runs[0].epoch:g} "
            f"| {accuracy} |"
        )
    return "\n".join(lines) + "\n"
