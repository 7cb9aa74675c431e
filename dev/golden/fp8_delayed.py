#!/usr/bin/env python3
"""The trace of test_fp8's DelayedScalesFollowTransformerEngine: its recipe, as its kernel has it.

Written from TransformerEngine's common/recipe/delayed_scaling.cu (kernel_bulk): a history whose
first entry is the running maximum, rolled by one place after a step. Floats are rounded by struct.
usage: dev/golden/fp8_delayed.py      prints the scales' bits after each step, a row a case
"""
import math
import struct

FLT_MAX = 3.4028234663852886e38


def f32(x):
    """The nearest float; beyond the largest, infinity."""
    try:
        return struct.unpack("f", struct.pack("f", x))[0]
    except OverflowError:
        return math.inf


def fmaxf(a, b):
    return b if math.isnan(a) else a if math.isnan(b) else max(a, b)


def bits(x):
    return struct.unpack("I", struct.pack("f", x))[0]


def trace(events, length, top, margin, recent):
    history, scale, scales = [0.0] * length, 1.0, []
    for event in events:
        history[0] = f32(event)
        last, amax = history[0], 0.0
        if last != 0:
            rolled = [history[i + 1] if i < length - 1 else last for i in range(length)]
            for a in rolled:
                amax = fmaxf(amax, a)
            history = [0.0] + rolled[1:]
        if recent:
            amax = last
        if math.isfinite(amax) and amax > 0:
            scale = f32(f32(top * 2.0**-margin) / amax)
        if math.isinf(scale):
            scale = FLT_MAX
        scales.append(bits(scale))
    return scales


EVENTS = [0, 1.5, 3.25, 0.7, 0.7, 0, 0.1, 1e-40, 0.3, math.inf, 0.2, 0.2, 0.2, 0.2, math.nan, 5e5,
          0.01, 1e-3, 0.25, 1e-42]
for length, top, margin, recent in [(4, 448, 0, False), (4, 57344, 2, False), (1, 448, 0, False),
                                    (4, 448, 1, True)]:
    row = ", ".join("0x%08x" % x for x in trace(EVENTS, length, top, margin, recent))
    print("{%d, %d, %d, %s}: %s" % (length, top, margin, str(recent).lower(), row))
