# Two commands do everything on a fresh machine: `make quickstart` and `make test`.
# Both create the virtual environment when it is missing; nothing else has to be installed first.

PYTHON ?= python3
VENV ?= .venv
# The CPU wheel of torch is installed first, so that no CUDA libraries are pulled in. On a GPU machine: `make TORCH="torch" ...`.
TORCH ?= torch==2.13.0
EXTRAS ?= dev,report,tracking
BIN := $(VENV)/bin
SOURCES := pacs_trl tests benchmarks

.PHONY: env quickstart test quality style bench clean

env: $(VENV)/.installed

$(VENV)/.installed: setup.cfg constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	touch $@

quickstart: env
	$(BIN)/python -m pacs_trl.miniature.quickstart $(ARGS)

test: env
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

quality: env
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy

style: env
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

bench: env
	$(BIN)/python benchmarks/step.py $(ARGS)

clean:
	rm -rf $(VENV) outputs build *.egg-info
