#!/usr/bin/env python3
"""Exports as transformers sees them: the same tokens, the same loss, the same greedy text.

usage: test/io/transformers_check.py [TRAIN_GPT]     prints `skipped: no transformers` where it is not installed

Each case trains a small model for some steps (or loads one), evaluates it on a text, continues a prompt and exports.
AutoTokenizer and AutoModelForCausalLM then read the folder alone. The loss is of the tokens that AutoTokenizer makes
of the text, so a token that differs moves it. All cases hold with transformers 4.57.6 and 5.23.0.
"""
import os, re, subprocess, sys, tempfile

os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
try:
    import torch, transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer
except ImportError:
    print("skipped: no transformers")
    sys.exit(0)
transformers.utils.logging.disable_progress_bar()

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "test/harness"))
from fixtures import FIXTURES
PROGRAM = sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "build/train_gpt")
SEQ, SAMPLED, PROMPT = 64, 24, "Once upon a time, the 3 kings'"
# Letters of many scripts, digits, runs of spaces, line ends and contractions.
TEXT = "It's 1234567 o'clock;  we'll   see.\n\n\tÀ bientôt, 你好世界, Привет! 🙂 x=y+1\r\nEND  " * 12
GPT2 = "--layers 2 --heads 2 --channels 32"
LLAMA = "--model tiny-llama --layers 2 --heads 4 --kv-heads 2 --channels 64 --ffn 96"
TRAINED = "--steps 20 --warmup 2 --lr 3e-3 --micro-batch 4"


def ours(arguments, folder, data):
    command = f"{PROGRAM} {arguments} --device cpu --seq {SEQ} --temperature 0 --sample-tokens {SAMPLED} --ignore-eos".split()
    command += ["--data", data, "--val", data + ".val.txt", "--prompt", PROMPT, "--export", folder]
    out = subprocess.run(command, capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr
    loss = float(re.findall(r"^step \d+ \| val loss (\d+\.\d+)", out.stdout, re.M)[-1])
    return loss, out.stdout.split("\n---\n")[-2]


def theirs(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()

    # The loss of whole windows of the text.
    ids = tokenizer(TEXT, add_special_tokens=False, return_tensors="pt").input_ids[0]
    windows = (len(ids) - 1) // SEQ
    x, y = ids[: windows * SEQ].view(-1, SEQ), ids[1 : windows * SEQ + 1].view(-1, SEQ)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1).double(), y.flatten()).item()

    prompt = tokenizer(PROMPT, return_tensors="pt")
    out = model.generate(**prompt, max_new_tokens=SAMPLED, do_sample=False, eos_token_id=None)
    return loss, tokenizer.decode(out[0], skip_special_tokens=True), tokenizer.bos_token or ""


def cases(scratch):
    yield "GPT-2, bytes", f"{GPT2} {TRAINED}"
    yield "Llama, bytes", f"{LLAMA} {TRAINED}"
    yield "Mixtral, bytes", f"--model tiny-moe --layers 2 {TRAINED}"
    yield "DeepSeek-V2, bytes", f"--model tiny-mla --layers 2 {TRAINED}"
    for name in ["deepseek-v2", "deepseek-v3"]:  # experts, shared ones, choices limited to groups
        yield f"{name} with experts", f"--model {ROOT}/dev/golden/{name}-tiny --scratch --vocab 256 {TRAINED}"

    if not os.path.isdir(FIXTURES):
        return print("skipped: no fixtures; FIXTURES=FOLDER says where they are")
    tokenizers = os.path.join(FIXTURES, "tokenizers")
    yield "GPT-2, vocab.bpe", f"{GPT2} {TRAINED} --vocab 50257 --tokenizer {tokenizers}/gpt2"
    yield "Llama, tokenizer.bin", f"{LLAMA} {TRAINED} --vocab 32000 --tokenizer {tokenizers}/llama2/tokenizer.bin"
    yield "Llama, SentencePiece", f"{LLAMA} {TRAINED} --vocab 32000 --tokenizer {tokenizers}/llama2/tokenizer.model"
    yield "Llama, tiktoken", f"{LLAMA} {TRAINED} --vocab 128256 --tokenizer {tokenizers}/llama3/tokenizer.model"
    stories = os.path.join(FIXTURES, "checkpoints/stories260K/stories260K.bin")
    yield "llama2.c's file", f"--model {stories} --tokenizer {tokenizers}/tinystories512/tok512.bin --steps 1 --lr 0"
    yield "an export again", f"--model {scratch}/export --steps 1 --lr 0"  # its own tokenizer


def main():
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        data = os.path.join(scratch, "data.txt")
        open(data, "w", newline="").write(PROMPT * 200 + TEXT)
        open(data + ".val.txt", "w", newline="").write(TEXT)

        # Train, export under another name, and put the export in its place: the last case reads it.
        for name, arguments in cases(scratch):
            folder = os.path.join(scratch, "export")
            loss, text = ours(arguments, folder + ".new", data)
            subprocess.run(["rm", "-rf", folder], check=True)
            os.rename(folder + ".new", folder)
            their_loss, their_text, begin = theirs(folder)
            text, their_text = text.replace(begin, "").strip(), their_text.strip()

            # Our loss is printed with four digits. Float rounding on both sides stays below that.
            good = abs(loss - their_loss) < 1e-4 and text == their_text
            failed += not good
            print(f"{'ok  ' if good else 'FAIL'} {name}: loss {loss:.4f} and {their_loss:.4f}; {text!r}")
            if text != their_text:
                print(f"     transformers {transformers.__version__}: {their_text!r}")
    print(f"{failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
