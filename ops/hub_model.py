"""Can a model be had from the Hugging Face hub? One request for its configuration tells, before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import httpx2

from ops.errors import PreconditionError
from tasks.settings import BUNDLED_MODEL, Settings
from worker.engines.model_source import HUB_NAME

_ANSWER_S = 10.0
_CONFIG = "config.json"
_OTHERWISE = "take a folder or a GGUF file with --model"


def is_hub_name(settings: Settings) -> bool:
    """Whether the setting names a model of the hub, and nothing on this machine."""
    model = settings.model
    if settings.engine == "simulated" or model == BUNDLED_MODEL or model.endswith(".gguf"):
        return False
    return not model.startswith((".", "~", "/")) and bool(HUB_NAME.fullmatch(model)) and not Path(model).is_dir()


def check_hub_model(settings: Settings) -> str:
    """The model's configuration is in the hub's cache on this machine, or the hub gives it; returns which.

    Raises:
        PreconditionError: there is no such model or revision, it is gated, the hub cannot be reached or is not asked.
    """
    # only the engines' extras bring the hub's client, and they are checked before
    from huggingface_hub import get_hf_file_metadata, get_token, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    model, revision = settings.model, settings.revision or "main"
    try:
        if isinstance(try_to_load_from_cache(model, _CONFIG, revision=revision), str):
            return f"{model} is in the hub's cache"
        token = get_token()
        get_hf_file_metadata(hf_hub_url(model, _CONFIG, revision=revision), token=token or False, timeout=_ANSWER_S)
    except HFValidationError:
        raise PreconditionError(f"{model!r} is no name on the hub", "Write owner/name, or " + _OTHERWISE) from None
    except OfflineModeIsEnabled:
        raise PreconditionError(
            f"The model {model} is not on this machine, and HF_HUB_OFFLINE forbids to fetch it",
            f"Unset HF_HUB_OFFLINE, or {_OTHERWISE}",
        ) from None
    except GatedRepoError as error:
        raise PreconditionError(_gated(model, error.response.status_code), _access(model, bool(token))) from None
    except RevisionNotFoundError:
        raise PreconditionError(
            f"The model {model} has no revision {revision!r} on the hub", "Set CARPOOL_REVISION to one that it has"
        ) from None
    except RepositoryNotFoundError:
        raise PreconditionError(
            f"The hub has no model {model}, or shows it to nobody without a token that may see it",
            f"Check the name, set HF_TOKEN, or {_OTHERWISE}",
        ) from None
    except EntryNotFoundError:
        raise PreconditionError(
            f"The model {model} has no {_CONFIG} on the hub", f"Take one in transformers' format, or {_OTHERWISE}"
        ) from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise PreconditionError(_gated(model, status), _access(model, bool(token))) from None
        raise PreconditionError(
            f"The hub answers {status} for the model {model}", f"Try again later, or {_OTHERWISE}"
        ) from None
    except (httpx2.HTTPError, OSError) as error:
        cause = re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__
        raise PreconditionError(
            f"The model {model} is not on this machine, and the hub cannot be reached ({cause})",
            f"Look at the network and HF_ENDPOINT, or {_OTHERWISE}",
        ) from None
    return f"{model} is on the hub"


def _gated(model: str, status: int) -> str:
    return f"The hub does not give the model {model} to this user ({status}): it is gated or private"


def _access(model: str, has_token: bool) -> str:
    what = "ask for access on the model's page with the account of this token" if has_token else "set HF_TOKEN"
    return f"{what[0].upper()}{what[1:]}, or {_OTHERWISE}"
