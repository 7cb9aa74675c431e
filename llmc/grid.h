// grid.h - the process grid: which rank holds which coordinate - arXiv:2104.04473, arXiv:2407.21783
//   world = dp * pp * cp * tp; neighbours in the first axis of the order are neighbours in rank. By
//   default tp comes first, so that it stays inside a machine, then cp, pp, and dp last.
//   Everything that depends on a rank reads it from here; a grid of 1x1x1x1 is the same code, and no
//   result depends on the order.
#pragma once
#include <array>
#include <string>
#include <utility>

enum class Axis { TP, CP, PP, DP };

struct Grid {
    int dp = 1, pp = 1, cp = 1, tp = 1;                     // sizes
    int dp_rank = 0, pp_rank = 0, cp_rank = 0, tp_rank = 0; // my coordinates
    std::array<Axis, 4> order = {Axis::TP, Axis::CP, Axis::PP, Axis::DP};
    int world() const { return dp * pp * cp * tp; }
};

inline Grid grid_at(Grid g, int rank) {
    for (Axis axis : g.order) {
        auto [size, mine] = axis == Axis::TP   ? std::pair{g.tp, &g.tp_rank}
                            : axis == Axis::CP ? std::pair{g.cp, &g.cp_rank}
                            : axis == Axis::PP ? std::pair{g.pp, &g.pp_rank}
                                               : std::pair{g.dp, &g.dp_rank};
        *mine = rank % size, rank /= size;
    }
    return g;
}

// "tp-pp-dp", nearest first; cp stands behind tp.
inline std::array<Axis, 4> grid_order(const std::string& text) {
    std::array<Axis, 4> order;
    size_t count = 0;
    for (size_t at = 0; at < text.size(); at += 3) {
        char first = text[at];
        order[count++] = first == 't' ? Axis::TP : first == 'p' ? Axis::PP : Axis::DP;
        if (first == 't') order[count++] = Axis::CP;
    }
    return order;
}
