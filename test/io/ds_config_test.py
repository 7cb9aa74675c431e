#!/usr/bin/env python3
"""dev/ds_config.py on configurations as DeepSpeed's and Accelerate's pages show them: their flags, and refusals."""
import json, os, subprocess, sys, tempfile

PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../dev/ds_config.py")
failed = 0


def translate(config, *words):
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(config if isinstance(config, str) else json.dumps(config))
        file.flush()
        ran = subprocess.run([sys.executable, PROGRAM, file.name, *words], capture_output=True, text=True)
    flags = dict(line.split(" = ", 1) for line in ran.stdout.splitlines() if not line.startswith("#"))
    return flags if ran.returncode == 0 else ran.stderr


def expect(found, wanted):
    global failed
    good = wanted in found if isinstance(wanted, str) else found == wanted
    failed += not good
    if not good:
        print(f"FAIL {found!r}: not {wanted!r}")


zero3 = {
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-7, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 4e-5,
                                                      "warmup_num_steps": 50, "total_num_steps": 900}},
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none", "pin_memory": True},
                          "overlap_comm": True, "reduce_bucket_size": 5e8},
    "gradient_clipping": 0.5, "steps_per_print": 2000, "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}
expect(translate(zero3, "--seq", "128", "--dp", "2"), {
    "precision": "fp16", "loss-scale": "dynamic", "zero": "3", "clip": "0.5", "optimizer": "adamw", "lr": "4e-05",
    "beta1": "0.8", "beta2": "0.999", "eps": "1e-07", "weight-decay": "3e-07", "schedule": "linear", "min-lr": "0",
    "warmup": "50", "steps": "900", "log-every": "2000", "micro-batch": "4", "batch-tokens": "4096"})

# "auto" is the command line's, and a key that is left out has DeepSpeed's default.
expect(translate({"optimizer": {"type": "Adam", "params": {"lr": "auto"}}, "gradient_clipping": "auto"}),
       {"optimizer": "adamw", "beta1": "0.9", "beta2": "0.999", "eps": "1e-08", "weight-decay": "0"})
expect(translate({"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "num_processes": 8,
                  "deepspeed_config": {"zero_stage": 2, "gradient_clipping": 2.0}}),
       {"precision": "bf16", "zero": "2", "clip": "2.0"})
nvme = {"device": "nvme"}
expect(translate({"zero_optimization": {"offload_optimizer": nvme, "offload_param": nvme | {"nvme_path": "/fast"}},
                  "gradient_clipping": 1}), {"clip": "1", "offload": "weights,optimizer", "offload-to": "/fast"})

# Muon: the page's example, rates of its own, and what its schedule makes one.
muon = {"type": "Muon", "params": {"lr": 0.001, "momentum": 0.9, "weight_decay": 0.0, "muon_lr": 0.02,
                                   "ns_method": "gram"}}
said = {"clip": "1", "lr": "0.02", "beta1": "0.9", "beta2": "0.999", "eps": "1e-08", "weight-decay": "0.0",
        "optimizer": "muon,scale=shape,momentum=0.9,table=0.001,head=0.001,vectors=0.001"}
expect(translate({"optimizer": muon, "gradient_clipping": 1}), said)
schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.003, "warmup_num_steps": 10}}
expect(translate({"optimizer": muon, "gradient_clipping": 1, "scheduler": schedule}),
       said | {"optimizer": "muon,scale=shape,momentum=0.9", "lr": "0.003", "schedule": "constant", "warmup": "10"})
expect(translate({"optimizer": {"type": "muon", "params": {"adam_lr": 0.0003}}, "gradient_clipping": 1}),
       said | {"lr": "0.001", "weight-decay": "0", "optimizer": "muon,scale=shape,table=0.0003,head=0.0003,vectors=0.0003"})
expect(translate({"optimizer": {"type": "muon", "params": {"lr": "auto"}}, "gradient_clipping": 1}),
       {key: value for key, value in said.items() if key != "lr"} | {"weight-decay": "0", "optimizer": "muon,scale=shape"})

# Sizes of a batch.
for sizes, micro, whole in (({"train_batch_size": 24, "gradient_accumulation_steps": 3}, 2, 24),
                            ({"train_batch_size": 24}, 6, 24), ({"train_micro_batch_size_per_gpu": 3}, 3, 12),
                            ({"gradient_accumulation_steps": 2}, 8, 64)):
    found = translate(sizes | {"gradient_clipping": 1}, "--dp", "4", "--seq", "16")
    expect(found, {"clip": "1", "micro-batch": str(micro), "batch-tokens": str(16 * whole)})
expect(translate({"train_batch_size": 3}, "--dp", "4"), "train_batch_size 3 is not")
expect(translate({"train_batch_size": 2.5}), "wants a whole number from 1")
expect(translate({"gradient_accumulation_steps": 2}), "counts tokens: give --seq")

# Files that are refused.
for config, says in ((["x"], "is no JSON object"),
                     ({"zero_optimisation": {"stage": 2}}, "did you mean zero_optimization.stage"),
                     ({"zero_optimization": {"stage": "2"}}, 'stage "2": wants a number'),
                     ({"fp16": {"enabled": 1}}, "fp16.enabled 1: not built here"),
                     ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "another key wants --precision bf16"),
                     ({"fp16": {"loss_scale_window": 500}}, "not built here, which has: 1000"),
                     ({"optimizer": muon | {"params": {"muon_lr": "2"}}}, 'muon_lr "2": wants a number'),
                     ({"optimizer": muon | {"params": {"ns_method": "qr"}}}, 'ns_method "qr": not built here'),
                     ({"optimizer": muon | {"params": {"per_head_muon": True}}}, "takes whole matrices"),
                     ({"optimizer": {"type": "Lamb"}}, 'optimizer.type "Lamb": not built here'),
                     ({"optimizer": {"params": {"lr": 1}}}, "optimizer.type: is left out"),
                     ({"optimizer": {"type": "Adam", "params": {"betas": [0.9]}}}, "wants two numbers"),
                     ({"optimizer": {"type": "SGD", "params": {"momentum": 0.9}}}, "momentum 0.9: not built"),
                     ({"\x1b[31m": 1}, "x1b[31m': is not known here")):
    expect(translate(config), says)
print("failed" if failed else "dev/ds_config.py: passed")
sys.exit(failed > 0)
