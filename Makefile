# Every command a person types here; .ci/run calls these and nothing else.
# A target with `##` shows in `make help`.

PYTHON ?= python3
BIN := .venv/bin
STAMPS := build/stamps
IN_MACHINE := $(BIN)/python tools/in_machine.py

SHELL := /bin/sh
MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
# What is compiled once gains nothing from pieces that the next time could use.
ifdef CI
export CARGO_INCREMENTAL := 0
endif
.PHONY: help check-host setup test-setup build binaries check static format lint types layers budgets test test-rust \
        compile-rust-tests test-fuzz test-client test-native test-machine test-intel soak shell machine-up machine-down in-machine \
        bench demo demo-branch docs typescript wheel gen lock clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' Makefile

check-host:
	@tools/check_host

setup: $(STAMPS)/debian $(STAMPS)/venv ## Install what building and running need: packages, virtual environment

test-setup: setup $(STAMPS)/test-packages $(STAMPS)/test-venv $(STAMPS)/reference $(STAMPS)/typescript ## Install what only tests and checks need besides

$(STAMPS)/debian: tools/debian-packages.txt tools/install_debian_packages | check-host
	@tools/install_debian_packages
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/test-packages: tests/debian-packages.txt tools/install_debian_packages
	@tools/install_debian_packages $<
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/venv: requirements.lock pyproject.toml | $(STAMPS)/debian
	@echo "setup: making the virtual environment"
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements.lock
	@$(BIN)/python -m pip uninstall -q -y forkd 2>/dev/null # what a checkout was called until it was `forkd-vm`
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/test-venv: requirements.lock tests/requirements.lock | $(STAMPS)/venv
	@$(BIN)/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements.lock -r tests/requirements.lock
	@mkdir -p $(STAMPS) && touch $@

# The reference's own clients, for tests: apart from the virtual environment, because one has our name.
$(STAMPS)/reference: tests/reference/requirements.txt | $(STAMPS)/venv
	@rm -rf build/reference-client
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes \
		--target build/reference-client -r $<
	@mkdir -p $(STAMPS) && touch $@

# Inspect AI, whose self-check a soak runs in a sandbox: apart, because it needs eighty packages.
$(STAMPS)/inspect: tests/inspect/requirements.txt | $(STAMPS)/venv
	@rm -rf build/inspect-client
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes \
		--target build/inspect-client -r $<
	@mkdir -p $(STAMPS) && touch $@

# What the TypeScript SDK is checked and built with; Node.js itself is in the virtual environment.
$(STAMPS)/typescript: sdk/typescript/package-lock.json | $(STAMPS)/test-venv
	@$(BIN)/python -m tools.node install
	@mkdir -p $(STAMPS) && touch $@

# A package whose tests a soak runs in forks, as source.
$(STAMPS)/package: tests/package/requirements.txt | $(STAMPS)/venv
	@rm -rf build/package
	@$(BIN)/python -m pip download -q --disable-pip-version-check --no-deps --no-binary :all: \
		--require-hashes -d build/package -r $<
	@mkdir -p $(STAMPS) && touch $@

# Bun, Deno and testers of MCP servers, for `make soak`: the packages have the programs themselves,
# and need no script to run.
$(STAMPS)/runtimes: tests/runtimes/package-lock.json | $(STAMPS)/test-venv
	@mkdir -p build/runtimes && cp tests/runtimes/package*.json tests/runtimes/.npmrc build/runtimes
	@$(BIN)/python -m tools.node install build/runtimes
	@mkdir -p $(STAMPS) && touch $@

build: $(STAMPS)/debian ## Build the VMM, the guest agent and the tests' witness into build/bin
	@tools/check_rust
	@$(MAKE) -j2 $(STAMPS)/venv binaries
	@echo "build: done; next: . .venv/bin/activate && forkd doctor && forkd up"

binaries:
	@env -u MAKEFLAGS -u MFLAGS tools/build_binaries # cargo cannot reach the job server of `make -j`

check: test-setup static ## Format, lint, types, layers, budgets, unit and contract tests
	@$(BIN)/pytest -q -p no:cacheprovider tests/unit tests/contract

static: format lint types layers budgets

format:
	@$(BIN)/ruff format --check --quiet . || { echo "run: $(BIN)/ruff format ."; exit 1; }
	@cargo fmt --all --check

lint:
	@$(BIN)/ruff check --quiet .
	@$(BIN)/python -m tools.node check biome check --error-on-warnings
	@cargo clippy --quiet --workspace --all-targets --locked -- -D warnings

types:
	@$(BIN)/mypy --no-error-summary src tools tests benchmarks examples
	@$(BIN)/python -m tools.node check tsc

layers:
	@$(BIN)/lint-imports --no-cache >build/layers.log 2>&1 || { cat build/layers.log; exit 1; }

budgets:
	@$(BIN)/python tools/check_repo.py

# Programs are compiled while packages are installed.
test: $(STAMPS)/debian ## Run everything, and say what ran where
	@tools/check_rust
	@$(MAKE) -j3 binaries test-setup
	@$(BIN)/python -m tools.test_all

test-rust: setup ## Rust tests that need no KVM
	@cargo test --quiet --workspace --locked

compile-rust-tests: setup
	@cargo test --quiet --workspace --locked --no-run

test-fuzz: setup ## A short, seeded run of every fuzz harness; fuzz/run.sh runs longer
	@cargo test --quiet --release --locked --manifest-path fuzz/Cargo.toml

test-client: setup $(STAMPS)/test-venv ## The client alone, against a daemon of another host, on each Python that it is for
	@$(BIN)/pytest -v --soak --strict-needs $(if $(K),-k '$(K)') tests/functional/test_pythons.py

test-native: build test-setup ## Tests that this host can run; K=word selects
	@$(BIN)/pytest $(if $(K),-k '$(K)') $(ARGS) tests

# What only a machine with a KVM and a kernel of its own can run.
OF_MACHINES := --needing kvm,cgroup2,io,pre-fault,helper tests/functional tests/security

# KERNEL=6.12 boots the machine with that kernel, GUEST_KERNEL=6.12 its guests; QEMU=10 runs it in Debian 13's QEMU.
# CPUS=8 gives it so many processors, POSSIBLE_CPUS=128 makes room for more.  Such a machine is fresh.
test-machine: build test-setup ## Tests of machines, in the helper machine; K=word selects, ARGS=… others, KERNEL=6.12 boots it
	@$(if $(QEMU),qemu=$$($(BIN)/python -m tools.qemu $(QEMU)) && export FORKD_MACHINE_QEMU="$$qemu" &&) \
		$(if $(KERNEL),FORKD_MACHINE_KERNEL=$(KERNEL)) $(if $(GUEST_KERNEL),FORKD_KERNEL=$(GUEST_KERNEL)) \
		$(BIN)/python -m tests.machine.run $(if $(KERNEL)$(GUEST_KERNEL)$(QEMU)$(CPUS)$(POSSIBLE_CPUS),--fresh) \
		$(if $(CPUS),--cpus $(CPUS)) $(if $(POSSIBLE_CPUS),--possible-cpus $(POSSIBLE_CPUS)) $(if $(K),-k '$(K)') $(or $(ARGS),$(OF_MACHINES))

# What depends on the kind of processor: its registers, timers and clocks, and the calls that are allowed.
ON_INTEL := $(addprefix tests/functional/test_,vmm.py branch_vmm.py fork_processor.py branch_reset.py \
            fork_correctness.py reset_time.py large_machines.py) tests/security/test_jail.py tests/security/test_seccomp.py

test-intel: build test-setup ## Tests on a processor of Intel's, which Bochs emulates; K=word selects, ARGS=… others
	@$(BIN)/python -m tests.intel.run $(if $(K),-k '$(K)') $(or $(ARGS),$(ON_INTEL))

# Java, for `make soak`: a warm runtime that a recipe brings.
$(STAMPS)/soak-packages: tests/runtimes/debian-packages.txt tools/install_debian_packages
	@tools/install_debian_packages $<
	@mkdir -p $(STAMPS) && touch $@

REPEAT := $(if $(FEW),--long,--soak)

soak: build test-setup deb $(STAMPS)/release $(STAMPS)/inspect $(STAMPS)/package $(STAMPS)/runtimes $(STAMPS)/soak-packages ## What is too long for `test`, and in full what that repeats a few times; K=word selects, FEW=1 repeats a few times
	@$(BIN)/python -m tools.deb --python 3.13
	@$(BIN)/pytest $(REPEAT) -m soak -v --unmet-to build/soak.txt $(if $(K),-k '$(K)') tests/functional tests/security tests/contract
	@[ ! -s build/soak.txt ] || $(BIN)/python -m tests.machine.run --fresh $(REPEAT) -m soak -v --unmet-from build/soak.txt tests/functional tests/security
	@[ -n '$(K)$(FEW)' ] || $(BIN)/python -m tests.intel.run $(ON_INTEL)
	@[ -n '$(K)$(FEW)' ] || $(BIN)/python -m tests.intel.moves
	@[ -n '$(K)$(FEW)' ] || $(MAKE) reproducible

# What lists the parts of a release.
$(STAMPS)/release: tools/release-requirements.txt | $(STAMPS)/venv
	@rm -rf build/release-tools
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes \
		--target build/release-tools -r $<
	@mkdir -p $(STAMPS) && touch $@

.PHONY: release
release: build $(STAMPS)/release ## Make a release in build/release: packages, programs, lists of parts, notes, sums
	@$(BIN)/python -m tools.release $(ARGS)

# What checks dependencies.
$(STAMPS)/audit: tools/audit-requirements.txt | $(STAMPS)/venv
	@rm -rf build/audit-tools
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes \
		--target build/audit-tools -r $<
	@mkdir -p $(STAMPS) && touch $@

.PHONY: audit
audit: $(STAMPS)/audit ## Check licences and known vulnerabilities of what we depend on; ARGS=--offline without the latter
	@$(BIN)/python -m tools.audit $(ARGS)

# Not in `make test`: two builds from nothing take minutes.
.PHONY: reproducible
reproducible: setup ## Build the programs twice in different places, and compare their bytes
	@$(BIN)/python -m tools.reproducible

shell: build ## A shell in the helper machine
	@$(IN_MACHINE) shell

machine-up: setup ## Start the development helper machine
	@$(IN_MACHINE) up

machine-down: ## Stop it
	@$(IN_MACHINE) down

in-machine: setup ## Run CMD='…' in it
	@$(IN_MACHINE) run -- sh -c '$(CMD)'

# pytest-xdist, which the benchmarks compare forks with.
$(STAMPS)/bench: benchmarks/requirements.txt | $(STAMPS)/venv
	@rm -rf build/bench-tools
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes \
		--target build/bench-tools -r $<
	@mkdir -p $(STAMPS) && touch $@

bench: build test-setup $(STAMPS)/bench ## Measure forks, evals and memory beside the bare floor; writes build/bench.json
	@$(BIN)/python -m benchmarks $(ARGS)

demo: build ## Fork a hundred Linux machines from a warm one
	@$(BIN)/python -m tools.demo $(ARGS)

demo-branch: build ## Branch a machine that is thinking into five, and keep the best
	@$(BIN)/python -m tools.demo_branch $(ARGS)

wheel: build ## Build both wheels and the source distribution into build/dist
	@rm -rf build/dist
	@FORKD_WHEEL=platform $(BIN)/python -m hatchling build -t wheel -t sdist -d build/dist
	@FORKD_WHEEL=pure $(BIN)/python -m hatchling build -t wheel -d build/dist

$(STAMPS)/site: tools/site-requirements.txt | $(STAMPS)/venv
	@rm -rf build/site-tools
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes \
		--target build/site-tools -r $<
	@mkdir -p $(STAMPS) && touch $@

.PHONY: deb
deb: wheel ## Build the Debian package into build/deb; ARGS='--python 3.13' for Debian 13
	@$(BIN)/python -m tools.deb $(ARGS)

typescript: $(STAMPS)/typescript ## Build the npm package of the TypeScript SDK into build/npm
	@$(BIN)/python -m tools.typescript_package

docs: $(STAMPS)/site ## Build the documentation as a web site into build/site
	@PYTHONPATH=build/site-tools NO_MKDOCS_2_WARNING=1 $(BIN)/python -m tools.build_site

gen: test-setup ## Write every generated file
	@$(BIN)/python -m tools.gen

# What reads the digests of packages.
$(STAMPS)/lock: tools/lock-requirements.txt | $(STAMPS)/venv
	@rm -rf build/lock-tools
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps --require-hashes \
		--target build/lock-tools -r $<
	@mkdir -p $(STAMPS) && touch $@

lock: $(STAMPS)/lock ## Pin the versions now in the virtual environment, and the digests of their files
	@$(BIN)/pip freeze --exclude-editable >build/freeze.txt
	@UV_CUSTOM_COMPILE_COMMAND='make lock' build/lock-tools/bin/uv pip compile --quiet --no-deps --generate-hashes \
		--no-annotate --no-header --system-certs --python $(BIN)/python --output-file build/all.lock build/freeze.txt
	@$(BIN)/python -m tools.split_lock build/all.lock

clean: ## Stop the development machine; remove what was built
	@[ ! -x $(BIN)/python ] || $(IN_MACHINE) down 2>/dev/null || true
	rm -rf build target
