# Everything starts here: Python 3.11 or newer and make are all that is needed.
# Whatever a command needs is set up first, in .venv, and only when pyproject.toml or constraints.txt changed.

at_least = import sys; sys.exit(sys.version_info < (3, 11))
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c '$(at_least)' 2>/dev/null && echo "$$python" && break; done)
VENV ?= .venv
ARGS ?=

python := $(VENV)/bin/python
strategy := $(if $(filter strategy=%,$(ARGS)),,strategy=ring)

tests := $(if $(strip $(ARGS)),pytest $(ARGS),tests)

.DEFAULT_GOAL := help
.PHONY: help train test lint types format clean

help:
	@echo 'make train [ARGS="devices=3 seed=2"]   set up, then train the digits: python train.py strategy=ring ARGS'
	@echo 'make test  [ARGS="-k ring"]            set up, then run all tests, in three processes; or: pytest ARGS'
	@echo 'make lint                              check style and layout (ruff)'
	@echo 'make types                             check types (mypy)'
	@echo 'make format                            lay out the code (ruff)'
	@echo 'make clean                             remove .venv and build outputs; runs in outputs/ stay'
	@echo 'PYTHON=python3.12 before or after any of them chooses the interpreter that .venv is made with.'

train: $(VENV)/.train-ready
	@echo "Training: $(python) train.py $(strategy) $(ARGS)"
	@$(python) train.py $(strategy) $(ARGS)

test: $(VENV)/.test-ready
	@echo "Testing: $(python) -m $(tests)"
	@OMP_NUM_THREADS=1 $(python) -m $(tests)

lint: $(VENV)/.test-ready
	@echo "Checking style and layout: ruff check, ruff format --check"
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .

types: $(VENV)/.test-ready
	@echo "Checking types: mypy"
	@$(python) -m mypy

format: $(VENV)/.test-ready
	@echo "Laying out the code: ruff check --fix, ruff format"
	@$(python) -m ruff check --fix .
	@$(python) -m ruff format .

clean:
	@echo "Removing $(VENV), build and dist"
	@rm -rf $(VENV) build dist

$(VENV)/.train-ready: pyproject.toml constraints.txt
	$(call set_up,zero$(comma)recipes)
	@touch $@

$(VENV)/.test-ready: pyproject.toml constraints.txt
	$(call set_up,zero$(comma)recipes$(comma)bench$(comma)cli$(comma)test)
	@touch $(VENV)/.train-ready $@

comma := ,

# While .unfinished is there, an install was cut short: pip would take half-written packages for whole ones,
# so the environment is made anew. The programs go first: without them it never passes for a usable one.
define set_up
	@"$(PYTHON)" -c '$(at_least)' || { echo 'Python 3.11 or newer is needed: install it, or name one with PYTHON=...' >&2; exit 1; }
	@if [ -e $(VENV)/.unfinished ] || [ ! -x $(python) ]; then \
		echo "Making $(VENV) with $(PYTHON)"; \
		if [ -e $(VENV)/.unfinished ] || [ -e $(VENV)/pyvenv.cfg ]; then rm -rf $(VENV)/bin && rm -rf $(VENV); fi; \
		mkdir -p $(VENV) && touch $(VENV)/.unfinished && "$(PYTHON)" -m venv $(VENV); \
	fi
	@echo "Installing drivetrain[$(1)] into $(VENV) (some minutes the first time)"
	@rm -f $(VENV)/.train-ready $(VENV)/.test-ready && touch $(VENV)/.unfinished
	@PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 \
		$(python) -m pip install --quiet --quiet -e ".[$(1)]"
	@rm -f $(VENV)/.unfinished
endef
