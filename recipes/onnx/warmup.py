"""Load the model, have it answer, and offer `session` and `identify` to those who evaluate.

The model is Magika's: it tells what kind of file some bytes are.  The package brings it, so nothing
is downloaded when it is loaded.  A session of ONNX Runtime keeps its plan and its arenas in memory;
every child shares them, and copies only what an inference writes.
"""

import json
from pathlib import Path

import magika
import numpy as np
import onnxruntime

FOLDER = next(Path(magika.__file__).parent.glob("models/*/model.onnx")).parent

_options = onnxruntime.SessionOptions()
_options.intra_op_num_threads = _options.inter_op_num_threads = 1

session = onnxruntime.InferenceSession(
    FOLDER / "model.onnx", _options, providers=["CPUExecutionProvider"]
)
"""The model, to be run by hand: `session.run(None, {"bytes": …})`."""

_config = json.loads((FOLDER / "config.min.json").read_text())


def identify(content):
    """Return the likeliest kind of a text, or of bytes: `python`, `html`, `zip` and so on."""
    return scores(content, 1)[0][0]


def scores(content, count=5):
    """Return the likeliest kinds of file with their probabilities, the likeliest first."""
    data = content.encode() if isinstance(content, str) else bytes(content)
    (row,) = session.run(None, {"bytes": _features(data)[None]})[0]
    best = np.argsort(row)[::-1][:count]
    return [[_config["target_labels_space"][each], round(float(row[each]), 4)] for each in best]


def _features(data):
    """Return what the model sees: the first bytes and the last ones, each without white space."""
    size = _config["beg_size"]
    block, padding = _config["block_size"], _config["padding_token"]
    seen = np.full(2 * size, padding, dtype=np.int32)
    head, tail = data[:block].lstrip()[:size], data[-block:].rstrip()[-size:]
    seen[: len(head)] = list(head)
    if tail:
        seen[-len(tail) :] = list(tail)
    return seen


for _text in (
    "import os\n\nprint(os.getcwd())\n",
    "<!doctype html><title>warm</title>",
    b"\x7fELF",
):
    identify(_text)
