# make         the environment, then every experiment at laptop scale: tables, figures, a report
# make smoke   the same, tiny, in minutes; make SCALE=overnight: the same at any scale of configs/scales
# make test    the tests, one process a core; ARGS goes to pytest: make test ARGS="-n 0 -k stats"
# make bench   the core's speed: fails where a ratio got worse than tests/bench_core.json; not a test
# make docs    the documentation in site/, links checked; make archive FOLDER=results/published/X: a ZIP of it
# make env     only the environment, in .venv; make clean removes it and what tools left behind
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := main
.PHONY: main smoke test bench docs archive env clean

SCALE ?= laptop
# The interpreter below an active virtual environment, which may be the .venv to be made again.
PYTHON ?= $(shell for name in python3.11 python3; do \
  $$name -c "import sys; sys.version_info < (3, 11) or print(sys._base_executable)"; \
  done 2> /dev/null | head -n 1)

# Snakemake's lock outlives a run that was killed; flock's ends with the last process of the run.
FLOCK := $(shell command -v flock)
SNAKEMAKE = $(if $(FLOCK),flock --nonblock --conflict-exit-code 75 .venv/running) \
  .venv/bin/python -m snakemake $(if $(FLOCK),--nolock)

# A .venv that does not work any more (half made, half deleted) is made again.
$(shell .venv/bin/python -c "import snakemake" 2> /dev/null || rm -f .venv/installed)

main: env
	@$(SNAKEMAKE) --config scale=$(SCALE) || { [ $$? -ne 75 ] || \
	  echo "make: another run is at work in this folder; wait for it or stop it" >&2; exit 1; }
	@.venv/bin/python -m snakemake --nolock --quiet all --config scale=$(SCALE) \
	  --report results/$(SCALE)/report.html
	@cat results/$(SCALE)/tables/*.md
	@echo; echo "Report: results/$(SCALE)/report.html"

smoke: SCALE = smoke
smoke: main

test: env
	@OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n auto --maxprocesses 8 $(ARGS)

bench: env
	@mkdir -p results/bench
	@.venv/bin/python -m pytest -q tests/bench_core.py --benchmark-only \
	  --benchmark-json=results/bench/core.json $(ARGS)

docs: env
	@.venv/bin/mkdocs build --strict

archive: env
	@.venv/bin/python -m fp4repro.archive $(FOLDER)

env: .venv/installed

# uv installs in a tenth of pip's time, so pip fetches it; where it fails (it does not read pip's configuration,
# in which a machine may name its index), pip does all. A folder of wheels that pip is told of, uv is told too.
.venv/installed: pyproject.toml constraints.txt
	@"$(PYTHON)" -c "import sys; sys.exit(sys.version_info < (3, 11))" 2> /dev/null || { \
	  echo "make: fp4repro needs Python 3.11 or newer and found none;" \
	  "install one or name one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@rm -rf .venv
	@"$(PYTHON)" -m venv .venv || { \
	  echo "make: $(PYTHON) cannot make a virtual environment;" \
	  "on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@uv=$$(command -v uv || { .venv/bin/python -m pip install --quiet uv && echo .venv/bin/uv; }) && \
	  UV_FIND_LINKS="$${UV_FIND_LINKS:-$$(.venv/bin/pip config get global.find-links 2> /dev/null || \
	    echo "$${PIP_FIND_LINKS:-}")}" \
	  "$$uv" pip install --python .venv/bin/python -c constraints.txt -e ".[test]" || \
	  .venv/bin/python -m pip install --progress-bar off -c constraints.txt -e ".[test]"
	@touch $@

clean:
	rm -rf .venv .snakemake .pytest_cache .ruff_cache .benchmarks .hypothesis
