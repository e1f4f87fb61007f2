"""SIGHUP on a real service: what is taken over, what is not, and that no request is lost or sees half of it."""

import concurrent.futures
import io
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from make_photograph import acceptance_picture
from PIL import Image
from running import (
    COMMAND,
    GOLDEN,
    RunningService,
    assert_balanced,
    descendants,
    holds_back_sighup,
    images_of,
    ranks_of,
    wait_until,
)
from slow_pictures import with_chunks

MODEL = str(GOLDEN / "tiny-k3-f32")
GOOD = (GOLDEN / "images" / "rgb_64x48.png").read_bytes()  # 24 patches
PLAIN: dict[str, Any] = {"capacity": {"patch_capacities": [64, 256, 1024]}, "limits": {"max_queue_s": 600}}


def picture(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 90, 10)).save(file, "PNG")
    return file.getvalue()


MEDIUM = picture(280, 280)  # 400 patches
LARGE = acceptance_picture(448, 448)  # 1,024 patches
SLOW = with_chunks(GOOD, 500_000)


DONE = re.compile(r"info: settings reloaded|error: the settings were not reloaded")


def said(service: RunningService, after: int) -> list[str]:
    """The front-end's log lines after so many, each as `level: event`, requests left out."""
    lines = [json.loads(line) for line in service.log[after:] if line.startswith("{")]
    return [f"{line['level']}: {line['event']}" for line in lines if line["event"] != "request"]


class Reloading:
    """A service with a settings file that tests write to."""

    def __init__(self, service: RunningService, config: Path) -> None:
        self.service = service
        self.config = config

    def write(self, text: str) -> None:
        """As Kubernetes and careful editors do it: never half a file."""
        new = self.config.with_suffix(".new")
        new.write_text(text)
        new.replace(self.config)

    def reload(self, *changes: dict[str, Any], pid: int | None = None) -> list[str]:
        """Set these settings on top of the plain ones, ask for a reload, and give the log lines it made."""
        tree: dict[str, Any] = {}
        for part in (PLAIN, *changes):
            for section, values in part.items():
                tree[section] = tree.get(section, {}) | values
        return self.reload_text(yaml.safe_dump(tree), pid=pid)

    def reload_text(self, text: str, *, pid: int | None = None) -> list[str]:
        self.write(text)
        before = len(self.service.log)
        os.kill(pid or self.service.process.pid, signal.SIGHUP)
        wait_until(
            lambda: any(DONE.match(line) for line in said(self.service, before)), timeout_s=30
        )  # reads for up to 10
        return [line for line in said(self.service, before) if "reloaded" in line]

    @property
    def capacity(self) -> dict[str, Any]:
        return self.service.client.get("/v1/capacity").json()  # type: ignore[no-any-return]

    @property
    def tiers(self) -> list[int]:
        return [tier["patches"] for tier in self.capacity["tiers"]]


@pytest.fixture(scope="module")
def reloading(start_service: Any, tmp_path_factory: pytest.TempPathFactory) -> Reloading:
    config = tmp_path_factory.mktemp("config") / "config.yaml"
    config.write_text(yaml.safe_dump(PLAIN))
    service = start_service(
        "--model", MODEL, "--tp", "2", "--config", str(config), TPVISION_LIMITS__SEND_TIMEOUT_S="59"
    )
    return Reloading(service, config)


@pytest.fixture
def keyed(start_service: Any, tmp_path: Path) -> Reloading:
    """One of its own, since keys are not switched off again."""
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(PLAIN))
    return Reloading(start_service("--model", MODEL, "--config", str(config)), config)


@pytest.fixture(autouse=True)
def as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "reloading" in request.fixturenames:
        reloading: Reloading = request.getfixturevalue("reloading")
        reloading.reload()
        assert_balanced(reloading.service)
        assert reloading.service.process.poll() is None


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_policy_and_tiers(reloading: Reloading) -> None:
    service = reloading.service
    lines = reloading.reload({"capacity": {"patch_capacities": [32, 128], "policy": "downscale"}})
    assert "settings reloaded: capacity.patch_capacities, capacity.policy" in lines[-1]
    (image,) = images_of(service.encode(MEDIUM))
    assert (image["downscaled"], image["tier"], image["patches"] <= 128) == (True, 128, True)
    capacity = reloading.capacity
    assert (capacity["policy"], capacity["max_patches_per_image"]) == ("downscale", 128)
    assert [tier["patches"] for tier in capacity["tiers"]] == [32, 128]
    assert capacity["largest_tier_without_restart"] == 1024
    assert capacity["slab"]["patches"] == 4096  # the one that is there
    reloading.reload()
    (image,) = images_of(service.encode(MEDIUM))
    assert (image["downscaled"], image["tier"]) == (False, 1024)


def test_the_override_that_requests_may_ask_for(reloading: Reloading) -> None:
    assert refused(reloading.service.encode(GOOD, oversize="downscale")) == (400, "invalid_request")
    reloading.reload({"capacity": {"allow_override": "any"}})
    assert reloading.service.encode(GOOD, oversize="downscale").status_code == 200


def test_flags_and_environment_still_win(reloading: Reloading) -> None:
    lines = reloading.reload({"limits": {"send_timeout_s": 1}, "parallel": {"tensor": 1}})
    assert "nothing has changed" in lines[-1]


@pytest.mark.parametrize(
    ("limits", "send", "outcome"),
    [
        ({"max_body_bytes": 1000}, lambda s: s.encode(GOOD), (413, "body_too_large")),
        ({"max_image_pixels": 3000}, lambda s: s.encode(GOOD), (422, "image_too_large")),
        (
            {"max_images_per_request": 1},
            lambda s: s.client.post("/v1/encode", files=[("f", GOOD), ("f", GOOD)]),
            (422, "too_many_images"),
        ),
        (
            {"max_header_bytes": 1024},
            lambda s: s.client.post("/v1/encode", content=GOOD, headers={"x-long": "x" * 1500}),
            (431, "headers_too_large"),
        ),
        (
            {"max_json_bytes": 1000},
            lambda s: s.client.post("/v1/encode", content=GOOD, headers={"accept": "application/json"}),
            (422, "response_too_large"),
        ),
        ({"max_inflight_bytes": 1000}, lambda s: s.encode(GOOD), (429, "overloaded")),
        ({"request_timeout_s": 0.0001}, lambda s: s.encode(GOOD), (504, "deadline_exceeded")),
        ({"decode_timeout_s": 0.1}, lambda s: s.encode(SLOW), (422, "decode_timeout")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_limits_hold_for_the_next_request_on_an_open_connection(
    reloading: Reloading,
    limits: dict[str, Any],
    send: Callable[[RunningService], httpx.Response],
    outcome: tuple[int, str],
) -> None:
    service = reloading.service
    assert send(service).status_code == 200
    lines = reloading.reload({"limits": limits})
    assert f"settings reloaded: limits.{next(iter(limits))}" in lines[-1]
    assert refused(send(service)) == outcome
    reloading.reload()
    assert send(service).status_code == 200


def test_more_may_be_allowed_than_at_the_start(start_service: Any, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("limits: {max_image_pixels: 1000, max_body_bytes: 2000, max_connections: 2}")
    reloading = Reloading(start_service("--model", MODEL, "--config", str(config)), config)
    large = picture(3000, 2000)
    assert refused(reloading.service.encode(large)) == (413, "body_too_large")
    assert "12 attention heads" in reloading.reload({"parallel": {"tensor": 5}})[-1]
    assert refused(reloading.service.encode(large)) == (413, "body_too_large")
    reloading.reload()
    assert refused(reloading.service.encode(large)) == (422, "too_many_patches")
    with httpx.Client(base_url=reloading.service.url, trust_env=False) as one, httpx.Client() as two:
        assert one.get("/livez").status_code == two.get(f"{reloading.service.url}/livez").status_code == 200
        assert reloading.service.encode(GOOD).status_code == 200


def test_keys_come_and_change_and_never_go(keyed: Reloading, tmp_path: Path) -> None:
    service, keys = keyed.service, tmp_path / "keys"

    def status(key: str) -> int:
        return service.client.get("/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

    keys.write_text("first\n")
    keyed.reload({"server": {"api_keys_file": str(keys)}})
    assert (service.client.get("/v1/models").status_code, status("first"), status("second")) == (401, 200, 401)
    assert "security" in service.client.get("/openapi.json").text
    other = tmp_path / "others"
    other.write_text("second\n")
    keyed.reload({"server": {"api_keys_file": str(other)}})
    assert (status("first"), status("second")) == (401, 200)
    keys.write_text("first\nthird\n")  # nobody looks at it any more
    other.write_text("fourth, and longer\n")
    wait_until(lambda: status("fourth, and longer") == 200, timeout_s=5)
    assert (status("first"), status("third")) == (401, 401)
    for half_written in ("capacity: {policy: refuse}", "server:", ""):
        lines = keyed.reload_text(half_written)
        assert any("warning: not reloaded: server.api_keys_file stays" in line for line in lines)
        assert (service.client.get("/v1/models").status_code, status("fourth, and longer")) == (401, 200)
    other.write_text("fifth\n")  # the ring in force is still followed
    wait_until(lambda: status("fifth") == 200, timeout_s=5)


def test_files_that_may_block_are_refused_and_the_service_ends(keyed: Reloading, tmp_path: Path) -> None:
    keys, fifo = tmp_path / "keys", tmp_path / "fifo"
    os.mkfifo(fifo)
    lines = keyed.reload({"server": {"api_keys_file": str(fifo)}})
    assert lines[-1].endswith(f"the API key file {fifo} cannot be read: not a regular file")
    keys.write_text("first\n")
    keyed.reload({"server": {"api_keys_file": str(keys)}})
    fifo.replace(keys)
    wait_until(lambda: any("1 old keys stay valid" in line for line in keyed.service.log), timeout_s=5)
    keyed.config.unlink()
    os.mkfifo(keyed.config)
    before = len(keyed.service.log)
    keyed.service.process.send_signal(signal.SIGHUP)
    wait_until(lambda: any("cannot be read: not a regular file" in line for line in keyed.service.log[before:]))
    assert keyed.service.stop() == 0


def test_what_needs_a_restart_is_named_and_the_rest_is_taken_over(reloading: Reloading) -> None:
    before = reloading.capacity
    lines = reloading.reload(
        {
            "capacity": {"patch_capacities": [64, 2048], "slab_patches": 8192, "allow_override": "none"},
            "image": {"orientation": "ignore"},
            "limits": {"batch_timeout_s": 5000},
        }
    )
    text = "".join(lines)
    assert (
        "not reloaded: capacity.patch_capacities stays 64,256,1024: 64,2048 needs a restart, since slab and ranks were "
        "started for a top tier of 1024" in text
    )
    assert "not reloaded: capacity.slab_patches stays unset: 8192 needs a restart" in text
    assert "not reloaded: image.orientation stays apply: ignore needs a restart" in text
    assert "not reloaded: limits.batch_timeout_s stays 600: 5000 needs a restart" in text
    assert "settings reloaded: capacity.allow_override" in lines[-1]
    after = reloading.capacity
    assert after.pop("allow_override") == "none"
    for name in ("slab", "policy", "max_patches_per_image"):
        assert after[name] == before[name]
    assert reloading.tiers == [64, 256, 1024]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("capacity: {patch_capacities: [64, 32]}", "capacity tiers must ascend, but 32 follows 64"),
        ("capacity: {polici: refuse}", "the nearest known one is capacity.policy"),
        ("limits: {max_queue_s: soon}", "limits.max_queue_s (file"),
        ("capacity: [", "cannot be read"),
        ("just words", "does not hold a mapping of sections"),
        ("a: 2020-99-99", "cannot be read"),
        (
            "{server: {api_keys_file: /nowhere}, capacity: {policy: downscale}}",
            "the API key file /nowhere cannot be read",
        ),
    ],
)
def test_a_file_that_no_start_would_take_changes_nothing(reloading: Reloading, text: str, words: str) -> None:
    before = reloading.capacity
    lines = reloading.reload_text(text)
    assert lines[-1].startswith("error: the settings were not reloaded, nothing has changed: ")
    assert words in lines[-1]
    after = reloading.capacity
    assert (after["policy"], after["tiers"]) == (before["policy"], before["tiers"])
    assert reloading.service.encode(GOOD).status_code == 200


def test_the_message_is_that_of_a_start(reloading: Reloading) -> None:
    (line,) = reloading.reload_text("capacity: {patch_capacities: [64, 32]}")
    ended = RunningService(["--model", MODEL, "--config", str(reloading.config)])
    assert ended.process.wait(60) == 2
    ended.stop()
    assert ended.log[-1].removeprefix("tpvision: ").strip() == line.partition("nothing has changed: ")[2].strip()


def test_a_missing_file_changes_nothing(reloading: Reloading) -> None:
    reloading.config.unlink()
    before = len(reloading.service.log)
    reloading.service.process.send_signal(signal.SIGHUP)
    wait_until(lambda: any("No such file" in line for line in reloading.service.log[before:]))
    assert reloading.tiers == [64, 256, 1024]


def test_requests_that_were_admitted_keep_what_they_were_admitted_with(reloading: Reloading) -> None:
    service = reloading.service
    ranks = ranks_of(service)
    with concurrent.futures.ThreadPoolExecutor(4) as pool, httpx.Client(base_url=service.url, timeout=60) as other:
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        try:
            sent = [pool.submit(service.encode, LARGE) for _ in range(3)]
            wait_until(lambda: other.get("/v1/capacity").json()["in_flight"]["free_patches"] == 4096 - 3 * 1024)
            reloading.reload({"capacity": {"patch_capacities": [16, 64]}, "limits": {"request_timeout_s": 2}})
            assert refused(other.post("/v1/encode", content=LARGE)) == (422, "too_many_patches")
            time.sleep(2.5)  # past the new deadline
        finally:
            for pid in ranks:
                os.kill(pid, signal.SIGCONT)
        for answer in sent:
            (image,) = images_of(answer.result())
            assert (image["patches"], image["tier"], image["downscaled"]) == (1024, 1024, False)
    assert ranks_of(service) == ranks  # none was lost to a batch over the new top tier


def test_under_load_no_request_is_lost_and_none_sees_half_of_a_reload(keyed: Reloading, tmp_path: Path) -> None:
    service = keyed.service
    keys = [tmp_path / "keys", tmp_path / "more keys"]
    for path in keys:
        path.write_text(f"the key\n{path.name}\n")
    wide = {"capacity": {"patch_capacities": [64, 1024], "policy": "downscale"}}
    narrow = {"capacity": {"patch_capacities": [64], "policy": "refuse"}}
    done = threading.Event()
    outcomes: list[tuple[int, str]] = []

    def client() -> None:
        headers = {"authorization": "Bearer the key"}
        with httpx.Client(base_url=service.url, timeout=60, headers=headers, trust_env=False) as own:
            while not done.is_set():
                answer = own.post("/v1/encode", content=MEDIUM)
                if answer.status_code == 200:
                    (image,) = images_of(answer)
                    outcomes.append((200, f"tier {image['tier']}, downscaled {image['downscaled']}"))
                else:
                    outcomes.append((answer.status_code, answer.json()["error"]["message"].split(";")[0]))

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        clients = [pool.submit(client) for _ in range(6)]
        try:
            for number in range(24):
                more = {"limits": {"max_queue_s": 500 + number}, "server": {"api_keys_file": str(keys[number % 2])}}
                keyed.reload((wide, narrow)[number % 2], more)
        finally:
            done.set()
        for each in clients:
            each.result()
    assert set(outcomes) == {
        (200, "tier 1024, downscaled False"),
        (422, "the image has 400 patches, the limit is 64"),
    }, set(outcomes)
    service.client.headers["authorization"] = "Bearer the key"
    assert_balanced(service)
    capacity = keyed.capacity
    assert capacity["requests"]["client_gone"] == 0


def test_a_hangup_of_everything_ends_nothing(reloading: Reloading) -> None:
    service = reloading.service
    pids = descendants(service.process.pid)
    for pid in [*pids, service.process.pid]:
        os.kill(pid, signal.SIGHUP)
    assert service.encode(LARGE).status_code == 200
    assert descendants(service.process.pid) == pids
    assert service.client.get("/readyz").status_code == 200


def test_a_hangup_early_in_the_start_is_followed_as_soon_as_that_is_possible(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(PLAIN))
    service = RunningService(["--model", MODEL, "--config", str(config)])
    wait_until(lambda: holds_back_sighup(service.process.pid))
    service.process.send_signal(signal.SIGHUP)
    service.wait_ready()
    wait_until(lambda: any("settings reloaded: nothing has changed" in line for line in service.log))
    assert service.stop() == 0


def test_many_hangups_in_a_row(reloading: Reloading) -> None:
    for _ in range(200):
        reloading.service.process.send_signal(signal.SIGHUP)
    reloading.reload({"capacity": {"policy": "downscale"}})
    wait_until(lambda: any("settings reloaded: capacity.policy" in line for line in reloading.service.log))
    assert reloading.service.encode(GOOD).status_code == 200


def test_ranks_that_come_back_after_a_reload_serve_on(reloading: Reloading) -> None:
    service = reloading.service
    reloading.reload({"capacity": {"patch_capacities": [64, 512]}})
    os.kill(ranks_of(service)[0], signal.SIGKILL)
    wait_until(lambda: service.client.get("/readyz").status_code == 503)
    wait_until(lambda: service.client.get("/readyz").status_code == 200, timeout_s=30)
    assert reloading.tiers == [64, 512]
    assert service.encode(MEDIUM).status_code == 200
    assert refused(service.encode(LARGE)) == (422, "too_many_patches")
    reloading.reload()
    assert service.encode(LARGE).status_code == 200


def test_as_pid_1(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(PLAIN))
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *COMMAND]
    service = RunningService(["--model", MODEL, "--config", str(config)], command=command).wait_ready()
    pid_1 = descendants(service.process.pid)[0]
    lines = Reloading(service, config).reload({"capacity": {"policy": "downscale"}}, pid=pid_1)
    assert "settings reloaded: capacity.policy" in lines[-1]
    assert images_of(service.encode(picture(700, 700)))[0]["downscaled"]
    os.kill(pid_1, signal.SIGTERM)
    assert service.process.wait(20) == 0
    service.stop()


def test_external_workers_stay_through_a_reload_and_a_restart_with_the_new_file(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(PLAIN))
    shared = ["--config", str(config), "--model", MODEL, "--socket", str(tmp_path / "control.sock")]
    service = RunningService([*shared, "--workers", "external"])
    reloading = Reloading(service, config)

    hasty = {"TPVISION_LIMITS__DRAIN_TIMEOUT_S": "1"}  # it waits that long for its front-end to hang up
    first = RunningService(shared, hasty, subcommand="worker")
    service.wait_ready()
    first.process.send_signal(signal.SIGHUP)
    wait_until(lambda: any("at the next start only" in line for line in first.log))
    reloading.reload({"capacity": {"patch_capacities": [64]}})
    assert first.stop() == 0
    wait_until(lambda: service.client.get("/readyz").status_code == 503)
    second = RunningService(
        shared, hasty, subcommand="worker"
    )  # with the new file, whose top tier and slab are smaller
    wait_until(lambda: service.client.get("/readyz").status_code == 200, timeout_s=60)
    assert service.encode(GOOD).status_code == 200
    reloading.reload()
    assert service.encode(LARGE).status_code == 200
    second.process.send_signal(signal.SIGTERM)
    assert service.stop() == 0
    assert second.stop() == 0


def test_capacity_numbers_after_traffic(start_service: Any) -> None:
    service = start_service("--model", MODEL, "--tp", "2", "--capacities", "64,1024,4096")

    def tiers() -> dict[int, dict[str, Any]]:
        return {tier["patches"]: tier for tier in service.client.get("/v1/capacity").json()["tiers"]}

    warm = tiers()
    assert warm[64]["measured"]["samples"] == 1  # the warm-up
    assert warm[64]["measured"]["mean_patches"] == 64
    assert (warm[1024]["measured"], warm[4096]["measured"]) == (None, None)
    assert {tier["execution"] for tier in warm.values()} == {"eager"}
    for _ in range(4):
        assert service.encode(MEDIUM).status_code == 200
    answer = service.encode(LARGE)
    measured = tiers()
    assert measured[64]["measured"] == warm[64]["measured"]
    assert measured[4096]["measured"] is None
    found = measured[1024]["measured"]
    assert (found["samples"], found["mean_patches"]) == (5, (4 * 400 + 1024) / 5)
    assert found["images_per_s"] == pytest.approx(1000 / found["ms"])  # one image a batch
    times = {name: float(ms) for name, ms in re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"])}
    assert found["ms"] * 5 >= times["forward"] + times["all_gather"]  # of which the last one is a part
