// timeline.h - a step as a picture: a lane a rank, a box an action; svg, or a trace for Chrome
//   Boxes come from the last step of a run, or, with --explain, from the pipeline's simulation with
//   a forward pass of a stage as one second. FILE.svg opens in a browser and says what a box is
//   where the pointer stands; FILE.json is the trace event format of chrome://tracing, ui.perfetto.dev.
#pragma once
#include <fstream>
#include "action.h"

struct Box {
    std::string name;  // F(0,3), as the plan prints it
    double start, end; // seconds
};
typedef std::vector<std::vector<Box>> Lanes; // [rank]

// What the schedules' simulation says, a box a slot.
inline Lanes simulated_lanes(const std::vector<Schedule>& all, const Simulation& s) {
    Lanes lanes(all.size());
    for (size_t r = 0; r < all.size(); r++)
        for (size_t i = 0; i < all[r].size(); i++)
            lanes[r].push_back({name_of(all[r][i]), s.start[r][i], s.end[r][i]});
    return lanes;
}

// by the first letters of a name; messages and collectives are grey
inline const char* box_colour(const std::string& name) {
    const std::pair<const char*, const char*> colours[] = {
        {"SENDRECV", "#9e9e9e"}, {"GATHER", "#bdbdbd"},  {"RELEASE", "#bdbdbd"},
        {"REDUCE", "#9e9e9e"},   {"PUBLISH", "#9e9e9e"}, {"COUNT", "#9e9e9e"},
        {"WAIT", "#e0e0e0"},     {"F", "#64b5f6"},       {"B", "#81c784"},
        {"I", "#aed581"},        {"W", "#ffb74d"},       {"R", "#4dd0e1"},
        {"", "#e57373"}};
    for (auto& [start, colour] : colours)
        if (name.rfind(start, 0) == 0) return colour;
    return "";
}

inline std::string timeline_svg(const Lanes& lanes, const std::string& title) {
    constexpr double WIDTH = 1600, HEIGHT = 28, LEFT = 60, TOP = 40;
    double end = 0;
    for (const auto& lane : lanes)
        for (const Box& b : lane) end = std::max(end, b.end);
    double scale = end > 0 ? WIDTH / end : 0;
    std::string text =
        concat("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", LEFT + WIDTH + 20,
               "\" height=\"", TOP + HEIGHT * double(lanes.size()) + 20,
               "\" font-family=\"sans-serif\" font-size=\"11\">\n", "<text x=\"", LEFT,
               "\" y=\"20\" font-size=\"14\">", title, "</text>\n");
    for (size_t r = 0; r < lanes.size(); r++) {
        double y = TOP + HEIGHT * double(r);
        text += concat("<text x=\"4\" y=\"", y + 17, "\">rank ", r, "</text>\n");
        for (const Box& b : lanes[r]) {
            double x = LEFT + b.start * scale, w = (b.end - b.start) * scale;
            text +=
                concat("<g><title>", b.name, ": ", b.start, " to ", b.end, " s</title><rect x=\"",
                       x, "\" y=\"", y, "\" width=\"", w, "\" height=\"", HEIGHT - 4, "\" fill=\"",
                       box_colour(b.name), "\" stroke=\"white\" stroke-width=\"0.5\"/>");
            if (w > 7 * double(b.name.size()))
                text += concat("<text x=\"", x + 3, "\" y=\"", y + 16, "\">", b.name, "</text>");
            text += "</g>\n";
        }
    }
    return text + "</svg>\n";
}

inline std::string timeline_trace(const Lanes& lanes) { // microseconds
    std::string text = "{\"traceEvents\": [\n";
    for (size_t r = 0; r < lanes.size(); r++)
        for (const Box& b : lanes[r])
            text +=
                concat(text.back() == '\n' && text.size() < 20 ? "" : ",\n", "{\"name\": \"",
                       b.name, "\", \"ph\": \"X\", \"pid\": 0, \"tid\": ", r,
                       ", \"ts\": ", b.start * 1e6, ", \"dur\": ", (b.end - b.start) * 1e6, "}");
    return text + "\n]}\n";
}

// "" or what is wrong
inline std::string write_timeline(const std::string& path, const Lanes& lanes,
                                  const std::string& title) {
    bool trace = path.size() > 5 && path.rfind(".json") == path.size() - 5;
    std::ofstream out(path);
    out << (trace ? timeline_trace(lanes) : timeline_svg(lanes, title));
    out.close();
    return out ? "" : "--timeline " + path + ": cannot be written";
}
