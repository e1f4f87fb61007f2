"""One large file of a hub into the cache folder of the hub's library: resumed where an earlier run stopped, checked.

The library itself starts a file over when its process ends. We keep the part beside the cache's own files, under the
file's SHA-256, and give it its place in the cache only once its content has that checksum. Messages name files and
numbers; they never repeat a URL, which a hub may have signed. Called by service/fetch_model.py; needs the extra
`fetch`.
"""

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx2
from huggingface_hub import constants, get_session, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers, hf_raise_for_status

from service.extract import ExtractError, file_sha256

log = logging.getLogger("tpvision.fetch")

Advance = Callable[[int], None]  # the file's bytes that are there

_MAX_FAILURES = 5  # in a row, without a byte that was not there before
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 10.0
_RETRIED_STATUSES = {408, 429, 500, 502, 503, 504}
_RETRIED = (httpx2.TimeoutException, httpx2.NetworkError, httpx2.ProxyError, httpx2.RemoteProtocolError)
SHA256 = re.compile(r"[0-9a-f]{64}")


class FetchError(ExtractError):
    """The hub does not have it, does not give it, or gave something else."""


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of one commit, as the hub describes it. `sha256` of files in large-file storage.

    Raises FetchError where what the hub says is no size or no checksum.
    """

    repo: str
    commit: str
    name: str
    num_bytes: int
    sha256: str | None

    def __post_init__(self) -> None:
        if type(self.num_bytes) is not int or self.num_bytes < 0:
            raise FetchError(f"{self.name}: the hub gives no size of it that is a number of bytes")
        if self.sha256 is not None and not SHA256.fullmatch(self.sha256):  # it names files of the cache
            raise FetchError(f"{self.name}: the hub gives no SHA-256 of it that is one")

    @property
    def is_cached(self) -> bool:
        """Whether the cache has it, perhaps from another commit."""
        found = try_to_load_from_cache(self.repo, self.name, revision=self.commit)
        return isinstance(found, str) or self.blob.exists()

    @property
    def missing_bytes(self) -> int:
        """What is still to come, given what an earlier run left."""
        return self.num_bytes - (self.partial.stat().st_size if self.partial.exists() else 0)

    @property
    def blob(self) -> Path:
        """Where the cache keeps a large file: under its SHA-256."""
        return self._storage / "blobs" / str(self.sha256)

    @property
    def partial(self) -> Path:
        """Where it grows."""
        return self.blob.with_suffix(".tpvision-partial")

    @property
    def lock(self) -> Path:
        """What a process holds that downloads it."""
        return Path(constants.HF_HUB_CACHE) / ".locks" / self._storage.name / f"{self.sha256}.tpvision.lock"

    @property
    def _storage(self) -> Path:
        return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=self.repo, repo_type="model")


def download(remote: RemoteFile, advance: Advance) -> int:
    """Put the file into the cache; the bytes received for that. Raises FetchError or OSError."""
    for folder in (remote.partial.parent, remote.lock.parent):
        folder.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(remote.lock):
        if remote.blob.exists():  # another process was faster
            return 0
        with remote.partial.open("ab") as file:
            receiver = _Receiver(remote, file, advance)
            receiver.run()
        check(remote.partial, remote)
        remote.partial.replace(remote.blob)
    return receiver.received


def check(path: Path, remote: RemoteFile) -> None:
    """Raise FetchError, and remove the file, unless it has the hub's checksum."""
    found = file_sha256(path)
    if found != remote.sha256:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise FetchError(
            f"{remote.name}: its SHA-256 is {found}, but the hub says {remote.sha256}; it was removed, fetch again"
        )


class _Receiver:
    """Appends to a file until it is whole, through lost connections and a busy hub."""

    def __init__(self, remote: RemoteFile, file: BinaryIO, advance: Advance) -> None:
        self.received = 0
        self._remote = remote
        self._file = file
        self._advance = advance
        self._url = hf_hub_url(remote.repo, remote.name, revision=remote.commit)

    def run(self) -> None:
        """Raises FetchError at an answer that will stay as it is, and when several attempts in a row got no further."""
        if start := self._file.tell():
            log.info("%s: going on at byte %s", self._remote.name, f"{start:,}")
        failures, furthest = 0, start
        while self._file.tell() != self._remote.num_bytes:
            is_final = False
            try:
                self._attempt()
                reason = "the answer ended early"
            except httpx2.HTTPError as error:
                reason, is_final = _reason(error), not _is_transient(error)
            there = self._file.tell()
            failures = 0 if there > furthest else failures + 1
            furthest = max(furthest, there)
            where = f"{self._remote.name}: {reason} at byte {there:,}"
            if is_final or failures == _MAX_FAILURES:
                tries = "" if is_final else f", {failures} attempts in a row got no further"
                raise FetchError(f"{where}{tries}; run it again to go on")
            if there != self._remote.num_bytes:
                log.warning("%s, again", where)
                time.sleep(min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2**failures))

    def _attempt(self) -> None:
        """One request, through the hub and whatever it redirects to. The token stays with the hub: httpx drops it."""
        start = self._file.tell()
        if start > self._remote.num_bytes:
            start = self._restart()
        headers = {**build_hf_headers(library_name="tpvision"), "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        with get_session().stream(
            "GET", self._url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT, follow_redirects=True
        ) as response:
            hf_raise_for_status(response)
            if response.status_code != httpx2.codes.PARTIAL_CONTENT:
                start = 0
            self._check_offer(response, start)
            if not start:
                self._restart()
            for block in response.iter_bytes():
                self._append(block)

    def _check_offer(self, response: httpx2.Response, start: int) -> None:
        """Raise FetchError where the headers tell that what follows is something else, such as a page of a proxy."""
        expected = self._remote.num_bytes - start
        offered = response.headers.get("Content-Length", str(expected))
        place = response.headers.get("Content-Range", f"bytes {start}-")
        if not place.startswith(f"bytes {start}-") or (not start and offered != str(expected)):
            raise FetchError(
                f"{self._remote.name}: {response.url.host} offers something else than its {expected:,} bytes from byte "
                f"{start:,} on"
            )

    def _append(self, block: bytes) -> None:
        self._file.write(block)
        self.received += len(block)
        if self._file.tell() > self._remote.num_bytes:
            self._restart()
            raise FetchError(f"{self._remote.name}: more came than its {self._remote.num_bytes:,} bytes")
        self._advance(self._file.tell())

    def _restart(self) -> int:
        self._file.truncate(0)
        return self._file.seek(0)


def _is_transient(error: httpx2.HTTPError) -> bool:
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _RETRIED_STATUSES
    return isinstance(error, _RETRIED)


def _reason(error: httpx2.HTTPError) -> str:
    if isinstance(error, HfHubHTTPError):
        return f"{error.response.url.host} answered with status {error.response.status_code}"
    return type(error).__name__
