#!/usr/bin/env python3
"""fineweb.py - filtered web text, 10B or 100B tokens, as GPT-2 shards or text - arXiv:2406.17557

usage: fineweb.py [--edu] [--100B] [--shards N] [--parquet [--raw]] [--out DIR]

Without --parquet: shards of 100M GPT-2 tokens (200 MB each) that others made and published, and
one shard for validation, in the format that llmc/io/dataloader.h describes: nothing to convert.
With --parquet: the text itself, about 2 GB a file, each turned into FILE.txt (needs pyarrow), or
left as it is with --raw, for prepare_gpt.
--edu takes FineWeb-Edu, the pages that a classifier finds educational. N files are taken in the
order of their names; sizes and hashes are those of the hub's listing.
"""
import argparse, os, struct
from download import (
    DownloadError, add_shards_option, hugging_face_download, hugging_face_files, main_with_errors,
)
from parquet_text import download_as_text

TEXT = {False: "HuggingFaceFW/fineweb", True: "HuggingFaceFW/fineweb-edu"}  # with --edu: True
# (--edu, size) -> the dataset of its tokens, how the names of its shards begin
TOKENS = {
    (False, "10B"): ("kjj0/fineweb10B-gpt2", "fineweb"),
    (False, "100B"): ("kjj0/fineweb100B-gpt2", "fineweb"),
    (True, "10B"): ("kjj0/finewebedu10B-gpt2", "finewebedu"),
    (True, "100B"): ("karpathy/fineweb-edu-100B-gpt2-token-shards", "edu_fineweb"),
}


def check_shard(path):
    """The header that train_gpt will read: 256 int32 {magic, version, tokens}. Returns tokens."""
    size = os.path.getsize(path)
    with open(path, "rb") as f:
        magic, version, tokens = struct.unpack("<iiI", f.read(12).ljust(12, b"\0"))
    if (magic, version, size) != (20240520, 1, 1024 + 2 * tokens):
        raise DownloadError(
            f"{path}: is no whole shard of GPT-2 tokens (magic {magic}, version {version}, "
            f"{tokens} tokens in {size} bytes); remove it and run this again"
        )
    return tokens


def download_shards(dataset, name, count, folder):
    files = hugging_face_files(dataset)
    val, train = f"{name}_val_000000.bin", sorted(f for f in files if "_train_" in f)[:count]
    tokens = [check_shard(hugging_face_download(files, f, folder)) for f in [val] + train]
    print(f"{len(train)} shards, {sum(tokens[1:])} tokens; for validation {tokens[0]}")
    print(
        "train:  build/train_gpt --model gpt2 --scratch --seq 1024 "
        f"--data '{folder}/{name}_train_*.bin' --val {folder}/{val}"
    )


def main():
    parser = argparse.ArgumentParser(description="Download FineWeb's sample of 10B tokens.")
    parser.add_argument("--edu", action="store_true", help="FineWeb-Edu")
    parser.add_argument("--100B", action="store_const", const="100B", default="10B", dest="size",
                        help="the sample of 100B tokens: 200 GB of shards")
    add_shards_option(parser)
    parser.add_argument("--parquet", action="store_true", help="text, not GPT-2 tokens")
    parser.add_argument("--raw", action="store_true", help="with --parquet: no FILE.txt")
    parser.add_argument("--out", help="folder (data/fineweb10B, data/finewebedu10B, ...100B)")
    arguments = parser.parse_args()
    edu, size = arguments.edu, arguments.size
    if arguments.raw and not arguments.parquet:
        parser.error("--raw is about parquet files: give --parquet too")
    folder = arguments.out or f"data/fineweb{'edu' if edu else ''}{size}"
    if arguments.parquet:
        download_as_text(TEXT[edu], f"sample/{size}T", "main", arguments.shards, folder,
                         arguments.raw)
    else:
        download_shards(*TOKENS[edu, size], arguments.shards, folder)


if __name__ == "__main__":
    main_with_errors(main)
