# Every target sets up what it needs; a second set-up does nothing. `make` alone lists the targets.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

PACKAGES := .venv/.packages
PROJECT := .venv/.project
PYTHON_IN_VENV := .venv/bin/python
PYTEST := $(PYTHON_IN_VENV) -m pytest

# spark-submit, dagster and persist are found, also by what they start.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# Bytecode is kept, also where the environment says otherwise: without it each interpreter that a test starts compiles all
# that it imports, which is half of its start.
unexport PYTHONDONTWRITEBYTECODE

# Evaluated where used: a JVM is only looked for by what runs Spark.
WITH_JAVA = JAVA_HOME=$$(scripts/java-home) && export JAVA_HOME &&

# JVMs, daemons, and processes that are killed under load: many of them at once would be too much.
HEAVY := spark or dagster or torture
# Where such tests are: to collect all others as well takes a minute a part. A test looks that no other folder has any.
HEAVY_FOLDERS := tests/bench tests/docs tests/faults tests/integration tests/orchestration tests/spark tests/torture tests/unit/jobs tests/wheels

.PHONY: help setup lint look check format test fuzz mutants torture transfers handovers takeovers event-kills servers hosts served-models serve kafka pending events powercut sim models faults interrupts spark-kills sink-kills source-kills cluster-kills long-history tpch size skew left-alone demo demo-s3 dev ui bench docs docs-serve pythons airflow sbom wheels lock clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(PROJECT) ## the virtual environment, pinned packages, a Java if none is found
	@$(WITH_JAVA) echo "ready: $$($(PYTHON_IN_VENV) --version), Java in $$JAVA_HOME"

$(PACKAGES): $(wildcard requirements/*.txt) scripts/setup
	scripts/setup packages
	@touch $@

$(PROJECT): $(PACKAGES) pyproject.toml pipeline/pyproject.toml
	scripts/setup project
	@touch $@

lint check: look
lint: TYPES = .venv/bin/mypy --python-version 3.13 persist_lib jobs orchestration & newer=$$!; .venv/bin/mypy; wait $$newer
check: TYPES = .venv/bin/mypy
lint: ## format, lint, types (also as Python 3.13 has them), import contract, words

look: $(PROJECT)
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	$(TYPES)
	.venv/bin/lint-imports
	scripts/prose

# The ground floor: where most slips show first.
CHECKED := tests/scripts $(addprefix tests/unit/,core kernel convert format schema runtime shard relation streams pending_area)

check: export PERSIST_CIRCLE ?= day
check: ## the same and the fast tests of the ground floor (a minute)
	scripts/in-memory $(PYTEST) -q -n 3 -m "not slow and not ($(HEAVY))" $(CHECKED)

format: $(PROJECT) ## rewrite the code as `check` wants it
	.venv/bin/ruff check --fix --exit-zero
	.venv/bin/ruff format

# What runs by day is said in tests/circles.py. DURATIONS=1 prints where the time went.
test: export PERSIST_CIRCLE ?= day
test sim test-all: export PERSIST_SEED ?= fresh
test: $(if $(DURATIONS),clean-durations) test-parts ## the tests of each change; random histories by a fresh seed, printed at the top (PERSIST_SEED=number: that one again); DURATIONS=1: a table of where the time goes
	$(if $(DURATIONS),$(PYTHON_IN_VENV) -m tests.durations build/durations)

test-all: test-parts ## all tests, with those that `make test` leaves to the night

clean-durations:
	rm -rf build/durations

TESTS = scripts/in-memory env $(if $(DURATIONS),PERSIST_DURATIONS=$(CURDIR)/build/durations) $(PYTEST)
# By files, as these share daemons and sessions; those that wait longest begin first (LONGEST in tests/circles.py).
BY_FILES := --dist loadfile --no-loadscope-reorder

UNITS := tests/unit tests/scripts tests/defects
OTHERS := $(filter-out $(UNITS) tests/__pycache__,$(patsubst %/,%,$(wildcard tests/*/)))

# Dagster, Spark and what kills processes wait for half of their time, so they run beside the others, of which the cheapest
# are first. A part that fails ends the run; what failed beside is shown when the others are done.
.PHONY: test-parts test-all clean-durations defects nightly reliability
test-parts: $(PROJECT)
	@$(WITH_JAVA) scripts/beside build/part-3.log scripts/part '3 of 3: Dagster, Spark and killed processes' \
		$(PYTHON_IN_VENV) scripts/spark_archive.py $(TESTS) -n 2 $(BY_FILES) -m "$(HEAVY)" $(HEAVY_FOLDERS) \
		:: scripts/ready-for-tests $(PYTEST) --collect-only -q $(UNITS) $(OTHERS) \
		:: scripts/part '1 of 3: units' $(TESTS) -n 3 -m "not ($(HEAVY))" $(UNITS) \
		:: scripts/part '2 of 3: the other tests without daemons' $(TESTS) -n 3 -m "not ($(HEAVY))" $(OTHERS)

defects: export PERSIST_CIRCLE ?= day
defects: $(PROJECT) ## plant recorded bugs one by one, and see which the tests find: NAMES="0301 streams" WIDE=1; SAMPLE=100 of them
	$(WITH_JAVA) $(PYTHON_IN_VENV) -m tests.defects.plant --report build/defects.md $(if $(WIDE),--wide) \
		$(if $(SAMPLE),--sample $(SAMPLE)) $(NAMES)

nightly: $(PROJECT) ## everything at full counts, with one report at the end, and docs/reliability.md: PARTS="lint test-all", PARTS="sim SEEDS=100"
	scripts/nightly $(PARTS)

reliability: ## docs/reliability.md and the README's line, of what `make nightly` counted
	scripts/reliability

FUZZER := .venv/fuzz/.packages

# In a folder that only this process sees, as nothing else needs it.
$(FUZZER): $(PROJECT) requirements/fuzz.txt
	.venv/bin/uv pip install --quiet --no-deps --require-hashes --target .venv/fuzz -r requirements/fuzz.txt
	@touch $@

fuzz: $(FUZZER) ## every decoder of foreign bytes by coverage, SECONDS_EACH=60: TARGETS="json-messages part"
	PYTHONPATH=$(CURDIR):$(CURDIR)/.venv/fuzz $(PYTHON_IN_VENV) -m tests.fuzz.run --seconds $(or $(SECONDS_EACH),60) $(TARGETS)

MUTATOR := .venv/mutants/.packages

$(MUTATOR): $(PROJECT) requirements/mutants.txt
	.venv/bin/uv pip install --quiet --no-deps --require-hashes --target .venv/mutants -r requirements/mutants.txt
	@touch $@

mutants: export PERSIST_CIRCLE ?= day
mutants: export PERSIST_SEED ?= fixed
mutants: $(MUTATOR) ## small changes of the ground floor, and which the fast tests find: SAMPLE=60 of each package SEED=1 PACKAGES="core shard"
	PYTHONPATH=$(CURDIR):$(CURDIR)/.venv/mutants scripts/in-memory $(PYTHON_IN_VENV) -m tests.mutants.run \
		--sample $(or $(SAMPLE),60) --seed $(or $(SEED),1) $(PACKAGES)

torture: $(PROJECT) ## kill processes at random points, KILLS=1000 times
	PERSIST_TORTURE_KILLS=$(or $(KILLS),1000) PERSIST_SEED=fresh $(PYTEST) -m torture --timeout=0

transfers: $(PROJECT) ## bank transfers between tables, KILLS=200 processes killed, handovers beside
	PERSIST_TRANSFER_KILLS=$(or $(KILLS),200) PERSIST_SEED=fresh $(PYTEST) --timeout=0 tests/torture/test_transfers.py

handovers: $(PROJECT) ## hand a collection over under load while its processes are killed, HANDOVERS=20 times
	PERSIST_HANDOVERS=$(or $(HANDOVERS),20) PERSIST_SEED=fresh $(PYTEST) -s --timeout=0 tests/torture/test_handovers.py

takeovers: $(PROJECT) ## writers of a stream paused, replaced and killed N=20 times; their history is linearizable
	PERSIST_STREAM_TAKEOVERS=$(or $(N),20) PERSIST_SEED=fresh $(PYTEST) -s -n 0 --timeout=0 tests/torture/test_streams.py

servers: $(PROJECT) ## shard servers killed and paused under load, KILLS=100 times, on SQLite and PostgreSQL
	PERSIST_SERVER_KILLS=$(or $(KILLS),100) PERSIST_SEED=fresh $(PYTEST) -s -n 0 --timeout=0 tests/faults/test_shard_servers.py

CLOCKS := .venv/clocks/.packages

# Beside what is installed, as only PostgreSQL's process sees it.
$(CLOCKS): $(PROJECT) requirements/clocks.txt
	.venv/bin/uv pip install --quiet --no-deps --require-hashes --target .venv/clocks -r requirements/clocks.txt
	@touch $@

hosts: $(CLOCKS) ## hosts as network namespaces (root), parted in each way N=3 times for up to 12 s, and clocks apart; times are printed
	PERSIST_PARTITIONS=$(or $(N),3) PERSIST_SEED=fresh $(PYTEST) -s -n 0 --timeout=0 tests/hosts tests/torture/test_clocks.py tests/torture/test_minters.py

served-models: $(PROJECT) ## the library's models through shard servers that are replaced meanwhile, EXAMPLES=50 of each
	PERSIST_SERVED_EXAMPLES=$(or $(EXAMPLES),50) PERSIST_SEED=fresh $(PYTEST) -n 2 --timeout=0 tests/properties/test_models_through_servers.py

serve: $(PROJECT) ## a shard server of LOCATION=file:./data (and CONSENSUS=…) on LISTEN=127.0.0.1:7600, pages on HTTP=127.0.0.1:7601; TOKENS= CERT= KEY= CLIENT_CA= files
	.venv/bin/persist --location $(or $(LOCATION),file:./data) $(if $(CONSENSUS),--consensus $(CONSENSUS)) serve \
		--listen $(or $(LISTEN),127.0.0.1:7600) --http $(or $(HTTP),127.0.0.1:7601) $(if $(TOKENS),--token-file $(TOKENS)) \
		$(if $(CERT),--tls-cert $(CERT)) $(if $(KEY),--tls-key $(KEY)) $(if $(CLIENT_CA),--tls-client-ca $(CLIENT_CA))

event-kills: $(PROJECT) ## a payments ledger killed KILLS=200 times at random and at each step, on every kind of store, and while its log moves
	PERSIST_EVENT_KILLS=$(or $(KILLS),200) PERSIST_SEED=fresh $(PYTEST) -s -n 0 --timeout=0 tests/torture/test_event_kills.py

kafka: $(PROJECT) ## two instances of a source of topics paused and killed at random moments, N=100 times; a real broker, too, and three
	PERSIST_KAFKA_KILLS=$(or $(N),100) PERSIST_SEED=fresh $(PYTEST) -s -n 0 --timeout=0 tests/torture/test_kafka_instances.py tests/integration/test_kafka_brokers.py

pending: $(PROJECT) ## a pending area with BATCHES=100000 batches of WRITERS=1000 writers, DEVICES=100 edge writers on S3, and KILLS=50 of processes
	PERSIST_PENDING_BATCHES=$(or $(BATCHES),100000) PERSIST_PENDING_WRITERS=$(or $(WRITERS),1000) $(PYTEST) -s -n 0 --timeout=0 tests/integration/test_pending_at_size.py
	PERSIST_PENDING_DEVICES=$(or $(DEVICES),100) $(PYTEST) -s -n 0 --timeout=0 tests/integration/test_pending_at_size.py -k devices
	PERSIST_PENDING_KILLS=$(or $(KILLS),50) PERSIST_SEED=fresh $(PYTEST) -s -n 0 --timeout=0 tests/torture/test_pending_areas.py

events: $(PROJECT) ## event logs on every store: all limits, each record damaged, each step of a writer interrupted by its successor; OF=some: a sample
	PERSIST_EVENTS=$(or $(OF),all) PERSIST_FAULTS=$(or $(OF),all) $(PYTEST) -n 0 --timeout=0 tests/unit/events tests/conformance/test_event_stores.py tests/faults/test_event_stores.py tests/faults/test_full_disk.py

powercut: $(PROJECT) ## disks as power cuts leave them, CUTS=5000 of them
	PERSIST_POWER_CUTS=$(or $(CUTS),5000) PERSIST_SEED=fresh $(PYTEST) -n 2 --timeout=0 tests/powercut

sim: $(PROJECT) ## simulated faults and schedules, SEEDS=1000 of them
	PERSIST_SIM_SEEDS=$(or $(SEEDS),1000) PERSIST_COLLECTION_SEEDS=$(or $(SEEDS),500) $(PYTEST) -n 2 --timeout=0 tests/simulation

models: $(PROJECT) ## formal models by Spin within large bounds, their mistakes, and TRACES=500 traces of each on the real code
	@scripts/spin
	$(PYTHON_IN_VENV) -m tests.models.check --night --mutants --replay --traces $(or $(TRACES),500)

faults: $(PROJECT) ## each request of everything to production servers broken once; OF=some: a sample of them
	PERSIST_FAULTS=$(or $(OF),all) $(PYTEST) --timeout=0 tests/faults

interrupts: $(PROJECT) ## Ctrl-C at every place of every kind of call, and at random moments
	PERSIST_INTERRUPTS=all $(PYTEST) -n 2 --timeout=0 tests/interrupts

source-kills: $(PROJECT) ## what ingests a table of PostgreSQL killed KILLS=100 times, and its server stopped at once STOPS=10 times
	PERSIST_SOURCE_KILLS=$(or $(KILLS),100) PERSIST_SOURCE_STOPS=$(or $(STOPS),10) $(PYTEST) -s --timeout=0 tests/torture/test_postgres_source.py

sink-kills: $(PROJECT) ## drivers and Python workers of streams into a shard killed at random moments, N=50 times
	$(WITH_JAVA) PERSIST_KILLS=$(or $(N),50) PERSIST_SEED=fresh $(PYTEST) -s --timeout=0 tests/spark/test_sinks_killed.py

spark-kills: $(PROJECT) ## executors and drivers of a Spark cluster killed at random moments, KILLS=10 times
	$(WITH_JAVA) PERSIST_SPARK_KILLS=$(or $(KILLS),10) $(PYTEST) -s --timeout=0 tests/spark/test_standalone_cluster.py tests/spark/test_rounds_killed.py -k random

cluster-kills: $(PROJECT) ## executors, workers and drivers of a stream on a Spark cluster killed at random moments, N=50 times
	$(WITH_JAVA) PERSIST_CLUSTER_KILLS=$(or $(N),50) $(PYTEST) -s --timeout=0 tests/spark/test_streams_killed_on_a_cluster.py

AT_SIZE = $(WITH_JAVA) $(PYTEST) -s -n 0 --timeout=0 tests/integration/test_compaction_at_size.py -k on_spark

size: $(PROJECT) ## a compaction on Spark of UPDATES=100000000 in BATCHES=24, and the memory of its tasks
	PERSIST_SIZE_UPDATES=$(or $(UPDATES),100000000) PERSIST_SIZE_BATCHES=$(or $(BATCHES),24) && export $${!PERSIST_SIZE_*} && $(AT_SIZE)

skew: $(PROJECT) ## the same with one key that has a share of HOT=0.9 of the UPDATES=20000000
	PERSIST_SIZE_UPDATES=$(or $(UPDATES),20000000) PERSIST_SIZE_HOT=$(or $(HOT),0.9) && export $${!PERSIST_SIZE_*} && $(AT_SIZE)

left-alone: $(PROJECT) ## a shard that nobody maintained for APPENDS=20000, brought to rest by one run of each door, on files and on servers
	$(WITH_JAVA) PERSIST_LEFT_ALONE=$(or $(APPENDS),20000) $(PYTEST) -s -n 0 --timeout=0 tests/integration/test_left_alone.py

long-history: $(PROJECT) ## a git history of COMMITS=100000 commits ingested within a bound of memory
	PERSIST_COMMITS=$(or $(COMMITS),100000) $(PYTEST) -s --timeout=0 tests/integration/test_git_history.py -k long_history

tpch: $(PROJECT) ## TPC-H-like tables written, refreshed and read back by Spark as of every time: SCALE=1 MEMORY=2g
	$(WITH_JAVA) $(PYTHON_IN_VENV) -m bench.tpch_spark --scale $(or $(SCALE),1) --memory $(or $(MEMORY),2g)

demo: $(PROJECT) ## the whole product on real input: REPO=path/to/git/clone ORDERS=1000000
	$(WITH_JAVA) $(PYTHON_IN_VENV) -m examples.demo $(if $(REPO),--repo "$(REPO)") $(if $(ORDERS),--orders $(ORDERS))

demo-s3: $(PROJECT) ## the same on PostgreSQL and an S3 server, started and stopped by itself; STORE=gcs or azure: on an emulator of that
	$(if $(filter azure,$(STORE)),scripts/azurite)
	$(WITH_JAVA) $(PYTHON_IN_VENV) -m examples.demo --servers $(if $(STORE),$(STORE) )$(if $(REPO),--repo "$(REPO)") $(if $(ORDERS),--orders $(ORDERS))

dev: export DAGSTER_HOME := $(CURDIR)/.dagster
dev: DEFAULT_LOCATION := $(if $(PERSIST_LOCATION),,file:$(CURDIR)/data)
dev: export PERSIST_LOCATION ?= $(DEFAULT_LOCATION)
dev: export PERSIST_RUNNING ?= 1
dev: export PERSIST_MAY_DELETE ?= 1
dev: $(PROJECT) ## the Dagster UI on PERSIST_LOCATION (default: ./data), PORT=3000
	@$(PYTHON_IN_VENV) scripts/dagster_home.py "$$DAGSTER_HOME" $(DEFAULT_LOCATION)
	@# From its home, as Dagster warns of any other dagster.yaml in the folder where it starts. So paths are made absolute.
	@$(WITH_JAVA) export PERSIST_LOCATION="$$(scripts/absolute "$$PERSIST_LOCATION")" && cd "$$DAGSTER_HOME" && \
		exec $(CURDIR)/.venv/bin/dg dev -w $(CURDIR)/workspace.yaml -h 127.0.0.1 -p $(or $(PORT),3000)

ui: $(PROJECT) ## look at the Dagster UI in a headless Chromium, and keep its pictures in docs/pictures
	scripts/chromium --install
	$(WITH_JAVA) PERSIST_PICTURES=docs/pictures $(PYTEST) --timeout=0 tests/orchestration/test_dev_pages.py

bench: $(PROJECT) ## figures beside their peers: NAME=one QUICK=1
	$(WITH_JAVA) $(PYTHON_IN_VENV) -m bench $(NAME) $(if $(QUICK),--quick)

SITE := .venv/docs/.packages
MKDOCS := NO_MKDOCS_2_WARNING=1 .venv/docs/bin/mkdocs

$(SITE): $(PROJECT) requirements/docs.txt
	.venv/bin/uv venv --quiet --clear --python $(PYTHON_IN_VENV) .venv/docs
	.venv/bin/uv pip sync --quiet --python .venv/docs/bin/python --require-hashes requirements/docs.txt
	@touch $@

docs: $(SITE) ## the site of the documents in build/site: pages, API and CLI references; a broken link is an error
	$(MKDOCS) build --strict

docs-serve: $(SITE) ## the same on a local port, rebuilt at each change: PORT=8000
	$(MKDOCS) serve --dev-addr 127.0.0.1:$(or $(PORT),8000)

AIRFLOW := .venv-airflow/.packages

$(AIRFLOW): $(PROJECT) requirements/airflow.txt
	.venv/bin/uv venv --quiet --clear --python $(PYTHON_IN_VENV) .venv-airflow
	.venv/bin/uv pip sync --quiet --python .venv-airflow/bin/python --require-hashes requirements/airflow.txt
	@touch $@

airflow: $(AIRFLOW) ## the DAGs of examples/airflow run by a real scheduler, in an environment of its own
	PERSIST_AIRFLOW=$(CURDIR)/.venv-airflow/bin $(PYTEST) -n 0 --timeout=0 tests/integration/test_airflow.py

pythons: $(PROJECT) ## the fast tests on other Pythons: PYTHONS="python3.12 /path/to/python3.13"
	scripts/pythons $(or $(PYTHONS),python3.12 python3.13)

sbom: $(PROJECT) ## build/sbom.json: what the software is made of, by the pinned requirements (CycloneDX)
	$(PYTHON_IN_VENV) scripts/sbom.py

wheels: $(PROJECT) ## both distributions as wheels and sdists in dist/: persist-lib, and persist-pipeline with jobs and orchestration
	rm -rf dist && scripts/wheels dist && ls dist/*

COMPILE = .venv/bin/uv pip compile --quiet --universal --fork-strategy fewest --python-version 3.11 --generate-hashes --no-header \
	--no-emit-index-url --no-emit-find-links $(if $(UPGRADE),--upgrade)

lock: ## pin requirements/*.txt anew after a change of ranges (UPGRADE=1: the newest)
	@test -x .venv/bin/uv || scripts/setup packages
	$(COMPILE) requirements/uv.in -o requirements/uv.txt
	$(COMPILE) requirements/build.in -o requirements/build.txt
	$(COMPILE) requirements/java.in -o requirements/java.txt
	$(COMPILE) --all-extras --no-emit-package persist-lib pyproject.toml pipeline/pyproject.toml requirements/dev.in requirements/bench.in \
		-o requirements/dev.txt
	$(COMPILE) requirements/ducklake.in -o requirements/ducklake.txt
	$(COMPILE) requirements/readers.in -o requirements/readers.txt
	$(COMPILE) requirements/fuzz.in -o requirements/fuzz.txt
	$(COMPILE) --no-deps requirements/clocks.in -o requirements/clocks.txt
	$(COMPILE) --no-deps requirements/mutants.in -o requirements/mutants.txt
	$(COMPILE) --no-deps requirements/spark-readers.in -o requirements/spark-readers.txt
	$(COMPILE) requirements/dbt.in -o requirements/dbt.txt
	$(COMPILE) requirements/airflow.in -o requirements/airflow.txt
	$(COMPILE) --constraint requirements/dev.txt pyproject.toml requirements/docs.in -o requirements/docs.txt

clean: ## remove caches, demo output and the virtual environment; never data
	rm -rf .venv .venv-airflow build dist demo-output .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis spark-warehouse
