"""Draw the gallery from the shipped results and write the page of all figures: `python docs/wall.py`."""

from pathlib import Path

from landscape.plots import FIGURES, IMPORTED, drawing
from landscape.plots.selection import Selection

DOCS = Path(__file__).parent
GALLERY = DOCS.parent / "gallery"
RESULTS = {  # of `examples/results`, with the checkpoints to draw; of several that hold a figure the last one is shown
    "muon-gpt2": (), "two-resnets": (), "sgd-sam": ("*-s0",), "edge-of-stability": (), "basins": (),
    "quantised-vit": (), "demo": (), "cifar10": (),
}  # fmt: skip
HEAD = """# All figures

Every figure that `landscape plot` draws, with the question of its probe and the commands that measure and draw it
alone. Pictures are of small networks, drawn with the default style: the command above each draws it. This page is
written by `python docs/wall.py`.
"""


def question(probe: str) -> str:
    """The question of a probe, as on its page; "" of what has no page."""
    page = DOCS / "probes" / f"{probe}.md"
    return page.read_text().split("\n\n")[1].replace("\n", " ") if page.exists() else ""


def wall() -> str:
    """The page: a section per probe, its figures in their order with meaning, command and picture."""
    parts = [HEAD]
    for probe in dict.fromkeys(figure.probe for figure in FIGURES.values()):
        asked = question(probe)
        measure = "landscape train --monitor" if probe == "monitor" else f"landscape {probe} CHECKPOINT"
        parts.append(f"## {probe}\n\n{asked}\n" if asked else f"## {probe}\n")
        if probe not in IMPORTED:
            parts.append(f"```\n{measure}\n```\n")
        for figure in (figure for figure in FIGURES.values() if figure.probe == probe):
            first = figure.module.MEANING.partition(". ")[0].rstrip(".")
            parts.append(f"`{figure.name}`: {first}.\n\n```\nlandscape plot --figure {figure.name}\n```\n")
            if (GALLERY / f"{figure.name}.png").exists():
                parts.append(f"![{figure.name.replace('_', ' ')}: {first}](../gallery/{figure.name}.png)\n")
    return "\n".join(parts)


def draw(folder: Path) -> list[Path]:
    """Draw every figure of the shipped results into a folder; the others of the gallery are of larger measurements."""
    files = {name: DOCS / "examples" / "results" / f"{name}.h5" for name in RESULTS}
    each = [drawing.draw(file, folder, selection=Selection(RESULTS[name])) for name, file in files.items()]
    return sorted({path for drawn in each for path in drawn})


if __name__ == "__main__":
    draw(GALLERY)
    (DOCS / "all-figures.md").write_text(wall())
