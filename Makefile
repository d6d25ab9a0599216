# `make` lists the targets. Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready
# All GPUs there are, else 4 ranks on the CPU.
NPROC  ?= $(shell nvidia-smi -L 2>/dev/null | grep -c . | sed 's/^0$$/4/')
TORCHRUN := $(VENV)/bin/torchrun --standalone --nproc_per_node
ARGS   ?=
PIP_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help train test lint bench tables clean

help:  ## list the targets
	@grep -hE '^[a-z-]+: .*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

$(READY): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(PYTHON) is older than Python 3.11; name another with make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements.txt
	@touch $@

train: $(READY)  ## train a small Llama on Python's own source text: 4 CPU ranks, or all GPUs
	$(TORCHRUN) $(NPROC) 11_5d_trainer/train.py $(ARGS)

test: $(READY)  ## prove it: every test of every chapter, the harness and the trainer
	$(PY) -m pytest -n 2 --dist worksteal $(ARGS)

lint: $(READY)  ## ruff (rules and format), and mypy on the harness and the trainer
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy tests/harness 11_5d_trainer

bench: $(READY)  ## verify, then measure every chapter; writes results/ and the tables of the READMEs
	@set -e; for script in [01]*/bench_*.py; do echo "== $$script"; $(PY) $$script; done
	$(PY) tests/harness/report.py

tables: $(READY)  ## fill the tables of the READMEs from results/
	$(PY) tests/harness/report.py

clean:  ## remove .venv, caches and runs/
	rm -rf $(VENV) runs .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The course: exercises/README.md.
.PHONY: exercise check grade mistakes

exercise: $(READY)  ## begin the exercises of a chapter in student/: make exercise CH=02
	@test -n "$(CH)" || { echo "make: which chapter? For example: make exercise CH=02" >&2; exit 2; }
	@$(PY) exercises/course.py start $(CH)

check: $(READY)  ## check your exercises: make check CH=02, or one of them with N=2.3
	@test -n "$(CH)" || { echo "make: which chapter? For example: make check CH=02 N=2.3" >&2; exit 2; }
	@$(PY) exercises/course.py check $(CH) $(N)

grade: $(READY)  ## check a folder of submissions, DIR/NAME/02_data_parallel/...: make grade DIR=submissions
	@test -n "$(DIR)" || { echo "make: which folder? For example: make grade DIR=submissions" >&2; exit 2; }
	@$(PY) exercises/course.py grade $(DIR)

mistakes: $(READY)  ## prove the checker: hand in every known mistake; minutes. One chapter: make mistakes CH=02
	@$(PY) exercises/course.py mistakes $(CH)
