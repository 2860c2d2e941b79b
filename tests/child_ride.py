"""A real Model worker process, driven by its executor as the LLM engine would drive it."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final

from tasks.job_request import SamplingParams
from tasks.settings import Settings
from worker.messages import Abort, Aborted, Accepted, Add, Stepped
from worker.model_executor import ChildSaid, ExecutorEvent, ModelExecutor

#: Longest wait for anything that the child does, in seconds.
BOUND_S: Final = 20
PROMPT: Final = "Hello, I am"


class Ride:
    """An executor and the events that it told, in order."""

    def __init__(self, **options: Any) -> None:
        self._bound_s = options.pop("bound_s", BOUND_S)
        keywords = {name: options.pop(name) for name in ("child_main", "restart_delays_s") if name in options}
        settings = Settings(**{"engine": "simulated", "simulated_step_ms": 0, **options})
        self._queue: SimpleQueue[ExecutorEvent] = SimpleQueue()
        self.events: list[ExecutorEvent] = []
        self.pids: set[int] = set()
        self.executor = ModelExecutor(settings, self._queue.put, **keywords)

    def next(self) -> ExecutorEvent:
        event = self._queue.get(timeout=self._bound_s)
        self.events.append(event)
        if (pid := self.executor.pid) is not None:
            self.pids.add(pid)
        return event

    def until(self, is_it: Callable[[ExecutorEvent], bool]) -> ExecutorEvent:
        while not is_it(event := self.next()):
            pass
        return event

    def until_said(self, kind: type[Any], id: str | None = None) -> Any:
        event = self.until(
            lambda event: (
                isinstance(event, ChildSaid)
                and isinstance(event.update, kind)
                and (id is None or getattr(event.update, "id", None) == id)
            )
        )
        assert isinstance(event, ChildSaid)
        return event.update

    def until_ended(self, *ids: str, have: dict[str, list[int]] | None = None) -> dict[str, str]:
        """Accept every step until all of these have ended; returns their texts."""
        texts = dict.fromkeys(ids, "")
        riding = set(ids)
        while riding:
            for delta in self.next_step().deltas:
                texts[delta.id] = texts.get(delta.id, "") + "".join(delta.texts) + delta.tail
                if have is not None:
                    have.setdefault(delta.id, []).extend(delta.ids)
                if delta.finish is not None:
                    riding.discard(delta.id)
        return texts

    def next_step(self) -> Stepped:
        step = self.until_said(Stepped)
        assert isinstance(step, Stepped)
        self.executor.send(Accepted(step.step))
        return step

    def add(self, id: str, prompt: str = PROMPT, *, seed: int = 0, ids: tuple[int, ...] = (), **params: Any) -> None:
        self.executor.send(Add(id, prompt, None, SamplingParams(**{"max_tokens": 10, **params}), seed=seed, ids=ids))

    def num_steps_told(self) -> int:
        """How many steps the child has told, after it has answered a question."""
        self.executor.send(Abort("nobody"))
        self.until_said(Aborted, "nobody")
        return sum(isinstance(e, ChildSaid) and isinstance(e.update, Stepped) for e in self.events)
