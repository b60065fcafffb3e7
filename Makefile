# The set-up happens by itself: every target makes .venv first. `make signoff` is the main job, `make test` the whole suite.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= dev,oracle

# Where the interpreter already has a ROCm torch, .venv sees it and nothing pins torch; elsewhere the CPU torch is pinned.
HAS_ROCM_TORCH := $(shell $(PYTHON) -c "import torch; print(1 if torch.version.hip else '')" 2>/dev/null)
ifeq ($(HAS_ROCM_TORCH),1)
VENV_FLAGS := --system-site-packages
CONSTRAINTS :=
else
VENV_FLAGS :=
CONSTRAINTS := -c constraints.txt
endif

.PHONY: signoff test lint nightly evidence clean
signoff: $(VENV)/ready
	$(BIN)/dsv32 signoff

test: $(VENV)/ready
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not nightly"

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

nightly: $(VENV)/ready
	$(BIN)/python -m pytest -m nightly
	$(BIN)/dsv32 bench plan

evidence: $(VENV)/ready
	$(BIN)/python docs/evidence.py

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) -e ".[$(EXTRAS)]"
	@touch $@

clean:
	rm -rf $(VENV) dist build
