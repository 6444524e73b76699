# The package, its MPI and its tests, in a virtual environment of its own (.venv).

MPI    ?= mpich
PYTHON ?= python3
N      ?=
CUDA   ?= 13

ifeq ($(filter $(MPI),mpich openmpi),)
$(error MPI=$(MPI): choose MPI=mpich or MPI=openmpi)
endif

ifeq ($(filter $(CUDA),12 13),)
$(error CUDA=$(CUDA): choose CUDA=12 or CUDA=13)
endif

other_mpi := $(filter-out $(MPI),mpich openmpi)
other_cuda := $(filter-out $(CUDA),12 13)
bin       := .venv/bin
# One empty file for each set of packages that is installed, beside the packages themselves.
installed := .venv/installed/$(MPI)
# Put the clone on Python's path: with an import hook, which is the default, a clone that is called pce_mpi would be
# taken for the package in the folder that it lies in.
editable  := --config-settings editable_mode=compat --editable

ifneq ($(shell echo '$(N)' | grep -E '^[1-9][0-9]*$$'),$(N))
$(error N=$(N): give a number of ranks, such as N=4)
endif

.PHONY: help run test test-kernels test-gpu test-peers lint docs clean

help:
	@echo 'make run           train the example language model on 2 ranks (N=4: on 4)'
	@echo 'make test          run every test at 1, 2, 3 and 4 ranks (N=4: at 4 only)'
	@echo 'make test-kernels  compile the CUDA kernels for GPUs and run them on the CPU; needs no GPU, but g++'
	@echo 'make test-gpu      run every test of CuPy arrays on a GPU, at 1, 2 and 4 ranks (N=4: at 4 only)'
	@echo 'make test-peers    run the tests that compare with torch, which is installed for them (N=4: on 4 ranks)'
	@echo 'make lint          check the code with ruff and mypy'
	@echo 'make docs          build the pages in docs/ and a reference from the docstrings, as a site in site/'
	@echo 'make clean         delete .venv and everything that was generated'
	@echo
	@echo 'MPI=openmpi takes Open MPI in place of MPICH, PYTHON=python3.12 another Python (when .venv is created).'
	@echo 'CUDA=12 takes CuPy for CUDA 12 in place of 13.'

# BLAS threads times ranks must not exceed the cores. Open MPI alone reads the last variables: more ranks than cores,
# and ranks that run as root.
run: ranks := $(or $(N),2)
run: $(installed)/examples
	@cores=$$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN); \
	threads=$$((cores > $(ranks) ? cores / $(ranks) : 1)); \
	export OMP_NUM_THREADS=$$threads OPENBLAS_NUM_THREADS=$$threads MKL_NUM_THREADS=$$threads; \
	export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe; \
	export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; \
	set -x; $(bin)/mpiexec -n $(ranks) $(bin)/python -m mpi4py examples/language_model.py

test: $(installed)/test
	$(bin)/python tests/run.py $(if $(N),-n $(N))

test-kernels: $(installed)/kernels-$(CUDA)
	$(bin)/python tests/run.py tests/kernels tests/jobs/test_gpus.py

# What compute-sanitizer looks at: rows that start and end anywhere, clusters, every option.
sanitized := anywhere or cluster or every_option

test-gpu: $(installed)/gpu-$(CUDA)
	$(bin)/python tests/run.py --gpu -n $(or $(N),1 2 4)
	@if ! command -v compute-sanitizer > /dev/null; then \
		echo 'compute-sanitizer is not on PATH: no kernel was looked at for bad accesses and races'; \
		exit; \
	fi; \
	for tool in memcheck racecheck; do \
		(set -x; compute-sanitizer --tool $$tool --report-api-errors no --error-exitcode 1 \
			$(bin)/python -m pytest -q -o faulthandler_timeout=0 --gpu tests/kernels -k '$(sanitized)') || exit 1; \
	done

test-peers: $(installed)/peers
	$(bin)/python tests/run.py tests/peers -n $(or $(N),1 3)
	$(bin)/python tests/peers/compare_speed.py --rows 64 --classes 1000 --pairs 1

lint: $(installed)/dev
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/mypy

docs: $(installed)/docs
	$(bin)/mkdocs build --quiet

clean:
	rm -rf .venv build site pce_mpi.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find benchmarks examples pce_mpi tests -name __pycache__ -prune -exec rm -rf {} +

# The two MPIs share bin/mpiexec: the other one goes before this one comes.
$(installed)/package: setup.cfg pyproject.toml | $(bin)/pip
	rm -rf .venv/installed
	$(bin)/python -m pip uninstall -qq --yes $(other_mpi)
	$(bin)/python -m pip install --quiet $(editable) '.[$(MPI)]'
	mkdir -p $(@D)
	touch $@

$(installed)/docs $(installed)/examples $(installed)/test: $(installed)/%: $(installed)/package
	$(bin)/python -m pip install --quiet $(editable) '.[$*]'
	touch $@

# mypy reads the tests too, and with them the packages that they use.
$(installed)/dev: $(installed)/test
	$(bin)/python -m pip install --quiet $(editable) '.[dev]'
	touch $@

# CuPy has a package for each CUDA, and they share their files: the other one goes before this one comes. To compile
# without a GPU it needs NVRTC alone, as the kernels include no header of CUDA's; on one, extras bring all of the toolkit.
define without_other_cupy
rm -f .venv/installed/*/kernels-* .venv/installed/*/gpu-*
$(bin)/python -m pip uninstall -qq --yes cupy-cuda$(other_cuda)x
endef

$(installed)/kernels-$(CUDA): $(installed)/test
	$(without_other_cupy)
	$(bin)/python -m pip install --quiet cupy-cuda$(CUDA)x $(if $(filter 12,$(CUDA)),nvidia-cuda-nvrtc-cu12,nvidia-cuda-nvrtc)
	touch $@

$(installed)/gpu-$(CUDA): $(installed)/test
	$(without_other_cupy)
	$(bin)/python -m pip install --quiet $(editable) '.[cuda$(CUDA)]'
	touch $@ $(installed)/kernels-$(CUDA)

$(installed)/peers: $(installed)/test
	$(bin)/python -m pip install --quiet torch==2.13.0
	touch $@

$(bin)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'pce_mpi needs Python 3.11 or newer, and $(PYTHON) is not. Name one that is: make PYTHON=python3.12 ...' >&2; \
		exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { \
		echo '$(PYTHON) cannot create virtual environments. Install python3-venv: sudo apt install python3-venv' >&2; \
		exit 1; }
	$(PYTHON) -m venv .venv
