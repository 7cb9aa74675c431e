#!/usr/bin/env python3
"""Make the golden adapters: folders as PEFT saves them beside tiny bases, and what PEFT says in float64.

usage: peft_golden.py [NAME..]     (needs torch, transformers and peft; made with the versions that golden.json names)

A and B hold v[i] = 0.1 sin(0.7 i + phi), rounded to float, phi 1 for A and 2 for B, and more by an expert's number.
golden.json: the loss on the base folder's golden tokens, gradients' norms, each gradient's first element.
"""
import json, math, os, re, sys
from unittest import mock
import peft, torch, transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from make_golden import cross_entropy

HERE = os.path.dirname(os.path.abspath(__file__))
SINGLE = torch.float32
CASES = {
    "lora-gpt2-tiny": ("gpt2-tiny", dict(r=3, lora_alpha=6, target_modules=["c_attn", "mlp.c_proj"], fan_in_fan_out=True)),
    "lora-llama-tiny": ("llama-tiny", dict(r=4, lora_alpha=10, target_modules="all-linear", use_rslora=True,
                                           rank_pattern={"k_proj": 2}, alpha_pattern={"layers.1.mlp.up_proj": 3})),
    "lora-upper-llama-tiny": ("llama-tiny", dict(r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"],
                                                 layers_to_transform=[1])),
    # Experts are modules of their own in transformers before 5. Each has an adapter.
    "lora-mixtral-tiny": ("mixtral-tiny", dict(r=2, lora_alpha=5, target_modules=["q_proj", "w1", "w2", "w3"],
                                               rank_pattern={"w2": 3})),
    "lora-qwen2-moe-tiny": ("qwen2-moe-tiny", dict(r=3, lora_alpha=4, use_rslora=True,
                                                   target_modules=["gate_proj", "down_proj"])),
}


def adapt(model, base, config, numbers):
    """The model with adapters of these numbers, and their parameters."""
    config = LoraConfig(task_type="CAUSAL_LM", base_model_name_or_path=base, **config)
    model = get_peft_model(model, config, autocast_adapter_dtype=False)
    adapters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for n, p in adapters.items():
        expert = re.search(r"experts\.(\d+)\.", n)
        phi = (1 if "lora_A" in n else 2) + int(expert[1] if expert else 0)
        values = [0.1 * math.sin(0.7 * i + phi) for i in range(p.numel())]
        p.data = numbers(torch.tensor(values, dtype=torch.float64)).view(p.shape)
    return model, adapters


def main():
    single = lambda x: x.to(SINGLE)
    for name in sys.argv[1:] or CASES:
        base, config = CASES[name]
        folder = os.path.join(HERE, name)
        loaded = AutoModelForCausalLM.from_pretrained(os.path.join(HERE, base), attn_implementation="eager")
        state = {n: x.clone() for n, x in loaded.state_dict().items()}
        model, _ = adapt(loaded, base, config, single)
        model.peft_config["default"].base_model_name_or_path = base
        model.save_pretrained(folder)
        os.remove(os.path.join(folder, "README.md"))

        # All in double, as make_golden.py does it: norms, softmax and rotary tables too.
        golden = load_file(os.path.join(HERE, base, "golden.safetensors"))
        tokens, targets = golden["tokens"].long().view(3, -1), golden["targets"].long().view(3, -1)
        with mock.patch.object(torch, "float32", torch.float64), mock.patch.object(torch, "float", torch.float64), \
             mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
            torch.set_default_dtype(torch.float64)  # older versions make their rotary tables in the default type
            double = type(loaded)(loaded.config).double().eval()
            torch.set_default_dtype(SINGLE)
            double.load_state_dict(state)
            double, adapters = adapt(double, base, config, lambda x: single(x).double())
            logits = double(input_ids=tokens).logits
            assert logits.dtype == torch.float64
            loss = cross_entropy(logits, targets)
            loss.backward()
        norm = lambda half: math.sqrt(sum(float((p.grad**2).sum()) for n, p in adapters.items() if half in n))
        with open(os.path.join(folder, "golden.json"), "w") as out:
            json.dump({"versions": f"torch {torch.__version__}, transformers {transformers.__version__}, "
                                   f"peft {peft.__version__}",
                       "loss": loss.item(), "norm_A": norm("lora_A"), "norm_B": norm("lora_B"),
                       "first": {n.replace(".default", ""): p.grad.flatten()[0].item() for n, p in adapters.items()}},
                      out, indent=1)
            out.write("\n")
        print(name, loss.item(), norm("lora_A"), norm("lora_B"))


if __name__ == "__main__":
    main()
