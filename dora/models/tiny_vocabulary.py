"""The 64 tokens of the tiny models: one per character, and four words that each name a class of characters.

In the matching task (``dora.prompts.tiny``, ``dora.rewards.tiny``) the model writes characters of the named class. The
words are in capitals and no class has a capital, so a repeated word never earns a reward.
"""

import json
from pathlib import Path

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
CLASSES = {
    "DIGITS": "0123456789",
    "SIGNS": "+-*/=<>%&#",
    "EARLY": "abcdefghijklm",
    "LATE": "nopqrstuvwxyz",
}
_PUNCTUATION = " \n.,:;?!'\""
VOCABULARY = (PAD, BOS, EOS, UNKNOWN, *CLASSES, *"".join(CLASSES.values()), *_PUNCTUATION)
PAD_ID, BOS_ID, EOS_ID = (VOCABULARY.index(token) for token in (PAD, BOS, EOS))
CHAT_TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, as transformers' AutoTokenizer reads them."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNKNOWN))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in (PAD, BOS, EOS, UNKNOWN)])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in CLASSES])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2) + "\n", encoding="utf-8")
