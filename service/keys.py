"""API keys: read from a file, compared in constant time, never logged."""

import hmac
from pathlib import Path


class KeysError(ValueError):
    """The key file cannot be read or holds no key."""


class KeyRing:
    """The keys that may call /v1/*."""

    def __init__(self, keys: frozenset[bytes]) -> None:
        self._keys = keys

    @classmethod
    def read(cls, path: Path) -> "KeyRing":
        """One key a line; empty lines and lines that start with # do not count. Raises KeysError."""
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise KeysError(f"the API key file {path} cannot be read: {error.strerror}") from error
        keys = frozenset(line.strip() for line in lines if line.strip() and not line.startswith(b"#"))
        if not keys:
            raise KeysError(f"the API key file {path} holds no key")
        return cls(keys)

    def holds(self, key: str) -> bool:
        """Whether it is one of the keys; takes as long for any wrong key of the same length."""
        given = key.encode()
        return bool(sum(hmac.compare_digest(given, known) for known in self._keys))
