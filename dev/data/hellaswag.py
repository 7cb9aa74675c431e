#!/usr/bin/env python3
"""hellaswag.py - 10042 beginnings with four endings each, one of them right - arXiv:1905.07830

usage: hellaswag.py [--out data]
then:  build/train_gpt ... --eval hellaswag=data/hellaswag_val.jsonl

The validation set, 12 MB of JSON lines, as its authors publish it.
"""
import argparse, os
from download import download, main_with_errors

URL = "https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl"
SIZE = 12246618
SHA256 = "0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae4884d9e9c992588"


def main():
    parser = argparse.ArgumentParser(description="Download HellaSwag's validation set (12 MB).")
    parser.add_argument("--out", default="data", help="folder (data)")
    parser.add_argument("--url", default=URL, help="a mirror")
    arguments = parser.parse_args()
    path = os.path.join(arguments.out, "hellaswag_val.jsonl")
    download(arguments.url, path, SIZE, SHA256)
    print(f"evaluate:  build/train_gpt ... --eval hellaswag={path}")


if __name__ == "__main__":
    main_with_errors(main)
