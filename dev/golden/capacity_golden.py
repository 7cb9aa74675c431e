#!/usr/bin/env python3
"""Make capacity.json: experts with a capacity, by the dense formula on transformers' models in float64.

usage: capacity_golden.py     (needs torch and transformers; the folders of family_golden.py stand beside it)

Every expert computes every token. A table of gates (tokens, experts) is zero where an expert was not chosen, or where
a running count of its choices, along each sequence, has passed the capacity. Autograd does the rest.
"""
import json, math, os, re
from unittest import mock
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
CASES = {"mixtral-tiny": 0.75, "olmoe-tiny": 1.25}


def with_capacity(block, factor, renormalise, total):
    def forward(x):  # (B,T,C)
        E, K = len(block.experts), block.top_k
        logits = block.gate(x)
        p = logits.softmax(-1)
        chosen = torch.zeros_like(p).scatter(-1, p.topk(K).indices, 1.0)  # (B,T,E)
        gates = p * chosen
        if renormalise:
            gates = gates / gates.sum(-1, keepdim=True)
        room = math.ceil(factor * K * x.shape[1] / E)
        kept = chosen * (chosen.cumsum(1) <= room)
        total["chosen"] += chosen.sum().item()
        total["dropped"] += (chosen - kept).sum().item()
        out = sum((gates * kept)[..., e : e + 1] * expert(x) for e, expert in enumerate(block.experts))
        return out, logits.flatten(0, 1)
    return forward


def compute(name, factor, text, loaded):
    model = type(loaded)(loaded.config).double()
    model.load_state_dict(loaded.state_dict())
    total = dict(chosen=0, dropped=0)
    for layer in model.model.layers:
        block = getattr(layer, "block_sparse_moe", None) or layer.mlp
        block.forward = with_capacity(block, factor, getattr(block, "norm_topk_prob", True), total)

    # The mean loss of valid targets, and the sum of each matrix's squared gradients, experts together.
    logits = model(text["tokens"].view(3, -1).long()).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text["targets"].flatten().long())
    loss.backward()
    squares = {}
    for n, p in model.named_parameters():
        n = re.sub(r"experts\.\d+", "experts.{}", n)
        squares[n] = squares.get(n, 0) + p.grad.square().sum().item()
    print(f"{name}: loss {loss.item():.6f}, dropped {total['dropped'] / total['chosen']:.3f}")
    return dict(factor=factor, loss=loss.item(), dropped=total["dropped"] / total["chosen"], squares=squares)


def main():
    golden = {}
    for name, factor in CASES.items():
        folder = os.path.join(HERE, name)
        text = load_file(os.path.join(folder, "golden.safetensors"))
        loaded = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
        # Norms, softmax and rotary tables of transformers are float32 whatever the model's type (make_golden.py).
        with mock.patch.object(torch, "float32", torch.float64), mock.patch.object(torch, "float", torch.float64), \
             mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
            golden[name] = compute(name, factor, text, loaded)
    json.dump(golden, open(os.path.join(HERE, "capacity.json"), "w"), indent=1)


main()
