"""Writes what torchtitan's debug models look for under ./tests/assets: a tokenizer and a little text."""

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

folder = Path("tests/assets")
text = [f"Sentence {k} tells of {k * 7919 % 1000} things and of {k % 13} others." * 20 for k in range(2000)]
(folder / "tokenizer").mkdir(parents=True)
(folder / "c4_test").mkdir()
(folder / "c4_test/data.json").write_text("".join(json.dumps({"text": line}) + "\n" for line in text), encoding="utf-8")
tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
special = ["<|begin_of_text|>", "<|end_of_text|>"]
tokenizer.train_from_iterator(text, trainers.BpeTrainer(vocab_size=2048, special_tokens=special))
tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
(folder / "tokenizer/tokenizer_config.json").write_text(
    json.dumps({"bos_token": special[0], "eos_token": special[1]}), encoding="utf-8"
)
