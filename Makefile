# The front door. Everything installs what it misses, says what it does, and may run again.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
export PATH := $(PATH):$(HOME)/.cargo/bin

.PHONY: help run test soak hw-test hw-synth bench fmt lint fuzz guests setup build install uninstall install-fastpath \
	uninstall-fastpath clean-guests clean

help: ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-19s %s\n", $$1, $$2 }'

run: guests build ## a stock Linux guest with a disk served by Millrace; ENGINE=fvm-sim: by the simulated hardware
	@scripts/demo $(ENGINE)

test: guests ## every test, guests included
	@scripts/test

soak: setup ## random commands of operators, every block checked, for an hour or so; RUNS=20 (docs/testing.md)
	@cargo build --profile checked --locked -p millrace
	@MILLRACE_TEST_RUNS=$(or $(RUNS),20) cargo test --profile checked --locked -p millrace-tests --test soak -- --nocapture

hw-test: guests ## the hardware's tests: lint, modules, proofs, the simulated engine (docs/hardware.md)
	@scripts/hw-test

hw-synth: setup ## the hardware's size and clock, from Yosys and nextpnr (docs/hardware-figures.md)
	@scripts/hw-synth

bench: guests ## ours beside its peers in one run; QUICK=1, ONLY=SECTIONS, SPDK_DIR=TREE (docs/performance.md)
	@scripts/build --benches
	@scripts/bench

fmt: setup ## format the source
	@cargo fmt --all

lint: setup ## formatting and clippy, as strict as the house style
	@cargo fmt --all -- --check
	@cargo clippy --workspace --all-targets --profile checked --locked -- -D warnings

fuzz: setup ## the guest's fuzzer, without end (docs/fuzzing.md)
	@cargo run --profile checked --locked -p millrace-fuzz

guests: setup ## QEMU, kernels and guest tools under target/, nothing on the host
	@scripts/guest-root
	@scripts/guest-images

setup: ## the packages and the Rust that building needs
	@scripts/setup-host

build: setup
	@scripts/build $(if $(findstring fvm-sim,$(ENGINE)),--sim)

install: ## what make build has built, its pages and its unit, under PREFIX (/usr/local); DESTDIR (docs/operating.md)
	@scripts/install

uninstall: ## take that away again; the configuration, the state and volumes stay
	@scripts/install --remove

install-fastpath: ## build libmillrace, for programs, and put it under PREFIX; DESTDIR (docs/fastpath.md)
	@scripts/install-fastpath $(or $(PREFIX),/usr/local)

uninstall-fastpath: ## take that away again
	@scripts/install-fastpath --remove $(or $(PREFIX),/usr/local)

clean-guests: ## remove the private root, the guests' images and the kernel that was built
	@rm -rf target/guest target/guest-root target/guest-kernel

clean: ## remove everything that was built
	@rm -rf target
