// test_report.cpp - what is printed for people: numbers, step lines on terminals and pipes, help
#include <pty.h>
#include "../../llmc/io/help.h"
#include "../../llmc/io/logger.h"
#include "../harness/testing.h"

using namespace llmc;

TEST(Numbers, ReadAsPeopleSayThem) {
    EXPECT_EQ(count_text(405853388800.), "405.9B");
    EXPECT_EQ(count_text(124439808), "124.4M");
    EXPECT_EQ(count_text(83200), "83.2k");
    EXPECT_EQ(count_text(512), "512");
    EXPECT_EQ(count_text(15e12), "15.0T");
    EXPECT_EQ(bytes_text(6.7 * std::pow(2., 40)), "6.7 TiB");
    EXPECT_EQ(bytes_text(1024), "1.0 KiB");
    EXPECT_EQ(bytes_text(1023), "1023 bytes");
    EXPECT_EQ(duration_text(7.4), "7s");
    EXPECT_EQ(duration_text(80), "1m20s");
    EXPECT_EQ(duration_text(7380), "2h03m");
    EXPECT_EQ(rate_text(1.2e6), "1.20M");
}

// ----------------------------------------------------------------------------
// step lines

// A run of up to 100 steps shows every step, a longer one a tenth, and always first and last.
TEST(StepLines, ShortRunsShowAllAndLongOnesATenth) {
    int shown = 0;
    for (int64_t step = 1; step <= 100; step++) shown += is_shown(0, step == 1, step, 100);
    EXPECT_EQ(shown, 100);
    shown = 0;
    for (int64_t step = 1; step <= 205; step++) shown += is_shown(0, step == 1, step, 205);
    EXPECT_EQ(shown, 1 + 20 + 1);
    EXPECT_TRUE(is_shown(50, true, 51, 205)) << "the first of a resumed run";
    EXPECT_TRUE(is_shown(50, false, 100, 205));
    EXPECT_TRUE(is_shown(50, false, 205, 205)) << "the last";
    EXPECT_FALSE(is_shown(50, false, 110, 205));
}

// A rate above the peak shows that the peak was measured badly, not that the machine is faster.
TEST(StepLines, NoShareIsAboveAll) {
    StepReport r = {10, 99, 3.21, 0.9, 3e-4, 0.0123, 1024, 10240, 0.41};
    EXPECT_EQ(step_text(r, 2),
              "step  10/99 | loss 3.2100 | norm 0.90 | lr 3.0e-04 | 12.3 ms | 83.3k tok/s | "
              "mfu 41.0% | eta 2s");
    r.mfu = 1.34;
    EXPECT_HAS(step_text(r, 2), "| mfu ~100% |");
}

// Run `print` on a terminal of that many columns, and return the text that the terminal got.
template <typename F> std::string on_terminal(unsigned short columns, F print) {
    int master, slave;
    struct winsize size = {24, columns, 0, 0};
    if (openpty(&master, &slave, nullptr, nullptr, &size)) return "no terminal";
    fflush(stdout);
    int before = dup(STDOUT_FILENO);
    dup2(slave, STDOUT_FILENO);
    print();
    fflush(stdout);
    dup2(before, STDOUT_FILENO);
    close(slave);
    close(before);

    // Read until the closed end has no more text: a read returns only what there is so far.
    std::string all;
    char text[4096];
    for (ssize_t n; (n = read(master, text, sizeof(text))) > 0;)
        all.append(text, size_t(n));
    close(master);
    return all;
}

// On a terminal each step overwrites the line, cut to the columns. Other output begins a new line.
TEST(StepLines, ATerminalHasOneLineInPlace) {
    auto steps = [](int64_t every) {
        return on_terminal(20, [&] {
            Logger log;
            open_display(log, every, false);
            show_step(log, "step 1 and a rest that is too long", true, 1, 3);
            show_step(log, "step 2", false, 2, 3);
            finish_line(log);
            finish_line(log);
            printf("val loss\n");
            show_step(log, "step 3", false, 3, 3);
        });
    };
    EXPECT_EQ(steps(0),
              "\rstep 1 and a rest t\x1b[K\rstep 2\x1b[K\r\nval loss\r\n\rstep 3\x1b[K\r\n");
    EXPECT_HAS(steps(1), " t\x1b[K\r\n\rstep 2\x1b[K\r\nval") << "--log-every 1: each line stays";
}

TEST(StepLines, ThePipeGetsLinesAndTheLogGetsAll) {
    Logger log;
    open_display(log, 5, false); // under a test runner the output is a pipe or a file
    if (log.columns) GTEST_SKIP() << "on a terminal";
    ASSERT_EQ(log_open(log, scratch("log.jsonl"), 0, {{"config", 1}}), "");

    testing::internal::CaptureStdout();
    for (int64_t step = 1; step <= 12; step++)
        ASSERT_EQ(log_step(log, {step, 12, 1, 1, 1, 1, 8, 8 * step, 0.1}), "");
    std::string text = testing::internal::GetCapturedStdout();
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 4) << text; // 1, 5, 10, 12
    EXPECT_HAS(text, "step  10/12 ");

    std::string all = read_file(scratch("log.jsonl"));
    EXPECT_EQ(std::count(all.begin(), all.end(), '\n'), 13);

    // The log lacks the keys of techniques that the run does not use.
    for (const char* key : {"loss_scale", "cp_imbalance", "max_vio", "least_load", "dropped_share"})
        EXPECT_EQ(all.find(key), std::string::npos) << key;
    StepReport even = {13, 13, 1, 1, 1, 1, 8, 104, 0.1};
    even.more = {{"max_vio", 0}, {"least_load", 1}, {"dropped_share", 0}};
    ASSERT_EQ(log_step(log, even), "");
    nlohmann::json last = nlohmann::json::parse(read_file(scratch("log.jsonl")).substr(all.size()));
    EXPECT_EQ(last["max_vio"], 0);
    EXPECT_EQ(last["least_load"], 1);
    EXPECT_EQ(last["dropped_share"], 0);
}

// ----------------------------------------------------------------------------
// help

TEST(Help, ProgramsNameTheirFlagsAndFitThePage) {
    std::string together;
    for (const Program& p : programs())
        for (size_t width : {HELP_WIDTH, HELP_NARROW}) {
            std::string help = help_text(p, width);
            together += help;
            EXPECT_EQ(help.rfind(p.name, 0), 0u);
            EXPECT_LT(help.find(concat("  ", p.name, " ")), help.find("\n  --"));

            // Choices and examples are not broken across lines. They fit the wider page.
            std::istringstream lines(help);
            for (std::string line; std::getline(lines, line);) {
                bool whole = has(line, "tp-pp-dp|") || has(line, p.name);
                EXPECT_LE(line.size(), whole ? HELP_WIDTH : width) << line;
            }
        }
    for (char& c : together)
        if (c == '\n') c = ' '; // a group's name may be broken across lines

    for (const Flag& f : config_table())
        EXPECT_HAS(together, (*f.name ? "--" : "") + std::string(*f.name ? f.name : f.help));
    for (const Preset& p : model_presets()) EXPECT_HAS(together, p.name);
}

TEST(Help, TheVersionSaysWhatIsBuiltIn) {
    std::string version = version_text(program_named("plan_gpt"));
    EXPECT_EQ(version.rfind(std::string("plan_gpt ") + VERSION + ", built by ", 0), 0u);
    EXPECT_HAS(version, "OpenMP");
    EXPECT_HAS(version, LLMC_KERNELS ? " CUDA kernels" : " no CUDA kernels");
#define DEFINED_FOR_THIS_TEST 1
    EXPECT_TRUE(LLMC_DEFINED(DEFINED_FOR_THIS_TEST));
    EXPECT_FALSE(LLMC_DEFINED(DEFINED_FOR_NO_TEST));
}
