"""Hooks on a model, and what they keep of the first pass after `attach`."""

import collections
import os
import re
import sys

import torch
from torch.overrides import TorchFunctionMode

from . import points, write


class CaptureError(Exception):
    """The pass cannot be written as a dump: more than one sequence, positions that do not begin at 0, and the like."""


def attach(model, engine=None, rank=None, tp=None, layers=None, only=None, name=None):
    """Hooks `model`. Every rank calls it on its own part of the model.

    `engine` is found by the module tree (`transformers`, `vllm`, `sglang`). `rank` and `tp` are torch.distributed's
    where it is initialised and they are not given. `layers` keeps these, with what they read from others. `only` is a
    regular expression for the full names to keep. `name` is the model's name in the dump.
    """
    from . import fused_engines, transformers_engine  # engines import what is above

    engines = {e.name: e for e in (transformers_engine.Transformers, fused_engines.Vllm, fused_engines.Sglang)}
    if engine is None:
        engine = next((e.name for e in engines.values() if e.fits(model)), None)
    if engine not in engines:
        raise CaptureError(f"no table for this module tree ({type(model).__name__}); engines: {', '.join(engines)}")
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if tp is None:
        tp = torch.distributed.get_world_size() if distributed and rank is None else 1
    if rank is None:
        rank = torch.distributed.get_rank() if distributed and tp > 1 else 0
    if not 0 <= rank < tp:
        raise CaptureError(f"rank {rank} of {tp}")
    return Capture(model, engines[engine], rank, tp, layers, only, name)


PASS, BEHIND, DONE = range(3)


class Watch(TorchFunctionMode):
    """Shows every torch call to the module that is running: the values between modules have no other handle."""

    def __init__(self, stack):
        super().__init__()
        self.stack = stack
        self.own = False  # what hooks compute is not the model's

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self.stack and not self.own:
            self.stack[-1](getattr(func, "__name__", ""), args, kwargs or {}, result)
        return result


class Capture:
    """What `attach` gives. `save` writes the dump and takes the hooks away."""

    def __init__(self, model, engine, rank, tp, layers, only, name):
        self.model, self.rank, self.tp, self.name = model, rank, tp, name
        self.config = getattr(model.config, "text_config", model.config)
        self.only = re.compile(only) if only else None
        self.body = next(m for m in model.modules() if hasattr(m, "layers") and hasattr(m, "embed_tokens"))
        self.modules = dict(enumerate(self.body.layers))
        self.layers = set(self.modules if layers is None else layers)
        if not self.layers <= self.modules.keys():
            raise CaptureError(f"layers {sorted(self.layers - self.modules.keys())} are not in this model")
        self.values, self.ids, self.positions, self.mask, self.autocast = {}, None, None, None, None
        self.stage, self.stack, self.undo, self.notes = PASS, [], [], {}
        self.watch = Watch(self.stack)
        self.entered = False
        # The pass begins and ends with the part of the model that has the layers; logits follow behind it.
        self.hook(self.body, self._begin, self._end)
        self.hook(self.body, self._again, behind=True)
        # A pass that fails is left, too.
        self.undo.append(self.body.register_forward_hook(lambda *_: self._leave(), always_call=True).remove)
        self.hook(self.body.embed_tokens, self._tokens)
        self.engine = engine(self)

    # -- hooks ---------------------------------------------------------------------------------------------------

    def hook(self, module, before=None, after=None, behind=False):
        """`before(module, args, kwargs)`, `after(module, args, kwargs, output)`, both only during the first pass, or
        `behind` it: logits come when the layers are through."""

        def guarded(function):
            def run(*args):
                if self.stage == (BEHIND if behind else PASS):
                    self.watch.own = True
                    try:
                        function(*args)
                    finally:
                        self.watch.own = False

            return run

        if before:
            self.undo.append(module.register_forward_pre_hook(guarded(before), with_kwargs=True).remove)
        if after:
            self.undo.append(module.register_forward_hook(guarded(after), with_kwargs=True).remove)

    def watched(self, module, see):
        """`see(call, args, kwargs, result)` for every torch call that `module` makes outside of watched parts."""

        def pop(*_):
            if self.stack:
                self.stack.pop()

        self.hook(module, lambda *_: self.stack.append(see))
        self.undo.append(module.register_forward_hook(pop, always_call=True).remove)

    def replace(self, owner, attribute, value):
        """Sets an attribute until `detach`."""
        mine = attribute in vars(owner)
        old = getattr(owner, attribute)
        setattr(owner, attribute, value)
        self.undo.append(lambda: setattr(owner, attribute, old) if mine else delattr(owner, attribute))

    def detach(self):
        """Takes all hooks away."""
        self._leave()
        while self.undo:
            self.undo.pop()()

    def _begin(self, _module, args, kwargs):
        device = next(self.model.parameters()).device.type
        if torch.is_autocast_enabled(device):
            self.autocast = torch.get_autocast_dtype(device)
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            self.mask = mask.detach().to("cpu", torch.bool)
        self.watch.__enter__()
        self.entered = True

    def _end(self, *_):
        self._leave()
        if self.ids is not None:
            self.stage = BEHIND

    def _again(self, *_):
        """A second pass begins: the first one had no logits, or they have come."""
        self.stage = DONE

    def _leave(self):
        if self.entered:
            self.entered = False
            self.stack.clear()
            self.watch.__exit__(None, None, None)

    def _tokens(self, _module, args, kwargs):
        ids = args[0] if args else next(iter(kwargs.values()))
        if ids.dim() == 2 and ids.shape[0] != 1 or ids.dim() > 2:
            raise CaptureError(f"a batch of {ids.shape[0]} sequences: run one, padded or not")
        self.ids = ids.detach().reshape(-1).to("cpu", torch.int64)

    def seen_positions(self, positions):
        """What the engine takes as positions of the tokens."""
        self.positions = positions.detach().reshape(-1).to("cpu", torch.int64)

    # -- values --------------------------------------------------------------------------------------------------

    def reads(self, layer, point):
        """Whether the kept layers have the point, or read it from another layer: the stream, a shared choice of keys."""
        if layer is None or layer in self.layers:
            return True
        if point == "output":
            return layer + 1 in self.layers
        return point == "attn.index_topk" and any(self.source(n) == layer for n in self.layers)

    def asked(self, name):
        """Whether the dump is to have it. What is not asked for is kept none the less: others are made with it."""
        return self.only is None or self.only.search(name) is not None

    def wants(self, layer, point):
        return self.reads(layer, point) and self.asked(point if layer is None else f"layers.{layer}.{point}")

    def source(self, layer):
        """The layer whose indexer chooses the keys of `layer`."""
        while layer > 0 and self.engine.indexer(layer) is None:
            layer -= 1
        return layer

    def keep(self, layer, point, value, width=None):
        """Keeps a copy of a point's rows: later writes in place do not reach it."""
        if self.stage == DONE or value is None or not self.reads(layer, point):
            return
        value = self.rows(point, value)
        if width:
            value = value.reshape(value.shape[0], -1, width)
        self.values[point if layer is None else f"layers.{layer}.{point}"] = value

    def rows(self, what, value):
        """[tokens, ..] on the host, own memory, of [1, tokens, ..] or [tokens, ..]."""
        n = len(self.ids)
        if not (value.shape[:2] == (1, n) or value.shape[0] == n):
            raise CaptureError(f"{what}: {list(value.shape)} is not one row for each of {n} tokens")
        return value.detach().to("cpu", copy=True).reshape(n, -1).clone()

    def part_of_logits(self, logits, vocab):
        """This rank's part of gathered logits: the vocabulary padded to a multiple of 64 x tp, and cut."""
        padded = -(-vocab // (64 * self.tp)) * 64 * self.tp
        return torch.nn.functional.pad(logits[..., :vocab], (0, padded - vocab)).chunk(self.tp, dim=-1)[self.rank]

    def get(self, layer, point):
        return self.values.get(f"layers.{layer}.{point}")

    def note(self, point, text):
        """Why a point is missing; the first reason stands."""
        self.notes.setdefault(point, text)

    # -- the dump ------------------------------------------------------------------------------------------------

    def save(self, out, timeout=600):
        """Writes the dump `out`, which must not exist; every rank calls it. Returns what is missing, a line per kind."""
        try:
            if self.ids is None:
                raise CaptureError("no pass since `attach`: nothing to write")
            self.engine.finish()
        finally:
            self.detach()
            self.stage = DONE
        values, ids = self._trimmed()
        missing = self._missing(values)
        write.write(out, self.rank, self.tp, values, self._description(ids), timeout)
        if self.rank == 0:
            for line in missing:
                print(f"lockstep_capture: {line}", file=sys.stderr)
        return missing

    def _trimmed(self):
        """The values without padding, of the tokens whose positions are 0, 1, 2, ..."""
        n = len(self.ids)
        kept = torch.ones(n, dtype=torch.bool) if self.mask is None else self.mask.reshape(-1)
        if len(kept) != n:
            raise CaptureError(f"an attention mask of {len(kept)} for {n} tokens")
        count = int(kept.sum())
        positions = torch.arange(n) if self.positions is None else self.positions
        if len(positions) != n or not torch.equal(positions[kept], torch.arange(count)):
            shown = positions[kept][:8].tolist() if len(positions) == n else positions[:8].tolist()
            raise CaptureError(
                f"positions {shown}.. of {count} tokens are not 0, 1, 2, ..: one whole prompt from its beginning "
                "(no second sequence in the batch, no cached prefix, no chunk of a longer prompt; padding on the "
                "right, or with position_ids)"
            )
        place = torch.full((n + 1,), -1, dtype=torch.int32)  # the last entry is for -1
        place[:n][kept] = torch.arange(count, dtype=torch.int32)
        values = {}
        for name, value in self.values.items():
            if not self.asked(name):
                continue
            value = value[kept]
            if points.short(name) == "attn.index_scores":
                value = _masked(value[:, kept])
            elif points.short(name) == "attn.index_topk":
                value = ascending(place[value.long()], self.config.index_topk)
            values[name] = value
        return values, self.ids[kept].tolist()

    def _missing(self, values):
        wanted = collections.Counter(point for point in points.GLOBAL if self.wants(None, point))
        for n in self.layers:
            has = points.of_layer(self.engine.experts(n), self.engine.indexer(n) is not None)
            wanted.update(point for point in has if self.wants(n, point))
        found = collections.Counter(points.short(name) for name in values)
        reasons = {}
        for point in (*points.GLOBAL, *points.LAYER):
            if found[point] < wanted[point]:
                some = f" in {wanted[point] - found[point]} of {wanted[point]} layers" if found[point] else ""
                why = self.notes.get(point) or self.engine.MISSING.get(point, "the module that makes it was not called")
                reasons.setdefault((some, why), []).append(point)
        return [f"not captured{some}: {', '.join(names)}: {why}" for (some, why), names in reasons.items()]

    def _folder(self):
        return os.path.basename(os.path.normpath(getattr(self.config, "_name_or_path", "") or "."))

    def _description(self, ids):
        dtype = self.engine.dtype()
        recipe = f"torch-{points.STORED.get(str(dtype), str(dtype).replace('torch.', ''))}"
        if self.autocast is not None:
            recipe = f"torch-autocast-{points.STORED.get(str(self.autocast), self.autocast)}"
        return {
            "format": "lockstep-dump",
            "version": 1,
            "producer": {"name": self.engine.name, "version": self.engine.version()},
            "model": {"name": self.name or self._folder() or "unnamed", "digest": ""},
            "token_ids": ids,
            "positions": list(range(len(ids))),
            "tp": self.tp,
            "dtype": "f32",
            "recipe": recipe,
            "settings": {
                "attention": "dsa" if any(self.engine.indexer(n) is not None for n in self.modules) else "dense",
                "device": str(next(self.model.parameters()).device),
                "torch": torch.__version__,
                **self.engine.settings(),
            },
        }


def usual(values):
    """The commonest of `values`, or None."""
    counted = collections.Counter(v for v in values if v is not None)
    return counted.most_common(1)[0][0] if counted else None


def eps(module):
    """The eps that a norm adds, by whatever name."""
    return next((getattr(module, n) for n in ("variance_epsilon", "eps") if hasattr(module, n)), None)


def pairs(x):
    """Rotated vectors in adjacent pairs, of first halves before second halves."""
    half = x.shape[-1] // 2
    return torch.stack((x[..., :half], x[..., half:]), dim=-1).flatten(-2)


def _masked(scores):
    """Later keys as -inf: engines that mask by adding have their type's smallest number there."""
    later = torch.ones(scores.shape, dtype=torch.bool).triu(1)
    return scores.masked_fill(later & (scores <= -6e4), float("-inf"))


def ascending(chosen, width):
    """Chosen keys ascending, -1 behind the last, `width` of them. Keys later than the row are masked in any case."""
    rows = torch.arange(len(chosen), dtype=torch.int32).unsqueeze(-1)
    none = torch.iinfo(torch.int32).max
    chosen = torch.where((chosen < 0) | (chosen > rows), none, chosen).sort(-1).values[:, :width]
    chosen = torch.nn.functional.pad(chosen, (0, width - chosen.shape[-1]), value=none)
    return torch.where(chosen == none, -1, chosen).to(torch.int32)
