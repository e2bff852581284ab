# What a person or a machine does with this repository, by name. `make` alone lists it.
#
# Nothing but make and Python 3.11 or newer is needed: every target sets up what it uses in .venv, once, and
# again when pyproject.toml or constraints.txt change.

PYTHON ?= python3
# Where pip looks for torch beside its usual index. On a machine with no GPU the CPU build is a twentieth of
# the download: make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --disable-pip-version-check -c constraints.txt
FOR_USE := $(VENV)/.ready-for-use
FOR_DEVELOPMENT := $(VENV)/.ready-for-development
PEERS_VENV := .venv-peers
FOR_PEERS := $(PEERS_VENV)/.ready
MCRPY_VENV := .venv-mcrpy
FOR_MCRPY := $(MCRPY_VENV)/.ready
OLDEST_VENV := .venv-oldest
FOR_OLDEST := $(OLDEST_VENV)/.ready
LIBRARIES_VENV := .venv-libraries
FOR_LIBRARIES := $(LIBRARIES_VENV)/.ready
NEWEST_VENV := .venv-newest
NEWEST_TORCH := 2.14.1
FOR_NEWEST := $(NEWEST_VENV)/.ready-with-$(NEWEST_TORCH)
COLAB_VENV := .venv-colab
FOR_COLAB := $(COLAB_VENV)/.ready
# So that notebooks and terminals in JupyterLab find the `nbgpu` command, as in an environment that was activated.
WITH_COMMANDS := PATH="$(CURDIR)/$(VENV)/bin:$$PATH"

# pip puts a copy of the JupyterLab extension there, also where it installs the checkout itself. What was built since
# takes its place. A link would not do: pip would write and remove the checkout's own files through it.
LABEXTENSION := $(VENV)/share/jupyter/labextensions/nbgpu
REFRESH_LABEXTENSION := rm -rf $(LABEXTENSION) && cp -R nbgpu/labextension $(LABEXTENSION) && \
	cp widgets/labextension/install.json $(LABEXTENSION)

.DEFAULT_GOAL := help
.PHONY: help demo lab test test-quick test-long test-all test-hosts quality test-oldest test-newest test-libraries test-colab test-python lint bench bench-peers bench-mcrpy notebooks site docs faults soak gpu gpu-wheels gpu-pages wheel release clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.* ## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.* ## (.*)/make \1\t\2/' | expand -t 18

demo: $(FOR_USE) ## run the first notebook on all GPUs, or on two CPU ranks; leaves it and a report in demo/
	@$(WITH_COMMANDS) $(RUN) -m nbgpu.cli demo

lab: $(FOR_USE) ## open the first notebook in JupyterLab
	@$(REFRESH_LABEXTENSION)
	@$(WITH_COMMANDS) $(RUN) -m nbgpu.cli lab

test: $(FOR_DEVELOPMENT) ## run every check, and the tests of Python, front end and browser that do not take long; ten minutes or so
	@bash tests/all.sh

test-quick: $(FOR_DEVELOPMENT) ## run the tests that start no ranks, no browser and no long program; a minute or so
	@bash tests/all.sh quick

test-long: $(FOR_DEVELOPMENT) ## run what CI runs besides: the tests that take long; half an hour or so on two cores
	@bash tests/all.sh long

test-all: $(FOR_DEVELOPMENT) ## run every check and every test, also those that CI leaves out; before a release
	@bash tests/all.sh all

# The areas in which ranks on other hosts are to do as those of one host.
ON_HOSTS := tests/cells tests/cluster/test_cluster.py tests/faults/cells tests/faults/cluster/test_keep.py \
	tests/runs tests/recipes/test_prediction.py tests/faults/runs/test_hangs_in_runs.py \
	tests/faults/runs/test_faults_in_runs.py tests/faults/runs/test_faults_of_numbers.py \
	tests/faults/runs/test_faults_of_predictions.py tests/ui/panels/test_controls.py tests/ui/panels/test_advice.py

test-hosts: $(FOR_DEVELOPMENT) ## run the tests of cells, faults and runs with the ranks on test hosts, as root; an hour and a half or so
	@$(RUN) -m pytest --launcher=hosts -m "not quality and not browser" $(ON_HOSTS)

quality: $(FOR_DEVELOPMENT) ## train every recipe in full with three seeds, and hold what it learns to a floor; twenty minutes or so
	@$(RUN) -m pytest -m quality --timeout=1200 --durations=0; failed=$$?; \
		$(RUN) docs/generate_quality.py && exit $$failed

test-oldest: $(FOR_OLDEST) ## run the tests in Python with the oldest versions that are supported
	@$(OLDEST_VENV)/bin/python -m pytest -m "not quality"

# With 2.14 torch can form a group again in place, which the tests of pairs do both with and without.
ON_NEWEST := tests/faults/cells/test_pairs_on_a_group.py tests/faults/cells/test_kept_on_ddp.py tests/unit/test_private_names.py

test-newest: $(FOR_NEWEST) ## run what depends on torch's process groups with the newest torch; three minutes or so
	@$(NEWEST_VENV)/bin/python -m pytest $(ON_NEWEST)

test-libraries: $(FOR_LIBRARIES) ## run the how-to of accelerate, transformers and Lightning, and compare their numbers with torchrun's
	@$(LIBRARIES_VENV)/bin/python -m pytest tests/notebooks/test_other_libraries.py

# Colab has neither JupyterLab nor what the other tests want beside nbgpu.
IN_COLAB := tests/cells tests/faults/cells tests/faults/runs tests/runs tests/ui/panels tests/unit/client

test-colab: $(FOR_COLAB) ## run the tests of cells, faults, runs and panels with the packages that Colab has; an hour or so
	@$(COLAB_VENV)/bin/python -m pytest -m "not quality and not browser and not release and not subshells" $(IN_COLAB)

test-python: $(FOR_DEVELOPMENT) ## run what needs no PyTorch with another Python: make test-python PYTHON=python3.13
	@$(RUN) .ci/other_python.py $(PYTHON)

lint: $(FOR_DEVELOPMENT) ## check style and types
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

bench: $(FOR_DEVELOPMENT) ## measure against peers in the same run
	@$(RUN) tests/bench

bench-peers: $(FOR_PEERS) ## measure against other notebook tools, in an environment of their own
	@$(RUN) tests/bench peers loops

bench-mcrpy: $(FOR_MCRPY) ## measure microstructures against MCRpy, which takes 2 GB in an environment of its own
	@$(RUN) tests/bench mcrpy

notebooks: $(FOR_DEVELOPMENT) ## execute the notebooks, and keep them with their outputs; ONLY="00 03" for two of them
	@$(WITH_COMMANDS) $(RUN) docs/execute_notebooks.py $(ONLY)

site: $(FOR_DEVELOPMENT) ## build the docs site into build/site, and hold its links; a page of it opens from the disk
	@$(RUN) -m sphinx -W --keep-going -q -c docs . build/site
	@$(RUN) docs/_site/check_links.py build/site

docs: $(FOR_DEVELOPMENT) ## write docs/configuration.md, docs/commands.md and the stubs for editors from the code
	@$(RUN) docs/generate.py
	@$(RUN) docs/generate_stub.py

faults: $(FOR_DEVELOPMENT) ## bring every fault about, and write what was measured to docs/faults.md
	@rm -f tests/_artifacts/faults.json
	@$(RUN) -m pytest -m row
	@$(RUN) docs/generate_faults.py

# How often each row is tried, for how long faults then come at random, and for how long each seed of the adversary goes on.
SOAK_REPEATS ?= 20
SOAK_MINUTES ?= 10
ADVERSARY_MINUTES ?= 20
ADVERSARY_SEEDS ?= 1,2,3

soak: $(FOR_DEVELOPMENT) ## bring every fault about twenty times, then random ones, then what cells leave behind; over two hours
	@rm -f tests/_artifacts/faults.json
	@SOAK_REPEATS=$(SOAK_REPEATS) $(RUN) -m pytest -m row
	@$(RUN) docs/generate_faults.py
	@SOAK_MINUTES=$(SOAK_MINUTES) $(RUN) -m pytest -s tests/faults/soak.py
	@ADVERSARY_MINUTES=$(ADVERSARY_MINUTES) ADVERSARY_SEEDS=$(ADVERSARY_SEEDS) $(RUN) -m pytest -s tests/faults/adversary.py

# What a GPU shows (docs/gpu.md). It runs with the Python at hand, which has torch: on a borrowed machine there may
# be no network to set anything up from. make gpu SLICE=2 ONLY="nccl_group nccl_stop" repeats two checks.
SLICE ?= 1 2 3 4 5 6
ONLY ?=
REHEARSE ?=

gpu: ## show on a GPU what was not shown of this code, with the Python at hand, in slices of 200 s: SLICE=1 to 6
	@failed=0; for slice in $(SLICE); do \
		$(PYTHON) tests/gpu $$slice $(ONLY) $(if $(REHEARSE),--rehearse) || failed=1; done; exit $$failed

gpu-wheels: $(FOR_DEVELOPMENT) ## collect in .whl what such a machine lacks, for Python 3.12 on Linux
	@$(RUN) tests/gpu/wheels.py .whl

# Folders with what came back from such a machine.
FROM ?=

gpu-pages: ## add what `make gpu` found to tests/gpu/shown.json and docs/; FROM names folders that came back
	@$(PYTHON) docs/generate_gpu.py $(FROM)

wheel: $(FOR_DEVELOPMENT) ## build the wheel and the sdist into dist/, and check both
	@$(RUN) .ci/release.py build

# The commit that .ci/run passed on.
TESTED ?=

release: $(FOR_DEVELOPMENT) ## prepare a release as docs/releasing.md says, up to the tag; TESTED names the commit that CI passed
	@$(RUN) .ci/release.py release --tested "$(TESTED)"

clean: ## remove all that these targets made; your own runs stay
	rm -rf $(VENV) $(PEERS_VENV) $(MCRPY_VENV) $(OLDEST_VENV) $(NEWEST_VENV) $(LIBRARIES_VENV) $(COLAB_VENV) .venv-python* .whl demo build dist widgets/node_modules
	rm -rf widgets/labextension/node_modules widgets/labextension/lib tests/_artifacts
	rm -rf .pytest_cache .mypy_cache .ruff_cache
	find nbgpu tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN):
	@command -v $(PYTHON) >/dev/null || { \
		echo "There is no $(PYTHON) on this machine. On Debian or Ubuntu:"; \
		echo "    sudo apt-get install -y python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is $$($(PYTHON) -V), and nbgpu needs 3.11 or newer. Name another one:"; \
		echo "    make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments. On Debian or Ubuntu:"; \
		echo "    sudo apt-get install -y python3-venv"; exit 1; }
	@echo "Making $(VENV)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

# Says how far pip is: the packages that it has looked at, of those that have pins.
NUM_PINS := $(shell grep -c '==' constraints.txt)
SAY_HOW_FAR := awk '/^(Collecting|Requirement already)/ {n += !($$2 in seen); seen[$$2]; \
	if (n % 15 == 0 && n > said) {print "    " n " of at most $(NUM_PINS) packages"; said = n}} \
	/^Installing collected/ {print "    writing them to $(VENV)"} {fflush()}'
# With bash a failure of pip is not lost behind awk.
SHELL := bash
.SHELLFLAGS := -o pipefail -c

# torch first and alone: it is by far the largest, and its progress bar is the one to watch.
$(FOR_USE): pyproject.toml constraints.txt | $(RUN)
	@echo "Installing PyTorch, the largest part by far (step 1 of $(if $(filter demo lab,$(MAKECMDGOALS)),2,3))"
	@$(INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@echo "Installing nbgpu and what it uses (step 2 of $(if $(filter demo lab,$(MAKECMDGOALS)),2,3))"
	@$(INSTALL) -e '.[lab,samples]' | $(SAY_HOW_FAR)
	@touch $@

# `git diff` then shows a notebook as text, with its cells and what they print (.gitattributes names the driver).
NOTEBOOK_AS_TEXT := $(RUN) -m nbconvert --to markdown --stdout --log-level=ERROR --NbConvertBase.display_data_priority=text/plain

$(FOR_DEVELOPMENT): $(FOR_USE)
	@echo "Installing what the tests and checks use (step 3 of 3)"
	@$(INSTALL) -e '.[dev]' | $(SAY_HOW_FAR)
	@! git rev-parse --git-dir >/dev/null 2>&1 || git config diff.notebook.textconv '$(NOTEBOOK_AS_TEXT)'
	@touch $@

$(FOR_OLDEST): pyproject.toml constraints-oldest.txt | $(RUN)
	$(RUN) -m venv $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install --disable-pip-version-check -c constraints-oldest.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(OLDEST_VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints-oldest.txt -e '.[test]'
	@touch $@

# First what is there, then nbgpu: pip says what it would change, and may change nothing of it.
$(FOR_COLAB): pyproject.toml tests/colab-constraints.txt | $(RUN)
	$(RUN) -m venv $(COLAB_VENV)
	$(COLAB_VENV)/bin/python -m pip install --disable-pip-version-check --quiet \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -r tests/colab-constraints.txt
	$(COLAB_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --dry-run --report $(COLAB_VENV)/report.json .
	$(COLAB_VENV)/bin/python tests/support/colab.py $(COLAB_VENV)/report.json
	$(COLAB_VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c tests/colab-constraints.txt \
		-e '.[samples,gdsii]' 'pytest-timeout>=2.3' 'pytest-xdist>=3.6' 'pexpect>=4.9' 'lifelines>=0.30' 'torchsurv>=0.2' \
		'pyparsing<3.3' # matplotlib 3.10 calls what newer ones warn of, and the tests take a warning for an error
	@touch $@

$(FOR_PEERS): constraints.txt | $(FOR_DEVELOPMENT)
	$(RUN) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --disable-pip-version-check -c constraints.txt \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(PEERS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt \
		numpy monai nbdistributed==0.1.0 jupyter-distributed==0.1.1 \
		lightning-fabric==2.6.6 accelerate
	@touch $@

# Beside all that is in the environment of the tests. transformers is not in that one itself: MONAI and torchmetrics import
# it where they find it, and each start of ranks would be slower.
$(FOR_LIBRARIES): constraints.txt | $(FOR_DEVELOPMENT)
	$(RUN) -m venv $(LIBRARIES_VENV)
	$(RUN) -c 'import site; print(*site.getsitepackages(), "$(CURDIR)", sep="\n")' > \
		"$$($(LIBRARIES_VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])')/tests.pth"
	$(LIBRARIES_VENV)/bin/python -m pip install --disable-pip-version-check --quiet -c constraints.txt \
		accelerate transformers==5.24.0 lightning==2.6.6
	@touch $@

# Beside all that is in the environment of the tests, as above.
$(FOR_NEWEST): | $(FOR_DEVELOPMENT)
	$(RUN) -m venv $(NEWEST_VENV)
	$(RUN) -c 'import site; print(*site.getsitepackages(), "$(CURDIR)", sep="\n")' > \
		"$$($(NEWEST_VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])')/tests.pth"
	$(NEWEST_VENV)/bin/python -m pip install --disable-pip-version-check --quiet \
		$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==$(NEWEST_TORCH)
	@touch $@

# MCRpy 0.2.0 calls what NumPy 2 has no longer.
$(FOR_MCRPY): | $(FOR_DEVELOPMENT)
	$(RUN) -m venv $(MCRPY_VENV)
	$(MCRPY_VENV)/bin/python -m pip install --disable-pip-version-check --quiet mcrpy==0.2.0 tensorflow==2.21.0 'numpy<2'
	@touch $@
