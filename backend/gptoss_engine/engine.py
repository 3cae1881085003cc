"""The engine, add / abort / step, and the thread that runs it for a server.

`Engine` is a plain object for one thread. `EngineLoop` owns one, and takes requests and aborts
from any thread; answers go to the callback that came with the request.
"""

import gc
import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from gptoss_engine.config import EngineConfig, InvalidConfig
from gptoss_engine.decoding import Decoder
from gptoss_engine.decoding.plain import PlainDecoder
from gptoss_engine.model_config import ModelConfig
from gptoss_engine.page_pool import PagePool
from gptoss_engine.replicas import Replicas
from gptoss_engine.scheduler import Scheduler
from gptoss_engine.sequence import ScheduledStep, Sequence, StepOutput
from gptoss_engine.types import (
    EngineStats,
    FinishReason,
    GenerationRequest,
    InvalidRequest,
    TokenChunk,
    Unavailable,
    Unsupported,
    duplicate,
)

if TYPE_CHECKING:
    from gptoss_engine.guides import Guides, Matcher

log = logging.getLogger(__name__)


class Pending(Protocol):
    """A step that was launched."""

    def guide(self) -> None:
        """Chooses by what the grammars of a guided step allow, see `StepRunner.launch`."""
        ...

    def result(self) -> StepOutput:
        """Waits until the step has run. Called once; in the order of launches."""
        ...


class StepRunner(Protocol):
    """What the engine needs of a runner: the model's figures, the cache's size, and one verb.

    At most two steps are out: launched, and their results not asked for. They run one after
    another in the order of their launches, all that they read and write included.
    """

    @property
    def model_config(self) -> ModelConfig: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def num_window_pages(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def is_asynchronous(self) -> bool:
        """Whether `launch` returns before the step has run."""
        ...

    @property
    def fault(self) -> str:
        """Why no step will run any more, as far as it is known before one fails; else empty."""
        ...

    def launch(self, step: ScheduledStep) -> Pending:
        """Reads all that the step needs of its sequences before it returns; may not wait for it.

        But of a step that is guided the matchers: as soon as they know all tokens before the step,
        and before the next one is launched, whoever launched it calls `guide`.
        """
        ...

    def close(self) -> None:
        """Ends the processes that it has started. No step runs any more; may be called again."""
        ...


class Engine:
    """Sequences in, chunks of tokens out, one step at a time. Not thread-safe.

    is_overlapped: whether each step is scheduled while the one before runs.
    guides: compiles what a request's answer may be; None refuses it.
    clock: time.monotonic(), or a test's own; deadlines are on it.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: StepRunner,
        *,
        decoder: Decoder | None = None,
        clock: Callable[[], float] = time.monotonic,
        guides: "Guides | None" = None,
    ) -> None:
        self.config = config
        self.runner = runner
        self.guides = guides
        self._clock = clock
        full = PagePool(runner.num_pages, config.page_size)
        if full.num_tokens < 2:
            raise InvalidConfig(
                f"num_pages ({runner.num_pages}) of page_size {config.page_size} hold "
                f"{full.num_tokens} tokens: a prompt and its answer need at least 2"
            )
        self.scheduler = Scheduler(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            full=full,
            window=PagePool(runner.num_window_pages, config.page_size),
            sliding_window=runner.model_config.sliding_window,
            max_num_tokens=min(runner.max_model_len, full.num_tokens),
            decoder=decoder or PlainDecoder(),
            has_prefix_cache=config.enable_prefix_caching,
        )
        self._failure = ""
        is_chosen = config.overlap == "on" or (config.overlap == "auto" and runner.is_asynchronous)
        self.is_overlapped = is_chosen and not self.scheduler.decoder.guesses
        self._out: tuple[ScheduledStep, Pending] | None = None
        self._admitted: list[Sequence] = []  # of whom the log does not know yet

    @property
    def failure(self) -> str:
        """Why the engine is broken; empty if it is not."""
        if not self._failure and self.runner.fault:
            self.fail(f"the engine failed: {self.runner.fault}")
        return self._failure

    def fail(self, failure: str) -> None:
        """From now on the engine is broken."""
        self._failure = failure

    @property
    def is_broken(self) -> bool:
        """Whether a step failed, or none will run. It stays broken: its process should end."""
        return bool(self.failure)

    @property
    def has_work(self) -> bool:
        """Whether a generation is open or a step is out."""
        return self.scheduler.has_work or self._out is not None

    def prepare(self, request: GenerationRequest) -> Sequence:
        """The request as a sequence, its limits resolved, or InvalidRequest.

        Reads only what never changes, so any thread may call it.
        """
        num_tokens = len(request.token_ids)
        capacity = self.scheduler.full.num_tokens
        max_model_len = self.runner.max_model_len
        self._check_vocabulary(request)
        if num_tokens == 0:
            raise InvalidRequest("the prompt (input_ids) must hold at least 1 token, got none")
        if num_tokens >= max_model_len:
            raise InvalidRequest(
                f"the prompt (input_ids) must hold at most {max_model_len - 1} tokens, so that "
                f"max_model_len ({max_model_len}) leaves one to generate, got {num_tokens}"
            )
        if num_tokens >= capacity:
            raise InvalidRequest(
                f"the prompt (input_ids) must hold at most {capacity - 1} tokens, so that the KV "
                f"cache ({capacity} tokens) can ever hold it and one generated, got {num_tokens}"
            )
        left = self.scheduler.max_num_tokens - num_tokens
        arrival_time = self._clock()
        if request.deadline is None:
            deadline = arrival_time + self.config.default_timeout_seconds
            request = replace(request, deadline=deadline)
        seed = request.sampling.seed
        sequence = Sequence.from_request(
            request,
            seed=secrets.randbits(64) if seed is None else seed,
            max_tokens=min(
                left, request.sampling.max_tokens or self.config.default_max_tokens or left
            ),
            eos_token_ids=self.runner.model_config.eos_token_ids,
            arrival_time=arrival_time,
            matcher=self._matcher(request),
        )
        if self.scheduler.prefix_cache is not None:  # Here, where no step waits for it.
            keys = self.scheduler.prefix_cache.keys
            keys.extend(sequence.page_keys, sequence.token_ids, sequence.cache_salt)
        return sequence

    def add(self, request: GenerationRequest) -> None:
        """Admit a request. InvalidRequest: it can never run. Unavailable: the engine is broken."""
        self.admit(self.prepare(request))

    def admit(self, sequence: Sequence) -> None:
        """Queue a prepared sequence."""
        if self.is_broken:
            raise Unavailable(self.failure)
        if sequence.generation_id in self.scheduler:
            raise duplicate(sequence.generation_id)
        self.scheduler.add(sequence)
        self._admitted.append(sequence)

    def abort(
        self, generation_id: str, error: str = "", reason: FinishReason = "abort"
    ) -> TokenChunk | None:
        """End a generation now. Its final chunk, or None if it is not open any more."""
        return self.scheduler.abort(generation_id, error, reason)

    def abort_all(self, error: str) -> list[TokenChunk]:
        """End every open generation now; by the failure, if the engine is broken."""
        if self.is_broken:
            return self.scheduler.finish_all("error", self.failure)
        return self.scheduler.finish_all("abort", error)

    def close(self) -> None:
        """End the runner's processes. No step runs any more."""
        self.runner.close()

    def step(self) -> list[TokenChunk]:
        """What came of one forward pass; of none, if the first has only just been launched.

        After a failure: everybody's final chunk.
        """
        expired = self.scheduler.expire(self._clock())
        if not self.has_work:
            self._log_admitted()
            return expired
        try:
            return expired + (self._overlapped_step() if self.is_overlapped else self._plain_step())
        except Exception as error:
            self._log_admitted()
            log.exception("a step failed: the engine is broken")
            self.fail(f"the engine failed: {_said(error)}")
            self._out = None  # A broken device may never answer.
            return expired + self.scheduler.finish_all("error", self.failure)

    def _plain_step(self) -> list[TokenChunk]:
        self._log_admitted()
        step = self.scheduler.schedule()
        pending = self.runner.launch(step)
        if step.is_guided:
            pending.guide()
        return self.scheduler.update(step, pending.result())

    def _overlapped_step(self) -> list[TokenChunk]:
        """The same, but the next step is launched before this one's result is asked for.

        So the device never waits for the host, as long as scheduling takes less than a step. That
        nobody ends who does not have to is taken for granted: a sequence that ends all the same
        has computed a token in vain, which `Scheduler.update` drops.
        What may follow a guided sequence's pending token is known only then: the next step computes
        meanwhile, and chooses once this one's tokens are there.
        """
        following = self.scheduler.schedule()
        launched = (following, self.runner.launch(following)) if following.items else None
        self._log_admitted()  # While the step runs.
        out, self._out = self._out, launched
        chunks: list[TokenChunk] = []
        if out is not None:
            step, pending = out
            chunks = self.scheduler.update(step, pending.result())
        if launched is not None and following.is_guided:
            launched[1].guide()
        return chunks

    def _log_admitted(self) -> None:
        """Not before a launch, which would wait for it."""
        for sequence in self._admitted:
            log.info(
                "generation %s admitted: %d prompt tokens, at most %d to generate",
                sequence.generation_id,
                sequence.num_prompt_tokens,
                sequence.max_tokens,
            )
        self._admitted.clear()

    def stats(self) -> EngineStats:
        scheduler, cache = self.scheduler, self.scheduler.prefix_cache
        return EngineStats(
            num_waiting=len(scheduler.waiting),
            num_waiting_tokens=scheduler.num_waiting_tokens,
            num_running=len(scheduler.running),
            num_pages=scheduler.full.num_pages,
            num_used_pages=scheduler.full.num_used,
            num_window_pages=scheduler.window.num_pages,
            num_used_window_pages=scheduler.window.num_used,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_generated_tokens=scheduler.num_generated_tokens,
            num_queried_tokens=0 if cache is None else cache.num_queried_tokens,
            num_hit_tokens=0 if cache is None else cache.num_hit_tokens,
            num_finished=dict(scheduler.num_finished),
        )

    def _matcher(self, request: GenerationRequest) -> "Matcher | None":
        guide = request.sampling.guide
        if guide is None:
            return None
        if self.guides is None:
            raise Unsupported("guide cannot be given here: this engine knows no vocabulary")
        return self.guides.matcher(guide)

    def _check_vocabulary(self, request: GenerationRequest) -> None:
        last = self.runner.model_config.vocab_size - 1
        for name, token_ids in (
            ("input_ids", request.token_ids),
            ("stop_token_ids", request.sampling.stop_token_ids),
            ("logit_bias", [token_id for token_id, _ in request.sampling.logit_bias]),
        ):
            if token_ids and (min(token_ids) < 0 or max(token_ids) > last):
                at, wrong = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t <= last)
                raise InvalidRequest(f"{name} must be in [0, {last}], got {wrong} at index {at}")


OnChunk = Callable[[TokenChunk], None]
_IDLE_SECONDS = 1.0  # after which a loop without work looks whether its engine is broken


class EngineLoop:
    """A thread that steps an engine while it has work, and sleeps while it has none.

    Each generation gets its chunks in order and exactly one final chunk, whatever happens, one at
    a time. Callbacks must only enqueue: everybody's next token waits for them. A generation whose
    callback raises is aborted and hears no more.
    Deadlines need no timer: while anything is open the loop steps, and each step looks at them.

    delivering: entered around the callbacks of each step, for whoever takes them together.
    idle: called by the loop's thread whenever it has nothing more to do.
    """

    def __init__(
        self,
        engine: Engine,
        delivering: Callable[[], AbstractContextManager[Any]] = nullcontext,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._delivering = delivering
        self._idle = idle
        # Whoever has it has the engine: the loop's thread, or one that begins.
        self._turn = threading.Lock()
        self._is_over = False
        # Guards all below.
        self._condition = threading.Condition()
        self._arrivals: list[Sequence] = []
        self._aborts: dict[str, tuple[str, FinishReason]] = {}
        self._open: dict[str, tuple[Sequence, OnChunk]] = {}
        self._refusal = ""
        self._is_stopping = False
        self._has_cut = False
        self._stats = engine.stats()
        if engine.guides is not None:
            engine.guides.begin()
        self._thread = threading.Thread(target=self._run, name="gptoss-engine", daemon=True)
        self._thread.start()

    @property
    def is_broken(self) -> bool:
        """Whether the engine failed. The server should turn unready and end its process."""
        return self._engine.is_broken

    @property
    def stats(self) -> EngineStats:
        """As of the last step; requests that arrived since count as waiting."""
        with self._condition:
            if not self._arrivals:
                return self._stats
            return replace(
                self._stats,
                num_waiting=self._stats.num_waiting + len(self._arrivals),
                num_waiting_tokens=self._stats.num_waiting_tokens
                + sum(sequence.num_prompt_tokens for sequence in self._arrivals),
            )

    @property
    def launches_at_once(self) -> bool:
        """Whether a request that came now would be launched, and the launch delivered, at once.

        That is before anything is waited for.
        """
        return self._engine.is_overlapped and not self._engine.has_work

    def submit(
        self, request: GenerationRequest, on_chunk: OnChunk, *, begins: bool = False
    ) -> None:
        """Admit a request from any thread, or raise InvalidRequest or Unavailable.

        Once this returns, `on_chunk` gets every chunk, the last of them with a finish_reason;
        the first may come before this returns. begins: the caller calls `begin` next.
        """
        sequence = self._engine.prepare(request)
        with self._condition:
            if refusal := self._engine.failure or self._refusal:
                raise Unavailable(refusal)
            if sequence.generation_id in self._open:
                raise duplicate(sequence.generation_id)
            self._check_queue(sequence)
            self._arrivals.append(sequence)
            self._open[sequence.generation_id] = (sequence, on_chunk)
            if not begins:
                self._condition.notify_all()

    def begin(self) -> None:
        """Launch what was submitted, if nothing runs, by this thread, which is awake.

        The loop's own waits for the step's end then, and has the step's time to wake.
        """
        try:
            if self._engine.is_overlapped and self._turn.acquire(blocking=False):
                try:
                    if self._arrivals and not (self._is_over or self._engine.has_work):
                        self._go_on()
                finally:
                    self._turn.release()
        except Exception as error:
            log.exception("the engine loop failed")
            self._fail(error)
        finally:
            with self._condition:
                self._condition.notify_all()

    def admission(self, request: GenerationRequest, on_chunk: OnChunk) -> Future[None]:
        """The same, and what it would raise told by what it returns."""
        answer: Future[None] = Future()
        try:
            self.submit(request, on_chunk)
        except Exception as error:  # noqa: BLE001  whoever asks the answer gets it
            answer.set_exception(error)
        else:
            answer.set_result(None)
        return answer

    def abort(self, generation_id: str, error: str = "", reason: FinishReason = "abort") -> None:
        """End a generation from any thread; nothing happens if it is not open any more.

        reason: "stop" when whoever reads the tokens has found the answer's end.
        """
        with self._condition:
            if generation_id in self._open:
                self._aborts[generation_id] = (error, reason)
                self._condition.notify_all()

    def drain(self, timeout: float) -> bool:
        """Refuse new requests and let the open ones end; abort what is left after `timeout` s.

        Returns when every final chunk is delivered: whether all of them ended by themselves.
        """
        with self._condition:
            self._refusal = self._refusal or "the engine is draining: it takes no new requests"
            if not self._open:
                return True
            if self._condition.wait_for(lambda: not self._open, timeout):
                return not self._has_cut
            error = f"the engine is shutting down and waited {timeout:g} s for this generation"
            self._aborts.update(dict.fromkeys(self._open, (error, "abort")))
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._open)
            return False

    def stop(self) -> None:
        """Abort what is open and end the thread, after the step that is running."""
        with self._condition:
            self._refusal = self._refusal or "the engine is stopped"
            self._is_stopping = True
            self._has_cut = self._has_cut or bool(self._open)
            self._condition.notify_all()
        self._thread.join()

    def _check_queue(self, sequence: Sequence) -> None:
        """The admission limits, for a request that would wait behind others for a place.

        One that finds a free place waits for the step's end or for pages, and is always taken:
        at most max_num_seqs of those can come before the limits count.
        """
        config, stats = self._engine.config, self.stats
        num_behind = stats.num_waiting - (config.max_num_seqs - stats.num_running)
        if num_behind < 0:
            return
        if num_behind >= config.max_waiting_requests:
            raise Unavailable(
                f"{num_behind} requests wait for a place, as many as max_waiting_requests "
                f"({config.max_waiting_requests}) allows: try again later"
            )
        num_tokens = stats.num_waiting_tokens + sequence.num_prompt_tokens
        if stats.num_waiting and num_tokens > config.max_waiting_tokens:
            raise Unavailable(
                f"{stats.num_waiting_tokens} tokens are waiting, {sequence.num_prompt_tokens} "
                f"more would exceed max_waiting_tokens ({config.max_waiting_tokens}): "
                "try again later"
            )

    def _run(self) -> None:
        try:
            goes_on = True
            while goes_on:
                self._wait()
                with self._turn:
                    goes_on = self._go_on()
            with self._turn:
                self._is_over = True
                self._deliver(self._engine.abort_all("the engine is stopped"))
                self._deliver(self._engine.step())  # Waits for the step that is out.
        except Exception as error:
            log.exception("the engine loop failed")
            self._fail(error)
        finally:
            with self._turn:
                self._is_over = True
                self._close()

    def _fail(self, error: Exception) -> None:
        self._engine.fail(f"the engine loop failed: {_said(error)}")

    def _wait(self) -> None:
        """For something to do."""
        if not self._has_something_to_do():
            self._idle()
        with self._condition:
            while not self._condition.wait_for(self._has_something_to_do, _IDLE_SECONDS):
                pass

    def _go_on(self) -> bool:
        """A step with all that arrived before, unless it is over."""
        aborts = self._take_mail()
        if aborts is None:
            return False
        if aborts:
            chunks = [self._engine.abort(id_, *how) for id_, how in aborts.items()]
            self._deliver([chunk for chunk in chunks if chunk is not None])
        self._deliver(self._engine.step())
        return True

    def _take_mail(self) -> dict[str, tuple[str, FinishReason]] | None:
        """Admit what arrived. What to abort, or None when it is over."""
        with self._condition:
            if self._is_stopping or self._engine.is_broken:
                return None
            try:
                for sequence in self._arrivals:
                    self._engine.admit(sequence)
            except Unavailable:  # A runner's fault may be heard of at any time.
                return None
            self._arrivals.clear()
            self._stats = self._engine.stats()
            aborts, self._aborts = self._aborts, {}
            return aborts

    def _has_something_to_do(self) -> bool:
        has_mail = bool(self._arrivals or self._aborts)
        has_to_end = self._is_stopping or self._engine.is_broken
        return has_mail or self._engine.has_work or has_to_end

    def _deliver(self, chunks: list[TokenChunk]) -> None:
        with self._condition:
            # Before anybody hears of an end: who asks again at once finds the place free.
            self._stats = self._engine.stats()
        done: list[str] = []
        with self._delivering():
            for chunk in chunks:
                with self._condition:
                    _, on_chunk = self._open[chunk.generation_id]
                if chunk.finish_reason:
                    done.append(chunk.generation_id)
                try:
                    on_chunk(chunk)
                except Exception:
                    log.exception("generation %s: its callback failed", chunk.generation_id)
                    self._engine.abort(chunk.generation_id)
                    done.append(chunk.generation_id)
        with self._condition:
            # Only now, so that a drained loop has delivered all.
            for generation_id in done:
                self._open.pop(generation_id, None)
            self._stats = self._engine.stats()
            self._condition.notify_all()

    def _close(self) -> None:
        """The last word to whoever has none yet: those who arrived too late for any step."""
        with self._condition:
            self._refusal = self._engine.failure or self._refusal or "the engine is stopped"
            left = [sequence for sequence, _ in self._open.values()]
            self._arrivals.clear()
        self._deliver(
            [
                TokenChunk(
                    generation_id=sequence.generation_id,
                    finish_reason="error" if self._engine.is_broken else "abort",
                    error=self._refusal,
                    num_prompt_tokens=sequence.num_prompt_tokens,
                )
                for sequence in left
            ]
        )
        self._engine.close()


def keep_for_good() -> None:
    """What there is by now stays: the garbage collector need not look at it again.

    A look at all launches and graphs, and at PyTorch's own objects, takes longer than many steps.
    """
    gc.collect()
    gc.freeze()


def load_engine(config: EngineConfig) -> Engine:
    """The whole engine for a configuration: weights loaded, cache allocated."""
    # Here, so that who needs the loop alone waits neither for torch nor for llguidance.
    from gptoss_engine.guides import guides_of
    from gptoss_engine.runner import load_runner

    runner = load_runner(config)
    model = runner.model_config
    sizes = {"vocab_size": model.vocab_size, "eos_token_ids": model.eos_token_ids}
    return Engine(config, runner, guides=guides_of(config, **sizes))


def load_engine_loop(config: EngineConfig) -> EngineLoop | Replicas:
    """The same, and its thread running; or several, if they are configured."""
    return Replicas(config) if config.dp > 1 else EngineLoop(load_engine(config))


def _said(error: Exception) -> str:
    """Its type and the first line of its message: what CUDA adds to an error is for the log."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
