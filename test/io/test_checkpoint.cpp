// test_checkpoint.cpp - checkpoints: every layout's round trip to the bit, and broken files
//   A broken file is skipped or refused by name. A save that fails or is killed loses nothing.
#include <bit>
#include <sys/resource.h>
#include <sys/wait.h>
#include <csignal>
#include "../../llmc/extra/silent_corruption.h"
#include "saved_models.h"

struct Checkpoints : Scratch {};

// ----------------------------------------------------------------------------
// checkpoints

// Save a model after three steps, load it into another with other weights, and go on with both:
// their states must have the same bits before and after.
template <typename T>
void checkpoint_round_trip(const std::string& dir, const Shape& s, bool adamw) {
    SCOPED_TRACE(shape_name(s) + (adamw ? ", adamw" : ", sgd"));
    auto a = random_model<T>(s, 3, adamw), b = random_model<T>(s, 4, adamw);
    auto step = [](Small<T>& m) { run_plan(m.t, 0), m.t.data.cursor += 2; };

    if (type_of<T>() == Type::F16) // a scale so large that early steps overflow, and later ones too
        for (auto* m : {a.get(), b.get()}) {
            m->t.hyper.loss_scaling = {.on = true, .start = 0x1p24f, .window = 1, .hysteresis = 1};
            init_loss_scale(m->t);
        }

    std::string out = dir + "/out", stale = out + "/step_00000001.tmp";
    fs::remove_all(out);
    fs::create_directories(stale); // an earlier crash left this folder
    put_file(stale + "/rank_00000.safetensors", "half");

    // Both have trained. Save one, and load it into the other, whose moments and count must go.
    for (int i = 0; i < 3; i++) step(*a);
    if (adamw) step(*b);
    ASSERT_TRUE(state_of(*a) != state_of(*b));
    ASSERT_EQ(checkpoint_save(a->t, {3, a->t.data.cursor, ~0ull, {{"lr", 1}}}, out, 2), "");
    EXPECT_FALSE(fs::exists(stale));

    Loaded l = load_checkpoint(*b, out);
    ASSERT_EQ(l.wrong, "");
    EXPECT_EQ(l.notes, std::vector<std::string>());
    EXPECT_EQ(l.info.step, 3);
    EXPECT_EQ(l.info.cursor, 6u);
    EXPECT_EQ(l.info.seed, ~0ull);
    EXPECT_EQ(l.info.config, (json{{"lr", 1}}));
    EXPECT_TRUE(state_of(*a) == state_of(*b));

    // The file holds each tensor without its padding.
    TensorFile g(out + "/step_00000003/rank_00000.safetensors");
    for (const StateTensor& x : state_tensors(a->t))
        EXPECT_EQ(safetensors_find(g.file, x.name)->elements(), x.p->file_elements()) << x.name;
    EXPECT_EQ(g.file.tensors.size(), a->t.model.parameters.size() * (adamw ? 3 : 1));

    // Both go on alike.
    b->t.data.cursor = l.info.cursor;
    step(*a), step(*b);
    EXPECT_TRUE(state_of(*a) == state_of(*b));
}

TEST_F(Checkpoints, CheckpointsLoadToTheSameBits) {
    for (const Shape& s : saved_shapes())
        for (bool adamw : {true, false}) {
            checkpoint_round_trip<float>(dir, s, adamw);
            checkpoint_round_trip<bf16>(dir, s, adamw);
            checkpoint_round_trip<fp16>(dir, s, adamw);
        }
    checkpoint_round_trip<double>(dir, saved_shapes()[0], true);

    // Delayed scaling, whose ring of maxima has gone round.
    Shape late = saved_shapes()[0];
    late.fp8.kind = Fp8::DELAYED, late.fp8.rule.length = 3;
    checkpoint_round_trip<bf16>(dir, late, true);
}

TEST_F(Checkpoints, CheckpointsOfOtherPrecisionAreNoted) {
    auto a = random_model<bf16>(saved_shapes()[0]);
    auto b = random_model<float>(saved_shapes()[0], 4);
    ASSERT_EQ(checkpoint_save(a->t, {1, 0, 0, {}}, dir, 1), "");
    Loaded l = load_checkpoint(*b, dir);
    EXPECT_EQ(l.wrong, "");
    EXPECT_EQ(l.notes, (std::vector<std::string>{"the checkpoint was trained in BF16"}));
    expect_same_weights(*a, *b); // a float model reads the fp32 masters of a BF16 one

    auto c = random_model<double>(saved_shapes()[0]);
    EXPECT_HAS(load_checkpoint(*c, dir).wrong, "param.wte.weight is F32(732), not F64(732)");

    // A checkpoint that another machine wrote: its bits may differ, which is noted.
    std::string manifest = dir + "/step_00000001/manifest.json";
    json m = read_json(manifest);
    m["threads"] = 99, m["cpu"] = "Another";
    m["crc32"] = manifest_crc(m);
    put_file(manifest, m.dump());
    l = load_checkpoint(*a, dir);
    EXPECT_EQ(l.wrong, "");
    ASSERT_EQ(l.notes.size(), 1u);
    EXPECT_HAS(l.notes[0], "99 threads on Another");
}

TEST_F(Checkpoints, KeepRemovesOlderCheckpoints) {
    auto m = random_model<float>(saved_shapes()[0]);
    for (int64_t step : {1, 2, 3, 4}) {
        m->t.data.cursor = uint64_t(step);
        ASSERT_EQ(checkpoint_save(m->t, {step, uint64_t(step), 0, {}}, dir, 2), "");
    }

    // Folders with other names are no checkpoints.
    EXPECT_EQ(checkpoint_steps(dir), (std::vector<int64_t>{4, 3}));
    for (const char* other :
         {"/step_1", "/step_00000009x", "/step_00000007.tmp.tmp", "/notes"})
        fs::create_directories(dir + other);
    EXPECT_EQ(load_checkpoint(*m, dir).info.step, 4);

    // A step that is saved again replaces itself.
    ASSERT_EQ(checkpoint_save(m->t, {4, 44, 0, {}}, dir, 2), "");
    EXPECT_EQ(checkpoint_steps(dir), (std::vector<int64_t>{4, 3}));
    EXPECT_EQ(load_checkpoint(*m, dir).info.cursor, 44u);

    // A run that went back keeps the newer steps.
    ASSERT_EQ(checkpoint_save(m->t, {3, 33, 0, {}}, dir, 1), "");
    EXPECT_EQ(checkpoint_steps(dir), (std::vector<int64_t>{4, 3}));

    ASSERT_EQ(checkpoint_save(m->t, {10, 10, 0, {}}, dir, 1), "");
    EXPECT_EQ(checkpoint_steps(dir), (std::vector<int64_t>{10}));
    EXPECT_TRUE(fs::exists(dir + "/notes") && fs::exists(dir + "/step_1"));
    EXPECT_HAS(checkpoint_save(m->t, {11, 0, 0, {}}, dir + "/nowhere", 1),
               "cannot be made: No such file");
}

TEST_F(Checkpoints, BrokenCheckpointsAreSkippedAndNamed) {
    auto m = random_model<float>(saved_shapes()[0]),
         saved = random_model<float>(saved_shapes()[0], 4);

    // Two steps. The newer one is broken in one way after another, and the older one is loaded.
    run_plan(saved->t, 0);
    ASSERT_EQ(checkpoint_save(saved->t, {1, 1, 0, {}}, dir, 5), "");
    std::string older = state_of(*saved);
    run_plan(saved->t, 0);
    ASSERT_EQ(checkpoint_save(saved->t, {2, 2, 0, {}}, dir, 5), "");

    std::string newest = dir + "/step_00000002", file = newest + "/rank_00000.safetensors";
    std::string manifest = newest + "/manifest.json", whole = read_file(file),
                list = read_file(manifest);
    auto falls_back = [&](const std::string& part) {
        SCOPED_TRACE("manifest " + read_file(manifest).substr(0, 2000));
        fill_weights(m->t, 9);
        Loaded l = load_checkpoint(*m, dir);
        EXPECT_EQ(l.wrong, "");
        EXPECT_EQ(l.info.step, 1);
        EXPECT_TRUE(state_of(*m) == older);
        ASSERT_EQ(l.notes.size(), 1u);
        EXPECT_HAS(l.notes[0], newest);
        EXPECT_HAS(l.notes[0], part);
        EXPECT_HAS(l.notes[0], ": skipped");
    };

    // A rank's file of another size, or with a bit turned.
    for (size_t size : {size_t(0), size_t(7), size_t(1000), whole.size() - 1}) {
        put_file(file, whole.substr(0, size));
        falls_back("is " + std::to_string(size) + " bytes, the manifest says " +
                   std::to_string(whole.size()));
    }
    put_file(file, whole + "x");
    falls_back("is " + std::to_string(whole.size() + 1) + " bytes, the manifest says");
    for (size_t at = 0; at < whole.size(); at += at < 16 ? 1 : whole.size() / 9) {
        std::string flipped = whole;
        flipped[at] ^= char(1 << at % 8);
        put_file(file, flipped), falls_back("its checksum is");
    }

    // Files that are missing, a manifest that is no object.
    fs::remove(file), falls_back("rank_00000.safetensors: No such file");
    put_file(file, whole);
    fs::remove(manifest), falls_back("has no manifest.json");
    for (const char* text : {"{}", "[]", "3", "null"})
        put_file(manifest, text), falls_back("manifest.json is broken");

    // The whole checkpoint loads again.
    put_file(manifest, list);
    EXPECT_EQ(load_checkpoint(*m, dir).info.step, 2);
    EXPECT_TRUE(state_of(*m) == state_of(*saved));

    // Both steps are broken, and then both are gone.
    fs::resize_file(file, 10);
    fs::resize_file(dir + "/step_00000001/rank_00000.safetensors", 10);
    Loaded l = load_checkpoint(*m, dir);
    EXPECT_HAS(l.wrong, dir + ": holds no whole checkpoint: the broken ones are named above: put "
               "back a copy of one, or begin anew in another --out");
    EXPECT_EQ(l.notes.size(), 2u);
    fs::remove_all(newest), fs::remove_all(dir + "/step_00000001");
    EXPECT_HAS(load_checkpoint(*m, dir).wrong, "holds no whole checkpoint: start without --resume");
    EXPECT_HAS(load_checkpoint(*m, dir + "/nowhere").wrong, "holds no whole checkpoint");
}

TEST_F(Checkpoints, ACheckpointOfAnotherModelIsRefusedByName) {
    Shape base = saved_shapes()[2];
    auto a = random_model<float>(base);
    ASSERT_EQ(checkpoint_save(a->t, {1, 0, 0, {}}, dir, 2), "");
    auto refused = [&](const char* key, const char* theirs, const char* ours, auto change) {
        Shape other = base;
        change(other);
        auto b = random_model<float>(other);
        Loaded l = load_checkpoint(*b, dir);
        EXPECT_HAS(l.wrong, "step_00000001: is of another model");
        EXPECT_HAS(l.wrong, std::string("its ") + key + " is " + theirs + ", this run's " + ours);
        EXPECT_EQ(l.notes.size(), 0u);
    };
    refused("layers", "2", "1", [](Shape& s) { s.L = 1; });
    refused("family", "\"llama\"", "\"mistral\"", [](Shape& s) { s.hf_type = "mistral"; });
    refused("position", "\"rope\"", "\"alibi\"", [](Shape& s) { s.embedding.position = Position::ALIBI; });

    // A run with SGD leaves the checkpoint's moments out. A run with AdamW needs them.
    auto sgd = random_model<float>(base, 3, false);
    EXPECT_EQ(load_checkpoint(*sgd, dir).wrong, "");
    expect_same_weights(*a, *sgd);
    ASSERT_EQ(checkpoint_save(sgd->t, {2, 0, 0, {}}, dir, 2), "");
    EXPECT_HAS(load_checkpoint(*a, dir).wrong,
               "was trained with sgd and has no moments of adamw's: go on with --optimizer sgd");
}

// An evaluation keeps no moments and loads the weights alone.
TEST_F(Checkpoints, AnEvaluationLoadsACheckpointOfTraining) {
    for (bool adamw : {true, false}) {
        auto a = random_model<bf16>(saved_shapes()[7], 3, adamw);
        run_plan(a->t, 0);
        ASSERT_EQ(checkpoint_save(a->t, {1, 2, 0, {}}, dir, 2), "");
        Small<bf16> e(saved_shapes()[7], {plan_of(Mode::EVALUATE, 1, 16)});
        ASSERT_EQ(address<float>(e.t, {Kind::STATE, 0}), nullptr);
        Loaded l = load_checkpoint(e, dir);
        EXPECT_EQ(l.wrong, "");
        EXPECT_EQ(l.info.cursor, 2u);

        for (const Parameter& p : a->t.model.parameters) {
            const bf16* x = address<bf16>(a->t, {Kind::WEIGHT, p.bucket}) + p.offset;
            const bf16* y = address<bf16>(e.t, {Kind::WEIGHT, p.bucket}) + p.offset;
            EXPECT_EQ(memcmp(x, y, p.elements() * sizeof(bf16)), 0) << p.name;
        }
    }
}

// ----------------------------------------------------------------------------
// checkpoints of many ranks

// A layout, and the number of files in its checkpoints.
struct LayoutCase {
    int dp, pp, zero, shards;
    int files;
    int tp = 1;
    bool muon = false;           // the optimizer
    int ep = 1;
    bool whole_experts = false;  // tensor-parallel ranks cut none
    bool near = false;           // weights alone are cut among groups
    int ranks() const { return dp * pp * tp; }
};
static const std::vector<LayoutCase> layouts = {
    {1, 1, 0, 1, 1}, {2, 1, 0, 2, 1},    {2, 1, 1, 2, 2},    {2, 1, 3, 2, 2}, {1, 2, 0, 1, 2},
    {2, 2, 2, 2, 4}, {1, 1, 0, 1, 4, 4}, {2, 1, 3, 2, 4, 2}, {4, 2, 2, 2, 4}, // groups of two
    {2, 1, 2, 2, 2}, {4, 1, 3, 2, 4, 1, false, 1, false, true}};

static std::string layout_name(const LayoutCase& l) {
    return "dp " + std::to_string(l.dp) + " tp " + std::to_string(l.tp) + " pp " +
           std::to_string(l.pp) + " zero " + std::to_string(l.zero) + " groups of " +
           std::to_string(l.shards) + (l.muon ? " by NorMuon" : "") +
           (l.near ? " of weights" : "") + " ep " + std::to_string(l.ep) +
           (l.whole_experts ? " of whole experts" : "");
}

// Run ranks as threads. Each has its part of the same random model: body(model).
template <typename T, typename F>
void on_ranks(const LayoutCase& l, const Shape& s, uint64_t seed, F body) {
    int status = run_local_ranks(l.ranks(), {}, [&](const Comm& world) {
        omp_set_num_threads(1);

        Layout sizes = small_layout(l.dp, l.tp, l.pp);
        sizes.zero = l.zero;
        sizes.zero_group = l.ep > 1 || l.whole_experts ? 0 : l.shards;
        sizes.weights_near = l.near;
        sizes.ep = l.ep;
        sizes.experts.whole = sizes.sequence_parallel = l.whole_experts;
        sizes.muon = l.muon;
        sizes.first_layer = split_layers(std::vector<double>(s.L + 2, 1.0), l.pp);

        Plan p = plan_of(Mode::TRAIN, 1, 16);
        p.micro_batches = std::max(8 / l.dp, 1);
        p.layout = layout_at(sizes, world.rank);
        if (l.muon) p.optimizer = Optimizer::NORMUON;
        if (l.muon && l.dp == 2) p.offload = {.optimizer = Tier::HOST, .chunk = 4096};

        Small<T> m(s, {p});
        m.t.comms = make_comms(world, p.layout, ranks_of_kv_head(p.layout, m.t.model));
        fill_weights(m.t, seed);
        m.t.data.window = squares_window(s.V);
        body(m);
    });
    EXPECT_EQ(status, 0) << layout_name(l);
}

// Models whose shards cut parameters and the vocabulary's padding.
static std::vector<Shape> shapes_to_cut() {
    Shape llama = llama_shape(2, 4, 2, 64, 64, 61, 32, 10000); // one shard is padding only
    return {gpt2_shape(2, 4, 48, 100, 16), llama};
}

// Load on one rank, on two shards and on two stages. All ranks must say the same, and a
// refusal must change nothing.
static Loaded load_everywhere(const std::string& out, const Shape& s, bool changes) {
    std::vector<Loaded> said;
    std::mutex mutex;
    for (const LayoutCase& l : {layouts[0], layouts[3], layouts[4]})
        on_ranks<float>(l, s, 4, [&](Small<float>& m) {
            std::string before = state_of(m);
            Loaded now = load_checkpoint(m, out);
            EXPECT_EQ(state_of(m) != before, changes);
            std::lock_guard<std::mutex> lock(mutex);
            said.push_back(now);
        });

    for (const Loaded& l : said) {
        EXPECT_EQ(l.wrong, said[0].wrong);
        if (changes) {
            EXPECT_EQ(l.info.step, said[0].info.step);
            EXPECT_EQ(l.notes.at(0), said[0].notes.at(0));
        }
    }
    return said[0];
}

// Save in each layout and load in each: the state has the same bits, and a run that goes on in its
// own layout makes the same next step.
template <typename T>
void save_and_load_in_all_layouts(const std::string& dir, const Shape& s,
                                  const std::vector<LayoutCase>& layouts) {
    auto step = [](Small<T>& m) { run_plan(m.t, 0), m.t.data.cursor += 8; };
    for (const LayoutCase& from : layouts) {
        std::string saved, next, out = dir + "/out";
        fs::remove_all(out), fs::create_directories(out);
        on_ranks<T>(from, s, 3, [&](Small<T>& m) {
            step(m), step(m);
            EXPECT_EQ(checkpoint_save(m.t, {2, m.t.data.cursor, 7, {}}, out, 1), "");
            std::string state = state_of(m);
            step(m);
            std::string later = state_of(m);
            if (m.t.comms.world.rank == 0) saved = state, next = later;
        });

        EXPECT_EQ(int(folder_bytes(out + "/step_00000002").size()), from.files + 1)
            << layout_name(from);

        for (const LayoutCase& to : layouts)
            on_ranks<T>(to, s, 4, [&](Small<T>& m) {
                SCOPED_TRACE(layout_name(from) + " read by " + layout_name(to));
                Loaded l = load_checkpoint(m, out);
                EXPECT_EQ(l.wrong, "");
                EXPECT_TRUE(l.info.step == 2 && l.info.cursor == 16 && l.info.seed == 7);
                EXPECT_TRUE(state_of(m) == saved);
                if (&from != &to) return;
                m.t.data.cursor = l.info.cursor;
                step(m);
                EXPECT_TRUE(state_of(m) == next);
            });
    }
}

TEST_F(Checkpoints, CheckpointsOfAnyLayoutLoadInAnyOther) {
    save_and_load_in_all_layouts<float>(dir, shapes_to_cut()[0], layouts);
    save_and_load_in_all_layouts<bf16>(dir, shapes_to_cut()[1], layouts);

    // Muon's matrices have one moment, and their parts other places. NorMuon's rows have another.
    // Two ranks keep theirs in the host's memory.
    std::vector<LayoutCase> muon = {layouts[0], layouts[3], layouts[5], layouts[7]};
    for (LayoutCase& l : muon)
        l.muon = true;
    save_and_load_in_all_layouts<float>(dir, shapes_to_cut()[1], muon);
}

// All bytes of tensors in a folder's files.
static size_t tensor_bytes(const std::string& folder) {
    size_t all = 0;
    for (const auto& [name, bytes] : folder_bytes(folder))
        if (name.ends_with(".safetensors"))
            for (const SafeTensor& x : TensorFile(folder + "/" + name).file.tensors)
                all += x.bytes;
    return all;
}

// Together 64 ranks read each byte of a checkpoint once, whatever layout wrote it. A tied table is
// needed on two stages, and it too is read once.
TEST_F(Checkpoints, EachByteIsReadOnce) {
    Shape s = shapes_to_cut()[0];
    for (const LayoutCase& from : {layouts[5]}) {
        std::string saved;
        std::string out = dir + "/" + layout_name(from);
        fs::create_directories(out);
        on_ranks<float>(from, s, 3, [&](Small<float>& m) {
            run_plan(m.t, 0);
            EXPECT_EQ(checkpoint_save(m.t, {1, 8, 0, {}}, out, 1), "");
            std::string state = state_of(m);
            if (m.t.comms.world.rank == 0) saved = state;
        });

        size_t all = tensor_bytes(out + "/step_00000001");
        // Ranks of two other layouts share the reading.
        for (const LayoutCase& to : {LayoutCase{8, 2, 3, 8, 0, 4}, {3, 1, 1, 3, 0}}) {
            std::atomic<size_t> read = 0;
            on_ranks<float>(to, s, 4, [&](Small<float>& m) {
                Loaded l = load_checkpoint(m, out);
                EXPECT_EQ(l.wrong, "");
                read += l.info.bytes_read;
                EXPECT_TRUE(state_of(m) == saved) << layout_name(to);
            });
            EXPECT_EQ(read, all) << layout_name(from) << " read by " << layout_name(to);
        }
    }
}

// The weights of a model, without the vocabulary's padding; the same on every rank.
static std::string weights_of(const Small<float>& m) {
    std::string all;
    for (const Parameter& p : m.t.model.parameters) {
        std::vector<float> values = fetch<float>(m.t, {Kind::WEIGHT, p.bucket}, p);
        all.append((const char*)values.data(), p.file_elements() * sizeof(float));
    }
    return all;
}

// Load a folder in a layout. Returns the sum of what all ranks read; *said: what each rank says.
static size_t load_folder(const std::string& folder, const Shape& s, const LayoutCase& to,
                          const std::string& expected, std::set<std::string>* said) {
    SCOPED_TRACE(layout_name(to));
    std::atomic<size_t> read = 0;
    std::mutex mutex;
    on_ranks<float>(to, s, 4, [&](Small<float>& m) {
        // A rank that waits for one that gave up ends the test soon.
        m.t.comms.world.info->timeout_s = 20;
        size_t bytes = 0;
        std::string wrong = hf_load_weights(m.t, folder, {}, "", &bytes);
        read += bytes;
        if (wrong.empty()) {
            EXPECT_TRUE(weights_of(m) == expected);
        }
        std::lock_guard<std::mutex> lock(mutex);
        said->insert(wrong);
    });
    return read;
}

// Shapes whose folders are read, and layouts that read them.
static std::vector<std::pair<Shape, std::vector<LayoutCase>>> folders_to_read() {
    Shape experts = shapes_to_cut()[1];
    experts.family = Family::MIXTRAL, experts.hf_type = "mixtral", experts.experts.E = 4, experts.experts.K = 2;
    LayoutCase many = {8, 2, 3, 8, 0, 4}; // 64 ranks
    LayoutCase shared = {4, 1, 0, 1, 0, 1, false, 2};
    return {{shapes_to_cut()[0], {layouts[0], many, layouts[5], layouts[6]}},
            {shapes_to_cut()[1], {layouts[3], layouts[4]}},
            {experts, {shared}}};
}

// Together all ranks read each byte of a model's folder once, and have the weights that were
// exported. A tied table is needed on two stages, and it too is read once.
TEST_F(Checkpoints, EachByteOfAFolderIsReadOnce) {
    for (const auto& [s, cases] : folders_to_read()) {
        SCOPED_TRACE(shape_name(s));
        fs::remove_all(dir + "/hf");
        auto m = random_model<float>(s);
        ASSERT_EQ(hf_export(m->t, dir + "/hf", Type::F32, 20000), "");
        size_t all = tensor_bytes(dir + "/hf");

        for (const LayoutCase& to : cases) {
            std::set<std::string> said;
            EXPECT_EQ(load_folder(dir + "/hf", s, to, weights_of(*m), &said), all);
            EXPECT_EQ(said, std::set<std::string>{""});
        }
    }
}

// A tensor that is longer than a chunk arrives whole, from whatever element on.
TEST_F(Checkpoints, TensorsComeInChunks) {
    Shape s = shapes_to_cut()[0];
    auto m = random_model<float>(s);
    ASSERT_EQ(hf_export(m->t, dir + "/hf", Type::F32, 20000), "");
    const Parameter& table = m->t.model.parameters[0];
    std::vector<float> all = get_weight(m->t, table);

    on_ranks<float>({1, 2, 0, 1, 0, 2}, s, 4, [&](Small<float>& x) {
        HfFiles h;
        h.reader = make_one_reader(x.t.comms.world, x.t.layout);
        h.most = 64;
        ASSERT_EQ(hf_open_files(&h, dir + "/hf"), "");
        const SafeTensor* t = hf_find(h, table.name);
        std::vector<float> some = bring_floats(h, *t, 5, 39, [](int) { return true; });
        EXPECT_EQ(some, std::vector<float>(all.begin() + 5, all.begin() + 44));
        EXPECT_EQ(h.chunk.size(), 64u);
    });
}

// If one rank's file is cut, all 64 ranks end with one error, and no tensor has been read. So do
// fewer ranks if its header has a flipped bit, or lacks a tensor of the index.
TEST_F(Checkpoints, ABrokenFolderEndsAllRanksAlike) {
    Shape s = shapes_to_cut()[0];
    auto m = random_model<float>(s);
    ASSERT_EQ(hf_export(m->t, dir + "/hf", Type::F32, 20000), "");
    std::string file = dir + "/hf/model-00003-of-";
    for (const auto& [name, bytes] : folder_bytes(dir + "/hf"))
        if (name.starts_with("model-00003-of-")) file = dir + "/hf/" + name;
    const std::string good = read_file(file);

    // Break the file, and load it.
    LayoutCase many = {8, 2, 3, 8, 0, 4}, few = {1, 2, 0, 1, 0, 2};
    auto with = [&](const std::string& bytes, const LayoutCase& to) {
        std::set<std::string> said;
        put_file(file, bytes);
        EXPECT_EQ(load_folder(dir + "/hf", s, to, weights_of(*m), &said), 0u);
        EXPECT_EQ(said.size(), 1u);
        return *said.begin();
    };
    EXPECT_HAS(with(good.substr(0, good.size() - 1), many), file + ": ");
    std::string flipped = good;
    flipped[good.find("F32")] ^= 1;
    EXPECT_HAS(with(flipped, few), file + ": tensor ");
    std::string renamed = good;
    renamed[good.find(".weight")] = '_';
    EXPECT_HAS(with(renamed, few), "is not in ");
}

// Adapters in the last blocks only leave the first stage without a moment. The first stage still
// reads its part of a file that the other stage needs.
TEST_F(Checkpoints, AStageWithoutAdaptersReadsForTheOthers) {
    Shape s = with_late_lora(shapes_to_cut()[0], 4);
    std::string saved;
    for (bool load : {false, true})
        on_ranks<float>(layouts[4], s, 3, [&](Small<float>& m) {
            m.t.comms.world.info->timeout_s = 5;
            if (!load) run_plan(m.t, 0);
            std::string wrong = load ? load_checkpoint(m, dir).wrong
                                     : checkpoint_save(m.t, {1, 8, 0, {}}, dir, 1);
            EXPECT_EQ(wrong, "");

            std::string state;
            for (const StateTensor& x : state_tensors(m.t)) {
                std::vector<float> values = fetch<float>(m.t, x.data, *x.p);
                state.append((const char*)values.data(), values.size() * sizeof(float));
            }

            if (m.t.comms.world.rank) return;
            EXPECT_TRUE(!load || state == saved);
            saved = state;
        });
    EXPECT_GT(saved.size(), 1000u);
}

// Experts that ranks share out are loaded by any other number of ranks, tensor-parallel ones too.
TEST_F(Checkpoints, ExpertsOfAnyRanksLoadInAnyOthers) {
    std::vector<LayoutCase> shared = {
        {1, 1, 0, 1, 1}, {2, 1, 0, 2, 2, 1, false, 2}, {4, 1, 3, 4, 2, 1, false, 2},
        {2, 2, 2, 2, 4}, {2, 1, 1, 2, 4, 2, false, 2}, {4, 1, 0, 4, 4, 1, false, 4},
        {1, 1, 0, 1, 2, 2, false, 2, true}, {2, 1, 0, 2, 2, 2, false, 1, true},
        {2, 1, 3, 2, 4, 2, false, 4, true}, {1, 2, 2, 1, 4, 2, false, 1, true}};
    Shape s = small_mixtral();
    s.experts.E = 4, s.P = 32;
    save_and_load_in_all_layouts<float>(dir, s, shared);
    std::vector<LayoutCase> muon = {shared[0], shared[2], shared[4], shared[8]};
    for (LayoutCase& l : muon)
        l.muon = true;
    save_and_load_in_all_layouts<float>(dir, s, muon);
    shared = {{2, 1, 2, 2, 2},
              {2, 1, 2, 2, 2, 1, false, 2},
              {4, 2, 1, 4, 4, 1, false, 2}}; // small buckets fill two shards
    save_and_load_in_all_layouts<bf16>(dir, s, shared);
}

// Files that say another number of expert-parallel ranks than can share the experts belong to no
// checkpoint of this model.
TEST_F(Checkpoints, ExpertsOfRanksThatCannotBeAreRefused) {
    Shape s = small_mixtral();
    auto a = random_model<float>(s);
    ASSERT_EQ(checkpoint_save(a->t, {1, 0, 0, {}}, dir, 1), "");
    std::string manifest = dir + "/step_00000001/manifest.json";
    for (auto [ep, ep_rank, says] :
         {std::tuple(4, 0, "says that 4 expert-parallel ranks wrote it, which cannot share"),
          std::tuple(2, 2, "ep_rank"), std::tuple(2, 1, "reaches beyond its parameter")}) {
        json m = read_json(manifest);
        m["files"][0]["ep"] = ep, m["files"][0]["ep_rank"] = ep_rank;
        m["crc32"] = manifest_crc(m);
        put_file(manifest, manifest_text(m));
        Loaded l = load_checkpoint(*a, dir);
        std::string said = l.wrong;
        for (const std::string& note : l.notes) said += note;
        EXPECT_HAS(said, says);
    }
}

// Write the shares that two tensor-parallel ranks hold, each cut once more at a third of it.
TEST_F(Checkpoints, SharesOfTensorParallelRanksAreReadWhole) {
    Shape s = gpt2_shape(2, 4, 64, 200, 256); // as many ffn channels and positions as padded words
    auto a = random_model<float>(s);
    for (const Parameter& p : a->t.model.parameters)
        EXPECT_EQ(p.file_rows, p.name == "wte.weight" ? 200 : p.rows()) << p.name;

    // Begin with a checkpoint of one rank.
    run_plan(a->t, 0);
    ASSERT_EQ(checkpoint_save(a->t, {1, 0, 0, {}}, dir, 1), "");
    std::string folder = dir + "/step_00000001", manifest = folder + "/manifest.json";
    json m = read_json(manifest);

    m["files"] = json::array();
    Model cut_in_two = make_model(s, small_layout(1, 2));
    TensorFile whole(folder + "/rank_00000.safetensors");

    // Write four files: two ranks, each in two parts.
    for (int rank = 0; rank < 4; rank++) {
        int tp_rank = rank % 2, third = rank / 2;
        std::vector<TensorSpec> specs;
        std::vector<float> data;
        json ranges;
        for (const StateTensor& x : state_tensors(a->t)) {
            std::vector<float> values = whole.floats(x.name), local;
            const Parameter& p = cut_in_two.parameters[size_t(x.p - &a->t.model.parameters[0])];
            bool mine = p.shard.axis >= 0 || tp_rank == 0; // the first writes what both have
            for_each_run(p, tp_rank, 2, [&](size_t, size_t global, size_t n) {
                for (size_t i = global; mine && i < std::min(global + n, values.size()); i++)
                    local.push_back(values[i]);
            });

            size_t cut = local.size() / 3, first = third ? cut : 0,
                   count = third ? local.size() - cut : cut;
            if (count == 0) continue;
            specs.push_back({x.name, Type::F32, {count}});
            ranges[x.name] = {first, count};
            data.insert(data.end(), local.begin() + long(first),
                        local.begin() + long(first + count));
        }

        FileWriter w;
        writer_open(&w, folder + "/" + rank_file(rank), specs, {});
        writer_put(w, data.data(), data.size() * sizeof(float));
        ASSERT_EQ(writer_close(&w), "");
        m["files"].push_back({{"file", rank_file(rank)},
                              {"bytes", w.bytes},
                              {"crc32", w.crc},
                              {"tp", 2},
                              {"tp_rank", tp_rank},
                              {"tensors", ranges}});
    }

    // Load them on one rank and on four.
    m["crc32"] = manifest_crc(m);
    put_file(manifest, manifest_text(m));
    std::string saved = state_of(*a);
    for (const LayoutCase& l : {layouts[0], layouts[5]})
        on_ranks<float>(l, s, 4, [&](Small<float>& b) {
            EXPECT_EQ(load_checkpoint(b, dir).wrong, "");
            EXPECT_TRUE(state_of(b) == saved) << layout_name(l);
        });
}

// Two elements that change places change the sum; one turned bit changes half of its term's bits.
TEST_F(Checkpoints, ASumKnowsPlacesAndBits) {
    for (uint64_t i = 0; i < 1000; i++) {
        uint64_t a = element_sum(i, 7) + element_sum(i + 1, 8);
        EXPECT_NE(a, element_sum(i, 8) + element_sum(i + 1, 7));
    }

    double changed = 0;
    for (int bit = 0; bit < 32; bit++)
        for (uint64_t i = 0; i < 100; i++)
            changed += std::popcount(element_sum(i, 0x3f800000) ^
                                     element_sum(i, 0x3f800000 ^ (uint64_t(1) << bit)));
    EXPECT_NEAR(changed / 3200, 32, 0.5); // 32 +- 4 in each of 3200 terms: 7 standard deviations
}

// The sums in any layout equal a definition that knows neither shards nor runs.
TEST_F(Checkpoints, WeightsSumsAreThoseOfTheWholeInAnyLayout) {
    for (const Shape& s : shapes_to_cut()) {
        std::vector<uint64_t> want;
        auto whole = random_model<bf16>(s, 3);
        for (const Parameter& p : whole->t.model.parameters) {
            std::vector<bf16> x = fetch<bf16>(whole->t, {Kind::WEIGHT, p.bucket}, p);
            uint64_t sum = 0;
            for (size_t i = 0; i < p.file_elements(); i++) sum += element_sum(i, x[i].bits);
            want.push_back(sum);
        }

        for (const LayoutCase& l : layouts)
            on_ranks<bf16>(l, s, 3, [&](Small<bf16>& m) {
                EXPECT_EQ(weight_sums(m.t), want) << layout_name(l);
                EXPECT_EQ(replicas_differ(m.t), "") << layout_name(l);
            });
    }
}

// Turn a bit of a weight on one rank. All ranks must name the parameter. Among three or
// more holders they name the rank; with two they name both; an element that one rank alone
// holds cannot be compared.
template <typename T = float>
static void turn_a_bit(const LayoutCase& l, const Shape& s, const std::string& name, int rank,
                       Data of = {Kind::WEIGHT}, std::string called = "") {
    std::atomic<int> holders = 0;
    std::set<std::string> said;
    std::mutex mutex;
    on_ranks<T>(l, s, 3, [&](Small<T>& m) {
        Trainer<T, Cpu>& t = m.t;
        if (of.kind != Kind::WEIGHT) run_plan(t, 0); // then moments are not zero

        const Comm& world = t.comms.world;
        const Parameter* p = nullptr;
        for (const Parameter& x : t.model.parameters)
            if (x.name == name) p = &x;
        Data weight = of;
        Parameter neurons = neurons_as_parameter(*p);
        if (of.kind == Kind::NEURONS) {
            weight.micro = int(p - t.model.parameters.data());
            p = &neurons;
        }
        weight.of = p->bucket;
        KeptRange range = kept_range(t, weight, *p);

        // Count the ranks that hold the same elements as the rank that fails.
        int64_t piece = t.layout.tp.rank * pieces_of(p->shard, l.tp) / l.tp;
        piece += l.tp * p->experts.rank;
        std::vector<int64_t> mine = {piece, int64_t(range.first), int64_t(range.count)};
        std::vector<int64_t> all(size_t(l.ranks()) * 3);
        all_gather(world, all.data(), mine.data(), 3, Cpu{});
        bool same = std::equal(mine.begin(), mine.end(), all.begin() + rank * 3);
        holders += same && range.count;

        // Turn the lowest bit of its first element.
        if (world.rank == rank && range.count) {
            uint32_t bits;
            read_kept(t, &bits, weight, range.at, 1);
            fill_kept<uint32_t>(t, weight, range.at, 1, [=](size_t) { return bits ^ 1; });
        }
        std::string text = replicas_differ(t);

        std::lock_guard<std::mutex> lock(mutex);
        said.insert(text);
    });

    // Every rank says the same: the rank, both ranks, or nothing.
    ASSERT_EQ(said.size(), 1u);
    std::string one = concat(called, name, ": rank ", rank, " has other values than ranks ");
    std::string two = concat(called, name, ": ranks ");
    std::string want = holders > 2 ? one : holders == 2 ? two : "";
    EXPECT_EQ(said.begin()->substr(0, want.size()), want) << layout_name(l);
    EXPECT_EQ(said.begin()->empty(), want.empty()) << layout_name(l) << *said.begin();
}

TEST_F(Checkpoints, ATurnedBitIsFoundAndItsRankNamed) {
    std::vector<LayoutCase> with_replicas = {{3, 1, 0, 3, 0}, {3, 1, 2, 3, 0}, {2, 2, 0, 2, 0},
                                             {1, 2, 0, 1, 0}, {4, 1, 3, 2, 0}, {2, 1, 3, 2, 0}};
    for (const LayoutCase& l : with_replicas)
        for (const char* name : {"h.0.mlp.c_fc.weight", "h.1.ln_1.weight", "wte.weight"})
            for (int rank = 0; rank < l.ranks(); rank += 2)
                turn_a_bit(l, shapes_to_cut()[0], name, rank);

    // Four ranks share a layer. Two of them hold the same key head, and all of them hold the norms.
    for (const char* name : {"self_attn.k_proj.weight", "self_attn.q_proj.weight",
                             "input_layernorm.weight"})
        for (int rank = 0; rank < 4; rank++)
            turn_a_bit({1, 1, 0, 1, 0, 4}, shapes_to_cut()[1], concat("model.layers.1.", name),
                       rank);

    // Six ranks see different tokens. Three of them hold the same experts.
    for (int rank : {0, 1, 5})
        turn_a_bit({6, 1, 0, 6, 0, 1, false, 2}, small_mixtral(),
                   "model.layers.1.block_sparse_moe.experts.{}.w1.weight", rank);

    // So do six ranks of which pairs share a layer, but not its whole experts.
    for (int rank : {0, 1, 5})
        turn_a_bit({3, 1, 0, 3, 0, 2, false, 2, true}, small_mixtral(),
                   "model.layers.1.block_sparse_moe.experts.{}.w1.weight", rank);
}

// Masters and moments have copies too, where ZeRO leaves them whole or where its groups repeat.
TEST_F(Checkpoints, ATurnedBitOfAMomentOrAMasterIsFound) {
    Shape s = shapes_to_cut()[0];
    const char* name = "h.1.mlp.c_fc.weight";
    for (const LayoutCase& l : {LayoutCase{3, 1, 0, 3, 0}, {4, 1, 3, 2, 0}, {4, 1, 1, 4, 0}}) {
        turn_a_bit(l, s, name, 2, {Kind::STATE, 0, 0}, "m of ");
        turn_a_bit(l, s, name, 0, {Kind::STATE, 0, 1}, "v of ");
        turn_a_bit<bf16>(l, s, name, 1, {Kind::MASTER}, "the master of ");
    }

    // NorMuon's are on all ranks that have a part of the matrix.
    for (LayoutCase l : {LayoutCase{3, 1, 2, 3, 0}, {2, 1, 0, 2, 0, 2}}) {
        l.muon = true;
        turn_a_bit(l, s, name, 2, {Kind::NEURONS}, "v of ");
    }

    // A norm's moments are on all ranks of a layer.
    turn_a_bit({1, 1, 0, 1, 0, 4}, s, "h.1.ln_1.weight", 3, {Kind::STATE, 0, 1}, "v of ");
}

// One rank computes a wrong result, in one action and at some of its times. Its gradients enter
// everybody's sums, so all ranks stay alike. A replay of the step must name the rank and the
// action, and must change nothing.
enum class Wrong { NEVER, ALWAYS, AT_TIMES, ONCE };
static std::string replay_with(const LayoutCase& l, const Shape& s, int rank, Op op, Wrong wrong) {
    std::set<std::string> said;
    std::mutex mutex;
    on_ranks<float>(l, s, 3, [&](Small<float>& m) {
        Trainer<float, Cpu>& t = m.t;
        int times = 0;

        // Spoil the rank's result of layer 1 in the first micro-batch.
        t.hooks.after = [&](const Action& a) {
            if (t.comms.world.rank != rank || a.op != op || a.layer != 1 || a.micro) return;
            float* x = op == Op::F ? output_of(t, a) : input_gradient(t, a);
            times++;
            bool now = wrong == Wrong::ALWAYS || (wrong == Wrong::ONCE && times == 1);
            if (now) x[5] *= 1.001f;
            if (wrong == Wrong::AT_TIMES) x[5] *= 1 + 0.001f * float(times);
        };

        // Train one step, then replay it.
        run_plan(t, 0);
        t.data.cursor += 8;
        if (l.tp == 1) { // ranks that share a layer differ by now
            EXPECT_EQ(replicas_differ(t), "");
        }

        std::string before = state_of(m), text = replay_step(t, 0);
        EXPECT_TRUE(state_of(m) == before) << layout_name(l);
        EXPECT_EQ(t.data.cursor, 8u);
        std::lock_guard<std::mutex> lock(mutex);
        said.insert(text);
    });
    EXPECT_EQ(said.size(), 1u);
    return *said.begin();
}

TEST_F(Checkpoints, ARankThatComputesWrongIsNamedByAReplay) {
    Shape s = shapes_to_cut()[0];
    std::string replay = "in a replay of the step rank";
    LayoutCase three = {3, 1, 0, 3, 0}, sharded = {4, 1, 3, 4, 0}, two = {2, 1, 0, 2, 0},
               stages = {3, 2, 0, 3, 0}, cut = {3, 1, 0, 3, 0, 2};
    for (const LayoutCase& l : {three, sharded}) {
        EXPECT_EQ(replay_with(l, s, 1, Op::F, Wrong::NEVER), "");
        EXPECT_EQ(replay_with(l, s, 1, Op::F, Wrong::ONCE), "");
        EXPECT_EQ(replay_with(l, s, 1, Op::F, Wrong::ALWAYS),
                  replay + " 1 made another result of F(0,1) than the others");
        EXPECT_EQ(replay_with(l, s, 2, Op::B, Wrong::AT_TIMES),
                  replay + " 2 made another result of B(0,1) than the others");
    }

    // With two ranks nobody can say which is wrong, unless a rank differs from its own first time.
    EXPECT_EQ(replay_with(two, s, 1, Op::F, Wrong::ALWAYS),
              replay + "s 0 and 1 made different results of F(0,1), each its own again");
    EXPECT_EQ(replay_with(two, s, 1, Op::F, Wrong::AT_TIMES),
              replay + " 1 made another result of F(0,1) than the time before");

    // The first wrong rank of a replica is named, and not the ranks that compute with its result.
    EXPECT_EQ(replay_with(stages, s, 4, Op::F, Wrong::NEVER), "");
    EXPECT_EQ(replay_with(stages, s, 2, Op::F, Wrong::ALWAYS),
              replay + " 2 made another result of F(0,1) than the others");
    EXPECT_HAS(replay_with(cut, s, 3, Op::F, Wrong::ALWAYS),
               replay + " 3 made another result of F(0,1)");
}

// A rank is not blamed for computing with weights that differ: the replay reports them until
// even_weights() makes them equal.
TEST_F(Checkpoints, AReplayBeginsWithEvenWeights) {
    on_ranks<float>({2, 1, 0, 2, 0, 2}, shapes_to_cut()[1], 3, [&](Small<float>& m) {
        const Parameter& p = m.t.model.parameters[3];
        Data weight = {Kind::WEIGHT, p.bucket};
        if (m.t.comms.world.rank == 3)
            fill_kept<float>(m.t, weight, kept_range(m.t, weight, p).at, 1,
                             [](size_t) { return 3.0f; });
        run_plan(m.t, 0);
        EXPECT_NE(replicas_differ(m.t), "");
        EXPECT_NE(replay_step(m.t, 0), "");
        even_weights(m.t);
        EXPECT_EQ(replay_step(m.t, 0), "");
    });
}

// A load whose weights differ from those that were saved says so, even if checksums agree.
TEST_F(Checkpoints, ALoadComparesTheWeightsSums) {
    Shape s = shapes_to_cut()[0];
    on_ranks<float>(layouts[3], s, 3, [&](Small<float>& m) {
        run_plan(m.t, 0);
        EXPECT_EQ(checkpoint_save(m.t, {1, 8, 0, {}}, dir, 5), "");
    });
    std::string manifest = dir + "/step_00000001/manifest.json";
    json m = read_json(manifest);
    ASSERT_EQ(m["weight_sums"].size(), random_model<float>(s)->t.model.parameters.size());
    auto load = [&](const json& changed) {
        json again = changed;
        again["crc32"] = manifest_crc(again);
        put_file(manifest, manifest_text(again));
        std::string wrong;
        on_ranks<float>(layouts[4], s, 4, [&](Small<float>& b) {
            std::string text = load_checkpoint(b, dir).wrong;
            if (b.t.comms.world.rank == 1) wrong = text;
        });
        return wrong;
    };

    EXPECT_EQ(load(m), "");
    json other = m;
    other["weight_sums"]["ln_f.weight"] = m["weight_sums"]["ln_f.weight"].get<uint64_t>() + 1;
    EXPECT_HAS(load(other), "tensor ln_f.weight is not what was saved");

    // Weights that are rounded in another way, and manifests without sums, are not compared.
    other["rounding"] = "remainder";
    EXPECT_EQ(load(other), "");
    m.erase("weight_sums");
    EXPECT_EQ(load(m), "");
}

TEST_F(Checkpoints, ARanksFileThatIsBrokenIsNoticedByAll) {
    Shape s = shapes_to_cut()[0];
    for (int64_t step : {1, 2})
        on_ranks<float>(layouts[3], s, uint64_t(step), [&](Small<float>& m) {
            run_plan(m.t, 0);
            EXPECT_EQ(checkpoint_save(m.t, {step, uint64_t(step), 0, {}}, dir, 5), "");
        });

    std::string folder = dir + "/step_00000002", manifest = folder + "/manifest.json",
                list = read_file(manifest);
    auto falls_back = [&](const std::string& part) {
        Loaded l = load_everywhere(dir, s, true);
        EXPECT_EQ(l.wrong, "");
        EXPECT_EQ(l.info.step, 1);
        EXPECT_HAS(l.notes.at(0), part);
        EXPECT_HAS(l.notes.at(0), ": skipped");
    };

    // Each rank's file in turn: missing, cut, and with a bit turned.
    for (const char* name : {"rank_00000.safetensors", "rank_00001.safetensors"}) {
        std::string file = folder + "/" + name, whole = read_file(file), flipped = whole;
        fs::remove(file), falls_back(std::string(name) + ": No such file");
        put_file(file, whole.substr(0, whole.size() - 1));
        falls_back(std::string(name) + ": is " + std::to_string(whole.size() - 1) + " bytes");
        flipped[flipped.size() - 9] ^= 4;
        put_file(file, flipped), falls_back(std::string(name) + ": its checksum is");
        put_file(file, whole);
    }

    // Manifests with a right checksum and wrong contents are refused.
    auto change_manifest = [&](auto change) {
        json m = json::parse(list);
        change(m["files"]);
        m["crc32"] = manifest_crc(m);
        put_file(manifest, manifest_text(m));
    };
    auto refused = [&](const std::string& part, auto change) {
        change_manifest(change);
        Loaded l = load_everywhere(dir, s, false);
        EXPECT_HAS(l.wrong, folder);
        EXPECT_HAS(l.wrong, part);
        EXPECT_EQ(l.notes.size(), 0u);
    };

    // A matrix that both ranks hold a part of: the first rank's elements, then the second's.
    const std::string cut = "m.h.0.mlp.c_fc.weight"; // [0, 6528) is the first rank's, of 9216
    auto range = [&](json& files, int rank) -> json& { return files[rank]["tensors"][cut]; };
    json files = json::parse(list)["files"];
    size_t at = range(files, 1)[0].get<size_t>();
    ASSERT_TRUE(at > 0 && at < 9216);
    ASSERT_EQ(range(files, 0), json({0, at}));
    ASSERT_EQ(range(files, 1), json({at, 9216 - at}));

    // Elements that are twice in the files, or in none.
    std::string where = "tensor " + cut + ": elements ", edge = std::to_string(at);
    refused("are there twice", [&](json& f) { f.push_back(f[1]); });
    refused("are in no file", [&](json& f) { f.erase(1); });
    refused(where + edge + " to 9216 of 9216 are in no file",
            [&](json& f) { f[1]["tensors"].erase(cut); });
    refused(where + "0 to " + edge + " of 9216 are in no file",
            [&](json& f) { f[0]["tensors"].erase(cut); });
    refused(where + std::to_string(at - 1) + " to " + edge + " of 9216 are there twice",
            [&](json& f) { range(f, 1)[0] = at - 1; });
    refused("tensor " + cut + " reaches beyond its parameter",
            [&](json& f) { range(f, 1)[0] = at + 1; });
    refused("tensor " + cut + " reaches beyond its parameter",
            [&](json& f) { range(f, 1)[0] = ~size_t(0); });

    // Elements of the vocabulary's padding, which no file may hold.
    const std::string table = "param.wte.weight"; // 100 of its 128 rows are words
    FileWriter w;
    writer_open(&w, folder + "/rank_00002.safetensors", {{table, Type::F32, {10}}}, {});
    writer_put(w, std::vector<float>(10).data(), 40);
    ASSERT_EQ(writer_close(&w), "");

    refused(
        "elements 4800 to 4810 of 4800 are vocabulary padding; to go on from the checkpoint "
        "before, remove " +
            folder,
        [&](json& f) {
            f.push_back({{"file", "rank_00002.safetensors"},
                         {"bytes", w.bytes},
                         {"crc32", w.crc},
                         {"tp", 1},
                         {"tp_rank", 0},
                         {"tensors", {{table, {4800, 10}}}}});
        });

    // A tensor of another size than its range, and a tensor that its file lacks.
    refused("tensor " + cut + " is F32(" + edge + "), not F32(" + std::to_string(at - 1) + ")",
            [&](json& f) { range(f, 0)[1] = at - 1; });
    const std::string lost = "m.h.1.ln_1.bias";
    refused("rank_00001.safetensors: tensor " + lost + " is missing", [&](json& f) {
        f[1]["tensors"][lost] = f[0]["tensors"][lost], f[0]["tensors"].erase(lost);
    });

    // An entry that makes no sense is a broken manifest.
    change_manifest([&](json& f) { range(f, 1) = 3; }), falls_back("manifest.json is broken");
    EXPECT_HAS(load_everywhere(dir + "/nowhere", s, false).wrong, "holds no whole checkpoint");
}

// Kill a child at each of its writes in turn. The files that it leaves load to the older
// state or to the new one.
TEST_F(Checkpoints, KilledAtAnyWriteNothingIsLost) {
    Shape s = saved_shapes()[0];
    for (const LayoutCase& layout : {layouts[0], layouts[5]}) {
        auto save = [&](int64_t step) {
            on_ranks<float>(layout, s, uint64_t(step), [&](Small<float>& m) {
                EXPECT_EQ(checkpoint_save(m.t, {step, 0, 0, {}}, dir, 5), "");
            });
        };

        save(1);
        size_t largest_file = 0;
        for (const auto& [name, bytes] : folder_bytes(dir + "/step_00000001"))
            largest_file = std::max(largest_file, bytes.size());
        int killed = 0, whole = 0;

        for (size_t limit = 0; limit < largest_file * 11 / 10; limit += largest_file / 23) {
            pid_t child = fork();
            if (child == 0) {
                rlimit r = {limit, limit}; // SIGXFSZ kills the writer at this byte of a file
                setrlimit(RLIMIT_FSIZE, &r);
                save(2);
                _exit(0);
            }
            int status;
            waitpid(child, &status, 0);
            Loaded l = load_checkpoint(*random_model<float>(s), dir);
            ASSERT_EQ(l.wrong, "") << limit;
            EXPECT_EQ(l.info.step, WIFEXITED(status) ? 2 : 1) << limit;
            (WIFEXITED(status) ? whole : killed)++;
            fs::remove_all(dir + "/step_00000002");
        }
        EXPECT_GT(killed, 15);
        EXPECT_GT(whole, 0);
    }
}
