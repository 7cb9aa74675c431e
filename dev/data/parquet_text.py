#!/usr/bin/env python3
"""parquet_text.py - the text column of parquet files as plain text, or as JSON lines

usage: parquet_text.py FILE.parquet ... --out FILE.txt|FILE.jsonl|- [--column text | --rows]

.txt: each document, then a line <|endoftext|>, as TinyStories has it. .jsonl: {"text": ...} a
line, for tokenizers that want documents apart. -: such lines on standard output, named by the
column, for prepare_gpt. --rows: lines of whole rows, all columns, for conversations. Reads
a batch of rows at a time, never a whole file; the output gets its name when it is whole. Needs pyarrow: pip install pyarrow
"""
import argparse, json, os, sys

# prepare_gpt starts this with python3 -I, which looks for modules neither here nor in the current folder.
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from download import (
    DownloadError, bytes_text, hugging_face_download, hugging_face_files, main_with_errors,
)

END_OF_TEXT = "<|endoftext|>"


def require_pyarrow():
    try:
        import pyarrow, pyarrow.parquet
    except ImportError:
        raise DownloadError("parquet files need pyarrow, which is not here: pip install pyarrow")
    return pyarrow


def documents(path, column, flag="--column"):
    """The values of a column, missing ones left out. None: whole rows, without what is missing."""
    pyarrow = require_pyarrow()
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            if column is None:
                for batch in file.iter_batches(batch_size=1024):
                    for row in batch.to_pylist():
                        yield {key: value for key, value in row.items() if value is not None}
                return
            if column not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                raise DownloadError(f"{path}: has no column {column}; {flag} takes: {names}")
            for batch in file.iter_batches(batch_size=1024, columns=[column]):
                yield from (text for text in batch.column(0).to_pylist() if text is not None)
    except pyarrow.ArrowException as e:
        raise DownloadError(f"{path}: cannot be read as parquet: {e}") from e


def json_line(value, name):
    """A document under its name, or a whole row, as a line. What JSON has no type for is text."""
    return json.dumps({name: value} if name else value, default=str) + "\n"


def parquet_to_stdout(paths, column):
    """For prepare_gpt, whose flag for the column is --field."""
    for path in paths:
        for text in documents(path, column, "--field"):
            sys.stdout.write(json_line(text, column))
    sys.stdout.flush()


def parquet_to_text(paths, out, column="text"):
    lines = out.endswith(".jsonl")
    os.makedirs(os.path.dirname(out) or ".", exist_ok=True)
    count = 0
    # a newline is a newline on every system
    with open(out + ".part", "w", encoding="utf-8", newline="\n") as f:
        for path in paths:
            for text in documents(path, column):
                f.write(json_line(text, column and "text") if lines else f"{text}\n{END_OF_TEXT}\n")
                count += 1
    os.replace(out + ".part", out)
    print(f"{out}: {count} documents, {bytes_text(os.path.getsize(out))}")


def download_as_text(dataset, folder, revision, count, out, raw=False):
    """Parquet files of a dataset as text files. A text that is there is not made again. raw: the
    parquet files alone, which prepare_gpt reads too."""
    require_pyarrow()  # before the gigabytes come
    files = hugging_face_files(dataset, folder, revision)
    names = sorted(f for f in files if f.endswith(".parquet"))[:count]
    if raw:
        for name in names:
            hugging_face_download(files, name, out)
        print(f"prepare:  build/prepare_gpt --data '{out}/*.parquet' OUT.bin")
        return
    for name in names:
        text = os.path.join(out, name.removesuffix(".parquet") + ".txt")
        if os.path.exists(text):
            print(f"{text}: already there")
        else:
            parquet_to_text([hugging_face_download(files, name, out)], text)
    print(f"{len(names)} files; the parquet files in {out} are not needed any more")
    print(f"train:  build/train_gpt --data '{out}/*.txt'")


def main():
    parser = argparse.ArgumentParser(description="Turn parquet files into text or JSON lines.")
    parser.add_argument("files", nargs="+", metavar="FILE.parquet")
    parser.add_argument("--out", required=True, help="FILE.txt, FILE.jsonl or -")
    parser.add_argument("--column", default="text", help="the column with the text (text)")
    parser.add_argument("--rows", action="store_true", help="whole rows instead, as JSON lines")
    arguments = parser.parse_args()
    if arguments.rows:
        arguments.column = None
    if arguments.out == "-":
        return parquet_to_stdout(arguments.files, arguments.column)
    if not arguments.out.endswith((".txt", ".jsonl")):
        parser.error(f"--out {arguments.out}: ends in .txt or .jsonl")
    if arguments.rows and arguments.out.endswith(".txt"):
        parser.error("--rows: rows are JSON lines: --out FILE.jsonl")
    parquet_to_text(arguments.files, arguments.out, arguments.column)


if __name__ == "__main__":
    main_with_errors(main)
