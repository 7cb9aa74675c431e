#!/usr/bin/env python3
"""dev/plot.py on small logs: what is read, where points stand; pictures where matplotlib is.

usage: test/io/plot_test.py        seconds
"""
import contextlib, io, json, math, os, sys, tempfile, unittest

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../dev"))
import plot

try:
    import matplotlib
except ImportError:
    matplotlib = None

FIRST = {"config": {"model": "tiny", "seq": 32}, "flops_per_token": 1000}


def step(n, loss=None, ms=500.0):
    return {"step": n, "loss": 5 - n / 10 if loss is None else loss, "grad_norm": 1 / n,
            "lr": n * 1e-4, "tokens": 128 * n, "ms": ms, "tokens_per_second": 256.0, "mfu": 0.3}


def val(n, loss):
    return {"step": n, "val_loss": loss}


class Plot(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def log(self, *entries, name="a"):
        os.makedirs(os.path.join(self.folder, name), exist_ok=True)
        path = os.path.join(self.folder, name, "log.jsonl")
        with open(path, "w", encoding="utf-8") as f:
            f.writelines((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries)
        return path

    def read(self, *entries):
        return plot.read_log(self.log(*entries), "a")

    def main(self, *arguments):
        """Exit status or message, and all that is printed."""
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            try:
                plot.main(list(arguments))
                status = 0
            except SystemExit as e:
                status = e.code
        return status, out.getvalue()

    # -- reading --

    def test_reads_what_a_run_writes(self):
        run = self.read(FIRST, val(0, 5.5), step(1), step(2), val(2, 4.5))
        self.assertEqual((run.steps, run.val, run.broken), ([1, 2], [(0, 5.5), (2, 4.5)], []))
        self.assertEqual(run.config["seq"], 32)
        for key in plot.KEYS:
            self.assertEqual(run.curves[key], (step(1)[key], step(2)[key]), key)

    def test_the_later_of_repeated_steps_counts(self):
        once = [step(n) for n in range(1, 7)]
        run = self.read(FIRST, *once[:2], val(2, 9), *once[2:], val(6, 9), step(2, 1.0),
                        val(2, 1.5), step(3, 0.5), val(3, 0.7), val(3, 0.6))
        self.assertEqual(run.steps, [1, 2, 3])  # 4 to 6 belong to the life that was given up
        self.assertEqual(run.curves["loss"], (4.9, 1.0, 0.5))
        self.assertEqual(run.val, [(2, 1.5), (3, 0.6)])
        self.assertEqual(run.broken, [])

    def test_scores_are_series(self):
        tasks = lambda n, value: {"step": n, "piqa": value, "piqa_norm": value / 2}
        run = self.read(FIRST, step(1), dict(val(1, 3), bits_per_byte=2), tasks(1, 0.5), step(2),
                        val(2, 9), tasks(2, 0.9), step(3), val(3, 9), tasks(3, 0.9), step(2),
                        val(2, 2), tasks(2, 0.7), tasks(2, 0.8))
        self.assertEqual(run.scores, {
            "val_loss": [(1, 3), (2, 2)], "bits_per_byte": [(1, 2)],
            "piqa": [(1, 0.5), (2, 0.8)], "piqa_norm": [(1, 0.25), (2, 0.4)]})
        self.assertEqual((run.val, run.broken), ([(1, 3), (2, 2)], []))
        self.assertEqual(plot.val_points(run, [10, 20], "piqa"), ([10, 20], [0.5, 0.8]))
        self.assertEqual(plot.val_points(run, [10, 20], "none"), ([], []))

    def test_broken_lines_are_named(self):
        run = self.read(FIRST, "{", step(1), "", '{"step": 2}', "[3]", '"config"', "null", "\x00",
                        step(3), '{"step": "x", "val_loss": 1}',
                        '{"step": 1e999, "val_loss": 1}', json.dumps(step(4))[:-9])
        self.assertEqual(run.broken, [2, 4, 5, 6, 7, 8, 9, 11, 12, 13])
        self.assertEqual(run.steps, [1, 3])

    def test_what_is_no_number_is_a_gap(self):
        run = self.read(FIRST, step(1), dict(step(2), loss=None, grad_norm="x", lr=True))
        for key in ("loss", "grad_norm", "lr"):
            self.assertTrue(math.isnan(run.curves[key][1]), key)

    # -- places --

    def test_axes(self):
        run = self.read(FIRST, val(0, 6), step(1), step(2, ms=1500), val(2, 5), step(5, ms=100),
                        val(5, 4))
        self.assertEqual(plot.x_values(run, "step"), [1, 2, 5])
        self.assertEqual(list(plot.x_values(run, "tokens")), [128, 256, 640])
        self.assertEqual(plot.x_values(run, "flops"), [128e3, 256e3, 640e3])
        for found, expected in zip(plot.x_values(run, "time"), (0.5, 2.0, 2.3)):
            self.assertAlmostEqual(found, expected)  # steps 3 and 4 are missing: 100 ms each too
        self.assertEqual(plot.val_points(run, [10, 20, 50]), ([0, 20, 50], [6, 5, 4]))

        # In a log that begins later, the first step counts with its own time.
        self.assertEqual(plot.x_values(self.read(step(7)), "time"), [0.5])

    def test_smoothing_does_not_lag(self):
        line = [float(i) for i in range(20)]
        self.assertEqual(plot.smoothed(line, 1), line)
        for a, b in zip(plot.smoothed(line, 7), line):
            self.assertAlmostEqual(a, b)

        # One neighbour on each side from the fifth value on, and none at the end.
        self.assertEqual(plot.smoothed([0, 3, 0, 3, 0, 3, 0, 3], 3), [0, 3, 0, 3, 2, 1, 2, 3])

        gap = plot.smoothed([0] * 4 + [6, 0, math.nan, 3, 1], 3)
        self.assertTrue(math.isnan(gap.pop(6)))
        self.assertEqual(gap, [0, 0, 0, 0, 2, 3, 2, 1])
        self.assertEqual(plot.smoothed([0.0] * 8 + [5, 0, 0, 0, 0], 99)[8], 1)  # two on each side

    def test_names(self):
        self.assertEqual(plot.run_names(["x/a/log.jsonl", "y/b/log.jsonl"]), ["a", "b"])
        same = ["x/a/log.jsonl", "y/a/log.jsonl"]
        self.assertEqual(plot.run_names(same), same)

    # -- the program --

    def test_wrong_input(self):
        log = self.log(step(1))
        for arguments, says in (
            (["missing"], "missing: No such file"),
            ([self.log(FIRST, "x", name="b")], "holds no training step"),
            ([log, "--x", "flops"], "take --x tokens"),
            ([log, "--y", "piqa"], "has no score piqa; it has none"),
            ([self.log(step(1), val(1, 2), name="c"), "--y", "piqa"], "it has val_loss"),
        ):
            self.assertIn(says, str(self.main(*arguments)[0]))
        for arguments, says in (
            ([log, "--out", "a.pdf"], "ends in .png or .svg"),
            ([log, "--names", "a,b"], "2 names for 1 logs"),
            ([log, "--smooth", "-1"], "is a number of steps"),
            ([log, "--x", "epochs"], "invalid choice"),
        ):
            status, text = self.main(*arguments)
            self.assertEqual(status, 2)
            self.assertIn(says, text)

    @unittest.skipIf(matplotlib, "matplotlib is installed")
    def test_without_matplotlib(self):
        self.assertIn("pip install matplotlib", self.main(self.log(step(1)))[0])

    @unittest.skipUnless(matplotlib, "matplotlib is not installed")
    def test_pictures(self):
        a = self.log(FIRST, "{", *(step(n) for n in range(1, 301)), val(300, 2.5))
        self.log(FIRST, *(step(n, 3 + 1 / n) for n in range(1, 30)), name="b")
        out = os.path.join(self.folder, "out.svg")

        # Every axis has its name, and the pictures their words.
        for x, name in (("step", "step"), ("tokens", "tokens"), ("flops", "FLOPs"),
                        ("time", "time in minutes")):
            status, text = self.main(a, os.path.join(self.folder, "b"), "--x", x, "--out", out,
                                     "--log", "xy")
            self.assertEqual(status, 0, text)
            self.assertIn("1 broken, left out: line 2", text)
            with open(out, encoding="utf-8") as f:
                svg = f.read()
            for words in (name, "2 runs: tiny, T 32", "a: best validation loss 2.500", ">b<",
                          "learning rate", "gradient norm", "tokens a second"):
                self.assertIn(words, svg)

        # The same picture has the same bytes.
        self.main(a, os.path.join(self.folder, "b"), "--x", "time", "--out", out, "--log", "xy")
        with open(out, encoding="utf-8") as f:
            self.assertEqual(f.read(), svg)

        # Names that matplotlib would take for a formula, or leave out of its legend.
        self.main(a, a, "--names", "$a$,_b", "--out", out)
        with open(out, encoding="utf-8") as f:
            svg = f.read()
        for name in (">$a$: best", " _b: best"):
            self.assertIn(name, svg)

        png = os.path.join(self.folder, "out.png")
        self.assertEqual(self.main(a, "--out", png, "--title", "T")[0], 0)
        with open(png, "rb") as f:
            self.assertEqual(f.read(8), b"\x89PNG\r\n\x1a\n")
        self.assertIn("No such file", self.main(a, "--out", self.folder + "/no/a.png")[0])

    @unittest.skipUnless(matplotlib, "matplotlib is not installed")
    def test_a_small_picture_is_the_loss_in_few_points(self):
        run = self.read(FIRST, *(step(n) for n in range(1, 1202)), val(1201, 3.5))
        out = os.path.join(self.folder, "a.svg")
        figure = plot.draw([run], out, "step", "", "", 0, small=True)
        self.assertEqual([ax.get_ylabel() for ax in figure.axes], ["nats a token"])

        # Every third step is drawn, and the validation loss as a point.
        raw, smooth, points = figure.axes[0].lines
        self.assertEqual(list(raw.get_xdata()), list(range(1, 1202, 3)))
        self.assertEqual(list(raw.get_ydata()), list(run.curves["loss"][::3]))
        self.assertEqual(list(points.get_ydata()), [3.5])
        self.assertLess(os.path.getsize(out), 50000)

    @unittest.skipUnless(matplotlib, "matplotlib is not installed")
    def test_lines_hold_the_log(self):
        run = self.read(FIRST, *(step(n) for n in range(1, 11)), val(10, 3.5))
        figure = plot.draw([run], os.path.join(self.folder, "a.svg"), "tokens", "", "", 0)
        axes = {ax.get_title(loc="left"): ax for ax in figure.axes}
        for title, key in (("loss, validation loss as points", "loss"), ("learning rate", "lr"),
                           ("gradient norm", "grad_norm"),
                           ("tokens a second", "tokens_per_second")):
            xs, ys = axes[title].lines[0].get_data()
            self.assertEqual(list(xs), [128.0 * n for n in range(1, 11)])
            self.assertEqual(list(ys), list(run.curves[key]), title)

        # A task's score instead of the loss.
        tasks = self.read(FIRST, step(1), {"step": 1, "piqa": 0.25}, step(2),
                          {"step": 2, "piqa": 0.5})
        figure = plot.draw([tasks], os.path.join(self.folder, "a.svg"), "step", "", "", 0, "piqa")
        scores = {ax.get_title(loc="left"): ax for ax in figure.axes}
        xs, ys = scores["piqa"].lines[0].get_data()
        self.assertEqual((list(xs), list(ys), len(scores["piqa"].lines)), ([1, 2], [0.25, 0.5], 1))
        self.assertEqual(scores["piqa"].get_ylabel(), "")

        # A long log is drawn raw and as an average.
        long = self.read(*(step(n) for n in range(1, 201)))
        figure = plot.draw([long], os.path.join(self.folder, "a.svg"), "step", "", "", 0)
        self.assertEqual([len(ax.lines) for ax in figure.axes], [3, 1, 2, 2])

        hours = self.read(step(1, ms=3.6e6), step(2, ms=7.2e6))
        figure = plot.draw([hours], os.path.join(self.folder, "a.svg"), "time", "", "", 0)
        self.assertEqual(list(figure.axes[0].lines[0].get_xdata()), [1, 3])
        self.assertEqual(figure.axes[0].get_xlabel(), "time in hours")

        # A log without numbers is drawn all the same.
        nothing = self.read(dict(step(1), loss=None, grad_norm=0), val(1, None))
        plot.draw([nothing], os.path.join(self.folder, "a.svg"), "time", "xy", "", 0)
        points = axes["loss, validation loss as points"].lines[1].get_data()
        self.assertEqual([list(p) for p in points], [[1280], [3.5]])


if __name__ == "__main__":
    unittest.main()
