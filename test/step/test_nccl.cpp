// test_nccl.cpp - steps of training on NCCL, whose calls MPI carries here (harness/nccl_stub)
//   Kernels run in the emulator, and collectives in the order of their streams, each when all its
//   ranks have arrived. Every layout runs in both of the emulator's orders of streams
//   (emulator_streams.h), so that each wait between them shows. Sums in rank order have the same
//   bits on every backend, so processes on NCCL are compared with threads that share a GPU, bit by
//   bit; and the order of calls is compared between ranks.
//     build/test_nccl                              starts the others
//     mpirun -np 4 build/test_nccl --steps-last    the layouts of 4 ranks; or --steps-first
#include "../../llmc/io/one_reader.h"
#include "../../llmc/comm/text.h"
#include "../harness/testing.h"
#include "small_models.h"

using namespace llmc;

// ----------------------------------------------------------------------------
// layouts

struct NcclCase {
    int dp, tp, pp, zero;
    bool llama, sequence_parallel = false;
    Pipeline pipeline = Pipeline::ONE_F_ONE_B;
    int chunks = 1, shards = 0;
    bool replays = false; // processes replay a graph from the second step on
    int ep = 1;           // above 1: a model with experts
    bool exchanges = false; // tokens go only to the ranks that have their experts
    int cp = 1;             // above 1: a ring
};

// Layouts that use every kind of group, with communicators that are shared, split or their own.
static std::vector<NcclCase> nccl_cases(int ranks) {
    if (ranks == 2)
        return {{2, 1, 1, 3, false, false, Pipeline::ONE_F_ONE_B, 1, 0, true},
                {1, 2, 1, 0, true, true},
                {.dp = 1, .tp = 1, .pp = 1, .zero = 0, .llama = true, .replays = true, .cp = 2},
                {1, 1, 2, 0, false, false, Pipeline::INTERLEAVED, 2}};
    if (ranks == 3) return {{1, 1, 3, 0, false, false, Pipeline::ZERO_BUBBLE}};
    return {{2, 2, 1, 2, true, true, Pipeline::ONE_F_ONE_B, 1, 0, true},
            {1, 4, 1, 0, true, true},
            {4, 1, 1, 1, true, false, Pipeline::ONE_F_ONE_B, 1, 2},
            {2, 1, 2, 1, false, false, Pipeline::ONE_F_ONE_B, 1, 0, true},
            {4, 1, 1, 1, true, false, Pipeline::ONE_F_ONE_B, 1, 0, false, 2},
            {.dp = 2, .tp = 1, .pp = 1, .zero = 2, .llama = true, .ep = 2, .exchanges = true,
             .cp = 2}};
}

// A case's model. Llama has two key/value heads, which the ranks of tp 4 share in pairs.
static Shape shape_of(const NcclCase& c) {
    size_t blocks = c.chunks; // with embedding and head at least a layer for each stage
    if (!c.llama) return gpt2_shape(blocks, 4, 16, 61, 16);
    Shape s = llama_shape(blocks, 4, 2, 16, 24, 53, 16, 10000);
    s.attention.qkv_bias = c.ep == 1;
    if (c.ep == 1) return s;
    s.family = Family::MIXTRAL, s.hf_type = "mixtral", s.experts.E = 4, s.experts.K = 2;
    return s;
}

static Layout sizes_of(const NcclCase& c) {
    Layout layout = small_layout(c.dp, c.tp, c.pp, c.cp);
    layout.zero = c.zero;
    layout.zero_group = c.shards || c.ep > 1 ? c.shards : c.dp;
    layout.ep = c.ep;
    layout.experts.exchange = c.exchanges;
    layout.context.method = ContextMethod::RING;
    layout.sequence_parallel = c.sequence_parallel;
    layout.pipeline = c.pipeline;
    layout.chunks = c.chunks;
    return layout;
}

// Run two steps on a rank, or three if the last is a replay, with a falling learning rate. Returns
// "dp 2 tp 1 ...: rank 0: loss norm loss norm, hash of all lasting data".
static std::string steps_text(const Comm& world, const NcclCase& c) {
    // Plan.
    use_threads(1); // models this small gain nothing by more
    Shape shape = shape_of(c);
    Layout me = layout_at(sizes_of(c), world.rank);
    Plan p = small_plan(1, 4, 2, c.zero % 2 ? Recompute::SELECTIVE : Recompute::NONE);
    p.layout = me;
    p.layout.first_layer = split_layers(std::vector<double>(shape.L + 2, 1.0), me.stages());

    // Make the trainer.
    Trainer<float, cudaStream_t> t;
    t.ctx.where = open_stream(cudaStream_t{});
    t.graphs.on = c.replays;
    trainer_place(t, shape, {p}, p.layout);
    trainer_allocate(t);
    t.comms = make_comms(world, me, ranks_of_kv_head(me, t.model));
    init_constants(t);
    init_weights(t, 5);
    t.hyper.clip = 0.5f;
    t.data.window = random_window(shape, p.T);

    // Run the steps.
    std::string text;
    char words[160];
    for (int s = 0; s < (c.replays ? 3 : 2); s++) {
        t.hyper.lr = 1e-3f / float(1 + s);
        run_plan(t, 0);
        t.data.cursor += p.B * size_t(p.micro_batches * c.dp);
        double loss = plan_loss(t).mean();
        snprintf(words, sizeof(words), " %a %a", loss,
                 double(read_value<StepScale>(t, {Kind::SCALE}).norm));
        text += words;
    }
#ifdef WITH_NCCL
    // Communicators of layers must be used on one stream only, and not on the streams of buckets.
    typedef std::set<cudaStream_t> Streams;
    auto streams_of = [](const Comm& c) {
        return c.nccl ? nccl_stub::streams[size_t(c.nccl->comm->number)] : Streams{};
    };
    for (const Comm* c : {&t.comms.tp, &t.comms.kv, &t.comms.ep})
        if (c->nccl && streams_of(*c).size() != 1)
            text += " '" + c->name + "' is not on one stream";

    // Messages of stages must not be on those streams either: sums would hold them up.
    bool both = t.comms.pp.size > 1 && t.comms.pp.size < world.size;
    if (both && streams_of(t.comms.pp) != Streams{t.streams.message})
        text += " messages have no stream of their own";
    if (both && streams_of(t.comms.data(Group::DATA).shard).count(t.streams.message))
        text += " sums are on the stream of messages";
#endif

    // Hash the state.
    const Memory& memory = t.arena.device();
    std::string lasting(reinterpret_cast<const char*>(memory.base), memory.persistent_bytes);
    snprintf(words, sizeof(words), "dp %d tp %d%s pp %d x %d cp %d, zero %d, ep %d, %s: rank %d:",
             c.dp, c.tp, c.sequence_parallel ? " sp" : "", c.pp, c.chunks, c.cp, c.zero, c.ep,
             c.llama ? "Llama" : "GPT-2", world.rank);
    text = words + text + concat(", ", fnv1a(lasting), "\n");
    trainer_free(t);
    return text;
}

// ----------------------------------------------------------------------------
// processes on the stand-in

#ifdef WITH_NCCL
// A call of NCCL as any of its ranks can name it: the communicator's ranks, and what is done; for a
// message, who sends to whom.
struct SeenCall {
    std::vector<int> members;
    std::string what;
    int from = -1, to = -1; // of a message, as ranks in the world; -1: it is none
};

// The calls of this rank that the stand-in has recorded since number `first`.
static std::vector<SeenCall> calls_since(size_t first, int rank) {
    std::vector<SeenCall> calls;
    for (size_t i = first; i < nccl_stub::calls.size(); i++) {
        const std::string& text = nccl_stub::calls[i];
        size_t on = text.rfind(" on ");
        if (on == std::string::npos) continue; // no call on a communicator: it makes one
        size_t number = size_t(atoi(text.c_str() + on + 4));
        SeenCall call = {nccl_stub::members[number], text.substr(0, on)};

        // A message names its peer by its place in the communicator.
        int peer = -1;
        if (sscanf(text.c_str(), "send to %d", &peer) == 1) {
            call.from = rank;
            call.to = call.members[size_t(peer)];
        } else if (sscanf(text.c_str(), "receive from %d", &peer) == 1) {
            call.from = call.members[size_t(peer)];
            call.to = rank;
        }
        calls.push_back(call);
    }
    return calls;
}

// The calls on communicators that have both ranks a and b, in order: a and b must agree on this
// text. Messages between two collectives are sorted, because one call may hold several of them.
static std::string shared_text(const std::vector<SeenCall>& calls, int a, int b) {
    std::string text;
    std::vector<std::string> messages;
    auto flush = [&] {
        std::sort(messages.begin(), messages.end());
        for (const std::string& m : messages) text += m;
        messages.clear();
    };
    for (const SeenCall& c : calls) {
        bool both = std::count(c.members.begin(), c.members.end(), a) &&
                    std::count(c.members.begin(), c.members.end(), b);
        if (!both) continue;

        // Collect messages until the next collective.
        if (c.from >= 0) {
            bool between = (c.from == a && c.to == b) || (c.from == b && c.to == a);
            if (between) messages.push_back(concat(c.from, ">", c.to, "; "));
            continue;
        }
        flush();
        text += c.what + " by " + ranks_text(c.members) + "; ";
    }
    flush();
    return text;
}

// Check that all ranks of a communicator call it alike, in the same order, and that any two ranks
// call the communicators that they share in the same order. All ranks call; "" or what differs.
static std::string check_order_of_calls(const Comm& world, const std::vector<SeenCall>& calls) {
    std::string wrong;
    for (int a = 0; a < world.size; a++)
        for (int b = a + 1; b < world.size; b++) {
            bool mine = world.rank == a || world.rank == b;
            auto all = gather_texts(world, mine ? shared_text(calls, a, b) : "");
            if (all[size_t(a)] != all[size_t(b)])
                wrong = concat("ranks ", a, " and ", b, " call in another order:\n",
                               all[size_t(a)], "\n", all[size_t(b)], "\n");
        }
    return wrong;
}

// The check finds another order of calls, but allows any order of messages that one call may hold.
TEST(Nccl, AnotherOrderOfCallsIsSeen) {
    const SeenCall tp = {{0, 1}, "sum"}, dp = {{0, 1, 2}, "sum"};
    const SeenCall there = {{0, 1}, "send to 1", 0, 1}, back = {{0, 1}, "receive from 1", 1, 0};

    // The order of two communicators counts between ranks that are in both: ranks 0 and 1, not 2.
    EXPECT_NE(shared_text({tp, dp}, 0, 1), shared_text({dp, tp}, 0, 1));
    EXPECT_EQ(shared_text({tp, dp}, 0, 2), shared_text({dp, tp}, 0, 2));
    EXPECT_NE(shared_text({tp, dp, dp}, 0, 2), shared_text({tp, dp}, 0, 2));

    // Messages may pass each other, but no collective.
    EXPECT_EQ(shared_text({there, back}, 0, 1), shared_text({back, there}, 0, 1));
    EXPECT_NE(shared_text({there, tp}, 0, 1), shared_text({tp, there}, 0, 1));
}

// An old NCCL cannot keep launches on several communicators in order. It is good enough for a
// layout with one communicator; tp beside dp ends the run with a line that says why.
TEST(Nccl, AnOldLibraryIsRefusedWhereLaunchesNeedAnOrder) {
    EXPECT_EQ(launch_order_missing(22600), "");
    EXPECT_EQ(launch_order_missing(23001), "");
    EXPECT_NE(launch_order_missing(22507), "");

    // Run all with version 2.21: tp alone, dp beside tp, dp beside pp.
    char self[4096] = {};
    ASSERT_GT(readlink("/proc/self/exe", self, sizeof(self) - 1), 0);
    for (int ranks : {2, 4, 6}) {
        Ran ran = shell(concat("timeout 100 mpirun --allow-run-as-root --oversubscribe -np ", ranks,
                               " ", self, " --old"));
        EXPECT_EQ(ran.status == 0, ranks == 2) << ran.text;
        EXPECT_EQ(ran.text.find("NCCL 2.21 is loaded") != std::string::npos, ranks > 2) << ran.text;
    }
}

// Make the communicators of tp 2, of pp 2 with six ranks, as a library of version 2.21.5.
static int run_old() {
    RankInfo info;
    nccl_stub::version = 22105;
    Comm world = nccl_attach(mpi_world(info));
    Layout layout = world.size == 6 ? small_layout(3, 1, 2) : small_layout(world.size / 2, 2);
    make_comms(world, layout_at(layout, world.rank));
    return 0;
}

// Run all cases of so many processes: print their results, and check the order of their calls.
static int run_steps(emulator::Beside beside) {
    RankInfo info;
    info.timeout_s = 60;
    int failed = 0;
    emulator::beside = beside;
    Comm world = mpi_world(info);
    world = nccl_attach(world);
    for (const NcclCase& c : nccl_cases(world.size)) {
        size_t first = nccl_stub::calls.size();
        for (auto& streams : nccl_stub::streams) streams.clear();
        for (const std::string& text : gather_texts(world, steps_text(world, c)))
            if (world.rank == 0) printf("%s", text.c_str());

        std::string wrong = check_order_of_calls(world, calls_since(first, world.rank));
        if (!wrong.empty()) {
            printf("%s", wrong.c_str());
            failed = 1;
        }
    }
    return failed;
}

// Steps of processes on NCCL have the losses, norms and state of threads, to the bit, in both
// orders of streams beside the one that a host waits for.
TEST(Nccl, StepsAreThoseOfThreads) {
    char self[4096] = {};
    ASSERT_GT(readlink("/proc/self/exe", self, sizeof(self) - 1), 0);
    for (int ranks : {2, 3, 4}) {
        std::string want;
        for (const NcclCase& c : nccl_cases(ranks)) {
            std::vector<std::string> texts{size_t(ranks), std::string()};
            auto body = [&](const Comm& world) {
                texts[size_t(world.rank)] = steps_text(world, c);
            };
            EXPECT_EQ(run_local_ranks(ranks, {}, body), 0);
            for (const std::string& text : texts) want += text;
        }

        // Run the same cases with processes.
        for (const char* order : {"--steps-last", "--steps-first"}) {
            Ran ran = shell(concat("timeout 200 mpirun --allow-run-as-root --oversubscribe -np ",
                                   ranks, " ", self, " ", order));
            EXPECT_EQ(ran.text, want) << order;
            EXPECT_EQ(ran.status, 0);
        }
    }
}
#endif

int main(int argc, char** argv) {
    testing::InitGoogleTest(&argc, argv);
#ifdef WITH_NCCL
    std::string mode = argc > 1 ? argv[1] : "";
    if (mode == "--old" || mode == "--steps-last" || mode == "--steps-first") {
        int given;
        LLMC_MPI_CHECK(MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &given));
        bool last = mode == "--steps-last";
        int status = mode == "--old" ? run_old()
                                     : run_steps(last ? emulator::Beside::LAST
                                                      : emulator::Beside::FIRST);
        LLMC_MPI_CHECK(MPI_Finalize());
        return status;
    }
#endif
    return RUN_ALL_TESTS();
}
