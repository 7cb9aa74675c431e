# train_gpt - make run | test | check | bench | ladders | gpu | copycheck | mutate | clean | setup;  build/train_gpt, build/test_*
#   Says what it found. DEVICE=cuda compiles for GPUs, on a machine without one too; DEVICE=cpu needs
#   no CUDA toolkit. Without the word: cuda where a GPU answers.
CXX ?= g++
NVCC ?= $(firstword $(wildcard /usr/local/cuda/bin/nvcc) nvcc)
DEVICE ?= $(if $(shell nvidia-smi -L 2>/dev/null),cuda,cpu)
BUILD ?= build
WARN = -Wall -Wextra -Wno-unknown-pragmas
OPT ?= -O3 -march=native
# -fno-math-errno lets sqrt be one instruction; -ffast-math is never used: it changes results
CXXFLAGS = -std=c++20 $(OPT) -fno-math-errno $(WARN) $(OPENMP) -DREPO_ROOT='"$(CURDIR)"' $(EXTRA)
OPENMP ?= -fopenmp
LIBS = -lz -lpcre2-8 -lutf8proc -lpthread

# oneDNN: matrix products on the CPU; without it plain blocked loops
ONEDNN ?= $(if $(wildcard /usr/include/oneapi/dnnl/dnnl.hpp /usr/local/include/oneapi/dnnl/dnnl.hpp),1,0)
ifeq ($(ONEDNN),1)
CXXFLAGS += -DWITH_ONEDNN
LIBS += -ldnnl
endif

# zstd: --prepare reads .zst files
ZSTD ?= $(if $(wildcard /usr/include/zstd.h /usr/local/include/zstd.h),1,0)
ifeq ($(ZSTD),1)
CXXFLAGS += -DWITH_ZSTD
LIBS += -lzstd
endif

# MPI: ranks as processes; without it ranks are threads of one process
MPI ?= $(if $(shell command -v mpicxx),1,0)
ifeq ($(MPI),1)
MPI_FLAGS = -DWITH_MPI $(shell mpicxx --showme:compile)
MPI_LIBS = $(shell mpicxx --showme:link)
endif

# NCCL: ranks on GPUs, a process each, found beside nvcc; without it ranks share a GPU as threads
CUDA_HOME = $(patsubst %/bin/nvcc,%,$(NVCC))
NCCL ?= $(if $(and $(filter 1,$(MPI)),$(wildcard /usr/include/nccl.h $(CUDA_HOME)/include/nccl.h)),1,0)
ifeq ($(NCCL),1)
NCCL_FLAGS = -DWITH_NCCL
NCCL_LIBS = -L$(CUDA_HOME)/lib -lnccl
endif

# GPUs: Ampere and what follows it, Hopper with its own instructions. `make GPUS=90a` for one alone.
# Without oneDNN, whose header nvcc 13.0 aborts on: with --device cpu such a build uses plain loops.
GPUS ?= 80 90a
NVCCFLAGS = -std=c++20 -O3 --threads 2 -x cu -Xcompiler -Wall,-Wextra,-Wno-unknown-pragmas,-fno-math-errno,$(OPENMP) \
    $(foreach gpu,$(GPUS),-gencode=arch=compute_$(gpu),code=sm_$(gpu)) \
    $(filter-out -DWITH_ONEDNN,$(filter -D%,$(CXXFLAGS)))
CUDA_LIBS = -lz -lpcre2-8 -lutf8proc -lpthread -lcublasLt $(if $(filter 1,$(ZSTD)),-lzstd)
# A GPU build fails on any warning, on registers spilled to memory, and where ptxas says (C75..) that
# it had to serialise wgmma.
define nvcc
@echo "$(NVCC) $(NVCCFLAGS) $(1)"
@$(NVCC) $(NVCCFLAGS) -Xptxas -warn-spills $(1) >$@.log 2>&1; status=$$?; cat $@.log; \
    if grep -qE 'warning|spill|C75[0-9][0-9]' $@.log; then rm -f $@; exit 1; fi; exit $$status
endef
# the kernels' own source on the CPU, by g++ alone
EMULATE = -DEMULATE

HEADERS = $(wildcard llmc/*.h llmc/*.cuh test/*.h dev/bench/*.h dev/cuda/*.h)
TESTS = test_plan test_pipeline test_config test_data test_prepare test_tokenizer test_onnx test_files test_evaluate test_interchange test_faults test_model test_layouts test_comm test_memory test_run \
    test_device
KERNEL_TESTS = test_kernels test_attention_kernels test_attention_sm90
EMULATED = test_emulator $(KERNEL_TESTS)
LADDERS = $(addprefix $(BUILD)/$(if $(filter cuda,$(DEVICE)),gpu/)ladder_,layernorm_forward attention_forward matmul)
.PHONY: run test check bench ladders gpu copycheck mutate clean setup found all tests-built

all: found $(BUILD)/train_gpt $(BUILD)/train_gpt_min

found:
	@echo "$(shell $(CXX) --version | head -1); oneDNN: $(if $(filter 1,$(ONEDNN)),yes,no - matrix products are plain loops); MPI: $(if $(filter 1,$(MPI)),yes,no - ranks are threads); device: $(DEVICE)$(if $(filter cuda,$(DEVICE)), NCCL: $(if $(filter 1,$(NCCL)),yes,no - processes run on the CPU))"

# `make run` and `make test` set the machine up first, then look again at what is there
run:
	@scripts/setup.sh
	@$(MAKE) --no-print-directory found $(BUILD)/train_gpt
	$(BUILD)/train_gpt

test:
	@scripts/setup.sh test
	@$(MAKE) --no-print-directory -j2 found tests-built
	@test/run.sh $(BUILD) test_ops $(TESTS) $(EMULATED)

check:
	@scripts/setup.sh test
	@test/check.sh

bench:
	@scripts/setup.sh
	@$(MAKE) --no-print-directory found $(BUILD)/test_ops $(BUILD)/bench_step
	$(BUILD)/test_ops perf
	$(BUILD)/bench_step

# an operator from the naive kernel to the project's own: checked everywhere, measured on a GPU
ladders: $(LADDERS)
	@for ladder in $(LADDERS); do echo $$ladder; $$ladder || exit 1; done

# operator files alone, as other projects copy them
copycheck:
	test/copycheck.sh

mutate:
	@scripts/setup.sh test
	test/mutate

setup:
	@scripts/setup.sh test

tests-built: all $(BUILD)/test_ops $(TESTS:%=$(BUILD)/%) $(EMULATED:%=$(BUILD)/%)

# everything that a machine with a GPU runs
gpu: $(addprefix $(BUILD)/gpu/,train_gpt $(KERNEL_TESTS) test_large test_device bench_kernels \
    ladder_layernorm_forward ladder_attention_forward ladder_matmul)

ifeq ($(DEVICE),cuda)
$(BUILD)/train_gpt: $(BUILD)/gpu/train_gpt
	cp $< $@
else
$(BUILD)/train_gpt: train_gpt.cu $(HEADERS) | $(BUILD)
	$(CXX) $(CXXFLAGS) -x c++ $< -o $@ $(LIBS)
endif

$(BUILD)/gpu/train_gpt: NVCCFLAGS += $(filter -D% -I%,$(MPI_FLAGS)) $(NCCL_FLAGS)
$(BUILD)/gpu/train_gpt: CUDA_LIBS += $(filter -L% -l%,$(MPI_LIBS)) $(NCCL_LIBS)
$(BUILD)/gpu/train_gpt: train_gpt.cu $(HEADERS) | $(BUILD)/gpu
	$(call nvcc,$< -o $@ $(CUDA_LIBS))
$(BUILD)/gpu/test_device: test/test_device.cpp $(HEADERS) | $(BUILD)/gpu
	$(call nvcc,$< -o $@ -lgtest -lgtest_main $(CUDA_LIBS))
# the kernel table needs no library but CUDA's
$(BUILD)/gpu/test_%: test/test_%.cpp $(HEADERS) | $(BUILD)/gpu
	$(call nvcc,$< -o $@ -lcublasLt)

$(BUILD)/gpu/bench_%: dev/bench/%.cu $(HEADERS) | $(BUILD)/gpu
	$(call nvcc,$< -o $@ -lcublasLt)

$(BUILD)/gpu/ladder_%: dev/cuda/%.cu $(HEADERS) | $(BUILD)/gpu
	$(call nvcc,$< -o $@ -lcublasLt)
$(BUILD)/ladder_%: OPT = -O1 -march=native
$(BUILD)/ladder_%: dev/cuda/%.cu $(HEADERS) | $(BUILD)
	$(CXX) $(CXXFLAGS) $(EMULATE) -x c++ $< -o $@ $(LIBS)

$(BUILD)/train_gpt_min: train_gpt_min.cpp | $(BUILD)
	$(CXX) -std=c++20 -O3 -march=native $(WARN) $< -o $@

$(BUILD)/test_ops: test/test_ops.cpp $(HEADERS) | $(BUILD)
	$(CXX) $(CXXFLAGS) $< -o $@ $(LIBS)

# the tests but the op table: at -O1 they build in half the time
$(TESTS:%=$(BUILD)/%) $(EMULATED:%=$(BUILD)/%): OPT = -O1 -march=native
$(EMULATED:%=$(BUILD)/%): $(BUILD)/%: test/%.cpp $(HEADERS) | $(BUILD)
	$(CXX) $(CXXFLAGS) $(EMULATE) $< -o $@ $(LIBS)
$(BUILD)/test_device: CXXFLAGS += $(EMULATE)
$(BUILD)/test_comm: CXXFLAGS += $(EMULATE)
$(BUILD)/test_comm $(BUILD)/test_memory $(BUILD)/train_gpt: CXXFLAGS += $(MPI_FLAGS)
$(BUILD)/test_comm $(BUILD)/test_memory $(BUILD)/train_gpt: LIBS += $(MPI_LIBS)
$(BUILD)/test_%: test/test_%.cpp $(HEADERS) train_gpt_min.cpp | $(BUILD)
	$(CXX) $(CXXFLAGS) $< -o $@ -lgtest -lgtest_main $(LIBS)

$(BUILD)/fuzz_readers: test/fuzz_readers.cpp $(HEADERS) | $(BUILD)
	$(CXX) $(CXXFLAGS) $< -o $@ $(LIBS)

$(BUILD)/bench_%: dev/bench/%.cpp $(HEADERS) | $(BUILD)
	$(CXX) $(CXXFLAGS) $< -o $@ $(LIBS)

$(BUILD) $(BUILD)/gpu:
	@mkdir -p $@

clean:
	rm -rf $(BUILD)
