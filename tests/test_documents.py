"""The documents say what the code does today."""

from __future__ import annotations

import re
from pathlib import Path

from ops import settings_doc
from tasks import keys
from tasks.codes import CODES
from tasks.settings import Settings

ROOT = Path(__file__).parent.parent


def documents() -> dict[str, str]:
    return {path.name: path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}


def test_the_settings_page_is_what_the_settings_are() -> None:
    assert settings_doc.DOCUMENT.read_text() == settings_doc.render()


def test_every_setting_named_in_a_document_exists() -> None:
    known = {f"CARPOOL_{name.upper()}" for name in Settings.model_fields} | {"CARPOOL_LIFELINE_FD", "CARPOOL_VENV"}
    for name, text in documents().items():
        for setting in set(re.findall(r"CARPOOL_[A-Z_]+[A-Z]", text)):
            assert setting in known, f"{name} names {setting}"


def test_every_file_named_in_a_document_exists() -> None:
    for name, text in documents().items():
        for path in set(re.findall(r"`((?:api|tasks|worker|ops|tests|docs)/[\w./-]*\w)`", text)):
            assert (ROOT / path).exists(), f"{name} names {path}"


def _anchors(text: str) -> set[str]:
    """What links may name of a document: its headings, as GitHub writes them."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M):
        name = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        anchor = "".join("-" if char == " " else char for char in name if char.isalnum() or char in " -_")
        number = sum(1 for other in found if other == anchor or re.fullmatch(rf"{re.escape(anchor)}-\d+", other))
        found.add(f"{anchor}-{number}" if number else anchor)
    return found


def test_every_link_of_a_document_leads_somewhere() -> None:
    for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            linked = (path.parent / file).resolve() if file else path
            assert linked.exists(), f"{path.name} links to {target}"
            if anchor:
                assert anchor in _anchors(linked.read_text()), f"{path.name} links to {target}"


def test_every_error_code_named_in_a_document_has_its_status() -> None:
    """That the reference has all of them is seen to by tests/test_http_document.py."""
    named = [
        (page, int(status), code)
        for page, text in documents().items()
        for status, code in re.findall(r"\b([45]\d\d) `([a-z]+(?:_[a-z]+)*)`", text)
    ]
    assert len(named) > 10
    for page, status, code in named:
        assert code in CODES, f"{page} names {code}"
        assert status == CODES[code].status, f"{page} says {status} {code}"


def test_every_key_of_the_ledger_is_in_the_table_of_keys() -> None:
    table = keys.__doc__ or ""
    for example in (
        keys.record("<id>"),
        keys.log("<id>"),
        keys.text("<id>"),
        keys.group("<id>"),
        keys.attached("<id>"),
        keys.file("<id>"),
        keys.file_chunk("<id>", 0).replace("0", "<n>"),
        keys.batch("<id>"),
        keys.batch_open("<id>"),
        keys.batch_lock("<id>"),
        keys.jobs("<key>"),
        keys.live("<key>"),
        keys.minute("<key>"),
        keys.files("<key>"),
        keys.batches("<key>"),
        *(key("<pool>") for key in (keys.queued, keys.load, keys.shares, keys.use, keys.rate, keys.lost, keys.counted)),
        keys.own("<pool>", "<owner>").replace("7", "<length>"),
    ):
        assert f"`{example}`" in table
    shared = (keys.DUE, keys.TICK, keys.GRACE, keys.REAPER, keys.MODELS, keys.SCHEMA, keys.VERSIONS, keys.POOLS)
    assert f"`{keys.WEBHOOK_QUEUE}`" in table
    of_keys = (keys.API_KEYS, keys.API_KEYS_REVISION)
    for constant in (
        *shared,
        *of_keys,
        keys.HOOKS,
        keys.SEEN,
        keys.GENERATED,
        keys.HOOK_WORKERS,
        keys.FILES,
        keys.FILES_UNTIL,
        keys.FILES_BYTES,
        keys.BATCHES,
        keys.BATCHES_LIVE,
    ):
        assert f"`{constant}`" in table
