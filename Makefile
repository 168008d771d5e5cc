# make demo: compile a real model and print eager against compiled.  make test: every test.  Each sets up .venv itself.
PYTHON ?= python3
JOBS ?= auto
VENV := .venv
BIN := $(VENV)/bin
INPUTS := pyproject.toml constraints.txt setup.py $(wildcard tensorplay/csrc/*)

.PHONY: demo test lint doctor clean

demo: $(VENV)/.demo
	$(BIN)/python -m tensorplay demo

doctor: $(VENV)/.demo
	$(BIN)/python -m tensorplay doctor

test: $(VENV)/.test
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest -n $(JOBS)

lint: $(VENV)/.test
	$(BIN)/ruff check tensorplay tests bench
	$(BIN)/mypy tensorplay

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "needs Python 3.11 or newer; set PYTHON=" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python $(INPUTS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[models]'
	@touch $@

$(VENV)/.test: $(VENV)/bin/python $(INPUTS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,models]'
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info tensorplay/_native*.so
