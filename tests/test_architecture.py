"""Imports point one way, in one order that covers every file, and what only reads or draws never loads torch."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from landscape.options import first_line
from landscape.plots import FIGURES
from landscape.probes import PROBES

ROOT = Path(__file__).parents[1]
FOLDERS = {"landscape": ROOT / "landscape", "landscape.cli": ROOT / "cli", "landscape.plots": ROOT / "plots"}

# The parts of the project (a package, or a file at the top level) by floor: a part may import those on floors before
# its own, never one on its own floor. `plots` stands apart: it draws what is stored and nothing below reaches it.
ORDER = (
    ("headline",),
    ("probe", "options", "plugins"),
    ("statistics", "reporting"),
    ("results", "random_vectors"),
    ("checkpoints", "exchange"),
    ("data", "doctor"),
    ("models", "discovery"),
    ("symmetry",),
    ("subject",),
    ("products", "predictions"),
    ("curvature", "layers"),
    ("weight_space",),
    ("monitoring",),
    ("probes", "training"),
    ("running",),
    ("studies",),
    ("api",),
    ("plots",),
    ("cli",),
    ("__main__", "__init__"),
)
FLOOR = {part: floor for floor, parts in enumerate(ORDER) for part in parts}
ONLY = {
    "options": set(),
    "plugins": set(),
    "headline": set(),
    "probe": {"headline", "options"},
    "statistics": {"headline", "probe", "options"},
    "reporting": {"probe", "options"},
    "plots": {"headline", "probe", "options", "plugins", "statistics", "results", "studies"},
}  # stricter than their floor
LONGEST_FILE, LONGEST_FUNCTION = 350, 60  # lines
WITHOUT_TORCH = ("headline", "probe", "options", "statistics", "results", "exchange", "doctor", "plots")
LIGHT = [
    "landscape",
    "landscape.probe",
    "landscape.probes",
    "landscape.reporting.progress",
    "landscape.options",
    "landscape.results.writer",
    "landscape.results.reader",
    "landscape.exchange.importing",
    "landscape.exchange.exporting",
    "landscape.subject.spec",
    "landscape.doctor.rules",
    "landscape.studies.claims",
    "landscape.studies.study_file",
    "landscape.studies.kinds",
    "landscape.plots",
    "landscape.plots.report",
    "landscape.cli.main",
]

# Where CUDA is chosen, set up or measured. Elsewhere code must follow the device of the tensors that it is given.
NAMED = {
    "checkpoints/user_code.py",
    "products/kinks.py", "curvature/pyhessian_engine.py",
    "curvature/spectrum.py", "data/memory.py", "running/local_processes.py",
    "layers/partial_forward.py", "subject/device.py", "subject/graph_replay.py", "subject/precision.py",
    "subject/process_group.py", "training/train.py", "training/updates.py", "weight_space/forward_mode.py",
}  # fmt: skip


def modules() -> dict[str, Path]:
    """Every module of the project by its import name."""
    found = {}
    for package, folder in FOLDERS.items():
        for file in folder.rglob("*.py"):
            parts = (*package.split("."), *file.relative_to(folder).with_suffix("").parts)
            found[".".join(parts).removesuffix(".__init__")] = file
    return found


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(parsed(file)))


def imported(file: Path, known: dict[str, Path], *, everywhere: bool) -> set[str]:
    """Modules of the project that a file imports, anywhere in it or when it is imported itself."""
    tree = parsed(file)
    if not everywhere:
        checked = [n for n in tree.body if not (isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test))]
        tree = ast.Module([n for n in checked if not isinstance(n, ast.FunctionDef | ast.ClassDef)], [])
    names: set[str] = set()
    for node in nodes(file) if everywhere else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return {name for name in names if name in known and name != "landscape"}


def part(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


@pytest.mark.slow
def test_every_file_imports_only_from_parts_before_its_own() -> None:
    known = modules()
    assert {part(module) for module in known} == set(FLOOR)
    wrong = []
    for module, file in known.items():
        own = part(module)
        allowed = ONLY.get(own, {other for other in FLOOR if FLOOR[other] < FLOOR[own]}) | {own}
        wrong += [
            f"{module} imports {other}"
            for other in sorted(imported(file, known, everywhere=True))
            if part(other) not in allowed
            or (part(other) == "plots" and own not in ("plots", "cli", "__main__", "__init__"))
        ]
    assert wrong == []


@pytest.mark.slow
def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules()
    graph = {}
    for module, file in known.items():
        others = imported(file, known, everywhere=True)  # a package may gather what lies in it
        graph[module] = {other for other in others if not f"{other}.".startswith(f"{module}.")}
    TopologicalSorter(graph).prepare()  # raises CycleError, naming the cycle


def test_files_and_functions_stay_readable() -> None:
    long = []
    for module, file in modules().items():
        lines = file.read_text().count("\n")
        long += [f"{module}: {lines} lines"] if lines > LONGEST_FILE else []
        for node in nodes(file):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= LONGEST_FUNCTION:  # type: ignore[operator]
                long.append(f"{module}.{node.name}: more than {LONGEST_FUNCTION} lines")
    assert long == []


def test_what_reads_and_draws_never_names_torch() -> None:
    for module, file in modules().items():
        if part(module) in WITHOUT_TORCH:
            names = {alias.name for n in nodes(file) if isinstance(n, ast.Import) for alias in n.names}
            froms = {str(n.module) for n in nodes(file) if isinstance(n, ast.ImportFrom)}
            assert not {name for name in names | froms if name.split(".")[0] == "torch"}, module


@pytest.mark.slow
def test_what_reads_and_draws_loads_neither_torch_nor_matplotlib() -> None:
    code = (
        f"import sys, {', '.join(LIGHT)}\n"
        "for figure in landscape.plots.FIGURES.values(): figure.module\n"
        "print({'torch', 'matplotlib'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_every_package_is_in_what_is_installed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {
        file.parent.relative_to(ROOT) for part in ("landscape", "cli", "plots") for file in (ROOT / part).rglob("*.py")
    }
    inside = {path.parts if path.parts[0] == "landscape" else ("landscape", *path.parts) for path in folders}
    assert listed == {".".join(parts) for parts in inside}


@pytest.mark.slow
def test_cuda_is_named_only_where_it_is_chosen() -> None:
    naming = set()
    for path in FOLDERS["landscape"].rglob("*.py"):
        named = any(isinstance(node, ast.Constant) and node.value == "cuda" for node in nodes(path))
        if named or any(isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda" for node in nodes(path)):
            naming.add(path.relative_to(FOLDERS["landscape"]).as_posix())
    assert naming <= NAMED


def test_one_function_forms_the_plural_of_a_counted_noun() -> None:
    own = re.compile(r"\} [a-z -]+\{['\"]e?s['\"] (\*|if) [^}]*(!= 1|> 1)")
    assert [name for name, file in modules().items() if own.search(file.read_text())] == []


# Where probes may be named outside their own files: what is about some of them by its nature, by part or file.
ABOUT_PROBES = {
    "doctor",  # a rule is about the numbers of a probe
    "exchange",  # a format of other programs holds results of one
    "studies",  # a study, or a claim, says what it measures
    "benchmarks",  # a benchmark measures what it is about
    "figures", "animation",  # what is animated
    "park2022",  # a layout of that paper
    "heads_study", "hybrid_study", "smoothing_study", "sweep_study",  # figures of several probes
    "panels",  # what the page draws by itself
    "findings", "next_steps",  # the first questions of the report
    "comparison", "rows",  # that heights are of one plane
}  # fmt: skip
WORDS = {  # names of probes that mean something else in a file: an axis, a matrix, a kind of layer, a key
    "step": {
        "optimizer_state",
        "preconditioner",
        "optimizer_rules",
        "ensemble",
        "stored_series",
        "monitor",
        "monitor_noise",
    },
    "hessian": {"hvp_backends", "operator", "stored_spectrum"},
    "tokens": {"layer", "token_grid", "selection", "attention", "smoothing"},
    "trace": {"flatness", "flatness_terms", "weight_units"},
    "noise": {"monitor", "perturbations", "ratio", "stored_series"},
    "attention": {"hessian_product", "vit"},
    "density": {"hessian"},
    "ensemble": {"stream", "timing"},
    "flatness": {"text"},
    "similarity": {"align"},
    "stream": {"layer_patterns"},
}


def test_no_file_knows_a_probe_of_another_file_by_its_name() -> None:
    """Its own files begin with its name, or draw it; elsewhere a probe, a quantity or a result is asked."""
    found = set()
    files = {file: part(module) for module, file in modules().items()}
    files |= dict.fromkeys((ROOT / "benchmarks").rglob("*.py"), "benchmarks")
    for file, of in files.items():
        drawn = FIGURES[file.stem].probe if file.stem in FIGURES else ""
        texts = {n.value for n in nodes(file) if isinstance(n, ast.Constant)}
        for name in set(PROBES) & texts if not {of, file.stem} & ABOUT_PROBES else ():
            own = file.stem.startswith(name.replace("-", "_")) or name == drawn or file.stem in WORDS.get(name, ())
            if not own and (of, file.stem) not in (("probes", "__init__"), ("plots", "__init__")):
                found.add(f"{file.relative_to(ROOT)}: {name}")
    assert found == set()


def test_intervals_are_made_in_one_place() -> None:
    """Quantiles of 95 % intervals, and Student's, are named there alone; rules of doctor test at other levels."""
    found = set()
    for module, file in modules().items():
        names = {alias.name for n in nodes(file) if isinstance(n, ast.ImportFrom) for alias in n.names}
        numbers = {n.value for n in nodes(file) if isinstance(n, ast.Constant) and isinstance(n.value, float)}
        if numbers & {1.96, 0.975, 0.025, 97.5} or (names & {"stdtrit", "NormalDist"} and part(module) != "doctor"):
            found.add(module)
    assert found == {"landscape.statistics.intervals"}
    drawn = {name for name, file in modules().items() if part(name) == "plots" and "NORMAL" in file.read_text()}
    assert not drawn, "figures draw the intervals of the numbers"


def test_the_first_line_of_an_error_is_worked_out_in_one_place() -> None:
    """Messages of libraries may begin with an empty line, have none, or go on for pages."""
    cut = re.compile(r"""str\(\w*err\w*\)(\.strip\(\))?\.(splitlines|(partition|split)\("\\n"\))""")
    assert {name for name, file in modules().items() if cut.search(file.read_text())} == {"landscape.options"}
    assert [first_line(ValueError(text)) for text in ("\n one\ntwo", "", " \n")] == ["one", "ValueError", "ValueError"]


def test_no_number_is_printed_with_a_standard_error_for_its_interval() -> None:
    """What follows a plus-minus sign is half the width of a 95 % interval, in figures, findings and tables."""
    assert {
        f"{module}: {ast.unparse(call)}"
        for module, file in modules().items()
        for call in nodes(file)
        if isinstance(call, ast.Call) and ast.unparse(call.func).rpartition(".")[2] == "plus_minus"
        and re.search(r"_se\b|\berrors?\b", ast.unparse(call))
    } == set()  # fmt: skip
