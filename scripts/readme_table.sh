#!/usr/bin/env bash
# Write the README's table of files from their first lines; --check only says whether it is current.
set -eu
cd "$(dirname "$0")/.."
table() {
    echo '| file | lines | what it is |'
    echo '|---|---:|---|'
    for f in train_gpt_min.cpp train_gpt.cu llmc/common.h llmc/{embedding,layernorm,rmsnorm,rope,gelu,swiglu,matmul,linear,attention,attention_sm80,attention_sm90,hopper,crossentropy,adamw,grad_norm}.cuh \
        llmc/{model,gpt2,llama,head,context,grid,action,plan,pipeline,tensor_parallel,zero,layout,timeline,comm,comm_group,comm_local,comm_mpi,comm_nccl,comm_placement,arena,trainer,step,generate,evaluate,explain}.h \
        llmc/{config,tokenizer,tokenizer_files,tokenizer_export,dataloader,prepare,text_batch,text_stream,files,safetensors,huggingface,model_files,checkpoint,lr_schedule,sampler,logger,mfu,rand}.h; do
        printf '| [%s](%s) | %d | %s |\n' "$(basename "$f")" "$f" "$(wc -l <"$f")" "$(head -n 1 "$f" | sed -E 's|^// [^ ]+ - ||; s|arXiv:([0-9.]+)|[arXiv:\1](https://arxiv.org/abs/\1)|g')"
    done
}
readme=$(awk -v table="$(table)" '/<!-- table -->/ {print; print table; skip = 1} /<!-- end of table -->/ {skip = 0} !skip || /<!-- end/ {if (!/<!-- table -->/) print}' README.md)
if [ "${1:-}" = --check ]; then
    [ "$readme" = "$(cat README.md)" ] || { echo "README.md: its table is not current: run scripts/readme_table.sh"; exit 1; }
else
    printf '%s\n' "$readme" >README.md
fi
