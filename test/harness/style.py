#!/usr/bin/env python3
"""How the code is set on the page, and who includes whom, held to limits. test/style.sh runs it.

usage: test/harness/style.py [FILE ...]     without FILE: llmc/ and the programs, the rules of includes, and the tests
       test/harness/style.py --includes     those rules alone; they need no ctags

Prints each place that breaks a rule, then the figures beside their limits; exit status 1 when one is over.
It measures rhythm and not sense: a blank line that begins no new thought is as bad as none.
Needs universal-ctags, which knows where functions end.
"""
import glob, json, os, re, subprocess, sys

LONG = 20  # lines of a function that wants paragraphs
LIMITS = {
    "unbroken": (5, "% of long functions have no blank line"),
    "bare": (2, "% of long functions have neither a blank line nor a comment"),
    "tokens": (11.4, "tokens a line of code"),
    "comments": (0.2, "lines of comment a line of code, files' headers left out: at least"),
    "wide": (0, "lines over 100 columns"),
    "orphans": (0, "lines of a comment with a word or two left over from the line above"),
    "inverted": (0, "comments that begin with a genitive or a pronoun"),
    "lengths": (0, "functions over 120 lines, kernels over 160, rows of tables left out"),
    "includes": (0, "includes against the rules"),
    "upward": (0, "includes of a later room"),
}
AT_LEAST = {"comments"}
# Tests are read too; lines of JSON and of words that are expected may be long.
TESTS = {"unbroken": 5, "bare": 2, "comments": 0.1, "orphans": 0, "inverted": 0}

COMMENT = re.compile(r"\s*(//|/\*|\*(?!\w))")
RULE = re.compile(r"\s*//\s*[-=]{3,}")  # a ruled line is no comment
INVERTED = {"Of", "That", "Those", "Mine", "What", "Whose"}
TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|[A-Za-z_]\w*|\d[\w.]*|[^\s\w]')


# ----------------------------------------------------------------------------
# the page

class Findings:
    def __init__(self):
        self.counts = dict.fromkeys(LIMITS, 0)
        self.places = []

    def add(self, figure, place):
        self.counts[figure] += 1
        self.places.append(place)


def words_of(line):
    return re.sub(r"^\s*(//|/\*|\*)+", "", line).split()


def read_lines(path):
    return open(path, encoding="utf-8").read().split("\n")


def functions(paths):
    """(path, first line, last line, name, signature) of each function, as ctags sees them."""
    command = ["ctags", "--output-format=json", "--fields=+neS", "--kinds-C++=f",
               "--langmap=C++:+.cu.cuh.h.cpp", "-f", "-", *paths]
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        tag = json.loads(line)
        if tag.get("kind") == "function" and "end" in tag:
            yield tag["path"], tag["line"], tag["end"], tag["name"]


def measure_functions(texts, found):
    long_ones = 0
    for path, first, last, name in functions(list(texts)):
        lines = texts[path]
        body = lines[first:last - 1]
        # Lengths: a row of a table is no line of a function.
        length = sum(not re.match(r"\s*(\{\"|\")", line) for line in body) + 2
        kernel = name.endswith("_kernel") or "__global__" in " ".join(lines[max(first - 4, 0):first])
        if length > (160 if kernel else 120):
            found.add("lengths", f"{path}:{first}: {name}() has {length} lines")

        # Paragraphs.
        if last - first + 1 < LONG:
            continue
        long_ones += 1
        if all(line.strip() for line in body):
            found.add("unbroken", f"{path}:{first}: {name}() has {last - first + 1} lines and no paragraph")
            found.counts["bare"] += not any("//" in line or COMMENT.match(line) for line in body)
    for figure in ("unbroken", "bare"):
        found.counts[figure] *= 100 / max(long_ones, 1)


def measure_comment(path, lines, n, found):
    """One comment line: left over from the one above, or the wrong way round?"""
    words = words_of(lines[n])
    above = lines[n - 1] if n else ""
    below = lines[n + 1] if n + 1 < len(lines) else ""
    continues = COMMENT.match(above) and not RULE.match(above)
    left_over = 0 < len(words) <= 2 and re.match(r"[a-z(0-9]", words[0]) and not COMMENT.match(below)
    if continues and left_over and len(above) > 70:
        found.add("orphans", f'{path}:{n + 1}: "{" ".join(words)}" is left over from the line above')
    if not COMMENT.match(above) and words and words[0] in INVERTED:
        found.add("inverted", f'{path}:{n + 1}: "{" ".join(words[:8])}": say who does what')


def measure_lines(texts, found):
    code = comments = tokens = 0
    for path, lines in texts.items():
        header = True
        for n, line in enumerate(lines):
            if len(line) > 100:
                found.add("wide", f"{path}:{n + 1}: {len(line)} columns")
            if not line.strip():
                continue
            if COMMENT.match(line):
                comments += not header and not RULE.match(line)
                measure_comment(path, lines, n, found)
                continue
            header = False
            if not line.startswith(("#pragma", "#include")):
                code += 1
                tokens += len(TOKEN.findall(re.sub(r"//.*", "", line)))
    found.counts["tokens"] = tokens / max(code, 1)
    found.counts["comments"] = comments / max(code, 1)


# ----------------------------------------------------------------------------
# who includes whom

# A room includes the rooms before it in this list, and its own; programs include all.
ROOMS = ["ops", "comm", "", "io", "planner", "run", "tune", "extra"]


def included(path):
    """The files in llmc/ that this one includes, as paths from there."""
    names = re.findall(r'^#include "([^"]+)"', open(path).read(), re.M)
    folder = os.path.dirname(path)
    return [os.path.relpath(os.path.join(folder, name), "llmc") for name in names]


def check_includes(found):
    files = {os.path.relpath(p, "llmc"): p for p in glob.glob("llmc/**/*", recursive=True)
             if os.path.isfile(p) and not p.endswith(".md")}
    arrows = {name: [x for x in included(path) if not x.startswith("..")] for name, path in files.items()}
    operators = [name for name in files if name.endswith(".cuh")]

    def reached(name, seen):
        for target in arrows.get(name, []):
            if target not in seen:
                seen.add(target)
                reached(target, seen)
        return seen

    for name, path in sorted(files.items()):
        if not open(path).readline().startswith(f"// {os.path.basename(name)} - "):
            found.add("includes", f"{path}: does not open with its name and what it is")
        for target in arrows[name]:
            if target not in files:
                found.add("includes", f"{path}: includes {target}, which is not there")
            # Rooms include what is below them, and nobody an extension.
            rooms = [ROOMS.index(os.path.dirname(x)) for x in (name, target)]
            if rooms[1] > rooms[0]:
                found.add("upward", f"{path}: includes {target}, a room that comes after it")

        # No file includes itself, whatever the way round.
        all_of_it = reached(name, set())
        if name in all_of_it:
            found.add("includes", f"{path}: includes itself, by way of {', '.join(arrows[name])}")

        # "To copy" names all that a file needs, and no more.
        head = open(path).read().split("#pragma once")[0]
        said = re.search(r"To copy:(.*)", head, re.S)
        if name in operators and not said:
            found.add("includes", f'{path}: an operator has no line "To copy: this file, ..."')
        if said:
            names = set(re.findall(r"\b\w+\.cuh|\b\w+\.h\b", said[1]))
            needs = {os.path.basename(x) for x in all_of_it} - {os.path.basename(name)}
            for x in sorted(needs - names):
                found.add("includes", f'{path}: "To copy" does not name {x}')
            for x in sorted(names - needs):
                found.add("includes", f'{path}: "To copy" names {x}, which is not needed')


def measure(paths):
    """The figures of these files, and the places that break a rule."""
    found = Findings()
    texts = {path: read_lines(path) for path in paths}
    measure_functions(texts, found)
    measure_lines(texts, found)
    return found


def show(found, limits, where=""):
    """Print places and figures; return how many figures are over their limits."""
    print("\n".join(found.places))
    failed = 0
    for figure, limit in limits.items():
        value = found.counts[figure]
        over = value < limit if figure in AT_LEAST else value > limit
        failed += over
        print(f"{'FAIL' if over else 'ok':4} {value:6.2f} of {limit:<5} {LIMITS[figure][1]}{where}")
    return failed


def main():
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
    limits = {figure: limit for figure, (limit, _) in LIMITS.items()}
    files, tests = sys.argv[1:], {}
    if files == ["--includes"]:
        files, limits = [], {x: limits[x] for x in ("includes", "upward")}
    elif files:
        del limits["includes"], limits["upward"]
    else:
        files = sorted(glob.glob("llmc/**/*.h", recursive=True) + glob.glob("llmc/ops/*.cuh") + glob.glob("*_gpt.c[up]*"))
        tests = TESTS

    # The sources, then the tests.
    found = measure(files) if files else Findings()
    if "includes" in limits:
        check_includes(found)
    failed = show(found, limits)
    if tests:
        found = measure(sorted(glob.glob("test/*/*.h") + glob.glob("test/*/*.cpp")))
        found.places = [place for place in found.places if not place.endswith("columns")]
        failed += show(found, tests, ", in tests")
    print(f"{len(limits) + len(tests) - failed} passed, {failed} failed")
    sys.exit(1 if failed else 0)


main()
