"""Hand-offs that are configured and cannot be had."""

import sys
from pathlib import Path

import pytest
from fastapi import FastAPI

from service.handoff.routes import HandoffError, prepare_handoffs
from tp.settings import HandoffSettings


def test_the_encoder_cache_needs_its_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "absent"):
        with pytest.raises(HandoffError, match=f"vllm_encoder_cache_dir {folder} is not a folder"):
            prepare_handoffs(FastAPI(), HandoffSettings(vllm_encoder_cache_dir=folder))


def test_pushing_needs_pyzmq(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "service.handoff.push", raising=False)
    with pytest.raises(HandoffError, match=r"needs the package zmq: pip install 'tpvision\[sglang\]'"):
        prepare_handoffs(FastAPI(), HandoffSettings(sglang_receivers=("10.0.0.0/8",)))
    prepare_handoffs(FastAPI(), HandoffSettings())
