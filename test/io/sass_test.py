#!/usr/bin/env python3
"""dev/bench/sass.py on a small kernel's machine code: loops, paths, figures; and each limit turns the guard red.

usage: test/io/sass_test.py        a second
"""
import contextlib, io, os, sys, tempfile, unittest
from unittest import mock

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../dev/bench"))
import sass

NAME = "_ZN4llmc31attention_hopper_forward_kernelINS_4bf16ELi64EEEvPT_"
# One instruction a line, as cuobjdump prints them. The loop goes from 0x20 to 0x120. Whole tiles
# jump over the mask at 0x80 to 0xa0. The wait for a barrier spins outside of the loop, at 0x150.
CODE = """
0000 S2R R0, SR_TID.X
0010 @P0 BRA 0x140
0020 SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R8
0030 @!P0 BRA 0x150
0040 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR12], RZ, !UPT
0050 HGMMA.64x64x16.F32.BF16 R88, R148, gdesc[UR12].tnspB, R88, gsb0
0060 WARPGROUP.DEPBAR.LE gsb0, 0x1
0070 @!P3 BRA P1, 0xb0
0080 ISETP.GE.AND P2, PT, R3, R5, PT
0090 FSEL R24, R24, -INF, P2
00a0 FSEL R25, R25, -INF, P2
00b0 FFMA R24, R24, R2, -R9
00c0 MUFU.EX2 R24, R24
00d0 MUFU.EX2 R25, R25
00e0 WARPGROUP.DEPBAR.LE gsb0, 0x0
00f0 MUFU.EX2 R26, R26
0100 FMUL R88, R88, R26
0110 ISETP.NE.AND P0, PT, R7, RZ, PT
0120 @P0 BRA 0x20
0130 STG.E desc[UR28][R2.64], R88
0140 EXIT
0150 SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R8
0160 @!P0 BRA 0x150
0170 BRA 0x40
0180 BRA 0x180
"""
LIMITS = "# taken with\nnvcc 13.0.88\nsm_90a attention_hopper_forward_kernel<*,64> 168 2 16 22 24  # as it is"


def text(code, name=NAME):
    lines = ["\tcode for sm_90a", f"\t\tFunction : {name}", "\t.headerflags\t@\"EF_CUDA_SM90\""]
    for line in code.strip().split("\n"):
        address, instruction = line.split(" ", 1)
        lines.append(f"        /*{address}*/   {instruction} ;   /* 0x00000a00ff017b82 */")
        lines.append("                            /* 0x000fe20000000800 */")
    return lines


class Sass(unittest.TestCase):
    def kernel(self, code=CODE):
        return next(sass.kernels(text(code)))

    # -- reading --

    def test_reads_instructions(self):
        kernel = self.kernel()
        self.assertEqual((kernel.gpu, kernel.name),
                         ("sm_90a", "attention_hopper_forward_kernel<bf16,64>"))
        self.assertEqual(len(kernel.code), 25)
        self.assertEqual(kernel.code[7], (0x70, "!P3", "BRA", ("P1", "0xb0")))

    def test_reads_only_what_is_wanted(self):
        lines = text(CODE, "_ZN4llmc5otherEv") + text(CODE)
        names = [k.name for k in sass.kernels(lines, lambda gpu, name: name != "other")]
        self.assertEqual(names, ["attention_hopper_forward_kernel<bf16,64>"])

    # -- blocks, loops, paths --

    def test_blocks_follow_each_other(self):
        blocks, follow = sass.blocks_of(self.kernel().code)
        self.assertEqual(follow[0x0], [0x140, 0x20])
        self.assertEqual(follow[0x40], [0xb0, 0x80])
        self.assertEqual(follow[0x140], [])  # EXIT
        self.assertEqual(follow[0x170], [0x40])
        self.assertEqual(sum(map(len, blocks.values())), 25)

    def test_finds_loops(self):
        blocks, follow = sass.blocks_of(self.kernel().code)
        order, back = sass.walk(follow, 0)
        loops = sass.loops_of(follow, back)
        self.assertEqual(back, {(0xb0, 0x20), (0x150, 0x150)})
        self.assertEqual(loops[0x20], {0x20, 0x40, 0x80, 0xb0, 0x150, 0x170})

    def test_whole_and_masked_paths(self):
        (whole, masked, sloped), = sass.tensor_loops(self.kernel())
        self.assertEqual(masked, sloped)  # nothing is converted to float
        self.assertEqual([i.address for i in whole],
                         [*range(0x20, 0x80, 16), *range(0xb0, 0x130, 16)])
        self.assertEqual(len(masked), len(whole) + 3 + 3)  # plus the mask, and the wait that spins
        self.assertEqual(sass.count(masked, "FSEL"), 2)

    def test_masked_path_has_no_alibi(self):
        """A block that makes distances float is on the sloped path alone."""
        code = CODE.replace("0090 FSEL R24, R24, -INF, P2", "0090 I2FP.F32.S32 R24, R24")
        (whole, masked, sloped), = sass.tensor_loops(self.kernel(code))
        self.assertEqual((len(whole), len(masked), len(sloped)), (14, 17, 20))

    def test_whole_takes_the_products(self):
        """One of two ways has a third product: it counts, though the other is shorter."""
        code = CODE.replace("0090 FSEL R24, R24, -INF, P2", "0090 HGMMA.64x8x16.F32.BF16 R4, gdesc[UR12], R4")
        (whole, _, _), = sass.tensor_loops(self.kernel(code))
        self.assertEqual(sass.count(whole, sass.PRODUCT), 3)

    def test_exponentials_under_the_product(self):
        (whole, masked, _), = sass.tensor_loops(self.kernel())
        self.assertEqual((sass.under_the_product(whole), sass.under_the_product(masked)), (2, 2))
        self.assertEqual(sass.figures_of(self.kernel(), 168), (168, 0, 2, 14, 20, 20))

    # -- lowest times --

    def test_clocks_of_units(self):
        (whole, _, _), = sass.tensor_loops(self.kernel())
        clocks = sass.clocks_of(whole, sass.GPUS["sm_90a"])
        self.assertEqual(4 * clocks["tensor"], 128 / 2 + 64 / 2)
        # Both operands of the first product lie in shared memory, and only one of the second's.
        self.assertEqual(4 * clocks["shared"], ((64 + 128) * 32 + 64 * 32) / 128)
        self.assertEqual(4 * clocks["issue"], 14)
        self.assertEqual(4 * clocks["mufu"], 3 * 8)
        self.assertEqual(4 * clocks["fp32"], 2)
        self.assertEqual(4 * clocks["alu"], 2)  # ISETP

    def test_shared_memory_of_a_warp(self):
        code = "0000 LDS.128 R4, [R2]\n0010 STS [R2], R4\n0020 LDSM.16.M88.4 R4, [R2]\n0030 LDSM.16.MT88.2 R4, [R2]"
        self.assertEqual([sass.shared_bytes(i) for i in self.kernel(code).code], [512, 128, 512, 256])

    def test_warps_of_an_sm(self):
        self.assertEqual(sass.warps_resident(168, 384, 163840), 12)
        self.assertEqual(sass.warps_resident(32, 256, 0), 64)
        self.assertEqual(sass.warps_resident(33, 256, 0), 48)  # registers come in eights: 40
        self.assertEqual(sass.warps_resident(32, 256, 65536), 24)

    def test_causal_tiles(self):
        a = sass.Attention("sm_90a", "", "", 4, 384, 8, 128, 128)
        self.assertEqual(sass.tiles(a, 1024), (28, 8))
        self.assertEqual(sass.tiles(a._replace(walk=64), 1024), (56, 16))
        self.assertEqual(sass.tiles(a._replace(own=192), 1024), (21, 11))

    def test_bytes_in_flight(self):
        code = """
0000 LDG.E.128 R4, desc[UR28][R2.64]
0010 LDG.E.128 R8, desc[UR28][R2.64]
0020 FADD R20, R20, R7
0030 LDG.E R12, desc[UR28][R2.64]
0040 FADD R20, R20, R8
0050 FADD R20, R20, R12
0060 STG.E.128 desc[UR28][R2.64], R20
0070 EXIT
"""
        path = self.kernel(code).code
        self.assertEqual(sass.in_flight(path), 32)
        self.assertEqual(sass.elements(path, 4), 8)

    def test_passes_of_a_kernel(self):
        """A loop of four 16-byte loads, its rest of one, and a loop that also writes."""
        load = "LDG.E.128 R4, desc[UR28][R2.64]"
        code = [load] * 4 + ["@P0 BRA 0x0", load, "@P0 BRA 0x50", load, "STG.E.128 desc[UR28][R2.64], R4",
                             "@P0 BRA 0x70", "EXIT"]
        paths = sass.memory_paths(self.kernel("\n".join(f"{16 * n:04x} {i}" for n, i in enumerate(code))))
        self.assertEqual([len(p) for p in paths], [5, 2, 3])
        self.assertEqual(len(sass.find_pass(paths, 2, 0)), 5)
        self.assertEqual(len(sass.find_pass(paths, 2, 1)), 3)

    # -- the guard --

    def guard(self, code, limits=LIMITS, registers=168, tool="cuobjdump", release="13.0.88"):
        """Status and what is printed, where cuobjdump prints this code."""
        def dump(program, option, *rest):
            if option == "-sass":
                return iter(text(code))
            return iter([f" Function {NAME}:\n", f"  REG:{registers} STACK:0 SHARED:1024\n"])
        with tempfile.NamedTemporaryFile("w") as f, contextlib.redirect_stdout(io.StringIO()) as out:
            f.write(limits)
            f.flush()
            with mock.patch.object(sass, "dump", dump), mock.patch.object(sass, "cuobjdump", lambda: tool):
                return sass.guard("program", release, f.name), out.getvalue()

    def test_guard_passes(self):
        status, says = self.guard(CODE)
        self.assertEqual((status, says), (0, "program: 1 kernels keep their limits (0 s)\n"))

    def test_guard_says_that_it_looks_at_nothing(self):
        status, says = self.guard(CODE, LIMITS.replace("168 2", "1 99"), tool=None)
        self.assertEqual((status, says.split(":")[0]), (0, "skipped"))

    def test_guard_only_tells_of_another_release(self):
        """It counts the kernels that are beyond the limits, in one line."""
        for limits, beyond in [(LIMITS, 0), (LIMITS.replace(" 16 22 ", " 13 19 "), 1)]:
            status, says = self.guard(CODE, limits, release="13.0.48")
            self.assertEqual((status, says), (0, f"program: {beyond} of 1 kernels are beyond the limits of "
                                                 "nvcc 13.0.88; nvcc 13.0.48 is not held to them\n"))

    def test_guard_wants_an_attention_kernel(self):
        with self.assertRaises(SystemExit), mock.patch.object(sass, "cuobjdump", lambda: "cuobjdump"), \
                mock.patch.object(sass, "dump", lambda *arguments: iter([])):
            sass.guard("program", "13.0.88")

    def red(self, words, *arguments, **named):
        status, says = self.guard(*arguments, **named)
        self.assertEqual(status, 1, says)
        self.assertIn(words, says)

    def test_guard_is_red_when_the_wait_moves_up(self):
        wait, exponential = "WARPGROUP.DEPBAR.LE gsb0, 0x0", "MUFU.EX2 R24, R24"
        code = CODE.replace(wait, "x").replace(exponential, wait).replace("x\n", exponential + "\n")
        self.red("0 exponentials under the product, at least 2 wanted", code)

    def test_guard_is_red_over_each_limit(self):
        self.red("1 instructions that spill", CODE.replace("FMUL R88, R88, R26", "STL [R1], R26"))
        self.red("169 registers, limit 168", CODE, registers=169)
        self.red("14 instructions a whole tile, limit 13", CODE, LIMITS.replace(" 16 ", " 13 "))
        self.red("20 instructions a masked tile, limit 19", CODE, LIMITS.replace(" 22 ", " 19 "))
        self.red("20 instructions a tile with ALiBi, limit 19", CODE, LIMITS.replace(" 24 ", " 19 "))

    def test_a_mask_costs_at_most_half_a_tile(self):
        for gpu, name, limit in sass.read_limits(sass.LIMITS)[1]:
            if gpu == "sm_90a" and name.startswith("attention"):
                self.assertLessEqual(limit.masked, 1.5 * limit.whole, name)

    def test_guard_is_red_without_a_row_or_a_loop(self):
        self.red("has no row for it", CODE, LIMITS.replace(",64", ",96"))
        self.red("no loop with products", CODE.replace("@P0 BRA 0x20", "NOP"))


if __name__ == "__main__":
    unittest.main()
