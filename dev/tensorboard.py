#!/usr/bin/env python3
"""tensorboard.py - runs for TensorBoard: event files from the log.jsonl that train_gpt writes

usage: tensorboard.py LOG ... [--out DIR] [--names A,B,...]      then: tensorboard --logdir DIR

A LOG is a log.jsonl or the folder of a run; DIR/NAME gets its events: every number of every line
(loss, lr, val_loss, ...) under its own name, by step. The same log gives the same file again. Where
a step stands twice, after a resume, the later one counts and nothing after the earlier. Times are
the sum of the steps' own, so that the last one is the log's. Needs no package. The formats:
    file     records of {uint64 length, uint32 crc(length), data, uint32 crc(data)}, little endian
    crc      CRC-32C, turned right by 15 bits, plus 0xa282ead8
    data     an Event of protocol buffers: 1 wall time (double), 2 step (varint), 3 file version
             (string), 5 Summary {1 Value {1 tag (string), 2 value (float)} ...}
"""
import argparse, json, math, os, struct, sys
from plot import keep_before, number, run_names

FILE = "events.out.tfevents.0.train_gpt"  # TensorBoard looks for "tfevents"

# ---------------------------------------------------------------------------
# the formats


def crc32c_table():
    table = []
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ (0x82F63B78 if n & 1 else 0)  # the Castagnoli polynomial, reflected
        table.append(n)
    return table


TABLE = crc32c_table()


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ TABLE[(crc ^ byte) & 255]
    return crc ^ 0xFFFFFFFF


def record(data):
    def masked(part):
        crc = crc32c(part)
        return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def varint(n):
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes(out + bytes([n]))


def field(number, value):
    """A protocol buffer's field: int as varint, str and bytes with their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def event(time, body):
    return record(varint(1 << 3 | 1) + struct.pack("<d", time) + body)


def scalar(time, step, tag, value):
    if math.isfinite(value) and abs(value) > 3.4028234e38:  # beyond a float
        value = math.copysign(math.inf, value)
    value = field(1, tag) + varint(2 << 3 | 5) + struct.pack("<f", value)
    return event(time, field(2, step) + field(5, field(1, value)))


# ---------------------------------------------------------------------------
# the log


def read_series(path):
    """tag -> [(step, value, seconds since the start)], and the numbers of lines that are broken."""
    series, broken = {}, []
    with open(path, encoding="utf-8", errors="replace") as lines:
        for n, line in enumerate(lines, 1):
            try:
                entry = json.loads(line)
                if "config" in entry:
                    continue
                step = int(entry.pop("step"))
                if not 0 <= step < 1 << 63:
                    raise ValueError
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
                broken.append(n)
                continue
            trained = "loss" in entry  # what is not comes after the step of its number
            for tag, points in series.items():
                keep_before(points, step if trained or tag in entry else step + 1)
            for tag, value in entry.items():
                series.setdefault(tag, []).append((step, number(value)))
    seconds, total = {}, 0.0
    for step, ms in series.get("ms", []):
        total += ms / 1e3 if math.isfinite(ms) else 0
        seconds[step] = total
    timed = {}
    for tag, points in series.items():
        last, timed[tag] = 0.0, []
        for step, value in points:
            last = seconds.get(step, last)
            timed[tag].append((step, value, last))
    return timed, broken


def write_events(series, path, end):
    """One file; `end` is the time of the last point."""
    points = [(step, tag, value, at) for tag in series for step, value, at in series[tag]]
    begin = end - max((at for *_, at in points), default=0)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path + ".part", "wb") as f:
        f.write(event(begin, field(3, "brain.Event:2")))
        for step, tag, value, at in sorted(points, key=lambda p: p[:2]):
            f.write(scalar(begin + at, step, tag, value))
    os.replace(path + ".part", path)


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Event files for TensorBoard from log.jsonl.")
    parser.add_argument("logs", nargs="+", metavar="LOG", help="log.jsonl, or a run's folder")
    parser.add_argument("--out", default="tensorboard", help="folder (tensorboard)")
    parser.add_argument("--names", help="A,B,...: of the runs (the folders' names)")
    a = parser.parse_args(arguments)
    logs = [os.path.join(p, "log.jsonl") if os.path.isdir(p) else p for p in a.logs]
    names = a.names.split(",") if a.names else run_names(logs)
    if len(names) != len(logs):
        parser.error(f"--names has {len(names)} names for {len(logs)} logs")
    for path, name in zip(logs, names):
        try:
            series, broken = read_series(path)
        except OSError as e:
            sys.exit(f"error: {path}: {e.strerror}; train_gpt --out DIR writes DIR/log.jsonl")
        if broken:
            print(f"{path}: {len(broken)} broken lines left out, line {broken[0]} the first",
                  file=sys.stderr)
        if not series:
            sys.exit(f"error: {path}: holds no step; is it the log.jsonl of train_gpt?")
        events = os.path.join(a.out, name.replace("/", "_"), FILE)
        try:
            write_events(series, events, os.path.getmtime(path))
        except OSError as e:
            sys.exit(f"error: {events}: {e.strerror}")
        print(f"{events}: {', '.join(sorted(series))}")
    print(f"tensorboard --logdir {a.out}")


if __name__ == "__main__":
    main()
