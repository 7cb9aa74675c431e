#!/usr/bin/env python3
"""Make gpt-oss-mxfp4-tiny: a gpt-oss whose experts are in MXFP4, as published files have them, and transformers' loss.

usage: mxfp4_golden.py     (needs torch and transformers 4.55 or later)

Codes are random: all of E2M1's, and scales of several sizes. transformers' own function expands them, and its model
computes the loss in float64 from the result.
"""
import json, os, shutil, tempfile
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from make_golden import HERE, transformers_golden, write_safetensors

CONFIG = dict(model_type="gpt_oss", architectures=["GptOssForCausalLM"], vocab_size=61, hidden_size=64,
              intermediate_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
              num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=64, sliding_window=6,
              torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2, pad_token_id=None)
QUANTIZATION = dict(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                                  "model.embed_tokens", "lm_head"])


def main():
    torch.manual_seed(7)
    folder = os.path.join(HERE, "gpt-oss-mxfp4-tiny")
    os.makedirs(folder, exist_ok=True)
    json.dump(CONFIG, open(os.path.join(folder, "config.json"), "w"), indent=1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    packed, values = {}, {}
    for name, x in model.named_parameters():
        if not name.endswith("_proj"):  # not an expert's matrix
            values[name] = (torch.randn(x.shape) * 0.2 + (1.0 if "norm" in name else 0.0)).bfloat16()
            packed[name] = values[name]
            continue
        experts, inputs, outputs = x.shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16)).to(torch.uint8)
        scales = torch.randint(121, 125, (experts, outputs, inputs // 32)).to(torch.uint8)
        packed[name + "_blocks"], packed[name + "_scales"] = blocks, scales
        values[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16).contiguous()
        assert values[name].shape == x.shape

    # the loss of three rows, from a folder of plain numbers
    tokens = torch.randint(CONFIG["vocab_size"], (3, 25))
    with tempfile.TemporaryDirectory() as plain:
        shutil.copy(os.path.join(folder, "config.json"), plain)
        write_safetensors(os.path.join(plain, "model.safetensors"), {n: x.float() for n, x in values.items()},
                          {"format": "pt"})
        numbers = transformers_golden(plain, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    save_file(packed, os.path.join(folder, "model.safetensors"), {"format": "pt"})
    json.dump(dict(CONFIG, quantization_config=QUANTIZATION), open(os.path.join(folder, "config.json"), "w"), indent=1)
    json.dump(dict(tokens=tokens.tolist(), loss=numbers["loss"].item()),
              open(os.path.join(folder, "golden.json"), "w"), indent=1)
    print("loss", numbers["loss"].item())


main()
