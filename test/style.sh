#!/usr/bin/env bash
# The page and the tree, held to limits: paragraphs, width, comments, lengths of functions, who includes
# whom (test/harness/style.py says which). Last line: N passed, N failed.
# usage: test/style.sh [FILE ...]      without FILE: llmc/, the programs and the tests
set -u
folder=$(dirname "$0")
if ! ctags --version 2>/dev/null | grep -q Universal; then
    echo "skipped: universal-ctags is not installed"
    exit 0
fi
exec python3 "$folder/harness/style.py" "$@"
