"""Every metric of the service, each defined once: name, labels, what it says. `GET /metrics` shows them.

Two kinds. Events are counted where they happen, through the small methods of `Metrics`. What can be read at any time is
not kept up to date but read when somebody looks: the fields of `ServiceState`. Labels have few values, all of them
ours: routes and error codes, not paths; tiers, groups and ranks as configured.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, Info, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from service.errors import BY_CODE
from service.geometry import ImagePlan
from service.modes import Choice
from service.record import STAGES, RequestRecord
from service.transport import LOSSES, Loss
from service.version import installed_version
from tp.modes import Mode
from tp.settings import Settings
from tp.wire import Done

Kind = Literal["counter", "gauge", "histogram", "info"]

_PREFIX = "tpvision_"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_SKEW_SECONDS = (0.0001, 0.00025, 0.0005, *_SECONDS[:13])
_PATCHES = tuple(2**power for power in range(4, 18))
_IMAGES = tuple(2**power for power in range(10))
_RATIOS = tuple(step / 10 for step in range(1, 11))
_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}


@dataclass(frozen=True, slots=True)
class Definition:
    """A row of the catalogue. `name` is as in /metrics; a histogram's has suffixes there."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str


def _read(kind: Literal["counter", "gauge"], text: str, *labels: str) -> Any:
    """A metric that is a field of `ServiceState`."""
    return field(metadata={"kind": kind, "labels": labels, "help": text})


@dataclass(frozen=True, slots=True)
class ServiceState:
    """What is read when somebody looks. A field's name is its metric's; a mapping's keys are label values."""

    queue_requests: int = _read("gauge", "Requests accepted and not yet answered.")
    queue_images: int = _read("gauge", "Images whose pixels are ready and that wait for a batch.")
    queue_cost_seconds: float = _read(
        "gauge", "Seconds until what is accepted is done, at the measured rate; 0 until something was measured."
    )
    queue_bytes: int = _read("gauge", "Bytes of request bodies being read and answers not yet sent.")
    slab_patches: int = _read("gauge", "Patches that the slab holds.")
    slab_used_patches: int = _read("gauge", "Patches of the slab that images in flight hold.")
    ready: bool = _read("gauge", "1 while requests are taken, as /readyz tells.")
    accepted_total: int = _read(
        "counter",
        "Requests accepted: those answered, those whose client left, and those in the queue.",
    )
    answered_total: int = _read("counter", "Accepted requests that were answered, with embeddings or an error.")
    client_gone_total: int = _read("counter", "Accepted requests whose client left first.")
    cache_hits_total: int = _read("counter", "Images whose tokens the content cache had.")
    cache_misses_total: int = _read("counter", "Images that it did not have and that nobody was encoding: encoded.")
    cache_coalesced_total: int = _read("counter", "Images that were just then encoded for somebody else.")
    cache_evictions_total: int = _read("counter", "Entries dropped to make room for others.")
    cache_bytes: int = _read("gauge", "Bytes that the content cache holds.")
    cache_max_bytes: int = _read("gauge", "Bytes that it may hold; 0 while it is off.")
    decoders_replaced_total: int = _read("counter", "Decode processes that died, or were ended with a task of theirs.")
    group_state: Mapping[tuple[str, str], bool] = _read(
        "gauge", "1 for the state that a group is in.", "group", "state"
    )
    group_restarts_total: Mapping[tuple[str], int] = _read(
        "counter", "Launches of a group after its first one.", "group"
    )


class Metrics(Collector):
    """The metrics of one service, in a registry of their own."""

    def __init__(self, settings: Settings, *, model: str, dtype: str, read_state: Callable[[], ServiceState]) -> None:
        """`read_state` is called for each look at /metrics."""
        self.catalogue: list[Definition] = []
        self._registry = CollectorRegistry()
        self._read_state = read_state
        self._requests = self._counter(
            "requests_total",
            "Answers given, but for probes and /metrics. code: the error's. status 499: a client that left first.",
            *("route", "form", "status", "code"),
        )
        self._request_seconds = self._histogram(
            "request_seconds", "From a request's first byte to its answer's last.", _SECONDS, "route"
        )
        self._refusals = self._counter(
            "refusals_total", "Requests refused before any work. reason: the error code.", "reason"
        )
        self._stage_seconds = self._histogram(
            "stage_seconds", "How long a request was in each stage that it came to.", _SECONDS, "stage"
        )
        self._images = self._counter(
            "images_total", "Images encoded, video chunks among them. tier: the smallest that holds it alone.", "tier"
        )
        self._downscaled = self._counter("images_downscaled_total", "Those that the capacity downscaled.", "tier")
        self._ratio = self._histogram(
            "downscale_ratio", "Of each downscaled image: its longer side over what the model's rule gives.", _RATIOS
        )
        self._pixels = self._counter("pixels_total", "Pixels of encoded images, padding included.")
        self._padding = self._counter("padding_pixels_total", "Pixels that padding added to them.")
        self._batches = self._counter(
            "batches_total",
            "Batches encoded. mode: tp, all ranks on each image, or dp, each on its own.",
            "mode",
        )
        self._graph_batches = self._counter(
            "graph_batches_total", "Batches that replayed a CUDA graph; the others ran eagerly."
        )
        self._batch_seconds = self._counter(
            "batch_seconds_total", "What batches took on their slowest rank, by the mode they ran in.", "mode"
        )
        self._predicted_seconds = self._counter(
            "batch_predicted_seconds_total",
            "What the same batches were predicted to take in each mode, where parallel.resident leaves a choice.",
            "mode",
        )
        self._batch_patches = self._histogram("batch_patches", "Patches of a batch.", _PATCHES)
        self._batch_images = self._histogram("batch_images", "Images of a batch.", _IMAGES)
        self._rank_forward = self._histogram(
            "rank_forward_seconds",
            "Forward of a batch on one rank, without the all-gather at its end.",
            _SECONDS,
            *("group", "rank"),
        )
        self._skew = self._histogram(
            "batch_skew_seconds", "Of each tp batch: the slowest rank's forward minus the fastest one's.", _SKEW_SECONDS
        )
        self._lost_ranks = self._counter(
            "lost_ranks_total", "Ranks whose loss ended their group. reason: what was seen first.", "group", "reason"
        )
        self._info(
            *("build_info", "What runs; always 1."),
            version=installed_version(),
            model=model,
            dtype=dtype,
            world_size=str(settings.parallel.tensor),
        )
        for each in fields(ServiceState):
            self._define(each.name, each.metadata["kind"], each.metadata["labels"], each.metadata["help"])
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self._start_at_zero(settings)

    def expose(self, accept: str) -> tuple[bytes, str]:
        """All metrics in the format that an Accept header asks for (text where it is malformed), and its type."""
        try:
            encode, content_type = choose_encoder(accept)
        except (TypeError, ValueError):  # a version of letters, say
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type

    def note_request(self, record: RequestRecord) -> None:
        """A request has ended."""
        self._requests.labels(record.route, record.form, record.status, record.code).inc()
        self._request_seconds.labels(record.route).observe(record.seconds)
        if record.is_refusal:
            self._refusals.labels(record.code).inc()
        for stage, seconds in record.times_s.items():
            self._stage_seconds.labels(stage).observe(seconds)

    def note_batch(self, plans: Sequence[ImagePlan], replies: Sequence[Done], *, group: int, choice: Choice) -> None:
        """A batch of these images was encoded; `replies` are its ranks', in order."""
        mode = choice.mode
        self._batches.labels(mode).inc()
        self._graph_batches.inc(replies[0].is_graphed)
        self._batch_seconds.labels(mode).inc(max(reply.forward_s + reply.all_gather_s for reply in replies))
        for predicted_mode, seconds in choice.predicted_s.items():
            self._predicted_seconds.labels(predicted_mode).inc(seconds)
        self._batch_images.observe(len(plans))
        self._batch_patches.observe(sum(plan.patches for plan in plans))
        for plan in plans:
            self._note_image(plan)
        forwards_s = [reply.forward_s for reply in replies]
        for rank, forward_s in enumerate(forwards_s):
            self._rank_forward.labels(group, rank).observe(forward_s)
        if mode == "tp":  # else they differ as their images do
            self._skew.observe(max(forwards_s) - min(forwards_s))

    def note_tiers(self, tiers: Sequence[int]) -> None:
        """These tiers are in force."""
        for tier in tiers:
            self._images.labels(tier)
            self._downscaled.labels(tier)

    def note_loss(self, group: int, reason: Loss) -> None:
        """A rank took its group down."""
        self._lost_ranks.labels(group, reason).inc()

    def collect(self) -> Iterator[Metric]:
        """What is read when somebody looks; the registry calls it."""
        state = self._read_state()
        for each in fields(state):
            family = _FAMILIES[each.metadata["kind"]](
                _PREFIX + each.name, each.metadata["help"], labels=each.metadata["labels"]
            )
            value = getattr(state, each.name)
            for labels, number in (value if isinstance(value, Mapping) else {(): value}).items():
                family.add_metric(labels, number)
            yield family

    def _note_image(self, plan: ImagePlan) -> None:
        self._images.labels(plan.tier).inc()
        self._pixels.inc(plan.pixels)
        self._padding.inc(plan.padding_pixels)
        if plan.downscaled:
            self._downscaled.labels(plan.tier).inc()
            self._ratio.observe(plan.scale)

    def _start_at_zero(self, settings: Settings) -> None:
        """Make the series whose labels are known, because a rate sees no step from nothing to one."""
        self.note_tiers(settings.capacity.patch_capacities)
        for mode in get_args(Mode):
            self._batches.labels(mode)
            self._batch_seconds.labels(mode)
            self._predicted_seconds.labels(mode)
        for stage in STAGES:
            self._stage_seconds.labels(stage)
        for code, error in BY_CODE.items():
            if error.status < 500 or error.status == 503:
                self._refusals.labels(code)
        for group in range(settings.parallel.groups):
            for rank in range(settings.parallel.tensor):
                self._rank_forward.labels(group, rank)
            for reason in LOSSES:
                self._lost_ranks.labels(group, reason)

    def _define(self, name: str, kind: Kind, labels: tuple[str, ...], text: str) -> str:
        self.catalogue.append(Definition(_PREFIX + name, kind, labels, text))
        return _PREFIX + name

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(self._define(name, "counter", labels, text), text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float], *labels: str) -> Histogram:
        full_name = self._define(name, "histogram", labels, text)
        return Histogram(full_name, text, labels, buckets=buckets, registry=self._registry)

    def _info(self, name: str, text: str, **labels: str) -> None:
        full_name = self._define(name, "info", tuple(labels), text)
        Info(full_name.removesuffix("_info"), text, registry=self._registry).info(labels)
