#!/usr/bin/env python3
"""Print what GPTQ's symmetric grid of 4 bits makes of one list of numbers, in groups of 128 inputs: codes as
llmc/ops/nf4.cuh has them, for the op table's row int4.

Written from the format's definition (arXiv:2210.17323, AutoGPTQ's symmetric grid) in plain Python:
    scale = 2 max|x| / 15, q = clip(rint(x / scale) + 8, 0, 15), every operation rounded to float
"""
import struct

def f32(x): return struct.unpack("f", struct.pack("f", x))[0]
def fnv1a(form, values):
    h = 0xcbf29ce484222325
    for byte in struct.pack(f"<{len(values)}{form}", *values):
        h = (h ^ byte) * 0x100000001b3 & 0xffffffffffffffff
    return f"{h:#x}"

def numbers(n): # 24 bits each: floats hold them
    return [((i * 2654435761 % 2**32 >> 8) / 2**24 - 0.5) * 2.0 ** (i // 64 * 7 % 11 - 5) for i in range(n)]

def grid(x, N, K): # x (N,K) -> codes (N,K), scales (N,groups), values (N,K)
    codes, scales, values = [], [], []
    for first in (n * K + k for n in range(N) for k in range(0, K, 128)):
        group = x[first:min(first + 128, first // K * K + K)]
        scale = f32(2 * max(map(abs, group)) / 15)
        back = f32(1 / scale)
        q = [min(15, max(0, round(f32(v * back)) + 8)) for v in group]
        codes += q
        scales.append(scale)
        values += [f32((c - 8) * scale) for c in q]
    return codes, scales, values

q, scales, values = grid(numbers(1500), 5, 300)
print("codes", fnv1a("B", [a << 4 | b for a, b in zip(q[0::2], q[1::2])]),
      "scales", fnv1a("f", scales), "values", fnv1a("f", values))
