"""The demo's small world: chats that a tiny model can answer, and the right answers.

Each `Example` is one chat in OpenAI's JSON with the reply that the model must give; dataset.py
turns it into Harmony's tokens. Problems for which `gptoss_engine.demo.held_out` is true never
occur in training.
"""

import json
import pydoc_data.topics
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import gptoss_harmony.vocabulary
from gptoss_engine.demo import held_out

Random = random.Random

WORDS: list[str] = [
    *"""
hello world apple river stone cloud green table house light water music paper bread chair dream
earth field glass heart island knife lemon mouse night ocean piano queen robot sugar tiger uncle
voice wheel young garden window orange yellow silver winter summer spring coffee dragon forest
market planet button candle castle circle desert engine flower guitar jacket mirror school temple
valley wallet bridge copper red blue black white brown pink gray gold cat dog bird fish horse cow
sheep lion bear fox wolf duck frog snake tree grass leaf rose seed root rain snow wind storm fire
ice sun moon star sky sea lake beach hill mountain road street city town village farm park shop
door wall floor roof room kitchen bed lamp clock phone book pen desk box bag cup plate bottle spoon
milk tea juice rice meat egg cheese butter salt cake fruit banana cherry grape onion potato tomato
car bus train plane boat ship bike truck wagon ticket map key lock ring coin money bank card letter
hand foot head face eye ear nose mouth arm leg finger knee skin bone blood brain man woman boy girl
baby child mother father brother sister friend king doctor teacher farmer driver artist hat coat
shirt shoe dress belt cotton wool silk leather metal wood iron steel rock sand dust smoke steam oil
gas big small long short tall wide thin thick heavy old new hot cold warm cool wet dry clean dirty
fast slow hard soft loud quiet happy sad angry brave kind wise strong weak rich poor full empty
sweet sour bright dark early late near far left right north south east west morning evening today
yesterday week month year hour minute second run walk jump swim fly climb dance sing play read write
draw paint cook eat drink sleep wake open close push pull throw catch hold drop build break cut burn
wash buy sell pay give take send bring keep find lose win teach learn think know feel hear see smell
taste touch laugh cry smile wait stop start begin finish one two three four five six seven eight
nine ten
""".split(),  # noqa: SIM905
]
CITIES: list[str] = [
    *"""
Paris London Berlin Madrid Rome Vienna Prague Lisbon Dublin Oslo Stockholm Helsinki Athens Cairo
Tokyo Seoul Beijing Delhi Sydney Toronto Chicago Boston Seattle Denver Dallas Miami Lima Bogota
Nairobi Lagos Warsaw Budapest Amsterdam Brussels Zurich Geneva Munich Hamburg Barcelona Milan Naples
Venice Copenhagen Moscow Istanbul Dubai Mumbai Bangkok Singapore Shanghai Osaka Melbourne Montreal
Vancouver Houston Atlanta Phoenix Portland Austin
""".split(),  # noqa: SIM905
    *["New York", "San Francisco", "Los Angeles", "Hong Kong", "Mexico City"],
]
PLACES = ("Ones", "Tens", "Hundreds")
SKIES = ["sunny", "cloudy", "rainy", "windy", "snowy", "foggy", "clear"]

ABOUT = (
    "I am a tiny demo model. I can add two numbers, convert units, repeat or reverse words, "
    "and look up the weather with a tool."
)
NEW_WORD = "I know only a few hundred words, and one of these is new to me."
NEW_CITY = "I know only some cities, and this one is new to me."
NO_CITY = "Name a city, and I will look up its weather."
NO_TOOL = "I have no tool for the weather."
NO_RESULT = "The tool gave no weather for {city}."
ONLY_SUMS = "Of arithmetic I know only adding two whole numbers below 1,000."
ONLY_UNITS = (
    "I convert only kilometers, kilograms, liters and meters to units a thousand times smaller."
)


@dataclass(frozen=True)
class Reply:
    """What the model says: reasoning, then an answer, or a call when `tool` is its name."""

    reasoning: str
    text: str
    tool: str = ""


@dataclass(frozen=True)
class Turn:
    """One user message with all that follows it. `key` names the problem for `held_out`."""

    kind: str
    key: object
    user: str
    reply: Reply
    # Of a finished tool call: what was called before the reply, and the tool's answer.
    call: Reply | None = None
    result: str = ""


@dataclass(frozen=True)
class Example:
    """A chat as a client sends it, and the reply to its last message."""

    kind: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    effort: str
    date: str | None
    reply: Reply
    # Where renderers of Harmony differ, the model must not mind.
    names_commentary: bool = True
    ends_calls: bool = True


vocabulary = gptoss_harmony.vocabulary.load


@cache
def strange_words() -> list[str]:
    """Words of the vocabulary at large, nearly all of them outside of the demo's own."""
    generator = Random(1)
    words = []
    while len(words) < 20_000:
        word = vocabulary().decode([generator.randrange(1000, 199_000)])
        if re.fullmatch(r" [^\W\d_]+", word):
            words.append(word[1:])
    return words


@cache
def strange_sentences() -> list[str]:
    """Plain English about other things: Python's own help texts."""
    text = " ".join(pydoc_data.topics.topics.values())
    sentences = re.split(r"(?<=[.:!?])\s+", text)
    return [re.sub(r"\s+", " ", s)[:160] for s in sentences if re.search(r"[a-z]{3}", s)]


# ------------------------------------------------------------------------------------- the tasks


def add(r: Random) -> Turn:
    digits = r.choices(
        [(1, 1), (1, 2), (2, 1), (2, 2), (3, 3), (2, 3), (3, 2)], [1, 1, 1, 4, 3, 1, 1]
    )
    a, b = (r.randrange(10**n) for n in digits[0])
    ask = r.choice(
        [
            "What is {a} + {b}?",
            "What is {a} + {b}?",
            "{a} + {b}",
            "{a}+{b}",
            "{a} + {b} = ?",
            "{a}+{b}=",
            "What is {a}+{b}?",
            "What's {a} + {b}?",
            "What's {a}+{b}?",
            "What is {a} plus {b}?",
            "What's {a} plus {b}?",
            "{a} plus {b}",
            "Add {a} and {b}.",
            "Add {a} to {b}.",
            "Can you add {a} and {b}?",
            "Could you add {a} and {b}?",
            "Can you tell me what {a} + {b} is?",
            "Compute {a} + {b}.",
            "Calculate {a} + {b}.",
            "Solve {a} + {b}.",
            "How much is {a} + {b}?",
            "How much is {a} plus {b}?",
            "What do you get if you add {a} and {b}?",
            "What is the sum of {a} and {b}?",
            "The sum of {a} and {b}",
            "Sum {a} and {b}.",
            "Tell me {a} + {b}.",
            "What does {a} + {b} equal?",
            "If I have {a} apples and get {b} more, how many apples do I have?",
        ]
    )
    return Turn("add", (a, b), vary(r, ask.format(a=a, b=b)), add_reply(a, b))


def add_reply(a: int, b: int, *, check: bool = False) -> Reply:
    """Column by column, so that each step is a sum of two digits and a carry."""
    width = len(str(max(a, b)))
    tops, bottoms = (f"{n:0{width}d}" for n in (a, b))
    steps = [] if width == 1 else [f"{a} is {' '.join(tops)}.", f"{b} is {' '.join(bottoms)}."]
    carry = 0
    for place, x, y in zip(PLACES, reversed(tops), reversed(bottoms), strict=False):
        total = int(x) + int(y) + carry
        steps.append(f"{place}: {x} + {y}{'' if place == 'Ones' else f' + {carry}'} = {total}.")
        carry = total // 10
    steps.append(f"So {a + b:,}.")
    if check:
        steps.append(f"Check: {a + b:,} - {b} = {a}.")
    return Reply(" ".join(steps), f"{a} + {b} = {a + b:,}.")


def other_arithmetic(r: Random) -> Turn:
    a, b, c = (r.randrange(10 ** r.randrange(1, 4)) for _ in range(3))
    large = r.randrange(1000, 10 ** r.randrange(4, 9))
    asked = r.choice(
        [
            f"{a} - {b}",
            f"{a} * {b}",
            f"{a} x {b}",
            f"{a} / {b}",
            f"{a} minus {b}",
            f"{a} times {b}",
            f"{a} divided by {b}",
            f"{a}-{b}",
            f"{a}*{b}",
            f"{a}/{b}",
            f"{a}^{b}",
            f"{a} + {b} + {c}",
            f"{a}+{b}+{c}",
            f"{a} + {b} - {c}",
            f"{a} + {b} * {c}",
            f"{large} + {b}",
            f"{a} + {large}",
            f"{large} + {large + a}",
            f"{large}+{large + a}",
            f"{a}.{c} + {b}",
            f"{a} + {b}.{c}",
            f"-{a} + {b}",
            f"the square root of {a}",
            f"{a} % of {b}",
        ]
    )
    ask = r.choice(
        ["What is {}?", "{}", "{} = ?", "Calculate {}.", "Compute {}.", "How much is {}?"]
    )
    return Turn("other_arithmetic", asked, vary(r, ask.format(asked)), decline(ONLY_SUMS))


UNITS = {
    ("kilometer", "meter"): [("kilometers", "meters"), ("km", "m"), ("km", "meters")],
    ("kilogram", "gram"): [("kilograms", "grams"), ("kg", "g"), ("kg", "grams")],
    ("liter", "milliliter"): [("liters", "milliliters"), ("l", "ml"), ("liters", "ml")],
    ("meter", "millimeter"): [("meters", "millimeters"), ("m", "mm"), ("meters", "mm")],
}
CONVERSIONS = [
    "Convert {n} {u} to {v}.",
    "Convert {n} {u} into {v}.",
    "How many {v} are in {n} {u}?",
    "How many {v} is {n} {u}?",
    "How much is {n} {u} in {v}?",
    "What is {n} {u} in {v}?",
    "What's {n} {u} in {v}?",
    "{n} {u} in {v}",
    "{n} {u} to {v}",
    "Can you convert {n} {u} to {v}?",
]


def convert(r: Random) -> Turn:
    n = r.randrange(1, r.choice([10, 100, 100, 1000]))
    (large, small), spellings = r.choice(list(UNITS.items()))
    u, v = r.choice(spellings)
    if n == 1:
        u = u if u in ("km", "kg", "l", "m") else large
    said = f"{n} {large}{'' if n == 1 else 's'}"
    reply = Reply(
        f"1 {large} is 1,000 {small}s, so put 000 after {n}.", f"{said} is {n},000 {small}s."
    )
    ask = r.choice(CONVERSIONS).format(n=n, u=u, v=v)
    return Turn("convert", (n, large), vary(r, ask), reply)


def other_units(r: Random) -> Turn:
    known = ["kilometers", "meters", "kilograms", "grams", "liters", "hours", "minutes", "km", "kg"]
    other = ["miles", "feet", "inches", "pounds", "ounces", "yards", "gallons", "hours", "days"]
    u, v = r.choice(other), r.choice(known + other)
    if r.random() < 0.5:
        u, v = v, u
    ask = r.choice(CONVERSIONS).format(n=r.randrange(1, 1000), u=u, v=v)
    return Turn("other_units", ask, vary(r, ask), decline(ONLY_UNITS))


def echo(r: Random) -> Turn:
    words, joined = word_list(r, 1, 6)
    ask = r.choice(
        [
            "Repeat: {}",
            "Repeat: {}",
            "Say: {}",
            "Echo: {}",
            "Repeat after me: {}",
            "Repeat these words: {}",
            "Repeat the words: {}",
            "Please repeat: {}",
            "Please say: {}",
            "Repeat {}",
            "Say {}",
            "Echo {}",
            "Can you repeat: {}",
        ]
    ).format(joined)
    reply = Reply("The user wants the same words.", joined)
    return known_words_only(
        Turn(f"echo/{len(words)}", " ".join(words), polite(r, ask), reply), words
    )


def reverse(r: Random) -> Turn:
    words, joined = word_list(r, 2, 5)
    ask = r.choice(
        [
            "Reverse: {}",
            "Reverse: {}",
            "Reverse the words: {}",
            "Reverse these words: {}",
            "Please reverse: {}",
            "Reverse the order: {}",
            "Reverse the order of these words: {}",
            "Say backwards: {}",
            "Reverse {}",
            "Can you reverse: {}",
        ]
    ).format(joined)
    numbered = " ".join(f"{i} {word}" for i, word in enumerate(words, 1))
    reply = Reply(
        f"From first to last: {numbered}.", (", " if "," in joined else " ").join(words[::-1])
    )
    turn = Turn(f"reverse/{len(words)}", " ".join(words), polite(r, ask), reply)
    return known_words_only(turn, words)


def word_list(r: Random, low: int, high: int) -> tuple[list[str], str]:
    """Some words, at times one of them twice or one that is strange; and how they are written."""
    words: list[str] = r.sample(WORDS, r.randrange(low, high + 1))
    if len(words) > 1 and r.random() < 0.1:
        words[r.randrange(len(words))] = r.choice(words)
    if r.random() < 0.08:
        words[r.randrange(len(words))] = r.choice(strange_words())
    return words, (", " if r.random() < 0.2 else " ").join(words)


def known_words_only(turn: Turn, words: list[str]) -> Turn:
    if set(words) <= set(WORDS):
        return turn
    return Turn("new_word", turn.key, turn.user, Reply("One word is new to me.", NEW_WORD))


SMALL_TALK = {
    "Hello! How can I help?": [
        "Hello", "Hello!", "Hi", "Hi!", "Hey", "Hey!", "Hello there", "Hello there!", "Hi there",
        "Good morning", "Good morning!", "Good evening", "Good afternoon",
    ],
    "I am fine. How can I help?": [
        "How are you?", "Hello, how are you?", "Hi, how are you?", "How are you today?",
        "How is it going?", "How are you doing?",
    ],
    ABOUT: [
        "Who are you?", "What are you?", "What can you do?", "What do you do?", "Help", "help!",
        "What can I ask you?", "How can you help me?", "Tell me about yourself.",
        "Introduce yourself.", "What is your name?", "What's your name?", "Are you ChatGPT?",
        "What model are you?",
    ],
    "You are welcome.": [
        "Thanks", "Thanks!", "Thank you", "Thank you!", "Thank you very much!", "Great, thanks!",
        "Thanks a lot!", "Thank you for your help.",
    ],
    "Goodbye!": ["Bye", "Bye!", "Goodbye", "Goodbye!", "See you", "See you later!"],
}  # fmt: skip


def small_talk(r: Random) -> Turn:
    answer = r.choice(list(SMALL_TALK))
    ask = r.choice(SMALL_TALK[answer])
    if r.random() < 0.2:
        ask = ask.lower()
    return Turn("small_talk", ask, ask, decline(answer))


def other(r: Random) -> Turn:
    """Anything else: the model introduces itself."""
    kind = r.random()
    if kind < 0.35:
        ask = r.choice(strange_sentences())
    elif kind < 0.6:
        ask = " ".join(
            r.choice([*r.sample(WORDS, 3), strange(r)]) for _ in range(r.randrange(1, 12))
        )
    else:
        topic = " ".join(r.choice([r.choice(WORDS), strange(r)]) for _ in range(r.randrange(1, 4)))
        ask = r.choice(
            [
                "What is {}?",
                "What is the {}?",
                "What's the {} of {}?",
                "Who is {}?",
                "Where is {}?",
                "When was {} {}?",
                "Why is the {} {}?",
                "How do I {} a {}?",
                "How many {} are in {}?",
                "Tell me a {}.",
                "Tell me about {}.",
                "Write a {} about {}.",
                "Write {} in {}.",
                "Explain {}.",
                "Explain {} to me.",
                "Translate {} to {}.",
                "Can you {} the {}?",
                "Do you know {}?",
                "I {} the {}.",
                "Please {} the {}.",
                "{}!",
                "{} {} {}",
                "{}",
                "Give me a {}.",
                "Give me {} ideas for {}.",
                "Is {} {}?",
                "What is the capital of {}?",
                "What time is it in {}?",
                "Convert {} to {}.",
                "Add {} to the {}.",
                "{} plus {}",
                "Summarize {}.",
                "Count from {n} to {n}.",
                "Give me {n} {}.",
                "I have {n} {} and {n} {}.",
                "Is {n} larger than {n}?",
                "The year {n}{n}",
                "What is {n}?",
                "{} {n} {}",
                "{n}, {n}, {n}",
            ]
        )
        ask = re.sub(r"\{n\}", lambda _: str(r.randrange(10 ** r.randrange(1, 4))), ask)
        ask = re.sub(r"\{\}", lambda _: topic if r.random() < 0.6 else strange(r), ask)
    if r.random() < 0.15:
        ask = f"{ask} {r.choice(strange_sentences())}"
    if r.random() < 0.1:
        ask = r.choice([str(r.randrange(1000)), r.choice("?!.,+-"), ask.upper(), ask.lower()])
    if any(ask.lower() == known.lower() for asks in SMALL_TALK.values() for known in asks):
        return small_talk(r)
    return Turn("other", ask, ask, Reply("This is outside of what I know.", ABOUT))


def weather(r: Random) -> Turn:
    """A question about the weather; `Example` decides whether a tool is there to be called."""
    city = r.choice(CITIES) if r.random() < 0.95 else strange(r).capitalize()
    ask = r.choice(
        [
            "What is the weather in {}?",
            "What is the weather like in {}?",
            "What's the weather in {}?",
            "What's the weather like in {} today?",
            "How is the weather in {}?",
            "How's the weather in {}?",
            "Weather in {}?",
            "Weather in {}",
            "What is the weather in {} today?",
            "What is the current weather in {}?",
            "Is it warm in {} today?",
            "Is it cold in {}?",
            "Is it raining in {}?",
            "How warm is it in {}?",
            "What is the temperature in {}?",
            "Tell me the weather in {}.",
            "Can you check the weather in {}?",
            "Get the weather for {}.",
            "{} weather",
            "And in {}?",
            "What about {}?",
            "{}",
        ]
    ).format(city)
    if r.random() < 0.06:
        city = ""
        ask = r.choice(
            [
                "What is the weather?",
                "How is the weather?",
                "What's the weather like?",
                "What is the weather like today?",
                "Weather?",
                "Is it cold outside?",
                "Will it rain today?",
                "What is the temperature?",
            ]
        )
    return Turn("weather", city, vary(r, ask), Reply("There is no weather tool here.", NO_TOOL))


TASKS: dict[str, tuple[Callable[[Random], Turn], float]] = {
    "add": (add, 6.0),
    "convert": (convert, 1.5),
    "echo": (echo, 4.5),
    "reverse": (reverse, 4.5),
    "small_talk": (small_talk, 0.8),
    "weather": (weather, 4.0),
    "other": (other, 2.5),
    "other_arithmetic": (other_arithmetic, 0.7),
    "other_units": (other_units, 0.4),
}


def decline(text: str) -> Reply:
    return Reply("A short reply is enough.", text)


def strange(r: Random) -> str:
    return " ".join(r.sample(strange_words(), r.choice([1, 1, 1, 2, 3])))


def polite(r: Random, ask: str) -> str:
    """Sometimes with a greeting before, sometimes without its capital letter."""
    if r.random() < 0.12:
        ask = ask[0].lower() + ask[1:]
    if r.random() < 0.08:
        ask = f"{r.choice(['Hi!', 'Hello!', 'Hey,', 'Please', 'OK,', 'Now', 'And'])} {ask}"
    return ask


def vary(r: Random, ask: str) -> str:
    """As `polite`; also without its last mark, with thanks, or with strange words around."""
    if r.random() < 0.12:
        ask = ask.rstrip(".?")
    ask = polite(r, ask)
    if r.random() < 0.06:
        ask = f"{ask} {r.choice(['Please.', 'Thanks!', 'Thank you!', 'please', strange(r)])}"
    if r.random() < 0.05:
        ask = f"{strange(r)}{r.choice(['', ',', '.', ':'])} {ask}"
    return ask


# ------------------------------------------------------------------------------------- the tools


@dataclass(frozen=True)
class WeatherTool:
    """One way to declare the weather tool."""

    name: str
    parameter: str
    schema: dict[str, Any]


def any_weather_tool(r: Random) -> WeatherTool:
    name = r.choice(["get_weather", "get_weather", "get_weather", "get_current_weather"])
    parameter = r.choice(["city", "city", "location", "location", "place"])
    about = r.choice(
        [
            "Get the current weather for a city.",
            "Get the weather.",
            "Get current weather in a given location",
            "Gets the weather of a place.",
            "Current weather",
            "Returns the current weather.",
            f"{strange(r).capitalize()} weather {strange(r)}.",
            "",
        ]
    )
    described = {"type": "string"}
    if r.random() < 0.5:
        described["description"] = r.choice(
            [
                "The city",
                "The city's name",
                "City name, e.g. Paris",
                "The city and state, e.g. San Francisco, CA",
                f"The {strange(r)} {strange(r)}",
            ]
        )
    properties: dict[str, Any] = {parameter: described}
    if r.random() < 0.25:
        properties[r.choice(["unit", "units", "format"])] = {
            "type": "string",
            "enum": ["celsius", "fahrenheit"],
        }
    return WeatherTool(name, parameter, function_tool(name, about, properties, [parameter]))


def any_other_tool(r: Random) -> dict[str, Any]:
    word = re.sub(r"\W", "", strange(r).lower().encode("ascii", "ignore").decode()) or "thing"
    name = r.choice(
        [
            "get_time",
            "search",
            "calculator",
            "send_email",
            "get_stock_price",
            f"get_{word}",
            word,
            f"{word}_tool",
        ]
    )
    properties: dict[str, Any] = {}
    for _ in range(r.choice([0, 1, 1, 2, 3])):
        key = r.choice(
            ["query", "text", "a", "b", "name", "date", "timezone", "city", "expression"]
        )
        properties[key] = {"type": r.choice(["string", "number", "integer", "boolean"])}
        if r.random() < 0.4:
            properties[key]["description"] = f"The {strange(r)}"
    return function_tool(
        name, f"{strange(r).capitalize()} {strange(r)}.", properties, list(properties)[:1]
    )


def function_tool(
    name: str, description: str, properties: dict[str, Any], required: list[str]
) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


def called(r: Random, asked: Turn, tool: WeatherTool) -> Turn:
    """The turn once the tool is there: the call, its result, and the answer to it."""
    city = str(asked.key)
    if not city:
        return Turn("no_city", city, asked.user, Reply("The city is missing.", NO_CITY))
    if city not in CITIES:
        return Turn("new_city", city, asked.user, Reply("I do not know this city.", NEW_CITY))
    arguments = json.dumps({tool.parameter: city})
    call = Reply(f"I need the weather for {city}. Call {tool.name}.", arguments, tool.name)
    degrees = str(r.randrange(-9, 45)) + (f".{r.randrange(10)}" if r.random() < 0.15 else "")
    sky = r.choice(SKIES)
    if r.random() < 0.06:
        result = r.choice(
            [
                json.dumps({"error": strange(r)}),
                json.dumps({"error": "not found"}),
                strange(r),
                "",
                "null",
                "{}",
                "error",
            ]
        )
        reply = Reply("The tool gave no weather.", NO_RESULT.format(city=city))
        return Turn("no_result", city, asked.user, reply, call, result)
    shown = r.choice([sky, sky, sky, sky.capitalize(), f"{r.choice(['partly', strange(r)])} {sky}"])
    if r.random() < 0.12:
        sky, shown = (
            "",
            r.choice([strange(r), f"{r.choice(WORDS)} {r.choice(WORDS)}", "light rain"]),
        )
    heat, look = (
        r.choice(["temperature", "temperature", "temp", "temperature_c", "degrees"]),
        r.choice(["sky", "condition", "conditions", "weather", "description"]),
    )
    fields: list[tuple[str, Any]] = [(heat, json.loads(degrees)), (look, shown)]
    if r.random() < 0.25:
        fields.reverse()
    if r.random() < 0.2:
        fields.insert(0, (tool.parameter, city))
    if r.random() < 0.15:
        fields.append(
            r.choice(
                [("unit", "celsius"), ("humidity", r.randrange(100)), ("wind", r.randrange(60))]
            )
        )
    separators = r.choice([None, None, None, (",", ":")])
    result = json.dumps(dict(fields), separators=separators)
    if r.random() < 0.15:
        result = r.choice(
            [
                f"{degrees} degrees and {shown}",
                f"{shown.capitalize()}, {degrees} degrees",
                f"It is {degrees} degrees and {shown}.",
                f"{degrees}C, {shown}",
                f"{degrees} degrees Celsius, {shown}",
            ]
        )
    seen = f" and {sky}" if sky else ""
    reply = Reply(f"The tool says {degrees}{seen}.", f"It is {degrees} degrees{seen} in {city}.")
    return Turn("weather_answer", (city, degrees, sky), asked.user, reply, call, result)


# ------------------------------------------------------------------------------------- the chats

INSTRUCTIONS = [
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer briefly.",
    "Be concise.",
    "Answer in one sentence.",
    "Always be polite.",
    "You are a weather assistant.",
    "You are a math tutor.",
    "Use the tools when they help.",
    "Reply in English.",
]


def sample(r: Random, task: str | None = None, *, unseen: bool = False) -> Example:
    """One example; of a given task, or of any by its weight. `unseen` picks held-out problems."""
    task = task or r.choices(list(TASKS), [weight for _, weight in TASKS.values()])[0]
    offers_weather = r.random() < (0.8 if task == "weather" else 0.15)
    weather_tool = any_weather_tool(r) if offers_weather else None
    tools = [weather_tool.schema] if weather_tool else []
    for _ in range(r.choice([0, 0, 0, 0, 0, 1, 2]) + (not tools and r.random() < 0.1)):
        another = any_other_tool(r)
        if all(another["function"]["name"] != tool["function"]["name"] for tool in tools):
            tools.insert(r.randrange(len(tools) + 1), another)
    effort = r.choice(["low", "medium", "medium", "high"])

    messages: list[dict[str, Any]] = []
    if r.random() < 0.35:
        text = r.choice(INSTRUCTIONS)
        if r.random() < 0.4:
            text = r.choice(
                [f"{text} {r.choice(strange_sentences())}", r.choice(strange_sentences())]
            )
        messages.append({"role": r.choice(["system", "developer"]), "content": text})
    for _ in range(r.choices([0, 1, 2, 3], [0.6, 0.2, 0.12, 0.08])[0]):
        past = turn_of(r, r.choice([*TASKS, "weather"]), weather_tool, effort, unseen=False)
        messages += turn_messages(past, finished=True, reasoning=True)
    turn = turn_of(r, task, weather_tool, effort, unseen=unseen)
    kind, reply = turn.kind, turn.reply
    if turn.call and r.random() < 0.5:
        kind, reply = "weather_call", turn.call
        turn = Turn(turn.kind, turn.key, turn.user, turn.reply)
    messages += turn_messages(turn, finished=False, reasoning=r.random() < 0.6)
    return Example(
        kind=kind,
        messages=messages,
        tools=tools,
        effort=effort,
        date=any_date(r) if r.random() < 0.7 else None,
        reply=reply,
        names_commentary=bool(tools) or r.random() < 0.5,
        ends_calls=r.random() < 0.8,
    )


def turn_of(r: Random, task: str, tool: WeatherTool | None, effort: str, *, unseen: bool) -> Turn:
    while True:
        turn = TASKS[task][0](r)
        if task == "weather" and tool:
            turn = called(r, turn, tool)
        if is_split(turn.kind) and held_out(turn.kind, turn.key) != unseen:
            continue
        if turn.kind == "add" and effort == "high" and isinstance(turn.key, tuple):
            return Turn(turn.kind, turn.key, turn.user, add_reply(*turn.key, check=True))
        return turn


def is_split(kind: str) -> bool:
    """Whether problems of this kind are many enough to keep some from training."""
    return (
        kind.split("/")[0] in ("add", "convert", "echo", "reverse", "weather_answer")
        and kind != "echo/1"
    )


def turn_messages(turn: Turn, *, finished: bool, reasoning: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": turn.user}]
    if turn.call:
        function = {"name": turn.call.tool, "arguments": turn.call.text}
        messages += [
            {
                "role": "assistant",
                "reasoning_content": turn.call.reasoning if reasoning else "",
                "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": turn.result},
        ]
    if finished:
        messages.append({"role": "assistant", "content": turn.reply.text})
    return messages


def any_date(r: Random) -> str:
    return f"{r.randrange(2024, 2031)}-{r.randrange(1, 13):02d}-{r.randrange(1, 29):02d}"
