#!/usr/bin/env python3
"""PyTorch on the shapes of dev/bench/kernels.cu and whole GPT-2 steps, on this GPU; or steps of both on this CPU.

usage: peers.py [attention|ops|decode|fp8|experts|gpt2|gpt2-xl] ...
       peers.py cpu [BENCH_STEP]     GPT-2 124M, B 4: build/bench_step's step beside PyTorch's, each the fastest it took
Prints one JSON object a line: part, what, rate, unit. Useful bytes and FLOPs are counted as the head of
kernels.cu says. What this PyTorch lacks it skips with its reason.
Without PyTorch or a GPU it says so and leaves with status 0.
"""
import json, os, re, statistics, subprocess, sys, time

try:
    import torch
    import torch.nn.functional as F
except ImportError:
    print("skipped: PyTorch is not installed")
    sys.exit(0)
DEVICE = "cpu" if sys.argv[1:2] == ["cpu"] else "cuda"
if DEVICE == "cuda" and not torch.cuda.is_available():
    print("skipped: PyTorch finds no GPU")
    sys.exit(0)
from torch.nn.attention import SDPBackend, sdpa_kernel

torch.manual_seed(1)


def seconds(f, runs=9):
    """The median of runs, each of about a hundredth of a second, by the GPU's clock."""
    def once(n):
        a, b = torch.cuda.Event(True), torch.cuda.Event(True)
        a.record()
        for _ in range(n):
            f()
        b.record()
        b.synchronize()
        return a.elapsed_time(b) * 1e-3 / n
    for _ in range(3):
        f()
    n = max(1, int(0.01 / max(once(2), 1e-6)))
    return statistics.median(once(n) for _ in range(runs))


def row(part, what, rate, unit):
    print(json.dumps({"part": part, "what": what, "rate": round(rate, 2), "unit": unit}), flush=True)


def random(*shape, dtype=torch.bfloat16, grad=False):
    return torch.randn(*shape, device=DEVICE, dtype=dtype).requires_grad_(grad)


def attempt(part, what, useful, unit, f):
    """A row, or why there is none."""
    try:
        row(part, what, useful / seconds(f) / (1e12 if unit == "TFLOP/s" else 1e9), unit)
    except Exception as e:
        print(f"skipped: {what}: {(str(e) or repr(e)).splitlines()[0]}", flush=True)


def capped(T, cap):
    """Causal attention whose scores have a soft cap."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device=DEVICE)
    flex = torch.compile(flex_attention)
    cap_of = lambda s, b, h, i, j: cap * torch.tanh(s / cap)
    return lambda q, k, v: flex(q, k, v, score_mod=cap_of, block_mask=mask, enable_gqa=True)


def attention():
    causal = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True,
                                                            enable_gqa=q.shape[1] != k.shape[1])
    both = [("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)]
    for B, T, NH, NKV, HS, HS_v, cap in [
            (16, 1024, 12, 12, 64, 64, 0), (4, 4096, 16, 16, 64, 64, 0), (2, 8192, 16, 16, 64, 64, 0),
            (16, 1024, 16, 16, 128, 128, 0), (4, 4096, 16, 16, 128, 128, 0), (2, 8192, 16, 16, 128, 128, 0),
            (2, 8192, 32, 8, 128, 128, 0), (1, 16384, 16, 16, 128, 128, 0), (4, 4096, 8, 8, 256, 256, 0),
            (2, 4096, 16, 16, 192, 128, 0), (1, 4096, 16, 8, 256, 256, 50)]:
        pairs = B * NH * T * T / 2
        q = random(B, NH, T, HS, grad=True)
        k, v = random(B, NKV, T, HS, grad=True), random(B, NKV, T, HS_v, grad=True)
        f = capped(T, cap) if cap else causal
        for name, backend in [("flex", SDPBackend.MATH)] if cap else both:
            shape = f"{name} bf16 B={B} T={T} NH={NH} NKV={NKV} HS={HS}"
            shape += f" HS_v={HS_v}" * (HS_v != HS) + f" softcap={cap}" * (cap > 0)

            def forward():
                with torch.no_grad():
                    f(q, k, v)

            def backward():
                torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

            with sdpa_kernel(backend):
                attempt("attention", "attention forward " + shape, pairs * (2 * HS + 2 * HS_v), "TFLOP/s", forward)
                try:
                    out = f(q, k, v)
                except Exception:
                    continue  # forward has said why
                dout = torch.randn_like(out)
                attempt("attention", "attention backward " + shape, pairs * (6 * HS + 4 * HS_v), "TFLOP/s", backward)


def decode():
    for B, Tk, NH, NKV, HS in [(16, 4096, 32, 8, 128), (1, 32768, 32, 8, 128), (16, 1024, 12, 12, 64)]:
        q, cache = random(B, NH, 1, HS), random(B, Tk, 2, NKV, HS)
        k, v = (x.transpose(1, 2) for x in cache.unbind(2))
        for name, backend in [("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)]:
            with sdpa_kernel(backend):
                attempt("decode", f"attention {name} bf16 B={B} Tk={Tk} NH={NH} NKV={NKV} HS={HS}", 2 * cache.numel(),
                        "GB/s", lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=NH != NKV))
    OC, IC = 14336, 4096
    w = random(OC, IC)
    for N in (16, 1):
        x = random(N, IC)
        attempt("decode", f"product bf16 N={N} OC={OC} IC={IC}", 2 * (OC * IC + N * (OC + IC)), "GB/s",
                lambda: F.linear(x, w))


def fp8():
    e4m3, e5m2, bf16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16

    @torch.compile
    def cast(x):
        scale = 448 / x.abs().amax().float()
        return (x * scale).to(e4m3), 1 / scale

    x = random(8192, 4096)
    attempt("fp8", "cast tensor compiled (8192,4096)", 3 * x.numel(), "GB/s", lambda: cast(x))
    one = torch.ones((), device=DEVICE)
    for N, OC, IC in [(8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336)]:
        for form, M, C, K, of_a, out in [("forward", N, OC, IC, e4m3, bf16), ("backward input", N, IC, OC, e5m2, bf16),
                                         ("backward weight", OC, IC, N, e5m2, torch.float32)]:
            a, b = random(M, K).to(of_a), random(C, K).to(e4m3)
            attempt("fp8", f"{form} codes tensor N={N} OC={OC} IC={IC}", 2 * N * OC * IC, "TFLOP/s",
                    lambda: torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=out))


def experts():
    for N, K, E, C, H in [(4096, 2, 8, 4096, 14336), (8192, 8, 128, 2048, 768)]:
        M = N * K
        x, dout, w = random(M, C), random(M, H), random(E, H, C)
        chosen = torch.rand(N, E, device=DEVICE).topk(K).indices.flatten()
        ends = torch.bincount(chosen, minlength=E).cumsum(0).to(torch.int32)
        for form, f in [("forward", lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends)),
                        ("backward input", lambda: torch._grouped_mm(dout, w, offs=ends)),
                        ("backward weight", lambda: torch._grouped_mm(dout.t(), x, offs=ends))]:
            attempt("experts", f"{form} bf16 N={N} K={K} E={E} C={C} F={H}", 2 * M * C * H, "TFLOP/s", f)


def ops():
    N, C = 32768, 4096
    x, w, b, d = random(N, C, grad=True), random(C, grad=True), random(C, grad=True), random(N, C)
    size = 2 * N * C
    for name, f in [("layernorm", lambda x, w, b: F.layer_norm(x, (C,), w, b)),
                    ("rmsnorm", lambda x, w, b: F.rms_norm(x, (C,), w))]:
        f = torch.compile(f)
        with torch.no_grad():
            row("norms", f"{name} forward compiled bf16", 2 * size / seconds(lambda: f(x, w, b)) / 1e9, "GB/s")
        out = f(x, w, b)
        inputs = (x, w, b) if name == "layernorm" else (x, w)
        row("norms", f"{name} backward compiled bf16, dx and weights", 3 * size /
            seconds(lambda: torch.autograd.grad(out, inputs, d, retain_graph=True)) / 1e9, "GB/s")
    for V in (50257, 131072):
        N = 8192
        logits, targets = random(N, V, grad=True), torch.randint(V, (N,), device=DEVICE)
        f = torch.compile(lambda x: F.cross_entropy(x.float(), targets))
        def both():
            torch.autograd.grad(f(logits), logits)
        row("head", f"cross-entropy forward and backward compiled bf16 ({N},{V})",
            2 * 2 * N * V / seconds(both) / 1e9, "GB/s")
    n = 256 << 20
    p = torch.nn.Parameter(random(n, dtype=torch.float32))
    p.grad = random(n, dtype=torch.float32)
    adamw = torch.optim.AdamW([p], lr=1e-4, fused=True)
    row("optimizer", "adamw fused, float", 28 * n / seconds(adamw.step) / 1e9, "GB/s")


class Block(torch.nn.Module):
    def __init__(self, C, NH):
        super().__init__()
        self.NH = NH
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(C), torch.nn.LayerNorm(C)
        self.c_attn, self.c_proj = torch.nn.Linear(C, 3 * C), torch.nn.Linear(C, C)
        self.c_fc, self.mlp_proj = torch.nn.Linear(C, 4 * C), torch.nn.Linear(4 * C, C)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.NH, -1).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(torch.nn.Module):
    def __init__(self, L, NH, C, V=50304, T=1024):
        super().__init__()
        self.wte, self.wpe = torch.nn.Embedding(V, C), torch.nn.Embedding(T, C)
        self.blocks = torch.nn.ModuleList(Block(C, NH) for _ in range(L))
        self.ln_f = torch.nn.LayerNorm(C)

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def gpt2_step(L, NH, C, B, T=1024, half=True):
    """A function that takes one step, compiled: half: autocast to bf16 over masters in float, as here."""
    torch.set_float32_matmul_precision("high")
    model = GPT2(L, NH, C).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), fused=True)
    compiled = torch.compile(model)
    tokens = torch.randint(50257, (B, T + 1), device=DEVICE)

    def step():
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=half):
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def on_gpu(name, L, NH, C, B, T=1024):
    s = seconds(gpt2_step(L, NH, C, B, T), 5)
    row("step", f"{name} compiled, autocast bf16, fused AdamW, B={B} T={T}", B * T / s, "tokens/s")


def on_cpu(bench_step, B=4):
    def fastest(step):  # of a few steps: others use the cores too
        spent = []
        while len(spent) < 3 or sum(spent) < 10:
            start = time.time()
            step()
            spent.append(time.time() - start)
        return min(spent)

    def ours(kind, T):
        said = subprocess.run([bench_step, kind, str(T)], capture_output=True, text=True, check=True).stdout
        return float(re.search(r"step ([0-9.]+) ms", said).group(1)) / 1e3

    for kind in ("bf16", "fp32"):
        for T in (1024, 64):
            step = gpt2_step(12, 12, 768, B, T, kind == "bf16")
            step()
            mine, theirs = map(min, zip(*((ours(kind, T), fastest(step)) for _ in range(3))))  # in turn
            row("cpu", f"{kind} B={B} T={T} here", B * T / mine, "tokens/s")
            row("cpu", f"{kind} B={B} T={T} PyTorch compiled, fused AdamW", B * T / theirs, "tokens/s")
            row("cpu", f"{kind} B={B} T={T} here / PyTorch", theirs / mine, "times")


if DEVICE == "cpu":
    bench_step = sys.argv[2] if len(sys.argv) > 2 else "build/bench_step"
    if not os.path.exists(bench_step):
        sys.exit(f"{bench_step} is not there: `make build/bench_step` builds it")
    on_cpu(bench_step)
    sys.exit(0)
PARTS = {"attention": attention, "ops": ops, "decode": decode, "fp8": fp8, "experts": experts,
         "gpt2": lambda: on_gpu("gpt2", 12, 12, 768, 32),
         "gpt2-xl": lambda: on_gpu("gpt2-xl", 48, 25, 1600, 8)}
for part in sys.argv[1:] or PARTS:
    PARTS[part]()
    torch.cuda.empty_cache()
