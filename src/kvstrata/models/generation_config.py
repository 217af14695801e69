"""Sampling defaults of a model: generation_config.json. Knows the file, not the engine."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FILE_NAME = "generation_config.json"

# Least and most of each that can be sampled with; top_p 0 and a penalty of 0 cannot.
RANGES = {
    "temperature": (0.0, math.inf),
    "top_p": (math.ulp(0.0), 1.0),
    "top_k": (0, math.inf),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (math.ulp(0.0), math.inf),
}


@dataclass(frozen=True)
class SamplingDefaults:
    """Defaults for requests that leave them out. None: the model has no default."""

    temperature: float | None = None  # 0 is greedy
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def given(self) -> dict[str, float]:
        """Return the defaults that the model has."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Return the defaults in a folder, empty without a file. A damaged file is logged and ignored."""
    path = folder / FILE_NAME
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        return SamplingDefaults()
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read (%s): requests get the server's own sampling defaults", path, error)
        return SamplingDefaults()
    return _defaults(path, config if isinstance(config, dict) else {})


def _defaults(path: Path, config: Mapping[str, Any]) -> SamplingDefaults:
    found = {name: config[name] for name in RANGES if config.get(name) is not None}
    for name in [name for name, value in found.items() if not _is_usable(name, value)]:
        log.warning("%s: %s is no use as %s: requests get the server's own default", path, repr(found.pop(name)), name)
    if config.get("do_sample") is False:
        found["temperature"] = 0.0
    return SamplingDefaults(**found)


def _is_usable(name: str, value: object) -> bool:
    kind = int if name == "top_k" else int | float
    least, most = RANGES[name]
    return isinstance(value, kind) and not isinstance(value, bool) and math.isfinite(value) and least <= value <= most
