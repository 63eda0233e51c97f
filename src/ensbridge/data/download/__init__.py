"""Sets from where they are given out, verified before anything of them is kept."""

from ensbridge.data.download.get import fetch_set as fetch_set
