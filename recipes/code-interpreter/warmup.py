"""Start Node.js, use each library once, and offer `cell` and `js` to those who evaluate.

Both languages are warm in every child: Python because this is its namespace, Node.js because its
process goes on in the child with all that it has loaded.
"""

import sys

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

import forkd

sys.path.insert(0, "/usr/lib/code-interpreter")

from javascript import JavaScriptError, Node
from notebook import run_javascript, run_python

_node = Node()
forkd.on_fork(_node.forked)


def cell(code, language="python"):
    """Run a cell; return its outputs in the order in which a notebook shows them.

    `language` is `python` or `javascript`. Python's cells share the namespace of `forkd eval`.
    """
    if language == "python":
        return run_python(code, globals())
    if language in ("javascript", "js", "node"):
        return run_javascript(code, _node, JavaScriptError)
    raise ValueError(f"{language!r} is no language of cells: use 'python' or 'javascript'")


def js(code):
    """Run JavaScript; return the last expression's value, or its text if that is no JSON."""
    value = _node.run(code)
    return None if value is None else value[0] if value[1] is None else value[1]


def _use_everything():
    cell("pd.DataFrame({'a': np.arange(3), 'b': ['x', 'y', 'z']}).describe()")
    cell("plt.plot([1, 2]); plt.title('warm'); print('warm')")
    cell("1 / 0")
    cell("let warm = [1, 2].map((n) => n ** 2); await 0; warm", "javascript")
    cell("require('crypto').createHash('sha256').update('warm').digest('hex')", "javascript")
    cell("throw new TypeError('warm')", "javascript")


_use_everything()
