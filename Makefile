PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: setup check test campaign lint docs demo bench gpu mutants convert-test integrations-test clusters-test compat storages-test clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,demo]'
	touch $@

# While writing: what computes in one process, so that there is a test for each core, with fewer
# seeds and examples than `make test` draws.
check: lint
	HYPOTHESIS_PROFILE=quick KEEPSTEP_SEEDS=200 $(BIN)/python -m pytest \
		-m 'not campaign and not slow' --numprocesses 2 --dist worksteal tests/unit tests/sim

# Everything that protects a user; CI runs it.
# Much of a job's test is waiting for processes: four tests run side by side on two cores.
# A job has ten processes: where Python shall keep no bytecode, each compiles all sources again.
test: setup
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -m 'not campaign and not frameworks and not clusters' \
		--numprocesses 4 --dist worksteal --durations 50

# Searches for faults that no test has: random faults, walks through layouts, random bytes,
# changes of the code that tests must notice, and conversions with the tools themselves.
MINUTES ?= 30
SEED ?= 1
campaign: mutants convert-test
	$(BIN)/python -m pytest -m campaign
	$(BIN)/python -m tests.fuzz --minutes $(MINUTES) --seed $(SEED)
	$(BIN)/python ops/bench/chaos.py --minutes $(MINUTES) --seed $(SEED)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The site, in build/site. A warning, such as a link to a page that there is not, is an error.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

demo: setup
	$(BIN)/python -m examples.demo

bench: setup
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python ops/bench/recovery.py --json
	$(BIN)/python ops/bench/snapshot.py --json
	$(BIN)/python ops/bench/checkpoint.py --json
	$(BIN)/python ops/bench/diagnosis_scale.py --json
	$(BIN)/python ops/bench/diagnosis.py --json --quick
	$(BIN)/python ops/bench/standstill.py --json --quick
	$(BIN)/python ops/bench/integrations.py --json --quick

# Nothing is set up: on a machine with GPUs, whose PyTorch is its own, nothing may be installable.
gpu:
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m ops.gpu --json

mutants: setup
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[mutants]'
	$(BIN)/python ops/mutants.py --json

# The libraries whose checkpoints are converted, each in an environment of its own: tests/convert.
ONLY ?=
ENVIRONMENTS ?= .
convert-test: setup
	$(BIN)/python -m tests.convert $(ONLY) --environments $(ENVIRONMENTS)

# The frameworks whose loops are attached, each in an environment of its own.
integrations-test: setup
	$(BIN)/python -m ops.integrations $(ONLY) --environments $(ENVIRONMENTS) --json

# Slurm's daemons, Kubernetes' manifests, and clouds' notices. Where root runs it, Slurm is installed
# if it is not there; what is missing all the same is named with the tests that were left out.
clusters-test: setup
	-test "$$(id -u)" != 0 || command -v slurmctld slurmd || ! command -v apt-get || \
		apt-get install --yes --quiet --no-install-recommends slurm-wlm
	test -x .venv-viewers/bin/python || { $(PYTHON) -m venv .venv-viewers && \
		.venv-viewers/bin/pip install --quiet holistictraceanalysis==0.5.0 viztracer==1.1.1; }
	$(BIN)/python -m pytest -m clusters -rs tests/integration/clusters

# Azurite, a server of Azure's interface, from the npm registry; without it its tests are skipped.
storages-test: setup
	npm install --no-save --no-fund --no-audit azurite@3.37.0
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[azure]'
	$(BIN)/python -m pytest -q -n 2 tests/integration/checkpoint/test_storages.py \
		tests/integration/checkpoint/test_crashes.py \
		tests/integration/checkpoint/test_conversion.py -k 'storages or crashes or object_store'

# Other versions of PyTorch, each in an environment of its own, with several GB of CUDA libraries.
TORCH ?= 2.11.0
compat: setup
	$(BIN)/python -m ops.compat $(TORCH) --environments $(ENVIRONMENTS) --json

clean:
	rm -rf $(VENV) .venv-convert-* .venv-integration-* .venv-torch-* .venv-viewers demo-output build dist *.egg-info node_modules
