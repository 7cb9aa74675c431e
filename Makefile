# train_gpt - make run | test | check | bench | ladders | gpu | lease | dist | copycheck | mutate | clean | setup;
#   build/train_gpt, build/test_*. Says what it found. DEVICE=cuda compiles for GPUs, on a machine without one too;
#   DEVICE=cpu needs no CUDA toolkit. Without either: cuda where a GPU answers and nvcc is there.
CXX ?= g++
NVCC ?= $(firstword $(wildcard /usr/local/cuda/bin/nvcc) nvcc)
DEVICE ?= $(if $(and $(filter GPU,$(shell nvidia-smi -L 2>/dev/null)),$(shell command -v $(NVCC))),cuda,cpu)
BUILD ?= build
WARN = -Wall -Wextra -Wno-unknown-pragmas
OPT ?= -O3 -march=native
OPENMP ?= -fopenmp
ifeq ($(MAKELEVEL),0) # two things at a time; `make -j8`: eight
MAKEFLAGS += -j2
endif
# Results stay: -fno-math-errno lets sqrt be one instruction, and -fno-trapping-math lets AVX2 loops choose between two
# values. -ffast-math is never used: it changes results. Vectors are as long as the processor's: g++ takes half of AVX-512's.
# -MMD writes down what a program was built from: a change rebuilds what includes the file, and nothing else.
LONG_VECTORS := $(if $(filter x86_64,$(shell uname -m)),-mprefer-vector-width=512)
CXXFLAGS = -std=c++20 -MMD -MP -MF $@.d $(OPT) $(LONG_VECTORS) -fno-math-errno -fno-trapping-math $(WARN) $(OPENMP) \
    -DREPO_ROOT='"$(CURDIR)"' $(EXTRA)
LIBS = -lz -lpcre2-8 -lutf8proc -lpthread

# What this machine has, 1 or 0; `make ONEDNN=0` leaves it out.
#   ONEDNN: matrix products on the CPU, else plain blocked loops    ZSTD: prepare_gpt reads .zst files
#   MPI: ranks as processes, else as threads of one    NCCL: ranks on GPUs, a process each, else threads that share one
CUDA_HOME = $(patsubst %/bin/nvcc,%,$(NVCC))
has = $(if $(wildcard $(addsuffix /$(1),/usr/include /usr/local/include $(2))),1,0)
with = $(if $(filter 1,$($(1))),$(2))
ONEDNN ?= $(call has,oneapi/dnnl/dnnl.hpp)
ZSTD ?= $(call has,zstd.h)
MPI ?= $(if $(shell command -v mpicxx),1,0)
NCCL ?= $(if $(call with,MPI,1),$(call has,nccl.h,$(CUDA_HOME)/include),0)
CXXFLAGS += $(call with,ONEDNN,-DWITH_ONEDNN) $(call with,ZSTD,-DWITH_ZSTD)
LIBS += $(call with,ONEDNN,-ldnnl) $(call with,ZSTD,-lzstd)
MPI_FLAGS = $(if $(filter 1,$(MPI)),-DWITH_MPI $(shell mpicxx --showme:compile))
MPI_LIBS = $(if $(filter 1,$(MPI)),$(shell mpicxx --showme:link))
NCCL_FLAGS = $(call with,NCCL,-DWITH_NCCL)
NCCL_LIBS = $(call with,NCCL,-L$(CUDA_HOME)/lib -lnccl)

# GPUs: this machine's; without one Ampere and what follows it, and Hopper with its own instructions. `make GPUS=90a` for
# one alone. A plain number carries PTX beside its code: a GPU that came later (Blackwell) compiles that at a program's
# first start.
# Without oneDNN, whose header nvcc 13.0 aborts on: with --device cpu such a build uses plain loops. -O1 is for the
# host's code: GCC 12 takes half of -O3's time, and makes loops that are three times as fast without -march=native.
# Kernels are at -O3 without being asked.
ifndef GPUS # nvidia-smi is slow: it is asked once
here := $(sort $(subst .,,$(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null)))
GPUS := $(if $(filter-out 80 86 89 90,$(here)),80 90a,$(patsubst 90,90a,$(or $(here),80 90)))
endif
ifneq ($(filter 3% 5% 6% 7%,$(GPUS)),)
$(error GPUS=$(GPUS): the kernels need 80 (Ampere) or later)
endif
NVCCFLAGS = -std=c++20 -O1 --threads 2 -x cu -Xptxas -warn-spills,-warn-lmem-usage \
    -Xcompiler -Wall,-Wextra,-Wno-unknown-pragmas,-fno-math-errno,$(OPENMP) \
    $(foreach gpu,$(GPUS),-gencode=arch=compute_$(gpu),code=sm_$(gpu)) \
    $(foreach gpu,$(filter-out %a %f,$(GPUS)),-gencode=arch=compute_$(gpu),code=compute_$(gpu)) \
    $(filter-out -DWITH_ONEDNN,$(filter -D%,$(CXXFLAGS)))
GPU_LIBS = -lcublasLt
# GPU programs go to machines with a driver, CUDA's libraries, and of others only what every machine has: what has an
# archive here is linked from it. Not libstdc++: its archive asks for this machine's C library or a newer one. CUDA's
# libraries are found beside the program, in their usual folder or by LD_LIBRARY_PATH; MPI=0 leaves MPI and NCCL out.
# CUDART=shared takes the runtime from there too, where a test puts one of its own in its place.
CUDART ?= static
ARCHIVES = $(BUILD)/gpu/archives
PORTABLE = -cudart $(CUDART) -L$(ARCHIVES) -Xlinker -rpath,\$$ORIGIN:/usr/local/cuda/lib64
# A GPU build fails on any warning of nvcc, on local memory (arrays that find no registers, or registers spilled), and
# where ptxas says (C75..) that it serialised wgmma. The host compiler's own warnings end in [-W...] and are only shown:
# GCC 12 warns of lengths that no run has.
define nvcc
@command -v $(NVCC) >/dev/null || \
    { echo "$@: there is no $(NVCC): install the CUDA toolkit, give NVCC= or make DEVICE=cpu"; exit 1; }
@echo "$(NVCC) $(NVCCFLAGS) $(or $(1),$< $(GPU_LIBS) $(PORTABLE)) -o $@"
@$(NVCC) $(NVCCFLAGS) -MMD -MF $@.d $(or $(1),$< $(GPU_LIBS) $(PORTABLE)) -o $@ >$@.log 2>&1; status=$$?; \
    cat $@.log; missing=$$(sed -nE 's/.*fatal error: ([^:]*): No .*/\1/p; s/.*cannot find (-l[^:]*).*/\1/p' $@.log); \
    [ -z "$$missing" ] || echo "$@ misses" $$missing "(make setup)"; \
    if grep -E 'warning|spill|C75[0-9][0-9]' $@.log | grep -qv '\[-W'; then rm -f $@; exit 1; fi; exit $$status
endef

# The programs: those that train or read weights run the step.
TRAINERS = train_gpt tune_gpt sample_gpt plan_gpt convert_gpt
PROGRAMS = $(addprefix $(BUILD)/,$(TRAINERS) prepare_gpt)
STEP_TESTS = test_plan test_budget test_planner test_fit test_model test_layouts test_context test_memory test_overflow test_offload \
    test_life test_samples test_generate test_golden test_huggingface test_dialects test_checkpoint test_evaluate test_interchange \
    test_faults test_states test_averages test_distill
TESTS = $(STEP_TESTS) test_simulator test_pipeline test_comm test_nccl test_run test_fp8 test_device test_types test_onnx \
    test_config test_losses test_report test_data test_files test_safetensors test_prepare test_tokenizer test_chat test_kto
KERNEL_TESTS = test_kernels test_attention_kernels test_attention_sm90
EMULATED = test_emulator $(KERNEL_TESTS)
SLOW = test_layouts test_kernels test_offload $(filter test_attention%,$(KERNEL_TESTS)) test_life test_device test_memory # first
LADDERS = $(patsubst dev/cuda/%.cu,ladder_%,$(wildcard dev/cuda/*.cu))
LADDERS_HERE = $(addprefix $(BUILD)/$(if $(filter cuda,$(DEVICE)),gpu/),$(LADDERS))
.PHONY: run test check bench ladders gpu lease dist copycheck mutate clean setup found all tests-built
vpath %.cpp test/kernels test/step test/io test/harness
-include $(wildcard $(BUILD)/*.d $(BUILD)/gpu/*.d)

all: found $(PROGRAMS) $(BUILD)/train_gpt_min
says = $(if $(call with,$(1),1),yes,no - $(2))
found:
	@echo "$(shell $(CXX) --version | head -1); oneDNN: $(call says,ONEDNN,matrix products are plain loops);" \
	    "MPI: $(call says,MPI,ranks are threads);" \
	    "device: $(DEVICE)$(if $(filter cuda,$(DEVICE)),; NCCL: $(call says,NCCL,processes run on the CPU))"
setup:
	@scripts/setup.sh test

# `make run` and `make test` set the machine up first, then look again at what is there.
run:
	@scripts/setup.sh
	@$(MAKE) --no-print-directory found $(BUILD)/train_gpt
	$(BUILD)/train_gpt --config scripts/first_run.cfg
test: setup
	@$(MAKE) --no-print-directory found tests-built
	@test/run.sh $(BUILD) test_ops $(SLOW) $(filter-out $(SLOW),$(TESTS) $(EMULATED))
check: setup # ALL=1: also what this commit is not dealt
	@test/check.sh
mutate: setup
	@test/mutate
copycheck: # operator files alone, as other projects copy them
	@test/copycheck.sh
bench:
	@scripts/setup.sh
	@$(MAKE) --no-print-directory found $(BUILD)/bench_ops $(BUILD)/bench_step $(BUILD)/bench_disk
	$(BUILD)/bench_ops perf
	$(BUILD)/bench_step
	$(BUILD)/bench_disk
# An operator from a naive kernel to what the project runs: checked everywhere, measured on a GPU.
ladders: $(LADDERS_HERE)
	@for ladder in $(LADDERS_HERE); do echo $$ladder; $$ladder || exit 1; done
tests-built: all $(addprefix $(BUILD)/,test_ops $(TESTS) $(EMULATED))
# Everything that a machine with a GPU runs, and what it was built from.
built = commit $$(git describe --always --dirty), CUDA $$($(NVCC) --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
gpu: $(addprefix $(BUILD)/gpu/,train_gpt $(KERNEL_TESTS) test_large test_device test_comm bench_kernels $(LADDERS))
	@echo "$(built)" >$(BUILD)/gpu/built
# One archive for a Hopper machine with CUDA's libraries and none of ours: programs, what scripts/gpu_check.sh reads,
# and llm.c's program and tokens, if they are in build/lease/gpu/peer. Then the command to type there.
LEASE = $(BUILD)/lease
LEASE_PROGRAMS = train_gpt $(KERNEL_TESTS) test_large test_device bench_kernels $(LADDERS)
lease:
	@$(MAKE) --no-print-directory BUILD=$(LEASE) GPUS=90a MPI=0 CUDART=shared $(addprefix $(LEASE)/gpu/,$(LEASE_PROGRAMS))
	@rm -rf $(LEASE)/lease; mkdir -p $(LEASE)/lease/gpu
	@for name in $(LEASE_PROGRAMS); do strip -o $(LEASE)/lease/gpu/$$name $(LEASE)/gpu/$$name || exit 1; done
	@echo "$(built)" >$(LEASE)/lease/gpu/built
	@cp --parents README.md llmc/*.h scripts/gpu_check.sh dev/bench/peers.py $(LEASE)/lease
	@[ ! -d $(LEASE)/gpu/peer ] || cp -r $(LEASE)/gpu/peer $(LEASE)/lease/gpu
	@tar -C $(LEASE) -cf - lease | xz -T0 >$(LEASE)/lease.tar.xz
	@ls -l $(LEASE)/lease/gpu $(LEASE)/lease/gpu/peer 2>/dev/null | awk 'NF > 8 {printf "%6.1f MiB %s\n", $$5 / 2^20, $$9}'
	@echo "tar xf $(LEASE)/lease.tar.xz && RESULTS=\$$OUT lease/scripts/gpu_check.sh --prebuilt gpu --lease 480"
	@size=$$(wc -c <$(LEASE)/lease.tar.xz); echo "$$((size >> 10)) KiB of at most 40960"; [ $$size -le 41943040 ]
# This commit's files as one archive; --version prints the same number.
RELEASE = train_gpt-$(shell sed -n 's/.* VERSION = "\(.*\)";/\1/p' llmc/io/help.h)
dist: | $(BUILD)
	git archive --prefix=$(RELEASE)/ -o $(BUILD)/$(RELEASE).tar.gz HEAD
clean:
	rm -rf $(BUILD)

# On the CPU. Tests build in half the time at -O1, the op table and the program's own file at -O2; bench_ops is the same
# table at -O3, and so is the step. `private`: what a program is linked from keeps its own flags. EMULATE: the kernels'
# own source, by g++ alone.
$(addprefix $(BUILD)/,$(TESTS) $(EMULATED)) $(BUILD)/ladder_%: private OPT = -O1 -march=native
$(BUILD)/test_ops $(BUILD)/train_gpt.o: private OPT = -O2 -march=native
$(patsubst %,$(BUILD)/%.o,$(filter-out train_gpt,$(TRAINERS))) $(BUILD)/prepare_gpt: private OPT = -O1 -march=native
$(addprefix $(BUILD)/,$(EMULATED) test_device test_comm test_nccl) $(BUILD)/ladder_%: CXXFLAGS += -DEMULATE
# NCCL's calls, carried by MPI.
$(addprefix $(BUILD)/,test_comm test_nccl): CXXFLAGS += $(call with,MPI,-DWITH_NCCL -Itest/harness/nccl_stub)
$(addprefix $(BUILD)/,$(TESTS)): LIBS += -lgtest -lgtest_main
$(BUILD)/test_device: LIBS += -rdynamic # kernels have names at run time
compile = $(CXX) $(CXXFLAGS) -x c++ $< -x none $(filter %.o,$^) -o $@ $(LIBS)
$(BUILD)/%: %.cpp | $(BUILD)
	$(compile)
$(BUILD)/bench_ops: test_ops.cpp | $(BUILD)
	$(compile)
$(BUILD)/bench_%: dev/bench/%.cpp | $(BUILD)
	$(compile)
$(BUILD)/ladder_%: dev/cuda/%.cu | $(BUILD)
	$(compile)
$(BUILD)/train_gpt_min: train_gpt_min.cpp | $(BUILD)
	$(CXX) -std=c++20 -O3 -march=native $(WARN) $< -o $@
# The step is compiled once a type for all programs (llmc/layers.h). STEPS is all four, or empty: each program whole.
STEPS ?= float double bf16 fp16
step = $(patsubst %,$(BUILD)/step_%.o,$(filter $(STEPS),$(1)))
$(BUILD)/step_%.o: llmc/layers.h | $(BUILD)
	$(CXX) $(CXXFLAGS) -DSTEP_OF=$* -include $< -x c++ -c /dev/null -o $@
$(BUILD)/%_gpt.o: %_gpt.cu | $(BUILD)
	$(CXX) $(CXXFLAGS) -x c++ -c $< -o $@
$(BUILD)/prepare_gpt: prepare_gpt.cpp | $(BUILD)
	$(CXX) $(CXXFLAGS) $< -o $@ $(LIBS)
$(addprefix $(BUILD)/,$(STEP_TESTS) bench_step): $(call step,float double bf16 fp16)
$(addprefix $(BUILD)/,$(STEP_TESTS) bench_step $(addsuffix .o,$(TRAINERS))): private CXXFLAGS += $(if $(STEPS),-DSTEP_BUILT -include llmc/step.h)
$(addprefix $(BUILD)/,$(STEP_TESTS) bench_step $(addsuffix .o,$(TRAINERS)) prepare_gpt step_%.o test_comm test_nccl): private CXXFLAGS += $(MPI_FLAGS)
$(addprefix $(BUILD)/,$(STEP_TESTS) bench_step $(TRAINERS) prepare_gpt test_comm test_nccl): LIBS += $(MPI_LIBS)
ifeq ($(DEVICE),cuda)
$(addprefix $(BUILD)/,$(TRAINERS)): $(BUILD)/%: $(BUILD)/gpu/%
	cp $< $@
else
$(addprefix $(BUILD)/,$(TRAINERS)): $(BUILD)/%: $(BUILD)/%.o $(call step,float bf16 fp16)
	$(CXX) $(OPENMP) $(EXTRA) $^ -o $@ $(LIBS)
endif

# On GPUs. Kernels alone need no library but CUDA's.
$(addprefix $(BUILD)/gpu/,$(TRAINERS) test_device test_comm libraries): GPU_LIBS = $(filter-out -ldnnl,$(LIBS)) -lcublasLt
$(addprefix $(BUILD)/gpu/,test_device test_comm): LIBS += -lgtest -lgtest_main
$(addprefix $(BUILD)/gpu/,$(addsuffix .o,$(TRAINERS)) step_%.o test_comm): NVCCFLAGS += $(filter -D% -I%,$(MPI_FLAGS)) $(NCCL_FLAGS)
$(addprefix $(BUILD)/gpu/,$(TRAINERS) test_comm): LIBS += $(filter -L% -l%,$(MPI_LIBS)) $(NCCL_LIBS)
$(BUILD)/gpu/step_%.o: llmc/layers.h | $(ARCHIVES)
	$(call nvcc,-c -DSTEP_OF=$* -include $< /dev/null)
$(BUILD)/gpu/%_gpt.o: %_gpt.cu | $(ARCHIVES)
	$(call nvcc,-c $(if $(STEPS),-DSTEP_BUILT) $<)
$(addprefix $(BUILD)/gpu/,$(TRAINERS)): %: %.o $(subst $(BUILD),$(BUILD)/gpu,$(call step,float bf16 fp16))
	$(NVCC) $^ -o $@ $(addprefix -Xcompiler ,$(OPENMP)) $(GPU_LIBS) $(PORTABLE)
$(BUILD)/gpu/%: %.cpp | $(ARCHIVES)
	$(nvcc)
$(BUILD)/gpu/bench_%: dev/bench/%.cu | $(ARCHIVES)
	$(nvcc)
$(BUILD)/gpu/ladder_%: dev/cuda/%.cu | $(ARCHIVES)
	$(nvcc)
$(ARCHIVES):
	@mkdir -p $@
	@for name in z pcre2-8 utf8proc zstd gomp; do \
	    file=$$($(CXX) -print-file-name=lib$$name.a); [ ! -e $$file ] || ln -sf $$file $@; done
$(BUILD):
	@mkdir -p $@
