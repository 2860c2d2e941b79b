"""What one token does to one sequence: text, stop strings, end-of-sequence, max_tokens. The same for every engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tasks.entries import NO_LOGPROB, TokenLogprob
from worker.detokenizer import Detokenizer
from worker.engines.base import Logprob, Tokenizer
from worker.messages import Delta
from worker.stop_matcher import StopMatcher


class TextSequence:
    """The text side of a sequence that rides: ids in, released text and the end out.

    Attributes:
        finish: None while it rides; "stop" (stop string, end-of-sequence token or complete grammar) or "length"
            (exactly max_tokens).
        num_tokens: tokens so far, those of earlier rides and an end-of-sequence token included.
    """

    def __init__(
        self, id: str, prompt_ids: Sequence[int], tokenizer: Tokenizer, stops: Sequence[str], max_tokens: int
    ) -> None:
        self.id = id
        self.finish: str | None = None
        self.num_tokens = 0
        self._max_tokens = max_tokens
        self._eos_ids = tokenizer.eos_ids
        self._token_bytes = tokenizer.token_bytes
        self._detokenizer = Detokenizer(tokenizer.decode, prompt_ids)
        self._stop_matcher = StopMatcher(stops)
        self._tail = ""
        #: Sent once, with the first delta of the ride.
        self._prompt_tokens: int | None = len(prompt_ids)

    def replay(self, ids: Iterable[int]) -> None:
        """Take in the tokens of earlier rides. Their text is out already; what was held then is held again."""
        for token_id in ids:
            if self.finish is not None:
                return
            self._take(token_id)

    def feed(
        self,
        ids: Iterable[int],
        logprobs: Sequence[Logprob] = (),
        *,
        is_complete: bool = False,
        cached_tokens: int = 0,
    ) -> Delta:
        """Take in new tokens, up to the one that ends the sequence; later ones are dropped.

        Args:
            logprobs: one per id, or none.
            is_complete: nothing can follow the last of these ids, so the sequence stops with it.
            cached_tokens: is said in the delta.
        """
        taken: list[int] = []
        texts: list[str] = []
        for token_id in ids:
            if self.finish is not None:
                break
            taken.append(token_id)
            texts.append(self._take(token_id))
        if is_complete and self.finish is None:
            self._finish("stop")
        elif is_complete and self.num_tokens >= self._max_tokens:
            self.finish = "stop"  # what is whole was not cut off
        lp = tuple(self._logged(logprob) for logprob in logprobs[: len(taken)])
        prompt_tokens, self._prompt_tokens = self._prompt_tokens, None
        return Delta(self.id, tuple(taken), tuple(texts), self.finish, self._tail, prompt_tokens, lp, cached_tokens)

    def end(self) -> str:
        """End the sequence from outside; returns the text that was still held."""
        return self._tail if self.finish is not None else self._held_text()

    def _take(self, token_id: int) -> str:
        self.num_tokens += 1
        if token_id in self._eos_ids:
            self._finish("stop")
            return ""
        text = self._stop_matcher.feed(self._detokenizer.feed(token_id))
        if self._stop_matcher.matched:
            self.finish = "stop"
        elif self.num_tokens >= self._max_tokens:
            self._finish("length")
        return text

    def _finish(self, reason: str) -> None:
        self._tail = self._held_text()
        # The bytes of a half character may have completed a stop string after all.
        self.finish = "stop" if self._stop_matcher.matched else reason

    def _logged(self, logprob: Logprob) -> TokenLogprob:
        top = [self._logged_token(token_id, value) for token_id, value in logprob.top]
        return {**self._logged_token(logprob.id, logprob.value), "top": top}

    def _logged_token(self, token_id: int, value: float) -> TokenLogprob:
        # Six digits tell apart what float32 does, and the log is kept in memory.
        return {"id": token_id, "lp": round(max(value, NO_LOGPROB), 6), "b": list(self._token_bytes(token_id))}

    def _held_text(self) -> str:
        return self._stop_matcher.feed(self._detokenizer.flush()) + self._stop_matcher.flush()
