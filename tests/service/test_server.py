"""Where the front-end listens, and what it says of that. Sockets are bound here, but never listened on."""

import logging
import resource
import socket
from collections.abc import Iterator

import pytest

from service import server
from tp.settings import ServerSettings, Settings, SettingsError, load_settings


def listen(**options: object) -> list[socket.socket]:
    settings = Settings(server=ServerSettings.model_validate({"port": 0, **options}))
    listeners = server._listen(settings)
    server._warn_if_open(settings, listeners[0].getsockname())
    return listeners


def bound(**options: object) -> list[str]:
    listeners = listen(**options)
    names = [listener.getsockname()[0] for listener in listeners]
    for listener in listeners:
        listener.close()
    return names


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_all_addresses_without_keys_are_warned_about(host: str, caplog: pytest.LogCaptureFixture) -> None:
    try:
        assert bound(host=host) == [host]
    except server.ServeError:
        pytest.skip("this machine has no such address family")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(f"ANYONE who reaches {host} port ")


@pytest.mark.parametrize("options", [{}, {"host": "localhost"}, {"host": "127.0.0.9"}, {"host": "::1"}])
def test_loopback_is_not_warned_about(options: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    try:
        bound(**options)
    except server.ServeError:
        pytest.skip("this machine has no such address")
    assert caplog.records == []


def test_all_addresses_with_keys_are_not_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    bound(host="0.0.0.0", api_keys_file="/does/not/matter/here")
    assert caplog.records == []


def test_probes_are_bound_beside_the_service() -> None:
    assert bound(probe_port=0) == ["127.0.0.1"] * 2


def test_the_probes_port_is_another_one() -> None:
    with pytest.raises(SettingsError, match="must differ"):
        load_settings(flags={"server.port": 9000, "server.probe_port": 9000})


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(server.ServeError, match=rf"cannot listen on 127.0.0.1 port {port}"):
            listen(port=port)


@pytest.mark.parametrize("host", ["a" * 64 + ".test", "", "no.such.host.invalid"])
def test_a_host_that_cannot_be_one_is_named(host: str) -> None:
    if host:
        with pytest.raises(server.ServeError, match=f"cannot listen on {host}"):
            listen(host=host)


def test_an_ipv6_url_has_brackets() -> None:
    settings = Settings(server=ServerSettings(host="::1", port=0))
    try:
        (listener,) = server._listen(settings)
    except server.ServeError:
        pytest.skip("this machine has no IPv6")
    with listener:
        assert server._url(settings, listener) == f"http://[::1]:{listener.getsockname()[1]}"


@pytest.fixture
def few_files() -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_limit_of_open_files_is_raised_as_needed(few_files: int) -> None:
    assert server._allow_connections(10) == 10
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (542, few_files)
    assert server._allow_connections(5) == 5
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (542, few_files)


def test_where_too_few_files_are_allowed_there_are_fewer_connections(
    few_files: int, caplog: pytest.LogCaptureFixture
) -> None:
    if few_files == resource.RLIM_INFINITY:
        pytest.skip("this machine allows any number")
    assert server._allow_connections(few_files) == few_files // 6
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (few_files, few_files)
    assert f"only {few_files} are allowed" in caplog.text
