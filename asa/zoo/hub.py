"""The Hugging Face hub: whether it answers is found out first, because its libraries repeat a failed request for half a
minute."""

from __future__ import annotations

import os
import ssl
from threading import Thread
from urllib.error import HTTPError, URLError
from urllib.request import Request, getproxies, urlopen

_WAIT_S = 5.0


def reachable() -> bool:
    """Whether the hub answers within some seconds. If not, or if ``HF_HUB_OFFLINE`` is set, the libraries of the hub
    use only what is stored on this machine, here and in the processes that are started from here."""
    try:
        from huggingface_hub import constants
    except ModuleNotFoundError:
        return True  # whoever needs it says so
    if constants.HF_HUB_OFFLINE:
        return False
    answered: list[bool] = []
    # Looking up a name has no time limit of its own, so a thread waits for it.
    asker = Thread(target=lambda: answered.append(_answers(constants.ENDPOINT)), daemon=True)
    asker.start()
    asker.join(_WAIT_S)
    if answered != [True]:
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"
        return False
    return True


def _answers(address: str) -> bool:
    if getproxies().get("all"):
        return True  # urllib does not know this proxy, the libraries do
    try:
        with urlopen(Request(address, method="HEAD"), timeout=_WAIT_S):
            return True
    except HTTPError:
        return True
    except URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # the libraries have certificates of their own
    except (OSError, ValueError):
        return False
