"""Draw the gallery from the shipped results and write the page of all figures: `python docs/wall.py`."""

import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from PIL import Image

import landscape
from landscape.plots import FIGURES, STUDIES, drawing, study_module
from landscape.plots.comparison.text import compare
from landscape.plots.selection import Selection

DOCS = Path(__file__).parent
GALLERY = DOCS.parent / "gallery"
RESULTS = {  # of `examples/results`, with the checkpoints to draw; of several that hold a figure the last one is shown
    "muon-gpt2": (), "two-resnets": (), "sgd-sam": ("*-s0",), "edge-of-stability": (), "basins": (),
    "quantised-vit": (), "cifar10": (),
}  # fmt: skip
TRAINED = (  # networks that the commands below measure
    "train vit_demo --data digits --out vit",
    "train vit_demo --objective mim --data digits --out mim",
    "train vit_demo --objective simclr --data digits --out simclr",
    "train resnet_demo --model-arg width=8 --data digits --out resnet",
    "train resnet_demo --model-arg width=8 --model-arg mc_dropout=0.1 --data digits --out dropout",
    "train resnet_demo --model-arg width=4 --data digits --out narrow",
    "train resnet_demo --model-arg width=2 --data digits --out narrower",
)
MEASURED = {  # figures that no shipped result holds, and the commands that measure them, each file for itself
    "tokens_moved": ("tokens vit --method principal --images 4",),
    "noise_pictures": ("noise vit --pictures 3 --samples 64",),
    "calibration_train": ("calibration vit resnet --split train --samples all", "calibration vit resnet"),
    "noise_scale": ("noise-scale vit/warmup.pt vit/epoch_006.pt vit",),
    "uncertainty_covariance": ("uncertainty vit resnet --samples 256",),
    "ensemble_diversity": ("ensemble vit resnet --snapshots last:3",),
    "corruption_sizes": (
        "corruption dropout --mc-dropout 5 --samples 128 --severities 1,3,5 --corruptions gaussian_noise,contrast",
    ),
    "sweep": ("sweep narrower narrow resnet --batches 24",),
    "smoothing": ("smoothing dropout --samples 128 --sizes 1,2,5",),
    "heads": tuple(
        f"heads dropout{smooth} --samples 64 --resolution 9 --masks 3 --batches 2" for smooth in ("", " --smooth")
    ),
    "stream_frames": ("stream vit resnet --data ../../docs/wall.py:frames --clip-length 15 --timed 0",),
    "input_surface": ("input-surface vit resnet --samples 64",),
    "input_images": ("input-surface vit resnet --samples 32 --range 0.3",),
    "density_blocks": ("density vit resnet --blocks layer --samples 32 --vectors 2 --steps 12",),
    "trace_blocks": ("trace vit resnet --blocks module --samples 256 --vectors 8",),
    "path": tuple(f"surface {run} --plane {run} --resolution 15 --samples 128" for run in ("vit", "resnet")),
    "objective": ("surface vit resnet --range 0.5 --resolution 21 --samples 64 --weight-decay 0.05",),
    "surface_basins": (
        "surface vit resnet --range 0.5 --resolution 15 --samples 64 --also test=digits:test --margin 0.1",
    ),
    "saddle": ("surface vit resnet --plane eigen --resolution 15 --samples 128",),
    "hessian_layers": (
        "hessian resnet/warmup.pt --per-layer --which both --top 1 --tol 0.01 --no-verify --samples 128",
    ),
    "hybrid": ("import ../../docs/park2023_figure_12.csv", "probe-linear mim simclr vit"),
    "hessian_phases": (
        "hessian vit/init.pt vit/warmup.pt vit/epoch_006.pt vit/epoch_012.pt vit --samples 64",
        "hessian resnet/init.pt resnet/warmup.pt resnet/epoch_006.pt resnet/epoch_012.pt resnet --samples 64",
    ),
}
ASKED = {  # commands that are not those of a probe
    "monitor": "landscape train --monitor", "sweep": "landscape sweep CHECKPOINT CHECKPOINT CHECKPOINT",
    "hybrid": "landscape import TABLE.csv\nlandscape probe-linear CHECKPOINT",
    "compare": "landscape compare results.h5 --group '-s\\d+$'",
}  # fmt: skip
HEAD = """# All figures

Every figure that `landscape plot` draws, with the question of its probe, the commands that measure it and the command
that draws it alone. The pictures show small networks in the default style. The table that `hybrid` imports was read
from Figure 12 of Park et al. 2023 (arXiv 2305.00729). `python docs/wall.py` writes this page. Where commands name
`vit`, `resnet` and others, these are seven networks that train in a minute each; `python docs/wall.py --measure`
trains and measures them, and draws their pictures anew:
"""


def frames() -> tuple[torch.Tensor, torch.Tensor]:
    """A stream of twelve clips: a digit of the test split for fifteen frames, with new noise in every frame."""
    digits, classes = landscape.load("vit", split="test", samples=12).batches[0]
    still = digits.repeat_interleave(15, dim=0)
    noise = torch.randn(still.shape, generator=torch.Generator().manual_seed(0))
    return still + 0.6 * noise, classes.repeat_interleave(15)


def question(probe: str) -> str:
    """The question of a probe, as on its page; "" of what has no page."""
    page = DOCS / "probes" / f"{probe}.md"
    return page.read_text().split("\n\n")[1].replace("\n", " ") if page.exists() else ""


def wall() -> str:
    """The page: a section per probe or study, its figures in their order with meaning, command and picture."""
    shown = [(figure.probe, name, figure.module.MEANING) for name, figure in FIGURES.items()]
    shown += [(name, name, study_module(name).MEANING) for name in STUDIES]
    parts = [HEAD, "```\n" + "".join(f"landscape {command}\n" for command in TRAINED) + "```\n"]
    for probe in dict.fromkeys(probe for probe, *_ in shown):
        parts.append(f"## {probe}\n\n{question(probe)}\n".replace("\n\n\n", "\n"))
        parts.append(f"```\n{ASKED.get(probe, f'landscape {probe} CHECKPOINT')}\n```\n")
        for name, meaning in ((name, meaning) for of, name, meaning in shown if of == probe):
            first = meaning.partition(". ")[0].rstrip(".")
            commands = "\n".join(f"landscape {each}" for each in (*MEASURED.get(name, ()), f"plot --figure {name}"))
            parts.append(f"`{name}`: {first}.\n\n```\n{commands}\n```\n")
            if (GALLERY / f"{name}.png").exists():
                parts.append(f"![{name.replace('_', ' ')}: {first}](../gallery/{name}.png)\n")
    return "\n".join(parts)


def draw(folder: Path) -> list[Path]:
    """Draw every figure of the shipped results into a folder; `measure` and `landscape demo --all` make the others."""
    files = {name: DOCS / "examples" / "results" / f"{name}.h5" for name in RESULTS}
    each = [drawing.draw(file, folder, selection=Selection(RESULTS[name])) for name, file in files.items()]
    each.append(drawing.draw_comparison(compare(files["sgd-sam"], group=(r"-s\d+$",)), folder))
    return sorted({path for drawn in each for path in drawn})


def measure(folder: Path) -> None:
    """Train and measure, in a folder that keeps what is finished, what the shipped results lack; and draw it."""
    folder.mkdir(parents=True, exist_ok=True)
    commands = [(command, "") for command in TRAINED]
    commands += [(command, f"{figure}.h5") for figure, several in MEASURED.items() for command in several]
    for command, out in commands:
        words = [*shlex.split(command), *(["--out", out] if out else [])]
        subprocess.run([sys.executable, "-m", "landscape", *words], cwd=folder, check=True)
    for figure in MEASURED:
        for path in drawing.draw(folder / f"{figure}.h5", GALLERY, figures=[figure]):
            with Image.open(path) as picture:  # of 256 colours: a third of the bytes
                picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
                    path, optimize=True
                )


def photograph(path: Path) -> None:
    """Save what Chromium shows of the report of CIFAR-10: its head, the first two answers and the surface."""
    sys.path.append(str(DOCS.parent / "tests"))
    from browser import browser

    hidden = "#answers > :nth-child(n + 4), #checks, #checkpoints, #trajectory"
    with TemporaryDirectory() as folder, browser(Path(folder) / "profile") as window:
        page = Path(folder) / "report.html"
        command = [sys.executable, "-m", "landscape", "report", DOCS / "examples" / "results" / "cifar10.h5", "--quiet"]
        subprocess.run([*command, "--out", page], check=True)
        window.tool("Emulation.setDeviceMetricsOverride", width=1266, height=1240, deviceScaleFactor=1, mobile=False)
        window.tool("Emulation.setScrollbarsHidden", hidden=True)
        window.open(page)
        window.until("return document.querySelector('#trajectory-view svg')")  # which is drawn after the surface
        window.run(f"for (const part of document.querySelectorAll('{hidden}')) part.style.display = 'none'")
        Image.fromarray(window.picture().astype("uint8")).save(path, optimize=True)


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure(DOCS.parent / "build" / "wall")
    draw(GALLERY)
    (DOCS / "all-figures.md").write_text(wall())
    photograph(GALLERY / "report.png")  # last, because it needs Chromium and its driver
