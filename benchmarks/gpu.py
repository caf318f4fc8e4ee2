"""Measure on a GPU, without a network: probes, Hessians, products, surfaces, shared pass, training, large models.

    python benchmarks/gpu.py [--stage probes hessian products surface features training language | all]
        [--minutes 7] [--only resnet50-224 ...] [--engines PyHessian traced ...] [--device cuda] [--out DIR]
    python benchmarks/gpu.py --small --device cpu        every stage in tiny sizes, on any machine

Rows are appended to DIR/gpu.jsonl one by one, and DIR/GPU.md is written anew from them every minute and after every
stage; DIR is this folder for a GPU and ./gpu-dry-run for a CPU. A stage stops before its `--minutes` are over and
says what is left; a second call measures that, also after a kill. A row that failed holds its error: delete its line
to try again. TF32 is off for all engines. GPU.md lists the packages to carry to a machine without a network.
"""

import argparse
import sys
import time
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import cast

HERE = Path(__file__).resolve().parent
if find_spec("landscape") is None:  # not installed: the checkout itself
    sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from gpu_stages import machine  # noqa: E402
from gpu_stages.steps import RowsFile, Settings, Stage, run  # noqa: E402

# The module of every stage, in the order of a run.
MODULES = {
    "probes": "probes", "hessian": "eigenvalues", "products": "products", "surface": "surfaces",
    "features": "shared_pass", "training": "training", "language": "language",
}  # fmt: skip
STAGES = tuple(MODULES)


def stages() -> dict[str, Stage]:
    from importlib import import_module

    return {name: cast(Stage, import_module(f"gpu_stages.{MODULES[name]}")) for name in STAGES}


def parsed(given: list[str] | None = None) -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--stage", nargs="+", choices=[*STAGES, "all"], default=["all"])
    options.add_argument("--only", nargs="+", default=[], help="beginnings of rows: networks with their pixels")
    options.add_argument("--engines", nargs="+", default=[], help="rows of these engines or ways alone")
    options.add_argument("--small", action="store_true", help="tiny sizes, to see that everything runs")
    options.add_argument("--device", default="cuda", help="cuda (the default), cuda:1 or cpu")
    options.add_argument("--minutes", type=float, default=7.0, help="time of each stage")
    options.add_argument("--out", type=Path, help="folder of gpu.jsonl and GPU.md")
    return options.parse_args(given)


def main() -> None:
    arguments = parsed()
    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda: PyTorch finds no GPU here; a dry run is --small --device cpu")
    lacking, without = machine.missing()
    if lacking:
        sys.exit(
            f"missing packages: {', '.join(lacking)}; GPU.md says how to carry them to a machine without a network"
        )
    if without:
        print(f"missing packages, whose rows will say so: {', '.join(without)}")
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    from gpu_stages.page import page

    folder = arguments.out or (HERE if device.type == "cuda" else Path("gpu-dry-run"))
    settings = Settings(device, arguments.small, folder, only=tuple(arguments.only), engines=tuple(arguments.engines))
    try:
        file = RowsFile(folder / "gpu.jsonl", machine.origin(device, small=arguments.small))
    except ValueError as error:
        sys.exit(str(error))
    found, facts = stages(), machine.facts(device)
    written = time.monotonic()

    def write(every: float = 0.0) -> None:
        nonlocal written
        if time.monotonic() - written >= every:
            (folder / "GPU.md").write_text(page(found, file, facts, settings))
            written = time.monotonic()

    for name in STAGES if "all" in arguments.stage else arguments.stage:
        limited = replace(settings, until=time.monotonic() + 60 * arguments.minutes)
        try:
            left = run(name, found[name], limited, file, partial(write, 60.0))
        finally:
            write()
        print(f"{name}: {f'{left} rows left, run it again' if left else 'complete'}; {folder / 'GPU.md'}", flush=True)


if __name__ == "__main__":
    main()
