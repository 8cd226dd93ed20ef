# What a newcomer types: make demo, make test. Everything else is for developers (make help).
SHELL := /bin/bash
BUILD ?= build
JOBS  ?= $(shell nproc)
GENERATOR := $(if $(shell command -v ninja),-G Ninja)
CMAKE_FLAGS ?=
FUZZ_SECONDS ?= 60

.PHONY: help setup configure build demo test fuzz bench kill sanitize tsan neon format clean

help:
	@echo "make demo      set up, build, run examples/writer_editor.yaml --compare"
	@echo "make test      set up, build, run all tests, then the fuzz targets"
	@echo "make setup     system packages, ggml and libllama, the default model (once, into a cache folder)"
	@echo "make build     the program: $(BUILD)/qkvshare"
	@echo "make bench     what a handoff costs, against libllama (bench handoff)"
	@echo "make fuzz      every parser of bytes from elsewhere, $(FUZZ_SECONDS) s each, with libFuzzer (needs clang)"
	@echo "make kill      2,000 random kills of producer, consumer and broker (tests/kill_test.cc)"
	@echo "make sanitize  unit tests under AddressSanitizer and UndefinedBehaviorSanitizer"
	@echo "make tsan      thread tests under ThreadSanitizer"
	@echo "make neon      the kernels' tests for aarch64 under qemu-user"
	@echo "make format    clang-format over the tree"

setup:
	@bash scripts/setup.sh

configure: setup
	@cmake -S . -B $(BUILD) $(GENERATOR) -Wno-dev $(CMAKE_FLAGS) > $(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }
	@rm -f $(BUILD).log

build: configure
	@cmake --build $(BUILD) -j $(JOBS) --target qkvshare

demo: build
	@$(BUILD)/qkvshare run examples/writer_editor.yaml --compare

test: configure
	@cmake --build $(BUILD) -j $(JOBS)
	@ctest --test-dir $(BUILD) --output-on-failure --no-tests=error
	@$(MAKE) --no-print-directory fuzz

fuzz:
	@bash scripts/setup.sh --fuzz
	@bash scripts/fuzz.sh $(BUILD)-fuzz $(FUZZ_SECONDS)

bench: build
	@$(BUILD)/qkvshare bench handoff --context 1024,4096,8192

kill: configure
	@cmake --build $(BUILD) -j $(JOBS) --target kill_test
	@QKV_KILL_RUNS=2000 $(BUILD)/tests/kill_test --gtest_filter=Kill.AtRandomPoints

sanitize: setup
	@cmake -S . -B $(BUILD)-asan $(GENERATOR) -Wno-dev -DQKV_SANITIZE=address,undefined $(CMAKE_FLAGS) > /dev/null
	@cmake --build $(BUILD)-asan -j $(JOBS) --target codec_test segment_test card_test attention_test broker_test flow_test
	@ctest --test-dir $(BUILD)-asan --output-on-failure --no-tests=error -R '^(codec|segment|card|attention|broker|flow)\.'

tsan: setup
	@cmake -S . -B $(BUILD)-tsan $(GENERATOR) -Wno-dev -DQKV_SANITIZE=thread $(CMAKE_FLAGS) > /dev/null
	@cmake --build $(BUILD)-tsan -j $(JOBS) --target segment_test attention_test broker_test load_test
	@TSAN_OPTIONS=die_after_fork=0 QKV_LOAD_SECONDS=20 ctest --test-dir $(BUILD)-tsan --output-on-failure --no-tests=error \
	  -R '^(segment|attention|broker)\.|^tests\.Load\.EightThreads'

neon:
	@bash scripts/neon.sh $(BUILD)-neon

format:
	@git ls-files '*.h' '*.cc' | xargs clang-format -i

clean:
	@rm -rf build build-*
