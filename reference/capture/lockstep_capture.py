"""Writes a lockstep dump from transformers' GlmMoeDsa (model_type glm_moe_dsa) with forward hooks.

    import torch, transformers, lockstep_capture
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    lockstep_capture.dump(model, ids, "out")          # ids: a list of token ids, one sequence

    lockstep verify activations -m path --target out

Needs torch and safetensors. Only what a hook on a module can see is written: values between modules (rope, the absorbed
form, softmax, the indexer's scores and choice, routing after the gate) are computed inside forward functions and stay
unseen. Run in float32: a bfloat16 run is judged by the floor of another recipe.

A module that is not there under its name is skipped and reported, never guessed. Names are those of the checkpoint.
"""

import json
import os
import shutil

import torch
from safetensors.torch import save_file

# point -> (module below model.layers.N, "in" or "out")
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
    "ffn.norm": ("post_attention_layernorm", "out"),
    "ffn.out": ("mlp", "out"),
    "output": ("", "out"),
}
GLOBAL = {
    "embed": ("model.embed_tokens", "out"),
    "final_norm": ("model.norm", "out"),
    "logits": ("lm_head", "out"),
}
# Layouts that a point has at any degree; here tp is 1, so each is whole.
SHARDED = {"attn.q_raw": 0, "attn.context": 0, "logits": 0}


def _tensor(value):
    """The tensor of a module's input or output: the first one, where there are several."""
    return value[0] if isinstance(value, (tuple, list)) else value


def dump(model, ids, out, name=None):
    """Runs `ids` as one sequence and writes the folder `out`, which must not exist. Returns what was skipped."""
    if os.path.lexists(out):
        raise FileExistsError(out)
    config, n = model.config, len(ids)
    values, hooks, skipped = {}, [], []

    def keep(point, heads=None):
        def take(value):
            value = _tensor(value).detach().to(torch.float32).cpu()
            width = value.shape[-1]
            value = value.reshape(n, width) if heads is None else value.reshape(n, heads, width // heads)
            values[point] = value.contiguous()

        return take

    def watch(point, path, side, heads=None):
        try:
            module = model.get_submodule(path)
        except AttributeError:
            skipped.append(f"{point}: no module {path}")
            return
        take = keep(point, heads)
        if side == "out":
            hooks.append(module.register_forward_hook(lambda _m, _a, output: take(output)))
        else:
            # A decoder layer is called with its hidden states by position or by name.
            hooks.append(
                module.register_forward_pre_hook(
                    lambda _m, args, kwargs: take(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
                )
            )

    for point, (path, side) in GLOBAL.items():
        watch(point, path, side)
    for layer in range(config.num_hidden_layers):
        base = f"model.layers.{layer}"
        for point, (path, side) in LAYER.items():
            heads = config.num_attention_heads if point == "attn.q_raw" else None
            watch(f"layers.{layer}.{point}", f"{base}.{path}" if path else base, side, heads)
        if layer >= config.first_k_dense_replace:
            _watch_router(model, f"{base}.mlp.gate", f"layers.{layer}.ffn.router_logits", values, hooks, skipped, n)
    try:
        with torch.no_grad():
            model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    _write(model, list(ids), out, name, values)
    return skipped


def _watch_router(model, path, point, values, hooks, skipped, n):
    """Router logits from the gate's input and weight: what the gate itself returns differs between versions."""
    try:
        gate = model.get_submodule(path)
    except AttributeError:
        skipped.append(f"{point}: no module {path}")
        return

    def take(module, args):
        x = args[0].detach().reshape(n, -1).to(torch.float32)
        values[point] = (x @ module.weight.detach().to(torch.float32).T).cpu().contiguous()

    hooks.append(gate.register_forward_pre_hook(take))


def _write(model, ids, out, name, values):
    config = model.config
    points = []
    for point, value in values.items():
        short = point.split(".", 2)[2] if point.startswith("layers.") else point
        entry = {
            "name": point,
            "file": "rank0.safetensors",
            "rank": 0,
            "layout": "sharded" if short in SHARDED else "replicated",
            "shape": list(value.shape),
            "dtype": "F32",
        }
        if short in SHARDED:
            entry["axis"] = SHARDED[short]
        points.append(entry)
    index = {
        "format": "lockstep-dump",
        "version": 1,
        "producer": {"name": "transformers", "version": __import__("transformers").__version__},
        "model": {"name": name or getattr(config, "_name_or_path", "") or "unnamed", "digest": ""},
        "token_ids": ids,
        "positions": list(range(len(ids))),
        "tp": 1,
        "dtype": "f32",
        "recipe": str(next(model.parameters()).dtype).replace("torch.", ""),
        # The latent norms' eps is fixed in transformers, whatever the config says.
        "settings": {"attention": "dsa", "rms_eps": config.rms_norm_eps, "latent_eps": 1e-6, "index_eps": 1e-6},
        "points": points,
    }
    part = f"{out.rstrip(os.sep)}.{os.getpid()}.partial"
    os.makedirs(part)
    try:
        save_file(values, os.path.join(part, "rank0.safetensors"))
        with open(os.path.join(part, "dump.json"), "w") as f:
            json.dump(index, f, indent=2)
        os.rename(part, out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
