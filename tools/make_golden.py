"""Writes tests/golden: a tiny checkpoint in the original layout, and what OpenAI's own code says.

Made once, with PyPI's `gpt-oss` 0.0.9 (pure Python, declared for 3.12, runs on 3.11 unpacked):

    pip download --no-deps --python-version 3.12 --only-binary=:all: -d build gpt-oss==0.0.9
    python -m zipfile -e build/gpt_oss-0.0.9-py3-none-any.whl build/gpt_oss
    python tools/make_golden.py build/gpt_oss

The reference holds its weights in bf16. The same code is run twice: as it is, and with every
parameter widened to fp32, which changes no value but removes the rounding of what it computes.
"""

import sys
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
NUM_TOKENS = 200
# The first ones, both sides of the window's edge, and the last.
POSITIONS = (0, 1, 2, 126, 127, 128, 129, 160, 199)


def main(package: str) -> None:
    sys.path[:0] = [package, str(ROOT / "tests")]
    from gpt_oss.torch.model import Transformer  # type: ignore[import-not-found]

    from tiny_checkpoint import TinySize, original_tensors, write  # type: ignore[import-not-found]

    torch.set_num_threads(1)
    size = TinySize(
        layers=2, hidden=64, intermediate=32, experts=4, experts_per_token=2, vocabulary=96
    )
    write(GOLDEN, original_tensors(size, seed=20), size.original_config())
    generator = torch.Generator().manual_seed(21)
    token_ids = torch.randint(size.vocabulary, (NUM_TOKENS,), generator=generator)
    model = Transformer.from_checkpoint(str(GOLDEN), device="cpu")
    values: dict[str, np.ndarray] = {
        "token_ids": token_ids.numpy(),
        "positions": np.array(POSITIONS),
    }
    with torch.inference_mode():
        for name in ("bfloat16", "float32"):
            logits = model.to(getattr(torch, name))(token_ids).float().numpy()
            values[f"logits_{name}"] = logits[list(POSITIONS)]
            values[f"argmax_{name}"] = logits.argmax(-1)
    np.savez_compressed(GOLDEN / "golden.npz", **values)
    for path in sorted(GOLDEN.iterdir()):
        print(f"{path.name}: {path.stat().st_size} bytes")
    difference = np.abs(values["logits_bfloat16"] - values["logits_float32"]).max()
    print(f"bf16 against fp32: at most {difference:.4f} apart in logits of mean size ", end="")
    print(f"{np.sqrt(np.square(values['logits_float32']).mean()):.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
