#!/usr/bin/env python3
"""compare.py - what changed between runs, and whether noise explains the difference of their losses

usage: compare.py RUN RUN ... [--y SCORE] [--sd X]

A RUN is a log.jsonl or the folder of a run. Runs with the same flags but for --seed form a group,
A, B, ...; each is compared with A: the flags that differ; the first step whose losses differ in any
bit, of runs with one seed; means along the run, of --y SCORE (val_loss, else the training loss in
twentieths); what the difference at the end is worth. With three seeds a group Welch's test says so
by the runs' own deviations: p < 0.01, as of one useless change in a hundred. Else for losses, or if
its deviation is theirs (--sd, 0.0013), modded-nanogpt's rule of track 3, with 4.5e-5 for a step:
    (loss_A - loss_B + (steps_A - steps_B) 4.5e-5) / sqrt(1/n_A + 1/n_B) >= 0.004, or 3.08 sd
"""
import argparse, glob, json, math, os, sys
from dataclasses import dataclass, field
from plot import read_log, run_names

# A run with other values of these trains the same.
ASIDE = {"seed", "out", "resume", "start", "log-every", "save-every", "save-async", "keep",
         "export", "export-dtype", "eval", "eval-every", "expect",
         "sample-every", "sample-tokens", "prompt", "temperature", "timeline", "watchdog"}
STEP_WORTH, RULE, RULE_SD = 4.5e-5, 0.004, 0.0013  # of track 3
LEVEL, ROWS = 0.01, 6  # Welch's p; lines of the table along the run


@dataclass
class Group:
    name: str
    flags: dict
    runs: dict = field(default_factory=dict)  # seed -> Run
    curve: dict = field(default_factory=dict)  # step -> a value for each run

    def mean(self, step):
        return sum(self.curve[step]) / len(self.runs)

    def variance(self, step):
        return sum((x - self.mean(step)) ** 2 for x in self.curve[step]) / (len(self.runs) - 1)


# ---------------------------------------------------------------------------
# runs and groups


def flags_of(config):
    return {key: value for key, value in config.items() if key not in ASIDE}


def read_run(path, name):
    try:
        run = read_log(path, name)
    except OSError as e:
        sys.exit(f"error: {path}: {e.strerror}; train_gpt --out DIR writes DIR/log.jsonl")
    if not run.steps or not run.config:
        sys.exit(f"error: {path}: lacks the first line or all steps; is it train_gpt's log.jsonl?")

    # The log's first line is the first start's; a checkpoint has the flags of its own.
    if run.steps[-1] < run.config.get("steps", 0):
        print(f"{name}: stops at step {run.steps[-1]} of {run.config['steps']}")
    for manifest in glob.glob(os.path.join(os.path.dirname(path), "step_*/manifest.json")):
        later = flags_of(json.load(open(manifest, encoding="utf-8")).get("config", {}))
        changed = [key for key in later if later[key] != run.config.get(key)]
        if changed:
            print(f"{name}: {manifest} has another --{', --'.join(changed)}: resumed with it?")
    return run


def make_groups(runs):
    """Groups by flags. A seed counts once: the same run again says nothing of noise."""
    groups = []
    for run in runs:
        flags, seed = flags_of(run.config), run.config.get("seed")
        if not any(g.flags == flags for g in groups):
            groups.append(Group(chr(ord("A") + len(groups)), flags))
        group = next(g for g in groups if g.flags == flags)
        if seed in group.runs:
            print(f"{run.name}: counts once with {group.runs[seed].name}: one seed, the same flags")
            print_first_difference(group.runs[seed], run)
        group.runs.setdefault(seed, run)
    return groups


def parts_of(run, size):
    """The mean training loss of each part of so many steps, at the part's last step."""
    losses = run.curves["loss"]
    return {run.steps[end - 1]: sum(losses[end - size:end]) / size
            for end in range(size, len(losses) + 1, size)}


def fill_curves(groups, score):
    """Values at the steps that all runs of a group have."""
    size = max(1, min(len(run.steps) for group in groups for run in group.runs.values()) // 20)
    for group in groups:
        runs = list(group.runs.values())
        for run in runs:
            if score not in ("loss", *run.scores):
                sys.exit(f"error: {run.name} has no {score}; it has {', '.join(run.scores)}")
        points = [parts_of(r, size) if score == "loss" else dict(r.scores[score]) for r in runs]
        group.curve = {s: [p[s] for p in points] for s in points[0] if all(s in p for p in points)}
        if not group.curve:
            sys.exit(f"error: the runs of {group.name} have no step with {score} in common")


# ---------------------------------------------------------------------------
# statistics


def chance(t, df):
    """How often chance gives |t| or more, by Student's distribution. With x = sqrt(df) tan(a) the
    density is cos(a)^(df - 1) / Beta(1/2, df/2); summed by midpoints."""
    low, parts = math.atan(abs(t) / math.sqrt(df)), 500
    width = (math.pi / 2 - low) / parts
    area = width * sum(math.cos(low + (i + 0.5) * width) ** (df - 1) for i in range(parts))
    return 2 * area / math.exp(math.lgamma(0.5) + math.lgamma(df / 2) - math.lgamma(df / 2 + 0.5))


def least_t(df):  # the t that chance reaches as often as LEVEL says, to a hundredth
    return next(i / 100 for i in range(1, 10**6) if chance(i / 100, df) <= LEVEL)


def welch(samples):
    """Of two means' difference: standard error, degrees of freedom. samples: (variance, size)."""
    total = sum(variance / n for variance, n in samples)
    below = sum((variance / n) ** 2 / (n - 1) for variance, n in samples)
    return math.sqrt(total), total * total / below if below else 2


# ---------------------------------------------------------------------------
# what is printed


def print_flags(groups):
    for key in sorted(set().union(*(g.flags for g in groups))):
        values = [f"{g.name} {json.dumps(g.flags.get(key))}" for g in groups]
        if len({value[2:] for value in values}) > 1:
            print(f"--{key}: {', '.join(values)}")


def print_first_difference(a, b):
    of_b = dict(zip(b.steps, b.curves["loss"]))
    both = [(step, x, of_b[step]) for step, x in zip(a.steps, a.curves["loss"]) if step in of_b]
    for step, x, y in both:
        if x != y and not (math.isnan(x) and math.isnan(y)):
            return print(f"{a.name}, {b.name}: losses differ from step {step} on: {x!r}, {y!r}")
    print(f"{a.name}, {b.name}: the same bits in all {len(both)} steps that both have")


def print_curve(a, b, score):
    steps = sorted(set(a.curve) & set(b.curve))
    print(f"{'step':>8} {score + ' ' + a.name:>12} {b.name:>10} {b.name + ' - ' + a.name:>10}")
    for step in steps[::-1][::max(1, math.ceil(len(steps) / ROWS))][::-1]:
        x, y = a.mean(step), b.mean(step)
        print(f"{step:8} {x:12.4f} {y:10.4f} {y - x:+10.4f}")


def print_worth(a, b, score, sd):
    ends, sizes = (max(a.curve), max(b.curve)), (len(a.runs), len(b.runs))
    difference = b.mean(ends[1]) - a.mean(ends[0])
    print(f"after {ends[0]} and {ends[1]} steps {b.name} - {a.name} = {difference:+.4f}")
    verdict, own = lambda differ: "they differ" if differ else "noise explains it", 0.0
    if min(sizes) >= 3:
        samples = (a.variance(ends[0]), sizes[0]), (b.variance(ends[1]), sizes[1])
        (error, df), sds = welch(samples), [math.sqrt(variance) for variance, _ in samples]
        p, own = chance(difference / error, df) if error else float(difference == 0), min(sds)
        print(f"  Welch: sd {sds[0]:.4f} and {sds[1]:.4f}, p {p:.2g}: {verdict(p < LEVEL)}; "
              f"{sizes[0]} and {sizes[1]} runs tell {least_t(df) * error:.4f} from noise")
    else:
        print("  Welch: needs three seeds a group")
    if own > 2 * sd:
        print(f"  track 3's rule: not for these runs, whose sd is not {sd:g}")
    elif score in ("val_loss", "loss"):
        worth = abs(difference + (ends[1] - ends[0]) * STEP_WORTH)
        worth, need = worth / math.sqrt(sum(1 / n for n in sizes)), RULE * sd / RULE_SD
        print(f"  track 3's rule, if sd is {sd:g}: {worth:.4f} of {need:.4f}: "
              f"{verdict(worth >= need)}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Say what changed between runs, without noise.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a log.jsonl or a run's folder")
    parser.add_argument("--y", metavar="SCORE", help="val_loss, loss, hellaswag_norm, ...")
    parser.add_argument("--sd", type=float, default=RULE_SD, help="that track 3's rule assumes")
    a = parser.parse_args(arguments)
    paths = [os.path.join(p, "log.jsonl") if os.path.isdir(p) else p for p in a.runs]
    groups = make_groups(runs := list(map(read_run, paths, run_names(paths))))
    for group in groups:
        print(f"{group.name}: {', '.join(run.name for run in group.runs.values())}")
    if len(groups) < 2:
        sys.exit("error: all runs have the same flags; give runs that differ in more than --seed")
    print_flags(groups)
    score = a.y or ("val_loss" if all(run.val for run in runs) else "loss")
    fill_curves(groups, score)
    for group in groups[1:]:
        for seed in [seed for seed in groups[0].runs if seed in group.runs]:
            print_first_difference(groups[0].runs[seed], group.runs[seed])
        print_curve(groups[0], group, score)
        print_worth(groups[0], group, score, a.sd)


if __name__ == "__main__":
    main()
