// local.h - ranks are threads of one process and read each other's memory
//   1. start    A rank posts its buffers, which belong to the collective until its finish().
//   2. finish   The rank waits until all ranks have started, then carries out items that nobody
//               has taken. An item is the sum of a range of elements, or the copy of what one
//               rank gets. A rank that computes between start and finish holds nobody up: the
//               ranks in finish() do all items.
//   A wait sleeps on a condition variable, after a short spin if every rank has a core. If a rank
//   throws, ends early or waits too long, one message says so, and every other rank's next
//   collective throws RankFailure. No rank touches the buffers of a rank that has left.
//   To copy: this file, placement.h, hang_report.h, group.h, rank_status.h,
//   memory.h, gpu.h, elements.h, element_type.h, cuda_common.h and types.h.
#pragma once
#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include <unistd.h>
#include "../ops/memory.h"
#include "group.h"
#include "hang_report.h"
#include "placement.h"
#include "rank_status.h"

namespace llmc {

// When an outstanding collective happens. Tests of the waits around it use this: results must have
// the same bits.
//   EARLIEST  everything happens in start, which waits for the peers
//   LATEST    the result is NaN until finish(), which refuses an input that changed after start
enum class Moment { ANY, EARLIEST, LATEST };

// Settings that tests change; a run has the defaults.
struct LocalSettings {
    Moment moment = Moment::ANY;
    double timeout_s = 600;
    bool placements = false;        // each rank has a table of what its buffers hold
    std::string* failure = nullptr; // where a failure's message goes; null: to stderr
    double leave_s = 0; // seconds from a failure to the end of the process; 0: it goes on
};

// Every collective throws this once a rank has failed; run_local_ranks catches it.
struct RankFailure {};

// The threads of one run, and whether one of them has failed. It outlives the threads, because
// run_local_ranks() joins them before it returns.
struct LocalWorld {
    int ranks;
    LocalSettings settings;
    std::mutex mutex;
    std::atomic<bool> failed = false;
    std::vector<std::atomic<bool>> ended; // (ranks)
    std::vector<RankNote> notes;          // (ranks)

    // A group that some of its ranks have not joined yet.
    struct Opening {
        std::shared_ptr<LocalGroup> group;
        std::vector<int> joined; // ranks in the world
    };
    std::vector<Opening> openings;

    LocalWorld(int ranks, LocalSettings settings)
        : ranks(ranks), settings(settings), ended(ranks), notes(ranks) {}
};

// A collective or a message that some of its parties have started. The group's mutex guards all of
// it; only spinning ranks read the two counts without the mutex.
struct LocalOp {
    Collective kind;
    std::string text; // the call in words; all parties must make the same call
    struct Party {
        int rank; // in the group
        bool posted = false;
        const char* in = nullptr; // (in_bytes)
        char* out = nullptr;      // (out_bytes)
        std::vector<char> snapshot; // LATEST: a copy of `in`, made at start
    };
    std::vector<Party> parties; // all ranks; for a message: sender, receiver
    int items = 0;   // pieces of its work; a barrier has none
    int claimed = 0; // items that some rank has taken
    std::atomic<int> arrived = 0; // parties
    std::atomic<int> done = 0;    // items
    bool broken = false;          // a party has left: its memory may be gone

    LocalOp(Collective kind, std::string text, const std::vector<int>& ranks, int items)
        : kind(kind), text(text), items(items) {
        for (int r : ranks)
            parties.push_back({r, false, nullptr, nullptr, {}});
    }
    bool all_arrived() const { return arrived == int(parties.size()); }
};

// A group of threads, and the collectives and messages that some of them have started.
struct LocalGroup {
    LocalWorld* world;
    std::string name;
    std::vector<int> members; // (size) ranks in the world
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<size_t> started;               // (size) collectives that each rank has started
    std::deque<std::shared_ptr<LocalOp>> open; // collectives that some rank has not started
    size_t first_open = 0;                     // the number of the first collective in `open`
    std::map<std::array<int, 3>, std::deque<std::shared_ptr<LocalOp>>> mail; // (from, to, tag)

    LocalGroup(LocalWorld* world, std::string name, std::vector<int> members)
        : world(world), name(name), members(members), started(members.size()) {}
};

// ----------------------------------------------------------------------------
// failures, and waits that end in one

// Report the first failure, once. From now on every rank's next collective throws.
inline void local_fail(LocalWorld& world, const std::string& message) {
    // Only the first failure explains the others, which follow from it.
    std::lock_guard lock(world.mutex);
    if (world.failed) return;
    world.failed = true;
    if (world.settings.failure)
        *world.settings.failure = message;
    else
        fprintf(stderr, "%s: error: %s\n", program_invocation_short_name, message.c_str());

    // End the process after a while, because a single thread that hangs cannot be ended. Tests that
    // go on after a failure leave leave_s at 0.
    if (world.settings.leave_s > 0)
        std::thread([seconds = world.settings.leave_s] {
            std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
            _exit(1);
        }).detach();
}

// Fail with this message, and leave the collective by throwing.
[[noreturn]] inline void local_stop(const Comm& c, const std::string& message) {
    local_fail(*c.local->world, message);
    throw RankFailure();
}

// Wait for ready(), which the group's mutex guards. With `op`, the wait ends in a failure when a
// rank fails, ends or takes too long. Without `op`, the rank waits for work that is in progress.
template <typename F>
void local_wait(const Comm& c, std::unique_lock<std::mutex>& lock, LocalOp* op, F ready) {
    LocalGroup& g = *c.local;
    static const int cores = std::max(1u, std::thread::hardware_concurrency());

    // Spin for a moment if each rank has a core: it may save a sleep. On a shared core it would
    // take time from the thread that this rank waits for.
    if (!ready() && g.world->ranks <= cores) {
        lock.unlock();
        for (int i = 0; i < 2000 && !ready(); i++) {}
        lock.lock();
    }

    // Sleep, and look 50 times a second which ranks are missing. Without `op` no rank is: the work
    // is in progress.
    NoteWait note(op ? c.info->notes : RankNotes());
    LateWait late = {*c.info};
    double start = clock_seconds();
    double limit = c.info->timeout_s;
    while (!ready()) {
        g.changed.wait_for(lock, std::chrono::milliseconds(20));
        note.sign();
        if (!op || ready()) continue;

        // Find the ranks that have not arrived, and those among them that have ended.
        std::vector<int> missing, ended;
        for (const LocalOp::Party& p : op->parties)
            if (!p.posted)
                missing.push_back(g.members[p.rank]);
        for (int r : missing)
            if (g.world->ended[r])
                ended.push_back(r);

        // Give up if a rank can no longer arrive, or after the limit.
        double waited = clock_seconds() - start;
        if (!ended.empty())
            local_fail(*g.world, rank_text(c) + " waits in " + where_text(c, op->kind) + " for " +
                                     ranks_text(ended) + ", which ended before");
        else if (limit > 0 && waited > limit)
            local_fail(*g.world, overdue_text(c, op->kind, waited, missing));
        else if (!g.world->failed && !g.world->settings.failure)
            late.look(
                waited, [&] { return missing; },
                [&] { return overdue_text(c, op->kind, waited, missing); });
        if (g.world->failed) throw RankFailure();
    }
}

// ----------------------------------------------------------------------------
// start

// Hand a party's buffers to the collective. The caller must hold the group's mutex.
template <typename S>
void local_arrive(const Comm& c, LocalOp& op, int party, const Call<S>& call) {
    // Record where this party's buffers are.
    LocalGroup& g = *c.local;
    if (op.broken) throw RankFailure();
    LocalOp::Party& p = op.parties[party];
    p.in = call.in;
    p.out = call.out;

    // LATEST: copy the input as it is now, and fill the output with a NaN of every type.
    if constexpr (std::is_same_v<S, Cpu>)
        if (g.world->settings.moment == Moment::LATEST) {
            if (call.in)
                p.snapshot.assign(call.in, call.in + call.in_bytes(c.size));
            p.in = p.snapshot.data();
            if (call.out)
                memset(call.out, 0xff, call.out_bytes(c.size));
        }

    // Wake the ranks that wait for the last party.
    p.posted = true;
    op.arrived++;
    if (op.all_arrived()) g.changed.notify_all();
}

// Return a call as text, "all-reduce (sum) of 10 float".
template <typename S>
std::string call_text(const Call<S>& call) {
    // Equal texts must mean equal calls, so include kind, count, type and root.
    std::string s = collective_name(call.kind);
    if (call.kind == Collective::BARRIER) return s;
    if (call.kind == Collective::ALL_REDUCE)
        s += call.max ? " (max)" : " (sum)";
    s += " of " + std::to_string(call.n) + " " + ELEMENT_NAMES[int(call.element)];
    return call.kind == Collective::BROADCAST ? s + " from " + std::to_string(call.root) : s;
}

// Join the collective that comes next for this rank, or open it.
template <typename S>
std::shared_ptr<LocalOp> local_start(const Comm& c, const Call<S>& call) {
    LocalGroup& g = *c.local;
    std::string text = call_text(call);
    std::lock_guard lock(g.mutex);
    if (g.world->failed) throw RankFailure();

    // Find it by its number, because ranks start the same collectives in the same order.
    size_t index = g.started[c.rank] - g.first_open;
    if (index == g.open.size()) {
        std::vector<int> ranks;
        for (int r = 0; r < c.size; r++)
            ranks.push_back(r);
        int items = call.kind == Collective::BARRIER ? 0 : c.size;
        g.open.push_back(std::make_shared<LocalOp>(call.kind, text, ranks, items));
    }

    // Compare this rank's call with its peers'.
    std::shared_ptr<LocalOp> op = g.open[index];
    if (op->text != text)
        local_stop(c, rank_text(c) + " starts " + text + " on '" + c.name +
                          "' where its peers start " + op->text);

    // Arrive, and forget the collectives that all ranks have started.
    g.started[c.rank]++;
    local_arrive(c, *op, c.rank, call);
    for (; !g.open.empty() && g.open.front()->all_arrived(); g.first_open++)
        g.open.pop_front();
    return op;
}

// Join the message's other end, or leave this end in the mail.
template <typename S>
std::shared_ptr<LocalOp> local_start_message(const Comm& c, const CommMessage& m,
                                             const Call<S>& call) {
    // Number the two ends: party 0 sends, party 1 receives.
    LocalGroup& g = *c.local;
    std::lock_guard lock(g.mutex);
    if (g.world->failed) throw RankFailure();
    int from = m.send ? c.rank : m.peer;
    int to = m.send ? m.peer : c.rank;
    int party = m.send ? 0 : 1;

    // Take the first message of this pair and tag whose other end waits, or open one.
    auto& queue = g.mail[{from, to, m.tag}];
    auto at = std::find_if(queue.begin(), queue.end(),
                           [&](auto& op) { return !op->parties[party].posted; });
    std::string text = std::to_string(m.bytes) + " bytes";
    if (at == queue.end())
        at = queue.insert(at, std::make_shared<LocalOp>(call.kind, text, std::vector{from, to}, 1));
    std::shared_ptr<LocalOp> op = *at;

    // Compare the lengths of the two ends, then arrive.
    if (op->text != text)
        local_stop(c, rank_text(c) + (m.send ? " sends " : " receives ") + text + " on '" + c.name +
                          "' where " + ranks_text({g.members[m.peer]}) + " has " + op->text);
    local_arrive(c, *op, party, call);
    if (op->all_arrived()) queue.erase(at);
    return op;
}

// ----------------------------------------------------------------------------
// finish

// Carry out item i of a collective that all parties have started. An item writes nothing that
// another item reads or writes. With `alone` (LATEST), make the whole result of party i instead,
// from the parties' snapshots.
template <typename S>
void local_item(const LocalOp& op, int i, const Call<S>& call, bool alone, S where) {
    using enum Collective;
    // Read and write the ranks' buffers directly: all ranks are in one process.
    int size = int(op.parties.size());
    size_t bytes = call.bytes();
    const LocalOp::Party& mine = op.parties[i];
    std::vector<const void*> ins(size); // (size) of `bytes` each, or of a range
    std::vector<void*> outs(size);      // (size) of the same

    // Sums: item i is range i for every rank, or shard i for rank i.
    switch (op.kind) {
    case ALL_REDUCE: {
        ElementRange range = alone ? ElementRange{0, call.n} : range_of(call.n, size, i);
        for (int r = 0; r < size; r++)
            ins[r] = op.parties[r].in + range.first * call.unit();
        for (int r = 0; r < size; r++)
            outs[r] = op.parties[r].out + range.first * call.unit();
        if (alone) outs[0] = mine.out;
        call.reduce(outs.data(), alone ? 1 : size, ins.data(), size, range.count, where);
        break;
    }
    case REDUCE_SCATTER:
        for (int r = 0; r < size; r++)
            ins[r] = op.parties[r].in + i * bytes;
        outs[0] = mine.out;
        call.reduce(outs.data(), 1, ins.data(), size, call.n, where);
        break;

    // Copies: item i is everything that rank i gets.
    case ALL_GATHER:
        for (int r = 0; r < size; r++)
            copy_bytes(mine.out + r * bytes, op.parties[r].in, bytes, where);
        break;
    case ALL_TO_ALL:
        for (int r = 0; r < size; r++)
            copy_bytes(mine.out + r * bytes, op.parties[r].in + i * bytes, bytes, where);
        break;
    case BROADCAST:
        if (i != call.root)
            copy_bytes(mine.out, op.parties[call.root].in, bytes, where);
        break;
    case EXCHANGE: // a message: its sender is party 0, its receiver party 1
        copy_bytes(op.parties[1].out, op.parties[0].in, bytes, where);
        break;
    case BARRIER: break;
    }
}

// Wait until all parties have started, share the work, and wait until all of it is done.
template <typename S>
void local_finish(const Comm& c, LocalOp& op, int party, const Call<S>& call, S where) {
    // Wait for all parties: an input may be read only once its rank has started.
    LocalGroup& g = *c.local;
    std::unique_lock lock(g.mutex);
    local_wait(c, lock, &op, [&] { return op.all_arrived(); });

    // LATEST: each party makes its own result now, from inputs that must be unchanged.
    if (g.world->settings.moment == Moment::LATEST && std::is_same_v<S, Cpu>) {
        lock.unlock();
        const std::vector<char>& was = op.parties[party].snapshot; // the input at start
        if (!was.empty() && !call.in_place(c.size) && memcmp(was.data(), call.in, was.size()))
            local_stop(c, rank_text(c) + " changed the input of " + where_text(c, op.kind) +
                              " before it was finished");
        if (call.out)
            local_item(op, party, call, true, where);
        return;
    }

    // Carry out items that no rank has taken.
    while (op.claimed < op.items) {
        if (op.broken) throw RankFailure();
        int item = op.claimed++;
        lock.unlock();
        local_item(op, item, call, false, where);
        wait_for(where);
        lock.lock();
        if (++op.done == op.claimed)
            g.changed.notify_all();
    }

    // Wait for the items that peers carry out.
    local_wait(c, lock, nullptr, [&] { return op.done == op.items; });
}

// Leave a collective that is outstanding: nobody may touch this rank's buffers afterwards.
inline void local_withdraw(const Comm& c, LocalOp& op) {
    // Break it, unless all of its work is done. If an exception unwinds, it has been reported.
    LocalGroup& g = *c.local;
    std::unique_lock lock(g.mutex);
    if (!op.broken && op.done < std::max(op.items, 1)) {
        op.broken = true;
        if (!std::uncaught_exceptions())
            local_fail(*g.world, rank_text(c) + " left " + where_text(c, op.kind) + " unfinished");
    }

    // Wait for the ranks that are using these buffers now.
    local_wait(c, lock, nullptr, [&] { return op.done == op.claimed; });
}

// ----------------------------------------------------------------------------
// groups and ranks

// Make the group of these ranks of the world, in this order. Only these ranks call, each with
// the same list.
inline std::shared_ptr<LocalGroup> local_split(const Comm& c, const std::string& name,
                                               const std::vector<int>& members) {
    LocalWorld& world = *c.local->world;
    std::lock_guard lock(world.mutex);

    // Join a group that others have opened and this rank is not in yet, or open one.
    auto at = std::find_if(world.openings.begin(), world.openings.end(), [&](auto& o) {
        return o.group->name == name && o.group->members == members &&
               std::find(o.joined.begin(), o.joined.end(), c.info->rank) == o.joined.end();
    });
    if (at == world.openings.end())
        at = world.openings.insert(at, {std::make_shared<LocalGroup>(&world, name, members), {}});

    // Forget the opening once all ranks have joined.
    std::shared_ptr<LocalGroup> group = at->group;
    at->joined.push_back(c.info->rank);
    if (at->joined.size() == members.size())
        world.openings.erase(at);
    return group;
}

// Run body(world) in `ranks` threads, each with its share of the cores. Returns 0 if every body
// returned nothing or 0; else 1, after the first failure has been reported.
template <typename F>
int run_local_ranks(int ranks, LocalSettings settings, F body) {
    // Make the group of all ranks.
    LocalWorld world(ranks, settings);
    std::vector<int> members(ranks);
    for (int r = 0; r < ranks; r++)
        members[r] = r;
    auto group = std::make_shared<LocalGroup>(&world, "world", members);

    auto run_rank = [&](int rank) {
        // Give this rank its share of the cores, and describe it.
        this_rank = rank;
        use_threads(cores_here() / ranks);
        Placements placements;
        RankInfo info;
        info.rank = rank;
        info.timeout_s = settings.timeout_s;
        if (settings.placements)
            info.placements = &placements;
        // Begin this rank's note, which other ranks may read.
        info.notes = {world.notes.data(), ranks, &world.notes[size_t(rank)]};
        info.notes.own->since = clock_seconds();
        info.notes.own->rank = rank;

        // Make its world: the group of all ranks, as this rank sees it.
        Comm c;
        c.rank = rank;
        c.size = ranks;
        c.members = members;
        c.info = &info;
        if (ranks > 1) c.local = group;

        // Run the body, and report whatever ends it early, once.
        try {
            if constexpr (std::is_void_v<decltype(body(c))>)
                body(c);
            else if (int status = body(c))
                local_fail(world, rank_text(c) + " ended with status " + std::to_string(status));
        } catch (const RankFailure&) {
        } catch (const std::exception& e) {
            local_fail(world, rank_text(c) + " failed: " + e.what());
        } catch (...) {
            local_fail(world, rank_text(c) + " failed");
        }
        world.ended[rank] = true;
    };

    // Start the ranks, and wait for all of them.
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; r++)
        threads.emplace_back(run_rank, r);
    for (std::thread& t : threads) t.join();
    return world.failed;
}

} // namespace llmc
