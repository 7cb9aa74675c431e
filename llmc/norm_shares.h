// norm_shares.h - what a rank adds to the gradient norm, and what it keeps of the result
//   NORM (step.h) adds a sum of squares for each chunk of each bucket, over all ranks. An element
//   that several ranks hold counts once. Offloaded gradients leave their sums before NORM (SQUARE).
#pragma once
#include "trainer.h"

namespace llmc {

// The first element of a bucket that this rank counts in the norm. The elements before it are
// replicated over tp: another tensor-parallel rank counts them.
template <typename T, typename S>
size_t own_count(const Trainer<T, S>& t, const Bucket& bucket) {
    if (t.layout.tp.rank == 0) return 0;
    bool first_of_head = t.layout.tp.rank % ranks_of_kv_head(t.layout, t.model) == 0;
    return first_of_head ? bucket.common : bucket.shared;
}

// Sum the squares of this rank's range of a gradient, one sum for each chunk.
template <typename T, typename S>
void square_gradient(const Trainer<T, S>& t, int bucket, Kind kind, double* sums) {
    Range range = updated_range(t.layout, t.model, bucket);
    auto rows = tensor_rows(t.model, bucket, range.first, range.first + range.count);
    const acc_t<T>* grad = updated_part<const acc_t<T>>(t, {kind, bucket}, range);
    grad_squares(sums, grad, rows.data(), rows.size(), t.ctx.where);
}

// Leave the step's scale with the host, if updates run late: they read it in the next step.
template <typename T, typename S>
void leave_late_scale(Trainer<T, S>& t) {
    StepScale* late = address<StepScale>(t, LATE_SCALE);
    if (!late) return;
    const StepScale* scale = address<const StepScale>(t, {Kind::SCALE});
    copy_out_later(late, scale, sizeof(StepScale), t.ctx.where);
}

} // namespace llmc
