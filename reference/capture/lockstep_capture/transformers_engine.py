"""Where transformers' GlmMoeDsa has its values (read and run with 5.24.0).

Most are inputs or outputs of modules. Between modules lie the rotated queries and keys (a function, wrapped while the
hooks are there), the query that attention got, the indexer's scores, the router's scores and the experts' inner values
(torch calls, watched while their module runs). Rotated vectors are stored as halves here and written as adjacent pairs.
"""

import sys

import torch

from .capture import CaptureError, eps, pairs, usual

# point -> (module of a layer, "in" or "out")
LAYER = {
    "input": ("", "in"),
    "attn.norm": ("input_layernorm", "out"),
    "attn.q_a": ("self_attn.q_a_proj", "out"),
    "attn.q_a_norm": ("self_attn.q_a_layernorm", "out"),
    "attn.q_raw": ("self_attn.q_b_proj", "out"),
    "attn.kv_a": ("self_attn.kv_a_proj_with_mqa", "out"),
    "attn.kv_latent": ("self_attn.kv_a_layernorm", "out"),
    "attn.context": ("self_attn.o_proj", "in"),
    "attn.out": ("self_attn.o_proj", "out"),
    "residual": ("post_attention_layernorm", "in"),
    "ffn.norm": ("post_attention_layernorm", "out"),
    "ffn.routed": ("mlp.experts", "out"),
    "ffn.shared": ("mlp.shared_experts", "out"),
    "ffn.out": ("mlp", "out"),
    "output": ("", "out"),
}


def first(value):
    """A tensor, or the first of several."""
    return value[0] if isinstance(value, (tuple, list)) else value


class Transformers:
    name = "transformers"
    MISSING = {
        "attn.q_absorbed": "this engine expands keys and values and has no absorbed form: nothing to add",
        "attn.latent": "this engine expands keys and values and has no absorbed form: nothing to add",
        "attn.k_rope": "no function apply_rotary* beside the attention's class; add its name in transformers_engine.py",
        "ffn.hidden": "an experts_implementation without a rule in transformers_engine.py: load the model with "
        'experts_implementation="eager"',
        "logits": "the model was called without its head: call the one with lm_head, for all rows",
    }

    @staticmethod
    def fits(model):
        """A tree with the checkpoint's own names."""
        layer = next((m.layers[0] for m in model.modules() if hasattr(m, "layers") and hasattr(m, "embed_tokens")), None)
        attention = getattr(layer, "self_attn", None)
        return hasattr(attention, "kv_a_proj_with_mqa") and not hasattr(attention, "attn_mqa")

    def __init__(self, capture):
        self.c, self.config = capture, capture.config
        c, body = capture, capture.body
        c.hook(body.embed_tokens, after=lambda _m, _a, _k, out: c.keep(None, "embed", out))
        c.hook(body.norm, after=lambda _m, _a, _k, out: c.keep(None, "final_norm", out))
        c.hook(body.rotary_emb, before=self._positions)
        if hasattr(c.model, "lm_head"):
            c.hook(c.model.lm_head, after=self._logits, behind=True)
        for n, layer in c.modules.items():
            for point, (path, side) in LAYER.items():
                module = layer
                for part in path.split(".") if path else ():
                    module = getattr(module, part, None)
                if module is not None:
                    self._plain(n, point, module, side)
            c.watched(layer.self_attn, self._attention(n))
            if self.indexer(n) is not None:
                self._indexer(n, layer.self_attn.indexer)
            if self.experts(n):
                self._moe(n, layer.mlp)
            else:
                c.hook(layer.mlp.down_proj, lambda _m, a, _k, n=n: c.keep(n, "ffn.hidden", a[0], a[0].shape[-1]))
        self._rotary()

    # -- what the capture asks -------------------------------------------------------------------------------------

    def indexer(self, n):
        return getattr(self.c.modules[n].self_attn, "indexer", None)

    def experts(self, n):
        return hasattr(self.c.modules[n].mlp, "gate")

    def version(self):
        return getattr(sys.modules.get("transformers"), "__version__", "unknown")

    def dtype(self):
        return self.c.body.embed_tokens.weight.dtype

    def settings(self):
        layers = self.c.modules.values()
        found = {
            "rms_eps": usual(eps(m) for layer in layers for m in (layer.input_layernorm, layer.post_attention_layernorm)),
            "latent_eps": usual(
                eps(m) for layer in layers for m in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm)
            ),
            "index_eps": usual(eps(self.indexer(n).k_norm) for n in self.c.modules if self.indexer(n) is not None),
            "attention_kernel": getattr(self.config, "_attn_implementation", None),
            "experts_kernel": getattr(self.config, "_experts_implementation", None),
        }
        return {name: value for name, value in found.items() if value is not None}

    def finish(self):
        """Joins what came in parts: the experts best first, their inner values with the shared expert's."""
        for n in filter(self.experts, self.c.modules):
            self._best_first(n)

    # -- values ------------------------------------------------------------------------------------------------------

    def _plain(self, n, point, module, side):
        width = self.config.qk_nope_head_dim + self.config.qk_rope_head_dim if point == "attn.q_raw" else None
        c = self.c
        if point in ("ffn.routed", "ffn.shared") and c.tp > 1:
            c.note(point, "summed over ranks inside of the module: a rank's addend is not to be had")
            return
        if side == "in":
            c.hook(module, lambda _m, a, k: c.keep(n, point, first(a) if a else k["hidden_states"], width))
        else:
            c.hook(module, after=lambda _m, _a, _k, out: c.keep(n, point, first(out), width))

    def _positions(self, _module, args, kwargs):
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        if positions.dim() == 2 and positions.shape[0] > 1:
            raise CaptureError(f"positions of {positions.shape[0]} sequences: run one")
        self.c.seen_positions(positions)

    def _logits(self, _module, _args, _kwargs, out):
        c, vocab = self.c, self.config.vocab_size
        if out.shape[-2] != len(c.ids):
            c.note("logits", f"the head saw {out.shape[-2]} of {len(c.ids)} rows: call the model without logits_to_keep")
            return
        if out.shape[-1] == vocab:
            out = c.part_of_logits(out, vocab)
        c.keep(None, "logits", out)

    def _rotary(self):
        """Wraps the function that rotates, wherever the attention's class finds it."""
        scope = sys.modules[type(self.c.modules[0].self_attn).__module__]
        for name in [name for name in vars(scope) if name.startswith("apply_rotary")]:
            function = getattr(scope, name)

            def rotate(*args, _function=function, **kwargs):
                result = _function(*args, **kwargs)
                if self.c.stack:
                    self.c.stack[-1]("rotated", args, kwargs, result)
                return result

            self.c.replace(scope, name, rotate)

    def _attention(self, n):
        c, config = self.c, self.config

        def see(call, args, _kwargs, result):
            if call == "rotated":
                c.keep(n, "attn.k_rope", pairs(result[1]).reshape(len(c.ids), -1))
            elif call in ("scaled_dot_product_attention", "matmul") and f"layers.{n}.attn.q" not in c.values:
                query = args[0].transpose(1, 2)  # [1, heads, tokens, width] before
                if query.dim() != 4 or query.shape[-1] != config.qk_nope_head_dim + config.qk_rope_head_dim:
                    return
                plain, rotated = query.split([config.qk_nope_head_dim, config.qk_rope_head_dim], dim=-1)
                c.keep(n, "attn.q", torch.cat((plain, pairs(rotated)), dim=-1), query.shape[-1])

        return see

    def _indexer(self, n, module):
        """The two products of the indexer's forward have all of its values as arguments; what widened them to f32 tells
        the type that they had."""
        c, config = self.c, self.config
        rope, width, heads = config.qk_rope_head_dim, config.index_head_dim, config.index_n_heads
        products, had = [], {}

        def pass_on(x):
            return x.to(had.get(x.untyped_storage().data_ptr(), x.dtype))

        def rotated(x):
            return torch.cat((pairs(x[..., :rope]), x[..., rope:]), dim=-1)

        def see(call, args, _kwargs, result):
            if call == "float":
                had.setdefault(result.untyped_storage().data_ptr(), args[0].dtype)
            elif call in ("matmul", "einsum"):
                products.append(None)
                tensors = [a for a in args if isinstance(a, torch.Tensor)]
                if len(products) == 1:
                    query, key = tensors
                    c.keep(n, "attn.index_q", rotated(pass_on(query).reshape(len(c.ids), heads, width)), width)
                    key = key.transpose(-1, -2) if call == "matmul" else key
                    c.keep(n, "attn.index_k", rotated(pass_on(key).reshape(len(c.ids), width)))
                elif len(products) == 2:
                    weights = min(tensors, key=torch.Tensor.numel).reshape(len(c.ids), heads)
                    # The other of the two scales is at the scores here; positive, it passes through the relu.
                    c.keep(n, "attn.index_weights", weights.float() * module.softmax_scale)
            elif call == "topk":
                c.keep(n, "attn.index_scores", args[0])

        def begin(*_):
            products.clear()
            had.clear()

        c.hook(module, begin)
        c.watched(module, see)
        c.hook(module, after=lambda _m, _a, _k, out: c.keep(n, "attn.index_topk", out))

    def _moe(self, n, mlp):
        c = self.c

        def see_gate(call, args, kwargs, result):
            # Of the choices that a gate makes, of groups and of experts, the last is the experts'.
            if call == "topk" and args[0].shape[-1] == mlp.gate.weight.shape[0]:
                c.keep(n, "ffn.choice_scores", args[0])

        def gate(_module, _args, _kwargs, out):
            logits, weights, ids = out
            c.keep(n, "ffn.router_logits", logits)
            c.keep(n, "ffn.expert_weights", weights)
            c.keep(n, "ffn.expert_ids", ids.to(torch.int32))

        c.watched(mlp.gate, see_gate)
        c.hook(mlp.gate, after=gate)
        self._expert_hidden(n, mlp)

    def _expert_hidden(self, n, mlp):
        """Inner values of the experts: the second product's input, per expert or for all, and which rows it has."""
        c, slots = self.c, self.config.num_experts_per_tok
        state = {"hidden": None, "shared": None}

        def begin(*_):
            state.update(calls=0, rows=None, hidden=None)

        def put(value):
            rows = state["rows"]
            if state["hidden"] is None:
                state["hidden"] = value.new_zeros(len(c.ids) * slots, value.shape[-1])
            state["hidden"][torch.arange(len(value)) if rows is None else rows] = value

        def see(call, args, _kwargs, result):
            if call == "sort":  # all experts at once, sorted by expert
                state["rows"] = result[1]
            elif call == "where":  # one expert after the other
                state["rows"] = result[1] * slots + result[0]
            elif call in ("grouped_mm", "_grouped_mm", "linear", "bmm"):
                state["calls"] += 1
                if state["calls"] % 2 == 0:
                    put(args[1].squeeze(-1) if call == "bmm" else args[0])

        def end(*_):
            if state["hidden"] is not None:
                state["hidden"] = c.rows("ffn.hidden", state["hidden"].reshape(len(c.ids), -1))

        c.hook(mlp.experts, begin, end)
        c.watched(mlp.experts, see)
        c.hook(mlp.shared_experts.down_proj, lambda _m, a, _k: state.update(shared=c.rows("ffn.hidden", a[0])))
        c.hook(mlp, after=lambda *_: self._hidden(n, state["hidden"], state["shared"]))

    def _hidden(self, n, routed, shared):
        """The chosen experts' inner values with the shared ones' behind them; several shared experts are one module."""
        width = 0 if routed is None else routed.shape[-1] // self.config.num_experts_per_tok
        if width and shared is not None and shared.shape[-1] % width == 0:
            self.c.keep(n, "ffn.hidden", torch.cat((routed, shared), dim=-1), width)

    def _best_first(self, n):
        """Experts in the order of the scores that they were chosen by; the engine leaves the order open."""
        c = self.c
        scores, ids = c.get(n, "ffn.choice_scores"), c.get(n, "ffn.expert_ids")
        if ids is None:
            return
        if scores is None:
            scores = c.get(n, "ffn.router_logits")  # the bias is not in these: a better order than none
            if scores is None:
                return
        order = scores.gather(1, ids.long()).argsort(dim=-1, descending=True, stable=True)
        for point in ("ffn.expert_ids", "ffn.expert_weights"):
            if (value := c.get(n, point)) is not None:
                c.values[f"layers.{n}.{point}"] = value.gather(1, order)
        if (hidden := c.get(n, "ffn.hidden")) is not None:
            slots = torch.cat((order, torch.arange(order.shape[1], hidden.shape[1]).expand(len(order), -1)), dim=1)
            c.values[f"layers.{n}.ffn.hidden"] = hidden.gather(1, slots.unsqueeze(-1).expand_as(hidden))
