"""The proxies that the environment names, as httpx reads them."""

from __future__ import annotations

import os
import re
from urllib.parse import urlsplit

from flash_mcp.protocol.errors import FlashError
from flash_mcp.protocol.listening import LOOPBACK
from flash_mcp.protocol.surroundings import of_whom

PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
BRACKETED = re.compile(r"\[([^\]]*)\]")


def use_proxies() -> None:
    """Prepare the variables of this process for what fetches by httpx. FlashError(proxy_invalid) if
    one is no address of a proxy, which httpx says with errors of no common class.
    """
    import httpx  # noqa: PLC0415  a worker may need neither

    for name in (form for proxy in PROXIES for form in (proxy, proxy.lower())):
        if address := os.environ.get(name, ""):
            try:
                httpx.Proxy(address if "://" in address else f"http://{address}")
            except (ValueError, httpx.InvalidURL) as error:
                # Without its value, which may hold a password.
                what = f"the variable {name}{of_whom()} is no address of a proxy that can be used"
                fix = f"set {name} to http://HOST:PORT or socks5://HOST:PORT, or unset it"
                raise FlashError(
                    "proxy_invalid", what, fix=f"{fix}; then restart the client"
                ) from error
    for name in ("NO_PROXY", "no_proxy"):
        if name in os.environ:  # httpx fails at [::1] and takes ::1 for the same
            os.environ[name] = BRACKETED.sub(r"\1", os.environ[name])


def by_way_of() -> str:
    """Words for an error of what fetches by httpx: the variable whose proxy it used, if any."""
    for name in PROXIES:
        if os.environ.get(name) or os.environ.get(name.lower()):
            return f", by way of the proxy in {name}{of_whom()}"
    return ""


def is_direct(url: str) -> bool:
    """Whether the address is on this machine, where no proxy leads."""
    return urlsplit(url).hostname in LOOPBACK
