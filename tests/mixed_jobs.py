"""Many jobs at once over HTTP, of random lengths, some cancelled, their streams cut and taken up again."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.api_server import ApiServer, events_of


@dataclass(frozen=True)
class Plan:
    """One job: what it asks for, whether it is cancelled on the way, and after how many events its stream is cut."""

    body: dict[str, Any]
    cancelled: bool
    cut_after: int


def draw_plans(
    number: int, seed: int, longest: int, body_of: Callable[[int, random.Random], dict[str, Any]]
) -> list[Plan]:
    """Plans with lengths up to `longest`; a quarter of them is cancelled."""
    draw = random.Random(seed)
    return [
        Plan(
            {**body_of(i, draw), "max_tokens": draw.randrange(1, longest)}, draw.random() < 0.25, draw.randrange(1, 20)
        )
        for i in range(number)
    ]


def run_all(api: ApiServer, plans: list[Plan], whole_of: Callable[[Plan], str], clients: int = 10) -> None:
    """Run the plans side by side. Each that finishes must have its whole text, each cancelled one a beginning of it."""

    def run(plan: Plan) -> None:
        whole = whole_of(plan)
        with api.client() as client, api.client() as other:
            id = client.post("/jobs", json=plan.body).json()["id"]
            got, cursor, tokens = "", "", 0
            while not cursor.endswith(".end"):
                patience = plan.cut_after
                with client.stream("GET", f"/jobs/{id}/stream", headers={"Last-Event-ID": cursor}) as response:
                    for event in events_of(response):
                        if event.data is None:
                            continue
                        assert event.data["sequence_id"] == id
                        got += event.data["token"]
                        cursor = event.id
                        tokens += 1
                        patience -= 1
                        if plan.cancelled and tokens > 3:
                            other.post(f"/jobs/{id}/cancel")
                        if not patience:
                            break
            job = client.get(f"/jobs/{id}").json()
            assert got == job["text"]
            if job["status"] == "succeeded":
                assert got == whole, plan
            else:
                assert plan.cancelled, job
                assert job["status"] == "cancelled"
                assert whole.startswith(got), plan

    with ThreadPoolExecutor(clients) as threads:
        list(threads.map(run, plans))
