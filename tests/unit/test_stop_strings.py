"""The token that completes a stop string is the one of the whole text, however characters are cut into tokens."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from dora.data.types import RequestSpec, SamplingParams
from dora.errors import InvalidValue
from dora.worker.stop_strings import StopStrings
from tests.refusals import refused

TEXT = "Ünïcödé 😀😀 wird 中文字 geschnitten. </answer>\n\nEND of it, 終わり。 \u200d👩‍👩‍👧 "


def saved(folder: Path, kind: str) -> Tokenizer:
    """A tokenizer whose tokens are mostly bytes."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=kind == "fallback", unk_token="<unk>"))
    special = ["<unk>", "<|im_end|>"]
    if kind == "byte-level":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        special, alphabet = [*special, *(f"<0x{byte:02X}>" for byte in range(256))], list("abcdefghijklmnopqrstuvwxyz")
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=special, initial_alphabet=alphabet, show_progress=False, limit_alphabet=256
    )
    tokenizer.train_from_iterator(["the answer is </answer> END of it " * 3], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def request(stops: tuple[str, ...], outputs: tuple[int, ...] = (), min_tokens: int = 0) -> RequestSpec:
    return RequestSpec("r", 0, (1,), SamplingParams(stop=stops, min_tokens=min_tokens), outputs, (0.0,) * len(outputs))


@pytest.mark.parametrize("kind", ["byte-level", "fallback"])
def test_a_stop_is_found_at_the_token_that_completes_it_whatever_was_resumed(kind: str, tmp_path: Path) -> None:
    tokenizer, draw, compared = saved(tmp_path, kind), random.Random(1), 0
    stop_strings = StopStrings(tmp_path)
    for _ in range(300):
        cut = [draw.randrange(len(TEXT)) for _ in range(4)]
        ids = [each for at in cut for each in tokenizer.encode(TEXT[at : at + draw.randrange(1, 30)]).ids]
        ids.insert(draw.randrange(len(ids)), 1)
        whole = tokenizer.decode(ids, skip_special_tokens=False)
        at = draw.randrange(len(whole))
        stops = ("\x01", whole[at : at + draw.randrange(1, 12)])
        if "\N{REPLACEMENT CHARACTER}" in stops[1]:
            continue
        texts = [tokenizer.decode(ids[:end], skip_special_tokens=False) for end in range(1, len(ids) + 1)]
        expected = next(end for end, text in enumerate(texts, start=1) if stops[1] in text)
        resumed = draw.randrange(expected)
        watch = stop_strings.watch(request(stops, tuple(ids[:resumed])))
        assert watch is not None
        found = [watch.completed_by(token_id) for token_id in ids[resumed:expected]]
        assert found == [""] * (expected - resumed - 1) + [stops[1]]
        compared += 1
    assert compared > 200


def test_what_is_watched_stays_small(tmp_path: Path) -> None:
    """Also where the model writes bytes that never become a character."""
    tokenizer = saved(tmp_path, "byte-level")
    half = tokenizer.encode("中").ids[0]
    watch = StopStrings(tmp_path).watch(request(("END",)))
    assert watch is not None
    for token_id in [half] * 500 + tokenizer.encode("long " * 100).ids:
        assert watch.completed_by(token_id) == ""
        assert len(watch._ids) <= 16 and len(watch._tail) <= 2
    assert [watch.completed_by(token_id) for token_id in tokenizer.encode("EN" + "D").ids][-1] == "END"


def test_a_special_token_is_text_too(tmp_path: Path) -> None:
    saved(tmp_path, "byte-level")
    watch = StopStrings(tmp_path).watch(request(("<|im_end|>",)))
    assert watch is not None and watch.completed_by(1) == "<|im_end|>"


def test_without_stop_strings_no_tokenizer_is_needed(tmp_path: Path) -> None:
    for folder in (None, tmp_path):
        assert StopStrings(folder).watch(request(())) is None
        with refused(InvalidValue, field="sampling.stop"):
            StopStrings(folder).watch(request(("END",)))
