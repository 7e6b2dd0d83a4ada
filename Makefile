# `make demo` trains, measures and shows a federated model, `make test` runs every check. Every target sets up what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test suite lint types format docs results bench dist clean

demo: $(READY)
	mkdir -p runs
	$(BIN)/fedflat split --draw runs/demo-split.png
	export OMP_NUM_THREADS=1; out=$$(mktemp -d runs/demo-XXXX) && \
	$(BIN)/fedflat run --method fedavg --method fedsam --method "feddyn + man(0.15)" --seeds 3 \
		--set server.rounds=20 checkpoint.keep=5 --out "$$out" && \
	$(BIN)/fedflat flatness "$$out"/*/ --samples 200 --k 2 && \
	$(BIN)/fedflat animate "$$out"/*-seed-0/ --samples 200 && \
	$(BIN)/fedflat report "$$out" --out "$$out/report.html"

# The types are checked on one core while the tests begin on the others.
test: lint
	$(MAKE) -j 2 types suite

# Processes that the tests start share their bytecode, even if the environment asks Python to write none.
suite: $(READY)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks docsite
	$(BIN)/ruff format --check src tests benchmarks docsite

types: $(READY)
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix src tests benchmarks docsite
	$(BIN)/ruff format src tests benchmarks docsite

# The site in build/site, with executed notebooks. Needs no network; links are checked, and a warning is an error.
docs: $(READY)
	$(BIN)/python -c "import zensical, merm" 2>/dev/null || $(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	OMP_NUM_THREADS=1 $(BIN)/python -m docsite

# docs/results.md, its figures and the methods' pages, from the committed results. Nothing is trained.
results: $(READY)
	$(BIN)/python -m fedflat.report.results_page docs
	$(BIN)/python -m fedflat.report.method_pages docs/methods

bench: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/step_cost.py

# Wheel and sdist in dist/, checked; the wheel is tried from an empty folder in an empty environment.
dist: $(READY)
	rm -rf dist build/empty
	$(BIN)/python -c "import build, twine" 2>/dev/null || $(BIN)/pip install --quiet build twine
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/empty/venv
	build/empty/venv/bin/pip install --quiet --constraint constraints.txt "$$(ls dist/*.whl)[plot,report]"
	cd build/empty && OMP_NUM_THREADS=1 venv/bin/fedflat run --method fedavg --method "feddyn + man" --set server.rounds=3 --out a && \
		venv/bin/fedflat flatness a/* --samples 100 --k 1 && venv/bin/fedflat report a -o report.html

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .hypothesis
