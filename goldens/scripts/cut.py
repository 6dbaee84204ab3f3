"""Cuts golden numbers to some of their rows, to keep the repository small; the numbers stay as they are, bit for bit.
Usage: cut.py UNCUT CUT, two folders laid out as goldens/. A matrix of reals with more than 32 values a row keeps the rows that
the new tensor `rows` lists (`mtp.rows` for the MTP block); ids, choices, margins, scores and other narrow tensors stay whole."""
import hashlib, json, sys
import numpy as np
from safetensors.numpy import load_file, save_file

WIDE = 32
# The trunk's rows and the MTP block's: early, at the boundary of top-k, beyond it, and the last.
KEPT = {
    "glm5-nano/Q4_K_M_short_ggufeps": ([1, 11, 22], [0, 10, 21]),
    "glm5-nano/Q4_K_M_long_ggufeps": ([8, 40, 64, 72, 96, 128, 152, 174], [0, 40, 64, 96, 128, 168]),
    "pico/pico-Q4_K_M_ggufeps": ([3, 15, 16, 22, 27, 31], [0, 14, 21, 30]),
    "nano52/nano52-Q2_K_ggufeps": ([3, 15, 16, 22, 27, 31], [0, 14, 21, 30]),
}

def cut(uncut, rows, mtp_rows):
    out = {"rows": np.array(rows, np.int32), "mtp.rows": np.array(mtp_rows, np.int32)}
    for name, values in uncut.items():
        if name.endswith("logits_rows"):
            continue  # `rows` says it
        keep = mtp_rows if name.startswith("mtp.") else rows
        if values.dtype == np.float32 and values[0].size > WIDE:
            # Of logits the uncut file may have some rows only; those to keep must be among them.
            have = uncut.get(f"{name}_rows")
            at = keep if have is None else [list(have).index(r) for r in keep]
            values = np.ascontiguousarray(values[at])
        out[name] = values
    return out

def sha256(path): return hashlib.sha256(open(path, "rb").read()).hexdigest()

if __name__ == "__main__":
    source, target = sys.argv[1:]
    for name, (rows, mtp_rows) in KEPT.items():
        path = f"{source}/{name}.safetensors"
        uncut = load_file(path)
        save_file(cut(uncut, rows, mtp_rows), f"{target}/{name}.safetensors")
        print(json.dumps({name: {"uncut_sha256": sha256(path), "rows": rows, "mtp_rows": mtp_rows}}))
