# Everything runs in .venv, which the first target that needs it sets up (harness/bootstrap.py).
# Its programs are called as modules: their own first lines break where a path has a space.

PYTHON ?= python3
ENGINE ?= cpu
ARGS ?=

SETUP := "$(PYTHON)" -I harness/bootstrap.py
RUN := .venv/bin/python -m

.DEFAULT_GOAL := help
.PHONY: help sweep report doctor test gpu-check lint clean distclean

help: ## this list
	@echo "Targets:"
	@sed -n 's/^\([a-z-]*\):.*## /  \1  /p' Makefile | \
		while read -r name text; do printf '  %-10s %s\n' "$$name" "$$text"; done
	@echo "Variables:"
	@echo "  ARGS       passed on, e.g. make sweep ARGS=\"load.qps=1,2\" or make test ARGS=\"-k sere\""
	@echo "  ENGINE     cpu (default), gpu or remote, e.g. make sweep ENGINE=gpu"
	@echo "  PYTHON     a Python 3.11 or 3.12, if python3 is another"

sweep: ## set up, run the default sweep, say where the report is
	@$(SETUP) $(if $(filter cpu gpu,$(ENGINE)),--extra $(ENGINE))
	@$(RUN) harness experiment=sweep $(if $(filter-out cpu,$(ENGINE)),engine=$(ENGINE)) $(ARGS)

report: ## make the report of the latest run anew
	@$(SETUP)
	@$(RUN) harness.report $(ARGS)

doctor: ## what this machine has, what is missing, how to get it
	@if [ -x .venv/bin/python ]; then $(RUN) harness.doctor $(ARGS); \
	else "$(PYTHON)" -m harness.doctor $(ARGS); fi

test: ## set up and run every test
	@$(SETUP) --extra engine --extra clip --extra dev
	$(RUN) pytest $(ARGS)

gpu-check: ## set up and run the tests that need an NVIDIA GPU
	@command -v nvidia-smi >/dev/null || { echo "gpu-check: no NVIDIA GPU here" >&2; exit 1; }
	@$(SETUP) --extra gpu --extra dev
	$(RUN) pytest -m gpu $(ARGS)

lint: ## set up and check style and types
	@$(SETUP) --extra engine --extra clip --extra dev
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	$(RUN) mypy

clean: ## remove caches and build products; runs and .venv stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## also remove .venv; runs stay
	rm -rf .venv
