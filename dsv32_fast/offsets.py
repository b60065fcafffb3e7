"""Where the caches and lists of the path lie, as exact integers: at which index 32-bit offsets would wrap.

A kernel that multiplies an index by a stride in int32 is right in every small test and wrong on a large GPU. `layouts`
lists what the path addresses; `Layout.offset` computes in Python integers, `as_int32` what a 32-bit kernel makes of
it. Strides follow from the shapes that `CacheState` and `MetadataBuilder` allocate, not from a run.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsv32_ref.config import Config

INT32_MAX = 2**31 - 1


def as_int32(offset: int) -> int:
    """`offset` after two's-complement wrapping to 32 bits."""
    return (offset + 2**31) % 2**32 - 2**31


@dataclass(frozen=True, kw_only=True)
class Layout:
    """An array of equal records.

    Raises:
        ValueError: a record without elements.
    """

    name: str
    index: str
    """What is counted: slot, page, block or row."""
    stride: int
    """Elements from one record to the next, hence of a record."""
    unit: str = "element"
    """What an offset counts: element or byte."""

    def __post_init__(self) -> None:
        if self.stride < 1:
            raise ValueError(f"stride {self.stride} of {self.name} must be positive")

    def offset(self, index: int, lane: int = 0) -> int:
        """Of element `lane` of record `index`, exactly."""
        return index * self.stride + lane

    @property
    def first_wrap(self) -> int:
        """The first record whose first element is beyond int32: what `index * stride` in int32 gets wrong."""
        return INT32_MAX // self.stride + 1

    @property
    def first_touched(self) -> tuple[int, int]:
        """(record, lane) of the first element beyond int32: what `index * stride + lane` in int32 gets wrong."""
        return divmod(INT32_MAX + 1, self.stride)


def layouts(
    config: Config, *, page_size: int = 64, max_len: int = 1 << 20, block_elements: int = 1280 * 512
) -> tuple[Layout, ...]:
    """Everything that the path and the kernels around it address by an index that grows with the deployment.

    Args:
        config: dimensions.
        page_size: slots of a page.
        max_len: columns of the indexer's logits.
        block_elements: elements of a KV block of the largest public case (vLLM issues #56037 and #56748).
    """
    C, R, width = config.kv_lora_rank, config.qk_rope_head_dim, config.index_head_dim + 4
    return (
        Layout(name="latent bf16", index="slot", stride=config.latent_dim),
        Layout(name="latent bf16", index="slot", stride=2 * config.latent_dim, unit="byte"),
        Layout(name="latent fp8 record", index="slot", stride=C + C // 128 * 4 + 2 * R, unit="byte"),
        Layout(name="indexer key record", index="slot", stride=width, unit="byte"),
        Layout(name="indexer page", index="page", stride=page_size * width, unit="byte"),
        Layout(name="kv block", index="block", stride=block_elements),
        Layout(name="paged_kv_indices", index="row", stride=config.index_topk),
        Layout(name="indexer logits", index="row", stride=max_len),
    )


def table(found: tuple[Layout, ...]) -> str:
    """One line per layout: stride, first record that wraps, first element that wraps."""
    lines = []
    for layout in found:
        record, lane = layout.first_touched
        where = f"{layout.index} {layout.first_wrap} wraps; first element: {layout.index} {record} + {lane}"
        lines.append(f"{layout.name:20} {layout.stride:8} {layout.unit:8} {where}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(layouts(Config())))
