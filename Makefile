# make demo | test | test-avx2 | test-sse | test-all | fuzz | lint | ledger | docs | release
# Each sets up .venv by itself; nothing is written outside this folder.
PYTHON ?= python3
# Elsewhere than the default: make TORCH="torch==2.13.0 --index-url ..." picks another build.
TORCH ?= torch==2.13.0
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Bytecode is kept, also where a machine's settings forbid it: collecting the tests takes 9 s, not 15.
export PYTHONDONTWRITEBYTECODE =
PYTEST := $(BIN)/python -m pytest -q -n 2 --dist worksteal
# The types of every call are checked; an int may be a float.
TYPES := --jaxtyping-packages='stateline,beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))'

.PHONY: demo test test-avx2 test-sse test-all fuzz lint ledger docs release clean
.DEFAULT_GOAL := test

# Less than three minutes on two idle cores, after the set-up. Started again, it goes on where it stopped.
HEADS := attention(position=hard_alibi, n_heads=8)
demo: .venv/run
	$(BIN)/stateline compare --protocol quick --seeds 4 --d_model 48 \
	  "attention=$(HEADS)*2" "lstm=lstm*2" "h3=h3*2" "h3+attention=h3 $(HEADS)" \
	  --tasks "word_problem(length=16, steps=400, eval_every=50)" \
	  "copying(n_letters=8, max_len=8, context_len=20, steps=800, eval_every=50, stop_at=0.98)" \
	  --out runs/demo

# The quick tests: three to five minutes on two idle cores, and at first up to two more for kernels.
test: .venv/ready
	$(PYTEST)

# The quick tests as on a processor with AVX2 alone; the numerical ones as on one with plain SSE, with
# the types of every call checked. NUMBA_CPU_NAME alone leaves numba the instructions of this
# processor.
test-avx2: .venv/ready
	@grep -q avx512f /proc/cpuinfo || echo "this processor has no more than AVX2: make test has run them so"
	! grep -q avx512f /proc/cpuinfo || \
	  ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
	  NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx,+avx2,+fma $(PYTEST)

test-sse: .venv/ready
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 \
	  NUMBA_CPU_NAME=generic NUMBA_CPU_FEATURES= $(PYTEST) $(TYPES) tests/ops tests/layers tests/models

# All tests: the quick ones, then the slow ones with the types of every call checked; PART=1/8 takes
# the slow tests 1, 9, 17, ...
PART ?= 0/1
test-all: test
	$(PYTEST) -m slow --part $(PART) $(TYPES)

# Wrong inputs for the command line, drawn from a seed: make fuzz COUNT=1000 SEED=7
COUNT ?= 300
SEED ?= 0
fuzz: .venv/ready
	$(BIN)/python -m tests.refusals.fuzz --count $(COUNT) --seed $(SEED)

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The tables of claims on the pages of the papers, from recorded results.
ledger: .venv/ready
	$(BIN)/python docs/_ext/ledger.py

docs: .venv/ready
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html
	@echo "the documentation is in docs/_build/html/index.html"

# Wheel and sdist of the version in pyproject.toml, each checked in an empty environment elsewhere.
release:
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" .ci/release

# What running needs.
.venv/run: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "stateline needs Python 3.11 or newer: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) $(TORCH)
	$(PIP) -c constraints.txt -e ".[cli,images]"
	@touch $@

# What tests, linters and the documentation need besides.
.venv/ready: .venv/run
	$(PIP) -c constraints.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf .venv build dist docs/_build src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
