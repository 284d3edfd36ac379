# Everything lives in .venv; `make` alone lists the targets. The interpreter: make PYTHON=/path/to/python3.13 quickstart
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
RUN := runs/quickstart
PIP := -m pip --disable-pip-version-check install -qq
export PYTHON

.PHONY: help install quickstart experiment test test-all test-oldest compile-gpu lint format lock bench bench-kernels clean
.DELETE_ON_ERROR:

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

install: $(VENV)/installed  ## set up .venv and nothing else

quickstart: $(VENV)/installed  ## train a small language model, evaluate it, sample from it
	$(BIN)/attnlab train --config=configs/language.py:size=tiny --workdir=$(RUN)
	$(BIN)/attnlab eval --workdir=$(RUN)
	$(BIN)/attnlab generate --workdir=$(RUN) --prompt='def '

experiment: $(VENV)/installed  ## run one of experiments/, or go on with it: make experiment NAME=grokking [SIZE=full]
	$(BIN)/attnlab experiment $(NAME) --size=$(or $(SIZE),cpu)

test: $(VENV)/installed $(VENV)/libtpu/complete  ## run the tests
	@$(BIN)/python -m pytest --durations=20 $(ARGS)

test-all: $(VENV)/installed $(VENV)/libtpu/complete  ## run the tests, the slow ones too
	@$(BIN)/python -m pytest -m '' -rs --durations=20 $(ARGS)

test-oldest: $(OLDEST)/installed $(OLDEST)/libtpu/complete  ## run the tests on the oldest Python and JAX supported
	@$(OLDEST)/bin/python -m pytest $(ARGS)

compile-gpu: $(VENV)/installed $(VENV)/cuda/complete  ## compile kernels and steps for an H100; needs none (and 0.7 GB for the compiler)
	@$(BIN)/python -m pytest -n 0 -m '' tests/kernels/test_compile_gpu.py tests/compile/test_steps.py \
		tests/compile/test_programs.py::test_steps_are_compiled_for_four_gpus tests/runs/test_plan.py \
		tests/scripts/test_spills.py $(ARGS)

lint: $(VENV)/installed  ## check format, style and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	MYPYPATH=scripts $(BIN)/mypy scripts/*.py

format: $(VENV)/installed  ## format the code and apply the automatic fixes of the linter
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock:  ## renew the files requirements*.lock from setup.cfg
	scripts/lock.sh

bench: $(VENV)/installed  ## time a train step against plain JAX
	$(BIN)/python scripts/bench_step.py $(ARGS)

bench-kernels: $(VENV)/installed  ## time the cores against alternative implementations
	$(BIN)/python -m pallas_kernels.bench $(ARGS)

clean:  ## remove the environments and caches, not the runs
	rm -rf .venv .venv-* build *.egg-info .pytest_cache .ruff_cache .mypy_cache
	find attnlab pallas_kernels configs scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +

# An environment is built from scratch, then marked as complete; an interrupted one is built again.
$(VENV)/complete: requirements.lock
	@python=$$(scripts/find_python.sh) && echo "setting up $(@D) with $$python (about a minute)" && rm -rf $(@D) && "$$python" -m venv $(@D)
	@$(@D)/bin/python $(PIP) -r $<
	@touch $@

$(OLDEST)/complete: requirements-oldest.lock
	@python=$$(scripts/find_python.sh 3.12) && echo "setting up $(@D) with $$python (about a minute)" && rm -rf $(@D) && "$$python" -m venv $(@D)
	@$(@D)/bin/python $(PIP) -r $<
	@touch $@

# The compiler for TPUs, for tests that compile without one. It stays out of the way of everything else: where JAX finds
# it, every start of JAX prints warnings. It is made for Linux alone.
$(VENV)/libtpu/complete: requirements-tpu.lock $(VENV)/complete
$(OLDEST)/libtpu/complete: requirements-tpu-oldest.lock $(OLDEST)/complete
%/libtpu/complete:
	@[ "$$(uname -s)" != Linux ] || $*/bin/python $(PIP) --no-deps --upgrade --target $(@D) -r $<
	@mkdir -p $(@D) && touch $@

# The compiler for GPUs, likewise, for plans too: JAX's plugin for CUDA and NVIDIA's assembler. No library of CUDA is needed to compile.
$(VENV)/cuda/complete: requirements-cuda.lock $(VENV)/complete
	@[ "$$(uname -s)" != Linux ] || $(BIN)/python $(PIP) --no-deps --upgrade --target $(@D) -r $<
	@mkdir -p $(@D) && touch $@

# setuptools is in the lock, so that this needs no network.
%/installed: %/complete setup.cfg pyproject.toml
	@$(@D)/bin/python $(PIP) --no-deps --no-build-isolation -e .
	@touch $@
