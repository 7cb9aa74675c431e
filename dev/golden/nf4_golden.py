#!/usr/bin/env python3
"""Print what NF4 with double quantisation makes of one list of numbers, for the op table's row nf4.

Written from the algorithm's description (arXiv:2305.14314 and bitsandbytes' CUDA kernels), apart from
llmc/ops/nf4.cuh: a value is looked for among all of them, and every operation is rounded to float.
"""
import bisect, math, struct

def f32(x): return struct.unpack("f", struct.pack("f", x))[0]
def fnv1a(data):
    h = 0xcbf29ce484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001b3 & 0xffffffffffffffff
    return h

VALUES = [f32(v) for v in (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)]

def dynamic_map():
    values = [0.0, 1.0]
    for i in range(7):
        n = 2 ** i
        start, step = f32(0.1), f32(f32(1.0 - f32(0.1)) / n)
        bounds = [f32(start + f32(step * k)) if k < (n + 1) // 2 else f32(1.0 - f32(step * (n - k)))
                  for k in range(n + 1)]
        for a, b in zip(bounds, bounds[1:]):
            middle = f32(f32(f32(a + b) / 2) * f32(10.0 ** (i - 6)))
            values += [middle, -middle]
    return sorted(values)

def nearest(values, x): # of two as near the lower one
    at = bisect.bisect_left(values, x)
    around = [k for k in (at - 1, at) if 0 <= k < len(values)]
    return min(around, key=lambda k: (abs(x - values[k]), k))

def numbers(n): # 24 bits each: floats hold them
    return [((i * 2654435761 % 2**32 >> 8) / 2**24 - 0.5) * 2.0 ** (i // 64 * 7 % 11 - 5) for i in range(n)]

x = numbers(64 * 300 + 11)
absmax, codes = [], []
for at in range(0, len(x), 64):
    block = x[at:at + 64]
    absmax.append(max(map(abs, block)))
    codes += [nearest(VALUES, f32(v * f32(1 / absmax[-1]))) for v in block]
codes.append(0)
packed = bytes(a << 4 | b for a, b in zip(codes[0::2], codes[1::2]))

table, offset = dynamic_map(), f32(math.fsum(absmax) / len(absmax))
scales, absmax2 = [], []
for at in range(0, len(absmax), 256):
    block = [f32(a - offset) for a in absmax[at:at + 256]]
    absmax2.append(max(map(abs, block)))
    scales += [nearest(table, f32(v * f32(1 / absmax2[-1]))) for v in block]

back = [f32(f32(table[s] * absmax2[b // 256]) + offset) for b, s in enumerate(scales)]
values = [f32(VALUES[codes[i]] * back[i // 64]) for i in range(len(x))]

bits = lambda v: struct.unpack("I", struct.pack("f", v))[0]
print(f"codes {len(packed)} {fnv1a(packed):#x} {packed[:8].hex()}")
print(f"absmax {len(scales)} {fnv1a(bytes(scales)):#x} {bytes(scales[:8]).hex()}")
print("offset", hex(bits(offset)), "absmax2", *[hex(bits(a)) for a in absmax2])
print(f"map {fnv1a(b''.join(struct.pack('f', v) for v in table)):#x}")
print(f"values {fnv1a(b''.join(struct.pack('f', v) for v in values)):#x}")
