"""Labels of sandboxes, and what lists ask of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forkd import limits
from forkd.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

_KEY = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_./-]{{0,{limits.LABEL_KEY_CHARS_MAX - 1}}}")

_SHOWN_CHARS_MAX = 80
"""Most of a wrong label that an error repeats."""


def check_labels(labels: Mapping[str, str]) -> None:
    """Return if a sandbox may have these labels.

    Raises:
        InvalidRequest: There are too many, or one of them is no label; the message names it.
    """
    if len(labels) > limits.LABELS_MAX:
        raise InvalidRequest(
            f"labels has {len(labels)} labels; a sandbox has at most {limits.LABELS_MAX}",
            field="labels",
        )
    for key, value in labels.items():
        _check(key, value, "labels")


@dataclass(frozen=True, slots=True)
class LabelFilter:
    """Which labels a sandbox must have.

    Attributes:
        key: It has a label of this key.
        value: With this value; None for any.
    """

    key: str
    value: str | None = None

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Whether these labels have it."""
        found = labels.get(self.key)
        return found is not None and self.value in {None, found}


def parse_label_filter(text: str, *, field: str = "label") -> LabelFilter:
    """Return what `key` or `key=value` asks for.

    Raises:
        InvalidRequest: It is no label; `context["field"]` is `field`.
    """
    key, equals, value = text.partition("=")
    _check(key, value, field)
    return LabelFilter(key, value if equals else None)


def _check(key: str, value: str, field: str) -> None:
    if _KEY.fullmatch(key) is None:
        raise InvalidRequest(
            f"{field}: the key of a label is a letter or digit, then up to "
            f"{limits.LABEL_KEY_CHARS_MAX - 1} of these, '.', '_', '/' and '-', not "
            f"{_shown(key)}",
            field=field,
        )
    if len(value) > limits.LABEL_VALUE_CHARS_MAX:
        raise InvalidRequest(
            f"{field}: the value of {key} has {len(value)} characters; at most "
            f"{limits.LABEL_VALUE_CHARS_MAX} are possible",
            field=field,
        )
    if not value.isprintable():
        raise InvalidRequest(
            f"{field}: the value of {key} must be printable text, not {_shown(value)}", field=field
        )


def _shown(text: str) -> str:
    cut = f" and {len(text) - _SHOWN_CHARS_MAX} characters more"
    return repr(text[:_SHOWN_CHARS_MAX]) + (cut if len(text) > _SHOWN_CHARS_MAX else "")
