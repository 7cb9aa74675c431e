// test_pipeline.cpp - schedules against the textbook, the check against planted faults, the split
#include <gtest/gtest.h>
#include <fstream>
#include <functional>
#include "../../llmc/pipeline.h"
#include "../../llmc/comm/text.h"

using namespace llmc;

typedef std::vector<Schedule> Schedules;

static const Pipeline KINDS[] = {Pipeline::GPIPE, Pipeline::ONE_F_ONE_B, Pipeline::INTERLEAVED,
                                 Pipeline::ZERO_BUBBLE};

// Call f(pp, chunks, m) for every size: pp 1 to 8, chunks 1 to 4, 1 to 24 micro-batches.
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

// A line a rank, as from_text() reads them.
static std::string to_text(const Schedules& all) {
    std::string text;
    for (const Schedule& mine : all)
        for (const Slot& s : mine)
            text += name_of(s) + (&s == &mine.back() ? "\n" : " ");
    return text;
}

// Steps with groups in one of two places, of which add_transfers() takes the faster one.
static Steps placed(const Schedules& all, int pp, bool in_rounds) {
    std::vector<Crossing> messages = crossings_of(all, pp);
    Steps bare = bare_steps(all, pp);
    Waits waits = waits_for_data(bare, messages);
    return place_transfers(bare, messages, run_steps(bare, waits, Costs(), in_rounds));
}

// The most micro-batches that live on a rank at once: from F until `until`, or until a whole B.
static int live_at_most(const Schedule& mine, SlotOp until) {
    int live = 0, most = 0;
    for (const Slot& s : mine) {
        live += s.op == SlotOp::F ? 1 : s.op == until || s.op == SlotOp::B ? -1 : 0;
        most = std::max(most, live);
    }
    return most;
}

// The time that a rank is idle in a step: the step's time minus the work of m micro-batches on each
// of its `chunks` stages.
static double idle(Pipeline kind, int pp, int chunks, int m, const Costs& c = {}) {
    Simulation s = simulate(schedules_of(kind, pp, chunks, m), pp, c);
    double busy = m * chunks * (c.F + c.I + c.W);
    EXPECT_NEAR(s.bubble, (s.time - busy) / s.time, 1e-12);
    return s.time - busy;
}

// ----------------------------------------------------------------------------
// generators

// The schedules of every size are legal, and their messages never deadlock.
TEST(Pipeline, EverySizeIsLegalAndNeverDeadlocks) {
    every_size([](int pp, int chunks, int m) {
        for (Pipeline kind : KINDS)
            ASSERT_EQ(check_schedule(schedules_of(kind, pp, chunks, m), pp, chunks, m), "")
                << int(kind) << " pp " << pp << " chunks " << chunks << " m " << m;

        // Groups may stand in two places; the slower one may not deadlock either.
        Schedules all = schedules_of(KINDS[m % 4], pp, chunks, m);
        for (bool in_rounds : {false, true})
            ASSERT_EQ(check_transfers(placed(all, pp, in_rounds), pp * chunks), "");
    });
}

static unsigned random_state;
static int random_below(int n) {
    random_state = random_state * 1664525u + 1013904223u;
    return int((random_state >> 8) % unsigned(n));
}

// Schedules with their slots in any order that their dependencies allow, as a file may give them.
// In some the backward pass is in two halves.
static Schedules random_schedules(int pp, int chunks, int m) {
    // List all slots.
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

    // Draw a slot; take it if all that it needs is done. Weight gradients add up in order.
    std::vector<int> adds(stages); // [stage]: micro-batches whose weight gradients are added
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

// No legal schedule deadlocks, whatever the order of its slots.
TEST(Pipeline, NoLegalScheduleDeadlocks) {
    random_state = 7;
    for (int trial = 0; trial < 500; trial++) {
        int pp = 1 + random_below(6), chunks = 1 + random_below(3), m = 1 + random_below(7);
        Schedules all = random_schedules(pp, chunks, m);
        ASSERT_EQ(check_schedule(all, pp, chunks, m), "") << to_text(all);
        for (bool in_rounds : {false, true})
            ASSERT_EQ(check_transfers(placed(all, pp, in_rounds), pp * chunks), "") << to_text(all);
    }
}

// Small schedules are those of the textbooks, slot by slot.
TEST(Pipeline, TextbookOrders) {
    EXPECT_EQ(to_text(schedules_of(Pipeline::GPIPE, 2, 1, 3)),
              "F0.0 F1.0 F2.0 B0.0 B1.0 B2.0\nF0.1 F1.1 F2.1 B0.1 B1.1 B2.1\n");
    EXPECT_EQ(to_text({schedule_of(Pipeline::GPIPE, 2, 2, 4, 1)}),
              "F0.1 F1.1 F2.1 F3.1 F0.3 F1.3 F2.3 F3.3 B0.3 B1.3 B2.3 B3.3 B0.1 B1.1 B2.1 B3.1\n");
    EXPECT_EQ(to_text(schedules_of(Pipeline::ONE_F_ONE_B, 3, 1, 4)),
              "F0.0 F1.0 F2.0 B0.0 F3.0 B1.0 B2.0 B3.0\n"
              "F0.1 F1.1 B0.1 F2.1 B1.1 F3.1 B2.1 B3.1\n"
              "F0.2 B0.2 F1.2 B1.2 F2.2 B2.2 F3.2 B3.2\n");
    EXPECT_EQ(to_text(schedules_of(Pipeline::INTERLEAVED, 2, 2, 4)),
              "F0.0 F1.0 F0.2 F1.2 F2.0 B0.2 F3.0 B1.2 F2.2 B0.0 F3.2 B1.0 B2.2 B3.2 B2.0 B3.0\n"
              "F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 F2.1 B0.1 F3.1 B1.1 F2.3 B2.3 F3.3 B3.3 B2.1 B3.1\n");
    EXPECT_EQ(to_text(schedules_of(Pipeline::ZERO_BUBBLE, 2, 1, 3)),
              "F0.0 F1.0 I0.0 W0.0 F2.0 I1.0 W1.0 I2.0 W2.0\n"
              "F0.1 I0.1 F1.1 I1.1 W0.1 F2.1 I2.1 W1.1 W2.1\n");

    // If pp does not divide the micro-batches: the first group has 3, the second 2.
    EXPECT_EQ(to_text({schedule_of(Pipeline::INTERLEAVED, 2, 2, 5, 1)}),
              "F0.1 F1.1 F2.1 F0.3 B0.3 F1.3 B1.3 F2.3 B2.3 F3.1 B0.1 F4.1 B1.1 F3.3 B2.1 F4.3 "
              "B3.3 B4.3 B3.1 B4.1\n");
    EXPECT_TRUE(schedule_of(Pipeline::GIVEN, 2, 1, 3, 0).empty());
}

// The warm-up of each schedule: forward passes before the first backward pass, without the one
// just before it.
TEST(Pipeline, WarmUpIsTheTextbooks) {
    auto warmup = [](const Schedule& s) {
        int n = 0;
        while (s[n].op == SlotOp::F) n++;
        return n - 1;
    };

    // Interleaved 1F1B has a formula only if pp divides the micro-batches.
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

// Bubbles: ranks of GPipe, 1F1B and interleaved 1F1B are idle for (pp - 1) (F + I + W).
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
            if (m >= pp) { // also if pp does not divide m
                EXPECT_DOUBLE_EQ(idle(Pipeline::INTERLEAVED, pp, chunks, m, c), (pp - 1) * one)
                    << size;
            }
        }
    });

    // The share of a step's time, and of its work.
    Simulation s = simulate(schedules_of(Pipeline::ONE_F_ONE_B, 4, 1, 8), 4);
    EXPECT_DOUBLE_EQ(s.bubble, 3.0 / (8 + 3)); // (p-1) / (m+p-1) of the time
    s = simulate(schedules_of(Pipeline::INTERLEAVED, 4, 2, 8), 4);
    EXPECT_DOUBLE_EQ(s.bubble / (1 - s.bubble), 3.0 / (2 * 8)); // (p-1) / (vm) of the work
}

// Zero-bubble schedules are always idle for less time than interleaved 1F1B; with one chunk and
// enough micro-batches for (pp - 1) (F + I - W).
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

// The most micro-batches whose activations live at once, by rank.
TEST(Pipeline, PeaksOfLiveActivationsAreTheTextbooks) {
    every_size([](int pp, int chunks, int m) {
        // Simulate each schedule.
        auto peak = [&](Pipeline kind, int v) {
            return simulate(schedules_of(kind, pp, v, m), pp).peak_live;
        };
        std::vector<int> gpipe = peak(Pipeline::GPIPE, chunks),
                         plain = peak(Pipeline::ONE_F_ONE_B, 1);
        std::vector<int> zero = peak(Pipeline::ZERO_BUBBLE, 1);
        std::vector<int> interleaved = peak(Pipeline::INTERLEAVED, chunks);

        // Compare with the formulas.
        for (int r = 0; r < pp; r++) {
            EXPECT_EQ(gpipe[r], chunks * m);
            EXPECT_EQ(plain[r], std::min(m, pp - r));
            EXPECT_LE(interleaved[r], gpipe[r]);
            if (m % pp == 0) {
                EXPECT_EQ(interleaved[r],
                          std::min(chunks * m, 2 * (pp - r - 1) + (chunks - 1) * pp + 1));
            }

            // ZB-H1 holds as much as 1F1B until I; until W no rank holds more than
            // 1F1B's first rank.
            Schedule mine = schedule_of(Pipeline::ZERO_BUBBLE, pp, 1, m, r);
            EXPECT_EQ(live_at_most(mine, SlotOp::I), std::min(m, pp - r));
            EXPECT_EQ(live_at_most(mine, SlotOp::W), zero[r]);
            EXPECT_EQ(zero[r], std::min(m, pp));
        }
    });
}

// In a simulation no slot starts before the one that it needs has ended, and a rank does one thing
// at a time.
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

// Sends that wait for their receives cost no time, if all slots of a kind take the same time.
TEST(Pipeline, GroupsThatBlockCostNothing) {
    every_size([](int pp, int chunks, int m) {
        for (Pipeline kind : KINDS) {
            Schedules all = schedules_of(kind, pp, chunks, m);
            EXPECT_EQ(simulate(all, pp, {}, true).time, simulate(all, pp).time)
                << int(kind) << " pp " << pp << " chunks " << chunks << " m " << m;
        }
    });

    // Groups between rounds cost nothing whatever the ratio of the costs.
    Schedules all = schedules_of(Pipeline::INTERLEAVED, 5, 2, 31);
    Costs uneven = {1, 1.25, 0.875};
    EXPECT_EQ(simulate(all, 5, uneven, true).time, simulate(all, 5, uneven).time);

    // Groups between slots may cost time, less than 5% here: a rank may find its peer in the middle
    // of a longer slot.
    all = schedules_of(Pipeline::ZERO_BUBBLE, 4, 1, 24);
    EXPECT_GT(simulate(all, 4, uneven, true).time, simulate(all, 4, uneven).time);
    EXPECT_LT(simulate(all, 4, uneven, true).time, 1.05 * simulate(all, 4, uneven).time);
}

// ----------------------------------------------------------------------------
// transfers

// The messages of 1F1B on two ranks, step by step.
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
    const Steps steps = add_transfers(schedules_of(Pipeline::ONE_F_ONE_B, 2, 1, 2), 2);
    EXPECT_EQ(lines(steps[0]),
              "F0.0\nsend activation 0.1, F1.0\nreceive gradient 0.1, send activation 1.1, B0.0\n"
              "receive gradient 1.1, B1.0\nend\n");
    EXPECT_EQ(lines(steps[1]),
              "receive activation 0.1, F0.1\nreceive activation 1.1, B0.1\n"
              "send gradient 0.1, F1.1\nB1.1\nsend gradient 1.1, end\n");
}

// Steps by a simpler rule: receive just before the use, send just after.
static Steps receive_when_needed(const Schedules& all) {
    int pp = int(all.size());
    Steps steps = bare_steps(all, pp);
    for (const Crossing& m : crossings_of(all, pp)) {
        steps[m.to][m.used].transfers.push_back(m.receive);
        steps[m.from][m.made + 1].transfers.push_back(m.send);
    }
    return steps;
}

// The simpler rule suffices for GPipe, but deadlocks interleaved 1F1B.
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

// The check names slots that are missing, repeated, on the wrong rank or in the wrong order.
TEST(Pipeline, FaultsOfSlots) {
    EXPECT_EQ(check("F0.0 B0.0\nF0.1 B0.1", 1, 1), "");
    EXPECT_EQ(check("F0.0 B0.0", 1, 1), "");
    EXPECT_EQ(check_schedule(from_text("F0.0 B0.0"), 2, 1, 1), "1 schedules for 2 ranks");

    // Slots that are missing, and slots done twice.
    EXPECT_EQ(check("F0.0 F1.0 B0.0 B1.0\nF0.1 F1.1 B0.1", 1, 2), "rank 1 lacks B1.1");
    EXPECT_EQ(check("F0.0 B0.0\nF0.1 F1.1 B0.1 B1.1", 1, 2), "rank 0 lacks F1.0");
    EXPECT_EQ(check("F0.0 I0.0\nF0.1 B0.1", 1, 1), "rank 0 lacks W0.0");
    EXPECT_EQ(check("F0.0 B0.0 B0.0\nF0.1 B0.1", 1, 1), "rank 0, slot 2, B0.0: done before");
    EXPECT_EQ(check("F0.0 B0.0 W0.0\nF0.1 B0.1", 1, 1), "rank 0, slot 2, W0.0: done before");
    EXPECT_EQ(check("F0.0 F0.0 B0.0\nF0.1 B0.1", 1, 1), "rank 0, slot 1, F0.0: done before");

    // Passes in the wrong order.
    EXPECT_EQ(check("B0.0 F0.0\nF0.1 B0.1", 1, 1), "rank 0, slot 0, B0.0: F must come first");
    EXPECT_EQ(check("I0.0 F0.0\nF0.1 B0.1", 1, 1), "rank 0, slot 0, I0.0: F must come first");
    EXPECT_EQ(check("F0.0 W0.0 I0.0\nF0.1 B0.1", 1, 1), "rank 0, slot 1, W0.0: I must come first");

    // Numbers that do not exist, or belong to another rank.
    EXPECT_EQ(check("F0.0 B0.0\nF1.1 B0.1", 1, 1),
              "rank 1, slot 0, F1.1: micro-batches are 0 to 0");
    EXPECT_EQ(check("F0.0 B0.0\nF0.2 B0.1", 1, 1), "rank 1, slot 0, F0.2: stages are 0 to 1");
    EXPECT_EQ(check("F0.0 F0.1\nB0.1 B0.0", 1, 1), "rank 0, slot 1, F0.1: the stage is on rank 1");

    // Weight gradients that would add up in another order.
    EXPECT_EQ(
        check("F0.0 F1.0 B1.0 B0.0\nF0.1 F1.1 B1.1 B0.1", 1, 2),
        "rank 0, slot 2, B1.0: weight gradients add in ascending order, micro-batch 0 is next");
    EXPECT_EQ(
        check("F0.0 F1.0 I0.0 I1.0 W1.0 W0.0", 1, 2),
        "rank 0, slot 4, W1.0: weight gradients add in ascending order, micro-batch 0 is next");
}

// The check names the first slot whose input comes too late, or the ranks that wait in a circle.
TEST(Pipeline, FaultsOfOrder) {
    // One rank: a stage needs the stage before it in the forward pass, and the one behind it in
    // the backward pass.
    EXPECT_EQ(check("F0.0 F0.1 B0.1 B0.0", 2, 1), "");
    EXPECT_EQ(check("F0.1 F0.0 B0.1 B0.0", 2, 1),
              "rank 0 in step 0: F0.1 needs activation 0.1, which comes later or never");
    EXPECT_EQ(check("F0.0 F0.1 B0.0 B0.1", 2, 1),
              "rank 0 in step 2: B0.0 needs gradient 0.1, which comes later or never");

    // Two ranks: each needs what the other does later, even if sends are buffered.
    EXPECT_EQ(check("F0.0 B0.0 F1.0 B1.0\nF0.1 F1.1 B0.1 B1.1", 1, 2),
              "deadlock: rank 0 in step 1 before B0.0 waits to receive gradient 0.1 from rank 1; "
              "rank 1 in step 1 before F1.1 waits to receive activation 1.1 from rank 0");

    // Three ranks, of which the first is not on the cycle.
    EXPECT_EQ(check("F0.0 F1.0 B0.0 B1.0\nF0.1 B0.1 F1.1 B1.1\nF0.2 F1.2 B0.2 B1.2", 1, 2),
              "deadlock: rank 1 in step 1 before B0.1 waits to receive gradient 0.2 from rank 2; "
              "rank 2 in step 1 before F1.2 waits to receive activation 1.2 from rank 1");
}

// The check names messages that lack their partner, are out of order, or come too early. The steps
// are those of 1F1B on two ranks, changed by hand.
TEST(Pipeline, FaultsOfTransfers) {
    const Steps good = add_transfers(schedules_of(Pipeline::ONE_F_ONE_B, 2, 1, 2), 2);
    EXPECT_EQ(check_transfers(good, 2), "");
    auto fault = [&](auto change) {
        Steps steps = good;
        change(steps[0], steps[1]);
        return check_transfers(steps, 2);
    };
    typedef std::vector<ScheduleStep>& Rank;

    // Messages that are left out, on one side or on both.
    EXPECT_EQ(
        fault([](Rank, Rank b) { b[0].transfers.clear(); }),
        "message 0 from rank 0 to rank 1: activation 0.1 is sent, activation 1.1 is received");
    EXPECT_EQ(fault([](Rank, Rank b) { b[1].transfers.clear(); }),
              "message 1 from rank 0 to rank 1: activation 1.1 is sent, nothing is received");
    EXPECT_EQ(fault([](Rank a, Rank) { a[1].transfers.clear(), a[2].transfers.pop_back(); }),
              "message 0 from rank 0 to rank 1: nothing is sent, activation 0.1 is received");
    EXPECT_EQ(fault([](Rank a, Rank b) { a[1].transfers.clear(), b[0].transfers.clear(); }),
              "rank 1 in step 0: F0.1 needs activation 0.1, which comes later or never");

    // Messages in another order, on one side or on both.
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

    // A message that is sent and received twice.
    EXPECT_EQ(fault([](Rank a, Rank b) {
                  a[3].transfers.push_back(a[1].transfers[0]);
                  b[3].transfers.push_back(b[0].transfers[0]);
              }),
              "rank 1 in step 3: activation 0.1 is received again");
}

// An order that works only with buffered sends is refused: each rank sends before it posts its
// receive. If rank 0 does both in one group, it is legal.
TEST(Pipeline, AnOrderThatNeedsBuffersIsRefused) {
    Transfer a0 = {true, 1, false, 0, 1}, a1 = {true, 1, false, 1, 1}; // rank 0 sends
    Transfer g0 = {true, 0, true, 0, 1}, g1 = {true, 0, true, 1, 1};   // rank 1 sends
    auto receive = [](Transfer t) {
        return Transfer{false, 1 - t.peer, t.gradient, t.micro, t.stage};
    };
    auto slot = [](SlotOp op, int micro, int stage) { return Slot{op, micro, stage}; };
    const Slot none = {};

    // Write the steps of both ranks.
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

    // Move rank 0's send into the group of its receive.
    steps[0][3].transfers.push_back(a1);
    steps[0].erase(steps[0].begin() + 2);
    EXPECT_EQ(check_transfers(steps, 2), "");
}

// ----------------------------------------------------------------------------
// files

// A schedule that is written and read again is the same.
TEST(Pipeline, TextRoundTrip) {
    for (Pipeline kind : KINDS) {
        Schedules all = schedules_of(kind, 4, 2, 11);
        EXPECT_EQ(from_text(to_text(all)), all);
    }
    EXPECT_EQ(from_text("# two ranks\n\n  F0.0  B0.0 # the first\r\n\n#\nF0.1\tB0.1"),
              schedules_of(Pipeline::ONE_F_ONE_B, 2, 1, 1));
}

// A text that is no schedule is refused with its line and word.
TEST(Pipeline, BrokenTexts) {
    auto fault = [](const std::string& text) {
        std::istringstream in(text);
        Schedules all;
        return read_schedule(in, all);
    };

    // Words that are no slots.
    EXPECT_EQ(fault("F0.0 B0.0\n# comment\nF0.1 X0.1"),
              "line 3: 'X0.1' is no slot: write a letter of FBIW, the micro-batch, a dot and the "
              "stage, like F0.1");
    for (const char* word :
         {"F", "F0", "F0.", "F.0", "0.1", "f0.1", "F0.1.2", "F-1.0", "F0.-1", "F+1.0", "F0,1",
          "F0.1,", "FF0.1", "F0x1.0", "F12345678.0", "F0.99999999999", "."})
        EXPECT_NE(fault(word).find("line 1: '" + std::string(word) + "' is no slot"),
                  std::string::npos)
            << word;

    // Empty texts, and a file that is missing.
    EXPECT_EQ(fault(""), "the schedule is empty: write a line of slots for each rank");
    EXPECT_EQ(fault("# nothing\n"), "the schedule is empty: write a line of slots for each rank");
    std::ifstream missing("/nowhere/schedule.txt");
    Schedules all;
    EXPECT_EQ(read_schedule(missing, all), "the schedule cannot be read: is the path right?");
}

// Draw the timeline as text: one line for each rank, three characters for each second. A slot
// prints as its letter and micro-batch, without the stage, and as -- in the seconds that follow.
// Costs must be whole seconds.
static std::string picture_of(const Schedules& all, const Simulation& s) {
    std::string text;
    for (size_t r = 0; r < all.size(); r++) {
        std::string line;
        // Begin each slot at its second; fill the seconds that follow.
        for (size_t i = 0; i < all[r].size(); i++) {
            line.resize(size_t(s.start[r][i]) * 3, ' ');
            std::string name = char(all[r][i].op) + std::to_string(all[r][i].micro);
            line += name + std::string(name.size() < 3 ? 3 - name.size() : 0, ' ');
            for (int k = 1; k < int(s.end[r][i] - s.start[r][i]); k++)
                line += "-- ";
        }
        text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
    }
    return text;
}

// The pictures in pipeline.h's header are what the program prints.
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

// How good a split is: the cost of its largest stage, then the sum of the squares of all.
static std::pair<double, double> largest_and_squares(const Doubles& cost, const Ints& first) {
    double largest = 0, squares = 0;
    for (size_t s = 0; s + 1 < first.size(); s++) {
        double sum = 0;
        for (int l = first[s]; l < first[s + 1]; l++) sum += cost[l];
        largest = std::max(largest, sum), squares += sum * sum;
    }
    return {largest, squares};
}

// The best split by trying all of them, in the order of their first layers: the first of equals.
static Ints split_by_force(const Doubles& cost, int stages) {
    Ints first = {0}, best;
    std::function<void()> extend = [&]() {
        // With all stages begun, keep the split if it is better.
        int left = stages - int(first.size()), n = int(cost.size());
        if (left == 0) {
            first.push_back(n);
            if (best.empty() || largest_and_squares(cost, first) < largest_and_squares(cost, best))
                best = first;
            first.pop_back();
            return;
        }

        // Begin the next stage at each layer that leaves one for every other.
        for (int next = first.back() + 1; next <= n - left; next++) {
            first.push_back(next);
            extend();
            first.pop_back();
        }
    };
    extend();
    return best;
}

// Splits that can be seen by eye.
TEST(Split, KnownCases) {
    EXPECT_EQ(split_layers(Doubles(8, 1), 4), (Ints{0, 2, 4, 6, 8}));
    EXPECT_EQ(split_layers(Doubles(10, 0.1), 4), (Ints{0, 2, 4, 7, 10})); // not exact in binary
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

// If the number of stages does not divide the layers, all layers are there, sizes differ by one at
// most, and later stages are the larger ones.
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

    // With a head that costs 3.5 layers and a light embedding, the last stage has
    // the fewest blocks.
    Doubles cost(34, 1);
    cost.front() = 0.25, cost.back() = 3.5;
    Ints first = split_layers(cost, 8);
    EXPECT_EQ(largest_and_squares(cost, first).first, 5);
    EXPECT_EQ(first.back() - first[7], 2);
}

// The split is the best of all splits, for random costs.
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
