"""Big files over HTTP: resumed, retried, checked; then joined or unpacked. A file appears whole or not at all."""

from __future__ import annotations

import errno
import functools
import gzip
import hashlib
import logging
import os
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

import requests
import tenacity
import urllib3
from tqdm import tqdm

logger = logging.getLogger(__name__)

BLOCK = 1 << 20
TIMEOUT = (15, 60)
"""Seconds to connect, and between two reads."""

REDIRECTS = 5
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0

T = TypeVar("T")


class Interrupted(Exception):
    """A failure that another attempt may mend."""


@dataclass(frozen=True)
class Remote:
    """A file on a server."""

    url: str
    size: int
    sha256: str | None
    """As the caller or the server states it; None if neither does."""

    @property
    def name(self) -> str:
        return urlsplit(self.url).path.rsplit("/", 1)[-1]

    def bytes_in(self, folder: Path) -> int:
        """How much of it lies in the folder, whole or in part."""
        path = folder / self.name
        return min(self.size, max(_size(path), _size(partial_path(path))))


def partial_path(path: Path) -> Path:
    """Where a file grows before it is whole."""
    return path.with_name(f"{path.name}.part")


def look_up(url: str, sha256: str | None, attempts: int) -> Remote:
    """Size and checksum of a file, from a HEAD request.

    The hub answers with a redirect to its storage, and states size and SHA-256 of big files in that very answer
    (`X-Linked-Size`, `X-Linked-ETag`), so redirects are followed by hand. Raises ValueError if there is no such file.
    """
    return _retrying(lambda: _look_up(url, sha256), attempts)


def _look_up(url: str, sha256: str | None) -> Remote:
    found_size, found_hash, at = "", sha256, url
    for _ in range(REDIRECTS + 1):
        with _request("HEAD", at, {"Accept-Encoding": "identity"}, allow_redirects=False) as response:
            found_hash = found_hash or _stated_hash(response.headers)
            size = response.headers.get("X-Linked-Size")
            if not response.is_redirect:
                size = size or response.headers.get("Content-Length")
            found_size = found_size or size or ""
            if not response.is_redirect or found_size:
                break
            at = urljoin(at, response.headers["Location"])
    else:
        raise ValueError(f"{url}: expected a file after at most {REDIRECTS} redirects, found more; check --endpoint")
    if not re.fullmatch(r"0*[1-9][0-9]*", found_size):
        raise ValueError(
            f"{url}: expected an answer that says how big the file is (Content-Length, 1 byte or more), found "
            f"{found_size or 'none'!r}; check --endpoint"
        )
    return Remote(url, int(found_size), found_hash)


def _stated_hash(headers: Any) -> str | None:
    etag = headers.get("X-Linked-ETag") or ""
    match = re.fullmatch(r'(?:W/)?"?([0-9a-f]{64})"?', etag.lower())
    return match[1] if match else None


def _request(method: str, url: str, headers: dict[str, str], **options: Any) -> requests.Response:
    """The answer; Interrupted for what may pass (no connection, 408, 429, 5xx), ValueError for what will not."""
    token = os.environ.get("HF_TOKEN")
    if token and urlsplit(url).hostname == "huggingface.co":
        headers = {**headers, "Authorization": f"Bearer {token}"}
    try:
        response = requests.request(method, url, headers=headers, timeout=TIMEOUT, **options)
    except requests.RequestException as error:
        raise Interrupted(f"{url}: {error}") from error
    if response.status_code < 400 or response.status_code == 416:
        if not response.is_redirect and response.headers.get("Content-Type", "").startswith("text/html"):
            response.close()
            raise ValueError(f"{url}: expected the file, found a web page; check --endpoint, or log in there")
        return response
    response.close()
    if response.status_code in (408, 429) or response.status_code >= 500:
        raise Interrupted(f"{url}: the server answers {response.status_code} {response.reason}")
    hint = {401: "it may need a token (HF_TOKEN)", 403: "it may need a token (HF_TOKEN)"}
    what = hint.get(response.status_code, "the file may have moved: check --endpoint")
    raise ValueError(f"{url}: the server answers {response.status_code} {response.reason}; {what}")


def _retrying(action: Callable[[], T], attempts: int) -> T:
    """What the action returns, tried again after Interrupted; then ValueError with the last reason."""
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(Interrupted),
        stop=tenacity.stop_after_attempt(max(1, attempts)),
        wait=tenacity.wait_exponential_jitter(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S),
        before_sleep=tenacity.before_sleep_log(logger, logging.WARNING),
        reraise=True,
    )
    try:
        return retrying(action)
    except Interrupted as error:
        raise ValueError(f"gave up after {attempts} attempts: {error}; the same command goes on later") from error


def fetch(remote: Remote, folder: Path, attempts: int) -> Path:
    """The file in the folder, downloaded as far as it is not there, and checked.

    It grows as `<name>.part`. Attempts are counted from the last one that brought more than was there. Raises
    ValueError if they run out, or if the checksum is wrong, in which case what was downloaded is removed.
    """
    target, partial = folder / remote.name, partial_path(folder / remote.name)
    if _size(target) == remote.size:
        logger.info("%s is there already", target)
        return target
    if not partial.exists() or _size(partial) > remote.size:
        partial.write_bytes(b"")
    most = _size(partial)
    with _bar(remote.name, remote.size, most) as bar:
        while _size(partial) < remote.size:
            _retrying(functools.partial(_read_on, remote, partial, most, bar), attempts)
            most = _size(partial)
    _check(partial, remote)
    partial.replace(target)
    return target


def _read_on(remote: Remote, partial: Path, most: int, bar: tqdm[Any]) -> None:
    """Append to the partial file until it is whole or the connection breaks; Interrupted unless it exceeds `most`."""
    had = _size(partial)
    headers = {"Accept-Encoding": "identity", **({"Range": f"bytes={had}-"} if had else {})}
    reason: Any = "the connection ended early"
    with _request("GET", remote.url, headers, stream=True) as response, partial.open("r+b") as out:
        had = _starts_at(response, had)
        out.truncate(had)
        out.seek(had)
        bar.update(had - bar.n)
        try:
            for block in response.raw.stream(BLOCK, decode_content=False) if response.ok else ():
                out.write(block)
                bar.update(len(block))
        except (urllib3.exceptions.HTTPError, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise
            reason = error
    if _size(partial) > remote.size:
        partial.write_bytes(b"")
        raise ValueError(
            f"{remote.url}: expected the {remote.size} bytes that the server stated, found more; what was downloaded "
            f"has been removed: run the same command again, or with another --endpoint"
        )
    if _size(partial) <= most:
        raise Interrupted(f"{remote.url}: {reason} after {_size(partial)} of {remote.size} bytes")


def _starts_at(response: requests.Response, asked: int) -> int:
    """Where in the file the bytes of an answer belong, which was asked for those from `asked` on."""
    if response.status_code != 206:
        return 0  # the server knows no ranges, or has nothing at this one
    stated = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    start = int(stated[1]) if stated else asked
    if start > asked:
        raise Interrupted(f"{response.url}: asked for the bytes from {asked} on, found those from {start} on")
    return start


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _bar(name: str, total: int, initial: int = 0) -> tqdm[Any]:
    return tqdm(total=total, initial=initial, desc=name, unit="B", unit_scale=True, mininterval=1)


def _check(path: Path, remote: Remote) -> None:
    if remote.sha256 is None:
        logger.warning("%s: no SHA-256 is known (--sha256), only the size was checked", remote.name)
        return
    digest = hashlib.sha256()
    with path.open("rb") as file, _bar(f"checking {remote.name}", remote.size) as bar:
        while block := file.read(BLOCK):
            digest.update(block)
            bar.update(len(block))
    if digest.hexdigest() != remote.sha256.lower():
        path.unlink()
        raise ValueError(
            f"{remote.name}: expected SHA-256 {remote.sha256}, found {digest.hexdigest()}; what was downloaded "
            f"has been removed: run the same command again"
        )


def joined_bytes(target: Path) -> int:
    """How much of a file that is joined of parts an interrupted `join` left."""
    return _size(partial_path(target))


def join(remotes: Sequence[Remote], target: Path, *, delete: bool) -> Path:
    """One file of the parts in its folder, which are in order; `delete` removes each as soon as it is in.

    Goes on where it was interrupted: a part that is wholly in `<target>.part` need not be there any more.
    """
    partial, total, end = partial_path(target), sum(remote.size for remote in remotes), 0
    first = target.with_name(remotes[0].name)
    if delete and not partial.exists():
        first.replace(partial)  # no copy, so no space
    with partial.open("ab") as out, _bar(f"joining {target.name}", total, out.tell()) as bar:
        for remote in remotes:
            end += remote.size
            part = target.with_name(remote.name)
            if out.tell() < end:
                with part.open("rb") as file:
                    file.seek(out.tell() - (end - remote.size))
                    while block := file.read(BLOCK):
                        out.write(block)
                        bar.update(len(block))
            out.flush()
            os.fsync(out.fileno())
            if delete:
                part.unlink(missing_ok=True)
    if _size(partial) != total:
        raise ValueError(f"{partial}: expected {total} bytes, found {_size(partial)}; remove it and run this again")
    partial.replace(target)
    return target


def unpack(packed: Path, target: Path, *, delete: bool) -> Path:
    """The content of a .gz file; ValueError if it is broken, which its own checksum tells."""
    partial = partial_path(target)
    with packed.open("rb") as file, _bar(f"unpacking {packed.name}", _size(packed)) as bar, partial.open("wb") as out:
        try:
            with gzip.open(file) as content:
                while block := content.read(BLOCK):
                    out.write(block)
                    bar.update(file.tell() - bar.n)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{packed} cannot be unpacked ({error}); remove it and download it again") from None
        out.flush()
        os.fsync(out.fileno())
    partial.replace(target)
    if delete:
        packed.unlink()
    return target
