// test_life.cpp - a run's life: a second run, a signal, a full disk, ruined weights lose nothing
//   Runs $TRAIN_GPT (default build/train_gpt). ROUNDS=200 sends signals at so many random moments.
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <chrono>
#include <csignal>
#include <functional>
#include <random>
#include <thread>
#include "../../llmc/io/model_shape.h"
#include "../../llmc/run/folder.h"
#include "../../llmc/run/limits.h"
#include "../harness/runs.h"
#include "small_models.h"

using nlohmann::json;

// A run in the background, with its output in a file. It is killed when this goes.
struct Child {
    pid_t pid = -1;
    std::string file;

    Child(const std::string& command, const std::string& output) : file(output) {
        pid = fork();
        if (pid > 0) return;
        prctl(PR_SET_PDEATHSIG, SIGKILL); // if the test is killed, so is the run

        // Under nohup a child would inherit that hang-ups are ignored.
        for (int number : STOP_SIGNALS)
            signal(number, SIG_DFL);
        std::string line = "exec " + with_its_program(command) + " >" + output + " 2>&1 </dev/null";
        execl("/bin/bash", "bash", "-c", line.c_str(), nullptr);
        _exit(127);
    }
    ~Child() {
        if (pid < 0) return;
        kill(pid, SIGKILL);
        waitpid(pid, nullptr, 0);
    }

    std::string text() const { return read_file(file); }

    // Wait until it has printed `part`.
    void wait_for_text(const std::string& part) const {
        for (int i = 0; i < 3000 && !has(text(), part); i++)
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        EXPECT_HAS(text(), part);
    }

    // Wait until it has printed the line of this step, of `steps` in all.
    void wait_for_step(int step, int steps) const {
        std::string number = concat(step, "/", steps, " |");
        wait_for_text(" " + number);
    }

    // Wait for its end: its exit status, or minus the number of the signal that ended it.
    int wait() {
        int status = 0;
        waitpid(pid, &status, 0);
        pid = -1;
        return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
    }
};

struct Life : Scratch {
    std::string small, out; // flags of a run of a second, and the folder it writes to
    void SetUp() override {
        Scratch::SetUp();
        small = "--layers 1 --heads 2 --channels 32 --seq 32 --micro-batch 4 --sample-tokens 0 "
                "--eval-tokens 256 --log-every 1 --data " + put("text.txt", numbered_lines(3000)) +
                " ";
        out = path("out");
    }

    // The names of a run's checkpoints, those that it has set aside included.
    std::vector<std::string> steps(const std::string& folder) const {
        std::vector<std::string> names;
        for (const fs::directory_entry& e : fs::directory_iterator(folder))
            if (has(e.path().filename().string(), "step_"))
                names.push_back(e.path().filename().string());
        std::sort(names.begin(), names.end());
        return names;
    }
    std::vector<std::string> steps() const { return steps(out); }

    // Begin a run in the background, with its output in the file "said".
    Child begin(const std::string& flags) const {
        fs::remove(path("said"));
        return Child(program() + " " + small + flags, path("said"));
    }

    // Train so many steps at once, and half of them twice: the checkpoints have the same bits.
    // Returns what the whole run printed; `more` are flags of it alone.
    Ran goes_on(const std::string& flags, int64_t all, const std::string& more = "") const;

    // The lines of the log: those that account for time, or all others.
    std::vector<json> lines(bool of_time) const {
        std::vector<json> found;
        std::ifstream in(out + "/log.jsonl");
        for (std::string line; std::getline(in, line);) {
            json j = json::parse(line);
            if (j.contains("wall") == of_time) found.push_back(j);
        }
        return found;
    }
    std::vector<json> log() const { return lines(false); }

    // How many steps the log has; also while a run writes it.
    int log_steps() const {
        std::string text = read_file(out + "/log.jsonl");
        return int(std::count(text.begin(), text.end(), '\n')) - 1;
    }
    json manifest(const std::string& step) const {
        return json::parse(read_file(out + "/" + step + "/manifest.json"));
    }
};

typedef std::vector<std::string> Names;

// flock() as the system has it, or failing with this error.
static int flock_fails = 0;
extern "C" int flock(int fd, int how) noexcept {
    if (!flock_fails) return int(syscall(SYS_flock, fd, how));
    errno = flock_fails;
    return -1;
}

// ----------------------------------------------------------------------------
// the folder is one run's

// A new run in the folder of another one is refused, and the folder stays as it was.
TEST_F(Life, AUsedFolderIsRefusedAndUntouched) {
    ASSERT_EQ(start(small + "--steps 6 --save-every 2 --out " + out).status, 0);
    std::string before = read_file(out + "/log.jsonl");
    Ran again = start(small + "--steps 2 --lr 0.01 --save-every 1 --out " + out);
    EXPECT_EQ(again.status, 1);
    EXPECT_HAS(again.text, "holds a run at step 6: --resume goes on with it");
    EXPECT_EQ(steps(), (Names{"step_00000004", "step_00000006"}));
    EXPECT_EQ(read_file(out + "/log.jsonl"), before);

    // Without its checkpoints the log is still a run's.
    for (const std::string& name : steps())
        fs::remove_all(out + "/" + name);
    EXPECT_HAS(start(small + "--steps 2 --out " + out).text, "holds a run's log");
    EXPECT_EQ(read_file(out + "/log.jsonl"), before);
}

// A second run in a folder where one is writing is refused; a run that only reads is not.
TEST_F(Life, ASecondRunIsToldAndAReaderIsNot) {
    Child first = begin("--steps 1000000 --save-every 5 --out " + out);
    first.wait_for_step(12, 1000000);
    Ran second = start(small + "--steps 9 --resume --out " + out);
    EXPECT_EQ(second.status, 1);
    EXPECT_HAS(second.text, concat("another run is writing there (process ", first.pid, ")"));

    // A run that only evaluates reads a checkpoint, and leaves the log to the other.
    size_t lines = log().size();
    Ran looks = start("--eval --resume --out " + out);
    EXPECT_EQ(looks.status, 0) << looks.text;
    EXPECT_HAS(looks.text, "weights: " + out + "/step_");
    EXPECT_HAS(looks.text, "val loss ");

    // The first run goes on undisturbed until it is stopped.
    kill(first.pid, SIGTERM);
    EXPECT_EQ(first.wait(), 128 + SIGTERM);
    std::vector<json> all = log();
    EXPECT_GE(all.size(), lines);
    for (size_t i = 1; i < all.size(); i++)
        EXPECT_EQ(all[i]["step"], i);

    // The lock ends with its process, so nothing has to be removed by hand.
    EXPECT_EQ(start(small + "--steps 9 --resume --out " + out).status, 0);
}

// A file system that has no locks is used all the same, and a note says what it cannot do.
TEST_F(Life, AFolderWithoutLocksIsSaid) {
    llmc::Run run;
    run.config.out = out, run.config.steps = 1;
    for (int error : {ENOLCK, EOPNOTSUPP, 0}) {
        flock_fails = error;
        testing::internal::CaptureStderr();
        take_folder(run);
        std::string why = concat("note: --out ", out, " cannot be locked (", strerror(error),
                                 "): see that no second run writes there\n");
        EXPECT_EQ(testing::internal::GetCapturedStderr(), error ? why : "");
    }

    // A lock that somebody holds is a refusal.
    flock_fails = EWOULDBLOCK;
    std::string unlocked;
    EXPECT_HAS(lock_folder(out, &unlocked), ": another run is writing there");
    EXPECT_EQ(unlocked, "");
    flock_fails = 0;
}

// Evaluating and sampling leave the log as it is. Without --resume they are refused, because they
// would take new weights.
TEST_F(Life, WhoOnlyLooksNeverWritesTheLog) {
    ASSERT_EQ(start(small + "--steps 3 --out " + out).status, 0);
    std::string before = read_file(out + "/log.jsonl");
    for (std::string flags : {"--eval --resume", "--steps 0 --sample-tokens 4 --resume"})
        EXPECT_EQ(start(small + flags + " --out " + out).status, 0);
    Ran forgot = start(small + "--eval --out " + out);
    EXPECT_EQ(forgot.status, 1);
    EXPECT_HAS(forgot.text, "holds a run at step 3: --resume takes its weights");
    EXPECT_EQ(read_file(out + "/log.jsonl"), before);
    EXPECT_HAS(start(small + "--eval").text, "weights: new, from --seed 1337");
}

// The parents of --out are made too.
TEST_F(Life, FoldersAboveAreMade) {
    EXPECT_EQ(start(small + "--steps 1 --out " + path("a/b/c")).status, 0);
    EXPECT_TRUE(fs::exists(path("a/b/c/step_00000001")));
}

// ----------------------------------------------------------------------------
// going on

// With --resume, flags that are not given take the checkpoint's values.
TEST_F(Life, FlagsThatAreLeftOutAreTheCheckpoints) {
    ASSERT_EQ(start(small + "--steps 4 --lr 0.002 --out " + out).status, 0);
    Ran sample = start("--resume --steps 0 --sample-tokens 8 --seed 7 --out " + out);
    EXPECT_EQ(sample.status, 0) << sample.text;
    EXPECT_HAS(sample.text, "weights: " + out + "/step_00000004");

    // A flag that is given wins, and a note names the difference.
    Ran other = start("--resume --steps 6 --lr 0.001 --sample-tokens 0 --out " + out);
    EXPECT_EQ(other.status, 0) << other.text;
    EXPECT_HAS(other.text, "note: this run differs from its checkpoint: --steps was 4, "
                           "--lr was 0.002\n");
    EXPECT_EQ(manifest("step_00000006")["config"]["channels"], 32);
    EXPECT_EQ(manifest("step_00000006")["config"]["min-lr"], 0.0001); // a tenth of the new --lr
}

// adopt_flags() compares values, not texts, and leaves alone what it cannot take.
TEST_F(Life, AdoptingFlagsComparesValues) {
    Config c;
    c.lr = 0.001;
    c.given = {"lr", "heads"};
    c.heads = 4;
    json saved = {{"lr", 1e-3}, {"heads", 2}, {"layers", 3}, {"seq", "long"}, {"no-flag", 1},
                  {"out", "elsewhere"}, {"states", "none of ours"}};
    EXPECT_EQ(adopt_flags(c, saved), "--heads was 2");
    EXPECT_EQ(c.layers, 3);
    EXPECT_EQ(c.heads, 4);
    EXPECT_EQ(c.seq, Config().seq);  // the flag refuses the saved value
    EXPECT_EQ(c.states, "float");    // likewise
    EXPECT_EQ(c.out, "");            // not adopted: it does not describe what is trained

    // A default --min-lr follows a new --lr; one that was chosen stays.
    saved = {{"lr", 0.01}, {"min-lr", 0.01 / 10}};
    adopt_flags(c, saved);
    EXPECT_EQ(c.min_lr, -1);
    saved["min-lr"] = 0.0005;
    adopt_flags(c, saved);
    EXPECT_EQ(c.min_lr, 0.0005);
}

// A run goes on with the program that knows its flags, or one that knows more.
TEST(Resuming, ARunOfAnotherProgramIsRefusedWithItsName) {
    Config c;
    c.out = "run";
    c.adopted = {"lr", "lora"};
    c.program = &program_named("train_gpt");
    EXPECT_EQ(check_program(c),
              "--resume run: --lora is a flag of tune_gpt, which goes on with this run");
    c.program = &program_named("tune_gpt");
    EXPECT_EQ(check_program(c), "");
}

// A checkpoint that names a flag which is gone resumes, unless its run used the flag.
TEST_F(Life, FlagsThatAreGoneAreRefusedByName) {
    EXPECT_EQ(check_gone_flags({{"layers", 2}, {"expert-rounds", 1}}), "");
    EXPECT_EQ(check_gone_flags({{"layers", 2}}), "");
    EXPECT_EQ(check_gone_flags({{"fp8-history", 1024}, {"fp8-weights", "product"}}), "");
    EXPECT_HAS(check_gone_flags({{"expert-rounds", 4}}),
               "--resume: this checkpoint's run had --expert-rounds 4, which is gone");
    EXPECT_HAS(check_gone_flags({{"loss-scale-rule", "pytorch"}}), "the rule is Megatron's");
}

// --resume without a checkpoint begins a new run, and after the last step has nothing to do. To
// evaluate it needs a checkpoint.
TEST_F(Life, ResumeBeginsWhereThereIsNothingAndEndsWhereAllIsDone) {
    Ran fresh = start(small + "--resume --steps 2 --out " + out);
    EXPECT_EQ(fresh.status, 0);
    EXPECT_HAS(fresh.text, "holds no checkpoint: a new run begins");
    Ran done = start(small + "--resume --steps 2 --out " + out);
    EXPECT_EQ(done.status, 0);
    EXPECT_HAS(done.text, "nothing to train: --steps 2, the checkpoint has 2");
    EXPECT_EQ(done.text.find("val loss"), std::string::npos);
    Ran none = start(small + "--resume --eval --out " + path("none"));
    EXPECT_EQ(none.status, 1);
    EXPECT_HAS(none.text, "holds no whole checkpoint");
}

// The log's count of tokens goes on from the checkpoint's, also with another batch size.
TEST_F(Life, TokensCountOnWithAnotherBatch) {
    ASSERT_EQ(start(small + "--steps 3 --batch-tokens 256 --out " + out).status, 0);
    ASSERT_EQ(start(small + "--steps 5 --batch-tokens 128 --resume --out " + out).status, 0);
    std::vector<int64_t> tokens;
    for (const json& line : log())
        if (line.contains("tokens")) tokens.push_back(line["tokens"].get<int64_t>());
    EXPECT_EQ(tokens, (std::vector<int64_t>{256, 512, 768, 896, 1024}));
}

// A run that resumes from an older checkpoint renames the newer ones: .broken if they are, else
// .newer. None is deleted.
TEST_F(Life, BrokenCheckpointsAreSetAside) {
    // Damage the newest.
    ASSERT_EQ(start(small + "--steps 6 --save-every 2 --keep 3 --out " + out).status, 0);
    std::fstream(out + "/step_00000006/rank_00000.safetensors",
                 std::ios::in | std::ios::out | std::ios::binary)
        .seekp(2000)
        .put('x')
        .put('y');
    std::string resume = small + "--resume --save-every 1 --out " + out;
    Ran r = start(resume + " --steps 5");
    EXPECT_HAS(r.text, "resumed at step 4");
    EXPECT_EQ(steps(), (Names{"step_00000004", "step_00000005", "step_00000006.broken"}));

    // Resume from an older step on purpose.
    Ran back = start(resume + " --steps 5 --resume 4");
    EXPECT_HAS(back.text, "step_00000005 is now " + out + "/step_00000005.newer");
    EXPECT_EQ(back.status, 0) << back.text;
    EXPECT_EQ(read_file(out + "/step_00000005/rank_00000.safetensors"),
              read_file(out + "/step_00000005.newer/rank_00000.safetensors"));
    EXPECT_EQ(start(resume + " --steps 5 --resume 4").status, 0);
    EXPECT_TRUE(fs::exists(out + "/step_00000005.newer.2")) << "the first one is still there";
    EXPECT_HAS(start(resume + " --resume 3").text, "no whole checkpoint of step 3");
}

// ----------------------------------------------------------------------------
// signals

Ran Life::goes_on(const std::string& flags, int64_t all, const std::string& more) const {
    std::string whole = out + ".whole", last = "/" + step_folder(all);
    Ran r = start(concat(flags, " --steps ", all, " --out ", whole, " ", more));
    EXPECT_EQ(r.status, 0) << r.text;
    EXPECT_EQ(start(concat(flags, " --steps ", all / 2, " --out ", out)).status, 0);
    EXPECT_EQ(start(concat(flags, " --steps ", all, " --resume --out ", out)).status, 0);
    EXPECT_TRUE(state_in(whole + last) == state_in(out + last));
    return r;
}

// Send signals to a run at random moments, and resume it each time, until it is over: its
// checkpoint must be that of a run that received none.
static void stop_and_resume(const Life& t, const std::string& flags, int rounds) {
    std::string whole = t.path("whole"); // of the run that is not disturbed
    std::string line = program() + " " + t.small + flags + " --steps 300 ";
    ASSERT_EQ(shell(line + "--out " + whole).status, 0);

    std::mt19937 random(unsigned(rounds) + 3);
    int stopped = 0;
    for (int round = 0; round < rounds; round++) {
        fs::remove_all(t.out);
        for (int step = 1 + random() % 150; step <= 300; step += 1 + random() % 150) {
            // Send a signal some time after a step.
            fs::remove(t.path("said"));
            Child child(line + "--resume --out " + t.out, t.path("said"));
            int number = STOP_SIGNALS[random() % STOP_SIGNALS.size()];
            child.wait_for_step(step, 300);
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 5000));
            kill(child.pid, number);
            int status = child.wait();
            if (status == 0 || status == -number) break; // its last step was over already

            // The run has stopped as it should, and saved. The next signal comes at a later step.
            ASSERT_EQ(status, 128 + number) << child.text();
            std::string text = child.text(),
                        said = "stopped by " + signal_name(number) + " at step ";
            EXPECT_HAS(text, said);
            step =
                atoi(text.c_str() + text.find(said) + said.size());
            EXPECT_FALSE(t.steps(t.out).empty());
            stopped++;
        }
        ASSERT_EQ(shell(line + "--resume --out " + t.out).status, 0);
        EXPECT_EQ(state_in(whole + "/step_00000300"), state_in(t.out + "/step_00000300"));
    }
    EXPECT_GT(stopped, 0);
}
static int rounds() {
    const char* given = getenv("ROUNDS");
    return given ? atoi(given) : 2;
}

// Signals at random moments: on one rank, on several, and with asynchronous saves.
TEST_F(Life, SignalsAtAnyMomentLoseNothing) { stop_and_resume(*this, "", rounds()); }
TEST_F(Life, SignalsStopAllRanksAfterTheSameStep) {
    stop_and_resume(*this, "--local-ranks 4 --pp 2 --zero 1 --batch-tokens 256", rounds());
}
TEST_F(Life, SignalsWaitForASaveBesideTheSteps) {
    stop_and_resume(*this, "--local-ranks 2 --zero 1 --save-async --save-every 7",
                    (rounds() + 1) / 2);
}

// A signal to one process stops all.
TEST_F(Life, OneProcessOfSeveralIsSignalled) {
    NEEDS_PROCESSES();

    // Signal the second process only.
    std::string train = program() + " " + small + "--steps 1000000 --out " + out;
    Child job(mpirun(2) + "sh -c 'echo $$ >" + path("pid") + ".$OMPI_COMM_WORLD_RANK; exec " + train +
                  "'",
              path("said"));
    job.wait_for_step(3, 1000000);
    kill(pid_t(atoll(read_file(path("pid.1")).c_str())), SIGUSR1);
    EXPECT_EQ(job.wait(), 128 + SIGUSR1) << job.text();
    EXPECT_HAS(job.text(), "stopped by SIGUSR1 at step ");
    EXPECT_FALSE(has(job.text(), "\x1b"))
        << "mpirun's terminal is nobody's: no line changes in place";
    EXPECT_EQ(steps().size(), 1u);
}

// The first process reads a folder's small files for all. The second process's own folder has empty
// ones, and yet it computes, samples and exports with the first.
TEST_F(Life, OneProcessReadsAFoldersSmallFiles) {
    NEEDS_PROCESSES();

    // Each process starts in a folder of its own, and finds there a model of the same name.
    fs::create_directories(path("0"));
    fs::create_directories(path("1"));
    ASSERT_EQ(start(small + "--steps 1 --export " + path("0/e")).status, 0);
    put("0/e/generation_config.json", "{\"eos_token_id\": [101, 102]}");
    std::string template_text = "[INST] <<SYS>>";
    put("0/e/tokenizer_config.json", json({{"chat_template", template_text}}).dump());
    fs::copy(path("0/e"), path("1/e"));
    for (const auto& file : fs::directory_iterator(path("1/e")))
        if (file.path().extension() == ".json") put_file(file.path().string(), "");
    ASSERT_EQ(read_file(path("1/e/config.json")), "");

    Ran r = shell(mpirun(2) + "sh -c 'cd " + path("$OMPI_COMM_WORLD_RANK") + "; exec " + program() +
                  " --model e --seq 32 --steps 1 --sample-tokens 9 --prompt a --chat-format plain"
                  " --export x --data " + path("text.txt") + "'");
    EXPECT_EQ(r.status, 0) << r.text;
    EXPECT_EQ(json::parse(read_file(path("0/x/generation_config.json"))),
              json::parse(read_file(path("0/e/generation_config.json"))));
}

// The watchdog names the rank that hangs, and ends the job. The first rank waits for the second,
// which waits for the third, which is stopped: only the third may be named.
TEST_F(Life, ARankThatHangsIsNamedAndTheJobEnds) {
    NEEDS_PROCESSES();
    std::string train =
        program() + " " + small + "--pp 3 --watchdog 2 --steps 1000000 --out " + out;
    Child job(
        mpirun(3) + "sh -c 'echo $$ >" + path("pid") + ".$OMPI_COMM_WORLD_RANK; exec " + train + "'",
        path("said"));

    // Stop the third rank's process.
    job.wait_for_step(3, 1000000);
    kill(pid_t(atoll(read_file(path("pid.2")).c_str())), SIGSTOP);
    double start = clock_seconds();
    EXPECT_NE(job.wait(), 0);
    EXPECT_LT(clock_seconds() - start, 60);
    EXPECT_HAS(job.text(),
               " has not arrived; rank 2 has been in "); // in some action, or in a wait
    for (const char* other : {"; rank 0 has been", "; rank 1 has been"})
        EXPECT_FALSE(has(job.text(), other)) << job.text();
}

// A signal during an evaluation ends the run without waiting for it, and without its loss.
TEST_F(Life, ASignalEndsAnEvaluation) {
    // After the first step evaluate the whole text, which takes many times as long as a step.
    for (std::string ranks : {"", " --local-ranks 2"}) {
        fs::remove_all(out);
        Child child = begin("--steps 9 --eval-every 1 --eval-tokens 1000000 --val " +
                            path("text.txt") + " --data " + ROOT +
                            "/train_gpt.cu --channels 128 --out " + out + ranks);
        child.wait_for_step(1, 9);
        kill(child.pid, SIGUSR1);
        EXPECT_EQ(child.wait(), 128 + SIGUSR1) << child.text();
        EXPECT_HAS(child.text(), "stopped by SIGUSR1 at step 1");
        EXPECT_FALSE(has(child.text(), "val loss"));
        EXPECT_EQ(steps(), Names{"step_00000001"});
    }
}

// A second signal, at least a second after the first one, ends the program at once.
TEST_F(Life, ASecondSignalLeavesAtOnce) {
    // Train a model whose step takes long enough for both signals.
    Child child("env OMP_NUM_THREADS=1 " + program() + " " + small +
                    "--channels 512 --layers 4 --seq 256 --batch-tokens 262144 --steps 9 --out " +
                    out,
                path("said"));
    child.wait_for_text("mfu: ");
    std::this_thread::sleep_for(std::chrono::milliseconds(100));

    // Two signals at once count as one, because shells send one twice.
    kill(child.pid, SIGINT);
    kill(child.pid, SIGINT);
    std::this_thread::sleep_for(std::chrono::milliseconds(1100));
    EXPECT_HAS(child.text(), "stopping: this step ends, then it is saved");
    kill(child.pid, SIGTERM);
    EXPECT_EQ(child.wait(), -SIGTERM) << child.text();
}

// A signal that was ignored when the program started, as nohup does, does not stop it.
TEST_F(Life, ASignalThatIsIgnoredStaysSo) {
    Child child("bash -c 'trap \"\" HUP; exec " + program() + " " + small + "--steps 60'",
                path("said"));
    child.wait_for_step(1, 60);
    kill(child.pid, SIGHUP);
    EXPECT_EQ(child.wait(), 0) << child.text();
}

// The system repeats SIGXCPU each second: neither the save nor the way to the exit ends by it.
TEST(Stop, ARepeatedLimitOfCpuTimeWaitsForTheSave) {
    stop_signal = SIGXCPU;
    stop_time = -1000000;
    CatchSignals(), raise(SIGXCPU); // handled while they live, and behind them
    raise(SIGXCPU);
    EXPECT_EQ(stop_signal, SIGXCPU);
    stop_signal = 0;
}

// A signal may come before errno is read, and its answer may have no reader.
TEST(Stop, ASignalKeepsErrno) {
    int kept = dup(STDERR_FILENO);
    close(STDERR_FILENO);
    errno = ENOSPC;
    note_signal(SIGTERM);
    int after = errno;
    dup2(kept, STDERR_FILENO);
    close(kept);
    stop_signal = 0;
    EXPECT_EQ(after, ENOSPC);
}

// A handler has a stack of its own in every thread: in oneDNN's products on AVX2 the stack pointer
// may point into the heap.
TEST(Stop, EveryThreadHasAStackForHandlers) {
    CatchSignals caught;
    struct sigaction action;
    sigaction(SIGTERM, nullptr, &action);
    EXPECT_TRUE(action.sa_flags & SA_ONSTACK);
    int without = 0;
#pragma omp parallel reduction(+ : without)
    {
        stack_t stack;
        sigaltstack(nullptr, &stack);
        without += (stack.ss_flags & SS_DISABLE) != 0;
    }
    EXPECT_EQ(without, 0);
}

// A reader of the output that leaves, as `| head` does, ends no run.
TEST_F(Life, AReaderThatLeavesCostsNoStep) {
    Ran r = start(small + "--steps 60 --out " + out + " 2>" + path("said") + " | head -n 1");
    EXPECT_EQ(r.status, 0) << r.text;
    EXPECT_EQ(steps(), (Names{"step_00000060"}));
    EXPECT_EQ(log_steps(), 62) << "60 steps, a validation and the account";
    EXPECT_HAS(read_file(path("said")), "note: standard output cannot be written: the run goes on");

    // The same for both outputs, and an interrupt that ends the reader too.
    std::string line = program() + " " + small + "--steps 1000000 --out " + path("both") +
                       " 2>&1 | tee " + path("tee") + " >" + path("teed");
    pid_t group = fork();
    if (group == 0) {
        setpgid(0, 0);
        signal(SIGINT, SIG_DFL);
        execl("/bin/bash", "bash", "-c", line.c_str(), nullptr);
        _exit(127);
    }
    for (int i = 0; i < 1000 && !has(read_file(path("tee")), " 3/1000000 |"); i++)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    kill(-group, SIGINT);
    for (int i = 0; i < 1000 && kill(-group, 0) == 0; i++) {
        waitpid(group, nullptr, WNOHANG);
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    EXPECT_EQ(steps(path("both")).size(), 1u);
}

// A folder that is moved or removed during the run is made again, and the run saves there. Another
// run's folder in its place stays as it is.
TEST_F(Life, AFolderThatIsMovedIsMadeAgain) {
    for (bool moved : {true, false}) {
        Child child = begin("--steps 1000000 --out " + out);
        child.wait_for_step(5, 1000000);
        fs::rename(out, path(moved ? "moved" : "gone"));
        if (!moved) fs::remove_all(path("gone"));
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        kill(child.pid, SIGTERM);
        EXPECT_EQ(child.wait(), 128 + SIGTERM);
        EXPECT_HAS(child.text(), "note: --out " + out + " was moved or removed: it is made again");
        EXPECT_EQ(steps().size(), 1u);
        EXPECT_TRUE(log()[0].contains("config"));
        EXPECT_EQ(start(small + "--steps 2 --resume --out " + out).status, 0);
        fs::remove_all(out);
    }

    // Put a finished run in the folder's place.
    ASSERT_EQ(start(small + "--steps 2 --out " + path("other")).status, 0);
    Child child = begin("--steps 1000000 --save-every 0 --resume --out " + out);
    child.wait_for_step(5, 1000000);
    fs::rename(out, path("away"));
    fs::rename(path("other"), out);
    kill(child.pid, SIGTERM);
    EXPECT_EQ(child.wait(), 128 + SIGTERM);
    EXPECT_HAS(child.text(), "is not saved: --out " + out + " holds a run at step 2");
    EXPECT_EQ(steps(), (Names{"step_00000002"}));
}

// A run that saves nowhere says so before its first step, and where a signal has ended it.
TEST_F(Life, ARunWithoutAFolderSaysWhatASignalLoses) {
    Child child = begin("--steps 1000000 --export " + path("e"));
    child.wait_for_step(5, 1000000);
    EXPECT_HAS(child.text(), "note: no --out: nothing is saved before --export at the end, and a "
                             "signal or a crash loses every step\n");
    kill(child.pid, SIGTERM);
    child.wait();
    EXPECT_TRUE(has(child.text(), ", which is not saved\n"));
    EXPECT_FALSE(has(start(small + "--steps 1 --out " + out).text, "nothing is saved"));
}

// Change a manifest's flags, with a checksum that fits.
static void rewrite_manifest(const std::string& folder, const std::function<void(json&)>& change) {
    json m = json::parse(read_file(folder + "/manifest.json"));
    change(m);
    m["crc32"] = manifest_crc(m);
    std::ofstream(folder + "/manifest.json") << manifest_text(m);
}

// Whatever type a manifest's flags have, a resume is told in words or goes on. It never aborts.
TEST_F(Life, FlagsOfAManifestMayHaveAnyType) {
    ASSERT_EQ(start(small + "--steps 1 --out " + out).status, 0);
    std::string folder = out + "/step_00000001", given = "--loss lm --precision fp32 --optimizer "
                                                         "adamw --lr 1e-3 --out " + out;
    for (json all : {json(), json(5), json("x"), json::array()}) {
        rewrite_manifest(folder, [&](json& m) { m["config"] = all; });
        Ran r = start(given + " --resume --steps 2");
        EXPECT_EQ(r.status, 1) << r.text;
        EXPECT_HAS(r.text, "manifest.json is broken: config is ");
    }
    rewrite_manifest(folder, [&](json& m) { m["config"] = config_json(Config()); });
    for (const char* name : {"loss", "precision", "optimizer", "group", "lr", "min-lr", "out",
                             "start", "model", "layers", "fp8", "beta"})
        for (json value : {json(), json(5), json("x"), json::array({1}), json::object()}) {
            rewrite_manifest(folder, [&](json& m) { m["config"][name] = value; });
            int status = start(given + " --resume --eval").status;
            EXPECT_TRUE(status == 0 || status == 1) << name << " " << value << ": " << status;
        }
}

// A checkpoint of an older program goes on if each of its gradients was applied in its own step.
TEST_F(Life, ACheckpointWhoseLastGradientWaitsIsRefused) {
    ASSERT_EQ(start(small + "--steps 1 --out " + out).status, 0);
    auto resume = [&](json delay) {
        rewrite_manifest(out + "/step_00000001", [&](json& m) {
            m["config"]["update-delay"] = delay;
        });
        return start("--out " + out + " --resume --steps 2 --sample-tokens 0");
    };
    Ran waits = resume(1);
    EXPECT_EQ(waits.status, 1) << waits.text;
    EXPECT_HAS(waits.text, "this checkpoint's run had --update-delay 1, which is gone");
    Ran none = resume(0);
    EXPECT_EQ(none.status, 0) << none.text;
    EXPECT_HAS(none.text, "resumed at step 1");
}

// More ranks than the checkpoint had: the batch is the checkpoint's, and the error says so, with a
// micro-batch that keeps it.
TEST_F(Life, AnErrorSaysWhoseFlagItIs) {
    ASSERT_EQ(start(small + "--steps 1 --out " + out).status, 0);
    Ran r = start("--out " + out + " --resume --steps 2 --sample-tokens 0 --local-ranks 2");
    EXPECT_EQ(r.status, 1);
    EXPECT_HAS(r.text, "--batch-tokens 128 is no multiple of micro-batch x seq x dp = 4 x 32 x 2 = "
                       "256: try 256, or --micro-batch 2 (--batch-tokens is the checkpoint's)");
    r = start("--out " + out + " --resume --steps 2 --sample-tokens 0 --local-ranks 2 "
              "--micro-batch 2");
    EXPECT_EQ(r.status, 0) << r.text;
}

// --model names a run, or a checkpoint of one, as it names a folder: the validation loss is that of
// its checkpoint. Adapters beside it go on to the same bits, and know their base again.
TEST_F(Life, ARunIsAModel) {
    std::string base = path("base"), text = "--data " + path("text.txt") + " --seq 32 ";
    ASSERT_EQ(start(small + "--kv-heads 1 --model tiny-llama --steps 6 --save-every 3 --out " + base)
                  .status, 0);
    auto loss = [](const std::string& said) { return said.substr(said.find("val loss "), 15); };
    std::string last = loss(start("--resume --eval --eval-tokens 256 --out " + base).text);
    for (std::string layout : {"", "--local-ranks 2 --tp 2 ", "--local-ranks 2 --zero 3 "})
        EXPECT_EQ(loss(start(text + "--eval --eval-tokens 256 --model " + base + " " + layout).text),
                  last);
    Ran older = start(text + "--eval --eval-tokens 256 --model " + base + "/step_00000003");
    EXPECT_HAS(older.text, "weights: " + base + "/step_00000003\n");
    EXPECT_NE(loss(older.text), last);

    // Train adapters beside it, at once and in two runs.
    std::string lora = text + "--model " + base + " --lora 2 --sample-tokens 0 --schedule constant "
                       "--micro-batch 4 --log-every 1 ";
    Ran whole = start(lora + "--steps 4 --out " + path("whole"));
    EXPECT_EQ(whole.status, 0) << whole.text;
    ASSERT_EQ(start(lora + "--steps 2 --out " + out).status, 0);
    EXPECT_EQ(manifest("step_00000002")["config"]["start"], base + "/step_00000006");
    Ran again = start("--resume --steps 4 --sample-tokens 0 --out " + out);
    EXPECT_EQ(again.status, 0) << again.text;
    EXPECT_TRUE(state_in(out + "/step_00000004") == state_in(path("whole") + "/step_00000004"));

    // Adapters have no weights of their own; a checkpoint that is gone is named.
    EXPECT_HAS(start(text + "--eval --model " + out).text, "stands on another model: --export it");
    fs::remove_all(base);
    again = start("--resume --steps 5 --sample-tokens 0 --out " + out);
    EXPECT_EQ(again.status, 1);
    EXPECT_HAS(again.text, base + "/step_00000006");
}

// agree() gives all ranks what any of them wishes.
TEST(Stop, OneWishIsEnough) {
    std::vector<Wishes> got(3);
    run_local_ranks(3, {}, [&](const Comm& world) {
        Wishes mine;
        if (world.rank == 2) mine.stop = SIGUSR1;
        if (world.rank == 1) mine.save = mine.doubt = true;
        got[world.rank] = agree(world, mine);
    });
    for (const Wishes& w : got) {
        EXPECT_EQ(w.stop, SIGUSR1);
        EXPECT_TRUE(w.save);
        EXPECT_TRUE(w.doubt);
        EXPECT_FALSE(w.writing);
    }
    EXPECT_EQ(agree({}, {}).stop, 0);
    EXPECT_FALSE(agree({}, {}).save);
    EXPECT_EQ(signal_name(SIGTERM), "SIGTERM");
}

// ----------------------------------------------------------------------------
// saving

// --save-every 10m saves by the clock.
TEST_F(Life, SavesByTheClock) {
    Child child = begin("--steps 1000000 --save-every 0.004m --out " + out);
    child.wait_for_step(1, 1000000);
    for (int i = 0; i < 3000 && steps().size() < 2; i++)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    EXPECT_GE(steps().size(), 2u) << child.text();
}

// Young's formula gives the literature's figures: 419 failures in 54 days of 16,384 ranks are
// one in three hours. A save that takes a minute is then due every 19 minutes, one of five
// seconds every 5.6.
TEST(Interval, YoungsFormulaMeetsPublishedFigures) {
    double failure = job_failure_seconds(50700, 16384);
    EXPECT_NEAR(failure, 54 * 86400 / 419.0, 10);
    EXPECT_NEAR(young_interval(11135, 60), 1156, 1);
    EXPECT_NEAR(young_interval(11135, 5), 334, 1);

    // The time that is left, with ten minutes to start again after a failure.
    EXPECT_NEAR(1 - lost_share(1156, 11135, 60) - 600 / 11135.0, 0.842,
                0.001);

    // Any other interval loses more.
    for (double t : {0.5, 0.9, 1.1, 2.0})
        EXPECT_GT(lost_share(t * young_interval(failure, 60), failure, 60),
                  lost_share(young_interval(failure, 60), failure, 60));
    EXPECT_EQ(young_interval(1, 8), 8); // saves that take longer than the job lives
    EXPECT_HAS(interval_text(50700, 1024, 30),
               "a checkpoint every 54m30s: a save takes 30 s, and 1024 ranks fail "
               "every 49h30m; both cost 1.8% of the time");
}

// With --save-every auto the cost of saves sets their interval. If a save costs C seconds and the
// job fails every 100 C, one is due every sqrt(200) C.
TEST_F(Life, TheIntervalFollowsWhatASaveCosts) {
    // Measure a save.
    std::string text = start(small + "--steps 2 --save-every auto --out " + path("cost")).text;
    double cost = number_behind(text, "a save takes ");
    EXPECT_TRUE(fs::exists(path("cost") + "/step_00000002"));

    // Train for about 40 C.
    Child child = begin(concat("--steps 1000000 --save-every auto:", 100 * cost / 3600,
                               " --keep 100 --out ", out));
    child.wait_for_step(1, 1000000);
    double begin = clock_seconds();
    while (clock_seconds() - begin < 40 * cost + 1)
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    double seconds = clock_seconds() - begin;
    kill(child.pid, SIGTERM);
    child.wait();

    // The interval is printed once.
    std::string said = child.text();
    EXPECT_HAS(said, "a checkpoint every ");
    EXPECT_EQ(said.find("a checkpoint every ", said.find("a checkpoint every ") + 1),
              std::string::npos)
        << "once";

    // The number of saves fits the cost that this run measured, within half of it and two.
    ASSERT_EQ(lines(true).size(), 1u);
    double spent = lines(true)[0]["seconds"]["save"].get<double>();
    double saves = double(checkpoint_steps(out).size());
    double due = young_interval(100 * cost, spent / saves);
    EXPECT_GE(saves, 3);
    EXPECT_NEAR(saves, seconds / due, 0.5 * saves + 2) << spent << " s for " << saves;
}

// The buddy of a rank is on the next machine, in whatever order ranks are placed on machines.
TEST(Buddies, AreOnTheNextMachine) {
    EXPECT_EQ(choose_buddies({0, 0, 2, 2}), (std::vector<int>{2, 3, 0, 1}));
    EXPECT_EQ(choose_buddies({0, 1, 0, 1, 4}), (std::vector<int>{1, 4, 3, 4, 0}));
    EXPECT_EQ(choose_buddies({0, 0, 0}), std::vector<int>());
    EXPECT_EQ(buddy_folder("/m/%r/x", 12), "/m/12/x");
}

// Three machines of one rank each save in each other's memory. If one machine is lost, the run
// goes on from the last save in memory, and ends with the bits of a run that nothing happened
// to. If a machine and its buddy are lost, a note names the part that is gone, and the run goes
// on from --out, whatever folder it is named from.
TEST_F(Life, ALostMachinesPartComesFromItsBuddy) {
    std::string flags =
        small + "--zero 1 --batch-tokens 384 --schedule constant --warmup 5 --save-every 0 ";
    std::string threads = "--local-ranks 3 ",
                buddy = concat("--buddy ", path("m%r"), ":2 --out ");
    bool mpi = no_processes().empty();
    if (!mpi) puts("skipped: no mpirun, so threads stand for processes");

    // Save step 5 on disk, go on, and kill one process, or the one that has all ranks: the rest of
    // the job ends with it. Then remove the memory of these machines. Returns the newest step that
    // was in memory.
    auto lose = [&](std::vector<int> machines) {
        for (std::string name : {"out", "said", "pid.1", "m0", "m1", "m2"})
            fs::remove_all(path(name));
        EXPECT_EQ(start(flags + threads + "--steps 5 --out " + out).status, 0);
        std::string train = "sh -c 'cd " + path("") + "; echo $$ >" + path("pid") +
                            ".${OMPI_COMM_WORLD_RANK:-1}; exec " + program() + " " + flags +
                            (mpi ? "" : threads) + "--steps 100000 --resume " + buddy + "out'";
        Child job((mpi ? mpirun(3) : "") + train, path("said"));
        job.wait_for_step(11, 100000);
        kill(pid_t(atoll(read_file(path("pid.1")).c_str())), SIGKILL);
        job.wait();
        int64_t step = 0;
        for (int m = 0; m < 3; m++)
            step = std::max(step, checkpoint_steps(path(concat("m", m))).front());
        EXPECT_GE(step, 10);
        for (int r : machines) fs::remove_all(path(concat("m", r)));
        return step;
    };
    auto go_on = [&](int64_t steps) {
        return start(flags + threads + buddy + out + concat(" --resume --steps ", steps));
    };

    // Lose one machine. The run may go on from one step earlier, if the kill came during a save.
    int64_t step = lose({1});
    Ran r = go_on(step + 5);
    EXPECT_HAS(r.text,
               ", from memory\n");
    ASSERT_EQ(
        start(flags + threads + concat("--steps ", step + 5, " --out ", path("whole"))).status, 0);
    std::string last = "/" + step_folder(step + 5);
    EXPECT_TRUE(state_in(out + last) == state_in(path("whole") + last));

    // A run that is over has removed its saves from memory.
    for (int m = 0; m < 3; m++)
        EXPECT_EQ(checkpoint_steps(path(concat("m", m))).size(), 0u);

    // Remove --out: without its log the memory counts as another run's, and is left alone. So it
    // does for a run that goes on in another folder, also one that is called alike.
    step = lose({});
    fs::rename(out, path("aside"));
    r = go_on(2);
    EXPECT_EQ(r.status, 1);
    EXPECT_HAS(r.text, concat(": holds step ", step, " of another run, ", out, ": choose another"));
    fs::create_directories(path("else/out"));
    std::string there = "cd " + path("else") + "; ", words = flags + threads + "--out out ";
    ASSERT_EQ(start(words + "--steps 2", there).status, 0);
    r = start(words + "--resume --steps 3 --buddy " + path("m%r") + ":2", there);
    EXPECT_EQ(r.status, 1);
    EXPECT_HAS(r.text, concat(" of another run, ", out, ": choose another"));
    fs::remove_all(out);
    fs::rename(path("aside"), out);
    EXPECT_HAS(go_on(step + 1).text, ", from memory\n");

    // Lose a machine and its buddy.
    lose({1, 2});
    r = go_on(8);
    EXPECT_HAS(r.text, "note: --buddy: rank_00001.safetensors of step ");
    EXPECT_HAS(r.text, " is on no machine that is left\n");
    EXPECT_HAS(r.text, "resumed at step 5\n");

    // Lose a machine, and flip a bit in the copy of its part: the copy is not used.
    lose({0});
    std::string copy = path("m1") + "/" + step_folder(checkpoint_steps(path("m1")).front()) +
                       "/rank_00000.safetensors";
    std::string bytes = read_file(copy);
    ASSERT_GT(bytes.size(), 1000u);
    bytes[bytes.size() / 2] ^= 1;
    std::ofstream(copy) << bytes;
    EXPECT_HAS(go_on(8).text, "note: --buddy: rank_00000.safetensors of step ");

    // A run on one machine is refused, and leaves no folder behind but those that were there.
    fs::create_directories(path("kept"));
    for (std::string ranks : {"", "--local-ranks 2 "})
        for (std::string folder : {"one", "two/three/", "kept/one"}) {
            r = start(small + ranks + "--steps 9 --out " + path("x") + " --buddy " + path(folder) +
                      ":1");
            EXPECT_HAS(r.text, "all ranks are on one machine: start the run on two or more");
            for (const char* name : {"x", "one", "two", "kept/one"})
                EXPECT_FALSE(fs::exists(path(name))) << name;
            EXPECT_TRUE(fs::exists(path("kept")));
        }

    // A run that resumes on one machine goes on without saves in memory.
    r = start(small + "--local-ranks 2 --steps 9 --resume --out " + path("x") + " --buddy " +
              path("one") + ":1");
    EXPECT_HAS(r.text, "all ranks are on one machine: nothing is saved in memory");
    EXPECT_EQ(r.status, 0) << r.text;
}

// Weights that are not finite after an update are not saved in memory over good ones.
TEST_F(Life, RuinedWeightsAreNotSavedInMemory) {
    Ran r = start(
        small +
        "--local-ranks 2 --steps 2 --precision fp16 --loss-scale 1 --lr 1000 --weight-decay 1000 "
        "--warmup 0 --schedule constant --save-every 0 --out " +
        out + " --buddy " + path("m%r") + ":1");
    EXPECT_HAS(r.text, "note: step 1 is not saved in memory: wte.weight: ");
    EXPECT_EQ(checkpoint_steps(path("m0")), std::vector<int64_t>());
}

// Six preference pairs, of which a window of 128 tokens holds one.
static std::string six_pairs() {
    std::string lines;
    for (std::string x : {"alpha", "beta", "gamma", "delta", "epsilon", "zeta"})
        lines += json({{"prompt", x}, {"chosen", x + x}, {"rejected", x + " " + x}}).dump() + "\n";
    return lines;
}

// A run that resumes with a smaller batch has read more windows than its steps would now. It still
// computes the references of all windows, as a longer run does: the losses of step 3 are the same.
TEST_F(Life, ASmallerBatchHasAllReferences) {
    std::string flags =
        "--layers 1 --heads 2 --channels 32 --seq 128 --micro-batch 1 --sample-tokens 0 --loss dpo "
        "--schedule constant --data " +
        put("pairs.jsonl", six_pairs() + six_pairs()) + " ";

    // Resume the same checkpoint for one step, and for five.
    ASSERT_EQ(start(flags + "--batch-tokens 256 --steps 2 --out " + out).status, 0);
    std::vector<double> losses;
    for (const char* steps : {"3", "7"}) {
        std::string whole = out;
        out = path(steps);
        fs::copy(whole, out, fs::copy_options::recursive);
        Ran r = start(concat("--loss dpo --resume --batch-tokens 128 --steps ", steps, " --out ", out));
        EXPECT_EQ(r.status, 0) << r.text;
        for (const json& line : log())
            if (line.value("step", 0) == 3 && line.contains("loss"))
                losses.push_back(line["loss"].get<double>());
        out = whole;
    }
    ASSERT_EQ(losses.size(), 2u);
    EXPECT_EQ(losses[0], losses[1]);
}

// A run of two ranks, with everything on that saves and checks beside its steps, is killed at
// random moments, or one of its processes is stopped, which the watchdog names within seconds.
// Resumed, it ends with the bits of a run that nothing happened to.
struct LifeKilled : Life, testing::WithParamInterface<const char*> {};
TEST_P(LifeKilled, AtAnyMomentLosesNothing) {
    std::string flags = "--micro-batch 2 --lr 0.002 --schedule constant --warmup 3 ";
    flags += has(GetParam(), "dpo") ? "--layers 1 --heads 2 --channels 32 --seq 128 --log-every 1 "
                                      "--sample-tokens 0 --data " +
                                          put("pairs.jsonl", six_pairs()) + " "
                                    : small;
    flags += std::string(GetParam()) + " ";
    std::string threads = "--local-ranks 2 --steps 40 ", whole = path("whole");
    std::string beside =
        concat("--buddy ", path("m%r"), ":1 --verify-every 2 --watchdog 2 ",
               "--save-async --save-every auto:1e-5 --out ", out, " --resume ");
    ASSERT_EQ(start(flags + threads + "--out " + whole).status, 0);

    // Kill the process of both ranks three times, and the second time one machine's memory too.
    std::mt19937 random(11);
    int at = 0;
    for (int kills = 0; kills < 3; kills++) {
        fs::remove(path("said"));
        Child child(program() + " " + flags + threads + beside, path("said"));
        at += 1 + int(random() % 8);
        for (int i = 0; i < 3000 && kill(child.pid, 0) == 0 && log_steps() < at; i++)
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 30000));
        kill(child.pid, SIGKILL);
        child.wait();
        EXPECT_FALSE(has(child.text(), "error: ")) << child.text();
        if (kills == 1) fs::remove_all(path("m1"));
    }

    // Stop one of two processes.
    if (!no_processes().empty()) {
        puts("skipped: no mpirun, so nobody stops");
    } else {
        fs::remove(path("said"));
        Child job(mpirun(2) + "sh -c 'echo $$ >" + path("pid") + ".$OMPI_COMM_WORLD_RANK; exec " + program() + " " + flags +
                      beside + "--steps 40'",
                  path("said"));
        job.wait_for_text("resumed at step ");
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 300000));

        // The job must end by itself.
        pid_t stops = pid_t(atoll(read_file(path("pid.1")).c_str()));
        ASSERT_GT(stops, 1);
        kill(stops, SIGSTOP);
        double begin = clock_seconds();
        EXPECT_NE(job.wait(), 0);
        EXPECT_LT(clock_seconds() - begin, 15);
        EXPECT_HAS(job.text(), "; rank 1 has been in ");
    }

    // Finish the run.
    Ran r = start(flags + threads + beside);
    ASSERT_EQ(r.status, 0) << r.text;
    EXPECT_TRUE(state_in(out + "/step_00000040") == state_in(whole + "/step_00000040"));
}
INSTANTIATE_TEST_SUITE_P(, LifeKilled, testing::Values("--zero 1", "--loss dpo"));

// Four ranks are killed; then three, two and four ranks go on. Every step takes the samples that it
// takes in a run of four ranks, so losses differ only by the order of sums. That changes a float's
// mean by some 1e-6 of itself, and AdamW turns 1e-6 of a gradient into
// lr x 1e-6 x |gradient|_1 <= 4e-4 x 1e-6 x 500 of loss a step. Other samples would change the loss
// by a hundredth.
struct LifeElastic : Life, testing::WithParamInterface<std::array<const char*, 3>> {};
TEST_P(LifeElastic, AnyRanksGoOn) {
    auto [model, four, two] = GetParam();
    std::string flags =
        concat(model,
               " --layers 1 --channels 32 --heads 4 --seq 32 --micro-batch 1 "
               "--batch-tokens 384 --schedule constant --warmup 9 --sample-tokens 0 "
               "--eval-tokens 256 --log-every 1 --data ",
               path("text.txt"), " ");

    // Kill four ranks.
    {
        Child child(
            concat(program(), " ", flags, four, " --steps 100000 --save-every 1 --out ", out),
            path("said"));
        child.wait_for_step(3, 100000);
        kill(child.pid, SIGKILL);
        child.wait();
    }

    // Go on with other numbers of ranks, two steps each.
    int64_t step = checkpoint_steps(out).front();
    for (std::string ranks : {"--local-ranks 3", two, four}) {
        Ran r = start(concat(flags, ranks, " --resume --steps ", step += 2, " --out ", out));
        ASSERT_EQ(r.status, 0) << r.text;
    }

    // Compare the losses with those of four ranks that nothing happened to.
    auto losses = [&] {
        std::map<int64_t, double> of_step;
        for (const json& line : log())
            if (line.contains("loss")) of_step[line["step"].get<int64_t>()] = line["loss"];
        return of_step;
    };
    std::map<int64_t, double> got = losses();
    out = path("whole");
    ASSERT_EQ(start(concat(flags, four, " --steps ", step, " --out ", out)).status, 0);
    std::map<int64_t, double> expected = losses();
    ASSERT_EQ(got.size(), expected.size());
    for (auto [at, loss] : expected) EXPECT_NEAR(got[at], loss, 2e-5) << at;
}
INSTANTIATE_TEST_SUITE_P(
    , LifeElastic,
    testing::Values(std::array{"", "--local-ranks 4 --cp 2", "--local-ranks 2 --cp 2"},
                    std::array{"--model tiny-moe --kv-heads 2 --ffn 16 --experts 4",
                               "--local-ranks 4 --ep 2 --zero 1", "--local-ranks 2 --ep 2"}));

// A replay of a step leaves no trace: neither in fp8's scales nor in the data's cursor.
TEST_F(Life, AReplayLeavesNothing) {
    std::string line =
        small + "--local-ranks 2 --precision bf16 --fp8 delayed --steps 4 --save-every 4 --out ";
    Ran plain = start(line + path("plain"));
    ASSERT_EQ(plain.status, 0) << plain.text;
    Ran replayed = start(line + path("replayed") + " --verify-every 1");
    ASSERT_EQ(replayed.status, 0) << replayed.text;
    std::string last = "/" + step_folder(4);
    EXPECT_TRUE(state_in(path("plain") + last) == state_in(path("replayed") + last));
    auto history = [&](const char* run) {
        return json::parse(read_file(path(run) + last + "/manifest.json"))["fp8"];
    };
    EXPECT_FALSE(history("plain").is_null());
    EXPECT_EQ(history("plain"), history("replayed"));
}

// Asynchronous saves write the same bytes as saves that the steps wait for.
TEST_F(Life, SavesBesideTheStepsAreTheSame) {
    std::string line = small + "--local-ranks 2 --steps 9 --eval-every 3 --save-every 2 "
                               "--keep 9,best --out ";
    ASSERT_EQ(start(line + path("waits")).status, 0);
    Ran beside = start(line + out + " --save-async");
    ASSERT_EQ(beside.status, 0) << beside.text;
    ASSERT_EQ(steps(), steps(path("waits")));
    ASSERT_GE(steps().size(), 5u);
    for (const std::string& name : steps()) {
        EXPECT_EQ(state_in(out + "/" + name), state_in(path("waits/") + name)) << name;
        json other = json::parse(read_file(path("waits/") + name + "/manifest.json"));
        json own = manifest(name);
        for (const char* key : {"config", "crc32"}) // these depend on the folder and the flag
            own.erase(key), other.erase(key);
        EXPECT_EQ(own, other);
    }

    // The end of a run waits for the save that is on its way.
    start(small + "--steps 5 --save-every 4 --keep 9 --save-async --out " + path("ends"));
    EXPECT_EQ(steps(path("ends")).size(), 2u);

    // --explain counts the copy: on one rank it has all that the files hold.
    size_t elements = 0;
    json files = manifest(steps()[0])["files"];
    for (const json& file : files)
        for (const json& range : file["tensors"])
            elements += range[1].get<size_t>();
    std::string plan = start(small + "--save-async --explain --out " + path("x")).text;
    EXPECT_EQ(number_behind(plan, "copy for a save"), 4 * elements);
}

// --keep N,best keeps the checkpoint with the lowest validation loss beside the N newest.
TEST_F(Life, TheBestCheckpointStays) {
    // Train with a rate that is too high, so that the loss goes up and down.
    ASSERT_EQ(start(small + "--steps 60 --eval-every 3 --warmup 0 --schedule constant --lr 0.03 "
                            "--save-every 1 --keep 1,best --out " + out).status, 0);

    // Find the best step in the log.
    double best = INFINITY;
    std::string name;
    for (const json& line : log())
        if (line.contains("val_loss") && line["val_loss"] < best) {
            best = line["val_loss"].get<double>();
            name = step_folder(line["step"].get<int64_t>());
        }
    EXPECT_TRUE(fs::exists(out + "/" + name)) << name;
    EXPECT_LE(steps().size(), 2u);
    EXPECT_EQ(manifest("step_00000060")["best_step"], manifest(name)["step"]);
    EXPECT_EQ(manifest("step_00000060")["best_loss"], best);
}

// Weights that have diverged are not saved: the good checkpoints stay.
TEST_F(Life, RuinedWeightsAreNotSavedOverGoodOnes) {
    ASSERT_EQ(start(small + "--steps 4 --save-every 1 --out " + out).status, 0);
    Ran r = start(small + "--steps 9 --resume --save-every 1 --lr 1000 --min-lr "
                          "1000 --clip 0 --out " + out);
    EXPECT_EQ(r.status, 1) << r.text;
    EXPECT_HAS(r.text, "note: step 5 is not saved: the weights are ruined: its loss on the last ");
    EXPECT_EQ(steps(), (Names{"step_00000003", "step_00000004"}));

    // Nor do they replace an export.
    ASSERT_EQ(start(small + "--steps 2 --export " + path("e")).status, 0);
    std::string good = read_file(path("e/model.safetensors"));
    Ran e = start(small + "--steps 2 --lr 1000 --min-lr 1000 --warmup 0 --clip 0 --export " +
                  path("e"));
    EXPECT_EQ(e.status, 1);
    EXPECT_HAS(e.text, "--export " + path("e") + ": the weights are ruined");
    EXPECT_EQ(read_file(path("e/model.safetensors")), good);
}

// A save beside the steps is tried by the next step's loss. Where that is bad it never gets a name,
// and the next one is tried on its own text.
TEST_F(Life, ASaveBesideTheStepsIsTriedByTheNextStep) {
    ASSERT_EQ(start(small + "--steps 4 --save-every 1 --out " + out).status, 0);
    Ran r = start(small + "--steps 9 --resume --save-every 1 --lr 1000 --min-lr "
                          "1000 --clip 0 --save-async --out " + out);
    EXPECT_EQ(r.status, 1) << r.text;
    EXPECT_HAS(r.text, "note: step 6 began with a loss far above guessing: the save of step 5 is "
                       "dropped");
    EXPECT_HAS(r.text, "note: step 6 is not saved: the weights are ruined: its loss on the last ");
    EXPECT_EQ(steps(), (Names{"step_00000003", "step_00000004"}));

    // A save that no step has tried yet is tried at the end of the run.
    Ran last = start(small + "--steps 5 --resume --save-every 0.00001m --lr 1000 --min-lr 1000 "
                             "--clip 0 --save-async --out " + out);
    EXPECT_EQ(last.status, 1) << last.text;
    EXPECT_HAS(last.text, "step 5 is not saved: the weights are ruined: its loss on the last ");
    EXPECT_EQ(steps(), (Names{"step_00000003", "step_00000004"}));
}

// A model that has learned its text by heart may be worse than guessing on other text. It is not
// ruined, and is saved.
TEST_F(Life, AModelThatOverfitsIsSaved) {
    std::string train, other;
    for (int i = 0; i < 5000; i++) {
        train += "ab";
        other += "zy";
    }
    ASSERT_EQ(start(small + "--channels 128 --steps 150 --lr 0.01 --schedule constant --data " +
                    put("train.txt", train) + " --val " + put("other.txt", other) + " --out " + out)
                  .status,
              0);
    EXPECT_GT(log().back()["val_loss"], 2 * std::log(256));
    EXPECT_EQ(steps(), Names{"step_00000150"});
}

// ----------------------------------------------------------------------------
// values that are not finite

// For GPT-2 and Llama, and every level of recomputation: all results of a healthy step are finite;
// and if one weight is NaN, the first operator that reads it is named.
TEST(Health, TheFirstValueThatIsNotFiniteIsFound) {
    for (const Shape& shape :
         {small_gpt2(), small_gpt2(false), small_llama(), small_llama(true, true)})
        for (Recompute level : ALL_LEVELS) {
            // Run a healthy step, and look at each action's results.
            PlanOptions o;
            o.B = 2, o.T = 8, o.micro_batches = 2, o.recompute = level;
            Small<float> small(shape, {make_plan({}, make_model(shape), o)});
            Trainer<float, Cpu>& t = small.t;
            t.data.window = random_window(shape, o.T);
            init_weights(t, 3);
            std::vector<std::string> found;
            t.hooks.after = [&](const Action& a) {
                std::string bad = bad_results(t, a);
                if (!bad.empty()) found.push_back(action_text(a, t.model) + ": " + bad);
            };
            run_plan(t, 0);
            EXPECT_EQ(found, Names());

            // Ruin one weight of the second block.
            for (const Parameter& p : t.model.parameters)
                if (p.layer == 2 && p.shape.size() == 2) {
                    address<float>(t, {Kind::WEIGHT, p.bucket})[p.offset + 1] = NAN;
                    EXPECT_HAS(first_bad_weight(t), p.name + ": 1 of ");
                    break;
                }
            run_plan(t, 0);
            ASSERT_FALSE(found.empty());
            EXPECT_HAS(found[0], "F(0,2): ");
            EXPECT_FALSE(has(found[0], "output")) << "the operator inside the block is to be named";
            EXPECT_HAS(found[0], "values are not finite, the first at ");
        }
}

// when_in_step() puts forward before backward, and layers in the direction of the pass.
TEST(Health, TheEarliestOfAllRanksIsNamed) {
    Action f, b;
    f.op = Op::F, f.micro = 1, f.layer = 3;
    b.op = Op::B, b.micro = 0, b.layer = 4;
    EXPECT_LT(when_in_step(f, 5), when_in_step(b, 5));
    Action later = f;
    later.layer = 4;
    EXPECT_LT(when_in_step(f, 5), when_in_step(later, 5));
    later = b;
    later.layer = 3;
    EXPECT_LT(when_in_step(b, 5), when_in_step(later, 5));
}

// find_bad_values() counts bad values over parts of a large array, and gives the others' range.
TEST(Health, BadValuesAreCountedAndTheOthersMeasured) {
    std::vector<float> x((size_t(1) << 20) + 7, 1.5f);
    x[3] = -2;
    EXPECT_EQ(find_bad_values(x.data(), x.size(), Cpu{}).count, 0u);
    x[size_t(1) << 20] = NAN;
    x.back() = INFINITY;
    BadValues bad = find_bad_values(x.data(), x.size(), Cpu{});
    EXPECT_EQ(bad.count, 2u);
    EXPECT_EQ(bad.first, size_t(1) << 20);
    EXPECT_EQ(bad.low, -2);
    EXPECT_EQ(bad.high, 1.5);
}

// A spike is noted once, when it begins: a loss or norm far above the recent steps.
TEST(Spikes, AreFarAboveTheLastSteps) {
    // Normal steps, then spikes of either.
    Spikes s;
    for (int i = 0; i < 200; i++)
        EXPECT_EQ(s.look(i, 3 + 0.1 * std::sin(i), 1 + 0.05 * std::cos(i)), "");
    EXPECT_HAS(s.look(200, 4.0, 1.0), "step 200: the loss of 4 is ");
    EXPECT_EQ(s.look(201, 4.0, 1.0), ""); // noted already
    EXPECT_EQ(s.look(202, 3.0, 1.0), "");
    EXPECT_HAS(s.look(203, 3.0, 2.0), "step 203: the gradient norm of 2 is ");
    EXPECT_EQ(s.look(204, 1.0, 0.5), ""); // a low value is no spike

    // A spike of the norm does not hide one of the loss, and a level that stays becomes normal.
    EXPECT_HAS(s.look(205, 3.0, 3.0), "gradient norm");
    EXPECT_HAS(s.look(206, 9.0, 3.0), "loss of 9");
    std::string last;
    for (int i = 207; i < 500; i++)
        last = s.look(i, 3.0, 3.0);
    EXPECT_EQ(last, "");
    EXPECT_HAS(s.look(500, 3.0, 9.0), "gradient norm of 9");

    // In the first steps of a run there are no spikes.
    Spikes young;
    for (int i = 0; i < 10; i++)
        EXPECT_EQ(young.look(i, i == 9 ? 100 : 3, 1), "");
}

// Weights are ruined if their loss is above twice that of guessing, and above twice the first loss.
TEST(Spikes, BlownUpIsWorseThanGuessing) {
    EXPECT_FALSE(blown_up(11.0, 256, 5.5)); // ln 256 is 5.545
    EXPECT_TRUE(blown_up(11.2, 256, 5.5));
    EXPECT_FALSE(blown_up(30, 256, 20)); // the run began with a worse loss than guessing
    EXPECT_TRUE(blown_up(NAN, 256, 5.5));
    EXPECT_TRUE(blown_up(INFINITY, 256, 5.5));
}

// Flip the lowest bit of a float in a process's memory: the first of 32 values of 1.0 in a row,
// which are a norm's untrained weights. Returns "", or why it could not.
static std::string turn_a_bit_of_ones(pid_t pid) {
    std::vector<float> ones(32, 1.0f);
    int memory = open(concat("/proc/", pid, "/mem").c_str(), O_RDWR | O_CLOEXEC);
    if (memory < 0) return concat("/proc/", pid, "/mem: ", strerror(errno));

    // Search the regions that are writable and have no file behind them.
    std::ifstream maps(concat("/proc/", pid, "/maps"));
    std::string found = "no norm's weights in memory";
    for (std::string line; found != "" && std::getline(maps, line);) {
        unsigned long long first = 0, end = 0, file = 0;
        char may[8] = {};
        if (sscanf(line.c_str(), "%llx-%llx %7s %*s %*s %llu", &first, &end, may, &file) != 4)
            continue;
        if (std::string(may) != "rw-p" || file) continue;
        std::string bytes(end - first, 0);
        if (pread(memory, bytes.data(), bytes.size(), off_t(first)) != ssize_t(bytes.size()))
            continue;

        // Find the floats, and write the changed byte back.
        size_t at =
            bytes.find(std::string(reinterpret_cast<char*>(ones.data()), 32 * sizeof(float)));
        if (at == std::string::npos) continue;
        bytes[at] ^= 1;
        bool written = pwrite(memory, &bytes[at], 1, off_t(first + at)) == 1;
        found = written ? "" : concat("/proc/", pid, "/mem: ", strerror(errno));
    }
    close(memory);
    return found;
}

// If memory fails while a run trains, the next comparison ends the run, whether of --verify-every
// or before a save, and the checkpoints that it has saved are good.
TEST_F(Life, ATurnedBitInMemoryEndsTheRun) {
    std::string ranks = program() + " " + small + "--local-ranks 2 --lr 0 --steps 1000000 ";
    std::string ends =
        "weight: ranks 0 and 1 have different values; a replay of the step is the same on all "
        "ranks, as "
        "if memory had failed: suspect that machine, and leave it out";
    for (std::string compares : {std::string("--verify-every 1"), "--save-every 5 --out " + out}) {
        SCOPED_TRACE(compares);
        std::string said = path("said_" + compares.substr(2, 4));
        Child child(ranks + compares, said);
        child.wait_for_step(12, 1000000);
        std::string wrong = turn_a_bit_of_ones(child.pid);
        if (has(wrong, "/mem: ")) GTEST_SKIP() << "skipped: " << wrong;
        ASSERT_EQ(wrong, "");
        EXPECT_EQ(child.wait(), 1);
        EXPECT_HAS(child.text(), ends);

        // The hint to resume appears only if there is a checkpoint.
        EXPECT_EQ(has(child.text(), "; --resume goes on from the last checkpoint"),
                  has(compares, out));
    }

    // The checkpoints before the failure are sound.
    int64_t saved = checkpoint_steps(out).front();
    Ran r = start(small + concat("--resume --out ", out, " --steps ", saved + 1));
    EXPECT_EQ(r.status, 0) << r.text;
    EXPECT_HAS(r.text, concat("resumed at step ", saved));
}

// Adapters in bf16: the frozen weights have no masters, so checkpoints and exports take the weights
// themselves. A resumed run ends with the bits of one that was not stopped, and the merged export
// evaluates like the model that was trained.
TEST_F(Life, AdaptersGoOnAndAreMerged) {
    std::string flags = small + "--precision bf16 --lora 4 --lr 0.05 --schedule constant ";
    std::string merged = path("merged");
    Ran r = goes_on(flags, 60, "--merge --export " + merged);

    // The folder says which adapters it has, and what flags change is said.
    Ran alone = start("--resume --eval --eval-tokens 256 --out " + out);
    EXPECT_EQ(alone.status, 0) << alone.text;
    alone = start("--resume --steps 61 --lora-alpha 3 --out " + out);
    EXPECT_HAS(alone.text, "--lora-alpha was 8");

    // Compare losses. A base of zeros would guess, which costs 5.545 nats a byte. Merging rounds
    // weights to bf16, by about 2^-9 of themselves.
    Ran read = start("--eval --seq 32 --eval-tokens 256 --data " + path("text.txt") +
                     " --model " + merged);
    ASSERT_EQ(read.status, 0) << read.text;
    double trained = number_behind(r.text, "val loss ");
    EXPECT_LT(trained, 5.5);
    EXPECT_NEAR(number_behind(read.text, "val loss "), trained, 0.01);
}

// Adapters in the upper block alone: a run goes on to the same bits, in a pipeline too, whose first
// stage runs forward alone. A checkpoint remembers the blocks; others find no adapters in it.
TEST_F(Life, AdaptersOfUpperBlocksGoOn) {
    std::string two = small;
    two.replace(two.find("--layers 1"), 10, "--layers 2");
    std::string flags = two + "--lora 4 --lora-layers 1 --lr 0.05 --schedule constant ";
    std::string whole = path("whole"), peft = path("peft");

    // Where it has no AVX-512, oneDNN sums thin products otherwise with another number of threads.
    std::string one = "OMP_NUM_THREADS=1";
    ASSERT_EQ(start(flags + "--steps 8 --export " + peft + " --out " + whole, one).status, 0);
    ASSERT_EQ(start(flags + "--steps 4 --local-ranks 2 --pp 2 --out " + out, one).status, 0);
    Ran r = start("--resume --steps 8 --out " + out, one);
    ASSERT_EQ(r.status, 0) << r.text;
    EXPECT_EQ(state_in(whole + "/step_00000008"), state_in(out + "/step_00000008"));
    json config = json::parse(std::ifstream(peft + "/adapter_config.json"));
    EXPECT_EQ(config["layers_to_transform"], json({1}));

    // Other blocks and other matrices than the checkpoint's.
    r = start("--resume --steps 9 --lora-layers all --out " + out);
    EXPECT_NE(r.status, 0);
    EXPECT_HAS(r.text, "step_00000008: h.0.attn.c_attn.lora_A.weight is in this run, and not in "
                       "it: give the --lora-layers and --lora-targets that it was trained with");
    r = start("--resume --steps 9 --lora-targets attention --out " + out);
    EXPECT_NE(r.status, 0);
    EXPECT_HAS(r.text, "h.1.mlp.c_fc.lora_A.weight is in it, and not in this run");

    // --explain says where passes end.
    r = start(flags + "--explain");
    EXPECT_HAS(r.text, " are frozen; backward passes end at block 1\n");
    EXPECT_HAS(r.text, "B(0,3..2)\n");
    r = start(flags + "--explain --local-ranks 2 --pp 2");
    EXPECT_HAS(r.text, "             0  0..1\n");
}

// A prefix in bf16: a resumed run ends with the bits of one that was not stopped, on one rank and on
// four. The folder that it exports evaluates like the model that was trained, and is trained on.
TEST_F(Life, APrefixGoesOnAndComesBack) {
    std::string base = path("base"), prefix = path("prefix");
    ASSERT_EQ(start(small + "--steps 20 --lr 0.01 --export " + base).status, 0);
    std::string flags = "--seq 32 --micro-batch 2 --batch-tokens 256 --sample-tokens 0 "
                        "--eval-tokens 256 --data " + path("text.txt") + " --tokenizer byte "
                        "--model " + base, train = flags + " --precision bf16 --prefix 5 --lr 0.05 "
                        "--schedule constant ";
    int number = 0;
    for (std::string layout : {"", "--local-ranks 4 --tp 2 --zero 3 "}) {
        SCOPED_TRACE(layout);
        out = path(concat("out", number++));
        Ran r = goes_on(train + layout, 20, "--export " + prefix);

        // Evaluate the folder in bf16, as training does: the loss is the same to the log's digits.
        // Two tensor-parallel ranks round their partial sums to bf16, one in 512 of an activation.
        Ran read = start(flags + " --precision bf16 --eval --adapter " + prefix);
        EXPECT_EQ(read.status, 0) << read.text;
        EXPECT_NEAR(number_behind(read.text, "val loss "), number_behind(r.text, "val loss "),
                    layout.empty() ? 0 : 1e-3);
    }

    // A folder's prefix is trained on, generates, and stands before fewer positions of text.
    Ran r = start(flags + " --steps 2 --sample-tokens 8 --adapter " + prefix);
    EXPECT_EQ(r.status, 0) << r.text;
    r = start(flags + " --steps 2 --prefix 5 --adapter " + prefix);
    EXPECT_HAS(r.text, " is for other adapters: leave one of them out");
    r = start(flags + " --steps 2 --precision bf16 --fp8 block --adapter " + prefix);
    EXPECT_HAS(r.text, "--fp8 block is not built with --adapter " + prefix);
}

// A checkpoint of adapters holds the adapters alone, and names its base. Beside a base of 4 or 8
// bits it resumes to the same bits; beside another base it is refused.
TEST_F(Life, ACheckpointOfAdaptersNamesItsBase) {
    // Make two bases.
    std::string base = path("base"), other = path("other");
    ASSERT_EQ(start(small + "--steps 0 --seed 1 --export " + base).status, 0);
    ASSERT_EQ(start(small + "--steps 0 --seed 2 --export " + other).status, 0);
    std::string flags = "--seq 32 --micro-batch 4 --batch-tokens 256 --sample-tokens 0 "
                        "--eval-tokens 256 --lora 4 --lr 0.05 --schedule constant --data " +
                        path("text.txt") + " --tokenizer byte ";

    // Train 20 steps at once, and ten and ten.
    int number = 0;
    for (std::string weights : {" --weights nf4", " --weights int8 --save-async"}) {
        SCOPED_TRACE(weights);
        out = path(concat("out", number++));
        goes_on(flags + weights + " --model " + base, 20);

        // Nothing of the base is in the files.
        json m = manifest("step_00000010");
        for (const json& file : m["files"])
            for (const auto& [name, range] : file["tensors"].items()) EXPECT_HAS(name, ".lora_");
        EXPECT_EQ(m["base"]["name"], base);
        EXPECT_EQ(m["base"]["bytes"], fs::file_size(base + "/model.safetensors"));
    }

    // Two ranks can go on. Another base is refused; the same one in a renamed folder is not.
    std::string go_on = flags + "--resume --out " + out + " --model ";
    Ran r = start(go_on + base + " --steps 22 --local-ranks 2");
    EXPECT_EQ(r.status, 0) << r.text;
    r = start(go_on + other + " --steps 30");
    EXPECT_NE(r.status, 0);
    EXPECT_HAS(r.text, "its adapters were trained beside \"" + base + "\" of ");
    EXPECT_HAS(r.text, "; this run has \"" + other + "\" of ");
    fs::rename(base, base + ".moved");
    r = start(go_on + base + ".moved --eval");
    EXPECT_EQ(r.status, 0) << r.text;
}

// ----------------------------------------------------------------------------
// where time goes

// Kinds of work may be nested; each second is of one kind, all together the time since the start.
TEST(Account, EverySecondHasOneKind) {
    Account a;
    double start = a.since;
    auto wait = [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); };
    wait();
    {
        Spend evaluate(a, Work::EVALUATE);
        wait();
        Spend save(a, Work::SAVE);
        wait(), wait();
    }
    EXPECT_EQ(a.now, Work::START);
    a.turn_to(Work::REST);
    EXPECT_NEAR(a.total(), a.since - start, 1e-9);
    EXPECT_GE(a.seconds[size_t(Work::START)], 0.02);
    EXPECT_GE(a.seconds[size_t(Work::EVALUATE)], 0.02);
    EXPECT_GE(a.seconds[size_t(Work::SAVE)], 0.04);
    EXPECT_EQ(a.seconds[size_t(Work::STEPS)], 0);

    // The text begins with the largest share, and leaves out those below a thousandth.
    Account b;
    b.seconds = {100, 2.5, 800, 0, 0.5, 97, 0, 0};
    EXPECT_HAS(account_text(b), ": 80.0% steps, 10.0% start, 9.7% save, 0.2% load");
    EXPECT_EQ(account_text(b).find("sample"), std::string::npos);
}

// seconds_waited() measures how long a rank has waited for others, and the account moves that time
// from the steps to the waits.
TEST(Account, WaitsForOthersAreMeasured) {
    std::array<double, 2> waited = {};
    run_local_ranks(2, {}, [&](const Comm& world) {
        if (world.rank == 1) std::this_thread::sleep_for(std::chrono::milliseconds(100));
        barrier(world, Cpu{});
        waited[size_t(world.rank)] = seconds_waited(world.info->notes);

        // A wait for the own device counts nothing.
        { NoteWait device(world.info->notes, false); }
        EXPECT_EQ(waited[size_t(world.rank)], seconds_waited(world.info->notes));
    });
    EXPECT_GE(waited[0], 0.09);
    EXPECT_LT(waited[1], waited[0]);
    Account a;
    a.turn_to(Work::STEPS);
    a.recount(Work::STEPS, Work::WAIT, 2);
    a.turn_to(Work::REST);
    EXPECT_EQ(a.seconds[size_t(Work::WAIT)], 2);
    std::vector<TimedAction> laps = {
        {"F(0,1)", 0, 1}, {"WAIT REDUCE(1)", 1, 3}, {"WAIT sends of a", 4, 4.5}};
    EXPECT_EQ(waiting_seconds(laps), 2.5);
    EXPECT_NEAR(a.total(), a.seconds[size_t(Work::START)], 0.1);
}

// The log has waits as a kind of their own.
TEST_F(Life, WaitsForOthersAreAPartOfTheTime) {
    for (int ranks : {1, 2}) {
        fs::remove_all(out);
        Ran r = ::start(
            small + concat("--batch-tokens 512 --steps 8 --local-ranks ", ranks, " --out ", out));
        ASSERT_EQ(r.status, 0) << r.text;
        json seconds = lines(true).at(0)["seconds"];
        EXPECT_EQ(seconds["wait"].get<double>() > 0, ranks == 2);
        EXPECT_GT(seconds["steps"].get<double>(), 0);
    }
}

// The log's last line accounts for the program's time, and for the steps that were done twice:
// those after the last checkpoint of a run that was killed.
TEST_F(Life, TheLogSaysWhereTimeWent) {
    // Kill a run.
    Child killed = begin("--steps 1000000 --save-every 5 --out " + out);
    killed.wait_for_step(12, 1000000);
    kill(killed.pid, SIGKILL);
    killed.wait();
    int64_t done = log().back()["step"].get<int64_t>();
    int64_t saved = checkpoint_steps(out).front();
    EXPECT_EQ(lines(true).size(), 0u);

    // Go on for a few steps.
    std::string more = concat("--resume --eval-every 2 --out ", out, " --steps ", saved + 4);
    double start = clock_seconds();
    Ran r = ::start(small + more);
    double wall = clock_seconds() - start;
    ASSERT_EQ(r.status, 0) << r.text;
    EXPECT_HAS(r.text, "\n  time        ");
    ASSERT_EQ(lines(true).size(), 1u);
    json line = lines(true)[0];
    EXPECT_EQ(line["step"], saved + 4);
    EXPECT_EQ(line["repeated_steps"], done - saved);

    // Each kind has its time, and no second is counted twice.
    double sum = 0;
    for (auto& [kind, seconds] : line["seconds"].items()) sum += seconds.get<double>();
    EXPECT_NEAR(sum, line["wall"].get<double>(), 1e-6);
    EXPECT_LE(sum, wall);
    for (const char* kind : {"start", "load", "steps", "evaluate", "save"})
        EXPECT_GT(line["seconds"][kind].get<double>(), 0) << kind;
    EXPECT_EQ(line["seconds"]["export"], 0);
}

// ----------------------------------------------------------------------------
// fp16

// With too large a scale every step overflows and is skipped; after 64 in a row the run ends.
TEST_F(Life, StepsThatAllOverflowEndTheRun) {
    Ran run = start(small + "--precision fp16 --loss-scale 1073741824 --steps 100 --out " + out);
    EXPECT_EQ(run.status, 1);
    EXPECT_HAS(run.text, "note: step 1: gradients overflow fp16: the step is skipped");
    EXPECT_HAS(run.text, "step 64: 64 steps in a row overflow fp16");
    EXPECT_EQ(log().size(), 64u) << "the first line, and 63 steps";
    EXPECT_EQ(log()[1].count("grad_norm"), 0u);
}

// The first steps are skipped until the scale fits. A run stopped among them resumes to the same bits.
TEST_F(Life, ARunGoesOnAmongSkippedSteps) {
    const std::string fp16 = small + "--precision fp16 --steps 12 --save-every 5 --keep 9 ";
    ASSERT_EQ(start(fp16 + "--out " + out).status, 0);
    std::string other = path("other");
    fs::create_directory(other);
    fs::copy(out + "/step_00000005", other + "/step_00000005", fs::copy_options::recursive);
    Ran rest = start("--resume --out " + other);
    ASSERT_EQ(rest.status, 0) << rest.text;
    EXPECT_TRUE(state_in(out + "/step_00000012") == state_in(other + "/step_00000012"));
    json loss_scale = manifest("step_00000012")["loss_scale"];
    EXPECT_EQ(json::parse(read_file(other + "/step_00000012/manifest.json"))["loss_scale"],
              loss_scale);

    // A fixed scale on the command line replaces the checkpoint's.
    rest = start("--resume --loss-scale 512 --steps 13 --out " + out);
    ASSERT_EQ(rest.status, 0) << rest.text;
    EXPECT_EQ(manifest("step_00000013")["loss_scale"]["scale"], 512);
}

// ----------------------------------------------------------------------------
// what the machine has

// Without AVX-512 oneDNN multiplies no bf16: our own loops do, and the first line of the run says so.
TEST_F(Life, Bf16TrainsWithoutAvx512) {
    Ran r = start(small + "--precision bf16 --steps 2", "ONEDNN_MAX_CPU_ISA=AVX2");
    EXPECT_EQ(r.status, 0) << r.text;
    EXPECT_HAS(r.text, "step  2/2 | loss ");
    if (has(r.text, "by oneDNN")) {
        EXPECT_HAS(r.text, "by oneDNN, of bf16 by plain loops (no AVX-512)");
    }
}

// A run that needs more memory than the machine has is refused.
TEST_F(Life, MemoryThatIsNotThereIsRefused) {
    if (memory_left(Cpu{}) > size_t(1) << 40) GTEST_SKIP() << "skipped: more than a TiB of memory";
    Ran r = start("--model llama3-70b --steps 1 --data " + path("text.txt"));
    EXPECT_EQ(r.status, 1);
    EXPECT_HAS(r.text, "this run needs 1.1 TiB, and ");
    EXPECT_HAS(r.text, "no --micro-batch or --recompute makes it fit");
}

// --memory bounds a run: one that needs more is refused, with flags that fit.
TEST_F(Life, AMemoryThatIsGivenIsABound) {
    // Each thread has scratch of its own, so their number is part of what a run needs.
    auto run = [&](const std::string& flags) {
        const std::string deep = small + "--layers 5 --seq 64 --micro-batch 8 --steps 1 ";
        return start(deep + flags, "OMP_NUM_THREADS=2");
    };
    Ran r = run("--memory 0.004");
    EXPECT_EQ(r.status, 1);
    EXPECT_HAS(
        r.text,
        "this run needs 8.4 MiB, and --memory 0.004 is less: these flags fit: --micro-batch 2");
    EXPECT_EQ(run("--memory 0.004 --micro-batch 2").status, 0);
    r = run("--memory 0.0042 --explain --local-ranks 2 --pp 2 --micro-batch 1 --recompute full");
    EXPECT_EQ(r.status, 0) << r.text;

    // --explain prints the plan, and then refuses it.
    r = run("--memory 0.004 --explain");
    EXPECT_EQ(r.status, 1);
    EXPECT_HAS(r.text, "actions of a step") << "the plan is printed first";
    EXPECT_HAS(r.text, "--memory 0.004 is less");

    // If no flags fit, the message says so.
    EXPECT_HAS(run("--memory 0.0001").text, "no --micro-batch or --recompute makes it fit");
    EXPECT_HAS(run("--recompute auto --explain").text, "give --memory GiB");

    // A pipeline names the rank that needs most.
    r = run("--memory 0.001 --local-ranks 2 --pp 2");
    EXPECT_EQ(r.status, 1);
    EXPECT_HAS(r.text, "rank 0 needs ");
}

// --recompute auto prints the levels that it chooses, and they change no bit, also after a resume.
TEST_F(Life, ChosenRecomputationChangesNoBit) {
    const std::string deep =
        small + "--layers 5 --seq 64 --micro-batch 8 --steps 4 --save-every 2 ";
    ASSERT_EQ(start(deep + "--out " + out).status, 0);
    std::string other = path("other");
    fs::create_directory(other);
    fs::copy(out + "/step_00000002", other + "/step_00000002", fs::copy_options::recursive);
    Ran rest = start("--resume --recompute auto --memory 0.006 --out " + other);
    ASSERT_EQ(rest.status, 0) << rest.text;
    EXPECT_HAS(rest.text, "recompute: layers 1");
    EXPECT_HAS(rest.text, "5 none; ");
    EXPECT_HAS(rest.text, "% more FLOPs\n  next cheaper: ");
    EXPECT_TRUE(state_in(out + "/step_00000004") == state_in(other + "/step_00000004"));

    // Each stage has a choice of its own, the same on all its ranks. Without --memory the machine
    // has enough, so nothing is recomputed.
    for (const char* flags :
         {"--local-ranks 4 --pp 2 --dp 2 --zero 2 --memory 0.0035 --micro-batch 4",
          "--local-ranks 2 --tp 2"}) {
        std::string folder = path(std::string("ranks") + flags[14]);
        rest = start(deep + "--recompute auto --out " + folder + " " + flags);
        ASSERT_EQ(rest.status, 0) << rest.text;
        bool stages = has(flags, "--pp");
        EXPECT_HAS(rest.text,
                   stages ? "recompute, stage 1: layers " : "recompute: layers 1..5 none");
    }
}

// Parked blocks that --recompute auto chooses change no bit of a run.
TEST_F(Life, ParkedBlocksChangeNoBit) {
    const std::string deep = small + "--layers 6 --seq 64 --micro-batch 8 --steps 2 ";
    ASSERT_EQ(start(deep + "--out " + out).status, 0);

    // Train with as little memory as parking needs.
    std::string other = path("parked");
    Ran r = start(deep + "--recompute auto --memory 0.0055 --offload activations --offload-to " + path("") +
              " --out " + other);
    ASSERT_EQ(r.status, 0) << r.text;
    EXPECT_HAS(r.text, " offloaded, ");
    EXPECT_HAS(r.text, "waiting for moves, by the rates of cpu");
    EXPECT_TRUE(state_in(out + "/step_00000002") == state_in(other + "/step_00000002"));

    // A stage of a pipeline has parked blocks of its own.
    r = start(deep + "--recompute auto --memory 0.0034 --offload activations --offload-to " + path("") +
              " --local-ranks 4 --pp 2 --dp 2 --zero 3 --micro-batch 4");
    ASSERT_EQ(r.status, 0) << r.text;
    EXPECT_HAS(r.text, "recompute, stage 1: layers ");
}

// flags_that_fit() finds the smallest change of flags that fits.
TEST(Limits, FlagsThatFitAreFound) {
    llmc::Run run;
    Config& c = run.config;
    c.layers = 2, c.seq = 64, c.micro_batch = 8, c.sample_tokens = 0;
    run.shape = choose_shape(c);
    ASSERT_EQ(config_check(c, run.shape), "");
    size_t now = arena_bytes<float>(run, c, 0, Cpu{});
    Config half = c;
    half.micro_batch = 4;
    size_t less = arena_bytes<float>(run, half, 0, Cpu{});
    ASSERT_LT(less, now);
    EXPECT_EQ(flags_that_fit<float>(run, 0, now - 1, Cpu{}), " --micro-batch 4");
    EXPECT_EQ(flags_that_fit<float>(run, 0, less - 1, Cpu{}), " --micro-batch 2");
    EXPECT_EQ(flags_that_fit<float>(run, 0, 1000, Cpu{}), "");
}

// Threads as ranks count who shares the machine; the bytes of a rank are those of its layout.
TEST(Limits, RanksOfThisMachineShareIt) {
    std::vector<size_t> bytes(2, 0);
    run_local_ranks(2, {}, [&](const Comm& world) {
        llmc::Run run;
        Config& c = run.config;
        c.layers = 2, c.seq = 64, c.local_ranks = 2, c.tp = 2, c.sample_tokens = 0;
        run.shape = choose_shape(c);
        run.world = world;
        EXPECT_EQ(config_check(c, run.shape), "");
        EXPECT_EQ(ranks_here(run.world, Cpu{}), 2);
        bytes[world.rank] = arena_bytes<float>(run, c, world.rank, Cpu{});
    });
    EXPECT_GT(bytes[0], 0u);
    EXPECT_GT(bytes[1], 0u);
}

// A small file system in memory, while this lives.
struct SmallDisk {
    std::string at;
    bool mounted;
    SmallDisk(const std::string& path, const std::string& size) : at(path) {
        fs::create_directories(at);
        mounted = mount("none", at.c_str(), "tmpfs", 0, size.c_str()) == 0;
    }
    ~SmallDisk() {
        if (mounted) umount(at.c_str());
    }
};

// A disk that is too small for the checkpoints is noticed before the first step.
TEST_F(Life, DisksThatAreTooSmallAreSeenFirst) {
    SmallDisk disk(path("disk"), "size=1m");
    if (!disk.mounted) GTEST_SKIP() << "skipped: no right to mount a disk";
    Ran r = start(small + "--channels 128 --steps 2 --out " + disk.at + "/o");
    EXPECT_EQ(r.status, 1) << r.text;
    EXPECT_HAS(r.text, "3 checkpoints of 4.1 MiB do not fit the ");
    EXPECT_EQ(r.text.find("step 1/2"), std::string::npos);
}

// A disk that fills up during a run ends nothing: saves fail with a note, and lines of the log wait
// in memory until there is room. An asynchronous save reports its error at a later step.
struct LifeFull : Life, testing::WithParamInterface<const char*> {};
TEST_P(LifeFull, ADiskThatFillsUpEndsNothing) {
    SmallDisk disk(path("disk"), "size=4m");
    if (!disk.mounted) GTEST_SKIP() << "skipped: no right to mount a disk";
    out = disk.at + "/o";
    Child child = begin(std::string(GetParam()) + "--steps 1000000 --save-every 5 --out " + out);
    child.wait_for_step(12, 1000000);

    // Fill the disk; again and again, because a save that fails leaves room that the log can use.
    // The folder and its newest checkpoint stay as they are.
    for (int i = 0; i < 300 && !has(child.text(), "its lines wait in memory"); i++) {
        std::ofstream full(disk.at + "/full", std::ios::app);
        full << std::string(size_t(8) << 20, 'x');
        full.close();
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }

    // Make room again, and stop the run.
    child.wait_for_text("is not saved: ");
    child.wait_for_text("its lines wait in memory");
    fs::remove(disk.at + "/full");
    kill(child.pid, SIGINT);
    EXPECT_EQ(child.wait(), 128 + SIGINT) << child.text();

    // The log and the last checkpoint are complete, as if the disk had never been full.
    std::vector<json> lines = log();
    for (size_t i = 1; i < lines.size(); i++)
        EXPECT_EQ(lines[i]["step"], i);
    EXPECT_EQ(steps().back(), step_folder(int64_t(lines.size()) - 1));
}
INSTANTIATE_TEST_SUITE_P(, LifeFull, testing::Values("", "--save-async "));

// A memory that holds each machine's own part and not its neighbour's saves nothing, says so once,
// and changes nothing else.
TEST_F(Life, AMemoryWithoutRoomForTheCopyEndsNothing) {
    std::string flags = small + "--local-ranks 2 --zero 1 --steps 4 --out ", whole = path("whole");
    std::string last = "/" + step_folder(4);
    ASSERT_EQ(start(flags + whole).status, 0);
    size_t bytes = 0;
    for (const char* file : {"/rank_00000.safetensors", "/rank_00001.safetensors"})
        bytes += fs::file_size(whole + last + file);

    // Both machines share a memory of one and a half times all parts.
    SmallDisk memory(path("memory"), concat("size=", bytes * 3 / 2));
    if (!memory.mounted) GTEST_SKIP() << "skipped: no right to mount a disk";
    Ran r = start(flags + out + " --buddy " + memory.at + "/m%r:1");
    EXPECT_EQ(r.status, 0) << r.text;
    size_t first = r.text.find("note: step 1 is not saved in memory: " + memory.at);
    ASSERT_NE(first, std::string::npos) << r.text;
    EXPECT_HAS(r.text, ": No space left on device");
    EXPECT_EQ(r.text.find("is not saved in memory", first + 40), std::string::npos) << r.text;
    EXPECT_TRUE(state_in(out + last) == state_in(whole + last));
}

// On a full disk a run trains to the end and says what failed; its checkpoints stay, and it resumes.
TEST_F(Life, AFullDiskLosesNothing) {
    std::string flags = small + "--save-every 0 --out " + out + " --steps ";
    ASSERT_EQ(start(flags + "2").status, 0);
    auto before = state_in(out + "/step_00000002");

    // Limit files to 8 KiB: enough for the log's first lines, and for no checkpoint.
    Ran r = start(flags + "40 --resume", "trap '' XFSZ; ulimit -f 8;");
    EXPECT_EQ(r.status, 1);
    for (const char* said : {"step  40/40 | loss ", "step 40 is not saved: ", "log.jsonl: cannot be"})
        EXPECT_HAS(r.text, said);
    EXPECT_TRUE(state_in(out + "/step_00000002") == before);
    EXPECT_EQ(start(flags + "40 --resume").status, 0);
}

// A timeline or an export that cannot be written is refused before the first step.
TEST_F(Life, PicturesAndExportsAreTriedFirst) {
    for (std::string flag : {"--timeline /nonexist/x.svg", "--export /proc/x", "--export ."}) {
        Ran r = start(small + "--steps 3 --out " + out + " " + flag);
        EXPECT_EQ(r.status, 1) << flag;
        EXPECT_EQ(r.text.find("step 1/3"), std::string::npos) << r.text;
        EXPECT_FALSE(fs::exists(out)) << flag;
    }
}

// Names of files and prompts need not be UTF-8.
TEST_F(Life, AnyBytesAreAName) {
    std::string odd = path("caf\xe9");
    fs::copy(path("text.txt"), odd + ".txt");
    Ran r = start(small + "--steps 1 --sample-tokens 4 --data '" + odd +
                  ".txt' --prompt '\xff' --out '" + odd + "' --export '" + odd +
                  "_e' --timeline '" + odd + ".svg'");
    EXPECT_EQ(r.status, 0) << r.text;
    for (const char* part : {"/step_00000001", "_e/model.safetensors", ".svg"})
        EXPECT_TRUE(fs::exists(odd + part)) << part;
    EXPECT_EQ(start(small + "--eval --resume --out '" + odd + "'").status, 0);
    EXPECT_EQ(start(small + "--steps 1 --data '" + path("\xe9") + "'").status, 1);
}

// Text for a trained model needs the model's tokenizer: its loss on another one's tokens would mean
// nothing. New weights may take any.
TEST_F(Life, AModelsTextNeedsItsTokenizer) {
    ASSERT_EQ(start(small + "--vocab 300 --steps 1 --export " + path("e")).status, 0);
    std::string model = "--sample-tokens 0 --seq 32 --model " + path("e") + " --data " +
                        path("text.txt") + " ";
    for (const char* what : {"--eval", "--steps 1"}) {
        Ran r = start(model + what);
        EXPECT_EQ(r.status, 1) << r.text;
        EXPECT_HAS(r.text, "the model has 300 tokens, --tokenizer byte writes 256");
    }
    EXPECT_EQ(start(model + "--scratch --steps 1").status, 0);
}
