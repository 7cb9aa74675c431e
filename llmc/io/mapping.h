// mapping.h - files in memory, and one line where the kernel cannot read on
//   A mapped file is read page by page when its bytes are first used. If the file was
//   truncated meanwhile, or the disk fails, the kernel sends SIGBUS, which would end the program
//   without a word. The handler here looks up whose address it was and says so.
//   The table of mappings is global, for a signal handler sees nothing else. A mapping that finds
//   no room in it works as well; only a fault in it ends without that line.
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include <signal.h>
#include <sys/mman.h>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include "files.h"

namespace llmc {

// A row of the table. The handler may run at any moment: `begin` is set last and cleared first.
struct MappedFile {
    std::atomic<const char*> begin = nullptr;
    std::atomic<size_t> bytes = 0;
    char name[512] = ""; // printable
};
inline MappedFile mapped_files[2048];
inline std::mutex mapped_files_mutex; // of those that change it

// Say which file could not be read on, and end the program. A handler may call little more than
// write() and _exit().
inline void on_bus_error(int, siginfo_t* info, void*) {
    // Find the file.
    const char* address = static_cast<const char*>(info->si_addr);
    const char* name = nullptr;
    for (const MappedFile& m : mapped_files) {
        const char* begin = m.begin.load();
        if (begin && address >= begin && address < begin + m.bytes.load())
            name = m.name;
    }

    // An address of nobody's is a mistake of the program: end as without this handler, with a core.
    if (!name) {
        signal(SIGBUS, SIG_DFL);
        return;
    }

    // Write one line at once, so that lines of several processes do not mix.
    char line[1024] = "train_gpt: error: ";
    strncat(line, name, 512);
    strcat(line, ": was cut while it was read, or its disk fails: make it whole again; what was "
                 "saved is good, --resume goes on from the last checkpoint\n");
    ssize_t written = write(2, line, strlen(line));
    _exit(written < 0 ? 2 : 1);
}

// Enter a mapping in the table.
inline void remember_mapping(const std::string& path, void* begin, size_t bytes) {
    // The first mapping brings the handler with it.
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

// Map a file, whole and for reading. A file without bytes cannot be mapped.
inline std::string map_whole_file(const std::string& path, void** begin, size_t* bytes,
                                  struct stat* s) {
    int fd = -1;
    std::string wrong = open_regular(path, &fd, s);
    if (!wrong.empty()) return wrong;
    if (s->st_size == 0) wrong = path + ": is empty";

    // The mapping outlives the descriptor.
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
    // Its addresses may be another file's at once, so the row goes first.
    std::lock_guard<std::mutex> lock(mapped_files_mutex);
    for (MappedFile& m : mapped_files)
        if (m.begin.load() == begin)
            m.begin = nullptr;
    munmap(begin, bytes);
}

} // namespace llmc
