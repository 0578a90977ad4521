"""Whether the Hugging Face Hub can be reached, found out in seconds: its own client tries again for half a minute."""

from __future__ import annotations

import os
import ssl
import urllib.error
import urllib.request

TIMEOUT_S = 5.0
OFFLINE = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")


def offline() -> str | None:
    """The environment variable that tells Hugging Face's libraries to use their cache only, if one is set."""
    return next((name for name in OFFLINE if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE")), None)


def require_network(key: str, alternatives: str) -> None:
    """Raise ConnectionError, naming the key that needs it and the alternatives, unless the Hub answers.

    Where a variable of `OFFLINE` is set nothing is asked: the libraries then read their cache.
    """
    if offline():
        return
    from huggingface_hub import constants

    try:
        request = urllib.request.Request(constants.ENDPOINT, method="HEAD")
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            return
    except urllib.error.HTTPError:
        return  # an answer, if not a friendly one
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLError):
            return  # somebody is there; which certificates are good is for the Hub's client to say
        raise ConnectionError(
            f"{key}: {constants.ENDPOINT} cannot be reached ({reason})\n"
            f"{alternatives}; HF_HUB_OFFLINE=1 in the environment uses what was downloaded before"
        ) from error
