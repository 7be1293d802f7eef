"""Which requests the monitor's server answers: those of its own origin."""

from __future__ import annotations

from offloadtrain_tui import web

REQUESTS: list[tuple[str, str | None, str, bool]] = [
    ("127.0.0.1:8000", None, "127.0.0.1", True),
    ("localhost:9000", "http://localhost:9000", "127.0.0.1", True),
    ("127.0.0.1:8000", "http://localhost:8000", "127.0.0.1", False),
    ("127.0.0.1:8000", "http://127.0.0.1:3000", "127.0.0.1", False),
    ("127.0.0.1:8000", "https://127.0.0.1:8000", "127.0.0.1", False),
    ("127.0.0.1:8000", "http://evil.example\\@127.0.0.1:8000", "127.0.0.1", False),
    ("127.0.0.1:8000", "null", "127.0.0.1", False),
    ("10.1.2.3:8000", "http://10.1.2.3:8000", "0.0.0.0", True),
    ("10.1.2.3:8000", "http://10.1.2.4:8000", "0.0.0.0", False),
    ("10.1.2.3:8000", None, "127.0.0.1", False),
    ("evil.example", "http://evil.example", "0.0.0.0", False),
    ("[::1", None, "127.0.0.1", False),
]


def test_a_request_is_allowed_from_this_machine_or_a_page_of_its_own_origin() -> None:
    for host, origin, at, is_allowed in REQUESTS:
        assert web.is_from_here(host, origin, at) is is_allowed
