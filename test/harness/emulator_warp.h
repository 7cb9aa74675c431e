// emulator_warp.h - models of hopper.cuh's warp-level wrappers: ldmatrix, stmatrix, mma, cp.async
//   Fragments are laid out as the PTX manual says (ISA 8.7, sections on ldmatrix and mma.m16n8k16).
//   A matrix has rows of 8 elements of 16 bits; lane l holds columns 2 (l % 4) and the next of row
//   l / 4. Each lane reads and writes shared memory for itself, although the hardware does it for
//   the whole warp. In this way ThreadSanitizer sees which lane uses the data.
#pragma once
#include <cfloat>
#include <deque>

#define LLMC_DEV inline

namespace emulator {

// ----------------------------------------------------------------------------
// ldmatrix, stmatrix: lane 8 m + r brings the address of row r of matrix m

struct MatrixRows {
    const uint16_t* row[32];
};
inline MatrixRows matrix_rows(const void* mine, const char* what, const Site& site) {
    if (uintptr_t(mine) % 16) error(site, "%s: a row at %p is not 16-byte aligned", what, mine);
    return warp_operation(
        0xffffffffu, what, mine,
        [](unsigned, const Lanes<const void*>& all) {
            MatrixRows rows;
            for (unsigned l = 0; l < 32; l++) rows.row[l] = static_cast<const uint16_t*>(all[l]);
            return rows;
        },
        site);
}

// The place of one element in the row that another lane named: element `half` (0 or 1) of this
// lane's register of matrix m.
inline const uint16_t* matrix_element(const MatrixRows& rows, unsigned m, unsigned half,
                                      bool transposed) {
    unsigned lane = thread_number() % 32, row = lane / 4, column = 2 * (lane % 4) + half;
    return transposed ? rows.row[8 * m + column] + row : rows.row[8 * m + row] + column;
}

inline void load_matrix(uint32_t (&r)[4], const void* s, bool transposed, const char* what,
                        const Site& site) {
    MatrixRows rows = matrix_rows(s, what, site);
    for (unsigned m = 0; m < 4; m++)
        r[m] = *matrix_element(rows, m, 0, transposed) |
               uint32_t(*matrix_element(rows, m, 1, transposed)) << 16;
}
inline void store_matrix(const void* s, const uint32_t (&r)[4], const Site& site) {
    MatrixRows rows = matrix_rows(s, "stmatrix", site);
    for (unsigned m = 0; m < 4; m++)
        for (unsigned half = 0; half < 2; half++)
            *const_cast<uint16_t*>(matrix_element(rows, m, half, false)) =
                uint16_t(r[m] >> (16 * half));
}

// ----------------------------------------------------------------------------
// mma: lanes 4 g to 4 g + 3 hold rows g and g + 8 of a and d, and column g of b

struct MmaOperands {
    uint32_t a[4], b[2];
};
struct MmaResult {
    float d[4];
};

// Number k, 0 or 1, of the two in a register.
template <typename T> float mma_number(uint32_t word, unsigned k) {
    return to_float(T{uint16_t(word >> (16 * k))});
}
// One element of the product: a row of a times a column of b. The sum over 16 has two halves of 8.
// For each half, register i of four lanes holds numbers 2 i and 2 i + 1.
template <typename T>
float mma_element(const Lanes<MmaOperands>& all, unsigned row, unsigned column) {
    constexpr unsigned P = 2, HALF = 8;
    float sum = 0;
    for (unsigned k = 0; k < 2 * HALF; k++) {
        const MmaOperands &from_a = all[row % 8 * 4 + k % HALF / P],
                          &from_b = all[column * 4 + k % HALF / P];
        sum += mma_number<T>(from_a.a[k / HALF * 2 + row / 8], k % P) *
               mma_number<T>(from_b.b[k / HALF], k % P);
    }
    return sum;
}
template <typename T>
void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const Site& site) {
    // Bring this lane's registers. The warp operation returns the lane's four sums.
    MmaOperands in;
    memcpy(in.a, a, sizeof(a)), memcpy(in.b, b, sizeof(b));
    MmaResult sum = warp_operation(
        0xffffffffu, "mma", in,
        [](unsigned lane, const Lanes<MmaOperands>& all) {
            MmaResult r;
            for (unsigned i = 0; i < 4; i++)
                r.d[i] = mma_element<T>(all, lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2);
            return r;
        },
        site);
    for (int i = 0; i < 4; i++) d[i] += sum.d[i];
}

// ----------------------------------------------------------------------------
// cp.async: a thread's copies, committed in groups. They happen at once or, with settings.latest,
// at the wait that covers them.

struct AsyncCopy {
    unsigned char* to;
    const void* from;
    size_t bytes; // of 16; the rest becomes zero
    Site site;
    void run() const {
        // Tell ThreadSanitizer: the compiler turns a small memcpy into plain instructions, which it
        // does not see.
        EMULATOR_TSAN(__tsan_read_range(const_cast<void*>(from), bytes);
                      __tsan_write_range(to, 16);)
        memcpy(to, from, bytes);
        memset(to + bytes, 0, 16 - bytes);
    }
};
struct AsyncCopies {
    std::vector<AsyncCopy> open; // the group that is not committed yet
    std::deque<std::vector<AsyncCopy>> groups;
    AsyncCopies() = default;
    AsyncCopies(const AsyncCopies&) = delete;
    ~AsyncCopies() { // when the thread returns
        groups.push_front(std::move(open));
        for (const std::vector<AsyncCopy>& group : groups)
            if (!group.empty()) error(group[0].site, "cp.async: no wait covers this copy");
    }
};
inline AsyncCopies& async_copies() {
    Unseen unseen;
    Fiber& f = self();
    if (!f.async) f.async = std::make_shared<AsyncCopies>();
    return *static_cast<AsyncCopies*>(f.async.get());
}

} // namespace emulator

LLMC_DEV void ldmatrix_x4(uint32_t (&r)[4], const void* s,
                     emulator::Site site = emulator::Site::current()) {
    emulator::load_matrix(r, s, false, "ldmatrix", site);
}
LLMC_DEV void ldmatrix_x4_t(uint32_t (&r)[4], const void* s,
                       emulator::Site site = emulator::Site::current()) {
    emulator::load_matrix(r, s, true, "ldmatrix.trans", site);
}
LLMC_DEV void stmatrix_x4(void* s, const uint32_t (&r)[4],
                     emulator::Site site = emulator::Site::current()) {
    emulator::store_matrix(s, r, site);
}
template <typename T>
void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                  emulator::Site site = emulator::Site::current()) {
    emulator::mma<T>(d, a, b, site);
}

LLMC_DEV void cp_async16(void* s, const void* g, int bytes = 16,
                    emulator::Site site = emulator::Site::current()) {
    if (uintptr_t(s) % 16 || uintptr_t(g) % 16)
        emulator::error(site, "cp.async: %p to %p, both must be 16-byte aligned", g, s);
    if (bytes < 0 || bytes > 16) emulator::error(site, "cp.async: %d bytes of 16", bytes);
    emulator::AsyncCopy copy = {static_cast<unsigned char*>(s), g, size_t(bytes) % 17, site};

    // Copy now, or leave NaN until the wait.
    if (!emulator::settings.latest) return copy.run();
    EMULATOR_TSAN(__tsan_write_range(s, 16);)
    memset(s, 0xff, 16); // NaN until the copy lands
    emulator::async_copies().open.push_back(copy);
}
LLMC_DEV void cp_async_commit() {
    emulator::AsyncCopies& copies = emulator::async_copies();
    copies.groups.push_back(std::move(copies.open));
    copies.open.clear();
}
// Waits until all groups but the last N have landed.
template <int N> void cp_async_wait() {
    emulator::AsyncCopies& copies = emulator::async_copies();
    for (; copies.groups.size() > size_t(N); copies.groups.pop_front())
        for (const emulator::AsyncCopy& copy : copies.groups.front()) copy.run();
}

// 2^x. As with ex2.approx.ftz, subnormal inputs and results are 0.
LLMC_DEV float ex2(float x) {
    float y = exp2f(fabsf(x) < FLT_MIN ? 0 : x);
    return y < FLT_MIN ? 0 : y;
}
// tanh(x) with the largest error that PTX's manual allows, 2^-11 of it, up or down by x's last bit.
LLMC_DEV float tanh_approx(float x) {
    float error = __builtin_bit_cast(uint32_t, x) & 1 ? 0x1p-11f : -0x1p-11f;
    float y = tanhf(x) * (1 + error);
    return y > 1 ? 1 : y < -1 ? -1 : y; // a NaN stays a NaN
}
// Two numbers rounded to T in one register, `low` in the lower 16 bits.
template <typename T> uint32_t pack(float low, float high) {
    return llmc::from_acc<T>(low).bits | uint32_t(llmc::from_acc<T>(high).bits) << 16;
}
