"""Who computes what in the next step, who waits, and who ends: the whole policy of the engine.

First come, first served: `running` and then `waiting` are always in order of arrival. A sequence
joins the running ones from the head of the queue; when pages run out the last one goes back to it,
and recomputes later. So the oldest sequence never loses a page and advances in every step, which
is why every sequence ends.
"""

import heapq
import logging
from collections import Counter, deque

from gptoss_engine.config import InvalidConfig
from gptoss_engine.decoding import Decoder
from gptoss_engine.page_pool import PagePool
from gptoss_engine.prefix_cache import Hit, PrefixCache
from gptoss_engine.sequence import (
    NO_SEAT,
    NO_TOKEN,
    ScheduledItem,
    ScheduledStep,
    Sequence,
    Status,
    StepOutput,
)
from gptoss_engine.types import FinishReason, TokenChunk, TokenLogprob

log = logging.getLogger(__name__)


class Scheduler:
    """The queue of waiting sequences, the running ones, and their pages in both page groups.

    full, window: the pools of the layers that see everything and of those that see a window.
    sliding_window: a query at position i of a window layer sees keys i - sliding_window + 1 … i.
    max_num_tokens: of one sequence, prompt and answer together; the full pool holds as many.
    has_prefix_cache: whether a sequence begins with the pages that others have computed.
    Not thread-safe: one caller. It launches each step before it schedules the next, and updates
    with its output before it schedules the next but one. Steps run one after another in that order.
    So pages and seats of which no later step has need are given away at once: a step that is out
    may still read and write there, but whoever gets them writes later, and reads what it wrote.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        full: PagePool,
        window: PagePool,
        sliding_window: int,
        max_num_tokens: int,
        decoder: Decoder,
        has_prefix_cache: bool = False,
    ) -> None:
        assert max_num_seqs <= max_num_batched_tokens
        assert max_num_tokens <= full.num_tokens
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.full = full
        self.window = window
        self.sliding_window = sliding_window
        self.decoder = decoder
        self.max_num_tokens = max_num_tokens
        # However a window lies, it touches no more pages than this.
        self.max_window_pages = min(
            (sliding_window - 2) // window.page_size + 2, window.pages_for(max_num_tokens)
        )
        if window.num_pages < self.max_window_pages:
            raise InvalidConfig(
                f"num_window_pages must be at least {self.max_window_pages}, the pages that one "
                f"window of {sliding_window} tokens can touch, got {window.num_pages}"
            )
        self.prefix_cache = PrefixCache(full, window, sliding_window) if has_prefix_cache else None
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_seats = [*reversed(range(max_num_seqs))]
        self.num_waiting_tokens = 0
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.num_finished: Counter[FinishReason] = Counter()
        self._open: dict[str, Sequence] = {}
        self._deadlines: list[tuple[float, str]] = []

    def __contains__(self, generation_id: str) -> bool:
        """Whether the generation is open: waiting, running or ending."""
        return generation_id in self._open

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        assert sequence.generation_id not in self._open
        assert sequence.num_prompt_tokens + sequence.max_tokens <= self.max_num_tokens
        self._open[sequence.generation_id] = sequence
        self.waiting.append(sequence)
        self.num_waiting_tokens += len(sequence.token_ids)
        if sequence.deadline is not None:
            heapq.heappush(self._deadlines, (sequence.deadline, sequence.generation_id))
        # Generations that ended in time leave theirs behind: far ones would gather for ever.
        if len(self._deadlines) > 2 * len(self._open) + 64:
            self._deadlines = [
                (each.deadline, each.generation_id)
                for each in self._open.values()
                if each.deadline is not None
            ]
            heapq.heapify(self._deadlines)

    def schedule(self) -> ScheduledStep:
        """Choose the next step and give its tokens their pages.

        One token of the budget belongs to each running sequence, so that no prefill holds up a
        decode. What is spare goes to the running ones in order of arrival, then to new ones. Where
        pages are short a prefill chunk shrinks; where not even one token has a page, the youngest
        sequences are preempted. A new sequence needs room for all of its tokens and must leave
        every running one a page to grow by: else it would be preempted before it gained anything.
        Of the window's group that is no page where a window has as many as it can touch.
        """
        self._make_room()
        decodes: list[ScheduledItem] = []
        prefills: list[ScheduledItem] = []
        preempted: list[Sequence] = []
        spare = self.max_num_batched_tokens - len(self.running)
        for sequence in self.running:  # Only its tail, beyond `sequence`, is cut while we go.
            while (room := self._room(sequence)) == 0 and self.running[-1] is not sequence:
                preempted.append(self._preempt_last())
            # The youngest may find no page. It keeps its own and waits for an older one to end.
            if room > 0:
                item = self._take(sequence, min(room, spare + 1))
                (decodes if item.is_decode else prefills).append(item)
                spare -= item.num_slots - 1

        if self.waiting and spare > 0 and not preempted:
            num_growing = sum(map(self._window_grows, self.running))
            while self.waiting and spare > 0 and len(self.running) < self.max_num_seqs:
                hit = self._hit(self.waiting[0])
                if not self._has_room(self.waiting[0], hit, num_growing):
                    break
                sequence = self._start_first(hit)
                item = self._take(sequence, min(self._room(sequence), spare))
                (decodes if item.is_decode else prefills).append(item)
                spare -= item.num_slots
                num_growing += self._window_grows(sequence)

        assert decodes or prefills or not (self.running or self.waiting), (
            "the oldest sequence must advance"
        )
        return ScheduledStep((*decodes, *prefills), tuple(preempted))

    def update(self, step: ScheduledStep, output: StepOutput) -> list[TokenChunk]:
        """Append what the step chose and end what is complete, or has no token.

        What it chose for a sequence that has ended since is dropped.
        """
        chunks: list[TokenChunk] = []
        for item, sampled, logprobs in zip(
            step.items, output.token_ids, output.logprobs, strict=True
        ):
            if item.is_sampled and item.sequence.status is not Status.FINISHED:
                accepted = self.decoder.accept(item.draft_token_ids, sampled)
                if NO_TOKEN in accepted:  # Its own rows alone: no row's mathematics has another's.
                    num_tokens = item.first + item.num_slots
                    error = f"the model's logits behind {num_tokens} tokens are not numbers"
                    chunks.append(self._finish(item.sequence, "error", error=error))
                    if self.prefix_cache is not None:  # Nobody else shall read such keys.
                        self.prefix_cache.forget(item.sequence)
                elif item.sequence.matcher is not None and item.sequence.matcher.error:
                    error = item.sequence.matcher.error
                    chunks.append(self._finish(item.sequence, "error", error=error))
                else:
                    chunks.append(self._append(item.sequence, accepted, logprobs))
        return chunks

    def abort(
        self, generation_id: str, error: str = "", reason: FinishReason = "abort"
    ) -> TokenChunk | None:
        """End a generation wherever it is; None if it is not open (it may have just ended)."""
        sequence = self._open.get(generation_id)
        return None if sequence is None else self._finish(sequence, reason, error=error)

    def expire(self, now: float) -> list[TokenChunk]:
        """Abort every generation whose deadline is not after `now`."""
        chunks: list[TokenChunk] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, generation_id = heapq.heappop(self._deadlines)
            sequence = self._open.get(generation_id)
            if sequence is not None and sequence.deadline == deadline:
                seconds = deadline - sequence.arrival_time
                error = f"the deadline, {seconds:.3f} s after the request's arrival, has passed"
                chunks.append(self._finish(sequence, "abort", error=error))
        return chunks

    def finish_all(self, reason: FinishReason, error: str) -> list[TokenChunk]:
        """End every open generation for the same reason."""
        return [self._finish(sequence, reason, error=error) for sequence in [*self._open.values()]]

    def _make_room(self) -> None:
        """Give back what the next step and those behind it need no more: everything of those who
        end with the token that is pending, of the others the pages that a window has left behind.
        """
        for sequence in [*self.running]:
            if sequence.num_tokens == sequence.num_prompt_tokens + sequence.max_tokens:
                self._leave(sequence, Status.ENDING)
            else:
                self.window.give_back_below(
                    sequence.page_tables.window,
                    sequence.num_computed_tokens - self.sliding_window + 1,
                )

    def _room(self, sequence: Sequence) -> int:
        """How many tokens after the computed ones have a page or could get one."""
        tables = sequence.page_tables
        reach = min(self.full.reach(tables.full), self.window.reach(tables.window))
        return reach - sequence.num_computed_tokens

    def _take(self, sequence: Sequence, limit: int) -> ScheduledItem:
        """Up to `limit` of the sequence's next tokens and guesses, given their pages."""
        num_uncomputed_tokens = sequence.num_uncomputed_tokens
        num_tokens = min(limit, num_uncomputed_tokens)
        draft: tuple[int, ...] = ()
        is_last = num_tokens == num_uncomputed_tokens
        # Nobody knows what a grammar lets follow a guess, nor counts it as said.
        can_guess = sequence.matcher is None and sequence.history is None
        if is_last and self.decoder.guesses and can_guess:
            assert not sequence.num_pending_tokens, "who guesses must know all tokens"
            useful = sequence.max_tokens - sequence.num_output_tokens - 1
            draft = self.decoder.propose(sequence)[: min(limit - num_tokens, useful)]
        item = ScheduledItem.of(sequence, num_tokens, draft)
        sequence.num_computed_tokens += num_tokens
        sequence.num_pending_tokens += item.is_sampled
        end, tables = item.first + item.num_slots, sequence.page_tables
        if end > len(tables.full) * self.full.page_size:  # Both tables are equally long.
            self.full.extend(tables.full, end)
            self.window.extend(tables.window, end)
            if self.prefix_cache is not None:  # The page before is full.
                self.prefix_cache.register(sequence)
        return item

    def _window_grows(self, sequence: Sequence) -> bool:
        """Whether a running sequence will need more pages of the window's group than it has left
        when its next step has given back what it no longer sees.
        """
        first_seen = max(0, sequence.num_computed_tokens - self.sliding_window + 1)
        num_pages = len(sequence.page_tables.window) - first_seen // self.window.page_size
        return num_pages < self.max_window_pages

    def _hit(self, sequence: Sequence) -> Hit:
        return Hit([], [], 0) if self.prefix_cache is None else self.prefix_cache.find(sequence)

    def _has_room(self, sequence: Sequence, hit: Hit, num_growing: int) -> bool:
        """For a sequence that begins with this hit. What is cached of it takes a free page, too."""
        num_tokens = len(sequence.token_ids)
        num_pages = self.full.pages_for(num_tokens) + len(self.running)
        num_window_pages = min(self.window.pages_for(num_tokens), self.max_window_pages)
        if num_window_pages + num_growing > self.window.num_free:
            return False
        if num_pages <= self.full.num_free:
            return True
        num_shared = sum(self.full.num_owners(page) > 0 for page in hit.full)
        return num_pages - num_shared <= self.full.num_free

    def _start_first(self, hit: Hit) -> Sequence:
        sequence = self.waiting.popleft()
        self.num_waiting_tokens -= len(sequence.token_ids)
        sequence.status = Status.RUNNING
        sequence.seat = self._free_seats.pop()
        self.running.append(sequence)
        if self.prefix_cache is not None:
            self.prefix_cache.share(sequence, hit)
        return sequence

    def _preempt_last(self) -> Sequence:
        sequence = self.running[-1]
        self._leave(sequence, Status.WAITING)
        sequence.num_computed_tokens = 0
        self.waiting.appendleft(sequence)
        self.num_waiting_tokens += len(sequence.token_ids)
        self.num_preemptions += 1
        log.info("generation %s preempted", sequence.generation_id)
        return sequence

    def _append(
        self, sequence: Sequence, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]
    ) -> TokenChunk:
        """The sequence with its new tokens, up to the one that ends it, and their chunk."""
        if sequence.num_output_tokens == 0:
            self.num_prompt_tokens += sequence.num_prompt_tokens
        reason: FinishReason | None = None
        num_appended = 0
        for token_id in token_ids:
            sequence.token_ids.append(token_id)
            num_appended += 1
            if sequence.matcher is not None:
                sequence.matcher.accept(token_id)
            is_over = sequence.matcher is not None and sequence.matcher.is_over
            if is_over or token_id in sequence.stop_token_ids:
                reason = "stop"
            elif sequence.num_output_tokens == sequence.max_tokens:
                reason = "length"
            if reason:
                break
        sequence.num_pending_tokens -= 1
        # The others were accepted guesses, which the step computed, too.
        sequence.num_computed_tokens += num_appended - 1
        if sequence.status is Status.WAITING:  # Preempted while the step ran.
            self.num_waiting_tokens += num_appended
        self.num_generated_tokens += num_appended
        token_ids, logprobs = token_ids[:num_appended], logprobs[:num_appended]
        if reason:
            return self._finish(sequence, reason, token_ids=token_ids, logprobs=logprobs)
        return _chunk(sequence, token_ids=token_ids, logprobs=logprobs)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        error: str = "",
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> TokenChunk:
        """The only way out of the scheduler, so that pages and counts are right on every way."""
        del self._open[sequence.generation_id]
        if sequence.status is Status.RUNNING:
            self._leave(sequence, Status.FINISHED)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
            self.num_waiting_tokens -= len(sequence.token_ids)
        sequence.status = Status.FINISHED
        self.num_finished[reason] += 1
        log.info(
            "generation %s finished: %s, %d tokens%s",
            sequence.generation_id,
            reason,
            sequence.num_output_tokens,
            f", {error}" if error else "",
        )
        return _chunk(sequence, reason=reason, error=error, token_ids=token_ids, logprobs=logprobs)

    def _leave(self, sequence: Sequence, status: Status) -> None:
        """Take its place, its seat and its pages from a running sequence."""
        self.running.remove(sequence)
        self._free_seats.append(sequence.seat)
        sequence.seat = NO_SEAT
        if self.prefix_cache is not None:
            self.prefix_cache.leave(sequence)
        self.full.give_back_all(sequence.page_tables.full)
        self.window.give_back_all(sequence.page_tables.window)
        sequence.status = status


def _chunk(
    sequence: Sequence,
    *,
    token_ids: tuple[int, ...],
    logprobs: tuple[TokenLogprob, ...],
    reason: FinishReason | None = None,
    error: str = "",
) -> TokenChunk:
    return TokenChunk(
        generation_id=sequence.generation_id,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=reason,
        error=error,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens or 0,
    )
