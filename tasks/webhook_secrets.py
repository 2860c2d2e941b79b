"""The secrets that webhooks are signed with, in Standard Webhooks' form: `whsec_` and 24 to 64 bytes in base64."""

from __future__ import annotations

import base64
import binascii
from typing import Final

from tasks.settings import Settings, SettingsError

_PREFIX: Final = "whsec_"
_MAKE_ONE: Final = "Make one with: echo whsec_$(openssl rand -base64 32)"


def webhook_secrets(settings: Settings) -> tuple[str, ...]:
    """All secrets, the newest first; each signs. None where none is set: then no job may have a webhook.

    Raises:
        SettingsError: one is none, or the file cannot be read; no message shows a secret.
    """
    given = settings.webhook_secret.get_secret_value()
    name = "CARPOOL_WEBHOOK_SECRET"
    if settings.webhook_secret_file is not None:
        if given:
            raise SettingsError("CARPOOL_WEBHOOK_SECRET and CARPOOL_WEBHOOK_SECRET_FILE are both set. Set one of them")
        name = f"CARPOOL_WEBHOOK_SECRET_FILE={settings.webhook_secret_file}"
        try:
            given = settings.webhook_secret_file.expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise SettingsError(f"{name}: it cannot be read ({reason}). Name a file that holds `whsec_…`") from None
        if not given.strip():
            raise SettingsError(f"{name}: it holds no secret. {_MAKE_ONE}")
    secrets = tuple(given.split())
    for number, secret in enumerate(secrets, 1):
        if not _is_secret(secret):
            raise SettingsError(f"{name}: secret {number} is not whsec_ and 24 to 64 bytes in base64. {_MAKE_ONE}")
    return secrets


def _is_secret(text: str) -> bool:
    encoded = text.removeprefix(_PREFIX)
    if not text.startswith(_PREFIX):
        return False
    try:
        key = base64.b64decode(encoded + "=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, ValueError):
        return False
    return 24 <= len(key) <= 64
