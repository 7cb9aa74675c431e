// fit.h - --fit: which models train on one card, in which way, with which flags, and how fast
//   full      every weight is trained, and all that takes lies on the card
//   offload   the same, with masters and moments in the host's memory; where that is not enough,
//             also activations, gradients and weights
//   lora      the weights are frozen in bf16, and adapters of rank 16 are trained; where the card
//             is too small for that, weights and activations lie in the host's memory
//   qlora     the same beside weights of 4 bits (nf4), which stay on the card
//   A way is a list of rungs, sets of flags from the fastest to the leanest. For a rung the
//   micro-batch doubles while the run fits. Bytes are those of the arena, with a GPU's chunks of
//   logits and workspace of products, so they are the run's own but for the scratch of some small
//   kernels; a twentieth of the card is left to CUDA's context and libraries, and a twentieth of
//   the host's memory to the system. Tokens a second come from the simulator (simulator.h), moves
//   to the host included.
//   Cost: ten to forty placings a cell, a few milliseconds each.
#pragma once
#include "../io/config.h"
#include "../io/config_check.h"
#include "../io/files.h"
#include "../io/machine.h"
#include "../ops/types.h"
#include "../comm/text.h"
#include "evaluate.h"
#include "machine_here.h"
#include "plan_search.h"

namespace llmc {

// A way to train: its name, and sets of flags to try in this order.
struct FitWay {
    const char* name;
    std::vector<std::string> rungs;
};
inline const std::vector<FitWay>& fit_ways() {
    static const std::vector<FitWay> ways = {
        {"full", {"", "--recompute selective", "--recompute full",
                  "--recompute full --masters remainder",
                  "--masters none --states 8bit",
                  "--recompute selective --masters none --states 8bit",
                  "--recompute full --masters none --states 8bit"}},
        {"offload", {"--offload optimizer", "--offload optimizer,activations",
                     "--recompute full --offload optimizer",
                     "--offload optimizer,activations,gradients",
                     "--recompute full --offload optimizer,activations,gradients",
                     "--recompute full --offload optimizer,activations,gradients,weights"}},
        {"lora", {"--lora 16", "--lora 16 --recompute selective", "--lora 16 --recompute full",
                  "--lora 16 --offload weights",
                  "--lora 16 --recompute selective --offload weights",
                  "--lora 16 --offload weights,activations",
                  "--lora 16 --recompute full --offload weights,activations"}},
        {"qlora", {"--lora 16 --weights nf4", "--lora 16 --weights nf4 --recompute selective",
                   "--lora 16 --weights nf4 --offload activations",
                   "--lora 16 --weights nf4 --recompute full",
                   "--lora 16 --weights nf4 --recompute full --offload activations"}},
    };
    return ways;
}

// The models of the table, from small to large; --model asks for any other.
inline const std::vector<const char*>& fit_models() {
    static const std::vector<const char*> names = {
        "gpt2", "gpt2-xl", "qwen3-0.6b", "tinyllama-1.1b", "qwen3-1.7b", "gemma-2-2b",
        "smollm3-3b", "llama2-7b", "llama3-8b", "gpt3-13b", "llama3-70b"};
    return names;
}

// The answer for a model and a way. B = 0: nothing fits.
struct FitCell {
    std::string way, flags;
    int B = 0;          // sequences of a micro-batch
    double bytes = 0;   // on the card
    double host = 0;    // bytes in the host's memory
    double rate = 0;    // tokens a second
    std::string leanest; // flags of the leanest rung that is allowed
    std::string refusal; // why none is; "": some are
};

// ----------------------------------------------------------------------------
// one run

// Set "--name value ..." in a configuration. The table above has no flag without a value.
inline void set_flags(Config& c, const std::string& flags) {
    std::istringstream words(flags);
    for (std::string name, value; words >> name >> value;)
        or_die(set_flag(c, name.substr(2), value));
}

// Tokens of a step where --batch-tokens says nothing. Every cell has as many, because
// they share the cost of moves and of the update.
constexpr int64_t FIT_BATCH = 65536;

inline int64_t fit_batch(const Config& c) {
    return c.batch_tokens ? c.batch_tokens : FIT_BATCH;
}

// The configuration of a rung with a micro-batch of B sequences, in the nearest batch below.
inline Config fit_config(const PlanQuestion& q, const std::string& flags, int B) {
    // Set the rung's flags, then the micro-batch and a batch that it divides.
    Config c = q.config;
    set_flags(c, flags);
    c.micro_batch = B;
    int64_t micro = int64_t(B) * c.seq;
    c.batch_tokens = std::max<int64_t>(1, fit_batch(q.config) / micro) * micro;
    return c;
}

// Evaluate a run with a GPU's sizes.
inline const Trial& try_fit(const PlanQuestion& q, const Config& c, Depth depth) {
    sizes_of_gpu = true;
    const Trial& t = evaluate<bf16>(q, c, depth, Cpu{});
    sizes_of_gpu = false;
    return t;
}

// ----------------------------------------------------------------------------
// a cell, a table

// The fastest rung of a way that fits, with its largest micro-batch.
inline FitCell fit_cell(const PlanQuestion& q, const FitWay& way) {
    // Leave out rungs that are refused, as small states are beside SGD.
    q.known->clear();
    FitCell best;
    best.way = way.name;
    std::vector<std::string> rungs;
    for (const std::string& rung : way.rungs) {
        Config c = fit_config(q, rung, 1);
        std::string wrong = check_with_teacher(c, q.shape, q.teacher);
        if (wrong.empty()) rungs.push_back(rung);
        else if (best.refusal.empty()) best.refusal = wrong; // the first rung adds no flags
    }
    if (rungs.empty()) return best;
    best.refusal = "";

    // Ask the leanest rung first: what the card cannot hold then, it holds with no other. Leave out
    // those that come last and fit nowhere, as where the host lacks memory.
    auto placed = [&](const std::string& rung, int B) -> const Trial& {
        return try_fit(q, fit_config(q, rung, B), Depth::PLACED);
    };
    auto fits = [&](const std::string& rung, int B) {
        const Trial& t = placed(rung, B);
        return t.wrong.empty() && has_room(q, t);
    };
    if (placed(rungs.back(), 1).bytes > q.room)
        return best;
    while (!rungs.empty() && !fits(rungs.back(), 1))
        rungs.pop_back();

    // Double the micro-batch of each rung while it fits. A rung beyond the second that fits the
    // card alone would only recompute or move more.
    int found = 0;
    int64_t most = std::max<int64_t>(1, FULL_ROWS / 2 / q.config.seq);
    for (const std::string& rung : rungs) {
        if (found == 2 && best.host == 0) break;
        int B = 0;
        while (std::max(1, 2 * B) <= most && fits(rung, std::max(1, 2 * B)))
            B = std::max(1, 2 * B);
        if (B == 0) continue;
        found++;
        Config c = fit_config(q, rung, B);
        const Trial& t = try_fit(q, c, Depth::TIMED);
        double rate = double(c.batch_tokens) / t.seconds;
        if (rate <= best.rate) continue;
        best = {way.name, rung, B, t.bytes, t.host, rate, rungs.back(), ""};

        // A batch of whole micro-batches may be smaller than the heading's.
        if (c.batch_tokens != fit_batch(q.config))
            best.flags += concat(rung.empty() ? "" : " ", "--batch-tokens ", c.batch_tokens);
    }
    return best;
}

// The cells of a model. all: of every way, else to the first that needs nothing but the card.
inline std::vector<FitCell> fit_cells(const PlanQuestion& q, bool all) {
    std::vector<FitCell> cells;
    for (const FitWay& way : fit_ways()) {
        cells.push_back(fit_cell(q, way));
        bool alone = cells.back().B > 0 && cells.back().host == 0;
        if (alone && !all) break;
    }
    return cells;
}

// The longest sequence that a rung fits, with one sequence in a micro-batch, to 1024 tokens.
inline int longest_sequence(const PlanQuestion& q, const std::string& leanest) {
    auto fits = [&](int seq) {
        PlanQuestion other = q;
        other.config.seq = seq;
        const Trial& t = try_fit(other, fit_config(other, leanest, 1), Depth::PLACED);
        return t.wrong.empty() && has_room(q, t);
    };

    // Bisect between a length that fits and one that does not, in units of 1024 tokens.
    int unit = int(std::min<size_t>(1024, q.shape.P));
    int low = 0;
    int high = int(q.shape.P) / unit + 1;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        (fits(middle * unit) ? low : high) = middle;
    }
    return low * unit;
}

// The row of the table for a card of so many GB: the last with this memory, or with the nearest.
inline Machine card_of(double gb) {
    // Pass over the CPU's row, which names no device.
    Machine best = machines()[0];
    for (const Machine& m : machines()) {
        bool nearer = std::fabs(m.memory_gb - gb) <= std::fabs(best.memory_gb - gb);
        if (!m.device.empty() && nearer) best = m;
    }
    best.memory_gb = gb;
    return best;
}

// Read a card: a number of GB, at the rates of --machine or of the nearest row; or what --machine
// takes. Returns "" or what is wrong.
inline std::string read_card(const Config& c, const std::string& card, Machine* machine) {
    // A machine's own memory counts where the card is named.
    char* end = nullptr;
    double gb = strtod(card.c_str(), &end);
    bool number = !card.empty() && !*end;
    std::string unknown = number ? "" : machine_named(machine, card);
    if (!number && unknown.empty()) return "";
    if (!number && file_type(card) == S_IFREG)
        return "--fit: " + unknown;
    if (!number || !(gb >= 0.1 && gb <= 1e5))
        return concat("--fit ", printable(card), ": give the GB of a card, or a machine: ",
                      machine_names(), ", or a FILE of one");

    // Keep the GB, whatever the machine has.
    *machine = card_of(gb);
    std::string wrong = c.machine.empty() ? "" : machine_named(machine, c.machine);
    machine->memory_gb = gb;
    return wrong;
}

// The question for one card. Trials are checked as --explain does, in bf16 and on one rank.
inline PlanQuestion fit_question(const RunFacts& run, const Config& c, const std::string& card) {
    // Take the card, and the bytes that it leaves for a run.
    PlanQuestion q;
    q.run = run;
    q.config = c;
    or_die(read_card(c, card, &q.machine));
    q.teacher = run.teacher(c);
    q.room = c.memory > 0 ? c.memory * GIB : room_of_card(q.machine);
    q.host_room = room_of_host(q.machine);
    q.config.machine = q.config.fit = "";
    q.config.memory = 0;
    q.config.precision = "bf16";
    q.config.explain = true;
    return q;
}

// Take a model by its name, with the user's sequence, or with 2048 tokens if it can have as many.
inline void take_model(PlanQuestion& q, const Config& user, const std::string& model) {
    // Read the shape as a run does: from a folder, a file or a preset.
    Config c = user;
    c.model = q.config.model = model;
    q.shape = q.run.shape(c);
    q.config.seq = user.seq ? user.seq : int(std::min<size_t>(q.shape.P, 2048));
}

// The models that are asked about: the user's alone, or those of the table.
inline std::vector<std::string> models_asked(const Config& user) {
    if (was_given(user, "model")) return {user.model};
    return {fit_models().begin(), fit_models().end()};
}

// Why all cells of a model are refused; "": some are not.
inline std::string refusal_of(const std::vector<FitCell>& cells) {
    for (const FitCell& cell : cells)
        if (cell.refusal.empty()) return "";
    return cells.back().refusal;
}

// A line of a card's table: the way, its rate, its bytes, and the flags. longest: 0: not asked.
inline std::string fit_line(const std::string& model, const FitCell& cell, int longest) {
    // Write the rate and the bytes, or only that there are none.
    std::string text = formatted("  %-16s %-8s ", model.c_str(), cell.way.c_str());
    if (!cell.refusal.empty())
        return concat(text, "refused: ", cell.refusal, "\n");
    if (cell.B == 0)
        return text + "does not fit\n";
    text += formatted("%8s tok/s %10s  ", count_text(cell.rate).c_str(),
                      bytes_text(cell.bytes).c_str());

    // Write the flags, and what they need besides the card.
    text += concat("--micro-batch ", cell.B);
    if (!cell.flags.empty()) text += " " + cell.flags;
    if (cell.host > 0)
        text += "  (" + bytes_text(cell.host) + " of the host's memory)";
    if (longest) text += concat("  (--seq up to ", longest, ")");
    return text + "\n";
}

// The table of one card: a line for each model and way.
inline std::string fit_card(const RunFacts& run, const Config& user, const std::string& card,
                            std::set<std::string>& refusals) {
    // Head the table with the card, and with the flags that all lines share.
    PlanQuestion q = fit_question(run, user, card);
    bool one = was_given(user, "model");
    std::string text = concat(
        "what trains on one card of ", q.machine.memory_gb, " GB, ", bytes_text(q.room),
        " of them for the run, and ", bytes_text(q.host_room), " of the host, at the rates of ",
        q.machine.name, "\nwith --precision bf16 --seq ",
        user.seq ? concat(user.seq) : "2048 (or the most that the model has)", " --batch-tokens ",
        fit_batch(user), "\n");

    // Answer for each model, and for a single one also how long a sequence may be.
    for (const std::string& model : models_asked(user)) {
        take_model(q, user, model);
        std::vector<FitCell> cells = fit_cells(q, true);
        refusals.insert(refusal_of(cells));
        for (const FitCell& cell : cells) {
            bool asked = one && cell.B;
            int longest = asked ? longest_sequence(q, cell.leanest) : 0;
            text += fit_line(model, cell, longest);
        }
    }
    return text;
}

// A cell of the table of several cards: the ways that fit, and their tokens a second.
inline std::string fit_word(const std::vector<FitCell>& cells) {
    std::string text;
    for (const FitCell& cell : cells)
        if (cell.B > 0)
            text += concat(text.empty() ? "" : ", ", cell.way, " ", count_text(cell.rate));
    return text.empty() ? "-" : text;
}

// The table of several cards: the models, and on each card the ways and tokens a second.
inline std::string fit_cards(const RunFacts& run, const Config& user,
                             const std::vector<std::string>& cards,
                             std::set<std::string>& refusals) {
    // Name the columns by the cards, and by the rows of machine.h whose rates they have.
    std::vector<PlanQuestion> columns;
    std::string text = "| |";
    for (const std::string& card : cards) {
        columns.push_back(fit_question(run, user, card));
        const Machine& m = columns.back().machine;
        text += concat(" ", m.memory_gb, " GB, ", m.name, " |");
    }
    text += "\n|---|";
    for (size_t i = 0; i < columns.size(); i++)
        text += "---|";
    text += "\n";

    // Write a row for each model, and below the table why some are refused, on every card.
    std::string refused;
    for (const std::string& model : models_asked(user)) {
        std::string why;
        text += concat("| ", model, " |");
        for (PlanQuestion& q : columns) {
            take_model(q, user, model);
            std::vector<FitCell> cells = fit_cells(q, false);
            why = refusal_of(cells);
            text += concat(" ", why.empty() ? fit_word(cells) : "refused", " |");
        }
        text += "\n";
        refusals.insert(why);
        if (!why.empty())
            refused += concat(model, " is refused: ", why, "\n");
    }
    return text + refused;
}

// Answer --fit: the flags for one card, or the ways for several, with commas between them.
inline std::string fit_text(const RunFacts& run, const Config& user) {
    // Read the cards between the commas.
    or_die(check_fit(user));
    std::vector<std::string> cards;
    std::string card;
    for (std::istringstream all(user.fit); std::getline(all, card, ',');)
        cards.push_back(card);
    std::set<std::string> refusals;
    std::string text = cards.size() == 1 ? fit_card(run, user, cards[0], refusals)
                                         : fit_cards(run, user, cards, refusals);

    // A refusal of every model and way is an error of the command line.
    if (refusals.size() == 1)
        or_die(*refusals.begin());
    return text;
}

} // namespace llmc
