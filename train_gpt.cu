// train_gpt.cu - train, evaluate and sample GPT-2 and Llama: main reads as the life of a run
//   The step itself is a plan (llmc/plan.h) that one loop runs (llmc/step.h). Compiles as plain C++
//   too:
//   g++ -x c++ train_gpt.cu.   Usage: train_gpt --help
#include <sys/stat.h>
#include <filesystem>
#include "llmc/checkpoint.h"
#include "llmc/config.h"
#include "llmc/dataloader.h"
#include "llmc/evaluate.h"
#include "llmc/explain.h"
#include "llmc/generate.h"
#include "llmc/huggingface.h"
#include "llmc/logger.h"
#include "llmc/lr_schedule.h"
#include "llmc/mfu.h"
#include "llmc/model_files.h"
#include "llmc/prepare.h"
#include "llmc/tokenizer_export.h"

// What a run has beside its trainer.
struct Run {
    Config config;
    Shape shape;
    Tokenizer tokenizer;
    ExportTokenizer exported; // with --export
    std::vector<int> prompt;
    DataLoader train, val;
    size_t val_samples = 0, val_bytes = 0; // of validation; bytes 0: not known
    Evaluation tasks;
    int document_end = -1; // the token, with --document-mask
    int train_plan = -1, evaluate_plan = -1, score_plan = -1,
        generate_plan = -1; // -1: this run has none
    Logger log;
    int64_t step = 0; // optimizer steps done
    double peak = 0;  // FLOP/s of one product, on all ranks
    Comm world;
    Grid grid;
    std::vector<Box> boxes; // of the last step, for --timeline
};
static bool is_first(const Run& run) { return run.world.rank == 0; } // prints, and writes files

static void or_die(const std::string& wrong) { USER_CHECK(wrong.empty(), "%s", wrong.c_str()); }
static mode_t kind_of(const std::string& path) { // S_IFDIR, S_IFREG, ...; 0: there is none
    struct stat s;
    return stat(path.c_str(), &s) == 0 ? s.st_mode & S_IFMT : 0;
}

// An error that all ranks know: the first one says so, and ends the others' wait.
static void or_die_together(const Run& run, const std::string& wrong) {
    if (!wrong.empty() && !is_first(run)) barrier(run.world, Cpu{});
    or_die(wrong);
}

// ----------------------------------------------------------------------------
// before the run: the model's shape, the text, the plans

static Shape choose_shape(const Config& c) {
    Shape s;
    if (mode_t kind = kind_of(c.model)) {
        or_die(kind == S_IFDIR ? hf_read_config(&s, c.model) : model_file_shape(&s, c.model));
        USER_CHECK(c.scratch || !(c.layers || c.heads || c.kv_heads || c.channels || c.ffn ||
                                  c.vocab || c.position.size()),
                   "%s has weights of its own shape: to change the shape, start from new weights "
                   "with --scratch",
                   c.model.c_str());
    } else {
        std::vector<std::string> names;
        for (const Preset& p : model_presets()) {
            names.push_back(p.name);
            if (c.model == p.name) s = p.shape;
        }
        std::string close = nearest(c.model, names);
        USER_CHECK(s.L > 0,
                   "--model %s is neither a folder, a file nor a preset%s%s%s; presets: %s",
                   c.model.c_str(), close.empty() ? "" : ": did you mean ", close.c_str(),
                   close.empty() ? "" : "?", preset_names().c_str());
    }
    or_die(override_shape(c, s));
    return s;
}

static std::string program_path() {
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 1);
    return std::string(path, n > 0 ? size_t(n) : 0);
}
static std::string program_folder() {
    std::string program = program_path();
    return program.substr(0, program.rfind('/') + 1);
}

static std::string own_bytes() {
    std::ifstream program("/proc/self/exe", std::ios::binary);
    return {std::istreambuf_iterator<char>(program), {}};
}

// Whether the tokenizer is the model's, as far as their sizes tell. A model may have more tokens
// than its tokenizer, as padding.
static bool speaks(const Run& run) {
    size_t tokens = size_t(run.tokenizer.vocab_size);
    return run.tokenizer.kind == TokenizerKind::BYTE ? tokens == run.shape.V
                                                     : tokens <= run.shape.V;
}
static std::string foreign_tokenizer(const Run& run) {
    return concat("the model has ", run.shape.V, " tokens, --tokenizer ", run.config.tokenizer,
                  " writes ", run.tokenizer.vocab_size, ": give the model's tokenizer");
}

static void open_data(Run& run) {
    Config& c = run.config;
    std::string files = c.data;
    if (files.empty()) {
        for (const std::string& f : project_sources(program_folder()))
            files += (files.empty() ? "" : ",") + f;
        USER_CHECK(!files.empty(),
                   "no --data, and the project's own sources are not beside the program: give "
                   "--data FILE");
    }
    bool train = c.steps > 0 && !c.eval;
    if (train)
        or_die(data_open(&run.train, files, Part::TRAIN, !c.val.empty(), run.tokenizer, c.seq,
                         run.shape.V, c.seed));
    or_die(data_open(&run.val, c.val.empty() ? files : c.val, Part::VAL, !c.val.empty(),
                     run.tokenizer, c.seq, run.shape.V, c.seed));
    run.val_samples = size_t(std::clamp<int64_t>(c.eval_tokens / c.seq, 1, run.val.windows));
    if (speaks(run)) run.val_bytes = target_bytes(run.val, run.tokenizer, run.val_samples);
    if (train && !c.val.empty()) or_die(data_disjoint(run.train, run.val));
    if (train && c.document_mask)
        or_die(data_document_end(run.train, run.tokenizer, c.document_end, &run.document_end));
}

// The text that a sample continues; without one the token that begins or ends texts. Where the
// tokenizer is not the model's a sample starts from the model's last token, GPT-2's end of text,
// and is printed as numbers.
static std::vector<int> prompt_tokens(const Run& run) {
    const Tokenizer& t = run.tokenizer;
    if (!speaks(run)) return {int(run.shape.V) - 1};
    if (!run.config.prompt.empty() || t.bos >= 0) return encode_from_start(t, run.config.prompt);
    return t.eot >= 0 ? std::vector<int>{t.eot} : encode(t, "\n");
}

// Left out it is the model folder's own, where it has one.
static void open_tokenizer(Run& run) {
    Config& c = run.config;
    bool left_out = c.tokenizer.empty();
    if (left_out && kind_of(c.model) == S_IFDIR) c.tokenizer = tokenizer_in(c.model);
    if (c.tokenizer.empty()) c.tokenizer = "byte";
    std::string wrong = tokenizer_open(&run.tokenizer, c.tokenizer);
    USER_CHECK(wrong.empty(), "%s%s", wrong.c_str(),
               left_out ? "; --tokenizer byte leaves the folder's out" : "");
    if (left_out && c.tokenizer != "byte" && is_first(run))
        printf("tokenizer: %s\n", c.tokenizer.c_str());
}

static bool is_model_file(const std::string& path) { return path.ends_with(".bin"); }
static Type export_type(const Config& c) {
    return c.export_dtype == "bf16" ? Type::BF16 : c.export_dtype == "fp16" ? Type::F16 : Type::F32;
}

// Before the run, for nothing may fail after it. A tokenizer that is not the model's stays out.
static void prepare_export(Run& run) {
    const Config& c = run.config;
    const Tokenizer& t = run.tokenizer;
    std::error_code none;
    USER_CHECK(!std::filesystem::equivalent(c.model, c.export_dir, none),
               "--export %s: is what --model reads: choose another name", c.export_dir.c_str());
    if (is_model_file(c.export_dir))
        return or_die(model_file_check(run.shape, c.export_dir, export_type(c)));
    or_die(hf_export_check(run.shape, c.export_dir));
    bool known = speaks(run);
    std::string note = known ? tokenizer_files(&run.exported.files, t, run.shape.P)
                             : "--tokenizer " + c.tokenizer + " is not the model's";
    run.exported.eos = known ? t.eot : run.shape.V == 50257 ? 50256 : -1; // GPT-2's
    run.exported.bos = known && t.bos >= 0 ? t.bos : run.exported.eos;
    if (!note.empty() && is_first(run))
        printf("--export writes no tokenizer.json: %s\n", note.c_str());
}

static void choose_prompt(Run& run) {
    const Config& c = run.config;
    USER_CHECK(c.prompt.empty() || speaks(run), "--prompt: %s", foreign_tokenizer(run).c_str());
    run.prompt = prompt_tokens(run);
    USER_CHECK(run.prompt.size() < run.shape.P,
               "--prompt has %zu tokens, the model %zu positions: shorten it", run.prompt.size(),
               run.shape.P);
}

// The questions of --evaluate.
static void open_tasks(Run& run) {
    const Config& c = run.config;
    if (c.evaluate.empty()) return;
    USER_CHECK(speaks(run), "--evaluate: %s", foreign_tokenizer(run).c_str());
    or_die(read_tasks(&run.tasks, c.evaluate, run.tokenizer, run.shape.P));
    if (run.world.size == 1) return;
    std::string all;
    for (const Candidate& x : run.tasks.candidates)
        for (int token : x.tokens) all += std::to_string(token) + " ";
    check_same(run.world, "the questions of --evaluate", all);
}

static Pipeline choose_pipeline(const Config& c, int micro_batches, std::vector<Schedule>* given) {
    const char* names[] = {"gpipe", "1f1b", "interleaved", "zero-bubble"};
    for (int i = 0; i < 4; i++)
        if (c.pipeline == names[i]) return Pipeline(i);
    std::ifstream file(c.pipeline);
    USER_CHECK(file, "--pipeline %s is neither gpipe, 1f1b, interleaved, zero-bubble nor a file",
               c.pipeline.c_str());
    std::string wrong = read_schedule(file, *given);
    if (wrong.empty()) wrong = check_schedule(*given, c.pp, c.chunks, micro_batches);
    USER_CHECK(wrong.empty(), "--pipeline %s: %s", c.pipeline.c_str(), wrong.c_str());
    return Pipeline::GIVEN;
}

// The layers of each stage, balanced by their products: the head's is the vocabulary's.
static std::vector<int> choose_stages(const Run& run, int stages) {
    Model model = make_model(run.shape);
    std::vector<double> cost(size_t(model.layers()), 0);
    for (const Parameter& p : model.parameters)
        if (p.shape.size() == 2 && p.layer > 0) cost[size_t(p.layer)] += double(p.elements());
    if (run.shape.tied) cost.back() = double(run.shape.Vp() * run.shape.C);
    return split_layers(cost, stages);
}

static std::vector<Plan> choose_plans(Run& run) {
    const Config& c = run.config;
    std::vector<Plan> plans;
    auto add = [&](Plan p) {
        plans.push_back(p);
        return int(plans.size()) - 1;
    };
    Plan p;
    p.B = size_t(c.micro_batch), p.T = size_t(c.seq), p.adamw = c.optimizer == "adamw";
    p.recompute = c.recompute == "full"        ? Recompute::FULL
                  : c.recompute == "selective" ? Recompute::SELECTIVE
                                               : Recompute::NONE;
    p.micro_batches = int(c.batch_tokens / (int64_t(c.micro_batch) * c.seq * c.dp));
    p.pp = c.pp, p.pp_rank = run.grid.pp_rank, p.chunks = c.chunks;
    p.shards = c.zero_group ? c.zero_group : c.dp, p.replicas = c.dp / p.shards;
    p.shard = run.grid.dp_rank % p.shards, p.zero = c.zero, p.prefetch = c.prefetch;
    p.tp = c.tp, p.tp_rank = run.grid.tp_rank, p.sequence_parallel = c.sequence_parallel;
    p.pipeline = choose_pipeline(c, p.micro_batches, &p.given);
    if (p.stages() > 1) p.first_layer = choose_stages(run, p.stages());
    if (c.steps > 0 && !c.eval) run.train_plan = add(p);
    p.mode = Mode::EVALUATE, p.recompute = Recompute::NONE, p.micro_batches = 1;
    if (c.steps > 0 || c.eval)
        run.evaluate_plan = add(p);
    else if (c.sample_tokens == 0)
        add(p); // only to export: never run, but its weights have a place
    if (!run.tasks.tasks.empty()) run.score_plan = add(score_plan(p, run.tasks, run.shape.P));
    p.mode = Mode::GENERATE, p.B = 1, p.T = run.prompt.size();
    p.cache = std::min(run.shape.P, run.prompt.size() + size_t(c.sample_tokens));
    if (c.sample_tokens > 0 && !c.eval) run.generate_plan = add(p);
    return plans;
}

// ----------------------------------------------------------------------------
// during the run

template <typename T, typename S> Loss evaluate(Run& run, Trainer<T, S>& t) {
    Loss total;
    auto window = [&](uint64_t sample, int* tokens, int* targets) {
        return load_window(run.val, sample, tokens, targets);
    };
    run_samples(t, run.evaluate_plan, run.val_samples, window, [&] {
        Loss loss = plan_loss(t);
        total.sum += loss.sum, total.valid += loss.valid;
    });
    return total;
}

template <typename T, typename S> void report_validation(Run& run, Trainer<T, S>& t) {
    Loss loss = evaluate(run, t);
    if (!is_first(run)) return;
    nlohmann::json j = {{"step", run.step}, {"val_loss", loss.mean()}};
    printf("val loss %.4f", loss.mean());
    if (run.val_bytes) {
        j["bits_per_byte"] = bits_per_byte(loss.sum, run.val_bytes);
        printf(" | %.4f bits per byte", double(j["bits_per_byte"]));
    }
    printf("\n");
    fflush(stdout);
    or_die(log_append(run.log, j));
}

template <typename T, typename S> void report_tasks(Run& run, Trainer<T, S>& t) {
    if (run.score_plan < 0) return;
    score_candidates(t, run.score_plan, run.tasks.candidates);
    if (!is_first(run)) return;
    nlohmann::json j = {{"step", run.step}};
    for (const Task& task : run.tasks.tasks) {
        Score score = score_task(task, run.tasks.candidates);
        printf("%s", score_text(task, score).c_str());
        score_log(j, task, score);
    }
    fflush(stdout);
    or_die(log_append(run.log, j));
}

template <typename T, typename S> void report_evaluation(Run& run, Trainer<T, S>& t) {
    report_validation(run, t);
    report_tasks(run, t);
}

template <typename T, typename S> void print_sample(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    bool text = speaks(run);
    auto emit = [&](int token) {
        if (!is_first(run)) return;
        text ? (void)fputs(decode(run.tokenizer, token).c_str(), stdout)
             : (void)printf("%d ", token);
        fflush(stdout);
    };
    if (is_first(run)) printf("---\n%s", c.prompt.c_str());
    for (size_t i = 0; !text && i < run.prompt.size(); i++) emit(run.prompt[i]);
    generate(t, run.generate_plan, run.prompt, size_t(c.sample_tokens),
             {float(c.temperature), float(c.top_p), c.top_k, uint64_t(c.seed), run.step}, emit);
    if (is_first(run)) printf("\n---\n");
}

template <typename T, typename S> void save(Run& run, Trainer<T, S>& t) {
    CheckpointInfo info;
    info.step = run.step, info.cursor = t.cursor, info.seed = uint64_t(run.config.seed),
    info.config = config_json(run.config);
    or_die_together(run, checkpoint_save(t, info, run.config.out, run.config.keep));
}

template <typename T, typename S> void write_export(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    or_die(is_model_file(c.export_dir)
               ? model_file_export(t, c.export_dir, export_type(c))
               : hf_export(t, c.export_dir, export_type(c), size_t(5) << 30, run.exported));
}

// The boxes of all ranks, from the first one's start on, to the first rank; all ranks call it.
static Lanes gather_lanes(const Run& run, const std::vector<Box>& mine) {
    Lanes lanes(size_t(run.world.size));
    for (int r = 0; r < run.world.size; r++) {
        int64_t count = int64_t(mine.size());
        broadcast(run.world, &count, 1, r, Cpu{});
        std::vector<Box> boxes = mine;
        boxes.resize(size_t(count));
        for (Box& b : boxes) {
            char name[256] = {};
            snprintf(name, sizeof(name), "%s", b.name.c_str());
            broadcast(run.world, reinterpret_cast<unsigned char*>(name), sizeof(name), r, Cpu{});
            broadcast(run.world, &b.start, 1, r, Cpu{}), broadcast(run.world, &b.end, 1, r, Cpu{});
            b.name = name;
        }
        lanes[size_t(r)] = boxes;
    }
    double first = INFINITY;
    for (auto& lane : lanes)
        for (Box& b : lane) first = std::min(first, b.start);
    for (auto& lane : lanes)
        for (Box& b : lane) b.start -= first, b.end -= first;
    return lanes;
}

static std::string axes_text(const Config& c) {
    return "dp " + std::to_string(c.dp) + " x tp " + std::to_string(c.tp) +
           (c.sequence_parallel ? " with sequence parallelism" : "") + " x pp " +
           std::to_string(c.pp);
}
static std::string layout_text(const Config& c) {
    return c.model + ", " + axes_text(c) + ", zero " + std::to_string(c.zero) + ", " + c.pipeline;
}

template <typename T, typename S> void train_step(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    bool drawn = !c.timeline.empty() && run.step + 1 == c.steps;
    t.trace = drawn ? &run.boxes : nullptr;
    double start = seconds_now();
    t.hyper.lr = float(lr_at(run.step, c.steps, c.warmup, c.lr, c.min_lr, c.schedule));
    run_plan(t, run.train_plan);
    double loss = plan_loss(t).mean(), seconds = seconds_now() - start;
    t.trace = nullptr;
    if (drawn) {
        Lanes lanes = gather_lanes(run, run.boxes);
        if (is_first(run))
            or_die(write_timeline(c.timeline, lanes, layout_text(c) + ": the last step"));
    }
    StepScale scale = read_value<StepScale>(t, {Kind::SCALE});
    bool good = std::isfinite(loss) && scale.finite;        // the same on all ranks
    if (!good && !is_first(run)) barrier(run.world, Cpu{}); // until the first has said so
    USER_CHECK(std::isfinite(loss) && scale.finite,
               "step %lld: the loss is %g and the gradient norm %g: the weights are those of the "
               "step before. Lower --lr, "
               "lengthen --warmup or set --clip 1%s",
               (long long)run.step + 1, loss, scale.norm,
               c.out.empty() ? "" : "; --resume goes on from the last checkpoint");
    run.step++;
    t.cursor += uint64_t(c.batch_tokens / c.seq);
    if (!is_first(run)) return;
    double flops = flops_per_token(t.model, size_t(c.seq)) * double(c.batch_tokens);
    or_die(
        log_step(run.log, {run.step, c.steps, loss, scale.norm, t.hyper.lr, seconds, c.batch_tokens,
                           run.step * c.batch_tokens, flops / seconds / run.peak}));
}

// ----------------------------------------------------------------------------
// the life of a run

template <typename T, typename S> void prepare_weights(Run& run, Trainer<T, S>& t) {
    const Config& c = run.config;
    init_constants(t);
    if (c.resume) {
        CheckpointInfo info;
        std::vector<std::string> notes;
        std::string wrong = checkpoint_load(t, &info, c.out, &notes);
        for (const std::string& note : notes)
            if (is_first(run)) fprintf(stderr, "note: %s\n", note.c_str());
        or_die_together(run, wrong);
        run.step = info.step, t.cursor = info.cursor;
        USER_CHECK(
            info.seed == uint64_t(c.seed),
            "the checkpoint was made with --seed %llu, not %lld: the data order would change",
            (unsigned long long)info.seed, (long long)c.seed);
        if (is_first(run)) printf("resumed at step %lld\n", (long long)run.step);
    } else if (mode_t kind = c.scratch ? 0 : kind_of(c.model))
        or_die(kind == S_IFDIR ? hf_load_weights(t, c.model) : model_file_load(t, c.model));
    else
        init_weights(t, uint64_t(c.seed));
}

// One step and one evaluation on zeros, before there is anything to lose: on a GPU each product
// measures which algorithm is fastest.
template <typename T, typename S> void rehearse(Run& run, Trainer<T, S>& t) {
    if (!blas_rehearse(t.ctx.blas, true, t.ctx.where)) return;
    Window window = t.window;
    t.window = [&](uint64_t, int* tokens, int* targets) {
        size_t n = t.plans[size_t(t.plan)].T;
        std::fill_n(tokens, n, 0), std::fill_n(targets, n, 0);
        return std::string();
    };
    init_constants(t);
    for (int plan : {run.train_plan, run.evaluate_plan, run.score_plan})
        if (plan >= 0) run_plan(t, plan);
    wait_for(t.ctx.where);
    blas_rehearse(t.ctx.blas, false, t.ctx.where);
    device_zero(t.arena.base, t.arena.bytes, t.ctx.where);
    t.window = window;
}

template <typename T, typename S>
void print_plan(const Run& run, const Trainer<T, S>& t, const std::vector<Plan>& options) {
    const Config& c = run.config;
    const Arena& arena = t.arena;
    const std::vector<Plan>& plans = t.plans;
    const Model& model = t.model;
    int plan = std::max(0, run.train_plan >= 0 ? run.train_plan : run.evaluate_plan);
    USER_CHECK(c.layer < model.layers(), "--layer %d: the model has layers 0 to %d", c.layer,
               model.head());
    if (!c.timeline.empty() && run.train_plan >= 0) {
        const Plan& p = plans[size_t(plan)];
        std::vector<Schedule> all = schedules_of(p);
        Simulation s = simulate(all, p.pp);
        char idle[64];
        snprintf(idle, sizeof(idle), ": ranks are idle %.1f%% of a step", 100 * s.bubble);
        or_die(write_timeline(c.timeline, simulated_lanes(all, s), layout_text(c) + idle));
    }
    if (run.train_plan >= 0)
        printf("%s",
               run_text(model, size_t(c.seq), c.steps, c.batch_tokens, rank_count(c)).c_str());
    if (rank_count(c) > 1) {
        std::string text;
        or_die(cluster_text<T>(options, model, t.ctx.where, &text));
        printf("%srank 0 of %d\n", text.c_str(), rank_count(c));
    }
    printf("%s", memory_text(arena, plans, model).c_str());
    if (c.layer >= 0)
        printf("actions of layer %d, first micro-batch\n%s", c.layer,
               layer_text(arena, plans[size_t(plan)], model, plan, c.layer).c_str());
    else
        printf("actions of a step, kind(micro-batch,layer)\n%s",
               plan_text(plans[size_t(plan)], model).c_str());
}

// The plans of all ranks of the pipeline fit together: seen before anything runs.
static void check_all_plans(const Run& run, const std::vector<Plan>& options, const Model& model) {
    for (const Plan& o : options)
        if (o.pp > 1) or_die_together(run, plans_check(make_plans(o, model), model));
}

// One rank's run.
template <typename T, typename S> void run_training(Run& run, S where) {
    const Config& c = run.config;
    Trainer<T, S> t;
    t.ctx.where = where;
    Grid sizes;
    sizes.dp = c.dp, sizes.pp = c.pp, sizes.tp = c.tp, sizes.order = grid_order(c.grid_order);
    t.grid = run.grid = grid_at(sizes, run.world.rank);
    std::vector<Plan> plans = choose_plans(run);
    trainer_place(t, run.shape, plans);
    if (is_first(run)) printf("%s", parameters_text(t.model).c_str());
    std::string kernels =
        c.explain ? "" : attention_says<T>(attention_shape(run.shape, 1, 1, 1), where);
    if (!kernels.empty() && is_first(run)) printf("attention: %s\n", kernels.c_str());
    if (c.explain) return print_plan(run, t, plans);
    check_all_plans(run, plans, t.model);
    t.comms = make_comms(run.world, run.grid, plans[0].shards, ranks_of_kv_head(plans[0], t.model));
    const Grid& g = run.grid;
    if (run.world.info)
        run.world.info->place = "dp " + std::to_string(g.dp_rank) + ", tp " +
                                std::to_string(g.tp_rank) + ", pp " + std::to_string(g.pp_rank);
    if (run.train_plan >= 0 && is_first(run)) printf("data: %s\n", data_text(run.train).c_str());
    if (run.document_end >= 0 && is_first(run))
        printf("documents: apart, each ends with token %d\n", run.document_end);
    trainer_allocate(t);
    t.hyper = {c.optimizer == "adamw", 0,
               float(c.beta1),         float(c.beta2),
               float(c.eps),           float(c.weight_decay),
               float(c.clip)};
    t.window = [&run](uint64_t sample, int* tokens, int* targets) {
        return load_window(run.train, sample, tokens, targets);
    };
    rehearse(run, t);
    t.document_end = run.document_end;
    prepare_weights(run, t);
    if (!c.out.empty() && is_first(run)) {
        USER_CHECK(mkdir(c.out.c_str(), 0777) == 0 || errno == EEXIST, "--out %s: %s",
                   c.out.c_str(), strerror(errno));
        or_die(log_open(run.log, c.out + "/log.jsonl", run.step,
                        {{"config", config_json(c)},
                         {"flops_per_token", flops_per_token(t.model, size_t(c.seq))}}));
    }
    if (c.eval) return report_evaluation(run, t);
    if (run.train_plan >= 0 && is_first(run)) {
        Peak peak = machine_peak<T>(where);
        // threads run at once as many as have cores of their own; on a GPU they take turns
        int cores = std::max(1, int(std::thread::hardware_concurrency()) / threads_here(Cpu{}));
        int at_once = std::is_same_v<S, Cpu> ? std::min(run.world.size, cores) : 1;
        run.peak = peak.flops * (run.world.local ? at_once : run.world.size);
        printf(
            "mfu: (6 x parameters + 6 L NH HS T) FLOPs a token, against %.0f GFLOP/s in %s: %s\n",
            run.peak / 1e9, c.precision.c_str(), peak.says.c_str());
    }
    while (run.step < c.steps) {
        train_step(run, t);
        bool last = run.step == c.steps;
        if (last || (c.eval_every && run.step % c.eval_every == 0)) report_evaluation(run, t);
        if (run.generate_plan >= 0 && !last && c.sample_every && run.step % c.sample_every == 0)
            print_sample(run, t);
        if (!c.out.empty() && (last || (c.save_every && run.step % c.save_every == 0)))
            save(run, t);
    }
    if (run.generate_plan >= 0) print_sample(run, t);
    if (!c.export_dir.empty()) write_export(run, t);
    trainer_free(t);
}

template <typename S> void run_rank(Run& run, S where) {
    run.config.precision == "bf16" ? run_training<bf16>(run, where)
                                   : run_training<float>(run, where);
}

// body(run) as each rank of this process: itself, or --local-ranks threads.
template <typename F> bool run_ranks(Run& run, F body) {
    const Config& c = run.config;
    bool threads = c.local_ranks > 1 && !c.explain;
    if (is_first(run) && (threads || run.world.size > 1))
        printf("ranks: %d %s, %s\n", rank_count(c), threads ? "threads" : "processes",
               axes_text(c).c_str());
    if (!threads) return body(run), true;
    return run_local_ranks(c.local_ranks, {}, [&](const Comm& world) {
               Run mine = run;
               mine.world = world;
               body(mine);
           }) == 0;
}

static bool run_on_cpu(Run& run) {
    const Config& c = run.config;
    if (is_first(run))
        printf("train_gpt: %s, %s, on the CPU with %d threads, %s\n", c.model.c_str(),
               c.precision.c_str(), threads_here(Cpu{}), matmul_backend());
    return run_ranks(run, [](Run& rank) { run_rank(rank, Cpu{}); });
}

#if KERNELS
// A process of several has a GPU to itself, and NCCL; threads share the first one.
static void join_gpus(Run& run, int gpus) {
#ifdef WITH_NCCL
    if (run.world.size == 1) return;
    or_die(take_gpu(run.world, gpus));
    run.world.fixed_order = run.config.fixed_order;
    run.world = nccl_attach(run.world);
#else
    (void)run, (void)gpus;
#endif
}

static bool run_on_gpu(Run& run) {
    const Config& c = run.config;
    int count = 0;
    cudaError_t answer = cudaGetDeviceCount(&count);
    bool there = answer == cudaSuccess && count > 0;
    const char* why = answer != cudaSuccess ? cudaGetErrorString(answer)
                      : there               ? "another process has none"
                                            : "there is none";
    bool plans_only = c.explain && c.device == "cuda"; // needs no GPU
    USER_CHECK(there || plans_only || c.device == "auto",
               "--device cuda: no GPU answers (%s): use --device cpu", why);
    int64_t with_gpu = there; // all of the processes, or none
    all_reduce_sum(run.world, &with_gpu, 1, Cpu{});
    there = with_gpu == run.world.size;
    if (!there && !plans_only) {
        if (is_first(run)) printf("no GPU answers (%s): on the CPU\n", why);
        return run_on_cpu(run);
    }
    if (there && !c.explain) join_gpus(run, count);
    if (is_first(run))
        printf("train_gpt: %s, %s, on %s\n", c.model.c_str(), c.precision.c_str(),
               there ? device_name(cudaStream_t{}).c_str() : "a GPU that is not here");
    return run_ranks(run, [&](Run& rank) {
        cudaStream_t stream = there ? open_stream(cudaStream_t{}) : nullptr;
        run_rank(rank, stream);
        if (there) close_stream(stream);
    });
}
#endif

// Processes need NCCL to meet on GPUs.
static bool run_where_wanted(Run& run) {
#if KERNELS
#ifdef WITH_NCCL
    bool can = true;
#else
    bool can = run.world.size == 1;
    if (!can && run.config.device == "auto" && is_first(run))
        printf("built without NCCL (install libnccl-dev): processes run on the CPU\n");
#endif
    if (can && run.config.device != "cpu") return run_on_gpu(run);
#endif
    return run_on_cpu(run);
}

// Under mpirun or srun the processes of the job are the ranks.
static void join_processes(Run& run, RankInfo* info, int* argc, char*** argv) {
    const char* size = getenv("OMPI_COMM_WORLD_SIZE");
    bool started = size || getenv("PMIX_RANK") || getenv("PMI_RANK");
    if (const char* rank = getenv("OMPI_COMM_WORLD_RANK")) this_rank = atoi(rank);
#ifdef WITH_MPI
    if (!started) return;
    int given = 0;
    MPI_CHECK(MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &given));
    run.world = mpi_world(*info);
#else
    (void)run, (void)info, (void)argc, (void)argv;
    USER_CHECK(!started || (size && atoi(size) == 1),
               "started as one of several processes, and built without MPI: install "
               "libopenmpi-dev and openmpi-bin and make again, or use --local-ranks");
#endif
}
static void leave_processes(Run& run) {
#ifdef WITH_MPI
    bool joined = run.world.mpi != nullptr;
    run.world = {};
    if (joined) MPI_CHECK(MPI_Finalize());
#else
    (void)run;
#endif
}

// Text to token shards; no model is needed, and one process does it.
static void prepare_data(Run& run) {
    if (!is_first(run)) return;
    open_tokenizer(run);
    or_die(prepare(run.config, run.tokenizer, program_folder()));
}

// OpenMP's threads spin while they wait, and take the cores from threads that work when another
// program wants some of them: a step of 13 ms had a mean of 557 (dev/LOG.md). How long they spin is
// read when the library is loaded, so the program starts once more.
static void spin_briefly(char** argv) {
#ifdef _OPENMP
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
    setenv("GOMP_SPINCOUNT", "1000", 1);
    execv(program_path().c_str(), argv);
#endif
    (void)argv; // where that cannot be they spin
}

int main(int argc, char** argv) {
    spin_briefly(argv);
    setvbuf(stdout, nullptr, _IOLBF, 0);
    RankInfo info;
    Run run;
    join_processes(run, &info, &argc, &argv);
    Config& c = run.config;
    or_die(parse_arguments(c, argc, argv));
    if (c.help) return is_first(run) && fputs(help_text().c_str(), stdout), leave_processes(run), 0;
    if (!c.prepare.empty()) return prepare_data(run), leave_processes(run), 0;
    run.shape = choose_shape(c);
    or_die(config_check(c, run.shape, run.world.size));
    check_same(run.world, "the command line", config_json(c).dump());
    if (run.world.size > 1) check_same(run.world, "the program", own_bytes());
    open_tokenizer(run);
    if (!c.export_dir.empty()) prepare_export(run);
    choose_prompt(run);
    open_tasks(run);
    if (!c.explain && (c.steps > 0 || c.eval)) open_data(run);
    bool good = run_where_wanted(run);
    leave_processes(run);
    return good ? 0 : 1;
}
