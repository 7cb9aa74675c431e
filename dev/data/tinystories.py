#!/usr/bin/env python3
"""tinystories.py - short stories by GPT-4 in a small child's words - arXiv:2305.07759

usage: tinystories.py [--val-only] [--out data/tinystories]

Version 2 of the data set (GPT-4 only), 2.2 GB for training and 22 MB for validation. A line
<|endoftext|> stands between stories. Sizes and hashes are those of the hub's listing.
"""
import argparse
from download import hugging_face_download, hugging_face_files, main_with_errors

DATASET = "roneneldan/TinyStories"
TRAIN, VAL = "TinyStoriesV2-GPT4-train.txt", "TinyStoriesV2-GPT4-valid.txt"


def main():
    parser = argparse.ArgumentParser(description="Download TinyStories (2.2 GB of text).")
    parser.add_argument("--val-only", action="store_true", help="only the 22 MB for validation")
    parser.add_argument("--out", default="data/tinystories", help="folder (data/tinystories)")
    arguments = parser.parse_args()
    files = hugging_face_files(DATASET)
    val = hugging_face_download(files, VAL, arguments.out)
    if arguments.val_only:
        print(f"train:  build/train_gpt --data {val}")
    else:
        train = hugging_face_download(files, TRAIN, arguments.out)
        print(f"train:  build/train_gpt --data {train} --val {val}")


if __name__ == "__main__":
    main_with_errors(main)
