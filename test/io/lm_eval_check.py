#!/usr/bin/env python3
"""Scores of --eval against lm-evaluation-harness's own, on all six tasks.

usage: test/io/lm_eval_check.py [TRAIN_GPT]      minutes; pip install lm_eval torch accelerate

Trains a small model with GPT-2's tokens on passages of a few words, exports it, makes questions of
every kind (marks, odd white space, letters of two bytes, contexts longer than the model's
positions), and compares accuracies, standard errors and perplexity. The harness's tasks are its own
files with another data set. Then the HellaSwag questions of the fixtures with stories260K, whose
tokens are made by a few lines here.
"""
import json, os, random, re, shutil, struct, subprocess, sys, tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "test/harness"))
from fixtures import FIXTURES
try:
    import accelerate, lm_eval, lm_eval.tasks, torch, transformers
    from lm_eval.models.huggingface import HFLM
except ImportError as e:
    sys.exit(print(f"skipped: {e}"))
if not os.path.exists(FIXTURES):
    sys.exit(print("skipped: no fixtures; FIXTURES=FOLDER says where they are"))
GPT2 = os.path.join(FIXTURES, "tokenizers/gpt2")
TOK512 = os.path.join(FIXTURES, "tokenizers/tinystories512/tok512.bin")
STORIES = os.path.join(FIXTURES, "checkpoints/stories260K/hf")
HELLASWAG = os.path.join(FIXTURES, "eval/hellaswag_val_first400.txt")
TEXT = os.path.join(FIXTURES, "text/tinyshakespeare.txt")
PROGRAM = sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "build/train_gpt")
TASKS = {  # paths of the harness's files
    "hellaswag": "hellaswag/hellaswag", "arc-easy": "arc/arc_easy",
    "arc-challenge": "arc/arc_challenge", "piqa": "piqa/piqa",
    "winogrande": "winogrande/default", "lambada": "lambada/lambada_openai",
}


# ---------------------------------------------------------------------------
# questions


def questions(words, pick, count):
    """(task, a line) for all tasks but lambada."""
    spaces = [" "] * 12 + ["  ", " [title] ", " [mark] ", "\u00a0", " \u00e9t\u00e9 "]

    def text(low, high):
        some = (pick.choice(words) + pick.choice(spaces) for _ in range(pick.randint(low, high)))
        return "".join(some).strip() + "."

    for _ in range(count):
        context = text(200, 300) if pick.random() < 0.1 else text(3, 20)
        endings, label = [text(1, 8) for _ in range(4)], pick.randrange(4)
        yield "hellaswag", {"activity_label": text(1, 2), "ctx_a": context, "ctx_b": text(1, 3),
                            "endings": endings, "label": str(label)}
        yield pick.choice(["arc-easy", "arc-challenge"]), {
            "question": context + " ", "answerKey": "ABCD"[label],
            "choices": {"text": endings, "label": list("ABCD")}}
        yield "piqa", {"goal": context, "sol1": endings[0], "sol2": endings[1], "label": label % 2}
        yield "winogrande", {"sentence": context[:-1] + " _ " + endings[2], "option1": endings[0],
                             "option2": endings[1], "answer": str(1 + label % 2)}


def passages(words, pick, count):
    return [" ".join(pick.choice(words) for _ in range(pick.choice([1, 5, 20, 300])))
            for _ in range(count)]


def write_lines(path, lines):
    with open(path, "w", encoding="utf-8") as out:
        out.writelines((l if isinstance(l, str) else json.dumps(l)) + "\n" for l in lines)
    return path


def real_questions():
    """The fixture's: texts already, and so without the harness's preparation."""
    with open(HELLASWAG, encoding="utf-8") as f:
        lines = f.read().splitlines()
    for at in range(0, len(lines), 6):
        yield {"query": lines[at], "choices": lines[at + 2:at + 6], "label": lines[at + 1]}


# ---------------------------------------------------------------------------
# scores: {(task, metric): (value, error)} as printed digits


def run(flags, **files):
    command = [PROGRAM] + [word.format(**files) for word in flags.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ours(model, tokenizer, files):
    text = run("--model {model} --tokenizer {tokenizer} --data {data} --eval --seq 256 "
               "--eval-tokens 256 --eval {tasks}", model=model, tokenizer=tokenizer, data=TEXT,
               tasks=",".join(f"{name}={path}" for name, path in files.items()))
    return {(name, metric): (value, error)
            for name, rest in re.findall(r"^([a-z-]+) \d+/\d+  (acc .*)$", text, re.M)
            for metric, value, error in re.findall(r"(\w+) (\S+) \+- (\S+)", rest)}


def copy_task(name, path, folder, prepared):
    """The harness's task with a file of ours as its data set."""
    source = os.path.join(os.path.dirname(lm_eval.__file__), "tasks", TASKS[name] + ".yaml")
    shutil.copytree(os.path.dirname(source), folder,
                    ignore=lambda _, all: [f for f in all if not f.endswith(".py")])
    # arc-challenge takes everything but its name from arc-easy.
    with open(source.replace("arc_challenge", "arc_easy"), encoding="utf-8") as f:
        lines = f.read().splitlines()
    ours = r"(tag|task|group|dataset_\w+|\w+_split):|  ?- (\w+|ai2_arc)$"
    lines = [l for l in lines if not re.match(ours + ("|process_docs" if prepared else ""), l)]
    write_lines(os.path.join(folder, "task.yaml"), lines + [
        f"task: our_{name}", "dataset_path: json", "test_split: test",
        f"dataset_kwargs: {{data_files: {{test: {path}}}}}"])


def harness(lm, folder, files, prepared=False):
    tasks = os.path.join(folder, "tasks")
    for name, path in files.items():
        copy_task(name, path, os.path.join(tasks, name), prepared)

    manager = lm_eval.tasks.TaskManager(include_path=tasks, include_defaults=False)
    results = lm_eval.simple_evaluate(model=lm, tasks=[f"our_{name}" for name in files],
                                      task_manager=manager, bootstrap_iters=100)["results"]
    formats = {"acc": "%.4f", "acc_norm": "%.4f", "perplexity": "%.4g"}
    return {(name, metric): (digits % found[f"{metric},none"],
                             "%.4f" % found[f"{metric}_stderr,none"])
            for name in files for found in [results[f"our_{name}"]]
            for metric, digits in formats.items() if f"{metric},none" in found}


def compare(a, b):
    """How many differ; of perplexity the harness draws the error."""
    wrong = 0
    for key in sorted(a.keys() | b.keys()):
        x, y = a.get(key, ("", "")), b.get(key, ("", ""))
        same = x[0] == y[0] and (x[1] == y[1] or key[1] == "perplexity")
        print("ok  " if same else "FAIL", "%-14s %-10s" % key, "ours", *x, "harness", *y)
        wrong += not same
    return wrong


# ---------------------------------------------------------------------------
# models


def small_model(folder, text):
    """The folder of its export, and the harness's view of it."""
    export = os.path.join(folder, "model")
    run("--model tiny --layers 2 --heads 2 --channels 32 --vocab 50257 --tokenizer {gpt2} "
        "--data {text} --seq 128 --micro-batch 4 --steps 80 --lr 1e-2 --sample-tokens 0 "
        "--export {export}",
        gpt2=GPT2, text=text, export=export)
    shutil.copy(os.path.join(GPT2, "encoder.json"), os.path.join(export, "vocab.json"))
    shutil.copy(os.path.join(GPT2, "vocab.bpe"), os.path.join(export, "merges.txt"))
    return export, HFLM(pretrained=transformers.AutoModelForCausalLM.from_pretrained(export),
                        tokenizer=transformers.GPT2TokenizerFast.from_pretrained(export),
                        batch_size=8)


class Stories(HFLM):
    """With the tokens of a llama2.c tokenizer: the neighbours with the best score merge."""

    def read_tokens(self, path):
        with open(path, "rb") as f:
            data = f.read()
        self.pieces, self.scores, at = [], [], 4
        while at < len(data):
            score, n = struct.unpack_from("<fi", data, at)
            self.pieces.append(data[at + 8:at + 8 + n].decode("utf-8", "replace"))
            self.scores.append(score)
            at += 8 + n
        self.ids = {piece: i for i, piece in reversed(list(enumerate(self.pieces)))}

    def tok_encode(self, string, add_special_tokens=None, **_):
        tokens = []
        for c in " " + string if string else "":
            tokens += [self.ids[c]] if c in self.ids else [b + 3 for b in c.encode()]
        while True:
            merged = [self.ids.get(self.pieces[a] + self.pieces[b], -1)
                      for a, b in zip(tokens, tokens[1:])]
            best = max(((self.scores[i], -k) for k, i in enumerate(merged) if i >= 0), default=None)
            if best is None:
                return tokens if add_special_tokens is False else [1] + tokens
            tokens[-best[1]:2 - best[1]] = [merged[-best[1]]]


def main():
    # Words of Shakespeare's, and questions made of them.
    wrong, pick = 0, random.Random(1)
    with open(TEXT, encoding="utf-8") as f:
        words = sorted(set(re.findall(r"\w+", f.read(20000))))
    lines = {name: [] for name in TASKS}
    for name, question in questions(words, pick, 60):
        lines[name].append(question)
    spoken = passages(words[:6], pick, 60)
    lines["lambada"] = [{"text": passage} for passage in spoken]

    # A small model on all tasks, by both programs.
    with tempfile.TemporaryDirectory() as folder:
        place = lambda name: os.path.join(folder, name)
        export, lm = small_model(folder, write_lines(place("text.txt"), spoken * 3))
        files = {name: write_lines(place(name + ".json"), lines[name]) for name in TASKS}
        wrong += compare(ours(export, GPT2, files), harness(lm, folder, files))

    # stories260K on the fixture's questions, whose texts need no preparation.
    with tempfile.TemporaryDirectory() as folder:
        path = write_lines(os.path.join(folder, "hellaswag.json"), real_questions())
        lm = Stories(pretrained=transformers.AutoModelForCausalLM.from_pretrained(STORIES),
                     tokenizer=lm.tokenizer, batch_size=8)
        lm.read_tokens(TOK512)
        theirs = harness(lm, folder, {"hellaswag": path}, prepared=True)
        wrong += compare(ours(STORIES, TOK512, {"hellaswag": HELLASWAG}), theirs)
    print(f"{wrong} differ")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
