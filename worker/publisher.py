"""The ledger's side of the rides: claims, boards, publishes, ends and hands back, and learns what the ledger wants.

It writes what the ledger does not hold yet. So a call that failed is simply made again, and a lost answer or a lost
tail of the log (the ledger says where it is) is mended by going on from there. Used by the engine's thread alone.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

import structlog

from tasks import keys
from tasks.codes import CarpoolError
from tasks.entries import decode
from tasks.ledger import SyncLedger
from tasks.ledger_types import Claim, Rider, SlotAnswer, SlotWrite
from worker.delivery import CelerySide, Delivery
from worker.messages import Abort, Command
from worker.ride_reports import RideReports
from worker.workload_manager import End, Ride, RideState, WorkloadManager

_log = structlog.get_logger("carpool.engine")
#: A slot that the ledger refuses to write so often is given up; its lease runs out and the reaper looks at the job.
_MAX_SLOT_ERRORS = 5


class SlotRefused(OSError):
    """The ledger could not write one slot; the write is tried again."""


class Publisher:
    """Keeps the ledger and Celery in step with the rides.

    Args:
        send: gives a command to the child that the rides are in.
        pump: asks for a pool's next invitations.
        pool: the pool that this worker serves.
        reports: tells what becomes of the rides.
    """

    def __init__(
        self,
        ledger: SyncLedger,
        slots: WorkloadManager,
        celery_side: CelerySide,
        send: Callable[[Command], None],
        pump: Callable[[str], None],
        pool: str,
        reports: RideReports | None = None,
    ) -> None:
        self._ledger = ledger
        self._calls = ledger.calls
        self._slots = slots
        self._celery_side = celery_side
        self._send = send
        self._pump = pump
        self._pool = pool
        self._reports = reports or RideReports()
        self._deliveries: dict[str, Delivery] = {}
        self._claimed_at: dict[str, float] = {}
        #: Of claims whose answer we have not seen: sent again with the same nonce, a claim that was granted stays ours.
        self._nonces: dict[str, str] = {}

    def tag(self, id: str) -> str:
        """Delivery tag of the message under which a job rides, "" where there is none."""
        delivery = self._deliveries.get(id)
        return delivery.tag if delivery else ""

    # --- in ---------------------------------------------------------------------------------------------------------

    def adopt(self, delivery: Delivery) -> bool:
        """Whether the message is one more of a job that rides here.

        The same message, delivered again, replaces the handle of a lost connection. Another message for the job is done
        with: two unacknowledged messages would count as two slots with the broker.
        """
        if self._slots.get(delivery.id) is None:
            return False
        if delivery.tag == self._deliveries[delivery.id].tag:
            self._deliveries[delivery.id] = delivery
        else:
            self._celery_side.given_up(delivery)
        return True

    def refuse(self, delivery: Delivery) -> None:
        """No slot for it: the job goes back to those that are not invited."""
        pool = self._ledger.run(self._calls.unclaimed(delivery.id))
        self._celery_side.given_up(delivery)
        if pool:
            self._pump(pool)

    def claimable(self, waiting: Sequence[Delivery]) -> list[Delivery]:
        """Invitations at the head of those that wait, to different jobs that do not ride here, and a slot for each.

        What needs more than a claim is no such one: a plain task, another message of a job that rides.
        """
        together: dict[str, Delivery] = {}
        for delivery in waiting[: self._slots.num_free]:
            if delivery.native or delivery.id in together or self._slots.get(delivery.id) is not None:
                break
            together[delivery.id] = delivery
        return list(together.values())

    def claim(
        self, deliveries: Sequence[Delivery], fingerprint: str, incarnation: str, worker: str
    ) -> Iterator[Ride | None]:
        """Make the jobs ours, in one round trip, and give each a free slot, at the position of its log.

        One after the other is dealt with as the caller asks for it; where the ledger goes away in between, the rest may
        be claimed again. Yields the ride where it has boarded with its claim: the child is to be given it now.
        """
        board = not self._slots.has_suspects
        nonces = [self._nonces.setdefault(delivery.id, uuid.uuid4().hex) for delivery in deliveries]
        claims = self._ledger.run_all(
            self._calls.claim(delivery.id, nonce, fingerprint, incarnation, worker, os.getpid(), board=board)
            for delivery, nonce in zip(deliveries, nonces, strict=True)
        )
        for delivery, nonce, claim in zip(deliveries, nonces, claims, strict=True):
            yield self._claimed(delivery, nonce, claim)

    def _claimed(self, delivery: Delivery, nonce: str, claim: Claim) -> Ride | None:
        if claim.verdict == "mismatch":
            self.refuse(delivery)
            del self._nonces[delivery.id]
            return None
        if claim.verdict != "ok":
            if claim.verdict == "newer":
                # its mark stays: it is invited again in seconds and not at once, or we two would go on for ever
                _log.warning("job_of_a_newer_release", job_id=delivery.id)
            self._celery_side.given_up(delivery)
            del self._nonces[delivery.id]
            return None
        try:
            ride = Ride.from_claim(delivery.id, nonce, claim)
        except ValueError as error:  # written by no release that keeps the rules: it must not take the worker along
            self._unreadable(delivery, Rider(delivery.id, claim.epoch, nonce), claim.k, error)
            return None
        if claim.k:
            self._read_log(ride)
        del self._nonces[delivery.id]
        self._slots.add(ride)
        self._deliveries[ride.id] = delivery
        self._claimed_at[ride.id] = time.monotonic()
        self._celery_side.started(delivery)
        self._reports.claimed(ride, claim)
        if claim.stop:
            self.stop(ride, claim.stop)
        if not claim.boarded or ride.state is not RideState.CLAIMED:
            return None
        ride.boarded()
        return ride

    def _unreadable(self, delivery: Delivery, rider: Rider, k: int, error: ValueError) -> None:
        message = f"the job's record cannot be read by its worker ({error}): submit the job again"
        end = SlotWrite(
            rider.id,
            rider.epoch,
            rider.nonce,
            first=k + 1,
            final="failed",
            finish_reason="error",
            error=error_json("engine_error", message),
        )
        self._ledger.run(self._calls.step([end]))
        self._celery_side.given_up(delivery)
        del self._nonces[rider.id]

    def _read_log(self, ride: Ride) -> None:
        """The tokens that the job already has."""
        log: list[tuple[str, dict[str, str]]] = self._ledger.client.xrange(keys.log(ride.id))  # type: ignore[assignment]
        for _, fields in log:  # our clients decode, which redis-py's types do not know
            entry = decode(fields["d"]).after(len(ride.ids))
            ride.ids.extend(entry.ids)
            ride.texts.extend(entry.text)
            ride.lp.extend(entry.lp)
        if len(ride.ids) != ride.sent:
            message = f"the job's log holds {len(ride.ids)} tokens and its record says {ride.sent}: submit it again"
            ride.out_of_child(End("failed", "error", error=error_json("engine_error", message)))
            ride.sent, ride.ids = min(ride.sent, len(ride.ids)), ride.ids[: ride.sent]
            ride.texts, ride.lp = [], []

    def board(self) -> list[Ride]:
        """The rides that may be given to the child now; the ledger has heard of each, and agreed."""
        boarding = self._slots.next_to_board()
        if not boarding:
            return []
        answers = self._ledger.run(self._calls.step([ride.write(board=True) for ride in boarding]))
        agreed = []
        for ride, answer in zip(boarding, answers, strict=True):
            if answer.verdict == "ok" and not answer.stop:
                ride.boarded()
                agreed.append(ride)
            elif answer.verdict == "error":
                # tried again in the next pass; raised here, the error would lose those that may board
                self._refused(ride, answer)
            else:
                self._answered(ride, answer)
        return agreed

    # --- on the way -------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write until the ledger holds all that we hold; one call a round for all slots."""
        while True:
            for ride in self._slots.rides:
                if ride.over_as is not None and not ride.in_child:
                    self._over(ride, ride.over_as)
                elif ride.wants_hand_back and not ride.has_news():
                    self.hand_back(ride)
            rides = [ride for ride in self._slots.rides if ride.has_news()]
            if not rides:
                return
            answers = self._ledger.run(self._calls.step([ride.write() for ride in rides]))
            for ride, answer in zip(rides, answers, strict=True):
                self._answered(ride, answer)

    def ask(self, ride: Ride) -> None:
        """Ask the ledger what it wants of a ride, by renewing it."""
        (answer,) = self._ledger.run(self._calls.renew([ride.rider]))
        self.renewed(ride, answer)

    def renewed(self, ride: Ride, answer: SlotAnswer) -> None:
        """What a renewal said. Its position may be older than what was written meanwhile, so it does not count."""
        if answer.verdict == "fenced":
            self._lost(ride, "")
        elif answer.verdict == "ended":
            self._lost(ride, answer.stop)
        elif answer.stop and answer.verdict != "error":
            self.stop(ride, answer.stop)

    def charge(self, generation: str, cause: str) -> None:
        """The child died; everything it gave us is in the ledger. Survivors may board again."""
        rides = [ride for ride in self._slots.rides if ride.state is not RideState.ENDING]
        if not rides:
            return
        fates = self._ledger.run(self._calls.child_died(generation, cause, [ride.rider for ride in rides]))
        for ride, fate in zip(rides, fates, strict=True):
            if fate.verdict == "back":
                ride.strikes, ride.struck_at = fate.strikes, fate.struck_at
                ride.state = RideState.CLAIMED
            else:
                self._over(ride, "failed" if fate.verdict == "ended" else "")

    def hand_to_others(self, incarnation: str) -> None:
        """While our model loads anew, another worker of the pool with free slots goes on with our riders."""
        client, elsewhere = self._ledger.client, 0
        for other in client.zrange(keys.pool_workers(self._pool), 0, -1):
            if other != incarnation:
                state, free = client.hmget(keys.worker(str(other)), ["state", "free"])
                elsewhere += int(free or 0) if state == "ready" else 0
        waiting = [ride for ride in self._slots.rides if ride.state is RideState.CLAIMED]
        for ride in waiting[:elsewhere]:
            self.hand_back(ride)

    # --- out --------------------------------------------------------------------------------------------------------

    def stop(self, ride: Ride, stop: str) -> None:
        """The ledger wants this job to stop. An end that came first wins; the status waits for the child's word."""
        if ride.over_as is not None:
            return
        if ride.state is RideState.BOARDED:
            ride.leave(stop)
            self._send(Abort(ride.id))
        elif ride.state is RideState.LEAVING:
            ride.leaving_for = stop
        elif ride.end is None or ride.wants_hand_back:
            ride.out_of_child(End(stop, stop))

    def hand_back(self, ride: Ride) -> None:
        """Give a job back at its position, for another worker to go on."""
        answer = self._ledger.run(self._calls.release(ride.rider))
        self._over(ride, "" if answer in ("released", "fenced") else answer, handed_back=answer == "released")
        self._pump(self._pool)

    def _answered(self, ride: Ride, answer: SlotAnswer) -> None:
        match answer.verdict:
            case "ok":
                ride.sent = answer.k
                ride.prompt_tokens_sent = ride.prompt_tokens is not None
            case "at" if answer.k <= len(ride.ids):
                if answer.k < ride.sent:
                    ride.prompt_tokens_sent = False  # the ledger lost its tail, and maybe this with it
                ride.sent = answer.k
            case "ended":
                ride.sent = answer.k  # the last tokens came with the end
                self._lost(ride, answer.stop)
                return
            case "error":
                self._refused(ride, answer)
                if ride.over_as is None:
                    raise SlotRefused(f"the ledger refused to write job {ride.id}: {answer.stop}")
                return
            case _:
                self._lost(ride, "")
                return
        if answer.stop:
            self.stop(ride, answer.stop)

    def _refused(self, ride: Ride, answer: SlotAnswer) -> None:
        ride.errors += 1
        _log.error("ledger_refused_a_slot", job_id=ride.id, error=answer.stop)
        if ride.errors >= _MAX_SLOT_ERRORS:
            self._lost(ride, "")

    def _lost(self, ride: Ride, status: str) -> None:
        """The ledger is done with this claim: the job has ended with `status`, or "" where another owns it.

        While the child has the sequence the slot is in use, and the job is not taken up here again: tokens that are
        still on their way would pass for those of a new ride.
        """
        if ride.over_as is not None:
            return
        ride.over_as = status
        if not status:
            _log.warning("ride_lost", job_id=ride.id, tokens=ride.sent)
        if ride.state is RideState.BOARDED:
            ride.leave("")
            self._send(Abort(ride.id))
        elif not ride.in_child:
            self._over(ride, status)

    def _over(self, ride: Ride, status: str, *, handed_back: bool = False) -> None:
        """Free the slot. `status` is the final status that this owner wrote, "" where it wrote none."""
        self._slots.remove(ride.id)
        delivery = self._deliveries.pop(ride.id)
        runtime = time.monotonic() - self._claimed_at.pop(ride.id)
        if status or handed_back:  # of a ride that another has taken its successor tells
            self._reports.over(ride, status or "handed_back")
        if status:
            reason = ride.end.finish_reason if ride.end and ride.end.finish_reason else status
            self._celery_side.ended(delivery, status, f"{ride.sent} tokens, {reason}", runtime)
        else:
            self._celery_side.given_up(delivery)


def error_json(code: str, message: str) -> str:
    """An error as the ledger keeps it."""
    return json.dumps(CarpoolError(code, message).body(), ensure_ascii=False)
