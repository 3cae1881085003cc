"""Humming's FP8 products with bias, on weights as ours or as MXFP4. Imported where it is used."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

from gptoss_kernels.fp8 import BLOCK, num_blocks

HUMMING_TENSORS = ("weight", "weight_scale", "weight_scale_2", "bias")


class HummingProduct:
    """x @ weight^T + bias by Humming; grouped rows lie as ours do, by their offsets.

    Blocks want K and N in multiples of 128, so that the weights are filled up with zeros: K = 2880
    becomes 2944, 2.2 % more bytes. `pad_n` rows more of N: the tile that the library chooses has
    256 columns where they divide N, and 128 else.
    """

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor,
        bias: Tensor,
        n: int,
        k: int,
        pad_n: int,
        *,
        is_mxfp4: bool = False,
    ) -> None:
        ops, config_types, kernel, transform, tune = (
            import_module(f"humming.{name}")
            for name in ("ops", "config", "kernel.humming", "transform", "tune")
        )

        pad_k = -k % BLOCK
        num_experts = len(weight) if bias.dim() == 2 else 0
        blocks = {"bs_dtype": "float32", "weight_scale_group_size_n": BLOCK}
        groups = {"bs_dtype": "float8e8m0", "weight_scale_group_size": 32}
        config = config_types.LayerConfig(
            shape_n=n + pad_n,
            shape_k=k + pad_k,
            pad_shape_n=pad_n,
            pad_shape_k=pad_k,
            num_experts=num_experts,
            a_dtype="float8e4m3",
            as_dtype="float32",
            input_scale_group_size=BLOCK,
            b_dtype="float4e2m1" if is_mxfp4 else "float8e4m3",
            c_dtype="bfloat16",
            has_bias=True,
            **({"weight_scale_group_size": BLOCK} | (groups if is_mxfp4 else blocks)),
        )
        bias = bias.bfloat16()
        if is_mxfp4:
            tensors = {
                "weight": weight.flatten(-2).view(torch.int32),
                "weight_scale": scale.view(torch.float8_e8m0fnu),
                "bias": bias,
            }
        else:
            fill = torch.nn.functional.pad
            tensors = {
                "weight": fill(weight.view(torch.uint8), (0, pad_k, 0, pad_n)).view(torch.int32),
                "weight_scale": fill(scale, (0, 0, 0, num_blocks(n + pad_n) - num_blocks(n))),
                "bias": fill(bias, (0, pad_n)),
            }
        self._tensors = transform.transform_humming_tensors(
            config, tensors, already_padded=not is_mxfp4
        )
        gemm_type = (
            config_types.GemmType.GROUPED_CONTIGUOUS if num_experts else config_types.GemmType.DENSE
        )
        compute = config_types.ComputeConfig(use_m_major_input_scale=True, gemm_type=gemm_type)
        self._locks = torch.zeros(1 << 14, dtype=torch.int32, device="cuda")
        self._launch = ops.launch_kernel

        @cache
        def configs(rows: int) -> Tensor:
            tuning = tune.get_heuristics_config(
                config, rows, use_m_major_input_scale=True, gemm_type=gemm_type
            )
            return kernel.HummingKernel.prepare_kernels(config.to_str(), compute.to_str(), tuning)

        self.prepare = configs

    def __call__(
        self, x: Tensor, x_scale: Tensor, out: Tensor, start: Tensor | None = None
    ) -> None:
        rows, columns = x_scale.shape
        stored = x_scale.as_strided((columns, -(-rows // 4) * 4), (x_scale.stride(1), 1))
        self._launch(
            configs=self.prepare(len(x)),
            inputs=x,
            input_scale=stored,
            outputs=out,
            expert_layout=start,
            locks=self._locks,
            **{name: self._tensors.get(name) for name in HUMMING_TENSORS},
        )


def paddings(n: int) -> list[int]:
    """Rows that make N a multiple of 128 and 256, each once."""
    return sorted({-n % multiple for multiple in (BLOCK, 2 * BLOCK)})


def compile_all(products: Iterable[HummingProduct], rows: Iterable[int]) -> None:
    """Humming's kernels for these numbers of rows, side by side: each takes seconds.

    One that does not compile fails again, and alone, where it is called.
    """
    sizes = list(rows)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        concurrent.futures.wait(
            [pool.submit(one.prepare, count) for one in products for count in sizes]
        )
