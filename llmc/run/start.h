// start.h - how a program starts: processes join, a device is chosen, each rank runs a body
//   start_program()      main: join the job's processes, read the flags, run the command
//   run_where_wanted()   body(run, where) for each rank: the process itself, or its threads
#pragma once
#include <malloc.h>
#include <csignal>
#include "../comm/comm.h"
#include "../comm/group.h"
#include "../comm/local.h"
#include "../comm/mpi.h"
#include "../comm/nccl.h"
#include "../io/config.h"
#include "../io/files.h"
#include "../io/help.h"
#include "../io/plan_flags.h"
#include "../ops/cuda_common.h"
#include "../ops/gpu.h"
#include "../ops/matmul.cuh"
#include "../ops/memory.h"
#include "../ops/types.h"
#include "../comm/text.h"
#include "run.h"

namespace llmc {

// Call body(run) once for each rank of this process: the process is a rank itself, or it starts
// --local-ranks threads. Returns whether all threads ended well.
template <typename F> bool run_ranks(Run& run, F body) {
    const Config& c = run.config;
    bool threads = c.local_ranks > 1 && !c.explain;

    // Print how many ranks there are, and along which axes.
    if (threads || run.world.size > 1)
        say(run, "ranks: ", rank_count(c), threads ? " threads, " : " processes, ", axes_text(c),
            "\n");

    // A process is its own rank.
    if (!threads) {
        body(run);
        return true;
    }

    // Each thread has a copy of the run, and with it its own tokenizer, data and log.
    auto rank = [&](const Comm& world) {
        Run mine = run;
        mine.world = world;
        body(mine);
        // The first rank decides the exit status of the program.
        if (is_first_rank(mine)) {
            run.end.stopped = mine.end.stopped;
            run.end.failed = mine.end.failed;
        }
    };

    // The watchdog names a rank that hangs. Once a rank has failed, the process leaves after 10
    // seconds, whether the others have ended or not.
    LocalSettings settings;
    settings.timeout_s = c.watchdog;
    settings.leave_s = 10;
    return run_local_ranks(c.local_ranks, settings, rank) == 0;
}

// Run on the CPU, and print with how many threads and which library, because the speed
// depends on both.
template <typename F> bool run_on_cpu(Run& run, F body) {
    const Config& c = run.config;
    LLMC_USER_CHECK(!c.graphs || c.explain,
                    "--graphs is for GPUs, and this run is on the CPU: leave it out");
    say(run, c.program->name, ": ", printable(c.model), ", ", c.precision, ", on the CPU with ",
        threads_here(Cpu{}), " threads, ", matmul_backend(), "\n");
    return run_ranks(run, [&](Run& rank) { body(rank, Cpu{}); });
}

#if LLMC_KERNELS
// Give each of several processes a GPU of its own, and connect them by NCCL. Threads as ranks share
// the first GPU.
inline void join_gpus(Run& run) {
    if (!HAS_NCCL || run.world.size == 1)
        return;
    or_die(take_gpu(run.world));
    or_die(no_gpu_because()); // ask again: this GPU may be older than the machine's first
    run.world.fixed_order = run.config.fixed_order;
    run.world = nccl_attach(run.world);
}

// Run on GPUs, or on the CPU where a process has none and --device auto permits it.
template <typename F> bool run_on_gpu(Run& run, F body) {
    const Config& c = run.config;

    // Ask for a GPU. All processes use GPUs, or none does. --explain needs none.
    std::string why = no_gpu_because();
    bool there = why.empty();
    bool plans_only = c.explain && c.device == "cuda";
    LLMC_USER_CHECK(there || plans_only || c.device == "auto",
                    "--device cuda: %s: use --device cpu", why.c_str());
    int64_t with_gpu = there;
    all_reduce_sum(run.world, &with_gpu, 1, Cpu{});
    there = with_gpu == run.world.size;

    // If any process lacks a GPU, all run on the CPU.
    if (!there && !plans_only) {
        say(run, why.empty() ? "another process has no GPU" : why, ": on the CPU\n");
        return run_on_cpu(run, body);
    }

    // Print the device. --explain plans for a GPU that need not be there.
    if (there && !c.explain) join_gpus(run);
    std::string name = there ? device_name(cudaStream_t{}) : "a GPU that is not here";
    say(run, c.program->name, ": ", printable(c.model), ", ", c.precision, ", on ", name, "\n");

    // Run each rank on a stream of its own.
    return run_ranks(run, [&](Run& rank) {
        cudaStream_t stream = there ? open_stream(cudaStream_t{}) : nullptr;
        body(rank, stream);
        if (there) close_stream(stream);
    });
}
#else
template <typename F> bool run_on_gpu(Run& run, F body) {
    return run_on_cpu(run, body); // the program has no kernels
}
#endif

// Run on GPUs where the flags and the build permit it, else on the CPU. Several processes need NCCL
// to communicate between GPUs.
template <typename F> bool run_where_wanted(Run& run, F body) {
    bool can = HAS_NCCL || run.world.size == 1;
    if (LLMC_KERNELS && !can && run.config.device == "auto")
        say(run, "built without NCCL (install libnccl-dev): processes run on the CPU\n");
    bool wants = can && run.config.device != "cpu";
    return wants ? run_on_gpu(run, body) : run_on_cpu(run, body);
}

// Join the other processes of a job. Under mpirun or srun each process is a rank.
inline void join_processes(Run& run, RankInfo* info, int* argc, char*** argv) {
    // Recognize a launcher by its environment variables: a process that was started alone must
    // not start MPI.
    const char* size = getenv("OMPI_COMM_WORLD_SIZE");
    bool started = size || getenv("PMIX_RANK") || getenv("PMI_RANK");
    if (const char* rank = getenv("OMPI_COMM_WORLD_RANK"))
        this_rank = atoi(rank);
    LLMC_USER_CHECK(HAS_MPI || !started || (size && atoi(size) == 1),
                    "started as one of several processes, and built without MPI: install "
                    "libopenmpi-dev and openmpi-bin and make again, or use --local-ranks");
    if (HAS_MPI && started)
        run.world = mpi_join(*info, argc, argv);
}

// Make OpenMP's threads spin only briefly. Threads spin while they wait, and when another program
// needs cores too, the spinning ones take them from those that work: a step of 13 ms then took 557
// on average (dev/LOG.md). OpenMP reads the limit when its library is loaded, so the program sets
// the variable and starts itself again. If exec fails, the run continues with threads that spin.
inline void spin_briefly(char** argv) {
    (void)argv;
#ifdef _OPENMP
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
    setenv("GOMP_SPINCOUNT", "1000", 1);
    execv(program_path().c_str(), argv);
#endif
}

// Run a program: its name, and what its command line asks for. Returns the exit status.
inline int start_program(const char* name, bool (*command)(Run&), int argc, char** argv) {
    spin_briefly(argv);

    // Flush standard output after each line, even into a pipe.
    setvbuf(stdout, nullptr, _IOLBF, 0);

    // Return large buffers to the system when they are freed, so that the peak memory is what
    // the plan says.
    mallopt(M_MMAP_THRESHOLD, 1 << 20);

    // Let a write beyond the file size limit fail like one on a full disk, instead of by a signal.
    signal(SIGXFSZ, SIG_IGN);

    // Join the other processes first: a rank must know its number before it complains.
    RankInfo info;
    Run run;
    join_processes(run, &info, &argc, &argv);
    Config& c = run.config;
    c.program = &program_named(name);
    if (!c.program->trains) c.steps = 0;
    std::string dial;
    or_die(parse_arguments(c, argc, argv));
    or_die(take_depth(c, &dial));
    info.timeout_s = c.watchdog;

    // Print a page and leave.
    std::string page = page_asked(c);
    say(run, page.empty() ? dial : page);

    // Let training outlive who reads its lines, as in `| head` or a tee that Ctrl-C has ended.
    if (has_training(c)) signal(SIGPIPE, SIG_IGN);
    bool good = !page.empty() || command(run);

    // Leave the other processes. Communicators must be freed before MPI ends.
    bool joined = run.world.mpi != nullptr;
    run.world = {}; // frees its group
    if (joined) mpi_leave();

    // After a signal, exit as shells report it: 128 plus the signal's number.
    if (run.end.stopped) return 128 + run.end.stopped;
    return good && !run.end.failed ? 0 : 1;
}

} // namespace llmc
