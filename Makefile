# Two commands do everything on a fresh Linux machine with Python 3.11 or newer: make train, make test.
# INSTALL=0 uses the current interpreter and its packages instead of a virtual environment (a GPU host without a network).

INSTALL ?= 1
BASE_PYTHON ?= python3

ifeq ($(INSTALL),1)
PYTHON := .venv/bin/python
READY := .venv/.installed
else
PYTHON := $(BASE_PYTHON)
READY :=
endif

.PHONY: train test lint clean

train: $(READY)
	$(PYTHON) train.py model=transformer ops=fused

# The second process runs the kernels themselves in Triton's interpreter, which must be chosen before Triton is imported.
test: $(READY)
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n auto --dist worksteal -m "not interpreter"
	OMP_NUM_THREADS=1 TRITON_INTERPRET=1 $(PYTHON) -m pytest -n auto --dist worksteal -m interpreter

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

.venv/.installed: pyproject.toml constraints.txt
	$(BASE_PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[zoo,dev]"
	touch $@

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
