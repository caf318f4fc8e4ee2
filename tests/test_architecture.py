"""Imports point one way, and what only reads or draws never loads torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = {"landscape": ROOT / "landscape", "landscape.cli": ROOT / "cli", "landscape.plots": ROOT / "plots"}

# part (a module, or a package with all below it) -> parts of the project that it may import, itself always
STORING = {"probe", "journal", "answer", "store"}
MODELS = {"probe", "device", "data", "hub", "models", "safe_load", "checkpoint", "linalg", "losses", "subject"}
ALLOWED = {
    "probe": set(),
    "journal": set(),
    "answer": STORING,
    "store": STORING,
    "results": {"store"},
    "plots": {"results", "store", "probe"},
    "linalg": {"probe"},
    "data": {"probe"},
    "hub": set(),
    "models": {"probe", "data", "hub"},
    "safe_load": set(),
    "checkpoint": {"safe_load"},
    "subject": MODELS,
    "loading": MODELS,
    "dataflow": set(),
    "residuals": {"dataflow"},
    "discovery": {"dataflow", "residuals"},
    "patterns": {"probe"},
    "layers": {*MODELS, "dataflow", "residuals", "discovery", "patterns"},
    "attending": {"dataflow"},
    "features": {*MODELS, "dataflow", "layers", "attending"},
    "selection": set(),
    "losses": {"data", "probe"},
    "curvature": {"linalg", "subject"},
    "spectra": {"linalg", "probe"},
    "paired": MODELS,
    "prefixes": {"dataflow", "residuals"},
    "probes": {
        *MODELS,
        "attending",
        "batchnorm",
        "curvature",
        "dataflow",
        "evaluator",
        "exchange",
        "features",
        "forward",
        "layers",
        "lesions",
        "loading",
        "paired",
        "patterns",
        "plane",
        "prefixes",
        "preview",
        "section",
        "selection",
        "snapshots",
        "spectra",
        "surface_summaries",
        "trial",
    },
    "together": {"features", "probe", "run", "store", "subject"},
    "run": {"probe", "probes", "subject", "loading", "checkpoint", "answer", "store"},
}
LIGHT = ["landscape", "landscape.store", "landscape.results", "landscape.plots", "landscape.cli.main"]


def modules() -> dict[str, Path]:
    """Every module of the project by its import name."""
    found = {}
    for package, folder in FOLDERS.items():
        for file in folder.rglob("*.py"):
            parts = (*package.split("."), *file.relative_to(folder).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = file
    return found


def imported(file: Path, known: dict[str, Path], *, everywhere: bool) -> set[str]:
    """Modules of the project that a file imports, anywhere in it or when it is imported itself."""
    tree = ast.parse(file.read_text())
    if not everywhere:
        checked = [n for n in tree.body if not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))]
        tree = ast.Module([n for n in checked if not isinstance(n, ast.FunctionDef | ast.ClassDef)], [])
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return {name for name in names if name in known and name != "landscape"}


def part(module: str) -> str:
    return module.split(".")[1] if "." in module else "landscape"


def test_everything_imports_only_what_it_may_and_nobody_the_command_line() -> None:
    known = modules()
    assert set(ALLOWED) <= {part(module) for module in known}
    wrong = []
    for module, file in known.items():
        others = {part(other) for other in imported(file, known, everywhere=True)} - {part(module)}
        allowed = ALLOWED.get(part(module), others - {"cli"})
        if module != "landscape.__main__" and not others <= allowed:
            wrong.append(f"{module} imports {', '.join(sorted(others - allowed))}")
    assert wrong == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules()
    graph = {}
    for module, file in known.items():
        others = imported(file, known, everywhere=False)  # a package may gather what lies in it
        graph[module] = {other for other in others if not f"{other}.".startswith(f"{module}.")}
    TopologicalSorter(graph).prepare()  # raises CycleError, naming the cycle


def test_what_reads_and_draws_never_loads_torch() -> None:
    code = f"import sys, {', '.join(LIGHT)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
