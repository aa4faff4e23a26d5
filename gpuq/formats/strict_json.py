"""JSON as headers may use it: what serde_json takes, and no key twice.

The safetensors format leaves its subset of JSON to serde_json and forbids duplicate keys
(https://github.com/huggingface/safetensors#format). Python's parser is more lenient, and
differs where a file can be made to mean two things.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from typing import Any

from .entries import refuse, show

MAX_DEPTH = 127  # serde_json gives up at 128
_ESCAPED_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(path: str, text: bytes) -> dict[str, Any]:
    """Parse the JSON object that a header of the file `path` is.

    Raises
    ------
    FormatError
        Not UTF-8, not JSON, not an object, a key twice, a lone surrogate, a number beyond
        float64, more than `MAX_DEPTH` levels, or more than memory holds.
    """
    try:
        value = _parse(text.decode("utf-8"))
    except RecursionError:
        refuse(path, f"header: expected at most {MAX_DEPTH} levels of JSON, found more")
    except MemoryError:
        refuse(path, f"header: expected JSON that fits in memory, found {len(text)} bytes of it")
    except ValueError as error:  # UnicodeError and JSONDecodeError are two
        refuse(path, f"header: expected UTF-8 JSON, found {error}")
    if not isinstance(value, dict):
        refuse(path, f"header: expected a JSON object, found {type(value).__name__}")
    if _depth_exceeds(value, MAX_DEPTH):
        refuse(path, f"header: expected at most {MAX_DEPTH} levels of JSON, found more")
    return value


def _parse(text: str) -> Any:
    value = json.loads(
        text,
        object_pairs_hook=_object_of_unique,
        parse_int=_integer,
        parse_float=_finite,
        parse_constant=_no_constant,
    )
    if _ESCAPED_SURROGATE.search(text):
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # refuses those without a partner
    return value


def _object_of_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {show(key)} twice")
    return members


def _integer(text: str) -> int | float:
    # serde_json reads -0 and what no 64-bit integer holds as float; 20 characters are 2**64 - 1.
    if len(text) <= 20 and text != "-0":
        number = int(text)
        if -(2**63) <= number < 2**64:
            return number
    return _finite(text)


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"number {show(text)} out of range")
    return number


def _no_constant(text: str) -> None:
    raise ValueError(f"{text}, which is not JSON")


def _depth_exceeds(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, dict | list)
        ]
    return bool(level)
