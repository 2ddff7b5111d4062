# `make demo` and `make test` set everything up by themselves: Python 3.11 or newer, a C compiler and make are enough.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile
STAMPS := build/stamps
KERNELS := setup.py $(wildcard autoprec/ops/csrc/*.[ch])
DATA := $(wildcard autoprec/hardware/data/*.toml autoprec/hardware/data/*/*.toml)
SOURCES := pyproject.toml requirements/dev.txt $(wildcard */*.py autoprec/*/*.py) $(DATA) $(KERNELS)

.PHONY: demo test slow lint types imports docs check gates train-policy-quick evaluate-policy bench bench-quick \
	calibrate-check convergence divergence transfer sanitize triton-aot zoo range-lowest range-newest range chaos compare-demo \
	report-check sweep-check check-all clean

demo: $(READY)
	$(BIN)/autoprec demo

# each comparison ends with its summary line; started again after an interruption, it runs what is missing
compare-demo: $(READY)
	$(BIN)/autoprec compare autoprec.demo.targets:gpt --interval 10 --minutes 5 --margin 0.02 --out build/compare/gpt
	$(BIN)/autoprec compare autoprec.demo.targets:cnn --interval 10 --minutes 1.5 --margin 0.01 --out build/compare/cnn
	@sed -n 's/^ "summary": "\(.*\)",$$/\1/p' build/compare/gpt/comparison.json build/compare/cnn/comparison.json

test: $(READY)
	$(PYTEST)

slow: $(READY)
	$(PYTEST) -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports

# the site in build/site; a warning is an error
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "docs: build/site/index.html"

check: lint types imports docs test

# whether the proxies are worth training a policy on; twins that an earlier run has trained are reused
gates: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python scripts/gates.py

# trains a small policy and plays it on tasks that it has not learnt from, under 5 minutes
train-policy-quick: $(READY)
	$(BIN)/autoprec train-policy --quick --out build/policy-quick
	$(BIN)/autoprec evaluate-policy --quick --policy build/policy-quick/seed-0 --out build/policy-quick/evaluation

# the shipped policy, or the table where none is shipped, against all rivals on held-out tasks; the last line sums it up
evaluate-policy: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/autoprec evaluate-policy --bank test --bank deep --bank wide --out build/evaluate-policy

# started again after an interruption, it measures only what is missing; `python -m benchmarks.train --help` has options
bench: $(READY)
	$(BIN)/python -m benchmarks.train

bench-quick: $(READY)
	$(BIN)/python -m benchmarks.train --quick

# a short calibration against a long measurement, about 8 minutes; `python -m benchmarks.calibrate_check --quick` takes one
calibrate-check: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.calibrate_check

# started again after an interruption, it trains only what is missing
convergence: $(READY)
	$(BIN)/python -m benchmarks.convergence

# the same
divergence: $(READY)
	$(BIN)/python -m benchmarks.divergence

# the same; two runs at a time, under an hour on two cores. `python -m benchmarks.transfer --quick` takes 5 minutes
transfer: $(READY)
	$(BIN)/python -m benchmarks.transfer

# small runs, their pages in a headless Chromium (apt-get install chromium), screenshots for docs/report.md
report-check: $(READY)
	$(BIN)/python scripts/report_check.py

sanitize: $(READY)
	$(BIN)/python scripts/sanitize.py

triton-aot: $(READY)
	$(BIN)/python scripts/triton_aot.py --write

zoo: $(READY)
	$(BIN)/python scripts/zoo.py

range: range-lowest range-newest

range-lowest range-newest: range-%: $(READY)
	$(BIN)/python scripts/check_range.py $*

# faults at random in small runs; started again with the same seed, it runs what is missing. `--help` has more
SCHEDULES ?= 100
SEED ?= 0
chaos: $(READY)
	$(BIN)/python scripts/chaos.py --schedules $(SCHEDULES) --seed $(SEED)

# 20 trials in two processes; a worker is killed in mid-trial, then the parent, and the sweep goes on, 5 minutes
sweep-check: $(READY)
	$(BIN)/python scripts/sweep_check.py

# each part leaves a stamp: after an interruption, or a failure that is mended, only what is missing runs
check-all: $(addprefix $(STAMPS)/,check slow sanitize range-lowest range-newest zoo chaos demo)
	@echo "check-all: every part passed"

$(STAMPS)/%: $(SOURCES) | $(READY)
	$(MAKE) $*
	@mkdir -p $(STAMPS) && touch $@

$(READY): requirements/dev.txt pyproject.toml $(KERNELS)
	@echo "setting up .venv (a few minutes, once)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --requirement requirements/dev.txt
	$(BIN)/python -m pip install --quiet --no-build-isolation --no-deps --editable .
	@touch $@

clean:
	rm -rf .venv build dist *.egg-info .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
