"""Sets from where they are given out, verified before anything of them is kept."""

from ensbridge.data.fetch.getting import fetch_set as fetch_set
