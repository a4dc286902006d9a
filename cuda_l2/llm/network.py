"""The way to an endpoint: the proxy that the environment names for it, the variable that keeps it from opening."""

import ipaddress
import ssl
import urllib.parse
import urllib.request

import httpx2

from cuda_l2.llm._base import one_line
from cuda_l2.system import paths
from cuda_l2.system.errors import UserError

_KNOWN = ("http", "https", "socks5", "socks5h")


def proxy_to(address: str) -> str:
    """The proxy for this address and the variable that names it, as in "HTTPS_PROXY=proxy:3128"; empty for none.

    A loopback address has none, whatever the environment says: a proxy elsewhere cannot reach this machine's server.
    """
    parts = urllib.parse.urlsplit(address)
    host = parts.hostname or ""
    if _loopback(host) or urllib.request.proxy_bypass(host):
        return ""
    proxies = urllib.request.getproxies()
    scheme = next((scheme for scheme in (parts.scheme, "all") if proxies.get(scheme)), "")
    return _shown(scheme, proxies[scheme]) if scheme else ""


def transport_to(address: str) -> httpx2.HTTPTransport | None:
    """A transport that uses no proxy; None where the environment's proxies decide."""
    return None if proxy_to(address) else httpx2.HTTPTransport()


def unusable(error: Exception) -> UserError:
    """One line on the variable for which no connection can be made."""
    if isinstance(error, ssl.SSLError | OSError):
        name, value = paths.certificates()
        what = "holds no certificates" if isinstance(error, ssl.SSLError) else "cannot be read"
        if name:
            return UserError(f"{name}={value} {what}: name a file of certificates in PEM form, or unset {name}")
    for scheme, value in urllib.request.getproxies().items():
        kind = value.partition("://")[0] if "://" in value else "http"
        shown, variable = _shown(scheme, value), f"{scheme.upper()}_PROXY"
        if isinstance(error, ImportError) and kind.startswith("socks"):
            return UserError(f"{shown} is a SOCKS proxy: pip install 'httpx2[socks]', or unset {variable}")
        if not isinstance(error, ImportError) and scheme != "no" and (kind not in _KNOWN or not _named(value)):
            return UserError(f"{shown} is no proxy that can be used: write http://HOST:PORT, or unset {variable}")
    return UserError(f"cannot open a connection: {one_line(str(error), 200)}")


def _loopback(host: str) -> bool:
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return number.is_loopback or number.is_unspecified


def _named(proxy: str) -> bool:
    try:
        parts = urllib.parse.urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _shown(scheme: str, proxy: str) -> str:
    """Without user and password."""
    kind, separator, rest = proxy.rpartition("://")
    return one_line(f"{scheme.upper()}_PROXY={kind}{separator}{rest.rpartition('@')[2]}", 100)
