#!/usr/bin/env python3
"""Make track3-tiny, nanochat-tiny and nanochat_values-tiny: small models of modded-nanogpt's track 3 and of nanochat,
and what PyTorch says.

usage: track3_golden.py     (needs torch alone)

Track 3's formulas are those of records/track_3_optimization in github.com/KellerJordan/modded-nanogpt, nanochat's those
of the class NanoChatForCausalLM in transformers 5, in this file's own words: rotations are complex numbers here, and
turn pairs by minus the angle. nanochat norms q and k after they are turned. The files are make_golden.py's.
nanochat_values has the residual scalars and value embeddings of nanochat/gpt.py in github.com/karpathy/nanochat.
"""
import json, os
import torch
from make_golden import ADAMW, B, HERE, T, attention, golden, random_weights, write_safetensors

BASE = dict(vocab_size=53, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
            max_position_embeddings=64, rope_theta=30.0, tie_word_embeddings=False, final_logit_softcapping=2.0,
            hidden_act="relu2", torch_dtype="float32", bos_token_id=1, eos_token_id=2)
CONFIGS = [
    dict(BASE, architectures=["Track3ForCausalLM"], model_type="track3", num_key_value_heads=4, head_dim=12,
         rms_norm_eps=1.1920929e-07),
    dict(BASE, architectures=["NanoChatForCausalLM"], model_type="nanochat", num_key_value_heads=2, rms_norm_eps=1e-6),
    dict(BASE, architectures=["NanoChatValuesForCausalLM"], model_type="nanochat_values", num_key_value_heads=2,
         rms_norm_eps=1e-6, residual_scalars=True, value_embeddings=True)]
GATE_CHANNELS = 12  # of a value embedding
SCORE_SCALE = 0.12  # of track 3


def is_track3(c):
    return c["model_type"] == "track3"


def has_values(c, l):  # the last block, and every other one before it
    return bool(c.get("value_embeddings")) and (c["num_hidden_layers"] - 1 - l) % 2 == 0


def head_size(c):
    return c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]


def shapes_of(c):
    C, F, V, HS = c["hidden_size"], c["intermediate_size"], c["vocab_size"], head_size(c)
    Q, KV = c["num_attention_heads"] * HS, c["num_key_value_heads"] * HS
    linears, norms = {}, ["model.layers.0.embed_norm", "model.norm"]
    for l in range(c["num_hidden_layers"]):
        p = f"model.layers.{l}."
        linears.update({f"{p}self_attn.{n}_proj": (rows, C) for n, rows in (("q", Q), ("k", KV), ("v", KV))})
        linears.update({p + "self_attn.o_proj": (C, Q), p + "mlp.fc1": (F, C), p + "mlp.fc2": (C, F)})
        norms += [p + "input_layernorm", p + "post_attention_layernorm"]
    linears["lm_head"] = (V, C)
    shapes = {"model.embed_tokens.weight": (V, C)}
    shapes.update({name + ".weight": shape for name, shape in linears.items()})
    if is_track3(c):  # nanochat has neither
        shapes.update({name + ".bias": shape[:1] for name, shape in linears.items()})
        shapes.update({name + ".weight": (C,) for name in norms})
    for l in range(c["num_hidden_layers"]):
        p = f"model.layers.{l}."
        if c.get("residual_scalars"):
            shapes.update({p + "resid_lambda": (1,), p + "x0_lambda": (1,)})
        if has_values(c, l):
            shapes.update({p + "value_embed.weight": (V, KV), p + "self_attn.ve_gate.weight":
                           (c["num_key_value_heads"], GATE_CHANNELS)})
    return shapes


def turned(x, c):  # (B, heads, T, HS)
    half = x.shape[-1] // 2
    pairs = half // 2 if is_track3(c) else half  # of track 3 the second half of the pairs stays
    steps = torch.arange(pairs, dtype=torch.float64) / (pairs - 1 if is_track3(c) else pairs)
    w = torch.zeros(half, dtype=torch.float64)
    w[:pairs] = c["rope_theta"] ** -steps
    angle = -torch.arange(x.shape[2], dtype=torch.float64)[:, None] * w
    z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1)


def logits_of(w, tokens, c):
    unit = lambda x: x / (x.square().mean(-1, keepdim=True) + c["rms_norm_eps"]).sqrt()
    norm = lambda x, name: unit(x) * w.get(name + ".weight", 1)
    linear = lambda x, name: x @ w[name + ".weight"].T + w.get(name + ".bias", 0)
    HS, cap = head_size(c), c["final_logit_softcapping"]
    x = x0 = norm(w["model.embed_tokens.weight"][tokens], "model.layers.0.embed_norm")
    for l in range(c["num_hidden_layers"]):
        p = f"model.layers.{l}."
        x = w.get(p + "resid_lambda", 1) * x + w.get(p + "x0_lambda", 0) * x0
        h = norm(x, p + "input_layernorm")
        q, k, v = (linear(h, f"{p}self_attn.{n}_proj").unflatten(-1, (-1, HS)).transpose(1, 2) for n in "qkv")
        if has_values(c, l):
            gate = 3 * (h[..., :GATE_CHANNELS] @ w[p + "self_attn.ve_gate.weight"].T).sigmoid()
            table = w[p + "value_embed.weight"][tokens].unflatten(-1, (-1, HS))
            v = v + (gate[..., None] * table).transpose(1, 2)
        q, k = (turned(unit(y), c) if is_track3(c) else unit(turned(y, c)) for y in (q, k))
        k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (k, v))
        if is_track3(c):
            q = q * (SCORE_SCALE * HS**0.5)  # attention() divides by the root of HS
        x = x + linear(attention(q, k, v).transpose(1, 2).flatten(2), p + "self_attn.o_proj")
        h = linear(norm(x, p + "post_attention_layernorm"), p + "mlp.fc1")
        x = x + linear(h.relu().square(), p + "mlp.fc2")
    y = linear(norm(x, "model.norm"), "lm_head")
    return cap * y / (y.square() + cap**2).sqrt() if is_track3(c) else cap * torch.tanh(y / cap)


def main():
    for config in CONFIGS:
        folder = os.path.join(HERE, config["model_type"] + "-tiny")
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
                          {"made_by": "track3_golden.py", "computed_in": "float64", "adamw": json.dumps(ADAMW)})
        # All digits, for golden.safetensors has float32's.
        print(f"{config['model_type']}: loss {numbers['loss'].item():.16g}, norm {numbers['grad_norm'].item():.16g},",
              f"largest logit {numbers['logits'].abs().max():.3f}")


if __name__ == "__main__":
    main()
