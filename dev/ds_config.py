#!/usr/bin/env python3
"""Lines for --config from a JSON configuration of DeepSpeed, Hugging Face's Trainer or Accelerate.

usage: dev/ds_config.py FILE [--seq T] [--dp N] > run.cfg;  build/tune_gpt --config run.cfg ...

Each key prints what became of it, as a comment, and its flag as a line. A key that would change the run and has no
flag ends the program with exit status 1. "auto" leaves the flag's default. A key that its block leaves out prints
DeepSpeed's default where that is not ours. Flags behind --config on the command line win. Batches are counted in
sequences there and in tokens here, so accumulation needs --seq; --dp is the number of data-parallel ranks (1).
"""
import argparse, difflib, json, sys

NUMBER = None
# key: flag ("": it must have one of the values), value here by value there, DeepSpeed's default where ours differs
ROWS = {
    "bf16.enabled": ("precision", {True: "bf16", False: ""}),
    "fp16.enabled": ("precision", {True: "fp16", False: ""}),
    "mixed_precision": ("precision", {"bf16": "bf16", "fp16": "fp16", "no": ""}),
    "fp16.loss_scale": ("loss-scale", NUMBER),
    "fp16.consecutive_hysteresis": ("", {False: ""}),
    "fp16.initial_scale_power": ("", {16: ""}),
    "fp16.loss_scale_window": ("", {1000: ""}),
    "fp16.hysteresis": ("", {2: ""}),
    "fp16.min_loss_scale": ("", {1: ""}),
    "fp16.auto_cast": ("", {False: ""}),
    "activation_checkpointing.cpu_checkpointing": ("", {False: ""}),
    "amp.enabled": ("", {False: ""}),
    "communication_data_type": ("gradients", {"fp32": "float", "bf16": "bf16"}),
    "sparse_gradients": ("", {False: ""}),
    "zero_optimization.stage": ("zero", NUMBER),
    "zero_optimization.offload_param.device": ("offload", {"none": "", "cpu": "weights", "nvme": "weights"}),
    "zero_optimization.offload_optimizer.device": ("offload", {"none": "", "cpu": "optimizer", "nvme": "optimizer"}),
    "zero_optimization.zero_quantized_weights": ("", {False: ""}),
    "zero_optimization.zero_quantized_gradients": ("", {False: ""}),
    "zero_optimization.zero_hpz_partition_size": ("hpz", NUMBER),
    "gradient_clipping": ("clip", NUMBER, 0),
    "optimizer.type": ("optimizer", {"AdamW": "adamw", "adamw": "adamw", "Adam": "adamw", "adam": "adamw",
                                     "SGD": "sgd", "Muon": "muon", "muon": "muon"}, ""),
    "optimizer.params.lr": ("lr", NUMBER, 0.001),
    "optimizer.params.betas": ("beta1", NUMBER, [0.9, 0.999]),
    "optimizer.params.eps": ("eps", NUMBER, 1e-8),
    "optimizer.params.weight_decay": ("weight-decay", NUMBER, 0),
    "optimizer.params.adam_w_mode": ("", {True: ""}),
    "optimizer.params.bias_correction": ("", {True: ""}),
    "optimizer.params.amsgrad": ("", {False: ""}),
    "optimizer.params.momentum": ("", {0: ""}),
    "scheduler.type": ("schedule", {"WarmupLR": "constant", "WarmupDecayLR": "linear"}, ""),
    "scheduler.params.warmup_max_lr": ("lr", NUMBER, ""),
    "scheduler.params.warmup_min_lr": ("", {0: ""}),
    "scheduler.params.warmup_num_steps": ("warmup", NUMBER, 1000),
    "scheduler.params.warmup_type": ("", {"linear": "", "log": ""}), # straight here
    "scheduler.params.total_num_steps": ("steps", NUMBER),
    "scheduler.params.last_batch_iteration": ("", {-1: ""}),
    "sequence_parallel_size": ("cp", NUMBER), # by gathered keys; --cp-method ulysses is DeepSpeed's way
    "distributed_type": ("", {name: "" for name in ("DEEPSPEED", "MULTI_GPU", "MULTI_CPU", "NO")}),
    "deepspeed_config.zero_stage": ("zero", NUMBER),
    "deepspeed_config.gradient_clipping": ("clip", NUMBER),
    "deepspeed_config.offload_param_device": ("offload", {"none": "", "cpu": "weights", "nvme": "weights"}),
    "deepspeed_config.offload_optimizer_device": ("offload", {"none": "", "cpu": "optimizer", "nvme": "optimizer"}),
    "steps_per_print": ("log-every", NUMBER),
}
BATCH = ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
         "deepspeed_config.gradient_accumulation_steps"]
# keys that change no result; one that ends in . or _ stands for all that begin with it
LEFT = """zero_optimization.overlap_comm zero_optimization.contiguous_gradients zero_optimization.reduce_bucket_size
    zero_optimization.reduce_scatter zero_optimization.allgather_partitions zero_optimization.allgather_bucket_size
    zero_optimization.sub_group_size zero_optimization.round_robin_gradients
    zero_optimization.ignore_unused_parameters zero_optimization.stage3_ zero_optimization.offload_optimizer.
    zero_optimization.offload_param. zero_allow_untested_optimizer zero_force_ds_cpu_optimizer prescale_gradients
    optimizer.params.torch_adam wall_clock_breakdown memory_breakdown dump_state flops_profiler. comms_logger.
    tensorboard. wandb. csv_monitor. aio. activation_checkpointing. deepspeed_config.zero3_
    deepspeed_config.deepspeed_multinode_launcher deepspeed_config.offload_ compute_environment debug downcast_bf16
    enable_cpu_affinity machine_rank main_ num_machines num_processes rdzv_backend same_network tpu_ use_cpu""".split()


def flatten(value, name=""):
    if not isinstance(value, dict):
        return {name: value}
    return {key: x for part, inner in value.items() for key, x in flatten(inner, f"{name}.{part}".lstrip(".")).items()}


def check_keys(keys):
    for key in keys:
        left = any(key.startswith(x) if x[-1] in "._" else key == x for x in LEFT)
        if key in ROWS or key in BATCH:
            continue
        if not left:
            near = difflib.get_close_matches(key, ROWS, 1)
            sys.exit(f"{key!a}: is not known here{near and ', did you mean ' + near[0] or ''}: where it changes no "
                     "result take it out of the file")
        print(f"# {key} {json.dumps(keys[key])}: no counterpart here, changes no result")


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# The flags that one key sets, by name.
def flags_of(key, value):
    flag, words = ROWS[key][:2]
    says = f"{key} {json.dumps(value)}"
    if key == "optimizer.params.betas":
        if not (isinstance(value, list) and len(value) == 2 and all(map(is_number, value))):
            sys.exit(f"{says}: wants two numbers")
        return {"beta1": value[0], "beta2": value[1]}
    if words is NUMBER:
        if not is_number(value):
            sys.exit(f"{says}: wants a number")
        return {flag: "dynamic" if key == "fp16.loss_scale" and value == 0 else value}
    there = [x for x in words if x == value and isinstance(x, bool) == isinstance(value, bool)]
    if not there:
        sys.exit(f"{says}: not built here, which has: {', '.join(json.dumps(x) for x in words)}")
    flags = {flag: words[value]} if words[value] else {}
    return flags | ({"min-lr": 0} if value == "WarmupDecayLR" else {})


# DeepSpeed's Muon as words of --optimizer: its own keys leave the list, and optimizer.params.lr becomes Muon's. Its
# matrices have simple's iterations (Gram's are the same polynomial) and sqrt(max(1, r / c)), the others adam_lr. A fused
# q, k, v is three matrices here and one there.
def take_muon(keys):
    given = {name: keys.pop(f"optimizer.params.{name}", None)
             for name in ("lr", "muon_lr", "adam_lr", "momentum", "ns_method", "per_head_muon")}
    for name, value in given.items():
        if name == "ns_method" and value not in (None, "gram", "standard"):
            sys.exit(f"ns_method {json.dumps(value)}: not built here, which has: \"gram\", \"standard\"")
        if name == "per_head_muon" and value not in (None, False):
            sys.exit(f"per_head_muon {json.dumps(value)}: not built here, which takes whole matrices")
        if name in ("lr", "muon_lr", "adam_lr", "momentum") and value not in (None, "auto") and not is_number(value):
            sys.exit(f"{name} {json.dumps(value)}: wants a number")
        if value is not None and name != "lr":
            print(f"# optimizer.params.{name} {json.dumps(value)}")

    # A schedule's rate is that of all groups.
    lr, muon_lr, adam_lr, momentum = (None if given[name] == "auto" else given[name]
                                      for name in ("lr", "muon_lr", "adam_lr", "momentum"))
    lr = 0.001 if given["lr"] is None else lr
    muon_lr, adam_lr = (lr if rate is None else rate for rate in (muon_lr, adam_lr))
    keys["optimizer.params.lr"] = "auto" if muon_lr is None else muon_lr
    words = ["muon", "scale=shape"] + ([f"momentum={momentum}"] if momentum is not None else [])
    if adam_lr not in (None, muon_lr) and not is_number(keys.get("scheduler.params.warmup_max_lr")):
        words += [f"{group}={adam_lr}" for group in ("table", "head", "vectors")]
    return ",".join(words)


# Two of the three sizes of a batch give the third, as in DeepSpeed.
def batch_of(keys, args):
    sizes = []
    for names in (BATCH[:1], BATCH[1:2], BATCH[2:]):
        size = next((keys[name] for name in names if keys.get(name) not in (None, "auto")), 0)
        if not (is_number(size) and size == int(size) >= 0) or (size == 0 and any(keys.get(n) == 0 for n in names)):
            sys.exit(f"{names[0]} {size}: wants a whole number from 1")
        sizes.append(int(size))
    whole, micro, steps = sizes
    if not any(sizes):
        return {}
    micro = micro or (0 if whole else 8)
    steps = steps or (0 if whole and micro else 1)
    whole = whole or micro * steps * args.dp
    micro = micro or whole // (steps * args.dp)
    steps = steps or whole // (micro * args.dp)
    if whole != micro * steps * args.dp or not whole:
        sys.exit(f"train_batch_size {whole} is not train_micro_batch_size_per_gpu {micro} x "
                 f"gradient_accumulation_steps {steps} x dp {args.dp}: change one, or leave one out")
    if steps > 1 and not args.seq:
        sys.exit("gradient_accumulation_steps: --batch-tokens counts tokens: give --seq")
    print(f"# train_batch_size {whole} = {micro} a micro-batch x {steps} accumulated x dp {args.dp}")
    return {"micro-batch": micro} | ({"batch-tokens": whole * args.seq} if args.seq else {})


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("file")
    parser.add_argument("--seq", type=int, default=0)
    parser.add_argument("--dp", type=int, default=1)
    args = parser.parse_args()
    config = json.load(open(args.file))
    if not isinstance(config, dict):
        sys.exit(f"{args.file}: is no JSON object")
    keys = flatten(config)
    muon = take_muon(keys) if str(keys.get("optimizer.type")).lower() == "muon" else ""
    check_keys(keys)

    # Take each row: the file's value, or DeepSpeed's default where the row's block is there.
    flags = {}
    for key, row in ROWS.items():
        block = key.rpartition(".")[0].removesuffix("params").rstrip(".")
        there = any(k.startswith(block + ".") for k in keys) if block else "distributed_type" not in keys
        value = keys.get(key, row[2] if len(row) > 2 and there else None)
        if value is None or value == "auto":
            continue
        if value == "":
            sys.exit(f"{key}: is left out, and has to be there")
        for flag, x in flags_of(key, value).items():
            if flag == "offload" and flag in flags:
                x = f"{flags[flag]},{x}"
            elif flag in flags and flag != "lr" and flags[flag] != x:
                sys.exit(f"{key} {json.dumps(value)}: another key wants --{flag} {flags[flag]}")
            flags[flag] = muon if x == "muon" else x
        whose = "" if key in keys else ", a default of DeepSpeed's"
        print(f"# {key} {json.dumps(value)}{whose}")

    # Offloaded state lies in the host's memory, or in one folder.
    places = {value for key, value in keys.items() if key.endswith("device") and value not in ("none", "auto")}
    if len(places) > 1:
        sys.exit("offload: --offload-to is one place for all")
    if "nvme" in places:
        flags["offload-to"] = next((v for k, v in keys.items() if k.endswith("nvme_path")), "/local_nvme")
    for flag, value in (flags | batch_of(keys, args)).items():
        print(f"{flag} = {value}")


main()
