"""Steps on a GPU: launched without waiting for it, those of few rows as CUDA graphs.

Nothing here reads what a step computed, or copies to or from memory that is not pinned: while a
step runs, the next one is enqueued behind it. All that a step reads and writes is on one stream, in
memory that is there from the start but for what the operators take from PyTorch's pool, which
`warm_up` fills.
"""

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gptoss_engine.batch import DueRows, Inputs, PageGroup, leading_decodes
from gptoss_engine.config import EngineConfig
from gptoss_engine.graphs import (
    MAXIMUM_PREFILL_ROWS,
    MIXED_ROWS,
    Capture,
    GraphShape,
    Outputs,
    StepGraphs,
    graph_sizes,
    mixed_shapes,
    ordered,
    prefill_shapes,
)
from gptoss_engine.kv_cache import KVCache
from gptoss_engine.model import GptOss
from gptoss_engine.progress import tracked
from gptoss_engine.sampler import (
    PENALIZED_ROWS,
    Guided,
    Penalized,
    Sampled,
    Sampler,
    Sampling,
    Wait,
)
from gptoss_engine.sequence import PageTables, ScheduledItem, ScheduledStep, Sequence, StepOutput
from gptoss_engine.staging import ALIGNMENT, KnownPages, Part, StagedStep, Staging
from gptoss_engine.types import (
    MAX_BIASED_TOKENS,
    MAX_LOGPROBS,
    MAX_STOP_TOKEN_IDS,
    GenerationRequest,
    SamplingParams,
)
from gptoss_kernels.ops import (
    MAXIMUM_DECODE_QUERIES,
    MAXIMUM_SEQUENCES,
    Decodes,
    Operators,
    SamplingRows,
    StepTensors,
)

log = logging.getLogger(__name__)

# Of a graph, for each of its decodes: a token id, and a page of each group; stop tokens that are
# masked, after each token that is due. A step that brings more runs without a graph.
_WORDS, _MASKED = 3, 16
# Tokens that are penalised or biased at a time, of all sequences: 12 MB.
_MOST_ENTRIES = 2**20
LONG_ROWS = 2048  # of a prefill that takes more than a few rounds of tiles
# Of steps whose launches are prepared before the first one is asked for: 20b's take the host 25 ms,
# in which every stream waits. Larger steps take the device as long.
PREPARED_ROWS = 1024
FILLERS = 16  # rows behind decodes: sizes of graphs are no further apart


class StepPlan(NamedTuple):
    """A step as numbers alone: all that a device is told of it, and all that another rank needs.

    sampling, rows, seats: how the tokens after these rows [S] are chosen, and who keeps them; items
    [B, 9], words [W]: as ops.unpack_step takes them; num_rows: of all sequences; decodes, and how
    many tokens are due after them; num_columns: of the page tables; is_graph: whether there is a
    graph of it; penalized: the rows whose tokens are chosen once more.
    """

    sampling: Sampling
    rows: np.ndarray
    seats: np.ndarray
    items: np.ndarray
    words: np.ndarray
    num_rows: int
    decodes: Decodes
    num_of_decodes: int
    num_columns: int
    is_graph: bool
    penalized: tuple[Penalized, ...] = ()

    @property
    def shape(self) -> GraphShape:
        """Of a graph."""
        num_decodes = self.decodes.num_sequences
        num_prefills = self.sampling.num_rows - num_decodes
        return GraphShape(num_decodes, self.num_rows - num_decodes, num_prefills)


class Sent(NamedTuple):
    """A step on the device: due, the rows after which a token is due, and sample_seats [S] int64,
    who keeps it; sampling: how; items [B, 9], words [W]: as ops.unpack_step takes them."""

    sampling: SamplingRows
    due: DueRows
    sample_seats: Tensor
    items: Tensor
    words: Tensor


class Launched:
    """A step that was enqueued.

    fetch: enqueues the way of its tokens to the host; called at once, but of a guided step.
    """

    def __init__(self, step: ScheduledStep, fetch: Callable[[], Sampled]) -> None:
        self._step = step
        self._fetch = fetch
        self._sampled = None if step.is_guided else fetch()

    def guide(self) -> None:
        """Enqueue the choice of what grammars allow, and the way to the host; waits for nothing."""
        self._sampled = self._fetch()

    def result(self) -> StepOutput:
        """Waits until the step has run; an error of the device's is raised here."""
        assert self._sampled is not None, "a step that is guided is told so"
        return StepOutput.of(self._step, *self._sampled.result())


class DeviceSteps:
    """Runs steps of a model over a cache, one after another.

    num_pages, num_window_pages: of the cache's page groups. max_model_len: tokens of one sequence.
    capture: what makes graphs of steps that are decodes alone, one prefill of up to prefill_rows,
    or prefills beside decodes or each other, of one of mixed_rows together; None where the
    operators do not allow it.
    wait: until an event of the device has happened.
    tell: called with each step's plan before it is enqueued, and with what is guided of it before
    its tokens are chosen once more, if it is set.
    """

    def __init__(
        self,
        model: GptOss,
        cache: KVCache,
        ops: Operators,
        config: EngineConfig,
        *,
        num_pages: int,
        num_window_pages: int,
        max_model_len: int,
        capture: Capture | None,
        prefill_rows: int = MAXIMUM_PREFILL_ROWS,
        mixed_rows: tuple[int, ...] = MIXED_ROWS,
        wait: Wait = torch.cuda.Event.synchronize,
    ) -> None:
        self._model = model
        self._cache = cache
        self._ops = ops
        self._sampler = Sampler(ops, wait)
        self._config = config
        self._num_pages = num_pages
        self._num_window_pages = num_window_pages
        self._max_model_len = max_model_len
        self._capture = capture
        self.tell: Callable[[StepPlan | Guided], None] | None = None
        self._graphs: StepGraphs | None = None
        self._graph_parts: dict[GraphShape, tuple[Part, ...]] = {}
        self._graph_inputs: dict[GraphShape, Sent] = {}
        # Of the step that was enqueued last.
        self._last: tuple[Sent, Outputs, tuple[Penalized, ...]] | None = None
        self._device = device = model.weights.embedding.device

        seats, window = config.max_num_seqs, model.config.sliding_window
        columns = -(-max_model_len // config.page_size)
        self._known = KnownPages(seats, config.page_size, window)
        self._full = torch.zeros((seats, columns), dtype=torch.int32, device=device)
        self._window = torch.zeros_like(self._full)
        # The last one is nobody's: for what is not to be kept.
        self._last_token_ids = torch.zeros(seats + 1, dtype=torch.int64, device=device)
        self._sizes = graph_sizes(seats)
        prefill_rows = min(prefill_rows, config.max_num_batched_tokens, max_model_len)
        most_rows = min(config.max_num_batched_tokens, max_model_len)
        self._mixed_shapes = mixed_shapes(seats, most_rows, mixed_rows)
        self._shapes = (
            *(GraphShape(size) for size in self._sizes),
            *prefill_shapes(prefill_rows),
            *self._mixed_shapes,
        )
        self._room = StepTensors.empty(
            config.max_num_batched_tokens + FILLERS, most_sequences(seats), columns, device
        )
        # Whatever lies in a column that no row sees is a page: the reference reads these, too.
        self._room.full_tables.zero_()
        self._room.window_tables.zero_()
        self._staging = Staging(self._most_bytes(), device, ops.transfer)
        # A seat's mask and its row, for a power of two of them.
        words = -(-model.config.vocab_size // 32) + 1
        most_guided = 1 << (seats - 1).bit_length()
        self._masks = Staging(4 * words * most_guided + ALIGNMENT, device, ops.transfer)
        # A sequence's penalised tokens are its own, the biased ones, and the sum is rounded up.
        own = min(model.config.vocab_size, max_model_len + MAX_BIASED_TOKENS)
        self._most_entries = min(1 << (seats * own - 1).bit_length(), _MOST_ENTRIES)
        most_bytes = Penalized.most_bytes(seats, self._most_masked, self._most_entries)
        self._penalties = Staging(most_bytes, device, ops.transfer)
        self._penalized_logits = torch.empty(
            (min(PENALIZED_ROWS, seats), model.config.vocab_size), device=device
        )

    @property
    def _most_masked(self) -> int:
        """Stop tokens of a sequence."""
        return MAX_STOP_TOKEN_IDS + len(self._model.config.eos_token_ids)

    def _most_bytes(self) -> int:
        """Of a step with as many rows, sequences, new pages and masked tokens as there can be.

        64 bytes a row that is sampled after, 36 a sequence, 4 a word, and what aligns them.
        """
        rows, seats = self._config.max_num_batched_tokens, self._config.max_num_seqs
        most_masked = max(self._most_masked, _MASKED)
        masked = min(rows, seats * MAXIMUM_DECODE_QUERIES) * most_masked
        # Pages that sequences share are sent for each: of full layers whole tables.
        columns, window = self._full.shape[1], self._model.config.sliding_window
        pages = seats * (columns + window // self._config.page_size + 2) + self._num_window_pages
        words = _WORDS * rows + pages + masked
        words += 2 * columns  # of a warm-up whose pages are fewer
        return 64 * (rows + FILLERS) + 36 * most_sequences(seats) + 4 * words + 1024

    @torch.inference_mode()
    def launch(self, step: ScheduledStep) -> Launched:
        """Enqueue the step, and the copy of its tokens to the host."""
        plan, sampling = self._plan(step)
        if step.is_penalized:
            sizes = (self._model.config.vocab_size, self._most_entries)
            plan = plan._replace(penalized=Penalized.build(step, plan.rows.tolist(), *sizes))
        if self.tell is not None:
            self.tell(plan)
        self._enqueue(plan)

        @torch.inference_mode()
        def fetch() -> Sampled:
            if step.is_guided:
                guided = Guided.build(step.due, self._model.config.vocab_size)
                if self.tell is not None:
                    self.tell(guided)
                self._guide(guided)
            assert self._last is not None
            sent, outputs, _ = self._last
            return self._sampler.fetch(*outputs, sent.sampling, sampling)

        return Launched(step, fetch)

    @torch.inference_mode()
    def follow(self, word: StepPlan | Guided) -> None:
        """Enqueue a step of another rank's, or its choice; its tokens stay on the device."""
        if isinstance(word, Guided):
            self._guide(word)
        else:
            self._enqueue(word)

    def _plan(self, step: ScheduledStep) -> tuple[StepPlan, Sampling]:
        """The step, and how its own tokens are chosen.

        Filled up, so that few numbers of sequences and rows occur: of decodes to those of a graph,
        behind them to those whose launches the operators have prepared before.
        """
        decodes = leading_decodes([item.num_slots for item in step.items])
        num_first, num_prefills = decodes.num_sequences, len(step.items) - decodes.num_sequences
        num_decodes, num_sequences = filled_sequences(self._sizes, num_first, num_prefills)
        shape = self._mixed_shape(step, decodes)
        if shape is not None:
            num_decodes, num_sequences = shape.num_decodes, shape.num_sequences
        spare = num_decodes - num_first
        staged = StagedStep.build(step, self._known, num_first, spare)
        sampling = Sampling.build(step.due, self._model.config.vocab_size)
        is_small = (
            len(staged.words) <= _WORDS * num_decodes
            and len(sampling.masked_ids) <= _MASKED * num_decodes
        )
        # As each item has a row at least, they have one each, and a token is due after it.
        are_decodes = len(step.items) == sampling.num_rows == staged.num_rows - spare
        if self._graphs and are_decodes and is_small:
            seats = [item.seat for item in step.items]
            return self._decode_plan(num_decodes, staged, sampling, seats), sampling
        if shape is not None:
            plan = self._mixed_plan(shape, step, staged, sampling, num_first)
            if plan.is_graph:
                return plan, sampling
        num_rows = staged.num_rows
        if num_sequences > staged.num_sequences:
            filled = filled_rows(num_rows, self._config.max_num_batched_tokens)
            # One sequence has all of them, at positions that there must be.
            num_rows = filled if filled - num_rows <= self._max_model_len else num_rows
        longest = max(item.first + item.num_slots for item in step.items)
        columns = self._columns(max(longest, num_rows - staged.num_rows))
        staged = staged.filled(num_sequences, num_rows)
        due = self._due(step, num_first, spare)
        if num_first == 0 and num_prefills == sampling.num_rows == 1:
            plan = self._prefill_plan(num_rows, staged, sampling, *due)
            if plan.is_graph and columns <= plan.num_columns:
                return plan, sampling
        plan = StepPlan(
            *(sampling, *due, *staged.arrays()),
            num_rows=num_rows,
            decodes=Decodes(num_decodes, decodes.num_queries + spare, decodes.max_queries),
            num_of_decodes=sum(item.num_due for item in step.items[:num_first]),
            num_columns=columns,
            is_graph=False,
        )
        return plan, sampling

    def _enqueue(self, plan: StepPlan) -> None:
        self._last = None  # whose memory is this step's
        parts = self._send(plan)
        if plan.is_graph:
            assert self._graphs is not None
            shape = plan.shape
            assert parts[:-1] == self._graph_parts[shape][:-1], "a graph reads at fixed addresses"
            sent, outputs = self._graph_inputs[shape], self._graphs.replay(shape)
        else:
            sent = self._read(parts, plan.num_of_decodes)
            outputs = self._compute(sent, plan.num_rows, plan.decodes, plan.num_columns)
        self._last = (sent, outputs, plan.penalized)
        self._choose_penalized()

    def _choose_penalized(self) -> None:
        """The last step's penalised tokens, which no graph knows of, and who keeps them.

        The step's input ids are there until the next one is unpacked.
        """
        assert self._last is not None
        sent, outputs, penalized = self._last
        for part in penalized:
            arrays = [*map(self._penalties.tensor, self._penalties.send(part.arrays))]
            self._sampler.choose_penalized(
                *(outputs.logits, self._room.input_ids, outputs.token_ids),
                *(arrays, self._penalized_logits),
            )
        if penalized:
            self._last_token_ids.index_copy_(0, sent.sample_seats, outputs.token_ids)

    def _guide(self, guided: Guided) -> None:
        """The last step's tokens chosen once more, of what masks leave: it ran before these were
        known, and a graph knows none. Of rows without a mask the same tokens come again.
        """
        assert self._last is not None
        sent, outputs, penalized = self._last
        rows, masks = map(self._masks.tensor, self._masks.send(guided))
        self._ops.mask_logits(outputs.logits, masks, rows)
        kept = (sent.sample_seats, self._last_token_ids)
        token_ids = self._sampler.sample(outputs.logits, sent.sampling, *kept)
        self._last = (sent, outputs._replace(token_ids=token_ids), penalized)
        self._choose_penalized()

    # ---- any step ------------------------------------------------------------------------------

    def _due(
        self, step: ScheduledStep, num_first: int, num_fillers: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """The rows after which a token is due, and the seats that keep these tokens: int64 [S].

        The fillers' rows lie behind the first items. What follows a guess is kept nowhere: nobody
        knows yet which is the last.
        """
        rows: list[int] = []
        seats: list[int] = []
        end = 0
        for index, item in enumerate(step.items):
            end += item.num_slots + (num_fillers if index == num_first else 0)
            num_due = item.num_due
            rows.extend(range(end - num_due, end))
            seats.extend([item.seat if num_due == 1 else self._config.max_num_seqs] * num_due)
        return np.array(rows, dtype=np.int64), np.array(seats, dtype=np.int64)

    def _columns(self, longest: int) -> int:
        """What a sequence of so many tokens needs: a power of two, or all."""
        needed = -(-longest // self._config.page_size)
        return min(2 ** (needed - 1).bit_length(), self._full.shape[1])

    def _compute(self, sent: Sent, num_rows: int, decodes: Decodes, num_columns: int) -> Outputs:
        """All that a step is on the device. Reads and writes the same memory each time.

        num_columns: of the page tables. Where no sequence is long, prefills take other tiles.
        """
        out = self._room.first(num_rows, len(sent.items), num_columns)
        self._ops.unpack_step(
            *(sent.items, sent.words, self._last_token_ids, self._full, self._window, out),
            page_size=self._config.page_size,
            window=self._model.config.sliding_window,
        )
        inputs = Inputs(
            input_ids=out.input_ids,
            positions=out.positions,
            decodes=decodes,
            query_start=out.query_start,
            seq_lens=out.seq_lens,
            full=PageGroup(out.full_tables, out.full_slots),
            window=PageGroup(out.window_tables, out.window_slots),
        )
        hidden = self._model.forward(inputs, self._cache, self._ops, sent.due)
        logits = self._model.logits(hidden, self._ops)
        kept = (sent.sample_seats, self._last_token_ids)
        return Outputs(self._sampler.sample(logits, sent.sampling, *kept), logits)

    def _send(self, plan: StepPlan) -> tuple[Part, ...]:
        """Of how many tokens are masked depends nothing that lies before."""
        sampling = plan.sampling
        others = (*sampling._replace(masked_ids=plan.rows), plan.seats, plan.items, plan.words)
        return self._staging.send((*others, sampling.masked_ids))

    def _read(self, parts: tuple[Part, ...], num_of_decodes: int) -> Sent:
        *sampling, seats, items, words, masked_ids = map(self._staging.tensor, parts)
        rows = SamplingRows(*sampling)
        return Sent(
            sampling=rows._replace(masked_ids=masked_ids),
            due=DueRows(rows.masked_ids, num_of_decodes),
            sample_seats=seats,
            items=items,
            words=words,
        )

    # ---- as graphs -----------------------------------------------------------------------------

    def _decode_plan(
        self, size: int, staged: StagedStep, sampling: Sampling, seats: list[int]
    ) -> StepPlan:
        """As a graph of so many rows reads it."""
        nobody = [self._config.max_num_seqs] * (size - len(seats))
        items, words = staged.arrays(_WORDS * size)
        return StepPlan(
            sampling=sampling.filled(size),
            rows=np.arange(size),
            seats=np.array(seats + nobody, dtype=np.int64),
            items=items,
            words=words,
            num_rows=size,
            decodes=Decodes(size, size, 1),
            num_of_decodes=size,
            num_columns=self._full.shape[1],  # of sequences of any length
            is_graph=True,
        )

    def _prefill_plan(
        self,
        size: int,
        staged: StagedStep,
        sampling: Sampling,
        rows: np.ndarray,
        seats: np.ndarray,
    ) -> StepPlan:
        """As a graph of so many rows reads it, if there is one that has room for all."""
        columns = self._columns(size)
        items, words = staged.arrays(size + 2 * columns)
        is_small = len(words) == size + 2 * columns and len(sampling.masked_ids) <= _MASKED
        return StepPlan(
            *(sampling, rows, seats, items, words),
            num_rows=size,
            decodes=Decodes(0, 0, 0),
            num_of_decodes=0,
            num_columns=columns,
            is_graph=is_small and GraphShape(0, size, 1) in (self._graphs or ()),
        )

    def _mixed_shape(self, step: ScheduledStep, decodes: Decodes) -> GraphShape | None:
        """The least one that has room for prefills, several or beside decodes of one row each.

        Its last rows are a sequence's that fills it, and after some of them tokens are due that
        nobody gets: so there must be as many.
        """
        num_decodes, prefills = decodes.num_sequences, step.items[decodes.num_sequences :]
        firsts = step.items[:num_decodes]
        if len(step.items) < 2 or not prefills or not self._graphs:
            return None
        if any(item.num_slots != 1 or item.num_due != 1 for item in firsts):
            return None
        num_rows = sum(item.num_slots for item in prefills)
        num_due = sum(item.num_due for item in step.items)
        for shape in self._mixed_shapes:
            has_room = (
                num_decodes <= shape.num_decodes
                and (num_decodes > 0 or shape.num_decodes == 0)
                and len(prefills) <= shape.num_prefills
                and num_rows + shape.num_sampled - num_due <= shape.num_prefill_rows
            )
            if has_room and shape in self._graphs:
                return shape
        return None

    def _mixed_plan(
        self,
        shape: GraphShape,
        step: ScheduledStep,
        staged: StagedStep,
        sampling: Sampling,
        num_first: int,
    ) -> StepPlan:
        """As a graph of that shape reads it, if it has room for all."""
        size, num_rows = shape.num_decodes, shape.num_rows
        # Of tables of any length; each prefill may begin and end within a page.
        num_pages = shape.num_prefill_rows // self._config.page_size + shape.num_prefills
        num_words = _WORDS * size + shape.num_prefill_rows + 2 * num_pages
        num_words += self._full.shape[1]  # that prefills begin with, out of the prefix cache
        num_masked = _MASKED * shape.num_sampled
        items, words = staged.filled(shape.num_sequences, num_rows).arrays(num_words)
        rows, seats = self._due(step, num_first, size - num_first)
        spare = shape.num_sampled - len(rows)
        return StepPlan(
            sampling=sampling.filled(shape.num_sampled),
            rows=np.concatenate((rows, np.arange(num_rows - spare, num_rows))),
            seats=np.concatenate((seats, np.full(spare, self._config.max_num_seqs))),
            items=items,
            words=words,
            num_rows=num_rows,
            decodes=Decodes(size, size, min(size, 1)),
            num_of_decodes=size,
            num_columns=self._full.shape[1],
            is_graph=len(words) == num_words and len(sampling.masked_ids) <= num_masked,
        )

    def _graph_step(self, shape: GraphShape) -> Outputs:
        """A step of that shape, as it was sent last; at first, with nothing but what fills it."""
        nothing, nobody = ScheduledStep(()), self._config.max_num_seqs
        masked = np.zeros(_MASKED * shape.num_sampled, dtype=np.int32)
        sampling = Sampling.build(nothing.due, self._model.config.vocab_size)
        sampling = sampling._replace(masked_ids=masked)
        staged = StagedStep.build(nothing, self._known, 0, shape.num_decodes)
        if not shape.num_prefills:
            plan = self._decode_plan(shape.num_decodes, staged, sampling, [])
        elif shape.num_sampled == 1:
            size = shape.num_prefill_rows
            due = np.array([size - 1]), np.array([nobody])
            plan = self._prefill_plan(size, staged.filled(2, size), sampling.filled(1), *due)
        else:
            plan = self._mixed_plan(shape, nothing, staged, sampling, 0)
        if shape not in self._graph_inputs:  # But not while it is captured: see StepGraphs.
            parts = self._send(plan)
            sent = self._read(parts, plan.num_of_decodes)
            self._graph_parts[shape], self._graph_inputs[shape] = parts, sent
        sent = self._graph_inputs[shape]
        return self._compute(sent, plan.num_rows, plan.decodes, plan.num_columns)

    # ---- before the first step -----------------------------------------------------------------

    @torch.inference_mode()
    def warm_up(self, *, is_trial: bool = False) -> None:
        """Load all kernels, capture the graphs, and fill PyTorch's pool for all other steps.

        Writes to the cache, whose pages are nobody's yet. is_trial: for what that takes of memory,
        so of the graphs only the largest of each kind, in whose memory the others lie.
        """
        config = self._config
        self._graphs = graphs = None
        self._graph_inputs.clear()  # so that each size is sent what it reads before it is run
        if self._capture is not None:
            started = time.monotonic()
            shapes = self._shapes
            if is_trial:  # A prefill has more rows than few seats have, but not their logits.
                shapes = tuple({shape.kind: shape for shape in reversed(ordered(shapes))}.values())
            graphs = StepGraphs(self._graph_step, shapes, self._capture)
            log.info(
                "captured %d CUDA graphs, of decodes up to %d rows, in %.1f s",
                *(len(shapes), self._sizes[-1], time.monotonic() - started),
            )
        # Behind the captures, which empty the pool; and decodes, too, without a graph.
        started = time.monotonic()
        most = (config.max_num_batched_tokens, config.max_num_seqs, self._max_model_len)
        steps = warm_up_steps(*most, is_trial=is_trial)
        for counts in tracked(steps, "warm-up", len(steps)):
            self.launch(self._made_up(counts)).result()
        # Behind a long context prefills have other kernels.
        rows = min(LONG_ROWS, config.max_num_batched_tokens, self._max_model_len)
        self.launch(self._made_up((rows,), self._max_model_len - rows)).result()
        words = -(-self._model.config.vocab_size // 32)
        everything = Guided(np.zeros(1, np.int32), np.full((1, words), -1, np.int32))
        plan, _ = self._plan(self._made_up((1,)))
        self._enqueue(plan)
        self._guide(everything)
        # The kernels for few rows and for as many as there may be at a time.
        for count in {1, len(self._penalized_logits)}:
            penalized = SamplingParams(presence_penalty=1.0)
            self.launch(self._made_up((1,) * count, sampling=penalized)).result()
        log.info("warmed up by %d steps in %.1f s", len(steps), time.monotonic() - started)
        self._graphs = graphs

    def _made_up(
        self,
        counts: tuple[int, ...],
        num_before: int = 0,
        sampling: SamplingParams | None = None,
    ) -> ScheduledStep:
        """The next tokens of sequences, so many each, behind others.

        In the pages that the largest first step has filled. One of them asks for all that can be
        asked for.
        """
        config = self._config
        filled = min(config.max_num_batched_tokens, self._max_model_len) // config.page_size
        num_pages, num_window_pages = (
            max(1, min(filled, count)) for count in (self._num_pages, self._num_window_pages)
        )
        items = []
        for seat, count in enumerate(counts):
            everything = SamplingParams(top_p=0.9, logprobs=MAX_LOGPROBS if seat == 0 else None)
            num_tokens = num_before + count
            token_ids = tuple(index % self._model.config.vocab_size for index in range(num_tokens))
            made = Sequence.from_request(
                GenerationRequest("warm-up", token_ids, sampling or everything),
                seed=0,
                max_tokens=1,
                eos_token_ids=frozenset(),
            )
            columns = range(-(-num_tokens // config.page_size))
            made.page_tables = PageTables(
                full=[column % num_pages for column in columns],
                window=[column % num_window_pages for column in columns],
            )
            made.num_computed_tokens, made.seat = num_before, seat
            items.append(ScheduledItem.of(made, count))
        return ScheduledStep(tuple(items))


def most_sequences(most_seqs: int) -> int:
    """That filled_sequences gives."""
    return min(2 * most_seqs + FILLERS, MAXIMUM_SEQUENCES)


def filled_sequences(
    sizes: tuple[int, ...], num_decodes: int, num_prefills: int
) -> tuple[int, int]:
    """How many sequences are called decodes, and how many there are in all, when filled up.

    Prefills to a power of two, with one at least for the rows that are missing. Where that is more
    than attention takes, nothing is filled up.
    """
    decodes = sizes[bisect_left(sizes, num_decodes)] if num_decodes else 0
    prefills = 2 ** num_prefills.bit_length() if num_prefills else 0
    if decodes + prefills > MAXIMUM_SEQUENCES:
        return num_decodes, num_decodes + num_prefills
    return decodes, decodes + prefills


def filled_rows(num_rows: int, most: int) -> int:
    """Of a step of at most `most` rows and FILLERS, filled up to a multiple of 16.

    Of many by a thirty-second at the most. Where there are `most` already, by nothing, and by no
    more than FILLERS beyond.
    """
    step = max(16, 2 ** max(num_rows - 1, 1).bit_length() // 64)
    rows = -(-num_rows // step) * step
    return rows if rows <= most else most + FILLERS if num_rows > most else most


def warm_up_steps(
    most_rows: int, most_seqs: int, max_model_len: int, *, is_trial: bool = False
) -> list[tuple[int, ...]]:
    """For each step the rows of its sequences; the first ones need the most memory.

    As many rows as a step may have, with the most and with the fewest sequences. Then such numbers
    of rows as make operators choose other kernels and, but for a trial, all up to PREPARED_ROWS
    that steps are filled up to.
    """
    decodes = (1,) * (most_seqs - 1)
    steps = [
        (*decodes, min(most_rows - len(decodes), max_model_len)),
        _cut(most_rows, most_seqs, max_model_len),
    ]
    numbers = {*range(1, MAXIMUM_DECODE_QUERIES + 1), 16, 32, 64, 96}
    numbers.update(2**exponent for exponent in range(7, most_rows.bit_length()))
    if not is_trial:
        numbers.update(filled_rows(rows, most_rows) for rows in range(9, PREPARED_ROWS + 1))
    for rows in sorted(numbers):
        if rows <= most_rows:
            steps.append(_cut(rows, most_seqs, max_model_len))
    return steps


def _cut(rows: int, most_seqs: int, max_model_len: int) -> tuple[int, ...]:
    """As few sequences as have so many rows, or nearly."""
    whole, rest = divmod(rows, max_model_len)
    return ((max_model_len,) * whole + ((rest,) if rest else ()))[:most_seqs]
