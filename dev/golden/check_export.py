#!/usr/bin/env python3
"""Load an exported Hugging Face folder with transformers: does it speak, and like another folder?

usage: check_export.py FOLDER [--tokens 1,2,3] [--greedy 16] [--same-as FOLDER [--tolerance 1e-5]]

Prints the greedy continuation of the tokens. With --same-as also the largest difference of the
logits, over the largest logit; the exit status is 1 above the tolerance, and whenever a tensor is
missing, unknown or of another shape.
"""
import argparse, sys
import torch
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--tokens", default="1,2,3")
parser.add_argument("--greedy", type=int, default=16)
parser.add_argument("--same-as")
parser.add_argument("--tolerance", type=float, default=1e-5)
arguments = parser.parse_args()


def load(folder):
    # transformers only warns about these, and fills what is missing with random numbers
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
    if wrong:
        sys.exit(f"{folder}: {wrong}")
    return model.float().eval()


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens).logits


tokens = torch.tensor([[int(t) for t in arguments.tokens.split(",")]])
model, grown = load(arguments.folder), tokens
# no generate(): it may stop at an end token and read settings of its own
for _ in range(arguments.greedy):
    grown = torch.cat([grown, logits(model, grown)[:, -1:].argmax(-1)], 1)
print("greedy:", ",".join(map(str, grown[0].tolist())))
if arguments.same_as:
    a, b = logits(model, tokens), logits(load(arguments.same_as), tokens)
    if a.shape != b.shape:
        sys.exit(f"logits {list(a.shape)} against {list(b.shape)}")
    difference = ((a - b).abs().max() / b.abs().max()).item()
    print(f"largest difference of logits: {difference:.1e} of the largest")
    sys.exit(not difference <= arguments.tolerance)  # `not <=`: NaN fails too
