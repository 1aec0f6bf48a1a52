"""Transformers: Trainer on a small Llama, with DDP or FSDP; a Mixtral by hand."""

import argparse
import os
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=("trainer", "fsdp", "mixtral"))
kind = parser.parse_args().kind
SHAPE = {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}


class Text(Dataset):
    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(32000, (512,))
        return {"input_ids": tokens, "labels": tokens}


def train() -> None:
    model = LlamaForCausalLM(LlamaConfig(intermediate_size=1376, **SHAPE))
    sharded = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        max_steps=6,
        bf16=True,
        logging_steps=2,
        save_strategy="no",
        report_to="none",
        gradient_checkpointing=kind == "trainer",
        dataloader_num_workers=0,
        **(sharded if kind == "fsdp" else {}),
    )
    Trainer(model=model, args=arguments, train_dataset=Text()).train()


def mixtral() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl")
    config = MixtralConfig(intermediate_size=1024, num_local_experts=8, num_experts_per_tok=2, **SHAPE)
    model = MixtralForCausalLM(config).to(device, torch.bfloat16)
    parallel = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index], find_unused_parameters=True)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-4)
    for _ in range(3):
        tokens = torch.randint(32000, (4, 1024), device=device)
        parallel(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


mixtral() if kind == "mixtral" else train()
