"""A package that looks like vLLM where the target looks, small enough to be read, with defects on demand.

It is written into a folder and driven there exactly as a real vLLM: imported by the worker under the name `vllm`.
"""

from __future__ import annotations

from pathlib import Path

PLATFORMS = """
class Platform:
    @classmethod
    def num_compute_units(cls, *_):
        raise RuntimeError("no GPU here")

current_platform = Platform()
"""

COMMON = """
from dataclasses import dataclass
import torch

@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
"""

BACKEND = """
from types import SimpleNamespace
import torch
from aiter import dtypes, get_mla_metadata_info_v1
from vllm._ops import rocm_aiter_ops
from vllm.platforms import current_platform

KEY, CLEAR, ROWS, PERSISTENT, MOVES = {key!r}, {clear!r}, {rows!r}, {persistent!r}, {moves!r}
INVALID, SHIFT, REMAP, LSE, GUARD = {invalid!r}, {shift!r}, {remap!r}, {lse!r}, {guard!r}
FIELDS = ("work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
print("a line on standard output")  # must not reach the messages


def triton_convert_req_index_to_global_index(req, table, tokens, indptr, out, BLOCK_SIZE=64, NUM_TOPK_TOKENS=2048):
    for row in range(len(req)):
        start, end = int(indptr[row]), int(indptr[row + 1])
        token = tokens[row, : end - start].long()
        slot = table[int(req[row])][token.clamp_min(0) // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE + SHIFT
        out[start:end] = torch.where(token < 0, INVALID, slot).int()


def fetch_id_to_ragged_triton(table, indptr, out, topk):
    for row in range(len(table)):
        out[int(indptr[row]) : int(indptr[row + 1]) + SHIFT] = table[row, : int(indptr[row + 1] - indptr[row]) + SHIFT]


class FakeBackend:
    @staticmethod
    def get_builder_cls():
        return FakeBuilder

    @staticmethod
    def get_impl_cls():
        return FakeLayer


class FakeLayer:
    def forward_mqa(self, q, cache, metadata, layer):
        if REMAP == "every pass" or getattr(metadata, "remapped", None) != self.index_epoch:
            triton_convert_req_index_to_global_index(
                metadata.req_id_per_token, metadata.block_table, self.topk_indices_buffer,
                metadata.paged_kv_indptr, metadata.paged_kv_indices, BLOCK_SIZE=1,
            )
            metadata.remapped = self.index_epoch
        return self._forward_mla(layer, q, cache, metadata)

    def _forward_mla(self, layer, q, cache, metadata):
        if LSE:
            return q, rocm_aiter_ops.mla_decode_fwd_lse(q, cache)
        rocm_aiter_ops.mla_decode_fwd(q, cache)
        return q, None


class FakeBuilder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        rows = vllm_config.scheduler_config.max_num_batched_tokens
        self.topk = vllm_config.model_config.hf_config.index_topk
        self.heads = max(16, vllm_config.model_config.get_num_attention_heads(None))
        self.req_ids = torch.zeros(rows, dtype=torch.int32)
        self.qo = torch.arange(rows + 1, dtype=torch.int32)
        self.last = torch.ones(rows, dtype=torch.int32)
        self.indices = torch.zeros(rows * self.topk, dtype=torch.int32)
        self.indptr = torch.zeros(rows + 1, dtype=torch.int32)
        bf16 = torch.bfloat16
        info = get_mla_metadata_info_v1(rows, 1, self.heads, bf16, bf16, is_sparse=True, fast_mode=True)
        for field, (shape, dtype) in zip(FIELDS, info):
            setattr(self, "my_" + field, torch.empty(shape, dtype=dtype))
        self.last_key, self.extents = None, (0, 0)

    def build(self, common_prefix_len, cam, fast_build=False):
        assert cam.query_start_loc is not cam.query_start_loc_cpu
        q = torch.diff(cam.query_start_loc_cpu)
        live = int(q.sum())
        rows = cam.num_actual_tokens if ROWS == "padded" else live
        req_extent, index_extent = self.extents
        if CLEAR:
            self.req_ids[live:max(live, req_extent)] = 0
            self.indices[rows * self.topk : max(rows * self.topk, index_extent)] = 0
        self.extents = (live, rows * self.topk)
        ids = torch.repeat_interleave(torch.arange(len(q)), q.long())
        self.req_ids[:live] = ids.int()
        lens = torch.zeros(rows, dtype=torch.int32)
        seen = cam.seq_lens - q - cam.query_start_loc_cpu[:-1]
        lens[:live] = (seen[ids] + torch.arange(live) + 1).clamp_max(self.topk).int()
        self.indptr[1 : rows + 1] = torch.cumsum(lens, 0)
        self.indptr[rows + 1 :] = int(self.indptr[rows])
        longest = max(q.tolist(), default=0)
        persistent = PERSISTENT == "always" or longest == 1
        key = (rows, longest, self.heads, tuple(cam.seq_lens.clamp_max(self.topk).tolist()))
        if KEY == "full":
            key += (tuple((cam.seq_lens - q).clamp_max(self.topk).tolist()), tuple(q.tolist()))
        plan = [getattr(self, "my_" + field) for field in FIELDS]
        if persistent and (rows or not GUARD) and (KEY is None or key != self.last_key):
            from aiter import get_mla_metadata_v1

            meta, indptr, info, reduce, final, partial = plan
            get_mla_metadata_v1(
                self.qo[: rows + 1], self.indptr[: rows + 1], self.last[:rows], self.heads, 1, True,
                meta, info, indptr, reduce, final, partial, page_size=1, kv_granularity=16, max_seqlen_qo=1,
                uni_seqlen_qo=1, fast_mode=True, max_split_per_batch=min(64, current_platform.num_compute_units()),
            )
            torch.cuda.current_stream().synchronize()
            if KEY is not None:
                self.last_key = key
        indptr_view = self.indptr[: rows + 1].clone() if MOVES else self.indptr[: rows + 1]
        return SimpleNamespace(
            num_actual_tokens=cam.num_actual_tokens, max_query_len=cam.max_query_len,
            req_id_per_token=self.req_ids[:rows], qo_indptr=self.qo[: rows + 1], paged_kv_indptr=indptr_view,
            paged_kv_last_page_len=self.last[:rows], paged_kv_indices=self.indices[: rows * self.topk],
            **dict(zip(FIELDS, plan if persistent else [None] * 6)),
        )
"""

OPS = """
class rocm_aiter_ops:
    mla_decode_fwd = mla_decode_fwd_lse = None
"""

INDEXER = """
from types import SimpleNamespace
import torch

class DeepseekV32IndexerMetadataBuilder:
    def __init__(self, spec, layers, config, device):
        self.drafts = config.num_speculative_tokens

    def build(self, prefix, cam):
        q = torch.diff(cam.query_start_loc_cpu)
        ids = torch.repeat_interleave(torch.arange(len(q)), q)
        place = torch.arange(len(ids)) - cam.query_start_loc_cpu[ids]
        keys = (cam.seq_lens - q)[ids] + place + 1 + {shift} * (place == 3)
        live = int((q[ids] <= self.drafts + 1).sum())
        starts = torch.zeros_like(keys[live:])
        chunk = SimpleNamespace(cu_seqlen_ks=starts, cu_seqlen_ke=keys[live:])
        decode = SimpleNamespace(seq_lens=keys[:live]) if live else None
        return SimpleNamespace(decode=decode, prefill=SimpleNamespace(chunks=[chunk]) if live < len(ids) else None)
"""

MODEL = """
import torch
rocm_aiter_ops = None

class Gate(torch.nn.Linear):
    def __init__(self, hidden, experts):
        super().__init__(hidden, experts, bias=False)
        self.e_score_correction_bias = torch.nn.Parameter(torch.zeros(experts, dtype=torch.{router}))

    def forward(self, x):
        return super().forward(x).to(torch.{router})

class DeepseekV2MoE(torch.nn.Module):
    def __init__(self, config, parallel_config, prefix=""):
        super().__init__()
        self.gate = Gate(config.hidden_size, config.n_routed_experts)
"""


def write_fake(
    folder: Path,
    *,
    key: str | None = "full",
    clear: bool = True,
    rows: str = "padded",
    persistent: str = "always",
    moves: bool = False,
    invalid: int = -1,
    shift: int = 0,
    router: str = "float32",
    remap: str = "every pass",
    lse: bool = False,
    guard: bool = True,
    prologue: str = "",
) -> Path:
    """Write the package; the defaults are without a defect.

    Args:
        folder: where the folder `vllm` is made.
        key: `full`, `old` (as of vLLM #42982), or None for no cache.
        clear: whether what a shrinking step leaves is cleared.
        rows: `padded`, or `live` for a release that leaves padding rows out.
        persistent: `always`, or `decode` for a release that plans only steps of one token per request.
        moves: whether a view moves from step to step.
        invalid: what the converter makes of an invalid index.
        shift: by how much the converters are off: in slots, and in rows that are too long; and by how many keys the
            indexer's fourth row of a request.
        router: type of the model's router logits and correction bias.
        remap: `every pass`, or `epoch` for a layer that converts its indices once per epoch and metadata.
        lse: whether the layer asks the decode kernel for an LSE.
        guard: whether a step of no rows stays away from the planner.
        prologue: statements at the start of the backend module.
    """
    backend = BACKEND.format(
        key=key,
        clear=clear,
        rows=rows,
        persistent=persistent,
        moves=moves,
        invalid=invalid,
        shift=shift,
        remap=remap,
        lse=lse,
        guard=guard,
    )
    files = {
        "__init__.py": "",
        "platforms.py": PLATFORMS,
        "_ops.py": OPS,
        "v1/attention/backend.py": COMMON,
        "v1/attention/backends/mla/rocm_aiter_mla_sparse.py": prologue + backend,
        "v1/attention/backends/mla/indexer.py": INDEXER.format(shift=shift),
        "model_executor/models/deepseek_v2.py": MODEL.format(router=router),
        "model_executor/layers/linear.py": "",
        "model_executor/parameter.py": "",
    }
    for name, text in files.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder
