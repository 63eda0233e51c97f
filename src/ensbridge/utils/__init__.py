"""Small helpers that know nothing of the method: files, text, devices, progress."""
