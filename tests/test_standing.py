"""How far a results file is: journals count, nothing is touched, and the printed command finishes what is missing."""

import json
import shlex
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import counting
import h5py
import numpy as np
import pytest
from command_line import Command

from landscape import api
from landscape.cli import show
from landscape.probes import PROBES, probe_class
from landscape.results.run_key import chosen
from landscape.results.unmerged_journals import standings
from landscape.results.writer import Writer
from landscape.subject.spec import Spec

pytestmark = pytest.mark.slow

KEY = counting.run_key(shape=(4, 3))


def test_units_in_journals_count_and_nothing_is_touched(tmp_path: Path) -> None:
    path, other = tmp_path / "results.h5", counting.run_key(shape=(4, 3), digest="a" * 10)
    counting.measure_pending(path, other)
    with Writer(path, KEY, reduce_of=counting.reduce_of) as writer:
        for unit in writer.pending()[2:7]:
            writer.write(unit, counting.values(unit))
        before = {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in tmp_path.iterdir()}
        living, whole = standings(path)
        if Path("/proc/locks").exists():
            assert (living.running, whole.running) == (True, False)
        assert (living.group, living.finished, living.missing()) == ("counting/toy-0123456789", 5, "0-1, 7-11")
        assert (whole.finished, whole.missing()) == (12, "")
        assert {file.name: (file.read_bytes(), file.stat().st_mtime_ns) for file in tmp_path.iterdir()} == before
    path.unlink()
    with pytest.raises(FileNotFoundError, match="no results file"):
        standings(path)


def test_a_file_that_is_gone_stands_by_its_journal(tmp_path: Path) -> None:
    path = tmp_path / "results.h5"
    counting.stopped(path, KEY, 3)
    path.unlink()
    (found,) = standings(path)
    assert (found.group, found.finished, found.running) == ("counting/toy-0123456789", 3, False)
    assert found.attributes["epoch"] == 3.0


def test_show_counts_what_lies_in_journals(command: Command, tmp_path: Path) -> None:
    path, said = tmp_path / "results.h5", "counting/toy-0123456789: 3 more finished units in its journal; "
    with Writer(path, KEY) as writer:
        for unit in writer.pending()[:3]:
            writer.write(unit, counting.values(unit))
        assert said in command("show", path)[1]
        killed = writer._journal.path.read_bytes()
    journal = tmp_path / "results.h5.journal-0123456789"
    path.unlink()
    with Writer(path, KEY):
        pass
    journal.write_bytes(killed)
    assert f"{said}the next run merges them\n" in command("show", path)[1]
    with Writer(path, KEY):
        pass
    assert "more units" not in command("show", path)[1]
    with h5py.File(path, "a") as file:
        del file["counting/toy-0123456789/done"]  # as in an imported result, which has no units
    assert "more units" not in command("show", path)[1]


def test_the_command_for_missing_units_finishes_them(command: Command, tmp_path: Path) -> None:
    out = tmp_path / "results.h5"
    words = ["--samples", "40", "--batch-size", "8", "--seed", "3", "--model-arg", "width=8", "--label", "my net"]
    checkpoint = "checkpoints/resnet_demo-digits/final.pt"
    surface = ["--normalize", "layer", "--resolution", "3,4", "--bn", "recalibrate:1", "--range", "0.5"]
    hidden = ["--layers", r"layer1\.0\..*", "--layers", "layer2"]
    for probe, more in (("surface", surface), ("variance", hidden)):
        given = [*words[:6], *words[8:], *more]
        code, _, err = command(probe, checkpoint, *given, "--shard", "2/3", "--out", out)
        assert code == 0, err
    code, said, _ = command("show", out, "--pending", "--json")
    rows = json.loads(said)
    assert [(row["group"].partition("/")[0], row["units"], row["missing"]) for row in rows] == [
        ("surface", 12, 8), ("variance", 5, 3)
    ]  # fmt: skip
    code, said, _ = command("show", out, "--pending")
    assert "8 of 12 units missing (0, 2-3, 5-6, 8-9, 11)" in said
    for row in rows:
        assert row["command"] in said
        code, _, err = command(*shlex.split(row["command"])[1:])
        assert code == 0, err
        assert f"{row['missing']} of {row['units']} units in" in err
    code, said, _ = command("show", out, "--pending")
    assert (code, said) == (0, "nothing is missing; finished results: 2\n")
    code, _, err = command("show", checkpoint, "--pending")
    assert code == 2
    assert "--pending is for results files" in err


def test_a_followed_file_is_printed_until_it_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(show, "POLL_SECONDS", 0.01)
    path = tmp_path / "results.h5"
    with Writer(path, KEY, reduce_of=counting.reduce_of):
        pass

    def measure() -> None:
        with Writer(path, KEY, reduce_of=counting.reduce_of) as writer:
            for unit in writer.pending():
                writer.write(unit, counting.values(unit))
                time.sleep(0.02)

    measuring = threading.Thread(target=measure)
    measuring.start()
    show.follow_file(path, as_json=True)
    measuring.join()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    finished = [row["finished"] for row in rows]
    assert finished[0] < finished[-1] == 12
    assert (np.diff(finished) > 0).all()
    assert rows[-1]["rate"] > 0


def test_the_command_of_a_result_is_written_without_torch_and_may_change_options() -> None:
    options = {"checkpoint": "a b.pt", "resolution": "51", "preview": True, "bn": False, "model_arg": {"width": 8},
               "mean": [0.5, 1.0], "layers": ["a", "b"], "seed": 2}  # fmt: skip
    code = (
        "import json, sys; from landscape.results.run_key import command_for; stored = json.loads(sys.argv[1]); "
        "print(command_for(stored, 'r.h5', range='0.5', resolution=None)); assert 'torch' not in sys.modules"
    )
    stored = json.dumps({"probe": "surface", "options": json.dumps(options)})
    found = subprocess.run([sys.executable, "-c", code, stored], capture_output=True, text=True, check=True)
    assert found.stdout == (
        "landscape surface 'a b.pt' --preview --no-bn --model-arg width=8 --mean 0.5,1 --layers a --layers b "
        "--seed 2 --range 0.5 --out r.h5\n"
    )


@pytest.mark.parametrize("probe", PROBES)
def test_a_command_has_no_option_with_its_default(probe: str) -> None:
    kind = probe_class(probe)
    spec = Spec(Path("a.pt"), **api.loading_defaults(kind))
    always = {"checkpoint": Path("a.pt"), **({"bn": "frozen"} if probe == "surface" else {})}  # where auto has led to
    assert chosen(kind(), spec) == always
    seed = {} if "seed" in api.parameter_defaults(kind) else {"seed": 3}  # of the probe before that of loading
    assert chosen(kind(), replace(spec, seed=3, samples="all")) == {**always, "samples": "all", **seed}
