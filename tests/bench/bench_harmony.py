"""What a chat costs on its way in and an answer on its way out, as a table, then JSON lines.

    python tests/bench/bench_harmony.py
    python tests/bench/bench_harmony.py --output results.jsonl

Parsing: microseconds a token, tokens pushed one by one or as under speculation, beside
openai-harmony's parser with its delta of each token. Rendering: seconds for a chat of 100,000
tokens from its JSON, beside openai-harmony's rendering of the same messages, made before. Times
are the process's own, so that other processes do not count, and the least of several runs.
"""

import argparse
import datetime
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai_harmony

from gptoss_harmony import vocabulary
from gptoss_harmony.answer import Answer, AnswerContext, EngineResponse
from gptoss_harmony.format import ChatFormat, HarmonyFormat
from gptoss_harmony.raw import RawFormat
from gptoss_harmony.vocabulary import Vocabulary

PEER = f"openai-harmony {version('openai-harmony')}"
PROSE = "The quick brown fox jumps over the lazy dog. 中文 😀 And then it rests. "
OPENED = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=100_000, help="of a chat, and of an answer")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path, help="append the JSON lines to this file")
    options = parser.parse_args()
    loaded = vocabulary.load()
    lines = [*parsing(loaded, options), *rendering(loaded, options)]
    print("| parsing | tokens a push | us a token | openai-harmony |\n|-|-|-|-|")
    for line in lines:
        if line["benchmark"] == "harmony_stream":
            print(
                f"| {line['case']} | {line['tokens_per_push']} | {line['us_per_token']} "
                f"| {line['peers'].get(PEER, '')} |"
            )
    print("\n| rendering | tokens | s | openai-harmony |\n|-|-|-|-|")
    for line in lines:
        if line["benchmark"] == "harmony_render":
            peer = line["peers"].get(PEER, "")
            print(f"| {line['case']} | {line['tokens']} | {line['seconds']} | {peer} |")
    print()
    for line in lines:
        print(json.dumps(line))
    if options.output:
        with options.output.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def least(runs: int, make: Callable[[], Callable[[], object]]) -> float:
    """Seconds of the quickest of several runs, each made anew."""
    best = float("inf")
    for _ in range(runs):
        run = make()
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best


def line_of(benchmark: str, case: str, **own: Any) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "benchmark": benchmark,
        "case": case,
        **own,
        "device": cpu(),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", "tests/bench/bench_harmony.py", *sys.argv[1:]]),
    }


def cpu() -> str:
    """The processor's name as Linux has it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def parsing(loaded: Vocabulary, options: argparse.Namespace) -> list[dict[str, Any]]:
    harmony, raw = HarmonyFormat(loaded), RawFormat(loaded)
    call = f'<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"a": 1}}{NEXT}'
    short = f"<|channel|>analysis<|message|>Let me look.{NEXT}{call}"
    words = {"stop_words": ["STOP", "and then it rested", "\n\n\n"]}
    cases: list[tuple[str, ChatFormat, str, dict[str, Any]]] = [
        ("an answer", harmony, OPENED + PROSE, {}),
        ("an answer, three stop words", harmony, OPENED + PROSE, words),
        ("reasoning", harmony, f"<|channel|>analysis<|message|>{PROSE}", {}),
        ("no channel", harmony, f"<|message|>{PROSE}", {}),
        ("arguments", harmony, f" to=functions.f<|message|>{PROSE}", {"tool_names": ["f"]}),
        ("short messages and calls", harmony, short, {"tool_names": ["f"]}),
        ("raw", raw, PROSE, {}),
    ]
    lines: list[dict[str, Any]] = []
    for case, chat_format, text, context in cases:
        repeated = text if case == "short messages and calls" else PROSE
        token_ids = filled(loaded, text, repeated, options.tokens)
        for size in (1, 4, 16):
            chunks = [token_ids[i : i + size] for i in range(0, len(token_ids), size)]

            def make(
                chat_format: ChatFormat = chat_format,
                context: dict[str, Any] = context,
                chunks: Sequence[list[int]] = chunks,
            ) -> Callable[[], object]:
                stream = chat_format.stream(context)
                return lambda: [stream.push(chunk) for chunk in chunks]

            is_compared = size == 1 and case in ("an answer", "reasoning")
            peers = (
                {PEER: by_openai_harmony(loaded, token_ids, options.runs)} if is_compared else {}
            )
            us = 1e6 * least(options.runs, make) / len(token_ids)
            lines.append(
                line_of(
                    "harmony_stream",
                    case,
                    tokens=len(token_ids),
                    tokens_per_push=size,
                    us_per_token=round(us, 2),
                    peers=peers,
                )
            )
    token_ids = filled(loaded, OPENED + PROSE, PROSE, options.tokens)
    responses = [
        EngineResponse("g", number, (token_id,), ((-0.5, ((1, -0.5), (2, -0.9))),), None, 1, 0)
        for number, token_id in enumerate(token_ids)
    ]

    def answered() -> Callable[[], object]:
        answer = Answer(AnswerContext(format={}, stream=True, return_logprobs=True), harmony)
        return lambda: [answer.push(response) for response in responses]

    us = 1e6 * least(options.runs, answered) / len(token_ids)
    shown = line_of(
        "harmony_stream",
        "a streamed answer with logprobs, as the ensemble has it",
        tokens=len(token_ids),
        tokens_per_push=1,
        us_per_token=round(us, 2),
        peers={},
    )
    return [*lines, shown]


def filled(loaded: Vocabulary, text: str, repeated: str, count: int) -> list[int]:
    token_ids = loaded.encode_raw(text)
    more = loaded.encode_raw(repeated)
    token_ids += more * (-(-(count - len(token_ids)) // len(more)))
    return token_ids[:count]


def by_openai_harmony(loaded: Vocabulary, token_ids: Sequence[int], runs: int) -> float:
    def make() -> Callable[[], object]:
        parser = openai_harmony.StreamableParser(loaded.encoding, openai_harmony.Role.ASSISTANT)

        def parse() -> None:
            for token_id in token_ids:
                parser.process(token_id)
                _ = parser.last_content_delta

        return parse

    return round(1e6 * least(runs, make) / len(token_ids), 2)


def rendering(loaded: Vocabulary, options: argparse.Namespace) -> list[dict[str, Any]]:
    harmony = HarmonyFormat(loaded)
    prose = loaded.encode(PROSE)
    text = PROSE * (options.tokens // len(prose))
    turns = options.tokens // 40
    chats: list[tuple[str, list[Any]]] = [
        ("one message", [{"role": "user", "content": text}]),
        (
            f"{2 * turns} messages",
            [
                {"role": role, "content": PROSE}
                for _ in range(turns)
                for role in ("user", "assistant")
            ],
        ),
    ]
    lines: list[dict[str, Any]] = []
    for case, messages in chats:
        given = json.dumps(messages)

        def make(given: str = given) -> Callable[[], object]:
            return lambda: harmony.render_chat(harmony.parse_chat(messages=given))

        count = len(harmony.render_chat(harmony.parse_chat(messages=given)).token_ids)
        conversation = openai_harmony.Conversation.from_messages(
            [
                openai_harmony.Message.from_role_and_content(
                    openai_harmony.Role(each["role"]), each["content"]
                )
                for each in messages
            ]
        )

        def peer(
            conversation: openai_harmony.Conversation = conversation,
        ) -> Callable[[], object]:
            return lambda: loaded.encoding.render_conversation_for_completion(
                conversation, openai_harmony.Role.ASSISTANT
            )

        lines.append(
            line_of(
                "harmony_render",
                case,
                tokens=count,
                seconds=round(least(options.runs, make), 4),
                peers={PEER: round(least(options.runs, peer), 4)},
            )
        )
    return lines


if __name__ == "__main__":
    main()
