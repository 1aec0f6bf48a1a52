"""A script of Hugging Face's Trainer, as torchrun runs it. By a schedule of foretrain's, without a change:

foretrain run --nproc 2 --schedule auto -- examples/trainers/hugging_face.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

LENGTH, VOCABULARY = 16, 64


def sequences(count: int) -> list[dict[str, torch.Tensor]]:
    """Tokens that go up by a number which differs by sequence."""
    made = []
    for index in range(count):
        tokens = (torch.arange(LENGTH) * (index % 7 + 1) + index) % VOCABULARY
        made.append({"input_ids": tokens, "labels": tokens})
    return made


def main() -> None:
    set_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            max_grad_norm=1.0,
            num_train_epochs=4,
            learning_rate=3e-3,
            use_cpu=not torch.cuda.is_available(),
            ddp_backend="nccl" if torch.cuda.is_available() else "gloo",
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=sequences(256))
        trained = trainer.train()
    if trainer.is_world_process_zero():
        print(f"loss {trained.training_loss:.6f} over {trained.global_step} steps")


if __name__ == "__main__":
    main()
