// text_stream.h - the bytes of a text file: plain, gzip, zstd, standard input, or parquet
//   Kinds, by the file's name:
//     .txt       text                     .jsonl  JSON lines
//     .gz .zst   after one of these: compressed; a file that is cut short is an error, not an end
//     .bin       16-bit tokens without a header, as nanoGPT writes them
//     .parquet   a child process (dev/data/parquet_text.py, with Python and pyarrow) prints it as
//                JSON lines
//     -          standard input, JSON lines
//   Errors: "" or one line that says what is wrong. While reading, that line is in
//   InputStream::wrong, which the caller checks.
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
#include <zstd_errors.h>
#endif
#include "../comm/text.h"
#include "file_kind.h"

namespace llmc {

// A file that --data names. Its endings say how the bytes are packed, and what they hold.
struct TextInput {
    std::string path;
    std::string packed;   // "", ".gz", ".zst", ".parquet" or "-"
    bool lines = false;   // JSON lines; otherwise plain text
    size_t bytes = 0;     // on disk
    int64_t modified = 0; // seconds since 1970
    bool tokens = false;  // 16-bit tokens; otherwise text
};

// Check that a file that is read as it is holds what its name says.
inline std::string check_plain(const TextInput& input) {
    // The first bytes reveal other kinds of files.
    char head[16] = "";
    size_t n = 0;
    if (FILE* f = fopen(input.path.c_str(), "rb")) {
        n = fread(head, 1, sizeof(head), f);
        fclose(f);
    }
    std::string kind = kind_by_bytes(std::string_view(head, n));
    if (!kind.empty() && !input.tokens)
        return input.path + ": is " + kind + ", which its name does not say: " +
               "give it its own ending, or give the text itself, in UTF-8";

    // Refuse a shard, which needs no preparation, and a file with half a token.
    int32_t word = 0;
    memcpy(&word, head, 4);
    if (input.tokens && (word == 20240520 || word == 20240801))
        return input.path + ": is a token shard already: train_gpt --data " +
               shell_word(input.path);
    if (input.tokens && input.bytes % 2)
        return concat(input.path, ": ", input.bytes, " bytes are no tokens of 16 bits each");
    return "";
}

// Find what an input is from its name, and from what is on disk.
inline std::string input_describe(TextInput* input, const std::string& path) {
    // Standard input is JSON lines, of unknown size and time.
    *input = {path, "", false, 0, 0};
    if (path == "-") {
        input->packed = "-";
        input->lines = true;
        return "";
    }

    // "x.jsonl.gz": first how it is packed, then what it holds.
    std::string name = path;
    for (const char* packed : {".gz", ".zst", ".parquet"}) {
        if (!name.ends_with(packed)) continue;
        input->packed = packed;
        name.resize(name.size() - strlen(packed));
    }

    // The ending decides what it holds.
    if (name.ends_with(".json"))
        return no_json_lines(path);
    input->lines = name.ends_with(".jsonl") || input->packed == ".parquet";
    input->tokens = input->packed.empty() && name.ends_with(".bin");
    if (!input->lines && !input->tokens && !name.ends_with(".txt"))
        return path +
               ": wants a name that ends in .txt or .jsonl, and after it .gz or .zst where "
               "it is compressed, in .parquet, or in .bin where it holds nanoGPT's tokens";
#ifndef WITH_ZSTD
    if (input->packed == ".zst")
        return path + ": this program is built without zstd: install libzstd-dev and make again";
#endif

    // Note size and time, which identify an input: one that resumes must find the same input.
    struct stat s;
    if (stat(path.c_str(), &s) != 0)
        return path + ": " + strerror(errno);
    if (!S_ISREG(s.st_mode))
        return path + ": is no file";
    input->bytes = s.st_size;
    input->modified = s.st_mtime;
    return input->packed.empty() ? check_plain(*input) : "";
}

// An input that is open for reading, through one of these handles.
struct InputStream {
    const TextInput* input = nullptr;
    FILE* file = nullptr; // plain or compressed bytes, or a pipe
    std::vector<char> buffer = {};
    bool packed_gz = false;
    z_stream gz = {};
    bool between = false; // between two members of a gzip file
    size_t members = 0;   // gzip members that are read to their ends
#ifdef WITH_ZSTD
    ZSTD_DStream* zst = nullptr;
    ZSTD_inBuffer in = {nullptr, 0, 0};
    size_t open_frame = 0; // as zstd returns it: 0 between frames
#endif
    std::string wrong = ""; // the first thing that failed
    std::string note = "";  // a remark for the user at the end
};

// Start the child process that prints a parquet file as JSON lines.
inline std::string parquet_open(InputStream* s, const std::string& script,
                                const std::string& field) {
    // Look for the script.
    const std::string& path = s->input->path;
    struct stat found;
    if (stat(script.c_str(), &found) != 0)
        return path + ": parquet files are read by " + script + ", which is not there";

    // Look for Python and pyarrow first: Python's own message would take ten lines. With -I
    // Python imports nothing from the current folder and ignores PYTHONPATH: a folder of data may
    // hold somebody else's pyarrow.py.
    int status = system("python3 -I -c 'import pyarrow.parquet' >/dev/null 2>&1");
    if (WEXITSTATUS(status) == 127)
        return path + ": parquet files need Python: install python3, and pip install pyarrow";
    if (status != 0)
        return path + ": parquet files need pyarrow: pip install pyarrow, for all users or into "
                      "the environment whose python3 comes first (--user is not looked at)";

    // Start with exec, so that pclose() waits for Python itself and not for a shell.
    std::string what = field.empty() ? " --rows -- " : " --column " + shell_quoted(field) + " -- ";
    std::string command =
        "exec python3 -I " + shell_quoted(script) + " --out -" + what + shell_quoted(path);
    s->file = popen(command.c_str(), "re");
    return s->file ? "" : path + ": python3 cannot be started: " + strerror(errno);
}

// Open an input. script: the program that reads parquet; field: the column with the text; "": all.
inline std::string stream_open(InputStream* s, const TextInput& input, const std::string& script,
                               const std::string& field) {
    *s = {};
    s->input = &input;
    if (input.packed == ".parquet")
        return parquet_open(s, script, field);

    // Open everything else as a file.
    s->file = input.packed == "-" ? stdin : fopen(input.path.c_str(), "rb");
    if (!s->file)
        return input.path + ": " + strerror(errno);

    // gzip: members one after the other. Adding 16 to zlib's largest window makes it
    // expect a gzip header.
    if (input.packed == ".gz") {
        s->packed_gz = true;
        s->buffer.resize(1 << 17);
        s->gz = {};
        if (inflateInit2(&s->gz, MAX_WBITS + 16) != Z_OK)
            return input.path + ": no memory to unpack it";
    }
#ifdef WITH_ZSTD
    if (input.packed != ".zst") return "";

    // zstd: frames one after the other, with windows as large as --long=31 makes them.
    s->zst = ZSTD_createDStream();
    ZSTD_DCtx_setParameter(s->zst, ZSTD_d_windowLogMax, 31);
    s->buffer.resize(ZSTD_DStreamInSize());
    s->open_frame = 1; // refuse an empty file, which holds no frame
#endif
    return "";
}

// Say that a compressed file is damaged, and roughly where.
inline std::string damaged_text(const InputStream& s, const char* what) {
    return concat(s.input->path, ": is damaged in or before byte ", ftello(s.file), " of ",
                  s.input->bytes, " (", what, "): get it again");
}

#ifdef WITH_ZSTD
// Read some of the next bytes of a zstd file. Returns 0 at the end, or with an error in s.wrong.
inline size_t zst_read(InputStream& s, char* to, size_t bytes) {
    ZSTD_outBuffer out = {to, bytes, 0};
    // A call may consume input without giving output, so repeat until there is some.
    while (out.pos == 0) {
        if (s.in.pos == s.in.size)
            s.in = {s.buffer.data(), fread(s.buffer.data(), 1, s.buffer.size(), s.file), 0};

        // At the file's end zstd may still hold bytes. The end is good only between two frames.
        bool end = s.in.size == 0;
        if (end && s.open_frame == 0) return 0;
        s.open_frame = ZSTD_decompressStream(s.zst, &out, &s.in);
        bool known = ZSTD_getErrorCode(s.open_frame) != ZSTD_error_prefix_unknown;
        if (ZSTD_isError(s.open_frame))
            s.wrong = known ? damaged_text(s, ZSTD_getErrorName(s.open_frame))
                            : s.input->path + ": is no zstd file, or other bytes follow its frames";
        else if (end && out.pos == 0)
            s.wrong = s.input->path + ": is cut short: its zstd frame goes on";
        if (!s.wrong.empty()) return 0;
    }
    return out.pos;
}
#endif

// Make sure that there are compressed bytes to read. Returns false at the end of the file.
inline bool gz_fill(InputStream& s) {
    if (s.gz.avail_in > 0) return true;
    s.gz.next_in = reinterpret_cast<Bytef*>(s.buffer.data());
    s.gz.avail_in = uInt(fread(s.buffer.data(), 1, s.buffer.size(), s.file));
    return s.gz.avail_in > 0;
}

// Skip what follows the last member. Zeros fill a tape's block and mean nothing; other bytes may be
// lost text, so note them.
inline void gz_leave_rest(InputStream& s) {
    s.between = true;
    if (s.gz.avail_in > 0 && *s.gz.next_in != 0)
        s.note = s.input->path + ": bytes behind its last gzip member are left out: is it whole?";
    while (gz_fill(s))
        s.gz.avail_in = 0;
}

// Unpack as much as there is room for, and check the result.
inline void gz_step(InputStream& s) {
    int status = inflate(&s.gz, Z_NO_FLUSH);
    s.between = status == Z_STREAM_END;
    s.members += s.between;
    if (status == Z_OK || status == Z_STREAM_END || status == Z_BUF_ERROR)
        return;

    // Without gzip's first two bytes this is another kind of data, not a damaged member.
    bool header = s.gz.total_out == 0 && s.gz.total_in <= 2;
    if (header && s.members > 0)
        gz_leave_rest(s);
    else if (header)
        s.wrong = s.input->path + ": is no gzip file";
    else
        s.wrong = damaged_text(s, s.gz.msg ? s.gz.msg : "bad data");
}

// Read some of the next bytes of a gzip file. Returns 0 at the end, or with an error in s.wrong.
inline size_t gz_read(InputStream& s, char* to, size_t bytes) {
    size_t most = std::min(bytes, size_t(1) << 30); // zlib counts in ints
    s.gz.next_out = reinterpret_cast<Bytef*>(to);
    s.gz.avail_out = uInt(most);

    // A call may consume input without giving output, so repeat until there is some.
    while (s.gz.avail_out == most && s.wrong.empty()) {
        if (gz_fill(s)) {
            bool begins = s.between && *s.gz.next_in == 0x1f;
            if (s.between && !begins) {
                gz_leave_rest(s);
                return 0;
            }
            if (begins) inflateReset(&s.gz);
            gz_step(s);
            continue;
        }

        // At the file's end: accept it after a member, refuse it before the first or inside one.
        if (s.between) return 0;
        bool empty = s.members == 0 && s.gz.total_in == 0;
        s.wrong = s.input->path +
                  (empty ? ": is no gzip file" : ": is cut short: its gzip stream goes on");
    }
    return s.wrong.empty() ? most - s.gz.avail_out : 0;
}

// Read some of the next bytes. Returns 0 at the end, or with an error in s.wrong.
inline size_t stream_read(InputStream& s, char* to, size_t bytes) {
    if (s.packed_gz)
        return gz_read(s, to, bytes);
#ifdef WITH_ZSTD
    if (s.zst) return zst_read(s, to, bytes);
#endif
    size_t n = fread(to, 1, bytes, s.file);
    if (n == 0 && ferror(s.file))
        s.wrong = s.input->path + ": " + strerror(errno);
    return n;
}

// How many bytes of the file on disk have been read, or 0 if that is unknown. Progress is measured
// against the file's size, so these are not bytes of text.
inline size_t stream_position(const InputStream& s) {
    bool pipe = s.input->packed == ".parquet" || s.input->packed == "-";
    return pipe ? 0 : size_t(ftello(s.file));
}

// Close the input. A child process reports here that it failed.
inline void stream_close(InputStream& s) {
    if (s.packed_gz) inflateEnd(&s.gz);
#ifdef WITH_ZSTD
    if (s.zst) ZSTD_freeDStream(s.zst);
#endif
    // pclose() returns the child's status; stdin is closed like any other file.
    bool child = s.file && s.input->packed == ".parquet";
    if (child && pclose(s.file) != 0 && s.wrong.empty())
        s.wrong = s.input->path + ": cannot be read; the lines above say why";
    if (s.file && !child)
        fclose(s.file);
    s.file = nullptr;
    s.packed_gz = false;
}

} // namespace llmc
