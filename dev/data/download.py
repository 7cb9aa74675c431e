#!/usr/bin/env python3
"""download.py - files over HTTP: resumed where they stopped, checked, then put in place

usage: download.py URL FILE [--size BYTES] [--sha256 HEX]

A file grows as FILE.part and gets its name only when its size and SHA-256 are the expected ones,
so a file with its final name is whole. FILE.part survives a kill, and the next call goes on from
its last byte. What nobody told in advance is printed: the size and hash found.

download()                  one file
hugging_face_files()        what a dataset on Hugging Face holds, with sizes and hashes
hugging_face_download()     one of these; the environment variable HF_ENDPOINT names a mirror
add_shards_option()         --shards N
main_with_errors()          a DownloadError as one line and status 1
"""
import argparse, hashlib, http.client, json, os, re, shutil, ssl, sys, time
import urllib.error, urllib.parse, urllib.request
from dataclasses import dataclass

CHUNK = 1 << 18
TIMEOUT = 30  # seconds without a byte: the connection is dead
TRIES = 5  # in a row without a new byte
RETRY_SECONDS = 1.0  # before the second try, doubled before each later one


class DownloadError(Exception):
    """What went wrong, and what to do, for the user to read."""


class Interrupted(Exception):
    """The connection failed in a way that a later try may not."""


class Unreachable(Interrupted):
    """No connection at all."""


# ---------------------------------------------------------------------------
# progress


def bytes_text(n):
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            break
        n /= 1000
    else:
        unit = "GB"
    return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"


def seconds_text(seconds):
    s = int(seconds + 0.5)
    if s >= 3600:
        return f"{s // 3600}h{s // 60 % 60:02d}m"
    return f"{s // 60}m{s % 60:02d}s" if s >= 60 else f"{s}s"


class Progress:
    """One line that is rewritten on a terminal, and a line now and then in a file."""

    def __init__(self, name, start, total):
        self.name, self.start, self.total = name, start, total
        self.began = self.shown = time.monotonic()
        self.live = sys.stderr.isatty()

    def text(self, done, now):
        rate = (done - self.start) / max(now - self.began, 1e-9)
        text = f"{self.name}: {bytes_text(done)}"
        if self.total:
            text += f" of {bytes_text(self.total)} ({100 * done / self.total:.0f}%)"
        text += f", {bytes_text(rate)}/s"
        if self.total and rate > 0:
            text += f", eta {seconds_text((self.total - done) / rate)}"
        return text

    def show(self, done):
        now = time.monotonic()
        if now - self.shown < (0.2 if self.live else 10):
            return
        self.shown = now
        # \r goes to the line's start, \033[K clears what a longer text left
        line = f"\r{self.text(done, now)}\033[K" if self.live else self.text(done, now) + "\n"
        print(line, end="", file=sys.stderr, flush=True)

    def clear(self):
        if self.live:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------
# one file


def open_url(url, first_byte=0):
    """The response, or Interrupted (worth another try), or DownloadError (not)."""
    headers = {"User-Agent": "train_gpt"}
    if first_byte:
        headers["Range"] = f"bytes={first_byte}-"
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as e:
        if e.code == 416:
            return e  # nothing after first_byte: the caller knows what that means
        says = f"{url}: the server answers {e.code} {e.reason}"
        if e.code >= 500 or e.code in (408, 429):
            raise Interrupted(says) from e
        if e.code == 404:
            says += ": it has moved or was withdrawn; look at the dataset's page for its new place"
        elif e.code in (401, 403):
            says += ": it is not public, or refuses this network; download it by hand"
        raise DownloadError(says) from e
    except (OSError, http.client.HTTPException) as e:
        reason = getattr(e, "reason", e)
        host = urllib.parse.urlsplit(url).hostname
        raise Unreachable(
            f"{url}: no connection to {host} ({reason}): is there a network? "
            "A proxy is named by the environment variable https_proxy"
        ) from e
    except ValueError as e:
        raise DownloadError(f"{url}: is no address: {e}") from e


def bytes_in(path):
    return os.path.getsize(path) if os.path.exists(path) else 0


def first_byte_sent(response, asked, part):
    """Where in the file a response starts: where it was asked to, or at 0."""
    if not asked or response.status != 206:
        return 0
    says = response.headers.get("Content-Range", "")
    if not says.startswith(f"bytes {asked}-"):
        raise DownloadError(
            f"{response.url}: asked for the bytes from {asked} on, the server sends '{says}'; "
            f"remove {part} and start again"
        )
    return asked


def append_response(url, part, size):
    """Append to `part` what the server has after its end; Interrupted if the connection ends
    early. Where the server tells no length, only `size` and the hash show that."""
    have = bytes_in(part)
    if have == size:
        return
    with open_url(url, have) as response:
        if response.status == 416:  # the server has nothing after our bytes
            total = response.headers.get("Content-Range", "").rpartition("/")[2]
            if total == str(have):
                return
            os.remove(part)
            raise Interrupted(f"{part} had {have} bytes, the server has {total or 'fewer'}")
        have = first_byte_sent(response, have, part)
        length = response.headers.get("Content-Length")
        total = have + int(length) if length else size
        if size is not None and total != size:
            raise DownloadError(
                f"{url}: the server has {total} bytes, expected are {size}: it holds another "
                "version of this file"
            )
        free = shutil.disk_usage(os.path.dirname(part) or ".").free
        if total and total - have > free:
            raise DownloadError(
                f"{part}: {bytes_text(total - have)} to come, {bytes_text(free)} free on this disk"
            )
        progress, done = Progress(os.path.basename(part), have, total), have
        with open(part, "ab" if have else "wb") as out:
            try:
                while block := response.read1(CHUNK):  # what has come: no byte is lost on a timeout
                    out.write(block)
                    done += len(block)
                    progress.show(done)
            except (TimeoutError, ConnectionError, ssl.SSLError, http.client.HTTPException) as e:
                raise Interrupted(f"{url}: the connection broke after {done} bytes") from e
            finally:
                progress.clear()
    if length and done < total:
        raise Interrupted(f"{url}: the connection ended after {done} of {total} bytes")


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def download(url, path, size=None, sha256=None):
    """The file of `url` as `path`. Does nothing when it is there with the expected size."""
    if os.path.exists(path):
        found = os.path.getsize(path)
        if size is not None and found != size:
            raise DownloadError(
                f"{path}: is there with {found} bytes, expected are {size}: remove it and run "
                "this again"
            )
        print(f"{path}: already there, {bytes_text(found)}")
        return
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    part = path + ".part"
    kept = reached = bytes_in(part)
    failures = 0
    while True:
        try:
            append_response(url, part, size)
            break
        except Interrupted as e:
            now = bytes_in(part)
            failures = 1 if now > reached else failures + 1
            reached = max(reached, now)
            # not one byte yet, and nobody there: more tries only hide that there is no network
            no_network = isinstance(e, Unreachable) and reached == kept
            if no_network or failures == TRIES:
                goes_on = f"; {bytes_text(now)} are kept, the next run goes on there" if now else ""
                raise DownloadError(f"{e}{goes_on}") from e
            wait = RETRY_SECONDS * 2 ** (failures - 1)
            print(f"{e}; again in {wait:.0f} s", file=sys.stderr)
            time.sleep(wait)
    found, digest = os.path.getsize(part), sha256_of(part)
    for what, is_, expected in (("bytes", found, size), ("sha256", digest, sha256)):
        if expected is not None and is_ != expected:
            os.remove(part)
            raise DownloadError(
                f"{url}: {what} {is_}, expected {expected}: "
                + ("what an earlier run had kept did not fit; run this again" if kept
                   else "the file was changed, or damaged on its way; nothing is kept")
            )
    os.replace(part, path)
    verdict = "as expected" if sha256 else "found, with nothing to compare it to"
    print(f"{path}: {found} bytes, sha256 {digest} {verdict}")


# ---------------------------------------------------------------------------
# Hugging Face


@dataclass
class HubFile:
    url: str
    size: int
    sha256: str | None  # of large files; small ones have none


def hugging_face_files(dataset, folder="", revision="main"):
    """name -> HubFile of a folder: the hub's own listing, which comes a thousand files a page."""
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    version = urllib.parse.quote(revision, safe="")
    url = f"{hub}/api/datasets/{dataset}/tree/{version}" + (f"/{folder}" if folder else "")
    try:
        entries, page = [], url
        while page:
            with open_url(page) as response:
                entries += json.load(response)
                link = re.search(r'<([^>]*)>; *rel="next"', response.headers.get("Link", ""))
            page = link[1] if link else None
        here = f"{hub}/datasets/{dataset}/resolve/{version}/"
        return {
            os.path.basename(e["path"]): HubFile(
                here + urllib.parse.quote(e["path"]), e["size"], e.get("lfs", {}).get("oid")
            )
            for e in entries
            if e["type"] == "file"
        }
    except Interrupted as e:
        raise DownloadError(str(e)) from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise DownloadError(f"{url}: sent no list of files ({e!r}); is it Hugging Face?") from e


def hugging_face_download(files, name, folder):
    """Of a listing, one file into a folder; returns its path."""
    if name not in files:
        raise DownloadError(
            f"{name} is not in the dataset any more; it has: " + ", ".join(sorted(files)[:8])
        )
    path = os.path.join(folder, name)
    download(files[name].url, path, files[name].size, files[name].sha256)
    return path


def add_shards_option(parser):
    def count(text):
        if not text.isdigit() or int(text) == 0:
            raise argparse.ArgumentTypeError(f"{text} is no number of files from 1 on")
        return int(text)

    parser.add_argument("--shards", type=count, metavar="N", help="the first N files (all)")


def main_with_errors(main):
    try:
        main()
    except DownloadError as e:
        sys.exit(f"error: {e}")
    except OSError as e:  # a full disk, a folder that cannot be written
        sys.exit(f"error: {e}")
    except KeyboardInterrupt:
        sys.exit("\ninterrupted: the next run goes on from here")


def main():
    parser = argparse.ArgumentParser(description="Download a file, resumed and checked.")
    parser.add_argument("url")
    parser.add_argument("file")
    parser.add_argument("--size", type=int, help="bytes")
    parser.add_argument("--sha256")
    arguments = parser.parse_args()
    download(arguments.url, arguments.file, arguments.size, arguments.sha256)


if __name__ == "__main__":
    main_with_errors(main)
