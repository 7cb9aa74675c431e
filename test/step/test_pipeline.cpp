// test_pipeline.cpp - schedules against the textbook, the check against planted faults, the split
#include <gtest/gtest.h>
#include <fstream>
#include <functional>
#include "../../llmc/pipeline.h"
#include "../../llmc/text.h"

using namespace llmc;

typedef std::vector<Schedule> Schedules;

static const Pipeline KINDS[] = {Pipeline::GPIPE, Pipeline::ONE_F_ONE_B, Pipeline::INTERLEAVED,
                                 Pipeline::ZERO_BUBBLE};

// Every size: pp 1 to 8, chunks 1 to 4, 1 to 24 micro-batches.
static void every_size(const std::function<void(int, int, int)>& f) {
    for (int pp = 1; pp <= 8; pp++)
        for (int chunks = 1; chunks <= 4; chunks++)
            for (int m = 1; m <= 24; m++) f(pp, chunks, m);
}

static Schedules from_text(const std::string& text) {
    std::istringstream in(text);
    Schedules all;
    EXPECT_EQ(read_schedule(in, all), "");
    return all;
}

static int live_at_most(const Schedule& mine, SlotOp until) {
    int live = 0, most = 0;
    for (const Slot& s : mine) {
        live += s.op == SlotOp::F ? 1 : s.op == until || s.op == SlotOp::B ? -1 : 0;
        most = std::max(most, live);
    }
    return most;
}

// Idle time of a rank whose m micro-batches of `chunks` stages are its whole work.
static double idle(Pipeline kind, int pp, int chunks, int m, const Costs& c = {}) {
    Simulation s = simulate(schedules_of(kind, pp, chunks, m), pp, c);
    double busy = m * chunks * (c.F + c.I + c.W);
    EXPECT_NEAR(s.bubble, (s.time - busy) / s.time, 1e-12);
    return s.time - busy;
}

// ----------------------------------------------------------------------------
// generators

TEST(Pipeline, EverySizeIsLegalAndNeverDeadlocks) {
    every_size([](int pp, int chunks, int m) {
        for (Pipeline kind : KINDS)
            ASSERT_EQ(check_schedule(schedules_of(kind, pp, chunks, m), pp, chunks, m), "")
                << int(kind) << " pp " << pp << " chunks " << chunks << " m " << m;
        // the proof holds for both places of the groups, not only for the faster
        for (bool in_rounds : {false, true}) {
            Schedules all = schedules_of(KINDS[m % 4], pp, chunks, m);
            ASSERT_EQ(check_transfers(place_transfers(all, pp, in_rounds), pp * chunks), "");
        }
    });
}

static unsigned random_state;
static int random_below(int n) {
    random_state = random_state * 1664525u + 1013904223u;
    return int((random_state >> 8) % unsigned(n));
}

// Slots in any order that their needs allow, as a file may give them; sometimes with I and W apart.
static Schedules random_schedules(int pp, int chunks, int m) {
    int stages = pp * chunks;
    Schedules all(pp);
    std::vector<Slot> left;
    for (int s = 0; s < stages; s++)
        for (int i = 0; i < m; i++) {
            left.push_back({SlotOp::F, i, s});
            bool apart = random_below(2);
            if (!apart) left.push_back({SlotOp::B, i, s});
            if (apart) left.push_back({SlotOp::I, i, s}), left.push_back({SlotOp::W, i, s});
        }
    std::vector<int> adds(stages); // micro-batches whose weight gradients are added
    std::map<std::tuple<char, int, int>, bool> done;
    while (!left.empty()) {
        int k = random_below(int(left.size()));
        auto [pass, i, s] = left[k];
        bool ready = pass == SlotOp::F ? s == 0 || done[{'F', i, s - 1}]
                     : pass == SlotOp::W
                         ? done[{'I', i, s}]
                         : done[{'F', i, s}] && (s == stages - 1 || done[{'I', i, s + 1}]);
        bool weights = pass == SlotOp::B || pass == SlotOp::W;
        if (!ready || (weights && adds[s] != i)) continue;
        adds[s] += weights;
        done[{pass == SlotOp::F ? 'F' : pass == SlotOp::W ? 'W' : 'I', i, s}] = true;
        all[s % pp].push_back(left[k]);
        left.erase(left.begin() + k);
    }
    return all;
}

TEST(Pipeline, NoLegalScheduleDeadlocks) {
    random_state = 7;
    for (int trial = 0; trial < 500; trial++) {
        int pp = 1 + random_below(6), chunks = 1 + random_below(3), m = 1 + random_below(7);
        Schedules all = random_schedules(pp, chunks, m);
        ASSERT_EQ(check_schedule(all, pp, chunks, m), "") << write_schedule(all);
        for (bool in_rounds : {false, true})
            ASSERT_EQ(check_transfers(place_transfers(all, pp, in_rounds), pp * chunks), "")
                << write_schedule(all);
    }
}

TEST(Pipeline, TextbookOrders) {
    EXPECT_EQ(write_schedule(schedules_of(Pipeline::GPIPE, 2, 1, 3)),
              "F0.0 F1.0 F2.0 B0.0 B1.0 B2.0\nF0.1 F1.1 F2.1 B0.1 B1.1 B2.1\n");
    EXPECT_EQ(write_schedule({schedule_of(Pipeline::GPIPE, 2, 2, 4, 1)}),
              "F0.1 F1.1 F2.1 F3.1 F0.3 F1.3 F2.3 F3.3 B0.3 B1.3 B2.3 B3.3 B0.1 B1.1 B2.1 B3.1\n");
    EXPECT_EQ(write_schedule(schedules_of(Pipeline::ONE_F_ONE_B, 3, 1, 4)),
              "F0.0 F1.0 F2.0 B0.0 F3.0 B1.0 B2.0 B3.0\n"
              "F0.1 F1.1 B0.1 F2.1 B1.1 F3.1 B2.1 B3.1\n"
              "F0.2 B0.2 F1.2 B1.2 F2.2 B2.2 F3.2 B3.2\n");
    EXPECT_EQ(write_schedule(schedules_of(Pipeline::INTERLEAVED, 2, 2, 4)),
              "F0.0 F1.0 F0.2 F1.2 F2.0 B0.2 F3.0 B1.2 F2.2 B0.0 F3.2 B1.0 B2.2 B3.2 B2.0 B3.0\n"
              "F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 F2.1 B0.1 F3.1 B1.1 F2.3 B2.3 F3.3 B3.3 B2.1 B3.1\n");
    EXPECT_EQ(write_schedule(schedules_of(Pipeline::ZERO_BUBBLE, 2, 1, 3)),
              "F0.0 F1.0 I0.0 W0.0 F2.0 I1.0 W1.0 I2.0 W2.0\n"
              "F0.1 I0.1 F1.1 I1.1 W0.1 F2.1 I2.1 W1.1 W2.1\n");

    // pp does not divide the micro-batches: the first group has 3, the second 2
    EXPECT_EQ(write_schedule({schedule_of(Pipeline::INTERLEAVED, 2, 2, 5, 1)}),
              "F0.1 F1.1 F2.1 F0.3 B0.3 F1.3 B1.3 F2.3 B2.3 F3.1 B0.1 F4.1 B1.1 F3.3 B2.1 F4.3 "
              "B3.3 B4.3 B3.1 B4.1\n");
    EXPECT_TRUE(schedule_of(Pipeline::GIVEN, 2, 1, 3, 0).empty());
}

// Forward passes before the first backward pass, less the one that goes with it.
TEST(Pipeline, WarmUpIsTheTextbooks) {
    auto warmup = [](const Schedule& s) {
        int n = 0;
        while (s[n].op == SlotOp::F) n++;
        return n - 1;
    };
    every_size([&](int pp, int chunks, int m) {
        for (int r = 0; r < pp; r++) {
            int last = pp - r - 1;
            EXPECT_EQ(warmup(schedule_of(Pipeline::GPIPE, pp, chunks, m, r)), m * chunks - 1);
            EXPECT_EQ(warmup(schedule_of(Pipeline::ONE_F_ONE_B, pp, 1, m, r)),
                      std::min(last, m - 1));
            EXPECT_EQ(warmup(schedule_of(Pipeline::ZERO_BUBBLE, pp, 1, m, r)),
                      std::min(last, m - 1));
            if (m % pp == 0) {
                EXPECT_EQ(warmup(schedule_of(Pipeline::INTERLEAVED, pp, chunks, m, r)),
                          std::min(2 * last + (chunks - 1) * pp, m * chunks - 1));
            }
        }
    });
}

// ----------------------------------------------------------------------------
// textbook figures

TEST(Pipeline, BubblesAreTheTextbooks) {
    Costs uneven = {1.25, 1.5, 1}; // exact in binary
    every_size([&](int pp, int chunks, int m) {
        std::string size = concat("pp ", pp, " chunks ", chunks, " m ", m);
        for (const Costs& c : {Costs(), uneven}) {
            double one = c.F + c.I + c.W;
            if (chunks == 1) {
                EXPECT_DOUBLE_EQ(idle(Pipeline::GPIPE, pp, 1, m, c), (pp - 1) * one) << size;
                EXPECT_DOUBLE_EQ(idle(Pipeline::ONE_F_ONE_B, pp, 1, m, c), (pp - 1) * one) << size;
            }
            if (m >= pp) { // not only where pp divides m
                EXPECT_DOUBLE_EQ(idle(Pipeline::INTERLEAVED, pp, chunks, m, c), (pp - 1) * one)
                    << size;
            }
        }
    });
    Simulation s = simulate(schedules_of(Pipeline::ONE_F_ONE_B, 4, 1, 8), 4);
    EXPECT_DOUBLE_EQ(s.bubble, 3.0 / (8 + 3)); // (p-1) / (m+p-1) of the time
    s = simulate(schedules_of(Pipeline::INTERLEAVED, 4, 2, 8), 4);
    EXPECT_DOUBLE_EQ(s.bubble / (1 - s.bubble), 3.0 / (2 * 8)); // (p-1) / (vm) of the work
}

TEST(Pipeline, ZeroBubbleWaitsLess) {
    every_size([](int pp, int chunks, int m) {
        if (pp == 1) return;
        double plain = idle(Pipeline::INTERLEAVED, pp, chunks, m);
        double zero = idle(Pipeline::ZERO_BUBBLE, pp, chunks, m);
        EXPECT_LT(zero, plain) << "pp " << pp << " chunks " << chunks << " m " << m;
        if (m >= pp) {
            EXPECT_EQ(zero, pp - 1) << "pp " << pp << " chunks " << chunks << " m " << m;
        }
    });
    for (Costs c : {Costs{1, 1, 1}, Costs{1, 1.25, 1}, Costs{1, 1.25, 0.75}, Costs{1, 1, 0.5}})
        for (int pp = 2; pp <= 8; pp++)
            for (int m = pp; m <= 24; m++)
                EXPECT_NEAR(idle(Pipeline::ZERO_BUBBLE, pp, 1, m, c), (pp - 1) * (c.F + c.I - c.W),
                            1e-12)
                    << "pp " << pp << " m " << m << " " << c.F << " " << c.I << " " << c.W;
}

TEST(Pipeline, PeaksOfLiveActivationsAreTheTextbooks) {
    every_size([](int pp, int chunks, int m) {
        auto peak = [&](Pipeline kind, int v) {
            return simulate(schedules_of(kind, pp, v, m), pp).peak_live;
        };
        std::vector<int> gpipe = peak(Pipeline::GPIPE, chunks),
                         plain = peak(Pipeline::ONE_F_ONE_B, 1);
        std::vector<int> zero = peak(Pipeline::ZERO_BUBBLE, 1);
        std::vector<int> interleaved = peak(Pipeline::INTERLEAVED, chunks);
        for (int r = 0; r < pp; r++) {
            EXPECT_EQ(gpipe[r], chunks * m);
            EXPECT_EQ(plain[r], std::min(m, pp - r));
            EXPECT_LE(interleaved[r], gpipe[r]);
            if (m % pp == 0) {
                EXPECT_EQ(interleaved[r],
                          std::min(chunks * m, 2 * (pp - r - 1) + (chunks - 1) * pp + 1));
            }

            // ZB-H1: as 1F1B up to I, and no rank holds more until W than 1F1B's first rank
            Schedule mine = schedule_of(Pipeline::ZERO_BUBBLE, pp, 1, m, r);
            EXPECT_EQ(live_at_most(mine, SlotOp::I), std::min(m, pp - r));
            EXPECT_EQ(live_at_most(mine, SlotOp::W), zero[r]);
            EXPECT_EQ(zero[r], std::min(m, pp));
        }
    });
}

// One slot never starts before the one it needs has ended, and a rank does one thing at a time.
TEST(Pipeline, TimelineObeysItsMessages) {
    for (Pipeline kind : KINDS)
        for (bool blocking : {false, true}) {
            Schedules all = schedules_of(kind, 4, 2, 6);
            Costs c = {1, 1.5, 0.75};
            Simulation s = simulate(all, 4, c, blocking);
            for (const Crossing& m : crossings_of(all, 4))
                EXPECT_GE(s.start[m.to][m.used], s.end[m.from][m.made]);
            for (int r = 0; r < 4; r++) {
                ASSERT_EQ(s.start[r].size(), all[r].size());
                for (size_t i = 1; i < all[r].size(); i++)
                    EXPECT_GE(s.start[r][i], s.end[r][i - 1]);
            }
            EXPECT_GE(s.time, simulate(all, 4, c).time);
        }
}

// Sends that wait for their receives cost no time, where all slots of a kind take the same time.
TEST(Pipeline, GroupsThatBlockCostNothing) {
    every_size([](int pp, int chunks, int m) {
        for (Pipeline kind : KINDS) {
            Schedules all = schedules_of(kind, pp, chunks, m);
            EXPECT_EQ(simulate(all, pp, {}, true).time, simulate(all, pp).time)
                << int(kind) << " pp " << pp << " chunks " << chunks << " m " << m;
        }
    });
    // groups between rounds do not live on the ratio of the costs
    Schedules all = schedules_of(Pipeline::INTERLEAVED, 5, 2, 31);
    Costs uneven = {1, 1.25, 0.875};
    EXPECT_EQ(simulate(all, 5, uneven, true).time, simulate(all, 5, uneven).time);
    // those between slots do: a rank may find its peer within a longer slot
    all = schedules_of(Pipeline::ZERO_BUBBLE, 4, 1, 24);
    EXPECT_GT(simulate(all, 4, uneven, true).time, simulate(all, 4, uneven).time);
    EXPECT_LT(simulate(all, 4, uneven, true).time, 1.05 * simulate(all, 4, uneven).time);
}

// ----------------------------------------------------------------------------
// transfers

TEST(Pipeline, TransfersOfTwoRanks) {
    auto lines = [](const std::vector<ScheduleStep>& steps) {
        std::string text;
        for (const ScheduleStep& s : steps) {
            for (const Transfer& t : s.transfers)
                text += concat(t.send ? "send " : "receive ", name_of(t), ", ");
            text += s.has_slot ? name_of(s.slot) + "\n" : "end\n";
        }
        return text;
    };
    Schedules all = schedules_of(Pipeline::ONE_F_ONE_B, 2, 1, 2);
    EXPECT_EQ(lines(add_transfers(all, 0, 2)),
              "F0.0\nsend activation 0.1, F1.0\nreceive gradient 0.1, send activation 1.1, B0.0\n"
              "receive gradient 1.1, B1.0\nend\n");
    EXPECT_EQ(
        lines(add_transfers(all, 1, 2)),
        "receive activation 0.1, F0.1\nreceive activation 1.1, B0.1\nsend gradient 0.1, F1.1\n"
        "B1.1\nsend gradient 1.1, end\n");
}

TEST(Pipeline, EveryMessageIsSentOnceAndNoOtherIs) {
    every_size([](int pp, int chunks, int m) {
        Schedules all = schedules_of(Pipeline::INTERLEAVED, pp, chunks, m);
        int sends = 0, receives = 0, borders = pp == 1 ? 0 : pp * chunks - 1;
        for (const std::vector<ScheduleStep>& steps : add_transfers(all, pp))
            for (const ScheduleStep& s : steps)
                for (const Transfer& t : s.transfers) (t.send ? sends : receives)++;
        EXPECT_EQ(sends, 2 * borders * m); // an activation and a gradient
        EXPECT_EQ(receives, 2 * borders * m);
    });
}

// Receives only where they are needed, as the simpler rule would have it.
static Steps receive_when_needed(const Schedules& all) {
    int pp = int(all.size());
    Steps steps = bare_steps(all, pp);
    for (const Crossing& m : crossings_of(all, pp)) {
        steps[m.to][m.used].transfers.push_back(m.receive);
        steps[m.from][m.made + 1].transfers.push_back(m.send);
    }
    return steps;
}

TEST(Pipeline, ReceivingWhenNeededDeadlocksInterleaved) {
    EXPECT_EQ(check_transfers(receive_when_needed(schedules_of(Pipeline::GPIPE, 4, 1, 8)), 4), "");
    std::string fault =
        check_transfers(receive_when_needed(schedules_of(Pipeline::INTERLEAVED, 2, 2, 4)), 4);
    EXPECT_EQ(fault,
              "deadlock: rank 0 in step 6 before F3.0 waits to send gradient 0.2 to rank 1; "
              "rank 1 in step 6 before F2.1 waits to send gradient 1.3 to rank 0");
}

// ----------------------------------------------------------------------------
// planted faults

static std::string check(const std::string& text, int chunks, int m) {
    Schedules all = from_text(text);
    return check_schedule(all, int(all.size()), chunks, m);
}

TEST(Pipeline, FaultsOfSlots) {
    EXPECT_EQ(check("F0.0 B0.0\nF0.1 B0.1", 1, 1), "");
    EXPECT_EQ(check("F0.0 B0.0", 1, 1), "");
    EXPECT_EQ(check_schedule(from_text("F0.0 B0.0"), 2, 1, 1), "1 schedules for 2 ranks");
    EXPECT_EQ(check("F0.0 F1.0 B0.0 B1.0\nF0.1 F1.1 B0.1", 1, 2), "rank 1 lacks B1.1");
    EXPECT_EQ(check("F0.0 B0.0\nF0.1 F1.1 B0.1 B1.1", 1, 2), "rank 0 lacks F1.0");
    EXPECT_EQ(check("F0.0 I0.0\nF0.1 B0.1", 1, 1), "rank 0 lacks W0.0");
    EXPECT_EQ(check("F0.0 B0.0 B0.0\nF0.1 B0.1", 1, 1), "rank 0, slot 2, B0.0: done before");
    EXPECT_EQ(check("F0.0 B0.0 W0.0\nF0.1 B0.1", 1, 1), "rank 0, slot 2, W0.0: done before");
    EXPECT_EQ(check("F0.0 F0.0 B0.0\nF0.1 B0.1", 1, 1), "rank 0, slot 1, F0.0: done before");
    EXPECT_EQ(check("B0.0 F0.0\nF0.1 B0.1", 1, 1), "rank 0, slot 0, B0.0: F must come first");
    EXPECT_EQ(check("I0.0 F0.0\nF0.1 B0.1", 1, 1), "rank 0, slot 0, I0.0: F must come first");
    EXPECT_EQ(check("F0.0 W0.0 I0.0\nF0.1 B0.1", 1, 1), "rank 0, slot 1, W0.0: I must come first");
    EXPECT_EQ(check("F0.0 B0.0\nF1.1 B0.1", 1, 1),
              "rank 1, slot 0, F1.1: micro-batches are 0 to 0");
    EXPECT_EQ(check("F0.0 B0.0\nF0.2 B0.1", 1, 1), "rank 1, slot 0, F0.2: stages are 0 to 1");
    EXPECT_EQ(check("F0.0 F0.1\nB0.1 B0.0", 1, 1), "rank 0, slot 1, F0.1: the stage is on rank 1");
    EXPECT_EQ(
        check("F0.0 F1.0 B1.0 B0.0\nF0.1 F1.1 B1.1 B0.1", 1, 2),
        "rank 0, slot 2, B1.0: weight gradients add in ascending order, micro-batch 0 is next");
    EXPECT_EQ(
        check("F0.0 F1.0 I0.0 I1.0 W1.0 W0.0", 1, 2),
        "rank 0, slot 4, W1.0: weight gradients add in ascending order, micro-batch 0 is next");
}

TEST(Pipeline, FaultsOfOrder) {
    // one rank: a stage needs the stage below, forward, and the stage above, backward
    EXPECT_EQ(check("F0.0 F0.1 B0.1 B0.0", 2, 1), "");
    EXPECT_EQ(check("F0.1 F0.0 B0.1 B0.0", 2, 1),
              "rank 0 in step 0: F0.1 needs activation 0.1, which comes later or never");
    EXPECT_EQ(check("F0.0 F0.1 B0.0 B0.1", 2, 1),
              "rank 0 in step 2: B0.0 needs gradient 0.1, which comes later or never");
    // two ranks: each needs what the other does later, however sends are buffered
    EXPECT_EQ(check("F0.0 B0.0 F1.0 B1.0\nF0.1 F1.1 B0.1 B1.1", 1, 2),
              "deadlock: rank 0 in step 1 before B0.0 waits to receive gradient 0.1 from rank 1; "
              "rank 1 in step 1 before F1.1 waits to receive activation 1.1 from rank 0");
    // three ranks, and the first is not on the cycle
    EXPECT_EQ(check("F0.0 F1.0 B0.0 B1.0\nF0.1 B0.1 F1.1 B1.1\nF0.2 F1.2 B0.2 B1.2", 1, 2),
              "deadlock: rank 1 in step 1 before B0.1 waits to receive gradient 0.2 from rank 2; "
              "rank 2 in step 1 before F1.2 waits to receive activation 1.2 from rank 1");
}

// Steps of 1F1B on two ranks, made wrong by hand.
TEST(Pipeline, FaultsOfTransfers) {
    const Steps good = add_transfers(schedules_of(Pipeline::ONE_F_ONE_B, 2, 1, 2), 2);
    EXPECT_EQ(check_transfers(good, 2), "");
    auto fault = [&](auto change) {
        Steps steps = good;
        change(steps[0], steps[1]);
        return check_transfers(steps, 2);
    };
    typedef std::vector<ScheduleStep>& Rank;
    EXPECT_EQ(
        fault([](Rank, Rank b) { b[0].transfers.clear(); }),
        "message 0 from rank 0 to rank 1: activation 0.1 is sent, activation 1.1 is received");
    EXPECT_EQ(fault([](Rank, Rank b) { b[1].transfers.clear(); }),
              "message 1 from rank 0 to rank 1: activation 1.1 is sent, nothing is received");
    EXPECT_EQ(fault([](Rank a, Rank) { a[1].transfers.clear(), a[2].transfers.pop_back(); }),
              "message 0 from rank 0 to rank 1: nothing is sent, activation 0.1 is received");
    EXPECT_EQ(fault([](Rank a, Rank b) { a[1].transfers.clear(), b[0].transfers.clear(); }),
              "rank 1 in step 0: F0.1 needs activation 0.1, which comes later or never");
    EXPECT_EQ(
        fault([](Rank a, Rank) { std::swap(a[1].transfers[0], a[2].transfers[1]); }),
        "message 0 from rank 0 to rank 1: activation 1.1 is sent, activation 0.1 is received");
    EXPECT_EQ(fault([](Rank a, Rank b) {
                  std::swap(a[1].transfers[0], a[2].transfers[1]);
                  std::swap(b[0].transfers[0], b[1].transfers[0]);
              }),
              "rank 0 in step 1: activation 1.1 is sent before it is made");
    EXPECT_EQ(fault([](Rank a, Rank) { std::swap(a[0].transfers, a[1].transfers); }),
              "rank 0 in step 0: activation 0.1 is sent before it is made");
    EXPECT_EQ(
        fault([](Rank, Rank b) { std::swap(b[0].transfers, b[2].transfers); }),
        "message 0 from rank 0 to rank 1: activation 0.1 is sent, activation 1.1 is received");
    EXPECT_EQ(fault([](Rank a, Rank b) {
                  a[3].transfers.push_back(a[1].transfers[0]);
                  b[3].transfers.push_back(b[0].transfers[0]);
              }),
              "rank 1 in step 3: activation 0.1 is received again");
}

// An order that only buffered sends survive: each rank sends before it posts its receive. With the
// two fused into one group on rank 0 it ends.
TEST(Pipeline, AnOrderThatNeedsBuffersIsRefused) {
    Transfer a0 = {true, 1, false, 0, 1}, a1 = {true, 1, false, 1, 1}; // rank 0 sends
    Transfer g0 = {true, 0, true, 0, 1}, g1 = {true, 0, true, 1, 1};   // rank 1 sends
    auto receive = [](Transfer t) {
        return Transfer{false, 1 - t.peer, t.gradient, t.micro, t.stage};
    };
    auto slot = [](SlotOp op, int micro, int stage) { return Slot{op, micro, stage}; };
    const Slot none = {};
    Steps steps = {{{true, slot(SlotOp::F, 0, 0), {}},
                    {true, slot(SlotOp::F, 1, 0), {a0}},
                    {false, none, {a1}},
                    {true, slot(SlotOp::B, 0, 0), {receive(g0)}},
                    {true, slot(SlotOp::B, 1, 0), {receive(g1)}},
                    {}},
                   {{true, slot(SlotOp::F, 0, 1), {receive(a0)}},
                    {true, slot(SlotOp::B, 0, 1), {}},
                    {false, none, {g0}},
                    {true, slot(SlotOp::F, 1, 1), {receive(a1)}},
                    {true, slot(SlotOp::B, 1, 1), {}},
                    {false, none, {g1}}}};
    EXPECT_EQ(check_transfers(steps, 2),
              "deadlock: rank 0 in step 2 before its end waits to send activation 1.1 to rank 1; "
              "rank 1 in step 2 before its end waits to send gradient 0.1 to rank 0");
    steps[0][3].transfers.push_back(a1);
    steps[0].erase(steps[0].begin() + 2);
    EXPECT_EQ(check_transfers(steps, 2), "");
}

// ----------------------------------------------------------------------------
// files

TEST(Pipeline, TextRoundTrip) {
    for (Pipeline kind : KINDS) {
        Schedules all = schedules_of(kind, 4, 2, 11);
        EXPECT_EQ(from_text(write_schedule(all)), all);
    }
    EXPECT_EQ(from_text("# two ranks\n\n  F0.0  B0.0 # the first\r\n\n#\nF0.1\tB0.1"),
              schedules_of(Pipeline::ONE_F_ONE_B, 2, 1, 1));
}

TEST(Pipeline, BrokenTexts) {
    auto fault = [](const std::string& text) {
        std::istringstream in(text);
        Schedules all;
        return read_schedule(in, all);
    };
    EXPECT_EQ(fault("F0.0 B0.0\n# comment\nF0.1 X0.1"),
              "line 3: 'X0.1' is no slot: write a letter of FBIW, the micro-batch, a dot and the "
              "stage, like F0.1");
    for (const char* word :
         {"F", "F0", "F0.", "F.0", "0.1", "f0.1", "F0.1.2", "F-1.0", "F0.-1", "F+1.0", "F0,1",
          "F0.1,", "FF0.1", "F0x1.0", "F12345678.0", "F0.99999999999", "."})
        EXPECT_NE(fault(word).find("line 1: '" + std::string(word) + "' is no slot"),
                  std::string::npos)
            << word;
    EXPECT_EQ(fault(""), "the schedule is empty: write a line of slots for each rank");
    EXPECT_EQ(fault("# nothing\n"), "the schedule is empty: write a line of slots for each rank");
    std::ifstream missing("/nowhere/schedule.txt");
    Schedules all;
    EXPECT_EQ(read_schedule(missing, all), "the schedule cannot be read: is the path right?");
}

// The pictures in the header are what the program prints.
TEST(Pipeline, PicturesInTheHeader) {
    std::ifstream in(std::string(__FILE__).substr(0, std::string(__FILE__).rfind("test/")) +
                     "llmc/pipeline.h");
    std::string line, header;
    while (std::getline(in, line)) header += line + "\n";
    ASSERT_FALSE(header.empty());
    for (Pipeline kind : {Pipeline::ONE_F_ONE_B, Pipeline::ZERO_BUBBLE}) {
        Schedules all = schedules_of(kind, 4, 1, 5);
        std::istringstream picture(picture_of(all, simulate(all, 4)));
        std::string expected;
        while (std::getline(picture, line)) expected += "//       " + line + "\n";
        EXPECT_NE(header.find(expected), std::string::npos) << expected;
    }
}

// ----------------------------------------------------------------------------
// layers into stages

typedef std::vector<int> Ints;
typedef std::vector<double> Doubles;

static std::pair<double, double> largest_and_squares(const Doubles& cost, const Ints& first) {
    double largest = 0, squares = 0;
    for (size_t s = 0; s + 1 < first.size(); s++) {
        double sum = 0;
        for (int l = first[s]; l < first[s + 1]; l++) sum += cost[l];
        largest = std::max(largest, sum), squares += sum * sum;
    }
    return {largest, squares};
}

// All splits, in the order of their first layers: the first of the best ones.
static Ints split_by_force(const Doubles& cost, int stages) {
    Ints first = {0}, best;
    std::function<void()> extend = [&]() {
        int left = stages - int(first.size()), n = int(cost.size());
        if (left == 0) {
            first.push_back(n);
            if (best.empty() || largest_and_squares(cost, first) < largest_and_squares(cost, best))
                best = first;
            first.pop_back();
            return;
        }
        for (int next = first.back() + 1; next <= n - left; next++) {
            first.push_back(next);
            extend();
            first.pop_back();
        }
    };
    extend();
    return best;
}

TEST(Split, KnownCases) {
    EXPECT_EQ(split_layers(Doubles(8, 1), 4), (Ints{0, 2, 4, 6, 8}));
    EXPECT_EQ(split_layers(Doubles(10, 0.1), 4), (Ints{0, 2, 4, 7, 10})); // 0.1 is not exact
    EXPECT_EQ(split_layers(Doubles(5, 1), 5), (Ints{0, 1, 2, 3, 4, 5}));
    EXPECT_EQ(split_layers(Doubles(5, 1), 1), (Ints{0, 5}));
    EXPECT_EQ(split_layers({1, 1, 1, 1, 5}, 3), (Ints{0, 2, 4, 5}));    // a heavy head
    EXPECT_EQ(split_layers({9, 1, 1, 1, 1, 1}, 3), (Ints{0, 1, 3, 6})); // a heavy embedding
    EXPECT_EQ(split_layers({1, 1, 9, 1, 1}, 3), (Ints{0, 2, 3, 5}));
    EXPECT_EQ(split_layers({0, 0, 0}, 2), (Ints{0, 1, 3}));
    EXPECT_EQ(split_layers({0, 0, 0, 4}, 3), (Ints{0, 1, 2, 4})); // no empty stage
    EXPECT_TRUE(split_layers({1, 1}, 3).empty());
    EXPECT_TRUE(split_layers({}, 1).empty());
    EXPECT_TRUE(split_layers({1}, 0).empty());
}

// Numbers of layers that a stage count does not divide: all layers are there, the sizes differ by
// one at most, and the later stages have the more.
TEST(Split, UnevenCountsKeepEveryLayer) {
    for (auto [layers, stages] : {std::pair{30, 4}, {80, 32}, {61, 16}, {12, 5}, {126, 16}}) {
        Ints first = split_layers(Doubles(layers, 1), stages);
        ASSERT_EQ(int(first.size()), stages + 1);
        EXPECT_EQ(first.front(), 0);
        EXPECT_EQ(first.back(), layers);
        int shorter = stages - layers % stages;
        for (int s = 0; s < stages; s++)
            EXPECT_EQ(first[s + 1] - first[s], layers / stages + (s >= shorter))
                << layers << " " << s;
    }
    // a head of 3.5 layers and a light embedding: the last stage has the fewest blocks
    Doubles cost(34, 1);
    cost.front() = 0.25, cost.back() = 3.5;
    Ints first = split_layers(cost, 8);
    EXPECT_EQ(largest_and_squares(cost, first).first, 5);
    EXPECT_EQ(first.back() - first[7], 2);
}

TEST(Split, AgreesWithAllSplits) {
    random_state = 1;
    for (int trial = 0; trial < 3000; trial++) {
        int n = 1 + random_below(9), stages = 1 + random_below(n);
        Doubles cost(n);
        for (double& c : cost) c = 1 + random_below(trial % 2 ? 3 : 50);
        Ints split = split_layers(cost, stages), force = split_by_force(cost, stages);
        EXPECT_EQ(largest_and_squares(cost, split).first, largest_and_squares(cost, force).first);
        EXPECT_EQ(largest_and_squares(cost, split).second, largest_and_squares(cost, force).second);
        EXPECT_EQ(split, force);
    }
}
