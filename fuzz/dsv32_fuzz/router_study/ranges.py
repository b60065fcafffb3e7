"""Single tensors out of safetensors files of any size, by reading their bytes and no others.

The safetensors library maps a whole file, and a kernel may refuse a mapping larger than memory. The format is an 8-byte
little-endian header length, a JSON header with dtype, shape and byte range of each tensor, then the bytes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_HEADER_BYTES = 100_000_000  # the library's own limit
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TensorFile:
    """The header of one file.

    Raises:
        ValueError: not a safetensors file, or a tensor's range lies outside of it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                if not 2 <= length <= MAX_HEADER_BYTES:
                    raise ValueError("no safetensors header")
                header = json.loads(file.read(length))
            self._start = 8 + length
            self._end = path.stat().st_size
            self.tensors: dict[str, Any] = {n: dict(t) for n, t in header.items() if n != "__metadata__"}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a readable safetensors file ({error}); download it again") from None

    def read(self, name: str, rows: int | None = None) -> Tensor:
        """A floating-point tensor, or its first `rows` rows.

        Raises:
            ValueError: another dtype, or a byte range that does not fit shape and file.
        """
        entry = self.tensors[name]
        dtype, shape = DTYPES.get(str(entry.get("dtype"))), list(entry.get("shape") or [])
        if dtype is None:
            raise ValueError(f"{self.path}: {name} is {entry.get('dtype')}; expected one of {', '.join(DTYPES)}")
        begin, end = entry.get("data_offsets") or (0, -1)
        size = math.prod(shape) * dtype.itemsize
        if begin < 0 or end - begin != size or self._start + end > self._end or not shape:
            raise ValueError(f"{self.path}: the bytes of {name} do not fit its shape; download it again")
        if rows is not None and rows < shape[0]:
            size, shape = size // shape[0] * rows, [rows, *shape[1:]]
        with self.path.open("rb") as file:
            file.seek(self._start + begin)
            data = bytearray(file.read(size))
        return torch.frombuffer(data, dtype=dtype).reshape(shape)


def tensor_files(folder: Path) -> dict[str, Path]:
    """File of each tensor in a checkpoint folder, from its index or from every file's header.

    Raises:
        ValueError: no safetensors files, or a damaged index.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            weight_map = {str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ValueError(f"{index} has no weight_map of file names ({error}); download it again") from None
        outside = [file for file in weight_map.values() if Path(file).name != file]
        if outside:
            raise ValueError(f"{index} points to {outside[0]!r}; files must lie in the folder itself")
        return {name: folder / file for name, file in weight_map.items()}
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ValueError(f"{folder} holds no .safetensors file; pickled weights (.bin, .pt) are not read")
    return {name: path for path in found for name in TensorFile(path).tensors}
