"""Checkpoints: torch.save, torch.distributed.checkpoint, synchronously and not, full state dicts of FSDP."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt import GPT, batch, loss_of, start
from torch import optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=("plain", "distributed", "async", "full"))
kind = parser.parse_args().kind
device = start()
model = GPT(2).to(device)
if kind != "plain":
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
optimizer = optim.AdamW(model.parameters(), lr=1e-3)


def step() -> None:
    tokens, targets = batch(device)
    loss_of(model(tokens), targets).backward()
    optimizer.step()
    optimizer.zero_grad()


step()
folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
dist.broadcast_object_list(folder, src=0)
path = os.path.join(folder[0], "checkpoint")
if kind == "plain":
    if dist.get_rank() == 0:
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.cuda.get_rng_state()}, path
        )
    dist.barrier()
    state = torch.load(path, map_location=device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
elif kind == "full":
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=options)
    if dist.get_rank() == 0:
        torch.save(state, path)
else:
    parameters, moments = get_state_dict(model, optimizer)
    state = {"model": parameters, "optimizer": moments}
    if kind == "async":
        cpu = dist.new_group(backend="gloo")
        dcp.async_save(state, checkpoint_id=path, process_group=cpu).result()
    else:
        dcp.save(state, checkpoint_id=path)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
step()
step()
