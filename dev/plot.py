#!/usr/bin/env python3
"""plot.py - the curves of one run or several, from the log.jsonl that train_gpt writes

usage: plot.py LOG ... [--x step|tokens|time|flops] [--log x|y|xy] [--out FILE.png|FILE.svg]
               [--names A,B,...] [--title TEXT] [--smooth STEPS] [--y SCORE] [--small]

A LOG is a log.jsonl or the folder of a run. Draws the loss (the raw curve pale, an average over
--smooth steps strong, validation as points), learning rate, gradient norm and tokens a second; with
--y in the loss's place a score of the evaluations: hellaswag_norm, bits_per_byte, val_loss, ...
time is the sum of the steps' own times; flops are tokens times the flops a token that the log's
first line names: the model's arithmetic, without recomputation. --small draws the loss alone, in a
picture of few bytes for a page. Where a step stands twice, after
a resume, the later one counts and nothing after the earlier. Lines that cannot be read are counted
and named. Needs matplotlib: pip install matplotlib, or scripts/setup.sh plot
"""
import argparse, bisect, json, math, os, sys
from dataclasses import dataclass, field

KEYS = ("loss", "lr", "grad_norm", "tokens_per_second", "tokens", "ms")


@dataclass
class Run:
    name: str
    config: dict = field(default_factory=dict)
    flops_per_token: float = math.nan
    steps: list = field(default_factory=list)  # rising
    curves: dict = field(default_factory=dict)  # of KEYS: a number a step, NaN where there is none
    scores: dict = field(default_factory=dict)  # name -> (step, value), rising; val_loss is one
    broken: list = field(default_factory=list)  # numbers of lines

    @property
    def val(self):
        return self.scores.get("val_loss", [])


# ---------------------------------------------------------------------------
# reading


def number(x):
    return float(x) if isinstance(x, (int, float)) and not isinstance(x, bool) else math.nan


def keep_before(entries, step):
    while entries and entries[-1][0] >= step:
        entries.pop()


def read_log(path, name):
    """A Run from the lines of a log."""
    run, train = Run(name), []
    with open(path, encoding="utf-8", errors="replace") as lines:
        for n, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                if "config" in entry:
                    run.config = dict(entry["config"])
                    run.flops_per_token = number(entry.get("flops_per_token"))
                    continue
                step = int(entry["step"])
                found = {} if "loss" in entry else {k: v for k, v in entry.items() if k != "step"}
                for name, points in run.scores.items():
                    # a resumed run: what it did the first time is of no use
                    keep_before(points, step if name in found or not found else step + 1)
                for name, value in found.items():
                    run.scores.setdefault(name, []).append((step, number(value)))
                if not found:
                    keep_before(train, step)
                    train.append((step, [number(entry[key]) for key in KEYS]))
            except (ValueError, TypeError, KeyError, OverflowError):
                run.broken.append(n)
    run.steps = [step for step, _ in train]
    run.curves = dict(zip(KEYS, zip(*(values for _, values in train)))) if train else {}
    return run


def x_values(run, x):
    """Where each step stands on the axis: what was done after it."""
    if x == "step":
        return run.steps
    if x == "tokens":
        return run.curves["tokens"]
    if x == "flops":
        return [t * run.flops_per_token for t in run.curves["tokens"]]
    seconds, total, before = [], 0.0, run.steps[0] - 1
    for step, ms in zip(run.steps, run.curves["ms"]):
        total += ms * (step - before) / 1e3  # a step whose line is broken took as long as the next
        seconds.append(total)
        before = step
    return seconds


def val_points(run, xs, name="val_loss"):
    """x and value of the evaluations; one before the first step stands at 0."""
    points = run.scores.get(name, [])
    places = [bisect.bisect_right(run.steps, step) for step, _ in points]
    return [xs[i - 1] if i else 0 for i in places], [value for _, value in points]


def smoothed(ys, window):
    """The mean of about `window` neighbours, as many before as after, so that it does not lag;
    fewer near the end, and near the start, where the loss falls fast. Gaps stay."""
    sums, counts = [0.0], [0]
    for y in ys:
        sums.append(sums[-1] + (y if math.isfinite(y) else 0))
        counts.append(counts[-1] + math.isfinite(y))
    out = []
    for i, y in enumerate(ys):
        half = min(window // 2, i // 4, len(ys) - 1 - i)
        low, high = i - half, i + half + 1
        alone = half == 0 or not math.isfinite(y)
        out.append(y if alone else (sums[high] - sums[low]) / (counts[high] - counts[low]))
    return out


# ---------------------------------------------------------------------------
# drawing

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe, Ito
STYLES = ("-", "--", ":", "-.")  # once the colours are used up
PANELS = ["loss", "lr", "grad_norm", "tokens_per_second"]  # the first is large
TIMES = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


def label(run):
    losses = [loss for _, loss in run.val if math.isfinite(loss)]
    text = f"{run.name}: best validation loss {min(losses):.3f}" if losses else run.name
    return f" {text}" if text.startswith("_") else text  # a leading _ keeps out of the legend


def about(run):
    """What was run, in a line, from the log's configuration."""
    c = run.config
    parts = [str(c["model"])] if "model" in c else []
    for flag, text in (("layers", "{} layers"), ("channels", "{} channels"), ("seq", "T {}"),
                       ("batch-tokens", "{} tokens a step"), ("precision", "{}")):
        if c.get(flag):
            parts.append(text.format(c[flag]))
    return ", ".join(parts)


def draw_run(axes, run, xs, color, style, smooth, y):
    """Raw curves pale under their averages; the learning rate has no noise to average."""
    window = smooth or max(1, len(xs) // 50)
    every = max(1, len(xs) // 400) if len(axes) == 1 else 1  # a small picture shows no more points
    if y:
        axes["loss"].plot(*val_points(run, xs, y), "o" + style, color=color, label=run.name)
    for key in [key for key in PANELS if key in axes and not (y and key == "loss")]:
        window_here = 1 if key == "lr" else window
        raw, ys = run.curves[key], smoothed(run.curves[key], window_here)
        if window_here > 1:
            axes[key].plot(xs[::every], raw[::every], color=color, alpha=0.25, linewidth=0.8)
        axes[key].plot(xs[::every], ys[::every], style, color=color, label=label(run))
    if not y:
        axes["loss"].plot(*val_points(run, xs), "o", color=color, markeredgecolor="white")


def finish_axes(axes, x, x_name, log, name):
    from matplotlib import ticker

    names = (name, "learning rate", "gradient norm", "tokens a second")
    thousands, plain = ticker.EngFormatter(sep=" "), ticker.FormatStrFormatter("%.3g")
    for key, name in zip(PANELS, names):
        if key not in axes:
            continue
        axes[key].set_title(name, loc="left", fontsize=10, fontweight="bold")
        axes[key].set_xlabel(x_name)
        if "x" in log:
            axes[key].set_xscale("log")
            axes[key].xaxis.set_minor_formatter(ticker.NullFormatter())
        axes[key].xaxis.set_major_formatter(
            thousands if x in ("tokens", "flops") else ticker.FormatStrFormatter("%g")
        )
    logarithmic = ("loss", "grad_norm") if "y" in log else ("grad_norm",)
    for key in (key for key in axes if key in logarithmic):
        if not any(y > 0 for line in axes[key].lines for y in line.get_ydata()):
            continue  # all NaN or 0: a logarithmic axis has no place for them
        axes[key].set_yscale("log")
        axis = axes[key].yaxis
        low, high = axis.get_view_interval()
        axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)) if high > 10 * low
                               else ticker.MaxNLocator(6))  # 1, 2, 5 may all lie outside
        axis.set_major_formatter(plain)
        axis.set_minor_locator(ticker.NullLocator())
    if names[0].startswith("loss"):
        axes["loss"].set_ylabel("nats a token")
    axes["loss"].legend(loc="best")
    if len(axes) == 1:
        return
    axes["lr"].yaxis.set_major_formatter(plain)
    axes["tokens_per_second"].yaxis.set_major_formatter(thousands)
    axes["tokens_per_second"].set_ylim(bottom=0)


def draw(runs, out, x, log, title, smooth, y="", small=False):
    import matplotlib

    matplotlib.use("Agg")
    # the same log, the same bytes; an SVG's text stays text; a $ in a name is no formula
    matplotlib.rcParams.update({
        "svg.hashsalt": "train_gpt", "svg.fonttype": "none", "text.parse_math": False,
        "font.size": 10, "axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True,
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    })
    from matplotlib import pyplot

    large = {"mosaic": [PANELS[:1] * 3, PANELS[1:]], "height_ratios": (2, 1), "figsize": (11, 7.5)}
    alone = {"mosaic": [PANELS[:1]], "figsize": (8, 3.5)}
    figure, axes = pyplot.subplot_mosaic(**alone if small else large, layout="constrained")
    places = [x_values(run, x) for run in runs]
    unit, x_name = 1, {"flops": "FLOPs of the model"}.get(x, x)
    if x == "time":
        longest = max(xs[-1] for xs in places)
        unit, x_name = next((u for u in TIMES if longest >= 2 * u[0]), TIMES[-1])
        x_name = f"time in {x_name}"
    for i, (run, xs) in enumerate(zip(runs, places)):
        style = STYLES[i // len(COLORS) % len(STYLES)]
        draw_run(axes, run, [v / unit for v in xs], COLORS[i % len(COLORS)], style, smooth, y)
    finish_axes(axes, x, x_name, log, y or (
        "loss, validation loss as points" if any(run.val for run in runs) else "loss"))
    figure.suptitle(title, fontsize=13, x=0.01, ha="left")
    figure.savefig(out, dpi=150, metadata={"Date": None} if out.endswith(".svg") else None)
    pyplot.close(figure)
    return figure


# ---------------------------------------------------------------------------
# the program


def run_names(paths):
    """The folders' names; whole paths where two are the same."""
    folders = [os.path.basename(os.path.dirname(os.path.abspath(p))) for p in paths]
    return folders if len(set(folders)) == len(folders) else paths


def parse(arguments):
    parser = argparse.ArgumentParser(description="Draw the curves of runs.")
    parser.add_argument("logs", nargs="+", metavar="LOG", help="a log.jsonl or a run's folder")
    parser.add_argument("--x", choices=("step", "tokens", "time", "flops"), default="step")
    parser.add_argument("--log", choices=("", "x", "y", "xy"), default="",
                        help="logarithmic axes; y is the loss")
    parser.add_argument("--out", default="plot.png", help="FILE.png or FILE.svg (plot.png)")
    parser.add_argument("--names", help="A,B,...: for the legend (the folders' names)")
    parser.add_argument("--title", help="(what the first line of the log says)")
    parser.add_argument("--smooth", type=int, default=0, metavar="STEPS",
                        help="average the loss over so many (1/50 of the run)")
    parser.add_argument("--y", default="", metavar="SCORE",
                        help="a score of the evaluations instead of the loss: hellaswag_norm, ...")
    parser.add_argument("--small", action="store_true",
                        help="the loss alone, in a picture of few bytes for a page")
    a = parser.parse_args(arguments)
    a.logs = [os.path.join(p, "log.jsonl") if os.path.isdir(p) else p for p in a.logs]
    a.names = a.names.split(",") if a.names else run_names(a.logs)
    if len(a.names) != len(a.logs):
        parser.error(f"--names has {len(a.names)} names for {len(a.logs)} logs")
    if not a.out.endswith((".png", ".svg")):
        parser.error(f"--out {a.out}: ends in .png or .svg")
    if a.smooth < 0:
        parser.error(f"--smooth {a.smooth}: is a number of steps")
    return a


def main(arguments=None):
    a = parse(arguments)
    runs = []
    for path, name in zip(a.logs, a.names):
        try:
            run = read_log(path, name)
        except OSError as e:
            sys.exit(f"error: {path}: {e.strerror}; train_gpt --out DIR writes DIR/log.jsonl")
        if run.broken:
            first = ", ".join(map(str, run.broken[:5])) + (", ..." if len(run.broken) > 5 else "")
            print(f"{path}: {len(run.broken)} broken, left out: line {first}", file=sys.stderr)
        if not run.steps:
            sys.exit(f"error: {path}: holds no training step; is it the log.jsonl of train_gpt?")
        if a.y and a.y not in run.scores:
            known = ", ".join(sorted(run.scores)) or "none"
            sys.exit(f"error: {path}: has no score {a.y}; it has {known}")
        if a.x == "flops" and not math.isfinite(run.flops_per_token):
            sys.exit(f"error: {path}: its first line names no flops_per_token; take --x tokens")
        runs.append(run)
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    if about(runs[0]) and len({about(run) for run in runs}) == 1:
        title += f": {about(runs[0])}"
    try:
        draw(runs, a.out, a.x, a.log, a.title or title, a.smooth, a.y, a.small)
    except ImportError as e:
        sys.exit(f"error: plots need matplotlib ({e}): pip install matplotlib, or "
                 "scripts/setup.sh plot on Debian and Ubuntu")
    except OSError as e:
        sys.exit(f"error: {a.out}: {e.strerror}")
    print(a.out)


if __name__ == "__main__":
    main()
