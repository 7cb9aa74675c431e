#!/usr/bin/env python3
"""openwebtext.py - the open copy of GPT-2's training text: pages that Reddit's users linked to

usage: openwebtext.py [--shards N] [--out data/openwebtext]

80 parquet files, each turned into FILE.txt (needs pyarrow); the first N in the order of their
names. Sizes and hashes are those of the hub's listing.
"""
import argparse
from download import add_shards_option, main_with_errors
from parquet_text import download_as_text

DATASET = "Skylion007/openwebtext"
# the hub's own conversion to parquet: the dataset itself holds archives of archives
REVISION, FOLDER = "refs/convert/parquet", "plain_text/train"


def main():
    parser = argparse.ArgumentParser(description="Download OpenWebText as text files.")
    add_shards_option(parser)
    parser.add_argument("--out", default="data/openwebtext", help="folder (data/openwebtext)")
    arguments = parser.parse_args()
    download_as_text(DATASET, FOLDER, REVISION, arguments.shards, arguments.out)


if __name__ == "__main__":
    main_with_errors(main)
