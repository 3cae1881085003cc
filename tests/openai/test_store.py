"""The store of responses keeps to its limits, whatever is put into it and asked of it."""

import json
import random
import tracemalloc

from gptoss_openai.store import ResponseStore, Stored


def _entry(name: str, size: int = 10, owner: str = "me") -> Stored:
    return Stored(name, b"x" * size, b"", owner)


def test_the_one_unused_for_longest_goes() -> None:
    store = ResponseStore(2, 100)
    store.put(_entry("a"))
    store.put(_entry("b"))
    assert store.get("a", "me") is not None
    store.put(_entry("c"))
    assert store.get("b", "me") is None
    assert store.get("a", "me") is not None
    assert store.num_bytes == 20


def test_bytes_are_limited() -> None:
    store = ResponseStore(10, 25)
    for name in "abc":
        store.put(_entry(name))
    assert (len(store), store.num_bytes) == (2, 20)
    store.put(_entry("large", 26))
    assert (len(store), store.num_bytes) == (2, 20)
    store.put(_entry("fits", 25))
    assert (len(store), store.num_bytes) == (1, 25)


def test_none_at_all() -> None:
    store = ResponseStore(0, 100)
    store.put(_entry("a"))
    assert len(store) == 0


def test_only_its_owner_sees_or_deletes_it() -> None:
    store = ResponseStore(10, 100)
    store.put(_entry("a"))
    assert store.get("a", "you") is None
    assert not store.delete("a", "you")
    assert store.delete("a", "me")
    assert (len(store), store.num_bytes) == (0, 0)
    assert not store.delete("a", "me")


def test_random_traffic_keeps_the_count() -> None:
    chance = random.Random(7)
    store = ResponseStore(5, 100)
    for number in range(2000):
        name = f"r{chance.randrange(20)}"
        if chance.random() < 0.5:
            store.put(_entry(f"r{number}", chance.randrange(60)))
        elif chance.random() < 0.5:
            store.delete(name, "me")
        else:
            store.get(name, "me")
        sizes = [each.size for each in store._entries.values()]
        assert store.num_bytes == sum(sizes) <= 100
        assert len(store) == len(sizes) <= 5


def test_a_size_is_what_it_takes_as_json() -> None:
    entry = Stored.of({"id": "x"}, ({"role": "user", "content": "é" * 100},), "me")
    assert 200 < entry.size < 260


def test_what_is_counted_is_what_is_held() -> None:
    tops = [{"token": "a", "logprob": -1.5, "bytes": [97]} for _ in range(5)]
    entry = {"token": "a", "logprob": -1.5, "bytes": [97], "top_logprobs": tops}
    answer = json.dumps({"logprobs": [entry] * 1000})
    store = ResponseStore(100, 2**30)
    tracemalloc.start()
    for number in range(10):
        store.put(Stored.of({"id": f"r{number}", **json.loads(answer)}, [], "me"))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 10 * len(answer) / 2 < store.num_bytes < held < 1.2 * store.num_bytes
