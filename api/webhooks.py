"""Webhooks of requests: whether this server can promise one."""

from __future__ import annotations

from tasks.codes import CarpoolError
from tasks.settings import Settings
from tasks.webhook_secrets import webhook_secrets
from tasks.webhook_urls import check_webhook_host, parse_webhook_url


class WebhookGate:
    """Refuses webhooks that could not be signed, or that go where none may go.

    Raises:
        SettingsError: a secret cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        self._is_configured = bool(webhook_secrets(settings))
        self._allow_private = settings.webhook_allow_private

    def check(self, url: str | None) -> str:
        """The URL that the ledger is to keep, "" for none.

        Raises:
            CarpoolError: it is refused.
        """
        if url is None:
            return ""
        if not self._is_configured:
            raise CarpoolError(
                "webhooks_not_configured",
                "webhook_url: this server has no secret to sign webhooks with. Set CARPOOL_WEBHOOK_SECRET (make one: "
                "echo whsec_$(openssl rand -base64 32)) and start it again, or leave webhook_url out and poll the job",
                param="webhook_url",
            )
        try:
            check_webhook_host(parse_webhook_url(url), allow_private=self._allow_private)
        except ValueError as error:
            raise CarpoolError("invalid_request", f"webhook_url: {error}", param="webhook_url") from None
        return url
