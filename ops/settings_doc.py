"""Writes docs/settings.md from the settings themselves: `python -m ops.settings_doc`. A test holds the two together."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tasks.settings import PREFIX, Settings

DOCUMENT = Path(__file__).parent.parent / "docs" / "settings.md"
_HEAD = """# Settings

Each setting is an environment variable; command-line options of the same name win over it (`docs/cli.md`). Durations
end in `_S` (seconds) or `_MS` (milliseconds). A key that does not exist, or a value that does not fit, is refused by
name before anything starts (exit code 2).

| variable | default | what |
|---|---|---|
"""
_HOMES = {"data_dir": "`~/.local/share/carpool`", "cache_dir": "`~/.cache/carpool`"}
_TAIL = """
`CARPOOL_RENEW_S` must be at most a third of `CARPOOL_LEASE_S`, `CARPOOL_STEP_TIMEOUT_S` more than
`CARPOOL_REDIS_TIMEOUT_S`, `CARPOOL_VISIBILITY_S` more than `CARPOOL_LEASE_S`: settings that depend on another are
refused together, by name.

Not ours, but heeded: `HF_TOKEN` and `HF_HUB_OFFLINE` (models from the hub), `OMP_NUM_THREADS` (processor threads of a
model), `CUDA_VISIBLE_DEVICES`, `NO_COLOR`, `XDG_DATA_HOME` and `XDG_CACHE_HOME`.
"""


def _default(name: str, field: FieldInfo) -> str:
    if name in _HOMES:
        return _HOMES[name]
    value: Any = field.default
    if value is PydanticUndefined or str(value) == "":
        return "(empty)"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _choices(field: FieldInfo) -> str:
    choices = [choice for choice in get_args(field.annotation) if isinstance(choice, str)]
    return f" One of {', '.join(f'`{choice}`' for choice in choices)}." if choices else ""


def render() -> str:
    """The whole page."""
    rows = (
        f"| `{PREFIX}{name.upper()}` | {_default(name, field)} | {field.description}{_choices(field)} |"
        for name, field in Settings.model_fields.items()
    )
    return _HEAD + "\n".join(rows) + "\n" + _TAIL


if __name__ == "__main__":
    DOCUMENT.write_text(render())
