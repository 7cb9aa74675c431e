// files.h - files that are whole or not there, mapped files, folders swapped in one step, CRC-32
//   FileWriter   1. writer_create starts PATH.tmp   2. writer_put appends bytes
//                3. writer_close syncs the file and renames it to PATH
//   After any failure PATH is as it was and PATH.tmp is gone. A kill leaves PATH.tmp, which nothing
//   reads. To survive a power cut the folder must be synced too (sync_folder).
//   Every function that returns a text returns "" or one line that says what is wrong.
#pragma once
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <vector>
#include <nlohmann/json.hpp>
#include "../ops/types.h"
#include "../comm/text.h"

namespace llmc {

typedef nlohmann::json Json;
typedef nlohmann::ordered_json OrderedJson; // its keys keep their order

// ----------------------------------------------------------------------------
// files

// A file that is being written to PATH.tmp.
struct FileWriter {
    std::string path;
    int fd = -1;
    size_t bytes = 0;    // written so far
    size_t expected = 0; // bytes that the whole file will have
    uint32_t crc = 0;    // CRC-32 of what is written
    std::string wrong;   // the first thing that failed
    // Values of an export that its type made infinite, and that became zero.
    size_t infinite = 0, vanished = 0;
};

// Sync a folder, so that the names in it survive a power cut.
inline std::string sync_folder(const std::string& folder) {
    int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY);
    bool good = fd >= 0 && fsync(fd) == 0;
    std::string why = strerror(errno);
    if (fd >= 0) close(fd);
    return good ? "" : folder + ": " + why;
}

// The folder part of a path, with its slash: "a/b.txt" -> "a/", "b.txt" -> "."
inline std::string folder_of(const std::string& path) {
    size_t slash = path.rfind('/');
    return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

// A file of a folder, whose name may end with a slash.
inline std::string file_in(const std::string& folder, const std::string& name) {
    return (folder.ends_with('/') ? folder : folder + "/") + name;
}

// Start PATH.tmp.
inline std::string writer_create(FileWriter* w, const std::string& path) {
    *w = {};
    w->path = path;
    w->fd = open((path + ".tmp").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (w->fd < 0)
        w->wrong = path + ": cannot be written: " + strerror(errno);
    return w->wrong;
}

// Append bytes. After a failure nothing more is written.
inline void writer_put(FileWriter& w, const void* data, size_t bytes) {
    const unsigned char* p = static_cast<const unsigned char*>(data);
    while (bytes > 0 && w.wrong.empty()) {
        // Write at most 16 MiB in a call; a signal may interrupt it.
        ssize_t n = write(w.fd, p, std::min(bytes, size_t(1) << 24));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            w.wrong = w.path + ": cannot be written: " + strerror(n < 0 ? errno : ENOSPC);
            return;
        }

        // Count what was written.
        w.crc = uint32_t(crc32(w.crc, p, uInt(n)));
        p += n;
        bytes -= n;
        w.bytes += n;
    }
}

// Sync the file and rename it to its final name. On any failure the temporary file is removed.
inline std::string writer_close(FileWriter* w) {
    // Compare the length with the promised one: a short file must not get the name.
    if (w->wrong.empty() && w->bytes != w->expected)
        w->wrong = concat(w->path, ": ", w->bytes, " bytes written, the header promises ",
                          w->expected);

    // An infinity would be of no use to anybody. What has become zero is lost, and said.
    if (w->wrong.empty() && w->infinite)
        w->wrong = concat(w->infinite, " values are infinite in this type, or were no numbers "
                          "before: --export-dtype fp32, or bf16");
    if (w->wrong.empty() && w->vanished)
        printf("--export: %zu values are too small for this type, and 0 in it\n", w->vanished);

    // Sync and close. A full disk may show only now.
    if (w->fd >= 0 && fsync(w->fd) != 0 && w->wrong.empty())
        w->wrong = w->path + ": cannot be written: " + strerror(errno);
    if (w->fd >= 0 && close(w->fd) != 0 && w->wrong.empty())
        w->wrong = w->path + ": cannot be written: " + strerror(errno);
    w->fd = -1;

    // Rename: from this moment the new file counts.
    std::string temporary = w->path + ".tmp";
    if (w->wrong.empty() && rename(temporary.c_str(), w->path.c_str()) != 0)
        w->wrong = w->path + ": cannot be renamed: " + strerror(errno);
    if (!w->wrong.empty())
        unlink(temporary.c_str());
    return w->wrong;
}

// Write a small file in one call.
inline std::string write_text_file(const std::string& path, const std::string& text) {
    FileWriter w;
    if (!writer_create(&w, path).empty())
        return w.wrong;
    writer_put(w, text.data(), text.size());
    w.expected = text.size();
    return writer_close(&w);
}

// ----------------------------------------------------------------------------
// reading

// The type of the file at a path: S_IFDIR, S_IFREG, ...; 0: there is none.
inline mode_t file_type(const std::string& path) {
    struct stat s;
    return stat(path.c_str(), &s) == 0 ? s.st_mode & S_IFMT : 0;
}

// Say what a path leads to if it is no file.
inline std::string kind_of_node(mode_t mode) {
    return S_ISDIR(mode)                      ? "a folder"
           : S_ISFIFO(mode)                   ? "a pipe"
           : S_ISSOCK(mode)                   ? "a socket"
           : S_ISCHR(mode) || S_ISBLK(mode) ? "a device"
                                              : "something else";
}

// Open a file for reading, and get its size. Every reader of files begins here.
inline std::string open_regular(const std::string& path, int* fd, struct stat* s) {
    // O_NONBLOCK: otherwise a pipe that nobody writes to would wait for ever.
    *fd = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    if (*fd < 0)
        return path + ": " + strerror(errno);
    if (fstat(*fd, s) == 0 && S_ISREG(s->st_mode))
        return "";

    // Refuse all else: a pipe cannot be mapped or rewound, and a device has no end.
    close(*fd);
    *fd = -1;
    return path + ": is no file but " + kind_of_node(s->st_mode);
}

// Read up to `bytes` bytes of an open file. Returns their number, or -1 if it cannot be read.
inline ssize_t read_some(int fd, void* to, size_t bytes) {
    ssize_t n = 0;
    do n = read(fd, to, bytes);
    while (n < 0 && errno == EINTR);
    return n;
}

// The largest file that read_whole_file() accepts: it is meant for JSON and tokenizers.
constexpr size_t MOST_BYTES_READ = size_t(1) << 32;

// The files that another process has read for this one: path -> bytes. one_reader.h fills it
// before ranks start as threads, and nobody writes it later.
inline std::map<std::string, std::string>& shared_files() {
    static std::map<std::string, std::string> files;
    return files;
}

// Some editors write this before a text in UTF-8. It is no part of the text.
constexpr std::string_view BYTE_ORDER_MARK = "\xef\xbb\xbf";

// Read all bytes of a file, but for a byte order mark.
inline std::string read_whole_file(const std::string& path, std::string* bytes) {
    // A shared file is here already.
    auto shared = shared_files().find(path);
    if (shared != shared_files().end()) {
        *bytes = shared->second;
        return "";
    }

    // Open it, unless it is too large.
    int fd = -1;
    struct stat s = {};
    std::string wrong = open_regular(path, &fd, &s);
    if (!wrong.empty()) return wrong;
    bytes->clear();
    if (size_t(s.st_size) > MOST_BYTES_READ)
        wrong = concat(path, ": has ", s.st_size, " bytes, and at most ", MOST_BYTES_READ,
                       " are read: is it the right file?");

    // Read to the actual end: a file of /proc claims to have 0 bytes.
    std::vector<char> buffer(size_t(1) << 16);
    for (ssize_t n = 1; wrong.empty() && n > 0;) {
        n = read_some(fd, buffer.data(), buffer.size());
        if (n < 0)
            wrong = path + ": " + strerror(errno);
        else
            bytes->append(buffer.data(), size_t(n));
    }
    close(fd);
    if (bytes->starts_with(BYTE_ORDER_MARK))
        bytes->erase(0, BYTE_ORDER_MARK.size());
    return wrong;
}

// The lines of a text, which may end in CR LF. A last line without its newline counts as well.
inline std::vector<std::string> lines_of(const std::string& text) {
    std::vector<std::string> lines;
    std::istringstream in(text);
    for (std::string line; std::getline(in, line);) {
        if (line.ends_with('\r'))
            line.pop_back();
        lines.push_back(line);
    }
    return lines;
}

// Read a file through, and return its size and CRC-32.
inline std::string file_crc(const std::string& path, size_t* bytes, uint32_t* crc) {
    int fd = -1;
    struct stat s = {};
    LLMC_TRY(open_regular(path, &fd, &s));

    // Read in blocks of 1 MiB.
    std::vector<unsigned char> buffer(size_t(1) << 20);
    *bytes = 0;
    *crc = 0;
    ssize_t n = 0;
    while ((n = read_some(fd, buffer.data(), buffer.size())) > 0) {
        *bytes += size_t(n);
        *crc = uint32_t(crc32(*crc, buffer.data(), uInt(n)));
    }
    close(fd);
    return n == 0 ? "" : path + ": cannot be read";
}

// ----------------------------------------------------------------------------
// mapping: files in memory, and one line where the kernel cannot read on
//   A mapped file is read page by page when its bytes are first used. If the file was truncated
//   meanwhile, or the disk fails, the kernel sends SIGBUS, which would end the program without a
//   message. The handler here finds the file of the address and reports it.
//   The table of mappings is global, because a signal handler sees nothing else. A mapping without
//   a row in the table works as well; only a fault in it ends without that message.

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
        action.sa_flags = SA_SIGINFO | SA_ONSTACK; // run/stop.h gives the stack
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
    LLMC_TRY(open_regular(path, &fd, s));
    std::string wrong = s->st_size == 0 ? path + ": is empty" : "";

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

// ----------------------------------------------------------------------------
// locks

// Lock a name for this process. PATH is made, and the lock ends with unlock_file() or with the
// process, however it ends. A PATH that a kill left behind locks nothing.
//   *fd   the lock; -1 where the file system has no locks, or PATH cannot be written
//   taken the message to return if another process holds the lock
inline std::string lock_file(const std::string& path, int* fd, const std::string& taken) {
    for (;;) {
        // Make the file. In a folder that is read-only nobody writes, so no lock is needed.
        *fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (*fd < 0 && (errno == EACCES || errno == EROFS))
            return "";
        if (*fd < 0)
            return path + ": cannot be made: " + strerror(errno);
        bool locked = flock(*fd, LOCK_EX | LOCK_NB) == 0;
        bool refused = !locked && errno == EWOULDBLOCK;

        // The holder may have removed the name between our open and flock. The lock then is on a
        // nameless file: try again with the new one.
        struct stat mine = {}, there = {};
        bool same = fstat(*fd, &mine) == 0 && stat(path.c_str(), &there) == 0 &&
                    mine.st_ino == there.st_ino && mine.st_dev == there.st_dev;
        if (locked && same) return "";
        close(*fd);
        *fd = -1;
        if (refused) return taken;
        if (!locked) return "";
    }
}

// Remove the file, and end the lock.
inline void unlock_file(const std::string& path, int fd) {
    // Remove the name first: a file without a name locks nobody out.
    if (fd < 0) return;
    unlink(path.c_str());
    close(fd);
}

// ----------------------------------------------------------------------------
// folders

// The names in a folder, or none if it is no folder.
inline std::vector<std::string> names_in(const std::string& folder) {
    std::vector<std::string> names;
    if (DIR* d = opendir(folder.c_str())) {
        while (dirent* e = readdir(d))
            if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
                names.push_back(e->d_name);
        closedir(d);
    }
    return names;
}

// Whether an export writes a file of this name.
inline bool export_file(const std::string& name) {
    for (const char* own : {"config.json", "generation_config.json", "adapter_config.json",
                            "adapter_model.safetensors", "tokenizer.json",
                            "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
                            "added_tokens.json", "chat_template.jinja", "chat_template.json"})
        if (name == own || name == std::string(own) + ".tmp")
            return true;
    return name.starts_with("model") && name.find(".safetensors") != std::string::npos;
}

// Whether an export or a checkpoint writes a file of this name. The program never removes any other
// file, whatever its folder is called.
inline bool own_file(const std::string& name) {
    bool rank = name.starts_with("rank_") && name.find(".safetensors") != std::string::npos;
    return export_file(name) || rank || name.starts_with("manifest.json");
}

// Files of a folder, [NAME or FOLDER/NAME]: the content.
typedef std::map<std::string, std::string> TextFiles;

// Write the files of a folder.
inline std::string write_texts(const std::string& folder, const TextFiles& texts) {
    for (const auto& [name, text] : texts) {
        std::string path = folder + "/" + name;
        mkdir(folder_of(path).c_str(), 0777);
        LLMC_TRY(write_text_file(path, text));
    }
    return sync_folder(folder);
}

// Remove the program's own files from a folder, and then the folder if it is empty. carried: files
// of other names that an export has.
inline void remove_folder(const std::string& folder, const TextFiles& carried = {}) {
    for (const auto& [name, text] : carried) {
        unlink((folder + "/" + name).c_str());
        if (name.find('/') != std::string::npos)
            rmdir(folder_of(folder + "/" + name).c_str());
    }
    for (const std::string& name : names_in(folder))
        if (own_file(name))
            unlink((folder + "/" + name).c_str());
    rmdir(folder.c_str());
}

// Put a whole new folder in the place of an old one, or of nothing. At every moment one of the two
// has the name, except on file systems that cannot exchange two names.
inline std::string replace_folder(const std::string& fresh, const std::string& folder,
                                  const TextFiles& carried = {}) {
    // Exchange the two names, or give the name for the first time.
    bool old = file_type(folder);
    unsigned how = old ? RENAME_EXCHANGE : 0;
    bool good = renameat2(AT_FDCWD, fresh.c_str(), AT_FDCWD, folder.c_str(), how) == 0;

    // Without an exchange: put the old folder aside, and back if the second rename fails.
    if (!good && old && (errno == EINVAL || errno == ENOSYS)) {
        std::string aside = folder + ".old";
        if (rename(folder.c_str(), aside.c_str()) == 0) {
            good = rename(fresh.c_str(), folder.c_str()) == 0;
            rename(aside.c_str(), good ? fresh.c_str() : folder.c_str());
        }
    }
    if (!good)
        return folder + ": cannot be renamed: " + strerror(errno);

    // Remove the old folder, which now has the temporary name.
    std::string wrong = sync_folder(folder_of(folder));
    if (old) remove_folder(fresh, carried);
    return wrong;
}

// ----------------------------------------------------------------------------
// manifests

// JSON as it is written, on one line or indented. Bytes that are not UTF-8 (in a path of the
// configuration) are replaced; plain dump() would throw.
inline std::string json_text(const Json& j, int indent = -1) {
    return j.dump(indent, ' ', false, Json::error_handler_t::replace) + "\n";
}
// A manifest's text is indented by one.
inline std::string manifest_text(const Json& manifest) { return json_text(manifest, 1); }

// The checksum that a manifest carries: that of its own text without the checksum. Parsing and
// printing a JSON text gives the same text again, so a reader can check it.
inline uint32_t manifest_crc(Json manifest) {
    manifest.erase("crc32");
    std::string text = manifest_text(manifest);
    const unsigned char* bytes = reinterpret_cast<const unsigned char*>(text.data());
    return uint32_t(crc32(0, bytes, uInt(text.size())));
}

// Try whether a file that will be written at the end of the run can be made: "" or why not. A file
// that is there is not changed.
inline std::string try_file(const char* flag, const std::string& path) {
    bool there = file_type(path) != 0;
    int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
    std::string why = strerror(errno);
    if (fd < 0)
        return concat("--", flag, " ", path, ": cannot be written: ", why);
    close(fd);
    if (!there) unlink(path.c_str());
    return "";
}

// The same for a folder: make one beside it, and remove that.
inline std::string try_folder(const char* flag, std::string path) {
    while (path.size() > 1 && path.ends_with("/"))
        path.pop_back();
    std::string beside = path + ".try";
    bool good = mkdir(beside.c_str(), 0777) == 0 || errno == EEXIST;
    std::string why = strerror(errno);
    rmdir(beside.c_str());
    return good ? "" : concat("--", flag, " ", path, ": cannot be made: ", why);
}

// The program itself: its path, to start it again; its folder, to find the sources beside it; and
// its bytes, to check that all ranks run the same program.
inline std::string program_path() {
    // Ask Linux for the path; "" where it does not tell.
    char path[4096];
    ssize_t n = readlink("/proc/self/exe", path, sizeof(path) - 1);
    return std::string(path, n > 0 ? size_t(n) : 0);
}
inline std::string program_folder() {
    std::string program = program_path();
    return program.substr(0, program.rfind('/') + 1);
}
inline std::string program_bytes() {
    std::ifstream program("/proc/self/exe", std::ios::binary);
    return {std::istreambuf_iterator<char>(program), {}};
}

// A message as it is shown: printable, whatever the file held that it quotes, and a screen at most,
// however long the list is that it names.
inline std::string one_screen(const std::string& message) {
    const size_t most = 1400;
    return printable(message.substr(0, most)) + (message.size() > most ? "..." : "");
}

// End the program with an error message, unless the message is empty. Functions that may fail
// return "" or a sentence for the user, and or_die() wraps their calls.
inline void or_die(const std::string& wrong) {
    LLMC_USER_CHECK(wrong.empty(), "%s", one_screen(wrong).c_str());
}

} // namespace llmc
