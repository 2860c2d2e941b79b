"""`/v1/responses` with OpenAI's own client: created, followed, taken up again, cancelled, forgotten, gone on with."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx2
import openai
import pytest

from tasks import keys
from tasks.codes import CarpoolError
from tasks.settings import Settings
from tests.api_server import ApiServer, running_api, until
from tests.openai_clients import async_client, chat_text, openai_client, raw_events
from tests.scripted_owner import Ride, ScriptedOwner

TOOLS: list[Any] = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture
def client(simulated_api: ApiServer) -> Iterator[openai.OpenAI]:
    with openai_client(simulated_api) as client:
        yield client


@pytest.fixture
def scripted(settings: Settings, owner: ScriptedOwner) -> Iterator[openai.OpenAI]:
    """A client of an API whose one worker is moved by hand."""
    with running_api(settings) as api, openai_client(api) as client:
        yield client


def messages_of(owner: ScriptedOwner, id: str) -> Any:
    return json.loads(str(owner.client.hget(keys.record(id), "input")))["messages"]


def events_after(http: httpx2.Client, id: str, after: int | None = None) -> list[dict[str, Any]]:
    params: dict[str, Any] = {"stream": True} | ({} if after is None else {"starting_after": after})
    response = http.get(f"/v1/responses/{id}", params=params)
    assert response.status_code == 200, response.text
    events = [json.loads(data) for _, data in raw_events(response)]
    assert [id for id, _ in raw_events(response)] == [str(event["sequence_number"]) for event in events]
    return events


def test_a_response_is_the_job_of_its_id(simulated_api: ApiServer, client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="gpt-4o-mini",
        input="Hello",
        instructions="Be brief.",
        max_output_tokens=5,
        temperature=0.5,
        metadata={"a": "b"},
        extra_body={"seed": 3},
    )
    assert response.id.startswith("resp_")
    assert response.output_text == chat_text([("system", "Be brief."), ("user", "Hello")], 3, 5)
    assert (response.status, response.model) == ("incomplete", "simulated")
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.instructions, response.temperature, response.metadata) == ("Be brief.", 0.5, {"a": "b"})
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (6, 5, 11)
    with simulated_api.client() as http:
        job = http.get(f"/jobs/{response.id}").json()
    assert job["text"] == response.output_text
    assert job["usage"]["prompt_tokens"] == response.usage.input_tokens
    assert client.responses.retrieve(response.id).to_dict() == response.to_dict()


def test_one_that_ends_by_itself_is_completed(client: openai.OpenAI) -> None:
    response = client.responses.create(model="simulated", input="x [[end]]@3")
    assert (response.status, response.incomplete_details) == ("completed", None)
    message = response.output[0]
    assert message.type == "message"
    assert message.status == "completed"


def test_a_stream_has_openai_s_events_with_their_numbers(client: openai.OpenAI) -> None:
    with client.responses.stream(model="simulated", input="x [[end]]@4") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text
    kept = client.responses.retrieve(final.id)
    assert (final.output_text, final.usage, final.status) == (kept.output_text, kept.usage, kept.status)


async def test_the_asynchronous_client_streams(simulated_api: ApiServer) -> None:
    async with async_client(simulated_api) as client:
        stream = await client.responses.create(model="simulated", input="x", max_output_tokens=3, stream=True)
        types = [event.type async for event in stream]
    assert types[-1] == "response.incomplete"
    assert types.count("response.output_text.delta") == 3


def test_a_stream_is_taken_up_after_any_event_on_any_replica(
    settings: Settings, scripted: openai.OpenAI, owner: ScriptedOwner
) -> None:
    response = scripted.responses.create(model="simulated", input="x", background=True, tools=TOOLS)
    ride = owner.claim(response.id)
    # the cuts between entries are another thing to each reader; the events must not depend on them
    owner.write(ride, " a", "", " b")
    owner.write(ride, " c")
    for start in range(0, len(CALL), 9):
        owner.write(ride, CALL[start : start + 9])
    owner.finish(ride, reason="stop", tail="")
    with running_api(settings) as replica, replica.client() as http:
        whole = events_after(http, response.id)
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        assert {event["type"] for event in whole} >= {"response.function_call_arguments.done", "response.completed"}
        for after in range(len(whole)):
            assert events_after(http, response.id, after) == whole[after + 1 :]
        resumed = http.get(f"/v1/responses/{response.id}?stream=true", headers={"Last-Event-ID": "3"})
        assert [json.loads(data) for _, data in raw_events(resumed)] == whole[4:]


def test_a_live_stream_and_its_replay_have_the_same_numbers(scripted: openai.OpenAI, owner: ScriptedOwner) -> None:
    stream = scripted.responses.create(model="simulated", input="x", stream=True, background=True)
    live = [next(stream), next(stream)]
    ride = owner.claim()
    for token in (" a", "", " b"):
        owner.write(ride, token)
    while len(live) < 6:
        live.append(next(stream))
    stream.close()
    # another worker takes over, which the log tells and the events do not
    owner.ledger.run(owner.calls.release(ride.rider))
    ride = owner.claim(ride.id)
    owner.write(ride, " c")
    owner.finish(ride, tail="!")
    rest = scripted.responses.retrieve(ride.id, stream=True, starting_after=live[-1].sequence_number)
    together = [event.to_dict() for event in [*live, *rest]]
    assert together == [event.to_dict() for event in scripted.responses.retrieve(ride.id, stream=True)]
    assert scripted.responses.retrieve(ride.id).output_text == " a b c!"


def test_in_the_background_it_goes_on_without_anyone(scripted: openai.OpenAI, owner: ScriptedOwner) -> None:
    response = scripted.responses.create(model="simulated", input="x", background=True)
    assert (response.status, response.background, response.output) == ("queued", True, [])
    ride = owner.claim(response.id)
    owner.write(ride, " a")
    running = scripted.responses.retrieve(response.id)
    assert (running.status, running.output_text, running.usage) == ("in_progress", " a", None)
    owner.finish(ride, reason="stop")
    assert scripted.responses.retrieve(response.id).status == "completed"


def _is_cancelled(owner: ScriptedOwner, ride: Ride) -> bool:
    return owner.look(ride) == "cancelled"


def test_a_client_that_leaves_cancels_only_what_is_not_in_the_background(
    settings: Settings, owner: ScriptedOwner
) -> None:
    with running_api(settings) as api, openai_client(api) as client:
        for background in (False, True):
            stream = client.responses.create(model="simulated", input="x", stream=True, background=background)
            assert next(stream).type == "response.created"
            ride = owner.claim()
            stream.close()
            until(lambda: api.call(lambda: api.service.relay.num_channels) == 0)
            if background:
                assert owner.look(ride) == ""
            else:
                until(partial(_is_cancelled, owner, ride))
                owner.finish(ride, "cancelled", "cancelled")


def test_a_queued_one_is_cancelled_at_once_and_then_forgotten(scripted: openai.OpenAI) -> None:
    response = scripted.responses.create(model="simulated", input="x", background=True)
    with pytest.raises(openai.ConflictError) as refusal:
        scripted.responses.delete(response.id)
    assert refusal.value.code == "job_not_ended"
    assert scripted.responses.cancel(response.id).status == "cancelled"
    # an event of ours: OpenAI's description has none for it
    last = list(scripted.responses.retrieve(response.id, stream=True))[-1].to_dict()
    assert last["type"] == "response.cancelled"
    scripted.responses.delete(response.id)
    for call in (scripted.responses.retrieve, scripted.responses.cancel, scripted.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(response.id)


def test_a_cancel_waits_for_the_worker_to_let_go(scripted: openai.OpenAI, owner: ScriptedOwner) -> None:
    response = scripted.responses.create(model="simulated", input="x", background=True)
    ride = owner.claim(response.id)
    owner.write(ride, " a")

    def let_go() -> None:
        until(lambda: owner.look(ride) == "cancelled")
        owner.finish(ride, "cancelled", "cancelled")

    worker = threading.Thread(target=let_go)
    worker.start()
    cancelled = scripted.responses.cancel(response.id)
    worker.join()
    assert (cancelled.status, cancelled.output_text) == ("cancelled", " a")


def test_a_failed_one_says_why(scripted: openai.OpenAI, owner: ScriptedOwner) -> None:
    response = scripted.responses.create(model="simulated", input="x", background=True)
    error = CarpoolError("worker_died", "it died").body()
    owner.finish(owner.claim(response.id), "failed", "error", error=json.dumps(error))
    failed = scripted.responses.retrieve(response.id)
    assert failed.status == "failed"
    assert failed.error is not None
    assert (failed.error.code, failed.error.message) == ("server_error", "worker_died: it died")
    last = list(scripted.responses.retrieve(response.id, stream=True))[-1]
    assert last.type == "response.failed"
    assert last.response.to_dict() == failed.to_dict()


def test_a_turn_follows_another_by_its_id(scripted: openai.OpenAI, owner: ScriptedOwner) -> None:
    first = scripted.responses.create(model="simulated", input="one", instructions="first", background=True)
    with pytest.raises(openai.BadRequestError) as refusal:
        scripted.responses.create(model="simulated", input="two", previous_response_id=first.id)
    assert refusal.value.param == "previous_response_id"
    owner.run([" a", " b"], first.id)
    second = scripted.responses.create(
        model="simulated", input="two", instructions="second", previous_response_id=first.id, background=True
    )
    assert second.previous_response_id == first.id
    turns = [["user", "one"], ["assistant", " a b"], ["user", "two"]]
    assert messages_of(owner, second.id) == [["system", "second"], *turns]
    owner.run([" c"], second.id)
    # a turn that is forgotten lives on in those that follow it
    scripted.responses.delete(first.id)
    third = scripted.responses.create(
        model="simulated", input=[{"role": "user", "content": "three"}], previous_response_id=second.id, background=True
    )
    assert messages_of(owner, third.id) == [*turns, ["assistant", " c"], ["user", "three"]]
    with pytest.raises(openai.NotFoundError) as gone:
        scripted.responses.create(model="simulated", input="x", previous_response_id=first.id)
    assert gone.value.param == "previous_response_id"


def test_a_call_of_a_tool_is_answered_in_the_next_turn(scripted: openai.OpenAI, owner: ScriptedOwner) -> None:
    first = scripted.responses.create(model="simulated", input="1 + 1?", tools=TOOLS, background=True)
    ride = owner.claim(first.id)
    owner.write(ride, "Wait.", CALL)
    owner.finish(ride, reason="stop")
    answered = scripted.responses.retrieve(first.id)
    text, call = answered.output
    assert text.type == "message"
    assert call.type == "function_call"
    assert (call.name, call.arguments, call.status) == ("add", '{"a": 1}', "completed")
    assert answered.to_dict()["tools"] == TOOLS
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "2"}
    chained = scripted.responses.create(
        model="simulated", input=[result], previous_response_id=first.id, tools=TOOLS, background=True
    )
    # a client may as well keep the conversation itself
    items: Any = [{"role": "user", "content": "1 + 1?"}, *[item.to_dict() for item in answered.output], result]
    whole = scripted.responses.create(model="simulated", input=items, tools=TOOLS, background=True)
    turns = messages_of(owner, chained.id)
    assert messages_of(owner, whole.id) == turns
    assert turns[1]["content"] == "Wait."
    assert turns[1]["tool_calls"][0]["id"] == call.call_id
    assert turns[2] == {"role": "tool", "content": "2", "tool_call_id": call.call_id}


def test_a_form_of_the_text_reaches_the_worker(scripted: openai.OpenAI, owner: ScriptedOwner) -> None:
    form: Any = {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True}
    choice: Any = {"type": "function", "name": "add"}
    response = scripted.responses.create(
        model="simulated", input="x", text={"format": form}, tools=TOOLS, tool_choice=choice, background=True
    )
    params = json.loads(str(owner.client.hget(keys.record(response.id), "params")))
    inner = {name: value for name, value in form.items() if name != "type"}
    assert params["response_format"] == {"type": "json_schema", "json_schema": inner}
    assert params["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert response.to_dict()["text"] == {"format": form}
    assert response.to_dict()["tool_choice"] == choice


def test_only_responses_are_found_here(simulated_api: ApiServer, client: openai.OpenAI) -> None:
    completion = client.completions.create(model="simulated", prompt="x", max_tokens=1)
    for id in (completion.id, "resp_none", "x" * 200):
        with pytest.raises(openai.NotFoundError) as refusal:
            client.responses.retrieve(id)
        assert refusal.value.code == "job_not_found"


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("max_tokens", 5, "max_tokens"),
        ("response_format", {"type": "text"}, "response_format"),
        ("logprobs", 1, "logprobs"),
        ("n", 2, "n"),
        ("conversation", "c", "conversation"),
        ("reasoning", {"effort": "low"}, "reasoning"),
        ("truncation", "auto", "truncation"),
        ("include", ["message.output_text.logprobs"], "include"),
        ("tools", [{"type": "web_search"}], "tools"),
        ("text", {"format": {"type": "xml"}}, "text.format"),
        ("text", {"verbosity": "low"}, "text.verbosity"),
        ("input", [], "input"),
        ("input", [{"type": "item_reference", "id": "x"}], "input[0]"),
        ("input", [{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].type"),
        ("max_output_tokens", 0, "max_output_tokens"),
    ],
)
def test_what_is_not_possible_is_refused_by_name(client: openai.OpenAI, field: str, value: object, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.post("/responses", body={"input": "x", field: value}, cast_to=object)
    assert refusal.value.param == param


def test_a_cursor_that_is_none_is_refused(simulated_api: ApiServer, client: openai.OpenAI) -> None:
    id = client.responses.create(model="simulated", input="x", max_output_tokens=1).id
    with simulated_api.client() as http:
        wrong = http.get(f"/v1/responses/{id}?stream=true", headers={"Last-Event-ID": "3.end"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "bad_cursor")
        assert http.get(f"/v1/responses/{id}?starting_after=3").status_code == 400
        assert http.get(f"/v1/responses/{id}?stream=true&starting_after=-1").status_code == 400
        beyond = http.get(f"/v1/responses/{id}?stream=true&starting_after=1000")
        assert (beyond.status_code, beyond.text) == (200, "")


@pytest.mark.parametrize("stream", [False, True])
def test_an_input_too_long_is_refused_before_it_is_accepted(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as refusal:
        client.responses.create(model="simulated", input="word " * 8200, stream=stream)
    assert (refusal.value.code, refusal.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(openai.BadRequestError) as too_many:
        client.responses.create(model="simulated", input="x", max_output_tokens=8192, stream=stream)
    assert (too_many.value.code, too_many.value.param) == ("context_length_exceeded", "max_output_tokens")
