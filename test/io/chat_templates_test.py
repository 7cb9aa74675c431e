#!/usr/bin/env python3
"""Chat formats against Jinja, as transformers renders templates: the same text of the same conversations.

usage: test/io/chat_templates_test.py [TEST_CHAT] [FOLDER]

Each format against the template that it is exported with, and against the published ones in FOLDER that are taken
for it (FOLDER/*.jinja; default: chat_templates of the fixtures). A text's hash stands in chat_templates.h.
"""
import glob, itertools, json, os, subprocess, sys, tempfile

try:
    from jinja2.exceptions import TemplateError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError:
    print("skipped: no jinja2\n0 failed, 1 skipped")
    sys.exit(0)

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "test/harness"))
from fixtures import FIXTURES
# What bos_token is where a format names the token itself.
BEGINS = {"nanochat": "<|bos|>"}


def conversations():
    """With and without a system text, one turn or three, finished, asked and opened; odd white space, empty texts, and
    texts that templates look into."""
    texts = ["T", " U ", "\n\tV\u2003 w\n", "", "It's {{ x }} \\n", "\u00e9\u00a0", "<think>a</think>\n\nb",
             "<tool_response>c</tool_response>"]
    for system, first, turns in itertools.product([None, *texts], range(len(texts)), (1, 2, 3)):
        messages = [] if system is None else [{"role": "system", "content": system}]
        for i in range(turns):
            messages.append({"role": "user", "content": texts[(first + 2 * i) % len(texts)]})
            asked = list(messages)
            messages.append({"role": "assistant", "content": texts[(first + 2 * i + 1) % len(texts)]})
        yield {"messages": messages, "opens": False}
        yield {"messages": asked, "opens": False}
        yield {"messages": asked, "opens": True}


class Generation(Extension):
    """The marks that transformers has around an answer write nothing."""
    tags = {"generation"}

    def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def refuse(text):
    raise TemplateError(text)


def compiled(template, blocks):
    """A template with transformers' settings, filters and functions. Today's date stands for itself."""
    jinja = ImmutableSandboxedEnvironment(trim_blocks=blocks, lstrip_blocks=blocks, extensions=[loopcontrols, Generation])
    jinja.filters["tojson"] = lambda x, **_: json.dumps(x, ensure_ascii=False)
    jinja.globals.update(raise_exception=refuse, strftime_now=lambda form: "today's date")
    return jinja.from_string(template)


def render(template, conversation, row):
    """A conversation as a template renders it. None: the template refuses."""
    try:
        return template.render(
            messages=conversation["messages"], add_generation_prompt=conversation["opens"], tools=None, documents=None,
            bos_token=BEGINS.get(row["format"], "<bos>"), eos_token="<eos>")
    except TemplateError:
        return None


def rows(program, texts):
    """Formats and templates with the texts that the C++ side writes of each conversation."""
    systems = ["", "You're a \"test\".\nAre you? \\"]
    given = {"conversations": list(conversations()), "systems": systems, "templates": texts}
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "in.json")
        with open(path, "w") as f:
            json.dump(given, f)
        subprocess.run([program, "--gtest_filter=*ForAComparisonWithJinja"], check=True, stdout=subprocess.DEVNULL,
                       env=dict(os.environ, CHAT_RENDERED=path))
        with open(path + ".out") as f:
            return json.load(f)


def differences(row, blocks=True):
    """The conversations that a template renders otherwise than its format writes them."""
    template = compiled(row["template"], blocks)
    for conversation, text in zip(conversations(), row["texts"]):
        rendered = render(template, conversation, row)
        if rendered != text:
            yield f"{conversation}\n    Jinja {rendered!r}\n    ours  {text!r}"


def main():
    program, folder = os.path.join(ROOT, "build/test_chat"), os.path.join(FIXTURES, "chat_templates")
    for given in sys.argv[1:]:
        program, folder = (program, given) if os.path.isdir(given) else (given, folder)
    paths = sorted(glob.glob(folder + "/*.jinja"))
    texts = [open(path, newline="").read() for path in paths]
    found = rows(program, texts)
    names = [row["format"] + "'s own" for row in found[:len(found) - len(paths)]] + [os.path.basename(p) for p in paths]

    # Ours do not depend on how an engine treats white space between tags; others are rendered as transformers does.
    wrong = unknown = 0
    for name, row in zip(names, found):
        unknown += row["format"] is None
        for blocks in (True, False) if name.endswith("'s own") else (True,):
            different = list(differences(row, blocks)) if row["format"] else []
            wrong += len(different)
            for text in different[:1]:
                print(f"FAIL {name} is no {row['format']}: {len(different)} differ: {text}")
    print(f"{len(found) - unknown} templates, {wrong} conversations differ; {unknown} templates are not known")
    if not paths:
        print("skipped: no published templates in " + folder + "\n0 failed, 1 skipped")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
