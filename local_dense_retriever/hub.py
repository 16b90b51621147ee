"""Downloads files of data sets on the Hugging Face hub by `huggingface_hub`, resumes after a kill, checks checksums.

`hf_hub_download` discards what a killed process had downloaded; the parts of the library used here can resume. The
library's own variables work: HF_TOKEN for private hubs, HF_ENDPOINT for mirrors, HF_HUB_DOWNLOAD_TIMEOUT and so on.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import httpx
import tenacity
from huggingface_hub import get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers

from local_dense_retriever.parts import BLOCK, partial_path, progress_bar, size_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

WAIT = tenacity.wait_exponential_jitter(initial=1.0, max=60.0)
"""Between attempts, in seconds."""


class TransientError(Exception):
    """A failure that another attempt may mend."""


@dataclass(frozen=True)
class Remote:
    """A file on the hub."""

    url: str
    size: int
    """In bytes."""
    sha256: str | None
    """As the caller or the hub states it; None if neither does."""

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]

    def bytes_in(self, folder: Path) -> int:
        """How many of its bytes are in the folder, as a whole file or a partial one."""
        path = folder / self.name
        return min(self.size, max(size_of(path), size_of(partial_path(path))))


def look_up(repository: str, name: str, *, endpoint: str, sha256: str | None, attempts: int) -> Remote:
    """Size and checksum of a file of a data set; ValueError, with a remedy, if they cannot be found out."""
    url = hf_hub_url(repository, name, repo_type="dataset", endpoint=endpoint.rstrip("/"))
    try:
        facts = _with_retries(lambda: _with_explained_errors(url, lambda: get_hf_file_metadata(url)), attempts)
    except OfflineModeIsEnabled:
        raise ValueError(
            "HF_HUB_OFFLINE is set, so that nothing is downloaded; unset it, then run this again"
        ) from None
    stated = facts.etag if facts.etag and re.fullmatch("[0-9a-f]{64}", facts.etag) else None
    if facts.commit_hash is None and stated is None:
        raise ValueError(
            f"{url}: expected the answer of a hub (with X-Repo-Commit), found another, such as a log-in page; check "
            f"HF_ENDPOINT, and the network for a page to log in at"
        )
    if not facts.size or facts.size < 1:
        raise ValueError(
            f"{url}: expected an answer that says how big the file is, found {facts.size}; check HF_ENDPOINT"
        )
    return Remote(url, facts.size, sha256 or stated)


def fetch(remote: Remote, folder: Path, attempts: int) -> Path:
    """Download what is missing of the file into the folder, and check it; returns its path.

    It grows as `<name>.part`. An attempt that brings new bytes starts the count of attempts again. Raises ValueError if
    the attempts run out, or if the checksum is wrong; what was downloaded is then removed.
    """
    target = folder / remote.name
    partial = partial_path(target)
    if size_of(target) == remote.size:
        logger.info("%s is there already", target)
        return target
    if not partial.exists() or size_of(partial) > remote.size:
        partial.write_bytes(b"")
    while size_of(partial) < remote.size:
        _with_retries(functools.partial(_read_on, remote, partial), attempts)
    _check(partial, remote)
    partial.replace(target)
    return target


def _read_on(remote: Remote, partial: Path) -> None:
    """Append to the partial file until it is whole or the connection breaks; TransientError if that brought nothing."""
    had = size_of(partial)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    with partial.open("ab") as out:
        try:
            _with_explained_errors(
                remote.url,
                lambda: http_get(
                    remote.url,
                    out,
                    resume_size=had,
                    headers=headers,
                    expected_size=remote.size,
                    displayed_filename=remote.name,
                ),
            )
        except TransientError as error:
            out.flush()
            if size_of(partial) <= had:
                raise
            logger.warning("%s; going on after %d of %d bytes", error, size_of(partial), remote.size)


def _with_explained_errors(url: str, action: Callable[[], T]) -> T:
    """The action's result. TransientError for failures that may pass, ValueError for others, OSError for the disk's."""
    try:
        return action()
    except httpx.HTTPError as error:
        _explain(url, error)
    except httpx.InvalidURL as error:
        raise ValueError(f"{url}: {error}; check HF_ENDPOINT") from None
    except OSError as error:
        if error.errno is not None or isinstance(error, OfflineModeIsEnabled):
            raise
        raise TransientError(f"{url}: {_in_one_line(error)}") from error  # fewer bytes than there should be


def _explain(url: str, error: httpx.HTTPError) -> NoReturn:
    response = getattr(error, "response", None)
    if response is None:
        raise TransientError(
            f"{url} cannot be reached ({_in_one_line(error)}); check the network and HF_ENDPOINT"
        ) from error
    answer = f"{url}: the server answers {response.status_code} {response.reason_phrase}"
    if response.status_code in (408, 416, 429) or response.status_code >= 500:
        raise TransientError(answer) from error
    raise ValueError(f"{answer}; expected the file: check HF_ENDPOINT, and HF_TOKEN if it is private") from error


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _with_retries(action: Callable[[], T], attempts: int) -> T:
    """The action's result, after up to `attempts` attempts; ValueError with the last reason if all of them fail."""
    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(TransientError),
        stop=tenacity.stop_after_attempt(attempts),
        wait=WAIT,
        before_sleep=tenacity.before_sleep_log(logger, logging.WARNING),
        reraise=True,
    )
    try:
        return retrying(action)
    except TransientError as error:
        raise ValueError(f"gave up after {attempts} attempts: {error}; the same command goes on later") from error


def _check(path: Path, remote: Remote) -> None:
    if remote.sha256 is None:
        logger.warning("%s: no SHA-256 is known (--sha256), only the size was checked", remote.name)
        return
    digest = hashlib.sha256()
    with path.open("rb") as file, progress_bar(f"checking {remote.name}", remote.size) as bar:
        while block := file.read(BLOCK):
            digest.update(block)
            bar.update(len(block))
    if digest.hexdigest() != remote.sha256.lower():
        path.unlink()
        raise ValueError(
            f"{remote.name}: expected SHA-256 {remote.sha256}, found {digest.hexdigest()}; what was downloaded "
            f"has been removed: run the same command again"
        )
