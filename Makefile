# Two commands: `make demo` trains, measures and shows a federated model, `make test` runs every check. Both set up what they need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: demo test lint types clean

demo: $(READY)
	mkdir -p runs
	$(BIN)/fedflat split --draw runs/demo-split.png
	export OMP_NUM_THREADS=1; out=$$(mktemp -d runs/demo-XXXX) && \
	$(BIN)/fedflat run --method fedavg --method fedsam --method "feddyn + man(0.15)" --seeds 3 \
		--set server.rounds=20 checkpoint.keep=5 --out "$$out" && \
	$(BIN)/fedflat flatness "$$out"/*/ --samples 200 --k 2 && \
	$(BIN)/fedflat animate "$$out"/*-seed-0/ --samples 200 && \
	$(BIN)/fedflat report "$$out" --out "$$out/report.html"

test: lint types
	$(BIN)/python -m pytest -n auto --dist loadfile

lint: $(READY)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks

types: $(READY)
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt torch
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) runs .mypy_cache .ruff_cache .hypothesis
