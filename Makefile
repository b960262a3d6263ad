# make demo and make test set up everything they need by themselves; a second run does no set-up work.
PYTHON ?= python3
ifeq ($(origin CXX),default)
    CXX := c++
endif
# CMake then builds with the compiler that was checked here.
export CXX

VENV := .venv
CONSTRAINTS := constraints/cpu.txt
BIN := $(VENV)/bin
INSTALL := $(BIN)/python environment/install.py --constraint $(CONSTRAINTS)
# Changes with the names of modules: what is installed has a table of them.
NAMES := $(VENV)/.names-$(firstword $(shell find pykern schedules -name '*.py' | LC_ALL=C sort | cksum))
SOURCES := CMakeLists.txt cmake/nvtx.cmake pyproject.toml $(shell find csrc -name '*.cpp' -o -name '*.hpp')

.PHONY: setup demo test docs torture matrix clean

setup: $(VENV)/.extension

demo: setup
	$(BIN)/pykern demo

test: setup
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile
	@! command -v nvidia-smi >/dev/null || TRITON_INTERPRET=0 $(BIN)/pytest -m gpu

# The site, in build/docs. Warnings of sphinx are errors, names and links that lead nowhere as well.
docs: setup $(VENV)/.docs-tools
	$(BIN)/sphinx-build --quiet --fresh-env --nitpicky --fail-on-warning --keep-going \
	    -c docs -d build/doctrees . build/docs

# On the other stacks that are promised (docs/versions.md); needs root for a bare Debian.
matrix: setup
	.ci/matrix

# Every campaign of docs/reliability.md for a minute or so. TORTURE says which, and how long or how
# many cases: make torture TORTURE="plans runs --seconds 600"
torture: setup
	$(BIN)/python -m tests.torture $(TORTURE)

# What building the extension needs. Nothing is downloaded before the machine is known to be fit.
$(VENV)/.build-tools: $(CONSTRAINTS)
	@$(PYTHON) environment/check.py "$(CXX)"
	@echo "Setting up $(VENV): about 2.5 GB (0.7 GB to download), or 5.6 GB (2.7 GB) where the index's torch" \
	    "brings CUDA."
	$(PYTHON) -m venv $(VENV)
	@$(INSTALL) "scikit-build-core>=0.11" "pybind11>=3.0" "cmake>=3.24" ninja nvidia-nvtx
	@touch $@

# Editable: Python sources are used where they lie; a change in csrc compiles what it touches.
$(VENV)/.extension: $(VENV)/.build-tools $(SOURCES) $(NAMES)
	@echo "Installing packages and compiling the extension: minutes."
	@$(INSTALL) --no-build-isolation --editable ".[dev]"
	@touch $@

$(VENV)/.docs-tools: $(VENV)/.build-tools | $(VENV)/.extension
	@$(INSTALL) "sphinx>=9" furo "myst-nb>=1.4"
	@touch $@

$(NAMES): $(VENV)/.build-tools
	@rm -f $(VENV)/.names-*
	@touch $@

clean:
	rm -rf $(VENV) build dist
