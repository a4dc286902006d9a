"""Folders and settings from the environment; no other module reads it."""

import os
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
"""The folder of the package's own files."""


def cache_dir() -> Path:
    """The folder of compiled kernels and helpers; it may be deleted at any time. CUDA_L2_CACHE moves it."""
    return _folder("CUDA_L2_CACHE", "XDG_CACHE_HOME", ".cache")


def data_dir() -> Path:
    """The folder of the archive and the winners' sources. CUDA_L2_HOME moves it."""
    return _folder("CUDA_L2_HOME", "XDG_DATA_HOME", ".local/share")


def default_archive() -> Path:
    return data_dir() / "archive.db"


def compiler_name() -> str:
    """The C compiler to use: CC, as everywhere else."""
    return os.environ.get("CC", "cc")


def cxx_name() -> str:
    """The C++ compiler to use: CXX, as everywhere else."""
    return os.environ.get("CXX", "g++")


def endpoint_key(variable: str) -> str:
    """The key of a language model's endpoint; empty where there is none."""
    return os.environ.get(variable, "").strip()


def endpoint_address() -> str:
    """The address of a language model that was named without one, as OpenAI's own client chooses it."""
    return os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"


def _folder(own: str, xdg: str, home: str) -> Path:
    if own in os.environ:
        return Path(os.environ[own])
    base = os.environ.get(xdg) or Path.home() / home
    return Path(base) / "cuda-l2"
