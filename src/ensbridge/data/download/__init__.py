"""Download known sets, verified before anything is kept."""

from ensbridge.data.download.get import fetch_set as fetch_set
