#!/usr/bin/env python3
"""What a reader must hold, against the ceiling in test/size_limits.txt. `make check` runs it.

usage: test/size.py             print each figure beside its limit; exit status 1 when one is over
       test/size.py lower       write the figures that are below their limits as the new limits

Figures: lines and files by room, comments included; the chain and the closure of includes; uses of another file's name
without its include; members of the central structs; flags of each program, where it is built; words of the pages.
Growth in one place is paid for in another: a limit is lowered, never raised. Needs universal-ctags.
"""
import collections, json, os, re, subprocess, sys

LIMITS = "test/size_limits.txt"
STRUCTS = ["Config", "Run", "Trainer", "Ctx", "Shape", "Layout", "PlanOptions", "Batch"]
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.M)


def sources():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], capture_output=True, text=True, check=True)
    return [path for path in listed.stdout.splitlines() if os.path.isfile(path)]


def is_code(path):
    return path.endswith((".h", ".cuh", ".cu", ".cpp"))


def room_of(path):
    parts = path.split("/")
    if len(parts) == 1:
        return "programs"
    if parts[0] != "llmc":
        return parts[0]
    return "flat" if len(parts) == 2 else parts[1]


def lines_of(path):
    return open(path, encoding="utf-8").read().count("\n")


# ----------------------------------------------------------------------------
# rooms and includes

def measure_rooms(files, figures):
    rooms = collections.Counter()
    for path in files:
        rooms[room_of(path)] += lines_of(path)
    apart = ("test", "dev", "extra")
    figures["program"] = sum(lines for room, lines in rooms.items() if room not in apart)
    for room in ("programs", "flat", "ops", "comm", "io", "planner", "run", "tune", "extra"):
        figures[room] = rooms[room]
    figures["tests"] = rooms["test"]
    headers = [path for path in files if path.startswith("llmc/")]
    figures["headers"] = sum(room_of(path) != "extra" for path in headers)
    figures["flat_files"] = sum(room_of(path) == "flat" for path in headers)


def measure_includes(files, figures):
    arrows = {path: [] for path in files}
    for path in files:
        for name in INCLUDE.findall(open(path, encoding="utf-8").read()):
            target = os.path.normpath(os.path.join(os.path.dirname(path), name))
            if target in arrows:
                arrows[path].append(target)

    def closure(path, seen):
        for target in arrows[path]:
            if target not in seen:
                seen.add(target)
                closure(target, seen)
        return seen

    def depth(path):
        if path not in depths:
            depths[path] = 0 # a circle ends here
            depths[path] = 1 + max(map(depth, arrows[path]), default=0)
        return depths[path]

    # Only an emulator build follows an arrow into test/.
    depths = {path: 0 for path in files if path.startswith("test/")}
    figures["depth"] = max(depth(path) for path in files if not path.startswith(("test/", "dev/")))
    ours = [path for path in closure("llmc/step.h", {"llmc/step.h"}) if path.startswith("llmc/")]
    figures["step_closure"] = sum(map(lines_of, ours))
    for name in ("layernorm", "adamw", "gelu", "attention_sm90"):
        path = f"llmc/ops/{name}.cuh"
        figures[f"copy_{name}"] = sum(map(lines_of, (x for x in closure(path, {path}) if x.startswith("llmc/"))))
    return arrows


# ----------------------------------------------------------------------------
# names

def tags_of(files):
    command = ["ctags", "--output-format=json", "--fields=+nKZ", "--kinds-C++=fpsgcmetuv", "--langmap=C++:+.cu.cuh.h",
               "-f", "-", *files]
    return map(json.loads, subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines())


def measure_names(files, arrows, figures):
    # A name counts where one file alone defines or declares it, outside of structs.
    homes, members, functions = collections.defaultdict(set), collections.Counter(), set()
    for tag in tags_of(files):
        scope = tag.get("scope", "").split("::")[-1]
        if tag["kind"] == "member":
            members[scope] += 1
        elif tag["kind"] in ("function", "prototype", "struct", "enum", "class", "typedef") and not scope[:1].isupper():
            homes[tag["name"]].add(tag["path"])
            if tag["kind"] in ("function", "prototype"):
                functions.add(tag["name"])
    for struct in STRUCTS:
        figures[f"members_{struct}"] = members[struct]
    home = {name: min(paths) for name, paths in homes.items() if len(paths) == 1 and len(name) > 4}

    # Look for uses whose file is not included directly. A function is used where it is called: a variable, a member or
    # a function of another namespace may have its name.
    used = missing = 0
    for path in files:
        text = re.sub(r'//.*|"(?:\\.|[^"\\\n])*"', "", open(path, encoding="utf-8").read())
        calls = set(re.findall(r"(?<![\w.>:~])([A-Za-z_]\w{4,})(?:<[^;{}()]*>)?\(", text))
        words = calls | (set(re.findall(r"[A-Za-z_]\w{4,}", text)) - functions)
        others = {home[word] for word in words if home.get(word, path) != path}
        used += len(others)
        missing += len(others - set(arrows[path]))
    figures["missing_percent"] = round(100 * missing / used, 1)


# ----------------------------------------------------------------------------
# flags and words

def measure_pages(figures):
    words = lambda path: len(open(path, encoding="utf-8").read().split())
    figures["words_readme"] = words("README.md")
    figures["words_docs"] = sum(words(f"docs/{page}") for page in os.listdir("docs") if page.endswith(".md"))
    for name in ("train", "tune", "sample", "plan", "convert", "prepare"):
        program = f"build/{name}_gpt"
        if os.access(program, os.X_OK):
            page = subprocess.run([program, "--help"], capture_output=True, text=True).stdout
            figures[f"flags_{name}"] = len(re.findall(r"^ +--[a-z]", page, re.M))


def main():
    os.chdir(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
    figures = {}
    code = [path for path in sources() if is_code(path)]
    measure_rooms(code, figures)
    arrows = measure_includes(code, figures)
    measure_names([path for path in code if path.startswith("llmc/") or "/" not in path], arrows, figures)
    measure_pages(figures)

    # Compare with the limits; a program that is not built has no flags to count.
    limits = dict(line.split() for line in open(LIMITS) if line.strip() and not line.startswith("#"))
    over = []
    for name, limit in limits.items():
        figure = figures.get(name)
        if figure is None:
            print(f"skip {name}: not built")
            continue
        above = figure - float(limit)
        over += [name] if above > 0 else []
        print(f"{'FAIL' if above > 0 else 'ok':4} {name:20} {figure:>8} of {limit}" +
              (f": {above:g} over" if above > 0 else ""))

    if sys.argv[1:] == ["lower"]:
        lines = open(LIMITS).read().splitlines()
        for i, line in enumerate(lines):
            name = line.split(" ")[0]
            if name in figures and figures[name] < float(limits[name]):
                lines[i] = f"{name} {figures[name]}"
        open(LIMITS, "w").write("\n".join(lines) + "\n")
    print(f"{len(limits) - len(over)} passed, {len(over)} failed")
    sys.exit(1 if over else 0)


main()
