"""The story of one image (`encode`), and the life of everything that it needs.

    header -> geometry -> admission -> pixels into the slab -> queue -> tokens out of the slab
    (or, where the content cache is on: tokens that it has, or that others compute, and the rest as above)

The engine owns the slab, the decode processes and the worker groups. `service.dispatch` empties the queue.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from service.admission import Admission, HeldBytes, Permit, Rows
from service.batcher import Batcher, Entry
from service.body import Body, ImageBytes, Item, VideoChunk
from service.cache import ContentCache, ItemError, ItemTokens
from service.content_keys import Key, content_key, digest
from service.decoders import DecoderPool, UnpackedBody
from service.dispatch import Dispatcher
from service.errors import DeadlineExceeded, InvalidRequest, NotReady, ServiceError, WorkersLost
from service.geometry import ImagePlan, plan_image
from service.groups import GROUP_STATES, WorkerGroups
from service.header import ImageHeader
from service.ledger import Ledger, stopping
from service.loan import LOAN_BYTES, Loan
from service.memory_check import check_host
from service.metrics import Metrics, ServiceState
from service.plan import CapacityPlan, plan_capacity, sentences
from service.record import RequestRecord
from service.tokens import Embeddings, TokenOptions, read_tokens
from service.transport import WorkerGroup
from service.unpack import Route
from service.version import installed_version
from service.waiting import off_loop
from tp import wire
from tp.settings import LimitSettings, Settings
from tp.slab import Slab, SlabLayout
from tp.spec import ITEMSIZE, EncoderSpec

log = logging.getLogger("tpvision.engine")

Result = TypeVar("Result")
State = Literal["loading", "ready", "draining", "failed"]
_Place = tuple[int, str]  # an item of a request, by its index, and what names a part of it: "" or ".frames[1]"

_NOT_SERVING: dict[State, str] = {
    "loading": "the workers are loading",
    "draining": "the service is stopping",
    "failed": "it failed",
}
_ABANDON_TIMEOUT_S = 2.0  # for requests that are cancelled to end


@dataclass(frozen=True, slots=True)
class EncodeOptions:
    """What a request asks for, beyond its images, and the settings that were in force when it came."""

    settings: Settings
    policy: Literal["refuse", "downscale"]
    tokens: TokenOptions
    param: str = "images"  # what error.param calls the list of images
    may_lend: bool = False  # nothing but `data` and the shapes of the embeddings will be used, and that at once
    check_plans: Callable[[Sequence[ImagePlan]], None] | None = None  # the answer form's own limits, before any work


@dataclass(frozen=True, slots=True)
class Encoded:
    """The embeddings of one request's images and video chunks, in order."""

    embeddings: Embeddings
    plans: Sequence[ImagePlan]


class Engine:
    """Turns images into merged tokens. One per process, which `service.server` or `service.check` starts and stops."""

    def __init__(
        self,
        settings: Settings,
        spec: EncoderSpec,
        *,
        on_progress: Callable[[int, int, wire.Progress], None] = lambda group, rank, progress: None,
    ) -> None:
        """`on_progress(group, rank, progress)` is called while ranks read weights."""
        self.started_with = settings
        self.settings = settings  # in force now; see `take_over`
        self.spec = spec
        self.dtype = settings.compute_dtype(spec)
        self.layout = SlabLayout.of(spec, num_patches=settings.slab_patches, itemsize=ITEMSIZE[self.dtype])
        self.admission = Admission(settings.slab_patches, settings.limits)
        self.cache = ContentCache(settings.cache.max_bytes)
        self.requests = Ledger()
        self.metrics = Metrics(settings, model=self.model_name, dtype=self.dtype, read_state=self._read_state)
        self.ready = asyncio.Event()  # a group was ready at least once
        self._on_progress = on_progress
        self._batcher = Batcher(settings.capacity.max_patches_per_image)

    @property
    def state(self) -> State:
        """Ready while at least one group is loaded and warm and nobody asked us to stop."""
        if self.failure.done():
            return "failed"
        if self.requests.is_closed:
            return "draining"
        return "ready" if self._groups.ready else "loading"

    @property
    def failure(self) -> asyncio.Future[Exception]:
        """Set when the service cannot go on."""
        return self._groups.failure

    @property
    def child_pids(self) -> set[int]:
        """Children that somebody here waits for."""
        return {*self._decoders.pids, *self._groups.pids}

    @property
    def model_name(self) -> str:
        """The id that answers carry."""
        assert self.settings.model.path is not None
        return self.settings.model.name or self.settings.model.path.resolve().name

    def check_serving(self) -> None:
        """Raise NotReady unless requests are taken now."""
        state = self.state
        if state != "ready":
            raise NotReady(_NOT_SERVING[state])

    @contextlib.asynccontextmanager
    async def taking(self) -> AsyncIterator[None]:
        """While a request is read, which is not accepted before it is whole.

        Raises NotReady at the start or in the middle of the block, as soon as nothing new is taken any more.
        """
        self.check_serving()
        async with self.requests.taking():
            yield

    @cached_property
    def _fixed_digest(self) -> str:
        """Of what every request's tokens depend on. Ask for it once a group was ready: its weights are in it."""
        image = self.settings.image
        return digest(
            *(installed_version(), asdict(self.spec), self._groups.weights_fingerprint, self.dtype),
            *(self.settings.model.rms_norm_eps, image.orientation, image.gray16),
        ).hex()

    async def content_keys(self, images: Sequence[Item], options: EncodeOptions, record: RequestRecord) -> list[Key]:
        """Digests of all that the tokens of each image, or its refusal, depend on: its bytes, the model, the settings.

        Call it while requests are taken: ranks have told by then which weights they hold.
        """
        capacity, limits = options.settings.capacity, options.settings.limits
        context = digest(self._fixed_digest, capacity.patch_capacities, options.policy, limits.max_image_pixels)
        with record.stage("receive"):
            return await off_loop(
                lambda: [content_key(item, context) for item in images],
                num_bytes=sum(file.length for item in images for _, file in _files(item, 0)),
            )

    async def encode(
        self,
        images: Sequence[Item],
        options: EncodeOptions,
        record: RequestRecord,
        keys: Sequence[Key] | None = None,
    ) -> Encoded:
        """Merged tokens of the images, all or nothing. Raises a ServiceError; `param` names the first bad image.

        A video chunk takes the place of an image, with one run of tokens for all of its frames. What becomes of the
        images, and when, is noted in the record. `keys` are their `content_keys`, where those are known already.
        """
        self.check_serving()
        record.policy = options.policy
        entries: list[Entry] = []
        limit_s = options.settings.limits.request_timeout_s
        with self.requests.accept():  # from here on it gets exactly one answer
            try:
                async with asyncio.timeout(limit_s):
                    if options.settings.cache.max_bytes:
                        return await self._encode_cached(images, options, record, entries, keys)
                    async with self._computed(images, options, record, entries) as tokens:
                        rows = [entry.rows for entry in entries]
                        return await self._answer(tokens, options, record, rows=rows)
            except ItemError as failed:
                raise failed.named(options.param) from None
            except TimeoutError:
                raise self._too_late(entries, limit_s) from None
            finally:
                for entry in entries:
                    entry.future.cancel()  # whoever is not answered by now is not wanted any more

    async def _encode_cached(
        self,
        images: Sequence[Item],
        options: EncodeOptions,
        record: RequestRecord,
        entries: list[Entry],
        keys: Sequence[Key] | None,
    ) -> Encoded:
        async def compute(indexes: Sequence[int]) -> list[ItemTokens]:
            async with self._computed([images[index] for index in indexes], options, record, entries) as tokens:
                with record.stage("copy"):
                    return await asyncio.to_thread(lambda: [item.copy() for item in tokens])

        keys = keys or await self.content_keys(images, options, record)
        found = await self.cache.resolve(keys, compute, waiting=lambda: record.stage("coalesce"))
        record.num_cached, record.num_coalesced = found.num_cached, found.num_coalesced
        record.plans = [item.plan for item in found.tokens]
        self._check(record.plans, options)  # all together, as if all had been computed for this request
        num_rows = sum(1 if options.tokens.pooled else plan.grid.num_tokens for plan in record.plans)
        with HeldBytes(self.admission) as held:
            if found.num_cached or found.num_coalesced:  # the slab does not bound how many have such tokens at once
                self.admission.check_bytes(0)
            held.add_unchecked(num_rows * self.spec.text_hidden_size * ITEMSIZE[options.tokens.dtype])
            return await self._answer(found.tokens, options, record, is_shared=True)

    @contextlib.asynccontextmanager
    async def _computed(
        self, images: Sequence[Item], options: EncodeOptions, record: RequestRecord, entries: list[Entry]
    ) -> AsyncIterator[Sequence[ItemTokens]]:
        """The tokens of these images, in rows of the slab that are held as long as the block. Raises ItemError."""
        with record.stage("header"):
            plans, slow = await self._plan(images, options, record)
            record.plans = plans
        self._check(plans, options)
        cost = sum(self.spec.cost(plan.patches) for plan in plans)
        with self.admission.admit([plan.patches for plan in plans], cost=cost) as permit:
            record.is_admitted = True
            with record.stage("decode"):
                preprocess_s = await self._write_patches(images, plans, permit, options, slow)
            record.end_with("preprocess", preprocess_s, of="decode")
            submitted = self._make_entries(plans, permit)
            entries += submitted
            self._batcher.submit(submitted)
            times = await _in_order({(index, ""): entry.future for index, entry in enumerate(submitted)})
            last = max(times, key=lambda each: each.settled_at)
            record.stages |= last.stages
            record.rank_0_forward = last.rank_0_forward
            record.mode = last.mode
            yield [
                ItemTokens(plan, self.slab.tokens(rows.run, plan.grid.num_tokens))
                for plan, rows in zip(plans, permit.rows, strict=True)
            ]

    async def _plan(
        self, images: Sequence[Item], options: EncodeOptions, record: RequestRecord
    ) -> tuple[list[ImagePlan], set[_Place]]:
        """The plan of each item, and which files are slow to decode."""
        limits, capacities = options.settings.limits, options.settings.capacity.patch_capacities
        files = {place: file for index, item in enumerate(images) for place, file in _files(item, index)}
        read = self._decoders.read_header
        headers = await self._by_turns({place: partial(read, file, limits) for place, file in files.items()})
        slow = {place for place, header in zip(files, headers, strict=True) if header.is_slow}
        rest = iter(headers)
        plans = []
        for index, item in enumerate(images):
            num_frames = len(item.frames) if isinstance(item, VideoChunk) else None
            try:
                size = _common_size([next(rest) for _ in range(num_frames or 1)])
                record.sizes.append(size)
                plan = plan_image(*size, self.spec.processor, capacities, options.policy, num_frames=num_frames)
            except ServiceError as error:
                raise ItemError(index, error) from None
            plans.append(plan)
        return plans, slow

    def _check(self, plans: Sequence[ImagePlan], options: EncodeOptions) -> None:
        """Refuse images that no answer could hold together. Raises RequestTooLarge and what `check_plans` does."""
        if options.check_plans is not None:
            options.check_plans(plans)
        self.admission.check_size([plan.patches for plan in plans])

    async def _write_patches(
        self,
        images: Sequence[Item],
        plans: Sequence[ImagePlan],
        permit: Permit,
        options: EncodeOptions,
        slow: Set[_Place],
    ) -> float:
        """The seconds of it that the slowest image took once it was decoded."""
        write, limits = self._decoders.write_patches, options.settings.limits
        work = {
            place: partial(write, file, plan, rows.run, limits, frame, is_slow=place in slow)
            for index, (item, plan, rows) in enumerate(zip(images, plans, permit.rows, strict=True))
            for frame, (place, file) in enumerate(_files(item, index))
        }
        return max(written.preprocess_s for written in await self._by_turns(work))

    async def _by_turns(self, calls: Mapping[_Place, Callable[[], Awaitable[Result]]]) -> list[Result]:
        """`_in_order`, no more at a time than there are decode processes: other requests' images come in between."""
        room = asyncio.Semaphore(self._decoders.num_processes)

        async def run(call: Callable[[], Awaitable[Result]]) -> Result:
            async with room:
                return await call()

        return await _in_order({place: run(call) for place, call in calls.items()})

    def _make_entries(self, plans: Sequence[ImagePlan], permit: Permit) -> list[Entry]:
        loop = asyncio.get_running_loop()
        return [
            Entry(plan, rows, self.spec.cost(plan.patches), loop.create_future())
            for plan, rows in zip(plans, permit.rows, strict=True)
        ]

    def _too_late(self, entries: Sequence[Entry], limit_s: float) -> ServiceError:
        """Of a request that waited for others' entries, it is only known whether there is a group now."""
        if any(entry.num_losses for entry in entries) or self.state == "loading":
            return WorkersLost(f"the worker group was lost and not back within {limit_s:g} s")
        return _late(limit_s)

    async def _answer(
        self,
        tokens: Sequence[ItemTokens],
        options: EncodeOptions,
        record: RequestRecord,
        *,
        rows: Sequence[Rows] = (),
        is_shared: bool = False,
    ) -> Encoded:
        """`rows`: where the tokens are, if in the slab. `is_shared`: nobody will ever write to them."""
        views = [item.values for item in tokens]
        with record.stage("copy"):
            loan = self._lend(views, rows, options)
            embeddings = await off_loop(
                lambda: read_tokens(
                    views, self.dtype, options.tokens, options.param, is_shared=is_shared or loan is not None
                ),
                num_bytes=0 if loan else sum(view.nbytes for view in views),
            )
        return Encoded(replace(embeddings, loan=loan), [item.plan for item in tokens])

    def _lend(self, views: Sequence[NDArray[np.uint8]], rows: Sequence[Rows], options: EncodeOptions) -> Loan | None:
        """Of one large image, asked for as it is, while the largest one that may come has room beside it."""
        is_as_asked = options.may_lend and options.tokens == TokenOptions(self.dtype) and len(rows) == 1
        has_room = self.admission.allocator.has_room(options.settings.capacity.max_patches_per_image)
        return Loan(views[0], rows[0]) if is_as_asked and has_room and views[0].nbytes >= LOAN_BYTES else None

    async def unpack(self, body: Body, route: Route, limits: LimitSettings) -> UnpackedBody:
        """The images of a JSON body, read in a decode process; the caller closes the result."""
        try:
            async with asyncio.timeout(limits.request_timeout_s):
                return await self._decoders.unpack(body, route, limits, max_frames=self.spec.pos_emb_time)
        except TimeoutError:
            raise _late(limits.request_timeout_s) from None

    def take_over(self, settings: Settings) -> None:
        """Let other settings be in force for requests that come from now on. `service.reload` says which may differ."""
        self.settings = settings
        self.plan = self._make_plan()
        self.admission.limits = settings.limits
        self.cache.resize(settings.cache.max_bytes)
        self._dispatcher.take_over(settings)
        self.metrics.note_tiers(settings.capacity.patch_capacities)

    async def start(self) -> None:
        """Make slab, decode processes and control socket, and launch the groups. Returns before they are loaded.

        Raises MemoryShortError before any of it where this machine has no room for the tiers.
        """
        check_host(self.spec, self.settings, side="all" if self.settings.parallel.workers == "managed" else "front-end")
        self.plan = self._make_plan()
        for sentence in sentences(self.plan):
            log.info("%s", sentence)
        self.slab = Slab.create(self.layout)
        log.info("slab: %d patches, %d bytes, allocated and touched", self.layout.num_patches, self.layout.total_bytes)
        self._decoders = DecoderPool(self.spec.processor, self.settings, self.slab)
        self._groups = WorkerGroups(
            self.settings,
            self.spec,
            self.slab,
            on_ready=self._note_ready,
            on_lost=lambda group: self.metrics.note_loss(group.index, group.loss),
            on_progress=self._on_progress,
        )
        self._dispatcher = Dispatcher(
            self.settings,
            self.spec,
            self.slab,
            batcher=self._batcher,
            groups=self._groups,
            admission=self.admission,
            metrics=self.metrics,
        )
        self.failure.add_done_callback(self._fail_waiting)
        try:
            await self._groups.start()  # first: torch takes longest, and decode processes start meanwhile
            await self._decoders.start()
        except BaseException:  # a cancelled start leaves no process either
            await self.stop()
            raise

    async def drain(self) -> None:
        """Take nothing new; wait for what was accepted, up to the drain limit."""
        self.requests.close()
        await self.requests.drained(self.settings.limits.drain_timeout_s)

    async def abandon(self) -> None:
        """Answer what is still in flight with 503: the drain is over. Returns when that is done, or soon."""
        self.requests.abandon()
        await self._decoders.stop()  # a decode keeps its request's cancellation back until its process is done or ended
        await self.requests.drained(_ABANDON_TIMEOUT_S)

    async def stop(self, now: asyncio.Event | None = None) -> None:
        """End everything, in the order in which nobody is left writing to what is taken away.

        Once `now` is set, it does not wait for the ranks to end by themselves.
        """
        self.requests.close()
        self._batcher.fail_all(stopping)
        await self._groups.stop(now or asyncio.Event())
        await self._decoders.stop()
        self.slab.close()

    def describe_capacity(self) -> dict[str, Any]:
        """The plan in force, what tiers really take and ranks really hold, and what is in flight."""
        ranks = [
            {"group": group.index, "rank": number, **ready.model_dump()}
            for group in self._groups.ready
            for number, ready in sorted(group.readiness.items())
        ]
        plan = self.plan.as_dict()
        for tier in plan["tiers"]:
            measured = self._dispatcher.tier_times.measured(tier["patches"])
            tier["measured"] = None if measured is None else asdict(measured)
            graphed = max(ranks[0]["graph_tiers"], default=0) if ranks else None
            tier["execution"] = None if graphed is None else "graph" if tier["patches"] <= graphed else "eager"
        in_flight = {
            "free_patches": self.admission.allocator.num_free,
            "queued_images": len(self._batcher),
            "queued_s": self.admission.expected_wait_s(),
            "bytes": self.admission.bytes_in_flight,
        }
        counts = self.requests.counts
        requests = {**asdict(counts), "in_flight": counts.in_flight}
        limit = {"largest_tier_without_restart": self.started_with.capacity.max_patches_per_image}
        image = self.settings.image.model_dump(include={"orientation", "gray16"})
        return {**plan, **limit, "image": image, "ranks": ranks, "in_flight": in_flight, "requests": requests}

    def _make_plan(self) -> CapacityPlan:
        num_cores = len(os.sched_getaffinity(0))
        return plan_capacity(self.spec, self.settings, num_cores=num_cores, slab_patches=self.layout.num_patches)

    def _note_ready(self, group: WorkerGroup) -> None:
        for number, ready in sorted(group.readiness.items()):
            log.info(
                "group %d rank %d on %s: weights %d bytes planned, %d loaded; slab %d planned, %d mapped; "
                "scratch up to %d planned; resident now %d",
                *(group.index, number, ready.device, self.plan.weights_bytes, ready.weights_bytes),
                *(self.plan.slab_bytes, ready.slab_bytes, self.plan.scratch_bytes, ready.resident_bytes),
            )
        self._dispatcher.start(group)
        self.ready.set()

    def _fail_waiting(self, failure: asyncio.Future[Exception]) -> None:
        self._batcher.fail_all(lambda: WorkersLost("the worker groups are gone for good"))

    def _read_state(self) -> ServiceState:
        groups = self._groups
        slab_patches = self.admission.allocator.num_patches
        return ServiceState(
            queue_requests=self.requests.counts.in_flight,
            queue_images=len(self._batcher),
            queue_cost_seconds=self.admission.expected_wait_s(),
            queue_bytes=self.admission.bytes_in_flight,
            slab_patches=slab_patches,
            slab_used_patches=slab_patches - self.admission.allocator.num_free,
            ready=self.state == "ready",
            accepted_total=self.requests.counts.accepted,
            answered_total=self.requests.counts.answered,
            client_gone_total=self.requests.counts.client_gone,
            cache_hits_total=self.cache.num_hits,
            cache_misses_total=self.cache.num_misses,
            cache_coalesced_total=self.cache.num_coalesced,
            cache_evictions_total=self.cache.num_evictions,
            cache_bytes=self.cache.num_bytes,
            cache_max_bytes=self.cache.max_bytes,
            decoders_replaced_total=self._decoders.num_replaced,
            group_state={(str(i), each): each == now for i, now in groups.states.items() for each in GROUP_STATES},
            group_restarts_total={(str(index),): number for index, number in groups.restarts.items()},
        )


def _late(limit_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"no answer within {limit_s:g} s", numbers={"limit_s": limit_s})


def _files(item: Item, index: int) -> list[tuple[_Place, ImageBytes]]:
    """The image files of one item, each with its place."""
    if isinstance(item, VideoChunk):
        return [((index, f".frames[{number}]"), frame) for number, frame in enumerate(item.frames)]
    return [((index, ""), item)]


def _common_size(headers: Sequence[ImageHeader]) -> tuple[int, int]:
    """The one upright size of an image, or of all frames of a video chunk. Raises InvalidRequest naming both."""
    first = headers[0]
    for number, header in enumerate(headers):
        if header.size != first.size:
            raise InvalidRequest(
                f"a frame of {header.width} x {header.height} pixels, but the first one of its video chunk has "
                f"{first.width} x {first.height}",
                param=f".frames[{number}]",
                numbers={"size": list(header.size), "first_size": list(first.size)},
            )
    return first.size


async def _in_order(work: Mapping[_Place, Awaitable[Result]]) -> list[Result]:
    """All results, side by side. Raises the error of the first bad one, as ItemError, when every one has ended."""
    results = await asyncio.gather(*work.values(), return_exceptions=True)
    good: list[Result] = []
    for (index, part), result in zip(work, results, strict=True):
        if isinstance(result, ServiceError):
            raise ItemError(index, result.with_param(part))
        if isinstance(result, BaseException):
            raise result
        good.append(result)
    return good
