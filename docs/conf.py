"""Sphinx settings of the documentation: `make docs` builds it offline, with warnings as errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

HERE = Path(__file__).parent
ROOT = HERE.parent
# Pages whose text is another file of the repository, so that it stands in one place.
ELSEWHERE = {
    "checkpoints": "checkpoints.md",
    "measurements": "benchmarks/RESULTS.md",
    "scaling": "benchmarks/SCALING.md",
    "claims": "benchmarks/CLAIMS.md",
    "audit": "benchmarks/AUDIT.md",
    "certificates": "benchmarks/CERTIFICATES.md",
    "invariances": "benchmarks/INVARIANCES.md",
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
}
sys.path.insert(0, str(HERE))
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

project = "landscape"
author = "the landscape authors"
release = metadata.version("landscape-probes")
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "mathml",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "probe_reference",
]
html_math_renderer = "mathml"
html_theme = "furo"
html_title = "landscape"
html_theme_options = {"navigation_with_keys": True}
html_copy_source = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["reference.css"]
exclude_patterns = ["_build", "examples", "**/sg_execution_times.rst", "sg_execution_times.rst"]
sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "gallery",
    "image_scrapers": ("figure_scraper.pages", "matplotlib"),
    "show_memory": False,
    "download_all_examples": False,
    "show_signature": False,
    "capture_repr": (),
    "min_reported_time": 1e9,
}
myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
autodoc_typehints = "description"
autodoc_member_order = "bysource"
nitpicky = False
suppress_warnings = ["config.cache"]  # of


def text_of(app: Sphinx, page: str, source: list[str]) -> None:
    """Replace the text of a page that stands elsewhere, and its links to files by links to their pages."""
    file = ROOT / ELSEWHERE[page] if page in ELSEWHERE else HERE / f"{page}.md"
    if page in ELSEWHERE:
        source[0] = file.read_text()
    if file.exists():
        source[0] = re.sub(r"(?<!!)\[([^\]]*)\]\(([\w./-]+)\)", lambda link: _link(link[1], link[2], file), source[0])


def _link(words: str, target: str, file: Path) -> str:
    """A link to the page of a file of the repository; the words alone where it has none, such as for a script."""
    place = (file.parent / target).resolve()
    pages = {(ROOT / path).resolve(): page for page, path in ELSEWHERE.items()}
    if place in pages:
        return f"[{words}](/{pages[place]}.md)"
    if place == ROOT / "README.md":
        return f"[{words}](/index.md)"
    return f"[{words}](/{place.relative_to(HERE)})" if place.is_relative_to(HERE) and place.is_file() else words


def sample_report(app: Sphinx, failed: Exception | None) -> None:
    """Write the report of the shipped results of CIFAR-10 beside the pages, which link to it."""
    if failed is None and app.builder.format == "html":
        command = [sys.executable, "-m", "landscape", "report", HERE / "examples" / "results" / "cifar10.h5", "--quiet"]
        subprocess.run([*command, "--out", Path(app.outdir) / "sample-report.html"], check=True)


def setup(app: Sphinx) -> None:
    """Register what reads pages and what writes the sample report."""
    app.connect("source-read", text_of)
    app.connect("build-finished", sample_report)
