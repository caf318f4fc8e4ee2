PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
EXTRAS := dev

# A process per core, at most four: each holds its own copy of the libraries. Neighbours in a file share their fixtures.
PARALLEL := -n auto --maxprocesses 4 --dist worksteal

# Compiled sources are kept, whatever the shell says: to compile and rewrite the tests anew takes each process four seconds.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test quick campaigns lint checkpoints docs

demo: $(STAMP)
	$(BIN)/landscape demo

# Every fact: six minutes on two fast cores, twelve on slow ones.
test: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m "not campaign"

# The tests not marked `slow` (those compile, train, start processes or draw many figures): about a minute on two cores.
quick: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow and not campaign"

# What looks for unknown faults, or runs what is delivered as a whole, and takes long: fuzzing, kills, large files, coverage by
# repetition, studies, groups of processes, the report in a browser, every probe on a simulated GPU, the documentation.
campaigns: $(STAMP)
	$(BIN)/python -m pytest $(PARALLEL) -m campaign

# The second table of checkpoints.md, nine networks of three seeds (the first table has one command per line): an hour and a
# half on two cores, from LANDSCAPE_DATA or ./data.
checkpoints: $(STAMP)
	$(BIN)/landscape reproduce --no-measure --out .

# The documentation as pages, docs/_build/index.html, with warnings as errors; needs no network once installed.
docs: $(STAMP)
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[docs]'
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

# Twenty thousand files, most of which nobody imports, took a minute and a half to compile; those imported are compiled then.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@
