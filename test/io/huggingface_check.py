#!/usr/bin/env python3
"""Configurations and tokenizers of Hugging Face: each is read as its own library reads it, or refused.

usage: test/io/huggingface_check.py [TRAIN_GPT]     prints `skipped: ...` where transformers is not installed

Models: a tiny model with large random weights for each config.json, made by transformers. Its loss on a text and its
greedy tokens must be those of the program, and those of the program's export when transformers loads it. Each folder is
read with the keys as they stand here, as older files have them, and as the installed transformers saves it; then each
family has some configurations drawn at random, saved by its class. Tokenizers: a
small tokenizer.json of each kind, made by tokenizers; the tokens of awkward texts must be the same. What the program
refuses it must refuse by one line. Anything else is a silent difference, and the exit status says so.
All hold with transformers 5.24.0 and tokenizers 0.23.3.
"""
import functools, json, multiprocessing, os, random, re, shutil, struct, subprocess, sys, tempfile

os.environ.update(TRANSFORMERS_VERBOSITY="error", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
try:
    import tokenizers, torch, transformers
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError as e:
    print(f"skipped: no {e.name}")
    sys.exit(0)
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
PROGRAM = sys.argv[1] if len(sys.argv) > 1 else os.path.join(ROOT, "build/train_gpt")
DRAWN = int(os.environ.get("DRAWN", 4))  # configurations at random of each family
SEQ, SAMPLED, PROMPT = 48, 30, "Once upon a time, the 3 kings'"
TEXT = "It's 1234567 o'clock;  we'll   see what the kings of the north have brought from the fields. " * 8


def run(*arguments, name="train_gpt"):
    out = subprocess.run([os.path.join(os.path.dirname(PROGRAM), name), *map(str, arguments)], capture_output=True)
    return out.returncode, out.stdout, out.stderr.decode(errors="replace").strip()


# ---- models

GPT2 = dict(model_type="gpt2", vocab_size=256, n_positions=64, n_embd=24, n_layer=2, n_head=3)
LLAMA = dict(model_type="llama", vocab_size=256, hidden_size=32, intermediate_size=44, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
MISTRAL, QWEN2, QWEN3 = (dict(LLAMA, model_type=t) for t in ("mistral", "qwen2", "qwen3"))
QWEN3["head_dim"] = 12
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=16)
WINDOWS = dict(use_sliding_window=True, sliding_window=8, max_window_layers=1)
FULL, WINDOW = "full_attention", "sliding_attention"
OLMO2, OLMO3, SMOLLM3, PHI3 = (dict(LLAMA, model_type=t, pad_token_id=None) for t in ("olmo2", "olmo3", "smollm3", "phi3"))
GEMMA2, GEMMA3 = (dict(LLAMA, model_type=t, pad_token_id=None, head_dim=12, query_pre_attn_scalar=10, sliding_window=8)
                  for t in ("gemma2", "gemma3_text"))
NEOX = dict(LLAMA, model_type="gpt_neox", rotary_pct=0.5)
MOE = dict(LLAMA, pad_token_id=None, num_experts_per_tok=2, moe_intermediate_size=20)
MIXTRAL = dict(MOE, model_type="mixtral", num_local_experts=5)
OLMOE, QWEN2_MOE, QWEN3_MOE = (dict(MOE, model_type=t, num_experts=5) for t in ("olmoe", "qwen2_moe", "qwen3_moe"))
QWEN2_MOE["shared_expert_intermediate_size"], QWEN3_MOE["head_dim"] = 28, 12
OSS = dict(MOE, model_type="gpt_oss", num_local_experts=5, head_dim=12, sliding_window=8)
DEEPSEEK2, DEEPSEEK3 = (dict(MOE, model_type=t, num_key_value_heads=4, q_lora_rank=20, kv_lora_rank=16, qk_nope_head_dim=8,
                             qk_rope_head_dim=4, v_head_dim=6, n_routed_experts=6, n_shared_experts=2, n_group=3, topk_group=2,
                             first_k_dense_replace=1) for t in ("deepseek_v2", "deepseek_v3"))


# Each family's keys, one change at a time: those that are read and those that must be refused.
def configurations():
    """(family, keys that differ)"""

    # GPT-2.
    for more in ({}, dict(n_inner=40), dict(n_inner=None), dict(tie_word_embeddings=False),
                 dict(layer_norm_epsilon=0.1), dict(activation_function="gelu_new"),
                 dict(activation_function="gelu_pytorch_tanh"), dict(activation_function="gelu"),
                 dict(activation_function="relu"), dict(activation_function="silu"),
                 dict(scale_attn_weights=False), dict(scale_attn_by_inverse_layer_idx=True),
                 dict(reorder_and_upcast_attn=True), dict(add_cross_attention=True), dict(n_head=4)):
        yield GPT2, more

    # Llama and its kin, of which some keys mean nothing to some families.
    for family in (LLAMA, MISTRAL, QWEN2, QWEN3):
        for more in ({}, dict(num_key_value_heads=1), dict(num_key_value_heads=4), dict(num_key_value_heads=None),
                     dict(head_dim=6), dict(rms_norm_eps=0.1), dict(tie_word_embeddings=True),
                     dict(rope_theta=50.0), dict(rope_parameters=dict(rope_type="default", rope_theta=77.0)),
                     dict(hidden_act="swish"), dict(hidden_act="gelu"), dict(hidden_act="relu"),
                     dict(attention_bias=True), dict(mlp_bias=True), dict(sliding_window=8),
                     dict(sliding_window=8, use_sliding_window=True), dict(sliding_window=8, use_sliding_window=False),
                     dict(sliding_window=None), dict(rope_scaling=dict(type="linear", factor=3.0)),
                     dict(rope_parameters=dict(rope_type="linear", rope_theta=500.0, factor=3.0)),
                     dict(rope_scaling=dict(rope_type="dynamic", factor=3.0)), dict(rope_scaling=LLAMA3),
                     dict(rope_scaling=YARN), dict(rope_scaling=dict(YARN, factor=None)),
                     dict(rope_scaling=dict(YARN, truncate=False, beta_fast=4.0, beta_slow=0.5)),
                     dict(rope_scaling=dict(YARN, mscale=0.7, mscale_all_dim=0.4)),
                     dict(rope_scaling=dict(YARN, attention_factor=1.3)),
                     dict(rope_scaling=dict(YARN), original_max_position_embeddings=8),
                     dict(rope_scaling=dict(type="linear", factor=3.0), rope_parameters=dict(YARN, rope_theta=9.0)),
                     dict(rope_scaling=dict(rope_type="longrope", factor=2.0, short_factor=[1.0] * 4,
                                            long_factor=[2.0] * 4)),
                     dict(partial_rotary_factor=0.5)):
            yield family, more

    # Windows.
    for family in (QWEN2, QWEN3):
        for more in (WINDOWS, dict(WINDOWS, max_window_layers=0), dict(WINDOWS, max_window_layers=3), dict(num_hidden_layers=5,
                     use_sliding_window=True, sliding_window=8, layer_types=[WINDOW, FULL, FULL, WINDOW, FULL]),
                     dict(WINDOWS, layer_types=[FULL, FULL, WINDOW]), dict(WINDOWS, layer_types=[WINDOW, FULL, WINDOW]),
                     dict(layer_types=[FULL] * 3), dict(use_sliding_window=True, sliding_window=8)):
            yield family, more

    for types in ([FULL, WINDOW, FULL], [WINDOW, FULL, WINDOW], [WINDOW] * 3, [FULL] * 3):
        yield MISTRAL, dict(sliding_window=8, layer_types=types)

    # Several changes at once.
    yield LLAMA, dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True, rope_scaling=YARN)
    yield QWEN3, dict(WINDOWS, attention_bias=True, rope_scaling=LLAMA3, num_key_value_heads=1)

    # The later variants of Llama, and Gemma.
    for family in (OLMO2, OLMO3, SMOLLM3, PHI3, GEMMA2, GEMMA3):
        for more in ({}, dict(num_key_value_heads=1), dict(rms_norm_eps=0.1), dict(tie_word_embeddings=False),
                     dict(tie_word_embeddings=True), dict(rope_theta=50.0), dict(attention_bias=True), dict(mlp_bias=True),
                     dict(rope_parameters=dict(rope_type="linear", rope_theta=500.0, factor=3.0)),
                     dict(rope_parameters=dict(YARN, rope_theta=500.0)), dict(sliding_window=8), dict(sliding_window=None),
                     dict(layer_types=[FULL] * 3), dict(layer_types=[WINDOW, FULL, WINDOW]),
                     dict(partial_rotary_factor=0.5), dict(hidden_act="gelu"), dict(hidden_activation="silu")):
            yield family, more
    for more in (dict(no_rope_layers=[1, 0, 1]), dict(no_rope_layers=[0, 1, 1]), dict(no_rope_layer_interval=2),
                 dict(use_sliding_window=True, sliding_window=8)):
        yield SMOLLM3, more
    for family in (GEMMA2, GEMMA3):
        for more in (dict(attn_logit_softcapping=3.0), dict(attn_logit_softcapping=None), dict(final_logit_softcapping=2.0),
                     dict(final_logit_softcapping=None), dict(query_pre_attn_scalar=100), dict(sliding_window_pattern=2),
                     dict(layer_types=[WINDOW] * 3), dict(use_bidirectional_attention=True), dict(rope_local_base_freq=30.0)):
            yield family, more
    yield GEMMA3, dict(rope_parameters=dict(full_attention=dict(rope_type="linear", rope_theta=500.0, factor=3.0),
                                            sliding_attention=dict(rope_type="default", rope_theta=30.0)))

    # Experts.
    for family in (MIXTRAL, OLMOE, QWEN2_MOE, QWEN3_MOE):
        for more in ({}, dict(num_key_value_heads=1), dict(num_key_value_heads=None), dict(head_dim=6), dict(rms_norm_eps=0.1),
                     dict(tie_word_embeddings=True), dict(rope_theta=50.0), dict(attention_bias=True), dict(mlp_bias=True),
                     dict(qkv_bias=False), dict(hidden_act="gelu"), dict(rope_parameters=dict(YARN, rope_theta=500.0)),
                     dict(rope_scaling=LLAMA3), dict(partial_rotary_factor=0.5), dict(sliding_window=8),
                     dict(WINDOWS), dict(WINDOWS, layer_types=[FULL, FULL, WINDOW]), dict(layer_types=[WINDOW, FULL, WINDOW]),
                     dict(norm_topk_prob=True), dict(norm_topk_prob=False), dict(num_experts_per_tok=1),
                     dict(router_jitter_noise=0.1), dict(clip_qkv=0.5), dict(decoder_sparse_step=2, intermediate_size=36),
                     dict(mlp_only_layers=[0], intermediate_size=36), dict(mlp_only_layers=[1], intermediate_size=36),
                     dict(output_router_logits=True), dict(router_aux_loss_coef=0.5)):
            yield family, more

    for more in ({}, dict(num_key_value_heads=1), dict(num_key_value_heads=None), dict(head_dim=6), dict(rms_norm_eps=0.1),
                 dict(tie_word_embeddings=True), dict(rope_theta=50.0), dict(attention_bias=False), dict(mlp_bias=True),
                 dict(hidden_act="gelu"), dict(rope_parameters=dict(YARN, rope_theta=500.0)), dict(rope_scaling=YARN),
                 dict(rope_parameters=dict(rope_type="default", rope_theta=77.0)), dict(rope_scaling=dict(YARN, truncate=False)),
                 dict(swiglu_limit=0.7), dict(swiglu_alpha=1.1), dict(num_experts_per_tok=1), dict(num_experts_per_tok=4),
                 dict(layer_types=[FULL] * 3), dict(layer_types=[WINDOW] * 3), dict(layer_types=[FULL, WINDOW, FULL]),
                 dict(sliding_window=None), dict(sliding_window=4), dict(norm_topk_prob=False), dict(clip_qkv=0.5),
                 dict(num_local_experts=None), dict(experts_per_token=3), dict(initial_context_length=16)):
        yield OSS, more

    # Latents.
    for family in (DEEPSEEK2, DEEPSEEK3):
        for more in ({}, dict(q_lora_rank=None), dict(rms_norm_eps=0.1), dict(tie_word_embeddings=True), dict(attention_bias=True),
                     dict(mlp_bias=True), dict(hidden_act="gelu"), dict(rope_theta=50.0), dict(num_key_value_heads=2),
                     dict(topk_method="greedy"), dict(topk_method="group_limited_greedy"), dict(topk_method="noaux_tc"),
                     dict(norm_topk_prob=True), dict(norm_topk_prob=False), dict(routed_scaling_factor=1.7),
                     dict(scoring_func="softmax"), dict(scoring_func="sigmoid"), dict(n_group=1, topk_group=1), dict(n_group=None),
                     dict(first_k_dense_replace=0), dict(first_k_dense_replace=3), dict(moe_layer_freq=2), dict(n_shared_experts=1),
                     dict(n_shared_experts=None), dict(rope_interleave=False), dict(v_head_dim=12), dict(head_dim=8),
                     dict(sliding_window=8), dict(rope_scaling=YARN), dict(rope_scaling=dict(YARN, mscale=0.7, mscale_all_dim=0.7)),
                     dict(rope_scaling=dict(YARN, mscale=1.0, mscale_all_dim=0.4)), dict(rope_scaling=dict(YARN, mscale=0.7)),
                     dict(rope_scaling=dict(YARN, mscale_all_dim=0.7)), dict(rope_scaling=dict(type="linear", factor=3.0)),
                     dict(mlp_layer_types=["sparse", "dense", "sparse"])):
            yield family, more

    # GPT-NeoX.
    for more in ({}, dict(rotary_pct=1.0), dict(rotary_pct=0.25), dict(partial_rotary_factor=0.25), dict(rotary_emb_base=50),
                 dict(rope_theta=50.0), dict(use_parallel_residual=False), dict(attention_bias=False), dict(hidden_act="gelu_new"),
                 dict(hidden_act="gelu_fast"), dict(hidden_act="relu"), dict(layer_norm_eps=0.1), dict(tie_word_embeddings=True),
                 dict(rope_parameters=dict(rope_type="linear", rope_theta=500.0, factor=3.0, partial_rotary_factor=0.5)),
                 dict(rope_parameters=dict(rope_type="default", rope_theta=77.0)), dict(rope_scaling=YARN)):
        yield NEOX, more

    # Keys of other classes, which a family reads, ignores or refuses.
    for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, SMOLLM3, PHI3, GEMMA2, GEMMA3, NEOX, MIXTRAL, OLMOE, QWEN2_MOE,
                   QWEN3_MOE, OSS, DEEPSEEK2, DEEPSEEK3):
        for more in (dict(is_causal=False), dict(logit_scale=0.5, embedding_multiplier=3.0, use_qk_norm=True),
                     dict(no_rope_layers=[1, 0, 1]), dict(rotary_pct=0.5), dict(rotary_emb_base=30.0, rope_local_base_freq=30.0),
                     dict(rope_scaling=dict(type="linear", factor=2.0), rope_theta=60.0)):
            yield family, more

    # Families that this program does not have, or not in this form.
    for other in ("phi", "gemma", "olmo"):
        yield dict(LLAMA, model_type=other), {}


def make_model(folder, config):
    """The folder, with weights that no variant hides behind; a line if transformers refuses."""
    os.makedirs(folder)
    json.dump(config, open(f"{folder}/config.json", "w"))
    try:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), attn_implementation="eager")

        # Draw weights so large that a wrong variant shows in the loss, with norms around 1.
        torch.manual_seed(5)
        for name, p in [*model.named_parameters(), *model.named_buffers()]:
            if "." in name and "rotary" in name:
                continue  # a table, not a weight
            p.data = torch.randn_like(p) * 0.2 + (1.0 if "norm" in name or "ln_" in name else 0.0) * (p.dim() == 1)
        model.tie_weights()
        model.save_pretrained(f"{folder}.saved")
        shutil.copy(f"{folder}.saved/model.safetensors", folder)
        return ""
    except Exception as e:
        return f"{type(e).__name__}: {e}".split("\n")[0]


EVERY_FAMILY = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, OLMO2, OLMO3, SMOLLM3, PHI3, GEMMA2, GEMMA3, NEOX, MIXTRAL, OLMOE, QWEN2_MOE,
                QWEN3_MOE, OSS, DEEPSEEK2, DEEPSEEK3)


def drawn(family, draw):
    """Keys at random, of those that the family's class has: sizes, flags, windows, experts, scaled positions."""
    L, NH, E = draw.randint(1, 5), draw.choice([2, 4]), draw.randint(2, 7)
    rope = draw.choice([None, dict(rope_type="default", rope_theta=draw.choice([9.0, 5e4])),
                        dict(rope_type="linear", factor=2.5, rope_theta=77.0), dict(LLAMA3, rope_theta=1e3), dict(YARN, rope_theta=1e3)])
    keys = dict(
        num_hidden_layers=L, n_layer=L, num_attention_heads=NH, n_head=draw.choice([2, 3, 6]), n_embd=24, n_inner=draw.choice([None, 20]),
        hidden_size=draw.choice([16, 32]), intermediate_size=draw.choice([20, 36]), num_key_value_heads=draw.choice([NH, NH // 2, 1]),
        head_dim=draw.choice([6, 8, 12]), rms_norm_eps=draw.choice([1e-6, 0.1]), layer_norm_eps=draw.choice([1e-6, 0.1]),
        layer_norm_epsilon=draw.choice([1e-6, 0.1]), tie_word_embeddings=draw.random() < 0.4, attention_bias=draw.random() < 0.4,
        mlp_bias=draw.random() < 0.4, qkv_bias=draw.random() < 0.5, use_parallel_residual=draw.random() < 0.5,
        use_sliding_window=draw.random() < 0.7, sliding_window=draw.choice([None, 3, 9]), max_window_layers=draw.randint(0, L),
        layer_types=draw.choice([None, [draw.choice([FULL, WINDOW]) for _ in range(L)]]),
        no_rope_layer_interval=draw.choice([1, 2, 4]), rope_parameters=rope, query_pre_attn_scalar=draw.choice([10, 64]),
        attn_logit_softcapping=draw.choice([None, 4.0]), final_logit_softcapping=draw.choice([None, 4.0]),
        num_local_experts=E, num_experts=E, n_routed_experts=6, num_experts_per_tok=draw.randint(1, 2), norm_topk_prob=draw.random() < 0.5,
        moe_intermediate_size=draw.choice([8, 20]), shared_expert_intermediate_size=draw.choice([8, 28]),
        decoder_sparse_step=draw.choice([1, 1, 2]) if L > 1 else 1, mlp_only_layers=draw.choice([[], [0]]) if L > 1 else [],
        swiglu_limit=draw.choice([0.7, 7.0]), swiglu_alpha=draw.choice([1.1, 1.702]), routed_scaling_factor=draw.choice([1.0, 1.7]),
        n_shared_experts=draw.choice([1, 2]), q_lora_rank=draw.choice([None, 20]), first_k_dense_replace=draw.randint(0, L),
        n_group=draw.choice([1, 3]), topk_method=draw.choice(["greedy", "group_limited_greedy"]), v_head_dim=draw.choice([6, 12]))

    # Leave out what is refused, but for one draw in eight.
    name = family["model_type"]
    if draw.random() < 0.9:
        keys["attention_bias"] &= name not in ("olmoe", "qwen3_moe", "deepseek_v2", "deepseek_v3")
        keys["mlp_bias"] &= name != "deepseek_v2"
        keys["norm_topk_prob"] &= name != "deepseek_v2"
        if name.startswith("deepseek"):
            keys["num_key_value_heads"] = NH
        if name.startswith("gemma") or name in ("gpt_oss", "smollm3"):
            keys["sliding_window"] = draw.choice([3, 9])
        if name == "gemma3_text":
            keys["attn_logit_softcapping"] = None
        if name in ("gemma3_text", "olmo3"):
            theta = 5e5 if name == "olmo3" else 30.0
            keys["rope_parameters"] = rope and dict(full_attention=rope, sliding_attention=dict(rope_type="default", rope_theta=theta))
        if not keys["use_sliding_window"] and keys["layer_types"]:
            keys["layer_types"] = [FULL] * L if "qwen" in name or name == "smollm3" else keys["layer_types"]
        if name == "gpt_neox":
            keys["attention_bias"] = True
    config = AutoConfig.for_model(name)
    own = {key: value for key, value in keys.items() if key in config.to_dict() or key in type(config).attribute_map}
    return dict(family, **own, vocab_size=256, topk_group=1 if own.get("n_group") == 1 else 2, pad_token_id=None)


def theirs(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").float().eval()


def their_loss_of(model):
    """The loss of whole windows of the text."""
    ids = torch.tensor(list(TEXT.encode()))
    windows = (len(ids) - 1) // SEQ
    x, y = ids[: windows * SEQ].view(-1, SEQ), ids[1 : windows * SEQ + 1].view(-1, SEQ)
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1).double(), y.flatten()).item()


def their_text_of(model):
    prompt = torch.tensor([list(PROMPT.encode())])
    # Generate without a cache: transformers' own cache forgets what lies behind a window, even if
    # the model's attention has no window.
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=SAMPLED, do_sample=False, use_cache=False,
                         eos_token_id=None, pad_token_id=0)
    return bytes(out[0].tolist())


class TheirsFails(Exception):
    pass


def model_type(folder):
    """The class: transformers saves a Mistral with a list of layers as another one."""
    return json.load(open(f"{folder}/config.json"))["model_type"]


def evaluate(folder, data):
    """Flags for a folder, and its loss."""
    common = ["--model", folder, "--device", "cpu", "--tokenizer", "byte", "--seq", SEQ, "--data", data, "--val", data + ".val.txt"]
    rc, out, error = run(*common, "--eval")
    if rc:
        raise PermissionError(error)
    return common, float(re.findall(rb"val loss (-?[\d.]+|-?nan)", out)[-1])


def check_model(folder, data):
    """What differs; "" where all agrees; a refusal is an exception."""

    # Evaluate, and then sample and export. The folder as transformers saves it is the same model.
    common, loss = evaluate(folder, data)
    saved = loss
    if os.path.isdir(folder + ".saved") and model_type(folder + ".saved") == model_type(folder):
        saved = evaluate(folder + ".saved", data)[1]
    if saved != loss:
        return f"loss {loss:.4f}, and {saved:.4f} where transformers has saved the folder"
    rc, _, error = run(*common, "--steps", 0, "--sample-tokens", 0, "--export", folder + ".export")
    if rc:
        raise PermissionError(error)
    rc, out, error = run("--model", folder, "--device", "cpu", "--tokenizer", "byte", "--temperature", 0, "--sample-tokens",
                         SAMPLED, "--ignore-eos", "--prompt", PROMPT, name="sample_gpt")
    if rc:
        raise PermissionError(error)

    # Let transformers run the model and the export.
    try:
        model = theirs(folder)
        their_loss, their_text = their_loss_of(model), their_text_of(model)
    except Exception as e:  # transformers reads the configuration and cannot run it: nothing to compare
        raise TheirsFails(f"transformers: {type(e).__name__}: {e}".split("\n")[0])
    try:
        export_loss = their_loss_of(theirs(folder + ".export"))
    except Exception as e:
        return f"the export does not load: {type(e).__name__}: {e}".split("\n")[0]
    text = out.split(b"---\n", 1)[1]

    # Our loss is printed with four digits.
    if not abs(loss - their_loss) < 1e-4 + 2e-6 * abs(their_loss):
        return f"loss {loss:.4f}, transformers {their_loss:.4f}"
    if not abs(export_loss - their_loss) < 1e-5:
        return f"loss of the export {export_loss:.5f}, transformers {their_loss:.5f}"
    if not text.startswith(their_text.replace(b"\0", b"")):
        return f"text {text[:60]!r}, transformers {their_text!r}"
    return ""


# ---- tokenizers

CORPUS = ["the quick brown fox jumps over the lazy dog, and the dogs of the north sleep. It's what we'll see in 1234 days!",
          "  spaces   and\ttabs\nlines\r\n\r\n ends ", "À bientôt, naïve façade — 你好世界 Привет мир 🙂 e\u0301 ﬁ ½ Ⅻ ١٢٣"] * 8
END = "<|endoftext|>"
PIECES = ["", " ", "  ", "\n", "\t \n", "a", "the", " the dogs", "The DOGS'll", "12345 67", "x=y+1;//", "e\u0301\u00e9", "\u00a0\u2003x\u180ey",
          "你好", "🙂🙂", "<x>", " <x> ", "a<x>b", "a <x>  <x>b", "_<x>", "\u0301<x>", "Ⓐ<x>", "\u200d<x>", "-<x>-", "<y>", "q<y>", " <y>the", "the<y> the",
          "ﬁ<y>", END, f"a {END} b", f"{END}<x>", "▁the▁", "<x><y>", "<xy>", "\u0085<x>\u2028z", "١<x>", "don't <x>'t", "½Ⅻ", "a\r\nb"]
TEXTS = [a + b for a in PIECES for b in ("", " end") if a + b] + ["".join(PIECES), " ".join(PIECES)]


def byte_level(normalizer=None, pre=None, **bpe):
    t = Tokenizer(models.BPE(**bpe))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre is None)
    t.pre_tokenizer = level if pre is None else pre_tokenizers.Sequence([pre, level])
    if normalizer:
        t.normalizer = normalizer
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=340, special_tokens=[END], show_progress=False,
                                                      initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return t


def byte_fallback(normalizer=None, pre=None, **bpe):
    vocab = {"<unk>": 0, END: 1, **{f"<0x{b:02X}>": b + 2 for b in range(256)}}
    letters = sorted({c for text in CORPUS for c in text.replace(" ", "▁")} - set("🙂你好世"))
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("d", "o"), ("do", "g"), ("▁", "dog"), ("▁", "▁"), ("i", "n"), ("o", "v")]

    for piece in letters + [a + b for a, b in merges]:
        vocab.setdefault(piece, len(vocab))
    t = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True, **bpe))

    if normalizer:
        t.normalizer = normalizer
    if pre:
        t.pre_tokenizer = pre
    t.add_special_tokens([END])
    return t


def added(t, *tokens):
    for content, special, flags in tokens:
        token = AddedToken(content, special=special, **flags)
        t.add_special_tokens([token]) if special else t.add_tokens([token])
    return t


def edited(t, **model):
    j = json.loads(t.to_str())
    j["model"].update(model)
    return j


def tokenizer_kinds():
    N, P = normalizers, pre_tokenizers
    yield "byte level", byte_level()
    for name in ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "Strip"):
        yield name, byte_level(getattr(N, name)())
    yield "NFD, then lower case", byte_level(N.Sequence([N.NFD(), N.Lowercase()]))
    yield "replace", byte_level(N.Replace("dog", "cat"))

    # Ways to cut words.
    yield "digits alone", byte_level(pre=P.Digits(individual_digits=True))
    yield "digits together", byte_level(pre=P.Digits(individual_digits=False))
    yield "split", byte_level(pre=P.Split(Regex(r"\w+|[^\w\s]+|\s+"), "isolated"))
    yield "split, merged with the next", byte_level(pre=P.Split(Regex(r"\s"), "merged_with_next"))
    yield "split, removed", byte_level(pre=P.Split(Regex(r"\s"), "removed"))
    yield "split, inverted", byte_level(pre=P.Split(Regex(r"\w+|\W+"), "removed", invert=True))
    yield "split, words", byte_level(pre=P.Split(Regex(r"\W|\b\w+?\b|[\w']+"), "isolated"))
    yield "white space", byte_level(pre=P.Whitespace())
    yield "punctuation", byte_level(pre=P.Punctuation())

    yield "prefix space", (lambda j: (j["pre_tokenizer"].update(add_prefix_space=True), j)[1])(edited(byte_level()))
    yield "ignore_merges", edited(byte_level(), ignore_merges=True)
    yield "dropout", edited(byte_level(), dropout=0.0)
    yield "suffix", edited(byte_level(), end_of_word_suffix="</w>")

    # Spaces written as U+2581.
    prepend = N.Sequence([N.Prepend("▁"), N.Replace(" ", "▁")])
    yield "prepend", byte_fallback(prepend)
    yield "replace alone", byte_fallback(N.Replace(" ", "▁"))
    for scheme in ("always", "first", "never"):
        yield f"metaspace {scheme}", byte_fallback(pre=P.Metaspace(prepend_scheme=scheme))
    yield "metaspace, no split", byte_fallback(pre=P.Metaspace(prepend_scheme="always", split=False))

    # Added tokens with every rule, and several of them together.
    for flags in (dict(lstrip=True), dict(rstrip=True), dict(lstrip=True, rstrip=True), dict(single_word=True),
                  dict(single_word=True, lstrip=True, rstrip=True)):
        for special in (False, True):
            token = ("<x>", special, flags)
            yield f"added {'special ' * special}{' '.join(flags)}", added(byte_level(), token)
    yield "added, normalized", added(byte_level(N.NFC()), ("e\u0301", False, dict(normalized=True)), ("<x>", False, {}))
    yield "added, as it is", added(byte_level(N.NFC()), ("e\u0301", False, dict(normalized=False)), ("<x>", True, {}))
    yield "added, one in another", added(byte_level(), ("<x>", True, {}), ("<x><y>", False, dict(normalized=False)), ("x>", False, {}))
    yield "added, special normalized", added(byte_level(N.NFKC()), ("<x>", True, dict(normalized=True)), ("fi<y>", True, dict(normalized=True)))
    mixed = (("<x>", False, dict(normalized=True)), ("<y>", False, dict(normalized=False)))
    yield "added, prepend", added(byte_fallback(prepend), *mixed)
    for scheme in ("always", "first", "never"):
        yield f"added, metaspace {scheme}", added(byte_fallback(pre=P.Metaspace(prepend_scheme=scheme)), *mixed)

    t = byte_level()
    t.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, t.token_to_id(END))])
    yield "template", t

    # Other kinds of model.
    unigram = Tokenizer(models.Unigram([("<unk>", 0.0), ("▁the", -1.0), ("a", -2.0), (END, 0.0)], 0))
    yield "unigram", unigram
    yield "word level", Tokenizer(models.WordLevel({"<unk>": 0, "the": 1, END: 2}, unk_token="<unk>"))
    yield "word piece", Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, END: 2}))


def prepared(folder, data, end):
    rc, out, error = run("--data", data, "--tokenizer", folder, "--document-end", end,
                         f"{folder}/out.bin", name="prepare_gpt")
    if rc:
        raise PermissionError(error)

    # The tokens of all shards, which are then removed.
    tokens = []
    for name in sorted(n for n in os.listdir(folder) if re.fullmatch(r"out(_\d+)?\.bin", n)):
        raw = open(f"{folder}/{name}", "rb").read()
        width = {20240520: 2, 20240801: 4}[struct.unpack("<i", raw[:4])[0]]
        tokens += struct.unpack(f"<{(len(raw) - 1024) // width}{'H' if width == 2 else 'I'}", raw[1024:])
        os.remove(f"{folder}/{name}")
    for name in [n for n in os.listdir(folder) if n.startswith("out")]:
        os.remove(f"{folder}/{name}")
    return tokens


def check_tokenizer(folder, kind):
    os.makedirs(folder)
    text = json.dumps(kind) if isinstance(kind, dict) else kind.to_str()
    open(f"{folder}/tokenizer.json", "w").write(text)

    t = Tokenizer.from_str(text)
    end = t.token_to_id(END)

    # First documents, in which special tokens are text. Then one text, in which they are tokens.
    with open(f"{folder}/x.jsonl", "w") as f:
        f.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS)
    whole = "\n".join(TEXTS)
    open(f"{folder}/x.txt", "w", newline="").write(whole)
    for special, data in ((False, "x.jsonl"), (True, "x.txt")):
        t.encode_special_tokens = not special
        texts = [whole] if special else TEXTS
        want = [id for text in texts for id in [end, *t.encode(text, add_special_tokens=False).ids]]
        got = prepared(folder, f"{folder}/{data}", end)
        if special and got[:1] != [end]:
            got = [end, *got]

        # Show the tokens around the first difference.
        if got != want:
            at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), min(len(got), len(want)))
            show = lambda ids: [t.id_to_token(i) for i in ids[max(at - 3, 0) : at + 3]]
            return f"{data}, token {at}: {show(got)}, tokenizers {show(want)}"
    return ""


# ---- all of them, two at a time

CHECKS = []  # a name, and a function that says what is wrong


def verdict_on(number):
    """A name, its state and why: ok, FAIL, refused by one line of ours, theirs where there is nothing to compare with."""
    name, check = CHECKS[number]
    try:
        wrong = check()
        return name, "FAIL" if wrong else "ok", wrong
    except PermissionError as e:
        wrong = str(e).split("error: ", 1)[-1]
        return name, "refused" if "\n" not in wrong and "error: " in str(e) else "FAIL", wrong
    except TheirsFails as e:
        return name, "theirs", str(e)


def check_config(folder, config, data, ending=""):
    """Make the folder of a configuration and check it, or with ending .saved only what transformers saves."""
    try:
        refused = make_model(folder, config)
        if not refused:
            return check_model(folder + ending, data)
        rc, _, error = run("--model", folder, "--device", "cpu", "--steps", 0, "--sample-tokens", 0)
        if rc and not ending:
            raise PermissionError(error)
        raise TheirsFails(f"transformers: {refused[-100:]}")
    finally:
        for each in ("", ".export", ".saved", ".saved.export"):
            shutil.rmtree(folder + each, ignore_errors=True)


def main():
    with tempfile.TemporaryDirectory() as scratch:
        data = f"{scratch}/data.txt"
        open(data, "w").write(PROMPT * 100)
        open(data + ".val.txt", "w").write(TEXT)
        for number, (family, more) in enumerate(configurations()):
            CHECKS.append((f"{family['model_type']} {json.dumps(more) if more else ''}",
                           functools.partial(check_config, f"{scratch}/model{number}", dict(family, **more), data)))
        for number, family in enumerate(list(EVERY_FAMILY) * DRAWN):
            config = drawn(family, random.Random(number))
            keys = json.dumps({k: v for k, v in config.items() if family.get(k) != v})
            CHECKS.append((f"{family['model_type']} drawn {number} {keys}",
                           functools.partial(check_config, f"{scratch}/drawn{number}", config, data, ".saved")))
        for number, (name, kind) in enumerate(tokenizer_kinds()):
            CHECKS.append((f"tokenizer.json, {name}", functools.partial(check_tokenizer, f"{scratch}/tokenizer{number}", kind)))

        counts = {}
        with multiprocessing.get_context("fork").Pool(2) as pool:
            for name, state, why in pool.imap(verdict_on, range(len(CHECKS))):
                counts[state] = counts.get(state, 0) + 1
                print(f"{state:8}{name}{': ' + why[-150:] if why else ''}", flush=True)
    print(", ".join(f"{n} {state}" for state, n in counts.items()))
    sys.exit(counts.get("FAIL", 0) > 0)


if __name__ == "__main__":
    main()
