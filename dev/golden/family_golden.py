#!/usr/bin/env python3
"""Make the golden files of further families from transformers' models alone: the same files as make_golden.py's.

usage: family_golden.py [FAMILY...]     (needs torch and transformers 4.53 or later)

make_golden.py has its own text of each model and compares it with transformers; here transformers is the only text,
run in float64. Every configuration differs from its class's defaults where a default would hide a mistake: windows
shorter than the text, layers of each kind, awkward sizes.
"""
import json, os, sys
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from make_golden import ADAMW, B, HERE, T, transformers_golden, write_safetensors

BASE = dict(vocab_size=53, hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=100.0,
            tie_word_embeddings=False, torch_dtype="float32", bos_token_id=1, eos_token_id=2,
            pad_token_id=None)  # the row of a padding token would have no gradient
GEMMA = dict(BASE, tie_word_embeddings=True, head_dim=6, sliding_window=7, query_pre_attn_scalar=10,
             hidden_activation="gelu_pytorch_tanh")
MOE = dict(BASE, intermediate_size=12, moe_intermediate_size=12, num_experts_per_tok=2, router_aux_loss_coef=0.0)
DEEPSEEK = dict(MOE, num_key_value_heads=4, kv_lora_rank=10, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
                intermediate_size=28, n_routed_experts=6, n_shared_experts=2, n_group=3, topk_group=2,
                first_k_dense_replace=1)
FAMILIES = {
    "gpt_neox": dict(BASE, hidden_size=24, num_attention_heads=3, intermediate_size=40, rotary_pct=0.25,
                     rotary_emb_base=100, layer_norm_eps=1e-4),
    "olmo2": dict(BASE, attention_bias=True),
    # Windows in no regular order; YaRN in the layers without one.
    "olmo3": dict(BASE, num_hidden_layers=5, sliding_window=7, rope_theta=500000.0,
                  layer_types=["sliding_attention", "full_attention", "full_attention", "sliding_attention", "full_attention"],
                  rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8, beta_fast=4.0,
                                    beta_slow=1.0, attention_factor=1.1)),
    "smollm3": dict(BASE, no_rope_layer_interval=2, mlp_bias=True),
    "phi3": dict(BASE, partial_rotary_factor=0.5, sliding_window=9),
    "gemma2": dict(GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=1.5),
    "gemma3_text": dict(GEMMA, sliding_window_pattern=2, rope_local_base_freq=30.0,
                        rope_scaling=dict(rope_type="linear", factor=4.0)),
    # Experts: the balance loss of transformers is another than the trainer's, and is left out.
    "mixtral": dict(MOE, num_local_experts=5),
    "qwen3_moe": dict(MOE, head_dim=6, num_experts=5, norm_topk_prob=True),
    "olmoe": dict(MOE, num_key_value_heads=4, num_experts=5, norm_topk_prob=False),
    "qwen2_moe": dict(MOE, intermediate_size=28, num_experts=5, norm_topk_prob=False, shared_expert_intermediate_size=20,
                      mlp_only_layers=[0]),
    # Sinks, biases everywhere, a clamp that some gates and some ups meet, YaRN that cuts between channels.
    "gpt_oss": dict(BASE, intermediate_size=12, num_local_experts=5, num_experts_per_tok=2, head_dim=6, sliding_window=7,
                    attention_bias=True, swiglu_limit=0.75, router_aux_loss_coef=0.0,
                    rope_scaling=dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8, beta_fast=4.0,
                                      beta_slow=1.0, truncate=False)),
    # Latents, heads whose values are narrower, routers of both kinds. V3 has YaRN: its scores grow, and the text is
    # longer than the context before it. Its groups are those of two sums; of V2's the best expert counts.
    "deepseek_v2": dict(DEEPSEEK, q_lora_rank=10, topk_method="group_limited_greedy", norm_topk_prob=False,
                        routed_scaling_factor=1.5),
    "deepseek_v3": dict(DEEPSEEK, q_lora_rank=None, norm_topk_prob=True, routed_scaling_factor=2.5,
                        rope_scaling=dict(type="yarn", factor=4.0, original_max_position_embeddings=8, beta_fast=4,
                                          beta_slow=1, mscale=0.707, mscale_all_dim=0.707)),
}


def make_model(folder, config):
    """The folder with random weights that no variant hides behind."""
    os.makedirs(folder, exist_ok=True)
    json.dump(config, open(os.path.join(folder, "config.json"), "w"), indent=1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager")
    weights = {}
    for name, x in model.named_parameters():
        # a norm of Gemma scales by 1 + weight
        middle = 1.0 if "norm" in name and name.endswith("weight") and "gemma" not in config["model_type"] else 0.0
        weights[name] = (torch.randn(x.shape) * 0.2 + middle).float()
    for name, x in model.named_buffers():  # the bias of a choice, which is never trained
        if name.endswith("e_score_correction_bias"):
            weights[name] = torch.randn(x.shape).float() * 0.2
    write_safetensors(os.path.join(folder, "model.safetensors"), weights, {"format": "pt"})
    return type(model).__name__


def main():
    for name, config in FAMILIES.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        folder = os.path.join(HERE, name.removesuffix("_text").replace("_", "-") + "-tiny")
        torch.manual_seed(1234)
        config = dict(model_type=name, **config)
        config["architectures"] = [make_model(folder, config)]
        json.dump(config, open(os.path.join(folder, "config.json"), "w"), indent=1)
        tokens = torch.randint(config["vocab_size"], (B, T + 1))
        targets = tokens[:, 1:].clone()
        for row in range(B):  # a different number of ignored targets in each row
            targets[row, torch.randperm(T)[: 2 + 5 * row]] = -100
        tokens = tokens[:, :-1]
        numbers = transformers_golden(folder, tokens, targets)
        numbers["step_losses"] = torch.cat([numbers[f"step.{step}.loss"] for step in range(3)])
        for n, x in AutoModelForCausalLM.from_pretrained(folder).named_buffers():
            if n.endswith("e_score_correction_bias"):
                numbers["after." + n] = x.double()
                numbers["grad." + n] = torch.zeros_like(x).double()
        assert all(x.dtype == torch.float64 for x in numbers.values())
        stored = {n: x.float() for n, x in numbers.items()}
        stored.update(tokens=tokens.int(), targets=targets.int())
        write_safetensors(os.path.join(folder, "golden.safetensors"), stored,
                          {"made_by": "family_golden.py", "computed_in": "float64", "adamw": json.dumps(ADAMW)})
        print(f"{name}: loss {numbers['loss'].item():.6f}, norm {numbers['grad_norm'].item():.4f}")


main()
