"""The command, as a person runs it: refusals to start, the plan, the demo, and processes that leave nothing behind."""

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from make_photograph import acceptance_picture
from running import (
    COMMAND,
    GOLDEN,
    ROOT,
    RunningService,
    catches_sigterm,
    decoders_of,
    descendants,
    holds_back_sighup,
    ignores_sighup,
    is_alive,
    ranks_below,
    ranks_of,
    wait_until,
)

from service.cli import _parser

MODEL = GOLDEN / "tiny-k3-f32"
GOOD = (GOLDEN / "images" / "rgb_64x48.png").read_bytes()


def tpvision(*arguments: str, timeout_s: float = 60, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "service", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environ}, capture_output=True, text=True, timeout=timeout_s, check=False
    )


def commands_of(parser: argparse.ArgumentParser) -> "list[argparse._SubParsersAction[argparse.ArgumentParser]]":
    return [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]


def all_parsers(top: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """This one, and those of all commands below it."""
    below = [parser for action in commands_of(top) for parser in action.choices.values()]
    return [top, *(each for parser in below for each in all_parsers(parser))]


@pytest.mark.parametrize("parser", all_parsers(_parser()), ids=lambda parser: parser.prog)
def test_everything_has_a_help_text_that_ends_without_a_full_stop(parser: argparse.ArgumentParser) -> None:
    commands = commands_of(parser)
    listed = [choice for action in commands for choice in action._choices_actions]
    flags = [action for action in parser._actions if action not in commands]
    texts = {"": parser.description} | {action.dest: action.help for action in [*flags, *listed]}
    assert [name for name, text in texts.items() if not text or text.endswith(".")] == []


def test_the_version_is_the_installed_one() -> None:
    ended = tpvision("--version")
    assert (ended.returncode, ended.stdout) == (0, f"tpvision {importlib.metadata.version('tpvision')}\n")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", str(MODEL), "--tp", "5"], ["12 attention heads", "1, 2, 3, 4, 6, 12", "5 group(s) of 1"]),
        (["--model", str(MODEL), "--tp", "8"], ["2 group(s) of 4"]),
        (["--model", str(MODEL), "--capacities", "1024,512"], ["must ascend", "512 follows 1024"]),
        (["--model", str(MODEL), "--capacities", "1023"], ["1023", "multiple of 4"]),
        (["--model", str(MODEL), "--capacities", ""], ["at least one capacity tier"]),
        (["--model", "/nowhere"], ["there is no folder /nowhere"]),
        ([], ["model.path is not set"]),
        (["--model", str(MODEL), "--tp", "0"], ["parallel.tensor (flag --tp): Input should be greater than"]),
        (["--model", str(MODEL), "--workers", "external"], ["parallel.socket"]),
    ],
)
def test_a_start_that_cannot_work_stops_with_the_reason(arguments: list[str], words: list[str]) -> None:
    ended = tpvision("serve", *arguments)
    assert ended.returncode == 2
    for phrase in words:
        assert phrase in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_start_without_decode_processes_stops_with_the_reason(tmp_path: Path) -> None:
    program = "import os, sys\nif 'service.decode_process' in sys.orig_argv:\n    os._exit(7)\n"
    (tmp_path / "sitecustomize.py").write_text(program)
    ended = tpvision("serve", "--model", str(MODEL), "--port", "0", PYTHONPATH=str(tmp_path))
    assert ended.returncode == 2
    assert ended.stderr.endswith("tpvision: a decode process did not start (exit code 7)\n")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("subcommand", ["serve", "worker", "check", "demo"])
def test_too_few_open_files_stop_a_start_with_the_reason(subcommand: str) -> None:
    model = str(MODEL)
    arguments = {"serve": ["--model", model], "worker": ["--model", model, "--socket", "unused"], "check": [model]}
    command = ["prlimit", "--nofile=20:20", *COMMAND, subcommand, *arguments.get(subcommand, [])]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "tpvision: 20 open files are allowed here (ulimit -n), and at least 64 are needed\n"


def test_a_low_limit_of_open_files_is_raised_as_far_as_that_is_allowed() -> None:
    command = ["prlimit", "--nofile=20:4096", *COMMAND, "check", str(MODEL)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_variables_of_other_tools_do_no_harm() -> None:
    environ = {"WEB_CONCURRENCY": "four", "WORLD_SIZE": "7", "RANK": "5", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}
    service = RunningService(["--model", str(MODEL), "--tp", "2"], environ).wait_ready()
    assert service.encode(GOOD).status_code == 200
    assert service.stop() == 0


def test_a_misspelt_setting_names_the_nearest() -> None:
    ended = tpvision("serve", "--model", str(MODEL), TPVISION_CAPACITY__POLICI="refuse")
    assert ended.returncode == 2
    assert "capacity.policy" in ended.stderr


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = tpvision("serve", "--model", str(MODEL), "--port", str(port))
    assert ended.returncode == 2
    assert f"port {port}" in ended.stderr


def test_the_first_green_readiness_is_followed_by_a_working_embed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    service = RunningService(["--model", str(MODEL), "--tp", "2", "--port", str(port)])
    seen: list[tuple[int, int, int]] = []  # of /livez, /readyz and an image, one after the other
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:

        def ask() -> bool:
            with contextlib.suppress(httpx.ConnectError):
                answers = client.get("/livez"), client.get("/readyz"), client.post("/v1/encode", content=GOOD)
                seen.append(tuple(answer.status_code for answer in answers))  # type: ignore[arg-type]
            return bool(seen) and seen[-1][1] == 200

        wait_until(ask, timeout_s=60)
    assert service.stop() == 0
    assert seen[0] == (200, 503, 503)  # it listens before the weights are there
    assert {live for live, _, _ in seen} == {200}
    assert seen[-1] == (200, 200, 200)


def test_a_checkpoint_without_a_tensor_stops_the_service_with_its_name(tmp_path: Path) -> None:
    for path in MODEL.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    missing = "vision_tower.encoder.final_layernorm.weight"
    shard = tmp_path / index["weight_map"][missing]
    shard.write_bytes(shard.read_bytes().replace(missing.encode(), missing.encode().replace(b"final", b"fynal")))
    ended = tpvision("serve", "--model", str(tmp_path), "--port", "0", "--device", "cpu")
    assert ended.returncode == 2
    assert missing in ended.stderr.splitlines()[-1]


def test_config_show_says_where_each_value_came_from(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"capacity": {"policy": "downscale"}, "server": {"port": 1}}))
    shown = tpvision("config", "show", "--config", str(config), "--port", "3", TPVISION_SERVER__HOST="::1").stdout
    assert f"capacity.policy: downscale  # file {config}" in shown
    assert "server.port: 3  # flag" in shown
    assert "server.host: ::1  # environment TPVISION_SERVER__HOST" in shown
    assert "limits.max_body_bytes: 67108864  # default" in shown


def test_the_plan_of_published_k3_has_the_worked_numbers() -> None:
    table = tpvision("plan", "--capacities", "16384,65536", "--tp", "2").stdout
    assert "320,274,432" in table
    plan = json.loads(tpvision("plan", "--capacities", "16384,65536", "--tp", "2", "--json").stdout)
    assert plan["dropping_top_tier_frees"]["reference"]["total_bytes"] == 320_274_432
    assert plan["largest_image"]["patches"] == 67_320


def test_the_plan_says_why_it_is_of_published_k3(tmp_path: Path) -> None:
    assert tpvision("plan").stderr == "no model is named: planned for published Kimi K3\n"
    missing = tmp_path / "missing"
    ended = tpvision("plan", "--model", str(missing))
    assert ended.stderr == f"there is no folder {missing}: planned for published Kimi K3\n"


def test_the_demo_makes_a_model_and_embeds_the_photograph(tmp_path: Path) -> None:
    ended = tpvision("demo", "--once", "--port", "0", "--out", str(tmp_path / "model"), timeout_s=120)
    assert ended.returncode == 0, ended.stderr
    assert "[1610, 128]" in ended.stdout
    assert "forward" in ended.stdout
    assert (tmp_path / "model" / "model.safetensors.index.json").exists()


def test_the_demo_downscales_a_phones_picture_and_says_so() -> None:
    command = [*COMMAND, "demo", "--port", "0"]
    environ = {**os.environ, "TPVISION_CAPACITY__PATCH_CAPACITIES": "1024"}  # a small one, for the test's time
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT, env=environ, text=True, **output) as demo:
        assert demo.stdout is not None
        url = next(found[1] for line in demo.stdout if (found := re.search(r"in a browser too: (\S+)/ ", line)))
        assert "over 1,024 patches is downscaled" in next(line for line in demo.stdout if "patches" in line)
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
            picture = acceptance_picture(4000, 3000)
            answer = client.post("/v1/encode?output=pooled", content=picture, headers={"accept": "application/json"})
            refused = client.post("/v1/encode?oversize=refuse", content=picture)
        demo.terminate()
        demo.stdout.read()
    (image,) = answer.json()["images"]
    assert (image["downscaled"], image["original_size"], image["tier"]) == (True, [4000, 3000], 1024)
    assert refused.json()["error"]["code"] == "too_many_patches"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_leaves_no_process(number: int) -> None:
    service = RunningService(["--model", str(MODEL), "--tp", "2"]).wait_ready()
    pids = descendants(service.process.pid)
    assert len(pids) >= 5  # torchrun, two ranks, two decode processes
    assert service.stop(number) == 0
    assert not any(is_alive(pid) for pid in pids)


@pytest.mark.parametrize("later_s", [0.0, 0.5])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_early_in_the_start_ends_it_quietly(number: int, later_s: float) -> None:
    service = RunningService(["--model", str(MODEL)])
    wait_until(lambda: catches_sigterm(service.process.pid))
    time.sleep(later_s)  # at some point of its imports, or after them
    assert service.stop(number) in (-number, 0, 130)
    assert not [line for line in service.log if "Traceback" in line]


def test_ctrl_c_early_in_the_start_reaches_all_processes_of_the_terminal_and_ends_it_quietly() -> None:
    service = RunningService(["--model", str(MODEL)], command=("setsid", *COMMAND))
    wait_until(lambda: bool(decoders_of(service)))  # which take a while until they have handlers of their own
    os.killpg(service.process.pid, signal.SIGINT)
    assert service.process.wait(30) == 0
    service.stop()
    assert not [line for line in service.log if "Traceback" in line]


def test_a_hangup_early_in_any_other_command_ends_it() -> None:
    with subprocess.Popen([*COMMAND, "plan"], cwd=ROOT, stdout=subprocess.DEVNULL) as ended:
        wait_until(lambda: holds_back_sighup(ended.pid))
        ended.send_signal(signal.SIGHUP)
    assert ended.returncode == 130


def test_a_hangup_ends_a_demo_that_removes_its_model(tmp_path: Path) -> None:
    command = [*COMMAND, "demo", "--port", "0"]
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as demo:
        assert demo.stdout is not None
        next(line for line in demo.stdout if b"merged vision tokens" in line)
        assert any(tmp_path.glob("tpvision-demo-*"))
        demo.send_signal(signal.SIGHUP)
        demo.stdout.read()
    assert demo.returncode == 0
    assert not any(tmp_path.glob("tpvision-demo-*"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_demo_that_is_ended_while_it_makes_its_model_removes_it(tmp_path: Path, number: int) -> None:
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([*COMMAND, "demo", "--size", "full", "--port", "0"], cwd=ROOT, env=environ) as demo:
        wait_until(lambda: any(tmp_path.glob("tpvision-demo-*/*")))
        demo.send_signal(number)
    assert demo.returncode == 130
    assert not any(tmp_path.iterdir())


def test_nohup_keeps_a_hangup_from_a_demo() -> None:
    command = ["nohup", *COMMAND, "demo", "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as demo:
        assert demo.stdout is not None
        next(line for line in demo.stdout if b"slab:" in line)  # it has its handlers by then
        assert ignores_sighup(demo.pid) and catches_sigterm(demo.pid)
        demo.terminate()
        demo.stdout.read()
    assert demo.returncode == 0


def test_accepted_requests_finish_while_draining() -> None:
    service = RunningService(["--model", str(MODEL), "--tp", "2"]).wait_ready()
    answers: list[httpx.Response] = []
    sender = threading.Thread(target=lambda: answers.append(service.encode(acceptance_picture(1792, 1008))))
    with httpx.Client(base_url=service.url, trust_env=False) as other:
        sender.start()
        wait_until(lambda: other.get("/v1/capacity").json()["in_flight"]["free_patches"] < 65536)
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: other.get("/readyz").status_code == 503)
        refused = other.post("/v1/encode", content=GOOD)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert int(refused.headers["retry-after"]) >= 1
        sender.join(60)
    assert answers[0].status_code == 200
    assert service.process.wait(30) == 0
    service.stop()


def test_a_killed_front_end_leaves_no_process() -> None:
    service = RunningService(["--model", str(MODEL), "--tp", "2"]).wait_ready()
    pids = descendants(service.process.pid)
    service.stop(signal.SIGKILL)
    wait_until(lambda: not any(is_alive(pid) for pid in pids), timeout_s=3)


def test_a_killed_rank_is_replaced_and_the_next_request_works() -> None:
    service = RunningService(["--model", str(MODEL), "--tp", "2"]).wait_ready()
    before = service.encode(GOOD)
    os.kill(ranks_of(service)[0], signal.SIGKILL)
    wait_until(lambda: service.client.get("/readyz").status_code == 503, timeout_s=2)
    assert service.client.get("/livez").status_code == 200
    wait_until(lambda: service.client.get("/readyz").status_code == 200, timeout_s=30)
    assert service.encode(GOOD).content[-3000:] == before.content[-3000:]
    assert service.stop() == 0


@contextlib.contextmanager
def external_group(folder: Path) -> Iterator[tuple[RunningService, subprocess.Popen[bytes]]]:
    """A front-end and a worker group that were started apart."""
    arguments = ["--model", str(MODEL), "--tp", "2", "--device", "cpu", "--socket", str(folder / "control.sock")]
    command = [*COMMAND, "worker", *arguments]
    worker = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    service = RunningService([*arguments, "--workers", "external"])
    try:
        yield service.wait_ready(), worker
    finally:
        service.stop()
        worker.kill()
        worker.wait()


def test_external_workers_join_over_a_shared_socket(tmp_path: Path) -> None:
    with external_group(tmp_path) as (service, worker):
        assert service.encode(GOOD).status_code == 200
        assert service.scrape().value("group_restarts_total") == 0
        os.kill(ranks_below(worker.pid)[0], signal.SIGKILL)
        wait_until(lambda: service.scrape().value("group_state", state="lost") == 1)
        wait_until(lambda: service.scrape().value("group_state", state="ready") == 1, timeout_s=60)
        assert service.scrape().value("group_restarts_total") == 1
        pids = descendants(worker.pid)
        worker.send_signal(signal.SIGTERM)  # both at once, as a container runtime does
        assert service.stop() == 0
        assert worker.wait(30) == 0
        assert not any(is_alive(pid) for pid in pids)


def test_external_workers_whose_front_end_has_gone_stop_at_once(tmp_path: Path) -> None:
    with external_group(tmp_path) as (service, worker):
        before = descendants(worker.pid)
        assert service.stop() == 0  # first, as Kubernetes stops a pod with a sidecar
        wait_until(lambda: bool(set(descendants(worker.pid)) - set(before)))  # the group is there for the next one
        worker.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10  # and not for the drain limit, 60 s
        while worker.poll() is None:
            assert time.monotonic() < deadline
            worker.send_signal(signal.SIGHUP)  # also when its work is over, and its loop is closed
            time.sleep(0.0001)
        assert worker.returncode == 0
