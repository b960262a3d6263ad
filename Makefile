# make demo and make test set up everything they need by themselves; a second run does no set-up work.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SOURCES := CMakeLists.txt pyproject.toml $(shell find csrc -name '*.cpp' -o -name '*.hpp')

.PHONY: setup demo test clean

setup: $(VENV)/.extension

demo: setup
	$(BIN)/pykern demo

test: setup
	$(BIN)/pytest

$(VENV)/.dependencies: pyproject.toml constraints/cpu.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pykern needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints/cpu.txt "torch>=2.10" "typer>=0.20" \
	    $$($(BIN)/python -c 'import tomllib; print(*(d.replace(" ", "") for d in tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["dev"]))')
	touch $@

$(VENV)/.extension: $(VENV)/.dependencies $(SOURCES)
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps -e .
	touch $@

clean:
	rm -rf $(VENV) build dist
