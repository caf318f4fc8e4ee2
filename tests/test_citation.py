"""What a paper cites: every probe has its sources, and the text of a file names exactly those of what was measured."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import synthetic
import xarray as xr

from landscape.cli.main import exit_code
from landscape.probes import OWN, PROBES
from landscape.studies.citation import bibliography, methods_and_sources


def test_every_probe_has_sources_and_every_source_is_of_a_probe() -> None:
    assert [name for name in OWN if not PROBES[name].sources] == []
    assert {key for name in OWN for key in PROBES[name].sources.split()} == set(bibliography())
    for key, entry in bibliography().items():
        assert {*re.findall(r"\\([a-z]+)", entry)} <= {"mathrm"}, f"{key}: LaTeX without packages lacks it"
        assert re.match("@(article|inproceedings){", entry), f"{key}: some styles lack it"
        assert {"title", "author", "year"} <= {*re.findall(r"(\w+) = \{", entry)}, key
        assert entry.count("{") == entry.count("}"), key
        (year,) = re.findall(r"year = \{(\d{4})\}", entry)
        assert year in key
        surname = re.findall(r"author = \{(?:\{)?([^,{}]+)", entry)[0].lower().replace(" ", "")
        assert key.startswith(surname.split("-")[0]), key


@pytest.mark.slow
def test_a_file_cites_what_it_measured_and_says_how_without_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = synthetic.write(tmp_path / "r.h5", synthetic.NETWORKS[:2], probes=("hessian", "lesion"))
    assert exit_code(["cite", str(path)]) == 0
    said = capsys.readouterr().out
    paragraph, _, entries = said.partition("@")
    cited = {key for keys in re.findall(r"\\cite{([^}]*)}", paragraph) for key in keys.split(",")}
    assert cited == {"landscape", *PROBES["hessian"].sources.split(), *PROBES["lesion"].sources.split()}
    assert cited == {*re.findall(r"(?m)^@\w+{(.+),", f"@{entries}")}
    assert "intervals over mini-batches" in paragraph
    assert str(tmp_path) not in said
    if shutil.which("bibtex") and shutil.which("pdflatex"):
        (tmp_path / "cited.bib").write_text(said)
        (tmp_path / "paper.tex").write_text(
            rf"\documentclass{{article}}\begin{{document}}{paragraph}\bibliographystyle{{plain}}\bibliography{{cited}}"
            r"\end{document}"
        )
        for tool in ("pdflatex", "bibtex", "pdflatex"):
            batch = ["-interaction=nonstopmode", "-halt-on-error"] if tool == "pdflatex" else []
            made = subprocess.run([tool, *batch, "paper"], cwd=tmp_path, check=True, capture_output=True, text=True)
            assert "Warning--" not in made.stdout


def test_labels_and_files_of_a_user_break_no_latex() -> None:
    options = {
        "checkpoint": "/home/me/a.pt",
        "against": "/home/me/b.pt",
        "data_root": "home",
        "top": 7,
        "hvp": "traced",
    }
    about = {"probe": "hessian", "options": json.dumps(options)}
    results = [xr.Dataset(attrs={**about, "label": f"a_{i}%@x", "protocol": f"digits, {i} samples"}) for i in (1, 2)]
    paragraph, _, _ = methods_and_sources(results).partition("@")
    assert r"digits, 1 samples, top 7 (a\_1\% at x); digits, 2 samples" in paragraph
    assert "/home" not in paragraph
    with pytest.raises(ValueError, match="nothing measured to cite"):
        methods_and_sources([xr.Dataset(attrs={"probe": "compare"})])
