"""`tpvision fetch` as a person runs it, against a hub on loopback with two needed shards of forty."""

import hashlib
import importlib
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from conftest import Here
from loopback_hub import COMMITS, SIGNATURE, Hub, running
from running import COMMAND, GOLDEN, ROOT, wait_until
from safetensors.torch import load_file, save

from service import hub_download
from tp.checkpoint import INDEX_NAME, fingerprint, read_vision_tensors
from tp.spec import read_spec

MODEL = GOLDEN / "tiny-k3-f32"
REPO = "moonshotai/Kimi-Tiny"
TOKEN = "hf_Th1sM4yNeverBeSeen"
SHARDS = [f"model-{number:05d}-of-000040.safetensors" for number in range(1, 41)]
PROJECTOR, TOWER = SHARDS[38:]
WORKS, REFUSED = 0, 2

Fetch = Callable[..., subprocess.CompletedProcess[str]]


def repository() -> dict[str, bytes]:
    """tiny-k3 as its publisher would lay it out: 38 shards of text, then the projector, then the tower."""
    tensors = {name: tensor for path in MODEL.glob("*.safetensors") for name, tensor in load_file(path).items()}
    parts: dict[str, dict[str, Any]] = {shard: {} for shard in SHARDS}
    for name, tensor in tensors.items():
        if name.startswith("vision_tower."):
            parts[TOWER][name] = tensor
        elif name.startswith("mm_projector."):
            parts[PROJECTOR][name] = tensor
    for index, shard in enumerate(SHARDS[:38]):
        parts[shard][f"language_model.model.layers.{index}.weight_packed"] = torch.full(
            (100_000,), index, dtype=torch.uint8
        )
    places = {name: shard for shard, held in parts.items() for name in held}
    configs = {name: (MODEL / name).read_bytes() for name in ("config.json", "preprocessor_config.json")}
    index_text = json.dumps({"metadata": {}, "weight_map": places}).encode()
    return {**configs, INDEX_NAME: index_text, **{shard: save(held) for shard, held in parts.items()}}


FILES = repository()
NEEDED_BYTES = len(FILES[PROJECTOR]) + len(FILES[TOWER])


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running(Hub(REPO, {COMMITS[0]: dict(FILES)})) as running_hub:
        yield running_hub


def environment(hub: Hub, home: Path, **more: str) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    places = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HOME": str(home), "NO_PROXY": "127.0.0.1"}
    return {**ours, **places, **more}


def command(out: Path, *arguments: str, repo: str = REPO) -> list[str]:
    return [*COMMAND, "fetch", repo, "--out", str(out), *arguments]


@pytest.fixture
def fetch(hub: Hub, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fetch]:
    """The command in this process, under an environment of its own, and with short pauses before it asks again."""
    monkeypatch.setattr(hub_download, "_FIRST_PAUSE_S", 0.01)
    for name in set(os.environ) - environment(hub, tmp_path).keys():
        monkeypatch.delenv(name)

    def run(*arguments: str, repo: str = REPO, **environ: str) -> subprocess.CompletedProcess[str]:
        for name, value in {**environment(hub, tmp_path / "home", HF_HUB_DISABLE_TELEMETRY="1"), **environ}.items():
            monkeypatch.setenv(name, value)
        importlib.reload(huggingface_hub.constants)  # where the library reads its variables
        ended = here(*command(tmp_path / "out", *arguments, repo=repo)[len(COMMAND) :])
        for name in environ:
            monkeypatch.delenv(name)
        return ended

    yield run
    huggingface_hub.close_session()
    monkeypatch.undo()
    importlib.reload(huggingface_hub.constants)


@pytest.fixture
def fetch_apart(hub: Hub, tmp_path: Path) -> Fetch:
    """The command in a process of its own."""

    def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(tmp_path / "out", *arguments),
            cwd=ROOT,
            env=environment(hub, tmp_path / "home", **environ),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def last_line(ended: subprocess.CompletedProcess[str]) -> str:
    assert ended.returncode == REFUSED, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr.splitlines()[-1]


def assert_whole(out: Path) -> None:
    spec = read_spec(out)
    assert fingerprint(read_vision_tensors(out, spec)) == fingerprint(read_vision_tensors(MODEL, spec))
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tpvision_slim.json",
    ]


def blobs(home: Path) -> set[str]:
    """What the cache holds of large files, whole or in part."""
    return {path.name for path in home.glob("hub/models--*/blobs/*") if len(path.name) >= 64}


def test_two_shards_of_forty_are_downloaded(hub: Hub, fetch_apart: Fetch, tmp_path: Path) -> None:
    ended = fetch_apart()
    assert ended.returncode == WORKS, ended.stderr
    assert_whole(tmp_path / "out")
    assert hub.served_large() == {PROJECTOR: len(FILES[PROJECTOR]), TOWER: len(FILES[TOWER])}
    assert f"{NEEDED_BYTES:,} bytes, of {sum(map(len, FILES.values())):,} in the repository" in ended.stdout
    assert f"tpvision serve --model {tmp_path / 'out'}" in ended.stdout


def test_the_folder_says_where_it_came_from(fetch: Fetch, tmp_path: Path) -> None:
    fetch()
    said = json.loads((tmp_path / "out" / "tpvision_slim.json").read_text())
    assert (said["repo"], said["revision"]) == (REPO, COMMITS[0])
    assert said["source_files"] == [
        {"name": name, "num_bytes": len(FILES[name]), "sha256": hashlib.sha256(FILES[name]).hexdigest()}
        for name in (PROJECTOR, TOWER)
    ]
    for name, checksum in said["sha256"].items():
        assert hashlib.sha256((tmp_path / "out" / name).read_bytes()).hexdigest() == checksum
    for name in ("config.json", "preprocessor_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == FILES[name]


def test_a_second_run_downloads_nothing(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    fetch()
    hub.served.clear()
    before = (tmp_path / "out" / "model.safetensors").stat()
    again = fetch()
    assert again.returncode == WORKS, again.stderr
    assert "was there" in again.stdout
    assert hub.served_large() == {}
    assert (tmp_path / "out" / "model.safetensors").stat().st_mtime_ns == before.st_mtime_ns


def test_the_folder_is_enough_without_the_cache(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    """An init container whose cache is gone, whose volume is not."""
    fetch()
    hub.served.clear()
    assert fetch(HF_HOME=str(tmp_path / "another")).returncode == WORKS
    assert hub.served_large() == {}


def test_a_dropped_connection_is_taken_up_where_it_broke(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    hub.drop_after = [len(FILES[PROJECTOR]) // 2, len(FILES[PROJECTOR]) // 4]
    ended = fetch()
    assert ended.returncode == WORKS, ended.stderr
    assert_whole(tmp_path / "out")
    assert [request.range is not None for request in hub.store_requests] == [False, True, True, False]
    assert sum(hub.served_large().values()) <= NEEDED_BYTES + 2 * 65_536  # what was under way when it broke
    assert f"{PROJECTOR}: RemoteProtocolError at byte" in ended.stderr


def test_a_killed_fetch_is_taken_up_by_the_next(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    hub.stall_after = len(FILES[PROJECTOR]) // 2
    killed = subprocess.Popen(
        command(tmp_path / "out"), cwd=ROOT, env=environment(hub, tmp_path / "home"), stderr=subprocess.DEVNULL
    )
    assert hub.stalled.wait(30)
    (partial,) = _wait_for_bytes(tmp_path / "home", hub.stall_after // 2)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    there, hub.stall_after = partial.stat().st_size, None
    assert fetch().returncode == WORKS
    assert_whole(tmp_path / "out")
    assert hub.store_requests[1].range == f"bytes={there}-"
    assert sum(hub.served_large().values()) < 1.6 * NEEDED_BYTES


def _wait_for_bytes(home: Path, count: int) -> list[Path]:
    def found() -> list[Path]:
        return [path for path in home.glob("hub/models--*/blobs/*.tpvision-partial") if path.stat().st_size >= count]

    wait_until(lambda: bool(found()))
    return found()


def test_ctrl_c_says_how_to_go_on(hub: Hub, tmp_path: Path) -> None:
    hub.stall_after = 0
    stopped = subprocess.Popen(
        command(tmp_path / "out"), cwd=ROOT, env=environment(hub, tmp_path / "home"), stderr=subprocess.PIPE, text=True
    )
    assert hub.stalled.wait(30)
    stopped.send_signal(signal.SIGTERM)
    _, said = stopped.communicate(timeout=30)
    assert stopped.returncode == 130
    assert said.splitlines()[-1] == "tpvision: interrupted; the same line goes on from here"


def test_a_store_without_ranges_starts_over(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    hub.drop_after, hub.takes_ranges = [len(FILES[PROJECTOR]) // 2], False
    assert fetch().returncode == WORKS
    assert_whole(tmp_path / "out")


def test_a_busy_store_is_asked_again(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    hub.fail_with = [503, 429]
    ended = fetch()
    assert ended.returncode == WORKS, ended.stderr
    assert "status 503" in ended.stderr


def test_a_store_that_refuses_is_an_error(hub: Hub, fetch: Fetch) -> None:
    hub.fail_with = [403]
    assert f"{PROJECTOR}: 127.0.0.1 answered with status 403" in last_line(fetch())


@pytest.mark.parametrize(
    ("tells_length", "attempts", "words"),
    [(True, 1, "offers something else than its"), (False, 6, "5 attempts in a row got no further")],
)
def test_a_page_in_place_of_the_file_is_given_up(
    hub: Hub, fetch: Fetch, tells_length: bool, attempts: int, words: str
) -> None:
    hub.page, hub.tells_length = b"<html>sign in</html>", tells_length
    said = last_line(fetch())
    assert PROJECTOR in said and words in said
    assert len(hub.store_requests) == attempts


def test_a_store_that_always_hangs_up_at_the_same_byte_is_given_up(hub: Hub, fetch: Fetch) -> None:
    hub.drop_after, hub.takes_ranges = [100_000] * 1000, False
    assert "5 attempts in a row got no further" in last_line(fetch())
    assert len(hub.store_requests) <= 8  # where it breaks differs by what was under way


def test_a_page_does_not_cost_what_was_downloaded(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    hub.drop_after, hub.range_shift = [100_000], 1
    fetch()
    (partial,) = (tmp_path / "home").glob("hub/models--*/blobs/*.tpvision-partial")
    before = partial.read_bytes()
    hub.page = b"<html>sign in</html>"
    assert "offers something else" in last_line(fetch())
    assert partial.read_bytes() == before


def test_a_range_that_was_not_asked_for_is_refused(hub: Hub, fetch: Fetch) -> None:
    hub.drop_after, hub.range_shift = [100_000], 1
    assert f"{PROJECTOR}: 127.0.0.1 offers something else than its" in last_line(fetch())
    assert len(hub.store_requests) == 2


def test_a_redirect_to_a_file_is_not_followed_again_and_again(hub: Hub, fetch: Fetch) -> None:
    hub.redirect = "file:///etc/hostname"
    assert f"{PROJECTOR}: UnsupportedProtocol" in last_line(fetch())
    assert len([request for request in hub.requests if request.method == "GET" and PROJECTOR in request.path]) == 1


def test_a_wrong_checksum_is_refused_and_removed(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    hub.corrupt = True
    said = last_line(fetch())
    assert f"{PROJECTOR}: its SHA-256 is " in said
    assert hashlib.sha256(FILES[PROJECTOR]).hexdigest() in said
    assert blobs(tmp_path / "home") == set()
    assert not (tmp_path / "out").exists()
    hub.corrupt = False
    assert fetch().returncode == WORKS
    assert_whole(tmp_path / "out")


def test_a_damaged_cache_is_refused_and_removed(fetch: Fetch, hub: Hub, tmp_path: Path) -> None:
    fetch()
    (blob,) = (tmp_path / "home").glob(f"hub/models--*/blobs/{hashlib.sha256(FILES[TOWER]).hexdigest()}")
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    (tmp_path / "out" / "model.safetensors").unlink()
    assert f"{TOWER}: its SHA-256 is " in last_line(fetch())
    assert not blob.exists()
    assert fetch().returncode == WORKS
    assert_whole(tmp_path / "out")


def test_all_that_is_damaged_in_the_cache_is_found_at_once(fetch: Fetch, tmp_path: Path) -> None:
    fetch()
    for blob in (tmp_path / "home").glob("hub/models--*/blobs/" + "?" * 64):
        blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    (tmp_path / "out" / "model.safetensors").unlink()
    said = last_line(fetch())
    assert f"{PROJECTOR}: its SHA-256 is" in said and f"{TOWER}: its SHA-256 is" in said
    assert fetch().returncode == WORKS


def of_siblings(**change: Any) -> Callable[[dict[str, Any]], bytes]:
    """The hub's description of a repository with another one of each large file; a callable changes a value."""

    def describe(info: dict[str, Any]) -> bytes:
        for sibling in info["siblings"]:
            if "lfs" in sibling:
                sibling |= {name: value(sibling) if callable(value) else value for name, value in change.items()}
        return json.dumps(info).encode()

    return describe


@pytest.mark.parametrize(
    ("describe", "words"),
    [
        (lambda info: b"<html>sign in</html>", "is not what a hub says (JSONDecodeError)"),
        (lambda info: b"[]", "is not what a hub says"),
        (lambda info: b"null", "is not what a hub says"),
        (lambda info: b"{}", "is not what a hub says"),
        (lambda info: b'{"id":' + b"[" * 200_000, "is not what a hub says"),
        (of_siblings(lfs={"size": 1}), "is not what a hub says"),
        (of_siblings(size="9"), "the hub gives no size of it"),
        (of_siblings(size=-9), "the hub gives no size of it"),
        (of_siblings(lfs={"sha256": "../../../../evil", "size": 1, "pointerSize": 1}), "no SHA-256 of it that is one"),
        (of_siblings(lfs={"sha256": 5, "size": 1, "pointerSize": 1}), "is not what a hub says"),
    ],
)
def test_a_hub_that_says_something_else_is_refused_in_one_line(
    hub: Hub, fetch: Fetch, tmp_path: Path, describe: Callable[[dict[str, Any]], bytes], words: str
) -> None:
    hub.describe = describe
    assert words in last_line(fetch())
    assert hub.served_large() == {}
    assert not list(tmp_path.rglob("*evil*"))


def test_a_checksum_in_capitals_is_the_same(hub: Hub, fetch: Fetch) -> None:
    hub.describe = of_siblings(lfs=lambda sibling: {**sibling["lfs"], "sha256": sibling["lfs"]["sha256"].upper()})
    ended = fetch()
    assert ended.returncode == WORKS, ended.stderr


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"HF_TOKEN": "hf_é"}, "the token given (HF_TOKEN) holds a character that no token has"),
        ({"HF_ENDPOINT": "not a url"}, "HF_ENDPOINT is not an http or https URL"),
        ({"HF_ENDPOINT": "file:///srv/hub"}, "HF_ENDPOINT is not an http or https URL"),
    ],
)
def test_variables_that_cannot_be_meant_are_named(hub: Hub, fetch: Fetch, environ: dict[str, str], words: str) -> None:
    ended = fetch(**environ)
    assert words in last_line(ended)
    assert environ.get("HF_TOKEN", "-") not in ended.stderr
    assert hub.requests == []


def test_a_variable_that_the_library_cannot_read_is_an_error_too(fetch_apart: Fetch) -> None:
    assert "a variable of the hub library (HF_…) is malformed" in last_line(fetch_apart(HF_ENDPOINT="http://[bad"))


def test_a_private_repository_needs_the_token(hub: Hub, fetch: Fetch) -> None:
    hub.token = TOKEN
    assert "private and no token is given (HF_TOKEN)" in last_line(fetch())
    wrong = fetch(HF_TOKEN="hf_Another")
    assert "private and the token given has no access to it" in last_line(wrong)
    assert "hf_Another" not in wrong.stdout + wrong.stderr


def test_neither_token_nor_signature_is_ever_shown_or_written(hub: Hub, fetch_apart: Fetch, tmp_path: Path) -> None:
    hub.token, hub.drop_after, hub.fail_with = TOKEN, [50_000], [503]
    ended = fetch_apart(HF_TOKEN=TOKEN)
    assert ended.returncode == WORKS, ended.stderr
    hub.fail_with = [403]
    (tmp_path / "out" / "model.safetensors").unlink()
    refused = fetch_apart(HF_TOKEN=TOKEN, HF_HUB_CACHE=str(tmp_path / "cache"))
    assert refused.returncode == REFUSED
    texts = [text.encode() for text in (ended.stdout, ended.stderr, refused.stdout, refused.stderr)]
    texts += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    for secret in (TOKEN, SIGNATURE):
        assert not [text for text in texts if secret.encode() in text]


def test_the_token_stays_with_the_hub(hub: Hub, fetch: Fetch) -> None:
    hub.token = TOKEN
    assert fetch(HF_TOKEN=TOKEN).returncode == WORKS
    assert {request.authorization for request in hub.requests} == {f"Bearer {TOKEN}"}
    assert {request.authorization for request in hub.store_requests} == {None}


@pytest.mark.parametrize("revision", ["v1", COMMITS[0]])
def test_a_revision_is_pinned_to_its_commit(hub: Hub, fetch: Fetch, tmp_path: Path, revision: str) -> None:
    hub.commits[COMMITS[1]] = {"README.md": b"main has moved on"}
    hub.refs = {"main": COMMITS[1], "v1": COMMITS[0]}
    ended = fetch("--revision", revision)
    assert ended.returncode == WORKS, ended.stderr
    assert json.loads((tmp_path / "out" / "tpvision_slim.json").read_text())["revision"] == COMMITS[0]
    pinning = [f"/api/models/{REPO}/revision/{revision}", f"/{REPO}/resolve/{revision}/config.json"]
    later = [request.path for request in hub.requests if not request.path.startswith(tuple(pinning))]
    assert later
    assert all(COMMITS[0] in path for path in later)


def test_a_branch_that_moves_meanwhile_gives_one_commit(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    other = FILES[PROJECTOR][:-1] + bytes([FILES[PROJECTOR][-1] ^ 1])
    hub.commits[COMMITS[1]], hub.moves_to = {**FILES, PROJECTOR: other}, COMMITS[1]
    ended = fetch()
    assert ended.returncode == WORKS, ended.stderr
    said = json.loads((tmp_path / "out" / "tpvision_slim.json").read_text())
    assert said["revision"] == COMMITS[1]
    assert said["source_files"][0]["sha256"] == hashlib.sha256(other).hexdigest()


def test_a_commit_with_the_same_weights_leaves_the_folder_alone(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    fetch()
    hub.commits[COMMITS[1]] = {**FILES, "README.md": b"a typo is gone"}
    hub.refs["main"] = COMMITS[1]
    hub.served.clear()
    assert "was there" in fetch().stdout
    assert hub.served_large() == {}


def test_a_commit_with_other_weights_is_refused(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    fetch()
    other = FILES[PROJECTOR][:-1] + bytes([FILES[PROJECTOR][-1] ^ 1])
    hub.commits[COMMITS[1]] = {**FILES, PROJECTOR: other}
    hub.refs["main"] = COMMITS[1]
    assert f"out holds {REPO} at {COMMITS[0]}" in last_line(fetch())


def test_offline_with_a_filled_cache(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    fetch()
    (tmp_path / "out").rename(tmp_path / "first")
    asked = len(hub.requests)
    ended = fetch(HF_HUB_OFFLINE="1")
    assert ended.returncode == WORKS, ended.stderr
    assert_whole(tmp_path / "out")
    assert len(hub.requests) == asked
    said = [json.loads((tmp_path / name / "tpvision_slim.json").read_text()) for name in ("first", "out")]
    assert said[0] == said[1]


def test_offline_with_an_empty_cache(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    said = last_line(fetch(HF_HUB_OFFLINE="1", HF_HUB_CACHE=str(tmp_path / "cache")))
    assert f"HF_HUB_OFFLINE is set, and the cache in {tmp_path / 'cache'} does not hold {REPO} at main" in said
    assert hub.requests == []


def test_the_cache_folder_is_where_the_environment_says(hub: Hub, fetch_apart: Fetch, tmp_path: Path) -> None:
    assert fetch_apart(HF_HUB_CACHE=str(tmp_path / "cache")).returncode == WORKS
    assert (tmp_path / "cache" / f"models--{REPO.replace('/', '--')}" / "refs" / "main").read_text() == COMMITS[0]
    assert blobs(tmp_path / "home") == set()


def test_what_the_library_cached_is_used(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    fetch("--revision", "v9")  # not there; but the library now has its variables
    huggingface_hub.hf_hub_download(REPO, TOWER)
    hub.served.clear()
    assert fetch().returncode == WORKS
    assert hub.served_large() == {PROJECTOR: len(FILES[PROJECTOR])}


@pytest.mark.parametrize(
    ("arguments", "repo", "words"),
    [
        ([], "moonshotai/Nothing", "127.0.0.1 shows no moonshotai/Nothing: it does not exist, or it is private"),
        (["--revision", "v9"], REPO, f"{REPO} has no revision v9"),
        ([], "a/b/c", "'a/b/c' is not a repository's name"),
    ],
)
def test_what_the_hub_does_not_have_is_said(fetch: Fetch, arguments: list[str], repo: str, words: str) -> None:
    assert words in last_line(fetch(*arguments, repo=repo))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda files: files.pop("preprocessor_config.json"), "lacks config.json or preprocessor_config.json"),
        (lambda files: files.pop(TOWER), f"has no {TOWER}, which its index names for vision tensors"),
        (lambda files: files.update({"config.json": b"{}"}), "vision_config is missing"),
        (
            lambda files: files.update({INDEX_NAME: FILES[INDEX_NAME].replace(b".wqkv.", b".qkv.")}),
            "blocks.0.wqkv.weight is missing, expected [288, 64]",
        ),
        (
            lambda files: files.update({INDEX_NAME: b'{"weight_map": {"lm_head.weight": "a.safetensors"}}'}),
            "holds no tensor called vision_tower.*",
        ),
        (
            lambda files: [files.pop(name) for name in (INDEX_NAME, *SHARDS)],
            f"holds neither {INDEX_NAME} nor a .safetensors file",
        ),
    ],
)
def test_a_repository_that_is_not_whole_costs_no_download(
    hub: Hub, fetch: Fetch, change: Callable[[dict[str, bytes]], object], words: str
) -> None:
    change(hub.commits[COMMITS[0]])
    assert words in last_line(fetch())
    assert hub.served_large() == {}


def test_a_repository_with_a_single_file(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    tensors = {name: tensor for path in MODEL.glob("*.safetensors") for name, tensor in load_file(path).items()}
    configs = {name: FILES[name] for name in ("config.json", "preprocessor_config.json")}
    hub.commits[COMMITS[0]] = {**configs, "model.safetensors": save(tensors)}
    ended = fetch()
    assert ended.returncode == WORKS, ended.stderr
    assert_whole(tmp_path / "out")


def test_a_foreign_folder_is_refused_before_anything_is_asked(hub: Hub, fetch: Fetch, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    assert "is not empty and not written by tpvision" in last_line(fetch())
    assert hub.requests == []


def test_what_cannot_be_written_is_told_before_the_download(hub: Hub, here: Here, fetch: Fetch, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.symlink_to(tmp_path / "nowhere")
    assert "out is not a folder" in last_line(fetch())
    out.unlink()
    assert here("extract", str(GOLDEN / "tiny-k25-f32"), "--out", str(out)).returncode == WORKS
    assert f"which is not {REPO} at {COMMITS[0]}; name another folder" in last_line(fetch())
    assert "writing /proc/no/such: " in last_line(fetch("--out", "/proc/no/such"))
    assert hub.served_large() == {}


def test_a_disk_that_fails_is_named_with_the_step(fetch: Fetch, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        assert last_line(fetch()).endswith(f"downloading {REPO}: File too large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    (tmp_path / "file").write_text("")
    said = last_line(fetch(HF_HUB_CACHE=str(tmp_path / "file" / "cache")))
    assert f"downloading {REPO}: {tmp_path / 'file'}" in said and said.endswith("Not a directory")


def test_an_unreachable_hub_is_said(fetch: Fetch) -> None:
    assert "127.0.0.1 cannot be reached" in last_line(fetch(HF_ENDPOINT="http://127.0.0.1:9"))


def test_without_the_package_one_line_says_what_to_install(tmp_path: Path) -> None:
    code = "import sys; sys.modules['huggingface_hub'] = None; from service.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", code, "fetch", REPO, "--out", str(tmp_path / "out")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == REFUSED
    assert ended.stderr == (
        "tpvision: fetch needs the package huggingface_hub, of the extra `fetch`: "
        "pip install -c constraints.txt -e '.[fetch]'\n"
    )
