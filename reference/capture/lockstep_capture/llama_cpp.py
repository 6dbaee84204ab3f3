"""Reads what a callback of llama.cpp's wrote, and writes it as a dump.

llama-eval-callback prints three values at each end of a row, with four decimals: that is no dump. Its callback has the
whole tensors; docs/dumps.md has the lines that write them, as `tensors.txt` (number, name, operation, type and four
extents of each, in the order of the pass) and one file NUMBER.bin of its bytes for each.

Names are those of the graphs of GLM-5 and DeepSeek-V3.2 in llama.cpp. A name stands for several tensors of a layer, such
as a product, its norm and its rotation; the operation tells them apart.
"""

import os
import sys

import torch

from . import points, write
from .capture import CaptureError, ascending

# point -> (names, operation or None, which of several).
PLAIN = {
    "attn.norm": (["attn_norm"], "MUL", -1),
    "attn.q_a": (["qr", "q"], "MUL_MAT", 0),
    "attn.q_a_norm": (["qr", "q"], "MUL", -1),
    "attn.kv_a": (["kv_cmpr_pe"], "MUL_MAT", -1),
    "attn.kv_latent": (["kv_cmpr"], "MUL", -1),
    "attn.k_rope": (["k_pe"], "ROPE", -1),
    "attn.index_k": (["indexer_k"], "CONCAT", -1),
    "attn.index_weights": (["indexer_weights"], "SCALE", -1),
    "attn.context": (["kqv_out"], None, -1),
    "attn.out": (["attn_out"], None, -1),
    "residual": (["ffn_inp"], "ADD", -1),
    "ffn.norm": (["ffn_norm"], "MUL", -1),
    "ffn.router_logits": (["ffn_moe_logits"], "MUL_MAT", -1),
    "ffn.choice_scores": (["ffn_moe_probs_biased"], None, -1),
    "ffn.expert_weights": (["ffn_moe_weights_scaled"], None, -1),
    "ffn.routed": (["ffn_moe_out"], None, -1),
    "ffn.shared": (["ffn_shexp"], None, -1),
    "ffn.out": (["ffn_out"], None, -1),
    "output": (["l_out"], None, -1),
}
GLOBAL = {"embed": "inp_embd", "final_norm": "result_norm", "logits": "result_output"}
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "i32": torch.int32}


def from_llama_cpp(folder, ids, out, index_topk, version="unknown", name="unnamed"):
    """Writes the dump `out` from the tensors in `folder`, of one pass over `ids`. Returns what is missing, by kind."""
    tensors, n = _read(folder), len(ids)
    layers = 1 + max((layer for _, layer, _, _ in tensors if layer is not None), default=-1)
    if not layers:
        raise CaptureError(f"{folder}: no tensor of a layer, such as l_out-0")
    values, cut = {}, set()

    def keep(layer, point, value, width=None):
        if value is None:
            return
        if value.numel() % n or value.reshape(-1, value.shape[-1]).shape[0] % n:
            cut.add(point)  # the last layer goes on with the rows whose logits were asked for
            return
        value = value.reshape(n, -1) if width is None else value.reshape(n, -1, width)
        values[point if layer is None else f"layers.{layer}.{point}"] = value.contiguous()

    def find(layer, names, operation=None, which=-1):
        for wanted in names:
            found = [t for got, at, op, t in tensors if (got, at) == (wanted, layer) and operation in (None, op)]
            if found:
                return found[which]
        return None

    for point, wanted in GLOBAL.items():
        keep(None, point, find(None, [wanted]))
    for layer in range(layers):
        for point, wanted in PLAIN.items():
            keep(layer, point, find(layer, *wanted))
        last = f"layers.{layer - 1}.output" if layer else "embed"
        if last in values:
            values[f"layers.{layer}.input"] = values[last]
        _attention(layer, n, find, keep)
        _indexer(layer, n, find, keep, index_topk)
        _experts(layer, n, find, keep)
    values = {point: _padded(value) if point == "logits" else value for point, value in values.items()}
    kinds = {points.short(point) for point in values}
    missing = [f"not captured: {p}: " + _why(p, cut) for p in (*points.GLOBAL, *points.LAYER) if p not in kinds]
    missing += [f"not captured in some layers: {p}: " + _why(p, cut) for p in sorted(cut & kinds)]
    write.write(out, 0, 1, values, _description(ids, version, name), 0)
    for line in missing:
        print(f"lockstep_capture: {line}", file=sys.stderr)
    return missing


def _why(point, cut):
    if point in cut:
        return "not one row for each token: ask for logits of every token of the batch, and run it as one batch"
    return "no tensor of that name, operation and type (fused attention and fused indexers have none)"


def _read(folder):
    """(name, layer, operation, tensor with the slowest axis first) of the tensors.txt there."""
    tensors = []
    with open(os.path.join(folder, "tensors.txt"), encoding="utf-8") as f:
        for line in f:
            number, name, operation, kind, *extents = line.split()
            if kind not in TYPES:
                continue
            shape = [int(e) for e in reversed(extents)]
            raw = torch.from_file(os.path.join(folder, f"{number}.bin"), size=_product(shape), dtype=TYPES[kind])
            base, dash, layer = name.rpartition("-")
            numbered = dash and layer.isdigit()
            tensors.append((base if numbered else name, int(layer) if numbered else None, operation, raw.reshape(shape)))
    return tensors


def _product(shape):
    product = 1
    for extent in shape:
        product *= extent
    return product


def _attention(layer, n, find, keep):
    """Queries are [tokens, heads, width]; what was multiplied head by head is [heads, tokens, width]."""
    query, rotated = find(layer, ["q"], "MUL_MAT", -1), find(layer, ["q_pe"], "ROPE")
    if query is not None and rotated is not None:
        heads, rope = rotated.shape[-2:]
        query = query.reshape(n, heads, -1)
        keep(layer, "attn.q_raw", query, query.shape[-1])
        keep(layer, "attn.q", torch.cat((query[..., :-rope], rotated.reshape(n, heads, rope)), -1), query.shape[-1])
    for point, names in (("attn.q_absorbed", ["q_nope_absorbed"]), ("attn.latent", ["kqv"])):
        value = find(layer, names, "MUL_MAT")
        if value is not None and value.shape[-2] == n:
            keep(layer, point, value.reshape(-1, n, value.shape[-1]).transpose(0, 1), value.shape[-1])


def _indexer(layer, n, find, keep, index_topk):
    query = find(layer, ["indexer_q"], "CONCAT")
    if query is not None:
        keep(layer, "attn.index_q", query, query.shape[-1])
    scores = find(layer, ["indexer_score_masked", "indexer_score"], "ADD")
    if scores is not None and scores.shape[-1] >= n:
        keep(layer, "attn.index_scores", scores.reshape(-1, scores.shape[-1])[:, :n])  # the cache is longer than the prompt
    chosen = find(layer, ["top_k"])
    if chosen is not None and chosen.dtype == torch.int32 and chosen.shape[-2] == n:
        keep(layer, "attn.index_topk", ascending(chosen.reshape(n, -1), index_topk))


def _experts(layer, n, find, keep):
    weights = find(layer, ["ffn_moe_weights_scaled"])
    order = find(layer, ["ffn_moe_argsort"])
    if weights is not None and order is not None:
        used = weights.numel() // n
        keep(layer, "ffn.expert_ids", order.reshape(n, -1)[:, :used].to(torch.int32))
    inner, shared = find(layer, ["ffn_moe_swiglu", "ffn_moe_gate_par"]), find(layer, ["ffn_swiglu", "ffn_gate_par"])
    if inner is None and shared is not None and find(layer, ["ffn_moe_logits"]) is None:
        keep(layer, "ffn.hidden", shared, shared.shape[-1])
    elif inner is not None and shared is not None and shared.shape[-1] % inner.shape[-1] == 0:
        width = inner.shape[-1]
        if inner.numel() % (n * width) == 0 and shared.numel() % (n * width) == 0:
            both = torch.cat((inner.reshape(n, -1, width), shared.reshape(n, -1, width)), 1)
            keep(layer, "ffn.hidden", both, width)


def _padded(logits):
    """The vocabulary padded to a multiple of 64."""
    return torch.nn.functional.pad(logits, (0, -logits.shape[-1] % 64))


def _description(ids, version, name):
    return {
        "format": "lockstep-dump",
        "version": 1,
        "producer": {"name": "llama.cpp", "version": version},
        "model": {"name": name, "digest": ""},
        "token_ids": list(ids),
        "positions": list(range(len(ids))),
        "tp": 1,
        "dtype": "f32",
        "recipe": "llama.cpp",
        "settings": {"attention": "dsa"},
    }
