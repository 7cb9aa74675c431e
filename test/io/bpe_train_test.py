#!/usr/bin/env python3
"""prepare_gpt --train-tokenizer against Hugging Face's tokenizers and tiktoken: vocabulary, merges and tokens.

usage: test/io/bpe_train_test.py [PREPARE_GPT [FILE.jsonl [SIZE]]]

Without FILE: this project's sources and pages. Characters newer than PCRE2's Unicode tables are cut differently.
"""
import glob, json, os, subprocess, sys, tempfile, time

try:
    import tiktoken, tiktoken.load
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
except ImportError as e:
    print(f"skipped: no {e.name}\n0 failed, 1 skipped")
    sys.exit(0)

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
program, file, size = (sys.argv[1:] + [os.path.join(ROOT, "build/prepare_gpt"), "", "4096"][len(sys.argv) - 1:])[:3]
# As their authors write them, not as this project does.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT4 = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+")
PATTERNS = {"gpt2": GPT2, "gpt4": GPT4, "nanochat": GPT4.replace("{1,3}", "{1,2}")}
SPECIAL = ["<|endoftext|>", "<|pad|>"]
failed = 0


def check(name, good):
    global failed
    failed += not good
    print("ok  " if good else "FAIL", name)


with tempfile.TemporaryDirectory() as folder:
    if not file:
        file = os.path.join(folder, "text.jsonl")
        with open(file, "w") as f:
            for path in sorted(glob.glob(ROOT + "/**/*.[hm]*", recursive=True)):
                if os.path.isfile(path) and "/build/" not in path:
                    f.write(json.dumps({"text": open(path, errors="replace").read()}) + "\n")
    texts = [json.loads(line)["text"] for line in open(file)]
    for name, pattern in PATTERNS.items():
        out = os.path.join(folder, name)
        start = time.time()
        subprocess.run([program, "--train-tokenizer", size, "--pattern", name, "--add-tokens", ",".join(SPECIAL), "--data",
                        file, out], check=True, stdout=subprocess.DEVNULL)
        own_seconds, start = time.time() - start, time.time()
        hf = Tokenizer(models.BPE())
        hf.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
        hf.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=int(size), special_tokens=SPECIAL, show_progress=False,
                                                          initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
        print(f"{name}: {own_seconds:.1f} s, tokenizers {time.time() - start:.1f} s")
        own, theirs = json.load(open(out + "/tokenizer.json"))["model"], json.loads(hf.to_str())["model"]
        check(name + ": the same vocabulary", own["vocab"] == theirs["vocab"])
        check(name + ": the same merges", own["merges"] == [" ".join(m) for m in theirs["merges"]])

        # The file opens there, and tiktoken gives the same ids.
        opened = Tokenizer.from_file(out + "/tokenizer.json")
        ranks = tiktoken.load.load_tiktoken_bpe(out + "/tokenizer.tiktoken")
        tik = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens={s: i for i, s in enumerate(SPECIAL)})
        check(name + ": tokenizers' and tiktoken's ids are those of training",
              all(opened.encode(t).ids == hf.encode(t).ids == tik.encode(t, disallowed_special=()) for t in texts[:500]
                  if not any(s in t for s in SPECIAL)))
print(f"{failed} failed")
sys.exit(failed > 0)
