"""The watched page: a server on the loopback address alone, for whoever has its token.

Starlette and uvicorn, not the standard library's http.server (docs/commands.md says why).
"""

import hashlib
import secrets
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuda_l2.report.page.parts import Section
from cuda_l2.report.page.templates import HERE, template
from cuda_l2.report.watch.watcher import Watcher
from cuda_l2.system.errors import UserError
from cuda_l2.system.files import imported
from cuda_l2.version import __version__

HOST, PORT = "127.0.0.1", 8765
HOSTS = ["localhost", HOST, "[::1]"]
"""Names under which the page may be asked for, with any port: a forwarded one differs from ours."""
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
NEEDS = "a watched page needs"


def application(look: Callable[[], list[Section]], token: str, title: str) -> Any:
    """The ASGI application. look: gives the sections; it is called only when somebody asks."""
    responses, routing = (imported(f"starlette.{name}", NEEDS, "report") for name in ("responses", "routing"))
    hosts = imported("starlette.middleware.trustedhost", NEEDS, "report")
    script = (Path(__file__).parent / "watch.js").read_text()
    style = (HERE / "page.css").read_text()

    def answer(content: Any, media: str = "text/html") -> Any:
        kind = responses.JSONResponse if media == "application/json" else responses.Response
        return kind(content, media_type=media, headers=HEADERS)

    def guarded(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def serve(request: Any) -> Any:
            given = request.path_params["token"].encode()
            if not secrets.compare_digest(given, token.encode()):
                return responses.PlainTextResponse("the address lacks the token that `cuda-l2 watch` printed", 403)
            return make(request)

        return serve

    def page(request: Any) -> Any:
        return answer(template("watch.html").render(title=title, style=style, version=__version__))

    def now(request: Any) -> Any:
        """Every section's id and hash in order, and the HTML of those whose hash the page has not."""
        has = set(request.query_params.get("has", "").split(","))
        shown = template("parts.html").module.shown
        found = [(section.id, str(shown(section))) for section in look()]
        hashed = [(id, hashlib.sha256(html.encode()).hexdigest()[:12], html) for id, html in found]
        return answer([[id, key, "" if key in has else html] for id, key, html in hashed], "application/json")

    app = imported("starlette.applications", NEEDS, "report").Starlette(
        routes=[
            routing.Route("/{token}/", guarded(page)),
            routing.Route("/{token}/now", guarded(now)),
            routing.Route("/{token}/watch.js", guarded(lambda request: answer(script, "text/javascript"))),
        ]
    )
    app.add_middleware(hosts.TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False)
    return app


def serve(watcher: Watcher, port: int | None, tell: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. port: None for the usual one, or any free one where it is taken."""
    uvicorn, token = imported("uvicorn", NEEDS, "report"), secrets.token_urlsafe(16)
    app = application(watcher.look, token, watcher.path.name)
    with _listening(port) as bound:
        port = bound.getsockname()[1]
        tell(f"http://localhost:{port}/{token}/ follows {watcher.path}; Ctrl-C ends it, and not the run")
        tell(f"from another machine: ssh -L {port}:localhost:{port} THIS_MACHINE, then open the same address there")
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none")
        uvicorn.Server(config).run(sockets=[bound])


def _listening(port: int | None) -> socket.socket:
    try:
        return socket.create_server((HOST, PORT if port is None else port))
    except (OSError, OverflowError) as error:
        if port is not None:
            raise UserError(f"port {port} cannot be used: {error}; choose another with --port") from None
        return socket.create_server((HOST, 0))
