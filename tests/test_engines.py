"""What is handed to LLM engines, read by the engines' own code: single modules of their published wheels.

`pytest -m slow tests/test_engines.py` downloads the wheels (0.4 GB, without what they depend on). A module is executed
by itself: what it imports and is not here is an empty class, unless the test gives it something.
"""

import ast
import asyncio
import base64
import contextlib
import itertools
import json
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch
import zmq
import zmq.asyncio
from running import GOLDEN, RunningService, images_of

from service.client import Client

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FIRST, SECOND = ((GOLDEN / "images" / f"{name}.png").read_bytes() for name in ("rgb_64x48", "gray_70x45"))


class Anything(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent

    def __getitem__(cls, parameter: Any) -> Any:
        return cls


class Absent(metaclass=Anything):
    """In place of what an engine imports and is not here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return Absent


@dataclass
class Engine:
    """A wheel whose modules can be executed one by one."""

    path: Path

    def load(self, name: str, *, only: Sequence[str] = (), **given: Any) -> Any:
        """A module, or of a large one only some definitions, with its imports; `given` stands for absent ones."""
        with zipfile.ZipFile(self.path) as archive:
            source = archive.read(name.replace(".", "/") + ".py")
        module = types.ModuleType(name)
        module.__package__ = name.rpartition(".")[0]
        sys.modules[name] = module  # where dataclasses and pickles look
        for parent in itertools.accumulate(name.split(".")[:-1], "{}.{}".format):
            sys.modules.setdefault(parent, types.ModuleType(parent)).__path__ = []
        for node in ast.parse(source).body:
            is_import = isinstance(node, ast.Import | ast.ImportFrom)
            if only and not is_import and getattr(node, "name", None) not in only:
                continue
            try:
                exec(compile(ast.Module([node], []), name, "exec"), module.__dict__)
            except ImportError:
                assert isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names:
                    bound = (alias.asname or alias.name).partition(".")[0]
                    module.__dict__[bound] = given.get(bound, Absent)
        return module


@pytest.fixture(scope="module")
def download(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Engine]]:
    def fetch(release: str) -> Engine:
        folder = tmp_path_factory.mktemp("wheel")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), release]
        subprocess.run(command, check=True, timeout=600)
        (path,) = folder.glob("*.whl")
        return Engine(path)

    yield fetch
    for name in [name for name in sys.modules if name.partition(".")[0] in ("vllm", "sglang")]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def vllm(download: Callable[[str], Engine]) -> Engine:
    return download("vllm==0.33.0")


@pytest.fixture(scope="module")
def sglang(download: Callable[[str], Engine]) -> Engine:
    return download("sglang==0.5.23")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module", params=["tiny-k3-bf16", "tiny-kimivl-bf16"])
def service(request: pytest.FixtureRequest, start_service: Any, cache: Path) -> RunningService:
    started: RunningService = start_service(
        *("--model", str(GOLDEN / request.param)),
        TPVISION_HANDOFF__VLLM_ENCODER_CACHE_DIR=str(cache),
        TPVISION_HANDOFF__SGLANG_RECEIVERS="127.0.0.1",
    )
    return started


def expected(service: RunningService, *pictures: bytes) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    answer = service.client.post("/v1/encode", files=[("file", picture) for picture in pictures])
    return safetensors.torch.load(answer.content)["embeddings"], images_of(answer)


def test_vllms_connector_loads_the_cache(
    vllm: Engine, service: RunningService, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = vllm.load(
        "vllm.distributed.ec_transfer.ec_connector.example_connector", gpu_sync_allowed=contextlib.nullcontext
    )
    platform = types.SimpleNamespace(device_type="cpu", is_cuda_alike=lambda: False)
    monkeypatch.setitem(sys.modules, "vllm.platforms", types.SimpleNamespace(current_platform=platform))
    uuid = f"sku-1:{service.url}".replace("/", "_")
    request = types.SimpleNamespace(
        mm_features=[types.SimpleNamespace(identifier=uuid)], get_num_encoder_embeds=lambda index: 6
    )
    scheduler, worker = (module.ECExampleConnector.__new__(module.ECExampleConnector) for _ in range(2))
    for connector in (scheduler, worker):
        connector.__dict__.update(_storage_path=str(cache), is_consumer=True, _mm_datas_need_loads={})
    assert not scheduler.has_cache_item(uuid)
    answer = service.client.post("/v1/encoder_cache", content=FIRST, params={"id": uuid})
    assert answer.status_code == 200, answer.text
    assert scheduler.has_cache_item(uuid)
    scheduler.update_state_after_alloc(request, 0)
    metadata = scheduler.build_connector_meta(None)
    worker._get_connector_metadata = lambda: metadata
    encoder_cache: dict[str, torch.Tensor] = {}
    worker.start_load_caches(encoder_cache)
    assert torch.equal(encoder_cache[uuid], expected(service, FIRST)[0])


def test_vllm_calls_an_image_what_its_part_does(vllm: Engine) -> None:
    module = vllm.load("vllm.multimodal.processing.inputs")
    items = types.SimpleNamespace(get_all_items_for_hash=lambda: [object()])
    inputs = module.ProcessorInputs([], {"image": items}, {"image": ["sku-1"]})
    assert inputs.get_mm_hashes("model", "blake3") == {"image": ["sku-1"]}


def test_vllm_reads_the_clients_part(vllm: Engine, service: RunningService) -> None:
    module = vllm.load(
        "vllm.multimodal.media.image",
        pybase64=base64,
        check_sparse_tensor_invariants_threadsafe=contextlib.nullcontext,
        safe_to_dense=lambda tensor, parameter: tensor,
    )
    with Client(service.url, trust_env=False) as client:
        part = json.loads(json.dumps(client.encode(FIRST).vllm_part()))
    assert part["type"] == "image_embeds"
    found = module.ImageEmbeddingMediaIO().load_base64("", part["image_embeds"])
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected(service, FIRST)[0])


class Session:
    """aiohttp's, as far as SGLang uses it here."""

    def __init__(self, **_: Any) -> None:
        self._client = httpx.AsyncClient(timeout=60, trust_env=False)

    async def __aenter__(self) -> "Session":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def post(self, url: str, json: Any) -> Any:
        answer = await self._client.post(url, json=json)

        async def body() -> Any:
            return answer.json()

        return types.SimpleNamespace(status=answer.status_code, json=body)


def test_sglang_asks_and_receives(sglang: Engine, service: RunningService) -> None:
    modality = sglang.load("sglang.srt.multimodal.modality").Modality
    sglang.load("sglang.srt.managers.schedule_batch", only=["nothing"], Modality=modality)
    common = sglang.load("sglang.srt.utils.common", only=["SafeUnpickler", "safe_pickle_loads"])
    module = sglang.load(
        "sglang.srt.disaggregation.encoder.receiver",
        Modality=modality,
        aiohttp=types.SimpleNamespace(ClientSession=Session, ClientTimeout=Absent),
        EncoderDispatchErrorReq=types.SimpleNamespace,
        safe_pickle_loads=common.safe_pickle_loads,
    )

    async def ask(*pictures: bytes) -> Any:
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.PULL)
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        receiver = module.MMReceiverHTTP.__new__(module.MMReceiverHTTP)
        receiver.__dict__.update(host="127.0.0.1", encode_urls=[service.url] * 2, model_type="kimi_k3")
        uris = ["data:image/png;base64," + base64.b64encode(picture).decode() for picture in pictures]
        items = [{"url": uri, "modality": modality.IMAGE, "content_hash": None} for uri in uris]
        received = asyncio.create_task(receiver._recv_mm_data("6f1c", socket, Processor, "a prompt"))
        try:
            error = await receiver.encode("6f1c", items, port, "encode")
            return error if error is not None else await asyncio.wait_for(received, 60)
        finally:
            received.cancel()
            await asyncio.gather(received, return_exceptions=True)
            socket.close(linger=0)
            context.term()

    class Processor:
        @staticmethod
        def get_validated_mm_data(prompt: str, embeddings: Any, **meta: Any) -> Any:
            return embeddings, meta

    # Two images over two encoders: two parts, each encoded alone.
    embeddings, meta = asyncio.run(ask(FIRST, SECOND))
    tensors, images = zip(*(expected(service, each) for each in (FIRST, SECOND)), strict=True)
    assert torch.equal(embeddings[modality.IMAGE], torch.cat(tensors))
    assert meta["img_grid_thw"].tolist() == [image["grid_thw"] for (image,) in images]
    is_k3 = service.client.get("/v1/models").json()["data"][0]["model_type"] == "kimi_k3"
    assert meta.get("original_image_sizes") == ([[64, 48], [70, 45]] if is_k3 else None)
    error = asyncio.run(ask(b"no image"))
    assert (error.error_msg.startswith("not an image"), error.error_code) == (True, 415)
