# Needs Python >= 3.10 (with venv) and make; everything else is installed below .envs/.
# Package indexes come from the machine's own pip and uv configuration (PIP_*, UV_*, pip.conf, uv.toml).

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help demo demo-celery demo-arq demo-taskiq test test-core test-scale test-matrix test-core5 test-celery test-celery-suite test-arq \
	test-arq-suite test-taskiq test-taskiq-suite test-docs coverage bench bench-arq bench-celery bench-taskiq docs pictures lint format envs clean

PYTHON ?= python3
ENVS := .envs
UV := $(ENVS)/boot/bin/uv
ARGS ?=
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Bytecode is kept, below .cache/: without it each of the hundreds of processes that the tests start compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX := $(CURDIR)/.cache/bytecode

# uv does not read pip's variables: pass on what pip was told, unless uv was told itself.
ifndef UV_DEFAULT_INDEX
ifdef PIP_INDEX_URL
export UV_DEFAULT_INDEX := $(PIP_INDEX_URL)
endif
endif

core8_packages  := -e '.[cli,metrics]' --group test hiredis 'redis>=8,<9'
core5_packages  := -e '.[cli,metrics]' --group test 'redis>=5.0.1,<5.1'
celery_packages := -e '.[celery,cli,metrics]' --group test --group demo --group celery hiredis
celerysuite_packages := -e '.[celery,cli]' --group servers --group celery-suite
arq_packages    := -e '.[arq,cli,metrics]' --group test 'arq[watch]'
arqsuite_packages := -e '.[arq,cli]' --group servers --group arq-suite
taskiq_packages := -e '.[taskiq,cli,metrics]' --group test --group taskiq
lint_packages   := -e '.[celery,cli,metrics,taskiq]' --group lint pytest
docs_packages   := -e '.[cli,metrics]' --group docs

help: ## This list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(ENVS)/celery.ok $(ENVS)/arq.ok $(ENVS)/taskiq.ok ## All three demos, and one table: a worker and Redis are killed, every job is accounted for
	@rm -f demo-report.json
	@for name in celery arq taskiq; do echo "== $$name"; $(MAKE) --no-print-directory demo-$$name || true; echo; done
	@PYTHONPATH=examples $(ENVS)/celery/bin/python -m demo_kit demo-report.json celery arq taskiq

demo-celery: $(ENVS)/celery.ok ## The Celery demo; ARGS=--compare sets it beside native Celery
	@$(ENVS)/celery/bin/python examples/celery_worker/demo.py $(ARGS)

demo-arq: $(ENVS)/arq.ok ## The arq demo
	@$(ENVS)/arq/bin/python examples/arq_worker/demo.py $(ARGS)

demo-taskiq: $(ENVS)/taskiq.ok ## The taskiq demo
	@$(ENVS)/taskiq/bin/python examples/taskiq_worker/demo.py $(ARGS)

test: ## All tests: redis-py 8 on every Redis at hand, redis-py 5, Celery, arq, taskiq; then the site (ARGS go to pytest)
	@$(MAKE) --no-print-directory --keep-going test-core test-matrix test-core5 test-celery test-arq test-taskiq test-docs

coverage: $(ENVS)/core8.ok ## All tests again, measured, which takes twice as long; and a report
	@rm -f .coverage .coverage.*
	@status=0; $(MAKE) --no-print-directory test COVERED=1 || status=$$?; \
	$(ENVS)/core8/bin/coverage combine -q && $(ENVS)/core8/bin/coverage report; exit $$status

# Exit status 5 is "no tests were found": with ARGS, for example -k, that is no failure of one environment among others.
# Tests mostly wait (for leases, restarts, processes), so a few run at once.
PARALLEL ?= -n 6 --dist worksteal
pytest = $(ENVS)/$1/bin/$(if $3,python,$(if $(COVERED),coverage run,python)) -m pytest $(PARALLEL) $2 $(ARGS) || $(if $(strip $(ARGS)),[[ $$? -eq 5 ]],false)

test-core: $(ENVS)/core8.ok ## The core on redis-py 8
	@echo "== core, redis-py 8"
	@$(call pytest,core8,tests --ignore=tests/adapters -m "not scale")

test-scale: $(ENVS)/core8.ok ## What `test` does with 10,000 to 60,000 jobs, with 20,000 to 200,000
	@$(call pytest,core8,tests --ignore=tests/adapters -m scale,uncovered)

# Every Redis and both ends of redis-py, but not each with each: 8 with the one on PATH and the oldest, 5 with the newest.
test-matrix: $(ENVS)/core8.ok ## What speaks to the session's Redis, on the oldest one (MATRIX=others: on all that are at hand)
	@echo "== core, redis-py 8, other Redis versions"
	@export DELAY_REDIS_MATRIX=$(or $(MATRIX),between); $(call pytest,core8,tests/contract tests/redis -m "redis_server and not slow",uncovered)

# Without what is about values, records and crashes, where redis-py has no part: that is test-core's. CORE5=tests/faults for more.
CORE5 ?= tests/contract tests/redis $(patsubst %,tests/faults/test_%.py,connection wakes misuse cancelled) tests/unit/test_imports.py \
	--ignore=tests/contract/test_bad_input.py --ignore=tests/redis/test_records.py --ignore=tests/redis/test_model.py
test-core5: $(ENVS)/core5.ok ## The core on redis-py 5.0, and the newest Redis at hand
	@echo "== core, redis-py 5"
	@export DELAY_REDIS_MATRIX=last; $(call pytest,core5,$(CORE5) -m "not slow and not scale",uncovered)

test-celery: $(ENVS)/celery.ok ## The Celery adapter
	@echo "== adapters/celery"
	@$(call pytest,celery,tests/adapters/celery tests/docs tests/unit/test_imports.py --ignore=tests/adapters/celery/test_demo.py)
	@# The demo is about time: by itself, and its processes not measured.
	@$(call pytest,celery,tests/adapters/celery/test_demo.py -n 0,uncovered)

test-celery-suite: $(ENVS)/celerysuite.ok ## Celery's own tests, with and without the fixup (needs Celery's source distribution)
	$(ENVS)/celerysuite/bin/python tests/peers/celery_suite.py $(ARGS)

test-arq: $(ENVS)/arq.ok ## The arq adapter
	@echo "== adapters/arq"
	@$(call pytest,arq,tests/adapters/arq tests/docs tests/unit/test_imports.py)

test-arq-suite: $(ENVS)/arqsuite.ok ## arq's own tests, on our classes and on its own (needs arq's source distribution)
	$(ENVS)/arqsuite/bin/python tests/peers/arq_suite.py $(ARGS)

test-taskiq: $(ENVS)/taskiq.ok ## The taskiq adapter
	@echo "== adapters/taskiq"
	@$(call pytest,taskiq,tests/adapters/taskiq tests/docs tests/unit/test_imports.py)

test-taskiq-suite: $(ENVS)/taskiq.ok ## taskiq's and taskiq-redis's own tests, with and without the middleware (needs their sources)
	$(ENVS)/taskiq/bin/python tests/peers/taskiq_suite.py $(ARGS)

test-docs: docs ## The site builds, with no broken link

bench: $(ENVS)/core8.ok ## The benchmarks (ARGS go to benchmarks/run.py)
	$(ENVS)/core8/bin/python benchmarks/run.py $(ARGS)

bench-arq: $(ENVS)/arq.ok ## The arq benchmarks, beside stock arq (ARGS go to benchmarks/arq_run.py)
	$(ENVS)/arq/bin/python benchmarks/arq_run.py $(ARGS)

bench-celery: $(ENVS)/celery.ok ## The Celery benchmarks, beside native Celery (ARGS go to benchmarks/celery_run.py)
	$(ENVS)/celery/bin/python benchmarks/celery_run.py $(ARGS)

bench-taskiq: $(ENVS)/taskiq.ok ## The taskiq benchmarks, beside the stock scheduler (ARGS go to benchmarks/taskiq_run.py)
	$(ENVS)/taskiq/bin/python benchmarks/taskiq_run.py $(ARGS)

docs: $(ENVS)/docs.ok ## The documentation site, in site/; fails on any broken link
	NO_MKDOCS_2_WARNING=1 $(ENVS)/docs/bin/mkdocs build --quiet --strict

pictures: $(ENVS)/docs.ok ## Draw the pictures in docs/pictures from the last results of the benchmarks
	$(ENVS)/docs/bin/python benchmarks/pictures.py $(ARGS)

lint: $(ENVS)/lint.ok ## ruff check, ruff format --check, mypy --strict
	$(ENVS)/lint/bin/ruff check .
	$(ENVS)/lint/bin/ruff format --check .
	$(ENVS)/lint/bin/mypy --strict src

format: $(ENVS)/lint.ok ## Let ruff fix and format
	$(ENVS)/lint/bin/ruff check --fix .
	$(ENVS)/lint/bin/ruff format .

envs: $(ENVS)/core8.ok $(ENVS)/core5.ok $(ENVS)/celery.ok $(ENVS)/arq.ok $(ENVS)/taskiq.ok $(ENVS)/docs.ok $(ENVS)/lint.ok ## Make all environments

clean: ## Remove environments, caches and reports
	rm -rf $(ENVS) site bench-results demo-report.json .cache .coverage .coverage.* htmlcov dist build .hypothesis .ruff_cache

# ------------------------------------------------------------------------------------------------- environments
# NAME.ok is written last: an environment without it was interrupted, and is made anew.

$(ENVS)/boot.ok:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed; make PYTHON=/path/to/python3")'
	@echo "== making $(ENVS)/boot"
	@mkdir -p $(ENVS)
	@$(PYTHON) -m venv --clear $(ENVS)/boot
	@$(ENVS)/boot/bin/python -m pip install --quiet 'uv>=0.8'
	@touch $@

$(ENVS)/%.ok: pyproject.toml Makefile $(ENVS)/boot.ok
	@echo "== making $(ENVS)/$*"
	@rm -f $@
	@$(UV) venv --quiet --clear --python $(ENVS)/boot/bin/python $(ENVS)/$*
	@$(UV) pip install --quiet --python $(ENVS)/$*/bin/python $($*_packages)
	@touch $@
