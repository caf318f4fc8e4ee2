"""The page that a run leaves behind: how to make one, the machine, and the tables of all stages."""

from collections.abc import Mapping
from pathlib import Path

from gpu_stages.machine import WHEELS
from gpu_stages.steps import RowsFile, Settings, Stage, failed, messages

HOW = f"""\
# On a GPU

Written by `python benchmarks/gpu.py`, which needs no network and no data: images are synthetic, made from a seed, and
the digits come with the package. Every stage ends within its `--minutes` (7); a second call continues it.

    python benchmarks/gpu.py                                   # all stages; writes this page after each
    python benchmarks/gpu.py --stage hessian --minutes 7       # one of them, within a time
    python benchmarks/gpu.py --small --device cpu --out DIR    # a dry run in tiny sizes, on any machine

The package itself need not be installed. Beside PyTorch (2.6 and later) and NumPy it needs scipy, xarray, h5py and
Pillow; without pyhessian or curvlinops their rows say so. The package's other requirements (typer, matplotlib,
h5netcdf, safetensors) are not needed. A run begins by naming what is missing. For a machine without a network, fetch
that alone as wheels, into a folder of its own, so that nothing of the machine's is replaced; here the engines for
Python 3.12 on x86-64, in the same way `{WHEELS[1]}`:

    python -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \\
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \\
        --platform manylinux2014_x86_64 -d wheels \\
        {WHEELS[0]}
    python -m pip install --no-index --no-deps --target carried wheels/*.whl
    PYTHONPATH=carried python benchmarks/gpu.py
"""
FINDINGS = Path(__file__).parent / "findings.md"
DRY = "**A dry run without a GPU: it shows that every stage runs, and nothing about speed.**\n"


def page(stages: Mapping[str, Stage], file: RowsFile, facts: Mapping[str, str], settings: Settings) -> str:
    """The whole page, in Markdown; that of a GPU with what earlier runs have shown."""
    dry = settings.small or settings.device.type != "cuda"
    parts = [HOW, DRY if dry else FINDINGS.read_text()]
    parts.append("## Machine\n")
    parts.append("\n".join(f"- {name}: {value}" for name, value in facts.items()) + "\n")
    for name, stage in stages.items():
        rows = file.of(name)
        good = {key: row for key, row in rows.items() if "error" not in row}
        left = sum(step.key not in rows for step in stage.steps(settings))
        state = "" if not left else f"**{left} of {left + len(rows)} rows are not measured yet.**\n\n"
        parts.append(f"## `{name}`: {stage.TITLE}\n\n{stage.ABOUT}\n\n{state}{stage.tables(good) if rows else ''}\n")
        for title, lines in (("Failed", failed(rows)), ("The package's own messages", messages(rows))):
            parts += [f"{title}:\n", "\n".join(lines) + "\n"] if lines else []
    return "\n".join(part.rstrip() + "\n" for part in parts)
