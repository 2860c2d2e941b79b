"""How settings become vLLM's environment; what needs vLLM itself is in test_vllm_service.py."""

from __future__ import annotations

import os

import pytest

from tasks.settings import Settings, SettingsError, load_settings
from worker.engines import vllm_setup


@pytest.fixture(autouse=True)
def _environment_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*vllm_setup.ENVIRONMENT, *vllm_setup.FIXED_ENVIRONMENT, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)


def test_the_engine_is_in_our_process_and_nobody_is_told_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    vllm_setup.set_environment(Settings(engine="vllm"))

    assert os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    vllm_setup.set_environment(Settings(engine="vllm"))

    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        ("cuda:1", None, "1"),
        ("cuda:1", "4,6,7", "6"),
        ("cuda:0", "GPU-aaa,GPU-bbb", "GPU-aaa"),
        ("cuda", None, None),
        ("auto", "3", "3"),
        ("cuda:2", "4", "4"),  # vLLM then finds no such device, and says so
    ],
)
def test_a_worker_sees_the_one_device_that_it_was_given(
    device: str, visible: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    vllm_setup.set_environment(Settings(engine="vllm", device=device))

    assert os.environ.get("CUDA_VISIBLE_DEVICES") == expected


def test_arguments_are_json_where_they_can_be_and_text_elsewhere() -> None:
    text = """max-model-len=2048 --enforce_eager=true quantization=fp8 'compilation_config={"mode": 0}' """
    text += 'load_format="a b"'
    assert Settings(engine="vllm", engine_args=text).engine_arguments == {
        "max_model_len": 2048,
        "enforce_eager": True,
        "quantization": "fp8",
        "compilation_config": {"mode": 0},
        "load_format": "a b",
    }


@pytest.mark.parametrize("text", ["max_model_len", "=8", "9x=1", "'open"])
def test_what_is_no_argument_is_refused_with_its_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CARPOOL_ENGINE_ARGS", text)
    with pytest.raises(SettingsError, match="CARPOOL_ENGINE_ARGS"):
        load_settings({"engine": "vllm"})
