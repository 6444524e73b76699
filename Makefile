# The package, its MPI and its tests, in a virtual environment of its own (.venv, or VENV=...).

MPI    ?= mpich
PYTHON ?= python3
N      ?=
CUDA   ?= 13
VENV   := .venv

ifeq ($(filter $(MPI),mpich openmpi),)
$(error MPI=$(MPI): choose MPI=mpich or MPI=openmpi)
endif

ifeq ($(filter $(CUDA),12 13),)
$(error CUDA=$(CUDA): choose CUDA=12 or CUDA=13)
endif

other_mpi := $(filter-out $(MPI),mpich openmpi)
other_cuda := $(filter-out $(CUDA),12 13)
bin       := $(VENV)/bin
# Torch is large, and can be installed while other packages are; from `make test-peers` on it is on Python's path.
torch     := $(VENV)/torch
# One empty file for each set of packages that is installed, beside the packages themselves.
installed := $(VENV)/installed/$(MPI)
# What is installed: the clone, where pip writes a folder of its own, or links to it where the clone cannot be written to.
source    := $(if $(shell test -w . && echo yes),.,$(VENV)/clone)
# Put the clone on Python's path: with an import hook, which is the default, a clone that is called pce_mpi would be
# taken for the package in the folder that it lies in. The build tools are installed once, not for each extra again.
editable  := --no-build-isolation --config-settings editable_mode=compat --editable

# What the package needs, as setup.cfg says it: installed first, so that pip's errors stand apart from the compiler's.
requirements := $(shell sed -n '/^install_requires/,/^$$/s/^    //p' setup.cfg)
comma := ,

# The sources of the compiled kernel, which pip builds.
kernel    := $(wildcard pce_mpi/kernels/*.cpp pce_mpi/kernels/*.h)

ifneq ($(shell echo '$(N)' | grep -E '^[1-9][0-9]*$$'),$(N))
$(error N=$(N): give a number of ranks, such as N=4)
endif

.PHONY: help run check test test-openmpi test-impi test-kernels test-cupy test-gpu test-peers test-versions test-others gallery soak lint docs dist wheels clean

help:
	@echo 'make run           train the example language model on 2 ranks (N=4: on 4)'
	@echo 'make check         compare every option with the exact numbers, on 2 ranks (N=4: on 4)'
	@echo 'make test          run every test at 1, 2, 3 and 4 ranks (N=4: at 4 only)'
	@echo 'make test-openmpi  run what depends on the MPI library under Open MPI, which is installed beside MPICH'
	@echo 'make test-impi     the same under Intel MPI'
	@echo 'make test-kernels  compile the CUDA kernels for GPUs and run them on the CPU; needs no GPU, but g++'
	@echo 'make test-cupy     run tests of CuPy arrays with CuPy itself on the CPU, at 1, 2 and 3 ranks (N=2: at 2 only)'
	@echo 'make test-gpu      run every test of CuPy arrays on a GPU, at 1, 2 and 4 ranks (N=4: at 4 only)'
	@echo 'make test-peers    run the tests that compare with torch, which is installed for them (N=4: on 4 ranks)'
	@echo 'make test-versions run what other versions of Python and NumPy may change (PYTHON=python3.13 VENV=/tmp/newer)'
	@echo 'make test-others   run the tests of other projects, which it downloads, beside the plugin of pytest'
	@echo 'make gallery       judge a public implementation by the kit (PEER=megatron_core); list them'
	@echo 'make soak          run for an hour, and look whether memory, descriptors and communicators grow (MINUTES=5: shorter)'
	@echo 'make lint          check the code with ruff, mypy and import-linter, its lines and docstrings, and what GitHub reads'
	@echo 'make docs          build the pages in docs/ and a reference from the docstrings, as a site in site/'
	@echo 'make dist          build the sdist and from it the wheel for this machine, into dist/, and try that wheel'
	@echo 'make wheels        build the wheel of a release by cibuildwheel, into dist/; needs Docker'
	@echo 'make clean         delete $(VENV) and everything that was generated'
	@echo
	@echo 'MPI=openmpi takes Open MPI in place of MPICH, PYTHON=python3.12 another Python (when .venv is created).'
	@echo 'CUDA=12 takes CuPy for CUDA 12 in place of 13, VENV=/tmp/venv another folder in place of .venv.'

# Thousands of processes import the same modules: each is compiled once, even where the environment says to keep no
# bytecode.
export PYTHONDONTWRITEBYTECODE :=

# BLAS threads times ranks must not exceed the cores. Open MPI alone reads the last variables: more ranks than cores,
# and ranks that run as root.
run: ranks := $(or $(N),2)
run: overrides := $(if $(filter-out mpich,$(MPI)), MPI=$(MPI))$(if $(filter-out .venv,$(VENV)), VENV=$(VENV))
run: what-run-takes $(installed)/examples
	@cores=$$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN); \
	threads=$$((cores > $(ranks) ? cores / $(ranks) : 1)); \
	export OMP_NUM_THREADS=$$threads OPENBLAS_NUM_THREADS=$$threads MKL_NUM_THREADS=$$threads; \
	export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe; \
	export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; \
	(set -x; $(bin)/mpiexec -n $(ranks) $(bin)/python -m mpi4py examples/language_model.py)
	@echo
	@echo 'Seen: a model whose vocabulary is sharded over $(ranks) ranks learns, its first steps are those of one process, and it'
	@echo 'predicts text that it has not read better than the frequencies of the tokens do. To try next:'
	@echo
	@printf '  %-58s %s\n' \
		'make run N=$(if $(filter 4,$(ranks)),3,4)$(overrides)' 'the same losses on another number of ranks' \
		'. $(bin)/activate' 'python and mpiexec are then those of the lines below' \
		'mpiexec -n 4 python -m mpi4py examples/sharded_loss.py' 'the loss alone, and what it sends' \
		'mpiexec -n 4 python -m pce_mpi check' 'every option against the exact numbers' \
		'python -m pce_mpi conformance --list' 'what a loss of your own can be tested for'
	@echo
	@echo 'README.md and docs/ explain all of it; `make help` lists what else make can do.'

.PHONY: what-run-takes
what-run-takes:
	@echo 'make run trains a language model on $(or $(N),2) ranks: a minute on 2 idle cores, with 0.4 GB of memory a rank.'
	@echo 'The first time it also installs 0.3 GB into $(VENV), of which PyPI sends 0.1, and compiles the loss for this'
	@echo 'machine: a minute more. On cores that have more to do, all of it takes several times as long.'

check: $(installed)/package
	$(bin)/mpiexec -n $(or $(N),2) $(bin)/python -m pce_mpi check

test: what-test-takes $(installed)/test
	$(bin)/python tests/run.py $(if $(N),-n $(N))

.PHONY: what-test-takes
what-test-takes:
	@echo 'make test runs every test at $(or $(N),1 to 4) ranks: at 1 to 4 that takes 20 minutes on 2 idle cores.'
	@echo 'A line tells of each file that is over, and each minute one says how far all of them are.'

# Collectives, communicators, and ranks that fail.
test-openmpi test-impi: test-%: $(installed)/test | $(VENV)/%/bin/mpiexec
	$(VENV)/$*/bin/python tests/run.py -n $(or $(N),3) $(addprefix tests/ranks/test_,$(addsuffix .py,\
		collectives staging mesh redistribute ranks_that_diverge errors_in_loops errors_of_one_rank))
	$(VENV)/$*/bin/python tests/run.py tests/jobs/test_digests.py -k 'ranks and 3'
	$(VENV)/$*/bin/python tests/run.py tests/jobs/test_equal_training.py -k 'mesh and 3'
	$(VENV)/$*/bin/python tests/run.py tests/jobs/test_faulty_tests.py -k \
		'fault_names and (abort or before or exit or kill or loop_in_python or skip_on)'
	$(VENV)/$*/bin/python tests/run.py tests/jobs/test_failing_ranks.py -k 'never_arrives and later or killed'

test-kernels: $(installed)/kernels-$(CUDA)
	$(bin)/python tests/run.py tests/kernels $(addprefix tests/jobs/test_gpus.py::test_,$(beside_cupy))

# Those of tests/jobs that show nothing where CuPy is not installed.
beside_cupy := numpy_arrays_never_import_cupy numpy_arrays_work_beside_imported_cupy cupy_has_every_function_that_is_used

# What most of CuPy is needed for, and what reaches MPI; tests/README.md says what is left out.
with_cupy := kernels/test_cupy_on_cpu.py kernels/test_launches.py $(addprefix ranks/test_,$(addsuffix .py,\
	array_library collectives dist_array functions linear redistribute sgd staging \
	divergence linear_statistics margin nucleus support take_classes))

test-cupy: $(installed)/kernels-$(CUDA)
	$(bin)/python tests/run.py --cupy-on-cpu -n $(or $(N),1 2 3) $(addprefix tests/,$(with_cupy))

# What a version of Python or NumPy can change: functions, dtypes, protocols, messages, files.
with_versions := array_library array_standard arrays callers_memory checkpoint custom_ops dist_array draws functions halves \
	laws numbers_of_every_kind op_arguments op_gradients ordinary_python sound_arrays special_values wrong_arguments

test-versions: $(installed)/test
	$(bin)/python -c 'import sys, numpy; print("Python", sys.version.split()[0], "with NumPy", numpy.__version__)'
	$(bin)/python tests/run.py -n $(or $(N),2) $(patsubst %,tests/ranks/test_%.py,$(with_versions))

# What compute-sanitizer looks at: rows that start and end anywhere, splits of rows, every option.
sanitized := anywhere or splits or every_option

# Downloads projects with tests of their own, by their own commands.
test-others: $(installed)/test
	$(bin)/python tests/other_projects.py

test-gpu: $(installed)/gpu-$(CUDA)
	$(bin)/python tests/run.py --gpu -n $(or $(N),1 2 4)
	@if ! command -v compute-sanitizer > /dev/null; then \
		echo 'compute-sanitizer is not on PATH: no kernel was looked at for bad accesses and races'; \
		exit; \
	fi; \
	for tool in memcheck racecheck; do \
		(set -x; compute-sanitizer --tool $$tool --report-api-errors no --error-exitcode 1 \
			$(bin)/python -m pytest -q --gpu tests/kernels -k '$(sanitized)') || exit 1; \
	done

test-peers: $(installed)/peers
	$(bin)/python tests/run.py tests/peers -n $(or $(N),1 3)
	$(bin)/python tests/peers/compare_speed.py --rows 64 --classes 1000 --pairs 1 --backend aot_eager
	for what in '' --statistics; do \
		$(bin)/python tests/peers/compare_linear.py --rows 64 --features 16 --classes 1000 --chunk 16 --pairs 1 $$what \
			|| exit 1; \
	done
	$(bin)/python tests/peers/compare_neighbours.py --rows 64 --classes 2000 --pairs 1
	$(bin)/mpiexec -n 2 $(bin)/python -m mpi4py tests/peers/compare_transformer.py --width 24 --classes 100 --steps 30

gallery: $(installed)/test
	$(bin)/python tests/peers/gallery.py $(PEER) $(if $(N),-n $(N))

soak: $(installed)/test
	$(bin)/mpiexec -n $(or $(N),3) $(bin)/python -m mpi4py tests/soak.py --minutes $(or $(MINUTES),60)

# The schemas come with the package: nothing is downloaded.
schema := $(bin)/check-jsonschema --quiet --builtin-schema vendor

lint: $(installed)/dev
	$(bin)/ruff check
	$(bin)/ruff format --check
	$(bin)/lint-imports --no-logo --no-cache
	$(bin)/python tests/lines.py
	$(bin)/mypy --num-workers 2
	$(bin)/python tests/run.py tests/jobs/test_docstrings.py tests/jobs/test_public_names.py -k 'docstring or list'
	$(schema).github-workflows .github/workflows/*.yml
	$(schema).github-actions action.yml
	$(schema).github-issue-forms .github/ISSUE_TEMPLATE/*.yml
	$(schema).citation-file-format CITATION.cff

# What a page loads must come with it: links alone may lead to another host.
docs: $(installed)/docs
	$(bin)/python docs/pages.py
	$(bin)/zensical build --clean
	@! grep -rnoE --include='*.html' --include='*.css' \
		'<(script|link|img|iframe)[^>]* (src|href)=.?(https?:)?//[^ >]*|(url\(|@import).{,2}(https?:)?//[^ )]*' site

# The wheel is tried in an environment of its own, outside the clone.
dist: $(installed)/release
	@rm -rf dist build/dist
	$(bin)/python -m build --sdist --outdir dist
	PCE_MPI_REQUIRE_KERNEL=1 $(bin)/python -m pip wheel --quiet --no-deps --wheel-dir build/dist dist/*.tar.gz
	PATH="$(abspath $(bin)):$$PATH" $(bin)/auditwheel repair --wheel-dir dist build/dist/*.whl
	$(bin)/python -m venv build/dist/env
	build/dist/env/bin/python -m pip install --quiet "$$(echo dist/*.whl)[bf16,$(MPI)]"
	cd build/dist && env/bin/pce-mpi --version && env/bin/mpiexec -n 2 env/bin/pce-mpi check

wheels: $(installed)/release
	$(bin)/cibuildwheel --output-dir dist

clean:
	@test ! -e $(VENV) || test -e $(VENV)/pyvenv.cfg || { echo '$(VENV) is no virtual environment' >&2; exit 1; }
	rm -rf $(VENV) build dist site pce_mpi.egg-info pce_mpi/kernels/*.so .pytest_cache .hypothesis .mypy_cache .ruff_cache .cache
	find benchmarks examples pce_mpi tests -name __pycache__ -prune -exec rm -rf {} +

# Say what is done, and every 15 seconds that it goes on. The loop ends with the shell, interrupted ones included.
define telling
@echo '$(1)'
@begin=$$(date +%s); \
while sleep 15 > /dev/null 2>&1 && kill -0 $$$$ 2> /dev/null; do echo "  ... $$(($$(date +%s) - begin)) s"; done & \
$(2); status=$$?; kill $$!; exit $$status
endef

# The two MPIs share bin/mpiexec: the other one goes before this one comes.
$(installed)/package: setup.cfg pyproject.toml setup.py $(kernel) | $(bin)/pip $(filter-out .,$(source))
	@rm -rf $(VENV)/installed
	@$(bin)/python -m pip uninstall -qq --yes $(other_mpi)
	$(call telling,pip installs $(MPI)$(comma) NumPy and mpi4py:,\
		$(bin)/python -m pip install --quiet 'setuptools>=77' $(MPI) $(requirements:%='%'))
	$(call telling,The loss is compiled for this machine if it has g++ or clang++:,\
		$(bin)/python -m pip install --quiet --no-deps $(editable) '$(source)[$(MPI)]')
	@mkdir -p $(@D)
	@touch $@

# The package is there: its name stands for the packages of an extra, and it is not made once more.
$(installed)/docs $(installed)/examples $(installed)/release $(installed)/test: $(installed)/%: $(installed)/package
	$(call telling,pip installs the packages of $*:,$(bin)/python -m pip install --quiet 'pce_mpi[$*]')
	@touch $@

# mypy reads the tests too, and with them the packages that they use.
$(installed)/dev: $(installed)/package
	$(call telling,pip installs the packages of lint and of the tests:,\
		$(bin)/python -m pip install --quiet 'pce_mpi[dev$(comma)test]')
	@touch $(installed)/test $@

# CuPy has a package for each CUDA, and they share their files: the other one goes before this one comes. To compile
# without a GPU it needs NVRTC alone, as the kernels include no header of CUDA's: the oldest of CUDA 13, which takes less
# C++ than later ones. On a GPU extras bring all of the toolkit.
define without_other_cupy
@rm -f $(VENV)/installed/*/kernels-* $(VENV)/installed/*/gpu-*
@$(bin)/python -m pip uninstall -qq --yes cupy-cuda$(other_cuda)x
endef

$(installed)/kernels-$(CUDA): $(installed)/test
	$(without_other_cupy)
	$(bin)/python -m pip install --quiet cupy-cuda$(CUDA)x nvidia-cuda-nvdisasm \
		$(if $(filter 12,$(CUDA)),nvidia-cuda-nvrtc-cu12,'nvidia-cuda-nvrtc==13.0.*')
	@touch $@

$(installed)/gpu-$(CUDA): $(installed)/test
	$(without_other_cupy)
	$(bin)/python -m pip install --quiet 'pce_mpi[cuda$(CUDA)]'
	@touch $@ $(installed)/kernels-$(CUDA)

# An environment in which another MPI takes the place of MPICH, and everything else is that of $(VENV).
$(VENV)/openmpi/bin/mpiexec $(VENV)/impi/bin/mpiexec: $(VENV)/%/bin/mpiexec: | $(bin)/pip
	@rm -rf $(VENV)/$*
	$(bin)/python -m venv --without-pip $(VENV)/$*
	$(bin)/python -c 'import site; print(f"import site; site.addsitedir({site.getsitepackages()[0]!r})")' > $(VENV)/$*/rest.pth
	mv $(VENV)/$*/rest.pth $(VENV)/$*/lib/python*/site-packages
	$(bin)/python -m pip --python $(VENV)/$*/bin/python install --quiet $(patsubst impi,impi-rt,$*)

$(installed)/peers: $(installed)/test | $(torch)
	printf '%s\n' $(abspath $(torch))/lib*/python*/site-packages > $(torch)/torch.pth
	cp $(torch)/torch.pth $(VENV)/lib/python*/site-packages
	@touch $@

pins := $(bin)/python tests/peers/gallery.py --pins

$(torch): | $(bin)/pip
	@rm -rf $@.new
	$(bin)/python -m pip install --quiet --ignore-installed --prefix $@.new $$($(pins) packages torch_losses)
	$(bin)/python -m pip install --quiet --no-deps --prefix $@.new $$($(pins) alone megatron_core) \
		$$($(pins) alone colossalai) numba==0.68.1 llvmlite==0.50.0
	mv $@.new $@

$(bin)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo 'pce_mpi needs Python 3.11 or newer, and $(PYTHON) is not. Name one that is: make PYTHON=python3.12 ...' >&2; \
		exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2> /dev/null || { \
		echo '$(PYTHON) cannot create virtual environments. Install python3-venv: sudo apt install python3-venv' >&2; \
		exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/clone: | $(bin)/pip
	mkdir -p $@.new
	ln -sf $(foreach name,setup.cfg setup.py pyproject.toml README.md LICENSE,$(CURDIR)/$(name)) $@.new
	cp -Rs $(CURDIR)/pce_mpi $@.new 2> /dev/null || cp -R $(CURDIR)/pce_mpi $@.new  # links, and room for what is built
	mv $@.new $@
