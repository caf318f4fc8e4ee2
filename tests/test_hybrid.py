"""Tables of encoders trained with two objectives: read, imported once, drawn beside linear probes; bad files."""

import json
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from command_line import Command

from landscape.exchange import csv_files, importing
from landscape.plots import drawing
from landscape.plots.figures import hybrid_study
from landscape.results import reader
from landscape.running.run import reduce_of
from landscape.studies import kinds

# Park et al. 2023 (arXiv 2305.00729), Fig. 12, as read from the figure
PUBLISHED = """weight,linear_accuracy,fine_tuning_accuracy
1,0.58,0.813
0,0.18,0.819
0.2,0.615,0.823
0.4,0.62,
0.6,0.62,0.816
"""


def published(folder: Path) -> Path:
    path = folder / "hybrid.csv"
    path.write_text(PUBLISHED)
    return path


def probe_of(objective: str, label: str) -> tuple[str, xr.Dataset]:
    data = xr.Dataset({"accuracy": ("layer", [0.2, 0.4, np.nan]), "accuracy_se": ("layer", [0.02, 0.03, np.nan])})
    attributes = {"label": label, "samples": 200, "protocol": "made up", "model": "vit_demo"}
    return "probe-linear/x", data.assign_attrs(attributes, configuration=json.dumps({"objective": objective}))


@pytest.mark.slow
def test_a_table_is_read_in_the_order_of_its_weights_and_imported_once(tmp_path: Path, command: Command) -> None:
    path, out = published(tmp_path), tmp_path / "r.h5"
    table = csv_files.table_in(path)
    assert table.weights == (0, 0.2, 0.4, 0.6, 1)
    assert table.scores["linear_accuracy"].tolist() == [0.18, 0.615, 0.62, 0.62, 0.58]
    code, _, err = command("import", str(path), "--out", str(out))
    assert code == 0, err
    assert "5 of 5 points. highest linear accuracy 0.62, at weight 0.4, highest fine tuning accuracy" in err
    (outcome,) = importing.import_file(path, out, reduce_of=reduce_of)
    assert outcome.measured == 0
    ((_, data),) = reader.find(out, probe="hybrid")
    np.testing.assert_array_equal(data["fine_tuning_accuracy"], table.scores["fine_tuning_accuracy"])
    assert data.attrs["source"] == "imported from hybrid.csv"
    assert drawing.left_out(out) == []
    assert [file.name for file in drawing.draw(out, tmp_path / "f")] == ["hybrid.png"]
    assert command("show", str(out))[0] == 0
    assert command("report", str(out), "--out", str(tmp_path / "report.html"))[0] == 0


def test_measured_encoders_stand_at_the_weight_of_their_objective(tmp_path: Path) -> None:
    out = tmp_path / "r.h5"
    importing.import_file(published(tmp_path), out, reduce_of=reduce_of)
    own = [probe_of("simclr", "a"), probe_of("mim", "b"), probe_of("classification", "c")]
    (study,) = kinds.hybrid([*reader.groups(out), *own])
    (ax,) = hybrid_study.page(study).axes
    fine_tuning, linear = ax.lines[:2]
    assert linear.get_ydata().tolist() == [0.18, 0.615, 0.62, 0.62, 0.58]
    assert fine_tuning.get_xdata().tolist() == [0, 0.2, 0.6, 1]  # the empty cell is left out
    places = [(container[0].get_xdata()[0], container[0].get_ydata()[0]) for container in ax.containers]
    assert places == [(1.0, 0.4), (0.0, 0.4)]  # the last layer that is finished
    assert not {fine_tuning.get_color(), linear.get_color()} & {made[0].get_color() for made in ax.containers}
    assert ax.lines[-2].get_ydata() == [0.4, 0.4]  # a network trained otherwise is a level line
    assert kinds.hybrid(own) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("weight,linear_accuracy\n0,18\n", "linear_accuracy 18 in line 2, expected a fraction .*; divide percentages"),
        ("weight,linear_accuracy\n1.5,0.1\n", "weight 1.5 in line 2, expected a fraction"),
        ("weight,linear_accuracy\n0,0.1\n0.0,0.2\n", "the weight 0 twice, in line 3"),
        ("weight,linear_accuracy\n,0.1\n", "no weight, in line 2"),
        ("weight,linear_accuracy\n0\n", "1 columns in line 2, expected 2"),
        ("weight,linear_accuracy\n0,high\n", "high as linear_accuracy in line 2, expected a number"),
        ("weight,linear_accuracy,nll\n0,0.1,2\n", "the column nll, expected a header of weight and accuracies"),
        ("weight,linear_accuracy\n", "0 lines below its header"),
    ],
)
def test_a_table_that_says_something_else_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "h.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        csv_files.table_in(path)
