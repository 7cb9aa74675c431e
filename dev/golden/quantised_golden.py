#!/usr/bin/env python3
"""Make the golden folders of GPTQ and AWQ: their own pack functions write the codes, transformers says the loss.

usage: quantised_golden.py AUTO_GPTQ AUTO_AWQ     the unpacked packages auto-gptq 0.7.1 and autoawq 0.2.9
       (pip download --no-deps, then unzip or tar; only one file of each is imported) (needs torch and transformers)

Codes q, zero points z and scales s are drawn. Each matrix is w[o,i] = (q - z) s, which float holds exactly, as s has 11
bits. The library packs w with its own pack function. golden.json has the CRC-32 of each matrix's float32 bytes, as
[out, in], and the loss in float64 of transformers' model with these matrices.
"""
import importlib.util, json, os, sys, types, zlib
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = dict(model_type="llama", architectures=["LlamaForCausalLM"], vocab_size=61, hidden_size=32,
             intermediate_size=160, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
             max_position_embeddings=32, rms_norm_eps=1e-5, rope_theta=100.0, tie_word_embeddings=False)
GPTQ = dict(quant_method="gptq", bits=4, damp_percent=0.01)
# The last group of 160 inputs is a short one where groups have 128.
FOLDERS = {
    "gptq-tiny": dict(GPTQ, group_size=32, sym=False, desc_act=True),
    "gptq-symmetric-tiny": dict(GPTQ, group_size=128, sym=True, desc_act=False, checkpoint_format="gptq"),
    "awq-tiny": dict(quant_method="awq", bits=4, group_size=32, zero_point=True, version="gemm"),
}


def module_of(path):
    """One file of a package, without the rest of it."""
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3] + "_of_package", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def libraries(auto_gptq, auto_awq):
    """The classes that pack: GPTQ's with any groups, and with a short last group."""
    folder = os.path.join(auto_gptq, "auto_gptq/nn_modules/qlinear")
    gptq = [module_of(os.path.join(folder, f"qlinear_{kind}.py")).QuantLinear for kind in ("exllama", "cuda_old")]
    for name in ("awq", "awq.utils"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [os.path.join(auto_awq, *name.split("."))]
    return gptq, module_of(os.path.join(auto_awq, "awq/modules/linear/gemm.py")).WQLinear_GEMM


def draw(outputs, inputs, q):
    """A matrix (out, in) of float32, its scales and zero points (groups, out), and the group of each input."""
    size = q["group_size"]
    groups = -(-inputs // size)
    codes = torch.randint(0, 16, (outputs, inputs))
    zeros = torch.randint(1, 16, (groups, outputs)) if not q.get("sym") else torch.full((groups, outputs), 8)
    scales = (torch.rand(groups, outputs) * 0.02 + 0.01).half()
    group = torch.arange(inputs) // size
    if q.get("desc_act"):
        group = group[torch.randperm(inputs)]
    w = (codes - zeros.t()[:, group]).float() * scales.float().t()[:, group]
    return w, scales, zeros, group.int()


def pack(w, scales, zeros, group, q, gptq, awq):
    """The library's tensors of a matrix. GPTQ's have a bias, as older versions wrote one for every layer."""
    linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=q["quant_method"] == "gptq")
    linear.weight.data = w.clone()
    if q["quant_method"] == "awq":
        layer = awq.from_linear(linear, 4, q["group_size"], scales=scales.float(), zeros=zeros.float())
        from awq.utils.packing_utils import dequantize_gemm
        back = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, q["group_size"])
        assert torch.equal(back.t(), w), "the library reads something else"
        return {k: getattr(layer, k) for k in ("qweight", "qzeros", "scales")}
    linear.bias.data.zero_()
    layer = gptq[not q["desc_act"]](4, q["group_size"], w.shape[1], w.shape[0], True)
    layer.pack(linear, scales.float().t(), zeros.float().t(), group)
    layer.scales = layer.scales.half()
    return {k: getattr(layer, k) for k in ("qweight", "qzeros", "scales", "g_idx", "bias")}


def make(name, q, gptq, awq):
    folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
    os.makedirs(folder, exist_ok=True)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation="eager")).double().eval()
    tensors, sums, weights = {}, {}, model.state_dict()
    for key, x in weights.items():
        if ".layers." not in key or x.dim() == 1:
            tensors[key] = (torch.randn(x.shape) * 0.2 + ("norm" in key)).half()
            weights[key] = tensors[key].double()
            continue
        w, scales, zeros, group = draw(*x.shape, q)
        for part, y in pack(w, scales, zeros, group, q, gptq, awq).items():
            tensors[key[:-len("weight")] + part] = y
        weights[key] = w.double()
        sums[key] = zlib.crc32(w.contiguous().numpy().tobytes())

    # The loss of one row of tokens, of which each predicts the next.
    model.load_state_dict(weights)
    tokens = torch.randint(0, 61, (1, 17))
    logits = model(tokens[:, :-1]).logits[0]
    loss = torch.nn.functional.cross_entropy(logits, tokens[0, 1:])
    json.dump(dict(SHAPE, quantization_config=q), open(os.path.join(folder, "config.json"), "w"), indent=1)
    json.dump(dict(tokens=tokens[0].tolist(), loss=loss.item(), crc32=sums),
              open(os.path.join(folder, "golden.json"), "w"), indent=1)

    save_file({k: v.contiguous() for k, v in tensors.items()}, os.path.join(folder, "model.safetensors"))


if __name__ == "__main__":
    torch.manual_seed(7)
    packers = libraries(*sys.argv[1:3])
    for folder, config in FOLDERS.items():
        make(folder, config, *packers)
