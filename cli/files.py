"""Commands that look at files: plot, report, show, layers, evaluate."""

from __future__ import annotations

import json as encoding
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from landscape.cli.progress import say

Option = typer.Option
File = Annotated[Path, typer.Argument(help="results file")]
Drawable = Annotated[Path, typer.Argument(help="results file, or the folder of a training run")]
Checkpoint = Annotated[Path | None, typer.Argument(help="checkpoint; default: the newest under ./checkpoints")]


def plot(
    file: Drawable = Path("results.h5"),
    out: Annotated[Path, Option(help="Folder for the figures.")] = Path("figures"),
    format: Annotated[str, Option(help="Any of png, pdf, svg, separated by commas.")] = "png",
    eigenvalues: Annotated[
        str, Option(help="LOW:HIGH of the figure of Hessian spectra; the paper has -120:900.", metavar="LOW:HIGH")
    ] = "",
    quiet: Annotated[bool, Option(help="Say nothing but errors.")] = False,
    debug: Annotated[bool, Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Draw every figure that the results allow; of a run folder its loss and accuracy."""
    if file.is_dir():
        from landscape import plots

        for path in plots.draw_run(file, out, formats_of(format)):
            typer.echo(path)
        return
    for path in drawn(file, out, formats_of(format), eigenvalues=range_of(eigenvalues), quiet=quiet):
        typer.echo(path)


def report(
    file: File = Path("results.h5"),
    out: Annotated[Path, Option(help="The page to write.")] = Path("report.html"),
    quiet: Annotated[bool, Option(help="Say nothing but errors.")] = False,
    debug: Annotated[bool, Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Write one page with every figure, the summary table and each protocol."""
    from tempfile import TemporaryDirectory

    from landscape.plots import report as page

    with TemporaryDirectory() as folder:
        typer.echo(page.report(file, out, drawn(file, Path(folder), ("png",), quiet=True)))


def range_of(text: str) -> tuple[float, float] | None:
    """`LOW:HIGH` with zero between them, None for nothing.

    Raises:
        OptionError: it is something else.
    """
    from landscape.probe import OptionError

    if not text:
        return None
    low, _, high = text.partition(":")
    try:
        found = float(low), float(high)
    except ValueError:
        found = (math.nan, math.nan)
    if not -math.inf < found[0] < 0 < found[1] < math.inf:
        raise OptionError(f"--eigenvalues {text} is no range around zero; ask for LOW:HIGH, for example -120:900")
    return found


def drawn(
    file: Path,
    out: Path,
    formats: tuple[str, ...],
    *,
    eigenvalues: tuple[float, float] | None = None,
    quiet: bool,
) -> list[Path]:
    """Draw into a folder.

    Raises:
        ValueError: there is nothing finished to draw.
    """
    from landscape import plots

    paths = plots.draw(file, out, formats=formats, eigenvalues=eigenvalues)
    if not paths:
        raise ValueError(f"{file} holds nothing finished to draw; run a probe first, for example: landscape surface")
    say(f"{len(paths)} figures in {out}", quiet=quiet)
    return paths


def formats_of(text: str) -> tuple[str, ...]:
    """`png,pdf` as a tuple."""
    from landscape.probe import OptionError

    formats = tuple(part.strip().lower() for part in text.split(","))
    unknown = [part for part in formats if part not in ("png", "pdf", "svg")]
    if unknown:
        raise OptionError(f"--format {unknown[0]} is unknown; ask for png, pdf or svg")
    return formats


def show(
    file: Annotated[Path, typer.Argument(help="checkpoint or results file")],
    json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    debug: Annotated[bool, Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Tell what a checkpoint or a results file holds."""
    if not file.exists():
        raise FileNotFoundError(f"no file at {file}; give a checkpoint or a results file")
    if file.is_dir():
        raise ValueError(f"{file} is a folder; give a checkpoint in it, or a results file")
    rows = _results(file) if _is_hdf5(file) else _checkpoint(file)
    if json:
        typer.echo(encoding.dumps(rows, default=str))
    elif isinstance(rows, dict):
        width = max(map(len, rows))
        for name, value in rows.items():
            typer.echo(f"{name:{width}}  {value}")
    else:
        typer.echo(table(rows))


def layers(
    checkpoint: Checkpoint = None,
    model: Annotated[str | None, Option(help="Name, module:callable or file.py:callable.")] = None,
    model_arg: Annotated[list[str], Option(help="KEY=VALUE argument of the model; repeatable.")] = [],  # noqa: B006
    image_size: Annotated[int | None, Option(help="Side of the example image.")] = None,
    layers: Annotated[
        list[str],
        Option(help="REGEX[:KIND[:ROWSxCOLUMNS[+PREFIX]]] or file.toml: modules instead of the layers found."),
    ] = [],  # noqa: B006
    json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    debug: Annotated[bool, Option(help="Show the traceback of an error.")] = False,
) -> None:
    """List the layers that probes listen to: name, kind, stage, depth, shape, grid. Needs no data."""
    import torch

    from landscape import loading
    from landscape.cli.probing import key_values
    from landscape.layers import chosen

    net, size = loading.bare(checkpoint, model or "", key_values(model_arg), image_size)
    dtype = next(net.parameters()).dtype
    example = torch.randn(2, 3, size, size, dtype=dtype)
    try:
        found = chosen(net, example, tuple(layers))
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"the model refuses images of shape {tuple(example.shape[1:])} ({reason}); "
            "check --image-size and --model-arg"
        ) from error
    rows = [
        {
            "layer": i,
            "name": layer.name,
            "kind": layer.kind,
            "reduces": "subsample" if layer.reduces else "",
            "stage": layer.stage,
            "depth": f"{layer.depth:.3f}",
            "shape": " x ".join(map(str, layer.shape)),
            "grid": " x ".join(map(str, layer.grid)) if layer.spatial else "?" if layer.unexplained else "",
        }
        for i, layer in enumerate(found)
    ]
    typer.echo(encoding.dumps(rows) if json else table(rows))
    if unexplained := [layer for layer in found if layer.unexplained]:
        first = unexplained[0]
        typer.echo(
            f"note: no grid of this model explains the {first.shape[0]} tokens of {first.name} "
            f"({len(unexplained)} layers); probes of maps leave them out, unless --layers says it, "
            "for example --layers 'REGEX:msa:14x14+1' for 14 x 14 tokens behind one other",
            err=True,
        )


def evaluate(
    checkpoint: Checkpoint = None,
    data: Annotated[str | None, Option(help="NAME, FOLDER or file.py:callable.")] = None,
    data_root: Annotated[Path | None, Option(help="Folder that holds cifar-100-python/ and the like.")] = None,
    split: Annotated[str, Option(help="train or test.")] = "test",
    samples: Annotated[str, Option(help="A number, a share such as 10%, or all.")] = "all",
    batch_size: Annotated[int, Option(help="Samples per mini-batch.")] = 128,
    model: Annotated[str | None, Option(help="Name, module:callable or file.py:callable.")] = None,
    model_arg: Annotated[list[str], Option(help="KEY=VALUE argument of the model; repeatable.")] = [],  # noqa: B006
    device: Annotated[str, Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
    debug: Annotated[bool, Option(help="Show the traceback of an error.")] = False,
) -> None:
    """Loss, accuracy, top-5 accuracy and calibration error of a checkpoint, each with its standard error."""
    from dataclasses import asdict

    from landscape import loading
    from landscape.cli.probing import key_values
    from landscape.evaluate import evaluate as evaluated

    loaded = loading.load(
        checkpoint, data=data or "", data_root=data_root, split=split, samples=samples, batch_size=batch_size,
        model=model or "", model_arg=key_values(model_arg), device=device,
    )  # fmt: skip
    found = asdict(evaluated(loaded.model, (loaded.batch(i) for i in range(len(loaded.batches)))))
    if json:
        typer.echo(encoding.dumps(found))
        return
    typer.echo(f"{loaded.label}, {loaded.protocol}")
    for name, value in found.items():
        if name != "samples" and not name.endswith("_se"):
            typer.echo(f"{name:9} {value:.4f} +- {found[f'{name}_se']:.4f}")


def table(rows: list[dict[str, Any]]) -> str:
    """Rows with common keys as aligned text under a header."""
    if not rows:
        return "(empty)"
    cells = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def _is_hdf5(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(8) == b"\x89HDF\r\n\x1a\n"


def _results(file: Path) -> list[dict[str, Any]]:
    from landscape import results

    return results.summary(file)


def _checkpoint(file: Path) -> dict[str, Any]:
    from landscape import checkpoint

    found = checkpoint.read(file)
    tensors = found.state_dict.values()
    return {
        "file": str(file),
        "sha256": found.sha256,
        "weights": f"{len(found.state_dict)} tensors, {sum(t.numel() for t in tensors):,} numbers ({found.taken})",
        "model": found.model or "not said: name it with --model",
        "model_args": found.model_args,
        "data": found.data,
        "recipe": found.recipe,
        "epoch": found.epoch,
        "metrics": found.metrics,
        "seed": found.seed,
        "versions": found.versions,
    }
