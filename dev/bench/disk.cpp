// disk.cpp - bytes a second that offload's file moves, as a share of what dd gets with O_DIRECT
//   Rounds of both take turns, and the best of each counts: the disk is shared.
//   usage: bench_disk [FOLDER] [MIB]
#include "../../llmc/io/mfu.h"
#include "../../llmc/offload.h"

using namespace llmc;

// Seconds that dd takes for a file of its own.
static double dd(const std::string& arguments) {
    double start = clock_seconds();
    std::string line = "dd bs=1M conv=notrunc status=none " + arguments;
    LLMC_USER_CHECK(system(line.c_str()) == 0, "%s: failed", line.c_str());
    return clock_seconds() - start;
}

// Seconds that all of `memory` takes, by the file's threads.
static double move(Disk& d, Way way, std::vector<unsigned char>& memory) {
    double start = clock_seconds();
    auto move = std::make_shared<DiskMove>();
    disk_start(d, move, way, memory.data(), 0, memory.size(), Cpu{});
    std::string wrong = disk_finish(d, *move);
    LLMC_USER_CHECK(wrong.empty(), "%s", wrong.c_str());
    return clock_seconds() - start;
}

int main(int argc, char** argv) {
    std::string folder = argc > 1 ? argv[1] : "/tmp";
    size_t mib = argc > 2 ? strtoull(argv[2], nullptr, 10) : 512;
    std::vector<unsigned char> memory(mib * DISK_BLOCK);
    for (size_t i = 0; i < memory.size(); i++) memory[i] = (unsigned char)(i * 2654435761u >> 13);
    Disk d;
    std::string wrong = disk_open(d, folder, memory.size());
    LLMC_USER_CHECK(wrong.empty(), "%s", wrong.c_str());

    std::string peer = folder + "/bench_disk.dd", count = concat(" count=", mib);
    double best[4] = {1e30, 1e30, 1e30, 1e30}; // write, read; dd's
    for (int round = 0; round < 4; round++) {
        double seconds[4] = {move(d, Way::TO_DISK, memory), move(d, Way::FROM_DISK, memory),
                             dd("if=/dev/zero of=" + peer + count + " oflag=direct"),
                             dd("if=" + peer + " of=/dev/null" + count + " iflag=direct")};
        for (int i = 0; i < 4; i++) best[i] = std::min(best[i], seconds[i]);
    }
    unlink(peer.c_str());
    printf("%s, %zu MiB, %s\n", folder.c_str(), mib, d.direct ? "O_DIRECT" : "through the page cache");
    for (int i = 0; i < 2; i++)
        printf("%-6s %8.1f MB/s, dd %8.1f MB/s: %.2f of it\n", i ? "read" : "write",
               double(memory.size()) / best[i] / 1e6, double(memory.size()) / best[i + 2] / 1e6,
               best[i + 2] / best[i]);
}
