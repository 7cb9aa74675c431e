#!/usr/bin/env python3
"""Make the golden DoRA and (IA)3 adapters: folders as PEFT saves them, and the logits of PEFT's own merge in float64.

usage: peft_merged_golden.py     (needs torch, transformers and peft; made with the versions that golden.json names)

Numbers are 0.1 sin(0.7 i + phi), phi 1 for A and 2 for B; DoRA's magnitudes are the base's norms times 1 + 0.3 sin(0.7 i);
(IA)3's factors are 1 + 0.5 sin(0.7 i + 1). golden.json, for the base folder's first row of golden tokens: the logits
behind its last token, of the model with the adapter beside it ("beside") and of merged weights rounded to float ("merged").
"""
import json, os
os.environ["HF_HUB_OFFLINE"] = "1"  # a base is a name here, not a repository
from unittest import mock
import peft, torch, transformers
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
SINGLE = torch.float32
DORA = dict(use_dora=True)
CASES = {
    "dora-gpt2-tiny": ("gpt2-tiny", LoraConfig, dict(r=3, lora_alpha=6, target_modules=["c_attn", "mlp.c_proj"],
                                                    fan_in_fan_out=True, **DORA)),
    "dora-llama-tiny": ("llama-tiny", LoraConfig, dict(r=4, lora_alpha=10, target_modules=["k_proj", "o_proj", "up_proj"],
                                                      use_rslora=True, alpha_pattern={"layers.1.mlp.up_proj": 3}, **DORA)),
    "ia3-gpt2-tiny": ("gpt2-tiny", IA3Config, dict(target_modules=["c_attn", "mlp.c_proj"],
                                                  feedforward_modules=["mlp.c_proj"], fan_in_fan_out=True)),
    "ia3-llama-tiny": ("llama-tiny", IA3Config, dict(target_modules=["k_proj", "v_proj", "down_proj"],
                                                    feedforward_modules=["down_proj"])),
}


def numbers(name, p):
    """The golden numbers of one trained tensor, rounded to float."""
    i = 0.7 * torch.arange(p.numel(), dtype=torch.float64)
    if "magnitude" in name:
        values = p.detach().double().flatten() * (1 + 0.3 * torch.sin(i))
    elif "ia3_l" in name:
        values = 1 + 0.5 * torch.sin(i + 1)
    else:
        values = 0.1 * torch.sin(i + (1 if "lora_A" in name else 2))
    return values.to(SINGLE).view(p.shape)


def adapt(model, base, kind, config):
    """The model with an adapter of the golden numbers."""
    config = kind(task_type="CAUSAL_LM", base_model_name_or_path=base, **config)
    model = get_peft_model(model, config, autocast_adapter_dtype=False)
    for n, p in model.named_parameters():
        if p.requires_grad:
            p.data = numbers(n, p).to(p.dtype)
    return model.eval()


def main():
    for name, (base, kind, config) in CASES.items():
        folder = os.path.join(HERE, name)
        loaded = AutoModelForCausalLM.from_pretrained(os.path.join(HERE, base), attn_implementation="eager")
        state = {n: x.clone() for n, x in loaded.state_dict().items()}
        model = adapt(loaded, base, kind, config)
        model.peft_config["default"].base_model_name_or_path = base
        model.save_pretrained(folder)
        os.remove(os.path.join(folder, "README.md"))
        saved = load_file(os.path.join(folder, "adapter_model.safetensors"))

        # All in double, with the saved numbers: norms, softmax and rotary tables too.
        tokens = load_file(os.path.join(HERE, base, "golden.safetensors"))["tokens"].long().view(3, -1)[:1]
        with mock.patch.object(torch, "float32", torch.float64), mock.patch.object(torch, "float", torch.float64), \
             mock.patch.object(torch.Tensor, "float", torch.Tensor.double), torch.no_grad():
            double = type(loaded)(loaded.config).double().eval()
            double.load_state_dict(state)
            double = adapt(double, base, kind, config)
            for n, p in double.named_parameters():
                if p.requires_grad:
                    p.copy_(saved[n.replace(".default.weight", ".weight" if "lora_A" in n or "lora_B" in n else "")
                                  .replace(".default", "")].double())
            beside = double(input_ids=tokens).logits[0, -1]
            merged = double.merge_and_unload()
            for p in merged.parameters():
                p.copy_(p.to(SINGLE).double())
            after = merged(input_ids=tokens).logits[0, -1]
            assert beside.dtype == after.dtype == torch.float64
        with open(os.path.join(folder, "golden.json"), "w") as out:
            json.dump({"versions": f"torch {torch.__version__}, transformers {transformers.__version__}, "
                                   f"peft {peft.__version__}",
                       "beside": beside.tolist(), "merged": after.tolist()}, out, indent=1)
            out.write("\n")
        print(name, sorted(saved)[:3], (beside - after).abs().max().item(), after.abs().max().item())


main()
