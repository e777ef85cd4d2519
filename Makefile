# mappnb: `make demo` and `make test` set everything up on a machine with Python 3.11, gcc and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
RUN_DIR ?= demo-run
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-fast test-all lab bench check setup chromium clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(wildcard csrc/*)
	$(PYTHON) -c 'import sys; sys.exit("mappnb needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[megatron,notebook,dev]"
	touch $@

demo: $(STAMP)
	$(BIN)/mappnb demo --run-dir $(RUN_DIR) --replace $(DEMO)

# every check and the default lane of tests
test: $(STAMP) check
	$(BIN)/python -m pytest -m "not slow and not gpu"

# what to run while working: no processes, no browser
test-fast: $(STAMP)
	$(BIN)/python -m pytest -m "not (slow or dist or browser or gpu)"

# the slow lane too
test-all: $(STAMP) check
	$(BIN)/python -m pytest -m "not gpu"

check: $(STAMP)
	$(BIN)/ruff check mappnb tests
	$(BIN)/ruff format --check mappnb tests
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror csrc/*.cpp csrc/*.hpp

lab: $(STAMP)
	$(BIN)/jupyter lab notebooks

bench: $(STAMP)
	$(BIN)/python tests/bench/run_all.py

chromium:
	command -v chromium >/dev/null || (apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium)

clean:
	rm -rf $(VENV) build demo-run
