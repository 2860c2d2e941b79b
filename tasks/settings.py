"""Every setting of Carpool, in one frozen class.

Each field is read from the environment variable `CARPOOL_<NAME>`; a command-line option of the same name wins over it.
Durations end in `_s` (seconds) or `_ms` (milliseconds). A value that does not fit is refused by name at the start.
"""

from __future__ import annotations

import difflib
import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from tasks.keys import RESERVED_POOL

PREFIX = "CARPOOL_"
BUNDLED_MODEL = "SmolLM2-135M-Instruct"

EngineName = Literal["transformers", "vllm", "simulated"]


class SettingsError(ValueError):
    """A setting that cannot be used; the message names the key, the value and what would do."""


def _home(variable: str, fallback: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / fallback) / "carpool"


class Settings(BaseSettings):
    """The settings of one process. Frozen: a part that needs another value gets another instance."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", env_ignore_empty=True)

    # Where things are
    redis_url: str = Field("redis://127.0.0.1:6379/0", description="Redis or Valkey: broker, ledger and streams.")
    redis_url_file: Path | None = Field(None, description="A file that holds the URL instead, for one with a password.")
    data_dir: Path = Field(
        default_factory=lambda: _home("XDG_DATA_HOME", ".local/share"),
        description="Everything of one instance: Redis files, logs, run file.",
    )
    cache_dir: Path = Field(
        default_factory=lambda: _home("XDG_CACHE_HOME", ".cache"), description="Converted models, shared by instances."
    )

    # API
    host: str = Field("127.0.0.1", description="Address the API listens on.")
    port: int = Field(8000, ge=0, le=65535, description="Port the API listens on; 0 takes a free one.")
    root_path: str = Field("", description="Path prefix under which a proxy serves the API.")
    trusted_proxies: str = Field("127.0.0.1", description="Proxies whose X-Forwarded headers count, comma separated.")
    cors_origins: str = Field("", description="Origins that browsers may call from, comma separated; empty: none.")
    allow_no_keys: bool = Field(False, description="Serve a non-loopback host while there are no API keys.")
    api_keys_file: str = Field("", description="File with API keys that the API brings in when it starts.")
    api_key: SecretStr = Field(
        SecretStr(""), description="The key that `carpool generate` and `carpool jobs` send to the API."
    )
    api_key_file: Path | None = Field(None, description="A file that holds it instead.")
    allowed_hosts: str = Field("", description="Further Host header names to serve without API keys, comma separated.")
    sync_wait_s: float = Field(600, gt=0, description="Longest wait of a synchronous request; then 504.")
    max_body_bytes: int = Field(4 * 2**20, gt=0, description="Largest request body.")
    max_prompts: int = Field(256, ge=1, le=256, description="Most prompts in one request.")
    max_wait_s: float = Field(60, gt=0, description="Longest `?wait=` of a poll.")
    max_streams: int = Field(4096, ge=1, description="Most open streams of one API process; further ones get 503.")
    receive_timeout_s: float = Field(
        60, gt=0, description="A request's head has so long to arrive; its body may be silent for so long."
    )
    sse_heartbeat_s: float = Field(15, gt=0, description="Heartbeat comment on a silent stream.")
    stream_queue: int = Field(256, ge=1, description="Entries held for a slow client before it reads the log.")
    max_file_bytes: int = Field(100 * 2**20, gt=0, description="Largest file that can be uploaded.")
    max_files_bytes: int = Field(512 * 2**20, gt=0, description="All files together; they are kept in Redis.")
    file_retention_s: float = Field(
        7 * 86400, ge=3600, le=30 * 86400, description="How long a file is kept that does not say how long."
    )
    batch_window: int = Field(256, ge=1, le=4096, description="Requests of one batch that are in the queue at once.")
    max_queued_jobs: int = Field(
        10_000,
        ge=0,
        description="Most jobs that wait for a slot; further ones get 503. Lines of batches do not count. 0: no bound.",
    )
    max_queued_tokens: int = Field(
        0,
        ge=0,
        description="Most tokens that wait (each job's prompt and max_tokens); further jobs get 503. 0: no bound.",
    )
    max_queued_jobs_per_key: int = Field(
        0, ge=0, description="Most jobs of one API key that wait; its further ones get 429. 0: no bound."
    )
    max_queued_tokens_per_key: int = Field(
        0, ge=0, description="Most tokens of one API key that wait; its further jobs get 429. 0: no bound."
    )
    refuse_late: bool = Field(
        False, description="Refuse a job at once that, by its ETA, would not be done by its deadline."
    )
    ack_after_fsync: bool = Field(False, description="Answer 202 only after WAITAOF says the record is on disk.")

    # Model and engine
    engine: EngineName = Field("transformers", description="transformers, vllm or simulated.")
    model: str = Field(BUNDLED_MODEL, description="Bundled model, hub name, local folder or GGUF file.")
    served_model_name: str = Field("", description="Alias that the model is served under; empty: its own name.")
    default_model: str = Field("", description="Model of a request that names none.")
    without_worker: Literal["wait", "refuse"] = Field(
        "wait",
        description="A request for a model that no worker serves now: its job waits for one, or it gets 503.",
    )
    model_aliases: str = Field(
        "",
        description="Further names of served models, as in `gpt-4o-mini=SmolLM2-135M-Instruct`, comma separated.",
    )
    revision: str = Field("", description="Revision of a hub model.")
    trust_remote_code: bool = Field(False, description="Run code that comes with a hub model.")
    device: str = Field("auto", description="auto, cpu, cuda or cuda:N; cuda:0 is the first visible GPU.")
    share_gpus: bool = Field(False, description="Let several workers load their models onto one GPU.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Number format of the weights."
    )
    engine_args: str = Field(
        "",
        description="Further arguments of vLLM's engine, as in `max_model_len=2048 enforce_eager=true`, separated by "
        "spaces; values are JSON or text.",
    )
    max_batch_size: int = Field(4, ge=1, le=1024, description="Slots: sequences that ride in one batch.")
    max_tokens: int = Field(4096, ge=1, description="Most new tokens of a request that does not say how many.")
    prefill_chunk_tokens: int = Field(256, ge=1, description="Most prompt tokens computed between two decoding steps.")
    prefix_cache_mb: int = Field(
        256,
        ge=0,
        description="Most memory, in MiB, for what the transformers engine keeps of prompts and completions, so that "
        "others that begin the same way need not compute it again; 0 keeps nothing. With vLLM, 0 turns its own off.",
    )
    simulated_step_ms: float = Field(20, ge=0, description="Simulated engine: time of one step of the whole batch.")
    simulated_prefill_ms: float = Field(0, ge=0, description="Simulated engine: time of one prompt's prefill.")
    simulated_context_length: int = Field(8192, ge=8, description="Simulated engine: context length in tokens.")

    # The job protocol
    lease_s: float = Field(8, gt=0, description="How long a claim lasts without renewal.")
    renew_s: float = Field(2, gt=0, description="How often the owner renews its leases.")
    redis_timeout_s: float = Field(2, gt=0, description="Longest wait for one answer of Redis.")
    reaper_tick_s: float = Field(1, gt=0, description="How often due jobs are looked at.")
    grace_s: float = Field(8, ge=0, description="After an outage: nobody's lease is taken for so long.")
    heartbeat_s: float = Field(2, gt=0, description="How often a worker says that it lives.")
    run_ahead_steps: int = Field(2, ge=1, le=64, description="Steps the engine may be ahead of what Redis accepted.")
    step_timeout_s: float = Field(60, gt=0, description="An engine without progress for so long counts as dead.")
    load_timeout_s: float = Field(1800, gt=0, description="A model load without progress for so long counts as dead.")
    retention_s: float = Field(86400, gt=0, description="How long an ended job is kept.")
    idempotency_s: float = Field(86400, gt=0, description="How long at least an idempotency key is remembered.")
    deadline_s: float = Field(86400, gt=0, le=7 * 86400, description="Deadline of a job that names none.")
    max_attempts: int = Field(3, ge=1, description="Deaths at one position that end a job.")
    max_deaths: int = Field(10, ge=1, description="Deaths in all that end a job.")
    max_claims: int = Field(20, ge=1, description="Claims in a row without a token that end a job.")
    visibility_s: float = Field(600, gt=0, description="Broker: an unacknowledged message comes again after so long.")
    drain_s: float = Field(30, ge=0, description="On SIGTERM: time for riding sequences to finish before hand-back.")

    # Webhooks
    webhook_secret: SecretStr = Field(
        SecretStr(""),
        description="Signs webhooks: `whsec_…`; several with blanks between, while one takes another's place.",
    )
    webhook_secret_file: Path | None = Field(None, description="A file that holds them instead.")
    webhook_allow_private: bool = Field(False, description="Webhooks may go to private and loopback addresses too.")
    webhook_timeout_s: float = Field(15, gt=0, le=60, description="Longest time of one attempt to deliver a webhook.")
    webhook_retry_s: float = Field(
        86400, ge=0, le=7 * 86400, description="A webhook is tried for so long after the job's end; 0: once."
    )
    webhook_backoff_s: float = Field(
        5, gt=0, le=3600, description="Wait after the first failed attempt; it doubles, up to an hour."
    )
    webhook_concurrency: int = Field(16, ge=1, le=256, description="Webhooks that one worker delivers at once.")

    # Supervisor
    workers: int = Field(1, ge=0, le=64, description="Generation workers that `carpool up` starts.")
    flower: bool = Field(False, description="Start Flower too.")
    flower_password_file: Path | None = Field(
        None, description="A file that holds the password of Flower's user `carpool`; without it `up` makes one."
    )
    appendfsync: Literal["everysec", "always"] = Field("everysec", description="Embedded Redis: when it is on disk.")

    # Logs and traces
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least level that is logged.")
    log_format: Literal["auto", "json", "text"] = Field("auto", description="auto: text on a terminal, JSON elsewhere.")

    traces: Literal["auto", "on", "off"] = Field(
        "auto",
        description="OpenTelemetry's spans, with the extra `otel`. auto: where OTEL_EXPORTER_OTLP_ENDPOINT is set.",
    )

    @model_validator(mode="after")
    def _settings_that_depend_on_another(self) -> Self:
        if self.renew_s * 3 > self.lease_s:
            raise ValueError(
                f"CARPOOL_RENEW_S={self.renew_s:g} is more than a third of CARPOOL_LEASE_S={self.lease_s:g}: "
                "one lost renewal would lose the lease. Set CARPOOL_RENEW_S to at most a third of CARPOOL_LEASE_S"
            )
        if self.step_timeout_s <= self.redis_timeout_s:
            raise ValueError(
                f"CARPOOL_STEP_TIMEOUT_S={self.step_timeout_s:g} must be more than "
                f"CARPOOL_REDIS_TIMEOUT_S={self.redis_timeout_s:g}. Raise CARPOOL_STEP_TIMEOUT_S"
            )
        if self.visibility_s <= self.lease_s:
            raise ValueError(
                f"CARPOOL_VISIBILITY_S={self.visibility_s:g} must be more than CARPOOL_LEASE_S={self.lease_s:g}, "
                "or the broker redelivers jobs that still ride. Raise CARPOOL_VISIBILITY_S"
            )
        if self.engine_args and self.engine != "vllm":
            raise ValueError(
                f"CARPOOL_ENGINE_ARGS={self.engine_args!r} are arguments of vLLM, and CARPOOL_ENGINE={self.engine}. "
                "Leave them out, or set CARPOOL_ENGINE=vllm"
            )
        if self.pool == RESERVED_POOL:
            raise ValueError(
                f"a model cannot be served as {RESERVED_POOL!r}, which is the name of the webhooks' queue. "
                "Give it another name with CARPOOL_SERVED_MODEL_NAME"
            )
        return self

    @field_validator("redis_url")
    @classmethod
    def _redis_is_one_server(cls, value: str) -> str:
        scheme, separator, _ = value.partition("://")
        if scheme == "sentinel":
            raise ValueError(
                "sentinels cannot be asked for the primary. Name one address that is kept on it: redis://host:6379/0"
            )
        if not separator or scheme not in ("redis", "rediss"):
            cause = f"{scheme + separator!r} is no beginning of it" if separator else "it has no scheme"
            raise ValueError(f"{cause}. Write it as redis://host:6379/0, or rediss:// with TLS")
        try:
            _ = urlsplit(value).port
        except ValueError:  # whose words may have a part of the password
            raise ValueError(
                "its port is no number. Write it as redis://host:6379/0, and a password percent-encoded"
            ) from None
        return value

    @field_validator("engine_args")
    @classmethod
    def _engine_args_are_pairs(cls, value: str) -> str:
        _parse_engine_args(value)
        return value

    @field_validator("device")
    @classmethod
    def _device_is_one(cls, value: str) -> str:
        kind, _, number = value.partition(":")
        if value not in ("auto", "cpu", "cuda") and not (kind == "cuda" and number.isascii() and number.isdecimal()):
            raise ValueError(f"{value!r} is no device. Set auto, cpu, cuda or cuda:N")
        return value

    @field_validator("model_aliases")
    @classmethod
    def _aliases_are_pairs(cls, value: str) -> str:
        for pair in filter(None, map(str.strip, value.split(","))):
            alias, _, model = map(str.strip, pair.partition("="))
            if not alias or not model:
                raise ValueError(f"{pair!r} is no pair of names. Write ALIAS=MODEL, with commas between several")
        return value

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of models: alias to the name that a model is served under."""
        pairs = (pair.partition("=") for pair in self.model_aliases.split(",") if pair.strip())
        return {alias.strip(): model.strip() for alias, _, model in pairs}

    @property
    def engine_arguments(self) -> dict[str, Any]:
        """Further arguments of vLLM's engine, by their names there."""
        return _parse_engine_args(self.engine_args)

    @property
    def pool(self) -> str:
        """Alias under which this worker's model is served; the name of its queue and wait set."""
        if self.served_model_name:
            return self.served_model_name
        if self.engine == "simulated":
            return "simulated"
        return Path(self.model).stem if self.model.endswith(".gguf") else self.model.rstrip("/").rsplit("/", 1)[-1]

    @property
    def renders_as_environment(self) -> dict[str, str]:
        """The settings that differ from their defaults, as environment variables for a child process."""
        return {
            f"{PREFIX}{name.upper()}": _as_text(getattr(self, name))
            for name in sorted(self.model_fields_set)
            if getattr(self, name) is not None and name not in _NOT_FOR_CHILDREN
        }


#: Variables that are no settings: how the supervisor tells its children who they are.
INTERNAL_VARIABLES = frozenset({"CARPOOL_LIFELINE_FD", "CARPOOL_PROCESS_NAME"})
#: Settings that may stand in a file instead: the value, and the file's.
VALUES_IN_FILES = {"redis_url": "redis_url_file", "api_key": "api_key_file"}
#: Settings of who calls an API, and of no process that serves one; and files whose content is passed on.
_NOT_FOR_CHILDREN = frozenset({"api_key", *VALUES_IN_FILES.values()})
#: Their variables, which the supervisor's children must not inherit either.
NOT_FOR_CHILDREN = frozenset(f"{PREFIX}{name.upper()}" for name in _NOT_FOR_CHILDREN)
#: Parts of names of settings whose values stand in no message: the URL may have a password in it.
_HIDDEN = ("SECRET", "PASSWORD", "REDIS_URL")
#: Parts of names that are no settings, and may be misspelt ones of secrets.
_SECRETIVE = (*_HIDDEN, "KEY", "TOKEN")


def _parse_engine_args(text: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for pair in shlex.split(text):
        name, equals, value = pair.partition("=")
        name = name.lstrip("-").replace("-", "_")
        if not name.isidentifier() or not equals:
            raise ValueError(f"{pair!r} is no argument. Write NAME=VALUE, with spaces between several")
        try:
            arguments[name] = json.loads(value)
        except ValueError:
            arguments[name] = value
    return arguments


def _as_text(value: object) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    return ("true" if value else "false") if isinstance(value, bool) else str(value)


def load_settings(overrides: Mapping[str, Any] | None = None) -> Settings:
    """Read the settings from the environment; `overrides` (from the command line) win, except where they are None.

    Raises:
        SettingsError: a key that does not exist, or a value that does not fit; the message names both.
    """
    known = {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    for key in os.environ:
        if key.startswith(PREFIX) and key not in known and key not in INTERNAL_VARIABLES:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"Did you mean {near[0]}?" if near else "docs/settings.md lists the settings."
            # a misspelt name may be that of a secret
            shown = key if any(word in key for word in _SECRETIVE) else f"{key}={os.environ[key]!r}"
            raise SettingsError(f"{shown} is no setting of Carpool. {hint}")
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    given |= _values_in_files(given)
    try:
        return Settings(**given)
    except ValidationError as error:
        raise SettingsError("; ".join(_explain(dict(item)) for item in error.errors())) from None


def _values_in_files(given: Mapping[str, Any]) -> dict[str, str]:
    """The settings whose value stands in a file that the environment names. Raises SettingsError."""
    found = {}
    for name, file in VALUES_IN_FILES.items():
        variable, file_variable = f"{PREFIX}{name.upper()}", f"{PREFIX}{file.upper()}"
        path = os.environ.get(file_variable)
        if not path or name in given:
            continue
        if os.environ.get(variable):
            raise SettingsError(f"{variable} and {file_variable} are both set. Set one of them")
        found[name] = read_secret_file(Path(path), file_variable)
    return found


def read_secret_file(path: Path, variable: str) -> str:
    """What a file holds, without the blanks around it; `variable` names it. Raises SettingsError."""
    try:
        text = path.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingsError(
            f"{variable}={path}: it cannot be read ({reason}). Name one that this user may read"
        ) from None
    if not text:
        raise SettingsError(f"{variable}={path}: it is empty. Write the value into it")
    return text


def _explain(item: dict[str, Any]) -> str:
    message = str(item["msg"]).removeprefix("Value error, ")
    if not item["loc"]:
        return message
    key = f"{PREFIX}{str(item['loc'][0]).upper()}"
    value = "…" if any(word in key for word in _HIDDEN) or key.endswith("_API_KEY") else repr(item["input"])
    return f"{key}={value}: {message[0].lower()}{message[1:]}"
