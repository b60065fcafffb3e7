"""Public reports that the catalogue answers to, by number: each has a fault, or a reason why it has none.

The numbers are the project's own and have gaps; reports are given by repository and number.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class KnownBug:
    """One defect that was reported in public."""

    number: str
    title: str
    reports: str
    reason: str = ""
    """Why no fault stands for it; empty if one does."""


def _bug(number: str, title: str, reports: str, reason: str = "") -> KnownBug:
    return KnownBug(number=number, title=title, reports=reports, reason=reason)


KNOWN_BUGS: tuple[KnownBug, ...] = (
    _bug("Z01", "key collision, ramp against uniform", "vLLM #47766, #47042"),
    _bug("Z02", "drafts that cross topk in pure decode", "derived from vLLM #47766"),
    _bug("Z03", "permuted query lengths", "derived from vLLM #47766"),
    _bug("Z04", "the key costs a device read, or is taken from a bound", "vLLM #54369, #40654, #29134"),
    _bug("Z05", "key by identity", "TensorRT-LLM #3322"),
    _bug("Z06", "key by pages", "rtp-llm #1254"),
    _bug("Z07", "graphs by batch size only", "aprender #2030"),
    _bug("Z08", "an idle rank reuses the last batch's metadata", "sglang #15227"),
    _bug("Z09", "a dummy batch keeps old positions", "vllm-ascend #17170"),
    _bug("Z10", "a wrong plan and a wrong reduction looked like one bug", "AITER #4076, #3955"),
    _bug("Z11", "split counts that nobody wrote", "AITER #4129, #4186"),
    _bug("Z12", "the reduction trusts every partial", "AITER #4420"),
    _bug("Z14", "empty splits whose scratch holds NaN", "AITER #4350"),
    _bug("Z15", "splits depend on the batch", "AITER #4364, #4378; FlashMLA #212; tokenspeed #904"),
    _bug("Z16", "query lengths that are no power of two", "AITER #2720"),
    _bug("Z17", "a verify step planned as one token", "vLLM #45227"),
    _bug("Z18", "split budget of 16", "ATOM #611, #1911"),
    _bug("Z19", "log-sum-exp of an unsplit tile", "AITER #3606"),
    _bug("Z20", "empty buffers and tail-only clears", "vLLM #42982 (review)"),
    _bug("Z21", "an invalid position becomes slot 0", "vLLM #45324; ATOM #1831"),
    _bug("Z23", "dropped fills", "vLLM #44527, #50008, #51323"),
    _bug("Z24", "an output view that is too short", "vLLM #42810, #42072"),
    _bug(
        "Z25",
        "padding rows mixed into a per-tensor fp8 scale",
        "vLLM #37442, #37682",
        "the path has no per-tensor fp8 scale of activations: its fp8 linears quantise 1 x 128, its keys one by one",
    ),
    _bug("Z26", "padded lengths look like real contexts", "vLLM #53906; vllm-backport #49"),
    _bug("Z27", "padded rows and a short slot mapping", "AITER #3235"),
    _bug("Z28", "a metadata write that is not ordered before the replay", "vLLM #47404, #47196"),
    _bug("Z29", "a cached device tensor captured in a graph", "AITER #5193, #5194, #4587, #5393"),
    _bug("Z32", "metadata of 100 rows for a graph of 112", "xllm #1939"),
    _bug(
        "Z33", "staging buffers reused before the copy", "vllm-ascend #12071, #16428; TensorRT-LLM #15546; vLLM #36013"
    ),
    _bug("Z34", "padded lengths of 0 and pages of -1", "vLLM #35969, #38436; flashinfer #5015"),
    _bug(
        "Z35",
        "graph corruption in one of five processes",
        "ROCm/clr #279",
        "a defect of the HIP runtime: it shows only in repeated processes on a GPU, not at a seam of the path",
    ),
    _bug("Z36", "correction bias in bf16", "sglang #37133, #31213"),
    _bug("Z37", "logits stored in bf16", "sglang #34857, #35055, #29783, #33764, #38695"),
    _bug("Z38", "precision depends on the batch size", "vllm-backport #65; vLLM #54048"),
    _bug("Z39", "bias cast by a loader", "vLLM #41760, #41835, #23640, #50761, #36724; transformers #42580"),
    _bug("Z41", "biased score as weight", "vLLM #12002; transformers #41647"),
    _bug("Z42", "masked groups as 0, group score as maximum", "vLLM #13474; DeepSeek-V3 #741"),
    _bug("Z43", "group arithmetic in bf16", "FlagGems #4245"),
    _bug("Z44", "NaN logits in padding rows", "vLLM #39391"),
    _bug("Z45", "kernels for large batches and small groups", "vLLM #29439, #30422; AITER #2369"),
    _bug("Z46", "partial sums in bf16, in any order", "sglang #40578"),
    _bug("Z47", "tie overflow", "sglang #30512, #30645"),
    _bug("Z49", "a sentinel outranks data", "sglang #38829; cudnn-frontend #446"),
    _bug("Z50", "paged logits wrong from 2049 on", "vLLM #39303, #39509"),
    _bug("Z52", "order of ties across ranks, index base", "AITER #4415; sglang #31115; vLLM #56749"),
    _bug("Z53", "short rows, k fixed at 2048", "Automodel #3035; TensorRT-LLM #8882"),
    _bug("Z54", "windows, ReLU and heads of the indexer", "sglang #12583, #13459; mlx-lm #531; lablup #619"),
    _bug("Z55", "sub-chunks that skip the gather", "vLLM #40018, #46478"),
    _bug("Z56", "row stride of a padded allocation", "vLLM #46856"),
    _bug("Z57", "cache layouts, and RoPE results that nobody takes", "vLLM #43781, #52109, #50455"),
    _bug("Z58", "a draft's window applied to local lengths", "ATOM #2118"),
    _bug("Z59", "RoPE layouts", "vLLM #28968; sglang #13530, #13531, #30111, #30342; vllm-ascend #4641, #5701, #7341"),
    _bug("Z61", "e4m3fn against e4m3fnuz", "vLLM #45720, #42893, #45681; sglang #28455, #39628"),
    _bug("Z62", "fp32 scales through e8m0", "FlashMLA #184"),
    _bug("Z64", "planar pages and tables per token", "AITER #5591; vLLM #50576"),
    _bug("Z65", "offsets in int32", "vLLM #56748, #56037; AITER #4474, #4427, #2517; flashinfer #3136"),
    _bug("Z66", "indexer pages shorter than KV pages", "sglang #31108"),
    _bug("Z68", "weights in another layout", "sglang #28471"),
    _bug(
        "Z69",
        "metadata that lacks fields",
        "vLLM #49188, #48722, #50064",
        "fields that an engine asks for belong to an installed vLLM; the path's own metadata is a frozen record",
    ),
    _bug("Z70", "head counts", "vLLM #36855, #41835; ATOM #1252; AITER #4957"),
    _bug("Z71", "full-width clears", "vLLM #55373"),
    _bug(
        "Z72",
        "the generic top-k for k = 2048",
        "vLLM #42072",
        "which top-k kernel an engine dispatches to is decided inside it; the path calls one function for every k",
    ),
    _bug("Z73", "cost that grows with the longest possible sequence", "vLLM #48582; sglang #40441"),
)
