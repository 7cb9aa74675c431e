#!/usr/bin/env python3
"""Make the golden prefixes: folders as PEFT saves them beside gpt2-tiny and llama-tiny, and PEFT's own numbers in float64.

usage: prefix_golden.py     (needs torch, transformers and peft; made with the versions that golden.json names)

The tensor holds v[i] = 0.5 sin(0.7 i + 1), rounded to float. golden.json: the loss on the base folder's golden tokens,
the gradient's norm, and the gradient of single elements [row, column]: keys and values of each layer.
"""
import json, math, os
from unittest import mock
import peft, torch, transformers
from peft import PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from make_golden import cross_entropy

HERE = os.path.dirname(os.path.abspath(__file__))
SINGLE = torch.float32
CASES = {"prefix-gpt2-tiny": ("gpt2-tiny", 5), "prefix-llama-tiny": ("llama-tiny", 3)}


def with_prefix(model, base, n, numbers):
    """The model behind a prefix of n tokens with these numbers, and the prefix's parameter."""
    config = PrefixTuningConfig(task_type="CAUSAL_LM", base_model_name_or_path=base, num_virtual_tokens=n)
    model = get_peft_model(model, config, autocast_adapter_dtype=False)
    (p,) = [p for p in model.parameters() if p.requires_grad]
    values = [0.5 * math.sin(0.7 * i + 1) for i in range(p.numel())]
    p.data = numbers(torch.tensor(values, dtype=torch.float64)).view(p.shape)
    return model, p


def main():
    single = lambda x: x.to(SINGLE)
    for name, (base, n) in CASES.items():
        folder = os.path.join(HERE, name)
        loaded = AutoModelForCausalLM.from_pretrained(os.path.join(HERE, base), attn_implementation="eager")
        state = {k: x.clone() for k, x in loaded.state_dict().items()}
        model, _ = with_prefix(loaded, base, n, single)
        model.peft_config["default"].base_model_name_or_path = base
        model.save_pretrained(folder)
        os.remove(os.path.join(folder, "README.md"))

        # All in double, as make_golden.py does it: norms, softmax and rotary tables too.
        golden = load_file(os.path.join(HERE, base, "golden.safetensors"))
        tokens, targets = golden["tokens"].long().view(3, -1), golden["targets"].long().view(3, -1)
        with mock.patch.object(torch, "float32", torch.float64), mock.patch.object(torch, "float", torch.float64), \
             mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
            double = type(loaded)(loaded.config).double().eval()
            double.load_state_dict(state)
            double, p = with_prefix(double, base, n, lambda x: single(x).double())
            logits = double(input_ids=tokens).logits
            assert logits.dtype == torch.float64
            loss = cross_entropy(logits, targets)
            loss.backward()
        half = p.shape[1] // (2 * loaded.config.num_hidden_layers)
        places = [(n - 1, k * half + 1) for k in range(p.shape[1] // half)]
        with open(os.path.join(folder, "golden.json"), "w") as out:
            json.dump({"versions": f"torch {torch.__version__}, transformers {transformers.__version__}, "
                                   f"peft {peft.__version__}",
                       "loss": loss.item(), "norm": p.grad.norm().item(),
                       "gradients": [[*at, p.grad[at].item()] for at in places]}, out, indent=1)
            out.write("\n")
        print(name, loss.item(), p.grad.norm().item())


if __name__ == "__main__":
    main()
