// files.h - files that are whole or not there: written under another name, synced, renamed; CRC-32
//   FileWriter streams into PATH.tmp; writer_close syncs it and renames it. On any failure PATH is
//   as it was and PATH.tmp is gone. A kill leaves PATH.tmp, which nothing reads. To survive a power
//   cut the folder has to be synced too. Every function returns "" or one line that says what is
//   wrong.
#pragma once
#include <fcntl.h>
#include <unistd.h>
#include <zlib.h>
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>
#include <nlohmann/json.hpp>

struct FileWriter {
    std::string path;
    int fd = -1;
    size_t bytes = 0, expected = 0;
    uint32_t crc = 0;  // of all that was written
    std::string wrong; // the first thing that failed
};

inline std::string sync_folder(const std::string& folder) {
    int fd = open(folder.c_str(), O_RDONLY | O_DIRECTORY);
    bool good = fd >= 0 && fsync(fd) == 0;
    std::string why = strerror(errno);
    if (fd >= 0) close(fd);
    return good ? "" : folder + ": " + why;
}

inline std::string folder_of(const std::string& path) {
    size_t slash = path.rfind('/');
    return slash == std::string::npos ? "." : path.substr(0, slash + 1);
}

inline std::string writer_create(FileWriter* w, const std::string& path) {
    *w = {};
    w->path = path;
    w->fd = open((path + ".tmp").c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (w->fd < 0) w->wrong = path + ": cannot be written: " + strerror(errno);
    return w->wrong;
}

inline void writer_put(FileWriter& w, const void* data, size_t bytes) {
    const unsigned char* p = static_cast<const unsigned char*>(data);
    while (bytes > 0 && w.wrong.empty()) {
        size_t piece = std::min(bytes, size_t(1) << 24);
        ssize_t n = write(w.fd, p, piece);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) {
            w.wrong = w.path + ": cannot be written: " + strerror(n < 0 ? errno : ENOSPC);
            return;
        }
        w.crc = uint32_t(crc32(w.crc, p, uInt(n)));
        p += n, bytes -= size_t(n), w.bytes += size_t(n);
    }
}

// Sync, rename to the final name; on any failure the temporary file is gone and the old file as it
// was.
inline std::string writer_close(FileWriter* w) {
    if (w->wrong.empty() && w->bytes != w->expected)
        w->wrong = w->path + ": " + std::to_string(w->bytes) +
                   " bytes written, the header promises " + std::to_string(w->expected);
    if (w->fd >= 0 && fsync(w->fd) != 0 && w->wrong.empty())
        w->wrong = w->path + ": cannot be written: " + strerror(errno);
    if (w->fd >= 0 && close(w->fd) != 0 && w->wrong.empty())
        w->wrong = w->path + ": cannot be written: " + strerror(errno);
    w->fd = -1;
    std::string temporary = w->path + ".tmp";
    if (w->wrong.empty() && rename(temporary.c_str(), w->path.c_str()) != 0)
        w->wrong = w->path + ": cannot be renamed: " + strerror(errno);
    if (!w->wrong.empty()) unlink(temporary.c_str());
    return w->wrong;
}

inline std::string write_text_file(const std::string& path, const std::string& text) {
    FileWriter w;
    if (!writer_create(&w, path).empty()) return w.wrong;
    writer_put(w, text.data(), text.size());
    w.expected = text.size();
    return writer_close(&w);
}

inline std::string file_crc(const std::string& path, size_t* bytes, uint32_t* crc) {
    FILE* f = fopen(path.c_str(), "rb");
    if (!f) return path + ": " + strerror(errno);
    std::vector<unsigned char> buffer(size_t(1) << 20);
    *bytes = 0, *crc = 0;
    for (size_t n; (n = fread(buffer.data(), 1, buffer.size(), f)) > 0;)
        *bytes += n, *crc = uint32_t(crc32(*crc, buffer.data(), uInt(n)));
    bool good = !ferror(f);
    fclose(f);
    return good ? "" : path + ": cannot be read";
}

// The manifest's checksum is that of its text without the checksum; parsed and printed again a JSON
// text is the same. Bytes that are no UTF-8 (in a path of the configuration) are replaced.
inline std::string manifest_text(const nlohmann::json& manifest) {
    return manifest.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

inline uint32_t manifest_crc(nlohmann::json manifest) {
    manifest.erase("crc32");
    std::string text = manifest_text(manifest);
    return uint32_t(
        crc32(0, reinterpret_cast<const unsigned char*>(text.data()), uInt(text.size())));
}
