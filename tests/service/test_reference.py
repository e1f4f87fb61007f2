import math
import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from service.reference import Origin, ReferenceFileError, distance, read_reference, write_reference

ORIGIN = Origin("kimi_k3", "abc", "bfloat16", "0.1.0", "cpu", "2")
TOKENS = np.random.default_rng(0).standard_normal((6, 8), np.float32)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "reference.safetensors"
    write_reference(path, TOKENS, ORIGIN)
    tokens, origin = read_reference(path)
    assert np.array_equal(tokens, TOKENS)
    assert origin == ORIGIN


def test_files_that_are_no_reference(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(ReferenceFileError, match="cannot be read"):
        read_reference(path)
    path.write_bytes(b"no safetensors at all")
    with pytest.raises(ReferenceFileError, match="cannot be read"):
        read_reference(path)
    save_file({"embeddings": TOKENS}, path)
    with pytest.raises(ReferenceFileError, match="was not written by"):
        read_reference(path)
    save_file({"other": TOKENS}, path, {"format": "tpvision reference 1"})
    with pytest.raises(ReferenceFileError, match="cannot be read"):
        read_reference(path)


def test_a_pipe_is_no_reference(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ReferenceFileError, match="is not a regular file"):
        read_reference(tmp_path / "pipe")


@pytest.mark.parametrize(
    ("tokens", "dtype"), [(TOKENS, "weird"), (TOKENS.astype(np.float16), "float16"), (TOKENS[0], "float32")]
)
def test_a_reference_holds_what_it_should(tmp_path: Path, tokens: np.ndarray, dtype: str) -> None:
    path = tmp_path / "reference"
    metadata = {"format": "tpvision reference 1", **asdict(ORIGIN), "dtype": dtype}
    save_file({"embeddings": np.ascontiguousarray(tokens)}, path, metadata)
    with pytest.raises(ReferenceFileError, match=f"cannot be read as a reference: {dtype} tokens stored as"):
        read_reference(path)


def test_distance_of_zeros_and_of_what_is_not_finite() -> None:
    zeros, broken = np.zeros_like(TOKENS), TOKENS * np.float32(np.inf)
    assert distance(zeros, zeros, "float32").relative == 0.0
    assert distance(TOKENS, zeros, "float32").relative == math.inf
    assert not distance(TOKENS, zeros, "float32").is_within
    assert not distance(broken, broken, "float32").is_within


def test_distance_is_relative_and_the_widest_tolerance_counts() -> None:
    far = distance(TOKENS * np.float32(1.01), TOKENS, "float32")
    assert far.relative == pytest.approx(0.01, rel=1e-3)
    assert far.max_abs == pytest.approx(0.01 * np.abs(TOKENS).max(), rel=1e-3)
    assert (far.tolerance, far.is_within) == (1e-5, False)
    assert distance(TOKENS * np.float32(1.01), TOKENS, "float32", "bfloat16").is_within
    assert distance(TOKENS, TOKENS, "float32").is_within


def test_nan_is_never_within() -> None:
    broken = replace(distance(TOKENS, TOKENS, "float32"), relative=float("nan"))
    assert not broken.is_within
