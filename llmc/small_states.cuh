// small_states.cuh - masters and moments in fewer bits than float
//   remainder   a float master as a bf16 weight and the 16 bits that it lacks:
//                 weight    = upper half of the master, plus 1 where the lower half is 2^15 or more
//                 remainder = lower half of the master
//               Exact: every number comes back. The weight is the master rounded to nearest, ties
//               away from zero; with ties to even an even weight could stand for two masters.
//   To copy: this file and types.h.
#pragma once
#include "types.h"

namespace llmc {

// Where the bits are that 16-bit weights lack: in floats beside them, in remainders, or nowhere.
enum class Masters : uint8_t { FLOAT, REMAINDER, NONE };

// How moments are stored.
enum class States : uint8_t { FLOAT, BF16 };

// Bytes a weight; the weight's own two are not counted.
inline size_t master_bytes(Masters masters) {
    return masters == Masters::FLOAT ? 4 : masters == Masters::REMAINDER ? 2 : 0;
}

// ----------------------------------------------------------------------------
// remainders

// The bits of a bf16 weight, and of what it lacks.
struct SplitFloat {
    uint16_t weight, remainder;
};

LLMC_HD inline SplitFloat split_float(float x) {
    uint32_t u = bits_as<uint32_t>(x);
    // A NaN keeps what fits the weight, and stays one: rounding could make it a zero.
    if ((u & 0x7fffffff) > 0x7f800000) u = (u | 0x400000) & 0xffff0000;
    return {uint16_t((u + 0x8000) >> 16), uint16_t(u)};
}

// The number that was split.
LLMC_HD inline float join_float(SplitFloat x) {
    uint32_t upper = uint32_t(x.weight) - (x.remainder >> 15); // undo the rounding up
    return bits_as<float>(upper << 16 | x.remainder);
}

} // namespace llmc
