"""Every metric of the catalogue is in /metrics, moves when it should, and has no label that a client can choose."""

import concurrent.futures
import os
import re
import signal
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from make_photograph import acceptance_picture
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from running import GOLDEN, OWN_STAGES, RunningService, Scrape, decoders_of, ranks_of, wait_until

from service.errors import BY_CODE
from service.geometry import plan_image
from service.groups import GROUP_STATES
from service.metrics import Metrics, ServiceState
from service.modes import Choice
from service.record import STAGES, UNKNOWN_ROUTE
from service.transport import LOSSES
from tp.settings import Settings
from tp.spec import PUBLISHED_K3
from tp.wire import Done

MODEL = GOLDEN / "tiny-k3-f32"
SMALL = (GOLDEN / "images" / "rgb_64x48.png").read_bytes()  # 24 patches, 4,704 pixels with padding
LARGE = acceptance_picture(896, 896)  # 4,096 patches, the top tier
OVER = acceptance_picture(1806, 448)  # 4,160 patches
SLAB_PATCHES = 16 * 4096
CATALOGUE = Metrics(Settings(), model="", dtype="", read_state=lambda: pytest.fail("nobody looks")).catalogue
CACHE_COUNTERS = ("hits", "misses", "coalesced", "evictions")
GAUGES = ("queue_requests", "queue_images", "queue_cost_seconds", "queue_bytes", "slab_used_patches")  # of waiting work
NAMES = [each.name.removeprefix("tpvision_") for each in CATALOGUE]


@pytest.fixture(scope="module")
def service(start_service: Any) -> RunningService:
    """Tiers of 256 and 4,096 patches, two ranks."""
    started: RunningService = start_service(
        *("--model", str(MODEL), "--tp", "2", "--capacities", "256,4096"),
        TPVISION_CAPACITY__ALLOW_OVERRIDE="any",
        TPVISION_CAPACITY__SLAB_PATCHES=str(SLAB_PATCHES),
        TPVISION_SERVER__PROBE_PORT="0",
    )
    return started


@pytest.fixture(scope="module")
def looks(service: RunningService) -> tuple[Scrape, Scrape, Scrape]:
    """/metrics before anything, in the middle of a load, and when everything has happened."""
    before = service.scrape()
    assert service.encode(SMALL).status_code == 200
    assert service.encode(OVER, oversize="downscale").status_code == 200
    assert service.encode(OVER).status_code == 422
    assert service.client.get("/nothing").status_code == 404
    during = look_under_load(service)
    leave(service)
    os.kill(decoders_of(service)[0], signal.SIGKILL)
    wait_until(lambda: service.scrape().value("decoders_replaced_total") == 1)
    os.kill(ranks_of(service)[0], signal.SIGKILL)
    wait_until(lambda: service.scrape().value("ready") == 0)
    wait_until(lambda: service.scrape().value("ready") == 1, timeout_s=60)
    return before, during, service.scrape()


def look_under_load(service: RunningService) -> Scrape:
    """A look in which every gauge of waiting work shows some."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool, httpx.Client(base_url=service.url) as other:
        answers = [pool.submit(service.encode, LARGE) for _ in range(8)]
        while not all(answer.done() for answer in answers):
            look = Scrape(other.get("/metrics").text)
            if all(look.value(gauge) > 0 for gauge in GAUGES):
                break
        else:
            pytest.fail("no look showed waiting work")
        assert {answer.result().status_code for answer in answers} == {200}
    return look


def leave(service: RunningService) -> None:
    """Send a picture and hang up before its answer."""
    with pytest.raises(httpx.TimeoutException):
        httpx.post(service.url + "/v1/encode", content=LARGE, timeout=httpx.Timeout(5, read=0.05))
    wait_until(lambda: service.scrape().value("queue_requests") == 0)


def rose(name: str, by: float | None = None, **labels: str) -> Callable[[Scrape, Scrape, Scrape], bool]:
    """Whether a counter rose, by so much where that is known."""

    def check(before: Scrape, _: Scrape, after: Scrape) -> bool:
        difference = after.value(name, **labels) - before.value(name, **labels)
        return difference > 0 if by is None else difference == by

    return check


def was(name: str, *values: float, **labels: str) -> Callable[[Scrape, Scrape, Scrape], bool]:
    """Whether a gauge had these values: before, under load, and after."""
    return lambda *looks: tuple(look.value(name, **labels) for look in looks) == values


def came_and_went(name: str) -> Callable[[Scrape, Scrape, Scrape], bool]:
    """Whether a gauge was above 0 under load alone."""
    return lambda before, during, after: before.value(name) == after.value(name) == 0 < during.value(name)


# What each metric did: one image of 24 patches, one downscaled to the top tier, eight of the top tier, one given up.
MOVES: dict[str, list[Callable[[Scrape, Scrape, Scrape], bool]]] = {
    "requests_total": [
        rose("requests_total", 10, route="/v1/encode", form="safetensors", status="200", code=""),
        rose("requests_total", 1, route="/v1/encode", status="422", code="too_many_patches"),
        rose("requests_total", 1, route=UNKNOWN_ROUTE, form="", status="404", code="not_found"),
        rose("requests_total", 1, route="/v1/encode", status="499", code="client_gone"),
        rose("requests_total", 13),
    ],
    "request_seconds": [rose("request_seconds_count", 12, route="/v1/encode"), rose("request_seconds_sum")],
    "refusals_total": [
        rose("refusals_total", 1, reason="too_many_patches"),
        rose("refusals_total", 1, reason="not_found"),
        rose("refusals_total", 2),
    ],
    "stage_seconds": [rose("stage_seconds_sum", stage=stage) for stage in OWN_STAGES]
    + [rose("stage_seconds_count", 10, stage=stage) for stage in OWN_STAGES[4:]],
    "images_total": [rose("images_total", 1, tier="256"), rose("images_total", tier="4096")],
    "images_downscaled_total": [
        rose("images_downscaled_total", 0, tier="256"),
        rose("images_downscaled_total", 1, tier="4096"),
    ],
    "downscale_ratio": [
        rose("downscale_ratio_count", 1),
        rose("downscale_ratio_bucket", 0, le="0.5"),
        rose("downscale_ratio_bucket", 1, le="1.0"),
    ],
    "pixels_total": [rose("pixels_total")],
    "padding_pixels_total": [rose("padding_pixels_total")],
    "batch_seconds_total": [rose("batch_seconds_total", mode="tp"), rose("batch_seconds_total", 0, mode="dp")],
    "batch_predicted_seconds_total": [rose("batch_predicted_seconds_total", 0)],
    "batches_total": [rose("batches_total", mode="tp"), rose("batches_total", 0, mode="dp")],
    "graph_batches_total": [rose("graph_batches_total", 0)],
    "batch_patches": [rose("batch_patches_bucket", 1, le="32.0"), rose("batch_patches_sum")],
    "batch_images": [rose("batch_images_count"), rose("batch_images_sum")],
    "rank_forward_seconds": [rose("rank_forward_seconds_sum", group="0", rank=rank) for rank in ("0", "1")],
    "batch_skew_seconds": [rose("batch_skew_seconds_sum")],
    "lost_ranks_total": [rose("lost_ranks_total", 1, group="0")],
    "build_info": [was("build_info", 1, 1, 1, model="tiny-k3-f32", dtype="float32", world_size="2")],
    **{gauge: [came_and_went(gauge)] for gauge in GAUGES},
    "slab_patches": [was("slab_patches", *[SLAB_PATCHES] * 3)],
    "ready": [was("ready", 1, 1, 1)],
    "accepted_total": [rose("accepted_total", 12)],
    "answered_total": [rose("answered_total", 11)],
    "client_gone_total": [rose("client_gone_total", 1)],
    # The cache is off here; tests/test_cache.py has these moving.
    **{f"cache_{name}_total": [rose(f"cache_{name}_total", 0)] for name in CACHE_COUNTERS},
    **{f"cache_{name}": [was(f"cache_{name}", 0, 0, 0)] for name in ("bytes", "max_bytes")},
    "decoders_replaced_total": [rose("decoders_replaced_total", 1)],
    "group_state": [
        was("group_state", 1, 1, 1, group="0", state="ready"),
        was("group_state", 0, 0, 0, group="0", state="lost"),
        was("group_state", 1, 1, 1),
    ],
    "group_restarts_total": [rose("group_restarts_total", 1, group="0")],
}


@pytest.mark.parametrize("name", NAMES)
def test_every_metric_moves_as_it_should(looks: tuple[Scrape, Scrape, Scrape], name: str) -> None:
    assert MOVES[name]
    for index, moved in enumerate(MOVES[name]):
        shown = [[sample for sample in look.samples if sample.name.startswith(f"tpvision_{name}")] for look in looks]
        assert moved(*looks), (index, shown)


def test_the_metrics_are_those_of_the_catalogue(service: RunningService, looks: Any) -> None:
    shown = {
        (family.name.removesuffix("_total"), frozenset(sample.labels) - {"le"})
        for look in looks
        for family in look.families
        for sample in family.samples
        if not sample.name.endswith("_created") and not sample.name.startswith("process_")
    }
    assert shown == {(each.name.removesuffix("_total"), frozenset(each.labels)) for each in CATALOGUE}
    assert len(NAMES) == len(set(NAMES))


def test_pixels_and_padding_are_counted_exactly(service: RunningService) -> None:
    before = service.scrape()
    assert service.encode(SMALL).status_code == 200
    after = service.scrape()
    assert after.value("pixels_total") - before.value("pixels_total") == 84 * 56
    assert after.value("padding_pixels_total") - before.value("padding_pixels_total") == 84 * 56 - 64 * 48


def test_counters_balance(service: RunningService, looks: Any) -> None:
    for look in (*looks, service.scrape()):
        assert look.value("accepted_total") == (
            look.value("answered_total") + look.value("client_gone_total") + look.value("queue_requests")
        )
    last = service.scrape()
    assert last.value("queue_requests") == last.value("slab_used_patches") == 0
    assert last.value("requests_total") == last.value("request_seconds_count") == len(service.requests)
    assert last.value("refusals_total") == sum("code" in line and line["status"] < 499 for line in service.requests)


def test_openmetrics_where_it_is_asked_for(service: RunningService) -> None:
    asked = "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.5"
    answer = service.client.get("/metrics", headers={"accept": asked})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    names = {family.name for family in parse_openmetrics(answer.text)}
    assert {"tpvision_requests", "tpvision_build", "tpvision_queue_cost_seconds"} <= names
    plain = service.client.get("/metrics", headers={"accept": "*/*"})
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize("version", ["x.y", "1", "1.0.0.0", "", "-1.0.0", "1.0.0-rc1", "9.9.9", "1,2"])
@pytest.mark.parametrize("media_type", ["application/openmetrics-text", "text/plain"])
@pytest.mark.parametrize("escaping", ["", ";escaping=none", ";escaping=x"])
def test_whatever_accept_asks_for_there_is_an_answer(version: str, media_type: str, escaping: str) -> None:
    metrics = Metrics(Settings(), model="m", dtype="float32", read_state=nothing_yet)
    content, content_type = metrics.expose(f"{media_type}; version={version}{escaping}")
    assert b"tpvision_requests" in content
    assert content_type.startswith(("text/plain; ", "application/openmetrics-text; "))


def test_the_probes_port_has_them_too(service: RunningService) -> None:
    (found,) = [match for line in service.log if (match := re.search(r"probes at (http://[\d.:]+)", line))]
    answer = httpx.get(found[1] + "/metrics")
    assert Scrape(answer.text).value("ready") == 1


HOSTILE_PATHS = ["/v1/{}", "/{}/encode", "/v1/encode/{}", "/metrics/{}", "/livez{}", "/v1/encode?{}=1", "/%00{}"]


def be_hostile(service: RunningService, word: str) -> None:
    for path in HOSTILE_PATHS:
        service.client.get(path.format(word))
    for method in ("PROPFIND", "DELETE", word.upper()):
        service.client.request(method, "/v1/encode")
    headers = {"accept": f"text/{word}", "x-request-id": word, "traceparent": word, "content-type": word}
    service.client.post("/v1/encode", content=word.encode(), headers=headers)
    service.client.post("/v1/encode", content=word.encode(), headers={**headers, "accept": "application/x-npy"})
    service.client.post("/v1/embeddings", json={"input": word, "model": word, "user": word})
    service.client.get("/v1/models", headers={"authorization": f"Bearer {word}", "host": f"{word}.example"})
    port = service.client.base_url.port
    assert port is not None
    for line in (f"{word}\r\n\r\n", f"GET /{word} HTTP/8\r\n\r\n", f"GET / HTTP/1.1\r\nHost: x\r\n{word}\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(line.encode())
            while connection.recv(2**16):
                pass


def test_no_label_can_be_chosen_by_a_client(service: RunningService) -> None:
    be_hostile(service, "word20")
    known = {(sample.name, *sorted(sample.labels.items())) for sample in service.scrape().samples}
    for number in range(20):
        be_hostile(service, f"word{number:02}")
    scrape = service.scrape()
    assert {(sample.name, *sorted(sample.labels.items())) for sample in scrape.samples} == known
    routes = {"/v1/encode", "/v1/embeddings", "/v1/models", "/v1/capacity", "/docs", "/openapi.json", UNKNOWN_ROUTE}
    allowed: dict[str, set[str]] = {
        "route": routes,
        "form": {"", "safetensors", "octet-stream", "npy", "json"},
        "code": {"", "client_gone", *BY_CODE},
        "reason": {*BY_CODE, *LOSSES},
        "stage": set(STAGES),
        "tier": {"256", "4096"},
        "mode": {"tp", "dp"},
        "group": {"0"},
        "rank": {"0", "1"},
        "state": set(GROUP_STATES),
    }
    for sample in scrape.samples:
        for label, value in sample.labels.items():
            assert value in allowed.get(label, {value}), sample
    assert {sample.labels["status"] for sample in scrape.samples if "status" in sample.labels} <= {
        *map(str, {error.status for error in BY_CODE.values()}),
        *("200", "499"),
    }


def nothing_yet() -> ServiceState:
    values: dict[str, Any] = {name: {} if name.startswith("group") else 0 for name in ServiceState.__slots__}
    return ServiceState(**values)


@pytest.mark.parametrize(("mode", "skews_s"), [("tp", [0.25]), ("dp", [])])
def test_skew_is_that_of_ranks_which_share_their_images(mode: Any, skews_s: list[float]) -> None:
    metrics = Metrics(Settings(), model="m", dtype="float32", read_state=nothing_yet)
    plan = plan_image(64, 48, PUBLISHED_K3.processor, (1024,), "refuse")
    replies = [Done(batch_id=1, non_finite=[], forward_s=seconds, all_gather_s=0) for seconds in (0.5, 0.75)]
    metrics.note_batch([plan], replies, group=0, choice=Choice(mode, {"tp": 2.0, "dp": 3.0}))
    scrape = Scrape(metrics.expose("")[0].decode())
    assert scrape.value("batches_total", mode=mode) == scrape.value("batches_total") == 1
    assert scrape.value("rank_forward_seconds_sum", group="0", rank="1") == 0.75
    assert (scrape.value("batch_skew_seconds_count"), scrape.value("batch_skew_seconds_sum")) == (
        len(skews_s),
        sum(skews_s),
    )


def test_batches_that_replayed_a_graph_are_counted() -> None:
    metrics = Metrics(Settings(), model="m", dtype="float32", read_state=nothing_yet)
    plan = plan_image(64, 48, PUBLISHED_K3.processor, (1024,), "refuse")
    for is_graphed in (True, False, True):
        reply = Done(batch_id=1, non_finite=[], forward_s=0.5, all_gather_s=0, is_graphed=is_graphed)
        metrics.note_batch([plan], [reply], group=0, choice=Choice("tp", {}))
    scrape = Scrape(metrics.expose("")[0].decode())
    assert (scrape.value("batches_total"), scrape.value("graph_batches_total")) == (3, 2)


def test_the_state_is_read_by_a_look_alone() -> None:
    num_reads = 0

    def read_state() -> ServiceState:
        nonlocal num_reads
        num_reads += 1
        return nothing_yet()

    metrics = Metrics(Settings(), model="m", dtype="float32", read_state=read_state)
    assert num_reads == 0
    metrics.expose("")
    metrics.expose("application/openmetrics-text")
    assert num_reads == 2
