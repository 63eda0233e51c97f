"""Measuring models: predictions, scores, fidelity. It imports nothing, so that reports need no torch."""
