"""Every kind of file that is mutated."""

from __future__ import annotations

from faults import kinds_data, kinds_models
from faults.kinds_requests import Requests
from faults.sandbox import AbstractKind

KINDS: tuple[type[AbstractKind], ...] = (*kinds_models.KINDS, *kinds_data.KINDS, Requests)
