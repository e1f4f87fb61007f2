"""The key file: what it may hold, how it is read again, and who is let in by a real service."""

import asyncio
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import GOLDEN, RunningService, wait_until

from service.keys import KeyRing, KeysError

GOOD = (GOLDEN / "images" / "rgb_64x48.png").read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_bytes(b"# the team's\nfirst-key\n\n  second-key \r\n")
    return path


def replace(path: Path, content: bytes) -> None:
    """As careful editors and Kubernetes do it."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    new.replace(path)


def test_every_line_is_a_key(path: Path) -> None:
    keys = KeyRing.read(path)
    assert keys.holds("first-key") and keys.holds("second-key")
    for wrong in ("", "# the team's", "third-key", "first-ke", "first-key ", "FIRST-KEY", "first-key\nsecond-key"):
        assert not keys.holds(wrong)


def test_keys_are_bytes(path: Path) -> None:
    path.write_bytes("\ufeffschlüssel\n".encode())
    assert KeyRing.read(path).holds("schlüssel".encode().decode("latin-1"))  # as a header's bytes are read
    assert not KeyRing.read(path).holds("schl\u2126ssel")


@pytest.mark.parametrize("content", [b"", b"\n \n", b"# only a comment\n"])
def test_a_file_without_keys_is_refused(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(KeysError, match="holds no key"):
        KeyRing.read(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match="cannot be read"):
        KeyRing.read(tmp_path / "none")


def test_a_file_that_may_block_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(KeysError, match="not a regular file"):
            KeyRing.read(path)


def test_a_file_that_is_too_large_is_refused_unread(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.truncate(path, 2**40)
    monkeypatch.setattr(Path, "read_bytes", lambda *_: pytest.fail("it was read"))
    with pytest.raises(KeysError, match="more than 1048576 bytes"):
        KeyRing.read(path)


def test_no_key_can_be_seen_in_the_ring(path: Path) -> None:
    keys = KeyRing.read(path)
    assert "first-key" not in repr(keys) + repr(vars(keys))


@pytest.mark.parametrize("in_place", [True, False])
def test_a_changed_file_is_read_again(path: Path, in_place: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    keys = KeyRing.read(path)
    if in_place:
        path.write_bytes(b"third-key\n")
    else:
        replace(path, b"third-key\n")
    assert keys.holds("first-key")
    keys.reload()
    assert keys.holds("third-key") and not keys.holds("first-key")
    assert [record.getMessage() for record in caplog.records] == ["the API key file changed: 1 keys"]


def test_keys_of_the_same_length_are_told_apart_by_time(path: Path) -> None:
    keys = KeyRing.read(path)
    path.write_bytes(path.read_bytes().replace(b"first", b"other"))
    os.utime(path, ns=(0, time.time_ns() + 10**9))
    keys.reload()
    assert keys.holds("other-key")


def test_a_link_that_is_turned_is_followed(tmp_path: Path, path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    keys = KeyRing.read(link)
    other = tmp_path / "other"
    other.write_bytes(b"third-key")
    link.unlink()
    link.symlink_to(other)
    keys.reload()
    assert keys.holds("third-key") and not keys.holds("first-key")


@pytest.mark.parametrize("content", [b"", b"# secret\n", None])
def test_a_broken_file_keeps_the_old_keys_and_says_so_once(
    path: Path, content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    keys = KeyRing.read(path)
    if content is None:
        path.unlink()
    else:
        replace(path, content)
    for _ in range(3):
        keys.reload()
    assert keys.holds("first-key")
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.endswith("; the 2 old keys stay valid") and "secret" not in message
    replace(path, b"third-key\n")
    keys.reload()
    assert keys.holds("third-key") and not keys.holds("first-key")


def test_an_unchanged_file_is_not_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = KeyRing.read(path)
    monkeypatch.setattr(Path, "open", lambda *_: pytest.fail("it was opened"))
    keys.reload()


def test_a_file_that_gives_no_answer_keeps_the_old_keys_and_is_told_of(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("service.keys._READ_TIMEOUT_S", 0.1)
    keys = KeyRing.read(path)
    replace(path, b"third-key\n")
    disk = threading.Event()
    read = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: (disk.wait(), read(path))[1])

    async def follow() -> None:
        await keys.follow()
        assert keys.holds("first-key")
        (message,) = [record.getMessage() for record in caplog.records]
        assert message.endswith("no answer within 0.1 s; the 2 old keys stay valid")
        disk.set()
        await keys.follow()
        assert keys.holds("third-key") and not keys.holds("first-key")

    asyncio.run(follow())


def test_without_room_for_a_thread_the_old_keys_stay(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    keys = KeyRing.read(path)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    asyncio.run(keys.follow())
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.endswith("can't start new thread; the 2 old keys stay valid")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_bytes(b"first-key\nsecond-key\n")
    return path


@pytest.fixture(scope="module")
def service(start_service: Any, key_file: Path) -> RunningService:
    """With keys and probes of their own, at the most talkative level."""
    started: RunningService = start_service(
        *("--model", str(GOLDEN / "tiny-k3-f32"), "--host", "127.0.0.1"),
        TPVISION_SERVER__API_KEYS_FILE=str(key_file),
        TPVISION_SERVER__LOG_LEVEL="debug",
        TPVISION_SERVER__PROBE_PORT="0",
        TPVISION_SERVER__CORS_ORIGINS="https://app.example",
    )
    return started


def status(service: RunningService, path: str, key: str | None = None, **headers: str) -> int:
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    if path in ("/v1/encode", "/v1/embeddings"):
        return service.client.post(path, content=GOOD, headers=headers).status_code
    return service.client.get(path, headers=headers).status_code


def test_keys_are_needed_for_v1_alone(service: RunningService) -> None:
    for path in ("/v1/encode", "/v1/embeddings", "/v1/models", "/v1/capacity"):
        assert status(service, path) == 401
        assert status(service, path, "wrong-key") == 401
    for path in ("/livez", "/readyz", "/health", "/metrics", "/openapi.json", "/docs"):
        assert status(service, path) == 200
    for path in ("/v1/encode", "/v1/models", "/v1/capacity"):
        assert status(service, path, "first-key") == status(service, path, "second-key") == 200


@pytest.mark.parametrize(
    "value",
    [
        "first-key",
        "Basic first-key",
        "Bearer",
        "Bearer first-key second-key",
        "Bearer\tfirst-key",
        "bearer x",
    ],
)
def test_other_shapes_of_authorization_are_refused(service: RunningService, value: str) -> None:
    assert status(service, "/v1/models", authorization=value) == 401


def test_the_scheme_is_case_free(service: RunningService) -> None:
    assert status(service, "/v1/models", authorization="bearer first-key") == 200


def test_a_refused_upload_is_not_kept(service: RunningService) -> None:
    answer = service.client.post("/v1/encode", content=bytes(2**20))
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    assert status(service, "/v1/models", "first-key") == 200


def test_keys_change_without_a_restart(service: RunningService, key_file: Path) -> None:
    replace(key_file, b"first-key\nthird-key\n")
    wait_until(lambda: status(service, "/v1/models", "third-key") == 200, timeout_s=5)
    assert status(service, "/v1/models", "second-key") == 401
    replace(key_file, b"")
    wait_until(lambda: any("old keys stay valid" in line for line in service.log), timeout_s=5)
    assert status(service, "/v1/models", "first-key") == 200
    replace(key_file, b"first-key\nsecond-key\n")
    wait_until(lambda: status(service, "/v1/models", "second-key") == 200, timeout_s=5)


def test_probes_have_their_own_port(service: RunningService) -> None:
    (line,) = [line for line in service.log if "probes at http://" in line]
    url = json.loads(line)["event"].split("probes at ")[1]
    with httpx.Client(base_url=url, trust_env=False) as client:
        for path in ("/livez", "/readyz", "/health", "/metrics"):
            assert client.get(path).status_code == 200
        for path in ("/v1/models", "/docs", "/openapi.json", "/"):
            answer = client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert client.post("/v1/encode", content=GOOD).status_code == 404


def test_configured_origins_may_call(service: RunningService) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization, content-type"}
    preflight = service.client.options("/v1/encode", headers={"origin": "https://app.example", **asks})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    answer = service.client.get(
        "/v1/models", headers={"origin": "https://app.example", "authorization": "Bearer first-key"}
    )
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    refused = service.client.get("/v1/models", headers={"origin": "https://app.example"})
    assert refused.headers["access-control-allow-origin"] == "https://app.example"  # so that a page can read the error
    other = service.client.options("/v1/encode", headers={"origin": "https://other.example", **asks})
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


def test_cors_is_off_unless_configured(tiny_k3: RunningService) -> None:
    asks = {"origin": "https://app.example", "access-control-request-method": "POST"}
    preflight = tiny_k3.client.options("/v1/encode", headers=asks)
    assert (preflight.status_code, preflight.json()["error"]["code"]) == (405, "method_not_allowed")
    answer = tiny_k3.client.get("/v1/models", headers=asks)
    assert not [name for name in (*preflight.headers, *answer.headers) if name.startswith("access-control")]


def test_no_key_is_ever_logged(service: RunningService) -> None:
    for key in ("first-key", "wrong-key"):
        status(service, "/v1/models", key)
        status(service, f"/v1/models?api_key={key}", key)
        service.client.get("/v1/nothing", headers={"authorization": f"Bearer {key}", "x-api-key": key})
    log = "".join(service.log)
    assert "-key" not in log
