"""LLM engine: takes jobs, schedules them into slots, publishes their tokens and ends them.

One thread owns all state and all writes of the rides. Everything reaches it as an event on one inbox: deliveries from
Celery, updates from the Model executor, stop notices, answers to lease renewals. The child may run ahead of what the
ledger holds by a few steps only, so while the parent publishes step N the child computes step N + 1, and a parent that
is paused, cut off or dead stops it by itself.
"""

from __future__ import annotations

import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
from redis.exceptions import RedisError, ResponseError

from tasks.app import CarpoolCelery
from tasks.invitations import invitation_template
from tasks.keeper import Keeper
from tasks.ledger import SyncLedger
from tasks.ledger_types import Rider, SlotAnswer
from tasks.redis_clients import connect, is_full
from tasks.registry import WorkerInfo
from tasks.settings import Settings
from worker.delivery import CelerySide, Delivery
from worker.heartbeat import Heartbeat
from worker.lease_renewal import LeaseRenewal
from worker.messages import Abort, Aborted, Accepted, Broken, Command, Failed, ModelCard, Phase, Ready, Stepped, Update
from worker.model_executor import ChildDied, ChildSaid, ExecutorEvent, GaveUp, ModelExecutor
from worker.native_tasks import accept_native
from worker.publisher import Publisher, error_json
from worker.registration import Condition, Registration
from worker.ride_reports import RideReports
from worker.step_times import StepReports, StepTimes
from worker.stop_notices import StopNotices
from worker.workload_manager import End, Ride, RideState, WorkloadManager

_log = structlog.get_logger("carpool.engine")
#: A pass of the loop lasts no longer than this, so that a live engine can be told from a dead one.
_PASS_S = 1.0
#: Wait before the next call while the ledger does not answer.
_RETRY_S = 0.2
#: After its drain time a child that does not let go of its sequences is ended.
_LEAVE_S = 5.0


@dataclass(frozen=True, slots=True)
class _StopWanted:
    id: str


@dataclass(frozen=True, slots=True)
class _Renewed:
    answers: list[tuple[Rider, SlotAnswer]]


@dataclass(frozen=True, slots=True)
class _Drain:
    deadline: float


@dataclass(frozen=True, slots=True)
class _Close:
    pass


_Event = Delivery | ExecutorEvent | _StopWanted | _Renewed | _Drain | _Close


class LLMEngine:
    """The engine of one worker. Public methods may be called from any thread and return at once, but for `close`.

    Attributes:
        drained: set once a drain, or the end of the model process, has left no ride behind.
    """

    def __init__(
        self,
        settings: Settings,
        celery: CarpoolCelery,
        name: str,
        on_gave_up: Callable[[str], None],
        executor: ModelExecutor,
        inbox: queue.SimpleQueue[_Event],
        reports: RideReports | None = None,
    ) -> None:
        """`executor` is started, and its events come to `inbox`.

        `on_gave_up` is called, from any thread, where this worker cannot go on, with the cause. `reports` tells what
        becomes of the rides.
        """
        self.celery_side = CelerySide()
        self.incarnation = uuid.uuid4().hex
        self.name = name
        self.drained = threading.Event()
        self._settings = settings
        self._on_gave_up = on_gave_up
        self._inbox = inbox
        self._client = connect(settings)
        self._ledger = SyncLedger(self._client, settings)
        self._slots = WorkloadManager(settings.max_batch_size, settings.run_ahead_steps)
        self._executor = executor
        self._keeper = Keeper(settings, invitation_template(celery), on_outdated=on_gave_up)
        self._reports = reports or RideReports()
        self._publisher = Publisher(
            self._ledger, self._slots, self.celery_side, self._send, self._keeper.wake, settings.pool, self._reports
        )
        self._registration = Registration(settings, self.incarnation, name)
        self._step_times = StepTimes()
        self._heartbeat = Heartbeat(settings, self._keeper, self._describe, StepReports(settings, self._step_times))
        self._renewal = LeaseRenewal(settings, lambda: self._riders, self._is_alive, self._renewed)
        self._notices = StopNotices(settings, self._ledger.calls.db, self.incarnation, self._stop_wanted)
        self._thread = threading.Thread(target=self._run, name="carpool-engine", daemon=True)

        # state of the engine's thread
        self._generation = 0  # of the child that is ready
        self._postponed: list[Delivery] = []
        self._unrecorded: list[Delivery] = []  # plain tasks for which a full ledger had no room
        self._record_at = 0.0
        self._deaths: list[ChildDied] = []
        self._steps_to_accept = 0
        self._unregistered: ModelCard | None = None
        self._away_since: float | None = None
        self._retry_at = 0.0
        self._drain_deadline: float | None = None
        self._progress_at = time.monotonic()
        self._closing = False

        # what other threads may read, each replaced as a whole
        self._state = "loading"
        self._phase = Phase("starting the model process")
        self._card: ModelCard | None = None
        self._riders: tuple[tuple[Rider, str], ...] = ()
        self._num_free = settings.max_batch_size
        self._alive_at = time.monotonic()

    # --- from other threads -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Register the pool, so that its jobs are accepted from now on, and take part."""
        self._registration.announce(self._client)
        self._keeper.start()
        self._heartbeat.start()
        self._renewal.start()
        self._notices.start()
        self._thread.start()

    def offer(self, delivery: Delivery) -> None:
        """A message has come."""
        self._inbox.put(delivery)

    def num_wanted(self) -> int:
        """The gate of the broker: how many slots are free, once the child is ready."""
        return self._num_free if self._state == "ready" else 0

    def drain(self) -> None:
        """No new claims; riders get `drain_s` to finish, the rest is handed back at its position."""
        self._inbox.put(_Drain(time.monotonic() + self._settings.drain_s))

    def close(self) -> None:
        """End threads and child. What still rides is left to its lease: `drain` first hands it back."""
        self._inbox.put(_Close())
        if self._thread.is_alive():
            self._thread.join(timeout=10 * self._settings.redis_timeout_s)
        self._executor.close(timeout_s=5.0)
        self._renewal.close()
        self._notices.close()
        self._heartbeat.close()
        self._keeper.close()
        self._client.close()

    def _stop_wanted(self, id: str) -> None:
        self._inbox.put(_StopWanted(id))

    def _renewed(self, answers: list[tuple[Rider, SlotAnswer]]) -> None:
        if any(answer.verdict == "fenced" or answer.stop for _, answer in answers):
            self._inbox.put(_Renewed(answers))

    def _is_alive(self) -> bool:
        return time.monotonic() - self._alive_at < self._settings.step_timeout_s

    def _describe(self) -> tuple[WorkerInfo, str]:
        now = Condition(self._state, self._phase, self._executor.pid, self._num_free)
        return self._registration.describe(now), self._registration.card_key

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._pass()
        except Exception as error:
            # a broken engine must not look alive: the worker ends, and its jobs go to another
            _log.exception("engine_broke")
            self._state = "broken"
            self._on_gave_up(f"the engine's thread broke: {error!r}. Please report this with the log")
            self.drained.set()
            raise

    def _pass(self) -> None:
        event: _Event | None
        try:
            event = self._inbox.get(timeout=self._wait_s())
        except queue.Empty:
            event = None
        self._alive_at = time.monotonic()
        try:
            while event is not None:
                self._handle(event)
                event = None if self._inbox.empty() else self._inbox.get_nowait()
            if self._away_since is None or time.monotonic() >= self._retry_at:
                self._settle()
        except (RedisError, OSError) as error:
            self._ledger_is_away(error)
        self._show()

    def _wait_s(self) -> float:
        if self._away_since is not None:
            return max(0.0, self._retry_at - time.monotonic())
        if any(ride.has_news() or ride.wants_hand_back for ride in self._slots.rides):
            return 0.0
        return _PASS_S

    def _handle(self, event: _Event) -> None:
        match event:
            case Delivery():
                self._postponed.append(event)
            case ChildSaid():
                self._child_said(event.generation, event.update)
            case ChildDied():
                self._child_died(event)
            case GaveUp():
                self._state = "broken"
                self._drain_deadline = time.monotonic()
                self._on_gave_up(event.cause)
            case _StopWanted():
                ride = self._slots.get(event.id)
                if ride is not None:
                    self._publisher.ask(ride)
            case _Renewed():
                for rider, answer in event.answers:
                    ride = self._slots.get(rider.id)
                    if ride is not None and ride.rider == rider:
                        self._publisher.renewed(ride, answer)
            case _Drain():
                self._drain_deadline = event.deadline
                self._state = "draining"
                self._heartbeat.wake()
            case _Close():
                self._closing = True

    def _settle(self) -> None:
        """Bring the ledger up to date, then do what only makes sense once it is."""
        self._publisher.flush()
        for death in self._deaths:
            self._publisher.charge(f"{self.incarnation}.{death.generation}", death.cause)
        if self._deaths:
            self._deaths.clear()
            self._publisher.hand_to_others(self.incarnation)
        if self._steps_to_accept:
            self._send(Accepted(self._steps_to_accept))
            self._steps_to_accept = 0
        if self._unregistered is not None:
            self._register(self._unregistered)
        if self._unrecorded and time.monotonic() >= self._record_at:
            self._postponed.extend(self._unrecorded)
            self._unrecorded.clear()
        while self._postponed:
            together = self._publisher.claimable(self._postponed)
            if len(together) > 1 and self._state == "ready" and self._card is not None:
                self._claim(together, self._card.fingerprint)
            else:
                self._take(self._postponed[0])
                del self._postponed[0]
        if self._state == "ready":
            for ride in self._publisher.board():
                self._give_to_child(ride)
        if self._away_since is not None:
            _log.info("ledger_is_back", away_s=round(time.monotonic() - self._away_since, 1))
            self._away_since = None
            self._progress_at = time.monotonic()
        self._watch_progress()
        self._go_on_draining()

    def _take(self, delivery: Delivery) -> None:
        if self._publisher.adopt(delivery):
            return
        try:
            is_ours = not delivery.native or accept_native(self._ledger, delivery, self._settings)
        except ResponseError as error:
            if not is_full(error):
                raise
            self._unrecorded.append(delivery)
            self._record_at = time.monotonic() + _PASS_S
            return
        if not is_ours:
            self.celery_side.given_up(delivery)
            self._keeper.wake(self._settings.pool)
        elif self._slots.num_free <= 0 or self._state != "ready" or self._card is None:
            self._publisher.refuse(delivery)
        else:
            for ride in self._publisher.claim([delivery], self._card.fingerprint, self.incarnation, self.name):
                if ride is not None:
                    self._give_to_child(ride)

    def _claim(self, together: Sequence[Delivery], fingerprint: str) -> None:
        for ride in self._publisher.claim(together, fingerprint, self.incarnation, self.name):
            del self._postponed[0]
            if ride is not None:
                self._give_to_child(ride)

    def _give_to_child(self, ride: Ride) -> None:
        self._progress_at = time.monotonic()
        self._send(ride.add_command())

    def _ledger_is_away(self, error: Exception) -> None:
        """Riders keep what they hold, the child waits after a few steps, and the same is tried again."""
        now = time.monotonic()
        if self._away_since is None:
            self._away_since = now
            _log.warning("ledger_is_away", error=str(error))
        self._retry_at = now + _RETRY_S

    def _show(self) -> None:
        """Let other threads see what rides, and Celery and the pump that slots came free."""
        self._riders = tuple((ride.rider, self._publisher.tag(ride.id)) for ride in self._slots.rides)
        if self._num_free != self._slots.num_free:
            self._num_free = self._slots.num_free
            self._heartbeat.wake()
            self.celery_side.wake()

    def _send(self, command: Command) -> None:
        self._executor.send(command, self._generation)

    # --- what the child says ----------------------------------------------------------------------------------------

    def _child_said(self, generation: int, update: Update) -> None:
        self._progress_at = time.monotonic()
        match update:
            case Stepped():
                self._steps_to_accept = update.step
                self._stepped(update)
            case Failed():
                ride = self._slots.get(update.id)
                if ride is not None and ride.in_child:
                    error = error_json(update.code, update.message)
                    ride.out_of_child(End("failed", "error", update.tail, error))
            case Aborted():
                ride = self._slots.get(update.id)
                if ride is not None and ride.state is RideState.LEAVING:
                    ride.left(update.tail)
            case Ready():
                self._generation = generation
                self._ready(update)
            case Phase():
                self._phase = update
                self._heartbeat.wake()
            case Broken():
                _log.error("model_process_cannot_serve", cause=update.message)

    def _stepped(self, update: Stepped) -> None:
        now, made = time.monotonic(), []
        for delta in update.deltas:
            ride = self._slots.get(delta.id)
            if ride is None or not ride.in_child:
                continue
            if delta.ids:
                made.append((None if ride.tokens_at is None else now - ride.tokens_at, len(delta.ids)))
                ride.tokens_at = now
            self._registration.rate.note(len(delta.ids))
            ride.ids.extend(delta.ids)
            ride.texts.extend(delta.texts)
            ride.lp.extend(delta.lp)
            if ride.times.awaits_token and delta.ids:
                ride.times.first_token()
                self._reports.first_token(ride)
            if delta.prompt_tokens is not None:
                ride.prompt_tokens = delta.prompt_tokens
            if delta.cached_tokens:
                ride.cached_tokens, ride.prompt_tokens_sent = delta.cached_tokens, False
            if delta.finish is not None:
                ride.out_of_child(End("succeeded", delta.finish, delta.tail))
        self._step_times.note(update.seconds, made)

    def _ready(self, update: Ready) -> None:
        self._unregistered = self._card = update.card
        self._registration.loaded(update.card)
        self._phase = Phase("ready", 1.0)
        self._steps_to_accept = 0
        if self._drain_deadline is None:
            self._state = "ready"
        card = update.card
        _log.info("model_ready", model=card.model, device=card.device, dtype=card.dtype, load_s=round(update.load_s, 2))

    def _register(self, card: ModelCard) -> None:
        self._registration.publish(self._client, card)
        self._unregistered = None
        self._heartbeat.wake()
        self.celery_side.wake()

    def _child_died(self, death: ChildDied) -> None:
        """What it gave us is still sent; then the ledger charges those of its riders who may have caused it."""
        _log.error("model_process_died", cause=death.cause, riders=len(self._slots))
        if self._state == "ready":
            self._state = "restarting"
        self._phase = Phase("restarting the model process")
        self._steps_to_accept = 0
        self._deaths.append(death)
        for ride in self._slots.rides:
            if ride.in_child:
                ride.times.out_of_child(death.cause)
                self._reports.model_died(ride, death.cause)
            if ride.state is RideState.LEAVING:
                ride.left()
        self._heartbeat.wake()

    # --- bounds -----------------------------------------------------------------------------------------------------

    def _watch_progress(self) -> None:
        """A step, or a load, that does not come forward is treated as a death."""
        if any(ride.in_child for ride in self._slots.rides):
            bound, what = self._settings.step_timeout_s, "decoding"
        elif self._state in ("loading", "restarting"):
            bound, what = self._settings.load_timeout_s, "loading"
        else:
            self._progress_at = time.monotonic()
            return
        if time.monotonic() - self._progress_at > bound:
            self._progress_at = time.monotonic()
            self._executor.kill(f"no progress for {bound:g} s while {what}")

    def _go_on_draining(self) -> None:
        if self._drain_deadline is None:
            return
        late = time.monotonic() - self._drain_deadline
        for ride in self._slots.rides:
            if ride.state is RideState.CLAIMED:
                self._publisher.hand_back(ride)
            elif ride.state is RideState.BOARDED and late >= 0:
                ride.leave("")
                self._send(Abort(ride.id))
            elif ride.state is RideState.LEAVING and late >= _LEAVE_S:
                self._executor.kill("it did not let go of its sequences while draining", self._generation)
        if not len(self._slots) and not self._postponed:
            self.drained.set()
