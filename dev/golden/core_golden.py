#!/usr/bin/env python3
"""Make core-tiny: a folder in the form of nanochat's eval_bundle, and what gpt2-tiny scores in it.

usage: core_golden.py     (needs PyYAML; the model runs in plain Python, in float64)

golden.json has each task's items in shuffled order, with each candidate's whole prompt, how many of its tokens are
scored, their log-likelihood and whether they are greedy; then CORE's table. A token is a byte, 96 begins each text, and
a prompt keeps its last 40 tokens. Prompts, draws and scores are those of nanochat's core_eval.py, written again here.
"""
import csv, json, math, os, random, struct
import yaml

HERE = os.path.dirname(os.path.abspath(__file__))
FOLDER = os.path.join(HERE, "core-tiny")
BOS, P, NH = 96, 40, 3
EPS, = struct.unpack("f", struct.pack("f", 1e-5))  # as a float

YAML = r"""# tasks in all "forms" that the published file has
icl_tasks:
-
  label: arc_easy
  dataset_uri: world_knowledge/arc_easy.jsonl
  num_fewshot: [2]
  icl_task_type: multiple_choice
  continuation_delimiter: "\nA: " # this separates questions from answers
-
  label: hellaswag_zeroshot
  dataset_uri: hellaswag.jsonl
  num_fewshot: [0]
  icl_task_type: multiple_choice
- label: piqa
  dataset_uri: hellaswag.jsonl
  num_fewshot: [3]
  icl_task_type: multiple_choice

-
  label: winograd
  dataset_uri: winograd.jsonl
  num_fewshot: [0]
  icl_task_type: schema
-
  label: winogrande
  dataset_uri: winograd.jsonl
  num_fewshot: [1]
  icl_task_type: schema
-
  label: lambada_openai
  dataset_uri: lambada.jsonl
  num_fewshot: [0]
  icl_task_type: language_modeling
  continuation_delimiter: "\nA:"
-
  label: jeopardy
  dataset_uri: jeopardy.jsonl
  num_fewshot: [2]
  icl_task_type: language_modeling
  has_categories: true
  # the end
"""
GUESSES = {"arc_easy": "25", "hellaswag_zeroshot": "50", "piqa": "50", "winograd": "50", "winogrande": "9.1",
           "lambada_openai": "0", "jeopardy": "0"}


# ---- GPT-2, with Hugging Face's names and [in, out] matrices

def read_model():
    blob = open(os.path.join(HERE, "gpt2-tiny", "model.safetensors"), "rb").read()
    size, = struct.unpack("<Q", blob[:8])
    w = {}
    for name, x in json.loads(blob[8:8 + size]).items():
        if name == "__metadata__":
            continue
        begin, end = x["data_offsets"]
        values = struct.unpack(f"<{(end - begin) // 4}f", blob[8 + size + begin:8 + size + end])
        columns = x["shape"][-1]
        rows = [values[i:i + columns] for i in range(0, len(values), columns)]
        w[name.removeprefix("transformer.")] = rows if len(x["shape"]) == 2 else values
    return w


def norm(x, w, name):
    mean = sum(x) / len(x)
    rstd = (sum((v - mean)**2 for v in x) / len(x) + EPS)**-0.5
    return [(v - mean) * rstd * a + b for v, a, b in zip(x, w[name + ".weight"], w[name + ".bias"])]


def linear(x, w, name):
    out = list(w[name + ".bias"])
    for v, row in zip(x, w[name + ".weight"]):
        for i, a in enumerate(row):
            out[i] += v * a
    return out


def gelu(x):
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def logits_of(w, tokens):
    xs = [[a + b for a, b in zip(w["wte.weight"][t], w["wpe.weight"][i])] for i, t in enumerate(tokens)]
    C = len(xs[0])
    size = C // NH
    for layer in ("h.0.", "h.1."):
        qkv = [linear(norm(x, w, layer + "ln_1"), w, layer + "attn.c_attn") for x in xs]
        for t in range(len(xs)):
            mixed = []
            for h in range(0, C, size):
                scores = [sum(qkv[t][h + i] * qkv[u][C + h + i] for i in range(size)) / math.sqrt(size)
                          for u in range(t + 1)]
                top = max(scores)
                p = [math.exp(s - top) for s in scores]
                mixed += [sum(p[u] * qkv[u][2 * C + h + i] for u in range(t + 1)) / sum(p) for i in range(size)]
            xs[t] = [a + b for a, b in zip(xs[t], linear(mixed, w, layer + "attn.c_proj"))]
        for t, x in enumerate(xs):
            hidden = [gelu(v) for v in linear(norm(x, w, layer + "ln_2"), w, layer + "mlp.c_fc")]
            xs[t] = [a + b for a, b in zip(x, linear(hidden, w, layer + "mlp.c_proj"))]
    xs = [norm(x, w, "ln_f") for x in xs]
    return [[sum(a * b for a, b in zip(x, row)) for row in w["wte.weight"]] for x in xs]


# ---- the folder

def words(rng, least, most):
    return " ".join("".join(rng.choice("ABCDEFGHIJ") for _ in range(rng.randint(1, 4)))
                    for _ in range(rng.randint(least, most)))


def make_folder(w):
    rng = random.Random(5)
    arc = [{"query": "Q: " + words(rng, 1, 2) + "?", "choices": [words(rng, 1, 2) for _ in range(4)],
            "gold": rng.randrange(4)} for _ in range(7)]
    # The second item's first choice begins its other one, and the third's second one its first.
    hellaswag = [{"query": words(rng, 2, 4), "choices": [words(rng, 1, 3), words(rng, 1, 3)],
                  "gold": rng.randrange(2)} for _ in range(8)]
    hellaswag[1].update(choices=["GO", "GO ON"], gold=0)
    hellaswag[2].update(choices=["GO ON", "GO"], gold=1)
    winograd = [{"context_options": [words(rng, 2, 3), words(rng, 2, 3)], "continuation": words(rng, 1, 3),
                 "gold": rng.randrange(2)} for _ in range(9)]
    lambada = [{"context": " \n" + words(rng, 2, 5) + "  ", "continuation": words(rng, 1, 1)} for _ in range(6)]
    for item in lambada[::2]:  # the model's own continuation, two tokens of it
        item["continuation"] = ""
        prompt = [BOS] + list((item["context"].strip() + "\nA:").encode())
        for _ in range(2):
            row = logits_of(w, (prompt + list(item["continuation"].encode()))[-P:])[-1]
            item["continuation"] += chr(row.index(max(row)))
    jeopardy = [{"context": words(rng, 1, 2) + ":", "continuation": words(rng, 1, 1), "category": "X"}
                for _ in range(30)]

    files = {"world_knowledge/arc_easy": arc, "hellaswag": hellaswag, "winograd": winograd, "lambada": lambada,
             "jeopardy": jeopardy}
    for name, items in files.items():
        path = os.path.join(FOLDER, "eval_data", name + ".jsonl")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "w").write("".join(json.dumps(item) + "\n" for item in items))
    open(os.path.join(FOLDER, "core.yaml"), "w").write(YAML)
    with open(os.path.join(FOLDER, "eval_meta_data.csv"), "w", newline="") as f:
        out = csv.writer(f)
        out.writerow(["Eval Task", "#shots", "Random baseline", "Description"])
        out.writerow(["another", "0", "33.3", "It has commas, \"quotes\"\nand lines"])
        for label, guess in GUESSES.items():
            out.writerow([label, "0", guess, f"{label}, as \"published\""])


# ---- scores

def text_of(kind, delimiter, item, choice):
    if kind == "multiple_choice":
        return item["query"] + delimiter + item["choices"][choice]
    if kind == "schema":
        return item["context_options"][choice] + delimiter + item["continuation"]
    return item["context"].strip() + delimiter + item["continuation"]


def common(sequences):
    n = 0
    while all(len(s) > n and s[n] == sequences[0][n] for s in sequences):
        n += 1
    return n


def score_item(w, kind, delimiter, data, index, shots):
    item = data[index]
    others = [x for i, x in enumerate(data) if i != index]
    drawn = random.Random(1234 + index).sample(others, shots)
    front = "".join(text_of(kind, delimiter, x, x.get("gold")) + "\n\n" for x in drawn)
    choices = range(len(item.get("choices", item.get("context_options", [0]))))
    prompts = [front + text_of(kind, delimiter, item, c) for c in choices]
    tokens = [[BOS] + list(p.encode()) for p in prompts]
    if kind == "multiple_choice":
        scored = [len(t) - common(tokens) for t in tokens]
    elif kind == "schema":
        scored = [common([t[::-1] for t in tokens])] * len(tokens)
    else:
        before = (front + item["context"].strip() + delimiter).strip()
        assert prompts[0].startswith(before) and len(before) < len(prompts[0])
        scored = [len(prompts[0]) - len(before)]

    candidates = []
    for prompt, t, n in zip(prompts, tokens, scored):
        t = t[-P:]
        sums, greedy = 0.0, True
        for i, row in list(enumerate(logits_of(w, t)))[len(t) - n - 1:len(t) - 1]:
            sums += row[t[i + 1]] - math.log(sum(math.exp(v) for v in row))
            greedy = greedy and row.index(max(row)) == t[i + 1]
        candidates.append({"prompt": prompt, "scored": n, "log_likelihood": sums, "greedy": greedy})
    losses = [-c["log_likelihood"] / c["scored"] if c["scored"] else math.nan for c in candidates]
    right = candidates[0]["greedy"] if kind == "language_modeling" else losses.index(min(losses)) == item["gold"]
    return candidates, right


def main():
    w = read_model()
    make_folder(w)
    with open(os.path.join(FOLDER, "eval_meta_data.csv"), newline="") as f:
        guesses = {row["Eval Task"]: float(row["Random baseline"]) / 100 for row in csv.DictReader(f)}
    table = f"{'Task':<35}, {'Shots':<5}, {'Accuracy':<10}, {'Centered':<10}\n"
    tasks, all_centered = [], []
    for task in yaml.safe_load(open(os.path.join(FOLDER, "core.yaml")))["icl_tasks"]:
        data = [json.loads(line) for line in open(os.path.join(FOLDER, "eval_data", task["dataset_uri"]))]
        random.Random(1337).shuffle(data)
        shots = task["num_fewshot"][0]
        scores = [score_item(w, task["icl_task_type"], task.get("continuation_delimiter", " "), data, i, shots)
                  for i in range(len(data))]
        accuracy = sum(right for _, right in scores) / len(scores)
        guess = guesses[task["label"]]
        all_centered.append((accuracy - guess) / (1 - guess))
        table += f"{task['label']:<35}, {shots:<5}, {accuracy:<10.6f}, {all_centered[-1]:<10.6f}\n"
        tasks.append({"label": task["label"], "items": [candidates for candidates, _ in scores]})
    table += f"{'CORE':<35}, {'':<5}, {'':<10}, {sum(all_centered) / len(all_centered):<10.6f}\n"
    print(table, end="")
    json.dump({"tasks": tasks, "table": table}, open(os.path.join(FOLDER, "golden.json"), "w"), indent=0)


main()
