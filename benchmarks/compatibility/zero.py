"""DeepSpeed: ZeRO stages 1, 2 and 3 with PyTorch's own AdamW."""

import argparse
import os

import deepspeed
import torch
from gpt import GPT, batch, loss_of

parser = argparse.ArgumentParser()
parser.add_argument("stage", type=int)
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
config = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": parser.parse_args().stage, "overlap_comm": True},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 1.0,
}
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
for _ in range(5):
    tokens, targets = batch(engine.device)
    engine.backward(loss_of(engine(tokens), targets))
    engine.step()
