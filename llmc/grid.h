// grid.h - the process grid: which rank holds which coordinate - arXiv:2104.04473, arXiv:2407.21783
//   world = dp * pp * cp * tp, tp fastest (so that it stays inside a machine), then cp, pp, dp
//   slowest.
//   Everything that depends on a rank reads it from here; a grid of 1x1x1x1 is the same code.
#pragma once

struct Grid {
    int dp = 1, pp = 1, cp = 1, tp = 1;                     // sizes
    int dp_rank = 0, pp_rank = 0, cp_rank = 0, tp_rank = 0; // my coordinates
    int world() const { return dp * pp * cp * tp; }
};

inline Grid grid_at(Grid sizes, int rank) {
    Grid g = sizes;
    g.tp_rank = rank % g.tp, rank /= g.tp;
    g.cp_rank = rank % g.cp, rank /= g.cp;
    g.pp_rank = rank % g.pp, rank /= g.pp;
    g.dp_rank = rank;
    return g;
}
