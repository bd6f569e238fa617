"""What evaluated Python gives: its value as JSON, and what it shows as a notebook does.

A part of `python.py`, which the agent puts beside it.  What an answer holds of it is said in
`protocol/runtime/CONTRACT.md`.

Only the standard library, Python 3.8 and later.
"""

import builtins
import json
import sys
import traceback

REPR_MAX = 65_536
"""Longest `repr` of a value, in characters."""

TEXT_MAX = 65_536
"""Longest message or traceback, in characters: two of them fit a frame however they are escaped."""

VALUE_MAX = 262_144
"""Largest JSON form of a value, in bytes."""

ITEMS_MAX = 1_000
"""Parts of a value up to which the C encoder is used, which cannot be stopped half-way."""

FRAME_MAX = 1_048_576
"""Longest payload of a frame, in bytes."""

RESULTS_MAX = 32
"""Most results of one evaluation, one of them the value; more are counted."""

FORMS_MAX = 16
"""Most forms of one result, such as HTML and PNG."""

RESULTS_BYTES_MAX = 655_360
"""Most bytes of the forms of all results of one evaluation, as JSON text; less beside a long value.

A form that exceeds the limit is left out, and the answer has its size.
"""

MIME_MAX = 128
"""Longest name of a form, in characters."""

NAMES_BYTES = 98_304
"""Bytes of a frame that the names and sizes of all forms need at most."""

ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
to_json = ENCODER.encode


# What an object is asked for its forms, as IPython asks.
FORM_METHODS = (
    ("text/html", "_repr_html_"),
    ("text/markdown", "_repr_markdown_"),
    ("image/svg+xml", "_repr_svg_"),
    ("image/png", "_repr_png_"),
    ("image/jpeg", "_repr_jpeg_"),
    ("application/pdf", "_repr_pdf_"),
    ("text/latex", "_repr_latex_"),
    ("application/json", "_repr_json_"),
    ("application/javascript", "_repr_javascript_"),
)
PYPLOT = "matplotlib.pyplot"
PLAIN_TYPES = {bool, bytes, complex, dict, float, int, list, set, str, tuple, type(None)}


class Results:
    """What one evaluation shows: its value's forms, figures, and what it displays."""

    def __init__(self):
        self._shown = []  # of each: whether it is the value, and its forms
        self._more = 0
        self._drawn = []  # figures that were shown as a value

    def install(self):
        """Have code that shows things, ours and that of packages, make results of them."""
        changes = {
            PYPLOT: self.change_pyplot,
            "IPython.core.display_functions": self.change_ipython,
        }
        sys.meta_path.insert(0, ImportHook(changes))
        builtins.display = self.display  # as in a notebook

    def begin(self):
        """Forget the last evaluation."""
        if self._shown or self._drawn:  # else nothing is written, which would copy pages of a fork
            self._shown, self._more, self._drawn = [], 0, []

    def add_value(self, value):
        """Add the forms of the last expression, unless it is all that can be shown."""
        if type(value) in PLAIN_TYPES and not self._shown and PYPLOT not in sys.modules:
            return
        if is_figure(value):
            self._drawn.append(value)
        self._shown.append((True, forms_of(value)))

    def display(self, *values):
        """Show values as a notebook does: each is a result of the evaluation."""
        for value in values:
            if is_figure(value):
                self._drawn.append(value)
            forms = forms_of(value)
            forms.setdefault("text/plain", cut(repr(value), REPR_MAX))
            self._add(forms)

    def add_figures(self):
        """Add the figures of matplotlib that are open, and close them, as a notebook does."""
        pyplot = sys.modules.get(PYPLOT)
        helpers = sys.modules.get("matplotlib._pylab_helpers")
        if pyplot is None or helpers is None:
            return
        for manager in helpers.Gcf.get_all_fig_managers():
            figure = manager.canvas.figure
            if has_window(manager.canvas):
                continue
            if not any(figure is drawn for drawn in self._drawn):
                self._add({**forms_of(figure), "text/plain": cut(repr(figure), REPR_MAX)})
            pyplot.close(figure)

    def change_pyplot(self, pyplot):
        """Have `pyplot.show()` make results of the open figures."""
        show = pyplot.show

        def show_results(*args, **kwargs):
            self.add_figures()
            if pyplot.get_fignums():  # of a backend with windows
                show(*args, **kwargs)

        pyplot.show = show_results

    def change_ipython(self, functions):
        """Have IPython's `display` do what ours does."""
        theirs = functions.display

        def display(*values, **options):
            if options.get("raw"):
                theirs(*values, **options)
            else:
                self.display(*values)

        functions.display = display

    def added_to(self, reply):
        """Return an answer with the results, as many forms of them as fit."""
        if not self._shown or self._shown == [(True, {})]:
            return reply  # there is nothing but the `repr`
        rest = FRAME_MAX - NAMES_BYTES - len(reply.encode("utf-8", "replace"))
        room = min(RESULTS_BYTES_MAX, rest)
        told = []
        for is_main, forms in self._shown:
            data, omitted = {}, {}
            for mime, text in forms.items():
                size = len(to_json(text).encode("utf-8", "replace"))
                if size <= room:
                    room -= size
                    data[mime] = text
                else:
                    omitted[mime] = size
            told.append({"is_main": is_main, "data": data, "omitted": omitted})
        members = f', "results": {to_json(told)}, "more_results": {self._more}}}'
        return reply[:-1] + members

    def _add(self, forms):
        if len(self._shown) < RESULTS_MAX - 1:  # the value always has its place
            self._shown.append((False, forms))
        else:
            self._more += 1


class ImportHook:
    """Change some modules once they have been imported."""

    def __init__(self, changes):
        self._changes = changes

    def find_spec(self, name, path=None, target=None):
        """Find a module that is to be changed, as the other finders do."""
        change = self._changes.get(name)
        if change is None:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                change_loaded(spec, change)
                return spec
        return None


def forms_of(value):
    """Return the forms that an object has besides its `repr`: texts, or base64, by MIME type."""
    kind, forms = type(value), {}
    if kind in PLAIN_TYPES or isinstance(value, type):
        return forms
    bundle = form_by(value, "_repr_mimebundle_", include=None, exclude=None)
    if isinstance(bundle, dict):
        for mime, form in bundle.items():
            add_form(forms, mime, form)
    for mime, method in FORM_METHODS:
        if mime not in forms:
            add_form(forms, mime, form_by(value, method))
    if is_figure(value) and "image/png" not in forms:
        add_form(forms, "image/png", picture_of(value))
    forms.pop("text/plain", None)
    return forms


def form_by(value, name, **options):
    """Return what one of an object's methods gives; None if it has none, or that fails."""
    # The class is asked: an object that has every attribute, such as a proxy, has no such form.
    method = getattr(type(value), name, None)
    if not callable(method):
        return None
    try:
        form = method(value, **options)
    except Exception:  # as in a notebook, the other forms are shown
        return None
    # With the form there may be its metadata.
    return form[0] if isinstance(form, tuple) and form else form


def add_form(forms, mime, form):
    """Add a form to those of one object, as text."""
    if not is_mime(mime) or len(forms) >= FORMS_MAX:
        return
    if isinstance(form, (bytes, bytearray)):
        forms[mime] = as_base64(form)
    elif isinstance(form, str):
        is_picture = mime in ("image/png", "image/jpeg", "application/pdf")
        forms[mime] = form.replace("\n", "") if is_picture else form
    elif form is not None and (mime == "application/json" or mime.endswith("+json")):
        try:
            forms[mime] = to_json(form)
        except (TypeError, ValueError, RecursionError):
            return


def is_mime(name):
    """Say whether this can be the name of a form."""
    return isinstance(name, str) and len(name) <= MIME_MAX and name.isascii() and name.isprintable()


def is_figure(value):
    """Say whether this is a figure of matplotlib."""
    module = sys.modules.get("matplotlib.figure")
    return module is not None and isinstance(value, getattr(module, "Figure", ()))


def has_window(canvas):
    """Say whether a figure is on a screen."""
    return getattr(canvas, "required_interactive_framework", None) is not None


def picture_of(figure):
    """Return a figure as PNG; None, with a traceback on standard error, if it cannot be drawn."""
    import io  # noqa: PLC0415 - most guests never draw

    file = io.BytesIO()
    try:
        figure.savefig(file, format="png", bbox_inches="tight")
    except Exception:
        traceback.print_exc()
        return None
    return file.getvalue()


def as_base64(data):
    """Return bytes as one line of base64."""
    import binascii  # noqa: PLC0415 - most guests show no pictures

    return binascii.b2a_base64(data, newline=False).decode()


def change_loaded(spec, change):
    """Have a module changed as soon as its code has run."""
    loader = spec.loader
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module):
        execute(module)
        change(module)

    loader.exec_module = exec_module


def cut(text, limit=TEXT_MAX):
    """Cut `text` after `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "\u2026"


def as_json(value):
    """Return the value as JSON text, or None if JSON cannot say it within VALUE_MAX bytes."""
    try:
        if count_items(value, ITEMS_MAX) >= 0:
            text = to_json(value)
        else:
            text = as_json_until(VALUE_MAX, value)
    except (TypeError, ValueError, RecursionError, OverflowError):
        return None
    return text if len(text.encode("utf-8", "replace")) <= VALUE_MAX else None


def as_json_until(limit, value):
    """Return the value as JSON text, stopping soon after `limit` characters."""
    pieces = []
    for piece in ENCODER.iterencode(value):
        pieces.append(piece)
        limit -= len(piece)
        if limit < 0:
            break
    return "".join(pieces)


def count_items(value, budget):
    """Return what is left of `budget` after counting the parts of `value`; too large is below 0."""
    budget -= 1
    if isinstance(value, str):
        return budget - len(value) // 256
    if not isinstance(value, (dict, list, tuple)):
        return budget
    if len(value) > budget:
        return -1
    for item in value.values() if isinstance(value, dict) else value:
        budget = count_items(item, budget)
        if budget < 0:
            break
    return budget
