# train_gpt - make run | test | check | bench | clean | setup;  build/train_gpt, build/train_gpt_min, build/test_*
#   Says what it found. DEVICE=cpu is what is built today; the CUDA kernels come later.
CXX ?= g++
DEVICE ?= cpu
BUILD ?= build
WARN = -Wall -Wextra
OPT ?= -O3 -march=native
# -fno-math-errno lets sqrt be one instruction; -ffast-math is never used: it changes results
CXXFLAGS = -std=c++20 $(OPT) -fno-math-errno $(WARN) $(OPENMP) -DREPO_ROOT='"$(CURDIR)"' $(EXTRA)
OPENMP ?= -fopenmp
LIBS = -lz -lpthread

ifneq ($(DEVICE),cpu)
$(error DEVICE=$(DEVICE): only DEVICE=cpu is built today)
endif

# oneDNN: matrix products on the CPU; without it plain blocked loops
ONEDNN ?= $(if $(wildcard /usr/include/oneapi/dnnl/dnnl.hpp /usr/local/include/oneapi/dnnl/dnnl.hpp),1,0)
ifeq ($(ONEDNN),1)
CXXFLAGS += -DWITH_ONEDNN
LIBS += -ldnnl
endif

HEADERS = $(wildcard llmc/*.h llmc/*.cuh test/*.h dev/bench/*.h)
TESTS = test_plan test_config test_data test_onnx test_files test_faults test_model test_memory test_run
.PHONY: run test check bench mutate clean setup found all tests-built

all: found $(BUILD)/train_gpt $(BUILD)/train_gpt_min

found:
	@echo "$(shell $(CXX) --version | head -1); oneDNN: $(if $(filter 1,$(ONEDNN)),yes,no - matrix products are plain loops); device: $(DEVICE)"

# `make run` and `make test` set the machine up first, then look again at what is there
run:
	@scripts/setup.sh
	@$(MAKE) --no-print-directory found $(BUILD)/train_gpt
	$(BUILD)/train_gpt

test:
	@scripts/setup.sh test
	@$(MAKE) --no-print-directory -j2 found tests-built
	@test/run.sh $(BUILD)

check:
	@scripts/setup.sh test
	@test/check.sh

bench:
	@scripts/setup.sh
	@$(MAKE) --no-print-directory found $(BUILD)/test_ops $(BUILD)/bench_step
	$(BUILD)/test_ops perf
	$(BUILD)/bench_step

mutate:
	@scripts/setup.sh test
	test/mutate

setup:
	@scripts/setup.sh test

tests-built: all $(BUILD)/test_ops $(TESTS:%=$(BUILD)/%)

$(BUILD)/train_gpt: train_gpt.cu $(HEADERS) | $(BUILD)
	$(CXX) $(CXXFLAGS) -x c++ $< -o $@ $(LIBS)

$(BUILD)/train_gpt_min: train_gpt_min.cpp | $(BUILD)
	$(CXX) -std=c++20 -O3 -march=native $(WARN) $< -o $@

$(BUILD)/test_ops: test/test_ops.cpp $(HEADERS) | $(BUILD)
	$(CXX) $(CXXFLAGS) $< -o $@ $(LIBS)

# the tests but the op table: at -O1 they build in half the time
$(TESTS:%=$(BUILD)/%): OPT = -O1 -march=native
$(BUILD)/test_%: test/test_%.cpp $(HEADERS) train_gpt_min.cpp | $(BUILD)
	$(CXX) $(CXXFLAGS) $< -o $@ -lgtest -lgtest_main $(LIBS)

$(BUILD)/fuzz_readers: test/fuzz_readers.cpp $(HEADERS) | $(BUILD)
	$(CXX) $(CXXFLAGS) $< -o $@ $(LIBS)

$(BUILD)/bench_%: dev/bench/%.cpp $(HEADERS) | $(BUILD)
	$(CXX) $(CXXFLAGS) $< -o $@ $(LIBS)

$(BUILD):
	@mkdir -p $@

clean:
	rm -rf $(BUILD)
