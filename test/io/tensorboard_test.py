#!/usr/bin/env python3
"""dev/tensorboard.py on small logs: its files read back by a reader that shares no code with it.

usage: test/io/tensorboard_test.py        seconds; reads with the tensorboard package too where it is
"""
import contextlib, io, json, math, os, struct, sys, tempfile, unittest

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../dev"))
import tensorboard as converter  # dev/tensorboard.py: its folder comes first

FIRST = {"config": {"model": "tiny"}, "flops_per_token": 1000}


def crc32c_by_division(data):
    """The remainder of a long division by x^32 + ... (0x11EDC6F41), bits in RFC 3720's order."""
    bits = [byte >> i & 1 for byte in data for i in range(8)] + [0] * 32
    for i in range(32):
        bits[i] ^= 1
    remainder = 0
    for bit in bits:
        remainder = remainder << 1 | bit
        if remainder >> 32:
            remainder ^= 0x11EDC6F41
    return int(f"{remainder ^ 0xFFFFFFFF:032b}"[::-1], 2)


def fields(data):
    """[(number, value)] of a protocol buffer."""
    at, found = 0, []

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            found.append((key >> 3, varint()))
            continue
        size = {1: 8, 5: 4}.get(key & 7) or varint()
        assert key & 7 in (1, 2, 5) and at + size <= len(data)
        found.append((key >> 3, data[at:at + size]))
        at += size
    return found


def read_events(path):
    """The file version, and [(tag, step, value, time)]."""
    with open(path, "rb") as f:
        data = f.read()
    at, version, points = 0, None, []

    def check(part, stored):
        crc = crc32c_by_division(part)
        turned = (crc >> 15 | (crc & 0x7FFF) << 17) + 0xA282EAD8 & 0xFFFFFFFF
        assert turned == struct.unpack("<I", stored)[0]

    # A record: its length, the body, and a checksum of each.
    while at < len(data):
        length, = struct.unpack_from("<Q", data, at)
        check(data[at:at + 8], data[at + 8:at + 12])
        body = data[at + 12:at + 12 + length]
        assert len(body) == length
        check(body, data[at + 12 + length:at + 16 + length])
        at += 16 + length

        # The event: a file version, or points.
        event = dict(fields(body))
        time, = struct.unpack("<d", event[1])
        if 3 in event:
            version = event[3].decode()
            continue
        for number, value in fields(event[5]):
            assert number == 1
            parts = dict(fields(value))
            points.append((parts[1].decode(), event[2], *struct.unpack("<f", parts[2]), time))
    return version, points


class TensorBoard(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def log(self, *entries, name="a"):
        os.makedirs(os.path.join(self.folder, name), exist_ok=True)
        path = os.path.join(self.folder, name, "log.jsonl")
        with open(path, "w", encoding="utf-8") as f:
            f.writelines((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries)
        os.utime(path, (1000, 1000))
        return path

    def main(self, *arguments):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            try:
                converter.main([*arguments, "--out", self.folder + "/tb"])
                status = 0
            except SystemExit as e:
                status = e.code
        return status, out.getvalue()

    def events(self, name="a"):
        return read_events(f"{self.folder}/tb/{name}/{converter.FILE}")

    def series(self, *entries):
        status, says = self.main(self.log(*entries))
        self.assertEqual(status, 0, says)
        found = {}
        for tag, step, value, _ in self.events()[1]:
            found.setdefault(tag, []).append((step, value))
        return found

    def test_crc(self):
        for crc in converter.crc32c, crc32c_by_division:  # RFC 3720, appendix B.4
            self.assertEqual(crc(b"123456789"), 0xE3069283)
            self.assertEqual(crc(bytes(32)), 0x8A9136AA)
            self.assertEqual(crc(b"\xff" * 32), 0x62A8AB43)
            self.assertEqual(crc(bytes(range(32))), 0x46DD794E)

    def test_every_number_with_its_step_and_time(self):
        log = self.log(FIRST, {"step": 0, "val_loss": 6}, {"step": 1, "loss": 5.5, "ms": 500},
                       {"step": 300, "loss": 4.25, "ms": 1500},
                       {"step": 300, "val_loss": 4.5, "hellaswag": 0.3})
        self.assertEqual(self.main(log)[0], 0)
        version, points = self.events()
        self.assertEqual(version, "brain.Event:2")
        expected = [("val_loss", 0, 6, 998), ("loss", 1, 5.5, 998.5), ("ms", 1, 500, 998.5),
                    ("loss", 300, 4.25, 1000), ("ms", 300, 1500, 1000),
                    ("val_loss", 300, 4.5, 1000), ("hellaswag", 300, 0.3, 1000)]
        self.assertEqual(len(points), len(expected))

        # Each point is there, and steps rise.
        for (tag, step, value, time), (*e, at) in zip(sorted(points), sorted(expected)):
            self.assertEqual((tag, step), (e[0], e[1]))
            self.assertAlmostEqual(value, e[2], 6)
            self.assertAlmostEqual(time, at)
        self.assertEqual(sorted(p[1] for p in points), [p[1] for p in points])

        # The same log makes the same bytes.
        with open(f"{self.folder}/tb/a/{converter.FILE}", "rb") as f:
            first = f.read()
        self.main(log)
        with open(f"{self.folder}/tb/a/{converter.FILE}", "rb") as f:
            self.assertEqual(f.read(), first)

    def test_the_later_of_repeated_steps_counts(self):
        steps = [{"step": n, "loss": n} for n in range(1, 6)]
        found = self.series(FIRST, *steps[:2], {"step": 2, "val_loss": 9}, *steps[2:],
                            {"step": 4, "val_loss": 8}, {"step": 2, "loss": 20},
                            {"step": 2, "val_loss": 7}, {"step": 2, "hellaswag": 0.5},
                            {"step": 3, "loss": 30})
        self.assertEqual(found["loss"], [(1, 1), (2, 20), (3, 30)])
        self.assertEqual(found["val_loss"], [(2, 7)])
        self.assertEqual(found["hellaswag"], [(2, 0.5)])

        found = self.series(FIRST, *steps, {"step": 5, "val_loss": 8}, {"step": 5, "loss": 50})
        self.assertEqual((found["loss"][-1], "val_loss" in found), ((5, 50), False))

    def test_steps_of_every_length(self):
        steps = [0, 1, 127, 128, 129, 16383, 16384, 2 ** 31, 2 ** 32, 2 ** 63 - 1]
        found = self.series(FIRST, *({"step": n, "loss": 1} for n in steps))
        self.assertEqual(found["loss"], [(n, 1) for n in steps])

    def test_what_is_broken_or_no_number(self):
        found = self.series(FIRST, "{", '{"loss": 1}', "[1]", '{"step": -1, "loss": 1}', "null",
                            {"step": 1, "loss": None}, '{"step": 1e999}', {"step": 2, "loss": 1e300},
                            {"step": 2 ** 40, "loss": -1e300}, {"step": 2 ** 63, "loss": 1})
        self.assertTrue(math.isnan(found["loss"][0][1]))
        self.assertEqual(found["loss"][1:], [(2, math.inf), (2 ** 40, -math.inf)])
        self.assertIn("7 broken lines left out, line 2 the first",
                      self.main(self.folder + "/a")[1])

    def test_wrong_input(self):
        log = self.log(FIRST, {"step": 1, "loss": 1})
        self.assertIn("missing: No such file", str(self.main("missing")[0]))
        self.assertIn("holds no step", str(self.main(self.log(FIRST, name="b"))[0]))
        self.assertEqual(self.main(log, "--names", "x,y")[0], 2)
        self.assertEqual(self.main(log, "--names", "../x/y")[0], 0)
        self.assertEqual(self.events(".._x_y")[1][0][:3], ("loss", 1, 1))

    def test_the_package_reads_it(self):
        # Import the package tensorboard in place of our file of that name.
        folder = sys.path.pop(0)
        ours = sys.modules.pop("tensorboard")
        try:
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        except ImportError:
            self.skipTest("tensorboard is not installed")
        finally:
            sys.path.insert(0, folder)
            sys.modules["tensorboard"] = ours

        steps = ({"step": n, "loss": 6 / n, "ms": 1000} for n in range(1, 400))
        self.main(self.log(FIRST, *steps))
        accumulator = EventAccumulator(f"{self.folder}/tb/a").Reload()
        events = accumulator.Scalars("loss")
        self.assertEqual([e.step for e in events], list(range(1, 400)))
        for e in events:
            self.assertAlmostEqual(e.value, 6 / e.step, 6)
            self.assertAlmostEqual(e.wall_time, 1000 - 399 + e.step)


if __name__ == "__main__":
    unittest.main()
