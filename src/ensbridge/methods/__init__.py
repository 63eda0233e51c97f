"""Methods, one file each, with one contract: `loss(batch)` and `log_probs(images)`."""

from ensbridge.methods.deep_ensemble import DeepEnsemble as DeepEnsemble
from ensbridge.methods.diffusion_bridge import Bridge as Bridge
from ensbridge.methods.diffusion_bridge import BridgeConfig as BridgeConfig
from ensbridge.methods.diffusion_bridge import DiffusionBridge as DiffusionBridge
from ensbridge.methods.method import AbstractMethod as AbstractMethod
from ensbridge.methods.method import Batch as Batch
from ensbridge.methods.method import EmaRule as EmaRule
from ensbridge.methods.method import Together as Together
from ensbridge.methods.step_distillation import StepDistillation as StepDistillation
