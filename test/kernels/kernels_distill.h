// kernels_distill.h - rows of the kernel table: distillation
#pragma once
#include "../../llmc/ops/distill.cuh"
#include "kernel_table.h"

// The sums, losses and gradients of a rank's columns, against the CPU in double. The second shard
// meets targets of the first, and its maxima are those of the whole row.
template <typename T> void distill_kernels(Check& c) {
    struct Case {
        size_t N, V, Vp, start;
    };
    const Case cases[] = {{1, 1, 1, 0}, {3, 5, 8, 0}, {2, 300, 304, 0}, {4, 1000, 1024, 500}};
    for (Case s : cases)
        for (float softcap : {0.0f, 30.0f}) {
            size_t N = s.N, V = s.V, Vp = s.Vp;
            if (SMALL && softcap != 0) continue;
            CASE(c, "distill %s N=%zu V=%zu start=%zu cap %g", type_word(T()), N, V, s.start,
                 double(softcap));
            Distillation d = {0.6, 2};
            std::vector<int> targets = integers(c, N, 0, int(s.start + V) - 1);
            if (N > 1) targets[1] = -1;
            auto student = rounded<T>(normals(c, N * Vp, 3));
            auto teacher = rounded<T>(normals(c, N * Vp, 3));

            // Want: the CPU in double, whose maxima lie a little above this shard's.
            std::vector<double> maxima(2 * N), sums(DISTILL_SUMS * N), losses(N), ds = student;
            DistillRows<double> x = {ds.data(), teacher.data(), targets.data(), maxima.data(),
                                     sums.data(), N, V, Vp, s.start};
            distill_max(x, Cpu{});
            std::vector<double> own = maxima;
            for (double& m : maxima) m += s.start ? 0.5 : 0;
            maxima = rounded<float>(maxima);
            x.maxima = maxima.data();
            distill_sums(x, d, Cpu{});
            distill_loss(losses.data(), x, d, Cpu{});
            distill_backward(x, d, {0.1, nullptr, softcap}, Cpu{});

            every_order(c, [&](Outputs& o) {
                cudaStream_t stream = {};
                Array<T> l(student), t(teacher);
                Array<int> to(targets);
                Array<float> found(2 * N), m(maxima), g(DISTILL_SUMS * N), loss(N);
                DistillRows<T> y = {l.data, t.data, to.data, found.data, g.data, N, V, Vp, s.start};
                distill_max(y, stream);
                o.add("maxima", found, own, 0);

                // From the maxima of all ranks on.
                y.maxima = m.data;
                distill_sums(y, d, stream);
                distill_loss(loss.data, y, d, stream);
                distill_backward(y, d, {0.1, nullptr, softcap}, stream);
                o.add("sums", g, sums, tolerance<float>(V));
                o.add("losses", loss, losses, tolerance<float>(V), 60);
                o.add("dlogits", l, ds, tolerance<T>(V), 0.1);
            });
        }
}

inline void add_distill_kernels(std::vector<KernelRow>& rows) {
    rows.insert(rows.end(), {
        THREE_TYPES("distill", distill_kernels)});
}
