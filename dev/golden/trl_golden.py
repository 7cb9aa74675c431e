#!/usr/bin/env python3
"""Make trl.json: what TRL's own trainers say of given log-probabilities, loss and gradient, in float64.

usage: trl_golden.py     (needs torch, transformers, peft and trl; made with the versions that trl.json names)

Each trainer's method that computes the loss of a batch runs as it is, on an object whose model answers with the given
log-probabilities. Numbers that we keep in float (of the reference, the old policy, advantages) are multiples of 1/64.
At last a real model: llama-tiny with the adapters of lora-llama-tiny prefers answers, and llama-tiny is its reference.
"""
import json, math, os, random, re
from collections import defaultdict
from types import SimpleNamespace
from unittest import mock
import peft, torch, transformers, trl
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from trl import DPOTrainer, GRPOTrainer, KTOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.utils import add_fused_lm_head
from trl.experimental.cpo import CPOTrainer
from trl.experimental.orpo import ORPOTrainer
from peft_golden import CASES, adapt

HERE = os.path.dirname(os.path.abspath(__file__))
LENGTHS = [3, 5, 6, 4, 1, 6]  # tokens of the answers: chosen, rejected, chosen, ...
LONGEST = max(LENGTHS)
same = lambda x, **_: x
ACCELERATOR = SimpleNamespace(device="cpu", num_processes=1, gather=same, gather_for_metrics=same, reduce=same)

# Padding (a, L) of the answers' rows, and the mask of a prompt of one token before them (a, 1 + L).
MASK = torch.tensor([[i < n for i in range(LONGEST)] for n in LENGTHS]).long()
COMPLETION = torch.cat([torch.zeros(len(LENGTHS), 1).long(), MASK], dim=1)


def draw(low, high):
    """Multiples of 1/64 for each token, 0 in the padding."""
    numbers = [[random.randint(int(64 * low), int(64 * high)) / 64 for _ in range(LONGEST)] for _ in LENGTHS]
    return torch.tensor(numbers, dtype=torch.float64) * MASK


def trainer(kind, **fields):
    """A trainer that was never set up: only what its loss reads."""
    t = kind.__new__(kind)
    model = torch.nn.Module()
    model.is_gradient_checkpointing = False
    common = dict(model=model, accelerator=ACCELERATOR, aux_loss_enabled=False, _metrics={"train": defaultdict(list)},
                  _total_train_tokens=0, _tp_size=1, is_encoder_decoder=False,
                  args=SimpleNamespace(gradient_checkpointing_kwargs=None))
    for name, value in {**common, **fields}.items():
        object.__setattr__(t, name, value)
    return t


def fused(logps, mismatched=None):
    """A model with TRL's fused head, which says `logps`; of mismatched answers, `mismatched`."""
    def model(input_ids, **_):
        said = mismatched if mismatched is not None and (input_ids == 2).any() else logps
        return SimpleNamespace(log_probs=said, entropy=said, mean_logits=said, is_top1=said > 0)
    return model


def two_words(logps):
    """A model over a vocabulary of two, in which token 0 has these log-probabilities."""
    logits = torch.stack([logps, torch.log(-torch.expm1(logps))], dim=-1)
    padded = torch.cat([logits, torch.zeros_like(logits[:, :1])], dim=1)
    return lambda ids, **_: SimpleNamespace(logits=padded)


def dpo(policy, reference, pairs, **fields):
    """The mean over pairs. Its batches have the chosen answers before the rejected ones."""
    rows = [2 * p for p in pairs] + [2 * p + 1 for p in pairs]
    t = trainer(DPOTrainer, ref_model=fused(reference[rows]), ld_alpha=None, precompute_ref_logps=False,
                f_divergence_type="reverse_kl", use_weighting=False, loss_weights=[1.0], **fields)
    mask = COMPLETION[rows]
    inputs = dict(input_ids=torch.zeros_like(mask), completion_mask=mask, attention_mask=torch.ones_like(mask))
    return t._compute_loss(fused(policy[rows]), inputs, False)


def without_reference(kind, policy, pair, **fields):
    """The loss of one pair by the trainers that have no reference."""
    rows = [2 * pair, 2 * pair + 1]
    t = trainer(kind, padding_value=0, pad_token_id=0, **fields)
    batch = {}
    for name, row in zip(("chosen", "rejected"), rows):
        mask = COMPLETION[row : row + 1]
        # The prompt's one token is predicted by nobody, padding neither.
        begun = torch.cat([torch.ones(1, 1).long(), MASK[row : row + 1]], dim=1)
        batch |= {f"{name}_input_ids": torch.zeros_like(mask), f"{name}_attention_mask": begun,
                  f"{name}_labels": torch.where(mask == 1, 0, -100)}
    return t.get_batch_loss_metrics(two_words(policy[rows]), batch)[0]


def kto(policy, reference, drift, point):
    """TRL's batch of desirable and undesirable answers; its reference point goes to `point`."""
    t = trainer(KTOTrainer, ref_model=fused(reference, torch.zeros_like(drift)), precompute_ref_logps=False,
                calculate_KL=True, loss_type="kto", beta=0.1, desirable_weight=1.25, undesirable_weight=0.5)
    # Token 2 marks the mismatched answers.
    ids = torch.zeros_like(COMPLETION)
    batch = dict(input_ids=ids, attention_mask=torch.ones_like(ids), completion_mask=COMPLETION, KL_input_ids=ids + 2,
                 KL_attention_mask=torch.ones_like(ids), KL_completion_mask=COMPLETION,
                 label=torch.tensor([i % 2 == 0 for i in range(len(LENGTHS))]))
    loss = t._compute_loss(fused(policy, drift), batch, False)
    point.append(t._metrics["train"]["kl"][0])
    return loss


def grpo(policy, reference, old, advantages, loss_type, beta):
    """The tokens' loss, normalised over the batch."""
    arguments = SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1)
    t = trainer(GRPOTrainer, args=arguments, top_entropy_quantile=1.0, off_policy_mask_threshold=None,
                importance_sampling_level="token", beta=beta, epsilon_low=0.2, epsilon_high=0.28, use_vllm=False,
                loss_type=loss_type, current_gradient_accumulation_steps=1, _entropy_bonus_enabled=False,
                _get_per_token_logps_and_entropies=lambda *_, **__: (policy, torch.zeros_like(policy), None))
    inputs = dict(prompt_ids=MASK[:, :1], prompt_mask=MASK[:, :1], completion_ids=MASK, completion_mask=MASK,
                  advantages=advantages, ref_per_token_logps=reference, old_per_token_logps=old,
                  num_items_in_batch=MASK.sum())
    return t._compute_loss(None, inputs)


def model_of_pairs():
    """DPO of a model with adapters, by TRL's collator, fused head and switch to the reference."""
    base, config = CASES["lora-llama-tiny"]
    loaded = AutoModelForCausalLM.from_pretrained(os.path.join(HERE, base), attn_implementation="eager")
    text = load_file(os.path.join(HERE, base, "golden.safetensors"))["tokens"].view(3, -1).tolist()
    pairs = [{"prompt_ids": text[0][:5], "chosen_ids": text[0][5:12], "rejected_ids": text[1][:7]},
             {"prompt_ids": text[1][8:11], "chosen_ids": text[2][:10], "rejected_ids": text[2][14:22]}]

    # All in double, as make_golden.py does it.
    with mock.patch.object(torch, "float32", torch.float64), mock.patch.object(torch, "float", torch.float64), \
         mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        model = type(loaded)(loaded.config).double()
        model.load_state_dict(loaded.state_dict())
        model, adapters = adapt(model, base, config, lambda x: x.to(loaded.dtype).double())
        add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
        t = trainer(DPOTrainer, model=model, ref_model=None, ld_alpha=None, precompute_ref_logps=False, beta=0.1,
                    f_divergence_type="reverse_kl", use_weighting=False, loss_types=["sigmoid"], loss_weights=[1.0])
        t.accelerator.unwrap_model = lambda x: x
        loss = t._compute_loss(model, DataCollatorForPreference(pad_token_id=0)(pairs), False)
        assert loss.dtype == torch.float64
        loss.backward()
    norm = lambda half: math.sqrt(sum(float((p.grad**2).sum()) for n, p in adapters.items() if half in n))
    return {"pairs": pairs, "loss": loss.item(), "margin": t._metrics["train"]["rewards/margins"][0],
            "norm_A": norm("lora_A"), "norm_B": norm("lora_B")}


def main():
    random.seed(7)
    policy = draw(-4, -0.25).requires_grad_()
    # The mean over six answers of multiples of 3 is such a multiple again, which a float holds.
    reference, drift = draw(-4, -0.25), 3 * draw(-0.25, 0.5)
    old = (policy.detach() + draw(-0.5, 0.5)) * MASK
    advantages = torch.tensor([1.5, -0.75, 0.25, -1.0, 0.0, 0.625], dtype=torch.float64)
    every, points, cases = range(len(LENGTHS) // 2), [], {}

    def case(name, loss):
        gradient, = torch.autograd.grad(loss, policy)
        assert loss.dtype == torch.float64, name
        cases[name] = {"loss": loss.item(), "gradient": gradient[MASK.bool()].tolist()}

    # TRL's `sigmoid` takes no label smoothing; `aot` does, and has nothing to sort in one pair.
    mean = lambda of: sum(of(p) for p in every) / len(every)
    case("dpo", dpo(policy, reference, every, loss_types=["sigmoid"], beta=0.1))
    case("cdpo", mean(lambda p: dpo(policy, reference, [p], loss_types=["aot"], beta=0.1, label_smoothing=0.1)))
    case("ipo", dpo(policy, reference, every, loss_types=["ipo"], beta=0.1))

    # ORPO's head rounds to float, unless Tensor.float stays in double. Its NLL is a mean over the tokens of
    # a batch, so a batch is one pair.
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        simpo = dict(loss_type="simpo", beta=2.0, simpo_gamma=0.5, cpo_alpha=0, alpha=0.0, label_smoothing=0)
        case("simpo", mean(lambda p: without_reference(CPOTrainer, policy, p, **simpo)))
        case("orpo", mean(lambda p: without_reference(ORPOTrainer, policy, p, beta=0.3)))

    # The reference point of a policy that has drifted, and of one that seems to have come nearer than near.
    case("kto", kto(policy, reference, drift, points))
    case("kto at 0", kto(policy, reference, -drift, points))

    # The first update of a rollout, and a later one. One micro-batch has the same mean under both names.
    case("grpo", grpo(policy, reference, None, advantages, "dapo", 0.0))
    case("grpo with kl", grpo(policy, reference, None, advantages, "dapo", 0.3))
    case("grpo clipped", grpo(policy, reference, old, advantages, "dapo", 0.0))
    case("grpo clipped with kl", grpo(policy, reference, old, advantages, "bnpo", 0.3))

    tokens = lambda x: x.detach()[MASK.bool()].tolist()
    golden = {"versions": f"torch {torch.__version__}, transformers {transformers.__version__}, "
                          f"peft {peft.__version__}, trl {trl.__version__}", "lengths": LENGTHS,
              "policy": tokens(policy), "reference": tokens(reference), "old": tokens(old),
              "advantages": advantages.tolist(), "kto": points, "cases": cases, "model": model_of_pairs()}
    with open(os.path.join(HERE, "trl.json"), "w") as out:
        # One list a line.
        one_line = lambda numbers: "[" + " ".join(numbers[1].split()) + "]"
        out.write(re.sub(r"\[([^][{}]*)\]", one_line, json.dumps(golden, indent=1)) + "\n")
    for name, x in cases.items():
        print(name, x["loss"])
    print("model", golden["model"]["loss"])


if __name__ == "__main__":
    main()
