"""API keys: read from a file, again whenever it changes, compared in constant time, never logged."""

import asyncio
import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Callable
from pathlib import Path

from service.waiting import DaemonThread

log = logging.getLogger("tpvision.keys")

_CHECK_S = 1.0
_READ_TIMEOUT_S = 10.0  # its disk may hang
_MAX_BYTES = 2**20  # each request is compared with all of its keys

_Signature = tuple[int, int, int, int]  # tells one content of a file from another without reading it


class KeysError(ValueError):
    """The key file cannot be read or holds no key."""


class KeyRing:
    """The keys that may call /v1/*, as digests. `watch` follows their file; requests never wait for it."""

    def __init__(self, path: Path, digests: frozenset[bytes], signature: _Signature) -> None:
        self._path = path
        self._digests = digests
        self._seen: _Signature | None = signature
        self._thread = DaemonThread(_READ_TIMEOUT_S)

    def __len__(self) -> int:
        return len(self._digests)

    @classmethod
    def read(cls, path: Path) -> "KeyRing":
        """One key a line; empty lines and lines that start with # do not count. Raises KeysError."""
        return cls(path, *_read(path))

    def holds(self, key: str) -> bool:
        """Whether a header's text, decoded as latin-1, is one of the keys; takes as long for any wrong one."""
        given = hashlib.sha256(key.encode("latin-1", "replace")).digest()
        return bool(sum(hmac.compare_digest(given, known) for known in self._digests))

    def reload(self) -> None:
        """Take over the file's keys if it has changed; where it cannot be used, keep the old ones and say so once."""
        seen = _sign(self._path)
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._digests, self._seen = _read(self._path)
        except KeysError as error:
            log.error("%s; the %d old keys stay valid", error, len(self._digests))
        else:
            log.info("the API key file changed: %d keys", len(self._digests))

    async def follow(self) -> None:
        """Reload in a thread; where the file gives no answer in time, say so."""
        try:
            await self._thread.run(self.reload)
        except (TimeoutError, RuntimeError) as error:  # the latter without room for a thread
            log.error("the API key file %s: %s; the %d old keys stay valid", self._path, error, len(self._digests))


async def watch(current: Callable[[], KeyRing | None]) -> None:
    """Follow the file of the ring in force until cancelled, once a second."""
    while True:
        await asyncio.sleep(_CHECK_S)
        if (ring := current()) is not None:
            await ring.follow()


def _read(path: Path) -> tuple[frozenset[bytes], _Signature]:
    try:
        status = path.stat()  # before reading: a later write is then noticed
        if not stat.S_ISREG(status.st_mode):
            raise KeysError(f"the API key file {path} cannot be read: not a regular file")
        if status.st_size > _MAX_BYTES:
            raise KeysError(f"the API key file {path} has more than {_MAX_BYTES} bytes")
        lines = [line.strip() for line in path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()]
    except OSError as error:
        raise KeysError(f"the API key file {path} cannot be read: {error.strerror}") from error
    keys = {line for line in lines if line and not line.startswith(b"#")}
    if not keys:
        raise KeysError(f"the API key file {path} holds no key")
    return frozenset(hashlib.sha256(key).digest() for key in keys), _signature(status)


def _sign(path: Path) -> _Signature | None:
    try:
        return _signature(path.stat())
    except OSError:
        return None


def _signature(status: os.stat_result) -> _Signature:
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
