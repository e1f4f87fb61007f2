from dataclasses import replace
from typing import Any

import pytest

from service.geometry import plan_image
from service.prompts import prompt_text
from tp.spec import PUBLISHED_K3, EncoderSpec

K25 = replace(PUBLISHED_K3, model_type="kimi_k25", projector="pre_norm")
KIMI_VL = replace(K25, model_type="kimi_vl", pos_emb_time=1, processor=replace(PUBLISHED_K3.processor, rule="kimi_vl"))


def prompt(spec: EncoderSpec, **options: Any) -> str | None:
    return prompt_text(spec, plan_image(8000, 6000, spec.processor, (65_712,), "refuse", **options))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (PUBLISHED_K3, "<|media_begin|>image 8000x6000<|media_content|><|media_pad|><|media_end|>"),
        (K25, "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"),
        (KIMI_VL, "<|media_start|>image<|media_content|><|media_pad|><|media_end|>"),
    ],
)
def test_an_image_is_named_as_its_processor_does(spec: EncoderSpec, expected: str) -> None:
    assert prompt(spec) == expected


@pytest.mark.parametrize("spec", [PUBLISHED_K3, K25])
@pytest.mark.parametrize("num_frames", [1, 4])
def test_a_chunk_is_a_video_of_any_length(spec: EncoderSpec, num_frames: int) -> None:
    expected = "<|media_begin|>video<|media_content|><|media_pad|><|media_end|>"
    plan = plan_image(64, 48, spec.processor, (1024,), "refuse", num_frames=num_frames)
    assert prompt_text(spec, plan) == expected


@pytest.mark.parametrize("spec", [replace(PUBLISHED_K3, model_type="kimi_k31"), replace(K25, model_type="kimi_k3")])
def test_models_that_we_do_not_know_get_none(spec: EncoderSpec) -> None:
    assert prompt(spec) is None
