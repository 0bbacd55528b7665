# One command each: `make run` shows Waybill at work, `make test` tests all of it.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

GO      ?= go
VERSION ?=
LDFLAGS := $(if $(VERSION),-ldflags '-X main.version=$(VERSION)')

# -shuffle finds tests that lean on each other; its seed is printed with a failure.
# Packages run side by side, as many as there are cores (go test's own default).
# Without debugging data, which nobody reads there, a test binary is linked in a quarter of the time.
TESTFLAGS   ?= -race -shuffle=on -count=1 -ldflags=-w
TESTTIMEOUT ?= 15m
# The longest begin first: what waits there leaves room for the compilation of the rest.
TESTFIRST   ?= ./internal/e2e ./journal ./cmd/waybill
# Of itself every program with the race detector waits a second before it ends, for others to race with its end; the
# tests start hundreds.
export GORACE ?= atexit_sleep_ms=50
FUZZTIME    ?= 10s
BENCH       ?= .
BENCHFLAGS  ?= -benchmem -count=1

.PHONY: run
run: ## show the demo: real proxy, real upstreams on loopback, every outcome with its evidence
	@echo 'building waybill (a minute or two the first time) …' >&2
	$(GO) run ./cmd/waybill demo

.PHONY: build
build: ## build bin/waybill (VERSION=v1.2.3 sets the version it prints)
	CGO_ENABLED=0 $(GO) build -trimpath $(LDFLAGS) -o bin/waybill ./cmd/waybill

# The binary first: where nothing is cached its compilation takes minutes, which no test's time limit has to cover.
.PHONY: test
test: deps build test-badger ## install what the tests need, run them all with -race, check the contract's coverage and the controls
	@$(GO) run ./internal/testreport -contract -controls -- $(TESTFLAGS) -timeout=$(TESTTIMEOUT) $(TESTFIRST) ./...

# The corrected copy is a module of its own. Built as the binary is, of which it is a part.
.PHONY: test-badger
test-badger:
	@CGO_ENABLED=0 $(GO) -C internal/third_party/badger test -trimpath -count=1 .

.PHONY: test-long
test-long: deps build test-badger ## the same with the long forms: more kills, more requests (WAYBILL_TEST_LONG=1)
	@WAYBILL_TEST_LONG=1 $(GO) run ./internal/testreport -contract -controls -- $(TESTFLAGS) -timeout=60m $(TESTFIRST) ./...

.PHONY: torture
torture: deps ## the storage faults in their long forms: full disk, failing syncs, power cuts, kills at system calls, torn and reordered writes, single failing files, flipped bits (20 minutes; WAYBILL_TEST_SEED repeats)
	WAYBILL_TEST_LONG=1 $(GO) test -count=1 -p=3 -timeout=19m -run='$(TORTURE)' ./journal ./journal/audit ./internal/e2e

# The fault families, and the tests that show that their harnesses can find a loss.
TORTURE := PowerCut|KillAt|KillWhile|KillControl|SyncErrors|SyncFails|BitFlips|TableFlips|AnyBit|Tamper|Torn|Rollback|Retention|ClockJump|TwoProcesses|OneWriter|Filesystem|Backup|Acknowledge|DiskFull|Quarantine|Gaps|AuditLog|FailingLog|OneFileFails|BeforeCut|SegmentFails

.PHONY: controls
controls: ## switch each protection of docs/controls.txt off in a test build: its tests must go red
	@$(GO) run ./internal/testreport -- -count=1 -timeout=15m -tags=waybill_controls -run='^TestControls$$' ./internal/control

.PHONY: fuzz
fuzz: ## run every fuzz target for FUZZTIME (10s)
	@scripts/fuzz.sh $(FUZZTIME)

.PHONY: bench
bench: ## measure Waybill against bare goproxy and others, as ratios (QUICK=1: 3 minutes; settings: scripts/bench.sh)
	@scripts/bench.sh

.PHONY: microbench
microbench: ## run the Go benchmarks that match BENCH
	$(GO) test -run='^$$' -bench='$(BENCH)' $(BENCHFLAGS) ./...

.PHONY: lint
lint: ## golangci-lint and govulncheck, at the versions of tools/go.mod
	$(GO) tool -modfile=tools/go.mod golangci-lint run ./...
	@scripts/vulncheck.sh

.PHONY: fmt
fmt: ## format the Go code as the linter wants it
	$(GO) tool -modfile=tools/go.mod golangci-lint fmt ./...

.PHONY: deps
deps: ## install the programs that the tests use, where they are missing
	@scripts/test-deps.sh

PREFIX  ?= /usr/local
DESTDIR ?=

.PHONY: install
install: build ## install binary, manual pages, completions and the systemd unit below PREFIX (/usr/local; DESTDIR for packages)
	install -D -m 0755 bin/waybill $(DESTDIR)$(PREFIX)/bin/waybill
	bin/waybill man bin/man
	install -d $(DESTDIR)$(PREFIX)/share/man/man1 && install -m 0644 bin/man/*.1 $(DESTDIR)$(PREFIX)/share/man/man1/
	install -d $(addprefix $(DESTDIR)$(PREFIX)/share/,bash-completion/completions zsh/site-functions fish/vendor_completions.d)
	bin/waybill completion bash >$(DESTDIR)$(PREFIX)/share/bash-completion/completions/waybill
	bin/waybill completion zsh >$(DESTDIR)$(PREFIX)/share/zsh/site-functions/_waybill
	bin/waybill completion fish >$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/waybill.fish
	install -d $(DESTDIR)$(PREFIX)/lib/systemd/system
	sed 's#/usr/local/bin/waybill#$(PREFIX)/bin/waybill#' deploy/systemd/waybill.service >$(DESTDIR)$(PREFIX)/lib/systemd/system/waybill.service
	install -D -m 0644 deploy/systemd/waybill.sysusers $(DESTDIR)$(PREFIX)/lib/sysusers.d/waybill.conf

.PHONY: image
image: build ## write the container image as an OCI layout to bin/image, without a container engine
	rm -rf bin/image
	$(GO) run ./internal/image/cmd/waybill-image -binary bin/waybill -out bin/image $(if $(VERSION),-version $(VERSION))

.PHONY: release
release: ## make the archives, SBOMs and checksums of a release in bin/release (VERSION=v1.2.3)
	@scripts/release.sh $(VERSION)

.PHONY: dashboard
dashboard: ## draw docs/dashboard.png from a real Prometheus filled by the demo (prometheus, librsvg2-bin)
	@scripts/dashboard.py

.PHONY: clean
clean: ## remove what the targets above leave behind
	rm -rf bin

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z][a-z-]*:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
