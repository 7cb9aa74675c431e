#!/usr/bin/env python3
"""Make the golden files: tiny models with random weights, and what PyTorch says of them.

usage: make_golden.py     (needs torch; compares with transformers where it can be imported)

Each folder NAME/ holds a Hugging Face model (config.json, model.safetensors, float32) and
golden.safetensors: tokens, targets (B,T) int32 with ignored targets -100, logits, loss (mean over
valid targets), grad.TENSOR for every tensor of the model, grad_norm, and for 3 clipped AdamW steps
on this batch: step.K.loss (the loss before step K, from 0; step_losses has the three in one tensor)
and after.TENSOR, the weights at the end. The metadata holds the steps' settings. All is computed in
float64 from the float32 weights, and stored rounded to float32.
"""
import json, math, os, struct
from unittest import mock
import torch
import torch.nn.functional as F

HERE = os.path.dirname(os.path.abspath(__file__))
B, T, STEPS = 3, 24, 3
LR, BETA1, BETA2, EPS, DECAY, CLIP = 1e-3, 0.9, 0.95, 1e-8, 0.1, 0.5
ADAMW = dict(lr=LR, beta1=BETA1, beta2=BETA2, eps=EPS, weight_decay=DECAY,
             decays="parameters of 2 or more dims", clip_norm=CLIP,
             clip_scale="min(1, clip_norm / norm)", steps=STEPS)


def write_safetensors(path, tensors, metadata):
    header, blobs, offset = {"__metadata__": metadata}, [], 0
    for name, x in tensors.items():
        dtype = {torch.float32: "F32", torch.int32: "I32"}[x.dtype]
        blob = x.contiguous().numpy().tobytes()
        header[name] = {"dtype": dtype, "shape": list(x.shape),
                        "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path + ".part", "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))
    os.replace(path + ".part", path)  # who reads it meanwhile sees the old or the new, whole


# ---- GPT-2, with the names and the [in, out] matrices of Hugging Face

def gpt2_config():
    return dict(architectures=["GPT2LMHeadModel"], model_type="gpt2", vocab_size=97, n_positions=40,
                n_ctx=40, n_embd=24, n_layer=2, n_head=3, n_inner=None,
                activation_function="gelu_new", layer_norm_epsilon=1e-5, resid_pdrop=0.0,
                embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=True, torch_dtype="float32",
                bos_token_id=96, eos_token_id=96)


def gpt2_shapes(c):
    C = c["n_embd"]
    shapes = {"transformer.wte.weight": (c["vocab_size"], C),
              "transformer.wpe.weight": (c["n_positions"], C)}
    for l in range(c["n_layer"]):
        p = f"transformer.h.{l}."
        shapes.update({p + "ln_1.weight": (C,), p + "ln_1.bias": (C,),
                       p + "attn.c_attn.weight": (C, 3 * C), p + "attn.c_attn.bias": (3 * C,),
                       p + "attn.c_proj.weight": (C, C), p + "attn.c_proj.bias": (C,),
                       p + "ln_2.weight": (C,), p + "ln_2.bias": (C,),
                       p + "mlp.c_fc.weight": (C, 4 * C), p + "mlp.c_fc.bias": (4 * C,),
                       p + "mlp.c_proj.weight": (4 * C, C), p + "mlp.c_proj.bias": (C,)})
    shapes.update({"transformer.ln_f.weight": (C,), "transformer.ln_f.bias": (C,)})
    return shapes


def attention(q, k, v, window=None):  # (B, heads, T, HS)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    if window:
        hidden |= torch.ones_like(hidden).tril(-window)
    return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def gpt2_logits(w, tokens, c):
    C, NH = c["n_embd"], c["n_head"]
    split = lambda x: x.view(*x.shape[:2], NH, C // NH).transpose(1, 2)
    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][: tokens.shape[1]]
    for l in range(c["n_layer"]):
        p = f"transformer.h.{l}."
        norm = lambda x, n: F.layer_norm(x, (C,), w[p + n + ".weight"], w[p + n + ".bias"],
                                         c["layer_norm_epsilon"])
        linear = lambda x, n: x @ w[p + n + ".weight"] + w[p + n + ".bias"]
        q, k, v = linear(norm(x, "ln_1"), "attn.c_attn").split(C, -1)
        x = x + linear(attention(split(q), split(k), split(v)).transpose(1, 2).reshape(x.shape),
                       "attn.c_proj")
        u = linear(norm(x, "ln_2"), "mlp.c_fc")
        gelu = 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
        x = x + linear(gelu, "mlp.c_proj")
    x = F.layer_norm(x, (C,), w["transformer.ln_f.weight"], w["transformer.ln_f.bias"],
                     c["layer_norm_epsilon"])
    return x @ w["transformer.wte.weight"].T


# ---- Llama, Qwen2 and Qwen3

def llama_config(**more):
    c = dict(architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=101, hidden_size=32,
             intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, head_dim=8, max_position_embeddings=64, rms_norm_eps=1e-5,
             rope_theta=10000.0, hidden_act="silu", tie_word_embeddings=False, attention_bias=False,
             rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=1.0,
                               high_freq_factor=4.0, original_max_position_embeddings=16),
             torch_dtype="float32", bos_token_id=1, eos_token_id=2)
    c.update(more)
    return c


def qwen2_config():
    c = llama_config(architectures=["Qwen2ForCausalLM"], model_type="qwen2", vocab_size=89,
                     intermediate_size=48, tie_word_embeddings=True, rope_scaling=None,
                     use_sliding_window=False, sliding_window=None)
    # Qwen2 has neither: biases always, heads that fill the hidden size
    del c["attention_bias"], c["head_dim"]
    return c


def qwen3_config():
    # heads wider than C / NH, biases on q, k, v and o, and a window in the second block
    return llama_config(architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=83,
                        intermediate_size=40, head_dim=12, tie_word_embeddings=True,
                        attention_bias=True, rope_scaling=None, use_sliding_window=True,
                        sliding_window=10, max_window_layers=1)


def head_size(c):
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def llama_shapes(c):
    C, I = c["hidden_size"], c["intermediate_size"]
    HS = head_size(c)
    Q, KV = c["num_attention_heads"] * HS, c["num_key_value_heads"] * HS
    biased = c["model_type"] == "qwen2" or c["attention_bias"]
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], C)}
    for l in range(c["num_hidden_layers"]):
        p = f"model.layers.{l}."
        shapes[p + "input_layernorm.weight"] = (C,)
        for name, rows in (("q", Q), ("k", KV), ("v", KV)):
            shapes[p + f"self_attn.{name}_proj.weight"] = (rows, C)
            if biased:
                shapes[p + f"self_attn.{name}_proj.bias"] = (rows,)
        if c["model_type"] == "qwen3":
            shapes.update({p + f"self_attn.{name}_norm.weight": (HS,) for name in "qk"})
        if c.get("attention_bias"):
            shapes[p + "self_attn.o_proj.bias"] = (C,)
        shapes.update({p + "self_attn.o_proj.weight": (C, Q),
                       p + "post_attention_layernorm.weight": (C,),
                       p + "mlp.gate_proj.weight": (I, C), p + "mlp.up_proj.weight": (I, C),
                       p + "mlp.down_proj.weight": (C, I)})
    shapes["model.norm.weight"] = (C,)
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], C)
    return shapes


def rope_frequencies(c, HS):
    f = c["rope_theta"] ** (-torch.arange(0, HS, 2, dtype=torch.float64) / HS)
    s = c.get("rope_scaling")
    if not s:
        return f
    wavelength, original = 2 * math.pi / f, s["original_max_position_embeddings"]
    low, high = s["low_freq_factor"], s["high_freq_factor"]
    smooth = (original / wavelength - low) / (high - low)
    middle = (1 - smooth) * f / s["factor"] + smooth * f
    middle = torch.where(wavelength > original / low, f / s["factor"], middle)
    return torch.where(wavelength < original / high, f, middle)


def rotate(x, frequencies):  # (B, heads, T, HS): pairs (i, i + HS/2)
    angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * frequencies
    cos, sin = torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def llama_logits(w, tokens, c):
    C, NH, NKV = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
    HS = head_size(c)
    scale = lambda x: (x.pow(2).mean(-1, keepdim=True) + c["rms_norm_eps"]).rsqrt()
    norm = lambda x, weight: x * scale(x) * weight
    split = lambda x, heads: x.view(*x.shape[:2], heads, HS).transpose(1, 2)
    frequencies = rope_frequencies(c, HS)
    x = w["model.embed_tokens.weight"][tokens]
    for l in range(c["num_hidden_layers"]):
        p = f"model.layers.{l}."
        linear = lambda x, n: F.linear(x, w[p + n + ".weight"], w.get(p + n + ".bias"))
        h = norm(x, w[p + "input_layernorm.weight"])
        q, k, v = (split(linear(h, f"self_attn.{n}_proj"), heads)
                   for n, heads in (("q", NH), ("k", NKV), ("v", NKV)))
        if c["model_type"] == "qwen3":
            q, k = (norm(y, w[p + f"self_attn.{n}_norm.weight"]) for n, y in (("q", q), ("k", k)))
        q, k = rotate(q, frequencies), rotate(k, frequencies)
        k, v = (y.repeat_interleave(NH // NKV, 1) for y in (k, v))
        window = c.get("use_sliding_window") and l >= c["max_window_layers"] and c["sliding_window"]
        seen = attention(q, k, v, window).transpose(1, 2).flatten(2)
        x = x + linear(seen, "self_attn.o_proj")
        h = norm(x, w[p + "post_attention_layernorm.weight"])
        gated = F.silu(linear(h, "mlp.gate_proj")) * linear(h, "mlp.up_proj")
        x = x + linear(gated, "mlp.down_proj")
    head = w["model.embed_tokens.weight"] if c["tie_word_embeddings"] else w["lm_head.weight"]
    return norm(x, w["model.norm.weight"]) @ head.T


# ---- the numbers

def random_weights(shapes):
    w = {}
    for name, shape in shapes.items():
        norm = "norm.weight" in name or "ln_" in name and name.endswith("weight")
        w[name] = (torch.randn(shape) * 0.2 + (1.0 if norm else 0.0)).float()
    return w


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1).long(),
                           ignore_index=-100)


def clip_scale(grads):
    norm = torch.sqrt(sum(g.pow(2).sum() for g in grads))
    assert norm > CLIP, "clipping must be active"
    return norm, min(1.0, CLIP / norm.item())


def golden(weights, logits_of, tokens, targets):
    """All numbers of golden.safetensors, in float64."""
    w = {n: x.double().requires_grad_() for n, x in weights.items()}
    m, v = ({n: torch.zeros_like(x) for n, x in w.items()} for _ in range(2))
    out, losses = {"tokens": tokens.int(), "targets": targets.int()}, []
    for step in range(1, STEPS + 1):
        logits = logits_of(w, tokens)
        loss = cross_entropy(logits, targets)
        grads = dict(zip(w, torch.autograd.grad(loss, list(w.values()))))
        norm, scale = clip_scale(grads.values())
        losses.append(loss.detach().view(1))
        out[f"step.{step - 1}.loss"] = losses[-1]
        if step == 1:
            out.update({"logits": logits.detach(), "loss": losses[0], "grad_norm": norm.view(1)})
            out.update({"grad." + n: g for n, g in grads.items()})
        with torch.no_grad():
            for n, g in grads.items():
                m[n] = BETA1 * m[n] + (1 - BETA1) * g * scale
                v[n] = BETA2 * v[n] + (1 - BETA2) * (g * scale) ** 2
                step_size = (m[n] / (1 - BETA1**step)) / ((v[n] / (1 - BETA2**step)).sqrt() + EPS)
                w[n] -= LR * (step_size + (DECAY if w[n].dim() >= 2 else 0.0) * w[n])
    out["step_losses"] = torch.cat(losses)
    out.update({"after." + n: x.detach() for n, x in w.items()})
    return out


# ---- the same from transformers' models and torch's AdamW

def transformers_golden(folder, tokens, targets):
    """golden() again. The norms, softmax and rotary tables of transformers are float32 whatever the
    model's type; here the names torch.float32 and torch.float and the method float() mean float64 while
    its model is built and run, so that all is float64."""
    from transformers import AutoModelForCausalLM
    loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    loaded.config._experts_implementation = "eager"  # transformers 5 has products of groups, for floats alone
    with mock.patch.object(torch, "float32", torch.float64), \
         mock.patch.object(torch, "float", torch.float64), \
         mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        model = type(loaded)(loaded.config).double().eval()
        model.load_state_dict(loaded.state_dict())
        w = dict(model.named_parameters())
        decays = {n for n, x in w.items() if x.dim() >= 2 and not n.endswith("_bias")}  # biases of experts: (E,F)
        groups = [dict(params=[x for n, x in w.items() if n in decays], weight_decay=DECAY),
                  dict(params=[x for n, x in w.items() if n not in decays], weight_decay=0.0)]
        adamw, out = torch.optim.AdamW(groups, lr=LR, betas=(BETA1, BETA2), eps=EPS), {}
        for step in range(STEPS):
            adamw.zero_grad()
            logits = model(tokens.long()).logits
            loss = cross_entropy(logits, targets)
            loss.backward()
            out[f"step.{step}.loss"] = loss.detach().view(1)
            norm, scale = clip_scale([x.grad for x in w.values()])
            if step == 0:
                out.update({"logits": logits.detach(), "loss": loss.detach().view(1),
                            "grad_norm": norm.view(1)})
                out.update({"grad." + n: x.grad.clone() for n, x in w.items()})
            for x in w.values():
                x.grad *= scale
            adamw.step()
    out.update({"after." + n: x.detach() for n, x in w.items()})
    return out


def compare_with_transformers(folder, numbers, tokens, targets):
    try:
        import transformers
    except ImportError:
        return "transformers cannot be imported: not compared"
    if tuple(int(x) for x in transformers.__version__.split(".")[:2]) < (4, 51):
        return f"transformers {transformers.__version__} does not know Qwen3 (4.51 does): not compared"
    theirs = transformers_golden(folder, tokens, targets)
    assert set(theirs) == set(numbers) - {"tokens", "targets", "step_losses"}
    worst = {}  # kind of number: largest difference over the largest number
    for n, x in theirs.items():
        assert x.dtype == torch.float64, n
        kind = n.split(".")[0]
        # a key bias has a gradient of 0
        size = 1.0 if kind == "grad" else max(numbers[n].abs().max().item(), 1e-12)
        worst[kind] = max(worst.get(kind, 0.0), (x - numbers[n]).abs().max().item() / size)
    text = ", ".join(f"{kind} {x:.0e}" for kind, x in worst.items())
    assert max(worst.values()) < 1e-10, text
    return f"transformers {transformers.__version__} differs by {text}"


def main():
    for name, config, shapes_of, logits_of in (
            ("gpt2-tiny", gpt2_config(), gpt2_shapes, gpt2_logits),
            ("llama-tiny", llama_config(), llama_shapes, llama_logits),
            ("qwen2-tiny", qwen2_config(), llama_shapes, llama_logits),
            ("qwen3-tiny", qwen3_config(), llama_shapes, llama_logits)):
        folder = os.path.join(HERE, name)
        os.makedirs(folder, exist_ok=True)
        torch.manual_seed(1234)
        weights = random_weights(shapes_of(config))
        tokens = torch.randint(config["vocab_size"], (B, T + 1))
        targets = tokens[:, 1:].clone()
        for row in range(B):  # a different number of ignored targets in each row
            targets[row, torch.randperm(T)[: 2 + 5 * row]] = -100
        tokens = tokens[:, :-1]
        json.dump(config, open(os.path.join(folder, "config.json"), "w"), indent=1)
        write_safetensors(os.path.join(folder, "model.safetensors"), weights, {"format": "pt"})
        numbers = golden(weights, lambda w, t: logits_of(w, t.long(), config), tokens, targets)
        stored = {n: x if x.dtype == torch.int32 else x.float() for n, x in numbers.items()}
        write_safetensors(os.path.join(folder, "golden.safetensors"), stored,
                          {"made_by": "make_golden.py", "computed_in": "float64",
                           "adamw": json.dumps(ADAMW)})
        print(f"{name}: loss {numbers['loss'].item():.6f}, norm {numbers['grad_norm'].item():.4f};",
              compare_with_transformers(folder, numbers, tokens, targets))


if __name__ == "__main__":
    main()
