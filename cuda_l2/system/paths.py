"""Folders and settings from the environment; no other module reads it."""

import os
import shlex
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
"""The folder of the package's own files."""
CLI = (sys.executable, "-m", "cuda_l2.cli")
"""The words that start this program once more."""
LAUNCHERS = ("ccache", "sccache", "distcc", "icecc")


def cache_dir() -> Path:
    """The folder of compiled kernels and helpers; it may be deleted at any time. CUDA_L2_CACHE moves it."""
    return _folder("CUDA_L2_CACHE", "XDG_CACHE_HOME", ".cache")


def data_dir() -> Path:
    """The folder of the archive and the winners' sources. CUDA_L2_HOME moves it."""
    return _folder("CUDA_L2_HOME", "XDG_DATA_HOME", ".local/share")


def default_archive() -> Path:
    return data_dir() / "archive.db"


def compiler_command() -> list[str]:
    """The C compiler to use and its options: CC, as everywhere else."""
    return _command("CC", "cc")


def cxx_name() -> str:
    """The C++ compiler to use: CXX, as everywhere else, without its options."""
    return _command("CXX", "g++")[0]


def endpoint_key(variable: str) -> str:
    """The key of a language model's endpoint; empty where there is none."""
    return os.environ.get(variable, "").strip()


def endpoint_address() -> str:
    """The address of a language model that was named without one, as OpenAI's own client chooses it."""
    return os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"


def certificates() -> tuple[str, str]:
    """Name and value of the variable that says which authorities' certificates count; empty where none does."""
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        if os.environ.get(name):
            return name, os.environ[name]
    return "", ""


def _command(variable: str, default: str) -> list[str]:
    """As a shell splits it, without a launcher before it: the sandbox holds no cache of ccache's and no network."""
    try:
        words = shlex.split(os.environ.get(variable, ""))
    except ValueError:  # a quote that is never closed
        words = [os.environ[variable]]
    while words and Path(words[0]).name in LAUNCHERS:
        del words[0]
    return words or [default]


def _folder(own: str, xdg: str, home: str) -> Path:
    if os.environ.get(own):
        return Path(os.environ[own])
    base = os.environ.get(xdg) or Path.home() / home
    return Path(base) / "cuda-l2"
