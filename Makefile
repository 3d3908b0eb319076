# Two commands on a fresh machine with Rust, Python and a C compiler: `make demo` and `make test`.
# PostgreSQL 17 and 18 are fetched under .pg/; 18 may be that of PG_CONFIG=/path/to/pg_config instead.

PYTHON ?= python3
PYTEST_ARGS ?=
UNPRIVILEGED = $(PYTHON) -m tests.lab.as_user
E2E = $(UNPRIVILEGED) -- python3 -m pytest -p no:cacheprovider
# Tests side by side, one more than there are cores in CI: many of them wait. None with PYTEST_WORKERS=0.
PYTEST_WORKERS ?= 3
PARALLEL = -n $(PYTEST_WORKERS) --dist loadgroup --no-loadscope-reorder --durations=30 --durations-min=10
# Random choices are the same every time, but in the soaks.
SOAK = WALRIDER_SEED=$${WALRIDER_SEED:-random}
# Of every area something that takes seconds.
QUICK = tests/test_lab.py tests/test_documents.py "tests/test_replay.py::test_replay_equals_stock[plain]" \
        tests/test_refusals.py::test_compare_sees_a_difference tests/test_restore_command.py tests/test_promote.py::test_as_stock_promotes \
        tests/test_standby_smoke.py tests/test_standby.py::test_every_level tests/test_standby_directory.py::test_a_base_backup_is_made_a_standby \
        "tests/test_early.py::test_the_same_bytes[default]" tests/test_early.py::test_only_what_is_flushed \
        tests/test_early.py::test_without_the_extension "tests/test_early_sender.py::test_bytes[loaded-default]"
export PYTHONDONTWRITEBYTECODE = 1

.PHONY: demo bench bench-recover bench-smoke bench-follow bench-sync bench-early bench-logical \
        bench-logical-long bench-logical-apply bench-readable bench-readable-live bench-top bench-relay bench-volume \
        test test-quick test-rust test-datadir test-e2e test-17 test-suites \
        test-subscription test-tools test-majors fetch-majors \
        build extension fetch fetch-17 fetch-18 fetch-suites fetch-suites-17 fetch-tools lint fuzz-smoke fuzz-long soak-unit soak-crash soak-spill soak-restore soak-jitter soak-stress \
        soak-standby soak-early soak-relay soak-logical soak-logical-boundaries soak-power soak-plugin soak-readable soak-sim planted \
        planted-readable suites-readable readable-asan packages clean

demo: build fetch-18
	$(UNPRIVILEGED) --writable demo-report -- python3 -m bench.demo --report demo-report $(DEMO_ARGS)

# Every load and the latency of following, or the loads named: LOADS="pgbench hot"; about 15 minutes, and as long to make the fixtures. They stay in BENCH_FIXTURES, made when missing.
BENCH_FIXTURES ?= /var/tmp/walrider-bench
BENCH_ROUNDS ?= 5
BENCH = $(PYTHON) -m bench.cgroup -- $(UNPRIVILEGED)
bench: build fetch-18
	$(BENCH) --writable bench/runs -- python3 -m bench.replay --fixtures $(BENCH_FIXTURES) --rounds $(BENCH_ROUNDS) \
	    $(if $(LOADS),--loads $(LOADS)) --save bench/runs $(BENCH_ARGS)
	$(if $(LOADS),,$(MAKE) bench-follow FOLLOW_ARGS="--save bench/runs/$$(date +%F)-follow.json")

# From the command to the first write, PostgreSQL alone and with Walrider: LATENCY="0,0.05" is what restore_command takes longer for a file;
# RECOVER_ARGS="--load regression" has the WAL of PostgreSQL's regression tests instead of pgbench's.
bench-recover: build fetch-18 $(if $(findstring regression,$(RECOVER_ARGS)),fetch-suites)
	$(UNPRIVILEGED) --writable bench/runs -- python3 -m bench.recover --fixtures $(BENCH_FIXTURES) --rounds $(BENCH_ROUNDS) \
	    $(if $(LATENCY),--latency $(LATENCY)) --save bench/runs $(RECOVER_ARGS)

# All of it, small and once: the figures mean nothing, the pages are compared all the same.
bench-smoke: build fetch-18
	$(BENCH) -- python3 -m bench.replay --smoke $(if $(LOADS),--loads $(LOADS)) $(BENCH_ARGS)

# How long after its arrival a commit is replayed.
bench-follow: build fetch-18
	$(UNPRIVILEGED) --writable bench/runs -- python3 -m bench.follow $(FOLLOW_ARGS)

# What a commit costs at each level of synchronous_commit; about an hour, less with SYNC_ARGS="--rounds 1".
bench-sync: build fetch-18
	$(UNPRIVILEGED) --writable bench/runs -- python3 -m bench.sync --save bench/runs $(SYNC_ARGS)

# What WAL sent before the primary's flush is worth; about 80 minutes, 7 of them with EARLY_ARGS="--conditions 10/3".
bench-early: build fetch-18 extension
	$(UNPRIVILEGED) --writable bench/runs -- python3 -m bench.early --save bench/runs $(EARLY_ARGS)

# What the output plugin spares subscribers, and what a commit waits that they are told of; two minutes.
bench-logical: fetch-18 extension
	$(UNPRIVILEGED) --writable bench/runs -- python3 -m bench.logical --save bench/runs $(LOGICAL_ARGS)

# A transaction of 10 million rows, not published, under a short wal_receiver_timeout; ten minutes, and 8 GB below TMPDIR.
bench-logical-long: fetch-18 extension
	$(UNPRIVILEGED) --writable bench/runs -- python3 -m bench.logical_long --save bench/runs $(LOGICAL_ARGS)

# How fast a backlog is applied, beside PostgreSQL's subscriber; about 15 minutes, less with APPLY_ARGS="--loads tpcb --rounds 1".
bench-logical-apply: build fetch-18
	$(UNPRIVILEGED) --writable bench/runs -- python3 -m bench.logical_apply --save bench/runs $(APPLY_ARGS)

# How fast a hot standby catches up with early redo, beside PostgreSQL alone; READABLE_ARGS="--loads pgbench --size 0.25".
bench-readable: build fetch-18 extension $(if $(findstring regression,$(READABLE_ARGS)),fetch-suites)
	$(if $(findstring --delay,$(READABLE_ARGS)),$(PYTHON) -m bench.device --image $(VOLUME_IMAGE) --) \
	    $(UNPRIVILEGED) --writable bench/runs -- python3 -m bench.readable --fixtures $(BENCH_FIXTURES) --save bench/runs $(READABLE_ARGS)

# How far behind such a standby is while WAL comes in faster than PostgreSQL replays it, and what commits wait for it;
# three minutes with LIVE_ARGS="--loads pgbench --size 0.25 --rounds 5 --seconds 6", when the fixture is there.
bench-readable-live: build fetch-18 extension
	$(UNPRIVILEGED) --writable bench/runs -- python3 -m bench.readable_live --fixtures $(BENCH_FIXTURES) --save bench/runs $(LIVE_ARGS)

# What it costs to send WAL on, beside a stock cascading standby; about 15 minutes, less with RELAY_ARGS="--parts backlog latency".
bench-relay: build fetch-18
	$(UNPRIVILEGED) --writable bench/runs -- python3 -m bench.relay --save bench/runs $(RELAY_ARGS)

# Recovery on volumes that limit requests, in little memory; hours, and 30 GB below BENCH_FIXTURES. Half an hour with
# VOLUME_ARGS="--wal 0.1 --images off"; 8 GB of memory, or VOLUME_IMAGE=/a/directory/on/a/fast/disk.
VOLUME_IMAGE ?= /dev/shm
bench-volume: build fetch-18
	$(PYTHON) -m bench.cgroup -- $(PYTHON) -m bench.device --image $(VOLUME_IMAGE) -- $(UNPRIVILEGED) --writable bench/runs -- \
	    python3 -m bench.volume --fixtures $(BENCH_FIXTURES) --save bench/runs $(VOLUME_ARGS)

# What walrider top costs the servers that it asks; four minutes.
bench-top: build fetch-18
	$(UNPRIVILEGED) --writable bench/runs -- python3 -m bench.top --save bench/runs $(TOP_ARGS)

test: test-rust fuzz-smoke test-datadir test-e2e

# For the developer at work, three minutes where all is built: the unit part, and a sample of the rest with the debug build.
test-quick: fetch extension
	cargo fmt --all --check
	cargo test --locked --workspace --quiet
	cargo build --locked --quiet
	WALRIDER=target/debug/walrider WALRIDER_TEST_MAJOR=18 $(E2E) $(PARALLEL) $(QUICK) $(PYTEST_ARGS)

test-rust:
	cargo test --locked --workspace --quiet
	cargo test --locked --workspace --quiet --bench '*'

test-datadir: fetch
	WALRIDER_TEST_MAJOR=18 $(PYTHON) -m tests.real_server
	WALRIDER_TEST_MAJOR=17 $(PYTHON) -m tests.real_server

# On PostgreSQL 18, and beside it on 17 what is marked `every_major`; on one of them alone with WALRIDER_TEST_MAJOR.
test-e2e: build fetch fetch-suites fetch-tools extension
	$(E2E) $(PARALLEL) tests $(PYTEST_ARGS)

# All of test-datadir and test-e2e on PostgreSQL 17.
test-17: build fetch fetch-suites-17 fetch-tools extension
	WALRIDER_TEST_MAJOR=17 $(PYTHON) -m tests.real_server
	WALRIDER_TEST_MAJOR=17 $(E2E) $(PARALLEL) tests $(PYTEST_ARGS)

build:
	cargo build --locked --release

fetch: fetch-17 fetch-18

fetch-17 fetch-18: fetch-%:
	$(PYTHON) -m tests.lab.install $*

# The extension, with the engine's redo, installed into the servers under .pg/.
extension: fetch
	cargo build --locked --release -p walrider-redo-c
	$(PYTHON) -m tests.lab.extension

# What can be packed on this machine, into target/packages/, or the kinds named: PACKAGES="deb static-gnu"; docs/install.md.
packages: build
	$(PYTHON) packaging/build.py $(PACKAGES)

lint:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS=-Dwarnings cargo doc --workspace --no-deps --quiet

# Any bytes are an error, never a crash: a short look in `make test`, a long one on request.
fuzz-smoke:
	@if command -v c++ >/dev/null; then $(PYTHON) -m tests.fuzz --runs 40000; \
	else echo 'fuzz: no C++ compiler for libFuzzer; the random inputs of cargo test stand alone'; fi

fuzz-long:
	$(SOAK) $(PYTHON) -m tests.fuzz --seconds 3600

# PostgreSQL's own suites, in every variant or in those named: SUITES="default contrib"; docs/testing.md.
# SUITES_ARGS="--save bench/runs/FILE" keeps the result.
test-suites: build fetch fetch-suites
	$(UNPRIVILEGED) --writable bench/runs -- python3 -m tests.suites $(SUITES) $(SUITES_ARGS)

# PostgreSQL's tests of subscriptions, with our output plugin in the place of its own; Perl is needed. Files or all: SUBSCRIPTION="021 022".
test-subscription: fetch-18 extension
	$(PYTHON) -m tests.suites.subscription --fetch
	$(UNPRIVILEGED) --writable bench/runs -- python3 -m tests.suites.subscription $(SUBSCRIPTION) $(SUBSCRIPTION_ARGS)

fetch-suites: fetch
	$(PYTHON) -m tests.suites.source

fetch-suites-17: fetch
	WALRIDER_TEST_MAJOR=17 $(PYTHON) -m tests.suites.source

# The unit part so often, with new seeds, beside a load that keeps every core busy; it ends with the first failure.
SOAK_UNIT_ROUNDS ?= 20
soak-unit:
	$(PYTHON) -m tests.soak_unit $(SOAK_UNIT_ROUNDS)

# pgBackRest, Barman, Patroni with etcd, and pgaudit; what this machine cannot have is said, and its tests are left out.
fetch-tools: fetch
	$(PYTHON) -m tests.lab.server.tools

# PostgreSQL 13 to 16, which `walrider top` and `doctor` look at, and their tests on each.
OLDER ?= 13 14 15 16
fetch-majors: fetch
	$(PYTHON) -m tests.lab.server.older $(OLDER)

test-majors: build fetch-majors
	for major in $(OLDER); do WALRIDER_TEST_MAJOR=$$major $(E2E) tests/test_top.py tests/test_doctor.py -rs $(PYTEST_ARGS) || exit 1; done

# Their tests, the long ones too, with every compression.
test-tools: build fetch fetch-tools
	WALRIDER_TOOLS_LONG=1 WALRIDER_TOOLS_COMPRESSIONS=zst,lz4,gz $(E2E) tests/test_pgbackrest.py tests/test_barman.py tests/test_patroni.py -s $(PYTEST_ARGS)

soak-crash: build fetch
	$(SOAK) WALRIDER_CRASH_ROUNDS=$${WALRIDER_CRASH_ROUNDS:-200} $(E2E) tests/test_crash.py -s $(PYTEST_ARGS)

# Kills of replays whose batches are larger than memory: half an hour.
soak-spill: build fetch
	$(SOAK) WALRIDER_SPILL_ROUNDS=$${WALRIDER_SPILL_ROUNDS:-200} $(E2E) tests/test_spill.py -k killed -s $(PYTEST_ARGS)

# Kills of restores in their single pass, of backups in each format: half an hour.
soak-restore: build fetch
	$(SOAK) WALRIDER_RESTORE_ROUNDS=$${WALRIDER_RESTORE_ROUNDS:-200} $(E2E) tests/test_restore_interrupted.py -s $(PYTEST_ARGS)

# Restores and replays whose threads are held up at random, 300 times.
soak-jitter: build fetch
	$(SOAK) WALRIDER_JITTER_ROUNDS=$${WALRIDER_JITTER_ROUNDS:-300} $(E2E) tests/test_jitter.py -s $(PYTEST_ARGS)

# Random work on every kind of index, for an hour unless WALRIDER_STRESS_SECONDS says otherwise.
soak-stress: build fetch
	$(SOAK) WALRIDER_STRESS_SECONDS=$${WALRIDER_STRESS_SECONDS:-3600} $(E2E) tests/test_stress.py -s $(PYTEST_ARGS)

# A thousand times: the primary dies under load, its standby takes over, the bank is audited.
soak-standby: build fetch
	$(SOAK) WALRIDER_STANDBY_ROUNDS=$${WALRIDER_STANDBY_ROUNDS:-1000} $(E2E) tests/test_standby_bank.py -s $(PYTEST_ARGS)

# Two hundred times: a relay between primary and standbys, everything fails, a standby takes over; and as many kills of a relay with slots.
soak-relay: build fetch
	$(SOAK) WALRIDER_RELAY_ROUNDS=$${WALRIDER_RELAY_ROUNDS:-200} $(E2E) tests/test_relay_bank.py -s $(PYTEST_ARGS)
	$(SOAK) WALRIDER_RELAY_KILLS=$${WALRIDER_RELAY_KILLS:-200} $(E2E) tests/test_relay_faults.py -k slots_never -s $(PYTEST_ARGS)

# A thousand times: the primary dies with WAL that the standby had from it early; promotion, and following it again.
soak-early: build fetch extension
	$(SOAK) WALRIDER_EARLY_ROUNDS=$${WALRIDER_EARLY_ROUNDS:-1000} $(E2E) tests/test_early_crash.py -s $(PYTEST_ARGS)

# Two hundred times: publisher, target or Walrider die while it is applied; both sides compared row by row.
soak-logical: build fetch
	$(SOAK) WALRIDER_LOGICAL_ROUNDS=$${WALRIDER_LOGICAL_ROUNDS:-200} $(E2E) tests/test_logical_apply.py -k crashes -s $(PYTEST_ARGS)

# The connections of `walrider logical apply` are lost right behind each message of the publisher, and each answer of the target.
soak-logical-boundaries: build fetch
	WALRIDER_BOUNDARY_STEP=$${WALRIDER_BOUNDARY_STEP:-1} $(E2E) tests/test_logical_apply_operation.py -k boundaries -s $(PYTEST_ARGS)

# The power goes two thousand times: at any moment of a replay, a promotion, a standby; both we and PostgreSQL go on.
soak-power: build fetch extension
	$(SOAK) WALRIDER_POWER_IMAGES=$${WALRIDER_POWER_IMAGES:-2000} $(E2E) tests/test_powercut.py tests/test_powercut_restore.py -s $(PYTEST_ARGS)

# A subscriber's connection is lost right behind each message of the stream, of transactions of every kind.
soak-plugin: build fetch extension
	WALRIDER_BOUNDARY_STEP=$${WALRIDER_BOUNDARY_STEP:-1} $(E2E) tests/test_logical_plugin.py -k boundaries -s $(PYTEST_ARGS)

# Early redo: readers for half an hour each with hot_standby_feedback on and off, 500 kills.
soak-readable: build fetch extension
	$(SOAK) WALRIDER_TEST_MAJOR=18 WALRIDER_READABLE_SECONDS=$${WALRIDER_READABLE_SECONDS:-1800} \
	    WALRIDER_READABLE_ROUNDS=$${WALRIDER_READABLE_ROUNDS:-500} $(E2E) tests/test_readable.py -s $(PYTEST_ARGS)

# PostgreSQL's suites as load for early redo: SUITES="plain" or other variants of tests.suites.
suites-readable: build fetch fetch-suites extension
	WALRIDER_TEST_MAJOR=18 $(UNPRIVILEGED) -- python3 -m tests.suites.early $(SUITES)

# The rules of early redo, each broken on purpose.
planted-readable: build fetch extension
	WALRIDER_TEST_MAJOR=18 $(E2E) tests/broken_rules.py -s $(PYTEST_ARGS)

# Early redo with AddressSanitizer and UndefinedBehaviorSanitizer in the library; gcc and its libasan are needed.
readable-asan: build fetch extension
	WALRIDER_TEST_MAJOR=18 $(E2E) tests/sanitized.py $(PYTEST_ARGS)

# The simulator with new seeds, for ten minutes unless WALRIDER_FUZZ_SECONDS says otherwise; docs/testing.md.
soak-sim:
	$(SOAK) WALRIDER_FUZZ_SECONDS=$${WALRIDER_FUZZ_SECONDS:-600} cargo test --locked --profile soak -p walrider-sim -- --nocapture

# Whether it finds bugs that are planted in code that ships.
planted:
	$(PYTHON) -m tests.planted $(PLANTED)

clean:
	cargo clean
	rm -rf .pg demo-report
