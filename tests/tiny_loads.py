"""Loads of tiny models by the Model manager, as tests want them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tasks.settings import Settings
from worker.model_manager import LoadedModel, load_model


def settings_of(model: str | Path, **more: Any) -> Settings:
    """Without a prefix cache, which is larger than any of these models."""
    base = {"model": str(model), "dtype": "float32", "device": "cpu", "prefix_cache_mb": 0}
    return Settings.model_validate(base | more)


def ignore(phase: str, fraction: float | None) -> None:
    """Nobody looks at the progress."""


def loaded(model: str | Path, **more: Any) -> LoadedModel:
    return load_model(settings_of(model, **more), ignore)


def phases_of_load(model: str | Path, **more: Any) -> list[str]:
    phases: list[str] = []
    load_model(settings_of(model, **more), lambda phase, fraction: phases.append(phase))
    return phases
