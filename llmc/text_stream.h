// text_stream.h - the bytes of a text file: plain, gzip, zstd, standard input, or parquet through Python
//   Kinds by name: .txt, and .jsonl for JSON lines; behind it .gz or .zst; .parquet, which a child
//   process (dev/data/parquet_text.py, with Python and pyarrow) prints as JSON lines; - is standard
//   input, JSON lines too.
//   A compressed file that is cut short is an error, not an end.
#pragma once
#include <sys/stat.h>
#include <sys/wait.h>
#include <zlib.h>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>
#ifdef WITH_ZSTD
#include <zstd.h>
#endif

struct TextInput {
    std::string path, packed; // packed: "", ".gz", ".zst", ".parquet" or "-"
    bool lines = false;       // of JSON; else a text
    size_t bytes = 0;         // of the file
    int64_t modified = 0;     // seconds since 1970
};

inline std::string input_describe(TextInput* input, const std::string& path) {
    *input = {path, "", false, 0, 0};
    if (path == "-") return input->packed = "-", input->lines = true, "";
    std::string name = path;
    for (const char* packed : {".gz", ".zst", ".parquet"})
        if (name.ends_with(packed))
            input->packed = packed, name.resize(name.size() - strlen(packed));
    input->lines = name.ends_with(".jsonl") || input->packed == ".parquet";
    if (!input->lines && !name.ends_with(".txt"))
        return path +
               ": wants a name that ends in .txt or .jsonl, and after it .gz or .zst where "
               "it is compressed, or in .parquet";
#ifndef WITH_ZSTD
    if (input->packed == ".zst")
        return path + ": this program is built without zstd: install libzstd-dev and make again";
#endif
    struct stat s;
    if (stat(path.c_str(), &s) != 0) return path + ": " + strerror(errno);
    if (!S_ISREG(s.st_mode)) return path + ": is no file";
    input->bytes = size_t(s.st_size), input->modified = int64_t(s.st_mtime);
    return "";
}

struct InputStream {
    const TextInput* input = nullptr;
    FILE* file = nullptr; // the bytes as they are, or zstd's, or a pipe
    gzFile gz = nullptr;
#ifdef WITH_ZSTD
    ZSTD_DStream* zst = nullptr;
    std::vector<char> buffer = {};
    ZSTD_inBuffer in = {nullptr, 0, 0};
    size_t open_frame = 0; // 0 between frames
#endif
    std::string wrong = "";
};

inline std::string shell_quoted(const std::string& text) {
    std::string quoted = "'";
    for (char c : text) quoted += c == '\'' ? "'\\''" : std::string(1, c);
    return quoted + "'";
}

// Parquet is read by a child process that prints JSON lines.
inline std::string parquet_open(InputStream* s, const std::string& script,
                                const std::string& field) {
    const std::string& path = s->input->path;
    struct stat found;
    if (stat(script.c_str(), &found) != 0)
        return path + ": parquet files are read by " + script + ", which is not there";
    int status = system("python3 -c 'import pyarrow.parquet' >/dev/null 2>&1");
    if (WEXITSTATUS(status) == 127)
        return path + ": parquet files need Python: install python3, and pip install pyarrow";
    if (status != 0) return path + ": parquet files need pyarrow: pip install pyarrow";
    std::string command = "exec python3 " + shell_quoted(script) + " --out - --column " +
                          shell_quoted(field) + " -- " + shell_quoted(path);
    s->file = popen(command.c_str(), "re");
    return s->file ? "" : path + ": python3 cannot be started: " + strerror(errno);
}

inline std::string stream_open(InputStream* s, const TextInput& input, const std::string& script,
                               const std::string& field) {
    *s = {};
    s->input = &input;
    if (input.packed == ".parquet") return parquet_open(s, script, field);
    if (input.packed == ".gz") {
        s->gz = gzopen(input.path.c_str(), "rb");
        if (!s->gz) return input.path + ": " + strerror(errno);
        gzbuffer(s->gz, 1 << 17);
        return input.bytes > 0 && !gzdirect(s->gz) ? "" : input.path + ": is no gzip file";
    }
    s->file = input.packed == "-" ? stdin : fopen(input.path.c_str(), "rb");
    if (!s->file) return input.path + ": " + strerror(errno);
#ifdef WITH_ZSTD
    if (input.packed != ".zst") return "";
    s->zst = ZSTD_createDStream();
    ZSTD_DCtx_setParameter(s->zst, ZSTD_d_windowLogMax, 31); // files made with --long=31
    s->buffer.resize(ZSTD_DStreamInSize());
    s->open_frame = 1; // an empty file is none
#endif
    return "";
}

#ifdef WITH_ZSTD
inline size_t zst_read(InputStream& s, char* to, size_t bytes) {
    ZSTD_outBuffer out = {to, bytes, 0};
    while (out.pos == 0) {
        if (s.in.pos == s.in.size)
            s.in = {s.buffer.data(), fread(s.buffer.data(), 1, s.buffer.size(), s.file), 0};
        bool end = s.in.size == 0; // of the file; zstd may still hold bytes
        if (end && s.open_frame == 0) return 0;
        s.open_frame = ZSTD_decompressStream(s.zst, &out, &s.in);
        if (ZSTD_isError(s.open_frame))
            s.wrong = s.input->path + ": " + ZSTD_getErrorName(s.open_frame);
        else if (end && out.pos == 0)
            s.wrong = s.input->path + ": is cut short: its zstd frame goes on";
        if (!s.wrong.empty()) return 0;
    }
    return out.pos;
}
#endif

// Some of the next bytes; 0 at the end, or where s.wrong says what is wrong.
inline size_t stream_read(InputStream& s, char* to, size_t bytes) {
    if (s.gz) {
        int n = gzread(s.gz, to, unsigned(std::min(bytes, size_t(1) << 30))), error = Z_OK;
        const char* says = gzerror(s.gz, &error);
        if (n > 0) return size_t(n);
        if (error == Z_BUF_ERROR)
            s.wrong = s.input->path + ": is cut short: its gzip stream goes on";
        else if (error != Z_OK)
            s.wrong = s.input->path + ": " + says;
        return 0;
    }
#ifdef WITH_ZSTD
    if (s.zst) return zst_read(s, to, bytes);
#endif
    size_t n = fread(to, 1, bytes, s.file);
    if (n == 0 && ferror(s.file)) s.wrong = s.input->path + ": " + strerror(errno);
    return n;
}

// Of the file's bytes, how many are read; 0 where nobody knows.
inline size_t stream_position(const InputStream& s) {
    if (s.gz) return size_t(gzoffset(s.gz));
    bool pipe = s.input->packed == ".parquet" || s.input->packed == "-";
    return pipe ? 0 : size_t(ftello(s.file));
}

inline void stream_close(InputStream& s) {
    if (s.gz) gzclose(s.gz);
#ifdef WITH_ZSTD
    if (s.zst) ZSTD_freeDStream(s.zst);
#endif
    bool child = s.file && s.input->packed == ".parquet";
    if (child && pclose(s.file) != 0 && s.wrong.empty())
        s.wrong = s.input->path + ": cannot be read; the lines above say why";
    if (s.file && !child) fclose(s.file);
    s.file = nullptr, s.gz = nullptr;
}
