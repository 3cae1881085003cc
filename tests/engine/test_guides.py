"""Grammars alone: what a mask allows, what cannot be compiled, and what ends."""

import json
import random
import threading

import numpy as np
import pytest

from gptoss_engine import guides as module
from gptoss_engine.guides import Guides, Matcher, fill_masks, load_vocabulary
from gptoss_engine.types import (
    MAX_GUIDE_LENGTH,
    Guide,
    InvalidRequest,
    SamplingParams,
    Unsupported,
)

from .guiding import EOS, VOCAB_SIZE, fits, guides, random_schema, schema_guide, text_of, vocabulary

COMPILER = guides()


def compiled(type_: str, value: str) -> Matcher:
    return COMPILER.matcher(Guide.from_mapping({"type": type_, "value": value}))


def allowed(matcher: Matcher) -> list[int]:
    masks = np.zeros((1, VOCAB_SIZE // 32), dtype=np.int32)
    fill_masks([matcher], masks)
    return np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist()


def walk(matcher: Matcher, chance: random.Random, most: int = 2000) -> list[int]:
    """Tokens as a model without any sense chooses them, until nothing may follow."""
    token_ids: list[int] = []
    while not matcher.is_over:
        token_ids.append(chance.choice(allowed(matcher)))
        matcher.accept(token_ids[-1])
        assert not matcher.error
        assert len(token_ids) < most
    return token_ids


@pytest.mark.parametrize("seed", range(150))
def test_whatever_is_chosen_fits_the_schema(seed: int) -> None:
    chance = random.Random(seed)
    schema = random_schema(chance)
    matcher = COMPILER.matcher(Guide.from_mapping(schema_guide(schema)))
    text = text_of(walk(matcher, chance))
    assert fits(json.loads(text), schema), (schema, text)


def test_the_end_may_come_where_the_grammar_is_satisfied() -> None:
    matcher = compiled("regex", "ab*")
    assert allowed(matcher) == [ord("a"), *token_ids_of("ab")]
    matcher.accept(ord("a"))
    assert set(allowed(matcher)) >= {EOS, ord("b")}
    assert not matcher.is_over
    matcher.accept(EOS)
    assert matcher.is_over


def token_ids_of(*texts: str) -> list[int]:
    tokens = vocabulary().token_bytes
    return [tokens.index(text.encode()) for text in texts]


def test_where_nothing_may_follow_it_is_over() -> None:
    matcher = compiled("regex", "ab")
    matcher.accept(ord("a"))
    assert not matcher.is_over
    matcher.accept(ord("b"))
    assert matcher.is_over
    assert allowed(matcher) == [EOS]


def test_control_tokens_come_by_their_ids_alone() -> None:
    lark = "start: <[510]> TEXT <[511]>\nTEXT: /(.|\\n)*/"
    matcher = compiled("lark", lark)
    assert allowed(matcher) == [510]
    matcher.accept(510)
    assert {511, ord("x")} <= set(allowed(matcher))
    assert not {510, EOS} & set(allowed(matcher))
    for token_id in (*b"<511>", 511):
        matcher.accept(token_id)
    assert matcher.is_over
    assert not matcher.error


def test_grammars_refer_to_each_other() -> None:
    parts = [
        {"name": "all", "lark_grammar": "start: <[510]> @body <[511]>"},
        {"name": "body", "json_schema": {"enum": ["x", "y"]}},
    ]
    matcher = compiled("grammars", json.dumps(parts))
    token_ids = walk(matcher, random.Random(0))
    assert (token_ids[0], token_ids[-1]) == (510, 511)
    assert text_of(token_ids) in ('"x"', '"y"')


def test_a_token_that_may_not_come_is_told() -> None:
    matcher = compiled("regex", "ab")
    matcher.accept(ord("z"))
    assert matcher.error.startswith("the guide cannot be followed any further: ")
    assert not matcher.is_over
    matcher.accept(ord("a"))
    assert len(allowed(matcher)) == VOCAB_SIZE, "a row of logits is left, whoever reads it"


def test_masks_of_many_are_those_of_each() -> None:
    texts = ["ab*", "[0-9]{3}", "x|y|zz", "(a|b)*c", "é+"]
    masks = np.full((8, VOCAB_SIZE // 32), 7, dtype=np.int32)
    matchers = [compiled("regex", text) for text in texts]
    matchers[1].accept(ord("z"))
    fill_masks(matchers, masks)
    for row, matcher in enumerate(matchers):
        alone = np.zeros_like(masks[:1])
        fill_masks([matcher], alone)
        assert (masks[row] == alone[0]).all()
    assert (masks[1] == -1).all()
    assert (masks[len(texts) :] == 7).all()


def test_what_a_grammar_leaves_no_choice_in_is_encoded_as_prompts_are() -> None:
    """Also where several masks are made at once, by other threads than Python's own."""
    table = vocabulary()
    (the,) = token_ids_of("the")
    encode = {"the": [the]}
    forced = Guides(
        lambda: table._replace(encode=lambda text: encode.get(text, [*text.encode()])),
        vocab_size=VOCAB_SIZE,
        eos_token_ids={EOS},
    )
    guide = Guide("lark", 'start: <[510]> "the" <[511]>')
    matchers = [forced.matcher(guide) for _ in range(9)]
    masks = np.zeros((9, VOCAB_SIZE // 32), dtype=np.int32)
    for matcher in matchers:
        matcher.accept(510)
    fill_masks(matchers, masks)
    assert [allowed(matcher) for matcher in matchers] == [[the]] * 9


REFUSED = [
    ("json_schema", "{", "guide must be JSON"),
    ("json_schema", "[" * 5000, "guide must be JSON"),
    ("json_schema", '{"type": "strin"}', "guide cannot be compiled: Invalid type: strin"),
    ("json_schema", '{"not": {}}', r"guide cannot be compiled: Unimplemented keys: \[\"not\"\]"),
    ("json_schema", '{"type": "string", "format": "new"}', "compiled: Unknown format: new"),
    ("json_schema", '{"$ref": "http://x/y"}', "compiled: .*http://x/y"),
    ("json_schema", "false", "compiled: Unsatisfiable schema: schema is false"),
    ("regex", "(", "guide cannot be compiled: "),
    ("regex", r"[^\s\S]", "guide cannot begin an answer: "),
    ("lark", "start: A\nA: /a/ & /b/", "guide cannot begin an answer: "),
    ("lark", 'start: start "a"', "guide cannot begin an answer: "),
    ("regex", "(?=a)b", "look-around, .* is not supported"),
    ("lark", "start: nope", 'unknown name: "nope"'),
    ("lark", "begin: /a/", "guide cannot be compiled: "),
    ("grammars", "{}", "guide of type grammars must be a JSON list of objects"),
    ("grammars", "[1]", "guide of type grammars must be a JSON list of objects"),
    ("grammars", '[{"lark_grammar": "start: @x"}]', "guide cannot be compiled: "),
]


@pytest.mark.parametrize(("type_", "value", "sentence"), REFUSED)
def test_what_cannot_be_compiled_is_refused_in_a_sentence(
    type_: str, value: str, sentence: str
) -> None:
    with pytest.raises(InvalidRequest, match=sentence) as refused:
        compiled(type_, value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def chains() -> list[tuple[str, str]]:
    """Guides about as long as one may be, in which each name says what the next one does."""
    schemas = {f"a{i}": {"items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(1300)}
    schema = {"$defs": schemas | {"a1300": {}}, "$ref": "#/$defs/a0"}
    rules, terminals = (
        f"start: {name}0\n" + "".join(f"{name}{i}:{name}{i + 1}\n" for i in range(4500))
        for name in "aA"
    )
    return [
        ("json_schema", json.dumps(schema, separators=(",", ":"))),
        ("lark", f'{rules}a4500: "a"'),
        ("lark", f'{terminals}A4500: "a"'),
    ]


@pytest.mark.parametrize(("type_", "value"), chains())
def test_no_chain_is_too_long_for_the_stack(type_: str, value: str) -> None:
    """An overflow would end the engine's process, and everybody's answers."""
    assert allowed(compiled(type_, value))


class Panic(BaseException):
    """As what Rust's panics become."""


def panics(*_: object, **__: object) -> None:
    raise Panic("index out of bounds")


def test_a_panic_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = guides()
    loaded.matcher(Guide("regex", "a"))
    monkeypatch.setattr(module, "LLMatcher", panics)
    with pytest.raises(InvalidRequest, match="guide cannot be compiled: index out of bounds"):
        loaded.matcher(Guide("json_schema", "{}"))


def test_what_never_ends_is_refused_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = guides()
    loaded.matcher(Guide("regex", "a"))
    may_end = threading.Event()
    monkeypatch.setattr(module, "LLMatcher", lambda *_, **__: may_end.wait())
    monkeypatch.setattr(module, "_COMPILE_SECONDS", 0.01)
    with pytest.raises(InvalidRequest, match=r"compiled: it takes longer than 0\.01 s"):
        loaded.matcher(Guide("json_schema", "{}"))
    may_end.set()


def test_an_ambiguous_grammar_ends_before_a_mask_takes_long() -> None:
    """Each of a token's characters may be in many places of its parse."""
    table = vocabulary()
    tokens = [*table.token_bytes]
    tokens[256:376] = [b"a" * length for length in range(2, 122)]
    loaded = Guides(
        lambda: table._replace(token_bytes=tokens), vocab_size=VOCAB_SIZE, eos_token_ids={EOS}
    )
    with pytest.raises(InvalidRequest, match=r"guide cannot begin an answer: .*Too many items"):
        loaded.matcher(Guide("lark", "start: s\ns: s s | s s s | /[a-z]/ |"))


def test_what_is_too_much_shows_where_it_is_too_much() -> None:
    matcher = compiled("regex", "a(([a-z]{1,100}){1,100}){1,100}")
    matcher.accept(ord("a"))
    chance = random.Random(0)
    for _ in range(200):
        matcher.accept(chance.choice(allowed(matcher)))
        if matcher.error:
            break
    assert "the guide cannot be followed any further: lexer error" in matcher.error


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("json", "guide must have a type and a value alone, got 'json'"),
        ({"type": "regex"}, "guide must have a type and a value alone"),
        ({"type": "json", "value": "{}"}, "guide.type must be one of json_schema, .*got 'json'"),
        ({"type": "regex", "value": ""}, "guide.value must be a text, got ''"),
        ({"type": "regex", "value": {}}, r"guide.value must be a text, got \{\}"),
        (
            {"type": "regex", "value": "a" * (MAX_GUIDE_LENGTH + 1)},
            "guide.value must have at most 65536 characters, got 65537",
        ),
    ],
)
def test_what_is_no_guide_is_refused(given: object, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        SamplingParams.from_mapping({"guide": given})


def test_a_guide_in_the_parameters_is_one() -> None:
    found = SamplingParams.from_mapping({"guide": {"type": "regex", "value": "a"}})
    assert found.guide == Guide("regex", "a")
    with pytest.raises(InvalidRequest, match="guide must be a Guide"):
        SamplingParams(guide="a")  # pyright: ignore[reportArgumentType]


def test_the_vocabulary_is_loaded_once_whoever_asks_first() -> None:
    calls: list[str] = []
    may_go_on = threading.Event()

    def load() -> module.Vocabulary:
        calls.append(threading.current_thread().name)
        may_go_on.wait(10)
        return vocabulary()

    made = Guides(load, vocab_size=VOCAB_SIZE, eos_token_ids={EOS})
    assert not calls
    made.begin()
    asking = threading.Thread(target=made.matcher, args=(Guide("regex", "a"),))
    asking.start()
    may_go_on.set()
    asking.join(10)
    assert not asking.is_alive()
    assert len(calls) == 1


def test_without_a_vocabulary_a_guide_is_unsupported_and_says_why() -> None:
    def load() -> module.Vocabulary:
        raise RuntimeError("it was found nowhere")

    for made, why in (
        (Guides(load, vocab_size=VOCAB_SIZE, eos_token_ids={EOS}), "it was found nowhere"),
        (Guides(vocabulary, vocab_size=VOCAB_SIZE, eos_token_ids={600}), "names no token that"),
    ):
        for _ in range(2):
            with pytest.raises(Unsupported, match=f"guide cannot be given here: .*{why}"):
                made.matcher(Guide("regex", "a"))


def test_a_vocabulary_comes_by_its_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class EntryPoint:
        def load(self):
            return lambda folder: ([str(folder).encode()], [3], list)

    monkeypatch.setattr(module.importlib.metadata, "entry_points", lambda group: [EntryPoint()])
    assert load_vocabulary(None).token_bytes == [b"None"]
    monkeypatch.setattr(module.importlib.metadata, "entry_points", lambda group: [])
    with pytest.raises(RuntimeError, match="no package that is installed has a vocabulary"):
        load_vocabulary(None)


def test_a_model_of_fewer_or_more_tokens_than_the_vocabulary_has() -> None:
    for vocab_size in (300, 600):
        made = Guides(vocabulary, vocab_size=vocab_size, eos_token_ids={EOS})
        matcher = made.matcher(Guide("regex", "the[a-z]{2}"))
        masks = np.zeros((1, -(-vocab_size // 32)), dtype=np.int32)
        for token_id in b"theab":
            fill_masks([matcher], masks)
            assert masks.view(np.uint32)[0, token_id // 32] >> token_id % 32 & 1
            matcher.accept(token_id)
        assert matcher.is_over
        assert not matcher.error
