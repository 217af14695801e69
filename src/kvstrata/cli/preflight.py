"""Checks before libraries are loaded, so that certain failures are reported at once and not after loading a model.

Checks paths only. Imports nothing that takes seconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstrata.errors import ConfigError, ModelError
from kvstrata.platform.files import make_writable

if TYPE_CHECKING:
    from kvstrata.config import Settings


def check_paths(settings: Settings) -> None:
    """Raise ModelError or ConfigError if the model, its adapter or the cache folder cannot be used."""
    from kvstrata.models.find import check_model_name

    check_model_name(settings.model)
    if settings.adapter_path is not None and not settings.adapter_path.expanduser().is_dir():
        raise ModelError(f"There is no adapter folder {settings.adapter_path}. Check --adapter-path, or leave it out")
    if settings.disk_cache_dir is None or settings.hot_cache_only:
        return
    try:
        make_writable(settings.disk_cache_dir.expanduser())
    except OSError as error:
        raise ConfigError(
            f"--disk-cache-dir {settings.disk_cache_dir} cannot be written to: {error}. Choose another folder, or use "
            "--hot-cache-only."
        ) from error
