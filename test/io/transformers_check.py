#!/usr/bin/env python3
"""Exports as transformers sees them: the same tokens, the same loss, the same greedy text.

usage: test/io/transformers_check.py [TRAIN_GPT]     prints `skipped: no transformers` where it is not installed

Each case trains a small model for some steps (or loads one), evaluates it on a text, continues a prompt and exports.
AutoTokenizer and AutoModelForCausalLM then read the folder alone. The loss is of the tokens that AutoTokenizer makes
of the text, so a token that differs moves it. All cases hold with transformers 4.57.6 and 5.23.0.

Conversations: a folder that save_pretrained() wrote is taught one, and exported. apply_chat_template() must make the
tokens that the program trains on, generate() must say the answer and stop behind it, and the settings stay.
They hold with transformers 5.24.0, PEFT 0.21.2, gguf 0.19.0.
"""
import json, os, re, struct, subprocess, sys, tempfile

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
    command = f"{PROGRAM} {arguments} --device cpu --seq {SEQ} --temperature 0 --sample-tokens {SAMPLED}".split()
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


# ---- conversations

TALK = [{"role": "user", "content": "What is a token?"}, {"role": "assistant", "content": "A piece of text."}]
LONGER = TALK + [{"role": "user", "content": "And a loss?"}, {"role": "assistant", "content": "How wrong it was."}]


def program(*arguments, name="tune_gpt"):
    path = os.path.join(os.path.dirname(PROGRAM), name)
    device = [] if name == "prepare_gpt" else ["--device", "cpu"]
    out = subprocess.run([path, *map(str, arguments), *device], capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr
    return out.stdout


def saved_model(folder):
    """A Llama and its tokenizer, as save_pretrained() writes them. None of its names is a usual one."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words.train_from_iterator([m["content"] for m in LONGER] * 9, trainers.BpeTrainer(
        vocab_size=280, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<begins>", eos_token="<ends>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id))
    model.generation_config.do_sample, model.generation_config.temperature = True, 0.6
    model.save_pretrained(folder)


def conversations(scratch):
    """(name, folder, the model if it is not the folder's own)"""
    path = lambda name: os.path.join(scratch, name)
    with open(path("talk.jsonl"), "w") as lines:
        lines.writelines(json.dumps({"messages": TALK}) + "\n" for _ in range(8))
    taught = ["--loss", "sft", "--data", path("talk.jsonl"), "--seq", 128, "--steps", 80, "--warmup", 4, "--lr", 1e-2,
              "--micro-batch", 2, "--eval-every", 0, "--sample-tokens", 0]
    none = ["--steps", 0, "--sample-tokens", 0, "--export"]
    marks = ["--add-tokens", "<|im_start|>,<|im_end|>", "--chat-format", "chatml"]
    saved_model(path("base"))
    program(*LLAMA.split(), *none, path("bytes"))

    program("--model", path("bytes"), *taught, "--steps", 150, "--export", path("bytes-taught"))
    yield "bytes, plain", path("bytes-taught"), None
    program("--model", path("base"), *taught, "--out", path("run"), "--export", path("taught"))
    yield "all weights, plain", path("taught"), None
    program("--model", path("base"), *taught, *marks, "--export", path("marked"))
    yield "new tokens, ChatML", path("marked"), None
    program("--model", path("marked"), *none, path("again"))
    yield "exported again", path("again"), None
    program("--resume", "--out", path("run"), *none, path("resumed"))
    yield "of a checkpoint", path("resumed"), None
    program(f"{path('run')}/step_00000080", path("taught"), path("mean"), name="convert_gpt")
    yield "a mean", path("mean"), None

    program("--model", path("base"), *taught, "--lora", 8, "--lora-targets", "all", "--export", path("adapter"))
    program("--adapter", path("adapter"), "--merge", path("base"), path("merged"), name="convert_gpt")
    yield "merged adapters", path("merged"), None
    try:
        from peft import PeftModel
        yield "adapters", path("adapter"), PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(path("base")), path("adapter"))
    except ImportError:
        print("skipped: no peft")
    try:
        import gguf
        program(path("marked"), path("file.gguf"), name="convert_gpt")
        keys = {k: f.contents() for k, f in gguf.GGUFReader(path("file.gguf")).fields.items() if "token" in k}
        found = gguf.SpecialVocab(path("marked")) # what llama.cpp's converter takes from a folder
        assert keys["tokenizer.ggml.eos_token_id"] == found.special_token_ids["eos"], (keys, found)
        assert keys["tokenizer.chat_template"] == found.chat_template, (keys, found)
    except ImportError:
        print("skipped: no gguf")


def same_conversation(scratch, folder, model):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = model or AutoModelForCausalLM.from_pretrained(folder)
    begin = tokenizer.apply_chat_template(TALK[:1], add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = model.generate(**begin, max_new_tokens=40, do_sample=False)[0, begin["input_ids"].shape[1] :]
    text = tokenizer.decode(answer, skip_special_tokens=True).strip()

    # The program's tokens of a longer conversation, with the format that the folder says.
    shard, lines = os.path.join(scratch, "shard.bin"), os.path.join(scratch, "longer.jsonl")
    for name in os.listdir(scratch):
        if name.startswith("shard"): os.remove(os.path.join(scratch, name))
    open(lines, "w").write(json.dumps({"messages": LONGER}) + "\n")
    base = ["--tokenizer", folder] if os.path.exists(os.path.join(folder, "config.json")) else \
        ["--tokenizer", os.path.join(scratch, "base"), "--chat-format", "plain"]
    program(*base, "--loss", "sft", "--seq", 128, "--data", lines, shard, name="prepare_gpt")
    data = open(shard, "rb").read()
    ours = [x & 0x3FFFFFFF for x in struct.unpack(f"<{len(data) // 4 - 256}I", data[1024:])]
    theirs = tokenizer.apply_chat_template(LONGER, return_dict=True)["input_ids"]
    same = ours[: len(theirs)] == theirs
    return same and text == TALK[1]["content"] and len(answer) < 40, f"{text!r} in {len(answer)} tokens, same tokens: {same}"


def main():
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name, folder, model in conversations(scratch):
            good, said = same_conversation(scratch, folder, model)
            failed += not good
            print(f"{'ok  ' if good else 'FAIL'} {name}: {said}")
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
