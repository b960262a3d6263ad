# make demo and make test set up everything they need by themselves; a second run does no set-up work.
PYTHON ?= python3
ifeq ($(origin CXX),default)
    CXX := c++
endif
# CMake then builds with the compiler that was checked here.
export CXX

VENV := .venv
BIN := $(VENV)/bin
# The second --quiet hides pip's warnings about package locations; errors still show.
INSTALL := $(BIN)/python -m pip install --quiet --quiet --constraint constraints/cpu.txt
SOURCES := CMakeLists.txt cmake/nvtx.cmake pyproject.toml $(shell find csrc -name '*.cpp' -o -name '*.hpp')

.PHONY: setup demo test clean

setup: $(VENV)/.extension

demo: setup
	$(BIN)/pykern demo

test: setup
	$(BIN)/pytest --numprocesses auto --maxprocesses 4 --dist loadfile

# What building the extension needs. Nothing is downloaded before the machine is known to be fit.
$(VENV)/.build-tools: constraints/cpu.txt
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.exit(sys.version_info < (3, 11) and \
	    f"pykern needs Python 3.11 or newer, and $(PYTHON) is {v}. Name another: make PYTHON=python3.13")'
	@$(PYTHON) -c 'import ensurepip, venv' || \
	    { echo "pykern needs Python's venv and ensurepip modules (Debian: the package python3-venv)."; exit 1; }
	@echo 'static_assert(__cplusplus >= 202002L); int main() {}' | \
	    $(CXX) -std=c++20 -x c++ -fsyntax-only - || \
	    { echo "pykern needs a C++20 compiler (GCC 11, Clang 14 or newer), and '$(CXX)' is none." \
	           "Name another: make CXX=g++-13"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) "scikit-build-core>=0.11" "pybind11>=3.0" "cmake>=3.24" ninja nvidia-nvtx
	@touch $@

# Editable: Python sources are used where they lie; a change in csrc compiles what it touches.
$(VENV)/.extension: $(VENV)/.build-tools $(SOURCES)
	$(INSTALL) --no-build-isolation --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist
