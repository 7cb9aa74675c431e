// plan_picture.h - the answer of --plan auto as a picture: memory against time, by row, and a step
//   1. POINTS    each layout that may fit, by its estimates of time and memory; the frontier joins
//                those that no other beats in both. Those that were simulated and placed are larger
//   2. BARS      bytes of the fullest rank by row of the memory table, for each of these; a line
//                marks the room
//   3. TIMELINE  the simulated step of the best (timeline.h); of a long accumulation as few
//                micro-batches as the simulator makes
//   --plan auto --explain --timeline FILE.svg writes it; FILE.json holds the timeline alone.
#pragma once
#include "plan_search.h"

namespace llmc {

// The picture's sizes in pixels. A timeline of more boxes than MOST_BOXES is left out: no eye would
// tell them apart, and the file would have many megabytes.
constexpr double PICTURE_WIDTH = 1690;
constexpr double PLOT_HEIGHT = 320;
constexpr double PLOT_TOP = 60;
constexpr double BARS_LEFT = 900;
constexpr size_t MOST_POINTS = 500;
constexpr size_t MOST_BOXES = 20000;

// A layout in the picture: its name, and what was simulated and placed.
struct NamedTrial {
    std::string name;
    const Trial* trial;
};

// A scale: a number's place in pixels, from `low` at pixel `from` to `high` at pixel `to`.
struct PlotScale {
    double low, high, from, to;
    double at(double x) const { return from + (x - low) / (high - low) * (to - from); }
};

// Text at a place.
inline std::string plot_text(double x, double y, const std::string& text) {
    return concat("<text x=\"", x, "\" y=\"", y, "\">", text, "</text>\n");
}

// A line across, broken into dashes: the memory that there is, with its bytes above its left end.
inline std::string room_line(double from, double to, double y, double bytes) {
    std::string text = concat("<path d=\"M", from, " ", y, "H", to);
    text += "\" stroke=\"#e57373\" stroke-dasharray=\"6 4\"/>\n";
    return text + plot_text(from + 4, y - 4, "room: " + bytes_text(bytes));
}

// The marks of an axis: a line with numbers below or beside it. unit: that of a number.
inline std::string plot_axis(const PlotScale& s, double other, bool across,
                             const std::string& unit) {
    // Begin at the first mark within the scale.
    std::string text;
    double tick = tick_of(s.high - s.low);
    double first = std::ceil(s.low / tick) * tick;

    // Draw them away from the plot, with their numbers beyond.
    for (double v = first; v <= s.high; v += tick) {
        double at = s.at(v);
        std::string number = concat(v, " ", unit);
        if (across) {
            text += concat("<path d=\"M", at, " ", other, "v6\" stroke=\"#616161\"/>");
            text += plot_text(at - 12, other + 18, number);
        } else {
            text += concat("<path d=\"M", other, " ", at, "h-6\" stroke=\"#616161\"/>");
            text += plot_text(other - 62, at + 4, number);
        }
    }
    return text;
}

// The estimates that no other one beats in both time and memory, from fast to slow. `all` is in the
// same order, with those that are beaten.
inline std::vector<Proposal> frontier_of(const std::vector<Proposal>& all) {
    std::vector<Proposal> frontier;
    for (const Proposal& p : all)
        if (frontier.empty() || p.estimate.bytes < frontier.back().estimate.bytes)
            frontier.push_back(p);
    return frontier;
}

// Draw memory against time.
inline std::string points_svg(const PlanQuestion& q, const std::vector<Proposal>& all,
                              const std::vector<NamedTrial>& named) {
    // Show what takes at most three times as long as the fastest, and what is named.
    double fastest = all[0].estimate.seconds;
    double slowest = 3 * fastest;
    double most = 1.1 * q.room;
    for (const NamedTrial& n : named) {
        fastest = std::min(fastest, n.trial->seconds);
        slowest = std::max(slowest, 1.05 * n.trial->seconds);
        most = std::max(most, 1.05 * n.trial->bytes);
    }
    PlotScale time = {0.95e3 * fastest, 1e3 * slowest, 90, BARS_LEFT - 60};
    PlotScale memory = {0, most / GIB, PLOT_TOP + PLOT_HEIGHT, PLOT_TOP};
    auto x = [&](double seconds) { return time.at(1e3 * seconds); };
    auto y = [&](double bytes) { return memory.at(bytes / GIB); };

    // Draw the axes and the room.
    std::string text = plot_axis(time, PLOT_TOP + PLOT_HEIGHT, true, "ms");
    text += plot_axis(memory, 90, false, "GiB");
    text += room_line(90, BARS_LEFT - 60, y(q.room), q.room);

    // Leave out points between points: more of them make a large file and no other picture.
    size_t step = 1 + all.size() / MOST_POINTS;
    for (size_t i = 0; i < all.size(); i += step) {
        const Estimate& e = all[i].estimate;
        if (e.seconds > slowest) break;
        if (e.bytes > most) continue; // above the plot
        text += concat("<circle cx=\"", x(e.seconds), "\" cy=\"", y(e.bytes));
        text += "\" r=\"2\" fill=\"#bdbdbd\"/>\n";
    }

    // Join the frontier by a line, which begins with a move.
    std::string path;
    for (const Proposal& p : frontier_of(all)) {
        const Estimate& e = p.estimate;
        if (e.seconds > slowest) break;
        if (e.bytes > most) continue;
        path += path.empty() ? "M" : "L";
        path += concat(x(e.seconds), " ", y(e.bytes));
    }
    text += concat("<path d=\"", path, "\" fill=\"none\" stroke=\"#64b5f6\"/>\n");

    // Draw what was simulated and placed. A name that would lie on another goes below it.
    std::vector<std::pair<double, double>> names;
    for (const NamedTrial& n : named) {
        double at = x(n.trial->seconds);
        double up = y(n.trial->bytes);
        std::string flags = proposal_text(n.trial->proposal);
        text += concat("<g><title>", flags, "</title>");
        text += concat("<circle cx=\"", at, "\" cy=\"", up, "\" r=\"5\" fill=\"#ffb74d\"/></g>");
        double below = up + 4;
        auto covered = [&](const auto& other) {
            return std::fabs(other.first - at) < 30 && std::fabs(other.second - below) < 11;
        };
        while (std::any_of(names.begin(), names.end(), covered))
            below += 2;
        names.push_back({at, below});
        text += plot_text(at + 7, below, n.name);
    }
    return text;
}

// Draw the bytes of the fullest rank by row, a bar for each trial.
inline std::string bars_svg(const PlanQuestion& q, const std::vector<NamedTrial>& named) {
    double most = q.room;
    for (const NamedTrial& n : named)
        most = std::max(most, n.trial->bytes);
    PlotScale memory = {0, 1.1 * most / GIB, PLOT_TOP + PLOT_HEIGHT, PLOT_TOP};
    double width = (PICTURE_WIDTH - BARS_LEFT - 180) / double(named.size());

    // Stack the rows of each.
    std::string text = plot_axis(memory, BARS_LEFT + 62, false, "GiB");
    double left = BARS_LEFT + 70;
    std::set<std::string> drawn; // rows
    for (const NamedTrial& n : named) {
        double below = 0;
        for (auto [row, colour] : memory_rows()) {
            auto found = n.trial->memory.find(row);
            bool any = found != n.trial->memory.end() && found->second > 0;
            if (!any) continue;

            // A box stands on the one below it.
            double gib = found->second / GIB;
            double top = memory.at(below + gib);
            double height = memory.at(below) - top;
            text += concat("<g><title>", row, ": ", gib, " GiB</title>");
            text += concat("<rect class=\"bar\" x=\"", left, "\" y=\"", top);
            text += concat("\" width=\"", 0.7 * width, "\" height=\"", height);
            text += concat("\" fill=\"", colour, "\"/></g>\n");
            below += gib;
            drawn.insert(row);
        }
        text += plot_text(left, PLOT_TOP + PLOT_HEIGHT + 18, n.name);
        left += width;
    }

    // Mark the room, and name the colours of the rows that are there.
    double room = memory.at(q.room / GIB);
    text += room_line(BARS_LEFT + 62, left, room, q.room);
    double y = PLOT_TOP;
    for (auto [row, colour] : memory_rows()) {
        if (!drawn.count(row)) continue;
        text += concat("<rect x=\"", PICTURE_WIDTH - 130, "\" y=\"", y - 10);
        text += concat("\" width=\"12\" height=\"12\" fill=\"", colour, "\"/>");
        text += plot_text(PICTURE_WIDTH - 112, y, row);
        y += 20;
    }
    return text;
}

// The whole picture. trace: the timeline of the best, under its title; empty: it is left out.
inline std::string picture_svg(const PlanQuestion& q, const std::vector<Proposal>& all,
                               const std::vector<NamedTrial>& named, const Trace& trace,
                               const std::string& step_title) {
    // The timeline lies below the plots, a row for each stage.
    double below = PLOT_TOP + PLOT_HEIGHT + 50;
    double rows = TIMELINE_ROW * double(trace.size());
    double height = below + (trace.empty() ? 30 : 90 + rows);
    std::string text = "<svg xmlns=\"http://www.w3.org/2000/svg\" ";
    text += concat("width=\"", PICTURE_WIDTH, "\" height=\"", height, "\" ");
    text += "font-family=\"sans-serif\" font-size=\"11\">\n";

    // Draw the plots under their titles.
    std::string title = "memory of the fullest rank against time of a step: ";
    title += concat(q.gpus, q.gpus > 1 ? " ranks on " : " rank on ", q.machine.name);
    text += plot_text(90, 24, title + "; grey: estimates, blue: their frontier");
    text += plot_text(BARS_LEFT + 70, 24, "memory by row");
    text += points_svg(q, all, named);
    text += bars_svg(q, named);

    // A picture within a picture has a place of its own.
    if (trace.empty()) {
        text += plot_text(90, below, "the timeline of so many actions is left out");
    } else {
        std::string line = timeline_svg(trace, step_title, "stage", "ms");
        text += concat("<svg y=\"", below, "\" ", line.substr(strlen("<svg ")));
    }
    return text + "</svg>\n";
}

// Write the picture of an answer, or the best one's timeline. named: the best first.
template <typename T, typename S>
void draw_plan(const PlanQuestion& q, const Answer& a, const std::vector<NamedTrial>& named,
               const std::string& path, S where) {
    // Simulate the best again: its actions' times were not kept.
    Rehearsal r = rehearse_proposal<T>(q, named[0].trial->proposal, where);
    CostModel cost = run_costs<T>(q.machine, r.model, Cpu{});
    cost.teacher_C = r.teacher_C;
    StepTime step = simulate_step(r.runs.few, r.model, action_cost(cost, r.model));
    Trace trace = trace_of(step, r.runs.few, r.model);

    // Write the timeline alone, or the picture.
    if (path.ends_with(".json"))
        return or_die(write_timeline(path, trace, "", "stage", "ms"));
    size_t boxes = 0;
    for (const auto& row : trace)
        boxes += row.size();
    if (boxes > MOST_BOXES) trace.clear();

    // Say how much of a long accumulation it shows.
    int all = r.micro_batches;
    int some = r.runs.more.empty() ? all : r.runs.few[0].micro_batches;
    std::string title = "the step of the best";
    if (some < all) title += concat(" (first ", some, " of ", all, " micro-batches)");
    or_die(write_text_file(path, picture_svg(q, a.search.proposals, named, trace, title)));
}

} // namespace llmc
