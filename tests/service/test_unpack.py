import base64
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from service.errors import InvalidRequest, ServiceError, TooManyFrames, TooManyImages
from service.unpack import (
    MAX_JSON_VALUES,
    MAX_URL_CHARS,
    EmbeddingsBody,
    EmbeddingsOptions,
    EncodeBody,
    Frames,
    SGLangOptions,
    Source,
    decode_base64,
    unpack_embeddings,
    unpack_encode,
    unpack_sglang,
)

ABC = "QUJD"  # base64 of b"ABC"
BAD_INPUTS: tuple[Any, ...] = ([], [""], [[]], None, {}, 3, [1, 2], [[1]], {"text": "a"})


def encode(*items: Any, max_images: int = 4, allow_urls: bool = False) -> list[Source | Frames]:
    return unpack_encode(json.dumps({"images": items}).encode(), max_images=max_images, allow_urls=allow_urls)


def embeddings(**fields: Any) -> tuple[list[Source], EmbeddingsOptions]:
    return unpack_embeddings(json.dumps(fields).encode(), max_images=4)


@pytest.mark.parametrize(
    "item",
    [
        ABC,
        f"data:image/png;base64,{ABC}",
        f"DATA:IMAGE/PNG;name=a.png;BASE64,{ABC}",
        f"data:image/png;charset=utf-8;base64,{ABC}",
        f"data:image/png;base64;charset=utf-8,{ABC}",
        f"data:;base64,{ABC}",
        {"type": "image", "data": ABC},
        {"type": "image_url", "url": f"data:;base64,{ABC}"},
        {"type": "image_url", "url": {"url": ABC}},
        {"type": "image_url", "image_url": {"url": ABC}},
        {"image": ABC},
    ],
)
def test_every_form_of_an_item(item: Any) -> None:
    assert encode(item) == [b"ABC"]
    assert embeddings(input=item)[0] == [b"ABC"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("QUI", b"AB"), ("QUI=", b"AB"), ("QQ", b"A"), ("QQ=", b"A"), ("QU\n JD\r\n", b"ABC"), ("_-8", b"\xff\xef")],
)
def test_base64_without_padding_with_whitespace_and_url_safe(text: str, expected: bytes) -> None:
    assert decode_base64(text) == expected


@pytest.mark.parametrize("text", ["A", "QUJDA", "QQ===", "Q=JD", "QU.D", "ÄÖÜß", "a cat, sitting"])
def test_what_is_not_base64_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_base64(text)
    assert text not in caught.value.message


@pytest.mark.parametrize("uri", ["data:,x", "data:image/png,QUJD", "data:image/png;base64", "data:x;base64=1,QUJD"])
def test_data_uri_without_comma_or_base64_is_refused(uri: str) -> None:
    with pytest.raises(InvalidRequest, match="data URI"):
        encode(uri)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/a.png", " https://x/", "file:///etc/hostname", "ftp://x", "HTTP:x", "blob:x", "s3://a/b"]
)
def test_urls_are_refused_by_default(url: str) -> None:
    for item in (url, {"type": "image_url", "url": url}, {"image": url}):
        with pytest.raises(InvalidRequest, match="URL fetching is off"):
            encode(item)


@pytest.mark.parametrize("url", ["https://x.example/a?b#c", "http://x", "HTTPS:x", "https://ü.example/"])
def test_urls_where_they_are_allowed_are_given_back_in_their_places(url: str) -> None:
    items = [f" {url}\n", {"type": "image_url", "url": url}, {"type": "image_url", "image_url": {"url": url}}]
    assert encode(ABC, *items, allow_urls=True) == [b"ABC", url, url, url]
    body = json.dumps({"input": [f"data:;base64,{ABC}", {"image": url}]}).encode()
    assert unpack_embeddings(body, max_images=2, allow_urls=True)[0] == [b"ABC", url]


@pytest.mark.parametrize("url", ["file:///etc/hostname", "ftp://x", "blob:x", "s3://a/b", "javascript:x"])
def test_other_schemes_are_refused_where_urls_are_allowed(url: str) -> None:
    with pytest.raises(InvalidRequest, match="scheme") as caught:
        encode(ABC, url, allow_urls=True)
    assert caught.value.param == "images[1]"


def test_long_urls_are_refused() -> None:
    url = "https://" + "x" * (MAX_URL_CHARS - len("https://"))
    assert encode(url, allow_urls=True) == [url]
    with pytest.raises(InvalidRequest, match="characters"):
        encode(url + "x", allow_urls=True)


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({"type": "image", "data": ABC, "foo": 1}, "images[1].foo"),
        ({"type": "image", "data": 3}, "images[1].data"),
        ({"type": "image"}, "images[1].data"),
        ({"type": "image_url", "url": {"url": ABC, "detail": "low"}}, "images[1].url.detail"),
        ({"type": "image_url", "url": ABC, "image_url": ABC}, "images[1]"),
        ({"type": "image_url"}, "images[1]"),
        ({"type": ["image"], "data": ABC}, "images[1]"),
        ({"text": "a cat"}, "images[1]"),
        ({}, "images[1]"),
        ("", "images[1]"),
        ("data:;base64,", "images[1]"),
        ([], "images[1]"),
        (None, "images[1]"),
    ],
)
def test_param_names_the_bad_place(item: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        encode(ABC, item)
    assert caught.value.param == param


def video(*frames: Any) -> dict[str, Any]:
    return {"type": "video_chunk", "frames": frames}


def unpack_video(*items: Any, max_images: int = 8, **options: Any) -> list[Any]:
    return unpack_encode(json.dumps({"images": items}).encode(), max_images=max_images, max_frames=4, **options)


def test_a_video_chunk_is_a_tuple_of_its_frames() -> None:
    assert unpack_video(ABC, video("QUI=", {"image": ABC}), video(ABC)) == [b"ABC", (b"AB", b"ABC"), (b"ABC",)]


def test_a_video_chunk_without_frames_is_told_what_it_lacks() -> None:
    with pytest.raises(InvalidRequest, match="at least one frame is needed") as caught:
        unpack_video(video())
    assert caught.value.param == "images[0].frames"


def test_frames_may_be_urls_where_images_may() -> None:
    assert unpack_video(video(ABC, "https://x"), allow_urls=True) == [(b"ABC", "https://x")]
    with pytest.raises(InvalidRequest, match="URL fetching is off") as caught:
        unpack_video(video(ABC, "https://x"))
    assert caught.value.param == "images[0].frames[1]"


def test_more_frames_than_the_model_takes() -> None:
    assert len(unpack_video(video(*[ABC] * 4))[0]) == 4
    with pytest.raises(TooManyFrames) as caught:
        unpack_video(ABC, video(*["not base64!"] * 5))
    assert (caught.value.param, caught.value.numbers) == ("images[1]", {"num_frames": 5, "limit": 4})


def test_a_model_without_frames_takes_no_chunk_of_any_length() -> None:
    for frames in ([ABC], [ABC] * 9):
        with pytest.raises(InvalidRequest, match="images only") as caught:
            encode(video(*frames), max_images=9)
        assert caught.value.param == "images[0]"


def test_each_frame_counts_as_an_image() -> None:
    unpack_video(ABC, video(ABC, ABC), ABC, max_images=4)
    with pytest.raises(TooManyImages) as caught:
        unpack_video(ABC, video(ABC, ABC), ABC, max_images=3)
    assert caught.value.numbers == {"num_images": 4, "limit": 3}


@pytest.mark.parametrize(
    ("item", "param"),
    [
        (video(), "images[0].frames"),
        ({"type": "video_chunk"}, "images[0].frames"),
        ({"type": "video_chunk", "frames": ABC}, "images[0].frames"),
        ({**video(ABC), "fps": 2}, "images[0].fps"),
        (video(ABC, 3), "images[0].frames[1]"),
        (video(ABC, {"type": "image"}), "images[0].frames[1].data"),
        (video(video(ABC)), "images[0].frames[0]"),
        (video(ABC, "data:,x"), "images[0].frames[1]"),
    ],
)
def test_param_names_the_bad_place_in_a_chunk(item: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        unpack_video(item)
    assert caught.value.param == param


def test_embeddings_take_no_chunks() -> None:
    with pytest.raises(InvalidRequest, match="POST /v1/encode") as caught:
        embeddings(input=[ABC, video(ABC)])
    assert caught.value.param == "input[1]"


def test_too_many_images_is_told_before_they_are_looked_at() -> None:
    with pytest.raises(TooManyImages) as caught:
        encode(*["not base64!"] * 5)
    assert caught.value.numbers == {"num_images": 5, "limit": 4}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x89PNG\r\n\x1a\n",
        b"[]",
        b"null",
        b'"images"',
        b"{}",
        b'{"images": null}',
        b'{"images": []}',
        b'{"images": "QUJD"}',
        b'{"images": NaN}',
        b'{"images": ["QUJD"], "x": Infinity}',
        b'{"images": ["QUJD"], "dtype": "float32"}',
        b'{"images": ["\xff"]}',
        b'{"images": ["\\ud800"]}',
        b'{"images": ["QUJD"]} x',
        b"[" * 100_000,
        b'{"images":' * 100_000,
        b'{"images": [' + b"[]," * MAX_JSON_VALUES + b"[]]}",
    ],
)
def test_malformed_encode_bodies(body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        unpack_encode(body, max_images=MAX_JSON_VALUES * 2)


def test_last_of_duplicate_keys_wins() -> None:
    assert unpack_encode(b'{"images": ["QUJD"], "images": ["QUI"]}', max_images=1) == [b"AB"]


def test_embeddings_options() -> None:
    images, options = embeddings(
        input=[ABC, {"image": ABC}], model="k3", encoding_format="base64", dimensions=8, pooling="none", user="u"
    )
    assert images == [b"ABC", b"ABC"]
    assert options == EmbeddingsOptions("k3", "base64", 8, "none", normalized=False)
    assert embeddings(input=ABC, encoding_format=None)[1] == EmbeddingsOptions(None, "float", None, "mean", False)


def test_jinas_and_infinitys_fields() -> None:
    _, jina = embeddings(input=[{"image": ABC}], embedding_type="base64", normalized=True, task="retrieval.query")
    assert jina == EmbeddingsOptions(None, "base64", None, "mean", normalized=True)
    assert embeddings(input=[ABC], modality="image", encoding_format="float")[0] == [b"ABC"]
    assert embeddings(input=ABC, encoding_format="float", embedding_type="float")[1].encoding_format == "float"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": ["a cat"], "modality": "text"}, "modality", "image"),
        ({"input": [{"image": ABC}, {"text": "a cat"}]}, "input[1]", "not an image"),
        ({"input": [[1, 2, 3]]}, "input[0]", "not an image"),
        ({"input": ABC, "embedding_type": "binary"}, "embedding_type", "'float' or 'base64'"),
        ({"input": ABC, "embedding_type": "float", "encoding_format": "base64"}, "embedding_type", "differ"),
    ],
)
def test_what_is_not_an_image_is_told_so(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        embeddings(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [{"input": bad} for bad in BAD_INPUTS]
    + [{}]
    + [
        {"input": ABC, field: value}
        for field, value in (
            ("encoding_format", "int8"),
            ("dimensions", "8"),
            ("dimensions", True),
            ("dimensions", 0),
            ("pooling", "max"),
            ("model", "m" * 300),
            ("model", 3),
            ("truncate", True),
        )
    ],
)
def test_malformed_embeddings_bodies(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        embeddings(**fields)
    assert caught.value.param is not None


def test_long_unknown_names_are_cut() -> None:
    with pytest.raises(InvalidRequest) as caught:
        embeddings(input=ABC, **{"x" * 10_000: 1})
    assert len(caught.value.param or "") <= 64


def test_models_describe_themselves_for_openapi() -> None:
    for model in (EncodeBody, EmbeddingsBody):
        assert model.model_json_schema()["additionalProperties"] is False


_leaves = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([ABC, "data:,", "http:"])
)
_keys = (
    st.sampled_from(["images", "input", "type", "url", "image_url", "data", "image", "frames", "model", "dimensions"])
    | st.text()
)
_trees = st.recursive(_leaves, lambda inner: st.lists(inner) | st.dictionaries(_keys, inner), max_leaves=20)


@settings(max_examples=200, deadline=None)
@given(st.binary() | _trees.map(lambda tree: json.dumps(tree).encode()))
@example(b'{"images": [{"type": {"a": 1}}]}')
def test_fuzz_gives_nothing_but_images_or_client_errors(body: bytes) -> None:
    for unpack in (unpack_encode, unpack_embeddings):
        try:
            unpack(body, max_images=3)
        except ServiceError as error:
            assert error.status in (400, 422)
            json.dumps(error.as_dict())


@given(st.binary(min_size=1))
def test_round_trip(data: bytes) -> None:
    assert encode(base64.b64encode(data).decode(), base64.urlsafe_b64encode(data).decode().rstrip("=")) == [data, data]


SGLANG: dict[str, Any] = {
    "mm_items": [ABC],
    "req_id": "r",
    "num_parts": 2,
    "part_idx": 1,
    "prefill_host": "h",
    "embedding_port": 5000,
    "modality": "IMAGE",
}


def sglang(**changes: Any) -> tuple[list[Source], SGLangOptions]:
    return unpack_sglang(json.dumps({**SGLANG, **changes}).encode(), max_images=2)


def test_sglangs_images_and_options() -> None:
    found = sglang(mm_items=[f"data:;base64,{ABC}", {"url": ABC, "detail": "low"}], of_tomorrow=[1], modality="image")
    assert found == ([b"ABC", b"ABC"], SGLangOptions("r", 2, 1, "h", 5000))


@pytest.mark.parametrize("field", ["req_id", "num_parts", "part_idx", "prefill_host", "mm_items"])
def test_what_sglang_must_say(field: str) -> None:
    body = {name: value for name, value in SGLANG.items() if name != field}
    with pytest.raises(InvalidRequest) as caught:
        unpack_sglang(json.dumps(body).encode(), max_images=2)
    assert caught.value.param == field


def test_sglangs_other_transfer_backend_is_told_of_this_one() -> None:
    with pytest.raises(InvalidRequest, match="zmq_to_tokenizer"):
        sglang(embedding_port=None)


def test_too_many_of_sglangs_images() -> None:
    with pytest.raises(TooManyImages) as caught:
        sglang(mm_items=[ABC] * 3)
    assert caught.value.param == "mm_items"
