"""The browser that shows a page or a picture that a command has made."""

import os
import sys
import webbrowser

OF_TERMINALS = "www-browser", "links", "elinks", "lynx", "w3m"


def find_browser() -> webbrowser.BaseBrowser | None:
    """One with a window, on this screen."""
    if sys.platform == "darwin" and "SSH_CONNECTION" in os.environ:
        return None  # it would open on the Mac's own screen
    try:
        found = webbrowser.get()
    except webbrowser.Error:
        return None
    return None if os.path.basename(getattr(found, "name", "")) in OF_TERMINALS else found
