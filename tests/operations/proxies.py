"""A real nginx or Envoy with the configuration that we ship, in front of a real service, with TLS."""

import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import trustme
from running import ROOT, wait_until
from tools import tool

FOLDER = ROOT / "deploy" / "proxies"
NAMES = ("nginx", "envoy")
_NGINX = """
daemon off;
pid {folder}/nginx.pid;
events {{ worker_connections 1024; }}
http {{
    access_log off;
    include {folder}/tpvision.conf;
}}
"""


@contextmanager
def running_proxy(name: str, *, behind: str, folder: Path) -> Iterator["Proxy"]:
    """A proxy in front of the service with the URL `behind`; it ends with the block, however that ends."""
    proxy = Proxy(name, behind=behind, folder=folder)
    try:
        proxy.wait_ready()
        yield proxy
    finally:
        proxy.stop()


class Proxy:
    """One proxy process on a free port of loopback. Its files differ from the ones shipped in addresses alone."""

    def __init__(self, name: str, *, behind: str, folder: Path) -> None:
        authority = trustme.CA()
        certificate = authority.issue_cert("localhost")
        certificate.private_key_pem.write_to_path(folder / "tpvision.key")
        certificate.cert_chain_pems[0].write_to_path(folder / "tpvision.crt")
        self.name = name
        self.port = free_port()
        self.trust = ssl.create_default_context(cadata=authority.cert_pem.bytes().decode())
        self.url = f"https://localhost:{self.port}"
        make = self._nginx if name == "nginx" else self._envoy
        command = make(httpx.URL(behind).netloc.decode(), folder)
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, cwd=folder)
        self.client = httpx.Client(base_url=self.url, verify=self.trust, timeout=200, trust_env=False)

    def wait_ready(self) -> None:
        wait_until(self._listens, timeout_s=10)
        wait_until(lambda: self.client.get("/livez").status_code == 200, timeout_s=10)  # Envoy has seen it healthy

    def connect(self) -> ssl.SSLSocket:
        """A connection on which nothing was sent yet."""
        plain = socket.create_connection(("127.0.0.1", self.port))
        return self.trust.wrap_socket(plain, server_hostname="localhost")

    def stop(self) -> None:
        self.client.close()
        self.process.terminate()
        self.process.wait(20)

    def _nginx(self, behind: str, folder: Path) -> list[str]:
        addresses = {"listen 443": f"listen {self.port}", "/etc/nginx/tls": str(folder)}
        addresses["127.0.0.1:8000"] = behind
        _write(FOLDER / "nginx.conf", folder / "tpvision.conf", addresses)
        (folder / "nginx.conf").write_text(_NGINX.format(folder=folder))
        return [tool("nginx"), "-p", str(folder), "-e", "stderr", "-c", "nginx.conf"]

    def _envoy(self, behind: str, folder: Path) -> list[str]:
        addresses = {
            "0.0.0.0, port_value: 443": f"127.0.0.1, port_value: {self.port}",
            "port_value: 9901": f"port_value: {free_port()}",
            "127.0.0.1, port_value: 8000": behind.replace(":", ", port_value: "),
            "/etc/envoy/tls": str(folder),
        }
        _write(FOLDER / "envoy.yaml", folder / "envoy.yaml", addresses)
        return [
            tool("envoy"),
            "-c",
            "envoy.yaml",
            "--log-level",
            "warning",
            "--concurrency",
            "1",
            "--disable-hot-restart",
        ]

    def _listens(self) -> bool:
        assert self.process.poll() is None, f"{self.name} ended at once"
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0


def _write(source: Path, target: Path, changes: dict[str, str]) -> None:
    text = source.read_text()
    for old, new in changes.items():
        assert old in text, f"{source.name} has no {old}"
        text = text.replace(old, new)
    target.write_text(text)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
