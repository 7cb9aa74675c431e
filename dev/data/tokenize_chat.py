#!/usr/bin/env python3
"""tokenize_chat.py - conversations as tokens and labels, rendered by a folder's own chat template

usage: tokenize_chat.py FOLDER IN.jsonl OUT.jsonl

For templates that tune_gpt does not know, and for turns of tools: a line {"messages": [...]}, with "tools" where
there are some, becomes {"input_ids": [...], "labels": [...]}, for tune_gpt --loss sft. Labels are -100 but for the
answers' tokens. What is an answer the template says ({% generation %}); otherwise it is what an answer adds to its
prompt, up to the token that ends it. An answer that the template writes in another way once more turns follow is
not trained; a line without one is left out; both are counted. Needs transformers: pip install transformers
"""
import json, os, sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def render(tokenizer, messages, tools, **how):
    return tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=True, **how)


def answers_by_template(tokenizer, messages, tools):
    """Tokens, and whether each is an answer's, where the template marks answers."""
    found = render(tokenizer, messages, tools, return_assistant_tokens_mask=True)
    return found["input_ids"], found["assistant_masks"], 0


def answers_by_prefix(tokenizer, messages, tools):
    """The same where it does not: an answer is what stands behind its prompt."""
    ids = render(tokenizer, messages, tools)["input_ids"]
    mask, lost = [0] * len(ids), 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, messages[:i], tools, add_generation_prompt=True)["input_ids"]
        answered = render(tokenizer, messages[: i + 1], tools)["input_ids"]
        first, end = len(prompt), len(answered)
        if ids[:first] != prompt or ids[:end] != answered:
            lost += 1
            continue

        # What follows the token that ends an answer is the template's.
        while tokenizer.eos_token_id in ids[first : end - 1] and ids[end - 1] != tokenizer.eos_token_id:
            end -= 1
        mask[first:end] = [1] * (end - first)
    return ids, mask, lost


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    folder, source, target = sys.argv[1:]
    try:
        from transformers import AutoTokenizer
    except ImportError:
        sys.exit("tokenize_chat.py: needs transformers, which is not here: pip install transformers")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    marked = "{% generation" in tokenizer.get_chat_template().replace("{%-", "{%")
    answers = answers_by_template if marked else answers_by_prefix

    # Write the lines; the file gets its name when it is whole.
    written = lost = empty = 0
    with open(source, encoding="utf-8") as lines, open(target + ".tmp", "w") as out:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                ids, mask, more = answers(tokenizer, row["messages"], row.get("tools"))
            except Exception as e:
                sys.exit(f"tokenize_chat.py: {source}:{number}: {type(e).__name__}: {e}")
            lost += more
            if not any(mask):
                empty += 1
                continue
            labels = [token if trained else -100 for token, trained in zip(ids, mask)]
            out.write(json.dumps({"input_ids": ids, "labels": labels}) + "\n")
            written += 1
    os.replace(target + ".tmp", target)
    print(f"{target}: {written} conversations; {lost} answers are not trained, for the template writes them otherwise "
          f"once more turns follow; {empty} lines without an answer are left out")


if __name__ == "__main__":
    main()
