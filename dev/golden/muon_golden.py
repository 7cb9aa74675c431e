#!/usr/bin/env python3
"""Make muon.json: matrices after three steps of torch.optim.Muon, and of its relatives on it, in float64.

usage: muon_golden.py     (needs torch 2.9 or later; made with the version that muon.json names)

torch's own Newton-Schulz runs in float64 where it names bf16. NorMuon stands behind it as modded-nanogpt has it: one
number for each row or column of the longer side; MuonEq before it and Muon+ behind as in arXiv:2603.28254 and 2602.21545.
Settings are exact in float; numbers() gives the test the same matrices.
"""
import json, os
from unittest import mock
import torch
from torch.optim import _muon

COMMON = {"lr": 0.03125, "momentum": 0.9375, "decay": 0.125, "nesterov": True, "scale": "shape", "normuon": 0}
CASES = [((5, 5), {}), ((7, 3), {}), ((4, 9), {"scale": "rms"}), ((7, 3), {"scale": "rms", "nesterov": False}),
         ((2, 11), {"decay": 0}), ((4, 9), {"scale": "unit", "nesterov": False}), ((5, 5), {"normuon": 0.875}),
         ((7, 3), {"normuon": 0.875, "scale": "rms"}), ((4, 9), {"normuon": 0.75}),
         ((7, 3), {"muoneq": True}), ((4, 9), {"muoneq": True, "first row": 2**-24}), ((7, 3), {"muon+": True, "scale": "rms"}),
         ((4, 9), {"muoneq": True, "muon+": True, "normuon": 0.75, "scale": "unit"})]
SCALES = {"shape": "original", "rms": "match_rms_adamw", "unit": "spectral_unclamped"}


def numbers(rows, cols, step):
    """Multiples of 1/1024 below 1: the weights of step 0, the gradients of later ones."""
    i = torch.arange(rows * cols)
    return (((i * i * 37 + i * 101 + step * 7919) % 2039 - 1019).double() / 1024).reshape(rows, cols)


def relatives(case, newton_schulz):
    second = [0]

    def orthogonalise(u, *settings):
        if case.get("muoneq"):
            u = u * (u.norm() / len(u)**.5 / u.norm(dim=1, keepdim=True).clamp(min=1e-6))
        x = newton_schulz(u, *settings)
        if case.get("muon+"):
            x = x * (min(x.shape)**.5 / x.norm())
        if not case["normuon"]:
            return x
        mean = x.square().mean(dim=-1 if u.size(0) >= u.size(1) else -2, keepdim=True)
        second[0] = case["normuon"] * second[0] + (1 - case["normuon"]) * mean
        y = x / second[0].clamp(min=1e-10).sqrt()
        return y * (x.norm() / y.norm())
    return orthogonalise


cases = []
for shape, changed in CASES:
    case = {"rows": shape[0], "cols": shape[1]} | COMMON | changed
    weight = torch.nn.Parameter(numbers(*shape, 0))
    muon = torch.optim.Muon([weight], lr=case["lr"], weight_decay=case["decay"], momentum=case["momentum"],
                            nesterov=case["nesterov"], adjust_lr_fn=SCALES[case["scale"]])
    with mock.patch.object(torch, "bfloat16", torch.float64), \
            mock.patch.object(_muon, "_zeropower_via_newtonschulz", relatives(case, _muon._zeropower_via_newtonschulz)):
        for step in (1, 2, 3):
            weight.grad = numbers(*shape, step)
            weight.grad[0] *= case.get("first row", 1)
            muon.step()
    cases.append(case | {"weights": weight.flatten().tolist()})
with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "muon.json"), "w") as file:
    file.write("{\"torch\": \"%s\", \"cases\": [\n%s\n]}\n" %
               (torch.__version__, ",\n".join(json.dumps(case) for case in cases)))
