"""What is kept of a tokenizer reads and writes texts as transformers does, and is given up where transformers does more."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertTokenizer, GPT2Tokenizer, LlamaTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from swarmnode.client.model_files import FOLDER, MOST_KEPT, CachedTokenizer, TokenizerCache
from swarmnode.client.tokenizer import Detokenizer, stop_ids
from swarmnode.client.tokenizer import Tokenizer as OurTokenizer
from swarmnode.errors import CheckpointError, UsageError

SWARM = bytes(32)
TEXTS = (
    "",
    " ",
    "hello world",
    "  two  spaces , then a comma . Don't !",
    "<s>hello</s> <think> world<|tool|>",
    "héllo wörld \u200b\n\ttabs\r\n",
    "漢字 🙂👩\u200d👩\u200d👧 \x00",
    "UNKNOWN words " * 50,
)


def letters() -> dict[str, int]:
    return {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}


def byte_level(**settings: object) -> PreTrainedTokenizerBase:
    """As Llama 3, Qwen and GPT-2 have them."""
    vocabulary = {**letters(), "he": 256, "ll": 257, "Ġw": 258, "hell": 259}
    pipeline = Tokenizer(models.BPE(vocab=vocabulary, merges=[("h", "e"), ("l", "l"), ("Ġ", "w"), ("he", "ll")]))
    pipeline.normalizer = normalizers.NFC()
    pipeline.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\s+(?!\S)"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    pipeline.decoder = decoders.ByteLevel()
    pipeline.add_special_tokens(["<s>", "</s>"])
    pipeline.add_tokens([AddedToken("<|tool|>", lstrip=True, rstrip=True), "<think>"])
    pipeline.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 260)])
    pipeline.enable_truncation(4)
    pipeline.enable_padding(length=64)
    return PreTrainedTokenizerFast(tokenizer_object=pipeline, bos_token="<s>", eos_token="</s>", **settings)


def metaspace() -> PreTrainedTokenizerBase:
    """As Llama 2 and Mistral have them: sentencepiece's, with bytes for what is unknown."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"helowrd", "he", "▁w"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return LlamaTokenizer(vocab=vocabulary, merges=[("h", "e"), ("▁", "w")], add_eos_token=True)


def word_piece(**settings: object) -> PreTrainedTokenizerBase:
    """As BERT has them."""
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "hello",
        "world",
        "two",
        "##s",
        ",",
        ".",
        "!",
        "don",
        "'",
        "t",
    ]
    return BertTokenizer(vocab={piece: number for number, piece in enumerate(pieces)}, **settings)


def gpt2() -> PreTrainedTokenizerBase:
    vocabulary = {**letters(), "he": 256, "<|endoftext|>": 257}
    return GPT2Tokenizer(vocab=vocabulary, merges=[("h", "e")], add_prefix_space=True)


KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    "byte level": byte_level,
    "byte level, tidied": lambda: byte_level(clean_up_tokenization_spaces=True),
    "byte level, specials split": lambda: byte_level(split_special_tokens=True),
    "byte level, with an end": lambda: byte_level(add_bos_token=True, add_eos_token=True),
    "metaspace": metaspace,
    "word piece": word_piece,
    "gpt2": gpt2,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_one_reads_and_writes_as_transformers_does(tmp_path: Path, kind: str) -> None:
    KINDS[kind]().save_pretrained(tmp_path / "model")
    cache = TokenizerCache(tmp_path)
    made, kept = cache.tokenizer(SWARM, tmp_path / "model"), cache.tokenizer(SWARM, tmp_path / "model")
    assert type(made) is OurTokenizer
    assert type(kept) is CachedTokenizer
    everything = list(range(len(made.own)))
    for text in TEXTS:
        ids = kept.encode(text)
        assert ids == made.own(text)["input_ids"]
        assert kept.encode_document(text) == made.own(text, add_special_tokens=False)["input_ids"]
        for special in (False, True):
            assert kept.decode(ids, special_tokens=special) == made.own.decode(ids, skip_special_tokens=not special)
        streams = Detokenizer(kept), Detokenizer(made)
        assert [streams[0].push(token) for token in ids] == [streams[1].push(token) for token in ids]
    assert kept.decode(everything) == made.decode(everything)
    assert [kept.decode_token(token) for token in everything] == [made.decode_token(token) for token in everything]
    assert kept.decode([len(everything) + 5]) == made.decode([len(everything) + 5])
    for asked in ("separator", "chat_template", "has_chat_template", "reasons", "has_response_template"):
        assert getattr(kept, asked) == getattr(made, asked)
    with pytest.raises(UsageError, match="half of a character"):
        kept.encode("\ud800")


def test_spaces_that_are_taken_away_are_transformers_business(tmp_path: Path) -> None:
    word_piece(clean_up_tokenization_spaces=True).save_pretrained(tmp_path / "model")
    cache = TokenizerCache(tmp_path)
    for _ in range(2):
        tokenizer = cache.tokenizer(SWARM, tmp_path / "model")
        assert type(tokenizer) is OurTokenizer
        assert tokenizer.decode(tokenizer.encode("hello , world .")) == "hello, world."
    assert not (tmp_path / FOLDER).exists()


def test_a_conversation_is_read_by_the_template(tmp_path: Path) -> None:
    byte_level(chat_template="{{ bos_token }}{{ messages[0]['content'] }}</think>").save_pretrained(tmp_path / "model")
    cache = TokenizerCache(tmp_path)
    made, kept = cache.tokenizer(SWARM, tmp_path / "model"), cache.tokenizer(SWARM, tmp_path / "model")
    messages = [{"role": "user", "content": "hello</s>"}]
    assert kept.reasons
    assert kept.encode_messages(messages) == made.encode_messages(messages)


@pytest.mark.parametrize("damage", ["", "{}", '{"pipeline": 3}', "other versions", "a folder"])
def test_what_cannot_be_used_is_made_again(tmp_path: Path, damage: str) -> None:
    byte_level().save_pretrained(tmp_path / "model")
    cache = TokenizerCache(tmp_path)
    cache.tokenizer(SWARM, tmp_path / "model")
    path = tmp_path / FOLDER / f"{SWARM.hex()}.json"
    kept = json.loads(path.read_text())
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    else:
        others = json.dumps({**kept, "versions": "transformers 4.0.0, tokenizers 0.1.0"})
        path.write_text(others if damage == "other versions" else damage)
    assert type(cache.tokenizer(SWARM, tmp_path / "model")) is OurTokenizer
    if damage != "a folder":
        assert type(cache.tokenizer(SWARM, tmp_path / "model")) is CachedTokenizer


def test_those_of_few_swarms_are_kept(tmp_path: Path) -> None:
    byte_level().save_pretrained(tmp_path / "model")
    cache = TokenizerCache(tmp_path)
    for number in range(MOST_KEPT + 2):
        cache.tokenizer(bytes([number]) * 32, tmp_path / "model")
    assert len(list((tmp_path / FOLDER).iterdir())) == MOST_KEPT
    assert type(cache.tokenizer(bytes([number]) * 32, tmp_path / "model")) is CachedTokenizer


def test_a_folder_without_one_is_told(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be used"):
        TokenizerCache(tmp_path).tokenizer(SWARM, tmp_path)


def test_a_kept_one_needs_no_transformers(tmp_path: Path) -> None:
    byte_level(chat_template="{{ messages[0].content }}!").save_pretrained(tmp_path / "model")
    TokenizerCache(tmp_path).tokenizer(SWARM, tmp_path / "model")
    reading = (
        "import sys; from pathlib import Path; from swarmnode.client.model_files import TokenizerCache;"
        f"tokenizer = TokenizerCache(Path({str(tmp_path)!r})).tokenizer(bytes(32), Path('nowhere'));"
        "chat = tokenizer.encode_messages([{'role': 'user', 'content': 'world'}]);"
        "print(tokenizer.decode(tokenizer.encode('hello') + chat), {'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", reading], capture_output=True, text=True, check=True)
    assert done.stdout == "helloworld! set()\n"


def test_another_thread_may_be_importing_transformers(tmp_path: Path) -> None:
    """As on a node's first start, whose compute thread does. `import transformers` gives the module as it was begun, without
    AutoTokenizer, which transformers replaces at its end."""
    byte_level().save_pretrained(tmp_path)
    begun = (
        "import sys, threading; from pathlib import Path; from swarmnode.client.tokenizer import Tokenizer\n"
        "threading.Thread(target=__import__, args=('transformers',)).start()\n"
        "while 'transformers' not in sys.modules: pass\n"
        f"print(len(Tokenizer(Path({str(tmp_path)!r})).encode('hello')))\n"
    )
    found = subprocess.run([sys.executable, "-c", begun], capture_output=True, text=True, timeout=120)
    assert found.stdout == "3\n", found.stderr


TURNS = "{% for m in messages %}[{{ m.role }}] {{ m.content }} <|tool|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (TURNS, ["</s>", "<|tool|>"]),
        (TURNS + "{% if add_generation_prompt %}[assistant]{% endif %}", ["</s>", "<|tool|>"]),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}<|tool|>assistant", ["</s>"]),  # another answer begins
        ("{{ raise_exception('only tools') }}", ["</s>"]),
        (None, ["</s>"]),
    ],
)
def test_texts_end_where_config_tokenizer_and_template_say(
    tmp_path: Path, template: str | None, ends: list[str]
) -> None:
    """A config may name another token than the tokenizer does; what is kept of the tokenizer knows as much."""
    own = byte_level(chat_template=template)
    own.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    expected = (7, *own.convert_tokens_to_ids(ends))
    cache = TokenizerCache(tmp_path)
    for _ in ("made", "kept"):
        tokenizer = cache.tokenizer(SWARM, tmp_path / "model")
        assert stop_ids(tmp_path / "model", tokenizer) == expected
    assert isinstance(tokenizer, CachedTokenizer)
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, "x", -1, True]}))
    assert stop_ids(tmp_path / "model", tokenizer) == (8, *expected[1:])
