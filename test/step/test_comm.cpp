// test_comm.cpp - collectives and messages: threads of one process, and processes under MPI
//   Every result is compared, bit for bit, with a plain sum in rank order. Where a library chooses
//   the order, the tolerance is the error that any order may have. The bodies are the same for all
//   backends:
//     build/test_comm                             ranks are threads; failures; what buffers hold
//     mpirun -np 3 build/test_comm --mpi          the same bodies between processes
//     mpirun -np 3 build/test_comm --mpi-fail F   ends the job with a message; a test runs this
//     mpirun -np 4 build/test_comm --nccl         streams, on a stand-in for NCCL
//     mpirun -np 2 build/gpu/test_comm --nccl     the same on NCCL, a GPU each
//     mpirun -np 8 build/test_comm --groups L     the communicators of layout L, on the stand-in
#include <gtest/gtest.h>
#include <random>
#include <regex>
#include "../../llmc/comm/comm.h"
#include "../../llmc/layout.h"
#include "../../llmc/transfers.h"

using namespace llmc;

// ----------------------------------------------------------------------------
// what goes in, and what must come out

// Element i of a rank's input: a hash of its arguments. Floating-point values lie in [-3, 3].
template <typename T> T value(int rank, size_t i, int salt) {
    uint64_t x = (uint64_t(rank) * 1000003 + i) * 0x9e3779b97f4a7c15u + salt * 77777;
    x = (x ^ x >> 31) * 0xbf58476d1ce4e5b9u, x ^= x >> 29;
    if constexpr (std::is_integral_v<T>)
        return T(x >> 40) - T(std::is_signed_v<T> ? 1 << 23 : 0);
    else
        return from_acc<T>(acc_t<T>((double(x >> 40) / (1 << 23) - 1) * 3));
}

// Element i of the ranks' sum or maximum: added in rank order, in float or wider, rounded once.
template <typename T> T expected_sum(int size, size_t i, int salt, bool max = false) {
    if constexpr (std::is_integral_v<T>) {
        T sum = value<T>(0, i, salt);
        for (int r = 1; r < size; r++) {
            T x = value<T>(r, i, salt);
            sum = max ? std::max(sum, x) : T(sum + x);
        }
        return sum;
    } else {
        acc_t<T> sum = to_acc(value<T>(0, i, salt));
        for (int r = 1; r < size; r++) {
            acc_t<T> x = to_acc(value<T>(r, i, salt));
            sum = max ? std::max(sum, x) : sum + x;
        }
        return from_acc<T>(sum);
    }
}

// A bound on the error of `size` additions in any order: each rounds a sum of at most 3 * size.
template <typename T> double any_order_error(int size) {
    if constexpr (std::is_integral_v<T>)
        return 0;
    else
        return 2.0 * size * 3 * size * (sizeof(T) == 8 ? 0x1p-53 : 0x1p-24);
}

// Whether two values have the same bits.
template <typename T> bool same(T a, T b) { return !memcmp(&a, &b, sizeof(T)); }
template <typename T> double as_double(T x) {
    if constexpr (std::is_integral_v<T>)
        return double(x);
    else
        return double(to_acc(x));
}

// A buffer of n elements between two guards, which must be intact at the end.
template <typename T> struct Buffer {
    static constexpr long GUARD = 16;
    std::vector<T> all;
    size_t n;
    explicit Buffer(size_t n) : all(n + 2 * GUARD), n(n) {
        memset(static_cast<void*>(all.data()), 0x5b, all.size() * sizeof(T));
    }
    T* data() { return all.data() + GUARD; }
    T& operator[](size_t i) { return data()[i]; }
    ~Buffer() {
        const char* p = reinterpret_cast<const char*>(all.data());
        auto intact = [&](size_t from) {
            return std::count(p + from, p + from + GUARD * sizeof(T), 0x5b) ==
                   GUARD * long(sizeof(T));
        };
        EXPECT_TRUE(intact(0)) << "written before the buffer";
        EXPECT_TRUE(intact((GUARD + n) * sizeof(T))) << "written past the buffer";
    }
};

// Whether `got` is element i of the sum: to the bit where the order of ranks is fixed.
template <typename T>
testing::AssertionResult is_sum(const Comm& c, T got, size_t i, int salt, bool max = false) {
    T want = expected_sum<T>(c.size, i, salt, max);
    bool bits = c.fixed_order || c.local || c.size == 1 || max;
    bool close = std::abs(as_double(got) - as_double(want)) <= any_order_error<T>(c.size);
    if (bits ? same(got, want) : close) return testing::AssertionSuccess();
    return testing::AssertionFailure()
           << ELEMENT_NAMES[int(element_of<T>())] << " " << i << ": " << as_double(got)
           << " instead of " << as_double(want) << ", " << c.size << " ranks";
}

// ----------------------------------------------------------------------------
// each collective, of each type and size, in place and not

// All-reduce, as a sum and as a maximum.
template <typename T> void test_all_reduce(const Comm& c, size_t n, int salt) {
    for (bool max : {false, true}) {
        Buffer<T> x(n);
        for (size_t i = 0; i < n; i++) x[i] = value<T>(c.rank, i, salt);
        if (max)
            all_reduce_max(c, x.data(), n, Cpu());
        else
            all_reduce_sum(c, x.data(), n, Cpu());
        for (size_t i = 0; i < n; i++) ASSERT_TRUE(is_sum(c, x[i], i, salt, max));
    }
}

// Reduce-scatter. Out of place it leaves its input as it was.
template <typename T> void test_reduce_scatter(const Comm& c, size_t n, int salt) {
    for (bool in_place : {false, true}) {
        Buffer<T> in(n * c.size), out(n);
        for (size_t i = 0; i < in.n; i++) in[i] = value<T>(c.rank, i, salt);
        T* to = in_place ? in.data() + c.rank * n : out.data();
        reduce_scatter_sum(c, to, in.data(), n, Cpu());
        for (size_t i = 0; i < n; i++) ASSERT_TRUE(is_sum(c, to[i], c.rank * n + i, salt));
        for (size_t i = 0; i < in.n && !in_place; i++)
            ASSERT_TRUE(same(in[i], value<T>(c.rank, i, salt))) << "its input has changed";
    }
}

// Collectives that only move data: all-gather, all-to-all, and broadcasts from each rank.
template <typename T> void test_moves(const Comm& c, size_t n, int salt) {
    for (bool in_place : {false, true}) {
        Buffer<T> in(n), out(n * c.size);
        T* from = in_place ? out.data() + c.rank * n : in.data();
        for (size_t i = 0; i < n; i++) from[i] = value<T>(c.rank, i, salt);
        all_gather(c, out.data(), from, n, Cpu());
        for (size_t i = 0; i < out.n; i++)
            ASSERT_TRUE(same(out[i], value<T>(int(i / n), i % n, salt))) << "all-gather at " << i;
    }

    Buffer<T> in(n * c.size), out(n * c.size), x(n);
    for (size_t i = 0; i < in.n; i++) in[i] = value<T>(c.rank, i, salt);
    all_to_all(c, out.data(), in.data(), n, Cpu());
    for (size_t i = 0; i < out.n; i++)
        ASSERT_TRUE(same(out[i], value<T>(int(i / n), c.rank * n + i % n, salt))) << "at " << i;

    for (int root = 0; root < c.size; root++) {
        for (size_t i = 0; i < n; i++) x[i] = value<T>(c.rank, i, salt + root);
        broadcast(c, x.data(), n, root, Cpu());
        for (size_t i = 0; i < n; i++)
            ASSERT_TRUE(same(x[i], value<T>(root, i, salt + root))) << "broadcast at " << i;
    }
}

template <typename T> void test_type(const Comm& c) {
    int salt = 0;
    for (size_t n : {0, 1, 2, 3, 5, 15, 64, 65, 130, 1000, 5003}) {
        test_all_reduce<T>(c, n, ++salt);
        test_reduce_scatter<T>(c, n, ++salt);
        test_moves<T>(c, n, ++salt);
        barrier(c, Cpu());
    }
}

void test_collectives(const Comm& c) {
    test_type<float>(c);
    test_type<double>(c);
    test_type<bf16>(c);
    test_type<fp16>(c);
    test_type<int>(c);
    test_type<int64_t>(c);
    test_type<unsigned char>(c);
}

// A maximum is the largest value of any rank, and NaN if any rank has a NaN.
void test_max(const Comm& c) {
    for (int bad = 0; bad < c.size; bad++) {
        float x[3] = {c.rank == bad ? NAN : 1, -INFINITY, c.rank == bad ? INFINITY : -1};
        all_reduce_max(c, x, 3, Cpu());
        EXPECT_TRUE(std::isnan(x[0]));
        EXPECT_EQ(x[1], -INFINITY);
        EXPECT_EQ(x[2], INFINITY);
    }
}

// ----------------------------------------------------------------------------
// timing: what is outstanding, which group finishes first, who is late

// Sleep or yield, now and then.
void jitter(std::mt19937& random) {
    unsigned k = random() % 8;
    if (k == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
    if (k == 1) std::this_thread::yield();
}

// Start one collective of every kind on a group, before any is finished.
void test_outstanding(const Comm& c, int rounds) {
    std::mt19937 random(c.rank + 1);
    for (int round = 0; round < rounds; round++) {
        // Fill the inputs.
        size_t n = 1 + round * 37 % 300;
        Buffer<float> sum(n), parts(n * c.size), part(n), whole(n * c.size), x(n);
        Buffer<bf16> half(n), turned(n * c.size), turn(n * c.size);
        for (size_t i = 0; i < n; i++) {
            sum[i] = value<float>(c.rank, i, round);
            x[i] = value<float>(c.rank, i, round + 1);
            half[i] = value<bf16>(c.rank, i, round);
            whole[c.rank * n + i] = value<float>(c.rank, i, round + 2);
        }
        for (size_t i = 0; i < n * c.size; i++) {
            parts[i] = value<float>(c.rank, i, round + 3);
            turn[i] = value<bf16>(c.rank, i, round + 4);
        }

        // Start all, then finish all.
        int root = round % c.size;
        std::vector<Pending<Cpu>> pending;
        auto add = [&](Pending<Cpu> p) {
            pending.push_back(std::move(p));
            jitter(random);
        };
        add(start_all_reduce_sum(c, sum.data(), n, Cpu()));
        add(start_all_reduce_sum(c, half.data(), n, Cpu()));
        add(start_reduce_scatter_sum(c, part.data(), parts.data(), n, Cpu()));
        add(start_all_gather(c, whole.data(), whole.data() + c.rank * n, n, Cpu()));
        add(start_all_to_all(c, turned.data(), turn.data(), n, Cpu()));
        add(start_broadcast(c, x.data(), n, root, Cpu()));
        for (Pending<Cpu>& p : pending) {
            finish(p);
            jitter(random);
        }

        // Check the results.
        for (size_t i = 0; i < n; i++) {
            ASSERT_TRUE(is_sum(c, sum[i], i, round));
            ASSERT_TRUE(is_sum(c, half[i], i, round));
            ASSERT_TRUE(is_sum(c, part[i], c.rank * n + i, round + 3));
            ASSERT_EQ(x[i], value<float>(root, i, round + 1));
            for (int r = 0; r < c.size; r++) {
                ASSERT_EQ(whole[r * n + i], value<float>(r, i, round + 2));
                ASSERT_TRUE(same(turned[r * n + i], value<bf16>(r, c.rank * n + i, round + 4)));
            }
        }
    }
}

// A world of rows (tp) and columns (dp), with a collective on each at the same time. Half of the
// ranks finish the row's first, half the column's.
void test_grid(const Comm& world, int tp_size) {
    // Split the world.
    int dp_size = world.size / tp_size, dp = world.rank / tp_size, tp = world.rank % tp_size;
    if (world.rank >= dp_size * tp_size) return;
    std::vector<int> row, column;
    for (int k = 0; k < tp_size; k++) row.push_back(dp * tp_size + k);
    for (int k = 0; k < dp_size; k++) column.push_back(k * tp_size + tp);
    Comm across = comm_split(world, "tp", row), down = comm_split(world, "dp", column);
    ASSERT_EQ(across.rank, tp);
    ASSERT_EQ(down.rank, dp);

    // Sum over both.
    std::mt19937 random(world.rank + 5);
    for (int round = 0; round < 20; round++) {
        size_t n = 200;
        std::vector<float> a(n), b(n);
        for (size_t i = 0; i < n; i++)
            a[i] = value<float>(across.rank, i, dp), b[i] = value<float>(down.rank, i, tp + 50);
        bool swap = (world.rank + round) % 2;
        Pending<Cpu> first = start_all_reduce_sum(across, a.data(), n, Cpu());
        jitter(random);
        Pending<Cpu> second = start_all_reduce_sum(down, b.data(), n, Cpu());
        finish(swap ? second : first);
        jitter(random);
        finish(swap ? first : second);
        for (size_t i = 0; i < n; i++) {
            ASSERT_TRUE(is_sum(across, a[i], i, dp));
            ASSERT_TRUE(is_sum(down, b[i], i, tp + 50));
        }
    }
    barrier(down, Cpu());
}

// Two splits with the same name and ranks make two groups, even if one rank makes both before
// another makes its first.
void test_split_twice(const Comm& c) {
    std::vector<int> all;
    for (int r = 0; r < c.size; r++) all.push_back(r);
    if (c.rank > 0) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    Comm one = comm_split(c, "same", all), two = comm_split(c, "same", all);
    float x = 1, y = 2;
    Pending<Cpu> first =
        start_all_reduce_sum(c.rank % 2 ? one : two, c.rank % 2 ? &x : &y, 1, Cpu());
    Pending<Cpu> second =
        start_all_reduce_sum(c.rank % 2 ? two : one, c.rank % 2 ? &y : &x, 1, Cpu());
    finish(first);
    finish(second);
    EXPECT_EQ(x, 1 * c.size);
    EXPECT_EQ(y, 2 * c.size);
}

// A random program over random groups, the same for all ranks. Each rank finishes its outstanding
// collectives at random times, in a random order of its own.
void test_random(const Comm& world, int seed, int steps) {
    // Make four groups; the first has all ranks.
    std::mt19937 program(seed), mine(seed * 100 + world.rank);
    std::deque<Comm> groups; // a deque: a Pending keeps a pointer to its group
    std::vector<Comm*> of_index;
    for (int g = 0; g < 4; g++) {
        std::vector<int> places;
        for (int r = 0; r < world.size; r++)
            if (g == 0 || program() % 3) places.push_back(r);
        std::shuffle(places.begin(), places.end(), program);
        bool inside = std::count(places.begin(), places.end(), world.rank);
        if (inside) groups.push_back(comm_split(world, "group " + std::to_string(g), places));
        of_index.push_back(inside ? &groups.back() : nullptr);
    }

    // A collective in flight, with its buffers.
    struct Running {
        Pending<Cpu> pending;
        const Comm* c;
        int kind, salt;
        size_t n;
        std::vector<float> in, out;
        std::vector<bf16> half;
    };
    std::deque<Running> running;

    // Finish any one, and check its result.
    auto finish_one = [&] {
        size_t which = mine() % running.size();
        Running& x = running[which];
        const Comm& c = *x.c;
        finish(x.pending);
        for (size_t i = 0; i < x.n; i++) {
            testing::AssertionResult right = testing::AssertionSuccess();
            if (x.kind == 0) right = is_sum(c, x.in[i], i, x.salt);
            if (x.kind == 1) right = is_sum(c, x.half[i], i, x.salt);
            if (x.kind == 2) right = is_sum(c, x.out[i], c.rank * x.n + i, x.salt);
            ASSERT_TRUE(right);
            for (int r = 0; r < c.size; r++)
                ASSERT_TRUE(x.kind != 3 || x.out[r * x.n + i] == value<float>(r, i, x.salt));
            ASSERT_TRUE(x.kind != 4 || x.in[i] == value<float>(x.salt % c.size, i, x.salt));
        }
        running.erase(running.begin() + which);
    };

    // Start collectives, and keep at most seven in flight.
    for (int step = 0; step < steps; step++) {
        const Comm* c = of_index[program() % of_index.size()];
        size_t n = program() % 4 ? program() % 200 : program() % 20000;
        int kind = program() % 6;
        if (!c) continue;
        Running& x = running.emplace_back();
        x.c = c, x.kind = kind, x.salt = step, x.n = n;
        x.in.resize(kind == 2 ? n * c->size : n), x.out.resize(n * c->size), x.half.resize(n);
        for (size_t i = 0; i < x.in.size(); i++) x.in[i] = value<float>(c->rank, i, step);
        for (size_t i = 0; i < n; i++) x.half[i] = value<bf16>(c->rank, i, step);
        switch (kind) {
        case 0: x.pending = start_all_reduce_sum(*c, x.in.data(), n, Cpu()); break;
        case 1: x.pending = start_all_reduce_sum(*c, x.half.data(), n, Cpu()); break;
        case 2:
            x.pending = start_reduce_scatter_sum(*c, x.out.data(), x.in.data(), n, Cpu());
            break;
        case 3: x.pending = start_all_gather(*c, x.out.data(), x.in.data(), n, Cpu()); break;
        case 4: x.pending = start_broadcast(*c, x.in.data(), n, step % c->size, Cpu()); break;
        case 5: x.pending = comm_start<Cpu>(*c, {Collective::BARRIER, nullptr, nullptr, 0}, Cpu());
        }
        jitter(mine);
        while (running.size() > mine() % 8) finish_one();
    }
    while (!running.empty()) finish_one();
}

// ----------------------------------------------------------------------------
// messages

// Pass a buffer around a ring: by exchanges, and by exchanges whose sends and
// receives finish apart.
void test_ring(const Comm& c) {
    int next = (c.rank + 1) % c.size, previous = (c.rank + c.size - 1) % c.size;
    std::vector<float> mine(1000, float(c.rank)), other(1000);
    for (int step = 1; step < c.size; step++) {
        // List the send first on some ranks, the receive first on others.
        CommMessage send = {mine.data(), 4000, next, true, 7},
                    get = {other.data(), 4000, previous, false, 7};
        CommMessage both[2] = {c.rank % 2 ? send : get, c.rank % 2 ? get : send};
        if (step % 2) {
            exchange(c, both, 2, Cpu());
        } else { // finish the send, then the receive
            PendingExchange<Cpu> p = start_exchange_apart(c, both, 2, Cpu());
            finish(p.sent);
            finish(p.received);
        }
        mine.swap(other);
        ASSERT_EQ(mine[999], float((c.rank + c.size - step) % c.size));
    }
}

// Messages from every rank to every rank, itself included, with several tags and two
// messages a tag. Each rank lists them in a random order of its own; only messages with the
// same tag keep theirs.
void test_all_pairs(const Comm& c, int rounds) {
    constexpr int TAGS = 3, EACH = 2;
    std::mt19937 random(c.rank + 17);
    for (int round = 0; round < rounds; round++) {
        auto bytes = [&](int from, int to, int tag, int k) {
            return size_t((from * 7 + to * 3 + tag * 11 + k * 5 + round) % 40 * 100); // 0 too
        };

        // Shuffle the pairs of peers and tags, and list their messages.
        struct Pair {
            int peer, tag;
            bool send;
        };
        std::vector<Pair> pairs;
        for (int peer = 0; peer < c.size; peer++)
            for (int tag = 0; tag < TAGS; tag++)
                for (bool send : {false, true}) pairs.push_back({peer, tag, send});
        std::shuffle(pairs.begin(), pairs.end(), random);
        std::deque<std::vector<char>> data;
        std::vector<CommMessage> messages;
        for (const Pair& p : pairs)
            for (int k = 0; k < EACH; k++) {
                int from = p.send ? c.rank : p.peer, to = p.send ? p.peer : c.rank;
                char fill = char(from * 31 + to * 17 + p.tag * 5 + k);
                data.emplace_back(bytes(from, to, p.tag, k), p.send ? fill : 0);
                messages.push_back({data.back().data(), data.back().size(), p.peer, p.send, p.tag});
            }
        if (c.size == 1) messages.clear();

        // Exchange them all at once.
        Pending<Cpu> p = start_exchange(c, messages.data(), int(messages.size()), Cpu());
        jitter(random);
        finish(p);
        for (size_t i = 0; i < messages.size(); i++) {
            const CommMessage& m = messages[i];
            int from = m.send ? c.rank : m.peer, to = m.send ? m.peer : c.rank;
            char fill = char(from * 31 + to * 17 + m.tag * 5 + int(i % EACH));
            for (char x : data[i]) ASSERT_EQ(x, fill) << from << " to " << to << " tag " << m.tag;
        }
    }
}

// Messages and collectives with the same numbers do not mix: half of the ranks start the message
// first, half the collective.
void test_messages_beside_collectives(const Comm& world) {
    std::vector<int> all;
    for (int r = 0; r < world.size; r++) all.push_back(r);
    Comm c = comm_split(world, "fresh", all); // a new group counts its collectives from 0, as tags
    int next = (c.rank + 1) % c.size, previous = (c.rank + c.size - 1) % c.size;
    for (int tag = 0; tag < 40 && c.size > 1; tag += 2) {
        size_t n = 64 * c.size; // so that a rank's slice is as long as a message
        std::vector<float> x(n), mine(64, float(c.rank)), other(64);
        for (size_t i = 0; i < n; i++) x[i] = value<float>(c.rank, i, tag);
        CommMessage messages[2] = {{mine.data(), 256, next, true, tag},
                                   {other.data(), 256, previous, false, tag}};

        // Start both, and finish both.
        Pending<Cpu> first, second;
        if (c.rank % 2) first = start_exchange(c, messages, 2, Cpu());
        second = start_all_reduce_sum(c, x.data(), n, Cpu());
        if (c.rank % 2 == 0) first = start_exchange(c, messages, 2, Cpu());
        finish(first);
        finish(second);
        for (size_t i = 0; i < n; i++) ASSERT_TRUE(is_sum(c, x[i], i, tag));
        for (float y : other) ASSERT_EQ(y, previous);
    }
}

// A rank's receive can finish while its send is outstanding. The even rank sends a large message,
// which the odd rank receives only after a word from the even one: and that comes after the even
// rank has finished its receive.
template <typename S> void test_halves_apart(const Comm& c, S where) {
    const size_t bytes = 1 << 20; // more than MPI sends before the receiver asks
    int peer = c.rank ^ 1;
    if (peer >= c.size) return;
    char* large =
        static_cast<char*>(device_memory(bytes, where)); // (bytes), from even to odd ranks
    char* small = static_cast<char*>(device_memory(100, where));   // (100), from odd to even ranks
    CommMessage large_message = {large, bytes, peer, c.rank % 2 == 0};
    CommMessage small_message = {small, 100, peer, c.rank % 2 == 1, 1};
    float word = 0; // "go on", from even to odd ranks
    CommMessage word_message = {&word, sizeof(word), peer, c.rank % 2 == 0, 2};
    auto first_of = [&](const char* data) {
        char x = 0;
        copy_out(&x, data, 1, where);
        return x;
    };

    if (c.rank % 2 == 0) {
        fill_memory(large, bytes, [](size_t) { return 'L'; }, where);
        CommMessage both[2] = {large_message, small_message};
        PendingExchange<S> p = start_exchange_apart(c, both, 2, where);
        finish(p.received);
        EXPECT_EQ(first_of(small), 's');
        exchange(c, &word_message, 1, Cpu());
        finish(p.sent);
    } else {
        fill_memory(small, 100, [](size_t) { return 's'; }, where);
        PendingExchange<S> p = start_exchange_apart(c, &small_message, 1, where);
        exchange(c, &word_message, 1, Cpu());
        exchange(c, &large_message, 1, where);
        EXPECT_EQ(first_of(large + bytes - 1), 'L');
        finish(p.sent);
        finish(p.received); // there was nothing to receive
    }
    device_free(large, bytes, where);
    device_free(small, 100, where);
}

// The library keeps nothing of collectives and messages that are finished.
void test_nothing_left(const Comm& c) {
    EXPECT_TRUE(!c.info || c.info->outstanding.empty());
    if (!c.local) return;
    barrier(c, Cpu());
    std::lock_guard lock(c.local->mutex);
    EXPECT_LE(c.local->open.size(), 1u); // one that others have started since
    for (auto& [key, queue] : c.local->mail) EXPECT_TRUE(queue.empty());
}

// All bodies, on groups in the world's order, in another order, and of one rank.
void test_everything(const Comm& c) {
    test_collectives(c);
    test_max(c);
    test_outstanding(c, 20);
    for (int tp = 1; tp <= c.size; tp++)
        if (c.size % tp == 0) test_grid(c, tp);
    for (int seed = 1; seed < 4; seed++) test_random(c, seed, 100);
    test_split_twice(c);
    test_ring(c);
    test_all_pairs(c, 5);
    test_messages_beside_collectives(c);
    test_halves_apart(c, Cpu());
    test_nothing_left(c);
    check_same(c, "the option list", "the same");

    // A group in reverse order, and one of a single rank.
    Comm backwards = c;
    std::vector<int> order;
    for (int r = c.size - 1; r >= 0; r--) order.push_back(r);
    backwards = comm_split(c, "backwards", order);
    ASSERT_EQ(backwards.rank, c.size - 1 - c.rank);
    test_all_reduce<float>(backwards, 100, 3);
    if (c.rank > 0) return;
    Comm alone = comm_split(c, "alone", {0});
    test_all_reduce<float>(alone, 100, 3);
}

// ----------------------------------------------------------------------------
// ranks as threads

LocalSettings quick(double timeout_s = 60) {
    LocalSettings s;
    s.timeout_s = timeout_s;
    return s;
}

// Run a body on threads, and return the message of its failure; "": it did not fail.
template <typename F> std::string failure_of(int ranks, F body, LocalSettings s = quick()) {
    std::string message;
    s.failure = &message;
    int status = run_local_ranks(ranks, s, body);
    EXPECT_EQ(status, !message.empty());
    return message;
}

// All bodies, with up to 16 threads.
TEST(Local, Everything) {
    for (int ranks : {1, 2, 3, 4, 8, 16})
        EXPECT_EQ(failure_of(ranks, test_everything), "") << ranks << " ranks";
}

// The same results if collectives take place at their start, or as late as possible.
TEST(Local, EarliestAndLatest) {
    for (Moment moment : {Moment::EARLIEST, Moment::LATEST})
        for (int ranks : {2, 5}) {
            LocalSettings s = quick();
            s.moment = moment;
            auto body = [moment](const Comm& c) {
                test_collectives(c);
                test_outstanding(c, 20);
                test_random(c, 7, 100);
                test_grid(c, 1);
                test_ring(c);
                test_all_pairs(c, 3);
                if (moment == Moment::LATEST) test_halves_apart(c, Cpu());
            };
            EXPECT_EQ(failure_of(ranks, body, s), "");
        }
}

// At the latest moment, the result is NaN until the collective is finished.
TEST(Local, LatestHasNaNUntilTheEnd) {
    LocalSettings s = quick();
    s.moment = Moment::LATEST;
    auto body = [](const Comm& c) {
        float x = 1;
        Pending<Cpu> p = start_all_reduce_sum(c, &x, 1, Cpu());
        barrier(c, Cpu());
        EXPECT_TRUE(std::isnan(x));
        finish(p);
        EXPECT_EQ(x, 3);
    };
    EXPECT_EQ(failure_of(3, body, s), "");
}

// At the latest moment, an input that changes before the collective is finished is an error.
TEST(Local, LatestSeesAnInputThatChanges) {
    LocalSettings s = quick();
    s.moment = Moment::LATEST;
    auto body = [](const Comm& c) {
        float in[2] = {1, 2}, out;
        Pending<Cpu> p = start_reduce_scatter_sum(c, &out, in, 1, Cpu());
        if (c.rank == 1) in[0] = 5;
        finish(p);
    };
    EXPECT_EQ(failure_of(2, body, s),
              "rank 1 changed the input of reduce-scatter on 'world' before it was finished");
}

// The watchdog names the rank that hangs: rank 0 waits for rank 2, which waits for rank 1. The
// process ends without waiting for that thread.
TEST(Local, ARankThatHangsIsNamedAndTheProcessEnds) {
    testing::FLAGS_gtest_death_test_style = "threadsafe";
    auto chain = [](const Comm& c) {
        note_action(c.info->notes, "B(0," + std::to_string(c.rank) + ")");
        Comm ahead = c.rank == 1 ? Comm() : comm_split(c, "ahead", {0, 2});
        Comm behind = c.rank == 0 ? Comm() : comm_split(c, "behind", {1, 2});
        if (c.rank == 2) barrier(behind, Cpu());
        if (c.rank == 1) std::this_thread::sleep_for(std::chrono::seconds(100));
        barrier(ahead, Cpu());
    };
    LocalSettings s = quick(0.5);
    s.leave_s = 0.2;
    EXPECT_EXIT(run_local_ranks(3, s, chain), testing::ExitedWithCode(1),
                "not arrived; rank 1 has been in B\\(0,1\\) for [0-9.]+ s, and waits for nobody\n");
}

// The watchdog's message says who waits, where, and which ranks have not arrived.
TEST(Local, NotOnTime) {
    // Ranks 1 and 2 stay away from a collective of all.
    auto late = [](const Comm& c) {
        c.info->place = "dp " + std::to_string(c.rank / 2) + ", tp " + std::to_string(c.rank % 2);
        c.info->action = "REDUCE(3)";
        if (c.rank > 0) c.info->timeout_s = 30;
        float x = 1;
        if (c.rank != 1 && c.rank != 2) all_reduce_sum(c, &x, 1, Cpu());
        while (c.rank == 1 || c.rank == 2) { // compute for ever, and meet in another group
            std::this_thread::sleep_for(std::chrono::milliseconds(300));
            barrier(comm_split(c, "pair", {1, 2}), Cpu());
        }
    };
    std::string said = failure_of(4, late, quick(0.2));
    EXPECT_EQ(said.find("rank 0 (dp 0, tp 0) waited "), 0u) << said;
    std::string rest =
        " s in all-reduce on 'world' during action REDUCE(3): ranks 1, 2 have not arrived";
    EXPECT_NE(said.find(rest), std::string::npos) << said;

    // Rank 2 does not receive a message.
    auto alone = [](const Comm& c) {
        char x;
        CommMessage m = {&x, 1, 2, false};
        if (c.rank == 0) exchange(c, &m, 1, Cpu());
        if (c.rank == 2) std::this_thread::sleep_for(std::chrono::seconds(1));
    };
    said = failure_of(3, alone, quick(0.1));
    EXPECT_NE(said.find(" s in exchange on 'world': rank 2 has not arrived"), std::string::npos)
        << said;
}

// A rank that throws, fails or ends early ends the wait of the others at once, with its name.
TEST(Local, ARankThatEndsStopsTheOthers) {
    double start = clock_seconds();
    auto wait = [](const Comm& c) {
        float x[4] = {};
        Pending<Cpu> p = start_all_reduce_sum(c, x, 4, Cpu());
        finish(p);
    };

    // Ranks that throw, return a status, or return without a collective.
    EXPECT_EQ(failure_of(4,
                         [&](const Comm& c) {
                             if (c.rank == 2) throw std::runtime_error("no such file");
                             wait(c);
                         }),
              "rank 2 failed: no such file");
    EXPECT_EQ(failure_of(4,
                         [&](const Comm& c) {
                             if (c.rank == 2) return 3;
                             wait(c);
                             return 0;
                         }),
              "rank 2 ended with status 3");
    std::string said = failure_of(2, [&](const Comm& c) {
        if (c.rank == 0) wait(c);
    });
    EXPECT_EQ(said, "rank 0 waits in all-reduce on 'world' for rank 1, which ended before");
    EXPECT_EQ(failure_of(1, [](const Comm&) { return 1; }), "rank 0 ended with status 1");
    EXPECT_LT(clock_seconds() - start, 10); // long before the watchdog's 60 s
}

// If a rank leaves, its buffers are gone: the others must not read them, although they have started
// to sum over them.
TEST(Local, ARankThatLeavesTakesItsBuffers) {
    // Each rank in turn throws while two sums are in flight.
    for (int round = 0; round < 30; round++) {
        std::string said = failure_of(4, [&](const Comm& c) {
            auto x = std::make_unique<std::vector<float>>(5000, 1.0f);
            auto y = std::make_unique<std::vector<float>>(5000, 1.0f);
            Pending<Cpu> a = start_all_reduce_sum(c, x->data(), 5000, Cpu());
            Pending<Cpu> b = start_all_reduce_sum(c, y->data(), 5000, Cpu());
            if (c.rank == round % 4) throw std::runtime_error("out of luck");
            finish(a);
            finish(b);
            barrier(c, Cpu());
        });
        EXPECT_EQ(said, "rank " + std::to_string(round % 4) + " failed: out of luck");
    }

    // A rank ends without finishing its sum: an error, unless its peer was there in time.
    std::string said = failure_of(2, [](const Comm& c) {
        float x = 1;
        Pending<Cpu> p = start_all_reduce_sum(c, &x, 1, Cpu());
        if (c.rank == 1) finish(p);
        std::this_thread::sleep_for(std::chrono::milliseconds(c.rank * 100));
    });
    EXPECT_TRUE(said == "" || said == "rank 0 left all-reduce on 'world' unfinished") << said;
}

// Ranks that call a collective or exchange a message with different sizes get an error, and so do
// ranks with different options.
TEST(Local, RanksThatDisagree) {
    std::string said = failure_of(3, [](const Comm& c) {
        std::vector<float> x(10);
        if (c.rank < 2) all_reduce_sum(c, x.data(), 10, Cpu());
        if (c.rank == 2) std::this_thread::sleep_for(std::chrono::milliseconds(200));
        if (c.rank == 2) all_reduce_sum(c, x.data(), 9, Cpu());
    });
    EXPECT_EQ(said,
              "rank 2 starts all-reduce (sum) of 9 float on 'world' where its peers start "
              "all-reduce (sum) of 10 float");

    said = failure_of(2, [](const Comm& c) {
        char x[10];
        CommMessage m = {x, size_t(10 - c.rank), 1 - c.rank, c.rank == 0};
        std::this_thread::sleep_for(std::chrono::milliseconds(c.rank * 200));
        exchange(c, &m, 1, Cpu());
    });
    EXPECT_EQ(said, "rank 1 receives 9 bytes on 'world' where rank 0 has 10 bytes");

    said =
        failure_of(4, [](const Comm& c) { check_same(c, "the program", c.rank >= 2 ? "a" : "b"); });
    EXPECT_EQ(said,
              "the program of rank 2 is not that of rank 0: start all ranks with the same "
              "program and options");
}

// The table of placements (placement.h) follows what collectives leave in buffers, and refuses a
// sum of what is summed already.
TEST(Local, WhatBuffersHold) {
    LocalSettings s = quick();
    s.placements = true;
    auto holds = [](const Comm& c, const void* p, const char* axis) {
        const Placements::Row* row = placement_find(*c.info->placements, p, 1, axis);
        return row ? placement_name(row->holds) : "nothing";
    };

    // Partial, sharded, replicated, and partial again.
    auto good = [&](const Comm& c) {
        std::vector<float> grad(8), out(2), other(8);
        placement_set(*c.info->placements, grad.data(), 32, "world", Placement::PARTIAL, "grad");
        placement_set(*c.info->placements, grad.data(), 32, "tp", Placement::SHARDED, "grad");
        reduce_scatter_sum(c, grad.data() + c.rank * 2, grad.data(), 2, Cpu());
        for (int r = 0; r < 4; r++)
            EXPECT_STREQ(holds(c, &grad[r * 2], "world"), r == c.rank ? "sharded" : "partial");
        EXPECT_STREQ(holds(c, &grad[0], "tp"), "sharded");
        all_gather(c, grad.data(), grad.data() + c.rank * 2, 2, Cpu());
        for (int i = 0; i < 8; i++) EXPECT_STREQ(holds(c, &grad[i], "world"), "replicated");
        placement_set(*c.info->placements, grad.data(), 32, "world", Placement::PARTIAL, "grad");
        all_reduce_sum(c, grad.data(), 8, Cpu());
        EXPECT_STREQ(holds(c, &grad[7], "world"), "replicated");
        all_reduce_sum(c, other.data(), 8, Cpu()); // a buffer without a row is not followed
        EXPECT_STREQ(holds(c, &other[0], "world"), "nothing");
    };
    EXPECT_EQ(failure_of(4, good, s), "");

    // One rank sums twice.
    auto twice = [](const Comm& c) {
        std::vector<float> grad(8);
        placement_set(*c.info->placements, grad.data(), 32, "world", Placement::PARTIAL, "grad");
        all_reduce_sum(c, grad.data(), 8, Cpu());
        c.info->timeout_s = c.rank == 1 ? 60 : 5;
        if (c.rank == 1) all_reduce_sum(c, grad.data() + 4, 4, Cpu());
        barrier(c, Cpu());
    };
    EXPECT_EQ(failure_of(2, twice, s),
              "rank 1: all-reduce on 'world': grad is replicated, it must be partial");
}

// A wait ends as soon as the peer arrives, in the median of 21 within 4 ms: on a busy machine
// some take longer.
TEST(Local, WaitsAreShort) {
    std::vector<double> came(21), left(21), late;
    auto body = [&](const Comm& c) {
        for (int i = 0; i < 21; i++) {
            if (c.rank == 1)
                std::this_thread::sleep_for(std::chrono::milliseconds(21 + i * 7 % 20));
            if (c.rank == 1) came[i] = clock_seconds();
            barrier(c, Cpu());
            if (c.rank == 0) left[i] = clock_seconds();
        }
    };
    EXPECT_EQ(failure_of(2, body), "");
    for (int i = 0; i < 21; i++) late.push_back(left[i] - came[i]);
    std::sort(late.begin(), late.end());
    EXPECT_LT(late[10], 0.004) << "the median";
}

// Ranks that arrive at random times make the same bits in every run.
TEST(Local, TimeDoesNotChangeBits) {
    std::vector<bf16> first;
    for (int run = 0; run < 10; run++) {
        std::vector<bf16> result(999);
        auto body = [&](const Comm& c) {
            std::mt19937 random(run * 100 + c.rank);
            std::vector<bf16> x(999);
            for (size_t i = 0; i < 999; i++) x[i] = value<bf16>(c.rank, i, 1);
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
            all_reduce_sum(c, x.data(), 999, Cpu());
            if (c.rank == run % c.size) result = x;
        };
        EXPECT_EQ(failure_of(7, body), "");
        if (run == 0) first = result;
        EXPECT_EQ(memcmp(first.data(), result.data(), 999 * 2), 0);
    }
}

// ----------------------------------------------------------------------------
// the sum's kernel against the CPU's: the same bits

#if LLMC_KERNELS && !defined(__CUDACC__)
// Sum or maximum of five ranks into two outputs, by the kernel and by the CPU, aligned or not.
template <typename T, bool MAX> void test_kernel(size_t n, size_t in_offset, size_t out_offset) {
    constexpr int RANKS = 5;
    std::vector<std::vector<T>> ins(RANKS, std::vector<T>(n + 1)), outs(4, ins[0]);
    const void* in[RANKS];
    for (int r = 0; r < RANKS; r++) {
        for (size_t i = 0; i < n; i++) ins[r][in_offset + i] = value<T>(r, i, 3);
        in[r] = ins[r].data() + in_offset;
    }
    void* out[4];
    for (int k = 0; k < 4; k++) out[k] = outs[k].data() + out_offset;

    // Run both, and compare all four outputs.
    cudaStream_t stream = nullptr;
    reduce_ranks<T, MAX>(out, 2, in, RANKS, n, stream);
    reduce_ranks<T, MAX>(out + 2, 2, in, RANKS, n, Cpu());
    for (int k = 1; k < 4; k++)
        EXPECT_EQ(memcmp(outs[k].data(), outs[0].data(), (n + 1) * sizeof(T)), 0);
    for (size_t i = 0; i < n; i++)
        ASSERT_TRUE(same(outs[0][out_offset + i], expected_sum<T>(RANKS, i, 3, MAX)));
}
template <typename T> void test_kernels() {
    for (size_t n : {0, 1, 15, 16, 1024, 4099})
        for (size_t offsets = 0; offsets < 4; offsets++) {
            test_kernel<T, false>(n, offsets % 2, offsets / 2);
            test_kernel<T, true>(n, offsets % 2, offsets / 2);
        }
}
TEST(Kernel, IsTheCpusSum) {
    test_kernels<float>();
    test_kernels<double>();
    test_kernels<bf16>();
    test_kernels<fp16>();
    test_kernels<int>();
    test_kernels<int64_t>();
    test_kernels<unsigned char>();
}
#endif

// ----------------------------------------------------------------------------
// ranks as threads that share a GPU, or the emulator: a stream each

#if LLMC_KERNELS
// A buffer of n elements on the device.
template <typename T> struct OnDevice {
    T* p;
    size_t n;
    cudaStream_t stream;
    OnDevice(size_t n, cudaStream_t stream) : n(n), stream(stream) {
        p = static_cast<T*>(device_memory(n * sizeof(T), stream));
    }
    ~OnDevice() { device_free(p, n * sizeof(T), stream); }
    void fill(int rank, int salt) {
        fill_memory(
            p, n, [&](size_t i) { return value<T>(rank, i, salt); }, stream);
    }
    std::vector<T> read() {
        std::vector<T> host(n);
        copy_out(host.data(), p, n * sizeof(T), stream);
        return host;
    }
};

// Each collective and a message on a stream.
template <typename T> void test_streams(const Comm& c, size_t n, cudaStream_t stream) {
    // Sums, two of them in flight beside an all-to-all.
    OnDevice<T> x(n, stream), all(n * c.size, stream), part(n, stream), turned(n * c.size, stream);
    x.fill(c.rank, 1), all.fill(c.rank, 2);
    Pending<cudaStream_t> first = start_all_reduce_sum(c, x.p, n, stream);
    Pending<cudaStream_t> second = start_reduce_scatter_sum(c, part.p, all.p, n, stream);
    all_to_all(c, turned.p, all.p, n, stream);
    finish(first);
    finish(second);
    std::vector<T> sum = x.read(), mine = part.read(), turn = turned.read();
    for (size_t i = 0; i < n; i++) {
        ASSERT_TRUE(is_sum(c, sum[i], i, 1));
        ASSERT_TRUE(is_sum(c, mine[i], c.rank * n + i, 2));
        for (int r = 0; r < c.size; r++)
            ASSERT_TRUE(same(turn[r * n + i], value<T>(r, c.rank * n + i, 2)));
    }

    // All-gather.
    x.fill(c.rank, 3);
    all_gather(c, all.p, x.p, n, stream);
    std::vector<T> whole = all.read();
    for (size_t i = 0; i < whole.size(); i++)
        ASSERT_TRUE(same(whole[i], value<T>(int(i / n), i % n, 3)));

    // A message around the ring, and a broadcast.
    OnDevice<T> received(n, stream);
    CommMessage messages[2] = {{x.p, n * sizeof(T), (c.rank + 1) % c.size, true},
                               {received.p, n * sizeof(T), (c.rank + c.size - 1) % c.size, false}};
    if (c.size > 1) exchange(c, messages, 2, stream);
    broadcast(c, x.p, n, c.size - 1, stream);
    std::vector<T> last = x.read(), got = received.read();
    for (size_t i = 0; i < n; i++) {
        ASSERT_TRUE(same(last[i], value<T>(c.size - 1, i, 3)));
        ASSERT_TRUE(c.size == 1 || same(got[i], value<T>(messages[1].peer, i, 3)));
    }
    barrier(c, stream);
}

// Threads as ranks share a GPU, or the emulator, with a stream each.
TEST(Local, RanksShareAGpu) {
    for (int ranks : {1, 2, 5}) {
        auto body = [](const Comm& c) {
            cudaStream_t stream;
            LLMC_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
            for (size_t n : {0, 1, 65, 4099}) {
                test_streams<float>(c, n, stream);
                test_streams<bf16>(c, n, stream);
                test_streams<int>(c, n, stream);
            }
            test_halves_apart(c, stream);
            LLMC_CUDA_CHECK(cudaStreamDestroy(stream));
        };
        EXPECT_EQ(failure_of(ranks, body), "");
    }
}
#endif

// ----------------------------------------------------------------------------
// ranks as processes

#ifdef WITH_MPI
// All bodies between processes: in rank order and in the library's, whole and in small pieces.
int run_mpi() {
    RankInfo info;
    info.timeout_s = 60;
    {
        Comm world = mpi_world(info);
        for (bool fixed : {true, false})
            for (size_t most : {size_t(1) << 30, size_t(1000)}) {
                world.fixed_order = fixed;
                if (world.mpi)
                    world.mpi->most = most, world.mpi->scratch = most == 1000 ? 5000 : 4 << 20;
                test_everything(world);
            }
        int failed = testing::Test::HasFailure();
        all_reduce_max(world, &failed, 1, Cpu());
        if (world.rank == 0) printf(failed ? "failed\n" : "passed with %d ranks\n", world.size);
        return failed;
    }
}

// Fail in one of three ways, each of which must end the job.
int run_mpi_failure(const std::string& how) {
    RankInfo info;
    info.timeout_s = how == "late" ? 0.5 : 60;
    info.action = "F(0)";
    if (how == "pairs" || how == "apart") {
        info.machine_ranks = how == "pairs" ? 2 : 1;
        info.timeout_s = 4;
    }
    Comm world = mpi_world(info);
    info.place = "dp " + std::to_string(world.rank);
    float x = 1;
    if (info.machine_ranks) {
        // The last rank computes, while all others wait.
        note_action(info.notes, "B(" + std::to_string(world.rank) + ")");
        if (world.rank == 3) std::this_thread::sleep_for(std::chrono::seconds(20));
        all_reduce_sum(world, &x, 1, Cpu());
    } else if (how == "late") {
        if (world.rank > 0) std::this_thread::sleep_for(std::chrono::seconds(20));
        all_reduce_sum(world, &x, 1, Cpu());
    } else if (how == "other") {
        check_same(world, "the program", world.rank == 2 ? "a" : "b");
    } else if (how == "drop") {
        Pending<Cpu> p = start_all_reduce_sum(world, &x, 1, Cpu());
    }
    return 0;
}

// Run a command, and return its output with "[passed]" or "[failed]".
std::string run_command(const std::string& command) {
    std::string text;
    FILE* f = popen((command + " 2>&1").c_str(), "r");
    char line[512];
    while (f && fgets(line, sizeof(line), f)) text += line;
    if (f) text += pclose(f) ? "[failed]" : "[passed]";
    return text;
}

std::string mpirun(int ranks, const std::string& options) {
    char self[4096] = {};
    if (readlink("/proc/self/exe", self, sizeof(self) - 1) < 0) return "no /proc/self/exe";
    return run_command("timeout 300 mpirun --allow-run-as-root --oversubscribe -np " +
                       std::to_string(ranks) + " " + self + " " + options);
}

// Ranks of one machine know from the other's ranks who stands still there, before the limit. A rank
// that is alone on its machine cannot answer, and is named for that.
TEST(Mpi, ARankOfAnotherMachineIsNamed) {
    auto told_by = [](const std::string& how, const std::string& ranks) { // of the first machine
        std::istringstream said(mpirun(4, "--mpi-fail " + how));
        std::string found;
        for (std::string line; std::getline(said, line);)
            if (std::regex_search(line, std::regex("rank " + ranks + " \\(dp .\\) waited ")))
                found += line + "\n";
        return found;
    };
    std::string text = told_by("pairs", "[01]");
    EXPECT_EQ(text.find("note: rank "), 0u) << text;
    EXPECT_NE(text.find("; rank 3 has been in B(3) for "), std::string::npos) << text;
    EXPECT_NE(text.find("and waits for nobody; the run ends if this lasts 4 s (--watchdog)"),
              std::string::npos) << text;
    EXPECT_EQ(text.find("rank 2 has been"), std::string::npos) << text;

    text = told_by("apart", "0");
    EXPECT_NE(text.find("; rank 3, alone on its machine, does not answer; the run ends if "),
              std::string::npos) << text;
    EXPECT_EQ(text.find("rank 1, alone"), std::string::npos) << text;
    EXPECT_EQ(text.find("rank 2, alone"), std::string::npos) << text;
}

// All bodies, with up to four processes.
TEST(Mpi, Everything) {
    for (int ranks : {1, 2, 3, 4}) {
        std::string said = mpirun(ranks, "--mpi");
        EXPECT_NE(said.find("passed with " + std::to_string(ranks)), std::string::npos) << said;
        EXPECT_NE(said.find("[passed]"), std::string::npos) << said;
    }
}

// A rank that fails ends the whole job, with a message that says why.
TEST(Mpi, FailuresEndTheJob) {
    auto expect = [](const std::string& how, const std::string& message) {
        std::string said = mpirun(3, "--mpi-fail " + how);
        EXPECT_NE(said.find(message), std::string::npos) << said;
        EXPECT_NE(said.find("[failed]"), std::string::npos) << said;
    };
    expect("late", "s in all-reduce on 'world' during action F(0): ranks 1, 2 have not arrived");
    expect("other", "the program of rank 2 is not that of rank 0");
    expect("drop", "left all-reduce on 'world' unfinished");
}
#endif

// ----------------------------------------------------------------------------
// ranks as processes with a GPU each: NCCL, on the CPU by its stand-in (harness/nccl_stub)

#ifdef WITH_NCCL
// The world on GPUs: each process has one of its own. On the stand-in all GPUs are the same.
Comm nccl_world(RankInfo& info) {
    Comm world = mpi_world(info);
#if defined(EMULATE)
    nccl_settings(0);
#else
    std::string wrong = take_gpu(world);
    if (!wrong.empty()) mpi_stop(wrong);
#endif
    return nccl_attach(world);
}

// NCCL's maximum keeps infinities, and gives NaN if any rank has a NaN.
void test_maximum(const Comm& c, cudaStream_t stream) {
    std::vector<float> mine = {float(c.rank) - 1.5f, -float(c.rank) - 2, -INFINITY, INFINITY, 0};
    if (c.rank == 1) mine[4] = -NAN;
    if (c.rank == 2) mine[2] = -1e30f;

    // Take the maximum. On the stand-in it must be one call of NCCL's own.
    OnDevice<float> x(mine.size(), stream);
    copy_in(x.p, mine.data(), mine.size() * sizeof(float), stream);
#if defined(EMULATE)
    nccl_stub::calls.clear();
#endif
    all_reduce_max(c, x.p, x.n, stream);
    std::vector<float> most = x.read();
#if defined(EMULATE)
    EXPECT_EQ(nccl_stub::calls, std::vector<std::string>{"maximum on 0"});
#endif

    EXPECT_EQ(most[0], float(c.size) - 2.5f);
    EXPECT_EQ(most[1], -2);
    EXPECT_EQ(most[2], c.size > 2 ? -1e30f : -INFINITY);
    EXPECT_EQ(most[3], INFINITY);
    EXPECT_TRUE(std::isnan(most[4]));
}

// Sums in rank order and in NCCL's, on streams.
int run_nccl() {
    RankInfo info;
    info.timeout_s = 60;
    Comm world = nccl_world(info);
    EXPECT_STREQ(getenv("NCCL_LAUNCH_ORDER_IMPLICIT"), "1");
#if defined(EMULATE)
    EXPECT_EQ(emulator::pool_keeps, UINT64_MAX);
#endif

    // MPI, which carries the stand-in's calls, has no sum of bf16: those are in rank order always.
    for (bool fixed : {true, false})
        for (size_t n : {0, 1, 65, 4099}) {
            world.fixed_order = fixed;
            test_streams<float>(world, n, nullptr);
            test_streams<int>(world, n, nullptr);
            world.fixed_order = true;
            test_streams<bf16>(world, n, nullptr);
        }
    test_maximum(world, nullptr);

    // Fail on all ranks if one has failed.
    int failed = testing::Test::HasFailure();
    all_reduce_max(world, &failed, 1, Cpu());
    if (world.rank == 0) printf(failed ? "failed\n" : "passed with %d ranks\n", world.size);
    return failed;
}

#if defined(EMULATE)
// Parse "dp=4 tp=2 late": a layout, and then what the run is to do.
Layout layout_of(const std::string& text, std::string* rest) {
    Layout layout;
    std::istringstream words(text);
    for (std::string word; words >> word;) {
        int n = atoi(word.substr(word.find('=') + 1).c_str());
        if (word.rfind("dp=", 0) == 0) layout.dp.size = n;
        else if (word.rfind("tp=", 0) == 0) layout.tp.size = n;
        else if (word.rfind("pp=", 0) == 0) layout.pp.size = n;
        else if (word.rfind("group=", 0) == 0) layout.zero_group = n;
        else *rest += word;
    }
    return layout;
}

// Print the calls of NCCL and the groups of each communicator, on each rank. With a word behind the
// layout meet an error, or wait too long.
int run_groups(const std::string& text) {
    RankInfo info;
    std::string error;
    Layout layout = layout_of(text, &error);
    info.timeout_s = error == "late" ? 0.2 : error == "error" ? 5 : 60;
    info.action = "F(0)";
    std::string said;
    {
        Comm world = nccl_world(info);
        Comms c = make_comms(world, layout_at(layout, world.rank), error == "kv" ? 2 : 1);
        for (const std::string& call : nccl_stub::calls) said += call + "; ";
        for (const NcclGroup* group : info.communicators) said += group->names + "; ";

        // Let the last communicator of the last rank fail. While it waits a rank asks all of its
        // communicators for errors, so it must notice.
        emulator::busy_queries = error.empty() || error == "kv" ? 0 : 1 << 30;
        if (error == "error" && world.rank == world.size - 1)
            nccl_stub::made.back()->error = ncclRemoteError;
        wait_for_peers(world, cudaStream_t{});
        for (int r = 0; r < world.size; r++) {
            if (r == world.rank) printf("rank %d: %s\n", r, said.c_str()), fflush(stdout);
            barrier(world, Cpu());
        }
    }

    // All communicators are freed, and none is listed any more.
    bool freed = info.communicators.empty();
    for (ncclComm_t comm : nccl_stub::made) freed &= !comm;
    return freed ? 0 : 1;
}

// Sums, moves and messages on streams, with two and four processes.
TEST(Nccl, Streams) {
    for (int ranks : {2, 4}) {
        std::string said = mpirun(ranks, "--nccl");
        EXPECT_NE(said.find("passed with " + std::to_string(ranks)), std::string::npos) << said;
        EXPECT_NE(said.find("[passed]"), std::string::npos) << said;
    }
}

// The communicators that a layout needs. Groups of the same ranks share one, if they do not run
// side by side; the others are split from the world's, or have one of their own. Counts and
// losses need none.
TEST(Nccl, CommunicatorsOfLayouts) {
    auto expect = [](int ranks, const std::string& layout, const std::string& rank_says) {
        std::string said = mpirun(ranks, "--groups '" + layout + "'");
        EXPECT_NE(said.find(rank_says + "\n"), std::string::npos) << layout << "\n" << said;
        EXPECT_NE(said.find("[passed]"), std::string::npos) << layout << "\n" << said;
    };
    expect(4, "dp=4", "rank 3: init 4; 'world', 'shard'; ");
    expect(4, "tp=4", "rank 0: init 4; 'world', 'tp'; ");
    expect(2, "pp=2", "rank 1: init 2; 'world', 'pp', 'tie'; ");
    expect(4, "dp=2 tp=2", "rank 0: init 4; split 0: 2; init 2; 'world'; 'shard'; 'tp'; ");
    expect(4, "dp=2 pp=2",
           "rank 2: init 4; split 0: 2; init 2; 'world'; 'shard'; 'pp', 'tie'; ");
    expect(4, "dp=4 group=2",
           "rank 1: init 4; split 0: 2; split 0: 2; 'world'; 'shard'; 'replica'; ");
    expect(4, "tp=4 kv", "rank 0: init 4; split 0: 2; 'world', 'tp'; 'kv'; ");

    // A tied table is summed by the ends of a pipeline; ranks between them join no group.
    expect(3, "pp=3", "rank 0: init 3; split 0: 2; 'world', 'pp'; 'tie'; ");
    expect(3, "pp=3", "rank 1: init 3; split 0: 0; 'world', 'pp'; ");
}

// An error of NCCL names the groups of the communicator; a wait that takes too long names all.
TEST(Nccl, FailuresNameTheCommunicator) {
    auto expect = [](const std::string& how, const std::string& message) {
        std::string said = mpirun(4, "--groups '" + how + "'");
        EXPECT_NE(said.find(message), std::string::npos) << said;
        EXPECT_NE(said.find("[failed]"), std::string::npos) << said;
    };
    expect("dp=2 tp=2 error",
           "rank 3: NCCL says of 'tp': remote process exited, during action F(0)");
    expect("dp=2 pp=2 error", "rank 3: NCCL says of 'pp', 'tie': remote process exited");
    expect("dp=2 tp=2 late",
           " s for its stream, with collectives on 'world'; 'shard'; 'tp', during "
           "action F(0)");
}
#endif
#endif

int main(int argc, char** argv) {
    testing::InitGoogleTest(&argc, argv);
    std::string mode = argc > 1 ? argv[1] : "";

    // As one of several processes, run the bodies; else the tests, which start the processes.
#ifdef WITH_MPI
    if (mode == "--mpi" || mode == "--mpi-fail") {
        int given;
        LLMC_MPI_CHECK(MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &given));
        std::string option = argc > 2 ? argv[2] : "";
        int status = mode == "--mpi" ? run_mpi() : run_mpi_failure(option);
        LLMC_MPI_CHECK(MPI_Finalize());
        return status;
    }
#endif
#ifdef WITH_NCCL
    if (mode == "--nccl" || mode == "--groups") {
        int given;
        LLMC_MPI_CHECK(MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &given));
#if defined(EMULATE)
        int status = mode == "--nccl" ? run_nccl() : run_groups(argc > 2 ? argv[2] : "");
#else
        int status = run_nccl();
#endif
        LLMC_MPI_CHECK(MPI_Finalize());
        return status;
    }
#endif
    return RUN_ALL_TESTS();
}
