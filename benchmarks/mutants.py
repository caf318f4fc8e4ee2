"""Plant faults into a copy of the project, one at a time, and see whether the tests notice: which suite kills which.

    python benchmarks/mutants.py [--only writer] [--suite quick|test] [--near] [--list]

Every mutant changes one place of run, writer, merge, reader, statistics, figure engine or command line. It is tried
with the tests of `make quick`, and if it survives with those of `make test`, of either first the files of its area: a
mutant that they kill is killed by the whole suite. Exit code 1 if `make test` kills not all.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUITES = {"quick": "not slow and not campaign", "test": "not campaign"}
FILES = {
    "run": ("run", "api"),
    "writer": ("writer", "writer_interference", "journal"),
    "merge": ("merging",),
    "reader": ("reader", "compare"),
    "statistics": ("statistics", "intervals", "compare", "seed_groups"),
    "figures": ("plots_from_python", "bad_input_figures", "plots", "report"),
    "cli": ("cli", "evaluation", "options", "messages", "api", "doctor"),
}


@dataclass(frozen=True)
class Mutant:
    """A fault: what stands in a file once, and what is written in its place."""

    area: str
    file: str
    old: str
    new: str
    means: str  # what goes wrong for a user


MUTANTS = (
    Mutant("run", "landscape/running/run.py", "if overwrite and path is not None:", "if False:",
           "--overwrite keeps the result"),
    Mutant("run", "landscape/running/run.py", "left.pop(index) for index",
           "left[index] for index", "units that a stage measured are measured again"),
    Mutant("run", "landscape/running/run.py", "Outcome(writer.group, total, len(units), writer.result())",
           "Outcome(writer.group, total, total, writer.result())", "kept units are reported as measured"),
    Mutant("run", "landscape/running/run.py", 'if batch_size is not None and "batch_size" not in probe.uses:',
           "if False:", "a half-finished result goes on with another batch size"),
    Mutant("writer", "landscape/results/writer.py", "if not done[unit.index]]", "]",
           "finished units are measured again"),
    Mutant("writer", "landscape/results/writer.py", "self.merge()  # also after an interrupt: finished units are kept",
           "pass", "finished units are lost at the end"),
    Mutant("writer", "landscape/results/writer.py", "if set(values) - {MICRO_BATCHES} != set(wanted):",
           "if False:", "a probe may leave out what its plan promises"),
    Mutant("writer", "landscape/results/journal.py", "zlib.crc32(memoryview(content)[begin : begin + length]) != crc",
           "False", "a torn or damaged record is read"),
    Mutant("writer", "landscape/results/journal.py", "self._end += written", "self._end += written - 1",
           "records overwrite each other's last byte"),
    Mutant("writer", "landscape/results/group.py",  'bool) if known is None else', 'bool) if True else',
           "units of a deleted file are not written again"),
    Mutant("writer", "landscape/results/group.py", 'mark_finished if finished else seal',
           "mark_finished", "an unfinished result says that it is finished"),
    Mutant("merge", "landscape/results/merging.py", "done = finished == 1", "done = finished >= 0",
           "units that are not finished are merged"),
    Mutant("merge", "landscape/results/merging.py", "done & (known.origin < 0), done & (known.origin >= 0)",
           "done, np.zeros_like(done)", "a conflict of two files passes silently"),
    Mutant("merge", "landscape/results/merging.py", "differ &= ~(np.isnan(mine) & np.isnan(theirs))", "pass",
           "units with equal NaN conflict"),
    Mutant("merge", "landscape/results/merging.py", "if number == self._preferred:", "if False:",
           "--prefer does not prefer"),
    Mutant("reader", "landscape/results/reader.py", 'str(item[1].attrs.get("created", ""))', '""',
           "results are not in the order of their creation"),
    Mutant("reader", "landscape/results/reader.py", "label in (None, data.attrs.get(\"label\"))", "True",
           "a label selects all networks"),
    Mutant("reader", "landscape/results/reader.py", """{counted(units, 'unit', ',')}" if done < units else""",
           """{counted(units, 'unit', ',')}" if False else""", "an unfinished result is not named"),
    Mutant("statistics", "landscape/statistics/means.py", "values.std(ddof=1) / np.sqrt(len(values))",
           "values.std(ddof=0) / np.sqrt(len(values))", "standard errors of few values are too small"),
    Mutant("statistics", "landscape/statistics/means.py", "np.clip(squares - n * mean**2, 0.0, None) / (n - 1)",
           "np.clip(squares - n * mean**2, 0.0, None) / n", "the same from sums"),
    Mutant("statistics", "landscape/statistics/paired.py", "difference = values - other\n",
           "difference = values + other\n", "a paired difference is a sum"),
    Mutant("statistics", "landscape/statistics/intervals.py", "2 * stdtr(", "stdtr(",
           "p of one side is called two-sided"),
    Mutant("figures", "plots/figure.py", "fits and any(known[name] for name in drawn)", "fits and any(known)",
           "figures without a finite value are drawn"),
    Mutant("figures", "plots/drawing.py", 'if name.partition("/")[0] == figure.probe])', "])",
           "a figure takes the results of other probes"),
    Mutant("figures", "plots/drawing.py", "if (probes is not None and figure.probe not in probes) or",
           "if False or", "the choice of probes is not obeyed"),
    Mutant("figures", "plots/selection.py", "if self.only:", "if False:", "--only does not select"),
    Mutant("cli", "cli/main.py", "return _fail(_one_line(error), 2)", "return _fail(_one_line(error), 1)",
           "an option with a wrong value ends with exit code 1"),
    Mutant("cli", "cli/main.py", "return code if isinstance(code, int) else 0", "return 0",
           "findings of doctor end with exit code 0"),
    Mutant("cli", "cli/measuring.py", "(refused := refused + 1) ==", "-1 ==", "one that does not fit is ignored"),
    Mutant("cli", "cli/measuring.py", 'common: dict[str, Any] = {"shard": Shard(*parse_shard("shard", shard)),',
           'common: dict[str, Any] = {"shard": Shard(*parse_shard("shard", "")),', "--shard measures everything"),
)  # fmt: skip


def place_of(mutant: Mutant, root: Path) -> Path:
    """The file of a mutant."""
    return root / mutant.file


def planted(mutant: Mutant, root: Path) -> str:
    """Write the mutant into a copy of the project; returns the text as it was.

    Raises:
        SystemExit: the text to replace is not there.
    """
    file = place_of(mutant, root)
    text = file.read_text()
    if mutant.old not in text:
        raise SystemExit(f"{file.relative_to(root)} does not hold {mutant.old!r} any more; correct MUTANTS")
    file.write_text(text.replace(mutant.old, mutant.new, 1))
    return text


def copied(folder: Path) -> Path:
    """Copy what git tracks, with a package folder in which `landscape`, `cli` and `plots` are the copy's."""
    root = folder / "project"
    for name in subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split(
        "\n"
    ):
        if name and (ROOT / name).is_file():  # not what is deleted and not yet committed
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, root / name)
    package = folder / "path" / "landscape"
    package.mkdir(parents=True)
    for part in (root / "landscape").iterdir():
        (package / part.name).symlink_to(part)
    for part in ("cli", "plots"):
        (package / part).symlink_to(root / part)
    return root


def killer(root: Path, suite: str, files: Sequence[str] = ()) -> str:
    """The first failing test of a suite, or of some files of it, run on a copy; "" if none fails."""
    environment = {**os.environ, "PYTHONPATH": str(root.parent / "path"), "PYTHONDONTWRITEBYTECODE": "1"}
    # -P: the folder in which it runs holds a package without its parts `cli` and `plots`.
    words = [sys.executable, "-P", "-m", "pytest", "-x", "--no-header", "-p", "no:cacheprovider", "-m", SUITES[suite]]
    words += [f"tests/test_{file}.py" for file in files] or ["-n", "2", "--dist", "worksteal"]
    ended = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True)
    failed = [line for line in ended.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    nothing = ended.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    return failed[0].split(" - ")[0] if failed else "" if nothing else f"exit code {ended.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="mutants of this area, or with these numbers: 3,7")
    parser.add_argument("--suite", choices=tuple(SUITES), default="", help="try this suite alone")
    parser.add_argument("--near", action="store_true", help="run the files of a mutant's area alone")
    parser.add_argument("--list", action="store_true", help="check that all can be planted, and test nothing")
    given = parser.parse_args()
    numbers = given.only.split(",") if given.only else []
    chosen = [(i, m) for i, m in enumerate(MUTANTS, start=1) if not numbers or m.area in numbers or str(i) in numbers]
    suites = [given.suite] if given.suite else list(SUITES)
    alive, killed = 0, dict.fromkeys(suites, 0)
    with tempfile.TemporaryDirectory() as folder:
        root = copied(Path(folder))
        near = sorted({file for _, mutant in chosen for file in FILES[mutant.area]})
        if not given.list and (wrong := killer(root, suites[-1], near)):
            raise SystemExit(f"without a mutant the tests fail already: {wrong}")
        print("| | area | what goes wrong | killed by |\n| --- | --- | --- | --- |")
        for number, mutant in chosen:
            before = planted(mutant, root)
            by = "" if not given.list else "planted"
            for suite in suites if not given.list else ():
                by = killer(root, suite, FILES[mutant.area])
                if by := by or ("" if given.near else killer(root, suite)):
                    killed[suite] += 1
                    by = f"{suite}: {by.removeprefix('FAILED ').removeprefix('tests/')}"
                    break
            alive += not by
            print(f"| {number} | {mutant.area} | {mutant.means} | {by or 'SURVIVES'} |", flush=True)
            place_of(mutant, root).write_text(before)
    print(f"{len(chosen)} mutants: {', '.join(f'{count} killed by {suite}' for suite, count in killed.items())}")
    raise SystemExit(1 if alive else 0)


if __name__ == "__main__":
    main()
