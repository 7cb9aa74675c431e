#!/usr/bin/env python3
"""dev/compare.py on small logs: which flags, which step, which differences are noise.

usage: test/io/compare_test.py        seconds
"""
import contextlib, io, json, math, os, sys, tempfile, unittest

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../dev"))
import compare

OTHERS = {"grad_norm": 1.0, "lr": 0.1, "tokens": 128, "ms": 500.0, "tokens_per_second": 256.0}


class Compare(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def run_of(self, name, val=None, losses=(5.0, 4.0, 3.0), **config):
        """A run's folder: a step for each loss, then a validation."""
        path = os.path.join(self.folder, name)
        os.makedirs(path, exist_ok=True)
        lines = [{"config": {"seed": 1, "lr": 0.1, "out": path, **config}, "flops_per_token": 1}]
        lines += [{"step": n, "loss": loss, **OTHERS} for n, loss in enumerate(losses, 1)]
        if val is not None:
            lines.append({"step": len(losses), "val_loss": val})
        with open(os.path.join(path, "log.jsonl"), "w", encoding="utf-8") as f:
            f.writelines(json.dumps(line) + "\n" for line in lines)
        return path

    def groups(self, a, b):
        """Two groups of seeds by their losses at the end."""
        return [self.run_of(f"a{i}", x, seed=i) for i, x in enumerate(a)] + \
               [self.run_of(f"b{i}", x, seed=i, lr=0.2) for i, x in enumerate(b)]

    def main(self, *arguments):
        """All that is printed, or the error."""
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            try:
                compare.main(list(arguments))
            except SystemExit as e:
                return f"{out.getvalue()}{e.code}"
        return out.getvalue()

    # -- flags and bits --

    def test_flags_that_differ(self):
        text = self.main(self.run_of("a"), self.run_of("b", lr=0.2, steps=9, keep=7, seed=2))
        self.assertIn("A: a\nB: b\n", text)
        self.assertIn("--lr: A 0.1, B 0.2\n--steps: A null, B 9\n", text)
        for aside in ("--seed:", "--out:", "--keep:"):
            self.assertNotIn(aside, text)

    def test_first_step_whose_bits_differ(self):
        a = self.run_of("a")
        later = math.nextafter(4.0, 5)
        text = self.main(a, self.run_of("b", lr=0.2, losses=(5.0, later, 3.0)))
        self.assertIn("a, b: losses differ from step 2 on: 4.0, 4.000000000000001\n", text)
        text = self.main(a, self.run_of("b", lr=0.2, losses=(5.0, 4.0, 3.0, 2.0)))
        self.assertIn("a, b: the same bits in all 3 steps that both have", text)
        self.assertNotIn("a, b:", self.main(a, self.run_of("b", lr=0.2, seed=2)))

    def test_a_seed_counts_once(self):
        paths = [self.run_of(name, 3.0) for name in "abc"]
        text = self.main(*paths, self.run_of("d", 3.1, lr=0.2))
        self.assertIn("b: counts once with a", text)
        self.assertIn("a, b: the same bits in all 3 steps", text)
        self.assertIn("A: a\n", text)
        self.assertIn("needs three seeds", text)
        self.assertIn("all runs have the same flags", self.main(*paths))

    def test_a_resume_with_other_flags_is_named(self):
        a, b = self.run_of("a"), self.run_of("b", lr=0.2)
        os.makedirs(os.path.join(b, "step_00000003"))
        path = os.path.join(b, "step_00000003", "manifest.json")
        for config, said in (({"seed": 1, "lr": 0.2, "out": b}, False), ({"lr": 0.3}, True)):
            with open(path, "w", encoding="utf-8") as f:
                json.dump({"config": config}, f)
            self.assertEqual(f"{path} has another --lr: resumed" in self.main(a, b), said)

    # -- what a difference is worth --

    def test_students_distribution(self):
        # Published critical values, two-sided, to the half of their last digit.
        for t, df, p in ((12.706, 1, 0.05), (4.303, 2, 0.05), (2.776, 4, 0.05), (4.604, 4, 0.01),
                         (2.086, 20, 0.05), (2.845, 20, 0.01)):
            self.assertLessEqual(compare.chance(t + 0.0005, df), p)
            self.assertGreaterEqual(compare.chance(t - 0.0005, df), p)
        self.assertAlmostEqual(compare.chance(0, 3), 1)
        self.assertAlmostEqual(compare.least_t(4), 4.604, delta=0.01)

    def test_welch(self):
        # Standard error and degrees of freedom: s^2 = 1 of 3 and 4 of 4: sqrt(1/3 + 1), and
        # (4/3)^2 / ((1/3)^2 / 2 + 1 / 3).
        error, df = compare.welch([(1, 3), (4, 4)])
        self.assertAlmostEqual(error, 1.1547005, places=6)
        self.assertAlmostEqual(df, 4.5714286, places=6)

    def test_welch_tells_noise(self):
        # Means 0.1 apart; sd 0.01, then 0.1.
        text = self.main(*self.groups((3.00, 3.01, 2.99), (2.90, 2.91, 2.89)))
        self.assertIn("after 3 and 3 steps B - A = -0.1000", text)
        self.assertIn("sd 0.0100 and 0.0100, p 0.00026: they differ; 3 and 3 runs tell 0.0376", text)
        text = self.main(*self.groups((3.0, 3.1, 2.9), (2.9, 3.0, 2.8)))
        self.assertIn("sd 0.1000 and 0.1000, p 0.29: noise explains it", text)
        self.assertIn("track 3's rule: not for these runs, whose sd is not 0.0013", text)
        text = self.main(*self.groups((3.0, 3.0, 3.0), (2.9, 2.9, 2.9)))
        self.assertIn("p 0: they differ", text)

    def test_track_3s_rule(self):
        # 3.28 - 3.2759 over one run each: 0.0041 / sqrt(2) = 0.0029; of four each 0.0058.
        text = self.main(*self.groups((3.28,), (3.2759,)))
        self.assertIn("0.0029 of 0.0040: noise explains it", text)
        text = self.main(*self.groups((3.28,) * 4, (3.2759,) * 4))
        self.assertIn("0.0058 of 0.0040: they differ", text)
        self.assertIn("if sd is 0.0026: 0.0058 of 0.0080: noise explains it",
                      self.main(*self.groups((3.28,) * 4, (3.2759,) * 4), "--sd", "0.0026"))

        # A step less is worth 4.5e-5: with 200 less the same loss is 0.009 better.
        a = self.run_of("a", 3.28, losses=[1.0] * 300)
        b = self.run_of("b", 3.28, losses=[1.0] * 100, lr=0.2)
        self.assertIn("0.0064 of 0.0040: they differ", self.main(a, b))
        self.assertIn("0.0064 of 0.0040: they differ", self.main(b, a))

    # -- scores --

    def test_along_the_run(self):
        losses = [float(n) for n in range(40, 0, -1)]
        a = self.run_of("a", losses=losses)
        text = self.main(a, self.run_of("b", losses=[x + 0.5 for x in losses], lr=0.2))
        self.assertIn("after 40 and 40 steps B - A = +0.5000", text)
        rows = [line.split() for line in text.splitlines() if line.startswith("      ")]
        self.assertEqual(rows[-1], ["40", "1.5000", "2.0000", "+0.5000"])  # of steps 39 and 40
        self.assertLessEqual(len(rows), compare.ROWS)

        # A shorter run has parts at the same steps.
        text = self.main(a, self.run_of("c", losses=losses[:30], lr=0.2, steps=40))
        self.assertIn("c: stops at step 30 of 40\n", text)
        self.assertIn("after 40 and 30 steps B - A = +10.0000", text)
        rows = [line.split() for line in text.splitlines() if line.startswith("      ")]
        self.assertEqual(rows[-1], ["30", "11.0000", "11.0000", "+0.0000"])

    def test_scores(self):
        a, b = self.run_of("a", 3.0), self.run_of("b", 2.0, lr=0.2)
        self.assertIn("val_loss A", self.main(a, b))
        self.assertIn("loss A", self.main(a, b, "--y", "loss"))
        self.assertIn("a has no piqa; it has val_loss", self.main(a, b, "--y", "piqa"))
        for path in (a, b):
            with open(os.path.join(path, "log.jsonl"), "a", encoding="utf-8") as f:
                f.write('{"step": 3, "piqa": 0.5}\n')
        text = self.main(a, b, "--y", "piqa")
        self.assertIn("B - A = +0.0000", text)
        self.assertNotIn("track 3", text)

    def test_wrong_input(self):
        a = self.run_of("a")
        self.assertIn("missing: No such file", self.main(a, "missing"))
        self.assertIn("lacks the first line or all steps", self.main(a, self.run_of("b", losses=())))


if __name__ == "__main__":
    unittest.main()
