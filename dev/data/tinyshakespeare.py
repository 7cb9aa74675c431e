#!/usr/bin/env python3
"""tinyshakespeare.py - 1.1 MB of Shakespeare's plays, the usual first text for a byte model

usage: tinyshakespeare.py [--out data]      then: build/train_gpt --data data/tinyshakespeare.txt
"""
import argparse, os
from download import download, main_with_errors

URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SIZE = 1115394
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def main():
    parser = argparse.ArgumentParser(description="Download tinyshakespeare (1.1 MB of text).")
    parser.add_argument("--out", default="data", help="folder (data)")
    parser.add_argument("--url", default=URL, help="a mirror")
    arguments = parser.parse_args()
    path = os.path.join(arguments.out, "tinyshakespeare.txt")
    download(arguments.url, path, SIZE, SHA256)
    print(f"train:  build/train_gpt --data {path}")


if __name__ == "__main__":
    main_with_errors(main)
