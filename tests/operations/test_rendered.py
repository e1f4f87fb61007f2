"""The rendered objects against each other and against our own code: what no linter of Kubernetes can know."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from chart import DEPLOY, EVERYTHING, MANIFESTS, NAMES, VALUES, Object, Rendered, helm_template

from service import groups
from service.app import create_probe_app
from service.cli import _parser
from service.decoders import START_TIMEOUT_S, max_memory_bytes
from service.engine import Engine
from service.plan import plan_capacity
from service.reporter import Reporter
from tp.settings import Settings, load_settings
from tp.spec import PUBLISHED_K3, check_world_size

pytestmark = pytest.mark.operations

UNITS = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}
PROCESS_BYTES = 64 * 2**20  # the front-end, or an idle decode process
TORCH_BYTES = 600 * 2**20  # a CPU rank without weights and scratch
WORDS_OF_RESTRICTED = {"configMap", "emptyDir", "persistentVolumeClaim", "secret"}


@pytest.fixture(scope="module", params=[*NAMES, *EVERYTHING], ids=lambda each: getattr(each, "stem", each))
def rendered(request: pytest.FixtureRequest) -> Rendered:
    """The objects of a values file: those kept in deploy/manifests, or rendered now."""
    if isinstance(request.param, Path):
        return Rendered(helm_template(request.param))
    return Rendered((MANIFESTS / f"{request.param}.yaml").read_text())


@pytest.fixture
def settings(rendered: Rendered, tmp_path: Path) -> Settings:
    """The rendered ConfigMap, read as both containers do."""
    (tmp_path / "tpvision.yaml").write_text(rendered.one("ConfigMap", "tpvision")["data"]["tpvision.yaml"])
    return load_settings(tmp_path / "tpvision.yaml").settings


def containers(rendered: Rendered) -> list[Object]:
    spec = rendered.pod["spec"]
    return [*spec["initContainers"], *spec["containers"]]


def mounts(container: Object) -> dict[str, Object]:
    return {mount["mountPath"]: mount for mount in container["volumeMounts"]}


def in_bytes(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KMG]i)?", quantity).groups(default="")  # type: ignore[union-attr]
    return int(number) * UNITS[unit]


def memory(container: Object, kind: str) -> int:
    return in_bytes(container["resources"][kind]["memory"])


def serves_cuda(settings: Settings) -> bool:
    return settings.parallel.device == "cuda"


# Settings


def test_settings_are_the_values_own_and_what_the_chart_adds(rendered: Rendered, settings: Settings) -> None:
    check_world_size(PUBLISHED_K3, settings.parallel.tensor)
    assert settings.parallel.workers == "external"
    for container in (rendered.frontend, *rendered.workers):
        at = mounts(container)
        assert str(settings.model.path).rpartition("/")[0] in at
        assert str(settings.parallel.socket).rpartition("/")[0] in at
    keys = settings.server.api_keys_file
    assert (keys is not None) == ("/etc/tpvision-keys" in mounts(rendered.frontend))
    if keys is not None:
        assert str(keys) == "/etc/tpvision-keys/api-keys"


@pytest.mark.parametrize("name", NAMES)
def test_every_value_reaches_the_settings_file(name: str) -> None:
    given = yaml.safe_load((VALUES / f"{name}.yaml").read_text())["settings"]
    rendered = Rendered((MANIFESTS / f"{name}.yaml").read_text())
    written = yaml.safe_load(rendered.one("ConfigMap", "tpvision")["data"]["tpvision.yaml"])
    for section, values in given.items():
        assert {key: written[section][key] for key in values} == values


def test_keys_secret_is_read_by_our_key_ring(tmp_path: Path) -> None:
    from service.keys import KeyRing

    rendered = Rendered(helm_template(EVERYTHING[1]))
    (tmp_path / "api-keys").write_text(rendered.one("Secret")["stringData"]["api-keys"])
    ring = KeyRing.read(tmp_path / "api-keys")
    assert [ring.holds(key) for key in ("one-key", "another-key", "none")] == [True, True, False]


def test_arguments_are_the_commands_own(rendered: Rendered, settings: Settings) -> None:
    for container in containers(rendered):
        arguments = _parser().parse_args(container["args"])
        if container["name"] in ("fetch", "demo-model"):
            assert arguments.out == settings.model.path
        else:
            assert str(arguments.config.parent) in mounts(container)
            assert arguments.config.name in rendered.one("ConfigMap", "tpvision")["data"]
    assert [_parser().parse_args(worker["args"]).group for worker in rendered.workers] == list(
        range(settings.parallel.groups)
    )


def test_a_change_of_settings_starts_new_pods() -> None:
    first, second = (
        Rendered(helm_template(path)).pod["metadata"]["annotations"]["checksum/settings"] for path in EVERYTHING
    )
    assert first != second


# Containers and their order


def test_workers_are_sidecars_and_the_front_end_is_the_pods_one_container(rendered: Rendered) -> None:
    spec = rendered.pod["spec"]
    kinds = ["sidecar" if "restartPolicy" in each else "init" for each in spec["initContainers"]]
    assert kinds == sorted(kinds), "what makes the model runs before the workers"
    assert {worker["restartPolicy"] for worker in rendered.workers} == {"Always"}
    assert [each["name"] for each in spec["containers"]] == ["frontend"]
    assert not any("startupProbe" in worker for worker in rendered.workers), "it would wait for a front-end not there"


def test_all_containers_have_the_user_that_the_control_socket_admits(rendered: Rendered) -> None:
    assert not any("runAsUser" in each["securityContext"] for each in containers(rendered))
    assert rendered.pod["spec"]["securityContext"]["runAsUser"] == 10001


def test_names_and_paths_are_unique_and_volumes_have_one_source(rendered: Rendered) -> None:
    """An API server refuses what differs; schemas say nothing of it."""
    volumes = rendered.pod["spec"]["volumes"]
    assert {len(volume) for volume in volumes} == {2}
    named = [volumes, containers(rendered), *(each.get("env", []) for each in containers(rendered))]
    named += [each.get("ports", []) for each in containers(rendered)]
    for each in named:
        assert len({one["name"] for one in each}) == len(each)
    for each in containers(rendered):
        assert len(mounts(each)) == len(each["volumeMounts"])


def test_the_model_is_read_only_to_those_who_serve(rendered: Rendered) -> None:
    assert all(mounts(each)["/models"]["readOnly"] for each in (rendered.frontend, *rendered.workers))


def test_every_container_can_write_to_tmp_and_to_little_else(rendered: Rendered) -> None:
    volumes = {volume["name"]: volume for volume in rendered.pod["spec"]["volumes"]}
    for container in containers(rendered):
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert "emptyDir" in volumes[mounts(container)["/tmp"]["name"]]
    used = {mount["name"] for each in containers(rendered) for mount in each["volumeMounts"]}
    assert used == volumes.keys()


def test_pod_security_is_restricted(rendered: Rendered) -> None:
    spec = rendered.pod["spec"]
    assert not {"hostNetwork", "hostPID", "hostIPC", "hostUsers"} & spec.keys()
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False  # else a Service may set TPVISION_… for our settings to stumble over
    for container in containers(rendered):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert not any("hostPort" in port for port in container.get("ports", []))
    assert {key for volume in spec["volumes"] for key in volume if key != "name"} <= WORDS_OF_RESTRICTED


# Resources


def test_gpus_are_requested_limited_and_visible_by_group(rendered: Rendered, settings: Settings) -> None:
    size = settings.parallel.tensor
    for worker in rendered.workers:
        visible = {each["name"]: each.get("value") for each in worker.get("env", [])}.get("CUDA_VISIBLE_DEVICES")
        counts = {worker["resources"][kind].get("nvidia.com/gpu") for kind in ("requests", "limits")}
        if serves_cuda(settings):
            assert (counts, visible) == ({size}, ",".join(map(str, range(size))))
        else:
            assert (counts, visible) == ({None}, None)


@pytest.mark.parametrize("name", [name for name in NAMES if "gpu" in name])
def test_gpus_are_those_of_the_name(name: str) -> None:
    workers = Rendered((MANIFESTS / f"{name}.yaml").read_text()).workers
    gpus = sum(worker["resources"]["limits"]["nvidia.com/gpu"] for worker in workers)
    assert gpus == int(re.findall(r"(\d+)gpu", name)[0])


def test_front_end_memory_holds_slab_bytes_in_flight_and_decode_processes(
    rendered: Rendered, settings: Settings
) -> None:
    """The slab's pages are charged to the container that touches them first. Published K3 has the largest rows."""
    plan = plan_capacity(PUBLISHED_K3, settings)
    processes = settings.image.decode_processes
    assert processes is not None, "the default counts the node's cores"
    held = plan.slab_bytes + settings.cache.max_bytes + settings.limits.max_inflight_bytes
    at_rest = held + (processes + 1) * PROCESS_BYTES
    at_most = held + processes * max_memory_bytes(settings.limits) + PROCESS_BYTES
    assert memory(rendered.frontend, "requests") >= at_rest
    assert at_most <= memory(rendered.frontend, "limits") < 1.2 * at_most + 2**30, "more than it can ever use"


def test_worker_memory_holds_weights_scratch_and_shared_memory(rendered: Rendered, settings: Settings) -> None:
    plan = plan_capacity(PUBLISHED_K3, settings)
    size = settings.parallel.tensor
    volumes = {volume["name"]: volume for volume in rendered.pod["spec"]["volumes"]}
    for worker in rendered.workers:
        shm = volumes[mounts(worker)["/dev/shm"]["name"]]["emptyDir"]
        assert shm["medium"] == "Memory"
        rank_bytes = TORCH_BYTES + plan.weights_bytes + (0 if serves_cuda(settings) else plan.scratch_bytes)
        assert memory(worker, "limits") >= size * rank_bytes + in_bytes(shm["sizeLimit"])


def test_no_process_is_started_for_each_core_of_the_node(rendered: Rendered, settings: Settings) -> None:
    assert settings.image.decode_processes is not None
    assert serves_cuda(settings) or settings.parallel.threads is not None
    for each in containers(rendered):
        if each["name"] == "demo-model":  # it reads no settings file
            loaded = load_settings(environ={one["name"]: one["value"] for one in each["env"]}).settings
            assert (loaded.image.decode_processes, loaded.parallel.threads) == (1, 1)


# Probes, ports and selectors


def test_probes_are_routes_of_the_probe_port(rendered: Rendered, settings: Settings) -> None:
    app = create_probe_app(cast(Engine, None), cast(Reporter, None))
    routes = {route.path for route in app.routes}  # type: ignore[attr-defined]
    probes = [rendered.frontend[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
    assert [probe["path"] for probe in probes] == ["/livez", "/livez", "/readyz"]
    scraped = {each["path"] for monitor in rendered.all("ServiceMonitor") for each in monitor["spec"]["endpoints"]}
    assert {probe["path"] for probe in probes} | scraped <= routes
    assert {probe["port"] for probe in probes} == {"probes"}
    ports = {port["name"]: port["containerPort"] for port in rendered.frontend["ports"]}
    assert ports == {"http": settings.server.port, "probes": settings.server.probe_port}
    assert settings.server.host in ("0.0.0.0", "::")


def ports_named(rendered: Rendered) -> Iterator[Any]:
    for service in rendered.all("Service"):
        yield from (port["targetPort"] for port in service["spec"]["ports"])
    for policy in rendered.all("NetworkPolicy"):
        yield from (port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"])


def test_ports_agree(rendered: Rendered) -> None:
    assert set(ports_named(rendered)) == {port["name"] for port in rendered.frontend["ports"]}
    services = {each["metadata"]["name"]: each for each in rendered.all("Service")}
    for ingress in rendered.all("Ingress"):
        for rule in ingress["spec"]["rules"]:
            for path in rule["http"]["paths"]:
                backend = path["backend"]["service"]
                names = {port["name"] for port in services[backend["name"]]["spec"]["ports"]}
                assert backend["port"]["name"] in names


def test_selectors_select_the_pod_and_only_what_they_are_for(rendered: Rendered) -> None:
    labels = rendered.pod["metadata"]["labels"].items()
    assert rendered.one("Deployment")["spec"]["selector"]["matchLabels"].items() <= labels
    for service in rendered.all("Service"):
        assert service["spec"]["selector"].items() <= labels
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        selector = rendered.one(kind)["spec"]
        assert selector.get("selector", selector.get("podSelector"))["matchLabels"].items() <= labels
    for monitor in rendered.all("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (found,) = (each for each in rendered.all("Service") if wanted <= each["metadata"]["labels"].items())
        assert [each["port"] for each in monitor["spec"]["endpoints"]] == [
            each["name"] for each in found["spec"]["ports"]
        ]


def test_everything_has_the_releases_namespace(rendered: Rendered) -> None:
    assert {each["metadata"]["namespace"] for each in rendered.objects} == {"tpvision"}


def test_nothing_goes_out_but_what_was_asked_for(rendered: Rendered, settings: Settings) -> None:
    policy = rendered.one("NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    fetches = any(each["name"] == "fetch" for each in containers(rendered))
    if settings.urls.fetch == "off" and not fetches:
        assert policy["egress"] == []
    else:
        names, outside, *_ = policy["egress"]
        assert {port["port"] for port in names["ports"]} == {53}
        assert {port["port"] for port in outside["ports"]} == {443, *settings.urls.allowed_ports}
        assert "10.0.0.0/8" in outside["to"][0]["ipBlock"]["except"]


# Starting, stopping, rolling out


def test_grace_outlasts_the_longest_stop(rendered: Rendered, settings: Settings) -> None:
    """The clock starts with the preStop hook. What each part takes at most is measured in tests/test_cli.py."""
    sleep_s = rendered.frontend["lifecycle"]["preStop"]["sleep"]["seconds"]
    front_end_s = sleep_s + settings.limits.drain_timeout_s + groups._STOP_TIMEOUT_S
    workers_s = 2 * settings.parallel.groups  # they end at once, as their front-end has gone
    assert rendered.pod["spec"]["terminationGracePeriodSeconds"] >= front_end_s + workers_s + 5


def test_the_pod_leaves_the_endpoints_before_it_stops_listening(rendered: Rendered) -> None:
    assert rendered.frontend["lifecycle"]["preStop"]["sleep"]["seconds"] >= 5


def test_startup_has_time_to_end_by_itself_and_liveness_is_tight(rendered: Rendered) -> None:
    startup, liveness = rendered.frontend["startupProbe"], rendered.frontend["livenessProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] >= 1.5 * START_TIMEOUT_S
    assert liveness["failureThreshold"] * liveness["periodSeconds"] <= 30


def test_a_rollout_needs_no_spare_gpu_unless_told_so(rendered: Rendered, settings: Settings) -> None:
    spec = rendered.one("Deployment")["spec"]
    rolling = spec["strategy"]["rollingUpdate"]
    assert rolling in ({"maxSurge": 0, "maxUnavailable": 1}, {"maxSurge": 1, "maxUnavailable": 0})
    takes_s = settings.parallel.start_timeout_s + rendered.pod["spec"]["terminationGracePeriodSeconds"]
    assert spec["progressDeadlineSeconds"] > takes_s


def test_a_drain_of_the_node_is_never_blocked_for_ever(rendered: Rendered) -> None:
    budget = rendered.one("PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] in (1, "25%")
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


# Around it


def test_autoscaler_scales_this_deployment_before_requests_are_refused(rendered: Rendered, settings: Settings) -> None:
    deployment = rendered.one("Deployment")
    scalers = [*rendered.all("ScaledObject"), *rendered.all("HorizontalPodAutoscaler")]
    assert ("replicas" in deployment["spec"]) == (not scalers)
    for scaler in scalers:
        assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
        if scaler["kind"] == "ScaledObject":
            (trigger,) = scaler["spec"]["triggers"]
            assert all(isinstance(value, str) for value in trigger["metadata"].values())
            assert 'service="tpvision-metrics"' in trigger["metadata"]["query"]
            assert "tpvision-metrics" in {each["metadata"]["name"] for each in rendered.all("Service")}
            threshold = trigger["metadata"]["threshold"]
        else:
            (metric,) = scaler["spec"]["metrics"]
            threshold = metric["pods"]["target"]["averageValue"]
        assert float(threshold) <= settings.limits.max_queue_s / 4


def test_ingress_is_as_wide_as_the_nginx_configuration_that_was_tried(rendered: Rendered, settings: Settings) -> None:
    prefix = "nginx.ingress.kubernetes.io/"
    nginx = (DEPLOY / "proxies" / "nginx.conf").read_text()
    tried = {
        name: value.split() for name, value in re.findall(r"^ *((?:client|proxy)_\w+) +([^;]+);", nginx, re.MULTILINE)
    }
    tried["proxy_body_size"] = tried.pop("client_max_body_size")
    for ingress in rendered.all("Ingress"):
        annotations = ingress["metadata"]["annotations"] or {}
        ours = {
            name.removeprefix(prefix).replace("-", "_"): value.split()
            for name, value in annotations.items()
            if name.startswith(prefix)
        }
        if ours:
            assert int(ours.pop("proxy_read_timeout")[0]) > settings.limits.request_timeout_s
            assert int(ours.pop("proxy_send_timeout")[0]) >= settings.limits.send_timeout_s
            assert ours.pop("proxy_connect_timeout") == [tried["proxy_connect_timeout"][0].removesuffix("s")]
            assert [*ours.pop("proxy_buffers_number"), *ours["proxy_buffer_size"]] == tried["proxy_buffers"]
            assert ours.items() <= tried.items()


def test_rules_and_board_are_the_files(rendered: Rendered) -> None:
    for rule in rendered.all("PrometheusRule"):
        assert rule["spec"] == yaml.safe_load((DEPLOY / "alerts" / "tpvision.rules.yaml").read_text())
    for board in rendered.all("ConfigMap"):
        if board["metadata"]["name"] == "tpvision-dashboard":
            assert board["data"]["tpvision.json"] == (DEPLOY / "dashboards" / "tpvision.json").read_text()
