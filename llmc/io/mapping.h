// mapping.h - files in memory, and one line where the kernel cannot read on
//   A mapped file is read page by page when its bytes are first used. If the file was truncated
//   meanwhile, or the disk fails, the kernel sends SIGBUS, which would end the program without a
//   message. The handler here finds the file of the address and reports it.
//   The table of mappings is global, because a signal handler sees nothing else. A mapping without
//   a row in the table works as well; only a fault in it ends without that message.
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include <signal.h>
#include <sys/mman.h>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include "../text.h"
#include "files.h"

namespace llmc {

// A row of the table. The handler may run at any moment, so `begin` is set last and cleared first.
struct MappedFile {
    std::atomic<const char*> begin = nullptr;
    std::atomic<size_t> bytes = 0;
    char name[512] = ""; // printable
};
inline MappedFile mapped_files[2048];
inline std::mutex mapped_files_mutex; // held by those who change the table

// Say which file could not be read any further, and end the program. A signal handler may call
// little more than write() and _exit().
inline void on_bus_error(int, siginfo_t* info, void*) {
    // Find the file that is mapped at the address.
    const char* address = static_cast<const char*>(info->si_addr);
    const char* name = nullptr;
    for (const MappedFile& m : mapped_files) {
        const char* begin = m.begin.load();
        if (begin && address >= begin && address < begin + m.bytes.load())
            name = m.name;
    }

    // An address in no mapping is a bug of the program: end as without this handler, with a core.
    if (!name) {
        signal(SIGBUS, SIG_DFL);
        return;
    }

    // Write the line in one call, so that lines of several processes do not mix.
    char line[1024] = "";
    strncat(line, program_invocation_short_name, 64);
    strcat(line, ": error: ");
    strncat(line, name, 512);
    strcat(line, ": was cut while it was read, or its disk fails: make it whole again; what was "
                 "saved is good, --resume goes on from the last checkpoint\n");
    ssize_t written = write(2, line, strlen(line));
    _exit(written < 0 ? 2 : 1);
}

// Enter a mapping in the table.
inline void remember_mapping(const std::string& path, void* begin, size_t bytes) {
    // Install the handler with the first mapping.
    std::lock_guard<std::mutex> lock(mapped_files_mutex);
    static const bool installed = [] {
        struct sigaction action = {};
        action.sa_sigaction = on_bus_error;
        action.sa_flags = SA_SIGINFO;
        return sigaction(SIGBUS, &action, nullptr) == 0;
    }();
    (void)installed;

    // Take the first free row.
    for (MappedFile& m : mapped_files) {
        if (m.begin.load()) continue;
        snprintf(m.name, sizeof(m.name), "%s", printable(path).c_str());
        m.bytes = bytes;
        m.begin = static_cast<const char*>(begin);
        return;
    }
}

// Map a whole file for reading. An empty file cannot be mapped.
inline std::string map_whole_file(const std::string& path, void** begin, size_t* bytes,
                                  struct stat* s) {
    int fd = -1;
    std::string wrong = open_regular(path, &fd, s);
    if (!wrong.empty()) return wrong;
    if (s->st_size == 0) wrong = path + ": is empty";

    // Map it. The mapping outlives the file descriptor.
    void* p = wrong.empty() ? mmap(nullptr, s->st_size, PROT_READ, MAP_PRIVATE, fd, 0) : nullptr;
    if (p == MAP_FAILED)
        wrong = path + ": cannot be mapped: " + strerror(errno);
    close(fd);
    if (!wrong.empty()) return wrong;
    *begin = p;
    *bytes = size_t(s->st_size);
    remember_mapping(path, p, *bytes);
    return "";
}

// End a mapping.
inline void unmap_file(void* begin, size_t bytes) {
    // Clear the row first: the addresses may belong to another file at once.
    std::lock_guard<std::mutex> lock(mapped_files_mutex);
    for (MappedFile& m : mapped_files)
        if (m.begin.load() == begin)
            m.begin = nullptr;
    munmap(begin, bytes);
}

} // namespace llmc
