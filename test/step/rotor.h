// rotor.h - optimal checkpointing of a chain by dynamic programming - arXiv:1911.13214
//   A chain of equal blocks. x: units of memory of a block's input; a: of all rows that its backward
//   pass reads; g: of its gradients. One micro-batch, one block at a time. least(n, m) counts the
//   blocks that are run forward once more for n blocks whose first input is kept beside m units:
//     keep       F writes the rows of the first block, which stay:  least(n-1, m - a - x)
//     drop k     F runs through the first k blocks and keeps the input of the next one; the others
//                are solved first, then these k again: least(n-k, m - x) + k + again(k, m)
//   again() is least() itself in rotor, which may redo a block many times. `once` redoes each block
//   at most once, so its k blocks then keep all of their rows. longest: the largest k.
//   Cost: O(n^2 m) sums, remembered.
#pragma once
#include <algorithm>
#include <map>

struct Rotor {
    int x, a, g;
    bool once = true;
    int longest = 1;
    std::map<std::pair<int, int>, int> known = {};
    static constexpr int NEVER = 1 << 20; // does not fit

    // Blocks that keep all of their rows, from forward to backward: none is redone.
    int kept(int n, int m) const { return m >= n * a + (n - 1) * x + std::max(x, g) ? 0 : NEVER; }

    int least(int n, int m) {
        // The running block has all of its rows, and beside them its output or its gradients.
        if (m < a + std::max(x, g)) return NEVER;
        if (n == 1) return 0;
        auto [entry, fresh] = known.insert({{n, m}, NEVER});
        if (!fresh) return entry->second;

        // Keep the first block's rows, or drop those of the first k blocks. While these run, the
        // input of the running one is there too, unless it is the first.
        int best = least(n - 1, m - a - x);
        for (int k = 1; k <= std::min(longest, n); k++) {
            bool runs = m >= a + x + (k > 1 ? x : 0);
            int again = once ? kept(k, m) : n == k ? NEVER : least(k, m);
            int others = n == k ? 0 : least(n - k, m - x);
            if (runs) best = std::min(best, others + k + again);
        }
        return known[{n, m}] = std::min(best, NEVER);
    }
};
