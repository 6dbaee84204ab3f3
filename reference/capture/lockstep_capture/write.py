"""The dump's folder. Every rank writes its file beside a list of its points; rank 0 waits for all of them, joins the
lists to dump.json and renames the folder to its name. So the dump is there whole or not at all."""

import json
import os
import time

import torch
from safetensors.torch import save_file

from . import points


def write(out, rank, tp, values, description, timeout):
    """Writes this rank's part of the folder `out`; on rank 0 also the rest. `values`: full name -> tensor."""
    part = f"{os.fspath(out).rstrip(os.sep)}.partial"
    mine = os.path.join(part, f"rank{rank}.json")
    if os.path.lexists(out):
        raise FileExistsError(f"{out} is there already")
    os.makedirs(part, exist_ok=True)
    file = f"rank{rank}.safetensors"
    if os.path.exists(os.path.join(part, file)):
        raise FileExistsError(f"{part} is left from a dump that was not finished: remove it")
    # Copies: safetensors refuses tensors that share memory.
    save_file({name: _plain(value) for name, value in values.items()}, os.path.join(part, file))
    entries = [_entry(name, value, file, rank) for name, value in values.items()]
    with open(mine + ".new", "w", encoding="utf-8") as f:
        json.dump({"token_ids": description["token_ids"], "points": entries}, f)
    os.replace(mine + ".new", mine)
    if rank == 0:
        _finish(out, part, tp, description, timeout)


def _plain(value):
    dtype = torch.float32 if value.is_floating_point() else torch.int32
    return value.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _entry(name, value, file, rank):
    entry = {"name": name, "file": file, "rank": rank, **points.layout(points.short(name)), "shape": list(value.shape)}
    if not value.is_floating_point():
        return entry | {"dtype": "I32"}
    return entry | {"dtype": "F32", "stored": points.STORED[str(value.dtype)]}


def _finish(out, part, tp, description, timeout):
    lists, end = {}, time.monotonic() + timeout
    while len(lists) < tp:
        for rank in set(range(tp)) - lists.keys():
            path = os.path.join(part, f"rank{rank}.json")
            if os.path.exists(path):
                with open(path, encoding="utf-8") as f:
                    lists[rank] = json.load(f)
        if len(lists) < tp:
            if time.monotonic() > end:
                late = sorted(set(range(tp)) - lists.keys())
                raise TimeoutError(f"ranks {late} have written nothing to {part} in {timeout} s")
            time.sleep(0.05)
    for rank, listed in lists.items():
        if listed["token_ids"] != description["token_ids"]:
            raise ValueError(f"rank {rank} ran other tokens than rank 0; the parts are in {part}")
    everywhere = set.intersection(*({entry["name"] for entry in listed["points"]} for listed in lists.values()))
    all_points = [entry for rank in sorted(lists) for entry in lists[rank]["points"] if entry["name"] in everywhere]
    with open(os.path.join(part, "dump.json"), "w", encoding="utf-8") as f:
        json.dump(description | {"points": all_points}, f, indent=1)
    for rank in lists:
        os.remove(os.path.join(part, f"rank{rank}.json"))
    os.rename(part, out)
