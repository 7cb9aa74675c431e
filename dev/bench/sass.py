#!/usr/bin/env python3
"""What the machine code of GPU kernels says: limits that kernels keep, and lowest times.

usage: sass.py guard PROGRAM NVCC  status 1 when a kernel breaks its row of sass_limits.txt
                                   and NVCC is the release, 13.0.88, that the limits were taken with
       sass.py rows PROGRAM        the same figures as rows for sass_limits.txt
       sass.py table PROGRAM ...   tables of registers, instructions and lowest times, in markdown

PROGRAM is what nvcc wrote: a program, an object, a fatbin or a cubin. Another release's code has
other counts: the guard prints how many kernels are beyond the limits, and passes. cuobjdump and
nvdisasm come with the CUDA toolkit; scripts/setup.sh installs them where a toolkit lacks them.

Loops. A kernel's SASS is cut into basic blocks; a depth-first walk finds the edges that go back,
and each such edge's natural loop. A kernel's main loop is the innermost one with products on tensor
cores. Three paths lead once around it:
  whole     most products, then fewest instructions: a tile of which everything is visible
  masked    most instructions without ALiBi, whose distances are converted to float: a tile that
            needs its mask
  sloped    most instructions: a mask and ALiBi
Where a loop of products is compiled twice, whole is of the shorter, the others of the longer one.

Lowest times. Each unit of an SM needs so many clocks for a path, were it never to wait. The largest
of them is the least that a tile can take. Real kernels take longer, by latencies, barriers, starts of
blocks, tails of grids and power limits. Per warp and scheduler, of which an SM has 4:
  issue     1 an instruction
  fp32      1 an FADD, FMUL, FFMA or packed one, 2 on sm_80; an IMAD has half of the unit: 2
  alu       2 an integer, logic, compare, select, minimum or conversion
  mufu      8 a MUFU: 16 results a clock and SM
Per SM, all warps together:
  tensor    N/2 a wgmma of 64 x N x 16 in 16 bits; 1 an mma of 16 x 8 x 16, 2 on sm_80
  shared    128 bytes a clock: operands of wgmma that lie in shared memory, each time that they are
            read, and LDS, STS, LDSM, STSM
  lsu       1 an instruction of memory or shuffle
Attention's share of peak is the arithmetic of its products over the causal half, 4 T^2/2 D a head
forward and 10 backward, over what tensor cores could do in that time; a tile that the diagonal
crosses counts as masked, and is done in full.
A kernel of memory moves each byte once to or from device memory. Its share is the time for that over
the largest of that time, the units' times, and flight: the time in which loads come back when each
warp that an SM has room for asks for as many bytes as its first pass does before it first waits, and
has them after LATENCY.
"""
import collections, functools, glob, itertools, os, re, shutil, subprocess, sys, time

HERE = os.path.dirname(os.path.abspath(__file__))
LIMITS = os.path.join(HERE, "sass_limits.txt")
TOOLS = os.path.join(HERE, "../../build/cuda_tools")  # where scripts/setup.sh installs cuobjdump


# ----------------------------------------------------------------------------
# the text of cuobjdump

Instruction = collections.namedtuple("Instruction", "address guard op operands")
Kernel = collections.namedtuple("Kernel", "gpu name code")

LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")


def cuobjdump():
    """The tool's path, or None. It runs nvdisasm, which lies beside it."""
    beside = os.path.dirname(shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc")
    packages = [os.path.join(p, "nvidia/*/bin/cuobjdump") for p in [TOOLS, *sys.path]]
    found = [shutil.which("cuobjdump"), os.path.join(beside, "cuobjdump")]
    found += [path for pattern in packages for path in glob.glob(pattern)]
    both = lambda path: os.path.exists(path) and os.path.exists(os.path.join(os.path.dirname(path), "nvdisasm"))
    return next((path for path in found if path and both(path)), None)


def dump(program, *options):
    """Lines of what cuobjdump prints, as they come."""
    child = subprocess.Popen([cuobjdump(), *options, program], stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL, text=True)
    yield from child.stdout
    if child.wait():
        sys.exit(f"sass.py: error: cuobjdump {' '.join(options)} {program}: status {child.returncode}")


def plain(name):
    """llmc::gelu_forward_kernel<llmc::bf16, 8>(...) as gelu_forward_kernel<bf16,8>; an enum's value as a number."""
    name = re.sub(r"\((?:\w+::)*\w+\)(?=\d)", "", name)
    name = re.sub(r"^void |\(anonymous namespace\)::|\b(llmc|cutlass|flash)::", "", name)
    return name.split("(")[0].replace(", ", ",").replace(" ", "")


@functools.cache
def demangled(name):
    """Ask c++filt, which comes with every host compiler that nvcc takes."""
    return plain(subprocess.run(["c++filt", name], capture_output=True, text=True).stdout.strip())


def kernels(lines, wanted=lambda gpu, name: True):
    """Every Kernel of a disassembly that is wanted by its GPU and plain name."""
    gpu, kernel = "", None
    for line in lines:
        if line.startswith("\tcode for "):
            gpu = line.split()[-1]
        elif "Function : " in line:
            if kernel:
                yield kernel
            name = demangled(line.split()[-1])
            kernel = Kernel(gpu, name, []) if wanted(gpu, name) else None
        elif kernel:
            match = LINE.match(line)
            if match:
                address, guard, op, operands = match.groups()
                operands = tuple(x.strip() for x in operands.split(",")) if operands else ()
                kernel.code.append(Instruction(int(address, 16), guard, op, operands))
    if kernel:
        yield kernel


# ----------------------------------------------------------------------------
# blocks, loops, paths

LEAVES = re.compile(r"(EXIT|RET|BRX|JMX|KILL)\b")
JUMPS = re.compile(r"(BRA|JMP)\b")


def blocks_of(code):
    """{address: instructions} and {address: addresses that may follow} of basic blocks."""
    target = lambda i: int(i.operands[-1], 16)
    # ptxas leaves some loops of sm_80 by a guarded call that nothing returns from.
    jumps = lambda i: JUMPS.match(i.op) or i.guard and i.op == "CALL.REL.NOINC"
    starts = {code[0].address}
    for i, after in zip(code, code[1:] + [None]):
        if jumps(i):
            starts.add(target(i))
        if after and (jumps(i) or LEAVES.match(i.op)):
            starts.add(after.address)

    blocks = {}
    for i in code:
        if i.address in starts:
            block = blocks.setdefault(i.address, [])
        block.append(i)

    # A guard, or a predicate among a jump's operands, lets the next instruction follow.
    order, follow = sorted(blocks), {}
    for start, after in zip(order, order[1:] + [None]):
        last = blocks[start][-1]
        follow[start] = [target(last)] if jumps(last) else []
        ends = JUMPS.match(last.op) and len(last.operands) == 1 or LEAVES.match(last.op)
        if after is not None and (last.guard or not ends):
            follow[start].append(after)
    return blocks, follow


def walk(follow, entry):
    """Blocks in reverse postorder, and the edges that lead back to a block under way."""
    order, back, state = [], set(), {entry: "under way"}
    stack = [(entry, iter(follow[entry]))]
    while stack:
        block, rest = stack[-1]
        after = next(rest, None)
        if after is None:
            state[block] = "done"
            order.append(block)
            stack.pop()
        elif state.get(after) == "under way":
            back.add((block, after))
        elif after not in state:
            state[after] = "under way"
            stack.append((after, iter(follow[after])))
    return order[::-1], back


def loops_of(follow, back):
    """{header: blocks of its natural loop}."""
    before = collections.defaultdict(set)
    for block, after in follow.items():
        for x in after:
            before[x].add(block)
    loops = {}
    for latch, header in back:
        body, rest = loops.setdefault(header, {header}), [latch]
        while rest:
            block = rest.pop()
            if block not in body:
                body.add(block)
                rest += before[block]
    return loops


def best_path(blocks, follow, order, back, body, header, worth):
    """Instructions of the path through a body with the largest sum of worth(block): once around a
    loop, or from the kernel's entry to an end."""
    best = {header: (worth(blocks[header]), None)}
    for block in order:
        if block not in best:
            continue
        for after in follow[block]:
            if after not in body or (block, after) in back:
                continue
            sum_ = tuple(a + b for a, b in zip(best[block][0], worth(blocks[after])))
            if after not in best or sum_ > best[after][0]:
                best[after] = (sum_, block)
    # Back from the best of the blocks that close the loop, or end the kernel.
    ends = [b for b, h in back if h == header and b in best] or [b for b in best if not follow[b]]
    at = max(ends, key=lambda b: best[b][0])
    path = []
    while at is not None:
        path.append(at)
        at = best[at][1]
    return [i for block in path[::-1] for i in blocks[block]]


def count(code, pattern):
    return sum(1 for i in code if re.match(pattern, i.op))


PRODUCT = r"(HG|QG|IG|H|I|Q|D)MMA\b"


def tensor_loops(kernel):
    """(whole, masked, sloped) paths of every innermost loop with products."""
    blocks, follow = blocks_of(kernel.code)
    order, back = walk(follow, kernel.code[0].address)
    loops = loops_of(follow, back)
    products = {b: count(code, PRODUCT) for b, code in blocks.items()}
    with_products = {h: body for h, body in loops.items() if any(products[b] for b in body)}
    inner = [h for h, body in with_products.items()
             if not any(x != h and x in body for x in with_products)]
    path = lambda h, worth: best_path(blocks, follow, order, back, loops[h], h, worth)
    return [(path(h, lambda code: (count(code, PRODUCT), -len(code))),
             path(h, lambda code: (-count(code, "I2F"), len(code))),
             path(h, lambda code: (len(code),))) for h in inner]


def under_the_product(path):
    """Most exponentials between a wait that leaves one group of wgmma running and the next wait."""
    most, running = 0, None
    for i in path + path:
        if i.op.startswith("WARPGROUP.DEPBAR"):
            running = 0 if i.operands[-1] != "0x0" else None
        elif i.op == "MUFU.EX2" and running is not None:
            running += 1
            most = max(most, running)
    return most


# ----------------------------------------------------------------------------
# the guard

Figures = collections.namedtuple("Figures", "registers spills exponentials whole masked sloped")


def figures_of(kernel, registers):
    paths = tensor_loops(kernel)
    if not paths:
        return None
    return Figures(registers, count(kernel.code, r"(LDL|STL)\b"),
                   min(under_the_product(path) for loop in paths for path in loop),
                   min(len(whole) for whole, _, _ in paths), max(len(masked) for _, masked, _ in paths),
                   max(len(sloped) for _, _, sloped in paths))


def usage_of(program, gpu):
    """{plain name: (registers a thread, bytes of declared shared memory)}"""
    found, name = {}, ""
    for line in dump(program, "-res-usage", "-arch", gpu):
        match = re.match(r"\s*Function (\S+):", line)
        if match:
            name = demangled(match.group(1))
        elif "REG:" in line:
            found[name] = tuple(int(re.search(key + r":(\d+)", line)[1]) for key in ("REG", "SHARED"))
    return found


def read_limits(path):
    """The release of nvcc that they were taken with, and [(GPU, pattern of plain names, Figures)]."""
    with open(path, encoding="utf-8") as lines:
        (_, release), *rows = filter(None, (line.split("#")[0].split() for line in lines))
    return release, [(row[0], row[1], Figures(int(row[2]), 0, *map(int, row[3:]))) for row in rows]


def fits(name, pattern):
    """Whether a plain name is of a row; * stands for one template argument."""
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^,]*"), name)


def limited_figures(program, limits):
    """(GPU, plain name, Figures, its row's Figures or None) of each kernel of the rows' names."""
    for gpu in sorted({row[0] for row in limits}):
        rows = [(pattern, limit) for row, pattern, limit in limits if row == gpu]
        # Kernels are compiled for every GPU, some to be empty: rows say whose a kernel is.
        families = {re.match(r"\w+", pattern).group() for pattern, _ in rows}
        usage = usage_of(program, gpu)
        if not any(name.split("<")[0] in families for name in usage):
            continue
        wanted = lambda _, name: name.split("<")[0] in families
        for kernel in kernels(dump(program, "-sass", "-arch", gpu), wanted):
            limit = next((x for p, x in rows if fits(kernel.name, p)), None)
            yield gpu, kernel.name, figures_of(kernel, usage[kernel.name][0]), limit


def wrong(found, limit):
    """What breaks a row, in words."""
    if not limit:
        return ["sass_limits.txt has no row for it"]
    if not found:
        return ["no loop with products on tensor cores"]
    f, most = found, limit
    says = [(f.registers > most.registers, f"{f.registers} registers, limit {most.registers}"),
            (f.spills > 0, f"{f.spills} instructions that spill"),
            (f.exponentials < limit.exponentials, f"{f.exponentials} exponentials under the product, "
                                                  f"at least {limit.exponentials} wanted"),
            (f.whole > most.whole, f"{f.whole} instructions a whole tile, limit {most.whole}"),
            (f.masked > most.masked, f"{f.masked} instructions a masked tile, limit {most.masked}"),
            (f.sloped > most.sloped, f"{f.sloped} instructions a tile with ALiBi, limit {most.sloped}")]
    return [text for bad, text in says if bad]


def guard(program, release, limits=LIMITS):
    """Exit status."""
    if not cuobjdump() or not shutil.which("c++filt"):
        print("skipped: cuobjdump with nvdisasm, or c++filt, is not installed: scripts/setup.sh test")
        return 0
    start, seen, bad = time.time(), 0, {}
    taken_with, rows = read_limits(limits)
    for gpu, name, found, limit in limited_figures(program, rows):
        seen += 1
        if wrong(found, limit):
            bad[f"{name} on {gpu}"] = wrong(found, limit)
    if not seen:
        sys.exit(f"sass.py: error: {program} has no kernel with limits")
    if release != taken_with:
        print(f"{program}: {len(bad)} of {seen} kernels are beyond the limits of nvcc {taken_with}; "
              f"nvcc {release} is not held to them")
        return 0

    for kernel, texts in bad.items():
        print(*[f"{program}: {kernel}: {text}" for text in texts], sep="\n")
    if not bad:
        print(f"{program}: {seen} kernels keep their limits ({time.time() - start:.0f} s)")
    return 1 if bad else 0


def print_rows(program):
    for gpu, name, found, _ in limited_figures(program, read_limits(LIMITS)[1]):
        f = found or Figures(0, 0, 0, 0, 0, 0)
        print(f"{gpu:7} {name:55} {f.registers:4} {f.exponentials:3} {f.whole:5} {f.masked:5} {f.sloped:5}")


# ----------------------------------------------------------------------------
# what units an instruction needs

Gpu = collections.namedtuple("Gpu", "name sms ghz bytes fp32 mma")
GPUS = {"sm_90a": Gpu("H100 SXM", 132, 1.83, 3.35e12, 1, 1),
        "sm_80": Gpu("A100 SXM", 108, 1.41, 2.04e12, 2, 2)}
LATENCY = 0.6e-6  # seconds from a load to its data from device memory, nothing else under way
UNITS = ("tensor", "issue", "alu", "fp32", "mufu", "shared", "lsu")

CLASSES = [("products", PRODUCT), ("mufu", r"MUFU|F2F\b|I2F|F2I|FRND|POPC"),
           ("fp32", r"FADD|FMUL|FFMA|HFMA2|HADD2|HMUL2"), ("fp64", r"D(ADD|MUL|FMA|SETP)"),
           ("imad", r"IMAD"), ("global", r"LDG|STG|LD\b|ST\b|RED|ATOMG?\b|UTMA|UBLK|LDGSTS"),
           ("shared", r"LDS|STS|LDSM|STSM|ATOMS"), ("shuffle", r"SHFL|REDUX"),
           ("barriers", r"BAR|SYNCS|DEPBAR|WARPGROUP|LDGDEPBAR|MEMBAR|FENCE|ERRBAR|CCTL|CGAERRBAR"),
           ("flow", r"BRA|BSSY|BSYNC|WARPSYNC|EXIT|CALL|RET|NOP|YIELD|BREAK|BMOV|LDC|ULDC|S2R|S2UR|CS2R"),
           ("uniform", r"U[A-Z]|R2UR"), ("integer", "")]
CLASSES = [(name, re.compile(pattern)) for name, pattern in CLASSES]


def mix_of(path):
    """{class: instructions}"""
    return collections.Counter(next(name for name, r in CLASSES if r.match(i.op)) for i in path)


def width(i):
    """Bytes of a thread's access."""
    match = re.search(r"\.(128|64|U?16|U?8)\b", i.op)
    return int(match.group(1).lstrip("U")) // 8 if match else 4


def shared_bytes(i):
    """Of a warp's access to shared memory; of a warpgroup's, divided by its 4 warps, for a product."""
    shape = re.match(r"HGMMA\.64x(\d+)x16", i.op)
    if shape:
        both = i.operands[1].startswith("gdesc")
        return (int(shape.group(1)) * 32 + (64 * 32 if both else 0)) / 4
    if re.match(r"(LDSM|STSM)", i.op):
        return 128 * int((re.search(r"\.(\d)\b", i.op.split("M88")[-1]) or [0, "1"])[1])
    return 32 * width(i) if re.match(r"(LDS|STS)\b", i.op) else 0


def clocks_of(path, gpu):
    """{unit: clocks of an SM for one warp's way along a path}; times warps, when all do it."""
    mix = mix_of(path)
    shapes = [re.match(r"HGMMA\.64x(\d+)x16", i.op) for i in path]
    mma = count(path, r"HMMA\.16816") + count(path, r"HMMA\.1688") / 2
    return {
        "tensor": sum(int(s.group(1)) / 2 for s in shapes if s) / 4 + mma * gpu.mma,
        "issue": len(path) / 4,
        "alu": 2 * mix["integer"] / 4,
        "fp32": max((mix["fp32"] + mix["imad"]) * gpu.fp32, 2 * mix["imad"]) / 4,
        "mufu": 8 * mix["mufu"] / 4,
        "shared": sum(map(shared_bytes, path)) / 128,
        "lsu": mix["global"] + mix["shared"] + mix["shuffle"],
    }


def warps_resident(registers, threads, shared):
    """Warps of an SM: by registers in units of 8 a thread, shared memory, 64 warps, 32 blocks."""
    warps = threads // 32
    by_registers = 65536 // (-(-registers // 8) * 8 * 32) // warps
    by_shared = 233472 // (shared + 1024)
    return warps * min(by_registers, by_shared, 64 // warps, 32)


# ----------------------------------------------------------------------------
# attention

# A block has `warps` that multiply; it owns a tile of rows (of keys in backward) and walks the others.
Attention = collections.namedtuple("Attention", "gpu pattern title flops threads warps own walk")
H, A = "sm_90a", "sm_80"
ATTENTION = [
    Attention(H, r"attention_hopper_forward_kernel<bf16,64,false>", "forward 64", 4, 384, 8, 128, 128),
    Attention(H, r"attention_hopper_forward_kernel<bf16,128,false>", "forward 128", 4, 384, 8, 128, 128),
    Attention(H, r"attention_hopper_forward_kernel<bf16,256,false>", "forward 256", 4, 384, 8, 128, 64),
    Attention(H, r"attention_hopper_backward_kernel<bf16,64,false>", "backward 64", 10, 384, 8, 128, 128),
    Attention(H, r"attention_hopper_backward_kernel<bf16,128,false>", "backward 128", 10, 384, 8, 128, 64),
    Attention(H, r".*FlashAttnFwd.*C<192>,cute::C<128>,cute::C<64>.*", "FlashAttention-3 forward 64", 4, 512, 12, 192, 128),
    Attention(H, r".*FlashAttnFwd.*C<128>,cute::C<128>,cute::C<128>.*", "FlashAttention-3 forward 128", 4, 384, 8, 128, 128),
    Attention(H, r".*FlashAttnBwdSm90.*C<128>,cute::C<128>,cute::C<64>.*", "FlashAttention-3 backward 64", 10, 384, 8, 128, 128),
    Attention(H, r".*FlashAttnBwdSm90.*C<64>,cute::C<128>,cute::C<128>.*", "FlashAttention-3 backward 128", 10, 384, 8, 128, 64),
    Attention(A, r"attention_mma_forward_kernel<bf16,64,2,64,false>", "mma.sync forward 64", 4, 128, 4, 128, 64),
    Attention(A, r"attention_mma_forward_kernel<bf16,128,2,32,false>", "mma.sync forward 128", 4, 128, 4, 128, 32),
    Attention(A, r"attention_mma_backward_q_kernel<bf16,64,.*false>", "mma.sync backward 64, dq", 4, 128, 4, 64, 32),
    Attention(A, r"attention_mma_backward_q_kernel<bf16,128,.*false>", "mma.sync backward 128, dq", 4, 128, 4, 64, 32),
    Attention(A, r"attention_mma_backward_kv_kernel<bf16,64,.*false>", "mma.sync backward 64, dk and dv", 6, 128, 4, 64, 32),
    Attention(A, r"attention_mma_backward_kv_kernel<bf16,128,.*false>", "mma.sync backward 128, dk and dv", 6, 128, 4, 64, 32),
]


def tiles(a, T):
    """(whole, masked) tiles that the blocks of one head walk, causal."""
    whole = masked = 0
    for first in range(0, T, a.own):
        before = first // a.walk  # of the diagonal
        whole += before
        masked += -(-min(first + a.own, T) // a.walk) - before
    return whole, masked


def share_at(a, T, D, whole, masked):
    """Share of tensor cores' peak at best, and the unit that takes longest."""
    n, m = tiles(a, T)
    clocks = {unit: a.warps * (n * whole[unit] + m * masked[unit]) for unit in UNITS}
    unit = max(UNITS, key=clocks.get)
    per_clock = {"sm_90a": 4096, "sm_80": 2048}[a.gpu]
    return a.flops * T * T / 2 * D / per_clock / clocks[unit], unit


# ----------------------------------------------------------------------------
# kernels of memory

# passes: bytes that a pass over an operand's element reads in its widest loads, and whether it writes;
# bytes: what an element costs in device memory, read and written.
Memory = collections.namedtuple("Memory", "pattern title threads passes bytes")
MEMORY = [
    Memory("layernorm_forward_kernel<bf16,8,4>", "layernorm forward", 128, [(2, 0), (2, 0), (6, 1)], 4),
    Memory("layernorm_backward_kernel<bf16,8,4,1>", "layernorm backward", 128, [(10, 1)], 8),
    Memory("rmsnorm_forward_kernel<bf16,8,4>", "rmsnorm forward", 128, [(2, 0), (4, 1)], 4),
    Memory("rmsnorm_backward_kernel<bf16,8,4,1>", "rmsnorm backward", 128, [(10, 1)], 8),
    Memory("column_sums_kernel<bf16,8>", "bias gradient", 256, [(2, 0)], 2),
    Memory("gelu_forward_kernel<bf16,8>", "gelu forward", 256, [(2, 1)], 4),
    Memory("gelu_backward_kernel<bf16,8>", "gelu backward", 256, [(4, 1)], 6),
    Memory("swiglu_forward_kernel<bf16,8>", "swiglu forward", 256, [(4, 1)], 6),
    Memory("swiglu_backward_kernel<bf16,8>", "swiglu backward", 256, [(6, 1)], 10),
    Memory("rope_kernel<bf16,8>", "rope", 256, [(6, 1)], 4),
    Memory("crossentropy_sum_kernel<bf16,8,true>", "cross-entropy, sum", 512, [(2, 0)], 2),
    Memory("crossentropy_backward_kernel<bf16,8>", "cross-entropy, backward", 512, [(2, 1)], 4),
    Memory("embedding_forward_kernel<bf16,8,4>", "embedding forward", 128, [(2, 1)], 4),
    Memory("embedding_add_kernel<bf16,8>", "embedding backward, add", 128, [(2, 0)], 10),
    Memory("update_kernel<AdamWRule,4,AdamW,FloatMasters<bf16>,FloatMoment<float>,FloatMoment<float>>",
           "adamw, float master", 256, [(16, 1)], 30),
    Memory("grad_squares_kernel<4>", "gradient norm, squares", 256, [(4, 0)], 4),
    Memory("fp8_quantise_kernel<e4m3,e4m3,bf16,0>", "fp8 codes both ways, scales of rows", 256, [(2, 1)], 4),
    Memory("fp8_quantise_kernel<e4m3,e4m3,bf16,1>", "fp8 codes both ways, of columns", 256, [(2, 1)], 4),
    Memory("fp8_quantise_kernel<e4m3,e4m3,bf16,2>", "fp8 codes both ways, one scale", 256, [(2, 1)], 4),
    Memory("fp8_quantise_kernel<e4m3,e4m3,bf16,5>", "MXFP8 codes both ways, scales of rows", 256, [(2, 1)], 4),
    Memory("fp8_quantise_kernel<e4m3,e4m3,bf16,6>", "MXFP8 codes both ways, of columns", 256, [(2, 1)], 4),
    Memory("fp8_amax_kernel<bf16>", "fp8 maximum", 256, [(2, 0)], 2),
]


def loads(code):
    return [i for i in code if re.match(r"LDG|LD\b", i.op)]


def stores(code):
    return [i for i in code if re.match(r"STG|ST\b|RED", i.op)]


def memory_paths(kernel):
    """The path that moves most bytes through each innermost loop; without one, through the kernel."""
    blocks, follow = blocks_of(kernel.code)
    order, back = walk(follow, kernel.code[0].address)
    loops = loops_of(follow, back)
    moved = lambda code: sum(map(width, loads(code) + stores(code)))
    path = lambda header, body: best_path(blocks, follow, order, back, body, header,
                                          lambda code: (moved(code), -len(code)))
    inner = [h for h in sorted(loops) if not any(x != h and x in loops[h] for x in loops)]
    paths = [path(h, loops[h]) for h in inner]
    paths = [p for p in paths if moved(p) and max(map(width, loads(p) + stores(p))) > 4]
    return paths or [path(kernel.code[0].address, set(blocks))]


def elements(path, read):
    """How many elements a thread's way along a path handles."""
    widths = [width(i) for i in loads(path)]
    return sum(w for w in widths if w == max(widths)) / read


def find_pass(paths, read, writes):
    """Of the paths that read so many operands, and write or not, the one of most elements."""
    fits_ = [p for p in paths if loads(p) and bool(stores(p)) == bool(writes)
             and elements(p, read) % (16 / max(width(i) for i in loads(p))) == 0]
    return max(fits_, key=lambda p: elements(p, read), default=None)


def in_flight(path):
    """Most bytes of a thread that are asked for and not yet waited for."""
    most, waiting = 0, []
    for i in path + path:
        reads = [int(r) for x in i.operands for r in re.findall(r"\bR(\d+)", x)]
        hit = max((n for n, (first, last, _) in enumerate(waiting)
                   if any(first <= r <= last for r in reads)), default=None)
        if hit is not None:  # data come back in order
            del waiting[:hit + 1]
        if i in loads([i]):
            first = re.match(r"R(\d+)", i.operands[0])
            first = int(first.group(1)) if first else 999
            waiting.append((first, first + max(1, width(i) // 4) - 1, width(i)))
        most = max(most, sum(w for _, _, w in waiting))
    return most


def memory_row(m, kernel, registers, shared):
    gpu = GPUS[kernel.gpu]
    paths, passes = memory_paths(kernel), []
    for read, writes in m.passes:
        path = find_pass(paths, read, writes)
        paths = [p for p in paths if p is not path] if len(paths) > 1 else paths
        passes.append((path, read))
    warps = warps_resident(registers, m.threads, shared)
    if any(path is None for path, _ in passes):
        return row(m.title, registers, warps, "not found", *[""] * 12)

    # Seconds of the whole GPU an element, by each limit.
    seconds = {"bytes": m.bytes / gpu.bytes, **{unit: 0 for unit in UNITS}, "flight": 0}
    for path, read in passes:
        n = 32 * elements(path, read)
        for unit, clocks in clocks_of(path, gpu).items():
            seconds[unit] += clocks / n / gpu.ghz / 1e9 / gpu.sms
        flying = warps * 32 * in_flight(path) * gpu.sms / LATENCY
        # A second reading of a row finds it nearer: the first one waits for device memory.
        if path is passes[0][0]:
            seconds["flight"] = m.bytes / flying
    longest = max(seconds, key=seconds.get)
    per = lambda kind: "+".join(str(mix_of(p)[kind]) for p, _ in passes)
    row(m.title, registers, warps, "+".join(f"{len(p)}/{elements(p, r):.0f}" for p, r in passes),
        per("fp32"), "+".join(str(mix_of(p)["imad"] + mix_of(p)["integer"]) for p, _ in passes), per("mufu"),
        "+".join(str(len(loads(p))) + "," + str(len(stores(p))) for p, _ in passes),
        f"{warps * 32 * in_flight(passes[0][0]) / 1024:.0f}",
        *[f"{seconds[x] / seconds['bytes']:.0%}" for x in ("issue", "alu", "fp32", "lsu", "flight")],
        f"{seconds['bytes'] / seconds[longest]:.0%} ({longest})", REMARKS.get(m.title, ""))


# ----------------------------------------------------------------------------
# tables

# What limits a kernel, as its machine code shows it.
REMARKS = {
    "forward 64": "MUFU and issue before products; 128 rows a block, FlashAttention-3 192",
    "backward 64": "128-row tiles, as FlashAttention-3's",
    "backward 128": "64-row tiles, as FlashAttention-3's",
    "FlashAttention-3 backward 64": "128-row tiles; 18 spills",
    "mma.sync backward 64, dq": "32-wide tiles: operands are read again for every 16 rows",
    "mma.sync backward 128, dq": "the same",
    "mma.sync backward 64, dk and dv": "the same",
    "mma.sync backward 128, dk and dv": "the same",
    "layernorm forward": "three readings of a row, two of them from near",
    "layernorm backward": "64 registers: 32 warps; one reading",
    "gelu forward": "one load a thread; 13 of 22 instructions an element are arithmetic",
    "gelu backward": "near half of the issue slots",
    "swiglu backward": "three loads at once, since packs meet in words",
    "cross-entropy, sum": "24 of 108 instructions scale tiny exponentials: ex2.approx.ftz needs none",
    "cross-entropy, backward": "the same 24; one load a thread",
    "adamw, float master": "40 warps, but four loads of 16 bytes each",
    "gradient norm, squares": "one load a thread; squares in double",
}


def row(*cells):
    print("| " + " | ".join(str(c) for c in cells) + " |")


def heading(*cells):
    row(*cells)
    print("|---" + "|---:" * (len(cells) - 1) + "|")


def attention_row(a, kernel, registers):
    loops = tensor_loops(kernel)
    whole = min((w for w, _, _ in loops), key=len)
    masked = max((m for _, m, _ in loops), key=len)
    D = int(re.search(r" (\d+)", a.title).group(1))
    clocks = [clocks_of(path, GPUS[a.gpu]) for path in (whole, masked)]
    mix = mix_of(whole)
    shares = [share_at(a, T, D, *clocks) for T in (1024, 8192)]
    under = " and ".join(str(under_the_product(path)) for path in (whole, masked))
    row(a.title, GPUS[a.gpu].name, registers, f"{len(whole)}, {len(masked)}", mix["products"],
        f"{under} of {count(whole, 'MUFU.EX2')}" if a.gpu == "sm_90a" else "",
        mix["mufu"], mix["fp32"], mix["imad"] + mix["integer"], mix["uniform"],
        mix["global"] + mix["shared"] + mix["shuffle"], mix["barriers"],
        ", ".join(f"{a.warps * clocks[0][u]:.0f}" for u in UNITS[:6]),
        *[f"{share:.0%} ({unit})" for share, unit in shares], REMARKS.get(a.title, ""))


def cases(gpu, name):
    """The rows of both tables that a kernel stands in."""
    return ([a for a in ATTENTION if a.gpu == gpu and re.fullmatch(a.pattern, name)] +
            [m for m in MEMORY if gpu == "sm_90a" and m.pattern == name])


def print_tables(*programs):
    found = []
    for program, gpu in itertools.product(programs, GPUS):
        usage = usage_of(program, gpu)
        if any(cases(gpu, name) for name in usage):
            found += [(case, kernel, usage[kernel.name])
                      for kernel in kernels(dump(program, "-sass", "-arch", gpu), cases)
                      for case in cases(gpu, kernel.name)]
    found.sort(key=lambda x: (ATTENTION + MEMORY).index(x[0]))

    heading("kernel", "GPU", "registers", "instructions whole, masked", "products", "exponentials under one",
            "mufu", "fp32", "integer", "uniform", "memory", "barriers", "clocks: " + ", ".join(UNITS[:6]),
            "share at T=1024", "at T=8192", "remark")
    for case, kernel, usage in found:
        if case in ATTENTION:
            attention_row(case, kernel, usage[0])
    print()
    heading("kernel", "registers", "warps an SM", "instructions/elements", "fp32", "integer", "mufu",
            "loads,stores", "KB in flight", "issue", "alu", "fp32", "lsu", "flight", "share of bytes", "remark")
    for case, kernel, usage in found:
        if case in MEMORY:
            memory_row(case, kernel, *usage)


def main(arguments):
    commands = {"guard": guard, "rows": print_rows, "table": print_tables}
    wanted = {"guard": 3, "rows": 2, "table": max(2, len(arguments))}
    if not arguments or len(arguments) != wanted.get(arguments[0]):
        sys.exit(__doc__)
    return commands[arguments[0]](*arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
