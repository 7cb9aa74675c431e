#!/usr/bin/env python3
"""Chat formats against Jinja, as transformers renders templates: the same text of the same conversations.

usage: test/io/chat_templates_test.py [TEST_CHAT]       each format against the template that it is exported with
       test/io/chat_templates_test.py [TEST_CHAT] FOLDER   and what each FOLDER/*.jinja equals, with its hash
"""
import glob, itertools, json, os, subprocess, sys, tempfile

try:
    from jinja2.exceptions import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError:
    print("1 skipped: no jinja2")
    sys.exit(0)

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# What bos_token and eos_token are where a format names the token itself.
TOKENS = {"llama3": ("<|begin_of_text|>", "<|eot_id|>"), "nanochat": ("<|bos|>", "<|assistant_end|>")}
TOKENS["llama3.1"] = TOKENS["llama3"]


def conversations():
    """With and without a system text, one turn or three, odd white space, empty texts; finished, asked and opened."""
    texts = ["T", " U ", "\n\tV\u2003 w\n", "", "It's {{ x }} \\n", "\u00e9\u00a0"]
    for system, first, turns in itertools.product([None, *texts], range(len(texts)), (1, 2, 3)):
        messages = [] if system is None else [{"role": "system", "content": system}]
        for i in range(turns):
            messages.append({"role": "user", "content": texts[(first + 2 * i) % len(texts)]})
            asked = list(messages)
            messages.append({"role": "assistant", "content": texts[(first + 2 * i + 1) % len(texts)]})
        yield {"messages": messages, "opens": False}
        yield {"messages": asked, "opens": False}
        yield {"messages": asked, "opens": True}


def refuse(text):
    raise TemplateError(text)


def compiled(template, blocks):
    """A template with transformers' settings, filters and functions. Today's date stands for itself."""
    jinja = ImmutableSandboxedEnvironment(trim_blocks=blocks, lstrip_blocks=blocks, extensions=[loopcontrols])
    jinja.filters["tojson"] = lambda x, **_: json.dumps(x, ensure_ascii=False)
    jinja.globals.update(raise_exception=refuse, strftime_now=lambda form: "today's date")
    return jinja.from_string(template)


def render(template, conversation, row):
    """A conversation as a template renders it. None: the template refuses."""
    bos, eos = TOKENS.get(row["format"], ("<s>", "</s>"))
    try:
        return template.render(
            messages=conversation["messages"], add_generation_prompt=conversation["opens"], tools=None, documents=None,
            bos_token=bos, eos_token=eos)
    except TemplateError:
        return None


def rows(program):
    """Each format's template and its text of each conversation, from the C++ side."""
    systems = ["", "You're a \"test\".\nAre you? \\"]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "in.json")
        with open(path, "w") as f:
            json.dump({"conversations": list(conversations()), "systems": systems}, f)
        subprocess.run([program, "--gtest_filter=*ForAComparisonWithJinja"], check=True, stdout=subprocess.DEVNULL,
                       env=dict(os.environ, CHAT_RENDERED=path))
        with open(path + ".out") as f:
            return json.load(f)


def differences(template, row, blocks=True):
    """The conversations that a template renders otherwise than a format writes them."""
    template = compiled(template, blocks)
    for conversation, text in zip(conversations(), row["texts"]):
        rendered = render(template, conversation, row)
        if rendered != text:
            yield f"{conversation}\n    Jinja {rendered!r}\n    ours  {text!r}"


def main():
    programs = [a for a in sys.argv[1:] if not os.path.isdir(a)]
    found = rows(programs[0] if programs else os.path.join(ROOT, "build/test_chat"))
    wrong = 0
    for row in found:
        for blocks in (True, False):
            different = list(differences(row["template"], row, blocks))
            wrong += len(different)
            for text in different[:1]:
                print(f"FAIL {row['format']}: {len(different)} differ: {text}")
    print(f"{len(found)} templates, {len(found[0]['texts'])} conversations, {wrong} differ")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
