"""Training: one flat, resumable loop, and the distillation of steps."""

from ensbridge.train.config import FitConfig as FitConfig
from ensbridge.train.distill import distill_steps as distill_steps
from ensbridge.train.distill import distill_together as distill_together
from ensbridge.train.fit import FitResult as FitResult
from ensbridge.train.fit import fit as fit
