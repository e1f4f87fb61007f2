"""The demo's pod with two groups, as processes: its containers' own arguments and settings, in the kubelet's order."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml
from chart import VALUES, Object, Rendered, helm_template
from make_photograph import PHOTOGRAPH
from running import ROOT, RunningService, descendants, is_alive, wait_until

pytestmark = pytest.mark.operations
TWO_GROUPS = {"settings": {"parallel": {"tensor": 1, "groups": 2}}}


class Pod:
    """The rendered pod, its volumes in a folder here."""

    def __init__(self, folder: Path) -> None:
        (folder / "groups.yaml").write_text(yaml.safe_dump(TWO_GROUPS))
        self._folder = folder
        rendered = Rendered(helm_template(VALUES / "cpu-demo.yaml", folder / "groups.yaml"))
        self.spec: Object = rendered.pod["spec"]
        self.probe_path: str = rendered.frontend["readinessProbe"]["httpGet"]["path"]
        for name in ("models", "run/tpvision", "etc/tpvision"):
            (folder / name).mkdir(parents=True)
        settings = rendered.one("ConfigMap", "tpvision")["data"]["tpvision.yaml"]
        (folder / "etc/tpvision/tpvision.yaml").write_text(self._here(settings))
        init, *self._sidecars = self.spec["initContainers"]
        subprocess.run(self._command(init), env=self._environ(init), cwd=ROOT, check=True, capture_output=True)
        self.workers = [self.start_worker(index) for index in range(len(self._sidecars))]
        arguments = self._command(rendered.frontend)[4:]
        local = {"TPVISION_SERVER__HOST": "127.0.0.1", "TPVISION_SERVER__PROBE_PORT": "0"}
        self.frontend = RunningService(arguments, {**self._environ(rendered.frontend), **local})

    def start_worker(self, index: int) -> subprocess.Popen[bytes]:
        container = self._sidecars[index]
        return subprocess.Popen(
            self._command(container), env=self._environ(container), cwd=ROOT, stderr=subprocess.DEVNULL
        )

    def end(self) -> None:
        self.frontend.stop()
        for worker in self.workers:
            worker.kill()
            worker.wait()

    def _command(self, container: Object) -> list[str]:
        return [sys.executable, "-m", "service", *map(self._here, container["args"])]

    def _environ(self, container: Object) -> dict[str, str]:
        return {**os.environ, **{each["name"]: each["value"] for each in container.get("env", [])}}

    def _here(self, text: str) -> str:
        for path in ("/models", "/run/tpvision", "/etc/tpvision"):
            text = text.replace(path, f"{self._folder}{path}")
        return text


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    pod = Pod(tmp_path)
    try:
        pod.frontend.wait_ready()
        yield pod
    finally:
        pod.end()


def num_ready(pod: Pod) -> float:
    return pod.frontend.scrape().value("group_state", state="ready")


def test_a_pod_starts_serves_loses_a_worker_and_stops_within_its_grace(pod: Pod) -> None:
    client: httpx.Client = pod.frontend.client
    wait_until(lambda: num_ready(pod) == 2, timeout_s=60)
    assert pod.frontend.encode(PHOTOGRAPH.read_bytes()).status_code == 200

    lost = pod.workers[0]
    lost.kill()
    lost.wait()
    wait_until(lambda: num_ready(pod) == 1)
    assert client.get(pod.probe_path).status_code == 200
    assert pod.frontend.encode(PHOTOGRAPH.read_bytes()).status_code == 200
    pod.workers[0] = pod.start_worker(0)
    wait_until(lambda: num_ready(pod) == 2, timeout_s=60)

    processes = [pid for each in (pod.frontend.process, *pod.workers) for pid in descendants(each.pid)]
    started = time.monotonic()
    assert pod.frontend.stop() == 0
    time.sleep(1)  # the kubelet takes a moment to see it, and the groups are there for the next front-end
    for worker in reversed(pod.workers):
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(5) == 0
    assert time.monotonic() - started < pod.spec["terminationGracePeriodSeconds"]
    assert not any(is_alive(pid) for pid in processes)
