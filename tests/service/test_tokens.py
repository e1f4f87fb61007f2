"""Tokens out of the slab: dtypes bit for bit, pooling, unit length, overflow."""

import numpy as np
import pytest
import torch

from service.errors import NonFiniteOutput
from service.tokens import TokenOptions, read_tokens, to_bfloat16_bits, to_float32

RNG = np.random.default_rng(0)


def as_bytes(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint8).reshape(len(values), -1)


def test_rounding_to_bfloat16_is_torchs() -> None:
    values = np.concatenate([RNG.standard_normal(5000), [0.0, -0.0, np.inf, -np.inf, 3.4e38, 1e-45]]).astype(np.float32)
    expected = torch.from_numpy(values).bfloat16().view(torch.uint16).numpy()
    assert (to_bfloat16_bits(values) == expected).all()
    assert np.isnan(to_float32(to_bfloat16_bits(np.float32([np.nan])), "bfloat16")).all()


def test_bfloat16_rounds_half_to_even() -> None:
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -1 - 2**-8, 0.0], np.float32)
    rounded = (to_bfloat16_bits(values).astype(np.uint32) << 16).view(np.float32)
    assert rounded.tolist() == [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -1.0, 0.0]


def test_tokens_of_the_same_dtype_are_copied_bit_for_bit() -> None:
    images = [RNG.standard_normal((n, 8)).astype(np.float32) for n in (3, 1)]
    result = read_tokens([as_bytes(image) for image in images], "float32", TokenOptions("float32"), "images")
    assert (result.values == np.concatenate(images)).all()
    assert list(result.bounds) == [0, 3, 4]
    assert (result.of_image(1) == images[1]).all()


def test_pooled_is_the_float32_mean_of_the_tokens() -> None:
    image = RNG.standard_normal((700, 8)).astype(np.float32)
    result = read_tokens([as_bytes(image)], "float32", TokenOptions("float32", pooled=True), "images")
    assert np.allclose(result.values[0], image.mean(axis=0, dtype=np.float64), rtol=1e-6)
    assert result.shape_of(0) == (8,)


def test_normalised_vectors_have_unit_length_and_zero_stays_zero() -> None:
    image = np.concatenate([RNG.standard_normal((3, 8)), np.zeros((1, 8))]).astype(np.float32)
    result = read_tokens([as_bytes(image)], "float32", TokenOptions("float32", normalize=True), "images")
    assert np.allclose(np.linalg.norm(result.values, axis=1), [1, 1, 1, 0])


def test_a_value_beyond_float16_is_an_error_that_names_its_image() -> None:
    images = [np.ones((1, 4), np.float32), np.full((1, 4), 1e6, np.float32)]
    with pytest.raises(NonFiniteOutput) as caught:
        read_tokens([as_bytes(image) for image in images], "float32", TokenOptions("float16"), "images")
    assert caught.value.param == "images[1]"
