"""What commands say of wrong usage, and what they answer, in this process."""

import json
from pathlib import Path

import pytest

from .conftest import Run


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("serve", "--max-num-seqs", "0"), "max_num_seqs must be in [1, 4096], got 0"),
        (("serve", "--device", "tpu"), "device must be one of auto, cpu, cuda, got 'tpu'"),
        (("serve", "--model", "/none"), "model must be a checkpoint folder or 'demo'"),
        (("serve", "--format", "rwa"), "format must be one of harmony, raw, got 'rwa'"),
        (("serve", "--modle", "demo"), "No such option: --modle"),
        (("serve", "--http-port", "0"), "should be greater than or equal to 1"),
        (("serve", "--config", "/none.toml"), "cannot read configuration file /none.toml"),
        (("chat", "--effort", "huge"), "effort must be one of low, medium, high, got 'huge'"),
        (("chat", "--tools", "/none.json"), "cannot read tools from /none.json"),
        (("chat", "--url", "h:1", "--page-size", "16"), "--url names a running server"),
        (("chat", "x", "--seed", str(2**64)), f"should be less than or equal to {2**64 - 1}"),
        (("chat", "x", "--max-tokens", "3000000000"), "should be less than or equal to 2147483647"),
        (("generate", "x", "--seed", str(2**64)), "seed must be in [0, 18446744073709551615]"),
        (("generate", "x", "--top-p", "0"), "top_p must be in (0, 1], got 0.0"),
        (("generate", "x", "--raw", "--token-ids"), "exclude each other"),
        (("generate", "x", "--token-ids"), "token ids must be a JSON list"),
        (("generate", "x", "--format", "runes"), "format must be one of harmony, raw, got 'runes'"),
        (("generate", "x", "--tp", "4", "--ep", "2"), "ep must be 1 or tp (4), got 2"),
        (("generate", "x", "--device", "cpu", "--tp", "2"), "with ep 2 each rank has whole ones"),
        (("bench", "decode", "--device", "cpu", "--dp", "2"), "dp must be 1 where one engine is"),
        (("nonsense",), "No such command"),
    ],
)
def test_wrong_usage_is_a_sentence_and_exit_code_2(
    gptoss: Run, arguments: tuple[str, ...], sentence: str
) -> None:
    done = gptoss(*arguments)
    assert done.code == 2, done.err
    assert sentence in " ".join(done.err.replace("│", " ").split())
    assert done.out == ""


def test_generate_over_ranks_and_replicas_says_the_same(gptoss: Run) -> None:
    arguments = ("generate", "[7, 8, 9]", "--token-ids", "--device", "cpu", "--temperature", "0")
    limits = ("--max-tokens", "6", "--ignore-eos", "--max-model-len", "64")
    alone = gptoss(*arguments, *limits)
    several = gptoss(*arguments, *limits, "--tp", "2", "--ep", "2", "--dp", "2")
    assert (several.code, several.out) == (0, alone.out)
    assert len(json.loads(alone.out)) == 6


def test_configuration_file_with_an_unknown_key(gptoss: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("max_num_seq = 4\n")
    done = gptoss("serve", "--config", str(path))
    assert done.code == 2
    assert "'max_num_seq'; did you mean 'max_num_seqs'?" in done.err


def test_flags_win_over_the_file(gptoss: Run, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"max_num_seqs": 4, "page_size": 0}))
    done = gptoss("serve", "--config", str(path), "--max-num-seqs", "0", "--page-size", "16")
    assert "max_num_seqs must be in [1, 4096], got 0" in done.err


def test_inspect_shows_the_demo(gptoss: Run) -> None:
    done = gptoss("inspect", "demo", "--json")
    assert done.code == 0, done.err
    figures = json.loads(done.out)
    assert figures["vocab_size"] == 201088
    assert figures["parameters"] > figures["active_parameters"] > 0
    assert "201,088" in gptoss("inspect", "demo").out


def test_serve_without_a_usable_cache_fails_in_a_sentence(
    gptoss: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPTOSS_CACHE", "/proc/none")
    done = gptoss("serve", "--no-openai")
    assert done.code == 1
    assert done.err.startswith("gptoss: ")
    assert "set GPTOSS_CACHE" in done.err


@pytest.mark.parametrize("command", [("inspect",), ("generate", "x", "--model")])
def test_a_folder_without_a_checkpoint_fails_in_a_sentence(
    gptoss: Run, command: tuple[str, ...], tmp_path: Path
) -> None:
    done = gptoss(*command, str(tmp_path))
    assert done.code == 1
    assert done.err.startswith("gptoss: ")


def test_generate_takes_and_gives_token_ids(gptoss: Run) -> None:
    prompt = "[200006, 1428, 200008, 4827, 382, 220, 1422, 200007, 200006, 173781]"
    done = gptoss("generate", prompt, "--token-ids", "--max-tokens", "3", "--temperature", "0")
    assert done.code == 0, done.err
    assert len(json.loads(done.out)) == 3


def test_chat_without_its_server_exits_1(gptoss: Run) -> None:
    done = gptoss("chat", "x", "--url", "127.0.0.1:9")
    assert done.code == 1
    assert done.err.startswith("gptoss: no answer: ")
