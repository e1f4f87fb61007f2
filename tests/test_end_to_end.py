"""The main job over HTTP: an image in, the golden merged tokens out of two tensor-parallel ranks."""

from safetensors.torch import load, load_file

from running import GOLDEN, RunningService


def test_raw_body_to_safetensors_gives_the_golden_tokens(tiny_k3: RunningService) -> None:
    expected = load_file(GOLDEN / "expected_tiny-k3.safetensors")["rgba_120x90/emb_f32"]
    answer = tiny_k3.encode((GOLDEN / "images" / "rgba_120x90.png").read_bytes())
    assert answer.status_code == 200
    tokens = load(answer.content)["embeddings"]
    assert (tokens - expected).norm() / expected.norm() <= 1e-5
