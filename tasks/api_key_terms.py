"""What an API key may, as people write it: on the command line and in CARPOOL_API_KEYS_FILE."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tasks.api_keys import ID_PREFIX, TOKEN_PREFIX, ApiKey, digest_of
from tasks.priority import priority_number
from tasks.settings import SettingsError

MAX_NAME: Final = 64
#: A key of one's own making: shorter ones could be guessed, and a plain hash protects only what cannot be.
MIN_SECRET: Final = 32
MAX_SECRET: Final = 512
_SECRET: Final = re.compile(r"[\x21-\x7e]+")
_NAME: Final = re.compile(r"[^\s\x00-\x1f\x7f]+")
_DURATION: Final = re.compile(r"(\d{1,6})([mhd])")
_SECONDS: Final = {"m": 60, "h": 3600, "d": 86400}
_TERMS: Final = ("rpm", "tpm", "max_concurrent", "models", "priority_ceiling", "expires")
_MOST: Final = 2**31 - 1


class TermError(ValueError):
    """A term that cannot be used; the message names it, its value and what would do."""


def parse_name(text: str) -> str:
    """Raises TermError."""
    # never shown: what does not look like a name may be a key in the wrong place
    if not (1 <= len(text) <= MAX_NAME and _NAME.fullmatch(text)) or text.startswith(TOKEN_PREFIX):
        raise TermError(
            f"the name has {len(text)} characters: 1 to {MAX_NAME} are possible, no space, and no key's beginning"
        )
    return text


def parse_terms(terms: dict[str, str], now: float) -> dict[str, Any]:
    """The fields of an `ApiKey` by its terms: rpm, tpm, max_concurrent, models, priority_ceiling, expires.

    Raises:
        TermError: one is not known, or its value is not possible.
    """
    found: dict[str, Any] = {}
    for name, text in terms.items():
        if name == "rpm":
            found["requests_per_minute"] = _number(name, text)
        elif name == "tpm":
            found["tokens_per_minute"] = _number(name, text)
        elif name == "max_concurrent":
            found["max_concurrent"] = _number(name, text)
        elif name == "models":
            found["models"] = _models(text)
        elif name == "priority_ceiling":
            found["priority_ceiling"] = _ceiling(text)
        elif name == "expires":
            found["expires_at"] = parse_time(text, now)
        else:
            raise TermError(f"{name[:40]!r} is no term of a key. There is: {', '.join(_TERMS)}")
    return found


def parse_time(text: str, now: float) -> float:
    """A time to come, as seconds since 1970: `90m`, `12h`, `30d`, or a date or time in UTC such as 2027-01-31.

    Raises:
        TermError: it is none, or over.
    """
    duration = _DURATION.fullmatch(text)
    if duration is not None:
        at = now + int(duration[1]) * _SECONDS[duration[2]]
    else:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise TermError(f"expires {text[:40]!r}: write 12h, 30d or a date such as 2027-01-31") from None
        at = (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()
    if at <= now:
        raise TermError(f"expires {text[:40]!r}: that time is over. Name one that is to come")
    return math.floor(at)


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and 1 <= int(text) <= _MOST):
        raise TermError(f"{name} {text[:40]!r}: a whole number from 1 on is needed. Leave it out for no limit")
    return int(text)


def _models(text: str) -> tuple[str, ...]:
    models = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not models:
        raise TermError(f"models {text[:40]!r}: write names with commas between. Leave it out for all models")
    return models


def _ceiling(text: str) -> int:
    if text in ("high", "normal", "low"):
        return priority_number(text)  # type: ignore[arg-type] # one of the three
    if len(text) == 1 and text in "0123456789":
        return int(text)
    raise TermError(f"priority_ceiling {text[:40]!r}: high, normal, low, or a number from 0 to 9 is possible")


def read_key_file(path: Path, now: float) -> tuple[ApiKey, ...]:
    """The keys that a file lists: a line has a name, the key itself, and terms such as `rpm=60`; `#` begins a comment.

    Lines of one name are one caller, so that a key is changed without losing sight of its jobs.

    Raises:
        SettingsError: the file cannot be read, or a line cannot be understood; the message never holds a key.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise SettingsError(f"CARPOOL_API_KEYS_FILE={path}: it cannot be read ({reason})") from None
    found = tuple(_parse_lines(path, lines, now))
    digests = [key.digest for key in found]
    for index, digest in enumerate(digests):
        if digest in digests[:index]:
            names = f"{found[digests.index(digest)].name} and {found[index].name}"
            raise SettingsError(f"CARPOOL_API_KEYS_FILE={path}: {names} have the same key. Give each its own")
    if not found:
        raise SettingsError(
            f"CARPOOL_API_KEYS_FILE={path}: it lists no key. Write a line with a name and a key, or unset the variable"
        )
    return found


def _parse_lines(path: Path, lines: Iterable[str], now: float) -> Iterable[ApiKey]:
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            yield _parse_line(words, now)
        except TermError as error:
            raise SettingsError(f"CARPOOL_API_KEYS_FILE={path}, line {number}: {error}") from None


def _parse_line(words: list[str], now: float) -> ApiKey:
    if len(words) < 2:
        raise TermError("it has one word. Write a name and a key, with a space between")
    name, secret, *rest = words
    if not (MIN_SECRET <= len(secret) <= MAX_SECRET and _SECRET.fullmatch(secret)):
        raise TermError(
            f"its key has {len(secret)} characters: {MIN_SECRET} to {MAX_SECRET} printable ASCII characters are "
            "needed. Make one with: openssl rand -hex 32"
        )
    terms = dict(_parse_term(word) for word in rest)
    # by its name, so that the caller stays the same when the key changes
    id = f"{ID_PREFIX}{hashlib.sha256(f'carpool-file-key-1:{name}'.encode()).hexdigest()[:16]}"
    digest = digest_of(secret)
    return ApiKey(digest, id, parse_name(name), now, source="file", **_file_terms(terms))


def _parse_term(word: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not equals or name not in _TERMS:
        # not shown: it may be a piece of a key
        raise TermError(f"a word behind the key is no term. There is: {', '.join(f'{term}=' for term in _TERMS)}")
    return name, value


def _file_terms(terms: dict[str, str]) -> dict[str, Any]:
    expires = terms.get("expires", "")
    if _DURATION.fullmatch(expires):
        raise TermError(f"expires={expires}: a file is read at each start. Write a date such as expires=2027-01-31")
    # a date in a file goes by: its key has then expired, which is no reason not to start
    return parse_terms(terms, 0.0)
