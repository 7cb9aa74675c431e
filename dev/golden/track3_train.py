#!/usr/bin/env python3
"""Make track3.json: sixty steps of track 3's recipe on a small model, as PyTorch trains them in float64.

usage: track3_train.py [adamw|muon|normuon]...     (needs torch alone; without a word: all, some minutes each)

The recipes are results 2, 36 and 10 of records/track_3_optimization in github.com/KellerJordan/modded-nanogpt: losses
are summed, eps is 1e-10, nothing is clipped. Smaller are the model (here), the batch, and the warm-up, of 10 steps for
AdamW's 250; larger is the decay of what Muon leaves to AdamW, so that sixty steps show it. The model's formulas are track3_golden.py's. Weights and tokens come from a hash of their place, so that a
test makes the same ones: an element i of parameter p is base + spread (2 hash(i + 2654435761 p) / 2^32 - 1).
"""
import json, os, sys
import torch
from make_golden import HERE
from track3_golden import BASE, logits_of, shapes_of

CONFIG = dict(BASE, architectures=["Track3ForCausalLM"], model_type="track3", vocab_size=256, hidden_size=128,
              intermediate_size=512, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=2, head_dim=64,
              max_position_embeddings=256, rope_theta=1024.0, final_logit_softcapping=15.0, rms_norm_eps=1.1920929e-07)
T, BATCH, STEPS, SHARD, VAL = 256, 8192, 60, 20 * 8192 + 3001, 16384  # a shard's last 3001 tokens make no step
FILE = os.path.join(HERE, "track3.json")

# Rates, decay and betas of matrices, then of the others: table, head, vectors.
RECIPES = {
    "adamw": dict(warmup=10, matrices=(0.0015, 0.1, (0.9, 0.95)), rates=(0.3, 1 / 320, 0.01), decay=0),
    "muon": dict(warmup=0, matrices=(0.025, 0.05, 0), rates=(0.7, 0.004, 0.015), decay=0.1),
    "normuon": dict(warmup=0, matrices=(0.035, 0.025, 0.95), rates=(0.3, 1 / 320, 0.01), decay=0)}


def hash32(x):  # MurmurHash3's last mixing, of numbers below 2^32
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = x ^ (x >> shift)
        low, high = x & 0xFFFF, x >> 16  # so that no product passes 2^63
        x = (low * factor + ((high * factor & 0xFFFF) << 16)) & 0xFFFFFFFF
    return x ^ (x >> 16)


def parameters():
    list_of = []
    for name, shape in shapes_of(CONFIG).items():
        c = shape[-1]
        drawn = len(shape) == 2 and not any(word in name for word in ("o_proj", "fc2", "lm_head"))
        std = 0 if not drawn else 1 if "embed" in name else (0.33 / c) ** 0.5
        gain = len(shape) == 1 and name.endswith("weight")
        list_of.append(dict(name=name, shape=shape, base=int(gain), spread=3**0.5 * std))
    return list_of


def weights():
    made = {}
    for number, p in enumerate(parameters()):
        n = torch.Size(p["shape"]).numel()
        u = hash32((torch.arange(n) + 2654435761 * number) & 0xFFFFFFFF).double() / 2**32
        made[p["name"]] = (p["base"] + p["spread"] * (2 * u - 1)).float().double().view(p["shape"])
    return made


def tokens(first, count):
    """Text whose next token hangs on the last one, on the fourth before it, and on chance."""
    chance = hash32(torch.arange(first, first + count)) % 4
    text = [1, 2, 3, 4]
    for c in chance.tolist():
        text.append((5 * text[-1] + 64 * (text[-4] % 2) + 3 * c + 7) % CONFIG["vocab_size"])
    return torch.tensor(text[4:])


def batches():
    """Shards one after the other; the rest that has no whole step is dropped."""
    for shard in range(10**6):
        text = tokens(shard * SHARD, SHARD)
        for at in range(0, SHARD - BATCH - 1, BATCH):
            yield text[at : at + BATCH].view(-1, T), text[at + 1 : at + BATCH + 1].view(-1, T)


def loss_sum(w, inputs, targets):
    return torch.nn.functional.cross_entropy(logits_of(w, inputs, CONFIG).flatten(0, 1), targets.flatten(),
                                             reduction="sum")


class Muon:
    """The matrices' rule. beta2: NorMuon's; 0: none."""

    def __init__(self, w, beta2):
        self.w, self.beta2, self.m, self.v = w, beta2, {n: 0 for n in w}, {n: 0 for n in w}

    @torch.no_grad()
    def step(self, lr, decay, mu=0.95):
        for name, p in self.w.items():
            self.m[name] = m = mu * self.m[name] + (1 - mu) * p.grad
            x = (1 - mu) * p.grad + mu * m
            rows, cols = x.shape
            x = x / (x.norm() + 1e-7)
            for _ in range(12):
                square = x @ x.T
                x = 2 * x - 1.5 * square @ x + 0.5 * square @ square @ x
            x = x * max(1, rows / cols) ** 0.5
            if self.beta2:
                norm = x.norm()
                self.v[name] = v = self.beta2 * self.v[name] + (1 - self.beta2) * x.square().mean(
                    1 if rows >= cols else 0, keepdim=True)
                x = x / v.clamp(min=1e-10).sqrt()
                x = x * norm / x.norm().clamp(min=1e-10)
            p.mul_(1 - lr * decay).sub_(lr * x)


def train(recipe):
    w = {name: x.requires_grad_() for name, x in weights().items()}
    block = [n for n, x in w.items() if x.dim() == 2 and "layers" in n]
    groups = ["model.embed_tokens.weight"], ["lm_head.weight"], [n for n, x in w.items() if x.dim() == 1]
    others = torch.optim.AdamW([dict(params=[w[n] for n in names]) for names in groups], betas=(0.8, 0.95), eps=1e-10,
                               weight_decay=recipe["decay"])
    lr, decay, more = recipe["matrices"]
    adamw = isinstance(more, tuple)
    matrices = [w[n] for n in block]
    rule = torch.optim.AdamW(matrices, betas=more, eps=1e-10, weight_decay=decay) if adamw else Muon(
        {n: w[n] for n in block}, more)
    text = tokens(10**7, VAL + 1)
    losses, validations, data = [], {}, batches()
    for step in range(STEPS + 1):
        if step % 20 == 0:
            with torch.no_grad():
                validations[step] = loss_sum(w, text[:-1].view(-1, T), text[1:].view(-1, T)).item() / VAL
        if step == STEPS:
            return losses, validations
        loss = loss_sum(w, *next(data))
        loss.backward()
        losses.append(loss.item() / BATCH)
        eta = min(1, (1 - step / STEPS) / 0.7) if step / STEPS >= 0.3 else 1
        eta *= min(1, (step + 1) / recipe["warmup"]) if recipe["warmup"] else 1
        for group, rate in zip(others.param_groups, recipe["rates"]):
            group["lr"] = rate * eta
        others.step()
        if adamw:
            rule.param_groups[0]["lr"] = lr * eta
            rule.step()
        else:
            rule.step(lr * eta, decay)
        for x in w.values():
            x.grad = None
        print(step, losses[-1], flush=True)


def main():
    golden = json.load(open(FILE)) if os.path.exists(FILE) else {}
    golden.update(made_by="track3_train.py, in float64", config=CONFIG, seq=T, batch_tokens=BATCH, shard_tokens=SHARD,
                  val_tokens=VAL, parameters=parameters())
    for name in sys.argv[1:] or RECIPES:
        losses, validations = train(RECIPES[name])
        golden[name] = dict(losses=losses, val=validations)
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items()]
    open(FILE, "w").write("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
