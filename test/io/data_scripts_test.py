#!/usr/bin/env python3
"""dev/data against a server on this machine that stops in the middle, lies about sizes, refuses.

usage: test/io/data_scripts_test.py        seconds; no network. Parquet where pyarrow is installed.
"""
import contextlib, hashlib, http.server, io, json, os, random, re, socket, struct, subprocess
import sys, tempfile, threading, time, unittest, urllib.parse

SCRIPTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../dev/data")
sys.dont_write_bytecode = True
sys.path.insert(0, SCRIPTS)
import download as dl
import fineweb, parquet_text, tokenizer

try:
    import pyarrow, pyarrow.parquet
except ImportError:
    pyarrow = None

sys.path.insert(0, os.path.join(SCRIPTS, "../../test/harness"))
from fixtures import FIXTURES
CONTENT = random.Random(1).randbytes(700_001)  # three blocks of the reader, the last one not full
HASH = hashlib.sha256(CONTENT).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves server.files; server.faults says what to do wrong, a request each."""

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        path, ranges = self.path, self.headers.get("Range")
        self.server.requests.append((path, ranges))
        fault = self.server.faults.pop(0) if self.server.faults else ""

        # Refuse, or send the client elsewhere.
        if path not in self.server.files or fault.isdigit():
            return self.send_error(int(fault or 404))
        if fault == "redirect":
            self.send_response(302)
            self.send_header("Location", self.path)
            return self.end_headers()

        # Where the answer begins.
        body = self.server.files[path]
        start = int(re.fullmatch(r"bytes=(\d+)-", ranges)[1]) if ranges else 0
        if fault == "no ranges":
            start = 0
        if start and start >= len(body):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(body)}")
            return self.end_headers()

        # The header, with what is wrong in it.
        self.send_response(206 if start else 200)
        if start:
            first = start + 1 if fault == "shifted" else start
            self.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
        if path in self.server.next_pages:
            self.send_header("Link", f'<{self.server.next_pages[path]}>; rel="next"')
        if fault != "no length":
            self.send_header("Content-Length", len(body) - start)
        self.end_headers()

        # The body, up to where the server stops.
        stop = int(fault.split()[1]) if fault.startswith("stop ") else len(body)
        with contextlib.suppress(ConnectionError):  # the client may refuse, and leave
            self.wfile.write(body[start:max(start, stop)])
            if fault.endswith("hang"):
                time.sleep(0.5)


class DataScripts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.file = os.path.join(self.folder, "deep/file.txt")
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.files, self.server.faults, self.server.requests = {"/f": CONTENT}, [], []
        self.server.next_pages = {}  # path -> where a listing goes on
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        self.addCleanup(self.server.server_close)
        self.addCleanup(self.server.shutdown)
        self.base = f"http://127.0.0.1:{self.server.server_port}"
        self.url = self.base + "/f"
        dl.RETRY_SECONDS = 0.001

    def get(self, *faults, size=len(CONTENT), sha256=HASH):
        """What download() says, the error with it."""
        self.server.faults, self.server.requests = list(faults), []
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            try:
                dl.download(self.url, self.file, size, sha256)
            except dl.DownloadError as e:
                print("error:", e)
        return out.getvalue()

    def ranges(self):
        return [r for _, r in self.server.requests]

    def keep(self, data):
        os.makedirs(os.path.dirname(self.file), exist_ok=True)
        with open(self.file + ".part", "wb") as f:
            f.write(data)

    def assert_whole(self, says, text="as expected"):
        self.assertIn(text, says)
        with open(self.file, "rb") as f:
            self.assertEqual(f.read(), CONTENT)
        self.assertFalse(os.path.exists(self.file + ".part"))

    def assert_refused(self, says, text, kept=False):
        self.assertIn("error: ", says)
        self.assertIn(text, says)
        self.assertFalse(os.path.exists(self.file))
        self.assertEqual(os.path.exists(self.file + ".part"), kept)

    # -- one file --

    def test_whole_and_only_once(self):
        self.assert_whole(self.get())
        self.assertEqual(self.ranges(), [None])
        self.assertIn("already there", self.get())
        self.assertEqual(self.ranges(), [])

    def test_redirect_keeps_the_range(self):
        self.keep(CONTENT[:1000])
        self.assert_whole(self.get("redirect"))
        self.assertEqual(self.ranges(), ["bytes=1000-"] * 2)

    def test_unknown_size_and_hash_are_printed(self):
        says = self.get(size=None, sha256=None)
        self.assert_whole(says, "nothing to compare")
        self.assertIn(f"{len(CONTENT)} bytes, sha256 {HASH} found", says)

    def test_server_stops_and_is_resumed(self):
        stops = [300000, 300001, 600000, 600001, 600002, 600003, 600004]  # more than TRIES
        self.assert_whole(self.get(*[f"stop {n}" for n in stops]))
        self.assertEqual(self.ranges(), [None] + [f"bytes={n}-" for n in stops])

    def test_silent_server_is_left(self):
        timeout, dl.TIMEOUT = dl.TIMEOUT, 0.1
        try:
            self.assert_whole(self.get("stop 300000 hang"))
        finally:
            dl.TIMEOUT = timeout
        self.assertEqual(self.ranges(), [None, "bytes=300000-"])

    def test_killed_and_resumed(self):
        self.keep(CONTENT[:123456])
        self.assert_whole(self.get())
        self.assertEqual(self.ranges(), ["bytes=123456-"])

    def test_server_without_ranges_starts_over(self):
        self.keep(b"x" * 5000)
        self.assert_whole(self.get("no ranges"))

    def test_part_that_is_whole(self):
        self.keep(CONTENT)
        self.assert_whole(self.get())
        self.assertEqual(self.ranges(), [])
        os.rename(self.file, self.file + ".part")
        self.assert_whole(self.get(size=None))
        self.assertEqual(self.ranges(), [f"bytes={len(CONTENT)}-"])

    def test_part_that_is_too_long(self):
        self.keep(CONTENT + b"x")
        self.assert_whole(self.get())
        self.assertEqual(self.ranges(), [f"bytes={len(CONTENT) + 1}-", None])

    def test_part_of_another_file(self):
        self.keep(b"x" + CONTENT[1:1000])
        self.assert_refused(self.get(), "what an earlier run had kept did not fit; run this again")
        self.assert_whole(self.get())

    def test_range_that_was_not_asked_for(self):
        self.keep(CONTENT[:1000])
        self.assert_refused(self.get("shifted"), "the server sends 'bytes 1001-", kept=True)

    def test_cut_short_without_a_length(self):
        says = self.get("no length", sha256=None)
        self.assert_whole(says, "nothing to compare")
        os.remove(self.file)
        self.server.files["/f"] = CONTENT[:-1]
        says = self.get("no length", sha256=None)
        self.assert_refused(says, f"bytes {len(CONTENT) - 1}, expected {len(CONTENT)}")

    def test_wrong_size(self):
        says = self.get(size=len(CONTENT) + 1)
        self.assert_refused(says, f"has {len(CONTENT)} bytes, expected are {len(CONTENT) + 1}")
        self.assertEqual(len(self.ranges()), 1)

    def test_wrong_hash(self):
        self.server.files["/f"] = CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])
        self.assert_refused(self.get(), f"expected {HASH}: the file was changed, or damaged")

    def test_file_there_with_another_size(self):
        self.assert_whole(self.get())
        with open(self.file, "ab") as f:
            f.write(b"x")
        self.assertIn("remove it and run this again", self.get())

    def test_stops_for_ever(self):
        says = self.get(*["stop 1000"] * 9)
        self.assert_refused(says, "1.0 kB are kept, the next run goes on there", kept=True)
        self.assertEqual(len(self.ranges()), dl.TRIES)

    def test_not_found_is_not_tried_again(self):
        self.assert_refused(self.get("404"), "answers 404")
        self.assertEqual(len(self.ranges()), 1)

    def test_busy_server_is_tried_again(self):
        self.assert_whole(self.get("503", "429"))
        os.remove(self.file)
        self.assert_refused(self.get(*["503"] * 9), "answers 503")
        self.assertEqual(len(self.ranges()), dl.TRIES)

    def test_no_network(self):
        with socket.socket() as s:  # a port where nobody listens
            s.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{s.getsockname()[1]}/f"
            says = self.get()
            self.keep(CONTENT[:1000])
            resumed = self.get()
        for text in says, resumed:
            self.assertIn("error: ", text)
            self.assertIn("no connection to 127.0.0.1", text)
            self.assertIn("is there a network?", text)
            self.assertEqual(text.count("\n"), 1)  # at once, without tries
        self.assertIn("1.0 kB are kept", resumed)

    def test_no_room(self):
        usage, dl.shutil.disk_usage = dl.shutil.disk_usage, lambda p: usage(p)._replace(free=1000)
        try:
            self.assert_refused(self.get(), "700.0 kB to come, 1.0 kB free")
        finally:
            dl.shutil.disk_usage = usage

    def test_progress(self):
        p = dl.Progress("f", 1_000_000, 5_000_000)
        self.assertEqual(
            p.text(3_000_000, p.began + 4), "f: 3.0 MB of 5.0 MB (60%), 500.0 kB/s, eta 4s"
        )
        self.assertEqual(dl.bytes_text(999), "999 B")
        self.assertEqual(dl.bytes_text(2_227_753_162), "2.2 GB")
        self.assertEqual(dl.bytes_text(24e12), "24000.0 GB")
        self.assertEqual(dl.seconds_text(3 * 3600 + 125), "3h02m")

    # -- the programs, as they are called --

    def publish(self, dataset, files, folder="", revision="main"):
        """Put a dataset on the server, as Hugging Face has it."""
        at, revision = f"{folder}/" if folder else "", urllib.parse.quote(revision, safe="")
        listing = f"/api/datasets/{dataset}/tree/{revision}/{at}".rstrip("/")
        self.server.files[listing] = (
            json.dumps([{"type": "directory", "oid": "0", "size": 0, "path": at + "0.parquet"}] + [
                {"type": "file", "oid": "1" * 40, "size": len(data), "path": at + name,
                 "lfs": {"oid": hashlib.sha256(data).hexdigest(), "size": len(data)}}
                for name, data in files.items()
            ]).encode()
        )
        for name, data in files.items():
            self.server.files[f"/datasets/{dataset}/resolve/{revision}/{at}{name}"] = data

    def program(self, name, *arguments):
        environment = dict(os.environ, HF_ENDPOINT=self.base, PYTHONDONTWRITEBYTECODE="1")
        result = subprocess.run(
            [sys.executable, f"{SCRIPTS}/{name}.py", *arguments], cwd=self.folder, text=True,
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        self.assertNotIn("Traceback", result.stdout)
        return result.returncode, result.stdout

    def read(self, name):
        with open(os.path.join(self.folder, name), "rb") as f:
            return f.read()

    def test_tinyshakespeare_refuses_another_text(self):
        status, says = self.program("tinyshakespeare", "--url", self.url)
        self.assertEqual(status, 1)
        self.assertIn(f"has {len(CONTENT)} bytes, expected are 1115394", says)

    def test_hellaswag_refuses_another_file(self):
        status, says = self.program("hellaswag", "--url", self.url)
        self.assertEqual(status, 1)
        self.assertIn(f"has {len(CONTENT)} bytes, expected are 12246618", says)
        self.server.files["/f"] = bytes(12246618)
        status, says = self.program("hellaswag", "--url", self.url)
        self.assertEqual(status, 1)
        self.assertIn("expected 0aa3b88843990f3f10a97b9575c94d7b71fb2205240ba04ae488", says)
        self.assertFalse(os.path.exists(f"{self.folder}/data/hellaswag_val.jsonl"))

    def test_tokenizers(self):
        for name, files in tokenizer.FILES.items():
            for url, size, sha256 in files:  # the fixtures, where they are at hand
                path = f"{FIXTURES}/tokenizers/{name}/{os.path.basename(url)}"
                self.server.files[f"/{os.path.basename(url)}"] = bytes(size)
                if os.path.exists(path):
                    with open(path, "rb") as f:
                        self.assertEqual(hashlib.sha256(f.read()).hexdigest(), sha256)
                    self.assertEqual(os.path.getsize(path), size)
            status, says = self.program("tokenizer", name, "--url", self.base)
            self.assertEqual(status, 1)
            self.assertIn(f"expected {files[0][2]}: the file was changed", says)
        self.assertEqual(self.program("tokenizer", "gpt3")[0], 2)

    def test_tinystories(self):
        files = {"TinyStoriesV2-GPT4-train.txt": CONTENT, "TinyStoriesV2-GPT4-valid.txt": b"Once"}
        self.publish("roneneldan/TinyStories", files)
        status, says = self.program("tinystories")
        self.assertEqual(status, 0, says)
        for name, data in files.items():
            self.assertEqual(self.read(f"data/tinystories/{name}"), data)
        self.assertIn("--data data/tinystories/TinyStoriesV2-GPT4-train.txt --val", says)

    def test_fineweb_shards(self):
        def shard(count, promised=None, magic=20240520, version=1):
            header = struct.pack("<3i", magic, version, promised or count).ljust(1024, b"\0")
            return header + bytes(2 * count)

        for options, dataset, name, folder in (
            ([], "kjj0/fineweb10B-gpt2", "fineweb", "fineweb10B"),
            (["--100B"], "kjj0/fineweb100B-gpt2", "fineweb", "fineweb100B"),
            (["--edu"], "kjj0/finewebedu10B-gpt2", "finewebedu", "finewebedu10B"),
            (["--edu", "--100B"], "karpathy/fineweb-edu-100B-gpt2-token-shards", "edu_fineweb",
             "finewebedu100B"),
        ):
            files = {f"{name}_train_{i:06d}.bin": shard(100 + i) for i in (3, 1, 2)}
            files[f"{name}_val_000000.bin"] = shard(7)
            self.publish(dataset, files)
            status, says = self.program("fineweb", "--shards", "2", *options)
            self.assertEqual(status, 0, says)
            self.assertIn("2 shards, 203 tokens; for validation 7", says)
            have = sorted(os.listdir(f"{self.folder}/data/{folder}"))
            self.assertEqual(have, [f"{name}_train_000001.bin", f"{name}_train_000002.bin",
                                    f"{name}_val_000000.bin"])
        for bad in (shard(9, 8), shard(9, magic=1), shard(9, version=2), b"short", b""):
            path = os.path.join(self.folder, "bad.bin")
            with open(path, "wb") as f:
                f.write(bad)
            with self.assertRaisesRegex(dl.DownloadError, "no whole shard"):
                fineweb.check_shard(path)

    def test_listing_of_many_pages(self):
        names = [f"{i}.bin" for i in range(3)]
        for i, name in enumerate(names):
            page = f"/api/datasets/d/tree/main{f'?cursor={i}' if i else ''}"
            self.server.files[page] = json.dumps(
                [{"type": "file", "size": i, "path": name}]).encode()
            if i < 2:
                self.server.next_pages[page] = (
                    f"{self.base}/api/datasets/d/tree/main?cursor={i + 1}")
        os.environ["HF_ENDPOINT"] = self.base
        self.addCleanup(os.environ.pop, "HF_ENDPOINT")
        files = dl.hugging_face_files("d")
        self.assertEqual([(name, f.size) for name, f in files.items()], list(zip(names, range(3))))

    def test_listings_that_are_none(self):
        self.assertEqual(self.program("fineweb")[0], 1)  # 404
        for listing in (b"<html>", b'{"error": "gone"}', b"[1]", b"[]"):
            self.server.files["/api/datasets/kjj0/fineweb10B-gpt2/tree/main"] = listing
            status, says = self.program("fineweb")
            self.assertEqual(status, 1)
            self.assertRegex(says, "^error: .*(no list of files|not in the dataset)")

    def test_wrong_options(self):
        for program, *options in (("fineweb", "--shards", "0"), ("fineweb", "--raw"),
                                  ("openwebtext", "--shards", "x"),
                                  ("parquet_text", "a", "--out", "b.csv")):
            status, says = self.program(program, *options)
            self.assertEqual(status, 2)
            self.assertIn("error: ", says)

    @unittest.skipIf(pyarrow, "pyarrow is installed")
    def test_without_pyarrow(self):
        for program, *options in (("openwebtext",), ("fineweb", "--parquet"),
                                  ("parquet_text", "a.parquet", "--out", "b.txt")):
            status, says = self.program(program, *options)
            self.assertEqual(status, 1)
            self.assertIn("pip install pyarrow", says)
        self.assertEqual(self.server.requests, [])  # before anything is downloaded

    @unittest.skipUnless(pyarrow, "pyarrow is not installed")
    def test_parquet(self):
        texts = ["Süß\r\nand\n\nlong", None, "", *(f"document {i}" for i in range(3000))]
        whole = [t for t in texts if t is not None]
        buffer = io.BytesIO()
        table = pyarrow.table({"id": list(range(len(texts))), "text": texts})
        pyarrow.parquet.write_table(table, buffer)
        data = buffer.getvalue()
        names = {f"{i:04d}.parquet": data for i in range(3)}
        self.publish("Skylion007/openwebtext", names, "plain_text/train", "refs/convert/parquet")
        status, says = self.program("openwebtext", "--shards", "2")
        self.assertEqual(status, 0, says)
        expected = "".join(f"{t}\n<|endoftext|>\n" for t in whole).encode()
        self.assertEqual(self.read("data/openwebtext/0001.txt"), expected)
        self.assertFalse(os.path.exists(f"{self.folder}/data/openwebtext/0002.txt"))
        self.assertIn("3002 documents", says)
        # texts that are there need neither the server nor the parquet files
        os.remove(f"{self.folder}/data/openwebtext/0000.parquet")
        self.assertIn("0000.txt: already there", self.program("openwebtext", "--shards", "1")[1])

        self.publish("HuggingFaceFW/fineweb-edu", names, "sample/10BT")
        self.assertEqual(self.program("fineweb", "--edu", "--parquet", "--shards", "1")[0], 0)
        self.assertEqual(self.read("data/finewebedu10B/0000.txt"), expected)
        self.publish("HuggingFaceFW/fineweb-edu", names, "sample/100BT")
        raw = ("--edu", "--100B", "--parquet", "--raw", "--shards", "2")
        status, says = self.program("fineweb", *raw)
        self.assertEqual(status, 0, says)
        have = sorted(os.listdir(f"{self.folder}/data/finewebedu100B"))
        self.assertEqual(have, ["0000.parquet", "0001.parquet"])
        self.assertEqual(self.read("data/finewebedu100B/0001.parquet"), data)

        parquet = f"{self.folder}/data/finewebedu10B/0000.parquet"
        self.assertEqual(self.program("parquet_text", parquet, parquet, "--out", "t.jsonl")[0], 0)
        lines = self.read("t.jsonl").decode().splitlines()
        self.assertEqual([json.loads(line)["text"] for line in lines], whole * 2)
        # whole rows, without what is missing; train_gpt's flag for a column is --field
        self.assertEqual(self.program("parquet_text", parquet, "--out", "r.jsonl", "--rows")[0], 0)
        rows = [json.loads(line) for line in self.read("r.jsonl").decode().splitlines()]
        self.assertEqual(rows[:3], [{"id": 0, "text": whole[0]}, {"id": 1}, {"id": 2, "text": ""}])
        self.assertEqual(len(rows), len(texts))
        self.assertIn("--field takes: id, text",
                      self.program("parquet_text", parquet, "--out", "-", "--column", "body")[1])
        status, says = self.program("parquet_text", parquet, "--out", "u.txt", "--column", "body")
        self.assertEqual(status, 1)
        self.assertIn("has no column body; --column takes: id, text", says)
        with open(parquet, "r+b") as f:
            f.truncate(len(data) // 2)
        status, says = self.program("parquet_text", parquet, "--out", "u.txt")
        self.assertEqual(status, 1)
        self.assertIn("cannot be read as parquet", says)
        self.assertFalse(os.path.exists(f"{self.folder}/u.txt"))


if __name__ == "__main__":
    unittest.main()
