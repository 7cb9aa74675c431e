// comm_local.h - ranks are threads of one process and read each other's memory
//   A collective is cut into items (a slice's sum, a rank's copy). Whoever is in finish() once all
//   have started takes the next item, so that nobody waits for a peer that computes meanwhile.
//   A wait sleeps on a condition variable, after a short spin where every rank has a core.
//   A rank that throws, ends early or waits too long makes every other rank's next collective throw
//   RankFailure, after one message; no rank touches the buffers of a rank that has left.
//   To copy: this file, comm_placement.h, comm_group.h and common.h.
#pragma once
#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <mutex>
#include <thread>
#include "comm_placement.h"
#ifdef _OPENMP
#include <omp.h>
#endif

// When an outstanding collective happens, for tests of the waits around it: the bits must be equal.
//   LATEST: the result is NaN until finish(), and finish() refuses an input that has changed since
//   start. EARLIEST: all happens in start, which waits for the peers.
enum class Moment { ANY, EARLIEST, LATEST };

struct LocalSettings {
    Moment moment = Moment::ANY;
    double timeout_s = 600;
    bool placements = false;        // each rank has a table of what its buffers hold
    std::string* failure = nullptr; // where the message of a failure goes; null: to stderr
};

struct RankFailure {}; // thrown by every collective once a rank has failed; run_local_ranks catches

struct LocalWorld {
    int ranks;
    LocalSettings settings;
    std::mutex mutex;
    std::atomic<bool> failed = false;
    std::vector<std::atomic<bool>> ended;
    struct Opening { // a group that not all of its ranks have joined
        std::shared_ptr<LocalGroup> group;
        std::vector<int> joined;
    };
    std::vector<Opening> openings;
    LocalWorld(int ranks, LocalSettings settings)
        : ranks(ranks), settings(settings), ended(ranks) {}
};

struct LocalOp { // a collective, or a message, that some of its parties have started
    Collective kind;
    std::string text; // all parties must ask for the same
    struct Party {
        int rank; // in the group
        bool posted = false;
        const char* in = nullptr;
        char* out = nullptr;
        std::vector<char> snapshot; // LATEST: of in, at start
    };
    std::vector<Party> parties; // the ranks; of a message: sender, receiver
    int items = 0, claimed = 0;
    // all under the group's mutex, but for those who spin
    std::atomic<int> arrived = 0, done = 0;
    bool broken = false; // a party has left: its memory may be gone
    LocalOp(Collective kind, std::string text, const std::vector<int>& ranks, int items)
        : kind(kind), text(text), items(items) {
        for (int r : ranks) parties.push_back({r, false, nullptr, nullptr, {}});
    }
    bool all_arrived() const { return arrived == int(parties.size()); }
};

struct LocalGroup {
    LocalWorld* world;
    std::string name;
    std::vector<int> members;
    std::mutex mutex;
    std::condition_variable changed;
    std::vector<size_t> started;               // collectives that each rank has started
    std::deque<std::shared_ptr<LocalOp>> open; // not started by all
    size_t first_open = 0;
    std::map<std::array<int, 3>, std::deque<std::shared_ptr<LocalOp>>> mail; // (from, to, tag)
    LocalGroup(LocalWorld* world, std::string name, std::vector<int> members)
        : world(world), name(name), members(members), started(members.size()) {}
};

// The first failure is said once; every rank's next collective throws.
inline void local_fail(LocalWorld& world, const std::string& message) {
    std::lock_guard lock(world.mutex);
    if (world.failed) return;
    world.failed = true;
    if (world.settings.failure)
        *world.settings.failure = message;
    else
        fprintf(stderr, "train_gpt: error: %s\n", message.c_str());
}
[[noreturn]] inline void local_stop(const Comm& c, const std::string& message) {
    local_fail(*c.local->world, message);
    throw RankFailure();
}

// Wait for ready(), which the group's mutex guards. With `op`, leave when a rank fails, ends or
// takes too long; without it what is waited for is on its way.
template <typename F>
void local_wait(const Comm& c, std::unique_lock<std::mutex>& lock, LocalOp* op, F ready) {
    LocalGroup& g = *c.local;
    static const int cores = std::max(1u, std::thread::hardware_concurrency());
    if (!ready() && g.world->ranks <= cores) { // a core each: a short spin saves a sleep
        lock.unlock();
        for (int i = 0; i < 2000 && !ready(); i++) {}
        lock.lock();
    }
    double start = clock_seconds(), limit = c.info->timeout_s;
    while (!ready()) {
        g.changed.wait_for(lock, std::chrono::milliseconds(20));
        if (!op || ready()) continue;
        std::vector<int> missing, ended;
        for (const LocalOp::Party& p : op->parties)
            if (!p.posted) missing.push_back(g.members[p.rank]);
        for (int r : missing)
            if (g.world->ended[r]) ended.push_back(r);
        double waited = clock_seconds() - start;
        if (!ended.empty())
            local_fail(*g.world, rank_text(c) + " waits in " + where_text(c, op->kind) + " for " +
                                     ranks_text(ended) + ", which ended before");
        else if (limit > 0 && waited > limit)
            local_fail(*g.world, overdue_text(c, op->kind, waited, missing));
        if (g.world->failed) throw RankFailure();
    }
}

// The party's buffers are the collective's from here on. Under the group's mutex.
template <typename S>
void local_arrive(const Comm& c, LocalOp& op, int party, const Call<S>& call) {
    LocalGroup& g = *c.local;
    if (op.broken) throw RankFailure();
    LocalOp::Party& p = op.parties[party];
    p.in = call.in, p.out = call.out;
    if constexpr (std::is_same_v<S, Cpu>)
        if (g.world->settings.moment == Moment::LATEST) {
            if (call.in) p.snapshot.assign(call.in, call.in + call.in_bytes(c.size));
            p.in = p.snapshot.data();
            if (call.out) memset(call.out, 0xff, call.out_bytes(c.size)); // NaN in every type
        }
    p.posted = true;
    op.arrived++;
    if (op.all_arrived()) g.changed.notify_all();
}

template <typename S> std::string call_text(const Call<S>& call) {
    std::string s = collective_name(call.kind);
    if (call.kind == Collective::BARRIER) return s;
    if (call.kind == Collective::ALL_REDUCE) s += call.max ? " (max)" : " (sum)";
    s += " of " + std::to_string(call.n) + " " + ELEMENT_NAMES[int(call.element)];
    return call.kind == Collective::BROADCAST ? s + " from " + std::to_string(call.root) : s;
}

template <typename S> std::shared_ptr<LocalOp> local_start(const Comm& c, const Call<S>& call) {
    LocalGroup& g = *c.local;
    std::string text = call_text(call);
    std::lock_guard lock(g.mutex);
    if (g.world->failed) throw RankFailure();
    size_t index = g.started[c.rank] - g.first_open;
    if (index == g.open.size()) {
        std::vector<int> ranks;
        for (int r = 0; r < c.size; r++) ranks.push_back(r);
        int items = call.kind == Collective::BARRIER ? 0 : c.size;
        g.open.push_back(std::make_shared<LocalOp>(call.kind, text, ranks, items));
    }
    std::shared_ptr<LocalOp> op = g.open[index];
    if (op->text != text)
        local_stop(c, rank_text(c) + " starts " + text + " on '" + c.name +
                          "' where its peers start " + op->text);
    g.started[c.rank]++;
    local_arrive(c, *op, c.rank, call);
    for (; !g.open.empty() && g.open.front()->all_arrived(); g.first_open++) g.open.pop_front();
    return op;
}

template <typename S>
std::shared_ptr<LocalOp> local_start_message(const Comm& c, const CommMessage& m,
                                             const Call<S>& call) {
    LocalGroup& g = *c.local;
    std::lock_guard lock(g.mutex);
    if (g.world->failed) throw RankFailure();
    int from = m.send ? c.rank : m.peer, to = m.send ? m.peer : c.rank, party = m.send ? 0 : 1;
    auto& queue = g.mail[{from, to, m.tag}];
    auto at = std::find_if(queue.begin(), queue.end(),
                           [&](auto& op) { return !op->parties[party].posted; });
    std::string text = std::to_string(m.bytes) + " bytes";
    if (at == queue.end())
        at = queue.insert(at, std::make_shared<LocalOp>(call.kind, text, std::vector{from, to}, 1));
    std::shared_ptr<LocalOp> op = *at;
    if (op->text != text)
        local_stop(c, rank_text(c) + (m.send ? " sends " : " receives ") + text + " on '" + c.name +
                          "' where " + ranks_text({g.members[m.peer]}) + " has " + op->text);
    local_arrive(c, *op, party, call);
    if (op->all_arrived()) queue.erase(at);
    return op;
}

// Item i of a collective that all have started: it writes what no other item reads or writes.
// Alone, where each party has a snapshot of what came in: all that party i gets.
template <typename S>
void local_item(const LocalOp& op, int i, const Call<S>& call, bool alone, S where) {
    int size = int(op.parties.size());
    size_t bytes = call.bytes();
    const LocalOp::Party& mine = op.parties[i];
    std::vector<const void*> ins(size);
    std::vector<void*> outs(size);
    switch (op.kind) {
    case Collective::ALL_REDUCE: {
        Slice s = alone ? Slice{0, call.n} : slice_of(call.n, size, i);
        for (int r = 0; r < size; r++) ins[r] = op.parties[r].in + s.from * call.unit();
        for (int r = 0; r < size; r++) outs[r] = op.parties[r].out + s.from * call.unit();
        if (alone) outs[0] = mine.out;
        call.reduce(outs.data(), alone ? 1 : size, ins.data(), size, s.count, where);
        break;
    }
    case Collective::REDUCE_SCATTER:
        for (int r = 0; r < size; r++) ins[r] = op.parties[r].in + i * bytes;
        outs[0] = mine.out;
        call.reduce(outs.data(), 1, ins.data(), size, call.n, where);
        break;
    case Collective::ALL_GATHER:
        for (int r = 0; r < size; r++)
            copy_bytes(mine.out + r * bytes, op.parties[r].in, bytes, where);
        break;
    case Collective::ALL_TO_ALL:
        for (int r = 0; r < size; r++)
            copy_bytes(mine.out + r * bytes, op.parties[r].in + i * bytes, bytes, where);
        break;
    case Collective::BROADCAST:
        if (i != call.root) copy_bytes(mine.out, op.parties[call.root].in, bytes, where);
        break;
    case Collective::EXCHANGE: copy_bytes(op.parties[1].out, op.parties[0].in, bytes, where); break;
    case Collective::BARRIER: break;
    }
}

template <typename S>
void local_finish(const Comm& c, LocalOp& op, int party, const Call<S>& call, S where) {
    LocalGroup& g = *c.local;
    std::unique_lock lock(g.mutex);
    local_wait(c, lock, &op, [&] { return op.all_arrived(); });
    if (g.world->settings.moment == Moment::LATEST && std::is_same_v<S, Cpu>) {
        lock.unlock();
        const std::vector<char>& was = op.parties[party].snapshot;
        if (!was.empty() && !call.in_place(c.size) && memcmp(was.data(), call.in, was.size()))
            local_stop(c, rank_text(c) + " changed the input of " + where_text(c, op.kind) +
                              " before it was finished");
        if (call.out) local_item(op, party, call, true, where);
        return;
    }
    while (op.claimed < op.items) {
        if (op.broken) throw RankFailure();
        int item = op.claimed++;
        lock.unlock();
        local_item(op, item, call, false, where);
        wait_for(where);
        lock.lock();
        if (++op.done == op.claimed) g.changed.notify_all();
    }
    local_wait(c, lock, nullptr, [&] { return op.done == op.items; });
}

// A rank leaves with a collective outstanding: nobody may touch its buffers afterwards.
inline void local_withdraw(const Comm& c, LocalOp& op) {
    LocalGroup& g = *c.local;
    std::unique_lock lock(g.mutex);
    if (!op.broken && op.done < std::max(op.items, 1)) {
        op.broken = true;
        if (!std::uncaught_exceptions())
            local_fail(*g.world, rank_text(c) + " left " + where_text(c, op.kind) + " unfinished");
    }
    local_wait(c, lock, nullptr, [&] { return op.done == op.claimed; });
}

// The group of these ranks of c, in this order; only they call, with the same list.
inline std::shared_ptr<LocalGroup> local_split(const Comm& c, const std::string& name,
                                               const std::vector<int>& members) {
    LocalWorld& world = *c.local->world;
    std::lock_guard lock(world.mutex);
    auto at = std::find_if(world.openings.begin(), world.openings.end(), [&](auto& o) {
        return o.group->name == name && o.group->members == members &&
               std::find(o.joined.begin(), o.joined.end(), c.info->rank) == o.joined.end();
    });
    if (at == world.openings.end())
        at = world.openings.insert(at, {std::make_shared<LocalGroup>(&world, name, members), {}});
    std::shared_ptr<LocalGroup> group = at->group;
    at->joined.push_back(c.info->rank);
    if (at->joined.size() == members.size()) world.openings.erase(at);
    return group;
}

// Run body(world) as `ranks` threads, each with its share of the cores. 0 once all have returned,
// or returned 0; else 1, and the first failure has been said.
template <typename F> int run_local_ranks(int ranks, LocalSettings settings, F body) {
    LocalWorld world(ranks, settings);
    std::vector<int> members(ranks);
    for (int r = 0; r < ranks; r++) members[r] = r;
    auto group = std::make_shared<LocalGroup>(&world, "world", members);
    auto run_rank = [&](int rank) {
        this_rank = rank;
#ifdef _OPENMP
        omp_set_num_threads(std::max(1, omp_get_num_procs() / ranks));
#endif
        Placements placements;
        RankInfo info;
        info.rank = rank, info.timeout_s = settings.timeout_s;
        if (settings.placements) info.placements = &placements;
        Comm c;
        c.rank = rank, c.size = ranks, c.members = members, c.info = &info;
        if (ranks > 1) c.backend = Backend::LOCAL, c.local = group;
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
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; r++) threads.emplace_back(run_rank, r);
    for (std::thread& t : threads) t.join();
    return world.failed;
}
