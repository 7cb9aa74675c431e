#!/usr/bin/env python3
"""Scores of --evaluate against lm-evaluation-harness's own, on all six tasks.

usage: test/lm_eval_check.py [TRAIN_GPT]      minutes; needs lm_eval and torch: pip install lm_eval torch

Trains a small model with GPT-2's tokens on passages made of the README's words, exports it, makes
questions of every kind (marks, odd white space, letters of two bytes, contexts longer than the
model's positions), and compares accuracies, standard errors and perplexity. The harness's tasks are
its own files with another data set. Then the HellaSwag questions of the fixtures with stories260K,
whose tokens are made by a few lines here.
"""
import json, os, random, re, shutil, struct, subprocess, sys, tempfile

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FIXTURES = os.path.join(ROOT, "../shared/fixtures")
try:
    import accelerate, lm_eval, lm_eval.tasks, torch, transformers
    from lm_eval.models.huggingface import HFLM
except ImportError as e:
    sys.exit(print(f"skipped: {e}"))
if not os.path.exists(FIXTURES):
    sys.exit(print("skipped: no fixtures"))
GPT2 = os.path.join(FIXTURES, "tokenizers/gpt2")
program = sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "build/train_gpt")

# the harness's files
TASKS = {"hellaswag": "hellaswag/hellaswag", "arc-easy": "arc/arc_easy", "arc-challenge": "arc/arc_challenge",
         "piqa": "piqa/piqa", "winogrande": "winogrande/default", "lambada": "lambada/lambada_openai"}


def questions(words, pick, count):
    def text(low, high):
        spaces = [" "] * 12 + ["  ", " [title] ", " [mark] ", "\u00a0", " \u00e9t\u00e9 "]
        return "".join(pick.choice(words) + pick.choice(spaces) for _ in range(pick.randint(low, high))).strip() + "."
    for _ in range(count):
        long = pick.random() < 0.1
        context = text(200, 300) if long else text(3, 20)
        endings = [text(1, 8) for _ in range(4)]
        label = pick.randrange(4)
        yield "hellaswag", {"activity_label": text(1, 2), "ctx_a": context, "ctx_b": text(1, 3), "endings": endings, "label": str(label)}
        yield pick.choice(["arc-easy", "arc-challenge"]), {
            "question": context + " ", "choices": {"text": endings, "label": list("ABCD")}, "answerKey": "ABCD"[label]}
        yield "piqa", {"goal": context, "sol1": endings[0], "sol2": endings[1], "label": label % 2}
        yield "winogrande", {"sentence": context[:-1] + " _ " + endings[2], "option1": endings[0], "option2": endings[1],
                             "answer": str(1 + label % 2)}


def run(*arguments):
    done = subprocess.run([program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def ours(model, tokenizer, files):
    text = run("--model", model, "--tokenizer", tokenizer, "--data", os.path.join(ROOT, "README.md"), "--eval", "--seq", "256",
               "--eval-tokens", "256", "--evaluate", ",".join(f"{n}={p}" for n, p in files.items()))
    found = {}
    for name, rest in re.findall(r"^([a-z-]+) \d+/\d+  (acc .*)$", text, re.M):
        for metric, value, error in re.findall(r"(\w+) (\S+) \+- (\S+)", rest):
            found[name, metric] = value, error
    return found


def harness(lm, folder, files, prepared=False):
    """As the printed digits; perplexity's error is drawn there, and left out. prepared: the questions are texts already"""
    for name, path in files.items():
        source = os.path.join(os.path.dirname(lm_eval.__file__), "tasks", TASKS[name] + ".yaml")
        shutil.copytree(os.path.dirname(source), os.path.join(folder, "tasks", name),
                        ignore=lambda _, all: [f for f in all if not f.endswith(".py") and f != os.path.basename(source)])
        lines = open(source).read().splitlines()
        if name == "arc-challenge":  # takes all but its name from the other
            lines = open(source.replace("challenge", "easy")).read().splitlines()
        keep = [l for l in lines if not re.match(r"(tag|task|group|dataset_\w+|\w+_split):|  ?- (\w+|ai2_arc)$", l)]
        keep = [l for l in keep if not (prepared and l.startswith("process_docs"))]
        keep += [f"task: our_{name}", "dataset_path: json", "test_split: test",
                 f"dataset_kwargs: {{data_files: {{test: {path}}}}}"]
        open(os.path.join(folder, "tasks", name, os.path.basename(source)), "w").write("\n".join(keep) + "\n")
    manager = lm_eval.tasks.TaskManager(include_path=os.path.join(folder, "tasks"), include_defaults=False)
    results = lm_eval.simple_evaluate(model=lm, tasks=[f"our_{n}" for n in files], task_manager=manager, bootstrap_iters=100)["results"]
    found = {}
    for task, values in results.items():
        for metric in ("acc", "acc_norm", "perplexity"):
            if f"{metric},none" in values:
                digits = "%.4g" if metric == "perplexity" else "%.4f"
                error = values[f"{metric}_stderr,none"]
                found[task[4:], metric] = digits % values[f"{metric},none"], error if isinstance(error, str) else "%.4f" % error
    return found


def compare(a, b):
    wrong = 0
    for key in sorted(a.keys() | b.keys()):
        same = key in a and key in b and a[key][0] == b[key][0] and (key[1] == "perplexity" or a[key] == b[key])
        wrong += not same
        print(f"{'ok' if same else 'FAIL':4} {key[0]:14} {key[1]:10} ours {a.get(key)} harness {b.get(key)}")
    return wrong


class Stories(HFLM):
    """HFLM with the tokens of a llama2.c tokenizer: the neighbours with the best score merge."""
    def read_tokens(self, path):
        data, at, self.ids, self.scores = open(path, "rb").read(), 4, {}, []
        while at < len(data):
            score, n = struct.unpack_from("<fi", data, at)
            self.ids.setdefault(data[at + 8:at + 8 + n].decode("utf-8", "replace"), len(self.scores))
            self.scores.append(score)
            at += 8 + n

    def tok_encode(self, string, add_special_tokens=None, **_):
        tokens = []
        for c in " " + string if string else "":
            tokens += [self.ids[c]] if c in self.ids else [b + 3 for b in c.encode()]
        texts = {i: t for t, i in self.ids.items()}
        while True:
            pairs = [(self.scores[i], -k, i) for k, (a, b) in enumerate(zip(tokens, tokens[1:]))
                     if (i := self.ids.get(texts.get(a, "\0") + texts.get(b, "\0"))) is not None]
            if not pairs:
                return [1] * (add_special_tokens is not False) + tokens
            _, k, i = max(pairs)
            tokens[-k:-k + 2] = [i]


def main():
    wrong, pick = 0, random.Random(1)
    words = re.findall(r"\w+", open(os.path.join(ROOT, "README.md")).read())
    with tempfile.TemporaryDirectory() as folder:
        files, lines = {}, {name: [] for name in TASKS}
        for name, question in questions(words, pick, 60):
            lines[name].append(json.dumps(question))
        few = words[:6]
        passages = [" ".join(pick.choice(few) for _ in range(pick.choice([1, 5, 20, 300]))) for _ in range(60)]
        lines["lambada"] = [json.dumps({"text": p}) for p in passages]
        for name in TASKS:
            files[name] = os.path.join(folder, name + ".json")
            open(files[name], "w").write("\n".join(lines[name]) + "\n")
        text = os.path.join(folder, "text.txt")
        open(text, "w").write("\n".join(passages) + open(os.path.join(ROOT, "README.md")).read())
        export = os.path.join(folder, "model")
        run("--model", "tiny", "--layers", "2", "--heads", "2", "--channels", "32", "--vocab", "50257", "--tokenizer", GPT2, "--data",
            text, "--seq", "128", "--micro-batch", "4", "--steps", "80", "--lr", "1e-2", "--sample-tokens", "0", "--export", export)
        shutil.copy(os.path.join(GPT2, "encoder.json"), os.path.join(export, "vocab.json"))
        shutil.copy(os.path.join(GPT2, "vocab.bpe"), os.path.join(export, "merges.txt"))
        tokenizer = transformers.GPT2TokenizerFast.from_pretrained(export)
        model = transformers.AutoModelForCausalLM.from_pretrained(export)
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8)
        wrong += compare(ours(export, GPT2, files), harness(lm, folder, files))
    with tempfile.TemporaryDirectory() as folder:  # the fixture's texts have had their marks removed
        source = open(os.path.join(FIXTURES, "eval/hellaswag_val_first400.txt")).read().splitlines()
        path = os.path.join(folder, "hellaswag.json")
        with open(path, "w") as out:
            for at in range(0, len(source), 6):
                out.write(json.dumps({"query": source[at], "gold": int(source[at + 1]), "label": source[at + 1],
                                      "choices": source[at + 2:at + 6]}) + "\n")
        stories = os.path.join(FIXTURES, "checkpoints/stories260K/hf")
        lm = Stories(pretrained=transformers.AutoModelForCausalLM.from_pretrained(stories),
                     tokenizer=transformers.GPT2TokenizerFast(os.path.join(GPT2, "encoder.json"), os.path.join(GPT2, "vocab.bpe")),
                     batch_size=8)
        lm.read_tokens(os.path.join(FIXTURES, "tokenizers/tinystories512/tok512.bin"))
        theirs = harness(lm, folder, {"hellaswag": path}, prepared=True)
        files = {"hellaswag": os.path.join(FIXTURES, "eval/hellaswag_val_first400.txt")}
        wrong += compare(ours(stories, os.path.join(FIXTURES, "tokenizers/tinystories512/tok512.bin"), files), theirs)
    print(f"{wrong} differ")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
