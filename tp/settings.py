"""The one settings model, read by both sides: YAML file, then environment, then flags; later wins.

Environment names are `TPVISION_<SECTION>__<NAME>`; anything else that starts with `TPVISION_` (Kubernetes injects
`TPVISION_PORT`) is not ours. An unknown key stops the start and names the nearest known one.
"""

import difflib
import ipaddress
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tp.spec import Dtype, EncoderSpec

ENV_PREFIX = "TPVISION_"
_HOST_PATTERN = re.compile(r"(\*\.)?[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_UNREADABLE = (OSError, yaml.YAMLError, ValueError, RecursionError)  # a date of month 13; a thousand brackets
SOCKET_PATH_BYTES = 107  # sun_path holds 108 with its closing zero


class SettingsError(ValueError):
    """A settings file, variable or flag is malformed, unknown, or contradicts another."""


def _split_commas(value: Any) -> Any:
    """One value, or several with commas between, as a flag or variable holds them."""
    if isinstance(value, int):
        return [value]
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _on_or_off(value: Any) -> Any:
    """YAML reads a bare `on` or `off` as a boolean."""
    return ("off", "on")[value] if isinstance(value, bool) else value


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans(cls, value: Any, info: ValidationInfo) -> Any:
        """A number is meant where one is wanted, and true is none."""
        wanted = cls.model_fields[info.field_name or ""].annotation
        if isinstance(value, bool) and (wanted in (int, float) or {int, float} & set(get_args(wanted))):
            raise ValueError(f"a number is wanted, not {str(value).lower()}")
        return value


class ModelSettings(_Section):
    """Which checkpoint, and in what arithmetic."""

    path: Path | None = Field(
        None, description="Checkpoint folder: config.json, preprocessor_config.json, safetensors."
    )
    name: str | None = Field(None, description="Model id in answers and /v1/models. Default: the folder's name.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Compute dtype. auto: the checkpoint's own; anything else casts the weights, and says so."
    )
    rms_norm_eps: float = Field(
        2.0**-23,
        gt=0,
        lt=1,
        description="Epsilon of the tower's RMS norms (K3). 2^-23 is what the reference does on current torch, 2^-7 "
        "what it did in bf16 on older torch. No effect on LayerNorm towers.",
    )


class ParallelSettings(_Section):
    """How the encoder is spread over devices."""

    tensor: int = Field(1, ge=1, description="Ranks per group; must divide the attention heads.")
    groups: int = Field(1, ge=1, description="Tensor-parallel groups behind this front-end, on this machine.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where torch sees a GPU, else cpu.")
    resident: Literal["shard", "full"] = Field(
        "shard",
        description="What a rank holds of the weights: its shard, or all of them, so that a batch of small images can "
        "run data-parallel, each rank encoding some of them alone.",
    )
    exchange: Literal["auto", "gloo", "shared_memory"] = Field(
        "auto",
        description="What carries sums between ranks on CPU. auto: shared memory on x86, else gloo. GPUs use NCCL.",
    )
    cuda_graphs: Annotated[Literal["off", "on"], BeforeValidator(_on_or_off)] = Field(
        "off", description="on: tiers of at most 4,096 patches are captured as CUDA graphs. Not run on a GPU yet."
    )
    workers: Literal["managed", "external"] = Field(
        "managed", description="managed: serve starts the ranks. external: `tpvision worker` does, e.g. in a sidecar."
    )
    socket: Path | None = Field(
        None,
        description="Control socket, at most 107 bytes. Default: in a private temporary folder; external workers need "
        "it.",
    )
    threads: int | None = Field(None, ge=1, description="CPU threads per rank. Default: cores / ranks.")
    max_restarts: int = Field(5, ge=0, description="Group losses within restart_window_s before the service gives up.")
    restart_window_s: float = Field(600, gt=0, description="Seconds over which losses are counted.")
    collective_timeout_s: float | None = Field(
        None, gt=0, description="What a rank waits for its peers in a collective. Default: limits.batch_timeout_s + 60."
    )
    start_timeout_s: float = Field(600, gt=0, description="Seconds from launch to ready, weights loaded and warm.")

    @field_validator("socket")
    @classmethod
    def _check_socket(cls, socket: Path | None) -> Path | None:
        if socket is not None and len(os.fsencode(socket)) > SOCKET_PATH_BYTES:
            raise ValueError(f"a socket path of {len(os.fsencode(socket))} bytes; the limit is {SOCKET_PATH_BYTES}")
        return socket


class CapacitySettings(_Section):
    """How large an image may be, what happens to a larger one, and the memory that this reserves."""

    patch_capacities: Annotated[tuple[int, ...], BeforeValidator(_split_commas)] = Field(
        (1024, 4096, 16384),
        description="Capacity tiers in patches, ascending, multiples of 4. The top one is the limit.",
    )
    policy: Literal["refuse", "downscale"] = Field("refuse", description="What happens to an image over the top tier.")
    allow_override: Literal["none", "stricter", "any"] = Field(
        "stricter", description="May a request name its own policy: no; only refuse where we downscale; or either."
    )
    slab_patches: int | None = Field(
        None, description="Patches of images in flight, multiple of 4. Default: 4 times the top tier for each group."
    )

    @field_validator("patch_capacities")
    @classmethod
    def _check_tiers(cls, tiers: tuple[int, ...]) -> tuple[int, ...]:
        if not tiers:
            raise ValueError("at least one capacity tier is needed")
        for tier in tiers:
            if tier < 4 or tier % 4:
                raise ValueError(f"capacity tier {tier} is not a positive multiple of 4 (patches merge 2 x 2)")
        for smaller, larger in itertools.pairwise(tiers):
            if larger <= smaller:
                raise ValueError(f"capacity tiers must ascend, but {larger} follows {smaller}")
        return tiers

    @model_validator(mode="after")
    def _check_slab(self) -> "CapacitySettings":
        top = self.patch_capacities[-1]
        if self.slab_patches is not None and (self.slab_patches < top or self.slab_patches % 4):
            raise ValueError(
                f"slab_patches {self.slab_patches} must be a multiple of 4 and at least the top tier {top}"
            )
        return self

    @property
    def max_patches_per_image(self) -> int:
        """The top tier; never a second number."""
        return self.patch_capacities[-1]


class ImageSettings(_Section):
    """Where we depart from the checkpoint's image processor."""

    orientation: Literal["apply", "ignore"] = Field(
        "apply", description="EXIF orientation. The checkpoint's processor ignores it; people expect upright pictures."
    )
    gray16: Literal["scale", "reference"] = Field(
        "scale", description="16-bit grey: value // 257, or clipped at 255 as the checkpoint's processor does."
    )
    decode_processes: int | None = Field(None, ge=1, description="Decode processes. Default: one per core, at least 2.")


class LimitSettings(_Section):
    """What one request may cost, and what all of them together may hold."""

    max_body_bytes: int = Field(64 * 2**20, ge=1, description="Bytes of one request body; more is 413.")
    max_image_pixels: int = Field(89_478_485, ge=1, description="Pixels of one image, by its header; more is 422.")
    max_images_per_request: int = Field(64, ge=1, description="Images in one request; more is 422.")
    max_json_bytes: int = Field(
        64 * 2**20, ge=1, description="Bytes of a JSON answer; more is 422. Binary forms: no cap."
    )
    max_inflight_bytes: int = Field(2 * 2**30, ge=1, description="Bytes of bodies and unsent answers; more is 429.")
    max_queue_s: float = Field(60, gt=0, description="Seconds of queued work, at the measured rate; more is 429.")
    request_timeout_s: float = Field(300, gt=0, description="From the last body byte to the answer; more is 504.")
    body_timeout_s: float = Field(60, gt=0, description="From the headers to the last body byte; more is 408.")
    decode_timeout_s: float = Field(20, gt=0, description="One image's decode and resize; more is 422, process killed.")
    batch_timeout_s: float = Field(
        600,
        gt=0,
        description="One batch on the workers, at most; more is a hang: the group is killed and restarted. Once the "
        "rate is known, ten times the expected time is enough, but never less than 30 s.",
    )
    drain_timeout_s: float = Field(60, ge=0, description="After SIGTERM, for accepted requests to finish.")
    max_connections: int = Field(
        1000,
        ge=1,
        description="Open connections; one more takes the place of the longest idle one. Where all are busy, only "
        "probes are answered and the rest is 429.",
    )
    max_header_bytes: int = Field(32 * 2**10, ge=1024, description="Bytes of a request line and headers; more is 431.")
    header_timeout_s: float = Field(
        10, gt=0, description="From the connection or a later request's first byte to the end of headers; more is 408."
    )
    keep_alive_timeout_s: float = Field(
        75, gt=0, description="How long a connection may be idle between requests. Set it above a load balancer's own."
    )
    send_timeout_s: float = Field(
        60, gt=0, description="A client that reads less than 64 KiB of its answer in this time is cut off."
    )


class CacheSettings(_Section):
    """Tokens of images that were encoded before, in the front-end's memory."""

    max_bytes: int = Field(
        0,
        ge=0,
        description="Bytes of tokens that are kept, so that the same image is not decoded and encoded again; those of "
        "images at the same time are encoded once. 0: off.",
    )


class UrlSettings(_Section):
    """Images given as URLs. Whoever may send one makes this machine connect somewhere: off unless that is wanted."""

    fetch: Annotated[Literal["off", "on"], BeforeValidator(_on_or_off)] = Field(
        "off", description="on: images may be given as URLs, which the front-end fetches from public addresses."
    )
    allow_http: bool = Field(False, description="http URLs too, not only https.")
    allowed_hosts: Annotated[tuple[str, ...], BeforeValidator(_split_commas)] = Field(
        (), description="Host names, or *.example.org for all below it. Default: any host."
    )
    allowed_ports: Annotated[tuple[int, ...], BeforeValidator(_split_commas)] = Field(
        (80, 443), description="Ports that URLs may have."
    )
    timeout_s: float = Field(10, gt=0, description="All URLs of a request, with their redirects; more is 422.")
    max_redirects: int = Field(3, ge=0, description="Redirects of one URL, each checked like the URL; more is 422.")

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not _HOST_PATTERN.fullmatch(host):
                raise ValueError(f"{host!r} is not a host name in ASCII (xn--…), nor *. and one")
        return tuple(host.lower() for host in hosts)


class HandoffSettings(_Section):
    """LLM engines that embeddings are handed to. Each is off unless it is set."""

    vllm_encoder_cache_dir: Path | None = Field(
        None,
        description="Folder of vLLM's encoder cache, its `shared_storage_path`. Where set, there is "
        "POST /v1/encoder_cache. Nothing in it is ever deleted.",
    )
    sglang_receivers: Annotated[tuple[str, ...], BeforeValidator(_split_commas)] = Field(
        (),
        description="Addresses, networks (10.0.0.0/16) or host names of SGLang servers that embeddings may be pushed "
        "to. Where set, there is POST /encode.",
    )
    timeout_s: float = Field(30, gt=0, description="One write or push; more is 500 or 422.")

    @field_validator("sglang_receivers")
    @classmethod
    def _check_receivers(cls, receivers: tuple[str, ...]) -> tuple[str, ...]:
        for receiver in receivers:
            if _HOST_PATTERN.fullmatch(receiver) and not receiver.rpartition(".")[2].isdecimal():
                continue
            ipaddress.ip_network(receiver)  # raises ValueError naming it
        return tuple(receiver.lower() for receiver in receivers)


class ServerSettings(_Section):
    """Where the front-end listens, and who may come in."""

    host: str = Field("127.0.0.1", description="Address to bind. Anything but loopback without keys is warned about.")
    port: int = Field(8000, ge=0, le=65535, description="TCP port; 0 picks a free one and logs it.")
    probe_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="A second port that answers /livez, /readyz, /health and /metrics, and nothing else.",
    )
    api_keys_file: Path | None = Field(
        None, description="One key a line. Where set, /v1/* needs one as Bearer token. Read again when it changes."
    )
    cors_origins: Annotated[tuple[str, ...], BeforeValidator(_split_commas)] = Field(
        (), description="Origins that browsers may call from. Off by default."
    )
    playground: Annotated[Literal["off", "on"], BeforeValidator(_on_or_off)] = Field(
        "on", description="on: a page at / for trying pictures in a browser. Needs no key itself; its calls do."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe level that is logged. Requests are info, those answered 5xx warning."
    )
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="json: one object a line. console: for a person. auto: console on a terminal, else json."
    )
    traces: Annotated[Literal["off", "otlp"], BeforeValidator(_on_or_off)] = Field(
        "off",
        description="otlp: export OpenTelemetry spans (extra `otel`); its own OTEL_* variables say where to.",
    )

    @model_validator(mode="after")
    def _check_ports(self) -> "ServerSettings":
        if self.probe_port is not None and self.probe_port == self.port != 0:
            raise ValueError(f"server.probe_port must differ from server.port, {self.port}")
        return self


class Settings(_Section):
    """Everything an operator can set. Frozen; built by `load_settings`."""

    model: ModelSettings = ModelSettings()
    parallel: ParallelSettings = ParallelSettings()
    capacity: CapacitySettings = CapacitySettings()
    image: ImageSettings = ImageSettings()
    limits: LimitSettings = LimitSettings()
    cache: CacheSettings = CacheSettings()
    urls: UrlSettings = UrlSettings()
    handoff: HandoffSettings = HandoffSettings()
    server: ServerSettings = ServerSettings()

    @model_validator(mode="after")
    def _check_external(self) -> "Settings":
        if self.parallel.workers == "external" and self.parallel.socket is None:
            raise ValueError("parallel.workers external needs parallel.socket, a path both containers see")
        return self

    @property
    def slab_patches(self) -> int:
        """Patches of the slab, default worked out."""
        return self.slab_patches_for(self.capacity.max_patches_per_image)

    def slab_patches_for(self, top: int) -> int:
        """Patches of the slab while `top` is the top tier."""
        return self.capacity.slab_patches or 4 * top * self.parallel.groups

    @property
    def collective_timeout_s(self) -> float:
        """Seconds in a collective; by default longer than a batch may take, so that the batch deadline acts first."""
        return self.parallel.collective_timeout_s or self.limits.batch_timeout_s + 60

    def rank_threads(self, num_cores: int) -> int:
        """CPU threads of one rank on a machine with that many cores."""
        return self.parallel.threads or max(1, num_cores // (self.parallel.tensor * self.parallel.groups))

    def num_decode_processes(self, num_cores: int) -> int:
        """Decode processes on a machine with that many cores."""
        return self.image.decode_processes or max(2, num_cores)

    def compute_dtype(self, spec: EncoderSpec) -> Dtype:
        """The dtype of weights, activations and the token arena. Raises SettingsError for `auto` on float16 weights."""
        if self.model.dtype != "auto":
            return self.model.dtype
        if spec.dtype == "float16":
            raise SettingsError(
                "model.dtype is auto and the checkpoint is float16, in which activations of this tower may overflow: "
                "name bfloat16, float32 or float16 (--dtype)"
            )
        return spec.dtype


# What SIGHUP applies to a running service (`service.reload`), and where only up to a point; all else needs a restart.
RELOADABLE: Mapping[str, str] = {
    "capacity.patch_capacities": "up to the top tier at the start",
    "capacity.policy": "yes",
    "capacity.allow_override": "yes",
    "limits.max_body_bytes": "yes",
    "limits.max_image_pixels": "yes",
    "limits.max_images_per_request": "yes",
    "limits.max_json_bytes": "yes",
    "limits.max_inflight_bytes": "yes",
    "limits.max_queue_s": "yes",
    "limits.request_timeout_s": "yes",
    "limits.body_timeout_s": "yes",
    "limits.decode_timeout_s": "yes",
    "limits.batch_timeout_s": "below the collective timeout at the start",
    "limits.drain_timeout_s": "yes",
    "limits.max_connections": "yes",
    "limits.max_header_bytes": "yes",
    "limits.header_timeout_s": "yes",
    "limits.keep_alive_timeout_s": "yes",
    "limits.send_timeout_s": "yes",
    "cache.max_bytes": "up to that at the start",
    "server.api_keys_file": "to another file; to none needs a restart",
}


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """Settings, and for each dotted name that was set where its value came from."""

    settings: Settings
    sources: Mapping[str, str]


def load_settings(
    config: Path | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, Any] | None = None,
    spellings: Mapping[str, str] | None = None,
) -> LoadedSettings:
    """Merge file, environment and flags (dotted name -> value; `spellings` has each flag as people type it).

    Raises SettingsError naming key, source and reason.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    layers = (
        _from_file(config),
        _from_environ(environ or {}),
        (((name, f"flag {(spellings or {}).get(name, name)}", value) for name, value in (flags or {}).items())),
    )
    for layer in layers:
        for name, source, value in layer:
            _check_known(name, source)
            values[name] = value
            sources[name] = source
    tree: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, key = name.split(".", 1)
        tree.setdefault(section, {})[key] = value
    try:
        return LoadedSettings(Settings.model_validate(tree), sources)
    except ValidationError as error:
        raise SettingsError(_explain(error, sources)) from error


def near_misses(environ: Mapping[str, str]) -> list[str]:
    """One sentence for each variable that would be a setting with two underscores; Kubernetes may have set it."""
    variables = {f"{ENV_PREFIX}{name.replace('.', '_')}".upper(): name for name, _ in known_names()}
    return [
        f"{variable} is not a setting; did you mean {ENV_PREFIX}{variables[variable].replace('.', '__').upper()}?"
        for variable in environ
        if variable in variables
    ]


def known_names() -> Iterator[tuple[str, Any]]:
    """Every dotted name with its pydantic field, in the order of the model."""
    for section, field in Settings.model_fields.items():
        section_type = field.annotation
        assert isinstance(section_type, type) and issubclass(section_type, BaseModel)
        for key, inner in section_type.model_fields.items():
            yield f"{section}.{key}", inner


def as_environ(settings: Settings) -> dict[str, str]:
    """The environment that makes `load_settings` give these very settings: how a launcher passes them to its ranks."""
    environ = {}
    for section, values in settings.model_dump(mode="json").items():
        for key, value in values.items():
            if value is not None:
                environ[f"{ENV_PREFIX}{section}__{key}".upper()] = (
                    yaml.safe_dump(value, default_flow_style=True).split("\n...")[0].strip()
                )
    return environ


def _from_file(path: Path | None) -> Iterator[tuple[str, str, Any]]:
    if path is None:
        return
    try:
        if path.exists() and not path.is_file():  # a FIFO may block for good
            raise ValueError("not a regular file")
        tree = yaml.safe_load(path.read_bytes()) or {}
    except _UNREADABLE as error:
        raise SettingsError(f"{path} cannot be read: {_in_one_line(error)}") from error
    if not isinstance(tree, dict):
        raise SettingsError(f"{path} does not hold a mapping of sections")
    for section, values in tree.items():
        if values is None:  # a section whose every line is commented out
            if section not in Settings.model_fields:
                _check_known(section, f"file {path}")
            continue
        if not isinstance(values, dict):
            raise SettingsError(f"{path}: {section} must be a section of settings, not {type(values).__name__}")
        for key, value in values.items():
            yield f"{section}.{key}", f"file {path}", value


def _from_environ(environ: Mapping[str, str]) -> Iterator[tuple[str, str, Any]]:
    for variable, text in environ.items():
        section, separator, key = variable.removeprefix(ENV_PREFIX).partition("__")
        if variable.startswith(ENV_PREFIX) and separator:
            yield f"{section}.{key}".lower(), f"environment {variable}", _read_value(text)


def _in_one_line(error: Exception) -> str:
    mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
    return str(error) if mark is None else f"line {mark.line + 1}: {error.problem}"  # type: ignore[attr-defined]


def _read_value(text: str) -> Any:
    """A number, a list and so on as YAML has them; anything that no setting could be, such as `::` or `*`, as it is."""
    try:
        value = yaml.safe_load(text)
    except _UNREADABLE:
        return text
    return value if value is None or isinstance(value, str | int | float | list) else text


def _check_known(name: str, source: str) -> None:
    names = [known for known, _ in known_names()]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0)
        raise SettingsError(f"{source}: unknown setting {name}; the nearest known one is {near[0]}")


def _explain(error: ValidationError, sources: Mapping[str, str]) -> str:
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"][:2]) or "settings"
        source = sources.get(name)
        lines.append(f"{name}{f' ({source})' if source else ''}: {item['msg'].removeprefix('Value error, ')}")
    return "; ".join(lines)
