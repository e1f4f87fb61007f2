"""The examples of the OpenAPI document: requests, answers and errors, as they are sent and as they come.

tests/test_openapi.py sends every request, checks what comes against the answer here, and every error's words against
the code that says them. Answers are those of a model of width 4: Kimi K3's vectors have 7,168 numbers.
"""

import json
from typing import Any

from service.errors import BY_CODE
from service.unpack import EXAMPLE_IMAGE

# One pixel as GIF. All of its bytes are ASCII, so that a JSON document can hold the file itself.
RAW_IMAGE = "GIF89a\x01\0\x01\0\0\0\0,\0\0\0\0\x01\0\x01\0\0\x02\x02D\x01\0;"
_BASE64 = EXAMPLE_IMAGE.partition(",")[2]
_CHUNK = {"type": "video_chunk", "frames": [EXAMPLE_IMAGE, EXAMPLE_IMAGE]}


def _example(summary: str, value: Any) -> dict[str, Any]:
    return {"summary": summary, "value": value}


RAW_REQUESTS = {"image": _example("One image file as it is", RAW_IMAGE)}
MULTIPART_REQUESTS = {"files": _example("Several files, answered all or none", {"file": [RAW_IMAGE, RAW_IMAGE]})}
ENCODE_REQUESTS = {
    "data_uri": _example("A data URI", {"images": [EXAMPLE_IMAGE]}),
    "base64": _example("Base64 alone", {"images": [_BASE64]}),
    "image": _example("An object of type image", {"images": [{"type": "image", "data": _BASE64}]}),
    "image_url": _example("An object of type image_url", {"images": [{"type": "image_url", "url": EXAMPLE_IMAGE}]}),
    "openai_image_url": _example(
        "OpenAI's image_url", {"images": [{"type": "image_url", "image_url": {"url": EXAMPLE_IMAGE}}]}
    ),
    "jina_image": _example("Jina's object", {"images": [{"image": _BASE64}]}),
    "video_chunk": _example("Frames that are encoded together", {"images": [_CHUNK]}),
    "several": _example("Several items, answered all or none", {"images": [EXAMPLE_IMAGE, _CHUNK]}),
}
EMBEDDINGS_REQUESTS = {
    "openai": _example("OpenAI's; `model` may be named too", {"input": EXAMPLE_IMAGE, "encoding_format": "float"}),
    "openai_base64": _example(
        "OpenAI's, as its Python client asks", {"input": [EXAMPLE_IMAGE], "encoding_format": "base64"}
    ),
    "jina": _example(
        "Jina's", {"input": [{"image": _BASE64}], "embedding_type": "float", "normalized": True, "task": "retrieval"}
    ),
    "infinity": _example("Infinity's", {"input": [EXAMPLE_IMAGE], "modality": "image"}),
    "tokens": _example("Merged tokens in place of their mean", {"input": EXAMPLE_IMAGE, "pooling": "none"}),
}

_ID = "7da4e98635864c59b7e4de286372ff36"
_MODEL = "Kimi-K3"
_TOKEN = [0.13852279, -1.0673413, 1.1080223, -0.6871672]
_TOKEN_BASE64 = "69gNPqSeiL+t040/Meovvw=="
_UNIT_TOKEN = [0.08193434, -0.6313178, 0.65538, -0.40645]
GEOMETRY: dict[str, Any] = {
    "grid_thw": [1, 2, 2],
    "num_tokens": 1,
    "start": 0,
    "end": 1,
    "original_size": [1, 1],
    "encoded_size": [1, 1],
    "padded_size": [28, 28],
    "downscaled": False,
    "patches": 4,
    "tier": 1024,
    "prompt": "<|media_begin|>image 1x1<|media_content|><|media_pad|><|media_end|>",
}
_CHUNK_GEOMETRY = {
    **GEOMETRY,
    "grid_thw": [2, 2, 2],
    "patches": 8,
    "prompt": "<|media_begin|>video<|media_content|><|media_pad|><|media_end|>",
}
_USAGE = {"prompt_tokens": 1, "total_tokens": 1}


def _encoded(image: dict[str, Any], **embedding: Any) -> dict[str, Any]:
    about = {"id": _ID, "object": "tpvision.encoding", "created": 1796053941, "model": _MODEL, "dtype": "float32"}
    return {**about, "images": [{**image, **embedding}], "usage": _USAGE}


def _listed(**embedding: Any) -> dict[str, Any]:
    data = [{"object": "embedding", "index": 0, **embedding}]
    return {"object": "list", "data": data, "model": _MODEL, "usage": _USAGE, "images": [GEOMETRY]}


ENCODE_ANSWERS = {
    "tokens": _example("A row a token", _encoded(GEOMETRY, embedding=[_TOKEN])),
    "tokens_base64": _example("encoding_format=base64", _encoded(GEOMETRY, embedding=_TOKEN_BASE64, shape=[1, 4])),
    "pooled": _example("output=pooled", _encoded(GEOMETRY, embedding=_TOKEN)),
    "pooled_base64": _example("output=pooled&encoding_format=base64", _encoded(GEOMETRY, embedding=_TOKEN_BASE64)),
    "video_chunk": _example("A video chunk", _encoded(_CHUNK_GEOMETRY, embedding=[_TOKEN])),
}
EMBEDDINGS_ANSWERS = {
    "float": _example("A mean vector an image", _listed(embedding=_TOKEN)),
    "base64": _example("encoding_format: base64", _listed(embedding=_TOKEN_BASE64)),
    "normalized": _example("normalized: true", _listed(embedding=_UNIT_TOKEN)),
    "tokens": _example("pooling: none", _listed(embedding=[_TOKEN])),
}
HANDOFF_ANSWER = {"id": _ID, "model": _MODEL, "dtype": "bfloat16", "images": [GEOMETRY]}
SGLANG_REQUESTS = {
    "part": _example(
        "SGLang's, with the fields that are read",
        {
            "mm_items": [EXAMPLE_IMAGE],
            "req_id": "6f1c_local_part_0",
            "num_parts": 1,
            "part_idx": 0,
            "modality": "IMAGE",
            "prefill_host": "127.0.0.1",
            "embedding_port": 40001,
        },
    )
}
MODELS_ANSWER = {
    "object": "list",
    "data": [
        {
            "id": _MODEL,
            "object": "model",
            "created": 1796053932,
            "owned_by": "tpvision",
            "model_type": "kimi_k3",
            "dtype": "bfloat16",
            "dimensions": 7168,
        }
    ],
}
HEADERS = {
    "metadata": json.dumps(
        {
            "id": _ID,
            "created": 1796053941,
            "model": _MODEL,
            "data": [
                {
                    "index": 0,
                    "embed_dtype": "float32",
                    "endianness": "little",
                    "start": 0,
                    "end": 16,
                    "shape": [1, 4],
                }
            ],
            "usage": _USAGE,
        }
    ),
    "x-tpvision-images": json.dumps([GEOMETRY]),
    "etag": 'W/"b1b0ac29d7f61bd7d80fb7db9a8b0f3cb3b20f6b1a0d2e3a1b8d5c6f7e9a0b1c"',
    "server-timing": "receive;dur=0.334, header;dur=0.769, decode;dur=0.642, preprocess;dur=0.147, queue;dur=0.058, "
    "forward;dur=22.615, all_gather;dur=2.595, copy;dur=0.250, encode_response;dur=0.213",
}


def _error(code: str, message: str, param: str | None = None, **numbers: Any) -> dict[str, Any]:
    return BY_CODE[code](message, param=param, numbers=numbers).as_dict()


# By code, in the order of their status.
ERRORS = {
    body["error"]["code"]: body
    for body in (
        _error("invalid_request", "unknown option: colour", "colour"),
        _error("too_many_images_for_form", "npy holds one image; send one a request, or ask for another form"),
        _error("unauthorized", "this service needs an API key, as `Authorization: Bearer KEY`"),
        _error("not_found", "there is nothing at this path; the routes are at /docs"),
        _error("model_not_found", f"this service serves {_MODEL}", "model"),
        _error("method_not_allowed", "this path does not take this method"),
        _error(
            "not_acceptable",
            "none of the answer forms is acceptable to you; there are application/vnd.safetensors, "
            "application/octet-stream, application/x-npy, application/json",
        ),
        _error("request_timeout", "the body was not complete after 60 s", limit_s=60),
        _error("body_too_large", "the body has more than 67108864 bytes", limit_bytes=67108864),
        _error(
            "unsupported_image",
            "not an image of a format that is read; send JPEG, PNG, GIF, WebP, BMP, TIFF or AVIF",
            "images[0]",
        ),
        _error("undecodable_image", "the PNG image is broken and cannot be decoded", "images[0]"),
        _error(
            "image_too_large",
            "the image has 400000000 pixels, the limit is 89478485",
            "images[0]",
            pixels=400000000,
            limit=89478485,
        ),
        _error("decode_timeout", "not decoded after 20 s", "images[0]", limit_s=20),
        _error(
            "too_many_patches",
            "the image has 20736 patches, the limit is 16384; 1792 x 1792 pixels would fit",
            "images[0]",
            patches=20736,
            limit=16384,
            downscaled_size=[1792, 1792],
        ),
        _error("too_many_images", "65 images in one request; the limit is 64", "images", num_images=65, limit=64),
        _error(
            "too_many_frames",
            "5 frames in one video chunk; the model takes at most 4",
            "images[0]",
            num_frames=5,
            limit=4,
        ),
        _error(
            "request_too_large",
            "the request's images have 81920 patches in all, but only 65536 fit at once",
            patches=81920,
            limit=65536,
        ),
        _error(
            "response_too_large",
            "the JSON answer would have about 352321536 bytes, over the limit of 67108864; ask for a binary form",
            bytes=352321536,
            limit=67108864,
        ),
        _error("url_fetch_failed", "the URL's server answered with status 404", "images[0]", upstream_status=404),
        _error("push_failed", "the receiver did not take the embeddings within 30 s", limit_s=30),
        _error("overloaded", "the queue is longer than 60 s; try again in 4 s"),
        _error("headers_too_large", "request line and headers have more than 32768 bytes", limit_bytes=32768),
        _error("internal_error", "an internal error; the log has it under this answer's x-request-id"),
        _error("non_finite_output", "the embedding of this image holds NaN or infinity", "images[0]"),
        _error("encode_failed", "the worker group was lost 2 times while it encoded this image", "images[0]"),
        _error("store_failed", "the embeddings could not be written to the encoder cache; the log has the reason"),
        _error("not_ready", "the service is stopping"),
        _error("workers_lost", "the worker group was lost and not back within 300 s"),
        _error("deadline_exceeded", "no answer within 300 s", limit_s=300),
    )
}
