// ds_keys.h - the keys of DeepSpeed's and Accelerate's configurations, and the flags they become
//   A row has a key, the function that checks its value, the flag it sets, DeepSpeed's default if
//   ours differs, and a note on what differs here. ds_config.h reads a file by these rows.
//   Every function that returns a text returns "" or what is wrong with the current key.
#pragma once
#include <map>
#include "../io/config.h"
#include "../io/json.h"
#include "../text.h"

namespace llmc {

typedef nlohmann::json Json;

// A file that is being translated into a Config, and the lines that report it.
struct DsFile {
    Config& c;
    std::map<std::string, Json> keys;
    std::set<std::string> user;     // flags that were given before
    std::vector<std::string> lines;
    std::string says;               // the current key and its value
};

// A key and its flag. use() sets the flag, or checks that the value works here.
struct DsRow {
    const char* key;
    std::string (*use)(DsFile& f, const DsRow& row, const Json& value);
    const char* flag = "";
    const char* words = "";        // "a=b c=": a becomes b, and c needs no change
    const char* missing = nullptr; // DeepSpeed's default, if the key's block is there
    const char* note = "";         // what differs here
};

// ----------------------------------------------------------------------------
// how a key is applied

// Set a flag, unless the command line has set it. An empty value leaves it unchanged.
inline std::string ds_set(DsFile& f, const DsRow& row, const std::string& value) {
    auto line = [&](const auto&... parts) { f.lines.push_back(concat(f.says, parts...)); };
    const Flag* flag = find_flag(row.flag);
    if (!flag) {
        line(": so it is here");
        return "";
    }

    // Keep the flag's value if there is nothing to set, or if the command line has set it.
    std::string before = field_text(f.c, flag->field);
    bool wins = f.user.count(row.flag) && !value.empty();
    if (value.empty() || wins) {
        line(" -> --", row.flag, " stays ", before, wins ? ": the command line wins" : row.note);
        return "";
    }

    // Refuse two keys that want different values of a flag. Only lr may be set twice: a schedule's
    // peak replaces the optimizer's rate.
    bool again = was_given(f.c, row.flag) && strcmp(row.flag, "lr");
    line(" -> --", row.flag, " ", value, row.note);
    std::string wrong = set_flag(f.c, row.flag, value);
    std::string now = field_text(f.c, flag->field);
    return wrong.empty() && again && now != before
               ? concat("another key wants --", row.flag, " ", before)
               : wrong;
}

// Set the flag to a number, as if the user had typed it; the flag checks its range. A text that
// holds a number is refused, as in DeepSpeed.
inline std::string ds_number(DsFile& f, const DsRow& row, const Json& value) {
    return value.is_number() ? ds_set(f, row, value.dump()) : "wants a number";
}

// Translate a word, number, true or false into the flag's word. Any other value is refused.
inline std::string ds_word(DsFile& f, const DsRow& row, const Json& value) {
    std::string word = value.is_string() ? value.get<std::string>() : value.dump();
    std::string pair, known;
    for (std::istringstream in(row.words); in >> pair;) {
        std::string from = pair.substr(0, pair.find('='));
        if (from == word)
            return ds_set(f, row, pair.substr(from.size() + 1));
        known += (known.empty() ? "" : ", ") + from;
    }
    return "not built here, which has: " + known;
}

// Set the schedule and its end. DeepSpeed's decay ends at 0, ours at --min-lr, which is a tenth of
// the peak by default.
inline std::string ds_schedule(DsFile& f, const DsRow& row, const Json& value) {
    std::string wrong = ds_word(f, row, value);
    bool falls = wrong.empty() && value == "WarmupDecayLR";
    return falls ? ds_set(f, {"", nullptr, "min-lr"}, "0") : wrong;
}

// Set the loss scale; 0 means dynamic.
inline std::string ds_loss_scale(DsFile& f, const DsRow& row, const Json& value) {
    return value == 0 ? ds_set(f, row, "dynamic") : ds_number(f, row, value);
}

// Set a number from its power of two.
inline std::string ds_power(DsFile& f, const DsRow& row, const Json& value) {
    if (!value.is_number_unsigned() || value > 32)
        return "wants a whole number up to 32";
    return ds_set(f, row, std::to_string(int64_t(1) << value.get<int>()));
}

// Set both of Adam's betas.
inline std::string ds_betas(DsFile& f, const DsRow& row, const Json& value) {
    if (!value.is_array() || value.size() != 2)
        return "wants two numbers";
    std::string wrong = ds_number(f, row, value[0]);
    return wrong.empty() ? ds_number(f, {"", nullptr, "beta2"}, value[1]) : wrong;
}

// Set the folder for state on nvme. With any other device the key is ignored.
inline std::string ds_folder(DsFile& f, const DsRow& row, const Json& value) {
    std::string key = row.key;
    auto device = f.keys.find(key.substr(0, key.size() - strlen("nvme_path")) + "device");
    if (device == f.keys.end() || device->second != "nvme") {
        if (f.keys.count(key))
            f.lines.push_back(f.says + ": for a device nvme: left out");
        return "";
    }
    return value.is_string() ? ds_set(f, row, value.get<std::string>()) : "wants a folder";
}

// Set --offload. Two keys share it, so each sets what both of them want.
inline std::string ds_offload(DsFile& f, const DsRow& row, const Json& value) {
    if (value != "none" && value != "cpu" && value != "nvme")
        return "not built here, which has: none, cpu, nvme";

    // Find the other key: its name has param in place of optimizer, or optimizer in place of param.
    std::string both, place;
    for (auto [word, what] : {std::pair("optimizer", "optimizer"), std::pair("param", "weights")}) {
        std::string key = row.key;
        for (std::string from : {"optimizer", "param"})
            if (size_t at = key.find("_" + from); at != std::string::npos)
                key.replace(at + 1, from.size(), word);
        auto at = f.keys.find(key);
        if (at == f.keys.end() || at->second == "none")
            continue;

        // Both keys must want the same place.
        std::string device = json_word(at->second);
        if (!place.empty() && device != place)
            return concat(key, " ", device, " is another place: --offload-to is one for all");
        both += (both.empty() ? "" : ",") + std::string(what);
        place = device;
    }
    return ds_set(f, row, both);
}

// Set dp. Accelerate counts all processes; dp is what the other axes leave of them.
inline std::string ds_processes(DsFile& f, const DsRow& row, const Json& value) {
    int64_t others = int64_t(f.c.tp) * f.c.pp * f.c.cp;
    bool good = value.is_number_unsigned() && value >= 1 && value <= 1000000;
    if (!good || value.get<int64_t>() % others)
        return concat("wants a multiple of tp x pp x cp = ", others);
    return ds_set(f, row, std::to_string(value.get<int64_t>() / others));
}

// ----------------------------------------------------------------------------
// the tables

// clang-format off
// Rows whose use is null are sizes of batches: ds_batch() takes them together.
inline const std::vector<DsRow>& ds_table() {
    static const std::vector<DsRow> table = {
        {"bf16.enabled",                          ds_word,       "precision", "true=bf16 false="},
        {"fp16.enabled",                          ds_word,       "precision", "true=fp16 false="},
        {"mixed_precision",                       ds_word,       "precision",
         "bf16=bf16 fp16=fp16 no="},
        {"fp16.loss_scale",                       ds_loss_scale, "loss-scale"},
        {"fp16.consecutive_hysteresis",           ds_word,       "loss-scale-rule",
         "false=deepspeed", "false"},
        {"fp16.initial_scale_power",              ds_power,      "loss-scale-start"},
        {"fp16.loss_scale_window",                ds_number,     "loss-scale-window"},
        {"fp16.hysteresis",                       ds_number,     "loss-scale-hysteresis"},
        {"fp16.min_loss_scale",                   ds_number,     "loss-scale-min"},
        {"fp16.auto_cast",                        ds_word,       "", "false="},
        {"activation_checkpointing.cpu_checkpointing", ds_word,  "", "false="},
        {"amp.enabled",                           ds_word,       "", "false="},
        {"communication_data_type",               ds_word,       "gradients",
         "fp32=float bf16=bf16"},
        {"sparse_gradients",                      ds_word,       "", "false="},

        {"zero_optimization.stage",                    ds_number, "zero"},
        {"zero_optimization.offload_param.device",     ds_offload, "offload"},
        {"zero_optimization.offload_optimizer.device", ds_offload, "offload"},
        {"zero_optimization.offload_param.nvme_path",     ds_folder, "offload-to", "",
         "\"/local_nvme\""},
        {"zero_optimization.offload_optimizer.nvme_path", ds_folder, "offload-to", "",
         "\"/local_nvme\""},
        {"zero_optimization.zero_quantized_weights",   ds_word,   "", "false="},
        {"zero_optimization.zero_quantized_gradients", ds_word,   "", "false="},
        {"zero_optimization.zero_hpz_partition_size",  ds_number, "hpz"},

        {"gradient_clipping",                     ds_number,   "clip", "", "0"},
        {"optimizer.type",                        ds_word,     "optimizer",
         "AdamW=adamw adamw=adamw Adam=adamw adam=adamw SGD=sgd", "\"\""},
        {"optimizer.params.lr",                   ds_number,   "lr", "", "0.001"},
        {"optimizer.params.betas",                ds_betas,    "beta1", "", "[0.9,0.999]"},
        {"optimizer.params.eps",                  ds_number,   "eps", "", "1e-08"},
        {"optimizer.params.weight_decay",         ds_number,   "weight-decay", "", "0",
         ", of matrices and tables alone"},
        {"optimizer.params.adam_w_mode",          ds_word,     "", "true="},
        {"optimizer.params.bias_correction",      ds_word,     "", "true="},
        {"optimizer.params.amsgrad",              ds_word,     "", "false="},
        {"optimizer.params.momentum",             ds_word,     "", "0= 0.0="},
        {"scheduler.type",                        ds_schedule, "schedule",
         "WarmupLR=constant WarmupDecayLR=linear", "\"\""},
        {"scheduler.params.warmup_max_lr",        ds_number,   "lr", "", "\"\"",
         ", in the place of the optimizer's"},
        {"scheduler.params.warmup_min_lr",        ds_word,     "", "0= 0.0="},
        {"scheduler.params.warmup_num_steps",     ds_number,   "warmup", "", "1000"},
        {"scheduler.params.warmup_type",          ds_word,     "warmup", "linear= log=", "\"log\"",
         ", straight: lr (step + 1) / warmup, two steps ahead of DeepSpeed's, and no logarithm"},
        {"scheduler.params.total_num_steps",      ds_number,   "steps"},
        {"scheduler.params.last_batch_iteration", ds_word,     "", "-1="},

        {"sequence_parallel_size",                ds_number,   "cp", "", nullptr,
         ", by gathered keys: for DeepSpeed's own way give --cp-method ulysses"},

        {"num_processes",                                ds_processes, "dp"},
        {"distributed_type",                             ds_word,      "",
         "DEEPSPEED= MULTI_GPU= MULTI_CPU= NO="},
        {"deepspeed_config.zero_stage",                  ds_number,    "zero"},
        {"deepspeed_config.gradient_clipping",           ds_number,    "clip"},
        {"deepspeed_config.offload_param_device",        ds_offload,   "offload"},
        {"deepspeed_config.offload_optimizer_device",    ds_offload,   "offload"},
        {"deepspeed_config.offload_param_nvme_path",     ds_folder,    "offload-to"},
        {"deepspeed_config.offload_optimizer_nvme_path", ds_folder,    "offload-to"},
        {"deepspeed_config.gradient_accumulation_steps", nullptr,      "batch-tokens"},
        {"gradient_accumulation_steps",                  nullptr,      "batch-tokens"},
        {"train_batch_size",                             nullptr,      "batch-tokens"},
        {"train_micro_batch_size_per_gpu",               nullptr,      "micro-batch"},
        {"steps_per_print",                              ds_number,    "log-every"},
    };
    return table;
}

// Keys that change no result: sizes of buffers, measuring and printing, the start of ranks. A name
// that ends in . or _ stands for all keys that begin with it, except those with a row.
inline const char* const DS_LEFT[] = {
    "zero_optimization.overlap_comm", "zero_optimization.contiguous_gradients",
    "zero_optimization.reduce_bucket_size", "zero_optimization.reduce_scatter",
    "zero_optimization.allgather_partitions", "zero_optimization.allgather_bucket_size",
    "zero_optimization.sub_group_size", "zero_optimization.round_robin_gradients",
    "zero_optimization.ignore_unused_parameters", "zero_optimization.stage3_",
    "zero_optimization.offload_optimizer.", "zero_optimization.offload_param.",
    "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer", "prescale_gradients",
    "optimizer.params.torch_adam", "wall_clock_breakdown", "memory_breakdown", "dump_state",
    "flops_profiler.", "comms_logger.", "tensorboard.", "wandb.", "csv_monitor.", "aio.",
    "activation_checkpointing.", "deepspeed_config.zero3_",
    "deepspeed_config.deepspeed_multinode_launcher", "compute_environment", "debug",
    "downcast_bf16", "enable_cpu_affinity", "machine_rank", "main_", "num_machines",
    "rdzv_backend", "same_network", "tpu_", "use_cpu"};
// clang-format on

} // namespace llmc
