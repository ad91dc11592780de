SHELL = /bin/bash
PYTHON = .venv/bin/python
# The live tests limit themselves; this is for a kernel that lets none of them return.
LIVE = timeout --foreground --kill-after=30 1800 $(PYTHON) -m pytest tests/live -ra

.PHONY: help setup demo test test-all lint format unit coverage pythons live live-slow vm vmlinux bench wheel \
	install-perf-scripts uninstall-perf-scripts clean

help: ## what can be made
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 24

setup: ## system packages (as root on Debian) and .venv
	@scripts/setup

demo: setup ## the main job on a recording made on the spot, or on the shipped one
	@scripts/demo

test: setup ## lint, unit and live: a few minutes, with a summary
	@scripts/check lint unit live

test-all: setup ## test, and then live-slow, pythons, coverage, vm and vmlinux
	@scripts/check lint unit live live-slow pythons coverage vm vmlinux

lint: setup ## ruff and mypy --strict
	@status=0; \
	$(PYTHON) -m ruff check . || status=1; \
	$(PYTHON) -m ruff format --check . || status=1; \
	$(PYTHON) -m mypy || status=1; \
	exit $$status

format: setup ## let ruff mend what it can
	@$(PYTHON) -m ruff check --fix .
	@$(PYTHON) -m ruff format .

unit: setup ## unit tests on .venv's Python, in parallel
	@scripts/setup browser
	@scripts/setup compiler
	@scripts/unit

# Without property tests: they take four times as long while branches are counted, and what
# they reach differs from run to run.
coverage: setup ## branch coverage of the package by the unit tests of fixed inputs
	@scripts/setup browser
	@scripts/setup compiler
	@scripts/unit --cov --cov-report=term -m 'not hypothesis'
	@$(PYTHON) -m coverage report --format=total --omit='*/cli/*' | sed 's/^/branch coverage of the core (all but cli), property tests left out: /; s/$$/%/'

# Without property tests: what they find is no matter of the version.
pythons: setup ## unit tests of fixed inputs on every other Python from 3.9 to 3.13 that is here
	@scripts/setup browser
	@scripts/setup compiler
	@scripts/pythons -m 'not hypothesis'

live: setup ## the quicker live tests against this kernel (root; says what it skips and why)
	@scripts/setup compiler
	@$(LIVE) -m 'not slow'

live-slow: setup ## the other live tests
	@scripts/setup compiler
	@$(LIVE) -m slow

vm: setup ## tests on stock kernels 6.1 and 6.12 under QEMU (root, for the first run)
	@scripts/setup vm
	@scripts/vm

vmlinux: setup ## names and lines compared with the debug packages of those kernels
	@scripts/setup vm
	@$(PYTHON) -m tests.vm.vmlinux

bench: setup ## benchmarks beside their peers
	@$(PYTHON) -m bench

wheel: setup ## dist/*.whl
	@$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .
	@ls dist/*.whl

install-perf-scripts: ## perf script record ksym, perf script report ksym
	@contrib/perf-script/install

uninstall-perf-scripts: ## take them away again
	@contrib/perf-script/install --uninstall

clean: ## all that was made here
	rm -rf .venv build dist .coverage .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
