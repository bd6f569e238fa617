"""Cells as a notebook shows them: printed text, pictures, the last value in each form, errors."""

import ast
import base64
import contextlib
import io
import sys
import traceback

from matplotlib import pyplot as plt

FORMS = {
    "text/html": "_repr_html_",
    "image/svg+xml": "_repr_svg_",
    "text/markdown": "_repr_markdown_",
    "text/latex": "_repr_latex_",
}


def run_python(code, namespace):
    """Run a cell in a namespace; return its outputs."""
    printed = {"stdout": io.StringIO(), "stderr": io.StringIO()}
    with (
        contextlib.redirect_stdout(printed["stdout"]),
        contextlib.redirect_stderr(printed["stderr"]),
    ):
        try:
            value = _evaluated(code, namespace)
            last = [] if value is None else [_result(*value)]
        except Exception as error:  # noqa: BLE001 - a cell may raise anything
            frames = error.__traceback__
            while frames is not None and frames.tb_frame.f_code.co_filename != "<cell>":
                frames = frames.tb_next  # ours
            trace = "".join(traceback.format_exception(type(error), error, frames))
            last = [_error(type(error).__name__, str(error), trace)]
    streams = [
        {"type": "stream", "name": name, "text": text.getvalue()}
        for name, text in printed.items()
        if text.getvalue()
    ]
    return [*streams, *_figures(), *last]


def run_javascript(code, node, failed):
    """Run a cell in Node.js, which prints by itself; return its outputs."""
    sys.stdout.flush()
    try:
        value = node.run(code)
    except failed as error:
        return [_error(error.name, error.message, error.stack)]
    if value is None:
        return []
    text, plain = value
    data = {"text/plain": text}
    if plain is not None:
        data["application/json"] = plain
    return [{"type": "execute_result", "data": data}]


def _evaluated(code, namespace):
    tree = ast.parse(code, "<cell>")
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), namespace)  # noqa: S102 - running code is its job
    if last is None:
        return None
    code = compile(ast.Expression(last.value), "<cell>", "eval")
    value = eval(code, namespace)  # noqa: S307 - likewise
    return None if value is None else (value,)


def _result(value):
    data = {"text/plain": repr(value)}
    for form, name in FORMS.items():
        show = getattr(type(value), name, None)
        shown = None if show is None else show(value)
        if shown is not None:
            data[form] = shown
    return {"type": "execute_result", "data": data}


def _error(name, message, trace):
    return {"type": "error", "ename": name, "evalue": message, "traceback": trace}


def _figures():
    outputs = []
    for number in plt.get_fignums():
        image = io.BytesIO()
        plt.figure(number).savefig(image, format="png")
        data = {"image/png": base64.b64encode(image.getvalue()).decode()}
        outputs.append({"type": "display_data", "data": data})
    plt.close("all")
    return outputs
