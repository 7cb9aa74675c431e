// timeline.h - a step as a picture: a row a rank, a box an action; svg, or a trace for Chrome
//   The actions are those of a run's last step. With --explain they come from the pipeline's
//   simulation, in which a stage's forward pass takes one second.
//   FILE.svg opens in a browser, which names the box under the pointer. FILE.json is in the trace
//   event format of chrome://tracing and ui.perfetto.dev.
#pragma once
#include <fstream>
#include "../pipeline.h"
#include "../streams.h"
#include "../comm/text.h"

namespace llmc {

// The timed actions of each rank. Times are seconds from the start of the step,
// or a simulation's units.
typedef PerRank<TimedAction> Trace; // [rank]

// The trace of simulated schedules: one box a slot.
inline Trace simulated_trace(const std::vector<Schedule>& all, const Simulation& s) {
    Trace trace(all.size());
    for (size_t r = 0; r < all.size(); r++)
        for (size_t i = 0; i < all[r].size(); i++)
            trace[r].push_back({name_of(all[r][i]), s.start[r][i], s.end[r][i]});
    return trace;
}

// The colour of a box, and its meaning in the legend.
struct BoxKind {
    const char* start; // beginning of the action's name
    const char* colour;
    const char* meaning;
};

// The row of an action: the first one with which its name begins.
inline const BoxKind& box_kind(const std::string& name) {
    // clang-format off
    // Longer names stand before letters with which they begin: RELEASE before R.
    static const BoxKind kinds[] = {
        {"SENDRECV", "#9e9e9e", "message, reduction"},
        {"GATHER",   "#bdbdbd", "gathered weights"},
        {"RELEASE",  "#bdbdbd", "gathered weights"},
        {"REDUCE",   "#9e9e9e", "message, reduction"},
        {"PUBLISH",  "#9e9e9e", "message, reduction"},
        {"COUNT",    "#9e9e9e", "message, reduction"},
        {"WAIT",     "#e0e0e0", "waits"},
        {"F",        "#64b5f6", "forward"},
        {"B",        "#81c784", "backward"},
        {"I",        "#aed581", "backward, inputs"},
        {"W",        "#ffb74d", "backward, weights"},
        {"R",        "#4dd0e1", "recompute"},
        {"",         "#e57373", "the rest"},
    };
    // clang-format on

    for (const BoxKind& kind : kinds)
        if (name.starts_with(kind.start))
            return kind;
    return kinds[0];
}

// The distance between the marks of an axis: 1, 2 or 5 times a power of ten, for
// at most eight marks.
inline double tick_of(double end) {
    double tick = std::pow(10, std::floor(std::log10(end / 8)));
    for (double step : {1, 2, 5})
        if (end / (tick * step) <= 8)
            return tick * step;
    return tick * 10;
}

// The scale of time in a picture: pixels a second, and the unit that people read.
struct TimeScale {
    double end = 0; // seconds; in a simulation, forward passes
    double pixels = 0;
    double factor = 1; // units a second
    std::string unit;
};

// The layout of a picture in pixels. ROW is the height of a rank's row.
constexpr double TIMELINE_WIDTH = 1600;
constexpr double TIMELINE_LEFT = 70;
constexpr double TIMELINE_TOP = 56;
constexpr double TIMELINE_ROW = 28;

// The legend, on one line: a square of each colour in the picture, with its meaning.
inline std::string timeline_legend(const Trace& trace) {
    // Kinds with the same meaning share a square.
    std::map<std::string, const char*> colours; // [meaning]
    for (const auto& row : trace)
        for (const TimedAction& a : row)
            colours[box_kind(a.name).meaning] = box_kind(a.name).colour;

    // Leave as much room for a meaning as its letters take.
    std::string text;
    double x = TIMELINE_LEFT;
    for (auto& [meaning, colour] : colours) {
        text += concat("<rect x=\"", x, "\" y=\"30\" width=\"12\" height=\"12\" ");
        text += concat("fill=\"", colour, "\"/>");
        text += concat("<text x=\"", x + 17, "\" y=\"40\">", meaning, "</text>");
        x += 40 + 7 * double(meaning.size());
    }
    return text + "\n";
}

// Draw the marks of time below the rows.
inline std::string timeline_axis(const TimeScale& time, double y) {
    if (time.end <= 0) return "";
    double tick = tick_of(time.end * time.factor);
    std::string text;
    for (int i = 0; i * tick <= time.end * time.factor; i++) {
        double at = i * tick;
        double x = TIMELINE_LEFT + at / time.factor * time.pixels;
        text += concat("<path d=\"M", x, " ", y, "v6\" stroke=\"#616161\"/>");
        text += concat("<text x=\"", x + 3, "\" y=\"", y + 12, "\">", at,
                       i ? "" : " " + time.unit, "</text>");
    }
    return text + "\n";
}

// Draw a row: its name, and a box for each action, with the action's name if there is room.
inline std::string timeline_row(const std::vector<TimedAction>& row, const std::string& name,
                                double y, const TimeScale& time) {
    std::string text = concat("<text x=\"4\" y=\"", y + 17, "\">", name, "</text>\n");
    for (const TimedAction& a : row) {
        double x = TIMELINE_LEFT + a.start * time.pixels;
        double width = (a.end - a.start) * time.pixels;

        // A browser shows the title of the box under the pointer.
        double start = a.start * time.factor;
        double end = a.end * time.factor;
        text += concat("<g><title>", a.name, ": ", start, " to ", end, " ", time.unit, "</title>");
        text += concat("<rect x=\"", x, "\" y=\"", y, "\" ");
        text += concat("width=\"", width, "\" height=\"", TIMELINE_ROW - 4, "\" ");
        text += concat("fill=\"", box_kind(a.name).colour, "\" ");
        text += "stroke=\"white\" stroke-width=\"0.5\"/>";
        if (width > 7 * double(a.name.size()))
            text += concat("<text x=\"", x + 3, "\" y=\"", y + 16, "\">", a.name, "</text>");
        text += "</g>\n";
    }
    return text;
}

// Draw all rows to one scale of time, between a legend and the marks. rows: what a row is, as in
// "rank 1" or "stage 1"; unit: "ms", or a simulation's.
inline std::string timeline_svg(const Trace& trace, const std::string& title,
                                const std::string& rows, const std::string& unit) {
    // Scale time to the width.
    TimeScale time;
    time.unit = unit;
    time.factor = unit == "ms" ? 1e3 : 1;
    for (const auto& row : trace)
        for (const TimedAction& a : row)
            time.end = std::max(time.end, a.end);
    time.pixels = time.end > 0 ? TIMELINE_WIDTH / time.end : 0;

    // Write the title and the legend, the rows one below the other, the marks.
    double below = TIMELINE_TOP + TIMELINE_ROW * double(trace.size());
    double width = TIMELINE_LEFT + TIMELINE_WIDTH + 20;
    std::string text = "<svg xmlns=\"http://www.w3.org/2000/svg\" ";
    text += concat("width=\"", width, "\" height=\"", below + 24, "\" ");
    text += "font-family=\"sans-serif\" font-size=\"11\">\n";
    text += concat("<text x=\"", TIMELINE_LEFT, "\" y=\"20\" font-size=\"14\">", title);
    text += "</text>\n";
    text += timeline_legend(trace);
    for (size_t r = 0; r < trace.size(); r++) {
        double y = TIMELINE_TOP + TIMELINE_ROW * double(r);
        text += timeline_row(trace[r], concat(rows, " ", r), y, time);
    }
    return text + timeline_axis(time, below) + "</svg>\n";
}

// Write a trace for Chrome: one complete event ("ph": "X") an action, one thread a rank.
inline std::string timeline_trace(const Trace& trace) {
    std::string text, comma;
    for (size_t r = 0; r < trace.size(); r++)
        for (const TimedAction& a : trace[r]) {
            double start = a.start * 1e6; // microseconds
            double duration = (a.end - a.start) * 1e6;
            text += concat(comma, "{\"name\": \"", a.name, "\", \"ph\": \"X\", \"pid\": 0, ");
            text += concat("\"tid\": ", r, ", \"ts\": ", start, ", \"dur\": ", duration, "}");
            comma = ",\n";
        }
    return "{\"traceEvents\": [\n" + text + "\n]}\n";
}

// Write either format. Returns "" or what is wrong.
inline std::string write_timeline(const std::string& path, const Trace& trace,
                                  const std::string& title, const std::string& rows,
                                  const std::string& unit) {
    // The file's ending chooses the format; config_check() has allowed only these two.
    bool chrome = path.ends_with(".json");
    std::ofstream out(path);
    out << (chrome ? timeline_trace(trace) : timeline_svg(trace, title, rows, unit));
    out.close();
    return out ? "" : "--timeline " + path + ": cannot be written";
}

} // namespace llmc
