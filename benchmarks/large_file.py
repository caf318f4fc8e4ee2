"""Processor time of commands that read a large honest results file, and of `repair` on damaged copies of one.

The file holds some probes of made-up networks, copied under further labels. Times are user and system time of the
command with its children, as it is started from a shell.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import synthetic

from landscape.results import group as groups
from landscape.results.updating import change_file

PROBES = ("surface", "line", "hessian", "trace", "flatness", "calibration")
ALL = tuple(name for name in synthetic.ALL)


def large(path: Path, results: int, probes: tuple[str, ...] = PROBES) -> Path:
    """Write a file of so many results: of two networks, of each of which there are copies with other weights."""
    source = synthetic.write(path.with_suffix(".source.h5"), synthetic.NETWORKS[:2], probes=probes)
    digits = random.Random(0)

    def change(file: h5py.File) -> None:
        with h5py.File(source) as few:
            names = [name for name, _ in groups.results_in(few)]
            for number in range(results):
                copy, name = divmod(number, len(names))
                probe, _, stored = names[name].partition("/")
                digest = f"{digits.getrandbits(40):010x}"
                label = f"{stored.rpartition('-')[0]}-{copy}"
                group = groups.copy(few[names[name]], file, f"{probe}/{label}-{digest}")
                weights = f"{int(group.attrs['checkpoint_sha256'], 16) + 2 * copy:064x}"
                for key, value in (("label", label), ("digest", digest), ("checkpoint_sha256", weights)):
                    group.attrs[key] = value
                groups.seal(group)

    change_file(path, change)
    source.unlink()
    return path


def seconds(*words: str | Path) -> float:
    """Processor time of a command; its output is not shown."""
    before = os.times()
    subprocess.run([sys.executable, "-m", "landscape", *map(str, words)], stdout=subprocess.DEVNULL, check=False)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=int, nargs="+", default=[200, 1200])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for count in options.results:
            file = large(folder / f"{count}.h5", count)
            print(f"{count} results, {file.stat().st_size / 1e6:.1f} MB", flush=True)
            for words in (["show", file], ["doctor", file], ["report", file, "--out", folder / f"{count}.html"]):
                print(f"  {words[0]}: {seconds(*words):.1f} s", flush=True)


if __name__ == "__main__":
    main()
