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
STORING = {"probe", "journal", "within", "answer", "store"}
MODELS = {
    "archive",
    "checkpoint",
    "data",
    "device",
    "hub",
    "linalg",
    "losses",
    "models",
    "probe",
    "safe_load",
    "subject",
}
ALLOWED = {
    "probe": set(),
    "journal": set(),
    "within": set(),
    "answer": STORING,
    "store": STORING,
    "headlines": set(),
    "results": {"headlines", "store", "within"},
    "plots": {"headlines", "results", "store", "probe"},
    "linalg": {"probe"},
    "chance": set(),
    "data": {"chance", "pickled", "probe"},
    "steady": {"chance", "curvature", "subject"},
    "hub": set(),
    "models": {"archive", "probe", "data", "hub"},
    "renamed": set(),
    "safe_load": {"archive", "data", "outline"},
    "pickled": set(),
    "archive": set(),
    "outline": {"archive", "pickled"},
    "containers": set(),
    "fit": {"containers"},
    "checkpoint": {"archive", "containers", "fit", "renamed", "safe_load"},
    "subject": MODELS,
    "building": MODELS,
    "loading": {*MODELS, "building"},
    "dataflow": set(),
    "residuals": {"dataflow"},
    "plain": {"dataflow", "residuals"},
    "arrangement": {"dataflow", "residuals"},
    "discovery": {"dataflow", "residuals", "plain", "arrangement"},
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
        "archive",
        "attending",
        "axes",
        "batchnorm",
        "cost",
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
        "steady",
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
