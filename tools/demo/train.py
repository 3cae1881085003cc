"""Train the demo model on dataset.py's rows, on a GPU or a CPU, for a given time.

    python tools/demo/train.py --minutes 25 --data .demo_data/demo.npz --out .demo_data/model

Writes OUT/trained.pt (now and then, and at the end); export.py makes the package's file of it.
The experts are rounded to MXFP4 in every forward pass, as they will be served.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as functional
from torch import Tensor

from layout import GENERATED, INDEX_MASK, START_OF_CHAT
from model import DemoModel, ModelConfig

WARMUP_STEPS, HELD_SHARE, LAST_RATE = 300, 0.55, 0.01
WEIGHT_DECAY, IMBALANCE_WEIGHT = 0.05, 0.01
MAX_GENERATED_SHARE = 0.3


def loss_and_accuracy(model: DemoModel, rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows int32 [B, T]: over the tokens that follow on another and were generated."""
    ids = rows & INDEX_MASK
    chats = ((rows & START_OF_CHAT) > 0).cumsum(1)
    targets = ids.roll(-1, 1).flatten().long()
    generated = (rows.roll(-1, 1) & GENERATED) > 0
    generated = functional.pad(generated[:, :-1], (0, 1)).flatten().float()
    hidden, _, imbalance = model(ids, chats)
    # A fixed number of positions, generated ones first, so that compiled shapes stay the same.
    weight, positions = generated.topk(int(MAX_GENERATED_SHARE * generated.numel()))
    logits = model.logits(hidden.flatten(0, 1)[positions])
    losses = functional.cross_entropy(logits, targets[positions], reduction="none")
    right = (logits.argmax(-1) == targets[positions]).float()
    loss = (losses * weight).sum() / weight.sum()
    loss = loss + IMBALANCE_WEIGHT * imbalance / len(model.layers)
    return loss, (right * weight).sum() / weight.sum()


def learning_rate(step: int, share: float) -> float:
    """Warm-up, a plateau, then a straight line down; `share` of the time has passed."""
    falling = max(LAST_RATE, (1 - share) / (1 - HELD_SHARE)) if share > HELD_SHARE else 1.0
    return min(1.0, (step + 1) / WARMUP_STEPS) * falling


def take_over(model: DemoModel, token_ids: np.ndarray, path: Path) -> None:
    """Parameters of an earlier training; tokens that it did not know begin as its unused ones."""
    earlier = torch.load(path)
    index = {token: i for i, token in enumerate(earlier["token_ids"])}
    known = [i for i, token in enumerate(token_ids.tolist()) if token in index]
    rows = [index[token_ids[i]] for i in known]
    with torch.no_grad():
        for name, value in model.named_parameters():
            source = earlier["parameters"][name].to(value.device)
            if name in ("embedding", "unembedding"):
                value.copy_(source[-1])
                value[known] = source[rows]
            else:
                value.copy_(source)


def save(model: DemoModel, token_ids: np.ndarray, folder: Path) -> None:
    parameters = {name: value.detach().cpu() for name, value in model.named_parameters()}
    torch.save({"parameters": parameters, "token_ids": token_ids.tolist()}, folder / "trained.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--data", type=Path, default=Path(".demo_data/demo.npz"))
    parser.add_argument("--out", type=Path, default=Path(".demo_data/model"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="rows a step (64 on a GPU, 8 on a CPU)")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="on a GPU: yes")
    parser.add_argument("--start", type=Path, help="an earlier trained.pt to go on from")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    on_gpu = arguments.device == "cuda"
    compiles = on_gpu if arguments.compile is None else arguments.compile
    batch = arguments.batch or (64 if on_gpu else 8)
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    torch.set_float32_matmul_precision("high")

    with np.load(arguments.data) as data:
        token_ids = data["token_ids"]
        rows = torch.from_numpy(data["rows"].astype(np.int32)).to(arguments.device)
    model = DemoModel(ModelConfig(), len(token_ids)).to(arguments.device)
    if arguments.start:
        take_over(model, token_ids, arguments.start)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": WEIGHT_DECAY},
            {"params": vectors, "weight_decay": 0},
        ],
        betas=(0.9, 0.98),
        fused=True,
    )
    measure = torch.compile(loss_and_accuracy) if compiles else loss_and_accuracy
    print(
        f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(token_ids)} tokens in "
        f"use, {len(rows):,} rows, {batch} a step on {arguments.device}, torch {torch.__version__}",
        flush=True,
    )

    seconds = arguments.minutes * 60
    started = saved = logged = time.monotonic()
    order = torch.empty(0, dtype=torch.long, device=arguments.device)
    step = 0
    while (passed := time.monotonic() - started) < seconds:
        if len(order) < batch:
            order = torch.randperm(len(rows), device=arguments.device)
        now, order = order[:batch], order[batch:]
        for group in optimizer.param_groups:
            group["lr"] = arguments.rate * learning_rate(step, passed / seconds)
        with torch.autocast(arguments.device, torch.bfloat16, enabled=on_gpu):
            loss, accuracy = measure(model, rows[now])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if time.monotonic() - logged > 10:
            # .item() waits for the device, so the time below is that of finished steps.
            shown = f"loss {loss.item():.4f} accuracy {accuracy.item():.4f}"
            logged = time.monotonic()
            rate = step / (logged - started)
            print(
                f"{logged - started:5.0f} s  step {step}  {shown}  {rate:.1f} steps/s", flush=True
            )
        if time.monotonic() - saved > 120:
            save(model, token_ids, arguments.out)
            saved = time.monotonic()
    save(model, token_ids, arguments.out)
    print(f"{step} steps, {step * batch * rows.shape[1] / 1e6:.0f} million tokens, {seconds:.0f} s")


if __name__ == "__main__":
    main()
