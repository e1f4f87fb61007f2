"""`tpvision embed` as a person runs it, through real services: what it writes, and that it goes on where it ended."""

import asyncio
import contextlib
import hashlib
import io
import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import safetensors
import torch
from PIL import Image
from running import ROOT, RunningService, descendants, is_alive, wait_until

from service.client import Client
from service.embed import EmbedStopped, Job
from service.embed import embed as run_embed
from service.embed_journal import Entry, Journal, JournalError
from service.embed_output import Shape, shards_of, write_output
from service.embed_sources import SourceError, find_sources

COMMAND = (sys.executable, "-m", "service", "embed")
ENVIRON = {**os.environ, "NO_PROXY": "127.0.0.1", "PYTHONPATH": str(ROOT)}


def embed(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *arguments]
    return subprocess.run(command, cwd=folder, env=ENVIRON, capture_output=True, text=True, timeout=120, check=False)


def picture(index: int) -> bytes:
    file = io.BytesIO()
    noise = np.random.default_rng(index).integers(0, 256, (28 + index, 56, 3), np.uint8)
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Three pictures in a folder of folders, an empty file, a broken one, and one that is none of our business."""
    (tmp_path / "photos" / "more").mkdir(parents=True)
    for index, name in enumerate(("b.png", "more/a.PNG", "a.png")):
        (tmp_path / "photos" / name).write_bytes(picture(index))
    (tmp_path / "photos" / "empty.jpg").touch()
    (tmp_path / "photos" / "broken.png").write_bytes(picture(3)[:-100])
    (tmp_path / "photos" / "notes.txt").write_text("a cat")
    return tmp_path


def read_safetensors(path: Path) -> tuple[torch.Tensor, torch.Tensor, list[dict[str, Any]], list[dict[str, Any]]]:
    with safetensors.safe_open(path, framework="pt") as file:
        about = file.metadata()
        tensors = file.get_tensor("embeddings"), file.get_tensor("grid_thw")
    return *tensors, json.loads(about["images"]), json.loads(about["errors"])


def test_a_folder_becomes_pooled_vectors(work: Path, tiny_k3: RunningService) -> None:
    ended = embed(work, "photos", "--out", "vectors.safetensors", "--url", tiny_k3.url)
    assert ended.returncode == 0, ended.stderr
    assert "5 images" in ended.stdout and "images/s" in ended.stdout and "2 have no embedding" in ended.stdout
    vectors, grids, images, errors = read_safetensors(work / "vectors.safetensors")
    assert [image["path"] for image in images] == ["photos/a.png", "photos/b.png", "photos/more/a.PNG"]
    with Client(tiny_k3.url, trust_env=False) as client:
        for row, image in enumerate(images):
            expected = client.encode(work / image["path"], pooled=True)
            assert np.allclose(vectors[row], expected.numpy(), atol=1e-5)
            assert tuple(grids[row].tolist()) == expected.geometry.grid_thw
            assert image["sha256"] == hashlib.sha256((work / image["path"]).read_bytes()).hexdigest()
            assert (image["start"], image["end"]) == (row, row + 1)
            assert image["original_size"] == list(expected.geometry.original_size)
    assert [(error["path"], error["code"]) for error in errors] == [
        ("photos/broken.png", "undecodable_image"),
        ("photos/empty.jpg", "unsupported_image"),
    ]
    assert sorted(path.name for path in work.iterdir()) == ["photos", "vectors.safetensors"]


def test_tokens_are_kept_as_they_are(work: Path, tiny_k3_bf16: RunningService) -> None:
    for out in ("tokens.safetensors", "tokens.parquet"):
        ended = embed(work, "photos/*.png", "--out", out, "--output", "tokens", "--url", tiny_k3_bf16.url)
        assert ended.returncode == 0, ended.stderr
    tokens, _, images, _ = read_safetensors(work / "tokens.safetensors")
    rows = {row["path"]: row for row in pq.read_table(work / "tokens.parquet").to_pylist()}
    assert tokens.dtype == torch.bfloat16
    for image in images:
        part = tokens[image["start"] : image["end"]].float()
        assert len(part) == image["num_tokens"] == rows[image["path"]]["num_tokens"]
        assert torch.equal(torch.tensor(rows[image["path"]]["embedding"]).reshape(part.shape), part)
    assert rows["photos/broken.png"]["embedding"] is None
    assert rows["photos/broken.png"]["code"] == "undecodable_image"


def test_parquet_goes_in_and_comes_out(tmp_path: Path, tiny_k3: RunningService) -> None:
    (tmp_path / "a.png").write_bytes(picture(1))
    cells = [{"bytes": picture(0), "path": None}, {"bytes": None, "path": "a.png"}, None]
    pq.write_table(pa.table({"label": [7, 8, 9], "image": cells}), tmp_path / "set.parquet")
    ended = embed(tmp_path, "set.parquet", "--out", "vectors.parquet", "--normalize", "--url", tiny_k3.url)
    assert ended.returncode == 0, ended.stderr
    found = pq.read_table(tmp_path / "vectors.parquet").to_pylist()
    assert [row["path"] for row in found] == [f"set.parquet#{row:09}" for row in range(3)]
    assert [row["code"] for row in found] == [None, None, "unreadable_file"]
    assert np.allclose([np.linalg.norm(row["embedding"]) for row in found[:2]], 1)
    assert [row["original_size"] for row in found] == [[56, 28], [56, 29], None]


def answered(service: RunningService) -> int:
    return int(service.client.get("/v1/capacity").json()["requests"]["answered"])


def start(folder: Path, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen([*COMMAND, *arguments], cwd=folder, env=ENVIRON, text=True, **options)


@contextlib.contextmanager
def door_to(service: RunningService, *, num_open: int) -> Iterator[str]:
    """The URL of a proxy that lets so many encodes through; those that come later wait until the block ends."""
    places, is_over = threading.Semaphore(num_open), threading.Event()

    class Door(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._forward(b"")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if places.acquire(blocking=False):
                self._forward(body)
            else:
                is_over.wait()

        def _forward(self, body: bytes) -> None:
            headers = {name: self.headers[name] for name in ("accept", "content-type") if name in self.headers}
            answer = service.client.request(self.command, self.path, content=body, headers=headers)
            self.send_response(answer.status_code)
            for name, value in answer.headers.multi_items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Door) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            is_over.set()
            server.shutdown()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_what_is_finished_is_not_done_again(tmp_path: Path, tiny_k3: RunningService, number: int) -> None:
    num_images, concurrency = 12, 2
    (tmp_path / "photos").mkdir()
    for index in range(num_images):
        (tmp_path / "photos" / f"{index:02}.png").write_bytes(picture(index))
    line = ("photos", "--out", "vectors.safetensors", "--concurrency", str(concurrency), "--url")
    before = answered(tiny_k3)
    with door_to(tiny_k3, num_open=6) as url:
        process = start(tmp_path, *line, url, stderr=subprocess.PIPE)
        wait_until(lambda: answered(tiny_k3) == before + 6, timeout_s=30)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == (-9 if number == signal.SIGKILL else 130)
    assert number == signal.SIGKILL or "the same line goes on from here" in stderr
    assert not (tmp_path / "vectors.safetensors").exists()
    finished = finished_in(tmp_path / "vectors.safetensors.journal")
    assert 6 - concurrency <= len(finished) <= 6

    (tmp_path / sorted(finished)[0]).write_bytes(picture(99))  # changed since: once more
    wait_until(lambda: tiny_k3.client.get("/v1/capacity").json()["requests"]["in_flight"] == 0)
    before = answered(tiny_k3)
    ended = embed(tmp_path, *line, tiny_k3.url)
    assert ended.returncode == 0, ended.stderr
    assert answered(tiny_k3) - before == num_images - len(finished) + 1
    assert f"{len(finished) - 1} by an earlier run" in ended.stdout
    assert len(read_safetensors(tmp_path / "vectors.safetensors")[2]) == num_images
    with Client(tiny_k3.url, trust_env=False) as client:
        vectors, _, images, _ = read_safetensors(tmp_path / "vectors.safetensors")
        expected = client.encode_batch([tmp_path / image["path"] for image in images], pooled=True)
        for vector, embedding in zip(vectors, expected, strict=True):
            assert np.allclose(vector, embedding.numpy(), atol=1e-5)  # type: ignore[union-attr]


def finished_in(path: Path) -> dict[str, str]:
    with contextlib.closing(sqlite3.connect(path)) as database:
        about = json.loads(database.execute("SELECT about FROM run").fetchone()[0])
    with Journal(path, about) as journal:
        return journal.versions()


def test_it_starts_a_service_of_its_own_and_ends_it(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    for index in range(120):
        (tmp_path / "photos" / f"{index:03}.png").write_bytes(picture(index))
    line = ("photos", "--out", "vectors.parquet", "--demo", "--concurrency", "1")
    process = start(tmp_path, *line, stderr=subprocess.PIPE)
    log = tmp_path / "vectors.parquet.journal-wal"
    wait_until(lambda: log.exists() and log.stat().st_size > 100_000, timeout_s=60)  # a dozen images
    pids = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert pids and not any(is_alive(pid) for pid in pids)
    ended = embed(tmp_path, *line)
    assert ended.returncode == 0, ended.stderr
    assert "by an earlier run" in ended.stdout
    assert pq.read_metadata(tmp_path / "vectors.parquet").num_rows == 120


def test_a_terminal_shows_rate_and_time_left(work: Path, tiny_k3: RunningService) -> None:
    ours, theirs = pty.openpty()
    line = ("photos", "--out", "vectors.safetensors", "--url", tiny_k3.url, "--concurrency", "1")
    process = start(work, *line, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    shown = b"".join(_read_all(ours)).decode()
    assert process.wait(30) == 0
    assert "5/5" in shown and "images/s" in shown and "2 failed" in shown and "0:00:0" in shown


def _read_all(terminal: int) -> Iterator[bytes]:
    with open(terminal, "rb", buffering=0) as file:
        while True:
            try:
                yield file.read(4096)
            except OSError:  # how Linux says that nobody holds the other end
                return


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("photos", "--out", "v.csv"), 2, ".safetensors or .parquet"),
        (("photos", "--out", "nowhere/v.parquet"), 2, "no folder nowhere"),
        (("photos", "--out", "there.parquet"), 2, "there already"),
        (("nowhere", "--out", "v.parquet"), 2, "neither a folder"),
        (("there.parquet", "--out", "v.parquet"), 2, "no Parquet file"),
        (("photos", "--out", "v.parquet"), 2, "--demo"),
        (("photos", "--out", "v.parquet", "--demo", "--url", "http://127.0.0.1:9"), 2, "--url names"),
        (("photos", "--out", "v.parquet", "--url", "127.0.0.1:9"), 2, "http://"),
        (
            ("photos", "--out", "v.parquet", "--url", "http://127.0.0.1:9", "--deadline-s", "0.2"),
            1,
            "goes on from here",
        ),
    ],
)
def test_what_cannot_work_is_told(work: Path, arguments: Sequence[str], status: int, words: str) -> None:
    (work / "there.parquet").write_text("not Parquet")
    ended = embed(work, *arguments)
    assert (ended.returncode, words in ended.stderr) == (status, True), ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "arguments", [("photos", "--out", "vectors.parquet"), ("table.parquet", "--out", "vectors.safetensors")]
)
def test_parquet_without_its_package_is_told_before_any_image_is_sent(
    work: Path, here: Any, monkeypatch: pytest.MonkeyPatch, arguments: Sequence[str]
) -> None:
    (work / "table.parquet").touch()
    monkeypatch.chdir(work)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    ended = here("embed", *arguments, "--url", "http://127.0.0.1:9")
    assert ended.returncode == 2
    assert "tpvision[parquet]" in ended.stderr


def test_an_option_that_the_service_does_not_allow_ends_the_run(work: Path, tiny_k3: RunningService) -> None:
    ended = embed(work, "photos", "--out", "v.safetensors", "--url", tiny_k3.url, "--oversize", "downscale")
    assert ended.returncode == 1
    assert "oversize" in ended.stderr


def test_what_is_finished_when_the_service_will_not_go_on_is_kept(
    work: Path, tiny_k3: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def add_slowly(journal: Journal, entry: Entry, data: bytes) -> None:
        time.sleep(0.5)  # by now the other image has ended the run
        add(journal, entry, data)

    add = Journal.add
    monkeypatch.setattr(Journal, "add", add_slowly)
    job = Job(["photos/empty.jpg", "photos/a.png"], work / "v.safetensors", oversize="downscale")
    monkeypatch.chdir(work)
    with pytest.raises(EmbedStopped, match="oversize"):
        asyncio.run(run_embed(job, find_sources(job.places, column=job.column), tiny_k3.url, trust_env=False))
    with sqlite3.connect(job.journal_path) as journal:
        assert journal.execute("SELECT name FROM image").fetchall() == [("photos/empty.jpg",)]


RUN = {"model": "m"}
GEOMETRY = {"grid_thw": [1, 4, 6]}


def filled(path: Path, names: Sequence[str]) -> Journal:
    journal = Journal(path, RUN)
    for name in names:
        data = np.full((2, 4), float(name), np.float32).tobytes()
        journal.add(Entry(name, "v", None, GEOMETRY, 2, len(data)), data)
    return journal


def test_a_journal_is_one_runs_and_one_processs(tmp_path: Path) -> None:
    with filled(tmp_path / "journal", ["1"]), pytest.raises(JournalError, match="another run writing"):
        Journal(tmp_path / "journal", RUN)
    with pytest.raises(JournalError, match="model was m and is n"):
        Journal(tmp_path / "journal", {"model": "n"})
    with Journal(tmp_path / "journal", RUN) as journal:
        assert journal.versions() == {"1": "v"}


@pytest.mark.parametrize("suffix", [".safetensors", ".parquet"])
def test_what_is_too_large_for_one_file_becomes_shards(tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"out{suffix}"
    stale = tmp_path / f"out-00001-of-00009{suffix}"
    stale.touch()
    with filled(tmp_path / "journal", ["3", "1", "2"]) as journal:
        paths = write_output(journal, Shape("m", "float32", 4), out, shard_bytes=64)
    assert [path.name for path in paths] == [f"out-0000{number}-of-00002{suffix}" for number in (1, 2)]
    assert shards_of(out) == paths
    if suffix == ".parquet":
        firsts = [row["embedding"][0] for path in paths for row in pq.read_table(path).to_pylist()]
    else:
        firsts = [row for path in paths for row in read_safetensors(path)[0][::2, 0].tolist()]
    assert firsts == [1, 2, 3]


def test_a_run_without_one_good_image_still_writes_its_errors(tmp_path: Path) -> None:
    about = {"code": "undecodable_image", "message": "broken"}
    with Journal(tmp_path / "journal", RUN) as journal:
        journal.add(Entry("a.png", "v", "00", about, 0, 0), b"")
        for name in ("out.safetensors", "out.parquet"):
            write_output(journal, Shape("m", "float32", 4), tmp_path / name, shard_bytes=64)
    vectors, grids, images, errors = read_safetensors(tmp_path / "out.safetensors")
    assert (list(vectors.shape), list(grids.shape), images) == ([0, 4], [0, 3], [])
    assert errors == [{"path": "a.png", "sha256": "00", **about}]
    (row,) = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert (row["code"], row["embedding"]) == ("undecodable_image", None)


@pytest.mark.parametrize(
    ("places", "names"),
    [
        (["photos"], ["a.png", "b.png", "broken.png", "empty.jpg", "more/a.PNG"]),
        (["photos/**/a.*"], ["a.png", "more/a.PNG"]),
        (["photos/notes.txt", "photos/more", "photos/more/a.PNG"], ["notes.txt", "more/a.PNG"]),
    ],
)
def test_folders_globs_and_files_are_found(
    work: Path, monkeypatch: pytest.MonkeyPatch, places: list[str], names: list[str]
) -> None:
    monkeypatch.chdir(work)
    sources = find_sources(places, column="image")
    assert [source.name for source in sources.images] == [f"photos/{name}" for name in names]
    assert sources.num_images == len(names)


def test_a_folder_without_images_says_what_it_was_searched_for(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"\.webp"):
        find_sources([str(tmp_path)], column="image")


def test_a_parquet_file_without_the_column_names_those_it_has(tmp_path: Path) -> None:
    pq.write_table(pa.table({"picture": [b"x"]}), tmp_path / "set.parquet")
    with pytest.raises(SourceError, match="picture"):
        find_sources([str(tmp_path / "set.parquet")], column="image")


def test_a_file_name_may_be_any_bytes(tmp_path: Path) -> None:
    path = Path(os.fsdecode(bytes(tmp_path) + b"/\xff.png"))
    path.write_bytes(b"x")
    (source,) = find_sources([str(tmp_path)], column="image").images
    assert source.name.endswith("\\udcff.png")
    assert source.read() == b"x"
