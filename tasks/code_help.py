"""What each error code means and what to do about it, in plain words: for the reference, beside the table of codes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Help:
    """`meaning`: when it is answered. `advice`: what who sent the request does then."""

    meaning: str
    advice: str


_ASK_AGAIN: Final = "Send it again after `Retry-After`, with the same `Idempotency-Key`."
_ADDRESS: Final = "Look at the id, and at the key that you send."

HELP: Final[dict[str, Help]] = {
    "invalid_request": Help(
        "A field has a value that does not fit; `param` names it.", "Change the field as the message says."
    ),
    "unsupported_field": Help("A field that is not supported.", "Leave it out; the message has a name that is near."),
    "webhooks_not_configured": Help(
        "A job with a `webhook_url`, and no secret to sign it with.",
        "Start Carpool with `CARPOOL_WEBHOOK_SECRET`, or leave the field out and poll.",
    ),
    "invalid_json": Help("The body is no JSON.", "Send UTF-8 JSON; the message has the place of the fault."),
    "invalid_http": Help(
        "What came is not HTTP/1.1; the connection is closed.", "Look at the proxy or client in between."
    ),
    "context_length_exceeded": Help(
        "Prompt and `max_tokens` do not fit into the model's context; both numbers are given. Of a chat, what the "
        "model's template writes is counted.",
        "Shorten the prompt, or ask for fewer tokens.",
    ),
    "chat_template_missing": Help(
        "Messages for a model that has no chat template; one that refuses them is `invalid_request`.",
        "Send a `prompt`, or take an instruct model.",
    ),
    "eta_unsupported": Help(
        "A Celery task with eta, countdown, links or a chord.", "Send it when it is to run; chain outside."
    ),
    "bad_cursor": Help(
        "`Last-Event-ID` or `starting_after` is none of this stream's ids.", "Send the id of the last event as it came."
    ),
    "group_too_large": Help(
        "More than 16 sequences in one stream.", "Follow the children one by one, or ask without a stream."
    ),
    "larger_than_queue": Help(
        "One request with more jobs or tokens than may wait at all.", "Split it, or use `/v1/batches`."
    ),
    "invalid_api_key": Help(
        "No API key, or one that does not exist, was revoked or has expired; in a stream: since it began.",
        "Send `Authorization: Bearer …` with a good one.",
    ),
    "host_not_allowed": Help(
        "There are no API keys, and the Host header is not a loopback name.",
        "Make a key, or name the host in `CARPOOL_ALLOWED_HOSTS`.",
    ),
    "origin_not_allowed": Help("A page of another site uploads a file.", "Name its origin in `CARPOOL_CORS_ORIGINS`."),
    "priority_not_allowed": Help("A priority above the key's ceiling.", "Ask for a lower one, or leave the field out."),
    "not_found": Help("No such path.", "`/docs` lists what there is."),
    "job_not_found": Help("No such job; or its retention is over; or it is another key's.", _ADDRESS),
    "model_not_found": Help(
        "Nobody has ever served a model of that name, or it is none of the key's; at `/v1/models/{model}` also: nobody "
        "serves it now.",
        "Take one that the message names, or start a worker for it.",
    ),
    "file_not_found": Help("No such file; or it has expired; or it is another key's.", _ADDRESS),
    "batch_not_found": Help("No such batch; or it is kept no longer; or it is another key's.", _ADDRESS),
    "method_not_allowed": Help("The path takes another method.", "Use the one that the message names."),
    "cancelled": Help("The job that was waited for was cancelled.", "Nothing, if you did; else submit it anew."),
    "idempotency_conflict": Help(
        "The `Idempotency-Key` was used with another body.", "Take a new key for a new request."
    ),
    "job_not_ended": Help(
        "Only ended jobs can be forgotten, and those of a batch once their answer is in its output.",
        "Cancel it first, or wait.",
    ),
    "file_in_use": Help("A batch that has not ended reads or writes the file.", "Cancel the batch first, or wait."),
    "body_too_large": Help(
        "More than `CARPOOL_MAX_BODY_BYTES`.", "Send less; many requests go into a file for `/v1/batches`."
    ),
    "file_too_large": Help("A file of more than `CARPOOL_MAX_FILE_BYTES`.", "Split it."),
    "files_full": Help(
        "All files together would be more than `CARPOOL_MAX_FILES_BYTES`.", "Delete files, or wait until some expire."
    ),
    "head_too_large": Help("Request line and headers of more than 64 KiB.", "Send less in headers and address."),
    "request_timeout": Help(
        "The head did not arrive in `CARPOOL_RECEIVE_TIMEOUT_S`, or the body was silent for so long.",
        "Send it again over a better connection.",
    ),
    "unsupported_media_type": Help(
        "A body that is not `application/json`, or an upload that is no form.", "Send the right Content-Type."
    ),
    "rate_limit_exceeded": Help("The key has used up its requests or tokens a minute.", _ASK_AGAIN),
    "too_many_jobs": Help(
        "The key has as many jobs that have not ended as it may.", "Wait for some to end, or cancel them."
    ),
    "too_many_queued": Help(
        "More jobs or tokens of this key wait than `CARPOOL_MAX_QUEUED_JOBS_PER_KEY` and "
        "`CARPOOL_MAX_QUEUED_TOKENS_PER_KEY` allow.",
        _ASK_AGAIN,
    ),
    "internal_error": Help(
        "A fault of the server's own.", "Report it with the `x-request-id`; the server's log has it under that."
    ),
    "worker_died": Help(
        "Processes died with this job three times at one token, or ten times in all.",
        "Look at the causes in the message, and at the prompt; submit it anew if they speak of kills from outside.",
    ),
    "claims_exhausted": Help(
        "Taken up twenty times without a token: its workers die before it boards.", "Look at the workers' logs."
    ),
    "engine_error": Help("This sequence failed in the engine.", "Look at the message and the worker's log."),
    "model_changed": Help(
        "Half done, and no worker serves the model that it was begun with.",
        "Take the text that there is, or submit it anew.",
    ),
    "no_worker": Help(
        "No worker for this kind of request; or none of this model, and `CARPOOL_WITHOUT_WORKER=refuse`.",
        "Start one, or ask again later.",
    ),
    "redis_unavailable": Help("Redis does not answer, or takes no writes.", _ASK_AGAIN),
    "redis_full": Help(
        "Redis has no memory left for new jobs; those that run end.",
        "Ask again later; the operator makes room ([operations.md](operations.md#redis-is-full)).",
    ),
    "too_many_streams": Help(
        "More than `CARPOOL_MAX_STREAMS` on this process.", "Poll, or ask another replica; then again."
    ),
    "server_busy": Help(
        "This API process has more requests at hand than it gets done: one waited for 5 × `CARPOOL_REDIS_TIMEOUT_S` "
        "for its turn to ask Redis.",
        "Send it again after `Retry-After`; the operator starts further API processes.",
    ),
    "queue_full": Help(
        "More jobs or tokens wait than `CARPOOL_MAX_QUEUED_JOBS` and `CARPOOL_MAX_QUEUED_TOKENS` allow.", _ASK_AGAIN
    ),
    "would_be_late": Help(
        "By its ETA the job would miss its deadline, and `CARPOOL_REFUSE_LATE` is set.",
        "Give it more time, or ask again later.",
    ),
    "wait_exceeded": Help(
        "The wait is over, and the job goes on.", "`GET /jobs/{id}` with the id in `x-carpool-job-id`."
    ),
    "deadline_exceeded": Help("The job was not done by its deadline.", "Give it more time, or submit it anew."),
}
