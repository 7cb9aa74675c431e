#!/usr/bin/env python3
"""tokenizer.py - the tokenizer of GPT-2 or of Llama 2 (TinyLlama's), as its authors publish it

usage: tokenizer.py gpt2|llama2 [--out data]      then: build/train_gpt ... --tokenizer data/NAME
"""
import argparse, os
from download import download, main_with_errors

GPT2 = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
HUB = "https://huggingface.co/"
TINYLLAMA = HUB + "TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T/resolve/main/"
# a tokenizer's files: address, size, SHA-256
FILES = {
    "gpt2": [
        (GPT2 + "vocab.bpe", 456318,
         "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
        (GPT2 + "encoder.json", 1042301,
         "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783"),
    ],
    "llama2": [
        (TINYLLAMA + "tokenizer.model", 499723,
         "9e556afd44213b6bd1be2b850ebbbd98f5481437a8021afaf58ee7fb1818d347"),
    ],
}


def main():
    parser = argparse.ArgumentParser(description="Download a tokenizer (1 MB).")
    parser.add_argument("name", choices=FILES)
    parser.add_argument("--out", default="data", help="folder of the tokenizer's folder (data)")
    parser.add_argument("--url", help="a mirror: a folder with the files")
    arguments = parser.parse_args()
    folder = os.path.join(arguments.out, arguments.name)
    for url, size, sha256 in FILES[arguments.name]:
        name = os.path.basename(url)
        if arguments.url:
            url = f"{arguments.url.rstrip('/')}/{name}"
        download(url, os.path.join(folder, name), size, sha256)
    print(f"train:  build/train_gpt ... --tokenizer {folder}")


if __name__ == "__main__":
    main_with_errors(main)
