# `make` lists the targets. Everything runs in .venv, which the first target that needs it creates.
PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
READY  := $(VENV)/.ready
GPUS   := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
TORCHRUN := $(PY) 11_5d_trainer/launch.py --standalone --nproc_per_node
ARGS   ?=
ifeq ($(shell uname),Darwin)  # there the name of the machine often leads nowhere: ranks meet on the loopback
export GLOO_SOCKET_IFNAME ?= lo0
endif
PIP_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help train train-3d train-5d test prove lint bench tables clean

help:  ## list the targets
	@grep -hE '^[a-z0-9-]+: .*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s  %s\n", $$1, $$2}'

$(READY): requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $(PYTHON) is not Python 3.11 or newer; name another with make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r requirements.txt
	@touch $@

# All GPUs there are, data-parallel. Without any, what two cores can make of two minutes: a rank for each core, and
# small steps, many of them. Options of your own go behind and win; another number of ranks, a run that is resumed and
# a model to start from have a batch and a length of their own.
ifeq ($(GPUS),0)
NPROC  ?= 2
ifeq ($(NPROC)$(findstring --resume,$(ARGS))$(findstring --init,$(ARGS)),2)
BEST   := --global-batch 4 --micro-batch 2 --steps 4000 --warmup 50 --eval-every 500 --save-every 0 --eval-samples 64
endif
else
NPROC  ?= $(GPUS)
ifeq ($(findstring --resume,$(ARGS))$(findstring --init,$(ARGS)),)
# 32 samples a step, or the next multiple of what all GPUs take at once.
BEST   := --micro-batch 8 --global-batch $$(( (31 + 8 * $(NPROC)) / (8 * $(NPROC)) * 8 * $(NPROC) ))
endif
endif
# What follows shows layouts: more ranks than cores, which wait for one another. The losses of a layout are those of one
# rank (test_train.py).
SHOW   := --device cpu --experts 4 --ep 2 --steps 100 --warmup 15 --lr 3e-3 --eval-samples 64 --sample 150

train: $(READY)  ## train a small model on Python's own source text: two CPU ranks, two to four minutes; or all GPUs
	OMP_NUM_THREADS=1 $(TORCHRUN) $(NPROC) 11_5d_trainer/train.py $(BEST) $(ARGS)

train-3d: $(READY)  ## a mixture of experts on 8 CPU ranks: data, tensor, pipeline and expert parallel
	OMP_NUM_THREADS=1 $(TORCHRUN) 8 11_5d_trainer/train.py $(SHOW) --pp 2 --tp 2 $(ARGS)

train-5d: $(READY)  ## the same on 16 CPU ranks with every axis: data, tensor, context, pipeline and expert parallel
	OMP_NUM_THREADS=1 $(TORCHRUN) 16 11_5d_trainer/train.py $(SHOW) --pp 2 --cp 2 --tp 2 --sequence-parallel --zero 1 \
	  $(ARGS)

# Ranks import chapters again and again: compiled modules are kept, whatever the shell's settings say.
# Ranks often wait for one another, so a worker more than there are cores keeps these busy.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -n 3 --dist worksteal

test: $(READY)  ## the tests of every chapter, the harness and the trainer; FOR=changed: those that your changes reach
	$(PYTEST) $(if $(FOR),--for $(FOR)) $(ARGS)

prove: $(READY)  ## everything that can be proven, with every planted mistake; CH=03: of one chapter; FRESH=1: without the cache
	$(PYTEST) --prove $(if $(CH),--chapter $(CH)) $(if $(FRESH),--fresh) $(ARGS)

.PHONY: fuzz
fuzz: $(READY)  ## many layouts of the trainer against one rank, and twenty ranks that die; about 15 minutes
	$(PY) 11_5d_trainer/tests/fuzz.py $(ARGS)
	$(PY) 11_5d_trainer/tests/fuzz.py --table
	$(PY) 11_5d_trainer/tests/fuzz.py --kills 20

.PHONY: rehearse
rehearse: $(READY)  ## rehearse four plans without a GPU: 8B on 64, 70B on 512, Mixtral on 256, 405B on 16,384 ranks
	@set -e; for run in "llama3-8b --ranks 64" "llama3-70b --ranks 512" "mixtral-8x7b --ranks 256" \
	  "llama3-405b --ranks 16384 --tokens 16777216"; do echo "== $$run"; \
	  $(PY) 11_5d_trainer/planner/rehearse.py --model $$run --plan --processes 2; done

lint: $(READY)  ## ruff (rules and format), and mypy on the harness and the trainer
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy tests/harness 11_5d_trainer

CHAPTERS = $(shell grep -oE '[01][0-9]_[a-z0-9_]+' tests/harness/layout.py | sort -u)
CHAPTER  = $(if $(CH),$(filter $(CH)_%,$(CHAPTERS)),$(CHAPTERS))
BENCHES  = $(wildcard $(addsuffix /bench_*.py,$(CHAPTER)) $(addsuffix /*/bench_*.py,$(CHAPTER)))
IS_THERE = test -n "$(CHAPTER)" || { echo "make: there is no chapter $(CH)" >&2; exit 2; }

bench: $(READY)  ## verify, then measure every chapter, or with CH=03 one; writes results/ and the tables of the READMEs
	@set -e; $(IS_THERE); \
	for script in $(BENCHES); do \
	  echo "== $$script"; $(PY) $$script; done
	$(PY) tests/harness/report.py

tables: $(READY)  ## fill the tables of the READMEs from results/
	$(PY) tests/harness/report.py

# On a borrowed GPU there may be no network and no .venv: then the Python that has PyTorch will do.
.PHONY: gpu results
GPU_PYTHON = $(if $(wildcard $(READY)),$(PY),$(PYTHON))

gpu:  ## print the two calls to make on a GPU; ARGS="--first" makes one, ARGS="--dry --first" on a stand-in GPU
	@$(GPU_PYTHON) tests/gpu.py $(ARGS)

results: $(READY)  ## tables and figures of the READMEs from results/; FROM=FILE takes the file of a GPU run in first
	$(PY) tests/harness/report.py $(if $(FROM),--take "$(FROM)")
	@$(MAKE) --no-print-directory figures

.PHONY: figures
figures: $(READY)  ## draw every figure again from results/, or with CH=03 those of one chapter
	@set -e; $(IS_THERE); \
	for script in $$(grep -l -e --figures $(BENCHES)); do \
	  echo "== $$script"; $(PY) $$script --figures; done
	$(PY) tests/harness/computed.py --figures

# The web edition: book/README.md. Its generator is installed when it is first needed.
.PHONY: book book-serve
BOOK := $(VENV)/.book

$(BOOK): $(READY) book/requirements.txt
	$(PY) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -r book/requirements.txt
	@touch $@

book: $(BOOK)  ## the web edition: lessons beside their code, in book/site/ (the first call needs a network)
	@$(PY) book/build_book.py

book-serve: book  ## the same on http://localhost:8000; PORT=8001
	@$(PY) -m http.server --bind 127.0.0.1 --directory book/site $(or $(PORT),8000)

clean:  ## remove .venv, caches, runs/ and the book that was built
	rm -rf book/pages book/site book/mkdocs.yml $(VENV) runs .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The course: exercises/README.md.
.PHONY: exercise check progress grade

exercise: $(READY)  ## begin the exercises of a chapter in student/: make exercise CH=02
	@test -n "$(CH)" || { echo "make: which chapter? For example: make exercise CH=02" >&2; exit 2; }
	@$(PY) exercises/course.py start $(CH)

check: $(READY)  ## check your exercises: make check CH=02, or one of them with N=2.3
	@test -n "$(CH)" || { echo "make: which chapter? For example: make check CH=02 N=2.3" >&2; exit 2; }
	@$(PY) exercises/course.py check $(CH) $(N)

progress: $(READY)  ## which exercises have passed so far
	@$(PY) exercises/course.py progress

grade: $(READY)  ## check a folder of submissions, DIR/NAME/02_data_parallel/...: make grade DIR=submissions
	@test -n "$(DIR)" || { echo "make: which folder? For example: make grade DIR=submissions" >&2; exit 2; }
	@$(PY) exercises/course.py grade "$(DIR)" $(ARGS)
