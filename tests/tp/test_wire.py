import json
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tp.settings import load_settings
from tp.slab import Run
from tp.spec import PUBLISHED_K3, Grid
from tp.wire import (
    HEADER_BYTES,
    KINDS,
    MAX_IMAGES_PER_BATCH,
    MAX_PAYLOAD_BYTES,
    PROTOCOL_VERSION,
    Batch,
    BatchImage,
    Contract,
    Done,
    Failed,
    Hello,
    Message,
    Progress,
    Ready,
    Refused,
    Stop,
    Welcome,
    WireError,
    contract_for,
    decode_header,
    decode_payload,
    encode,
)

CONTRACT = contract_for(load_settings().settings, PUBLISHED_K3, 2)
MESSAGES: list[Message] = [
    Hello(group=0, incarnation="a1", rank=1, pid=77, contract=CONTRACT, weights_fingerprint="ab" * 32),
    Welcome(slab_patches=8, slab_bytes=4096, patch_capacities=[4, 8]),
    Refused(reason="spec.num_layers: 27 here, 4 there — ünïcode"),
    Progress(loaded_bytes=0, total_bytes=894_717_952),
    Ready(
        device="cpu",
        weights_bytes=1,
        slab_bytes=4096,
        resident_bytes=2**40,
        warm_up_patches=4,
        warm_up_s=0.25,
    ),
    Batch(batch_id=3, images=[BatchImage(start=0, t=1, h=2, w=4), BatchImage(start=8, t=1, h=128, w=128)]),
    Done(batch_id=3, non_finite=[0, 1], forward_s=0.25, all_gather_s=1e-9),
    Failed(reason="out of memory", is_fatal=False),
    Stop(),
]


def decoded(frame: bytes) -> Message:
    kind, length = decode_header(frame[:HEADER_BYTES])
    assert length == len(frame) - HEADER_BYTES
    return decode_payload(kind, frame[HEADER_BYTES:])


def header(*, magic: bytes = b"TPV1", version: int = PROTOCOL_VERSION, kind: int = 9, length: int = 2) -> bytes:
    return struct.pack("!4sHHI", magic, version, kind, length)


def changed(**fields: object) -> Contract:
    return Contract.model_validate(CONTRACT.model_dump() | fields)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_what_is_sent_arrives(message: Message) -> None:
    assert decoded(encode(message)) == message


def test_every_kind_is_tested_and_has_a_number_of_its_own() -> None:
    assert {type(message) for message in MESSAGES} == set(KINDS.values())
    assert sorted(KINDS) == list(range(1, len(KINDS) + 1))


def test_the_largest_batch_fits_a_frame() -> None:
    images = [BatchImage(start=4 * 10**9, t=1, h=512, w=512)] * MAX_IMAGES_PER_BATCH
    assert len(encode(Batch(batch_id=2**53, images=images))) < MAX_PAYLOAD_BYTES


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (header(magic=b"HTTP"), "does not speak"),
        (
            header(version=PROTOCOL_VERSION + 1),
            f"protocol version {PROTOCOL_VERSION} here, {PROTOCOL_VERSION + 1} there",
        ),
        (header(kind=0), "unknown message kind 0"),
        (header(kind=max(KINDS) + 1), "unknown message kind"),
        (header(length=MAX_PAYLOAD_BYTES + 1), f"over the limit of {MAX_PAYLOAD_BYTES}"),
        (header()[:-1], "a frame header of 11 bytes; it has 12"),
        (header() + b"x", "a frame header of 13 bytes; it has 12"),
        (b"", "a frame header of 0 bytes"),
    ],
)
def test_a_header_that_is_not_ours_is_refused(frame: bytes, reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        decode_header(frame)


def test_the_longest_payload_is_announced_and_one_more_is_not_sent() -> None:
    assert decode_header(header(length=MAX_PAYLOAD_BYTES)) == (9, MAX_PAYLOAD_BYTES)
    with pytest.raises(WireError, match="over the limit"):
        encode(Refused(reason="x" * MAX_PAYLOAD_BYTES))


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_payload_cut_anywhere_is_refused(message: Message) -> None:
    payload = encode(message)[HEADER_BYTES:]
    for length in {0, 1, len(payload) // 2, len(payload) - 1}:
        with pytest.raises(WireError, match=type(message).__name__):
            decode_payload(message.kind, payload[:length])


@pytest.mark.parametrize(
    ("kind", "payload", "field"),
    [
        (2, {"slab_patches": 8, "slab_bytes": "4096", "patch_capacities": [4]}, "slab_bytes"),
        (2, {"slab_patches": 8, "slab_bytes": 0, "patch_capacities": [4]}, "slab_bytes"),
        (2, {"slab_patches": 8, "slab_bytes": 4096, "patch_capacities": []}, "patch_capacities"),
        (2, {"slab_bytes": 4096, "patch_capacities": [4]}, "slab_patches"),
        (9, {"extra": 1}, "extra"),
        (6, {"batch_id": 0, "images": []}, "images"),
        (6, {"batch_id": 0, "images": [{"start": 2, "t": 1, "h": 2, "w": 2}]}, "images.0.start"),
        (6, {"batch_id": 0, "images": [{"start": -4, "t": 1, "h": 2, "w": 2}]}, "images.0.start"),
        (6, {"batch_id": 0, "images": [{"start": 0, "t": 1, "h": 3, "w": 2}]}, "images.0.h"),
        (6, {"batch_id": 0, "images": [{"start": 0, "t": 0, "h": 2, "w": 2}]}, "images.0.t"),
        (6, {"batch_id": 0, "images": [{"start": 0, "t": 1, "h": 2, "w": 0}]}, "images.0.w"),
    ],
)
def test_a_payload_that_does_not_fit_names_the_field(kind: int, payload: object, field: str) -> None:
    with pytest.raises(WireError, match=rf"does not fit its fields: {field}"):
        decode_payload(kind, json.dumps(payload).encode())


def test_refusals_do_not_repeat_what_was_sent() -> None:
    with pytest.raises(WireError) as caught:
        decode_payload(3, b'{"reason": {"secret": "hunter2"}}')
    assert "hunter2" not in str(caught.value)


def test_too_many_images_are_refused() -> None:
    image = {"start": 0, "t": 1, "h": 2, "w": 2}
    payload = json.dumps({"batch_id": 0, "images": [image] * (MAX_IMAGES_PER_BATCH + 1)}).encode()
    with pytest.raises(WireError, match="images"):
        decode_payload(6, payload)


@hypothesis_settings(deadline=None)  # the machine may be busy
@given(st.binary(max_size=64) | st.builds(header, kind=st.integers(0, 65_535), length=st.integers(0, 2**32 - 1)))
def test_any_header_is_read_or_refused(frame: bytes) -> None:
    try:
        kind, length = decode_header(frame)
    except WireError:
        return
    assert kind in KINDS
    assert length <= MAX_PAYLOAD_BYTES


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(sorted({name for kind in KINDS.values() for name in kind.model_fields}))


@hypothesis_settings(deadline=None)  # the machine may be busy
@given(
    kind=st.integers(-1, 12),
    payload=st.binary(max_size=300)
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(FIELDS, JSON, max_size=4).map(lambda value: json.dumps(value).encode()),
)
def test_any_payload_is_read_or_refused(kind: int, payload: bytes) -> None:
    try:
        message = decode_payload(kind, payload)
    except WireError:
        return
    assert message.kind == kind


@hypothesis_settings(deadline=None)  # the machine may be busy
@given(message=st.sampled_from(MESSAGES), place=st.integers(0, 2000), value=st.integers(0, 255))
def test_a_frame_with_one_wrong_byte_is_read_or_refused(message: Message, place: int, value: int) -> None:
    frame = bytearray(encode(message))
    frame[place % len(frame)] = value
    try:
        kind, _ = decode_header(bytes(frame[:HEADER_BYTES]))
        decode_payload(kind, bytes(frame[HEADER_BYTES:]))
    except WireError:
        pass


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(WireError):
        decode_payload(1, b"[" * 500_000)


def test_an_images_run_and_grid_follow_from_its_fields() -> None:
    image = BatchImage(start=8, t=1, h=4, w=6)
    assert (image.run, image.grid) == (Run(8, 24), Grid(1, 4, 6))
    assert Batch(batch_id=0, images=[image, image]).num_patches == 48


def test_contract_of_the_same_settings_has_no_differences() -> None:
    assert CONTRACT.differences(contract_for(load_settings().settings, PUBLISHED_K3, 2)) == []


@pytest.mark.parametrize(
    ("fields", "difference"),
    [
        ({"protocol": 9}, f"protocol: {PROTOCOL_VERSION} here, 9 there"),
        ({"world_size": 4}, "world_size: 2 here, 4 there"),
        ({"dtype": "float32"}, "dtype: 'bfloat16' here, 'float32' there"),
        ({"rms_norm_eps": 2.0**-7}, "rms_norm_eps: 1.1920928955078125e-07 here, 0.0078125 there"),
    ],
)
def test_a_difference_names_the_field_and_both_values(fields: dict[str, Any], difference: str) -> None:
    assert CONTRACT.differences(changed(**fields)) == [difference]


def test_a_difference_inside_the_spec_names_its_path() -> None:
    spec = PUBLISHED_K3.as_dict()
    spec["num_layers"] = 4
    spec["processor"]["background"]["gray_value"] = 200
    assert CONTRACT.differences(changed(spec=spec)) == [
        "spec.num_layers: 27 here, 4 there",
        "spec.processor.background.gray_value: 180 here, 200 there",
    ]


def test_several_differences_come_together() -> None:
    assert len(CONTRACT.differences(changed(world_size=4, dtype="float32"))) == 2


def test_contract_survives_the_wire() -> None:
    hello = decoded(encode(MESSAGES[0]))
    assert isinstance(hello, Hello)
    assert CONTRACT.differences(hello.contract) == []
