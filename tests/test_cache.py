"""The content cache and ETags on real services: what is answered without encoding, and that nothing else differs."""

import base64
import concurrent.futures
import contextlib
import http.client
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from make_photograph import acceptance_picture
from PIL import Image
from running import GOLDEN, RunningService, Scrape, assert_balanced, images_of, ranks_of, wait_until

MODEL = str(GOLDEN / "tiny-k3-f32")
GOOD = (GOLDEN / "images" / "rgb_64x48.png").read_bytes()  # 24 patches, 6 tokens
ENTRY_BYTES = 6 * 128 * 4 + 2048
FORMS = ("application/vnd.safetensors", "application/octet-stream", "application/x-npy", "application/json")
PLAIN: dict[str, Any] = {
    "capacity": {"patch_capacities": [1024], "allow_override": "any"},
    "cache": {"max_bytes": 2**24},
}
MISS, HIT, COLLAPSED = "tpvision; fwd=miss", "tpvision; hit", "tpvision; fwd=miss; collapsed"


def picture(number: int, width: int = 56, height: int = 56) -> bytes:
    """A picture that no other test sends; of 16 patches unless a size is given."""
    file = io.BytesIO()
    Image.new("RGB", (width, height), (number % 256, number // 256, 77)).save(file, "PNG")
    return file.getvalue()


class Cached:
    """A service with a cache, and a settings file that tests write to."""

    def __init__(self, service: RunningService, config: Path) -> None:
        self.service = service
        self.config = config
        self.encode = service.encode

    def post(self, content: bytes, accept: str = "*/*", **query: str) -> httpx.Response:
        return self.service.client.post("/v1/encode", content=content, params=query, headers={"accept": accept})

    def reload(self, **changes: dict[str, Any]) -> None:
        tree = {name: {**PLAIN.get(name, {}), **changes.get(name, {})} for name in PLAIN | changes}
        self.config.write_text(yaml.safe_dump(tree))
        before = sum("settings reloaded" in line for line in self.service.log)
        self.service.process.send_signal(signal.SIGHUP)
        wait_until(lambda: sum("settings reloaded" in line for line in self.service.log) > before)

    def line_of(self, answer: httpx.Response) -> dict[str, Any]:
        request_id = answer.headers["x-request-id"]
        wait_until(lambda: any(line["id"] == request_id for line in self.service.requests))
        return next(line for line in self.service.requests if line["id"] == request_id)

    @contextlib.contextmanager
    def counting(self) -> Iterator["Counted"]:
        counted = Counted(self.service, self.service.scrape())
        yield counted
        counted.after = self.service.scrape()

    @contextlib.contextmanager
    def stopped_ranks(self) -> Iterator[list[int]]:
        """Ranks that hold every batch that they are given."""
        ranks = ranks_of(self.service)
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield ranks
        finally:
            for pid in ranks:
                try:
                    os.kill(pid, signal.SIGCONT)
                except ProcessLookupError:
                    continue


class Counted:
    """How counters rose."""

    def __init__(self, service: RunningService, before: Scrape) -> None:
        self._service = service
        self._before = before
        self.after: Scrape | None = None

    def __call__(self, name: str, **labels: str) -> float:
        return (self.after or self._service.scrape()).value(name, **labels) - self._before.value(name, **labels)

    @property
    def cache(self) -> tuple[float, ...]:
        """Hits, misses, coalesced."""
        return tuple(self(f"cache_{name}_total") for name in ("hits", "misses", "coalesced"))


class Call:
    """A request whose client waits elsewhere, and can leave."""

    def __init__(self, service: RunningService, content: bytes) -> None:
        url = httpx.URL(service.url)
        self._connection = http.client.HTTPConnection(url.host, url.port, timeout=60)
        self._connection.request("POST", "/v1/encode", content)

    def status(self) -> int:
        with contextlib.closing(self._connection), self._connection.getresponse() as answer:
            answer.read()
            return answer.status

    def leave(self) -> None:
        self._connection.close()


def start(tmp_path_factory: pytest.TempPathFactory, start_service: Any, max_bytes: int) -> Cached:
    config = tmp_path_factory.mktemp("config") / "config.yaml"
    config.write_text(yaml.safe_dump({**PLAIN, "cache": {"max_bytes": max_bytes}}))
    return Cached(start_service("--model", MODEL, "--tp", "2", "--config", str(config)), config)


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory, start_service: Any) -> Iterator[Cached]:
    made = start(tmp_path_factory, start_service, 2**24)
    yield made
    assert_balanced(made.service)


def comparable(answer: httpx.Response) -> Any:
    """All of an answer but what names the request and the moment."""
    assert answer.status_code == 200, answer.text
    form = answer.headers["content-type"]
    geometry = answer.headers.get("x-tpvision-images")
    if form == "application/json":
        return {key: value for key, value in answer.json().items() if key not in ("id", "created")}
    if form != "application/vnd.safetensors":
        return geometry, answer.content
    length = int.from_bytes(answer.content[:8], "little")
    header = json.loads(answer.content[8 : 8 + length])
    metadata = header.pop("__metadata__")
    return header, metadata["images"], metadata["dtype"], answer.content[8 + length :]


OPTIONS = [
    *(pytest.param(form, {}, id=form) for form in FORMS),
    *(pytest.param(form, {"dtype": "float16"}, id=f"{form} float16") for form in FORMS),
    pytest.param(FORMS[0], {"dtype": "bfloat16", "normalize": "true"}, id="normalised bfloat16"),
    *(pytest.param(form, {"output": "pooled", "normalize": "true"}, id=f"{form} pooled") for form in FORMS),
    pytest.param(FORMS[3], {"encoding_format": "base64"}, id="base64"),
]


@pytest.mark.parametrize(("form", "query"), OPTIONS)
def test_a_hit_is_byte_for_byte_what_an_uncached_service_answers(
    cached: Cached, tiny_k3: RunningService, form: str, query: dict[str, str]
) -> None:
    expected = comparable(tiny_k3.client.post("/v1/encode", content=GOOD, params=query, headers={"accept": form}))
    cached.encode(GOOD)
    with cached.counting() as counted:
        answer = cached.post(GOOD, form, **query)
    assert comparable(answer) == expected
    assert answer.headers["cache-status"] == HIT
    assert counted.cache == (1, 0, 0)
    assert counted("batches_total") == counted("images_total") == 0


def test_a_hit_comes_to_no_stage_of_encoding(cached: Cached) -> None:
    content = picture(1)
    miss, hit = cached.line_of(cached.encode(content)), cached.line_of(cached.encode(content))
    assert set(hit["stages_ms"]) == {"receive", "copy", "encode_response"}
    assert {"header", "decode", "queue", "forward"} < set(miss["stages_ms"])
    assert (hit["cached"], "cached" in miss) == (1, False)
    assert (hit["images"], hit["patches"], hit["outcome"]) == (miss["images"], miss["patches"], miss["outcome"])


def test_embeddings_and_every_kind_of_body_share_one_entry(cached: Cached) -> None:
    content = picture(2)
    cached.encode(content)
    text = base64.b64encode(content).decode()
    client = cached.service.client
    with cached.counting() as counted:
        answers = [
            client.post("/v1/encode", files={"file": content}),
            client.post("/v1/encode", json={"images": [text]}),
            client.post("/v1/embeddings", json={"input": f"data:image/png;base64,{text}"}),
            client.post("/v1/embeddings", json={"input": [text, text], "pooling": "none"}),
        ]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert [answer.headers["cache-status"] for answer in answers] == [HIT] * 4
    assert counted.cache == (5, 0, 0)


def test_of_several_images_only_new_ones_are_encoded_each_once(cached: Cached) -> None:
    old, new, newer = picture(3), picture(4), picture(5, 112, 56)
    alone = [images_of(cached.encode(each))[0] for each in (old,)]
    with cached.counting() as counted:
        files = [("file", each) for each in (new, old, newer, new)]
        answer = cached.service.client.post("/v1/encode", files=files)
    images = images_of(answer)
    assert counted.cache == (1, 2, 1)
    assert counted("images_total") == 2
    assert answer.headers["cache-status"] == "tpvision; fwd=partial"
    assert [image["num_tokens"] for image in images] == [4, 4, 8, 4]
    assert {**images[1], "start": 0, "end": 4} == alone[0]
    line = cached.line_of(answer)
    assert (line["cached"], line["coalesced"], line["num_images"]) == (1, 1, 4)
    length = int.from_bytes(answer.content[:8], "little")
    rows = answer.content[8 + length :][: 20 * 128 * 4]
    assert rows[: 4 * 512] == rows[16 * 512 :] != rows[4 * 512 : 8 * 512]


def test_policies_and_options_that_change_the_result_do_not_share(cached: Cached) -> None:
    content = acceptance_picture(480, 480)  # over the top tier
    assert cached.encode(content).status_code == 422
    assert images_of(cached.encode(content, oversize="downscale"))[0]["downscaled"]
    with cached.counting() as counted:
        assert cached.encode(content).json()["error"]["code"] == "too_many_patches"
        assert cached.encode(content, oversize="downscale").headers["cache-status"] == HIT
    assert counted.cache == (1, 1, 0)


def test_an_image_that_is_refused_is_not_kept(cached: Cached) -> None:
    before = cached.service.scrape().value("cache_bytes")
    with cached.counting() as counted:
        answers = [cached.encode(b"no image at all") for _ in range(2)]
        names = cached.service.client.post("/v1/encode", files=[("file", GOOD), ("file", b"no image at all")])
    assert [answer.status_code for answer in answers] == [415, 415]
    assert (names.json()["error"]["param"], counted.cache[1]) == ("images[1]", 3)
    assert cached.service.scrape().value("cache_bytes") == before


def test_a_video_chunk_is_its_frames_in_order(cached: Cached) -> None:
    one, two = (base64.b64encode(picture(number)).decode() for number in (6, 7))

    def send(*frames: str) -> str:
        body = {"images": [{"type": "video_chunk", "frames": list(frames)}]}
        answer = cached.service.client.post("/v1/encode", json=body)
        assert answer.status_code == 200, answer.text
        return answer.headers["cache-status"]

    assert [send(one, two), send(two, one), send(one), send(one, two)] == [MISS, MISS, MISS, HIT]
    assert cached.encode(base64.b64decode(one)).headers["cache-status"] == MISS


def test_simultaneous_duplicates_are_encoded_once(cached: Cached) -> None:
    content, count = picture(8), 12
    with cached.counting() as counted, concurrent.futures.ThreadPoolExecutor(count) as pool:
        with cached.stopped_ranks():
            calls = [pool.submit(cached.encode, content) for _ in range(count)]
            wait_until(lambda: cached.service.scrape().value("queue_requests") == count)
            assert counted("cache_misses_total") == 1
        answers = [call.result() for call in calls]
    assert {answer.status_code for answer in answers} == {200}
    assert len({str(comparable(answer)) for answer in answers}) == 1
    assert counted.cache == (0, 1, count - 1)
    assert counted("batch_images_sum") == 1
    assert sorted(answer.headers["cache-status"] for answer in answers) == [MISS] + [COLLAPSED] * (count - 1)
    lines = [cached.line_of(answer) for answer in answers]
    assert sum("coalesce" in line["stages_ms"] for line in lines) == count - 1


def test_when_the_first_client_leaves_the_others_are_answered(cached: Cached) -> None:
    content = picture(9)
    with cached.counting() as counted:
        with cached.stopped_ranks():
            first = Call(cached.service, content)
            wait_until(lambda: counted("cache_misses_total") == 1)
            others = [Call(cached.service, content) for _ in range(3)]
            wait_until(lambda: cached.service.scrape().value("queue_requests") == 4)
            first.leave()
            wait_until(lambda: counted("cache_misses_total") == 2)
        assert [other.status() for other in others] == [200] * 3
    assert counted.cache == (0, 2, 2)
    assert (counted("client_gone_total"), counted("answered_total"), counted("accepted_total")) == (1, 3, 4)


def test_who_waits_for_another_has_a_deadline_of_its_own(cached: Cached) -> None:
    content = picture(10)
    with cached.counting() as counted:
        with cached.stopped_ranks():
            first = Call(cached.service, content)
            wait_until(lambda: counted("cache_misses_total") == 1)
            cached.reload(limits={"request_timeout_s": 0.2})
            late = cached.encode(content)
        cached.reload()
        assert (late.status_code, late.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert first.status() == 200
    assert counted.cache == (0, 1, 0)


@pytest.mark.faults
def test_a_rank_that_dies_in_the_first_ones_batch_costs_nobody_an_answer(cached: Cached) -> None:
    content = picture(11)
    pool = concurrent.futures.ThreadPoolExecutor(5)
    with cached.counting() as counted, pool, cached.stopped_ranks() as ranks:
        calls = [pool.submit(cached.encode, content) for _ in range(5)]
        wait_until(lambda: cached.service.scrape().value("queue_requests") == 5)
        os.kill(ranks[1], signal.SIGKILL)
        assert {call.result().status_code for call in calls} == {200}
    assert counted.cache == (0, 1, 4)
    assert counted("lost_ranks_total") == 1
    wait_until(lambda: cached.service.client.get("/readyz").status_code == 200, timeout_s=30)
    assert cached.encode(content).headers["cache-status"] == HIT  # and it outlives the group


def test_what_does_not_fit_the_slab_together_is_refused_also_where_all_of_it_is_kept(cached: Cached) -> None:
    content = acceptance_picture(420, 420)  # 900 patches; the slab has 4,096
    cached.encode(content)
    four, five = ([("file", content)] * number for number in (4, 5))
    assert cached.service.client.post("/v1/encode", files=four).headers["cache-status"] == HIT
    answer = cached.service.client.post("/v1/encode", files=five)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "request_too_large")


def test_the_oldest_make_room_and_what_is_larger_than_all_room_is_not_kept(
    tmp_path_factory: pytest.TempPathFactory, start_service: Any
) -> None:
    small = start(tmp_path_factory, start_service, 2 * ENTRY_BYTES)
    one, two, three = (picture(number, 64, 48) for number in range(3))
    statuses = [small.encode(each).headers["cache-status"] for each in (one, two, one, three, one, two)]
    assert statuses == [MISS, MISS, HIT, MISS, HIT, MISS]
    large = picture(4, 224, 224)
    assert [small.encode(large).headers["cache-status"] for _ in range(2)] == [MISS, MISS]
    look = small.service.scrape()
    assert look.value("cache_evictions_total") == 2
    assert look.value("cache_bytes") == look.value("cache_max_bytes") == 2 * ENTRY_BYTES
    small.reload(cache={"max_bytes": ENTRY_BYTES})
    assert [small.encode(each).headers["cache-status"] for each in (two, one)] == [HIT, MISS]
    small.reload(cache={"max_bytes": 0})
    assert "cache-status" not in small.encode(one).headers
    assert small.service.scrape().value("cache_bytes") == 0


def test_it_is_off_by_default(tiny_k3: RunningService) -> None:
    before = tiny_k3.scrape()
    answers = [tiny_k3.encode(GOOD) for _ in range(2)]
    after = tiny_k3.scrape()
    assert [answer.headers.get("cache-status") for answer in answers] == [None, None]
    assert after.value("batch_images_sum") - before.value("batch_images_sum") == 2
    for name in ("hits_total", "misses_total", "coalesced_total", "evictions_total", "bytes", "max_bytes"):
        assert after.value(f"cache_{name}") == 0


def ask(service: RunningService, content: bytes, tags: str, **query: str) -> httpx.Response:
    return service.client.post("/v1/encode", content=content, params=query, headers={"if-none-match": tags})


def test_an_etag_gives_304_without_encoding_whether_or_not_there_is_a_cache(tiny_k3: RunningService) -> None:
    tag = tiny_k3.encode(GOOD).headers["etag"]
    before = tiny_k3.scrape()
    answer = ask(tiny_k3, GOOD, f'"something else", {tag}')
    after = tiny_k3.scrape()
    assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tag)
    assert answer.headers["x-request-id"]
    assert tiny_k3.encode(GOOD).headers["etag"] == tag
    for name in ("batches_total", "accepted_total"):
        assert after.value(name) == before.value(name)
    assert after.value("requests_total", status="304") == before.value("requests_total", status="304") + 1


def test_a_tag_is_of_all_images_in_their_order(tiny_k3: RunningService) -> None:
    def send(*images: bytes, tags: str = "") -> httpx.Response:
        files = [("file", image) for image in images]
        return tiny_k3.client.post("/v1/encode", files=files, headers={"if-none-match": tags})

    one, two = picture(20), picture(21)
    tag = send(one, two).headers["etag"]
    assert send(one, two, tags=tag).status_code == 304
    assert [send(*images, tags=tag).status_code for images in ((two, one), (one,), (one, two, two))] == [200] * 3


def test_every_form_and_option_has_a_tag_of_its_own(tiny_k3: RunningService) -> None:
    queries: list[dict[str, str]] = [{}, {"output": "pooled"}, {"normalize": "true"}, {"dtype": "float16"}]
    answers = [
        tiny_k3.client.post("/v1/encode", content=GOOD, params=query, headers={"accept": form})
        for form in FORMS
        for query in queries
    ]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.headers["etag"] for answer in answers}) == len(answers)
    assert ask(tiny_k3, GOOD, answers[0].headers["etag"], dtype="float32").status_code == 304  # it is the default


@pytest.mark.parametrize("tags", ["*", '"', '""', "W/", 'W/"' + "0" * 64 + '"', '"' * 20_001, ",," * 9_000, "\xff\xfe"])
def test_a_hostile_if_none_match_changes_nothing(tiny_k3: RunningService, tags: str) -> None:
    headers = [(b"if-none-match", tags.encode("latin-1"))]
    answer = tiny_k3.client.post("/v1/encode", content=GOOD, headers=headers)
    assert (answer.status_code, bool(answer.content)) == (200, True)


def test_what_would_be_refused_now_is_refused_whatever_tag_comes_with_it(cached: Cached) -> None:
    content = acceptance_picture(420, 420)  # 900 patches
    json_tag = cached.post(content, FORMS[3]).headers["etag"]
    first = cached.encode(content)
    tags = f"{first.headers['etag']}, {json_tag}"
    assert ask(cached.service, content, tags).status_code == 304

    def refused(accept: str = "*/*", **changes: dict[str, Any]) -> str:
        cached.reload(**changes)
        headers = {"if-none-match": tags, "accept": accept}
        answer = cached.service.client.post("/v1/encode", content=content, headers=headers)
        return str(answer.json()["error"]["code"])

    def answered(**changes: dict[str, Any]) -> tuple[int, str | None]:
        cached.reload(**changes)
        answer = ask(cached.service, content, tags)
        return answer.status_code, answer.headers.get("cache-status")

    assert refused(capacity={"patch_capacities": [256]}) == "too_many_patches"
    assert refused(limits={"max_image_pixels": 420 * 420 - 1}) == "image_too_large"
    assert refused(limits={"max_body_bytes": 1000}) == "body_too_large"
    assert refused(FORMS[3], limits={"max_json_bytes": 100_000}) == "response_too_large"
    assert answered(capacity={"policy": "downscale"}) == (200, MISS)
    assert answered(capacity={"patch_capacities": [900, 1024]}) == (200, MISS)  # its tier is another one
    assert answered() == (304, None)


def test_a_tag_opens_no_door(tmp_path: Path, start_service: Any, tiny_k3: RunningService) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret")
    service: RunningService = start_service("--model", MODEL, TPVISION_SERVER__API_KEYS_FILE=str(keys))
    headers = {"authorization": "Bearer secret"}
    tag = service.client.post("/v1/encode", content=GOOD, headers=headers).headers["etag"]
    assert ask(service, GOOD, tag).status_code == 401
    answer = service.client.post("/v1/encode", content=GOOD, headers={**headers, "if-none-match": tag})
    assert answer.status_code == 304
