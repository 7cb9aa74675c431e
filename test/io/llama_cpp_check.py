#!/usr/bin/env python3
"""Exports as llama.cpp sees them: the same loss, the same greedy text, the same end of an answer.

usage: test/io/llama_cpp_check.py [TRAIN_GPT]     prints `skipped: ...` where llama-cpp-python is not installed

Small models are trained, converted to GGUF, and run with keys and values in float. Then each is taught a conversation:
the file's chat template must lead to the answer, and its end token must stop it. Holds with llama-cpp-python 0.3.36.
"""
import json, os, re, subprocess, sys, tempfile

try:
    import jinja2, numpy, llama_cpp
except ImportError as e:
    print(f"skipped: no {e.name}")
    sys.exit(0)

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAM = sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "build/train_gpt")
SEQ, SAMPLED, PROMPT = 64, 24, "Once upon a time, the 3 kings'"
TEXT = "It's 1234567 o'clock;  we'll   see.\n\n\tÀ bientôt, 你好世界, Привет! 🙂 x=y+1\r\nEND  " * 12
MODELS = {"GPT-2": "--layers 2 --heads 2 --channels 32",
          "Llama": "--model tiny-llama --layers 2 --heads 4 --kv-heads 2 --channels 64 --ffn 96"}
TALK = [{"role": "user", "content": "What is a token?"}, {"role": "assistant", "content": "A piece of text."}]


def program(name, arguments, *more):
    path = os.path.join(os.path.dirname(PROGRAM), name)
    out = subprocess.run([path, "--device", "cpu", *arguments.split(), *more], capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr
    return out.stdout


def converted(folder):
    program("convert_gpt", f"{folder} {folder}.gguf")
    return llama_cpp.Llama(f"{folder}.gguf", n_ctx=256, logits_all=True, type_k=0, type_v=0, n_threads=1, verbose=False)


def loss_of(model, ids):
    losses = []
    for at in range(0, len(ids) - SEQ, SEQ):  # whole windows
        model.reset()
        model.eval(ids[at : at + SEQ])
        x = model.scores[:SEQ].astype(numpy.float64)
        losses.append(numpy.log(numpy.exp(x).sum(1)) - x[range(SEQ), ids[at + 1 : at + SEQ + 1]])
    return numpy.mean(losses)


def differs(w, shape):
    """Where llama.cpp differs; "" if it does not. Our loss is printed with four digits."""
    out = program("train_gpt", f"{shape} --steps 20 --warmup 2 --lr 3e-3 --micro-batch 4 --seq {SEQ} --temperature 0 --sample-tokens "
                  f"{SAMPLED} --data {w}/data.txt --val {w}/val.txt --export {w}/model", "--prompt", PROMPT)
    model = converted(f"{w}/model")
    loss = float(re.findall(r"val loss (\d+\.\d+)", out)[-1])
    theirs = loss_of(model, model.tokenize(TEXT.encode(), add_bos=False))
    text = model(PROMPT, max_tokens=SAMPLED, temperature=0)["choices"][0]["text"]
    if abs(loss - theirs) >= 1e-4 or PROMPT + text != out.split("\n---\n")[-2].split("---\n")[-1]:
        return f"loss {loss:.4f} and {theirs:.5f}, text {text!r}, all of ours: {out}"

    # Teach it an answer.
    program("tune_gpt", f"--model {w}/model --loss sft --data {w}/talk.jsonl --seq {SEQ} --steps 150 --warmup 4 --lr 1e-2 "
            f"--micro-batch 2 --eval-every 0 --sample-tokens 0 --export {w}/taught")
    model = converted(f"{w}/taught")
    template = jinja2.Environment().from_string(model.metadata["tokenizer.chat_template"])
    question = template.render(messages=TALK[:1], add_generation_prompt=True)
    said = model(model.tokenize(question.encode(), add_bos=False, special=True), temperature=0, max_tokens=40)["choices"][0]
    good = said["text"].strip() == TALK[1]["content"] and said["finish_reason"] == "stop"
    return "" if good else f"answer {said}"


failed = 0
for name, shape in MODELS.items():
    with tempfile.TemporaryDirectory() as w:
        talk = json.dumps({"messages": TALK}) + "\n"
        for file, text in (("data.txt", PROMPT * 200 + TEXT), ("val.txt", TEXT), ("talk.jsonl", talk * 8)):
            open(f"{w}/{file}", "w", newline="").write(text)
        wrong = differs(w, shape)
    failed += wrong != ""
    print(f"{'FAIL' if wrong else 'ok  '} {name} {wrong}")
sys.exit(failed > 0)
