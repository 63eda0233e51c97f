"""Training: one flat, resumable loop, and the distillation of steps."""

from ensbridge.training.config import FitConfig as FitConfig
from ensbridge.training.distill import distill_steps as distill_steps
from ensbridge.training.distill import distill_together as distill_together
from ensbridge.training.fit import FitResult as FitResult
from ensbridge.training.fit import fit as fit
