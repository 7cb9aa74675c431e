// hang_report.h - hang reports: after seconds, which ranks are late, where, and in which action
//   1. late   a wait has taken ten seconds, or five times this rank's longest one so far, whichever
//             is longer; or half of --watchdog
//   2. ask    one rank of each other machine: who stands still there? A rank that waits answers
//             from the notes of its machine (rank_status.h). A rank that computes does not: then
//             the next rank of its machine is asked. A machine without an answer is named
//   3. tell   one rank of each machine prints a note, at most one a minute. The run goes on; at the
//             watchdog's limit it ends with the same words
//   Cost: nothing before a wait sleeps; then a probe for questions at each look. A rank asks 64
//   machines at most, those of missing ranks first. Threads share notes and ask nobody.
//   To copy: this file, group.h, rank_status.h, elements.h, element_type.h, cuda_common.h, types.h.
#pragma once
#ifdef WITH_MPI
#define OMPI_SKIP_MPICXX 1
#include <mpi.h>
#endif
#include <deque>
#include <utility>
#include "group.h"
#include "rank_status.h"

namespace llmc {

constexpr double LATE_SECONDS = 10; // shorter waits are never reported
constexpr double TELL_AGAIN = 60;   // seconds between two notes of a machine
constexpr double TO_ANSWER = 0.5;   // seconds that a rank has to answer

#ifdef WITH_MPI

// The line between machines: a communicator of its own, where questions never meet other messages.
struct Hotline {
    enum Tag { QUESTION, ANSWER };
    // A question, and the head of its answer. The number tells an old answer from a new one.
    struct Question {
        int64_t number;
        double waited; // seconds
    };
    MPI_Comm comm = MPI_COMM_NULL; // freed with MPI itself: a question may still be on its way
    std::vector<int> machine_of;   // [rank]: the first rank of its machine
    int64_t questions = 0;
    std::deque<std::pair<MPI_Request, std::string>> sent; // what MPI may still read
};

// Open the line, unless all ranks are on one machine. All ranks of the world call.
inline void open_hotline(MPI_Comm world, MPI_Comm machine, RankInfo& info) {
    auto line = std::make_shared<Hotline>();
    int size = 0, first = info.rank;
    MPI_Bcast(&first, 1, MPI_INT, 0, machine);
    MPI_Comm_size(world, &size);
    line->machine_of.resize(size_t(size));
    MPI_Allgather(&first, 1, MPI_INT, line->machine_of.data(), 1, MPI_INT, world);

    // All ranks see the same list, so all open the line or none.
    for (int other : line->machine_of)
        if (other != line->machine_of[0])
            info.hotline = line;
    if (info.hotline)
        MPI_Comm_dup(world, &line->comm);
}

// Send bytes without waiting for whoever receives them.
inline void hotline_send(Hotline& line, int to, Hotline::Tag tag, std::string bytes) {
    // Forget what has arrived.
    int arrived = 1;
    while (!line.sent.empty() && arrived) {
        MPI_Test(&line.sent.front().first, &arrived, MPI_STATUS_IGNORE);
        if (arrived) line.sent.pop_front();
    }
    auto& [request, text] = line.sent.emplace_back(MPI_REQUEST_NULL, std::move(bytes));
    MPI_Isend(text.data(), int(text.size()), MPI_BYTE, to, tag, line.comm, &request);
}

// Receive one message with a tag, if there is one. Returns the sender, or -1.
inline int hotline_receive(Hotline& line, Hotline::Tag tag, std::string* bytes) {
    int there = 0, count = 0;
    MPI_Status status;
    MPI_Iprobe(MPI_ANY_SOURCE, tag, line.comm, &there, &status);
    if (!there) return -1;
    MPI_Get_count(&status, MPI_BYTE, &count);
    bytes->resize(size_t(count));
    MPI_Recv(bytes->data(), count, MPI_BYTE, status.MPI_SOURCE, tag, line.comm, MPI_STATUS_IGNORE);
    return status.MPI_SOURCE;
}

// Answer the questions that have come: with who stands still on this machine. Every wait calls.
inline void answer_questions(const RankInfo& info) {
    if (!info.hotline) return;
    std::string bytes;
    for (int from; (from = hotline_receive(*info.hotline, Hotline::QUESTION, &bytes)) >= 0;) {
        Hotline::Question question;
        memcpy(&question, bytes.data(), sizeof(question));
        std::string text = standing_text(info.notes, question.waited);
        hotline_send(*info.hotline, from, Hotline::ANSWER, bytes + text);
    }
}

// An inquiry at other machines, which goes on while its rank waits.
struct Inquiry {
    struct Machine {
        std::vector<int> ranks;
        size_t asked = 0; // the number of its ranks that were asked
        bool answered = false;
    };
    std::vector<Machine> machines;
    int64_t number = 0;
    double next = 0; // the time at which to ask the next ranks
    std::string found;
};

// List the other machines, those of the ranks that are missing first.
inline Inquiry begin_inquiry(const RankInfo& info, const std::vector<int>& missing) {
    Inquiry inquiry;
    if (!info.hotline) return inquiry;
    Hotline& line = *info.hotline;

    // Begin with the machines of missing ranks: they know most.
    inquiry.number = ++line.questions;
    std::vector<int> firsts;
    for (int rank : missing)
        firsts.push_back(line.machine_of[size_t(rank)]);
    firsts.insert(firsts.end(), line.machine_of.begin(), line.machine_of.end());

    // Take each machine once, and its ranks in order.
    std::vector<int> seen = {line.machine_of[size_t(info.rank)]};
    for (int first : firsts) {
        bool known = std::count(seen.begin(), seen.end(), first);
        if (known || seen.size() > 64) continue;
        seen.push_back(first);
        inquiry.machines.emplace_back();
        for (size_t r = 0; r < line.machine_of.size(); r++)
            if (line.machine_of[r] == first)
                inquiry.machines.back().ranks.push_back(int(r));
    }
    return inquiry;
}

// Continue an inquiry: take answers, and ask the next rank of each machine that gave none. Returns
// whether all machines have answered or were given up.
inline bool go_on(Inquiry& inquiry, const RankInfo& info, double waited) {
    if (inquiry.machines.empty()) return true;

    // Take all answers that have come. One to an earlier inquiry is out of date.
    std::string bytes;
    for (int from; (from = hotline_receive(*info.hotline, Hotline::ANSWER, &bytes)) >= 0;) {
        Hotline::Question question;
        memcpy(&question, bytes.data(), sizeof(question));
        for (Inquiry::Machine& m : inquiry.machines) {
            bool here = std::count(m.ranks.begin(), m.ranks.end(), from);
            if (!here || m.answered || question.number != inquiry.number)
                continue;
            m.answered = true;
            inquiry.found += bytes.substr(sizeof(question));
        }
    }

    // Ask one more rank of each machine that has not answered, a while after the one before.
    bool over = true;
    bool now = clock_seconds() >= inquiry.next;
    for (Inquiry::Machine& m : inquiry.machines) {
        if (m.answered) continue;
        over = false;
        if (now && m.asked < m.ranks.size()) {
            Hotline::Question question = {inquiry.number, waited};
            std::string text(reinterpret_cast<const char*>(&question), sizeof(question));
            hotline_send(*info.hotline, m.ranks[m.asked++], Hotline::QUESTION, text);
        } else if (now) {
            m.answered = true; // nobody is left to ask
            bool alone = m.ranks.size() == 1;
            inquiry.found += "; " + ranks_text(m.ranks);
            inquiry.found += alone ? ", alone on its machine, does not answer"
                                   : ", all of one machine, do not answer";
        }
    }
    if (now) inquiry.next = clock_seconds() + TO_ANSWER;
    return over;
}

#else

// The same names without MPI.
struct Hotline {};
inline void answer_questions(const RankInfo&) {}
struct Inquiry {
    std::string found;
};
inline Inquiry begin_inquiry(const RankInfo&, const std::vector<int>&) { return {}; }
inline bool go_on(Inquiry&, const RankInfo&, double) { return true; }

#endif

// ----------------------------------------------------------------------------
// a wait that may become late

// Whether this rank may print a note now: one rank of a machine speaks for all, once a minute.
inline bool may_tell(const RankNotes& notes) {
    if (!notes.all) return true;
    std::atomic<double>& silent = notes.all[0].silent_until;
    double until = silent, now = clock_seconds();
    return now >= until && silent.compare_exchange_strong(until, now + TELL_AGAIN);
}

// A wait that answers questions, and asks its own when it is late.
struct LateWait {
    const RankInfo& info;
    bool asked = false, told = false;
    Inquiry inquiry = {};

    // Seconds after which a wait is late; 0: never.
    double late_after() const {
        double longest = info.notes.own ? info.notes.own->longest.load() : 0;
        return std::min(std::max(LATE_SECONDS, 5 * longest), info.timeout_s / 2);
    }

    // Look after `waited` seconds. missing() lists the ranks that this one waits for, and
    // text() says all that it knows by itself.
    template <typename M, typename F> void look(double waited, M missing, F text) {
        answer_questions(info);
        bool late = info.timeout_s > 0 && waited >= late_after();
        if (told || !late) return;
        if (!std::exchange(asked, true)) inquiry = begin_inquiry(info, missing());
        if (!go_on(inquiry, info, waited)) return;
        told = true;
        if (!may_tell(info.notes)) return;
        fprintf(stderr, "note: %s%s; the run ends if this lasts %g s (--watchdog)\n",
                text().c_str(), inquiry.found.c_str(), info.timeout_s);
    }
};

} // namespace llmc
