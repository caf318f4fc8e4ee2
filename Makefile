PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test lint checkpoints

demo: $(STAMP)
	$(BIN)/landscape demo

test: $(STAMP)
	$(BIN)/python -m pytest

# The second table of checkpoints.md, nine networks of three seeds (the first table has a command a line): an hour and a
# half on two cores, from LANDSCAPE_DATA or ./data.
checkpoints: $(STAMP)
	$(BIN)/landscape reproduce --no-measure --out .

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@
