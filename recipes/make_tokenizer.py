"""Makes a byte-level BPE tokenizer, for configs without a real one: `python -m recipes.make_tokenizer FOLDER`.

The one in train_configs/tokenizer was made by it from Python 3.11's standard library. Byte level: it encodes any text.
"""

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from recipes.data import stdlib_files

VOCAB_SIZE = 2048
BOS, EOS = "<|begin|>", "<|end|>"


def make_tokenizer(vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Trains the tokenizer on the standard library's sources."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train([str(path) for _, path in stdlib_files()], trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
