"""The weights and tokens behind the recorded decodes, by formula instead of by file.

Each tensor has its own numpy `RandomState` stream, seeded by the CRC-32 of its name, so the numbers do not depend on
the order of drawing. Matrices lie on the bf16 grid; norm weights, the indexer's LayerNorm bias and the correction
bias are plain fp32. A recording states the SHA-256 of its weights, which is checked before anything is compared.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from dsv32_ref.config import Config
from dsv32_ref.weights import weight_shapes


@functools.lru_cache(maxsize=1)
def recipe_weights(config: Config, seed: int) -> Mapping[str, Tensor]:
    """Named fp32 weights of `seed`, under DeepSeek's names, [out, in]; kept, so do not change them."""
    return MappingProxyType({name: _draw(name, shape, seed) for name, shape in weight_shapes(config).items()})


def _draw(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    stream = np.random.RandomState((zlib.crc32(name.encode()) + 1000003 * seed) % 2**32)
    z = stream.standard_normal(shape)
    plain = {"norm.weight": (1.0, 0.1), "k_norm.bias": (0.0, 0.1), "gate.bias": (0.0, 0.05)}
    for suffix, (mean, spread) in plain.items():
        if name.endswith(suffix):
            return torch.from_numpy((mean + spread * z).astype(np.float32))
    scale = 1.0 if name == "embed.weight" else 1.0 / shape[-1] ** 0.5
    scale = 1.5 / shape[-1] ** 0.5 if name.endswith("gate.weight") else scale
    drawn: Tensor = torch.from_numpy((z * scale).astype(np.float32)).to(torch.bfloat16).to(torch.float32)
    return drawn


def weights_sha256(named: Mapping[str, Tensor]) -> str:
    """SHA-256 over the names and little-endian fp32 bytes of all tensors, by ascending name."""
    digest = hashlib.sha256()
    for name in sorted(named):
        digest.update(name.encode())
        digest.update(named[name].numpy().astype("<f4").tobytes())
    return digest.hexdigest()
