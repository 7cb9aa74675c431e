#!/usr/bin/env python3
"""Load an exported Hugging Face folder with transformers: does it speak, and like another folder?

usage: check_export.py FOLDER [--tokens 1,2,3] [--greedy 16] [--same-as FOLDER]
"""
import argparse
import torch
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--tokens", default="1,2,3")
parser.add_argument("--greedy", type=int, default=16)
parser.add_argument("--same-as")
arguments = parser.parse_args()

tokens = torch.tensor([[int(t) for t in arguments.tokens.split(",")]])
model = AutoModelForCausalLM.from_pretrained(arguments.folder).float().eval()
with torch.no_grad():
    print("greedy:", model.generate(tokens, max_new_tokens=arguments.greedy, do_sample=False)[0].tolist())
    if arguments.same_as:
        other = AutoModelForCausalLM.from_pretrained(arguments.same_as).float().eval()
        print("largest difference of logits:", (model(tokens).logits - other(tokens).logits).abs().max().item())
