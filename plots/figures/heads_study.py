"""Draw surfaces and Hessian spectra of several networks, deterministic and with dropout masks ("Blurs")."""

from collections.abc import Sequence

import numpy as np
import xarray as xr

from landscape.plots import appearance, style, theme
from landscape.plots.figure import Axes, Figure, Look
from landscape.plots.figures import hessian, surface
from landscape.studies import kinds
from landscape.studies.study import Network, Study, members_of, smoothed

MEANING = (
    "A column per network: contours of the loss as it is and of the mean prediction over dropout masks, on levels that "
    "all panels share, above the density of the largest-magnitude Hessian eigenvalues of mini-batches. Two random "
    "directions show neither the whole valley nor its sharpest walls, and networks compare only under one protocol."
)
KINDS = {False: Look("deterministic", "tab:blue", "", "-"), True: Look("with dropout masks", "tab:orange", "", "--")}
UNEVEN = 10.0  # ratio of peaks of densities from which a linear axis hides the lower one
studies = kinds.heads


def page(study: Study) -> Figure:
    """A column per network; rows for the surfaces of each kind, and for the spectra of both."""
    networks = list(study.networks.values())
    surfaces, spectra = (
        [one.results[probe, kind] for one in networks for probe, kind in one.results if probe == wanted]
        for wanted in ("surface", "hessian")
    )
    rows = [kind for kind in KINDS if any(("surface", kind) in one.results for one in networks)]
    side = (theme.page_width() - 0.9) / len(networks)
    shown = [*surfaces, *spectra]
    looks = [Look(str(data.attrs.get("label", ""))) for data in shown]
    note = (
        "Cross: the trained weights. APE: mean of the positive eigenvalues, NEP: share of negative ones, with 95 % "
        f"intervals over mini-batches. {hessian.ticks(spectra)}"
    )
    legend = [KINDS[kind] for kind in rows]
    heights = [*(len(rows) * [side + 0.1]), 1.3]
    caption = _protocols(surfaces, spectra)
    figure = style.page(shown, looks, height=sum(heights), legend=legend, note=note, caption=caption)
    grid = figure.subplots(len(heights), len(networks), height_ratios=heights, squeeze=False)
    levels = surface.contour_levels(surfaces)
    for column, one in enumerate(networks):
        for row, kind in enumerate(rows):
            ax = grid[row, column]
            data = one.results.get(("surface", kind))
            if data is None:
                ax.axis("off")
                style.write_centred(ax, "not measured", fontsize=style.SMALL)
            else:
                surface.draw(data, ax, levels=levels)
            ax.set_title(_title(one, data, row, side), fontsize=style.SMALL + 1)
            ax.set(xlabel="", ylabel="")
            ax.locator_params(nbins=5)
            ax.tick_params(labelsize=style.SMALL, labelleft=column == 0, labelbottom=row == len(rows) - 1)
    surface.add_colour_bar(figure, list(grid[: len(rows)].flat), surfaces, levels)
    _draw_spectra(grid[-1], networks, spectra)
    return figure


def label_of(network: Network) -> str:
    """The label of a network, and whether blocks were inserted that it was not trained with."""
    return network.label + ", smoothing inserted" * smoothed(next(iter(network.results.values())))


def _title(network: Network, data: xr.Dataset | None, row: int, side: float) -> str:
    """The name of the network above its first panel, and the kind of prediction."""
    masks = members_of(data) if data is not None else 0
    kind = f"{masks} dropout masks" if masks else "deterministic" if data is not None else ""
    name = style.fitted(appearance.escaped(label_of(network)), side, style.SMALL + 1, lines=2) if row == 0 else ""
    return f"{name}\n{kind}".strip()


def _draw_spectra(axes: Sequence[Axes], networks: Sequence[Network], spectra: Sequence[xr.Dataset]) -> None:
    """The densities of both kinds, with one range of eigenvalues for all networks."""
    (low, _), (_, high) = hessian.axis_ranges(spectra)
    at = np.linspace(min(low, -0.05 * high), high, 400)
    peaks = []
    for ax, one in zip(axes, networks, strict=True):
        lines = []
        for kind, look in KINDS.items():
            data = one.results.get(("hessian", kind))
            if data is None:
                continue
            peaks.append(float(hessian.draw_density(ax, hessian.eigenvalues(data), at, look).max()))
            lines.append(_numbers(data, look))
        for i, (text, color) in enumerate(lines):
            ax.text(0.98, 0.97 - 0.13 * i, text, color=color, transform=ax.transAxes, ha="right", va="top",
                    fontsize=style.SMALL)  # fmt: skip
        ax.set(xlim=(at[0], at[-1]), xlabel="Hessian eigenvalue")
        ax.xaxis.label.set_fontsize(style.SMALL + 1)
        ax.tick_params(labelsize=style.SMALL)
    peaks = list(filter(None, peaks)) or [1.0]
    for ax in axes:
        if max(peaks) > UNEVEN * min(peaks):
            ax.set_yscale("log")
            ax.set_ylim(0.03 * min(peaks), 6 * max(peaks))
        else:
            ax.set_ylim(0, 1.45 * max(peaks))  # room for the numbers
        if ax is not axes[0]:
            ax.tick_params(labelleft=False)
    axes[0].set_ylabel("density", fontsize=style.SMALL + 1)


def _numbers(data: xr.Dataset, look: Look) -> tuple[str, str]:
    return ", ".join(f"{name.upper()} {hessian.with_interval(data, name)}" for name in ("ape", "nep")), str(look.color)


def _protocols(surfaces: Sequence[xr.Dataset], spectra: Sequence[xr.Dataset]) -> str:
    """The protocols of surfaces and of spectra; one of each where only the number of dropout masks differs."""
    said = []
    for name, results in (("Surfaces", surfaces), ("Spectra", spectra)):
        texts = dict.fromkeys(
            ", ".join(part for part in str(data.attrs.get("protocol", "")).split(", ") if "dropout mask" not in part)
            for data in results
        )
        axes = {str(data[axis].attrs.get("long_name", axis)) for data in results for axis in ("x", "y") if axis in data}
        along = f", axes: {' and '.join(sorted(axes))}" if len(axes) == 2 else ""
        said.append(f"{name}: {appearance.escaped('; '.join(texts))}{appearance.escaped(along)}.")
    return " ".join(said)
