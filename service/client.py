"""The Python client: a picture in, its merged vision tokens and their geometry out, over HTTP.

    with Client("http://127.0.0.1:8000") as client:
        tokens = client.encode("photo.jpg").numpy()  # [num_tokens, hidden]

Needs httpx and numpy; Pillow for pictures and arrays and torch for `Embedding.torch` and `vllm_part`, when
they are used. Of the
service it needs `service.errors` alone: what the service answers is raised as the very class that it was there;
`NoAnswer` and its kinds are what happens where it does not answer.

Encoding changes nothing, so a call may be repeated. It is, until its deadline, for `Overloaded` and `NotReady` (and
`WorkersLost`) after the `Retry-After` that came with them, and five times for `Unreachable`, over about 12 s. Nothing
else is: another attempt would end in the same way, or cost the service the same work again.
"""

import asyncio
import base64
import contextlib
import datetime
import email.utils
import io
import json
import math
import os
import random
import threading
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypedDict, TypeVar, Unpack

import httpx
import numpy as np
import numpy.typing as npt

from service.errors import NotReady, Overloaded, ServiceError, read_error

if TYPE_CHECKING:
    import torch
    from PIL import Image

    Picture = str | os.PathLike[str] | bytes | bytearray | memoryview | Image.Image | npt.NDArray[np.generic]

Dtype = Literal["bfloat16", "float16", "float32"]
Result = TypeVar("Result")

_CONNECT_TIMEOUT_S = 10.0
_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0)  # where no Retry-After tells
_PROXY_RETRY = (429, 502, 503)  # of a proxy, when they come without an error object of ours
_SAFETENSORS = "application/vnd.safetensors"
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
_ORIENTATION = 0x0112  # the EXIF tag


class NoAnswer(Exception):
    """The service did not answer."""


class Unreachable(NoAnswer):
    """No connection, one that broke off, or a proxy's word that nobody is behind it."""

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlinePassed(NoAnswer):
    """No answer within the call's own deadline. Its cause, if any, is the last error that was worth another attempt."""


class UnexpectedAnswer(NoAnswer):
    """Something answered that is not this service."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """What became of the picture. Sizes are (width, height) in pixels."""

    grid_thw: tuple[int, int, int]  # patches: frames, rows, columns
    num_tokens: int
    original_size: tuple[int, int]
    encoded_size: tuple[int, int]
    padded_size: tuple[int, int]
    downscaled: bool  # by the service's capacity, beyond what the model's own rule does
    patches: int
    tier: int
    prompt: str | None  # what stands for it in the language model's prompt


@dataclass(frozen=True, slots=True)
class Embedding:
    """Merged tokens [num_tokens, hidden] in row-major order of the merged grid, or their mean [hidden]."""

    geometry: Geometry
    dtype: Dtype
    shape: tuple[int, ...]
    data: memoryview  # the values as they came: little-endian, row-major
    model: str
    request_id: str
    stages_ms: Mapping[str, float]  # where the service spent its time

    def numpy(self) -> npt.NDArray[Any]:
        """As an array, exactly: float16 and float32 as a view of `data`, bfloat16 widened to float32.

        (numpy has no bfloat16, and each of its values is a float32 too.)
        """
        if self.dtype != "bfloat16":
            return np.frombuffer(self.data, np.dtype(self.dtype)).reshape(self.shape)
        bits = np.frombuffer(self.data, np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(self.shape)

    def torch(self) -> "torch.Tensor":
        """As a CPU tensor of the answer's dtype: a view of `data`."""
        import torch  # noqa: PLC0415 - for those who have it

        return torch.frombuffer(self.data, dtype=getattr(torch, self.dtype)).reshape(self.shape)

    def vllm_part(self, uuid: str | None = None) -> dict[str, Any]:
        """As a content part of type `image_embeds` for vLLM's chat API: the tensor as torch.save writes it, in base64.

        `uuid` is what vLLM caches it by. Raises ValueError for a pooled vector.
        """
        import torch  # noqa: PLC0415 - for those who have it

        if len(self.shape) != 2:
            raise ValueError("a pooled vector stands for no image in a prompt: encode without `pooled`")
        file = io.BytesIO()
        torch.save(self.torch(), file)
        part = {"type": "image_embeds", "image_embeds": base64.b64encode(file.getbuffer()).decode()}
        return part if uuid is None else {**part, "uuid": uuid}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind the service."""

    id: str
    dtype: Dtype  # compute dtype: that of answers, where none is asked for
    dimensions: int


class Options(TypedDict, total=False):
    """How to encode; what is left out is the service's default."""

    dtype: Dtype
    pooled: bool  # the float32 mean of the tokens in place of all of them
    normalize: bool  # to unit length
    oversize: Literal["refuse", "downscale"]
    deadline_s: float  # for the whole call with its retries and waits, in place of the client's


Outcome = Embedding | ServiceError | NoAnswer | OSError | ValueError


class AsyncClient:
    """A client for one event loop, of the service at `url`. Raises ValueError unless that is http or https.

    More keywords are httpx.AsyncClient's, such as `verify`.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        deadline_s: float = 300.0,
        retry: bool = True,
        **http_options: Any,
    ) -> None:
        if httpx.URL(url).scheme not in ("http", "https"):
            raise ValueError(f"{url} does not start with http:// or https://")
        self._deadline_s = deadline_s
        self._retry = retry
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {api_key}"} if api_key else None,
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT_S),
            **http_options,
        )

    async def encode(self, picture: "Picture", **options: Unpack[Options]) -> Embedding:
        """The embedding of a file (its path or its bytes), a Pillow image, or an array.

        An array is uint8 [height, width], [height, width, 3] or [height, width, 4] (RGB, RGBA), or uint16
        [height, width]. Pictures and arrays travel as PNG, without loss. Raises ServiceError and NoAnswer, OSError for
        a file that cannot be read, ValueError for a picture that has no PNG form.
        """
        deadline_s = options.pop("deadline_s", self._deadline_s)
        is_pooled = options.pop("pooled", False)
        answer = await self._call(
            "POST",
            "/v1/encode",
            deadline_s=deadline_s,
            params={
                "output": "pooled" if is_pooled else "tokens",
                **{name: value for name, value in options.items() if value is not None},
            },
            headers={"accept": _SAFETENSORS},
            content=await asyncio.to_thread(_file_of, picture),
        )
        return _read_embedding(answer, is_pooled=is_pooled)

    async def encode_batch(
        self, pictures: Iterable["Picture"], *, concurrency: int = 8, **options: Unpack[Options]
    ) -> AsyncIterator[Outcome]:
        """For each picture, in order, its embedding, or as a value what `encode` would have raised.

        `pictures` may be endless: no more than `concurrency` of them are in work at any time.
        """
        waiting: deque[asyncio.Task[Outcome]] = deque()
        try:
            for picture in pictures:
                if len(waiting) == concurrency:
                    yield await waiting.popleft()
                waiting.append(asyncio.create_task(self._outcome(picture, options)))
            while waiting:
                yield await waiting.popleft()
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def model(self) -> ServedModel:
        """The one model that the service serves."""
        answer = await self._call("GET", "/v1/models", deadline_s=self._deadline_s)
        with _expected(answer):
            (found,) = json.loads(answer.content)["data"]
            return ServedModel(found["id"], found["dtype"], found["dimensions"])

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _outcome(self, picture: "Picture", options: Options) -> Outcome:
        try:
            return await self.encode(picture, **options)
        except (ServiceError, NoAnswer, OSError, ValueError) as error:
            return error

    async def _call(self, method: str, path: str, *, deadline_s: float, **request: Any) -> "_Answer":
        """The 200 answer, of as many attempts as the deadline allows."""
        clock = asyncio.get_running_loop().time
        until = clock() + deadline_s
        pauses = iter(_PAUSES_S)
        last = None
        try:
            async with asyncio.timeout_at(until):
                while True:
                    try:
                        return await self._attempt(method, path, **request)
                    except (Overloaded, NotReady, Unreachable) as error:
                        pause_s = error.retry_after_s
                        if pause_s is None:
                            pause_s = next(pauses, math.inf) * random.uniform(0.5, 1)
                        if not self._retry or clock() + pause_s > until:
                            raise
                        last = error
                        await asyncio.sleep(pause_s)
        except TimeoutError:
            raise DeadlinePassed(f"no answer within {deadline_s:g} s") from last

    async def _attempt(self, method: str, path: str, **request: Any) -> "_Answer":
        body = bytearray()  # and not bytes, so that arrays and tensors may be views of it that can be written to
        try:
            async with self._http.stream(method, path, **request) as response:
                async for chunk in response.aiter_bytes():
                    body += chunk
        except (httpx.NetworkError, httpx.TimeoutException, httpx.RemoteProtocolError, httpx.ProxyError) as error:
            raise Unreachable(f"{self._http.base_url}: {error or type(error).__name__}") from error
        if response.status_code != 200:
            raise _error_of(response, body)
        return _Answer(response.headers, body)


class Client:
    """`AsyncClient` for code that is not async: the same calls, from any thread, also where an event loop runs."""

    def __init__(self, url: str, **options: Any) -> None:
        self._pid = os.getpid()
        self._client = AsyncClient(url, **options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tpvision-client", daemon=True)
        self._thread.start()

    def encode(self, picture: "Picture", **options: Unpack[Options]) -> Embedding:
        """See `AsyncClient.encode`."""
        return self._run(self._client.encode(picture, **options))

    def encode_batch(
        self, pictures: Iterable["Picture"], *, concurrency: int = 8, **options: Unpack[Options]
    ) -> Iterator[Outcome]:
        """See `AsyncClient.encode_batch`."""
        waiting: deque[Future[Outcome]] = deque()
        try:
            for picture in pictures:
                if len(waiting) == concurrency:
                    yield waiting.popleft().result()
                waiting.append(self._submit(self._client._outcome(picture, options)))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()

    def model(self) -> ServedModel:
        """See `AsyncClient.model`."""
        return self._run(self._client.model())

    def close(self) -> None:
        """Give up what is under way, close the connections and end the thread."""
        if self._loop.is_closed():
            return
        self._run(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    def _run(self, work: Coroutine[Any, Any, Result]) -> Result:
        future = self._submit(work)
        try:
            return future.result()
        finally:
            future.cancel()  # where Ctrl-C ended the wait; else it does nothing

    def _submit(self, work: Coroutine[Any, Any, Result]) -> "Future[Result]":
        if os.getpid() != self._pid:
            work.close()
            raise RuntimeError(
                "this client was made before a fork and its thread is not here: make one in each process"
            )
        return asyncio.run_coroutine_threadsafe(work, self._loop)


@dataclass(frozen=True, slots=True)
class _Answer:
    headers: httpx.Headers
    content: bytearray


def _file_of(picture: "Picture") -> bytes:
    """The image file to send."""
    if isinstance(picture, str | os.PathLike):
        return Path(picture).read_bytes()
    if isinstance(picture, bytes | bytearray | memoryview):
        return bytes(picture)
    from PIL import Image  # noqa: PLC0415 - for those who have pictures in memory

    return _png_of(Image.fromarray(_checked(picture)) if isinstance(picture, np.ndarray) else picture)


def _checked(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    is_colour = array.ndim == 3 and array.shape[2] in (3, 4)
    if (array.dtype == np.uint8 and (is_colour or array.ndim == 2)) or (array.dtype == np.uint16 and array.ndim == 2):
        return array
    raise ValueError(
        f"{array.dtype} {list(array.shape)} is no picture: it takes uint8 [height, width], [height, width, 3] or "
        "[height, width, 4], or uint16 [height, width]"
    )


def _png_of(image: "Image.Image") -> bytes:
    if image.mode not in _PNG_MODES:
        raise ValueError(f"a picture of mode {image.mode} has no PNG form: convert it first, to RGB say")
    exif = image.getexif()
    for tag in list(exif):
        if tag != _ORIENTATION:
            del exif[tag]
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1, exif=exif)
    return file.getvalue()


def _read_embedding(answer: _Answer, *, is_pooled: bool) -> Embedding:
    body = answer.content
    with _expected(answer):
        data_start = 8 + int.from_bytes(body[:8], "little")
        header = json.loads(body[8:data_start])
        about, tensor = header["__metadata__"], header["embeddings"]
        (image,) = json.loads(about["images"])
        start, end = (data_start + offset for offset in tensor["data_offsets"])
        return Embedding(
            geometry=_read_geometry(image),
            dtype=about["dtype"],
            shape=tuple(tensor["shape"][1:] if is_pooled else tensor["shape"]),
            data=memoryview(body)[start:end],
            model=about["model"],
            request_id=about["request_id"],
            stages_ms=_read_stages(answer.headers.get("server-timing", "")),
        )


def _read_geometry(image: Mapping[str, Any]) -> Geometry:
    names = [field.name for field in fields(Geometry)]
    values: dict[str, Any] = {
        name: tuple(image[name]) if isinstance(image[name], list) else image[name] for name in names
    }
    return Geometry(**values)


def _read_stages(timing: str) -> dict[str, float]:
    parts = (part.strip().partition(";dur=") for part in timing.split(",") if part)
    return {stage: float(duration) for stage, _, duration in parts}


@contextlib.contextmanager
def _expected(answer: _Answer) -> Iterator[None]:
    """Whatever reading a 200 answer stumbles over, it was not this service's."""
    try:
        yield
    except (ValueError, LookupError, TypeError) as error:
        kind = answer.headers.get("content-type")
        raise UnexpectedAnswer(f"{len(answer.content)} bytes of {kind}, which are not this service's answer") from error


def _error_of(response: httpx.Response, body: bytearray) -> ServiceError | NoAnswer:
    retry_after_s = _read_retry_after(response.headers.get("retry-after", ""))
    with contextlib.suppress(ValueError):
        error = read_error(json.loads(body), retry_after_s=retry_after_s)
        if error is not None:
            error.add_note(f"x-request-id: {response.headers.get('x-request-id')}")
            return error
    message = f"{response.url} answered {response.status_code} without an error object of this service"
    if response.status_code in _PROXY_RETRY:
        return Unreachable(message, retry_after_s=retry_after_s)
    return UnexpectedAnswer(message)


def _read_retry_after(value: str) -> float | None:
    """Seconds; the header holds them, or a date (RFC 9110 section 10.2.3)."""
    if value.strip().isdecimal():
        return float(value)
    try:
        date = email.utils.parsedate_to_datetime(value)
        return max(0.0, (date - datetime.datetime.now(datetime.UTC)).total_seconds())
    except (ValueError, TypeError):  # no date, or one without a time zone
        return None
