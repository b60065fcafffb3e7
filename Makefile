# The set-up happens by itself: every target makes .venv first. `make signoff` is the main job, `make test` the whole suite.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= dev,oracle

# Where the interpreter already has a ROCm torch, .venv sees its packages and nothing pins torch; elsewhere the CPU torch
# is pinned. If that interpreter is itself a virtual environment, its packages are added by name: venv does not nest.
ROCM_SITE := $(shell $(PYTHON) -c "import os, torch; \
  print(os.path.dirname(os.path.dirname(torch.__file__)) if torch.version.hip else '')" 2>/dev/null)
ifneq ($(ROCM_SITE),)
VENV_FLAGS := --system-site-packages
CONSTRAINTS :=
ADD_SITE = echo "import site; site.addsitedir('$(ROCM_SITE)')" > "$$(echo $(VENV)/lib/python3*/site-packages)/rocm_torch.pth"
else
VENV_FLAGS :=
CONSTRAINTS := -c constraints.txt
ADD_SITE = true
endif

.PHONY: signoff examples pictures test lint nightly pages mutants evidence clean
signoff: $(VENV)/ready
	$(BIN)/dsv32 signoff

# The two sign-offs that the README speaks of: NO-GO for the PR as merged, GO for the repaired key.
EXAMPLES ?= examples
examples: $(VENV)/ready
	$(BIN)/dsv32 signoff --options pr42982 --out $(EXAMPLES)/pr42982; test $$? -eq 1
	$(BIN)/dsv32 signoff --options pr47766 --out $(EXAMPLES)/pr47766
	$(BIN)/dsv32 verify $(EXAMPLES)/pr42982
	$(BIN)/dsv32 verify $(EXAMPLES)/pr47766

test: $(VENV)/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not nightly and not browser"

lint: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A night: the long tests, then a campaign whose corpus is carried on. Every night has a seed of its own, its
# date; results lie in $(NIGHTS)/<seed>, and a night that was cut short is taken up again.
NIGHTS ?= nights
CORPUS ?= fuzz/corpus
LEDGER ?= fuzz/ledger.toml
WORKERS ?= 1
MAX_TIME ?= 30m
SEED ?= $(shell date -u +%Y%m%d)
nightly: $(VENV)/ready
	@status=0; \
	$(BIN)/python -m pytest -m nightly || status=$$?; \
	if [ -n "$$DSV32_VLLM_DIR" ]; then $(BIN)/python -m pytest -m vllm || status=$$?; fi; \
	$(BIN)/dsv32 fuzz --profile nightly --max-time $(MAX_TIME) --workers $(WORKERS) --seed $(SEED) \
	  --corpus $(CORPUS) --ledger $(LEDGER) --out $(NIGHTS)/$(SEED) || status=$$?; \
	$(BIN)/dsv32 bench plan || status=$$?; \
	exit $$status

# The pictures in docs/pictures, of the page of $(EXAMPLES)/pr42982; needs what `pages` needs.
pictures: $(VENV)/ready
	$(BIN)/python docs/pictures.py $(EXAMPLES)/pr42982

# The pages in an installed Chromium; needs the extra `browser` (make pages EXTRAS=dev,oracle,browser on a fresh .venv).
pages: $(VENV)/ready
	$(BIN)/python -m pytest -m browser

mutants: $(VENV)/ready
	$(BIN)/python tests/faults/mutants.py

evidence: $(VENV)/ready
	$(BIN)/python docs/evidence.py

$(VENV)/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	@$(ADD_SITE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(CONSTRAINTS) -e ".[$(EXTRAS)]"
	@touch $@

clean:
	rm -rf $(VENV) dist build
